"""Is TRITON_ATTN as fast as it was? Another commit's kernels beside this one's, in turn, on one GPU.

    git archive COMMIT core/src plugins/triton/src plugins/cuda/src | tar x -C OLD
    python benchmarks/h200_old_new.py OLD [--rounds 12] [--also NAME=TREE] [--out FILE.json]

Each tree runs in a process of its own; a third one, the old tree again, says what the noise is. They take
turns within each round, so that all see the same clocks. A call's device time lies between events, the L2
cold, the host ahead (see `timing.py`); `graph` is the call in a replayed CUDA graph. Results must agree.
Prints the ratios new / old of least and of median times; exits 1 where a least time is over 1.02.
`--also` times further trees, to find out which change it is; what such a tree lacks is this one's.
`--cpu` runs tiny steps on the CPU instead (TRITON_INTERPRET=1), to test this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
BAR = 1.02
SAMPLES = 5
"""Of a worker in each of its turns."""
STEPS = {
    "decode 64 x 4096": ([1] * 64, [4096] * 64),
    "decode 1 x 8192": ([1], [8192]),
    "prefill 1 x 8192": ([8192], [8192]),
    "prefill 4 x 2048": ([2048] * 4, [2048] * 4),
}
SMALL = {"decode 2 x 40": ([1, 1], [40, 40]), "prefill 1 x 33": ([33], [33])}


class OneStep:
    """One layer of either tree over one step."""

    def __init__(self, queries: list[int], lens: list[int], device: str):
        import polyattn
        import torch
        from polyattn import Attention, Batch, LayerSpec, select

        dtype = "bfloat16" if device == "cuda" else "float32"
        spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, dtype=dtype, block_size=16)
        if device == "cpu":
            spec = spec.replace(num_heads=4, num_kv_heads=2, head_size=32)
        selection = select(spec, device, backend="TRITON_ATTN")
        torch.manual_seed(1)  # after select, which may reseed in an old tree
        blocks = [-(-n // 16) for n in lens]
        order = torch.randperm(sum(blocks)).int().split(blocks)
        table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True).to(device)
        batch = Batch.from_lens(queries, lens, table, 16)
        self.cache: Any
        self.plan: Any
        if hasattr(selection, "cache_spec"):  # before plans were values
            self.layer = Attention(selection, checks=False)
            self.layer.plan(batch)
            self.cache, self.plan = selection.cache_spec(sum(blocks)).allocate(device), batch
        else:
            group = polyattn.LayerGroup(selection)
            self.layer = Attention(group, checks=False)
            self.cache, self.plan = group.allocate_cache(sum(blocks)), group.plan(batch)

        def drawn(heads: int, *shape: int) -> Any:
            size = (*(shape or (sum(queries),)), heads, spec.head_size)
            return torch.randn(size, device=device).to(getattr(torch, dtype))

        self.cache.key.copy_(drawn(spec.num_kv_heads, sum(blocks), 16))
        self.cache.value.copy_(drawn(spec.num_kv_heads, sum(blocks), 16))
        self.query, self.out = drawn(spec.num_heads), drawn(spec.num_heads)
        self.key, self.value = drawn(spec.num_kv_heads), drawn(spec.num_kv_heads)

    def step(self) -> None:
        """Store the new tokens, whose keys are at hand, and attend."""
        self.layer(self.query, self.key, self.value, self.cache, self.plan, out=self.out)

    def attend(self) -> None:
        """Attend alone: all keys are read from the cache."""
        self.layer(self.query, None, None, self.cache, self.plan, out=self.out)


def clock(device: str) -> Callable[[Callable[[], object]], float]:
    """Return what times one call in microseconds."""
    import torch

    if device == "cpu":

        def on_host(call: Callable[[], object]) -> float:
            started = time.perf_counter()
            call()
            return (time.perf_counter() - started) * 1e6

        return on_host
    scratch = torch.empty(64 << 20, device="cuda")

    def on_device(call: Callable[[], object]) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        scratch.zero_(), scratch.fill_(1), scratch.sum()  # empties the L2, clean lines last
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e3

    return on_device


def graph_of(call: Callable[[], object]) -> Callable[[], object]:
    """Return the replay of a graph of one call."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def work(device: str) -> None:
    """Answer requests, a line each: {"step": name} builds it, {"time": way} times it."""
    import importlib

    from polyattn import discover, register

    owners = {"cuda": "FLASH_ATTN", "cpu": "TORCH_SDPA"}
    for name, backend in ((device, owners[device]), ("triton", "TRITON_ATTN")):
        if backend not in discover().backends:  # without the metadata of an installed distribution
            register(importlib.import_module(f"polyattn_{name}.hooks"), name)
    steps, timed = STEPS if device == "cuda" else SMALL, clock(device)
    calls: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if "step" in asked:
                calls.clear()
                answer: Any = build(calls, *steps[asked["step"]], device)
            else:
                answer = [timed(calls[asked["time"]]) for _ in range(SAMPLES)]
        except Exception as error:  # one step that fails leaves the others
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), flush=True)


def build(
    calls: dict[str, Callable[[], object]], queries: list[int], lens: list[int], device: str
) -> list[float]:
    """Prepare a step's calls, warm; return some of its results."""
    step = OneStep(queries, lens, device)
    calls |= {"step": step.step, "attend": step.attend}
    for call in (step.step, step.attend, step.attend):
        call()
    if device == "cuda" and max(queries) == 1:
        calls["graph"] = graph_of(step.attend)
        calls["graph"]()
    found: list[float] = step.out.float().flatten()[:: max(1, step.out.numel() // 512)].tolist()
    return found


def sources(tree: Path) -> list[Path]:
    """Return a tree's folders of Python sources."""
    return [*tree.glob("core/src"), *sorted(tree.glob("plugins/*/src"))]


class Worker:
    """A tree's process."""

    def __init__(self, tree: Path, device: str):
        path = [str(found.resolve()) for root in (tree, HERE) for found in sources(root)]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])
        }
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--work", device], env=env, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def send(self, **asked: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with {self.process.wait()}; its error is above")
        return json.loads(line)


def compare(old: Path, also: dict[str, Path], rounds: int, device: str) -> dict[str, Any]:
    """Return, for each step and way, the times of each tree and their ratios to the old one's."""
    trees = {"old": old, "new": HERE, "again": old} | also
    workers = {name: Worker(tree, device) for name, tree in trees.items()}
    found: dict[str, Any] = {}
    for name in STEPS if device == "cuda" else SMALL:
        for worker in workers.values():  # all compile at once
            worker.send(step=name)
        results = {who: worker.answer() for who, worker in workers.items()}
        failed = {who: result for who, result in results.items() if isinstance(result, dict)}
        if failed:
            print(f"{name}: {failed}", flush=True)
            found[name] = failed
            continue
        apart = max(
            abs(a - b)
            for result in results.values()
            for a, b in zip(results["old"], result, strict=True)
        )
        captured = ("graph",) if device == "cuda" and name.startswith("decode") else ()
        for way in ("attend", "step", *captured):
            times: dict[str, list[float]] = {who: [] for who in workers}
            for turn in range(rounds):
                for who in sorted(workers, reverse=turn % 2 == 1):
                    workers[who].send(time=way)
                    times[who] += workers[who].answer()
            row: dict[str, Any] = {"apart": apart}
            for kind, least in (("min", min), ("median", statistics.median)):
                us = {who: least(taken) for who, taken in times.items()}
                row[kind] = us | {f"{who}/old": time / us["old"] for who, time in us.items()}
            found[f"{name}, {way}"] = row
    for worker in workers.values():
        worker.process.terminate()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--also", metavar="NAME=TREE", action="append", default=[])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--work", metavar="DEVICE", help="what the processes of the trees are told")
    given = parser.parse_args()
    if given.work:
        work(given.work)
        return 0
    if given.old is None or not (given.old / "core/src").is_dir():
        parser.error(f"OLD={given.old} must be a folder with another commit's core/src and plugins")
    also = {name: Path(tree) for name, tree in (pair.split("=", 1) for pair in given.also)}
    for name, tree in also.items():
        if name in ("old", "new", "again") or not sources(tree):
            parser.error(f"--also {name}={tree}: a name of its own, and a folder with sources")
    found = compare(given.old, also, given.rounds, "cpu" if given.cpu else "cuda")
    if given.out:
        given.out.write_text(json.dumps(found, indent=1))
    failed = [name for name, row in found.items() if "min" not in row]
    found = {name: row for name, row in found.items() if name not in failed}
    others = "".join(f" {name[:9]:>9}" for name in also)
    print(
        f"{'':28} {'old us':>9} {'new us':>9} {'least':>7} {'median':>7} {'noise':>7} {'apart':>8}"
        + others
    )
    for name, row in found.items():
        least = row["min"]
        print(
            f"{name:28} {least['old']:9.1f} {least['new']:9.1f} {least['new/old']:7.3f} "
            f"{row['median']['new/old']:7.3f} {least['again/old']:7.3f} {row['apart']:8.2g}"
            + "".join(f" {least[f'{who}/old']:9.3f}" for who in also)
        )
    slower = [name for name, row in found.items() if row["min"]["new/old"] > BAR]
    wrong = [name for name, row in found.items() if row["apart"] > 0.02]
    print(
        f"over {BAR}: {slower or 'none'}; results apart: {wrong or 'none'}; failed: {failed or 'none'}"
    )
    return int(bool(slower or wrong or failed))


if __name__ == "__main__":
    raise SystemExit(main())
