"""Random layers and steps, drawn from the claims by the harness's seed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

from polyattn.conformance.case import caches, served_phases
from polyattn.conformance.cases.attention import FEATURE_FIELDS, GQA_RATIOS, HEAD_SIZES, fields_of
from polyattn.conformance.cases.functions import functions, refused
from polyattn.conformance.cases.recurrent import specs as recurrent_specs
from polyattn.conformance.harness.base import Harness
from polyattn.errors import PolyattnError, SpecError
from polyattn.families.recurrent.workload import unusual
from polyattn.registry.capabilities import Capabilities
from polyattn.registry.info import BackendInfo
from polyattn.registry.variants import register_variant, variants
from polyattn.runtime.group import LayerGroup
from polyattn.spec.kinds import Role
from polyattn.spec.layer import LayerSpec
from polyattn.spec.variant import AttentionVariant
from polyattn.workload.steps import USUAL

EXAMPLES = 8
"""Draws between two looks at the clock."""
SIZES = tuple(sorted({*HEAD_SIZES, 72, 88, 100, 104, 120}))
"""Head sizes that are drawn: the kit's own, and more that models have."""
WIDEST = 128
"""The largest head size that is drawn: the reference is slow."""
OF_SEQUENCES = AttentionVariant(
    name="conformance_sequences",
    score_mod="polyattn.conformance.transforms:of_score",
    mask_mod="polyattn.conformance.transforms:of_pair",
    inputs={"sharpness": "float32[num_seqs, num_heads]", "document": "int32[num_seqs, *]"},
    summary="the conformance kit's functions that read each sequence's own inputs",
)
MASKS = {"custom": "custom_mask", "block_sparse": "block_sparse"}
"""What a backend claims of each kind of mask."""

lengths = st.lists(
    st.tuples(st.integers(0, 12) | st.just(1), st.integers(0, 70) | st.integers(100, 700)).map(
        lambda pair: (pair[0], pair[0] + pair[1])
    ),
    min_size=1,
    max_size=14,
)


def drawn(
    harness: Harness, example: Callable[[st.DataObject], None], count: int | None = None
) -> int:
    """Run `example` on draw after draw; returns how many ran.

    It stops after `count` of them or, without a count, when the harness's budget is spent. Hypothesis's
    first draw is the simplest layer with every seed, so it is dropped.
    """
    end, ran = time.monotonic() + harness.budget, 0

    def once(data: st.DataObject) -> None:
        nonlocal ran
        assume(data.draw(st.integers(0, 1 << 31), label="not the simplest"))
        example(data)
        ran += 1

    at = harness.seed
    while ran < count if count is not None else not ran or time.monotonic() < end:
        configured = settings(
            max_examples=EXAMPLES if count is None else count - ran,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        seed(at)(configured(given(st.data())(once)))()
        at += 1
    return ran


def drawn_group(
    data: st.DataObject, harness: Harness, base: LayerSpec, with_variants: bool = False
) -> LayerGroup:
    """Return the group of a layer like `base`; a draw that isn't claimed is dropped.

    `with_variants`: functions and masks are drawn, too.
    """
    caps, layout = harness.info.capabilities, None
    if base.recurrent is not None:
        spec = data.draw(recurrences(caps, base), label="spec")
    elif base.latent is not None:
        spec = data.draw(latent_specs(caps, base), label="spec")
    else:
        spec = data.draw(attention_specs(caps, base), label="spec")
        if with_variants:
            spec = data.draw(with_functions(harness.info, spec))
        assume(len(served_phases(caps, spec, harness.device)) == len(caps.phases - {"mixed"}))
        layout = data.draw(st.sampled_from(caps.layouts), label="layout") if spec.cached else None
    try:
        return harness.group(spec, layout)
    except PolyattnError:  # such a block size in such a layout, say
        assume(False)
        raise


def drawn_numbers(data: st.DataObject, spec: LayerSpec) -> dict[str, str]:
    """Return the option by which a layer's numbers, and its steps', are drawn."""
    if spec.recurrent is None:
        return {}
    return {"numbers": data.draw(st.sampled_from([USUAL, *unusual(spec)]))}


@st.composite
def attention_specs(draw: st.DrawFn, caps: Capabilities, base: LayerSpec) -> LayerSpec:
    """Draw a layer from the claims. What they exclude is drawn too, and left to the caller."""
    sizes = [s for s in caps.head_sizes.examples(SIZES) if s <= WIDEST] or [base.head_size]
    ratios = caps.gqa_ratios.examples((*GQA_RATIOS, 17)) if "gqa" in caps.features else [1]
    cached = draw(st.sampled_from(sorted(caps.cached)))
    roles = sorted({Role.DECODER, Role.CROSS} & caps.roles) or [base.role]
    role = draw(st.sampled_from(roles))
    claimed = [n for n in FEATURE_FIELDS if n in caps.features and "invariant" not in n]
    chosen = draw(st.sets(st.sampled_from(claimed), max_size=4)) if claimed else set()
    kv_heads = draw(st.integers(1, 5))
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
        values[name] = draw(st.integers(1, 40) | st.sampled_from((128, 1024)))
    if "sink_tokens" in values:
        values["sink_tokens"] = draw(st.integers(1, 9) | st.sampled_from((64, 200)))
    if "logit_soft_cap" in values:
        values["logit_soft_cap"] = draw(st.sampled_from((1.5, 30.0, 50.0)))
    if "v_head_size" in caps.features and not caps.v_head_pairs and draw(st.booleans()):
        values["v_head_size"] = draw(st.sampled_from(caps.v_head_sizes.examples((16, 32, 48))))
    if cached:
        sized = LayerSpec(
            num_heads=1, head_size=values["head_size"], v_head_size=values.get("v_head_size", 0)
        )
        values["kv_cache_dtype"] = draw(st.sampled_from(["auto", *caches(caps, sized)]))
        if "qkv_dtype" in values:
            values["kv_cache_dtype"] = values["qkv_dtype"]
        values["fp8_compute"] = caps.fp8_compute and values["kv_cache_dtype"] == "fp8_e4m3"
        values["block_size"] = draw(
            st.sampled_from(
                caps.block_sizes.examples((1, 3, 8, 16, 32, 48, 64)) or [caps.preferred_block_size]
            )
        )
    try:
        return LayerSpec(**values)
    except SpecError:  # cross-attention with a window, say
        assume(False)
        raise


@st.composite
def with_functions(draw: st.DrawFn, info: BackendInfo, spec: LayerSpec) -> LayerSpec:
    """Draw a layer with functions or masks that the backend serves, in two draws of three."""
    claimed = info.capabilities.features & {"variant", *MASKS.values()}
    if not claimed or spec.role is Role.CROSS or not draw(st.integers(0, 2)):
        return spec
    if OF_SEQUENCES.name not in variants():
        register_variant(OF_SEQUENCES)
    fields = draw(
        st.sampled_from([*functions().values(), {"variant": OF_SEQUENCES.name}]), label="functions"
    )
    needed = {"variant"} & fields.keys() | {MASKS[fields[n]] for n in ("mask",) if n in fields}
    try:
        changed = spec.replace(**fields)
        served = needed <= claimed and refused(info, changed) is None
    except SpecError:  # sinks beside weights that are no softmax, say
        return spec
    return changed if served else spec


@st.composite
def latent_specs(draw: st.DrawFn, caps: Capabilities, base: LayerSpec) -> LayerSpec:
    """Draw an MLA layer from the claims."""
    heads = draw(st.sampled_from(caps.gqa_ratios.examples((1, 2, 5, 16)) or [128]))
    blocks = caps.block_sizes.examples((1, 8, 16, 64)) or [caps.preferred_block_size]
    return base.replace(
        num_heads=heads,
        num_kv_heads=heads,
        dtype=draw(st.sampled_from(sorted(caps.dtypes))),
        kv_cache_dtype=draw(st.sampled_from(["auto", *caches(caps, base)])),
        needs_lse="lse" in caps.features and draw(st.booleans()),
        scale=draw(st.just(0.0) | st.floats(0.05, 0.2)),
        block_size=draw(st.sampled_from(blocks)),
    )


@st.composite
def recurrences(draw: st.DrawFn, caps: Capabilities, base: LayerSpec) -> LayerSpec:
    """Draw a recurrence of `base`'s kind from the claims."""
    dtype = draw(st.sampled_from(sorted(caps.dtypes)))
    layer = draw(st.sampled_from([spec for _, spec in recurrent_specs(base.kind, dtype)]))
    heads = layer.gqa_ratio * draw(st.integers(1, 4))
    if layer.head_size == 1:
        return layer
    return layer.replace(num_heads=heads, num_kv_heads=heads // layer.gqa_ratio)
