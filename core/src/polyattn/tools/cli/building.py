"""`polyattn build`: compiles what a model's layers may run, so that no process has to wait for it."""

from __future__ import annotations

import logging
import time

from polyattn.api import select
from polyattn.registry.devices import resolve_device
from polyattn.runtime.group import LayerGroup
from polyattn.settings import current_settings
from polyattn.spec.decompose import group_layers
from polyattn.tools.cli.models import AS_IT_IS, Reading, read_specs
from polyattn.tools.cli.output import console


def show(
    model: str | None,
    spec_json: str | None,
    device: str | None,
    backend: str | None,
    reading: Reading = AS_IT_IS,
) -> int:
    """Build each layer group's backends and candidates; print the seconds that each group took."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("polyattn").setLevel(logging.INFO)
    settings = current_settings().with_backend(backend, "flag --backend")
    resolved = resolve_device(device)
    _, specs = read_specs(model, spec_json, reading)
    for spec, layers in group_layers(specs).items():
        began = time.monotonic()
        group = LayerGroup(select(spec, resolved, settings=settings))
        group.finish_builds()
        seconds = time.monotonic() - began
        console.print(f"{len(layers)} layers: {spec}: built in {seconds:.1f} s", markup=False)
    return 0
