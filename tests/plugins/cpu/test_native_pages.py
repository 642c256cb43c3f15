"""NATIVE_ATTN's own naming of chosen pages: does it write what torch's operators write?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from polyattn import LayerGroup, LayerSpec, SparseSpec, select
from polyattn.families.sparse.planning import Piece
from polyattn.workload.base import workload
from polyattn_cpu.native import library
from polyattn_cpu.native.attention import NativeAttention

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
            some = replace(chosen, choice=ids.gather(-1, torch.rand(ids.shape).argsort(-1)))
            assert own(self, some)
            mine = chosen.table.clone(), chosen.lens.clone()
            piece.page(chosen)
            tables += int(mine[1].count_nonzero())
            assert mine[0].equal(chosen.table) and mine[1].equal(chosen.lens)
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
