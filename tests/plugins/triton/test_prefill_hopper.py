"""Hopper's own prefill: who gets it, with what it is launched, and what its programs are dealt."""

from __future__ import annotations

import random
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
import numpy as np
import torch
from polyattn import Batch, Device, LayerSpec
from polyattn.kernel import CacheFormat, KVCache, LayerParams
from polyattn_triton import hopper, hopper_items, planning, prefill_hopper
from polyattn_triton.aot import compile_hopper
from polyattn_triton.attention import TritonAttention
from polyattn_triton.configs import HOPPER
from polyattn_triton.descriptors import described
from polyattn_triton.hopper import HopperPrefill, box_rows, hopper_config
from polyattn_triton.schedule import Rates, Tiles, key_tiles, max_parts, rows_of, stretches
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
    "e4m3 cache": {"kv_cache_dtype": "fp8_e4m3"},
    "scales in tensors": {"kv_cache_dtype": "fp8_e4m3", "scales": "tensor"},
}


@pytest.mark.parametrize("arch", ["sm_90", "sm_80", "sm_100", "gfx942", "cpu"])
def test_plain_layers_get_it_on_hopper_alone(arch: str) -> None:
    for changes in ({}, {"num_heads": 28, "num_kv_heads": 4}, {"dtype": "float16"}, {"causal": False},
                    {"head_size": 64}, {"needs_lse": True}, {"head_size": 256},
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
    found = {size: box_rows(config, size) for size in (0, 4, 8, 16, 24, 64, 128, 256, 1000)}
    assert found == {
        0: 128, 4: None, 8: 8, 16: 16, 24: None, 64: 64, 128: 128, 256: 128, 1000: None,
    }  # fmt: skip


def layouts() -> dict[str, torch.Tensor]:
    """Keys as engines keep them; numbered, so that an element says where it lies."""

    def numbered(*shape: int) -> torch.Tensor:
        return torch.arange(int(np.prod(shape)), dtype=torch.int16).view(shape)

    return {
        "NHD": numbered(5, 16, 4, 8),
        "HND": numbered(5, 4, 16, 8).transpose(1, 2),
        "keys beside values": numbered(5, 2, 16, 4, 8)[:, 1],
        "values after keys": numbered(2, 5, 16, 4, 8)[1],
        "in one row": numbered(5, 16, 2, 4, 8)[:, :, 1],
        "by token": numbered(37, 4, 8),
        "fused": numbered(37, 12, 8)[:, 4:8],
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


class Pointer:
    """What `gl.load` takes: an array and where in it."""

    def __init__(self, array: Any, at: int = 0):
        self.array, self.at = array, at

    def __add__(self, by: int) -> Pointer:
        return Pointer(self.array, self.at + int(by))


def language(program: int, programs: int, head: int) -> SimpleNamespace:
    """Gluon's functions of scalars, for one program."""

    def load(pointer: Pointer, mask: bool = True, other: int = 0) -> int:
        assert 0 <= pointer.at < len(pointer.array) or not mask
        return int(pointer.array[pointer.at]) if mask else other

    return SimpleNamespace(
        program_id=lambda axis: (program, head)[axis], num_programs=lambda axis: programs,
        load=load, minimum=min, maximum=max, where=lambda c, a, b: a if c else b,
        cdiv=lambda a, b: -(-a // b),
    )  # fmt: skip


def items_of(
    monkeypatch: pytest.MonkeyPatch, work: Any, tiles: int, heads: int, at_once: int, split: bool,
    programs: int, height: int,
    queries: list[int], lens: list[int], group: int, causal: bool, window: int,
) -> list[tuple[Any, ...]]:  # fmt: skip
    """Run the kernel's own index functions: program, head, sequence, row, then what `bounds` tells."""
    starts = np.concatenate([[0], np.cumsum(queries)])
    begin, advance, bounds = (
        getattr(hopper_items, name).fn for name in ("begin", "advance", "bounds")
    )
    monkeypatch.setattr(hopper_items, "job_at", hopper_items.job_at.fn)
    found = []
    for program in range(programs):
        for kv_head in range(heads if split else 1):
            monkeypatch.setattr(hopper_items, "gl", language(program, programs, kv_head))
            work_at = Pointer(work)
            at, stop, low, high, tile, seq, row, head = begin(work_at, tiles, at_once, heads, split)
            while at < stop:
                token0, query_len, length, *rest = bounds(
                    Pointer(lens), Pointer(starts), work_at, at, stop, low, high, seq, row,
                    group, height, 128, causal, window, split,
                )  # fmt: skip
                assert (token0, query_len, length) == (starts[seq], queries[seq], lens[seq])
                found.append((program, head, seq, row, *rest, low, high))
                at, low, high, tile, seq, row, head = advance(
                    work_at, tiles, at_once, low, high, tile, head, split
                )
    return found


@pytest.mark.parametrize(("causal", "window"), [(True, 0), (False, 0), (True, 200), (True, 1000)])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_every_key_of_every_row_has_one_program(
    monkeypatch: pytest.MonkeyPatch, seed: int, split: bool, causal: bool, window: int
) -> None:
    chance = random.Random(seed)
    group, heads = chance.choice([(4, 8), (7, 4), (1, 3), (8, 1)])
    queries = [chance.choice([0, 1, 17, 128, 300, 1500]) for _ in range(chance.randint(1, 6))]
    queries[0] = max(queries[0], 1)
    lens = [q + chance.choice([0, 0, 5, 128, 2000]) for q in queries]
    spec = PLAIN.replace(num_heads=group * heads, num_kv_heads=heads, causal=causal)
    if window:
        spec = spec.replace(sliding_window=window)
    q, n = np.array(queries), np.array(lens)
    height, at_once = chance.choice([128, 192]), chance.choice([1, heads])
    seq, row = rows_of(q, group, height)
    last = np.minimum(row + height, q[seq] * group) - 1
    context = (n - q)[seq]
    keys = key_tiles(spec, context + row // group, context + last // group, n[seq], 128)
    lows = (
        np.maximum(context + row // group - window + 1, 0) // 128 if window else np.zeros_like(keys)
    )
    order = np.argsort(-keys, kind="stable")
    work = np.concatenate([seq[order], row[order]])
    programs = min(132, len(seq) * heads)
    if split:
        programs = max(1, 132 // heads)
        work = stretches(keys, programs, Rates(1, 2)).work(Tiles(seq, row, keys))
    found = items_of(
        monkeypatch, work, len(seq), heads, at_once, split, programs, height,
        queries, lens, group, causal, window,
    )  # fmt: skip
    seen: dict[tuple[int, int, int], list[int]] = {}
    for _program, head, s, r, first, count, full_low, full, limit, *_ in found:
        tiles_seen = seen.setdefault((head, s, r), [])
        end = min(-(-limit // 128), first + count)
        tiles_seen += range(first, end)
        # In [full_low, full) every row sees every key.
        context_s = lens[s] - queries[s]
        last_row = context_s + (min(r + height, queries[s] * group) - 1) // group
        for tile in range(full_low, full):
            assert first <= tile < first + count
            assert (tile + 1) * 128 <= (context_s + r // group + 1 if causal else lens[s])
            assert not window or tile * 128 > last_row - window
    wanted = {
        (head, int(s), int(r)): list(range(int(low), int(low + k)))
        for head in range(heads)
        for s, r, k, low in zip(seq, row, keys, lows, strict=True)
    }
    assert {key: sorted(tiles_seen) for key, tiles_seen in seen.items()} == wanted


def pretended(
    monkeypatch: pytest.MonkeyPatch, spec: LayerSpec
) -> tuple[TritonAttention, list[dict[str, Any]]]:
    """A backend that takes this machine for an H200, and what it launches."""
    launched: list[dict[str, Any]] = []

    class Kernel:
        arg_names = prefill_hopper.prefill_hopper_kernel.arg_names

        def __getitem__(self, grid: Any) -> Any:
            def launch(*given: Any, **options: Any) -> None:
                named = dict(zip(self.arg_names, given, strict=True))
                launched.append(named | {"grid": grid, "options": options})

            return launch

    monkeypatch.setattr(hopper, "prefill_hopper_kernel", Kernel())
    monkeypatch.setattr(
        planning, "hopper_prefill",
        lambda spec, arch, _: HopperPrefill(spec, hopper_config(spec, arch), 132, 35 << 20),
    )  # fmt: skip
    form = CacheFormat(
        block_size=16, num_kv_heads=spec.num_kv_heads, head_size=spec.head_size,
        v_head_size=spec.v_head_size, dtype=spec.dtype,
    )  # fmt: skip
    backend = TritonAttention(spec, form, Device("cuda", "sm_90", torch_device="cpu"))
    backend.num_sms = 132
    return backend, launched


def test_what_it_is_launched_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over blocks, whole and in pieces, and over keys by token; each name has what it says."""
    backend, launched = pretended(monkeypatch, PLAIN)
    form = backend.cache
    assert form is not None
    for queries, lens, fresh in (
        ([2048] * 4, [2048] * 4, False),
        ([2048] * 4, [2048] * 4, True),
        ([300], [8192], False),
    ):
        blocks = sum(-(-n // 16) for n in lens)
        cache = KVCache.allocate(form, blocks, torch.device("cpu"))
        table = torch.zeros(len(lens), max(lens) // 16, dtype=torch.int32)
        plan = backend.plan(Batch.from_lens(queries, lens, table, 16))
        query = torch.zeros(sum(queries), 32, 128, dtype=torch.bfloat16)
        key = torch.zeros(sum(queries), 8, 128, dtype=torch.bfloat16) if fresh else None
        out, lse = torch.empty_like(query), torch.empty(len(query), 32)
        launched.clear()
        monkeypatch.setattr(backend, "_merge", lambda *_: None)
        backend.run(plan, query, key, key, cache, LayerParams(), out, lse)
        (named,) = launched
        assert named["Q"] is query and named["OUT"] is out and named["LSE"] is lse
        kept = cache.key if key is None else key
        assert named["K"].base is kept and named["WORK"] is plan.work
        assert named["K"].block_shape == [128 if fresh else 16, 128]
        assert (named["q_t"], named["q_h"], named["o_t"], named["lse_t"]) == (4096, 128, 4096, 32)
        assert (named["k_b"], named["k_row"], named["k_col"]) == (0 if fresh else 16, 0, 128)
        assert (named["G"], named["KV_HEADS"], named["D"]) == (4, 8, 128)
        assert (named["PAGED"], named["HAS_LSE"]) == (not fresh, True)
        assert named["SPLIT"] == (plan.way == "pieces") == (lens == [8192])
        assert named["bt_s"] == table.stride(0) and named["v_scale"] == 1.0
        if named["SPLIT"]:
            assert named["grid"] == (132 // 8, 8, 1)
            rows = max_parts(132 // 8) * 8 * 128
            assert named["PART_LSE"].numel() >= rows and named["PARTS"].numel() >= rows * 128
        else:
            assert named["tiles"] == 256 and named["grid"] == (132, 1, 1)
            assert named["WORK"].numel() == 2 * named["tiles"]


def test_what_cannot_be_described_goes_to_the_portable_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, launched = pretended(monkeypatch, PLAIN)
    assert backend.hopper is not None
    plan = backend.plan(Batch.from_lens([512], [8192], torch.zeros(1, 512, dtype=torch.int32), 16))
    query = torch.zeros(512, 32, 128, dtype=torch.bfloat16)
    storage = torch.zeros(600 * 16384, dtype=torch.bfloat16)
    good = storage[: 512 * 16384].view(512, 16, 8, 128)
    shifted = storage[4 : 4 + 512 * 16384].view(512, 16, 8, 128)
    call = backend.hopper
    for key, value, q, took in (
        (good, good, query, True),
        (shifted, good, query, False),
        (good, shifted, query, False),
        (good[:, :12], good[:, :12], query, False),  # blocks of 12
        (good, good, torch.zeros(512 * 4096 + 8, dtype=torch.bfloat16)[4:-4].view(512, 32, 128), False),
    ):  # fmt: skip
        launched.clear()
        out = torch.empty_like(query)
        assert call(plan, PLAIN, q, key, value, out, None, (1.0, 1.0)) is took
        assert len(launched) == took


def test_the_portable_kernel_has_a_plan_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made once, with its own tiles; the merge that follows is that plan's."""
    from polyattn_triton import attention

    backend, launched = pretended(monkeypatch, PLAIN.replace(head_size=64))
    ran: list[tuple[Any, ...]] = []

    def site(kernel: Any, *_: Any) -> Any:
        return lambda grid, *_: ran.append((kernel, grid))

    monkeypatch.setattr(attention, "_site", site)
    monkeypatch.setattr(backend, "_merge", lambda plan, *_: ran.append(("merge", plan.grid)))
    plan = backend.plan(Batch.from_lens([300], [8192], torch.zeros(1, 512, dtype=torch.int32), 16))
    assert plan.config.block_m == HOPPER[64].block_m
    storage = torch.zeros(2 * 512 * 8192 + 4, dtype=torch.bfloat16)
    cache = KVCache(*storage[4:].view(2, 512, 16, 8, 64))
    query = torch.zeros(300, 32, 64, dtype=torch.bfloat16)
    for _ in range(2):
        backend.run(plan, query, None, None, cache, LayerParams(), torch.empty_like(query), None)
    portable = plan.portable
    assert portable is not None and not launched
    assert portable.config == backend.paged_config and portable.way == "pieces"
    assert ran == [(attention.prefill_kernel, portable.grid), ("merge", portable.grid)] * 2


@pytest.mark.parametrize(
    ("lens", "wanted"),
    [([8192], 8), ([2048] * 4, 8), ([4608] * 4, 2), ([32768], 2), ([1 << 17], 1)],
)
def test_heads_share_what_the_l2_holds(lens: list[int], wanted: int) -> None:
    """Half of an L2 of 50 MiB and more holds 8,192 tokens of eight heads of 128, K and V."""
    call = HopperPrefill(PLAIN, HOPPER[128], 132, 35 << 20)
    assert call.heads_at_once(lens) == wanted


CUOBJDUMP = re.compile(r"REG:(\d+) STACK:(\d+)")
SHAPES = [
    pytest.param({}, 16, True),
    *(
        pytest.param(changes, block_size, split, marks=pytest.mark.slow)
        for changes, block_size, split in (
            ({}, 0, False), ({"needs_lse": True}, 256, False), ({"head_size": 64}, 16, True),
            ({"head_size": 64, "dtype": "float16"}, 0, False), ({"causal": False}, 0, False),
            ({"num_heads": 28, "num_kv_heads": 4, "needs_lse": True}, 64, True),
            ({"num_heads": 8}, 8, False), ({"sliding_window": 1000}, 16, False),
            ({"head_size": 256}, 16, True), ({"head_size": 256, "sliding_window": 512}, 0, False),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "block_size", "split"), SHAPES)
def test_compiles_for_hopper(
    changes: dict[str, Any], block_size: int, split: bool, tmp_path: Path
) -> None:
    """Its program fits on a multiprocessor, and no register of the loops over keys lies in memory."""
    from triton import knobs

    spec = PLAIN.replace(**changes)
    kernel, config = compile_hopper(spec, block_size, split), HOPPER[spec.head_size]
    assert kernel.metadata.shared <= 227 << 10
    # Blocks looked up ahead and those of the tile before: Triton 3.6 can lose one of them.
    carried = [line for line in kernel.asm["ttgir"].splitlines() if "iter_args" in line]
    assert max(line.count("tensor<32xi32") for line in carried) == 2
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    told = [
        subprocess.run([tool, *options, cubin], capture_output=True, text=True, check=True).stdout
        for tool, options in (
            (knobs.nvidia.cuobjdump.path, ["--dump-resource-usage"]),
            (knobs.nvidia.nvdisasm.path, ["-c"]),
        )
    ]
    found = CUOBJDUMP.search(told[0])
    assert found is not None and int(found[1]) * 32 * config.num_warps <= 65536
    lines = told[1].splitlines()
    labels = {line.strip()[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    loops = 0
    for end, line in enumerate(lines):
        target = re.search(r"BRA `\((\.L_x_\d+)\)", line)
        begin = labels.get(target[1], end) if target else end
        body = lines[begin:end]
        products = sum("HGMMA" in text for text in body)
        exponentials = sum("MUFU.EX2" in text for text in body)
        if end - begin < 1000 and exponentials in (34, 66) and products in (12, 16, 20):
            loops += 1
            assert not any("LDL" in text or "STL" in text for text in body)
            # The softmax lies between the wait for the scores and that for the output.
            waits = [i for i, text in enumerate(body) if "WARPGROUP.DEPBAR" in text]
            assert len(waits) == 2
            assert all(waits[0] < i < waits[1] for i, t in enumerate(body) if "MUFU.EX2" in t)
    # Of each group, with a mask and without, and with one where a window begins.
    assert loops == config.block_m // 64 * (3 if spec.sliding_window else 2)
