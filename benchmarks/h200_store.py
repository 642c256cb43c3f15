"""TRITON_STORE on one GPU: fused QKV, rotated and stored, beside its bytes and beside storing alone.

    python benchmarks/h200_store.py [--out FILE.json] [--seconds 90] [--tokens 8192]

Device times with a cold L2 (see `timing.py`), median of twenty. The bytes: those that the call must
read (fused QKV, cosines and sines) and write (queries, pages), moved by torch's `copy_`. Storing
alone: the same tokens' keys and values, already rotated; it moves no queries. Storing as many bytes:
the same kernel over more heads, as many bytes in and out as rotating moves. Bars: 1.15 times the bytes
at 8,192 tokens over an fp8 cache, 1.02 times storing for one token of each sequence. Each result is
compared with the float64 formulas. Other tiles and warps than the shipped ones are timed last. Under
TRITON_INTERPRET=1, for tiny sizes, everything runs but the clock.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import polyattn_triton.kernels.rotated_store as rotated_store
import torch
import triton
from polyattn import Batch, Device, LayerSpec
from polyattn.families.attention.rope import rotate
from polyattn.families.attention.rotation import rotation_of
from polyattn.kernel import CacheFormat, KVCache, LayerParams, NewTokens, Rotation, StorePlan
from polyattn.spec.rope import RopeSpec
from polyattn_triton.store import TritonStore
from rows import Rows
from timing import graph_us, kernel_us

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
STORED = "int8" if INTERPRETED else "fp8_e4m3"  # the interpreter knows no fp8
BLOCK = 16
SPEC = LayerSpec(
    num_heads=32, num_kv_heads=8, head_size=128, dtype=str(DTYPE).removeprefix("torch."),
    rope=RopeSpec(
        rotary_size=128, base=500000.0, scaling="llama3", factor=8.0, original_length=8192,
        low_freq_factor=1.0, high_freq_factor=4.0,
    ),
)  # fmt: skip
PAIRINGS = ("neox", "gptj")
TILES = (1024, 2048, 4096)
"""Elements of a tile of query heads, to try."""
RIGHT = {"fp8_e4m3": 0.07, "int8": 0.02, "auto": 5e-3}
"""How far a result may be from float64, of its largest element, for each cache."""


@dataclass
class Step:
    """New tokens of a step, and all that a store is called with."""

    store: TritonStore
    new: NewTokens
    cache: KVCache
    plan: StorePlan
    rotation: Rotation
    positions: torch.Tensor
    params: LayerParams

    @classmethod
    def of(cls, queries: list[int], context: int, pairing: str, stored: str) -> Step:
        """Return a step of sequences with `context` cached tokens each."""
        rope = {f: getattr(SPEC.rope, f) for f in RopeSpec.__dataclass_fields__}
        spec = SPEC.replace(
            rope=RopeSpec(**rope | {"pairing": pairing}), kv_cache_dtype=stored
        )  # fmt: skip
        form = CacheFormat(
            block_size=BLOCK, num_kv_heads=8, head_size=128, v_head_size=128,
            dtype=spec.stored_dtype, layout="NHD",
        )  # fmt: skip
        tokens, blocks = sum(queries), sum(queries) // BLOCK + 2
        cache = KVCache.allocate(form, blocks, DEVICE)
        fused = torch.randn(tokens, 48 * 128, device=DEVICE).to(DTYPE)
        parts = fused.split((4096, 1024, 1024), dim=1)
        query, key, value = (part.unflatten(1, (-1, 128)) for part in parts)
        slots = torch.randperm(blocks * BLOCK, device=DEVICE)[:tokens]
        starts = [0, *accumulate(queries)]
        batch = Batch(starts, [context + n for n in queries], slot_mapping=slots)
        rotation = rotation_of(spec, batch)
        assert rotation is not None
        store = TritonStore(spec, form, Device("cuda", "sm_90", torch_device=str(DEVICE)))
        scale = 1.0 if stored == "auto" else 0.05
        return cls(
            store, NewTokens(query, key, value), cache, store.plan(slots), rotation,
            batch.token_positions, LayerParams(k_scale=scale, v_scale=scale),
        )  # fmt: skip

    def rotate_and_store(self) -> torch.Tensor:
        """What is measured."""
        run = self.store.run_rotated
        return run(self.plan, self.rotation, self.new, self.cache, self.params, False)[0]

    def store_alone(self) -> None:
        """Keys and values as they are."""
        key, value = self.new.key, self.new.value
        assert key is not None and value is not None
        self.store.run(self.plan, key, value, self.cache, self.params)

    def store_as_many_bytes(self) -> Callable[[], None]:
        """Storing alone, of as many bytes as rotating moves: in the step's dtype, of more heads."""
        size, item = self.new.query.shape[2], self.new.query.element_size()
        heads = round(self.moved_bytes() / (4 * item * size * len(self.new.query)))
        form = CacheFormat(
            block_size=BLOCK, num_kv_heads=heads, head_size=size, v_head_size=size,
            dtype=str(DTYPE).removeprefix("torch."), layout="NHD",
        )  # fmt: skip
        spec = SPEC.replace(num_heads=heads, num_kv_heads=heads)
        store = TritonStore(spec, form, Device("cuda", "sm_90", torch_device=str(DEVICE)))
        cache = KVCache.allocate(form, len(self.cache.key), DEVICE)
        fused = torch.randn(len(self.new.query), 2 * heads * size, device=DEVICE).to(DTYPE)
        key, value = (x.unflatten(1, (heads, size)) for x in fused.chunk(2, dim=1))
        return lambda: store.run(self.plan, key, value, cache, LayerParams())

    def moved_bytes(self) -> int:
        """Bytes that the call must read and write."""
        new, item = self.new, self.cache.key.element_size()
        assert new.key is not None and new.value is not None
        given = sum(t.numel() * t.element_size() for t in (new.query, new.key, new.value))
        pages = (new.key.numel() + new.value.numel()) * item
        table = self.rotation.turns.numel() * self.rotation.turns.element_size()
        return given + table + new.query.numel() * new.query.element_size() + pages

    def error(self) -> float:
        """Return how far queries and stored keys are from the formulas, of their largest element.

        Half a step of the dtype's is in it.
        """
        found, rope = self.rotate_and_store(), self.store.spec.rope
        assert rope is not None and self.new.key is not None
        slots, size = self.plan.slots, self.cache.block_size
        keys = self.cache.key[slots // size, slots % size].double().cpu() * self.params.k_scale
        worst = 0.0
        for got, given in ((found.double().cpu(), self.new.query), (keys, self.new.key)):
            exact = rotate(given.cpu(), self.positions.cpu(), rope)
            worst = max(worst, float((got - exact).abs().max() / exact.abs().max()))
        return worst


def time(call: Callable[[], object]) -> float | None:
    """Return device microseconds, None where there is no clock."""
    if INTERPRETED:
        call()
        return None
    return kernel_us(call)


def copy_us(count: int) -> float | None:
    """Return the time of moving `count` bytes, read and written together."""
    source = torch.zeros(count // 2, dtype=torch.uint8, device=DEVICE)
    goal = torch.empty_like(source)
    return time(lambda: goal.copy_(source))


def prefill(tokens: int, pairing: str, stored: str) -> dict[str, Any]:
    """Measure a prompt against the time to move its bytes."""
    step = Step.of([tokens], 0, pairing, stored)
    error = step.error()
    us, floor = time(step.rotate_and_store), copy_us(step.moved_bytes())
    ratio = None if us is None or floor is None else us / floor
    return {
        "tokens": tokens, "pairing": pairing, "cache": stored, "us": us, "copy_us": floor,
        "bytes": step.moved_bytes(), "ratio": ratio, "bar": 1.15, "error": error,
        "right": error < RIGHT[stored],
    }  # fmt: skip


def decode(rows: int, pairing: str, stored: str) -> dict[str, Any]:
    """Measure one token of each sequence against storing, launched and replayed in a graph."""
    step = Step.of([1] * rows, 5000, pairing, stored)
    as_many = step.store_as_many_bytes()
    error, us, alone = step.error(), time(step.rotate_and_store), time(step.store_alone)
    equal = time(as_many)
    found = {
        "rows": rows, "pairing": pairing, "cache": stored, "us": us, "store_us": alone,
        "as_many_bytes_us": equal, "ratio": None if us is None or alone is None else us / alone,
        "ratio_as_many": None if us is None or equal is None else us / equal, "bar": 1.02,
        "error": error, "right": error < RIGHT[stored],
    }  # fmt: skip
    if not INTERPRETED:
        found["graph_us"] = graph_us(step.rotate_and_store)
        found["store_graph_us"] = graph_us(step.store_alone)
        found["as_many_graph_us"] = graph_us(as_many)
    return found


def other_tiles(
    measure: Callable[[int, str, str], dict[str, Any]],
    count: int,
    stored: str,
    tile: int,
    warps: int,
) -> dict[str, Any]:
    """Measure with another tile of query heads and other warps than are shipped."""
    shipped, launch = rotated_store.TILE, rotated_store._rotate_store

    def launched(*words: Any) -> None:
        launch(*words[:-1], {"num_warps": warps})

    rotated_store.TILE = tile
    rotated_store._rotate_store = launched  # type: ignore[assignment]
    try:
        return measure(count, "neox", stored)
    finally:
        rotated_store.TILE, rotated_store._rotate_store = shipped, launch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--seconds", type=float, default=90.0)
    options = parser.parse_args()
    rows, tokens = Rows(options.seconds), options.tokens
    for stored in (STORED, "auto"):
        for pairing in PAIRINGS:
            rows.add(
                f"{tokens} tokens, {pairing}, {stored}",
                lambda p=pairing, s=stored: prefill(tokens, p, s),
            )
            for count in map(int, options.batches.split(",")):
                rows.add(
                    f"{count} x 1 token, {pairing}, {stored}",
                    lambda n=count, p=pairing, s=stored: decode(n, p, s),
                )
    most = max(map(int, options.batches.split(",")))
    steps = [(f"{most} x 1 token", decode, most)]
    steps += [(f"{n} tokens", prefill, n) for n in (tokens // 16, tokens // 8, tokens // 4, tokens)]
    for tile, warps in product(TILES, (4, 8)):
        for what, measure, count in steps:
            rows.add(
                f"{what}, {STORED}, tile {tile}, {warps} warps",
                lambda m=measure, n=count, t=tile, w=warps: other_tiles(m, n, STORED, t, w),
            )
    machine = "interpreter" if INTERPRETED else torch.cuda.get_device_name()
    report = {"machine": machine, "torch": torch.__version__, "triton": triton.__version__}
    rows.finish(options.out, report)


if __name__ == "__main__":
    main()
