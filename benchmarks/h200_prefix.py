"""Decodes that share leading blocks on one GPU: read once for all rows, beside every row by itself.

    python benchmarks/h200_prefix.py [--out FILE.json] [--device cpu] [--small]

Bars: 64 sequences over 32,768 shared tokens with 512 of their own in at most 200 us; two levels
(8 groups of 8 over 16k + 8k + 512) three times as fast as plain; nothing shared at most 1.01 times
plain, and 20 us of host for 256 sequences of 2,048 blocks; n = 4 to 64 over a 4k prompt as a curve.
Device times with a cold L2 (see `timing.py`), and in a replayed graph. Three rows of one KV head's
group are checked against float64 on the device, and all rows against plain. Beside it FlashInfer's
own `MultiLevelCascadeAttentionWrapper`, where it imports. `--small` divides lengths by 64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from polyattn import Attention, Batch, LayerGroup, LayerSpec, select
from polyattn.checking.tolerance import tolerance_of
from polyattn.runtime.shared_prefix import shared_prefixes
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


def compared(shape: Shape, name: str, device: torch.device, **changes: Any) -> dict[str, Any]:
    """Time a shape with its blocks shared and plain; check both."""
    spec = LLAMA.replace(dtype="float32" if device.type == "cpu" else "bfloat16", **changes)
    run = Run(spec, shape, name, device)
    shared, shared_out, plan = run.call(run.shared)
    plain, plain_out, _ = run.call(run.plain)
    shared()
    plain()
    limit, error = tolerance_of(spec).output, run.error(shared_out)
    apart = float((shared_out - plain_out).float().norm() / plain_out.float().norm())
    if not (error <= limit and apart <= limit):
        raise AssertionError(f"wrong: {error:.2g} of float64, {apart:.2g} of plain")
    taken = plan.calls[0].plan
    return {
        "shape": shape.name, "backend": name, **changes, "error": error, "apart": apart,
        "levels": len(getattr(taken, "levels", ())),
        "saved_mb": getattr(taken, "saved_bytes", 0) / 1e6,
        "shared_us": timed(shared, device), "plain_us": timed(plain, device),
        "shared_graph_us": replayed(shared, device), "plain_graph_us": replayed(plain, device),
        "shared_plan_us": host_us(lambda: run.group.plan(run.shared)),
        "plain_plan_us": host_us(lambda: run.group.plan(run.plain)),
    }  # fmt: skip


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


def sections(device: torch.device, divisor: int) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """Every row of the table, the bars' own first."""
    names = BACKENDS if device.type == "cuda" else ("NATIVE_ATTN", "TORCH_SDPA")
    shapes = {shape: shape.divided(divisor) for shape in (ONE, TWO, NONE, *CURVE)}
    rows: list[tuple[str, Callable[[], dict[str, Any]]]] = [("host", host_of_none)]

    def add(shape: Shape, name: str, **changes: Any) -> None:
        rows.append(
            (f"{shape.name}, {name}", lambda: compared(shapes[shape], name, device, **changes))
        )

    for shape in (ONE, TWO, NONE, *CURVE):
        add(shape, names[0])
    add(ONE, names[0], kv_cache_dtype="fp8_e4m3")
    if device.type == "cuda":
        rows += [(f"{s.name}, cascade", lambda s=s: cascade(shapes[s], device)) for s in (ONE, TWO)]
    for shape in (ONE, TWO, NONE):
        for name in names[1:]:
            add(shape, name)
    return rows


def line(row: dict[str, Any]) -> str:
    """Return a row of the table that is printed last."""
    if "cannot" in row or "look_us" in row:
        return f"{row['shape']:42} {row.get('cannot', '') or format(row['look_us'], '.1f') + ' us'}"
    plain = row.get("plain_us")
    over = f"{plain / row['shared_us']:7.2f}x" if plain else " " * 8
    cache = row.get("kv_cache_dtype", "")
    text = f"{row['shape']:28}{row['backend']:30}{cache:9}{row['shared_us']:9.1f} us{over}"
    if plain is None:
        return text
    graphs = [row[key] for key in ("shared_graph_us", "plain_graph_us") if row[key]]
    text += f"  in a graph {graphs[0]:.1f}, plain {graphs[1]:.1f};" if len(graphs) == 2 else ""
    return (
        f"{text}  plain {plain:9.1f}, levels {row['levels']}, saved {row['saved_mb']:.0f} MB, plan "
        f"{row['shared_plan_us']:.0f} us (plain {row['plain_plan_us']:.0f}), error {row['error']:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=420, help="No new row starts after these.")
    args = parser.parse_args()
    device, started = torch.device(args.device), time.perf_counter()
    rows: list[dict[str, Any]] = []
    for title, measure in sections(device, 64 if args.small else 1):
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
