"""Layers and batches that nobody thought of: drawn from the claims until a budget of seconds is spent.

Hypothesis draws from the harness's seed; what fails is printed with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

from polyattn.conformance.case import Case, served_phases
from polyattn.conformance.cases.attention import (
    FEATURE_FIELDS,
    GQA_RATIOS,
    HEAD_SIZES,
    fields_of,
)
from polyattn.conformance.cases.recurrent import specs as recurrent_specs
from polyattn.conformance.harness.attention import AttentionHarness
from polyattn.conformance.harness.base import Harness
from polyattn.conformance.harness.mla import LatentHarness
from polyattn.conformance.harness.recurrent import RecurrentHarness
from polyattn.errors import PolyattnError, SelectionError, SpecError
from polyattn.registry.capabilities import Capabilities
from polyattn.registry.discovery import discover
from polyattn.runtime.group import LayerGroup
from polyattn.spec.kinds import Role
from polyattn.spec.layer import LayerSpec

EXAMPLES = 8
"""Drawn at a time; between them the clock is looked at."""
WIDEST = 128
"""The largest head size that is drawn: the reference is slow."""

lengths = st.lists(
    st.tuples(st.integers(0, 12) | st.just(1), st.integers(0, 70) | st.integers(100, 700))
    .map(lambda pair: (pair[0], pair[0] + pair[1])),
    min_size=1, max_size=14,
)  # fmt: skip


def drawn(
    harness: Harness, example: Callable[[st.DataObject], None], count: int | None = None
) -> int:
    """Run `example` on draw after draw; returns how many ran.

    Until `count` of them did, or, without one, until the harness's budget is spent.
    """
    end, ran = time.monotonic() + harness.budget, 0

    def once(data: st.DataObject) -> None:
        nonlocal ran
        example(data)
        ran += 1

    at = harness.seed
    while ran < count if count is not None else not ran or time.monotonic() < end:
        configured = settings(
            max_examples=EXAMPLES if count is None else count - ran, deadline=None, database=None,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )  # fmt: skip
        seed(at)(configured(given(st.data())(once)))()
        at += 1
    return ran


def search(case: Case, harness: AttentionHarness) -> None:
    """Any layer that is claimed, two of them and two plans in turn, over any batch."""
    caps = discover().backend(harness.backend).capabilities

    def example(data: st.DataObject) -> None:
        spec = data.draw(attention_specs(caps, case.spec), label="spec")
        group = drawn_group(data, harness, caps, spec)
        steps = [data.draw(lengths, label="(query, length)") for _ in range(2)]
        if "prefill" not in caps.phases:
            steps = [[(1, max(length, 1)) for _, length in step] for step in steps]
        layers = [harness.layer(spec, group=group) for _ in range(2)]
        firsts = [harness.inputs(layers[0], step) for step in steps]
        plans = [group.plan(first.batch) for first in firsts]
        for index in (0, 1, 0):
            other = harness.inputs(layers[1], steps[index], like=firsts[index])
            harness.check(layers[0], firsts[index], "drawn: ", plans[index])
            harness.check(layers[1], other, "drawn, another layer: ", plans[index])

    drawn(harness, example)


def drawn_group(
    data: st.DataObject, harness: Harness, caps: Capabilities, spec: LayerSpec
) -> LayerGroup:
    """Return a group in a layout that is drawn; a draw that isn't claimed is dropped."""
    assume(len(served_phases(caps, spec, harness.device)) == len(caps.phases - {"mixed"}))
    layout = data.draw(st.sampled_from(caps.layouts), label="layout") if spec.cached else None
    try:
        return harness.group(spec, layout)
    except SelectionError:  # such a block size in such a layout, say
        assume(False)
        raise


@st.composite
def attention_specs(draw: st.DrawFn, caps: Capabilities, base: LayerSpec) -> LayerSpec:
    """Draw a layer from the claims. What they exclude is drawn too, and left to the caller."""
    sizes = [s for s in caps.head_sizes.examples(HEAD_SIZES) if s <= WIDEST] or [base.head_size]
    ratios = caps.gqa_ratios.examples(GQA_RATIOS) if "gqa" in caps.features else [1]
    cached = draw(st.sampled_from(sorted(caps.cached)))
    roles = sorted({Role.DECODER, Role.CROSS} & caps.roles) or [base.role]
    role = draw(st.sampled_from(roles))
    claimed = [n for n in FEATURE_FIELDS if n in caps.features and "invariant" not in n]
    chosen = draw(st.sets(st.sampled_from(claimed), max_size=4)) if claimed else set()
    kv_heads = draw(st.integers(1, 4))
    values: dict[str, Any] = {
        "num_heads": kv_heads * draw(st.sampled_from(ratios)),
        "num_kv_heads": kv_heads,
        "head_size": draw(st.sampled_from(sizes)),
        "dtype": draw(st.sampled_from(sorted(caps.dtypes))),
        "cached": cached,
        "role": role,
        "causal": base.causal and role is Role.DECODER,
        "scale": draw(st.just(0.0) | st.floats(0.02, 0.4)),
    }
    for name in sorted(chosen):
        values |= fields_of(caps, name, cached)
    for name in {"sliding_window", "chunk_size"} & values.keys():
        values[name] = draw(st.integers(1, 40))
    if "sink_tokens" in values:
        values["sink_tokens"] = draw(st.integers(1, 5))
    if "v_head_size" in caps.features and not caps.v_head_pairs and draw(st.booleans()):
        values["v_head_size"] = draw(st.sampled_from(caps.v_head_sizes.examples((16, 32, 48))))
    if cached:
        values["kv_cache_dtype"] = draw(st.sampled_from(sorted(caps.kv_cache_dtypes)))
        if "qkv_dtype" in values:
            values["kv_cache_dtype"] = values["qkv_dtype"]
        values["fp8_compute"] = caps.fp8_compute and values["kv_cache_dtype"] == "fp8_e4m3"
        values["block_size"] = draw(
            st.sampled_from(
                caps.block_sizes.examples((1, 3, 8, 16, 32, 64)) or [caps.preferred_block_size]
            )
        )
    try:
        return LayerSpec(**values)
    except SpecError:  # cross-attention with a window, say
        assume(False)
        raise


def latent_search(case: Case, harness: LatentHarness) -> None:
    """Any MLA layer that is claimed, over any batch."""
    caps = discover().backend(harness.backend).capabilities

    def example(data: st.DataObject) -> None:
        spec = data.draw(latent_specs(caps, case.spec), label="spec")
        step = data.draw(lengths, label="(query, length)")
        if "prefill" not in caps.phases and case.spec.latent and case.spec.latent.topk:
            step = [(1, max(length, 1)) for _, length in step]
        try:
            layer = harness.layer(spec)
        except SelectionError:
            assume(False)
        harness.check(layer, harness.inputs(layer, step), "drawn: ")

    drawn(harness, example)


@st.composite
def latent_specs(draw: st.DrawFn, caps: Capabilities, base: LayerSpec) -> LayerSpec:
    """Draw an MLA layer from the claims."""
    heads = draw(st.sampled_from(caps.gqa_ratios.examples((1, 2, 5, 16)) or [128]))
    return base.replace(
        num_heads=heads,
        num_kv_heads=heads,
        dtype=draw(st.sampled_from(sorted(caps.dtypes))),
        kv_cache_dtype=draw(st.sampled_from(sorted(caps.kv_cache_dtypes))),
        needs_lse="lse" in caps.features and draw(st.booleans()),
        scale=draw(st.just(0.0) | st.floats(0.05, 0.2)),
    )


NUMBERS = st.sampled_from(["usual", "growing", "forgetting"])


@st.composite
def recurrences(draw: st.DrawFn, caps: Capabilities, base: LayerSpec) -> LayerSpec:
    """Draw a recurrence of `base`'s kind from the claims."""
    dtype = draw(st.sampled_from(sorted(caps.dtypes)))
    found = draw(st.sampled_from([spec for _, spec in recurrent_specs(base.kind, dtype)]))
    heads = found.gqa_ratio * draw(st.integers(1, 4))
    if found.head_size == 1:
        return found
    return found.replace(num_heads=heads, num_kv_heads=heads // found.gqa_ratio)


def recurrent_search(case: Case, harness: RecurrentHarness) -> None:
    """Any size of this kind, any numbers, over any batch."""
    caps = discover().backend(harness.backend).capabilities

    def example(data: st.DataObject) -> None:
        spec = data.draw(recurrences(caps, case.spec), label="spec")
        numbers = data.draw(NUMBERS)
        step = data.draw(lengths, label="(query, length)")
        try:
            layer = harness.layer(spec, numbers)
        except PolyattnError:
            assume(False)
        harness.check(layer, harness.inputs(layer, step, numbers), "drawn: ")

    drawn(harness, example)
