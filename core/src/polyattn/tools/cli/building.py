"""`polyattn build`: compiles what a model's layers may run, so that no process has to wait for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from polyattn.api import select
from polyattn.registry.devices import resolve_device
from polyattn.runtime.group import LayerGroup
from polyattn.settings import current
from polyattn.spec.decompose import group_layers
from polyattn.tools.cli.models import read_specs
from polyattn.tools.cli.output import console


def show(
    model: str | None,
    spec_json: str | None,
    device: str | None,
    backend: str | None,
    assume: str | None = None,
    ignore: Sequence[str] = (),
    kv_cache_dtype: str | None = None,
    block_size: int | None = None,
) -> int:
    """Build each layer group's backends and candidates; print the seconds that each group took."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("polyattn").setLevel(logging.INFO)
    settings = current().with_backend(backend, "flag --backend")
    resolved = resolve_device(device)
    _, specs = read_specs(model, spec_json, assume, ignore, kv_cache_dtype, block_size)
    for spec, layers in group_layers(specs).items():
        began = time.monotonic()
        group = LayerGroup(select(spec, resolved, settings=settings))
        group.finish_builds()
        seconds = time.monotonic() - began
        console.print(f"{len(layers)} layers: {spec}: built in {seconds:.1f} s", markup=False)
    return 0
