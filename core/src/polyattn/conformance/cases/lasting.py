"""Which cases follow from layouts and lasting state, which every backend of attention promises?"""

from __future__ import annotations

from collections.abc import Iterator

from polyattn.conformance.case import Case, served_phases, stored_as
from polyattn.device import Device
from polyattn.registry.capabilities import Capabilities
from polyattn.spec.kinds import Role
from polyattn.spec.layer import LayerSpec
from polyattn.spec.row_format import is_rows

COPIES = frozenset({"tpu"})
"""Platforms whose backends have copies of caches: each step would copy a cache of gigabytes."""


def derive(caps: Capabilities, base: LayerSpec, batch: str, device: Device) -> Iterator[Case]:
    """Yield the cases of a backend's plainest layer; `batch`: rows that a backend gets as views."""
    with_lse = base.replace(needs_lse="lse" in caps.features)
    with_lse = with_lse if served_phases(caps, with_lse, device) else base
    for check in ("strided_out", "strided_heads", "process"):
        yield Case(check, "", base, batch if check.startswith("strided") else "tiny")
    yield Case("many_calls", "", with_lse, "tiny")
    if not COPIES & caps.platforms.keys():  # which compile for each shape
        yield Case("many_lengths", "", with_lse, "lengths")
    if base.cached:
        yield Case("wide_table", "", base, batch)
        paged = caps.layouts[0] != "contiguous" and not COPIES & caps.platforms.keys()
        paged = paged and not is_rows(base.kv_cache_dtype)  # any bytes are no row
        if paged and device.platform in ("cpu", "cuda", "rocm"):
            yield Case("far_blocks", "", base, "decode")
    for stored in sorted(caps.kv_cache_dtypes & {"int8", "fp8_e4m3"}) if base.cached else ():
        spec = base.replace(**stored_as(caps, stored))
        yield Case("reassigned", stored, spec, batch)
        for scales in ("tensor", "head"):
            if f"{scales}_scales" in caps.features:
                yield Case("reassigned", f"{stored} {scales}", spec.replace(scales=scales), batch)
    if base.role is Role.DECODER:
        for name in ("learned_sinks", "alibi"):
            if name in caps.features:
                yield Case("loaded_later", name, base.replace(**{name: True}), batch)
