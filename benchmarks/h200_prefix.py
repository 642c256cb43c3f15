"""Decodes that share leading blocks on one GPU: read once for all rows, beside every row by itself.

    python benchmarks/h200_prefix.py [--out FILE.json] [--device cpu] [--small] [--sweep]

Bars: 64 sequences over 32,768 shared tokens with 512 of their own in at most 200 us; two levels
(8 groups of 8 over 16k + 8k + 512) three times as fast as plain; nothing shared at most 1.01 times
plain, and 20 us of host for 256 sequences of 2,048 blocks; n = 4 to 64 over a 4k prompt as a curve.
Device times with a cold L2 (see `timing.py`), and in a replayed graph. Three rows of one KV head's
group are checked against float64 on the device, and all rows against plain. Beside it FlashInfer's
own `MultiLevelCascadeAttentionWrapper`, where it imports. `--small` divides lengths by 64.

Each way is forced: TRITON_ATTN's own launch, calls and merges, plain; and the group's own choice is
named. `--sweep` times heights and tiles of the own launch instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from polyattn import Attention, Batch, LayerGroup, LayerSpec, select
from polyattn.families.attention import sharing
from polyattn.families.attention.prefix import PrefixDecode
from polyattn.runtime.step.shared_prefix import shared_prefixes
from polyattn.workload.tolerance import tolerance_of
from timing import graph_us, kernel_us

HEADS, KV_HEADS, SIZE, PAGE = 32, 8, 128, 16
LLAMA = LayerSpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, block_size=PAGE)
BACKENDS = ("TRITON_ATTN", "FLASHINFER", "FLASH_ATTN_V3")
K = 1024


@dataclass(frozen=True)
class Shape:
    """`levels`: (rows that share a run, its tokens), outermost first; `own` tokens of each row."""

    name: str
    rows: int
    levels: tuple[tuple[int, int], ...]
    own: int

    def table(self) -> np.ndarray[Any, Any]:
        """Return the block table int32 (rows, blocks), each distinct block at a random place."""
        columns, fresh = [], 0
        for group, tokens in (*self.levels, (1, self.own)):
            count, groups = -(-tokens // PAGE), -(-self.rows // group)
            blocks = np.arange(fresh, fresh + groups * count).reshape(groups, count)
            columns.append(np.repeat(blocks, group, 0)[: self.rows])
            fresh += groups * count
        order = np.random.default_rng(0).permutation(fresh)
        return order[np.concatenate(columns, 1)].astype(np.int32)

    @property
    def length(self) -> int:
        """Tokens of each row."""
        return sum(tokens for _, tokens in self.levels) + self.own

    def divided(self, by: int) -> Shape:
        """Return the shape with shorter runs, whole blocks each."""
        levels = tuple((rows, max(PAGE, tokens // by)) for rows, tokens in self.levels)
        return Shape(self.name, self.rows, levels, max(PAGE, self.own // by))


ONE = Shape("64 over 32k + 512", 64, ((64, 32 * K),), 512)
TWO = Shape("8 x 8 over 16k + 8k + 512", 64, ((64, 16 * K), (8, 8 * K)), 512)
NONE = Shape("64 x 4k, nothing shared", 64, (), 4 * K)
FOUR = Shape(
    "4 levels, 64 over 8k + 4k + 2k + 1k", 64, ((64, 8 * K), (16, 4 * K), (4, 2 * K), (2, K)), 128
)
CURVE = [Shape(f"{n} over 4k + 128", n, ((n, 4 * K),), 128) for n in (4, 8, 16, 32, 64)]


class Run:
    """A shape on one backend: `shared` has its block table on the host too, `plain` hasn't."""

    def __init__(self, spec: LayerSpec, shape: Shape, name: str, device: torch.device):
        torch.manual_seed(0)
        self.spec, self.shape = spec, shape
        self.group = LayerGroup(select(spec, device, backend=name))
        table = shape.table()
        form = self.group.cache_format
        assert form is not None and form.block_size == PAGE
        self.cache = self.group.allocate_cache(int(table.max()) + 1)
        for stored in (self.cache.key, self.cache.value):
            for piece in stored.split(1 << 14):
                piece.copy_(torch.randn(piece.shape, device=device).to(piece.dtype))
        on_device = torch.from_numpy(table).to(device)
        starts, lens = list(range(shape.rows + 1)), [shape.length] * shape.rows
        self.shared = Batch(starts, lens, on_device, host_block_table=table, device=device)
        self.plain = Batch(starts, lens, on_device, device=device)
        if device.type == "cpu":  # there the table is always on the host
            self.plain.__dict__["host_block_table"] = None
        self.layer = Attention(self.group, checks=False)
        dtype = getattr(torch, spec.dtype)
        self.query = torch.randn(shape.rows, HEADS, SIZE, device=device).to(dtype)
        self.table = on_device

    def call(self, batch: Batch) -> tuple[Callable[[], None], torch.Tensor, Any]:
        """Return what runs a batch, where its output goes, and its plan."""
        plan, out = self.group.plan(batch), torch.empty_like(self.query)
        return lambda: self._attend(plan, out), out, plan

    def _attend(self, plan: Any, out: torch.Tensor) -> None:
        self.layer(self.query, None, None, self.cache, plan, out=out)

    def error(self, out: torch.Tensor) -> float:
        """Return the worst relative error of three rows, one KV head's group, against float64."""
        each, worst = HEADS // KV_HEADS, 0.0
        for row, head in ((0, 0), (self.shape.rows // 2, 3), (self.shape.rows - 1, KV_HEADS - 1)):
            blocks, heads = self.table[row].long(), slice(head * each, (head + 1) * each)
            keys, values = (
                stored[blocks][:, :, head].flatten(0, 1)[: self.shape.length].double()
                for stored in (self.cache.key, self.cache.value)
            )
            scores = self.query[row, heads].double() @ keys.T * self.spec.scale
            wanted = torch.softmax(scores, 1) @ values
            got = out[row, heads].double()
            worst = max(worst, float((got - wanted).norm() / wanted.norm()))
        return worst


def timed(call: Callable[[], None], device: torch.device) -> float:
    """Return the median microseconds of a call."""
    if device.type == "cuda":
        return kernel_us(call, repeats=10)
    return statistics.median(host_us(call, 1) for _ in range(3))


def replayed(call: Callable[[], None], device: torch.device) -> float | None:
    """Return the median microseconds of a call in a replayed graph: without the host's launches."""
    return graph_us(call, inner=4) if device.type == "cuda" else None


def host_us(call: Callable[[], object], repeats: int = 30) -> float:
    """Return the least microseconds of the host."""
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best * 1e6


WAYS = ("own launch", "calls")


@contextmanager
def forced(group: LayerGroup, way: str) -> Iterator[bool]:
    """Let a group share by this way alone, whatever is predicted; yields whether it can."""
    found: Any = group.planner.sharing  # type: ignore[attr-defined]
    before = found.native, found.calls
    costs = dict(sharing.CALL_US), dict(sharing.LAUNCH_US)
    kinds = dict.fromkeys(("cuda", "cpu"), 0.0)
    try:
        sharing.CALL_US.update(kinds), sharing.LAUNCH_US.update(kinds)
        if way == "own launch":
            found.calls = None
        else:
            found.native, found.calls = None, found.calls or PrefixDecode.of(group)
        yield (found.native or found.calls) is not None
    finally:
        found.native, found.calls = before
        for kept, cost in zip((sharing.CALL_US, sharing.LAUNCH_US), costs, strict=True):
            kept.clear(), kept.update(cost)


def compared(shape: Shape, name: str, device: torch.device, **changes: Any) -> dict[str, Any]:
    """Time a shape by each way and plain; check all of them."""
    spec = LLAMA.replace(dtype="float32" if device.type == "cpu" else "bfloat16", **changes)
    run = Run(spec, shape, name, device)
    chosen = run.group.plan(run.shared).calls[0]
    ways = {"plain": (run.plain, run.call(run.plain)), "chosen": (run.shared, run.call(run.shared))}
    row: dict[str, Any] = {
        "shape": shape.name, "backend": name, **changes, "chosen": chosen.name,
        "saved_mb": chosen.saved_bytes / 1e6, "levels": len(shape.levels),
    }  # fmt: skip
    for way in WAYS if shape.levels else ():
        with forced(run.group, way) as able:
            if able:
                ways[way] = (run.shared, run.call(run.shared))
    limit, wanted = tolerance_of(spec).output, None
    for way, (batch, (call, out, _)) in ways.items():
        call()
        wanted = out.clone() if wanted is None else wanted
        error = run.error(out)
        apart = float((out - wanted).float().norm() / wanted.float().norm())
        if not (error <= limit and apart <= limit):
            raise AssertionError(f"{way} is wrong: {error:.2g} of float64, {apart:.2g} of plain")
        row |= {f"{way} us": timed(call, device), f"{way} in a graph us": replayed(call, device)}
        row[f"{way} error"] = error
        if way in WAYS:
            with forced(run.group, way):
                row[f"{way} plan us"] = host_us(lambda b=batch: run.group.plan(b))
        else:
            row[f"{way} plan us"] = host_us(lambda b=batch: run.group.plan(b))
    return row


TILES = (
    (16, 64, 4, 3, 3), (32, 64, 4, 3, 2), (64, 64, 4, 3, 2), (64, 64, 8, 3, 1), (64, 128, 4, 3, 1),
    (64, 128, 8, 3, 1), (128, 64, 8, 3, 1), (128, 128, 8, 3, 1),
)  # fmt: skip
"""Rows, keys, warps, stages, programs on one multiprocessor."""
COSTS = (
    (10, 20, 20),
    (10, 20, 40),
    (10, 20, 80),
    (15, 20, 40),
    (20, 20, 40),
    (20, 20, 80),
    (7, 20, 20),
)
"""Of a key tile of the lower and the higher tile of rows, and of a tile beside: what the cuts go by."""


def swept(shape: Shape, device: torch.device, **changes: Any) -> dict[str, Any]:
    """Time the own launch in some tiles, each cut by some costs."""
    from polyattn_triton import prefix
    from polyattn_triton.configs import PrefixConfig

    spec = LLAMA.replace(dtype="bfloat16", **changes)
    run = Run(spec, shape, "TRITON_ATTN", device)
    before, times = prefix.fastest, {}
    try:
        for tile in TILES:
            for costs in COSTS:
                config = PrefixConfig(*tile, *costs)
                prefix.fastest = lambda *_, c=config: c
                label = f"{tile} {costs}"
                try:
                    with forced(run.group, "own launch"):
                        call, out, _ = run.call(run.shared)
                    call()
                    times[label] = timed(call, device) if run.error(out) < 0.02 else float("nan")
                except Exception as problem:
                    print(label, type(problem).__name__, str(problem)[:200], flush=True)
                    break
    finally:
        prefix.fastest = before
    best = ", ".join(f"{label} {us:.1f}" for label, us in sorted(times.items(), key=lambda x: x[1]))
    return {"shape": shape.name, **changes, "cannot": best, "swept": times}


def cascade(shape: Shape, device: torch.device) -> dict[str, Any]:
    """FlashInfer's wrapper of several levels, by itself."""
    import flashinfer

    table = torch.from_numpy(shape.table()).to(device)
    cache = torch.randn(int(table.max()) + 1, 2, PAGE, KV_HEADS, SIZE, device=device).bfloat16()
    query = torch.randn(shape.rows, HEADS, SIZE, device=device).bfloat16()
    queries, pages, indices, last, at = [], [], [], [], 0
    for group, tokens in (*shape.levels, (1, shape.own)):
        count, firsts = tokens // PAGE, range(0, shape.rows, group)
        queries.append(torch.tensor([*firsts, shape.rows], dtype=torch.int32, device=device))
        pages.append(torch.arange(len(firsts) + 1, dtype=torch.int32, device=device) * count)
        indices.append(table[list(firsts), at : at + count].flatten().contiguous())
        last.append(torch.full((len(firsts),), PAGE, dtype=torch.int32, device=device))
        at += count
    buffer = torch.zeros(256 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(queries), buffer, "NHD")
    wrapper.plan(
        queries, pages, indices, last, HEADS, KV_HEADS, SIZE, PAGE, causal=False,
        q_data_type=torch.bfloat16,
    )  # fmt: skip
    name = "FlashInfer's cascade wrapper"
    us = timed(lambda: wrapper.run(query, cache), device)
    return {"shape": shape.name, "backend": name, "shared_us": us}


def host_of_none(rows: int = 256, blocks: int = 2048) -> dict[str, Any]:
    """What looking for shared blocks costs where there are none."""
    table = np.random.default_rng(0).permutation(rows * blocks).astype(np.int32)
    table, lens = table.reshape(rows, blocks), [blocks * PAGE] * rows
    us = host_us(lambda: shared_prefixes(table, lens, PAGE), 200)
    return {"shape": f"looking over {rows} x {blocks} blocks", "backend": "host", "look_us": us}


Row = tuple[str, Callable[[], dict[str, Any]]]


def sections(device: torch.device, divisor: int, sweep: bool) -> list[Row]:
    """Every row of the table, the bars' own first."""
    names = BACKENDS if device.type == "cuda" else ("NATIVE_ATTN", "TORCH_SDPA")
    shapes = {shape: shape.divided(divisor) for shape in (ONE, TWO, FOUR, NONE, *CURVE)}
    if sweep:
        eight = {"kv_cache_dtype": "fp8_e4m3"}
        found: list[Row] = [
            (f"{s.name}, swept", lambda s=s: swept(shapes[s], device))
            for s in (ONE, TWO, FOUR, *CURVE)
        ]
        return [*found, (f"{ONE.name}, e4m3", lambda: swept(shapes[ONE], device, **eight))]
    rows: list[Row] = [("host", host_of_none)]

    def add(shape: Shape, name: str, **changes: Any) -> None:
        rows.append(
            (f"{shape.name}, {name}", lambda: compared(shapes[shape], name, device, **changes))
        )

    for shape in (ONE, TWO, NONE, *CURVE, FOUR):
        add(shape, names[0])
    add(ONE, names[0], kv_cache_dtype="fp8_e4m3")
    if device.type == "cuda":
        rows += [(f"{s.name}, cascade", lambda s=s: cascade(shapes[s], device)) for s in (ONE, TWO)]
    for shape in (ONE, TWO):
        for name in names[1:]:
            add(shape, name)
    return rows


def line(row: dict[str, Any]) -> str:
    """Return a row of the table that is printed last."""
    if "cannot" in row or "look_us" in row:
        return f"{row['shape']:42} {row.get('cannot', '') or format(row['look_us'], '.1f') + ' us'}"
    text = f"{row['shape']:36}{row['backend']:14}{row.get('kv_cache_dtype', ''):9}"
    plain = row.get("plain us")
    if plain is None:
        return f"{text}{row['shared_us']:9.1f} us"
    for way in ("plain", "chosen", *WAYS):
        if f"{way} us" in row:
            graph = row[f"{way} in a graph us"] or 0.0
            text += (
                f" | {way} {row[f'{way} us']:.1f} us ({plain / row[f'{way} us']:.2f}x, in a graph "
                f"{graph:.1f}, plan {row[f'{way} plan us']:.0f}, error {row[f'{way} error']:.1e})"
            )
    return f"{text} | saved {row['saved_mb']:.0f} MB, chosen: {row['chosen']}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=420, help="No new row starts after these.")
    args = parser.parse_args()
    device, started = torch.device(args.device), time.perf_counter()
    rows: list[dict[str, Any]] = []
    for title, measure in sections(device, 64 if args.small else 1, args.sweep):
        if time.perf_counter() - started > args.seconds:
            rows.append({"shape": title, "cannot": "no time was left"})
            continue
        try:
            rows.append(measure())
        except Exception as problem:
            traceback.print_exc()
            text = f"{type(problem).__name__}: {problem}"
            rows.append({"shape": title, "cannot": text.splitlines()[0][:150]})
        print(f"[{time.perf_counter() - started:5.0f} s] {line(rows[-1])}", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if args.out:
            args.out.write_text(json.dumps(rows, indent=1) + "\n")
    print("\n" + "\n".join(map(line, rows)))


if __name__ == "__main__":
    main()
