"""What is one test of the kit? A `Case`: a check, its layer and its batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polyattn.device import Device
from polyattn.errors import SpecError
from polyattn.registry.capabilities import Capabilities, check
from polyattn.registry.info import BackendInfo, load_object
from polyattn.spec.layer import LayerSpec
from polyattn.spec.row_format import ANY_ROWS, is_rows, known_formats, rows_of
from polyattn.workload.steps import USUAL


@dataclass(frozen=True)
class Case:
    """One test. `check` names the property, `batch` names a shape, `inputs` unusual numbers."""

    check: str
    label: str
    spec: LayerSpec
    batch: str = "mixed"
    inputs: str = USUAL

    @property
    def id(self) -> str:
        """The test's id in pytest."""
        words = [self.check, self.label, self.batch]
        words += [] if self.inputs == USUAL else [self.inputs]
        return "-".join(words).replace(" ", "_")


IN_PAIRS = "nvfp4"
"""The format of rows that is tried with each other feature, where any is claimed."""


def caches(caps: Capabilities, spec: LayerSpec, every: bool = True) -> list[str]:
    """Return the quantised caches that the claims allow for a layer; of any rows each format, or one."""
    names = caps.kv_cache_dtypes - {"auto", ANY_ROWS}
    if ANY_ROWS in caps.kv_cache_dtypes:
        names |= known_formats().keys() if every else {IN_PAIRS}
    return [
        name for name in sorted(names) if not is_rows(name) or changed(spec, kv_cache_dtype=name)
    ]


def changed(spec: LayerSpec, **changes: Any) -> LayerSpec | None:
    """Return the layer with these fields, or None where there is no such layer."""
    try:
        return spec.replace(**changes)
    except SpecError:
        return None


def unread(info: BackendInfo, spec: LayerSpec) -> str | None:
    """Say why a backend can't read a layer's rows of bytes, or None."""
    stored = spec.kv_cache_dtype
    if (
        not is_rows(stored)
        or info.rows_check is None
        or stored in info.capabilities.kv_cache_dtypes
    ):
        return None
    check_rows = load_object(info.rows_check)
    return next(filter(None, map(check_rows, rows_of(stored))), None)


def stored_as(caps: Capabilities, dtype: str) -> dict[str, Any]:
    """Return what a quantised cache sets on a layer."""
    return {"kv_cache_dtype": dtype, "fp8_compute": caps.fp8_compute and dtype == "fp8_e4m3"}


def captures(device: Device) -> bool:
    """Whether this machine's device records graphs: torch calls CUDA's and ROCm's both so."""
    return str(device.torch_device).startswith("cuda")


def served_phases(caps: Capabilities, spec: LayerSpec, device: Device) -> list[str]:
    """Return which of prefill and decode the claims cover for a layer."""
    return [p for p in ("prefill", "decode") if not check(caps, spec, device, p)]
