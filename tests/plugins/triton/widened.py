"""Runs the copies that Hopper's own prefill gets of narrow caches, interpreted: `python widened.py`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from polyattn import Batch, Device, KVCache, LayerSpec
from polyattn.families.attention import reference
from polyattn.kernel import STORAGE_DTYPES, CacheFormat, Frame, LayerParams
from polyattn.runtime.cache.rows import decoded
from polyattn.selection.cache_format import format_of
from polyattn.spec.row_format import row_format
from polyattn.workload.compare import output_error
from polyattn_triton.attention import TritonAttention
from polyattn_triton.functions.rows import NO_ROWS, Rows
from polyattn_triton.hopper import widening
from polyattn_triton.hopper.widening import Widening
from polyattn_triton.launch import Kept

torch.set_num_threads(1)
CPU = Device("cpu", "x86_64", torch_device="cpu")
TILE = 128
"""Keys of a tile of Hopper's, which begin a sequence's copies where it has a window."""
SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float16", block_size=16)
WINDOW = {"sliding_window": 37}
STEPS = {
    "fresh": ([70, 1, 20], [70, 1, 20]),
    "chunks": ([9, 0, 64, 3, 30], [200, 40, 64, 300, 30]),
    "more queries than keys": ([20, 5], [7, 0]),
    "alone": ([33], [290]),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "e4m3": ("NHD", {"kv_cache_dtype": "fp8_e4m3"}),
    "e4m3, heads apart, window": ("HND", {"kv_cache_dtype": "fp8_e4m3", **WINDOW}),
    "e5m2, blocks of 1": ("NHD", {"kv_cache_dtype": "fp8_e5m2", "block_size": 1}),
    "e5m2, blocks of 64, window": (
        "NHD",
        {"kv_cache_dtype": "fp8_e5m2", "block_size": 64, **WINDOW},
    ),
    "int8, not causal": ("NHD", {"kv_cache_dtype": "int8", "causal": False}),
    "int8, heads apart": ("HND", {"kv_cache_dtype": "int8", "block_size": 64}),
    "nvfp4, window": ("NHD", {"kv_cache_dtype": "nvfp4", **WINDOW}),
    "nvfp4, heads apart": ("HND", {"kv_cache_dtype": "nvfp4"}),
    "mxfp4": ("NHD", {"kv_cache_dtype": "mxfp4", "dtype": "bfloat16"}),
}


def form_of(spec: LayerSpec, layout: Any = "NHD") -> CacheFormat:
    """The format of a layer's cache."""
    assert spec.block_size is not None
    return format_of(spec, CPU, layout, spec.block_size)


def filled(spec: LayerSpec, form: CacheFormat, used: torch.Tensor, blocks: int) -> KVCache:
    """A cache of which the `used` slots hold every number there is, all others NaN where there is one."""
    size, cache = form.block_size, KVCache.allocate(form, blocks)
    if form.rows is not None:
        return filled_rows(form, cache, used)
    numbers = torch.arange(-128, 128).to(torch.int8)
    if spec.stored_dtype != "int8":
        numbers = numbers.view(STORAGE_DTYPES[spec.stored_dtype])
        numbers = numbers[numbers.float().isfinite()]
    if spec.stored_dtype == "fp8_e5m2":  # of which Triton 3.6's interpreter loses subnormal ones
        numbers = numbers[(numbers.float().abs() >= 2.0**-14) | (numbers.float() == 0)]
    chance = torch.Generator().manual_seed(5)
    for stored in (cache.key, cache.value):
        stored.copy_(torch.full(stored.shape, 127 if spec.stored_dtype == "int8" else torch.nan))
        drawn = torch.randint(len(numbers), (len(used), *stored.shape[2:]), generator=chance)
        stored[used // size, used % size] = numbers[drawn]
    return cache


def filled_rows(form: CacheFormat, cache: KVCache, used: torch.Tensor) -> KVCache:
    """A cache of which the `used` slots hold every code and many scales, all others NaN."""
    assert form.rows is not None
    chance = torch.Generator().manual_seed(5)
    for stored in (cache.key, cache.value):
        stored.fill_(255)
        drawn = torch.randint(256, (len(used), *stored.shape[2:]), generator=chance)
        scales = drawn[..., form.head_size // 2 :]
        # Of mxfp4, those whose products with a query are finite; a NaN is met elsewhere.
        scales.copy_(scales % 127 if form.rows[0].name == "nvfp4" else 120 + scales % 9)
        stored[used // form.block_size, used % form.block_size] = drawn.to(torch.uint8)
    return cache


def paged(
    spec: LayerSpec, form: CacheFormat, queries: list[int], lens: list[int]
) -> tuple[Batch, KVCache]:
    """A step over pages in a random order, and its cache."""
    size = form.block_size
    width = -(-max(*queries, *lens) // size)
    order = torch.randperm(len(lens) * width + 2, generator=torch.Generator().manual_seed(7))
    table = order[: len(lens) * width].view(len(lens), width).int()
    used = torch.cat([
        table[i, torch.arange(n) // size].long() * size + torch.arange(n) % size
        for i, n in enumerate(lens)
    ])  # fmt: skip
    starts = torch.tensor([0, *queries]).cumsum(0).tolist()
    return Batch(starts, lens, table), filled(spec, form, used, len(order))


def check_copies(
    spec: LayerSpec, batch: Batch, cache: KVCache, made: Widening
) -> tuple[torch.Tensor, ...]:
    """Compare with torch's own casts; what no query sees is 0."""
    assert spec.block_size is not None and batch.block_table is not None
    size, window = spec.block_size, spec.sliding_window
    wide, rows = STORAGE_DTYPES[spec.dtype], Rows.of(cache.format, cache.alignment, spec.dtype)
    read = (NO_ROWS if rows is None else rows.constants(False))[:2]
    copied = made.copies(batch, cache.key, cache.value, wide, spec.head_size, read)
    first = 0
    for i, (query, length) in enumerate(zip(batch.query_lens, batch.lens, strict=True)):
        sees = max(length - query - window + 1, 0) if window else 0
        place = torch.arange(sees // TILE * TILE, length if query else 0)
        if window is None:
            place = torch.arange(length if query else 0)
        page = batch.block_table[i, place // size].long()
        for kept, found in zip((cache.key, cache.value), copied, strict=True):
            wanted = kept[page, place % size]
            if rows is not None:
                exact = decoded(wanted, row_format(spec.stored_dtype), spec.head_size)
                assert torch.equal(exact.to(wide).float(), exact)
                wanted = exact
            wanted = wanted.to(wide)
            wanted[place < sees] = 0
            assert torch.equal(found[first : first + len(place)], wanted)
            assert found.isfinite().all()
        if len(place):
            assert int(made.firsts[i]) == first and int(made.origins[i]) == first - int(place[0])
        first += len(place)
    assert first == made.tokens == len(copied[0])
    return copied


def attended(
    spec: LayerSpec, batch: Batch, query: torch.Tensor, given: Any, params: LayerParams, keys: Any
) -> torch.Tensor:
    """The portable prefill's output; `keys`: where sequences' packed keys begin, None: over pages."""
    cache = None if keys is not None else given
    backend = TritonAttention(spec, None if cache is None else form_of(spec), CPU)
    backend.most_few_rows = 0
    plan = backend.plan_rows(batch)
    out = torch.full(query.shape, torch.nan, dtype=query.dtype)
    lse = torch.empty(query.shape[:2])
    if cache is not None:
        backend.run(plan, Frame(query, None, None, cache, params, out, lse))
        return out
    tensors = list(plan.kept.tensors)
    tensors[5] = keys
    plan.kept = Kept(tuple(tensors))
    backend.run(plan, Frame(query, *given, None, params, out, lse))
    return out


def check(name: str) -> None:
    """Copy each step's tokens; attend to them as to the cache itself, with scales as factors."""
    layout, changes = CASES[name]
    spec = SPEC.replace(**changes)
    params = LayerParams(k_scale=0.01, v_scale=0.5)
    widening.LEAST, widening.ROWS_A_KEY, widening.OF_ROWS = -(1 << 60), 0, 0
    for step, (queries, lens) in STEPS.items():
        batch, cache = paged(spec, form_of(spec, layout), queries, lens)
        made = widening.widening(spec, batch, TILE)
        assert made is not None
        copied = check_copies(spec, batch, cache, made)
        if spec.dtype == "bfloat16":  # of which Triton 3.6's interpreter multiplies the bits
            print(f"{name}, {step}: {made.tokens} copied", flush=True)
            continue
        query = torch.randn(batch.num_tokens, 4, 64, dtype=torch.float16)
        pages = attended(spec, batch, query, cache, params, None)
        alone = Batch(batch.starts, batch.lens)
        plain = spec.replace(
            kv_cache_dtype="auto", cached=False, block_size=None, scale=spec.scale * 0.01
        )  # fmt: skip
        found = attended(plain, alone, query, copied, LayerParams(), made.origins) * 0.5
        off = output_error(found, pages)
        assert off < 2e-3, f"{name}, {step}: off by {off:.3g}"
        wanted, _ = reference.forward(spec, query, None, None, cache, batch, params)
        assert output_error(found, wanted) < 3e-3
        print(f"{name}, {step}: {made.tokens} copied, off by {off:.3g}", flush=True)


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        check(name)
