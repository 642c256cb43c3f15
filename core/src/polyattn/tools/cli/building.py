"""`polyattn build`: compiles a model's kernels ahead, so that no process waits for them."""

from __future__ import annotations

import logging
import time

from polyattn.api import select
from polyattn.registry.devices import resolve_device
from polyattn.runtime.group import LayerGroup
from polyattn.settings import current_settings
from polyattn.spec.decompose import group_layers
from polyattn.tools.cli.models import read_specs
from polyattn.tools.cli.options import BuildOptions
from polyattn.tools.cli.output import say


def show(options: BuildOptions) -> int:
    """Build each layer group's backends and candidates; print the seconds that each group took."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("polyattn").setLevel(logging.INFO)
    settings = current_settings().with_backend(options.backend, "flag --backend")
    resolved = resolve_device(options.device)
    _, specs = read_specs(options.model, options.spec, options)
    for spec, layers in group_layers(specs).items():
        began = time.monotonic()
        group = LayerGroup(select(spec, resolved, settings=settings))
        group.finish_builds()
        seconds = time.monotonic() - began
        say(f"{len(layers)} layers: {spec}: built in {seconds:.1f} s")
    return 0
