"""VANILLA_MLA_SPARSE: attention to chosen rows of the latent cache, a token at a time, in float64."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from polyattn.families.attention import reference
from polyattn.families.mla.absorption import cached_rows
from polyattn.runtime.backend import LayerParams, SparseBackend
from polyattn.runtime.cache.kv_cache import KVCache
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
        rank = cache.format.v_head_size
        alone = absorbed(self.spec).replace(causal=False)
        for token, row in enumerate(slots.cpu().long()):
            chosen = row[row >= 0].to(cache.key.device)
            keys = cached_rows(cache, chosen, params, torch.float64).cpu()[:, None]
            found, found_lse = reference.attend(
                alone, query[token : token + 1], keys, keys[..., :rank]
            )
            out[token].copy_(found[0])
            if lse is not None:
                lse[token].copy_(found_lse[0])
