"""Claims of the TPU plugin's backends, by the conformance kit, interpreted on the CPU.

Through torchax the kit's tensors live in JAX. Over the host's tensors the same jitted functions run,
without its views: those that `test_jax_door.py` calls by themselves.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from kits import conforms

pytest.importorskip("jax")
slow, sweep = pytest.mark.slow, pytest.mark.sweep

WAYS = {"torchax": ("jax", "-p", "in_jax"), "host": ("cpu",)}
"""The torch device that the kit selects for, and what is registered with pytest."""
FEW = (
    "out- or strided- or (plans- and not recurrent) or (isolation-nan and mixed) or context-cached"
)
"""Views, plans and isolation: what torchax can get wrong, where the kernels themselves are right."""
FEW_RECURRENT = (
    "(recurrent_out or recurrent_strided) and (gdn or short_conv) or recurrent_plans-short_conv"
)
"""The kind with the most inputs and the one with the fewest; plans are any kind's."""
ALL = ""


ENVIRONMENT = {
    "PALLAS_INTERPRET": "1",
    "JAX_PLATFORMS": "cpu",
    "PALLAS_BUCKETS": "tokens=8192,seqs=1024,pages=8192",
    "POLYATTN_PLUGIN_TIMEOUT": "200",  # torchax is imported to look for its device
    "PYTHONPATH": str(Path(__file__).parent),
}

SMALL = ENVIRONMENT | {"PALLAS_BUCKETS": "tokens=1024,seqs=16,pages=512"}
"""For short steps: the interpreter computes each place of a bucket."""


def conforms_through(
    way: str, backend: str, chosen: str, least: int, environment: dict[str, str] = ENVIRONMENT
) -> None:
    """Assert that the kit, or the cases that `chosen` names, passes."""
    device, *plugin = WAYS[way]
    conforms(backend, least, *plugin, "-k", chosen, device=device, **environment)


@slow
@pytest.mark.skipif(find_spec("torchax") is None, reason="torchax is not installed")
@pytest.mark.parametrize(
    ("backend", "chosen", "least"), [("XLA_SCAN", FEW_RECURRENT, 5), ("PALLAS_ATTN", FEW, 5)]
)
def test_views_and_plans_conform_through_torchax(backend: str, chosen: str, least: int) -> None:
    conforms_through("torchax", backend, chosen, least, SMALL)


@sweep
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("backend", "least"),
    [("XLA_MLA_SPARSE", 30), ("XLA_SCAN", 90), ("PALLAS_MLA", 30), ("PALLAS_ATTN", 300)],
)
def test_conforms_in_the_interpreter(backend: str, least: int, way: str) -> None:
    if way == "torchax" and find_spec("torchax") is None:
        pytest.skip("torchax is not installed")
    conforms_through(way, backend, ALL, least)


@sweep
@pytest.mark.skipif(find_spec("torchax") is None, reason="torchax is not installed")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("backend", "least"), [("JAX_STORE", 20), ("JAX_MERGE", 4)])
def test_services_conform_through_torchax(backend: str, least: int) -> None:
    conforms_through("torchax", backend, ALL, least)
