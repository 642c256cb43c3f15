"""Layers whose bits depend on no other request, or on no step either, beside layers without a promise."""

from __future__ import annotations

from dataclasses import replace

from table import Bar, Contender, Other, Row

from suites import decode, mixed, prefill

BACKENDS = {"cuda": "TRITON_ATTN", "cpu": "NATIVE_ATTN"}
BAR = Bar(1.15, "free")


def pair(backend: str) -> tuple[Contender, ...]:
    return (
        Other("batch_invariant", backend, {"batch_invariant": "batch"}),
        Other("free", backend),
        Other("call_invariant", backend, {"batch_invariant": "calls"}),
    )


def serves(row: Row, device: str) -> bool:
    """Whether the device's backend is among a row's, for the layer as it is."""
    return BACKENDS[device] in row.by.get(device, ())


ROWS = [
    replace(row, name=f"{kind}: {row.name}", bar=BAR, libraries=(),
            by={device: pair(name) for device, name in BACKENDS.items() if serves(row, device)})
    for kind, rows in (("decode", decode.ROWS), ("mixed", mixed.ROWS), ("prefill", prefill.ROWS))
    for row in rows
    if any(serves(row, device) for device in BACKENDS)
]  # fmt: skip
