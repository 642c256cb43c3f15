"""Lies about sizes that published models have, and about several features at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from liars.plain import Plain
from liars.told import OtherSpec, lies
from polyattn.conformance.case import Case
from polyattn.conformance.cases.published import LENGTHS
from polyattn.families.attention import reference
from polyattn.kernel import Batch, Frame, LayerSpec, Plan
from torch import Tensor

SPEC = LayerSpec(num_heads=1, head_size=8)


class Call:
    """One call of a backend: what a lie may depend on."""

    def __init__(self, spec: LayerSpec, batch: Batch, frame: Frame):
        self.spec, self.batch, self.cache, self.params = spec, batch, frame.cache, frame.params
        self.query, self.key, self.value = frame.query, frame.key, frame.value
        self.out = frame.out
        self.lens, self.queries = batch.lens, batch.query_lens
        self.table = batch.block_table

    def has(self, *names: str) -> bool:
        """Whether the layer has all of these features."""
        return all(getattr(self.spec, name) for name in names)

    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.queries, self.lens, strict=True))


class When(Plain):
    """Right, but where `wrong` says so."""

    wrong: ClassVar[Callable[[Call], bool]]

    def run(self, plan: Plan, frame: Frame) -> None:
        out = frame.out
        super().run(plan, frame)
        spec = self.spec_of(plan.batch)
        if type(self).wrong(Call(spec, plan.batch, frame)):
            out.copy_((out.float() * 1.3).to(out.dtype))


def found_by(label: str) -> str:
    """Return the id of the kit's case of a published layer, or of a step by its name."""
    return Case("published", f"cached {label}", SPEC, label if label in LENGTHS else "reaching").id


def after(block: int) -> Callable[[tuple[int, int]], bool]:
    """Whether a sequence has over 128 queries, after a context that no block ends at."""
    return lambda pair: pair[0] > 128 and pair[1] > pair[0] and bool((pair[1] - pair[0]) % block)


def twins(call: Call) -> bool:
    """Whether two rows of a step are alike in all."""
    rows = call.query.flatten(1)
    each = [row.tolist() for row in rows[:64, :4]]
    return len(each) > len({tuple(row) for row in each})


SIZES: dict[str, tuple[str, Callable[[Call], bool]]] = {
    "HeadSize72": ("SigLIP", lambda c: c.spec.head_size == 72),
    "HeadSize80": ("Phi-2", lambda c: c.spec.head_size == 80),
    "HeadSize88": ("ViT-g", lambda c: c.spec.head_size == 88),
    "HeadSize96": ("GPT-NeoX", lambda c: c.spec.head_size == 96),
    "HeadSize100": ("OpenLLaMA", lambda c: c.spec.head_size == 100),
    "HeadSize104": ("ViT-bigG", lambda c: c.spec.head_size == 104),
    "HeadSize112": ("MPT-30B", lambda c: c.spec.head_size == 112),
    "HeadSize120": ("H2O-Danube3", lambda c: c.spec.head_size == 120),
    "HeadSize144": ("head_size 144", lambda c: c.spec.head_size == 144),
    "HeadSize256": ("Gemma", lambda c: c.spec.head_size == 256),
    "KvHeads5": ("SmolLM2-360M", lambda c: c.spec.num_kv_heads == 5),
    "KvHeads10": ("Phi-3-medium", lambda c: c.spec.num_kv_heads == 10),
    "KvHeads40": ("LLaMA-13B", lambda c: c.spec.num_kv_heads == 40),
    "Group6": ("Grok", lambda c: c.spec.gqa_ratio == 6),
    "Group12": ("GLM", lambda c: c.spec.gqa_ratio == 12),
    "Group17": ("group 17", lambda c: c.spec.gqa_ratio == 17),
    "Group48": ("StarCoder", lambda c: c.spec.gqa_ratio == 48),
    "Group71": ("Falcon", lambda c: c.spec.gqa_ratio == 71),
    "BlocksOf48": ("block 48", lambda c: c.spec.block_size == 48),
    "Over4097Keys": ("long context", lambda c: max(c.lens, default=0) > 4097),
    "Over8192Keys": ("long context", lambda c: max(c.lens, default=0) > 8192),
    "TwoQueriesOver4097Keys": (
        "long context", lambda c: any(q == 2 and n > 4097 for q, n in c.pairs())),
    "ManyQueriesOverManyKeys": (
        "long context", lambda c: any(q > 100 and n > 4097 for q, n in c.pairs())),
    "Over513Queries": ("long prompts", lambda c: max(c.queries, default=0) > 513),
    "LongPromptAfterContext": ("long prompts", lambda c: any(513 < q < n for q, n in c.pairs())),
    "Over64Sequences": ("many sequences", lambda c: len(c.lens) > 64),
    "Over110Sequences": ("many sequences", lambda c: len(c.lens) > 110),
    "TilesAfterContext": ("after context", lambda c: any(map(after(16), c.pairs()))),
    "EveryBlockFull": ("all full", lambda c: (
        c.cache is not None and len(c.lens) > 1
        and not any(n % c.cache.block_size for n in c.lens))),
    "Keys192Values128": (
        "DeepSeek's prefill", lambda c: (c.spec.head_size, c.spec.v_head_size) == (192, 128)),
    "Heads128": ("Llama-405B", lambda c: c.spec.num_heads == 128),
    "Over65536Keys": ("long context", lambda c: max(c.lens, default=0) > 65536),
    "Over32768Keys": ("long context", lambda c: max(c.lens, default=0) > 32768),
    "Over4096Queries": ("long prompts", lambda c: max(c.queries, default=0) > 4096),
    "SomeQueriesOver4097Keys": (
        "long context", lambda c: any(16 < q <= 64 and n > 4097 + q for q, n in c.pairs())),
    "PromptsBeyondAWindowOver4096": (
        "long context", lambda c: any(
            q > 1 and n > (c.spec.sliding_window or 1 << 30) > 4096 for q, n in c.pairs())),
    "Over1024Queries": ("long prompts", lambda c: max(c.queries, default=0) > 1024),
    "Over512Sequences": ("many sequences", lambda c: len(c.lens) > 512),
    "Over256Sequences": ("many sequences", lambda c: len(c.lens) > 256),
    "Length2048": ("powers of two", lambda c: 2048 in c.lens),
    "Queries256": ("powers of two", lambda c: 256 in c.queries),
    "Window512": ("Gemma-3-1B", lambda c: c.spec.sliding_window == 512),
    "Window2047": ("Phi-3-mini", lambda c: c.spec.sliding_window == 2047),
    "Window1024": ("Gemma-3", lambda c: c.spec.sliding_window == 1024),
    "Window4096": ("Mistral", lambda c: c.spec.sliding_window == 4096),
    "Window128WithSinks": (
        "gpt-oss", lambda c: c.spec.sliding_window == 128 and c.has("learned_sinks")),
    "SinksOfGroup8": (
        "gpt-oss without a window", lambda c: c.spec.gqa_ratio == 8 and c.has("learned_sinks")),
    "Chunk1024": ("chunk 1024", lambda c: c.spec.chunk_size == 1024),
    "Chunk8192": ("Llama-4", lambda c: c.spec.chunk_size == 8192),
    "Cap30": ("Grok's cap", lambda c: c.spec.logit_soft_cap == 30.0),
    "Cap50": ("Gemma-2's cap", lambda c: c.spec.logit_soft_cap == 50.0),
    "CapBesideAWindow4096": (
        "Gemma-2", lambda c: c.has("logit_soft_cap") and c.spec.sliding_window == 4096),
    "Scale1": ("T5", lambda c: c.spec.scale == 1.0),
    "Keeps9": ("9 tokens kept", lambda c: c.spec.sink_tokens == 9),
    "Keeps200": ("200 tokens kept", lambda c: c.spec.sink_tokens == 200),
}  # fmt: skip
"""Of each liar: which published layer, or which step, finds it, and of which calls it is wrong."""
COMBINATIONS: dict[str, Callable[[Call], bool]] = {
    "CapAlibiSinks": lambda c: c.has("logit_soft_cap", "alibi", "learned_sinks"),
    "CapWindowSinks": lambda c: c.has("logit_soft_cap", "sliding_window", "learned_sinks"),
    "CapKeptSinks": lambda c: c.has("logit_soft_cap", "sink_tokens", "learned_sinks"),
    "AlibiKeptSinks": lambda c: c.has("alibi", "sink_tokens", "learned_sinks"),
    "AlibiWindowSinks": lambda c: c.has("alibi", "sliding_window", "learned_sinks"),
    "AlibiChunkCap": lambda c: c.has("alibi", "chunk_size", "logit_soft_cap"),
    "AlibiChunkSinks": lambda c: c.has("alibi", "chunk_size", "learned_sinks"),
    "AllAtOnce": lambda c: c.has("alibi", "logit_soft_cap", "learned_sinks", "sink_tokens"),
    "BothWaysChunkAlibi": lambda c: c.has("chunk_size", "alibi") and not c.spec.causal,
    "BothWaysKeptAlibi": lambda c: c.has("sink_tokens", "alibi") and not c.spec.causal,
    "BothWaysKeptChunk": lambda c: c.has("sink_tokens", "chunk_size") and not c.spec.causal,
    "BothWaysCapAlibiSinks": lambda c: (
        c.has("logit_soft_cap", "alibi", "learned_sinks") and not c.spec.causal),
    "MoreKeptThanTheWindow": lambda c: (
        not c.spec.causal and c.spec.sink_tokens > (c.spec.sliding_window or 1 << 30)),
    "ChunksOfMoreQueriesThanKeys": lambda c: (
        c.has("chunk_size") and any(q > n for q, n in c.pairs())),
    "CapAlibiAfterContext": lambda c: (
        c.has("logit_soft_cap", "alibi") and any(map(after(16), c.pairs()))),
}  # fmt: skip
PAIRS: dict[str, Callable[[Call], bool]] = {
    "HeadSize48": lambda c: c.spec.head_size == 48,
    "SlopesOfGroup5": lambda c: c.spec.alibi and c.spec.gqa_ratio == 5,
    "WindowsOfBlocks32": lambda c: (
        c.has("sliding_window") and c.cache is not None and c.cache.block_size == 32),
    "Window1024OfBlocks784": lambda c: (
        c.spec.sliding_window == 1024 and c.cache is not None and c.cache.block_size == 784),
    "BlockZeroIsNobodys": lambda c: c.table is not None and any(
        n and c.table[row, 0] == 0 for row, n in enumerate(c.lens)),
    "WrongWithoutGradients": lambda c: not torch.is_grad_enabled(),
}  # fmt: skip
"""Values, and pairs of them, that no single published layer has."""
HND: dict[str, Callable[[Call], bool]] = {
    "WindowsOfHnd": lambda c: c.has("sliding_window"),
    "SinksOfHnd": lambda c: c.has("learned_sinks"),
    "ValueSizesOfHnd": lambda c: c.spec.head_size != c.spec.v_head_size,
}
"""Of each liar: of which calls it is wrong over an HND cache."""
UNCACHED: dict[str, Callable[[Call], bool]] = {
    "KeysByHeads": lambda c: (
        c.cache is None and len(c.key) > 1 and c.key.stride(0) < c.key.stride(1)),
}  # fmt: skip
NUMBERS: dict[str, Callable[[Call], bool]] = {
    "ScalesOver1": lambda c: c.spec.scale > 1,
    "QueriesOver200": lambda c: bool((c.query.float().norm(dim=-1) > 200).any()),
    "NegativeSlopes": lambda c: c.spec.alibi and bool((c.params.alibi_slopes < 0).any()),
    "HeadsWithoutASink": lambda c: c.spec.learned_sinks and bool(c.params.sinks.isinf().any()),
}  # fmt: skip
SPOILT: dict[str, Callable[[Call], bool]] = {
    "GivenNanEverywhere": lambda c: c.cache is None and any(
        bool(c.value[first : first + count].isnan().any())
        for first, count in zip(c.batch.key_starts, c.lens, strict=True)),
}  # fmt: skip
LAYERS: dict[str, Callable[[Call], bool]] = {
    "CachesAlikeInStrides": lambda c: c.cache is not None and c.cache.key.stride() != (
        vars(c.batch).setdefault("strides", c.cache.key.stride())),
}  # fmt: skip
globals().update(lies(
    __name__,
    *((When, "wrong", {name: wrong}, found_by(label)) for name, (label, wrong) in SIZES.items()),
    (When, "wrong", COMBINATIONS, "combined"), (When, "wrong", PAIRS, "pairs"),
    (When, "wrong", UNCACHED, "pairs-uncached-drawn"),
    (When, "wrong", {
        name: lambda c, wrong=wrong: c.cache is not None and c.cache.layout == "HND" and wrong(c)
        for name, wrong in HND.items()
    }, "layout"),
    (When, "wrong", NUMBERS, "numeric"),
    (When, "wrong", SPOILT, "isolation"),
    (When, "wrong", LAYERS, "layers"),
    (When, "wrong", {"TwinsTogether": twins}, "twins"),
))  # fmt: skip


class LseOfManyHeads(Plain):
    """Wrong beyond 16 heads, in the LSE alone."""

    by = ("published",)

    def run(self, plan: Plan, *args: Any) -> None:
        super().run(plan, *args)
        if args[-1].lse is not None and self.spec.num_heads > 16:
            args[-1].lse.add_(0.5)


def at_most(name: str, most: float) -> Callable[[LayerSpec], dict[str, Any]]:
    """Return what makes a field no more than `most`."""
    return lambda spec: {name: getattr(spec, name) and min(getattr(spec, name), most)}


OTHER: dict[str, tuple[str, Callable[[LayerSpec], dict[str, Any]]]] = {
    "WindowsTo1000": ("Gemma-3", at_most("sliding_window", 1000)),
    "WindowsTo4095": ("Mistral", at_most("sliding_window", 4095)),
    "ChunksTo1000": ("chunk 1024", at_most("chunk_size", 1000)),
    "ChunksTo8000": ("Llama-4", at_most("chunk_size", 8000)),
    "KeepsAtMost8": ("9 tokens kept", at_most("sink_tokens", 8)),
    "KeepsAtMost64": ("200 tokens kept", at_most("sink_tokens", 64)),
    "KeepsAtMost128": ("200 tokens kept", at_most("sink_tokens", 128)),
    "CapsTo20": ("Grok's cap", at_most("logit_soft_cap", 20.0)),
    "CapsTo30": ("Gemma-2's cap", at_most("logit_soft_cap", 30.0)),
    "NoCapFrom20": ("Grok's cap", lambda spec: {
        "logit_soft_cap": spec.logit_soft_cap if (spec.logit_soft_cap or 99) < 20 else None}),
}  # fmt: skip
"""Of each liar: which published layer finds it, and what it takes for the layer's own."""
globals().update(lies(__name__, *(
    (OtherSpec, "fields", {name: fields}, found_by(label)) for name, (label, fields) in OTHER.items()
)))  # fmt: skip


class KeptLeftOfTheWindow(Plain):
    """First tokens count where they lie before the window, not where they lie right of it."""

    by = ("masks", "published")

    def visible(self, queries: int, keys: int) -> Tensor:
        mask, spec = super().visible(queries, keys), self.spec
        if spec.causal or not spec.sink_tokens:
            return mask
        key, query = torch.arange(keys), torch.arange(keys - queries, keys)[:, None]
        return mask & (key < query + (spec.sliding_window or 0))


class ChunksTruncate(Plain):
    """A chunk's number is rounded towards zero, where positions are below zero, too."""

    by = ("masks", "combined")

    def visible(self, queries: int, keys: int) -> Tensor:
        mask, size = super().visible(queries, keys), self.spec.chunk_size
        if size is None:
            return mask
        whole = reference.visible(replace(self.spec, chunk_size=None), queries, keys)
        key, query = torch.arange(keys), torch.arange(keys - queries, keys)[:, None]
        same = torch.div(key, size, rounding_mode="trunc") == torch.div(
            query, size, rounding_mode="trunc"
        )
        return whole & same
