"""What does choosing by a timing table cost? Chosen over best, on steps that it was not fitted to.

    python benchmarks/selector.py --out FILE [--table FILE] [--seconds N] [--backends NAME ...]

Models with other heads than `benchmarks/machines/h200_tune.sh` fits a table to, and batches with
other lengths: long ones among short, traces, Zipf, verification rows, chunks, mixed steps. At each
point every backend alone is timed (see `polyattn.workload.clock`), of a mixed step every pair, too:
twice, in turns, and the mean counts. Who the table and who the priorities choose follows from the
lengths; a choice counts with the time of what it names, so that noise is no regret. What noise
alone costs is told beside: who was the best in the first round, judged by the second. Points that
the output file holds already are not measured again: without time left (`--seconds 0`) the table is
judged by those that are there.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from polyattn.api import select
from polyattn.families.attention.layer import Attention
from polyattn.registry.devices import resolve_device
from polyattn.runtime.group import LayerGroup
from polyattn.selection.selection import Selection
from polyattn.selection.step_choice import StepChoice, step_choice
from polyattn.settings import current_settings
from polyattn.spec.layer import LayerSpec
from polyattn.tools.cli.models import bundled
from polyattn.tools.lengths import DISTRIBUTIONS, of_trace
from polyattn.tools.tune.measuring import Measured, pool_bytes, size_for
from polyattn.tools.tune.shapes import Size, StepSample
from polyattn.tools.tune.tuning import left_out
from polyattn.workload.clock import Clock

MODELS = {
    "Qwen2.5-7B": (28, 4, 128),
    "Phi-4": (40, 10, 128),
    "Llama-3.1-70B, TP 4": (16, 2, 128),
    "Llama-2-13B, TP 2": (20, 20, 128),
    "Qwen3-30B-A3B": (32, 4, 128),
    "Command R+": (96, 8, 128),
    "GLM-4-9B": (32, 2, 128),
    "Llama-3.2-3B": (24, 8, 128),
}
"""Query heads, KV heads, head size: none of them among those that are tuned on."""
ALONE = ("FLASH_ATTN_V3", "FLASHINFER", "TRITON_ATTN")
Rows = list[tuple[int, int]]
SEED = 31_115
ROUNDS = 2


def batches(seed: int = SEED) -> dict[str, tuple[str, Rows]]:
    """Return the steps by name: (kind, (queries, keys) of each row)."""
    source = random.Random(seed)
    chat = of_trace(bundled("azure_conversation.csv"))
    long = of_trace(bundled("mooncake_conversation.jsonl"))

    def of(lens: Sequence[int], query: int = 1) -> Rows:
        return [(min(query, n), n) for n in lens]

    zipf, uniform = DISTRIBUTIONS["zipf"], DISTRIBUTIONS["uniform"]
    return {
        "decode 1 x 128k + 63 x 1k": ("decode", of([131_072, *[1024] * 63])),
        "decode 64 x 3k": ("decode", of([3056] * 64)),
        "decode 12 of a long-context trace": ("decode", of(long(12, 0, source))),
        "decode 24 of a chat trace": ("decode", of(chat(24, 0, source))),
        "decode 200 of a chat trace": ("decode", of(chat(200, 0, source))),
        "decode 32, Zipf of mean 4k": ("decode", of(zipf(32, 4096, source))),
        "decode 100, uniform of mean 2k": ("decode", of(uniform(100, 2048, source))),
        "decode 1 x 20k": ("decode", of([20_000])),
        "decode 5 of a long-context trace": ("decode", of(long(5, 0, source))),
        "16 new after 128k": ("short", [(16, 131_072)]),
        "64 rows of 4 after 4k": ("short", [(4, 4096)] * 64),
        "24 rows of 5, chat trace": ("short", of([n + 5 for n in chat(24, 0, source)], 5)),
        "prompts of a chat trace": ("prefill", [(n, n) for n in chat(6, 0, source) if n > 16]),
        "prompt of 6,758": ("prefill", [(6758, 6758)]),
        "chunks of 512 after a trace's": ("prefill", of([n + 512 for n in long(4, 0, source)], 512)),
        "chunk of 2,048 after 30k": ("prefill", [(2048, 32_768)]),
        "40 decodes of 2k + 2 x 1,024": ("mixed", [(1, 2048)] * 40 + [(1024, 1024)] * 2),
        "80 decodes of a chat trace + 1 x 1,500": (
            "mixed", [*of(chat(80, 0, source)), (1500, 1500)],
        ),
        "10 decodes of a long trace + chunk of 512": (
            "mixed", [*of(long(10, 0, source)), (512, 9000)],
        ),
    }  # fmt: skip


def small(rows: Rows) -> Rows:
    """Return the step as a CPU can run it in a moment: a sixteenth of it."""
    return [
        (q if q <= 16 else max(17, q // 16), max(q if q <= 16 else 17, n // 16)) for q, n in rows
    ]


def sample_of(kind: str, rows: Rows) -> StepSample:
    return StepSample(kind, "judged", tuple(q for q, _ in rows), tuple(n for _, n in rows))


def pair(selection: Selection, decode: str, prefill: str) -> Selection:
    """Return the selection with one backend for the decodes and one for the rest, in two calls."""
    served = {phase: {i.name: i for i in infos} for phase, infos in selection.candidates}
    named = {"decode": served["decode"][decode], "prefill": served["prefill"][prefill]}
    backends = []
    for phase, info in selection.backends:
        info = named.get(phase, info)
        claimed = info.capabilities
        apart = replace(claimed, phases=claimed.phases - {"mixed"})
        backends.append((phase, replace(info, capabilities=apart)))
    return replace(selection, backends=tuple(backends), timings=())


class Judge:
    """One model's backends and pairs over one cache, and who is chosen by priority."""

    def __init__(self, spec: LayerSpec, device: Any, clock: Clock, size: Size, options: Any):
        self.selection = select(spec, device, settings=current_settings().without_timings())
        self.measured = Measured(self.selection, clock, size, options.leave_out)
        self.by_priority = Attention(LayerGroup(self.selection), checks=False)
        self.pairs: dict[str, Attention] = {}

    def row(self, sample: StepSample) -> dict[str, Any]:
        cannot: dict[str, str] = {}
        rounds = [self._round(sample, cannot) for _ in range(ROUNDS)]
        times = {
            name: statistics.fmean(found[name] for found in rounds)
            for name in rounds[0]
            if all(name in found for found in rounds)
        }
        calls = self.by_priority.plan(self.measured.step(sample).batch.copy()).calls
        chosen = "+".join(call.name for call in calls)
        return {"times": times, "rounds": rounds, "cannot": cannot, "priority": chosen}

    def _round(self, sample: StepSample, cannot: dict[str, str]) -> dict[str, float]:
        """Return each backend's and each pair's time; `cannot` gets why others have none."""
        times: dict[str, float] = {}
        mixed = sample.kind == "mixed"
        for name, found in self.measured.times(sample, list(self.measured.layers), one_call=mixed):
            if isinstance(found, str):
                cannot[name] = found
            else:
                times[name] = found
        if mixed:
            step = self.measured.step(sample)
            for name, layer in self._pairs().items():
                times[name] = self.measured.us(step.but(layer=layer))
        return times

    def _pairs(self) -> dict[str, Attention]:
        if not self.pairs:
            served = {phase: [i.name for i in infos] for phase, infos in self.selection.candidates}
            for name in self.measured.layers:
                for other in self.measured.layers:
                    if name in served["decode"] and other in served["prefill"]:
                        group = LayerGroup(pair(self.selection, name, other))
                        self.pairs[f"{name}+{other}"] = Attention(group, checks=False)
        return self.pairs


def measure(options: Any) -> list[dict[str, Any]]:
    device = resolve_device(options.device)
    clock = Clock(torch.device(str(device.torch_device)))
    end = time.monotonic() + options.seconds
    steps = batches(options.seed)
    if not device.is_accelerator:
        steps = {name: (kind, small(rows)) for name, (kind, rows) in steps.items()}
    most = max(sum(n for _, n in rows) for _, rows in steps.values())
    out: Path = options.out
    rows = json.loads(out.read_text())["points"] if out.exists() else []
    done = {(row["model"], row["step"]) for row in rows}
    for model in options.models:
        heads, kv_heads, head_size = MODELS[model]
        missing = [name for name in steps if (model, name) not in done]
        if not missing or time.monotonic() > end:
            continue
        spec = LayerSpec(num_heads=heads, num_kv_heads=kv_heads, head_size=head_size)
        size = replace(size_for(spec, device, pool_bytes(device)), keys=most)
        judged = Judge(spec, device, clock, size, options)
        for name in missing:
            if time.monotonic() > end:
                break
            kind, lengths = steps[name]
            row = {"model": model, "step": name, "kind": kind, "rows": lengths}
            rows.append(row | judged.row(sample_of(kind, lengths)))
            out.write_text(json.dumps({"device": str(device), "points": rows}) + "\n")
        del judged
        print(model, "measured", flush=True)
    return rows


def chosen(rows: Sequence[dict[str, Any]], options: Any) -> None:
    """Add to each point whom the table chooses among those that were measured there."""
    device = resolve_device(options.device)
    settings = replace(current_settings(), timings=str(options.table))
    choices: dict[str, StepChoice | None] = {}
    for row in rows:
        if row["model"] not in choices:
            heads, kv_heads, head_size = MODELS[row["model"]]
            spec = LayerSpec(num_heads=heads, num_kv_heads=kv_heads, head_size=head_size)
            choices[row["model"]] = step_choice(select(spec, device, settings=settings))
        choice = choices[row["model"]]
        row["table"] = row["priority"]
        if choice is not None:
            calls = choice.calls([q for q, _ in row["rows"]], [n for _, n in row["rows"]])
            row["table"] = "+".join(call.name for call in calls)


def time_of(row: dict[str, Any], name: str) -> float | None:
    """Return what a backend took; of a mixed step, where it has no one call, its two calls."""
    found: float | None = row["times"].get(name, row["times"].get(f"{name}+{name}"))
    return found


def ratios(rows: Sequence[dict[str, Any]], who: str) -> list[float]:
    """Return chosen over best, or a backend alone over best, at each point that has both."""
    found = []
    for row in rows:
        us = time_of(row, row.get(who, who))
        if us is not None:
            found.append(us / min(row["times"].values()))
    return found


def by_noise(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Return what whoever was the best in a first round costs in the second."""
    found = []
    for row in rows:
        first, again = row.get("rounds", ({}, {}))
        known = {name: us for name, us in first.items() if name in again}
        if known:
            found.append(again[min(known, key=known.__getitem__)] / min(again.values()))
    return found


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {}
    for who in ("table", "noise", "priority", *ALONE):
        for kind in ("all", "decode", "short", "prefill", "mixed"):
            here = [r for r in rows if kind in ("all", r["kind"])]
            costs = by_noise(here) if who == "noise" else ratios(here, who)
            if costs:
                mean = math.exp(sum(map(math.log, costs)) / len(costs))
                made[f"{who}, {kind}"] = {"points": len(costs), "mean": mean, "worst": max(costs)}
    return made


def show(rows: Sequence[dict[str, Any]]) -> None:
    costly = sorted(rows, key=lambda r: -ratios([r], "table")[0] if ratios([r], "table") else 0.0)
    print("\nThe costliest choices by the table:")
    for row in costly[:12]:
        best = min(row["times"], key=row["times"].__getitem__)
        chosen = time_of(row, row["table"])
        if chosen is None:
            print(f"  {row['model']}, {row['step']}: {row['table']} was not measured")
            continue
        print(
            f"  {chosen / row['times'][best]:.2f}  {row['model']}, {row['step']}: {row['table']} "
            f"{chosen:.0f} us; best {best} {row['times'][best]:.0f} us"
        )
    twice = [
        abs(math.log(again[name] / us))
        for first, again in (row["rounds"] for row in rows if "rounds" in row)
        for name, us in first.items()
        if name in again
    ]
    if twice:
        twice.sort()
        middle, high = (math.expm1(twice[int(q * (len(twice) - 1))]) for q in (0.5, 0.95))
        print(f"\nThe same call twice: {middle:.1%} apart (median), {high:.1%} (one in twenty)")
    print(f"\n{'over the best':24} {'points':>6} {'mean':>7} {'worst':>7}")
    for who, line in summary(rows).items():
        print(f"{who:24} {line['points']:6} {line['mean']:7.3f} {line['worst']:7.2f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=SEED, help="of the batches' lengths")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--device", default=None)
    parser.add_argument("--backends", nargs="+", default=[])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    options.leave_out = left_out(options.backends)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = measure(options)
    if options.table is None:
        return
    if not options.table.is_file():
        raise SystemExit(
            f"--table {options.table}: is no file; too few points were measured for one"
        )
    chosen(rows, options)
    data = {"device": str(resolve_device(options.device)), "table": options.table.name}
    options.out.write_text(json.dumps(data | {"points": rows, "summary": summary(rows)}) + "\n")
    show(rows)


if __name__ == "__main__":
    main()
