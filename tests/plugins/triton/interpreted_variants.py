"""Variants and masks on TRITON_ATTN in Triton's interpreter, which a process has or has not."""

from __future__ import annotations

from typing import Any

import torch
from polyattn import (
    Attention,
    AttentionVariant,
    Batch,
    BlockSparseMask,
    CustomMask,
    LayerGroup,
    select,
)
from polyattn.families.attention import reference
from polyattn.workload.pages import fill
from test_variants import (
    BASE,
    LENS,
    VARIANTS,
    assert_functions_right,
    assert_right,
    masks_of_each_kind,
    register_variant,
    run,
)

DECODES = ([1] * 5, LENS[1])


def check_left_out() -> None:
    """What a mask hides is not read: it may be NaN, which a weight of 0 would let through."""
    generator = torch.Generator().manual_seed(4)
    spec = BASE.replace(mask="block_sparse")
    group = LayerGroup(select(spec, backend="TRITON_ATTN", verify=False))
    for lens, rows in (
        # Prefill in tiles of 16 x 16, a few tokens, decodes; what each row of 16 x 32 blocks sees.
        (([48, 16], [64, 96]), [[0], [0, 1], [1], [0, 2]]),
        (([6, 4], [64, 96]), [[1], [0, 2]]),
        (([1, 1], [64, 96]), [[1], [0, 2]]),
    ):
        cache = group.allocate_cache(12)
        fill(cache, generator)
        table = torch.randperm(12, generator=generator).int().view(2, 6)
        indptr = [sum(map(len, rows[:i])) for i in range(len(rows) + 1)]
        mask = BlockSparseMask(indptr, [block for row in rows for block in row], (16, 32))
        batch = Batch(
            [0, lens[0][0], sum(lens[0])], lens[1], table, None, mask=mask
        )  # fmt: skip
        query = torch.randn(batch.num_tokens, 4, 32, generator=generator)
        expected, _ = reference.forward(spec, query, None, None, cache, batch)
        for stored in (cache.key, cache.value):
            stored[table[1, 2:4].long()] = torch.nan  # the second sequence's keys 32 to 63
        found = Attention(group)(query, None, None, cache, batch)
        assert isinstance(found, torch.Tensor)
        assert_right(found, expected)


def check_left_out_of_decodes() -> None:
    """Likewise by a function, and by a step's own mask: a token's document has a hole in it."""
    generator = torch.Generator().manual_seed(6)
    document = torch.tensor([[0] * 96, [0] * 32 + [1] * 32 + [0] * 32]).int()
    mask = CustomMask.documents([document[0, :64].tolist(), document[1].tolist()], [1, 1])
    steps: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({"variant": "documents"}, {"inputs": {"document": document}}),
        ({"mask": "custom"}, {"mask": mask}),
        (
            {"mask": "custom", "num_heads": 6, "sliding_window": 80, "needs_lse": True},
            {"mask": mask},
        ),
        ({"variant": "striped", "mask": "custom"}, {"mask": mask}),
    )
    for fields, step in steps:
        spec = BASE.replace(**fields)
        group = LayerGroup(select(spec, backend="TRITON_ATTN", verify=False))
        cache = group.allocate_cache(12)
        fill(cache, generator)
        table = torch.randperm(12, generator=generator).int().view(2, 6)
        batch = Batch([0, 1, 2], [64, 96], table, None, **step)
        query = torch.randn(2, spec.num_heads, 32, generator=generator)
        expected, _ = reference.forward(spec, query, None, None, cache, batch)
        for stored in (cache.key, cache.value):
            stored[table[1, 2:4].long()] = torch.nan
        found = Attention(group)(query, None, None, cache, batch)
        assert_right(found[0] if isinstance(found, tuple) else found, expected)


def check_captured() -> None:
    """A captured graph would read the lists of its capture: none are made."""
    spec = BASE.replace(variant="striped", graph_capture="uniform")
    group = LayerGroup(select(spec, backend="TRITON_ATTN", verify=False))
    backend: Any = group.planner.chooser.chosen["decode"].backend  # type: ignore[attr-defined]
    table = torch.zeros(2, 6, dtype=torch.int32)
    for queries in (1, 3):
        plan = backend.plan_rows(Batch([0, queries, 2 * queries], [64, 96], table, None))
        assert backend.lister is not None and plan.lists is None


def check_captured_tensors() -> None:
    """They count as they are at each step, whatever their dtype, also for a plan that ran before."""
    gain = torch.tensor([0.5, 1.5, 1.0, 2.0], dtype=torch.float64)
    register_variant(
        AttentionVariant(name="gained", score_mod=lambda score, b, h, q, k: score * gain[h])
    )
    spec = BASE.replace(variant="gained")
    group = LayerGroup(select(spec, backend="TRITON_ATTN", verify=False))
    layer, cache = Attention(group), group.allocate_cache(6)
    fill(cache, torch.Generator().manual_seed(5))
    table = torch.arange(6, dtype=torch.int32).view(1, 6)
    batch = Batch([0, 3], [40], table)
    plan, query = group.plan(batch), torch.randn(3, 4, 32)
    for change in (1.0, -2.0):
        gain.mul_(change)
        expected, _ = reference.forward(spec, query, None, None, cache, batch)
        found = layer(query, None, None, cache, plan)
        assert isinstance(found, torch.Tensor)
        assert_right(found, expected)


def main() -> None:
    check_left_out()
    for variant in VARIANTS:
        register_variant(variant)
    check_left_out_of_decodes()
    check_captured()
    check_captured_tensors()
    for lens in (LENS, DECODES):
        assert_functions_right("TRITON_ATTN", lens)
    for spec, mask, lens in masks_of_each_kind():
        assert_right(*run(spec, "TRITON_ATTN", lens, mask=mask))
    print("right")


main()
