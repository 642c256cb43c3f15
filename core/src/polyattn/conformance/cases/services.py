"""Which cases follow from what a store or a merge claims? Pure data."""

from __future__ import annotations

from collections.abc import Iterator

from polyattn.conformance.case import Case, caches
from polyattn.device import Device
from polyattn.registry.capabilities import Capabilities, check
from polyattn.registry.info import BackendInfo
from polyattn.spec.kinds import DTYPES, AttentionKind
from polyattn.spec.latent import LatentSpec
from polyattn.spec.layer import LayerSpec
from polyattn.spec.norm import NormSpec
from polyattn.spec.rope import RopeSpec
from polyattn.spec.row_format import is_rows

SLOTS = ("some", "all skipped", "none", "one", "many")
"""Orders of a step's slots: shuffled with skips, all skipped, no token, a decode, thousands."""


def derive(info: BackendInfo, device: Device) -> list[Case]:
    """Return the cases of a store's or a merge's claims."""
    caps = info.capabilities
    phase = next(iter(caps.phases))
    kinds = [k for k in (AttentionKind.ATTENTION, AttentionKind.MLA) if k in caps.kinds]
    cases = []
    for kind in kinds:
        for label, spec in _specs(caps, _base(caps, kind), phase):
            where = f"{kind.value} {label}".strip()
            if phase == "merge":
                cases += [
                    Case("merge", where, spec, "pairs"),
                    Case("merge_many", where, spec, "ten"),
                ]
                continue
            cases.append(Case("store", where, spec, "some"))
            if not label:
                cases += [Case("store", where, spec, name) for name in SLOTS[1:]]
                cases += [Case("store_plans", where, spec, "some")]
                layouts = caps.layouts if kind is AttentionKind.ATTENTION else ()
                sized = spec.replace(block_size=64)  # of a contiguous cache it must be said
                cases += [Case("store", f"{where} {form}", sized, "some") for form in layouts]
            if label in ("cache int8", "cache fp8_e4m3", "cache fp8_e5m2"):
                cases += [Case("store_ties", where, spec, "some")]
                cases += [Case("store_plans", where, spec, "some")]
        if phase == "store":
            cases += _rotated(caps, _base(caps, kind))
        if phase == "store" and kind is AttentionKind.ATTENTION:
            cases += _normed(caps, _base(caps, kind))
    can = [c for c in cases if not check(caps, c.spec, device, phase)]
    refused = [
        Case(
            "refusal", f"{kind.value} dtype {dtype}", _base(caps, kind).replace(dtype=dtype), "none"
        )
        for kind in kinds
        for dtype in DTYPES
        if dtype not in caps.dtypes
    ]
    return can + refused


def _rotated(caps: Capabilities, base: LayerSpec) -> Iterator[Case]:
    """Yield the cases of each pairing that is claimed: whole heads and parts, biases, 8-bit caches."""
    whole = base.head_size if base.latent is None else base.latent.rope_head_size
    factor = {"base": 5000.0, "attention_factor": 1.3}
    warm = {"temperature": 0.2, "temperature_length": 300}
    for pairing in sorted(caps.rotates):
        spec = base.replace(rope=RopeSpec(pairing=pairing, rotary_size=whole, **factor))  # type: ignore[arg-type]
        where = f"{base.kind.value} {pairing}"
        yield from (Case("store_rotated", where, spec, name) for name in SLOTS)
        yield Case("store_rotated_plans", where, spec, "some")
        heated = RopeSpec(pairing=pairing, rotary_size=whole, **warm)  # type: ignore[arg-type]
        yield Case("store_rotated", f"{where} temperature", spec.replace(rope=heated), "some")
        for dtype in sorted(caps.dtypes - {base.dtype}):
            yield Case("store_rotated", f"{where} {dtype}", spec.replace(dtype=dtype), "some")
        for cached in (n for n in caches(caps, base) if not is_rows(n)):
            if base.latent is None and "head_scales" in caps.features:
                many = spec.replace(kv_cache_dtype=cached, scales="head")
                yield Case("store_rotated", f"{where} head scales, cache {cached}", many, "some")
            eight = spec.replace(kv_cache_dtype=cached)
            yield Case("store_rotated", f"{where} cache {cached}", eight, "some")
        if base.latent is not None:
            continue
        for size in (24, 2):
            part = RopeSpec(pairing=pairing, rotary_size=size, **factor)  # type: ignore[arg-type]
            for label in ("", " bias"):
                yield Case(
                    "store_rotated",
                    f"{where} {size} of {whole}{label}",
                    spec.replace(rope=part),
                    "some",
                )
        yield Case("store_rotated", f"{where} v 32 bias", spec.replace(v_head_size=32), "some")


def _normed(caps: Capabilities, base: LayerSpec) -> Iterator[Case]:
    """Yield the cases of each norm that is claimed: with each pairing, a part of a head, none of it."""
    for over in sorted(caps.norms):
        spec = base.replace(qk_norm=NormSpec(over=over, eps=1e-3))
        where = f"{base.kind.value} norm of a {over}"
        yield Case("store_rotated", f"{where} alone", spec, "some")
        for pairing in sorted(caps.rotates):
            for size in (base.head_size, 24):
                rope = RopeSpec(pairing=pairing, rotary_size=size, base=5000.0)
                turned = spec.replace(rope=rope)
                label = f"{where} {pairing} {size} of {base.head_size}"
                yield Case("store_rotated", f"{label} bias", turned, "some")
        yield from (Case("store_rotated", where, turned, name) for name in SLOTS)
        yield Case("store_rotated_plans", where, turned, "some")
        for dtype in sorted(caps.dtypes - {base.dtype}):
            yield Case("store_rotated", f"{where} {dtype}", turned.replace(dtype=dtype), "some")
        for cached in (n for n in caches(caps, base) if not is_rows(n)):
            eight = turned.replace(kv_cache_dtype=cached)
            yield Case("store_rotated", f"{where} cache {cached}", eight, "some")
        for heads in (1, 3, 40):  # 40: more than a kernel takes at once
            many = turned.replace(num_heads=2 * heads, num_kv_heads=heads)
            yield Case("store_rotated", f"{where} kv_heads {heads}", many, "some")


def _base(caps: Capabilities, kind: AttentionKind) -> LayerSpec:
    dtype = next(d for d in ("bfloat16", "float16", "float32") if d in caps.dtypes)
    if kind is AttentionKind.MLA:
        latent = LatentSpec(rank=64, rope_head_size=16)
        return LayerSpec(
            kind=kind, num_heads=4, head_size=48, v_head_size=32, dtype=dtype, latent=latent
        )
    return LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype=dtype)


def _specs(caps: Capabilities, base: LayerSpec, phase: str) -> Iterator[tuple[str, LayerSpec]]:
    yield "", base
    for dtype in DTYPES:
        if dtype in caps.dtypes and dtype != base.dtype:
            yield f"dtype {dtype}", base.replace(dtype=dtype)
    if phase == "store":
        for cached in caches(caps, base):
            yield f"cache {cached}", base.replace(kv_cache_dtype=cached)
            if "float32" in caps.dtypes:
                wide = base.replace(kv_cache_dtype=cached, dtype="float32")
                yield f"float32, cache {cached}", wide
    if base.latent is None:
        for heads in (1, 3, 8):
            yield f"kv_heads {heads}", base.replace(num_heads=2 * heads, num_kv_heads=heads)
        for size in caps.head_sizes.examples((8, 80, 128, 256)):
            yield f"head_size {size}", base.replace(head_size=size)
        yield "v_head_size 32", base.replace(v_head_size=32)
    elif phase == "store":
        latent = LatentSpec(rank=512, rope_head_size=64)
        wide = base.replace(head_size=192, v_head_size=128, latent=latent)
        yield "rank 512", wide
        for cached in caches(caps, wide):
            if cached not in caches(caps, base):
                yield f"rank 512, cache {cached}", wide.replace(kv_cache_dtype=cached)
    if phase == "store" and base.latent is None:
        for cached in caches(caps, base, every=False):
            for scales in ("tensor", "head"):
                if f"{scales}_scales" in caps.features:
                    spec = base.replace(kv_cache_dtype=cached, scales=scales)
                    yield f"{scales} scales, cache {cached}", spec
        if "fp8_inputs" in caps.features and "fp8_e4m3" in caps.kv_cache_dtypes:
            eight = base.replace(kv_cache_dtype="fp8_e4m3", qkv_dtype="fp8_e4m3")
            yield "fp8 inputs", eight
    if phase == "store":
        for block in caps.block_sizes.examples((1, 8, 64)):
            yield f"block_size {block}", base.replace(block_size=block)
