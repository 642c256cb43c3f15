"""What would each format of cached rows cost a model? `explain --formats`: bytes, backends, times."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import or_
from typing import Any

from polyattn.api import select
from polyattn.device import Device
from polyattn.errors import PolyattnError, SelectionError
from polyattn.selection.selection import Selection
from polyattn.settings import Settings
from polyattn.spec.kinds import KV_CACHE_DTYPES
from polyattn.spec.layer import LayerSpec
from polyattn.spec.row_format import known_formats
from polyattn.tools.cli.forecasting import UNMEASURED, forecast
from polyattn.tools.cli.output import print_rows, say

Steps = Mapping[str, list[tuple[int, int]]]


def formats_of(
    spec: LayerSpec, layers: int, device: Device, settings: Settings, steps: Steps
) -> list[dict[str, Any]]:
    """Return what each `kv_cache_dtype` costs a group of layers, the fewest bytes first.

    A format has `bytes_per_token`, of all layers, `decode`, and `us`, a layer's predicted microseconds
    by step. A format that no backend serves, or that has no such rows, has `cannot`.
    """
    rows = [
        {"kv_cache_dtype": name} | _cost(spec, name, layers, device, settings, steps)
        for name in (*KV_CACHE_DTYPES, *sorted(known_formats()))
    ]
    return sorted(rows, key=lambda row: row.get("bytes_per_token", float("inf")))


def _cost(
    spec: LayerSpec, name: str, layers: int, device: Device, settings: Settings, steps: Steps
) -> dict[str, Any]:
    try:
        selection = select(spec.replace(kv_cache_dtype=name), device, settings=settings)
    except SelectionError:
        return {"cannot": "no backend serves it"}
    except PolyattnError as error:
        return {"cannot": str(error)}
    cache = selection.cache_format
    if cache is None:
        return {"cannot": "the layer has no cache"}
    chosen = dict(selection.decision.chosen)
    times = {text: _time(selection, lengths) for text, lengths in steps.items()}
    return {
        "bytes_per_token": layers * cache.bytes_per_token,
        "decode": chosen.get("decode", ""),
        "us": {text: us for text, us in times.items() if us is not None},
    }


def _time(selection: Selection, lengths: list[tuple[int, int]]) -> float | None:
    """Return a step's predicted microseconds, or None where a timing table lacks a call of it."""
    total = 0.0
    calls = forecast(selection, lengths)["calls"]
    for call in calls:
        us = [row["us"] for row in call["candidates"] if row["backend"] == call["backend"]]
        if not us:
            return None
        total += us[0]
    return total if calls else None


def print_formats(rows: list[dict[str, Any]], steps: Collection[str]) -> None:
    """Print the formats that a group of layers could cache in, and why it couldn't in the others."""
    say("cache formats, bytes of a token in these layers:")
    columns = {"  kv_cache_dtype": "  {kv_cache_dtype}", ">bytes": "{bytes_per_token}"}
    columns |= {"  decode": "  {decode}"} | {f">us, {step}": f"{{{step}}}" for step in steps}
    served = [row for row in rows if "cannot" not in row]
    times = [{s: f"{row['us'][s]:.1f}" if s in row["us"] else "-" for s in steps} for row in served]
    print_rows(columns, map(or_, served, times))
    if any(len(row.get("us", steps)) < len(steps) for row in rows):
        say(f"  -: {UNMEASURED}")
    for row in rows:
        if "cannot" in row:
            say(f"  {row['kv_cache_dtype']}: {row['cannot']}")
