"""Random layers and steps, drawn from the claims by the harness's seed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

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
from polyattn.workload.dice import Dice
from polyattn.workload.steps import USUAL

EXAMPLES = 8
"""The fewest draws of a search."""
TRIES = 1 << 12
"""The most draws of which none is claimed."""
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


class UnclaimedError(Exception):
    """What was drawn isn't claimed: a search draws anew."""


class Draw(Dice):
    """What a search draws a layer and its steps with. `said` describes them, should it fail."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.said: list[str] = []

    def between(self, low: float, high: float) -> float:
        """Return a number from `low` up to `high`."""
        return low + (high - low) * float(self.chance(1))

    def lengths(self) -> list[tuple[int, int]]:
        """Return a step's (query, sequence) lengths."""
        rows = []
        for _ in range(min(self.integers(1, 15, 2))):
            query = self.choice((1, self.integer(0, 13)))
            context = self.choice((self.integer(0, 71), self.integer(100, 701)))
            rows.append((query, query + context))
        self.said.append(f"(query, length) {rows}")
        return rows


def require(condition: bool) -> None:
    """Drop the draw where the condition doesn't hold."""
    if not condition:
        raise UnclaimedError


def drawn(harness: Harness, example: Callable[[Draw], None], count: int | None = None) -> int:
    """Run `example` on draw after draw; returns how many ran.

    It stops after `count` of them or, without a count, after `EXAMPLES` and the harness's budget. The
    draws follow from the harness's seed, on any machine.
    """
    end, ran, least = time.monotonic() + harness.budget, 0, EXAMPLES if count is None else count
    seeds, unclaimed = Dice(harness.seed), 0
    while ran < least or (count is None and time.monotonic() < end):
        draw = Draw(seeds.integer(0, 1 << 31))
        try:
            example(draw)
            ran += 1
        except UnclaimedError:
            unclaimed += 1
            assert ran or unclaimed < TRIES, f"none of {TRIES} layers that were drawn is claimed"
        except Exception as error:
            error.add_note(f"draw {ran + 1} of seed {harness.seed}: {'; '.join(draw.said)}")
            raise
    return ran


def drawn_group(
    draw: Draw, harness: Harness, base: LayerSpec, with_variants: bool = False
) -> LayerGroup:
    """Return the group of a layer like `base`; a draw that isn't claimed is dropped.

    `with_variants`: functions and masks are drawn, too.
    """
    caps, layout = harness.info.capabilities, None
    if base.recurrent is not None:
        spec = recurrences(draw, caps, base)
    elif base.latent is not None:
        spec = latent_specs(draw, caps, base)
    else:
        spec = attention_specs(draw, caps, base)
        if with_variants:
            spec = with_functions(draw, harness.info, spec)
        require(len(served_phases(caps, spec, harness.device)) == len(caps.phases - {"mixed"}))
        layout = draw.choice(caps.layouts) if spec.cached else None
    draw.said.append(f"{spec}, {layout or 'no'} layout")
    try:
        return harness.group(spec, layout)
    except PolyattnError:  # such a block size in such a layout, say
        raise UnclaimedError from None


def drawn_numbers(draw: Draw, spec: LayerSpec) -> dict[str, str]:
    """Return the option by which a layer's numbers, and its steps', are drawn."""
    if spec.recurrent is None:
        return {}
    return {"numbers": draw.choice([USUAL, *unusual(spec)])}


def attention_specs(draw: Draw, caps: Capabilities, base: LayerSpec) -> LayerSpec:
    """Draw a layer from the claims. What they exclude is drawn too, and left to the caller."""
    sizes = [s for s in caps.head_sizes.examples(SIZES) if s <= WIDEST] or [base.head_size]
    ratios = caps.gqa_ratios.examples((*GQA_RATIOS, 17)) if "gqa" in caps.features else [1]
    cached = draw.choice(sorted(caps.cached))
    roles = sorted({Role.DECODER, Role.CROSS} & caps.roles) or [base.role]
    role = draw.choice(roles)
    claimed = [n for n in FEATURE_FIELDS if n in caps.features and "invariant" not in n]
    few = draw.integer(0, 5)
    chosen = {claimed[n] for n in draw.order(len(claimed))[:few].tolist()}
    kv_heads = draw.integer(1, 6)
    values: dict[str, Any] = {
        "num_heads": kv_heads * draw.choice(ratios),
        "num_kv_heads": kv_heads,
        "head_size": draw.choice(sizes),
        "dtype": draw.choice(sorted(caps.dtypes)),
        "cached": cached,
        "role": role,
        "causal": base.causal and role is Role.DECODER,
        "scale": draw.choice((0.0, draw.between(0.02, 0.4))),
    }
    for name in sorted(chosen):
        values |= fields_of(caps, name, cached)
    for name in sorted({"sliding_window", "chunk_size"} & values.keys()):
        values[name] = draw.choice((draw.integer(1, 41), 128, draw.integer(1, 41), 1024))
    if "sink_tokens" in values:
        values["sink_tokens"] = draw.choice((draw.integer(1, 10), 64, draw.integer(1, 10), 200))
    if "logit_soft_cap" in values:
        values["logit_soft_cap"] = draw.choice((1.5, 30.0, 50.0))
    if "v_head_size" in caps.features and not caps.v_head_pairs and draw.integer(0, 2) == 1:
        values["v_head_size"] = draw.choice(caps.v_head_sizes.examples((16, 32, 48)))
    if cached:
        sized = LayerSpec(
            num_heads=1, head_size=values["head_size"], v_head_size=values.get("v_head_size", 0)
        )
        values["kv_cache_dtype"] = draw.choice(["auto", *caches(caps, sized)])
        if "qkv_dtype" in values:
            values["kv_cache_dtype"] = values["qkv_dtype"]
        values["fp8_compute"] = caps.fp8_compute and values["kv_cache_dtype"] == "fp8_e4m3"
        blocks = caps.block_sizes.examples((1, 3, 8, 16, 32, 48, 64))
        values["block_size"] = draw.choice(blocks or [caps.preferred_block_size])
    try:
        return LayerSpec(**values)
    except SpecError:  # cross-attention with a window, say
        raise UnclaimedError from None


def with_functions(draw: Draw, info: BackendInfo, spec: LayerSpec) -> LayerSpec:
    """Draw a layer with functions or masks that the backend serves, in two draws of three."""
    claimed = info.capabilities.features & {"variant", *MASKS.values()}
    if not claimed or spec.role is Role.CROSS or not draw.integer(0, 3):
        return spec
    if OF_SEQUENCES.name not in variants():
        register_variant(OF_SEQUENCES)
    fields = draw.choice([*functions().values(), {"variant": OF_SEQUENCES.name}])
    needed = {"variant"} & fields.keys() | {MASKS[fields[n]] for n in ("mask",) if n in fields}
    try:
        changed = spec.replace(**fields)
        served = needed <= claimed and refused(info, changed) is None
    except SpecError:  # sinks beside weights that are no softmax, say
        return spec
    return changed if served else spec


def latent_specs(draw: Draw, caps: Capabilities, base: LayerSpec) -> LayerSpec:
    """Draw an MLA layer from the claims."""
    heads = draw.choice(caps.gqa_ratios.examples((1, 2, 5, 16)) or [128])
    blocks = caps.block_sizes.examples((1, 8, 16, 64)) or [caps.preferred_block_size]
    return base.replace(
        num_heads=heads,
        num_kv_heads=heads,
        dtype=draw.choice(sorted(caps.dtypes)),
        kv_cache_dtype=draw.choice(["auto", *caches(caps, base)]),
        needs_lse="lse" in caps.features and draw.integer(0, 2) == 1,
        scale=draw.choice((0.0, draw.between(0.05, 0.2))),
        block_size=draw.choice(blocks),
    )


def recurrences(draw: Draw, caps: Capabilities, base: LayerSpec) -> LayerSpec:
    """Draw a recurrence of `base`'s kind from the claims."""
    dtype = draw.choice(sorted(caps.dtypes))
    layer = draw.choice([spec for _, spec in recurrent_specs(base.kind, dtype)])
    heads = layer.gqa_ratio * draw.integer(1, 5)
    if layer.head_size == 1:
        return layer
    return layer.replace(num_heads=heads, num_kv_heads=heads // layer.gqa_ratio)
