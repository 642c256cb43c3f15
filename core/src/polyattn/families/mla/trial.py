"""One tiny step of each phase of MLA, and what it should give: what verification runs."""

from __future__ import annotations

import torch

from polyattn.families.attention.trial import paged_step
from polyattn.families.mla import reference
from polyattn.families.mla.inputs import chosen_positions, latent_weights
from polyattn.families.mla.layer import LatentAttention
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.trial import Outcome


def run_trial(group: LayerGroup, phase: str, generator: torch.Generator) -> Outcome:
    """Run a step of `phase` of this group's layer on its device beside the float64 reference."""
    spec, device, latent = group.spec, group.torch_device, group.spec.latent
    assert latent is not None
    layer = LatentAttention(group, *latent_weights(spec, generator), checks=False)
    batch, cache = paged_step(group, phase, generator)
    tokens, topk = batch.num_tokens, None
    if latent.topk:
        topk = chosen_positions(batch.lens, batch.query_lens, latent.topk, generator).to(device)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(STORAGE_DTYPES[spec.dtype]).to(device)

    query = random(tokens, spec.num_heads, spec.head_size)
    latents, rope = random(tokens, latent.rank), random(tokens, latent.rope_head_size)
    got = layer(query, latents, rope, cache, group.plan(batch), topk=topk)
    assert layer.weights is not None
    expected = reference.forward(spec, query, cache, batch, layer.weights, layer.params, topk)
    out, lse = got if isinstance(got, tuple) else (got, None)
    return Outcome(out, expected[0], lse, expected[1])
