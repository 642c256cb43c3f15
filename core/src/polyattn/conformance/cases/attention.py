"""Which cases follow from what an attention backend claims? Pure data: nothing here runs a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

from polyattn.conformance.case import (
    Case,
    caches,
    captures,
    changed,
    served_phases,
    stored_as,
    unread,
)
from polyattn.conformance.cases import forests, functions, invariance, lasting, published, sparse
from polyattn.device import Device
from polyattn.registry.capabilities import Capabilities, names
from polyattn.registry.info import BackendInfo
from polyattn.spec.kinds import DTYPES, KV_CACHE_DTYPES, GraphCapture, Role
from polyattn.spec.layer import LayerSpec
from polyattn.spec.rope import RopeSpec
from polyattn.spec.row_format import ANY_ROWS
from polyattn.workload.steps import EDGES, LATER

HEAD_SIZES = (8, 16, 32, 40, 64, 80, 96, 112, 128, 160, 192, 256, 512)
GQA_RATIOS = (1, 2, 3, 4, 5, 7, 8, 16)
KV_HEADS = (1, 3, 8)
BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
CACHED_BATCHES = (
    "decode", "prefill", "chunked", "mixed", "prefills first", "many", "long", "padded",
    "late padding", "empty", "in order",
)  # fmt: skip
GIVEN_BATCHES = ("given", "more keys", "fewer keys")

NTK = RopeSpec(
    rotary_size=8, base=50.0, positions="cache", scaling="dynamic", factor=2.0, original_length=16
)
FEATURE_FIELDS: dict[str, dict[str, Any]] = {
    "sliding_window": {"sliding_window": 21},
    "window_right": {"causal": False, "sliding_window": 21, "window_right": 9},
    "chunked": {"chunk_size": 24},
    "logit_soft_cap": {"logit_soft_cap": 1.5},
    "alibi": {"alibi": True},
    "learned_sinks": {"learned_sinks": True},
    "sink_tokens": {"sliding_window": 21, "sink_tokens": 3},
    "cache_positions": {"rope": RopeSpec(rotary_size=8, base=50.0, positions="cache")},
    "cache_positions_by_length": {"rope": NTK},
    "tensor_scales": {"scales": "tensor", "kv_cache_dtype": "int8"},
    "head_scales": {"scales": "head", "kv_cache_dtype": "int8"},
    "fp8_output": {"out_dtype": "fp8_e4m3"},
    "fp8_inputs": {"qkv_dtype": "fp8_e4m3", "kv_cache_dtype": "fp8_e4m3"},
    "lse": {"needs_lse": True},
    "non_causal": {"causal": False},
    "deterministic": {"deterministic": True},
    "batch_invariant": {"batch_invariant": "batch"},
    "step_invariant": {"batch_invariant": "steps"},
    "call_invariant": {"batch_invariant": "calls"},
}
"""What each optional feature sets on the base spec."""
LEVELS = frozenset({"step_invariant", "call_invariant"})
"""What has cases of its own (`cases.invariance`)."""
ALONE = frozenset({"tensor_scales", "cache_positions_by_length", *LEVELS})
"""Features without pairs: another feature's pairs run the same code."""
SCALED = ("lse", "learned_sinks", "alibi", "logit_soft_cap")
"""Features of scaled logits: kernels turn some of them by the scale, to save a product."""
UNLIKE_CROSS = frozenset({"sliding_window", "window_right", "chunked", "alibi", "sink_tokens"})
"""Features that depend on positions, which cross-attention doesn't have."""


def fields_of(caps: Capabilities, name: str, cached: bool) -> dict[str, Any]:
    """Return the fields that a feature sets on a base spec. Without a cache, inputs are quantised.

    Features of 8 bits need a cache that is claimed.
    """
    fields = dict(FEATURE_FIELDS[name])
    stored = fields.pop("kv_cache_dtype", None)
    if stored and not cached:
        fields["qkv_dtype"] = "fp8_e4m3"
    elif stored:
        fields |= stored_as(caps, stored if stored in caps.kv_cache_dtypes else "fp8_e4m3")
    return fields


ONE_LAYER = frozenset({"numeric", "context", "layout", "packed"})
"""The checks that prove one claim. The others look at what every backend must do."""


def derive(info: BackendInfo, device: Device, whole: bool = True) -> list[Case]:
    """Return every case that `info`'s capabilities give on `device`, or those of `ONE_LAYER` alone."""
    caps = info.capabilities
    bases = [
        _stored(info, base_spec(caps, role, cached))
        for role in Role
        if role in caps.roles
        for cached in (True, False)
        if cached in caps.cached and not (cached and role in (Role.ENCODER, Role.ENCODER_ONLY))
    ]
    cases: list[Case] = []
    for base in bases:
        cases += [*_numeric(caps, base), *_parts(caps, base)]
        cases += published.derive(caps, base, device) if whole else ()
        if base is not bases[0] and base.role is Role.DECODER and not caps.mixes_tails:
            cases.append(Case("isolation", "nan", base, "more keys"))
        if whole:
            cases += functions.derive(info, base, _main(_batches_for(caps, base), "feature"))
        if base is bases[0]:
            cases += _behaviour(caps, base, _batches_for(caps, base), device)
            cases += forests.derive(caps, base, device)
            cases += lasting.derive(caps, base, _views(_batches_for(caps, base)), device)
            cases.append(Case("search", "", base, "drawn"))
            cases += _rows(caps, base, _batches_for(caps, base))
    asked = cases if whole else [c for c in cases if c.check in ONE_LAYER]
    can = [c for c in asked if served_phases(caps, c.spec, device) and not unread(info, c.spec)]
    if not whole:
        return can
    if True in caps.cached and "decode" in caps.phases:
        base = _stored(info, base_spec(caps, Role.DECODER, True))
        can += sparse.derive(info, base, device)
    refused = [*_refusals(caps, bases[0], device), *functions.refusals(info, bases[0])]
    return can + refused


def _numeric(caps: Capabilities, base: LayerSpec) -> Iterator[Case]:
    where = base.role.value if base.cached else f"{base.role.value} uncached"
    names = _batches_for(caps, base)
    for name in names:
        yield Case("numeric", where, base, name)
    if caps.by_address and not base.cached:
        lse = ("", " lse") if "lse" in caps.features else ("",)
        for label, name in product(lse, names):
            spec = base.replace(needs_lse=bool(label))
            yield Case("addressed", where + label, spec, name)
    for label, spec in _variants(caps, base):
        for name in _main(names, label):
            yield Case("numeric", f"{where} {label}", spec, name)
    if base.role is Role.DECODER:
        for numbers in ("+100", "-100"):
            yield Case("numeric", where, base, _main(names, "")[0], numbers)
        for name in ("chunked", "sink_tokens"):  # which count from where a text begins
            if name in caps.features and not base.cached:
                spec = base.replace(**FEATURE_FIELDS[name])
                for batch in ("more keys", "fewer keys"):
                    yield Case("numeric", f"{where} feature {name}", spec, batch, LATER)


def _parts(caps: Capabilities, base: LayerSpec) -> Iterator[Case]:
    """Yield the case of a divided step, whose calls may be causal or not."""
    names = _batches_for(caps, base)
    batch = next((name for name in ("chunked", "more keys") if name in names), None)
    if batch and base.causal and {"non_causal", "lse"} <= caps.features:
        where = "cached" if base.cached else "uncached"
        yield Case("context", where, base.replace(needs_lse=True), batch)


def base_spec(caps: Capabilities, role: Role, cached: bool) -> LayerSpec:
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
        cached=cached,
        causal=causal,
        block_size=caps.preferred_block_size if cached else None,
    )


def _stored(info: BackendInfo, base: LayerSpec) -> LayerSpec:
    """Return a base layer over a cache that the backend reads, where the layer's own dtype isn't one."""
    caps = info.capabilities
    if not base.cached or "auto" in caps.kv_cache_dtypes:
        return base
    for size in (base.head_size, *caps.head_sizes.examples(HEAD_SIZES)):
        sized = base.replace(head_size=size)
        for name in caches(caps, sized):
            spec = sized.replace(**stored_as(caps, name))
            if not unread(info, spec):
                return spec
    return base


def _batches_for(caps: Capabilities, base: LayerSpec) -> tuple[str, ...]:
    if not base.cached:
        # Where keys and queries are the same tokens, there are as many of each.
        return GIVEN_BATCHES if base.role in (Role.DECODER, Role.CROSS) else ("given",)
    short: tuple[str, ...] = ("short queries",) if caps.decode_query_lens > 1 else ()
    if caps.padding_rows and base.causal and base.role is Role.DECODER:
        short += ("padded rows", "padded prompts")
    if "decode" not in caps.phases:
        return ("prefill", "chunked", "empty")
    if "prefill" not in caps.phases:
        return ("decode", "padded", *short)
    if base.role is Role.CROSS:
        return ("decode", "chunked")
    return (*CACHED_BATCHES, *short)


def _main(names: tuple[str, ...], label: str) -> tuple[str, ...]:
    """The batches that a variant runs: the one that holds most, and decode for features."""
    most = next(n for n in ("mixed", "chunked", "more keys", "given", "decode") if n in names)
    if label.startswith("feature") and "decode" in names and most != "decode":
        return (most, "decode")
    return (most,)


def _views(names: tuple[str, ...]) -> str:
    """The batch that reaches a backend as views; rows in no order reach it as copies."""
    return next(name for name in ("in order", _main(names, "")[0]) if name in names)


def _variants(caps: Capabilities, base: LayerSpec) -> Iterator[tuple[str, LayerSpec]]:
    """Yield the layers that claims add, without those that a cache's format has no rows for."""
    for label, fields in _changes(caps, base):
        spec = changed(base, **fields)
        if spec is not None:
            yield label, spec


def _changes(caps: Capabilities, base: LayerSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    for dtype in DTYPES:
        if dtype in caps.dtypes and dtype != base.dtype:
            yield f"dtype {dtype}", {"dtype": dtype}
    for size in caps.head_sizes.examples(HEAD_SIZES):
        if size != base.head_size:
            yield f"head_size {size}", {"head_size": size}
    yield "scale", {"scale": 1.31}
    for count in KV_HEADS:
        heads = count * base.gqa_ratio
        yield f"kv_heads {count}", {"num_heads": heads, "num_kv_heads": count}
    if "gqa" in caps.features:
        for ratio in caps.gqa_ratios.examples(GQA_RATIOS):
            yield f"gqa {ratio}", {"num_heads": 2 * ratio, "num_kv_heads": 2}
        if 5 in caps.gqa_ratios:
            yield "mqa", {"num_heads": 5, "num_kv_heads": 1}
    for k, v in sorted(caps.v_head_pairs):
        yield f"feature v_head_size {k}/{v}", {"head_size": k, "v_head_size": v}
    if "v_head_size" in caps.features and not caps.v_head_pairs:
        for size in caps.v_head_sizes.examples((32, 48, 128)):
            if size != base.head_size:
                yield f"feature v_head_size {size}", {"v_head_size": size}
    if base.cached:
        yield from _cache_changes(caps, base)
    yield from _feature_changes(caps, base)


def _cache_changes(caps: Capabilities, base: LayerSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    for cached in caches(caps, base, every=False):
        yield f"feature kv_cache_dtype {cached}", stored_as(caps, cached)
    for size in caps.block_sizes.examples(BLOCK_SIZES):
        if size != base.block_size:
            yield f"block_size {size}", {"block_size": size}
    if "NHD" in caps.layouts:
        preferred = caps.preferred_block_size
        expanded = next(
            (preferred * k for k in (2, 3, 5) if preferred * k not in caps.block_sizes), None
        )
        if expanded:
            yield f"expanded block_size {expanded}", {"block_size": expanded}


def _rows(caps: Capabilities, base: LayerSpec, names: tuple[str, ...]) -> Iterator[Case]:
    """Each format of rows: each kind of step, what hides or changes scores, groups of 1 to 16 heads."""
    if not base.cached or ANY_ROWS not in caps.kv_cache_dtypes:
        return
    has = {*names, "short queries"} if "prefill" in names else {*names}
    steps = [n for n in ("decode", "short queries", "prefill", "chunked") if n in has]
    features = ("sliding_window", "learned_sinks", "sink_tokens", "logit_soft_cap")
    for cached in [*caches(caps, base), "int8_rows/int4"]:
        spec = base.replace(**stored_as(caps, cached))
        where = f"rows {cached}"
        yield from (Case("numeric", where, spec, name) for name in steps)
        for name in (n for n in features if n in caps.features):
            changed = spec.replace(**FEATURE_FIELDS[name])
            yield Case("numeric", f"{where} {name}", changed, _main(names, "")[0])
        for ratio in (r for r in (1, 3, 16) if r in caps.gqa_ratios and "gqa" in caps.features):
            heads = spec.replace(num_heads=2 * ratio, num_kv_heads=2)
            yield Case("numeric", f"{where} gqa {ratio}", heads, _main(names, "")[0])
        yield Case("numeric", where, spec, _main(names, "")[0], EDGES)
        yield Case("stale", where, spec, _main(names, "")[0])
        yield Case("shared", where, spec, "shared" if "prefill" in names else "decode")


def _feature_changes(caps: Capabilities, base: LayerSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    claimed = [name for name in FEATURE_FIELDS if name in caps.features]
    if base.role is not Role.DECODER:
        wanted = names("sliding_window window_right logit_soft_cap alibi lse fp8_output fp8_inputs")
        unlike = UNLIKE_CROSS if base.role is Role.CROSS else frozenset[str]()
        claimed = [name for name in claimed if name in wanted - unlike]
    elif not base.causal:
        claimed = [name for name in claimed if name != "non_causal"]
    if not base.cached:
        claimed = [name for name in claimed if not name.startswith("cache_positions")]
    for name in claimed:
        yield f"feature {name}", fields_of(caps, name, bool(base.cached))
    for name in SCALED:
        if name in claimed:
            yield f"pair scale {name}", {"scale": 1.31, **FEATURE_FIELDS[name]}
    if base.cached and "fp8_inputs" in claimed and not caps.fp8_compute:
        fields = fields_of(caps, "fp8_inputs", True) | {"fp8_compute": True}
        yield "feature fp8_inputs, fp8_compute", fields
    if base.role is Role.DECODER or not base.cached:
        for first, second in combinations([name for name in claimed if name not in ALONE], 2):
            if base.cached or {first, second} & {"non_causal", "lse"}:
                fields = fields_of(caps, first, bool(base.cached)) | fields_of(
                    caps, second, bool(base.cached)
                )
                yield f"pair {first} {second}", fields
    if base.role is Role.DECODER and base.cached:
        for cached in caches(caps, base, every=False):
            for name in claimed:
                fields = FEATURE_FIELDS[name]
                if "kv_cache_dtype" not in fields and name not in LEVELS:
                    changes = fields | stored_as(caps, cached)
                    yield f"pair {cached} {name}", changes


def _behaviour(
    caps: Capabilities, base: LayerSpec, names: tuple[str, ...], device: Device
) -> list[Case]:
    most = _main(names, "")[0]
    views = _views(names)
    cases = [Case(name, "", base, views) for name in ("out", "strided")]
    cases.append(Case("plans", "", base, most))
    for label, spec in _per_layer(caps, base):
        cases.append(Case("layers", label, spec, most))
        if label in ("tensor_scales", "head_scales"):
            cases.append(Case("rescaled", label, spec, most))
    # There is a cache to change in the first two.
    contexts = [name for name in names if name in ("decode", "chunked", "more keys")]
    for how in ("numbers", "nan", "inf"):
        chosen = dict.fromkeys((most, *contexts[:1], views))
        cases += [Case("isolation", how, base, name) for name in chosen]
    if "prefill" in names and most != "prefill":  # whose keys no cache need hold
        cases.append(Case("isolation", "nan", base, "prefill"))
    if base.cached:
        cases += [Case("layout", layout, base, most) for layout in caps.layouts]
        cases += [  # one of each batch above is of the first layout
            Case("layout", f"{layout} {label}", spec, most)
            for layout in caps.layouts[1:]
            for label, spec in _variants(caps, base)
            if label.startswith("feature ")
            and (layout != "contiguous" or spec.head_size == spec.v_head_size)
        ]
        cases += [
            Case("packed", caps.layouts[0], base, most),
            Case("stale", "", base, most),
            Case("skipped", "", base, most),
            Case("shared", "", base, "shared" if "prefill" in names else "decode"),
        ]
    if "deterministic" in caps.features:
        cases.append(Case("deterministic", "", base.replace(deterministic=True), most))
    cases += invariance.derive(caps, base, names)
    if "length_bounds" in caps.features and base.cached and "decode" in caps.phases:
        wide = {"sliding_window": 21} if "sliding_window" in caps.features else {}
        for label, fields in (("", {}), ("window", wide)):
            spec = base.replace(length_bounds=True, **fields)
            cases.append(Case("bounds", label, spec, "decode"))
            cases += [
                Case("bounds", f"{label} {batch}".strip(), spec, batch)
                for batch in ("in order", "mixed", "padded rows", "padded prompts")
                if batch in names
            ]
    if caps.graph_capture and base.cached and "decode" in caps.phases:
        how = "graph" if captures(device) else "reuse"
        spec = base.replace(graph_capture="single_token_decode")
        cases.append(Case(how, "", spec, "decode"))
        if caps.graph_capture >= GraphCapture.UNIFORM:
            cases.append(Case(how, "", base.replace(graph_capture="uniform"), "three each"))
        if caps.graph_capture >= GraphCapture.ANY and "prefill" in caps.phases:
            cases.append(Case(f"mixed_{how}", "", base.replace(graph_capture="any"), "mixed"))
    return cases


def _per_layer(caps: Capabilities, base: LayerSpec) -> Iterator[tuple[str, LayerSpec]]:
    """Layers that differ in more than their caches: parameters and scales."""
    yield "caches", base
    for name in (
        "learned_sinks",
        "alibi",
        "tensor_scales",
        "head_scales",
        "fp8_inputs",
        "fp8_output",
    ):
        if name in caps.features:
            yield name, base.replace(**fields_of(caps, name, bool(base.cached)))
    for cached in caches(caps, base, every=False) if base.cached else ():
        yield cached, base.replace(**stored_as(caps, cached))


def _refusals(caps: Capabilities, base: LayerSpec, device: Device) -> Iterator[Case]:
    """One case for each thing that the backend doesn't claim."""
    attempts = {name: fields_of(caps, name, bool(base.cached)) for name in FEATURE_FIELDS}
    if not base.cached or base.role is not Role.DECODER:
        del attempts["cache_positions"], attempts["cache_positions_by_length"]
    attempts |= {f"dtype {dtype}": {"dtype": dtype} for dtype in DTYPES}
    attempts |= {f"head_size {size}": {"head_size": size} for size in HEAD_SIZES}
    attempts |= {f"gqa {r}": {"num_heads": 2 * r, "num_kv_heads": 2} for r in GQA_RATIOS}
    if base.role is not Role.CROSS:
        attempts |= {name: functions.FUNCTIONS[name] for name in ("relative bias", "custom")}
    attempts["v_head_size"] = {"v_head_size": base.head_size // 2}
    if base.cached:
        attempts |= {f"kv_cache_dtype {c}": {"kv_cache_dtype": c} for c in KV_CACHE_DTYPES}
        attempts["uncached"] = {"cached": False, "block_size": None, "kv_cache_dtype": "auto"}
        attempts["length_bounds"] = {"length_bounds": True}
    for label, changes in attempts.items():
        spec = changed(base, **changes)
        if spec is not None and not served_phases(caps, spec, device):
            yield Case("refusal", label, spec, "none")
