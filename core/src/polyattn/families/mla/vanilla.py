"""VANILLA_MLA_SPARSE: attention to chosen rows of the latent cache, a token at a time, in float64."""

from __future__ import annotations

from typing import ClassVar

import torch

from polyattn.families.attention import reference
from polyattn.families.mla.absorption import cached_rows
from polyattn.runtime.backend import SparseBackend
from polyattn.runtime.program import Frame, Plan
from polyattn.spec.decompose import absorbed


class VanillaSparseMLA(SparseBackend):
    """Each token's rows are gathered on the host and attended to by `reference.attend`."""

    name: ClassVar[str] = "VANILLA_MLA_SPARSE"

    def run(self, plan: Plan, frame: Frame) -> None:
        cache, choice = frame.cache, frame.choice
        assert cache is not None and choice is not None
        rank = cache.format.v_head_size
        alone = absorbed(self.spec).replace(causal=False)
        for token, row in enumerate(choice.cpu().long()):
            chosen = row[row >= 0].to(cache.key.device)
            keys = cached_rows(cache, chosen, frame.params, torch.float64).cpu()[:, None]
            result, found_lse = reference.attend(
                alone, frame.query[token : token + 1], keys, keys[..., :rank]
            )
            frame.out[token].copy_(result[0])
            if frame.lse is not None:
                frame.lse[token].copy_(found_lse[0])
