"""Which way does a step of decodes run on a chip of 132 multiprocessors, and by how many programs?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chips import h200
from polyattn import Batch, Device, LayerSpec
from polyattn.kernel import LatentSpec
from polyattn.selection.cache_format import format_of

pytest.importorskip("triton")
H200 = Device(platform="cuda", arch="sm_90", torch_device="cpu")
SMS = 132


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plan as on an H200; nothing runs."""
    from polyattn_triton import launch
    from polyattn_triton.attention import TritonAttention

    monkeypatch.setattr(launch, "facts", h200(SMS))

    def plan(heads: int, kv_heads: int, lens: list[int], tokens: int = 1, **changes: Any) -> Any:
        spec = LayerSpec(num_heads=heads, num_kv_heads=kv_heads, head_size=128, **changes)
        table = torch.zeros(len(lens), -(-max(lens) // 64), dtype=torch.int32)
        batch = Batch(list(range(0, tokens * len(lens) + 1, tokens)), lens, table)
        return TritonAttention(spec, format_of(spec, H200, "NHD", 64), H200).plan(batch)

    return plan


LONG = [131_072, *[1024] * 63]


def test_a_long_tile_is_not_cut_into_more_parts_than_pay(planned: Any) -> None:
    assert planned(16, 2, LONG).grid == (2 * SMS // 2, 2, 1)
    assert planned(28, 4, LONG).grid == (2 * SMS // 4, 4, 1)
    assert planned(32, 8, LONG).grid == (3 * SMS // 8, 8, 1)
    # Nor are programs given up where no tile has many parts.
    assert planned(16, 2, [100 * n for n in range(1, 200)]).grid == (3 * SMS // 2, 2, 1)


def test_a_kernel_merges_what_a_program_would_in_several_rounds(planned: Any) -> None:
    """And what is dealt out by lists; even splits that are merged at once need one launch."""
    for heads, kv_heads, lens in (
        (32, 8, [8192]),
        (28, 4, [3103] * 64),
        (8, 2, [1150]),
        (48, 4, [399]),
    ):
        plan = planned(heads, kv_heads, lens)
        assert plan.way == "split" and plan.splits > 1 and plan.merging is None
    for heads, kv_heads, lens in ((16, 1, [16_889]), (64, 8, [8192]), (48, 4, [8192] * 2)):
        plan = planned(heads, kv_heads, lens)
        assert plan.way == "many" and plan.splits > 4
        assert plan.merging[:4] == (len(lens), len(lens), plan.splits, False)
    plan = planned(28, 4, LONG)
    assert plan.way == "listed" and plan.merging[:2] == (66, 64) and plan.merging.parts in (43, 44)
    assert planned(28, 4, [64] * 40 + [40] * 60).merging is None  # nothing is cut


def test_drafts_of_large_groups_are_decoded_in_several_tiles_where_keys_are_few(
    planned: Any,
) -> None:
    few = planned(32, 2, [1200] * 24, 5)
    assert few.way == "few" and few.config.block_m == 64
    assert planned(16, 1, [30_000], 8).way == "few"
    # Of long contexts few keys are seen.
    for limits in ({"sliding_window": 1024}, {"chunk_size": 1024}):
        assert planned(32, 2, [30_000] * 24, 5, **limits).way == "few"
    kept = {"sliding_window": 1024, "sink_tokens": 8192}
    assert planned(32, 2, [30_000] * 24, 5, **kept).way != "few"
    for lens, tokens, changes in (
        ([1200] * 100, 8, {}),  # many keys
        ([1200] * 24, 17, {}),  # more tokens than drafts are
        ([1200] * 24, 5, {"graph_capture": "uniform"}),  # lengths decide nothing
    ):
        assert planned(32, 2, lens, tokens, **changes).way in ("prefill", "pieces")


def test_a_captured_step_s_grid_depends_on_no_length(planned: Any) -> None:
    captured = {"graph_capture": "single_token_decode"}
    grids = {planned(16, 2, lens, **captured).grid for lens in (LONG, [64] * 64, [4096] * 64)}
    assert grids == {(3 * SMS // 2, 2, 1)}


def test_a_captured_step_over_latents_merges_alike_whatever_the_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """How many parts are merged at once is the order of a sum: a replay has the eager step's bits."""
    from polyattn_triton import launch, mla

    monkeypatch.setattr(launch, "facts", h200(SMS))
    spec = LayerSpec(
        kind="mla", num_heads=64, head_size=192, v_head_size=128, graph_capture="single_token_decode",
        latent=LatentSpec(rank=512, rope_head_size=64),
    )  # fmt: skip
    backend = mla.TritonMLA(spec, None, H200)
    merged = set()
    for lens in (LONG, [64] * 64, [4096] * 64):
        table = torch.zeros(64, 2048, dtype=torch.int32)
        merged.add(backend.plan(Batch(list(range(65)), lens, table)).merging)
    assert len(merged) == 1


def test_the_multi_block_threshold_is_a_setting(
    planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few sequences are cut up to the threshold, none where it is 0."""
    assert planned(8, 2, [1024] * 2).splits > 4  # 128 keys each
    monkeypatch.setenv("POLYATTN_MULTI_BLOCK", "512")
    assert planned(8, 2, [1024] * 2).splits == 2
    assert planned(8, 2, [500] * 2).way == "decode"
    monkeypatch.setenv("POLYATTN_MULTI_BLOCK", "0")
    for lens in ([100_000], LONG, [1024] * 2):
        plan = planned(8, 2, lens)
        assert (plan.way, plan.splits, plan.grid) == ("decode", 1, (len(lens), 2, 1))


@pytest.mark.parametrize(
    ("rows", "way"),
    [
        (33, "decode"),
        (34, "listed"),
        (40, "listed"),
        (52, "listed"),
        (53, "decode"),
        (64, "decode"),
    ],
)
def test_equal_programs_that_leave_a_tail_are_cut(rows: int, way: str, planned: Any) -> None:
    """33 rows of 16 KV heads are 528 programs, as many as fit at once; 64 two rounds of them."""
    plan = planned(16, 16, [2048] * rows)
    assert plan.way == way
    assert plan.grid[0] == (3 * SMS // 16 if way == "listed" else rows)
