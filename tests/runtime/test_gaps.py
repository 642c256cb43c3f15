"""Numbers of a head that lie apart are copied: kernels go by the strides of tokens and heads alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from polyattn import (
    Attention,
    Batch,
    LatentAttention,
    LatentSpec,
    LayerGroup,
    LayerSpec,
    SparseAttention,
    SparseSpec,
    select,
)
from torch import Tensor

PLAIN = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float32", block_size=16)
SPARSE = PLAIN.replace(kind="sparse", sparse=SparseSpec(budget=2, granularity=16))
LATENT = LayerSpec(
    kind="mla", num_heads=4, head_size=64, v_head_size=64, dtype="float32", block_size=16,
    latent=LatentSpec(rank=64, rope_head_size=16),
)  # fmt: skip
Form = Callable[[Tensor], Tensor]


def apart(tensor: Tensor) -> Tensor:
    """Return the same numbers, each beside one that nobody may read."""
    filler = torch.nan if tensor.is_floating_point() else 9
    wide = torch.full((*tensor.shape, 2), filler, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


@pytest.mark.parametrize("lens", [([1, 1], [30, 5]), ([5, 3], [30, 5])], ids=["decode", "prompt"])
@pytest.mark.parametrize("backend", [None, "TORCH_SDPA"])
@pytest.mark.parametrize("spec", [PLAIN, SPARSE, LATENT], ids=lambda spec: spec.kind.value)
def test_gaps_within_a_head_change_nothing(
    spec: LayerSpec, backend: str | None, lens: tuple[list[int], list[int]]
) -> None:
    if spec is LATENT:
        backend = None
    group, tokens = LayerGroup(select(spec, "cpu", backend=backend)), sum(lens[0])
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    batch = Batch.from_lens(*lens, table, 16)
    query, (key, value) = torch.randn(tokens, 4, 64), torch.randn(2, tokens, 2, 64)
    choice = torch.tensor([0, -1], dtype=torch.int32).expand(tokens, 1, 2).contiguous()
    up, down = torch.randn(4, 48, 64), torch.randn(4, 64, 64)
    if spec is LATENT:
        key, value = torch.randn(tokens, 64), torch.randn(tokens, 16)

    def found(form: Form) -> list[Tensor]:
        cache = group.allocate_cache(4)
        cache.key.fill_(0.5), cache.value.fill_(0.5)
        layer: Attention | SparseAttention | LatentAttention
        chosen = {}
        if spec is LATENT:
            layer = LatentAttention(group, form(up), form(down))
        elif spec is SPARSE:
            layer, chosen = SparseAttention(group), {"choice": form(choice)}
        else:
            layer = Attention(group)
        plan = group.plan(batch)
        outs = []
        for more in (0, 1):  # the second call of a step checks less
            outs.append(layer(form(query), form(key + more), form(value), cache, plan, **chosen))
        layer.store(form(key[:1]), form(value[:1]), cache, form(torch.tensor([37])))
        return [*outs, cache.key, cache.value]

    for one, other in zip(found(apart), found(lambda tensor: tensor), strict=True):
        assert torch.equal(one, other)
