"""NATIVE_ATTN's own naming of chosen pages: does it write what torch's operators write?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from polyattn import LayerGroup, LayerSpec, SparseAttention, SparseSpec, select
from polyattn.families.sparse.planning import Piece
from polyattn.workload.base import workload
from polyattn_cpu.native import library
from polyattn_cpu.native.attention import NativeAttention
from torch_operators import Operators

pytestmark = pytest.mark.skipif(
    library.why_not() is not None, reason=f"native kernels: {library.why_not()}"
)


@pytest.mark.parametrize(
    "sparse",
    [
        SparseSpec(budget=3, granularity=16, scope="kv_head"),
        SparseSpec(budget=300, granularity=4),
        SparseSpec(budget=2, granularity=32, scope="head"),
        SparseSpec(budget=20, physical=True),
        SparseSpec(budget=6, tokens_per_entry=4),
    ],
    ids=["blocks", "groups", "two-pages", "physical", "entries"],
)
def test_a_choice_s_pages_are_torch_s(sparse: SparseSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    own, attended, tables = NativeAttention.page, Piece.attended, 0

    def beside_torch(piece: Piece, frame: Any) -> Any:
        def page(self: NativeAttention, chosen: Any) -> bool:
            nonlocal tables
            ids = chosen.choice
            for order in (torch.rand(ids.shape).argsort(-1), ids.argsort(-1)):
                assert own(self, replace(chosen, choice=ids.gather(-1, order)))
                mine = chosen.table.clone(), chosen.lens.clone()
                piece.page(chosen)
                assert mine[0].equal(chosen.table) and mine[1].equal(chosen.lens)
            tables += int(mine[1].count_nonzero())
            return True

        monkeypatch.setattr(NativeAttention, "page", page)
        return attended(piece, frame)

    monkeypatch.setattr(Piece, "attended", beside_torch)
    spec = LayerSpec(
        kind="sparse",
        num_heads=4,
        num_kv_heads=2,
        head_size=32,
        dtype="float32",
        block_size=16,
        sparse=sparse,
    )
    for step in ([(1, 40), (1, 7)], [(5, 1300), (3, 7), (1, 129)]):
        workload(LayerGroup(select(spec, "cpu", backend="NATIVE_ATTN")), step, 5).check()
    assert tables >= 5


def chosen_pages(scope: str, lengths: list[tuple[int, int]]) -> Any:
    """Return a step of a layer that reads three pages of 16 tokens."""
    spec = LayerSpec(
        kind="sparse", num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", block_size=16,
        sparse=SparseSpec(budget=3, granularity=16, scope=scope),
    )  # fmt: skip
    return workload(LayerGroup(select(spec, "cpu", backend="NATIVE_ATTN")), lengths)


@pytest.mark.parametrize("scope", ["all", "kv_head"])
def test_a_call_asks_torch_for_its_output_alone(scope: str) -> None:
    """Each other operator, a view too, costs a cold host as much as all checks."""
    step = chosen_pages(scope, [(1, 40), (1, 7)])
    layer, plan = SparseAttention(step.group), step.group.plan(step.batch)

    def call() -> Any:
        return layer(step.query, None, None, step.held, plan, choice=step.choice)

    once, names = call(), list[str]()
    with Operators(lambda name, *_: names.append(name)):
        twice = call()
    assert names == ["aten.empty_like.default"]
    assert twice.equal(once)


@pytest.mark.parametrize("scope", ["all", "kv_head"])
def test_a_query_in_a_fused_projection_is_read(scope: str) -> None:
    step = chosen_pages(scope, [(1, 40), (2, 27)])
    layer, wide = SparseAttention(step.group), torch.randn(3, 4 * 32 + 100)
    query = wide[:, 100:].unflatten(1, (4, 32))
    query.copy_(step.query)
    plain = layer(step.query, None, None, step.held, step.batch, choice=step.choice)
    for each in (query, step.query.transpose(1, 2).contiguous().transpose(1, 2)):
        assert not each.is_contiguous()
        assert layer(each, None, None, step.held, step.batch, choice=step.choice).equal(plain)
