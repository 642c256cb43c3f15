"""Is TRITON_ATTN's prefill right on Hopper whatever the lengths? Random steps, against float64.

    python benchmarks/h200_pieces.py [--out FILE.json] [--seconds 100] [--seed N] [--processes 6]

Layers (heads, sizes, windows, not causal, float16, LSE) are processes of their own, which compile side by
side. Each plans random steps: fresh prompts, chunks and few tokens after a context, many short sequences,
more queries than keys, over permuted pages or keys by token. Nobody may read what lies beyond a
sequence: there is NaN; outputs begin as NaN. Every step runs twice, which must give the same bits. The
table, printed last, counts the steps by the way they ran: whole or in pieces, by Hopper's own kernel
or the portable one.
Exit 1 where one was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from h200_prefill_variants import BASE, DEVICE, Step, Variant

LAYERS = (
    replace(BASE, name="28/4 of 128", heads=28, kv_heads=4),
    replace(BASE, name="28/4 of 128, LSE, pages of 64", heads=28, kv_heads=4, lse=True, page=64),
    replace(BASE, name="16/2 of 128", heads=16, kv_heads=2, page=32),
    replace(BASE, name="32/8 of 128, LSE", lse=True),
    replace(BASE, name="32/8 of 128, window 200", window=200),
    replace(BASE, name="8/8 of 128, window 1000, LSE, float16", heads=8, window=1000, lse=True,
            dtype="float16", page=128),
    replace(BASE, name="32/8 of 128, not causal, LSE", causal=False, lse=True),
    replace(BASE, name="40/40 of 128, not causal, float16", heads=40, kv_heads=40, causal=False,
            dtype="float16", page=256),
    replace(BASE, name="14/2 of 64, LSE", heads=14, kv_heads=2, size=64, lse=True),
    replace(BASE, name="32/8 of 64, not causal", size=64, causal=False, page=8),
    replace(BASE, name="16/4 of 256, LSE", heads=16, kv_heads=4, size=256, lse=True),
    replace(BASE, name="8/1 of 256, window 500", heads=8, kv_heads=1, size=256, window=500),
)  # fmt: skip


class Planned(Step):
    """A step as the backend plans and runs it."""

    def __init__(self, backend: Any, variant: Variant, queries: list[int], lens: list[int]):
        self.backend = backend
        super().__init__(variant, queries, lens)

    def dealt(self) -> Any:
        """Nothing: the plan deals."""

    def launch(self) -> Any:
        """Plan the step."""
        from polyattn import Batch
        from polyattn.kernel import KVCache, LayerParams

        v = self.variant
        if v.page:
            batch = Batch.from_lens(self.queries, self.lens, self.table, v.page)
        else:
            batch = Batch.from_lens(self.queries, self.lens, device=DEVICE)
        self.plan = self.backend.plan(batch)
        kept = (None, None, KVCache(*self.kept)) if v.page else (*self.kept, None)
        return self.plan.grid, (self.plan, self.query, *kept, LayerParams(), self.out)

    def run(self) -> None:
        """Run it."""
        self.backend.run(*self.args, self.lse if self.variant.lse else None)

    def way(self) -> str:
        """How it ran."""
        plan = self.plan
        own = plan.at_once and plan.portable is None
        return f"{plan.way}, {'own' if own else 'portable'}"


def lengths(chance: random.Random, paged: bool, causal: bool) -> tuple[list[int], list[int]]:
    """A step's query lengths and lengths."""
    kind = chance.choice(["prompts", "chunks", "few", "long", "short", "mixed", "beyond"])
    if kind == "prompts":
        queries = [chance.randint(1, 3000) for _ in range(chance.randint(1, 5))]
        return queries, list(queries)
    if kind == "short":
        queries = [chance.randint(1, 200) for _ in range(chance.randint(1, 40))]
    elif kind == "few":
        queries = [chance.randint(1, 32) for _ in range(chance.randint(1, 6))]
    elif kind == "long":
        queries = [chance.choice([3, 16, 100, 512])]
    else:
        queries = [
            chance.choice([0, 1, 17, 127, 128, 300, 700]) for _ in range(chance.randint(1, 8))
        ]
        queries[0] = max(1, queries[0])
    if kind == "beyond":  # tokens that see no key, or whole sequences without any
        most = max(2, max(queries))
        return queries, [chance.choice([0, 1, q // 2, chance.randint(0, most)]) for q in queries]
    most = {"long": 60_000, "few": 20_000}.get(kind, 4000)
    lens = [q + chance.choice([0, 1, 128, chance.randint(0, most)]) for q in queries]
    if kind == "long":
        lens = [queries[0] + chance.randint(2000, most)]
    if not causal and chance.random() < 0.3:  # as of an encoder: keys are their own
        lens = [max(1, n - q) for q, n in zip(queries, lens, strict=True)]
    return queries, lens


def of_layer(variant: Variant, seconds: float, seed: int) -> dict[str, Any]:
    """Plan and run random steps of a layer until the time is over."""
    import torch
    from polyattn import LayerSpec
    from polyattn.kernel import CacheFormat
    from polyattn.registry.devices import resolve_device
    from polyattn.workload.tolerance import TOLERANCES
    from polyattn_triton.attention import TritonAttention

    v = variant
    spec = LayerSpec(
        num_heads=v.heads, num_kv_heads=v.kv_heads, head_size=v.size, causal=v.causal,
        sliding_window=v.window or None, dtype=v.dtype, needs_lse=v.lse,
    )  # fmt: skip
    form = CacheFormat(
        block_size=v.page, num_kv_heads=v.kv_heads, head_size=v.size, v_head_size=v.size, dtype=v.dtype
    )  # fmt: skip
    backend = TritonAttention(spec, form, resolve_device(DEVICE))
    assert backend.hopper is not None or DEVICE != "cuda", "no layer of Hopper's own kernel"
    most, chance = TOLERANCES[v.dtype], random.Random(f"{seed} {v.name}")
    torch.manual_seed(seed)
    ways: Counter[str] = Counter()
    wrong: list[Any] = []
    worst = 0.0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        paged = chance.random() < 0.75
        queries, lens = lengths(chance, paged, v.causal)
        step = Planned(backend, v if paged else replace(v, page=0), queries, lens)
        off, off_lse = step.error(6)
        first, first_lse = step.out.clone(), step.lse.clone()
        step.run()
        same = torch.equal(first, step.out) and (not v.lse or torch.equal(first_lse, step.lse))
        way = f"{step.way()}, {'pages' if paged else 'by token'}"
        ways[way] += 1
        worst = max(worst, off)
        if not (off <= most.output and off_lse <= most.lse and same):
            wrong.append({"way": way, "queries": queries, "lens": lens, "off": off,
                          "lse": off_lse, "same": same})  # fmt: skip
    return {"name": v.name, "ways": ways, "worst": worst, "wrong": wrong}


def spawn(variant: Variant, options: argparse.Namespace) -> dict[str, Any]:
    """Check a layer in a process of its own."""
    job = json.dumps([asdict(variant), options.seconds, options.seed])
    command = [sys.executable, __file__, "--worker", job]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=options.seconds + 100, check=False
        )
    except subprocess.TimeoutExpired:
        return {"name": variant.name, "failed": "hung"}
    lines = [line[4:] for line in done.stdout.splitlines() if line.startswith("ROW ")]
    failed = done.stderr.strip()[-1500:] or f"exit code {done.returncode}"
    row: dict[str, Any] = (
        json.loads(lines[-1]) if lines else {"name": variant.name, "failed": failed}
    )
    print(json.dumps(row)[:3000], flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=100, help="of each layer's steps")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--worker")
    options = parser.parse_args()
    if options.worker:
        named, seconds, seed = json.loads(options.worker)
        variant = Variant(**(named | {"steps": tuple(named["steps"])}))
        print("ROW " + json.dumps(of_layer(variant, seconds, seed)), flush=True)
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    with ThreadPoolExecutor(options.processes) as pool:
        rows = list(pool.map(lambda variant: spawn(variant, options), LAYERS))
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(f"\n{'layer':40}{'steps':>6}{'wrong':>6}{'worst':>9}  ways")
    for row in rows:
        if "failed" in row:
            print(f"{row['name']:40}failed: {row['failed'].splitlines()[-1][:150]}")
            continue
        ways = "; ".join(f"{way} {count}" for way, count in sorted(row["ways"].items()))
        steps = sum(row["ways"].values())
        print(f"{row['name']:40}{steps:6}{len(row['wrong']):6}{row['worst']:9.2g}  {ways}")
        for found in row["wrong"][:3]:
            print("    wrong:", json.dumps(found)[:300])
    return int(any(row.get("wrong") or "failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
