"""Triton's own naming of chosen pages and rows: beside torch's, interpreted, and machine code."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreting import interpreted
from polyattn import LayerSpec, SparseSpec

pytest.importorskip("triton")

CASES = """
from polyattn import LayerGroup, LayerSpec, SparseSpec, select
from polyattn.families.sparse.planning import Piece
from polyattn.workload.base import workload
from polyattn_triton.attention import TritonAttention

own, attended, rows = TritonAttention.page, Piece.attended, 0


def beside_torch(piece, frame):
    def page(self, chosen):
        global rows
        assert own(self, chosen)
        table, lens = chosen.table.clone(), chosen.lens.clone()
        piece.page(chosen)
        assert lens.equal(chosen.lens)
        for mine, theirs, count in zip(table.tolist(), chosen.table.tolist(), lens.tolist()):
            whole, rest = divmod(count, chosen.page_size)  # complete pages, in any order, then the last
            assert sorted(mine[:whole]) == sorted(theirs[:whole])
            assert not rest or mine[whole] == theirs[whole]
            rows += count > 0
        chosen.table.copy_(table), chosen.lens.copy_(lens)
        return True

    TritonAttention.page = page
    return attended(piece, frame)


Piece.attended = beside_torch
for sparse, bounds in (
    (SparseSpec(budget=3, granularity=16, scope="kv_head"), True),
    (SparseSpec(budget=9, granularity=4), False),
    (SparseSpec(budget=2, granularity=32, scope="head"), True),
    (SparseSpec(budget=20, physical=True), True),
    (SparseSpec(budget=6, tokens_per_entry=4), True),
):
    spec = LayerSpec(
        kind="sparse", num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", block_size=16,
        sparse=sparse, length_bounds=bounds,
    )
    for step in ([(1, 40), (1, 7)], [(5, 40), (3, 7), (1, 129)]):
        work = workload(LayerGroup(select(spec, "cpu", backend="TRITON_ATTN")), step, 5)
        work.check()
        if sparse.granularity > 1:  # an incomplete group, too
            work.layer.checks = False
            work.choice[..., 1] = work.choice[..., 0] = work.choice[..., :2].amax(-1)
            work.run()
print(rows)
"""
ROWS = """
from polyattn import LayerGroup, LayerSpec, SparseSpec, select
from polyattn.runtime.step.chosen_pages import places_of
from polyattn.workload.base import workload
from polyattn_triton.mla import TritonMLASparse

own, named = TritonMLASparse.place, 0


def beside_torch(self, spec, choice, batch, size, first):
    global named
    places = own(self, spec, choice, batch, size, first)
    assert places.equal(places_of(spec, choice, batch, size, slice(first, first + len(choice))))
    named += int((places >= 0).sum())
    return places


TritonMLASparse.place = beside_torch
for sparse in (
    SparseSpec(budget=20, value_in_key=True),
    SparseSpec(budget=6, tokens_per_entry=4, value_in_key=True),
    SparseSpec(budget=3, granularity=4, value_in_key=True),
    SparseSpec(budget=9, physical=True, value_in_key=True),
):
    spec = LayerSpec(
        kind="sparse", num_heads=4, num_kv_heads=1, head_size=32, dtype="float32", sparse=sparse
    )
    for step in ([(1, 40), (1, 7)], [(5, 40), (3, 7), (1, 129)]):
        workload(LayerGroup(select(spec, "cpu", backend="TRITON_MLA_SPARSE")), step, 5).check()
print(named)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("cases", "least"), [(CASES, 60), (ROWS, 150)], ids=["pages", "rows"])
def test_what_is_named_is_what_torch_names(cases: str, least: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(cases)
    assert int(interpreted(script)) >= least


@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_90", "gfx942")]
)
def test_it_compiles_to_machine_code(arch: str) -> None:
    """Pages, and places where the value lies in the key."""
    from ahead import launches

    pages = LayerSpec(
        kind="sparse", num_heads=32, num_kv_heads=4, head_size=128,
        sparse=SparseSpec(budget=16, granularity=128, scope="kv_head"),
    )  # fmt: skip
    places = LayerSpec(
        kind="sparse", num_heads=64, num_kv_heads=1, head_size=512, learned_sinks=True,
        sparse=SparseSpec(budget=512, tokens_per_entry=4, value_in_key=True),
    )  # fmt: skip
    for spec, backend, name in (
        (pages, "TRITON_ATTN", "chosen_pages_kernel"),
        (places, "TRITON_MLA_SPARSE", "chosen_places_kernel"),
    ):
        (launch,) = (one for one in launches(spec, arch, [(1, 900)], backend) if one.name == name)
        assert len(launch.compiled(arch).asm["cubin" if arch == "sm_90" else "hsaco"]) > 500
