"""Do the native kernels read each format's rows as its `decode` does, in every instruction set?"""

from __future__ import annotations

import ctypes
import math
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polyattn
import pytest
import torch
from polyattn import Batch, KVCache, LayerSpec, RowFormat, row_formats
from polyattn.families.attention import reference
from polyattn.kernel import (
    CacheFormat,
    Device,
    Frame,
    LayerParams,
    decoded,
    encoded,
    quantize,
    sizes_of,
)
from polyattn.runtime.cache.bits import codebook, half, single_at, written
from polyattn.selection.cache_format import format_of
from polyattn.workload.compare import lse_error, output_error
from polyattn.workload.tolerance import tolerance_of
from polyattn_cpu.native import library
from polyattn_cpu.native.attention import NativeAttention
from polyattn_cpu.native.rows import BY_HAND, latent_problem, rows_problem, writer
from polyattn_cpu.native.store import Part, store

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
from guarded import at_an_end
from unseen_format import registered

CPU = Device("cpu", "x86_64", torch_device="cpu")
pytestmark = pytest.mark.skipif(library.why_not() is not None, reason="no native kernels")
ISAS = library.isas() if library.why_not() is None else ()


def _every_operation(row: Any, d: Any, size: int) -> Any:
    """Return element `d`, float32, by whatever a trace may hold: all else adds up to nothing."""
    x = single_at(row, 4 * d)
    byte, place = row[4 * d] - 100, d * 1.0
    table = codebook((1.5, -2.5, 0.25, 8.0), torch.device("cpu"))[row[4 * d] & 3]
    found = (
        torch.exp(-x.abs())
        + torch.exp2(-x.abs())
        + torch.log(x.abs() + 1)
        + torch.log2(x.abs() + 2)
    )
    found = found + torch.sqrt(x.abs()) + torch.rsqrt(x.abs() + 1) + torch.sin(x) + torch.cos(x)
    found = found + torch.tanh(x) + torch.sigmoid(x) + torch.floor(x) + torch.ceil(x) + table
    found = (
        found
        + byte // 7
        + (byte // -1 + byte)
        + byte % 7
        + byte % -3
        + ((byte | 1) << 31) // (1 << 28)
        + (byte << 2)
        + (byte >> 1)
        + (byte ^ 5)
        + (byte | 8)
        + (byte & 12)
    )
    found = (
        found + torch.clamp(byte, -20, 20) + torch.clamp(x, -1.0, 1.0) + byte.abs() - (-byte) * 2
    )
    found = (
        found
        + ~byte
        + half(row[4 * d] | 0x3C00)
        + (x / 3).to(torch.int32)
        + torch.maximum(x, place)
    )
    for seen in (x < 0, x <= 0.5, x > 1, x >= -1, byte == 3, byte != 3, byte < 9, byte <= 9):
        found = (
            found
            + torch.where(seen & (x == x), 0.5, -0.25)
            + torch.where(~seen | (x != x), byte, d)
        )
    return x + found * 2.0**-8


def _bytes(row: torch.Tensor) -> torch.Tensor:
    return written(row, torch.float32)


EVERY = RowFormat(
    name="every", encode=_bytes, decode=_every_operation, row_bytes=lambda size: 4 * size
)


@pytest.fixture(scope="module", autouse=True)
def formats() -> Iterator[None]:
    """Make the unseen format known, and that of every operation, whose zeros aren't zeros."""
    from polyattn.registry import row_formats as known

    with registered():
        known._registered["every"] = EVERY
        yield
        known._registered.pop("every")


def every_isa(spec: LayerSpec, form: CacheFormat) -> Iterator[tuple[str, NativeAttention]]:
    for isa in ISAS:
        backend = NativeAttention(spec, form, CPU)
        backend.by = isa
        yield isa, backend


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def step(spec: LayerSpec, queries: list[int], lens: list[int]) -> tuple[Any, ...]:
    """Return a step's frame, its batch and the cache, whose unused bytes are 255."""
    chance = torch.Generator().manual_seed(len(lens))
    table = torch.randperm(3 * len(lens), generator=chance).int().view(len(lens), 3)
    cache = KVCache.allocate(format_of(spec, CPU, "NHD", 32), 3 * len(lens))
    params = LayerParams(k_scale=0.5, v_scale=1.5)
    formats = cache.format.rows or (None, None)
    for stored, format, size, scale in (
        (cache.key, formats[0], spec.head_size, 0.5), (cache.value, formats[1], spec.v_head_size, 1.5)
    ):  # fmt: skip
        stored.view(torch.uint8).fill_(255)
        for pages, count in zip(table.tolist(), lens, strict=True):
            for at in range(count):
                new = torch.randn(1, spec.num_kv_heads, size, generator=chance) * 2.0 ** -(at % 4)
                turns = (0.5, 1.0, -1.0, 0.0)[at % 4]  # where a comparison turns, as it is stored
                new[..., at % size] = scale * turns
                new = new if stored.dtype.itemsize == 1 else new.to(stored.dtype)
                stored[pages[at // 32], at % 32] = quantize(new, stored.dtype, scale, format)[0]
    query = torch.randn(sum(queries), spec.num_heads, spec.head_size, generator=chance)
    query = query.to(torch.bfloat16 if spec.dtype == "bfloat16" else torch.float32)
    out = query.new_empty(len(query), spec.num_heads, spec.v_head_size)
    frame = Frame(query, None, None, cache, params, out, torch.empty(out.shape[:2]))
    return frame, Batch.from_lens(queries, lens, table, 32), cache


LAYERS = [
    ("int4", 128, 96), ("nvfp4", 144, 80), ("mxfp4/kivi4", 96, 160), ("turboquant4", 64, 256),
    ("kivi4/int4", 160, 32), ("int8_rows/e4m3_rows", 80, 72), ("e4m3_rows/int8_rows", 128, 64),
    ("kivi2/logs6", 64, 48), ("logs6", 96, 32), ("every", 24, 40),
    ("int4/every", 64, 40),  # the registers are the values' alone
    ("int8_rows/e4m3_rows", 32, 1024),  # a row's room is the values': more than scratch has to spare
    ("int8", 72, 40), ("int8", 7, 5),  # rows whose scale is the cache's
    ("nvfp4", 16, 16),  # weights as integers, which AVX-512 has more of than a row has numbers
]  # fmt: skip


@pytest.mark.parametrize(
    "heads",
    [(6, 2), *(pytest.param(n, marks=pytest.mark.slow) for n in ((2, 2), (16, 2), (11, 1)))],
)
@pytest.mark.parametrize("name, size, v_size", LAYERS)
def test_rows_are_read_as_decoded(
    name: str, size: int, v_size: int, heads: tuple[int, int]
) -> None:
    """Decodes, drafts and prefills: each number of rows that a kernel takes, in each instruction set."""
    for dtype in ("float32", "bfloat16"):
        spec = LayerSpec(
            num_heads=heads[0], num_kv_heads=heads[1], head_size=size, v_head_size=v_size, dtype=dtype,
            kv_cache_dtype=name, needs_lse=True,
        )  # fmt: skip
        frame, batch, cache = step(spec, [1, 2, 30, 1], [65, 3, 40, 1])
        wanted, lse = reference.forward(spec, frame.query, None, None, cache, batch, frame.params)
        tolerance = tolerance_of(spec)
        for isa, backend in every_isa(spec, cache.format):
            backend.run(backend.plan(batch), frame)
            assert output_error(frame.out, wanted) <= tolerance.output, isa
            assert lse_error(frame.lse, lse) <= tolerance.lse, isa


@pytest.mark.skipif(
    (platform.machine(), platform.libc_ver()[0]) != ("x86_64", "glibc"), reason="x86's flags"
)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("size", [32, 64, 96])
def test_what_ends_a_row_is_no_subnormal_number(size: int) -> None:
    """As scales of no group were, of fewer groups than a vector's: Intel multiplies these slowly."""
    spec = LayerSpec(num_heads=4, num_kv_heads=1, head_size=size, kv_cache_dtype="mxfp4")
    frame, batch, cache = step(spec, [1], [65])
    libm, state = ctypes.CDLL("libm.so.6"), (ctypes.c_uint32 * 8)()
    for isa, backend in every_isa(spec, cache.format):
        plan = backend.plan(batch)
        libm.fegetenv(state)
        state[7] &= ~2  # MXCSR: that an operand was subnormal
        libm.fesetenv(state)
        backend.run(plan, frame)
        libm.fegetenv(state)
        assert not state[7] & 2, isa


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name, dtype, size, v_size",
    [
        ("turboquant4", "float32", 64, 256),
        ("int8_rows", "float32", 16, 16),
        ("auto", "bfloat16", 16, 16),
    ],
)
def test_an_item_of_many_heads_has_room(name: str, dtype: str, size: int, v_size: int) -> None:
    """Sixteen KV heads of sixteen rows are an item: no other path has as large a scratch."""
    spec = LayerSpec(
        num_heads=256, num_kv_heads=16, head_size=size, v_head_size=v_size, kv_cache_dtype=name,
        dtype=dtype,
    )  # fmt: skip
    frame, batch, cache = step(spec, [1, 1], [65, 65])
    wanted, _ = reference.forward(spec, frame.query, None, None, cache, batch, frame.params)
    for isa, backend in every_isa(spec, cache.format):
        backend.run(backend.plan(batch), frame)
        assert output_error(frame.out, wanted) <= tolerance_of(spec).output, isa


@pytest.mark.parametrize("hard", ["sink", "outliers", "NaN"])
def test_integers_of_8_bits_lose_nothing_but_the_outputs_rounding(hard: str) -> None:
    """Beside float64: a sink whose value is small, outliers, and NaN in one head's values."""
    spec = LayerSpec(
        num_heads=8, num_kv_heads=2, head_size=80, dtype="bfloat16", kv_cache_dtype="int8_rows"
    )
    chance = torch.Generator().manual_seed(1)
    key, value = torch.randn(2, 96, 2, 80, generator=chance)
    query = torch.randn(1, 8, 80, generator=chance)
    if hard == "sink":
        key[0], value[0] = 3 * query.view(2, 4, 80).mean(1), value[0] * 1e-3
    if hard == "outliers":
        query[..., 7], key[..., 9] = query[..., 7] * 50, key[..., 9] * 30
    if hard == "NaN":
        value[5, 1, 3] = math.nan
    query = query.bfloat16()
    cache = KVCache.allocate(format_of(spec, CPU, "NHD", 32), 3)
    assert cache.format.rows is not None
    read = []
    for stored, new, format in zip(
        (cache.key, cache.value), (key, value), cache.format.rows, strict=True
    ):
        stored.copy_(quantize(new, torch.uint8, 1.0, format).view(stored.shape))
        read.append(decoded(stored.flatten(0, 1), format, 80).double())
    scores = torch.einsum("hgd,nhd->hgn", query.double().view(2, 4, 80), read[0]) * spec.scale
    wanted = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), read[1]).view(1, 8, 80)
    batch = Batch.from_lens([1], [96], torch.arange(3).int().view(1, 3), 32)
    for isa, backend in every_isa(spec, cache.format):
        out = torch.empty_like(query)
        backend.run(backend.plan(batch), Frame(query, None, None, cache, LayerParams(), out, None))
        assert torch.equal(out.isnan(), wanted.isnan()), isa
        exact, found = wanted[:, :4], out[:, :4].double()
        rounding = (exact.bfloat16().double() - exact).norm()
        assert (found - exact).norm() <= 1.1 * rounding, isa


@pytest.mark.parametrize("name", ["int8_rows", "e4m3_rows", "int4", "every"])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_a_rows_nan_stays_its_own(name: str, size: int) -> None:
    """Values of whole vectors, behind which the next row's sums lie: a weight of NaN touches none."""
    spec = LayerSpec(
        num_heads=6,
        num_kv_heads=2,
        head_size=64,
        v_head_size=size,
        dtype="float32",
        kv_cache_dtype=name,
    )
    frame, batch, cache = step(spec, [1, 2], [40, 70])
    for isa, backend in every_isa(spec, cache.format):
        plan = backend.plan(batch)
        backend.run(plan, frame)
        wanted = frame.out.clone()
        for head in range(6):
            query = frame.query.clone()
            query[:, head, 0] = math.nan
            backend.run(plan, frame.but(query=query))
            assert frame.out[:, head].isnan().all(), isa
            others = [other for other in range(6) if other != head]
            assert torch.equal(frame.out[:, others], wanted[:, others]), isa


@pytest.mark.skipif(sys.platform != "linux", reason="pages that nobody may touch are Linux's")
@pytest.mark.parametrize("name, size, v_size", LAYERS)
def test_nothing_is_read_or_written_behind_an_end(name: str, size: int, v_size: int) -> None:
    """Each tensor ends where memory does, and the last block's last row is a sequence's."""
    for dtype in ("float32", "bfloat16"):
        spec = LayerSpec(
            num_heads=6, num_kv_heads=2, head_size=size, v_head_size=v_size, dtype=dtype,
            kv_cache_dtype=name, needs_lse=True,
        )  # fmt: skip
        frame, batch, cache = step(spec, [1, 2], [96, 96])
        inputs = {each: at_an_end(getattr(frame, each)) for each in ("query", "out", "lse")}
        held = KVCache(at_an_end(cache.key), at_an_end(cache.value), cache.format)
        assert batch.block_table is not None
        batch.block_table = at_an_end(batch.block_table)
        for isa, backend in every_isa(spec, cache.format):
            backend.run(backend.plan(batch), frame)
            backend.run(backend.plan(batch), frame.but(cache=held, **inputs))
            assert torch.equal(inputs["out"], frame.out), isa
            assert torch.equal(inputs["lse"], frame.lse), isa


def test_all_formats_are_claimed_but_those_without_steps() -> None:
    assert not any(rows_problem(each) for each in row_formats().values())
    assert {n for n, each in row_formats().items() if latent_problem(each)} == {
        "logs6",
        "turboquant4",
    }
    odd = RowFormat(
        name="odd", encode=_bytes, decode=lambda row, d, size: row[row[d]] * 1.0,
        row_bytes=lambda size: 4 * size,
    )  # fmt: skip
    assert "a byte at a place that another byte says, which the native kernels" in str(
        rows_problem(odd)
    )
    spec = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, kv_cache_dtype="int4")
    backend = polyattn.select(spec, "cpu").backend("decode")
    assert backend is not None and backend.name == "NATIVE_ATTN"


@pytest.mark.parametrize("name", [*BY_HAND, "kivi2", "fp8_ds_mla", "fp8_ds_v4"])
def test_rows_are_written_as_torch_writes_them(name: str) -> None:
    """Strided rows over a scale, in no order; a slot of -1 is skipped, and nothing else is touched."""
    format = row_formats()[name]
    size = 128 if format.row_bytes(128) else sizes_of(format)[0]
    chance = torch.Generator().manual_seed(5)
    new = torch.randn(40, 6, size, generator=chance).bfloat16()[:, 1:3]
    new[3], new[4], new[5] = 0.0, new[4] * 1e30, new[5] * 1e-20
    slots = torch.randperm(64, generator=chance)[:40]
    slots[7] = -1
    cache = torch.full((4, 16, 2, format.row_bytes(size)), 0x5A, dtype=torch.uint8)
    wanted, kept = cache.clone(), slots >= 0
    wanted.view(64, 2, -1)[slots[kept]] = encoded(new[kept].float() / torch.tensor(0.3), format)
    for isa in ISAS:
        found = torch.full_like(cache, 0x5A)
        store([Part(new, found, 0.3, rows=writer(format, size).address)], slots, by=isa)
        assert torch.equal(found, wanted), isa


@pytest.mark.parametrize("name", [*BY_HAND, "kivi2", "fp8_ds_mla"])
def test_thousands_of_rows_have_torchs_bytes(name: str) -> None:
    """What rounds another way by one place of a float32 shows in one row of 20,000."""
    format = row_formats()[name]
    size = 64 if format.row_bytes(64) else sizes_of(format)[0]
    count = 100_000 if size == 64 else 10_000
    new = torch.randn(count, 1, size, generator=torch.Generator().manual_seed(6)).bfloat16()
    wanted = encoded(new.float(), format)
    stored = torch.zeros(count // 16, 16, 1, format.row_bytes(size), dtype=torch.uint8)
    for isa in ISAS:
        store(
            [Part(new, stored, 1.0, rows=writer(format, size).address)], torch.arange(count), by=isa
        )
        assert torch.equal(stored.view(count, 1, -1), wanted), isa
