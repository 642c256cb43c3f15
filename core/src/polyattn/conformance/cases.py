"""Which cases follow from a backend's claims? Pure data: nothing here runs a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from polyattn.conformance.case import Case, captures
from polyattn.conformance.families import derive_latent, derive_recurrent
from polyattn.device import Device
from polyattn.registry.capabilities import Capabilities, check
from polyattn.registry.info import BackendInfo
from polyattn.spec.kinds import DTYPES, KV_CACHE_DTYPES, Role
from polyattn.spec.layer import LayerSpec

HEAD_SIZES = (8, 16, 32, 40, 64, 80, 96, 112, 128, 160, 192, 256, 512)
GQA_RATIOS = (1, 2, 3, 4, 5, 7, 8, 16)
BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
CACHED_BATCHES = (
    "decode", "prefill", "chunked", "mixed", "padded", "late padding", "empty",
)  # fmt: skip
DENSE_BATCHES = ("dense",)

FEATURE_FIELDS: dict[str, dict[str, Any]] = {
    "sliding_window": {"sliding_window": 21},
    "window_right": {"causal": False, "sliding_window": 21, "window_right": 9},
    "chunked": {"chunk_size": 24},
    "logit_soft_cap": {"logit_soft_cap": 1.5},
    "alibi": {"alibi": True},
    "learned_sinks": {"learned_sinks": True},
    "sink_tokens": {"sliding_window": 21, "sink_tokens": 3},
    "lse": {"needs_lse": True},
    "deterministic": {"deterministic": True},
    "batch_invariant": {"batch_invariant": True},
}
"""What each optional feature sets on the base spec."""


def batches(name: str, block: int) -> list[tuple[int, int]]:
    """Return (query length, sequence length) pairs for a block size.

    Together they hold empty sequences, length 1, exact multiples of a block and one over.
    """
    decode = [(1, 1), (1, block), (1, block + 1), (1, 3 * block - 1), (1, 5 * block + 7)]
    prefill = [(0, 0), (1, 1), (2, 2), (block, block), (block + 1, block + 1), (37, 37)]
    chunked = [(0, 5), (3, block + 3), (block, 2 * block), (5, 4 * block + 1), (1, 9), (29, 61)]
    return {
        "decode": decode,
        "prefill": prefill,
        "chunked": chunked,
        "mixed": [*decode, (0, 0), *prefill[3:], *chunked],
        "padded": [(1, block + 3), (1, 0), (1, 2), (1, 0)],
        "empty": [(0, 0), (0, 7)],
        "late padding": [(5, block + 5), (1, 0), (0, 3), (1, 9)],
        "dense": [(1, 1), (33, 33), (0, 0), (64, 64), (17, 17)],
    }[name]


def derive(info: BackendInfo, device: Device) -> list[Case]:
    """Return every case that `info`'s capabilities give on `device`."""
    caps = info.capabilities
    if any(kind.is_recurrent for kind in caps.kinds):
        return derive_recurrent(info, device)
    if any(kind.is_latent for kind in caps.kinds):
        return derive_latent(info, device)
    cases = []
    roles = [role for role in Role if role in caps.roles]
    for role in roles:
        base = base_spec(caps, role)
        names = _batches_for(caps, role)
        cases += [Case("numeric", f"{role.value}", base, name) for name in names]
        for label, spec in _variants(caps, base):
            cases += [
                Case("numeric", f"{role.value} {label}", spec, name) for name in _main(names, label)
            ]
        if role is roles[0]:
            cases += _behaviour(caps, base, names, captures(device))
    can = [c for c in cases if served_phases(caps, c.spec, device)]
    return can + list(_refusals(caps, base_spec(caps, roles[0]), device))


def served_phases(caps: Capabilities, spec: LayerSpec, device: Device) -> list[str]:
    """Return which of prefill and decode the claims cover for a layer."""
    return [p for p in ("prefill", "decode") if not check(caps, spec, device, p)]


def base_spec(caps: Capabilities, role: Role) -> LayerSpec:
    """Return the plainest layer that the claims allow in this role."""
    dtype = next(d for d in ("bfloat16", "float16", "float32", "float64") if d in caps.dtypes)
    sizes = caps.head_sizes.examples((64, *HEAD_SIZES))
    # A list of sizes speaks of kernels that are compiled for each: 128 is the one that users have.
    usual = (128, 64) if caps.head_sizes.values else (64, 128)
    head_size = next((size for size in usual if size in sizes), sizes[0])
    ratio = next((r for r in (2, 4, 1, 8, 16) if r in caps.gqa_ratios), 1)
    if "gqa" not in caps.features:
        ratio = 1
    causal = "causal" in caps.features and role is Role.DECODER
    return LayerSpec(
        num_heads=2 * ratio,
        num_kv_heads=2,
        head_size=head_size,
        dtype=dtype,
        role=role,
        causal=causal,
        block_size=caps.preferred_block_size if role.has_cache else None,
    )


def _batches_for(caps: Capabilities, role: Role) -> tuple[str, ...]:
    if not role.has_cache:
        return DENSE_BATCHES
    if "decode" not in caps.phases:
        return ("prefill", "chunked", "empty")
    if "prefill" not in caps.phases:
        return ("decode", "padded")
    if role is Role.CROSS:
        return ("decode", "chunked")
    return CACHED_BATCHES


def _main(names: tuple[str, ...], label: str) -> tuple[str, ...]:
    """The batches that a variant runs: the one that holds most, and decode for features."""
    most = next(n for n in ("mixed", "chunked", "dense", "decode") if n in names)
    if label.startswith("feature") and "decode" in names and most != "decode":
        return (most, "decode")
    return (most,)


def _variants(caps: Capabilities, base: LayerSpec) -> Iterator[tuple[str, LayerSpec]]:
    for dtype in DTYPES:
        if dtype in caps.dtypes and dtype != base.dtype:
            yield f"dtype {dtype}", base.replace(dtype=dtype)
    for size in caps.head_sizes.examples(HEAD_SIZES):
        if size != base.head_size:
            yield f"head_size {size}", base.replace(head_size=size)
    if "gqa" in caps.features:
        for ratio in caps.gqa_ratios.examples(GQA_RATIOS):
            yield f"gqa {ratio}", base.replace(num_heads=2 * ratio, num_kv_heads=2)
        if 5 in caps.gqa_ratios:
            yield "mqa", base.replace(num_heads=5, num_kv_heads=1)
    for k, v in sorted(caps.v_head_pairs):
        yield f"feature v_head_size {k}/{v}", base.replace(head_size=k, v_head_size=v)
    if "v_head_size" in caps.features and not caps.v_head_pairs:
        for size in caps.v_head_sizes.examples((32, 48, 128)):
            if size != base.head_size:
                yield f"feature v_head_size {size}", base.replace(v_head_size=size)
    if base.cached:
        yield from _cache_variants(caps, base)
    if base.role in (Role.DECODER, Role.ENCODER_ONLY):
        yield from _feature_variants(caps, base)


def _cache_variants(caps: Capabilities, base: LayerSpec) -> Iterator[tuple[str, LayerSpec]]:
    for cached in KV_CACHE_DTYPES:
        if cached in caps.kv_cache_dtypes and cached != "auto":
            yield f"feature kv_cache_dtype {cached}", base.replace(**_cached(caps, cached))
    for size in caps.block_sizes.examples(BLOCK_SIZES):
        if size != base.block_size:
            yield f"block_size {size}", base.replace(block_size=size)
    if "NHD" in caps.layouts:
        preferred = caps.preferred_block_size
        expanded = next(
            (preferred * k for k in (2, 3, 5) if preferred * k not in caps.block_sizes), None
        )
        if expanded:
            yield f"expanded block_size {expanded}", base.replace(block_size=expanded)


def _cached(caps: Capabilities, dtype: str) -> dict[str, Any]:
    """What a quantised cache sets on the base spec."""
    return {"kv_cache_dtype": dtype, "fp8_compute": caps.fp8_compute and dtype == "fp8_e4m3"}


def _feature_variants(caps: Capabilities, base: LayerSpec) -> Iterator[tuple[str, LayerSpec]]:
    claimed = [name for name in FEATURE_FIELDS if name in caps.features]
    if base.role is not Role.DECODER:
        fitting = ("sliding_window", "window_right", "logit_soft_cap", "alibi", "lse")
        claimed = [n for n in claimed if n in fitting]
    elif "non_causal" in caps.features:
        yield "feature non_causal", base.replace(causal=False)
    for name in claimed:
        yield f"feature {name}", base.replace(**FEATURE_FIELDS[name])
    for first, second in combinations(claimed, 2):
        fields = FEATURE_FIELDS[first] | FEATURE_FIELDS[second]
        yield f"pair {first} {second}", base.replace(**fields)
    if base.role is Role.DECODER:
        for cached in sorted(caps.kv_cache_dtypes - {"auto"}):
            for name in claimed:
                changes = FEATURE_FIELDS[name] | _cached(caps, cached)
                yield f"pair {cached} {name}", base.replace(**changes)


def _behaviour(
    caps: Capabilities, base: LayerSpec, names: tuple[str, ...], graphs: bool
) -> list[Case]:
    most = _main(names, "")[0]
    cases = [Case(name, "", base, most) for name in ("out", "strided", "replan")]
    if base.cached:
        contexts = [
            name for name in names if name in ("decode", "chunked")
        ]  # there is a cache to change
        cases += [Case("isolation", "", base, n) for n in dict.fromkeys((most, contexts[0]))]
        cases += [Case("layout", layout, base, most) for layout in caps.layouts]
        cases.append(Case("packed", caps.layouts[0], base, most))
    for name in ("deterministic", "batch_invariant"):
        if name in caps.features:
            cases.append(Case(name, "", base.replace(**FEATURE_FIELDS[name]), most))
    if graphs and caps.graph_capture and base.cached and "decode" in caps.phases:
        spec = base.replace(graph_capture="single_token_decode")
        cases.append(Case("graph", "", spec, "decode"))
    return cases


def _refusals(caps: Capabilities, base: LayerSpec, device: Device) -> Iterator[Case]:
    """One case for each thing that the backend doesn't claim."""
    attempts: dict[str, dict[str, Any]] = dict(FEATURE_FIELDS)
    attempts |= {f"dtype {dtype}": {"dtype": dtype} for dtype in DTYPES}
    attempts |= {f"head_size {size}": {"head_size": size} for size in HEAD_SIZES}
    attempts |= {f"kv_cache_dtype {c}": {"kv_cache_dtype": c} for c in KV_CACHE_DTYPES}
    attempts |= {f"gqa {r}": {"num_heads": 2 * r, "num_kv_heads": 2} for r in GQA_RATIOS}
    attempts["v_head_size"] = {"v_head_size": base.head_size // 2}
    if base.role is Role.DECODER:
        attempts["non_causal"] = {"causal": False}
    for label, changes in attempts.items():
        spec = base.replace(**changes)
        if not served_phases(caps, spec, device):
            yield Case("refusal", label, spec, "none")
