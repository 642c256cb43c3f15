"""Hopper's own prefill: who gets it, and with what is it launched?"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import pytest
from polyattn.kernel import Frame

pytest.importorskip("triton")
import numpy as np
import torch
from polyattn import Batch, LayerSpec
from polyattn.kernel import KVCache, LayerParams
from polyattn_triton import attention
from polyattn_triton.configs import HOPPER
from polyattn_triton.hopper import choice as hopper
from polyattn_triton.hopper.choice import HopperPrefill, box_rows, hopper_config
from polyattn_triton.hopper.descriptors import described
from polyattn_triton.schedule import fullest, max_parts
from pretending import merging_costs_nothing, pretended
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

PLAIN = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
ODD: dict[str, dict[str, Any]] = {
    "window on both sides": {"sliding_window": 128, "causal": False},
    "chunks": {"chunk_size": 128},
    "sink tokens": {"sliding_window": 128, "sink_tokens": 4},
    "soft cap": {"logit_soft_cap": 30.0},
    "ALiBi": {"alibi": True},
    "sinks": {"learned_sinks": True},
    "size 96": {"head_size": 96},
    "values of another size": {"v_head_size": 64},
    "float32": {"dtype": "float32"},
    "groups of 4 bits": {"kv_cache_dtype": "int4"},
    "scales in tensors": {"kv_cache_dtype": "fp8_e4m3", "scales": "tensor"},
}


@pytest.mark.parametrize("arch", ["sm_90", "sm_80", "sm_100", "gfx942", "cpu"])
def test_plain_layers_get_it_on_hopper_alone(arch: str) -> None:
    for changes in ({}, {"num_heads": 28, "num_kv_heads": 4}, {"dtype": "float16"},
                    {"head_size": 64}, {"needs_lse": True}, {"head_size": 256}, {"causal": False},
                    {"sliding_window": 4096}):  # fmt: skip
        spec = PLAIN.replace(**changes)
        found = hopper_config(spec, arch)
        assert found == (HOPPER[spec.head_size] if arch == "sm_90" else None)


@pytest.mark.parametrize("changes", ODD.values(), ids=ODD)
def test_other_layers_have_the_portable_kernel(changes: dict[str, Any]) -> None:
    assert hopper_config(PLAIN.replace(**changes), "sm_90") is None


def test_a_triton_without_what_it_needs_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hopper, "prefill_hopper_kernel", None)
    assert hopper_config(PLAIN, "sm_90") is None and "install triton 3.6" in caplog.text
    caplog.clear()
    assert hopper_config(PLAIN, "sm_80") is None and not caplog.records


def test_boxes_lie_in_one_block() -> None:
    config = HOPPER[128]
    found = {size: box_rows(config.block_n, size) for size in (0, 4, 8, 16, 24, 64, 128, 256, 1000)}
    assert found == {
        0: 128, 4: None, 8: 8, 16: 16, 24: None, 64: 64, 128: 128, 256: 128, 1000: None,
    }  # fmt: skip


def layouts() -> dict[str, torch.Tensor]:
    """Keys as engines keep them; numbered, so that an element says where it lies."""

    def numbered(*shape: int) -> torch.Tensor:
        return torch.arange(int(np.prod(shape)), dtype=torch.int16).view(shape)

    return {
        "NHD": numbered(5, 16, 4, 64),
        "HND": numbered(5, 4, 16, 64).transpose(1, 2),
        "keys beside values": numbered(5, 2, 16, 4, 64)[:, 1],
        "values after keys": numbered(2, 5, 16, 4, 64)[1],
        "in one row": numbered(5, 16, 2, 4, 64)[:, :, 1],
        "by token": numbered(37, 4, 64),
        "fused": numbered(37, 12, 64)[:, 4:8],
    }


@pytest.mark.parametrize("name", layouts())
def test_a_descriptor_finds_every_element(name: str) -> None:
    kept = layouts()[name].view(torch.bfloat16)
    found = described(kept, 16)
    assert found is not None
    descriptor, (block, row, column) = found
    TensorDescriptor.__post_init__(descriptor)  # its own checks, left out where it is made
    rows, columns = descriptor.shape
    matrix = kept.as_strided((rows, columns), descriptor.strides).view(torch.int16)
    whole = kept.view(torch.int16)
    for index in np.ndindex(*kept.shape[:-1]):
        *place, slot, head = index
        at = (place[0] * block if place else 0) + slot + head * row
        there = matrix[at, head * column : head * column + kept.shape[-1]]
        assert torch.equal(there, whole[index])
    # Nothing beyond the tensor's own last element is ever touched.
    last = (rows - 1) * descriptor.strides[0] + columns
    assert kept.storage_offset() + last <= kept.untyped_storage().nbytes() // 2


def test_what_a_descriptor_cannot_say() -> None:
    kept = torch.zeros(6, 16, 4, 8, dtype=torch.bfloat16)
    assert described(kept, 16) is not None
    assert described(kept.flatten()[4 : 4 + 5 * 512].view(5, 16, 4, 8), 16) is None  # address
    assert described(kept.as_strided((5, 16, 4, 8), (520, 32, 8, 1)), 16) is None  # block's stride
    assert described(kept.as_strided((5, 16, 4, 8), (512, 36, 8, 1)), 16) is None  # token's
    assert described(kept.as_strided((5, 16, 4, 4), (512, 32, 8, 2)), 16) is None  # elements apart
    assert described(kept[:0], 16) is None


@pytest.mark.parametrize(
    ("queries", "lens", "fresh"),
    [
        ([2048] * 4, [2048] * 4, False),
        ([2048] * 4, [2048] * 4, True),
        ([300], [8192], False),
        ([300, 2], [300, 2], True),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_what_it_is_launched_with(
    monkeypatch: pytest.MonkeyPatch, queries: list[int], lens: list[int], fresh: bool, causal: bool
) -> None:
    """Over blocks and over keys by token, whole and in pieces; each name has what it says."""
    merging_costs_nothing(monkeypatch)
    backend, launched = pretended(monkeypatch, PLAIN)
    form = backend.cache
    assert form is not None
    merged: list[Any] = []
    monkeypatch.setattr(backend, "merge", lambda plan, *_: merged.append(plan))
    cache = KVCache.allocate(form, sum(-(-n // 16) for n in lens), torch.device("cpu"))
    table = torch.zeros(len(lens), max(lens) // 16 + 1, dtype=torch.int32)
    query = torch.zeros(sum(queries), 32, 128, dtype=torch.bfloat16)
    out, lse = torch.empty_like(query), torch.empty(len(query), 32)
    key = torch.zeros(sum(lens), 8, 128, dtype=torch.bfloat16) if fresh else None
    batch = Batch.from_lens(queries, lens, table, 16)
    batch.causal = causal
    plan = backend.plan_rows(batch)
    backend.run(plan, Frame(query, key, key, cache, LayerParams(), out, lse))
    (named,) = launched
    assert named["Q"] is query and named["OUT"] is out and named["LSE"] is lse
    kept = cache.key if key is None else key
    assert named["K"].base is kept and named["WORK"] is plan.work
    assert named["K"].block_shape == [128 if fresh else 16, 128]
    assert (named["q_t"], named["q_h"], named["o_t"], named["lse_t"]) == (4096, 128, 4096, 32)
    assert (named["k_b"], named["k_row"], named["k_col"]) == (0 if fresh else 16, 0, 128)
    assert (named["G"], named["KV_HEADS"], named["D"]) == (4, 8, 128)
    assert (named["PAGED"], named["HAS_LSE"], named["WINDOW"]) == (not fresh, True, 0)
    assert named["bt_s"] == table.stride(0) and named["v_scale"] == 1.0
    assert named["CAUSAL"] is causal
    assert named["SPLIT"] is (plan.merging is not None) is (plan.way == "pieces") is (len(lens) < 4)
    if plan.merging is not None:
        assert named["grid"] == (132 // 8, 8, 1) and merged == [plan]
        rows = max_parts(132 // 8) * 8 * 128
        assert named["PART_LSE"].numel() >= rows and named["PARTS"].numel() >= rows * 128
    else:
        assert named["tiles"] == 256 and named["grid"] == (132, 1, 1) and not merged
        assert named["WORK"].numel() == 2 * named["tiles"]


@pytest.mark.parametrize(
    ("size", "queries", "lens", "causal", "way"),
    [
        (128, [2048] * 4, [2048] * 4, True, "prefill"),
        (128, [512] * 4, [4608] * 4, True, "prefill"),
        (128, [2048] * 4, [2048] * 4, False, "prefill"),  # a step that asks for no causality
        (128, [300], [8192], True, "pieces"),  # few tiles: their keys are cut
        (128, [100, 1, 40], [2000, 1, 40], True, "pieces"),
        (128, [4096] * 4, [2048] * 4, True, "prefill"),  # the first queries see no key
        (64, [512] * 4, [4608] * 4, True, "prefill"),
        (64, [2048] * 4, [2048] * 4, True, ""),  # by token the portable kernel is faster
        (256, [2048] * 4, [2048] * 4, True, "prefill"),
    ],
)
def test_which_steps_are_planned_for_it(
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    queries: list[int],
    lens: list[int],
    causal: bool,
    way: str,
) -> None:
    """Others are dealt out as if there were no such kernel."""
    backend, _ = pretended(monkeypatch, PLAIN.replace(head_size=size))
    table = torch.zeros(len(lens), max(*queries, *lens) // 16 + 1, dtype=torch.int32)
    starts = [0, *accumulate(queries)]
    batch = Batch(starts, lens, table)
    batch.causal = causal
    plan, portable = backend.plan_rows(batch), backend.plan_rows(batch, portable=True)
    assert (plan.at_once > 0) is bool(way) and portable.at_once == 0
    if way:
        assert (plan.way, plan.config) == (way, HOPPER[size])
        assert (plan.merging is not None) is (way == "pieces")
    else:
        assert plan.variant == portable.variant and plan.grid == portable.grid
        assert torch.equal(plan.work, portable.work) and plan.merging == portable.merging


def test_what_cannot_be_described_goes_to_the_portable_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, launched = pretended(monkeypatch, PLAIN)
    assert backend.hopper is not None
    plan = backend.plan_rows(
        Batch.from_lens([512] * 4, [4608] * 4, torch.zeros(4, 512, dtype=torch.int32), 16)
    )
    assert plan.at_once
    query = torch.zeros(2048, 32, 128, dtype=torch.bfloat16)
    storage = torch.zeros(600 * 16384, dtype=torch.bfloat16)
    good = storage[: 512 * 16384].view(512, 16, 8, 128)
    shifted = storage[4 : 4 + 512 * 16384].view(512, 16, 8, 128)
    call = backend.hopper
    for key, value, q, took in (
        (good, good, query, True),
        (shifted, good, query, False),
        (good, shifted, query, False),
        (good[:, :12], good[:, :12], query, False),  # blocks of 12
        (good, good, torch.zeros(2048 * 4096 + 8, dtype=torch.bfloat16)[4:-4].view(2048, 32, 128), False),
    ):  # fmt: skip
        launched.clear()
        out = torch.empty_like(query)
        assert call(plan, PLAIN, q, key, value, out, None, (1.0, 1.0), out) is took
        assert len(launched) == took


def test_the_portable_kernel_has_a_plan_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made once, with its own tiles, where a step's tensors can't be described."""
    backend, launched = pretended(monkeypatch, PLAIN.replace(head_size=64))
    ran: list[tuple[Any, ...]] = []

    def site(kernel: Any, *_: Any) -> Any:
        return lambda grid, *_: ran.append((kernel, grid))

    monkeypatch.setattr(attention, "_site", site)
    monkeypatch.setattr(backend, "merge", lambda plan, *_: ran.append(("merge", plan.grid)))
    plan = backend.plan_rows(
        Batch.from_lens([512] * 4, [4608] * 4, torch.zeros(4, 288, dtype=torch.int32), 16)
    )
    assert plan.at_once and plan.config == HOPPER[64]
    storage = torch.zeros(2 * 512 * 8192 + 4, dtype=torch.bfloat16)
    cache = KVCache(*storage[4:].view(2, 512, 16, 8, 64))
    query = torch.zeros(2048, 32, 64, dtype=torch.bfloat16)
    for _ in range(2):
        backend.run(
            plan, Frame(query, None, None, cache, LayerParams(), torch.empty_like(query), None)
        )
    portable = plan.portable
    assert portable is not None and not launched
    assert portable.config == backend.paged_config and not portable.at_once
    merges = [("merge", portable.grid)] * (portable.merging is not None)
    assert ran == [(attention.prefill_kernel, portable.grid), *merges] * 2


@pytest.mark.parametrize(
    ("lens", "wanted"),
    [([8192], 8), ([2048] * 4, 8), ([4608] * 4, 2), ([32768], 2), ([1 << 17], 1)],
)
def test_heads_share_what_the_l2_holds(lens: list[int], wanted: int) -> None:
    """Half of an L2 of 50 MiB and more holds 8,192 tokens of eight heads of 128, K and V."""
    call = HopperPrefill(PLAIN, HOPPER[128], 132, 35 << 20)
    assert call.heads_at_once(lens, np.full(1000, 60)) == wanted


def test_more_heads_go_at_once_where_the_last_ones_would_end_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four chunks, one behind 39k: head by head the chip waits for the last head's long tiles.

    All heads' long tiles first, every program ends within a tenth of the mean; the L2 has room for one.
    """
    spec = PLAIN.replace(num_kv_heads=4)
    backend, _ = pretended(monkeypatch, spec)
    lens = [39425, 17188, 4388, 4374]
    table = torch.zeros(4, 2500, dtype=torch.int32)
    plan = backend.plan_rows(Batch.from_lens([512] * 4, lens, table, 16))
    work = plan.work.numpy().reshape(2, -1)
    costs = np.array([-(-(lens[seq] - 512 + row // 8 + 16) // 128) + 1 for seq, row in work.T])
    assert plan.way == "prefill" and list(costs) == sorted(costs, reverse=True)
    ends = {n: fullest(costs, 4, n, 132) / (costs.sum() * 4 / 132) for n in (1, 2, 4)}
    assert ends[1] > 1.25 and ends[plan.at_once] < 1.1 and plan.at_once == 2


@pytest.mark.parametrize(
    ("queries", "way"),
    [([232], "prefill"), ([150, 100, 50], "prefill"), ([1148], "prefill"), ([1400], "pieces")],
)
def test_prompts_that_take_no_longer_than_a_merge_stay_whole(
    monkeypatch: pytest.MonkeyPatch, queries: list[int], way: str
) -> None:
    backend, _ = pretended(monkeypatch, PLAIN.replace(num_heads=8, num_kv_heads=2))
    table = torch.zeros(len(queries), 88, dtype=torch.int32)
    plan = backend.plan_rows(Batch.from_lens(queries, queries, table, 16))
    assert plan.way == way and (plan.merging is not None) is (way == "pieces")


@pytest.mark.parametrize("heads", [(8, 2), (32, 8), (64, 8)])
def test_warming_up_compiles_whole_tiles_and_pieces(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int]
) -> None:
    """Of prompts and of chunks, though plans for such heads hardly ever cut a prompt."""
    backend, launched = pretended(
        monkeypatch, PLAIN.replace(num_heads=heads[0], num_kv_heads=heads[1])
    )
    monkeypatch.setattr(backend, "merge", lambda *_: None)
    monkeypatch.setattr(attention, "_site", lambda *_: lambda *_: None)  # the other kernels
    monkeypatch.setattr(attention, "compiling_only", lambda *_: nullcontext([]))  # launch instead
    backend.warm_up(("prefill",))
    assert {(named["SPLIT"], named["PAGED"]) for named in launched} == {
        (split, paged) for split in (False, True) for paged in (False, True)
    }
