"""Which sparse layers does an attention backend serve, as decodes over chosen pages? Pure data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from polyattn.conformance.case import Case, captures
from polyattn.conformance.cases import invariance
from polyattn.device import Device
from polyattn.registry.capabilities import Capabilities, check
from polyattn.registry.info import BackendInfo
from polyattn.spec.decompose import questions
from polyattn.spec.kinds import AttentionKind, Invariance
from polyattn.spec.layer import LayerSpec
from polyattn.spec.sparse import SparseSpec

CHOICES: dict[str, tuple[SparseSpec, int | None]] = {
    "tokens": (SparseSpec(budget=24), None),
    "groups": (SparseSpec(budget=9, granularity=4, scope="kv_head"), 16),
    "blocks": (SparseSpec(budget=3, granularity=32, scope="kv_head"), 32),
    "heads": (SparseSpec(budget=5, granularity=16, scope="head"), 32),
}
"""Choices by name, and the block size of the cache: pages of 1, 4, 32 and 16 tokens.

What else a choice may be (places, entries of several tokens, values in keys) is core's to map, the same
for every backend: `sparse_search` draws it.
"""


def derive(info: BackendInfo, base: LayerSpec, device: Device) -> list[Case]:
    """Return the cases of sparse layers like `base` that a backend's claims cover."""
    caps, cases = info.capabilities, []
    layers = {name: layer_of(caps, base, name) for name in CHOICES}
    for name, spec in layers.items():
        batches = ("choices", "empty") if name == "groups" else ("choices",)
        cases += [Case("sparse", name, spec, batch) for batch in batches]
    groups = layers["groups"]
    for label, spec in _variants(caps, groups):
        cases.append(Case("sparse", label, spec, "choices"))
    cases += [
        Case(check, "groups", groups, "decode") for check in ("sparse_plans", "sparse_others")
    ]
    if caps.graph_capture:
        captured = groups.replace(graph_capture="single_token_decode")
        how = "graph" if captures(device) else "reuse"
        cases.append(Case(how, "groups", captured, "decode"))
    cases.append(Case("sparse_search", "", groups, "drawn"))
    level = invariance.level_of(caps)
    if level:
        cases.append(
            Case("regrouped", "groups", groups.replace(batch_invariant="batch"), "choices")
        )
    if level >= Invariance.STEPS:
        cases.append(Case("chunked", "groups", groups.replace(batch_invariant="steps"), "short"))
    return [case for case in cases if serves(caps, case.spec, device)]


def rows(info: BackendInfo, device: Device) -> list[Case]:
    """Return the cases of layers of values in keys, which backends of chosen rows serve."""
    caps, cases = info.capabilities, []
    dtype = next(each for each in ("bfloat16", "float16", "float32") if each in caps.dtypes)
    for size in caps.latent_ranks.examples((64, 320, 512)):
        for name in ("tokens", "groups"):
            sparse = replace(
                CHOICES[name][0],
                scope="all",
                value_in_key=True,
                tokens_per_entry=1 if size > 64 else 4,
            )
            spec = LayerSpec(
                kind=AttentionKind.SPARSE, num_heads=16 if 16 in caps.gqa_ratios else 128,
                num_kv_heads=1, head_size=size, dtype=dtype, sparse=sparse,
                learned_sinks="lse" in caps.features, needs_lse="lse" in caps.features,
            )  # fmt: skip
            cases.append(Case("sparse", f"{name}, rows of {size}", spec, "choices"))
    return [case for case in cases if serves(caps, case.spec, device)]


def serves(caps: Capabilities, spec: LayerSpec, device: Device) -> bool:
    """Whether the claims cover a sparse layer."""
    asked = questions(spec, "decode", device.is_accelerator, caps.kinds)
    return not any(check(caps, question, device, "decode") for question in asked)


def layer_of(caps: Capabilities, base: LayerSpec, name: str) -> LayerSpec:
    """Return a sparse layer by its choice's name."""
    sparse, block = CHOICES[name]
    heads = 6 if 2 in caps.gqa_ratios and sparse.scope != "head" else 3
    return LayerSpec(
        kind=AttentionKind.SPARSE, num_heads=heads, num_kv_heads=3, head_size=base.head_size,
        dtype=base.dtype, block_size=block, sparse=sparse,
    )  # fmt: skip


def _variants(caps: Capabilities, groups: LayerSpec) -> Iterator[tuple[str, LayerSpec]]:
    if "lse" in caps.features:
        yield "lse", groups.replace(needs_lse=True)
        yield "sinks", groups.replace(needs_lse=True, learned_sinks=True)
    if "length_bounds" in caps.features:
        yield "bounds", groups.replace(length_bounds=True)
    for dtype in ("fp8_e4m3", "int8"):
        if dtype in caps.kv_cache_dtypes:
            yield dtype, groups.replace(kv_cache_dtype=dtype, fp8_compute=False)
