"""VANILLA_MLA_SPARSE: attention to chosen rows of the latent cache, a token at a time, in float64."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from polyattn.families.attention import reference
from polyattn.runtime.backend import LayerParams, SparseBackend
from polyattn.runtime.kv_cache import KVCache
from polyattn.runtime.plan import Plan
from polyattn.spec.decompose import absorbed


class VanillaSparseMLA(SparseBackend):
    """Each token's rows are gathered on the host and attended to by `reference.attend`."""

    name: ClassVar[str] = "VANILLA_MLA_SPARSE"

    def run(
        self,
        plan: Plan,
        query: Tensor,
        slots: Tensor,
        cache: KVCache,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        stored, rank = cache.key, cache.value.shape[3]
        scale = params.k_scale if stored.dtype.itemsize == 1 else 1.0
        alone = absorbed(self.spec).replace(causal=False)
        for token, row in enumerate(slots.cpu().long()):
            chosen = row[row >= 0].to(stored.device)
            blocks, offsets = chosen // cache.block_size, chosen % cache.block_size
            keys = torch.stack(
                [stored[b, o] for b, o in zip(blocks.tolist(), offsets.tolist(), strict=True)]
                or [stored[0, 0]]
            )[: len(chosen)]
            keys = keys.to("cpu").to(torch.float64) * scale
            found, found_lse = reference.attend(
                alone, query[token : token + 1], keys, keys[..., :rank]
            )
            out[token].copy_(found[0])
            if lse is not None:
                lse[token].copy_(found_lse[0])
