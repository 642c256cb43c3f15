"""Which cases follow from what published models have? Sizes, windows, caps, lengths, and all at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polyattn.conformance.case import Case, changed, served_phases
from polyattn.conformance.cases.lasting import COPIES
from polyattn.device import Device
from polyattn.registry.capabilities import Capabilities
from polyattn.spec.kinds import Role
from polyattn.spec.layer import LayerSpec
from polyattn.workload.steps import Lengths

PUBLISHED: dict[str, dict[str, Any]] = {
    "SigLIP": {"num_heads": 3, "num_kv_heads": 3, "head_size": 72},
    "Phi-2": {"num_heads": 4, "num_kv_heads": 4, "head_size": 80},
    "ViT-g": {"num_heads": 2, "num_kv_heads": 2, "head_size": 88},
    "GPT-NeoX": {"num_heads": 4, "num_kv_heads": 4, "head_size": 96},
    "OpenLLaMA": {"num_heads": 2, "num_kv_heads": 2, "head_size": 100},
    "ViT-bigG": {"num_heads": 2, "num_kv_heads": 2, "head_size": 104},
    "MPT-30B": {"num_heads": 2, "num_kv_heads": 2, "head_size": 112},
    "H2O-Danube3": {"num_heads": 8, "num_kv_heads": 2, "head_size": 120},
    "head_size 144": {"num_heads": 2, "num_kv_heads": 2, "head_size": 144},
    "DeepSeek's prefill": {"num_heads": 4, "num_kv_heads": 4, "head_size": 192, "v_head_size": 128},
    "Gemma": {"num_heads": 4, "num_kv_heads": 1, "head_size": 256},
    "Qwen2": {"num_heads": 14, "num_kv_heads": 2},
    "Phi-4-mini": {"num_heads": 24, "num_kv_heads": 8},
    "SmolLM2": {"num_heads": 9, "num_kv_heads": 3},
    "SmolLM2-360M": {"num_heads": 15, "num_kv_heads": 5},
    "Hymba": {"num_heads": 25, "num_kv_heads": 5},
    "Phi-3-medium": {"num_heads": 40, "num_kv_heads": 10},
    "LLaMA-13B": {"num_heads": 40, "num_kv_heads": 40},
    "Grok": {"num_heads": 12, "num_kv_heads": 2},
    "GLM": {"num_heads": 24, "num_kv_heads": 2},
    "group 17": {"num_heads": 17, "num_kv_heads": 1},
    "StarCoder": {"num_heads": 48, "num_kv_heads": 1},
    "Falcon": {"num_heads": 71, "num_kv_heads": 1},
    "Llama-405B": {"num_heads": 128, "num_kv_heads": 8},
    "block 48": {"block_size": 48},
    "gpt-oss": {"num_heads": 8, "num_kv_heads": 1, "sliding_window": 128, "learned_sinks": True},
    "gpt-oss without a window": {"num_heads": 16, "num_kv_heads": 2, "learned_sinks": True},
    "Gemma-3-1B": {"sliding_window": 512},
    "Gemma-3": {"sliding_window": 1024},
    "Phi-3-mini": {"sliding_window": 2047},
    "Mistral": {"sliding_window": 4096},
    "chunk 1024": {"chunk_size": 1024},
    "Llama-4": {"chunk_size": 8192},
    # Logits of 4 on average: of 1, a cap of 30 changes nothing that a tolerance would show.
    "Grok's cap": {"logit_soft_cap": 30.0, "scale": 0.5},
    "Gemma-2's cap": {"logit_soft_cap": 50.0, "scale": 0.5},
    "Gemma-2": {"logit_soft_cap": 50.0, "sliding_window": 4096, "scale": 0.5},
    "T5": {"scale": 1.0},
    "9 tokens kept": {"sliding_window": 40, "sink_tokens": 9},
    "200 tokens kept": {"sliding_window": 64, "sink_tokens": 200},
    "200 kept beside a window": {"causal": False, "sliding_window": 8, "sink_tokens": 200},
    "200 kept beside a window, group 8": {
        "causal": False,
        "sliding_window": 8,
        "sink_tokens": 200,
        "num_heads": 8,
        "num_kv_heads": 1,
    },
    "9 kept beside a window": {"causal": False, "sliding_window": 2, "sink_tokens": 9},
}
"""Layers as published models have them, of fewer heads, and what else was seen: fields of a spec.

Every other one returns its LSE, where a backend claims it.
"""

CAP, SLOPES, SINKS = {"logit_soft_cap": 1.5}, {"alibi": True}, {"learned_sinks": True}
WINDOW, CHUNK = {"sliding_window": 21}, {"chunk_size": 24}
KEPT = {"sliding_window": 21, "sink_tokens": 3}
BOTH_WAYS = {"causal": False}
COMBINED: dict[str, dict[str, Any]] = {
    "plain": {},
    "cap, ALiBi": CAP | SLOPES,
    "cap, ALiBi, sinks": CAP | SLOPES | SINKS,
    "cap, window, sinks": CAP | WINDOW | SINKS,
    "cap, kept, sinks": CAP | KEPT | SINKS,
    "ALiBi, kept": SLOPES | KEPT,
    "ALiBi, kept, sinks": SLOPES | KEPT | SINKS,
    "ALiBi, window, sinks": SLOPES | WINDOW | SINKS,
    "ALiBi, chunk, cap": SLOPES | CHUNK | CAP,
    "ALiBi, chunk, sinks": SLOPES | CHUNK | SINKS,
    "chunk, window": CHUNK | WINDOW,
    "chunk, kept": CHUNK | KEPT,
    "all": CAP | SLOPES | SINKS | KEPT,
    "both ways, kept": BOTH_WAYS | {"sliding_window": 5, "sink_tokens": 64},
    "both ways, kept, ALiBi": BOTH_WAYS | SLOPES | {"sliding_window": 5, "sink_tokens": 64},
    "both ways, chunk, ALiBi": BOTH_WAYS | CHUNK | SLOPES,
    "both ways, chunk, kept": BOTH_WAYS | CHUNK | KEPT,
    "both ways, cap, ALiBi, sinks": BOTH_WAYS | CAP | SLOPES | SINKS,
    "right, cap, sinks": BOTH_WAYS | CAP | SINKS | {"sliding_window": 21, "window_right": 9},
}
"""Features together. Other cases prove each one alone, and every pair."""

VALUES: dict[str, tuple[Any, ...]] = {
    "head_size": (16, 32, 48, 64, 72, 80, 88, 96, 104, 112, 120, 128, 144, 160, 192, 256),
    "num_kv_heads": (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 32, 40),
    "group": (*range(1, 11), 12, 14, 16, 17, 24, 32, 48, 71),
    "scale": (0.0, 0.0625, 0.0442, 0.015625, 0.25, 0.5, 1.0),
    "causal": (True, False),
    "sliding_window": (None, 1, 3, 16, 64, 128, 256, 512, 1000, 1024, 2047, 2048, 4096, 8192, 32768),
    "sink_tokens": (0, 1, 4, 5, 9, 16, 64, 128, 200, 256),
    "chunk_size": (None, 7, 16, 64, 256, 512, 1024, 2048, 8192),
    "logit_soft_cap": (None, 1.5, 5.0, 10.0, 20.0, 30.0, 50.0),
    "alibi": (False, True),
    "learned_sinks": (False, True),
    "needs_lse": (False, True),
    "v_head_size": (0, 16, 64, 128, 256),
    "dtype": ("bfloat16", "float16", "float32"),
    "kv_cache_dtype": ("auto", "fp8_e4m3", "int8"),
    "block_size": (1, 8, 16, 32, 48, 64, 80, 96, 128, 144, 256, 272, 512, 528, 544, 784, 1024),
    "layout": ("NHD", "HND", "contiguous"),
    "lie": ("plain", "packed", "by heads"),
    "mode": ("gradients", "none", "inference"),
    "sequences": (1, 2, 3, 4, 8, 9, 16, 17, 33, 65, 129, 257),
    "context": (1, 2, 16, 17, 33, 64, 65, 128, 129, 256, 257, 512, 513, 1024, 1025, 2048, 2049, 4096,
                4099, 8200, 16_500, 32_775),
    "query": (2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 513, 1025),
    "length": (2, 7, 16, 17, 33, 64, 65, 128, 129, 256, 257, 512, 513, 1024, 1025, 2049, 4099),
}  # fmt: skip
"""Values. Each pair of claimed values occurs in some layer and step.

`group`: query heads of a KV head; `lie`: how tensors lie; `mode`: of torch's gradients; `sequences`: of
the step; `context`: of its sequences of one query; `query` and `length`: of the others.
"""

LENGTHS = (
    "long context",
    "long prompts",
    "many sequences",
    "after context",
    "all full",
    "powers of two",
)
"""Steps that test the plainest layer."""

FEW_KEYS: Lengths = [(1, 9), (3, 170)]
FURTHER: dict[str, tuple[tuple[dict[str, Any], Lengths | str], ...]] = {
    "after context": tuple(
        (fields, "after context") for fields in (CAP, SLOPES, SINKS, WINDOW, KEPT, CHUNK)
    ),
    "all full": tuple(
        ({"block_size": size}, [(1, 2 * size), (1, 4352 + 2 * size), (3, 2 * size), (1, size - 1)])
        for size in (64, 128, 256, 512)
    ),
    "long context": (
        ({"sliding_window": 32768}, [(1, 9), (33, 32_800)]),
        ({"sliding_window": 2**31 - 1}, [(1, 9), (0, 70), (1, 30)]),
        ({"chunk_size": 1 << 20}, FEW_KEYS),
        ({"sliding_window": 40, "sink_tokens": 1 << 20}, FEW_KEYS),
    ),
}
"""For each step of the plainest layer, the other layers that its case checks, and their steps.

They have each feature alone over a long context, larger blocks, and windows longer than any text.
"""


def derive(caps: Capabilities, base: LayerSpec, device: Device) -> Iterator[Case]:
    """Yield the cases of a decoder's layers; `base`: the plainest layer."""
    if base.role is not Role.DECODER or not base.causal:
        return
    where = "cached" if base.cached else "uncached"
    prefills = "prefill" in caps.phases
    for batch in LENGTHS if prefills else ():
        if base.cached or batch != "all full":
            few = (
                {"num_heads": base.gqa_ratio, "num_kv_heads": 1} if batch == "long prompts" else {}
            )
            yield Case("published", f"{where} {batch}", base.replace(**few), batch)
    reaching = "reaching" if prefills else "reaching decodes"
    for index, (label, fields) in enumerate(PUBLISHED.items()):
        spec = _other(base, fields)
        if spec is not None and index % 2 and "lse" in caps.features:
            with_lse = spec.replace(needs_lse=True)
            spec = with_lse if served_phases(caps, with_lse, device) else spec
        if spec is not None and _walks(caps, spec.block_size):
            yield Case("published", f"{where} {label}", spec, reaching)
    batches = ["after context" if prefills else "decode"]
    if not base.cached and prefills:  # over a cache are contexts enough
        batches = ["fewer keys"] if True in caps.cached else ["fewer keys", *batches]
    for label, fields in COMBINED.items():
        spec = _other(base, fields) if fields else None
        if spec is None:
            continue
        for batch in batches:
            yield Case("combined", f"{where} {label}", spec, batch)
    yield Case("masks", where, base, "grid")
    if not COPIES & caps.platforms.keys():  # which compile for each shape
        yield Case("pairs", where, base, "drawn")
    if base.cached:
        yield Case("twins", where, base, "decode")


def _walks(caps: Capabilities, block: int | None) -> bool:
    """Whether a backend takes a cache of this block size, in blocks of its own where it must."""
    sizes = caps.block_sizes
    return (
        block is None or block in sizes or ("NHD" in caps.layouts and bool(sizes.divisor_of(block)))
    )


def _other(base: LayerSpec, fields: dict[str, Any]) -> LayerSpec | None:
    """Return the base spec with other fields, None where it is the same, or no layer."""
    fields = {n: v for n, v in fields.items() if n != "block_size" or base.cached}
    spec = changed(base, **fields)
    return None if spec == base else spec
