"""`polyattn explain`: the decision tree of each layer group, with every rejection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.tree import Tree

from polyattn.api import select, unmatched_overrides
from polyattn.errors import SelectionError
from polyattn.registry.devices import resolve_device
from polyattn.selection.decision import verdict_line
from polyattn.selection.selection import Selection
from polyattn.settings import current
from polyattn.spec.decompose import group_layers, kv_sources, ranges
from polyattn.spec.layer import LayerSpec
from polyattn.tools.cli.forecasting import forecast, print_forecast
from polyattn.tools.cli.grammar import parse_batch
from polyattn.tools.cli.models import AS_IT_IS, Reading, read_specs
from polyattn.tools.cli.output import console, print_json


def show(
    model: str | None,
    spec_json: str | None,
    device: str | None,
    backend: str | None,
    batches: Sequence[str],
    as_json: bool,
    reading: Reading = AS_IT_IS,
) -> int:
    """Print one tree a layer group; exit 1 when a group has no backend."""
    steps = {text: parse_batch(text) for text in batches}
    settings = current().with_backend(backend, "flag --backend")
    specs = read_specs(model, spec_json, reading)[1]
    groups = group_layers(specs)
    resolved = resolve_device(device)
    found: list[_Group] = []
    for spec, layers in groups.items():
        read = kv_sources(specs, layers)
        try:
            found.append((spec, layers, read, select(spec, resolved, settings=settings)))
        except SelectionError as error:
            found.append((spec, layers, read, error))
    notes = unmatched_overrides(list(groups), settings)
    if as_json:
        print_json(
            {"device": str(resolved), "groups": [_json(*g, steps) for g in found], "notes": notes}
        )
    else:
        console.print(f"on [bold]{escape(str(resolved))}[/]", highlight=False)
        for spec, layers, read, result in found:
            console.print(_tree(spec, layers, read, result), highlight=False)
            if isinstance(result, Selection):
                for text, rows in steps.items():
                    print_forecast(text, forecast(result, rows))
        for note in notes:
            console.print(f"note: {note}", markup=False)
    return int(any(isinstance(result, SelectionError) for *_, result in found))


_Group = tuple[LayerSpec, list[int], tuple[int, ...], Selection | SelectionError]
"""A group's spec, its layers, whose keys each reads, and what was selected."""


def _json(
    spec: LayerSpec,
    layers: list[int],
    read: tuple[int, ...],
    result: Selection | SelectionError,
    steps: Mapping[str, list[tuple[int, int]]],
) -> dict[str, Any]:
    base: dict[str, Any] = {"spec": spec.to_dict(), "layers": layers, "kv_source": list(read)}
    if isinstance(result, SelectionError):
        return base | {"error": str(result)}
    predicted = {text: forecast(result, rows) for text, rows in steps.items()}
    return base | result.decision.to_dict() | ({"batches": predicted} if steps else {})


def _tree(
    spec: LayerSpec, layers: list[int], read: tuple[int, ...], found: Selection | SelectionError
) -> Tree:
    tree = Tree(f"[bold]{len(layers)} layers[/]: {escape(str(spec))}")
    for source in sorted(set(read)):
        readers = [i for i, other in zip(layers, read, strict=True) if other == source != i]
        if readers:
            tree.add(f"layers {ranges(readers)} read the keys of layer {source}")
    if isinstance(found, SelectionError):
        tree.add(f"[red]{escape(str(found))}[/]")
        return tree
    result = found.decision
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
