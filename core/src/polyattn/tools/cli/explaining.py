"""`polyattn explain`: the decision tree of each layer group, with every rejection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.tree import Tree

from polyattn.api import select, unmatched_overrides
from polyattn.errors import SelectionError, SettingsError, ranges
from polyattn.registry.devices import resolve_device
from polyattn.selection.selection import Selection, verdict_line
from polyattn.settings import Settings, current_settings
from polyattn.spec.decompose import candidate_sources, choice_sources, group_layers, kv_sources
from polyattn.spec.layer import LayerSpec
from polyattn.tools.cli.cache_formats import formats_of, print_formats
from polyattn.tools.cli.forecasting import UNMEASURED, forecast, print_forecast
from polyattn.tools.cli.grammar import parse_batch
from polyattn.tools.cli.models import has_blocks, read_specs
from polyattn.tools.cli.options import ExplainOptions
from polyattn.tools.cli.output import console, print_json, say
from polyattn.tools.cli.plots import check_plot, plot_values


def show(options: ExplainOptions) -> int:
    """Print one tree a layer group; exit 1 when a group has no backend."""
    if options.plot:
        check_plot(options.plot)
    steps = {text: parse_batch(text) for text in options.batch or []}
    settings = current_settings().with_backend(options.backend, "flag --backend")
    specs = read_specs(options.model, options.spec, options)[1]
    groups = group_layers(specs)
    resolved = resolve_device(options.device)
    selected: list[_Group] = []
    for spec, layers in groups.items():
        read = tuple(sources(specs, layers) for sources in SOURCES.values())
        try:
            selected.append((spec, layers, read, select(spec, resolved, settings=settings)))
        except SelectionError as error:
            selected.append((spec, layers, read, error))
    notes = unmatched_overrides(list(groups), settings)
    if options.formats and not any(map(has_blocks, groups)):
        notes = [*notes, "--formats: no layer here has a cache whose format could differ"]
    predicted = [_predicted(result, steps, settings) for *_, result in selected]
    compared = steps or {text: parse_batch(text) for text in DEFAULT_STEPS}
    costs = [
        formats_of(spec, len(layers), resolved, settings, compared)
        if options.formats and has_blocks(spec)
        else []
        for spec, layers, *_ in selected
    ]
    if options.json:
        rows = [
            _json(*g, times) | ({"formats": cost} if cost else {})
            for g, times, cost in zip(selected, predicted, costs, strict=True)
        ]
        print_json({"device": str(resolved), "groups": rows, "notes": notes})
    else:
        console.print(f"on [bold]{escape(str(resolved))}[/]", highlight=False)
        for (spec, layers, read, result), times, cost in zip(
            selected, predicted, costs, strict=True
        ):
            console.print(_tree(spec, layers, read, result), highlight=False)
            for text, step in times.items():
                print_forecast(text, step)
            if cost:
                print_formats(cost, compared)
        for note in notes:
            say(f"note: {note}")
    if options.plot:
        _plot(selected, predicted, options.plot, str(resolved))
    return int(any(isinstance(result, SelectionError) for *_, result in selected))


DEFAULT_STEPS = ("32q1s4k", "q2k")
"""A decode and a prefill, whose times are predicted where no step is named."""


def _predicted(
    result: Selection | SelectionError,
    steps: Mapping[str, list[tuple[int, int]]],
    settings: Settings,
) -> dict[str, dict[str, Any]]:
    """Return each step's times; without steps those of the usual two, if a timing table has them.

    A choice that the user forced is compared with every backend that can serve.
    """
    if isinstance(result, SelectionError):
        return {}
    free = result
    if settings.sources:
        with suppress(SelectionError):
            free = select(result.spec, result.device, settings=replace(settings, sources=()))
    usual = {} if steps else {text: parse_batch(text) for text in DEFAULT_STEPS}
    forecasts = {text: forecast(result, rows, free) for text, rows in (steps or usual).items()}
    return {text: step for text, step in forecasts.items() if steps or step["calls"]}


def _plot(
    groups: Sequence[_Group], predicted: Sequence[dict[str, Any]], path: Path, device: str
) -> None:
    """Plot each candidate's predicted time. Raises `SettingsError` where none is known."""
    panels = {
        f"{len(layers)} layers: {spec}\n{text}, {call['kind']}, {call['rows']}": {
            row["backend"]: row["us"] for row in call["candidates"]
        }
        for (spec, layers, *_), steps in zip(groups, predicted, strict=True)
        for text, step in steps.items()
        for call in step["calls"]
        if call["candidates"]
    }
    if not panels:
        raise SettingsError(f"--plot={path}: {UNMEASURED}, so there are no times to plot")
    plot_values(panels, path, f"predicted on {device}", "microseconds")


SOURCES = {
    ("kv_source", "read the keys"): kv_sources,
    ("choice_source", "attend to the choice"): choice_sources,
    ("candidate_source", "choose within the choice"): candidate_sources,
}
"""What of another layer's a layer may need, in JSON and in words."""
_Sources = tuple[tuple[int | None, ...], ...]
"""For each of `SOURCES` and each layer, whose it is."""
_Group = tuple[LayerSpec, list[int], _Sources, Selection | SelectionError]
"""A group's spec, its layers, whose keys each reads, and what was selected."""


def _json(
    spec: LayerSpec,
    layers: list[int],
    read: _Sources,
    result: Selection | SelectionError,
    predicted: Mapping[str, dict[str, Any]],
) -> dict[str, Any]:
    base: dict[str, Any] = {"spec": spec.to_dict(), "layers": layers}
    for (name, _), sources in zip(SOURCES, read, strict=True):
        if any(source is not None for source in sources):
            base[name] = list(sources)
    if isinstance(result, SelectionError):
        return base | {"error": str(result)}
    if spec.sparse is not None:
        keys, index = _context_bytes(result)
        base["context_bytes"] = {"keys": keys, "index_keys": index}
    return base | result.decision.to_dict() | ({"batches": predicted} if predicted else {})


def _context_bytes(selection: Selection) -> tuple[float, float]:
    """Return a layer's bytes for a token of context: keys and values, and index keys."""
    spec, cache = selection.spec, selection.cache_format
    sparse, indexer = spec.sparse, spec.indexer
    keys = 0 if cache is None else cache.bytes_per_token
    index = indexer.key_bytes(spec.dtype) / indexer.tokens_per_entry if indexer else 0
    return keys / (sparse.tokens_per_entry if sparse else 1), index


def _tree(
    spec: LayerSpec, layers: list[int], read: _Sources, selection: Selection | SelectionError
) -> Tree:
    tree = Tree(f"[bold]{len(layers)} layers[/]: {escape(str(spec))}")
    for sources, (_, what) in zip(read, SOURCES, strict=True):
        for source in sorted(each for each in {*sources} if each is not None):
            readers = [i for i, other in zip(layers, sources, strict=True) if other == source != i]
            if readers:
                tree.add(f"layers {ranges(readers)} {what} of layer {source}")
    if isinstance(selection, SelectionError):
        tree.add(f"[red]{escape(str(selection))}[/]")
        return tree
    result = selection.decision
    if spec.sparse is not None:
        keys, index = _context_bytes(selection)
        beside = f", and {index:g} of index keys" if index else ""
        tree.add(f"a layer keeps {keys:g} bytes of keys and values for a token of context{beside}")
    for number, step in enumerate(result.steps, 1):
        node = tree.add(f"{number}. {escape(step.question)} [bold]{escape(step.answer)}[/]")
        for verdict in step.verdicts:
            mark = "[green]+[/]" if verdict.accepted else "[red]-[/]"
            leaf = node.add(f"{mark} {escape(verdict_line(verdict))}")
            for rejection in verdict.rejections:
                leaf.add(escape(str(rejection)))
    tree.add(f"[bold green]=> {escape(result.summary())}[/]")
    for note in result.notes:
        tree.add(escape(f"note: {note}"))
    return tree
