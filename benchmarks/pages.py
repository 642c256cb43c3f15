"""What is told of results? Records in `results/<machine>.jsonl`, and a page of the newest of each."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from polyattn import AttentionKind, LayerSpec, select
from polyattn.errors import DeviceError
from polyattn.registry.devices import resolve_device
from polyattn.selection.prediction import kind_of_step
from polyattn.selection.step_choice import step_choice
from rows import current_commit
from suites import NAMES
from table import BEST, Row

RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("torch", "triton", "flashinfer-python", "vllm", "flash-linear-attention", "mamba-ssm")
HEAD = """# {machine}

Generated from `{machine}.jsonl` by `python benchmarks/run.py --pages`: the newest figure of each.
Times are microseconds: on a GPU device time, the L2 cold, the median; elsewhere, and of the host, the
least. "Ratio" is the first one's time over what its bar names, or over the fastest of the others.
"Error" is the largest, against float64.
"""
CHOICES = """
## What choosing costs

The choice's time over the best's, by the selector with this machine's profile, among the backends that
a row has figures of.

| layer | step | rows | mean | worst |
| --- | --- | ---: | ---: | ---: |"""
PHASES = re.compile(r"(^|,)(decode|prefill)=")
ALONE = re.compile(r"(decode=)?[A-Z0-9_]+(,prefill=[A-Z0-9_]+)?")
"""A contender that is a backend of the row's own layer, or one for each phase."""


def suite(name: str) -> list[Row]:
    """Return a suite's rows."""
    rows: list[Row] = importlib.import_module(f"suites.{name}").ROWS
    return rows


def about(device: torch.device, commit: str = "") -> dict[str, Any]:
    """Return what each record says of its run."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    versions["torch"] = torch.__version__
    return {
        "date": str(date.today()), "commit": commit or current_commit(),
        "device": resolve_device(str(device)).name if device.type == "cpu"
        else torch.cuda.get_device_name(device),
        "versions": versions,
    }  # fmt: skip


def judged(row: Row, times: dict[str, float]) -> tuple[float | None, bool | None]:
    """Return the first contender's time over what the bar names, and whether that meets the bar.

    `times`: microseconds by contender, the first one's first.
    """
    held = {c.label for device in row.by for c in row.contenders(device)[:1]}
    if not times or next(iter(times)) not in held:
        return None, None
    us, *_ = times.values()
    beside = {
        who: other for who, other in list(times.items())[1:] if not who.startswith("machine.")
    }
    of, best = row.bar.of if row.bar else BEST, min(beside.values(), default=None)
    if of == "us" and row.bar is not None:
        return us / row.bar.most, us <= row.bar.most
    other = best if of == BEST else times.get(of)
    if other is None:
        return None, None
    return us / other, None if row.bar is None else us / other <= row.bar.most


def newest(records: Sequence[dict[str, Any]]) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """Return the last record of each contender, by suite and row."""
    latest: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for record in records:
        latest.setdefault((record["suite"], record["row"]), {})[record["who"]] = record
    return latest


def read(path: Path) -> list[dict[str, Any]]:
    """Return a file's records."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def page(machine: str, records: Sequence[dict[str, Any]]) -> str:
    """Return the page of a machine's records, a table for each suite in its rows' order."""
    latest, parts = newest(records), [HEAD.format(machine=machine)]
    devices = dict.fromkeys((r["device"], json.dumps(r["versions"])) for r in records)
    parts += [
        f"- {device}: " + ", ".join(f"{k} {v}" for k, v in json.loads(of).items())
        for device, of in devices
    ]
    for name in NAMES:
        lines = [
            _line(row, latest[name, row.name]) for row in suite(name) if (name, row.name) in latest
        ]
        if not lines:
            continue
        asks = (importlib.import_module(f"suites.{name}").__doc__ or "").splitlines()[0]
        parts += ["", f"## {name}", "", asks, "", "| row | us | ratio | bar | error | when |",
                  "| --- | --- | ---: | --- | ---: | --- |", *lines]  # fmt: skip
    return "\n".join([*parts, *choices(machine, latest)]) + "\n"


def _line(row: Row, records: dict[str, dict[str, Any]]) -> str:
    order = [c.label for device in row.by for c in row.contenders(device)] + [*row.libraries]
    shown = {who: records[who] for who in dict.fromkeys(order) if who in records}
    times = {who: record["us"] for who, record in shown.items() if "us" in record}
    ratio, met = judged(row, times)
    text = "; ".join(f"{who} {us:.1f}" for who, us in times.items())
    missing = [who for who in shown if who not in times]
    text += f"; no figure: {', '.join(missing)}" if missing else ""
    error = max((r["error"] for r in shown.values() if "error" in r), default=None)
    when = ", ".join(dict.fromkeys(f"{r['date']} at {r['commit']}" for r in shown.values()))
    bar = "" if row.bar is None else f"{row.bar}"
    if bar and met is not None:
        bar += ": met" if met else ": **missed**"
    return (
        f"| {row.name} | {text} | {'' if ratio is None else f'{ratio:.2f}'} | {bar} | "
        f"{'' if error is None else f'{error:.1e}'} | {when} |"
    )


def choices(
    machine: str, rows: Mapping[tuple[str, str], Mapping[str, dict[str, Any]]]
) -> list[str]:
    """Return a table of what the selector's choices take of the best, by kinds of layers and steps.

    Those of a machine that has a profile; a choice is among what was measured.
    """
    try:
        resolve_device(machine)
    except DeviceError:
        return []
    costs: dict[str, list[float]] = defaultdict(list)
    for (name, label), records in rows.items():
        row = next((row for row in suite(name) if row.name == label), None)
        times = {who: r["us"] for who, r in records.items() if ALONE.fullmatch(who) and "us" in r}
        if row is not None and len(times) > 1 and (who := choice(row, machine, times)) in times:
            step = kind_of_step(*zip(*row.lengths(), strict=True))
            costs[f"{_layer(row.spec)} | {step}"].append(times[who] / min(times.values()))
    mean = {kind: math.exp(sum(map(math.log, each)) / len(each)) for kind, each in costs.items()}
    lines = [f"| {k} | {len(v)} | {mean[k]:.3f} | {max(v):.2f} |" for k, v in sorted(costs.items())]
    return [CHOICES, *lines] if lines else []


def choice(row: Row, machine: str, measured: Iterable[str]) -> str:
    """Return whom the selector takes for a row's step, where only what was measured is installed."""
    selection = select(row.spec, machine)
    names = set(PHASES.sub(",", ",".join(measured)).split(","))
    served = {
        phase: [info for info in infos if info.name in names] or infos
        for phase, infos in selection.candidates
    }
    selection = replace(
        selection,
        backends=tuple((p, served[p][0] if p in served else i) for p, i in selection.backends),
        candidates=tuple((phase, tuple(infos)) for phase, infos in served.items()),
    )
    queries, lens = zip(*row.lengths(), strict=True)
    # Rows are the device's times, so the host's don't choose.
    models = tuple(replace(model, host=0.0) for model in selection.timings)
    by_time = step_choice(replace(selection, timings=models))
    if by_time is None:
        decode = selection.backend("decode")
        short = decode is not None and max(queries) <= decode.capabilities.decode_query_lens
        return served["decode" if short else "prefill"][0].name
    calls = [call.name for call in by_time.calls(queries, lens)]
    return calls[0] if len(set(calls)) == 1 else "decode={},prefill={}".format(*calls)


def _layer(spec: LayerSpec) -> str:
    if spec.kind is not AttentionKind.ATTENTION:
        return f"{spec.kind.value}, {spec.num_heads} heads" if spec.latent else spec.kind.value
    asks = spec.features & {"sliding_window", "logit_soft_cap", "learned_sinks"}
    cache = [f"cache of {spec.stored_dtype}"] if spec.stored_dtype != spec.dtype else []
    return ", ".join([spec.dtype, f"heads of {spec.head_size}", *cache, *sorted(asks)])


def write_pages(folder: Path = RESULTS) -> list[Path]:
    """Write the page of each machine's records, and return the paths."""
    written = []
    for path in sorted(folder.glob("*.jsonl")):
        path.with_suffix(".md").write_text(page(path.stem, read(path)), encoding="utf-8")
        written.append(path.with_suffix(".md"))
    return written
