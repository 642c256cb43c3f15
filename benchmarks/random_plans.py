"""Random plans of our own backends, each checked key by key: `polyattn.runtime.reads`. Resumable.

    python benchmarks/random_plans.py --plans 1000000 --out benchmarks/results/random_plans.json
    python benchmarks/random_plans.py --share --plans 3000

GPUs' backends plan on the host, as on a chip of theirs: nothing runs. In one plan of two, lengths are
those at which the backend's own sources turn (`conformance.boundaries`). `--seconds` ends a run early.
`--share` prints how much longer plans take with `POLYATTN_CHECKS=1`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from polyattn import Batch, Device, LayerGroup, LayerSpec, SparseSpec, __version__, select
from polyattn.conformance.boundaries import draw_turning, numbers_of, turning
from polyattn.errors import PluginError
from polyattn.families.mla import planning as mla_planning
from polyattn.kernel import LatentSpec
from polyattn.runtime.plan_checks import check_calls, check_plan
from polyattn.selection.cache_format import format_of
from polyattn.workload.dice import Dice
from polyattn.workload.steps import drawn_forest, share_blocks
from rows import current_commit

CPU = Device("cpu", platform.machine(), torch_device="cpu")
CHIPS = (("sm_90", 132), ("sm_80", 108), ("gfx942", 304), ("sm_90", 4))
"""Architectures and how many multiprocessors, of which few are cut to the most parts."""
PIECE = 200
"""Plans of one layer."""
LONGEST = 6000
BLOCKS = (16, 64, 1, 48)
FORMATS = ("int4", "nvfp4", "mxfp4/kivi4", "turboquant4", "e4m3_rows", "int8_rows")
LEVELS = ("batch", "steps", "calls")
LATENT = LatentSpec(rank=64, rope_head_size=16)

Rows = list[tuple[int, int]]
Drawn = tuple[Any, Callable[[Dice], Batch]]
"""A backend, and what draws its steps."""


def layer(dice: Dice, windows: bool = True, **changes: Any) -> LayerSpec:
    """Draw a layer: heads, a mask."""
    kv_heads, group = dice.choice((1, 2, 3, 4, 8)), dice.choice((1, 1, 2, 3, 4, 7, 8, 16, 71))
    values: dict[str, Any] = {"num_heads": kv_heads * group, "num_kv_heads": kv_heads}
    if windows and dice.integer(0, 2):
        values["sliding_window"] = dice.choice((1, 2, 21, 64, 100, 128, 512, 1024))
        if dice.integer(0, 2):
            values["sink_tokens"] = dice.choice((1, 4, 64, 65, 200))
    if windows and not dice.integer(0, 4):
        values["chunk_size"] = dice.choice((16, 100, 512, 1024))
    if not dice.integer(0, 4):
        values["causal"] = False
    return LayerSpec(**({"head_size": 64, "dtype": "bfloat16"} | values | changes))


def lengths(dice: Dice, package: str, spec: LayerSpec, decodes: int) -> Rows:
    """Draw a step. `decodes`: 0 any queries, 1 single tokens, else up to so many."""
    count = dice.choice((1, 1, 2, 3, 5, 8, 13, 64, 65, 133))
    if dice.integer(0, 2):
        rows = draw_turning(dice, turning(numbers_of(package), spec), count, LONGEST)
    else:
        rows = [
            (
                dice.choice((0, 1, 1, 2, 5, 17, dice.integer(1, 400))),
                dice.choice((0, 1, 5, LONGEST)),
            )
            for _ in range(count)
        ]
        rows = [(q, q + dice.integer(0, n + 1)) for q, n in rows]
    if decodes == 1:
        return [(1, max(n, 1) if dice.integer(0, 9) else 0) for _, n in rows]
    if decodes:
        return [(min(q, dice.integer(1, decodes + 1)), n) for q, n in rows]
    return [(q if n else min(q, 1), n) for q, n in rows]


def batch_of(rows: Rows, block: int, dice: Dice | None = None) -> Batch:
    """Return a step of these lengths.

    With `dice` its blocks are in any order, and every third sequence begins with another's.
    """
    width = max(1, max(-(-n // block) for _, n in rows))
    table = torch.zeros(len(rows), width, dtype=torch.int32)
    if dice is not None:
        table = dice.order(table.numel()).int().view(table.shape)
        table[2::3, :2] = table[0, :2]
    return Batch([0, *accumulate(q for q, _ in rows)], [n for _, n in rows], table)


def drawn(
    backend: Any, decodes: int, rows_of: Callable[[Rows], Rows] = list, shuffled: bool = False
) -> Drawn:
    """Return a backend, and what draws its steps: `decodes` as of `lengths`, `shuffled` blocks."""
    package = type(backend).__module__.partition(".")[0]

    def step(dice: Dice) -> Batch:
        rows = rows_of(lengths(dice, package, backend.spec, decodes))
        return batch_of(rows, backend.cache.block_size, dice if shuffled else None)

    return backend, step


def native(dice: Dice, **changes: Any) -> Drawn:
    from polyattn_cpu.native.attention import NativeAttention

    spec = layer(dice, **({"dtype": "float32"} | changes))
    form = format_of(spec, CPU, "NHD", dice.choice(BLOCKS))
    backend, draw = drawn(NativeAttention(spec, form, CPU), 0)

    def step(dice: Dice) -> Batch:
        torch.set_num_threads(dice.choice((1, 2, 5, 16)))
        return draw(dice)

    return backend, step


def latents(dice: Dice) -> LayerSpec:
    heads = dice.choice((1, 5, 16, 20, 31, 32, 33, 64, 65, 128))
    return LayerSpec(
        kind="mla", num_heads=heads, num_kv_heads=heads, head_size=48, v_head_size=32,
        dtype="bfloat16", latent=LATENT,
    )  # fmt: skip


def native_mla(dice: Dice) -> Drawn:
    from polyattn_cpu.native.attention import NativeMLA

    spec = latents(dice)
    return drawn(NativeMLA(spec, format_of(spec, CPU, "NHD", dice.choice(BLOCKS[:2])), CPU), 4)


def on_chip(kind: Callable[..., Any], spec: LayerSpec, dice: Dice) -> Any:
    """Return one of Triton's backends that takes this machine for a GPU."""
    from polyattn_triton import launch

    arch, sms = dice.choice(CHIPS)
    form = format_of(spec, CPU, "NHD", dice.choice(BLOCKS[:2] if spec.latent else BLOCKS))
    facts = SimpleNamespace(
        multi_processor_count=sms, shared_memory_per_multiprocessor=1 << 30,
        shared_memory_per_block=1 << 30, L2_cache_size=50 << 20,
    )  # fmt: skip
    with patch.object(launch, "facts", lambda device: facts):
        return kind(spec, form, Device("cuda", arch, torch_device="cpu"))


def triton(dice: Dice, windows: bool = True, **changes: Any) -> Drawn:
    from polyattn_triton.attention import TritonAttention

    spec = layer(dice, windows, head_size=dice.choice((64, 128)), **changes)
    decodes = 1 if spec.graph_capture else dice.choice((0, 0, 1, 1, 16))
    return drawn(on_chip(TritonAttention, spec, dice), decodes)


def captured(dice: Dice) -> Drawn:
    """Steps of one size, planned into the buffers of the first."""
    backend, _ = triton(dice, graph_capture="single_token_decode")
    count, size = dice.choice((1, 3, 8, 64)), backend.cache.block_size
    table = torch.zeros(count, -(-2 * LONGEST // size), dtype=torch.int32)

    def step(dice: Dice) -> Batch:
        rows = lengths(dice, "polyattn_triton", backend.spec, 1) * count
        return Batch(list(range(count + 1)), [n for _, n in rows[:count]], table)

    return backend, step


def invariant(dice: Dice) -> Drawn:
    """Steps of several launches, which are planned whatever else is in the step."""
    backend, step = triton(dice, batch_invariant=dice.choice(LEVELS))
    if not dice.integer(0, 3):  # so little room that a class has launches of its own
        backend.room = 1 << 20
    return backend, step


def prefixes(dice: Dice) -> Drawn:
    capture = {"graph_capture": "single_token_decode"} if dice.integer(0, 2) else {}
    backend, _ = triton(dice, windows=False, causal=True, **capture)
    size, fixed = backend.cache.block_size, dice.choice((2, 5, 16, 40))

    def step(dice: Dice) -> Batch:
        count = fixed if capture else dice.integer(2, 41)
        levels, ends = drawn_forest(count, dice.integer)
        lens = [e * size + (dice.integer(0, 900) or bool(e)) for e in ends]
        table = torch.arange(count * 400, dtype=torch.int32).view(count, 400)
        if capture:
            table = torch.cat([table, table[:, :0].new_zeros(count, 400)], 1)
        share_blocks(table, levels)
        lens = [min(n, 400 * size) for n in lens]
        return Batch(list(range(count + 1)), lens, table, shared_prefix=levels or None)

    return backend, step


def triton_mla(dice: Dice, **fields: Any) -> Drawn:
    from polyattn_triton.mla import TritonMLA

    if not dice.integer(0, 4):
        fields.setdefault("graph_capture", "single_token_decode")
    spec = latents(dice).replace(**fields)
    decodes = 1 if fields or not dice.integer(0, 3) else 4
    backend, draw = drawn(on_chip(TritonMLA, spec, dice), decodes)

    def step(dice: Dice) -> Batch:
        batch = draw(dice)
        return batch.over_context() if decodes > 1 and not dice.integer(0, 4) else batch

    return backend, step


def mla_captured(dice: Dice) -> Drawn:
    """Prompts that have so many tokens together, or drafts, in the buffers of the first step."""
    backend, _ = triton_mla(dice, graph_capture="any")
    prompts, tokens = dice.choice((0, 1, 3, 6)), dice.choice((7, 40, 300))
    rows = dice.choice((1, 8))
    each, size = dice.choice((1, 3, 16, 20)), backend.cache.block_size
    table = torch.zeros(max(prompts, rows), -(-2 * LONGEST // size), dtype=torch.int32)

    def step(dice: Dice) -> Batch:
        ends = [*sorted(dice.integers(0, tokens + 1, prompts - 1)), tokens] if prompts else []
        starts = [0, *ends] if prompts else list(range(0, rows * each + 1, each))
        lens = [b - a + dice.integer(0, LONGEST) for a, b in pairwise(starts)]
        batch = Batch(starts, lens, table[: len(lens)])
        batch.num_contexts = prompts or None
        return batch

    return backend, step


def triton_sparse(dice: Dice) -> Drawn:
    """Tokens that attend to chosen keys: to the checker, short sequences."""
    from polyattn_triton.mla import TritonMLASparse

    sparse = SparseSpec(budget=dice.choice((1, 17, 64, 512, 2048)))
    spec = latents(dice).replace(kind="sparse_mla", sparse=sparse)
    backend = on_chip(TritonMLASparse, spec, dice)
    return drawn(backend, 4, lambda rows: [(max(q, 1), max(q, n, 1)) for q, n in rows])


def pallas(dice: Dice) -> Drawn:
    from polyattn_tpu.backends import PallasAttention
    from polyattn_tpu.buckets import Buckets

    spec, device = layer(dice, head_size=128), Device("tpu", "v6e", torch_device="cpu")
    backend = PallasAttention(spec, format_of(spec, device, "NHD", dice.choice(BLOCKS)), device)
    backend.buckets = Buckets(pages=1 << 19)  # for blocks of one token
    return drawn(backend, dice.choice((0, 0, 1)), shuffled=True)


def hpu(dice: Dice) -> Drawn:
    from polyattn_hpu.attention import UnifiedAttention

    spec, device = layer(dice, head_size=128), Device("hpu", "gaudi3", torch_device="cpu")
    backend = UnifiedAttention(spec, format_of(spec, device, "NHD", dice.choice(BLOCKS)), device)
    decodes = dice.choice((0, 1, 16))
    return drawn(backend, decodes, lambda rows: [(q, min(n, 2000 + q)) for q, n in rows[:8]], True)


class Apart(NamedTuple):
    """A group, whose steps are taken apart, and the bytes of a piece of an expanded context."""

    group: LayerGroup
    piece: int

    def plan(self, batch: Batch, _: Any = None) -> Any:
        with patch.object(mla_planning, "EXPANDED_BYTES", self.piece):
            return self.group.plan(batch)


def by_phase(dice: Dice) -> Drawn:
    """Steps that a group takes apart: decodes and prefills, and over latents the pieces of contexts."""
    if latent := dice.integer(0, 2):
        spec = latents(dice).replace(dtype="float32", block_size=16)
    else:
        spec = layer(dice, dtype="float32", block_size=16)
    group = LayerGroup(select(spec, CPU, backend=None if latent else "TORCH_SDPA", verify=False))
    row = 4 * spec.num_heads * (spec.head_size + spec.v_head_size)

    def step(dice: Dice) -> Batch:
        rows = [(q or 1, max(q, n, 1)) for q, n in lengths(dice, "polyattn_cpu", spec, 0)]
        return batch_of(rows, 16, dice)

    return Apart(group, row * dice.choice((2000, 9000, 50000))), step


KINDS: dict[str, Callable[[Dice], Drawn]] = {
    "NATIVE_ATTN": native,
    "NATIVE_ATTN, invariant": lambda dice: native(dice, batch_invariant=dice.choice(LEVELS)),
    "NATIVE_ATTN, row formats": lambda dice: native(
        dice, kv_cache_dtype=dice.choice(FORMATS), dtype=dice.choice(("float32", "bfloat16"))
    ),
    "NATIVE_MLA": native_mla,
    "TRITON_ATTN": triton,
    "TRITON_ATTN, captured": captured,
    "TRITON_ATTN, shared prefixes": prefixes,
    "TRITON_ATTN, invariant": invariant,
    "TRITON_ATTN, row formats": lambda dice: triton(dice, kv_cache_dtype=dice.choice(FORMATS)),
    "TRITON_MLA": triton_mla,
    "TRITON_MLA, captured": mla_captured,
    "TRITON_MLA_SPARSE": triton_sparse,
    "PALLAS_ATTN": pallas,
    "HPU_ATTN": hpu,
    "steps taken apart": by_phase,
}


def piece(kind: str, seed: int, count: int = PIECE) -> tuple[int, list[str]]:
    """Plan `count` steps of one layer; return how many were checked, and what is wrong."""
    dice, checked, failed = Dice(seed), 0, []
    threads = torch.get_num_threads()
    try:
        backend, step = KINDS[kind](dice)
        first = None
        for _ in range(count):
            batch = step(dice)
            plan = backend.plan(batch, first)
            if kind.endswith("captured") and first is None:
                first = plan
            try:
                if isinstance(backend, Apart):
                    check_calls(plan)
                    checked += 1
                else:
                    checked += check_plan(backend, first or plan, batch)
            except PluginError as error:
                failed.append(f"seed {seed}: {error}")
    finally:
        torch.set_num_threads(threads)
    return checked, failed


def share(count: int) -> None:
    """Print how long plans of this machine's groups take with checks over how long without, in turns."""
    dice = Dice(0)
    for spec in (
        LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16"),
        LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16", sliding_window=1024),
        latents(dice).replace(block_size=16),
    ):  # fmt: skip
        groups = []
        for checks in (True, False):
            with patch.dict(os.environ, {"POLYATTN_CHECKS": str(int(checks))}):
                groups.append(LayerGroup(select(spec, CPU, verify=False)))
        took = [0.0, 0.0]
        for step in range(count):
            rows = [(q or 1, max(q, n, 1)) for q, n in lengths(dice, "polyattn_cpu", spec, 0)]
            form = batch_of(rows, 16, dice)
            for at in (0, 1) if step % 2 else (1, 0):
                group = groups[at]
                batch = Batch(form.host_starts.tolist(), form.lens, form.block_table)
                began = time.process_time()
                group.plan(batch)
                took[at] += time.process_time() - began
        checks = groups[0].plan_checks
        assert checks is not None
        print(
            f"{spec}: {took[0] / took[1]:.3f} times as long; {checks.checked} of {checks.plans} plans "
            f"checked, of {count} steps; checks took {checks.spent / checks.planned:.3f} of the planning"
        )


def one(job: tuple[str, int]) -> tuple[str, int, list[str]]:
    """Plan a piece of a kind, from a seed."""
    return job[0], *piece(*job)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=1_000_000, help="of all kinds together")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--only", help="kinds, by semicolons")
    parser.add_argument("--out", type=Path, default=Path("random_plans.json"))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--commit", help="where there is no git")
    parser.add_argument("--share", action="store_true", help="what checks cost, of so many plans")
    args = parser.parse_args()
    if args.share:
        share(args.plans)
        return
    held = json.loads(args.out.read_text()) if args.out.exists() else {"kinds": {}, "revisions": {}}
    rows, revisions = held["kinds"], held["revisions"]
    kinds = args.only.split(";") if args.only else [*KINDS]
    for kind in kinds:
        rows.setdefault(kind, {"plans": 0, "layers": 0, "wrong": 0, "examples": []})
    left = args.plans - sum(rows[kind]["plans"] for kind in kinds)
    turns = range(-(-left // (PIECE * len(kinds))))
    jobs = [(kind, rows[kind]["layers"] + turn) for turn in turns for kind in kinds]
    end, saved = time.monotonic() + args.seconds, time.monotonic()
    with multiprocessing.get_context("spawn").Pool(args.jobs, torch.set_num_threads, (1,)) as pool:
        for kind, checked, failed in pool.imap(one, jobs):
            row = rows[kind]
            row["plans"] += checked
            row["layers"] += 1
            row["wrong"] += len(failed)
            row["examples"] = (row["examples"] + failed)[:5]
            if time.monotonic() > end:
                break
            if time.monotonic() > saved + 10:
                saved = time.monotonic()
                save(args, rows, revisions)
    save(args, rows, revisions)
    for kind, row in rows.items():
        print(kind, {name: value for name, value in row.items() if name != "examples"})
    sys.exit(any(row["wrong"] for row in rows.values()))


def save(args: argparse.Namespace, rows: dict[str, Any], revisions: dict[str, int]) -> None:
    now = args.commit or current_commit()
    before = sum(count for name, count in revisions.items() if name != now)
    revisions[now] = sum(row["plans"] for row in rows.values()) - before
    found = {
        "command": "python benchmarks/random_plans.py", "machine": platform.machine(),
        "revisions": revisions, "polyattn": __version__, "torch": torch.__version__,
        "python": platform.python_version(), "kinds": rows,
    }  # fmt: skip
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
