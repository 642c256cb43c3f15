"""Are few long prompts walked in pieces, many whole, and does each piece's kernel keep its registers?"""

from __future__ import annotations

import pytest
import torch
from polyattn import Batch, LayerSpec
from polyattn.kernel import AttentionKind, RecurrentSpec

pytest.importorskip("triton")
from polyattn_triton import walk
from polyattn_triton.configs import WALKS
from polyattn_triton.walk import tokens_of_piece

MAMBA2 = WALKS[AttentionKind.MAMBA2]


def cut(counts: list[int], heads: int) -> int:
    return tokens_of_piece(counts, 64, MAMBA2, (heads, heads), (132, MAMBA2.on_one))


def test_few_long_prompts_are_cut_to_whole_chunks() -> None:
    """H200: 16 heads of a prompt of 4,000 take 296 us whole, 61 in 8 pieces."""
    size = cut([10946], 16)
    assert size % 64 == 0 and 8 <= 10946 / size <= 32
    assert cut([4096] * 8, 80) == 0
    assert cut([4000, *[1] * 3], 16) > 0


@pytest.mark.parametrize("counts", [[], [0], [1], [64], [64] * 40])
def test_a_chunk_is_not_cut(counts: list[int]) -> None:
    assert cut(counts, 4) == 0


def test_a_walk_counts_programs_that_share_a_multiprocessor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """H200: KDA's 32 heads of one prompt of 16,000 take 1,971 us whole, 1,450 in pieces."""
    monkeypatch.setattr(walk, "multiprocessors", lambda device: 132)
    spec = LayerSpec(kind="kda", num_heads=32, head_size=128, recurrent=RecurrentSpec())
    batch = Batch([0, 16000], [16000], state_slots=torch.zeros(1, dtype=torch.int64))
    assert walk.Walk(spec, "sm_90", torch.device("cpu")).cut(batch) is not None


def test_pieces_fill_the_multiprocessors_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """H200: 8 heads of 256 states, a prompt of 8,000: 213 us in 8 pieces, 298 in 12, of 192 programs."""
    monkeypatch.setattr(walk, "multiprocessors", lambda device: 132)
    form = RecurrentSpec(state_size=256)
    spec = LayerSpec(kind="mamba2", num_heads=8, num_kv_heads=1, head_size=128, recurrent=form)
    batch = Batch([0, 8000], [8000], state_slots=torch.zeros(1, dtype=torch.int64))
    pieces = walk.Walk(spec, "sm_90", torch.device("cpu")).cut(batch)
    assert pieces is not None and pieces.size == 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size", "kernel", "most"),
    [
        ("kda", 128, "chunk_kernel", 96),
        ("rwkv7", 64, "chunk_kernel", 0),
        ("gdn", 128, "delta_kernel", 192),
        ("linear", 128, "gated_kernel", 128),
    ],
)
def test_pieces_compile_and_hardly_spill(kind: str, size: int, kernel: str, most: int) -> None:
    """KDA's second launch took 8 ms for 0.65 on an H200 where it spilled 336 bytes."""
    from ahead import launches
    from machine_code import usage

    form = RecurrentSpec(qk_norm=kind in ("gdn", "kda"))
    spec = LayerSpec(kind=kind, num_heads=4, head_size=size, recurrent=form)
    made = launches(spec, "sm_90", [(4000, 4000)], "TRITON_SCAN")
    parts = {one.constants[-1]: one for one in made if one.name == kernel}
    assert parts.keys() == {"left", "out"}
    for one in parts.values():
        assert usage(one.compiled("sm_90").asm["cubin"])["STACK"] <= most
