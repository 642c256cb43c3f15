"""`LayerSpec`: what a layer computes, with everything that can change which kernel is right."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from polyattn.errors import SpecError, choice, flag, integer, number, shown
from polyattn.spec.fields import (
    LARGEST_BLOCK,
    LARGEST_WINDOW,
    LONGEST,
    Named,
    as_fields,
    from_fields,
    member,
    short_repr,
    word,
)
from polyattn.spec.invariance import check_invariance
from polyattn.spec.kinds import (
    KV_CACHE_DTYPES,
    WORDS,
    AttentionKind,
    GraphCapture,
    Invariance,
    Role,
    dtype_name,
)
from polyattn.spec.latent import LatentSpec
from polyattn.spec.models import model_reader
from polyattn.spec.norm import NormSpec
from polyattn.spec.recurrent import VALUELESS, RecurrentSpec
from polyattn.spec.rope import RopeSpec
from polyattn.spec.row_format import check_widths, rows_of
from polyattn.spec.sparse import IndexerSpec, SparseSpec
from polyattn.spec.variant import MASKS, NAME

if TYPE_CHECKING:
    from polyattn.spec.fields import Word


@dataclass(frozen=True, kw_only=True)
class LayerSpec(Named):
    """One layer of attention, or of a recurrence: frozen, hashable, no tensors, JSON round trip.

    Sizes are in elements, windows in tokens. A window, a chunk and sink tokens count up to 2^29, the
    longest sequence; a larger value is stored as that one.

    Attributes:
        kind: what the layer computes: an `AttentionKind`, or its value as text (`"mla"`).
        num_heads: query heads.
        num_kv_heads: of keys and values; default: `num_heads`.
        head_size: of queries and keys.
        v_head_size: of values; default: `head_size`.
        scale: of the scores; default: 1 / sqrt(head_size).
        dtype: of queries, keys, values and outputs, as text or torch's.
        kv_cache_dtype: of the cache: 8-bit numbers times a scale, or rows of bytes in a format that
            `row_formats()` lists. `"auto"`: `dtype`. `"fp8"` is `"fp8_e4m3"`, here and in the next two.
        qkv_dtype: `"fp8_e4m3"`: queries, keys and values arrive as `value / scale` in e4m3 (OCP's), as
            a quantised projection leaves them. The cache is then e4m3 too, and holds the same numbers.
        out_dtype: `"fp8_e4m3"`: the output leaves as `value / out_scale`, saturated.
        scales: `"number"`: fixed while a graph is captured. `"tensor"`: on the device, one number each;
            `"head"`: one for each KV head (`out_scale` is always one). Kernels read tensors at each
            step.
        fp8_compute: over an e4m3 cache, kernels may round queries and the softmax's weights to e4m3
            too; `workload.tolerance.fp8_compute` is the tolerance.
        block_size: tokens of a block of the cache; None: the selection chooses.
        role: where the layer is in its model: a `Role`, or its value as text (`"encoder"`).
        cached: whether keys and values outlive their step. None: a decoder's and cross-attention's do,
            an encoder's don't. Without a cache, each call passes all keys.
        kv_source: the index, in the model's list of specs, of the earlier layer whose cache this layer
            reads; None: its own. Both compute the same and share a group (`group_layers`). Call such a
            layer with that cache, and None as key and value.
        causal: whether a query sees no later key; aligned to the bottom right.
        sliding_window: W: a query sees itself and the W - 1 keys before it; without a causal mask also
            the W - 1 after it, or `window_right`.
        window_right: without a causal mask, the keys after it that a query sees, with or without W.
        chunk_size: C: a query sees only the keys of its own chunk, `position // C` (Llama 4).
        logit_soft_cap: scores become cap * tanh(score / cap) (Gemma 2); 1,000 at most.
        alibi: adds `-slope * distance` to each score (Press et al., 2022); `Attention` has the slopes.
        learned_sinks: one learned logit for each head joins the softmax's denominator (gpt-oss).
        sink_tokens: S: a window never hides the first S keys (StreamingLLM).
        dense_context: a whole prompt in one step sees all of its keys (TensorRT-LLM's dense context
            phase). The window and the sink tokens apply to rows that continue from a cache.
        needs_lse: whether calls return the LSE.
        graph_capture: which steps the caller captures: a `GraphCapture`, or its name (`"uniform"`).
        length_bounds: steps are planned by upper bounds of the lengths (`Batch.on_buffers`), and
            kernels read the lengths on the device, so that a graph replays without a new plan. Query
            lengths are exact.
        deterministic: equal calls give equal bits.
        batch_invariant: what must not change a bit of a token's result: `"batch"` (or True), `"steps"`,
            `"calls"` or `"machines"`, the levels of `Invariance`.
        latent: the latent part of an MLA layer.
        recurrent: the recurrent part of a recurrence.
        qk_norm: the norm of queries and keys before they are rotated. A layer whose `q_norm=` and
            `k_norm=` have its weights applies it.
        rope: the rotation of queries and keys. The layer's `rotate=` says whether the layer applies it;
            kernels do only if `rope.positions` is `"cache"`.
        sparse: of kinds `"sparse"` and `"sparse_mla"`, the meaning of the ids that choose a token's keys.
        indexer: of a sparse layer, what chooses; None: another layer's indexer, or the caller.
        variant: the name of a registered `AttentionVariant`, whose functions change scores or hide keys
            after all of the above.
        mask: a mask that each step brings (`Batch.mask`), beside the above: `"custom"` (packed
            booleans) or `"block_sparse"` (rows of blocks).

    Raises:
        SpecError: no layer has such a value or such values together.

    Examples:
        >>> spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, sliding_window=4096)
        >>> spec.replace(kv_cache_dtype="fp8").kv_cache_dtype
        'fp8_e4m3'
        >>> LayerSpec(num_heads=32, head_dim=128)
        Traceback (most recent call last):
        polyattn.errors.SpecError: LayerSpec has no field 'head_dim'; polyattn calls it head_size

    """

    kind: Word[AttentionKind, str] = word(AttentionKind.ATTENTION)
    num_heads: int
    num_kv_heads: int = 0
    head_size: int
    v_head_size: int = 0
    scale: float = 0.0
    dtype: Word[str, object] = word("bfloat16")
    kv_cache_dtype: Word[str, object] = word("auto")
    qkv_dtype: Word[str, object] = word("auto")
    out_dtype: Word[str, object] = word("auto")
    scales: str = "number"
    fp8_compute: bool = False
    block_size: int | None = None
    role: Word[Role, str] = word(Role.DECODER)
    cached: bool | None = None
    kv_source: int | None = None
    causal: bool = True
    sliding_window: int | None = None
    window_right: int | None = None
    chunk_size: int | None = None
    logit_soft_cap: float | None = None
    alibi: bool = False
    learned_sinks: bool = False
    sink_tokens: int = 0
    dense_context: bool = False
    needs_lse: bool = False
    graph_capture: Word[GraphCapture, str] = word(GraphCapture.NONE)
    length_bounds: bool = False
    deterministic: bool = False
    batch_invariant: Word[Invariance, bool | str] = word(Invariance.NONE)
    latent: LatentSpec | None = None
    recurrent: RecurrentSpec | None = None
    qk_norm: NormSpec | None = None
    rope: RopeSpec | None = None
    sparse: SparseSpec | None = None
    indexer: IndexerSpec | None = None
    variant: str | None = None
    mask: str | None = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        if isinstance(self.batch_invariant, bool):
            set_(self, "batch_invariant", Invariance(self.batch_invariant))
        for name, enum in _ENUMS.items():
            set_(self, name, member(name, getattr(self, name), enum))
        for name in ("dtype", "kv_cache_dtype", "qkv_dtype", "out_dtype"):
            dtype = dtype_name(getattr(self, name))
            if name != "dtype" and {type(dtype), type(self.dtype)} == {str} and dtype == self.dtype:
                dtype = "auto"
            set_(self, name, dtype)
        for name, default in self._derived().items():
            value = getattr(self, name)
            if type(value) is type(_DERIVED[name]) and value == _DERIVED[name]:
                set_(self, name, default)
        _check_fields(self)
        for name, part in _PARTS.items():
            if not isinstance(getattr(self, name), (part, type(None))):
                raise SpecError(
                    f"{name}={shown(getattr(self, name))} must be a {part.__name__}, or None for none"
                )
        for name, most in _SATURATED.items():
            if (getattr(self, name) or 0) > most:
                set_(self, name, most)
        set_(self, "scale", float(self.scale) or 1.0 / math.sqrt(self.head_size))
        _check_relations(self)
        if self.window_right is not None and self.window_right + 1 == self.sliding_window:
            set_(self, "window_right", None)  # the window's own meaning
        # The spec is the key of every look-up on the way to a kernel, so hash it once.
        set_(self, "_hash", hash(tuple(map(vars(self).get, self.__dataclass_fields__))))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields alone: strings hash otherwise in another process."""
        return partial(LayerSpec, **self._values()), ()

    def _values(self) -> dict[str, Any]:
        values = vars(self)
        return {name: values[name] for name in self.__dataclass_fields__}

    def _derived(self) -> dict[str, Any]:
        """Return what fields that were left out follow from."""
        return {
            "num_kv_heads": self.num_heads,
            "v_head_size": self.head_size,
            "cached": self.role in (Role.DECODER, Role.CROSS),
        }

    @cached_property
    def features(self) -> frozenset[str]:
        """The names in `spec.features.FEATURES` that the layer needs."""
        rope = self.rope if self.rope is not None and self.rope.positions == "cache" else None
        asks = {
            "causal": self.causal,
            "non_causal": not self.causal,
            "gqa": self.num_kv_heads != self.num_heads,
            "v_head_size": self.v_head_size != self.head_size,
            "sliding_window": self.sliding_window is not None,
            "window_right": self.window_right is not None,
            "chunked": self.chunk_size is not None,
            "logit_soft_cap": self.logit_soft_cap is not None,
            "alibi": self.alibi,
            "learned_sinks": self.learned_sinks,
            "sink_tokens": self.sink_tokens > 0,
            "cache_positions": rope is not None,
            "cache_positions_by_length": rope is not None and rope.by_length,
            "variant": self.variant is not None,
            "custom_mask": self.mask == "custom",
            "block_sparse": self.mask == "block_sparse",
            "tensor_scales": self.scales == "tensor",
            "head_scales": self.scales == "head",
            "fp8_inputs": self.qkv_dtype != "auto",
            "fp8_output": self.out_dtype != "auto",
            "lse": self.needs_lse,
            "length_bounds": self.length_bounds,
            "deterministic": self.deterministic,
            "batch_invariant": self.batch_invariant >= Invariance.BATCH,
            "step_invariant": self.batch_invariant in (Invariance.STEPS, Invariance.CALLS),
            "call_invariant": self.batch_invariant == Invariance.CALLS,
            "machine_invariant": self.batch_invariant >= Invariance.MACHINES,
        }
        of_part = frozenset[str]() if self.recurrent is None else self.recurrent.features
        return of_part.union(name for name, asked in asks.items() if asked)

    @property
    def gqa_ratio(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def stored_dtype(self) -> str:
        """The dtype of the cache's content: `kv_cache_dtype`, or the model's."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def chooses(self) -> bool:
        """Whether a token attends to a choice of keys, which each call brings."""
        return self.sparse is not None and not self.sparse.newest

    @property
    def has_functions(self) -> bool:
        """Whether a variant's functions, or a step's mask, change or hide its scores."""
        return self.variant is not None or self.mask is not None

    @property
    def in_rows(self) -> bool:
        """Whether the cache holds rows of bytes, in a format of `row_formats()`."""
        return self.kv_cache_dtype not in KV_CACHE_DTYPES

    def replace(self, **changes: Any) -> LayerSpec:
        """Return a copy with changes; sizes that were defaults follow the fields they derive from.

        Args:
            changes: fields of `LayerSpec` by name.

        Raises:
            SpecError: a field is unknown or its value isn't valid.

        Examples:
            >>> LayerSpec(num_heads=32, num_kv_heads=8, head_size=128).replace(head_size=64).v_head_size
            64

        """
        values = self._values()
        for name, default in self._derived().items():
            if getattr(self, name) == default:
                values[name] = _DERIVED[name]
        if self.scale == 1.0 / math.sqrt(self.head_size):
            values["scale"] = 0.0
        return LayerSpec(**(values | changes))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as JSON values."""
        return as_fields(self, {"cached": self._derived()["cached"]})

    def to_json(self) -> str:
        """Return the spec as JSON text; `from_json` reads it back."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LayerSpec:
        """Return the spec that `to_dict` wrote.

        Args:
            values: fields by name; those that are left out have their defaults.

        Raises:
            SpecError: a field is unknown or its value isn't valid.

        """
        if not isinstance(values, Mapping):
            raise SpecError(f"LayerSpec.from_dict takes a mapping of fields, not {shown(values)}")
        parts = {
            name: from_fields(name, part, values[name])
            for name, part in _PARTS.items()
            if isinstance(values.get(name), Mapping)
        }
        return from_fields("LayerSpec", cls, {**values, **parts})

    @classmethod
    def from_json(cls, text: str) -> LayerSpec:
        """Return the spec that `to_json` wrote.

        Args:
            text: a JSON object.

        Raises:
            SpecError: the text isn't JSON, a field is unknown or its value isn't valid.

        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise SpecError(
                f"LayerSpec: {shown(text)} is not JSON: {error}; write an object like "
                '{"num_heads": 32, "head_size": 128}'
            ) from error
        if not isinstance(values, dict):
            raise SpecError(f"LayerSpec: JSON must be an object, not {type(values).__name__}")
        return cls.from_dict(values)

    @classmethod
    def from_hf_config(
        cls,
        config: Mapping[str, Any] | str | os.PathLike[str] | object,
        *,
        assume: str | None = None,
        ignore: Collection[str] = (),
        strict: bool = True,
        kv_cache_dtype: str | None = None,
    ) -> list[LayerSpec]:
        """Return the specs of the layers that a Hugging Face model serves text with, in order.

        The distribution `polyattn-models` reads the config. Without a dtype it is a bfloat16 model's.

        Args:
            config: a mapping, a config object, or the path of a `config.json` or of its directory.
            assume: the `model_type` to read it as.
            ignore: fields that don't change attention.
            strict: False: warn of fields that aren't understood instead of refusing them.
            kv_cache_dtype: the dtype of the caches; None or `"auto"`: the checkpoint's, else the model's.

        Raises:
            ConfigError: the config isn't understood, or `polyattn-models` isn't installed.

        Examples:
            >>> config = {"model_type": "qwen2", "num_hidden_layers": 2, "num_attention_heads": 14,
            ...           "num_key_value_heads": 2, "hidden_size": 896, "torch_dtype": "bfloat16"}
            >>> [spec.head_size for spec in LayerSpec.from_hf_config(config)]
            [64, 64]

        """
        options = {"ignore": ignore, "strict": strict, "kv_cache_dtype": kv_cache_dtype}
        return list(model_reader().layer_specs(config, assume=assume, **options))

    def __repr__(self) -> str:
        return short_repr(self, self._derived() | {"scale": 1.0 / math.sqrt(self.head_size)})

    def __str__(self) -> str:
        """Return one line for logs: the layer's unusual fields only."""
        heads = _either(self.num_heads, self.num_kv_heads)
        sized = f"{heads} heads of {_either(self.head_size, self.v_head_size)}"
        if self.kind.is_recurrent and self.head_size == 1:
            sized = f"{self.num_heads} channels"
        words = [self.kind.value, sized, self.dtype]
        if self.kv_cache_dtype != "auto":
            words.append(f"cache {self.kv_cache_dtype}{', computed in it' * self.fp8_compute}")
        if self.block_size:
            words.append(f"block {self.block_size}")
        if self.role is not Role.DECODER:
            words.append(self.role.value)
        if self.cached != self._derived()["cached"]:
            words.append("cached" if self.cached else "uncached")
        if self.sparse is not None:
            words.append(str(self.sparse))
        if self.indexer is not None:
            words.append(f"indexer {self.indexer}")
        if self.kv_source is not None:
            words.append(f"keys of layer {self.kv_source}")
        words += sorted(self.features - {"causal", "gqa"})
        if self.sliding_window:
            words[words.index("sliding_window")] = f"window {self.sliding_window}"
        if self.variant:
            words[words.index("variant")] = f"variant {self.variant}"
        return ", ".join(words)


_PARTS: dict[str, type[Any]] = {
    "latent": LatentSpec,
    "recurrent": RecurrentSpec,
    "qk_norm": NormSpec,
    "rope": RopeSpec,
    "sparse": SparseSpec,
    "indexer": IndexerSpec,
}
_ENUMS: dict[str, type[Enum]] = {
    "kind": AttentionKind,
    "role": Role,
    "graph_capture": GraphCapture,
    "batch_invariant": Invariance,
}
_SATURATED = dict.fromkeys(("sliding_window", "chunk_size", "sink_tokens"), LONGEST)
_SATURATED["window_right"] = LONGEST - 1
"""The value of each field from which on it means "all keys"."""
_DERIVED: dict[str, Any] = {"num_kv_heads": 0, "v_head_size": 0, "cached": None}
"""The mark of a field that was left out."""


def _either(one: int, other: int) -> str:
    return f"{one}" if one == other else f"{one}/{other}"


def _check_fields(spec: LayerSpec) -> None:
    """Check each field of a layer alone. Raises `SpecError`."""
    for name in ("num_heads", "num_kv_heads", "head_size", "v_head_size"):
        integer(name, getattr(spec, name), 1)
    for name, low, high in (
        ("block_size", 1, LARGEST_BLOCK),
        ("sliding_window", 1, LARGEST_WINDOW),
        ("chunk_size", 1, LARGEST_WINDOW),
        ("window_right", 0, LARGEST_WINDOW),
    ):
        if getattr(spec, name) is not None:
            integer(name, getattr(spec, name), low, high, "; use None for none")
    if spec.kv_source is not None:
        integer("kv_source", spec.kv_source, 0, hint="; use None for the layer's own keys")
    integer("sink_tokens", spec.sink_tokens, 0, LARGEST_WINDOW)
    for name in _FLAGS:
        flag(name, getattr(spec, name))
    for name, words in WORDS.items():
        choice(name, getattr(spec, name), words)
    stored = spec.kv_cache_dtype
    if not isinstance(stored, str):
        choice("kv_cache_dtype", stored, KV_CACHE_DTYPES)
    elif stored not in KV_CACHE_DTYPES:
        rows_of(stored)
    variant = spec.variant
    if variant is not None and not (isinstance(variant, str) and NAME.fullmatch(variant)):
        raise SpecError(f"variant={variant!r} must be a registered variant's name, or None")
    if spec.mask is not None:
        choice("mask", spec.mask, MASKS)
    number("scale", spec.scale, "a positive number, or 0 for the default", 0)
    cap = spec.logit_soft_cap
    if cap is not None:
        number("logit_soft_cap", cap, "positive, 1000 at most; None is none", math.ulp(0), 1000)


_FLAGS = ("cached", *(f.name for f in dataclasses.fields(LayerSpec) if f.type == "bool"))


def _check_relations(spec: LayerSpec) -> None:
    """Check what fields mean together. Raises `SpecError`."""
    if spec.num_heads % spec.num_kv_heads:
        raise SpecError(
            f"num_heads={spec.num_heads} is not divisible by num_kv_heads={spec.num_kv_heads}; "
            "each KV head (or group) serves the same number of query heads"
        )
    if spec.sink_tokens and spec.sliding_window is None:
        raise SpecError(
            f"sink_tokens={spec.sink_tokens} needs a sliding_window; without one every key is kept"
        )
    decoding = spec.role is Role.DECODER and spec.causal and spec.cached
    if spec.dense_context and (spec.sliding_window is None or not decoding):
        raise SpecError(
            "dense_context=True is for causal decoders over a cache, with a sliding_window; without one "
            "every prompt sees all of its keys"
        )
    if spec.dense_context and (spec.graph_capture is GraphCapture.ANY or spec.length_bounds):
        raise SpecError(
            "dense_context=True needs to know which rows are whole prompts, and a captured mixed "
            "step, or one planned by bounds, doesn't; use graph_capture='uniform' at most, and no "
            "length_bounds"
        )
    check_invariance(vars(spec))
    if spec.window_right is not None and spec.causal:
        right = f"window_right={spec.window_right}: a causal mask hides all keys after the query"
        raise SpecError(f"{right}; leave it out, or set causal=False")
    if spec.fp8_compute and spec.kv_cache_dtype != "fp8_e4m3":
        raise SpecError(
            f"fp8_compute=True goes with kv_cache_dtype='fp8_e4m3', not {spec.kv_cache_dtype!r}"
        )
    _check_quantised(spec)
    if spec.role in (Role.CROSS, Role.ENCODER, Role.ENCODER_ONLY) and spec.causal:
        raise SpecError(f"role={spec.role.value!r} is not causal; set causal=False")
    if spec.role is Role.CROSS and (
        spec.sliding_window or spec.window_right is not None or spec.chunk_size or spec.alibi
    ):
        raise SpecError("role='cross' has no positions to window, chunk or bias; drop those fields")
    attends = spec.role is Role.DECODER and not spec.kind.is_recurrent
    if spec.kv_source is not None and not (attends and spec.cached):
        raise SpecError(
            f"kv_source={spec.kv_source!r} is for a decoder's attention over cached keys; leave it out"
        )
    if not spec.cached:
        _check_uncached(spec)
    _check_family(spec)
    _check_pointwise(spec)
    if spec.rope is not None:
        _check_rope(spec, spec.rope)
    if spec.qk_norm is not None:
        spec.qk_norm.check(spec.kind, spec.role)


def _check_quantised(spec: LayerSpec) -> None:
    """What comes or leaves in 8 bits is attention's, and scales have something to scale."""
    if spec.qkv_dtype != "auto" and spec.cached and spec.kv_cache_dtype != spec.qkv_dtype:
        raise SpecError(
            f"qkv_dtype={spec.qkv_dtype!r} needs kv_cache_dtype={spec.qkv_dtype!r}, not "
            f"{spec.kv_cache_dtype!r}: quantised inputs are stored unchanged"
        )
    if spec.in_rows:
        if spec.kind.is_recurrent:
            raise SpecError(
                f"kv_cache_dtype={spec.kv_cache_dtype!r} is for keys and values, and "
                f"{spec.kind.value} layers keep none; leave it out"
            )
        latent = None if spec.latent is None else spec.latent.size
        check_widths(
            spec.kv_cache_dtype, spec.num_kv_heads, spec.head_size, spec.v_head_size, latent
        )
    scaled = spec.stored_dtype != spec.dtype or spec.qkv_dtype != "auto" or spec.out_dtype != "auto"
    if spec.scales != "number" and (spec.kind.family != "attention" or not scaled):
        raise SpecError(
            f"scales={spec.scales!r}: nothing is quantised that attention scales; leave it out, or set "
            "kv_cache_dtype, qkv_dtype or out_dtype"
        )


def _check_rope(spec: LayerSpec, rope: RopeSpec) -> None:
    """The rotated part lies within a head, and in-cache positions need a cache of keys."""
    if spec.kind.is_recurrent:
        raise SpecError(f"rope={rope!r}: {spec.kind.value} layers don't rotate; leave it out")
    if spec.latent is None:
        rope.check_span("head_size", spec.head_size)
    elif rope.last:
        raise SpecError("rope.last=True: an MLA layer's rope part is the last anyway; leave it out")
    else:
        rope.check_span("latent.rope_head_size", spec.latent.rope_head_size, whole=True)
    attends = spec.kind.family == "attention" and spec.role is Role.DECODER
    if rope.positions == "cache" and not (spec.cached and attends):
        what = "MLA" if spec.kind.is_latent else f"a {spec.role.value} layer"
        raise SpecError(
            "rope.positions='cache' is for a decoder's attention over cached keys; use 'absolute' for "
            f"{what if spec.cached else 'a layer that keeps none'}"
        )


def _check_pointwise(spec: LayerSpec) -> None:
    """A variant's functions and a step's mask speak of places in one sequence, and of its keys."""
    if spec.mask is not None and spec.length_bounds:
        raise SpecError(
            f"mask={spec.mask!r} counts a sequence's keys, and with length_bounds=True the host "
            f"knows only their bounds; drop one"
        )
    for name, plain in (
        ("variant", spec.variant if spec.kind is AttentionKind.PHI_LINEAR else None),
        ("mask", None),
        ("qkv_dtype", "auto"),
        ("out_dtype", "auto"),
    ):
        if (value := getattr(spec, name)) == plain:
            continue
        if spec.kind.family != "attention":
            raise SpecError(
                f"{name}={value!r} is for attention over keys and values; leave it out for "
                f"{spec.kind.value} layers"
            )
        if spec.role is Role.CROSS and plain is None:
            raise SpecError(
                f"{name}={value!r}: role='cross' has no positions, and a query's keys are another "
                "sequence's; use a decoder's or an encoder's role"
            )


def _check_uncached(spec: LayerSpec) -> None:
    """Keys and values that don't outlive the step have no cache to describe."""
    if spec.kind.family != "attention":
        raise SpecError(f"cached=False: {spec.kind.value} layers keep what they attend to")
    if spec.length_bounds:
        raise SpecError(
            "length_bounds=True is for a cache whose lengths are on the device; leave it out"
        )
    for name, plain in (("kv_cache_dtype", "auto"), ("block_size", None)):
        if (value := getattr(spec, name)) != plain:
            raise SpecError(f"{name}={value!r} is about a cache, and cached=False; drop one")


def _check_family(spec: LayerSpec) -> None:
    """The part that makes a layer of its kind is there, and no other kind's. Raises `SpecError`."""
    kind = spec.kind
    for name, due in (
        ("latent", kind.is_latent),
        ("sparse", kind in (AttentionKind.SPARSE, AttentionKind.SPARSE_MLA)),
        ("recurrent", kind.is_recurrent),
    ):
        part = getattr(spec, name)
        if due != (part is not None):
            remedy = f"leave {name} out" if part else f"give {name}={_PARTS[name].__name__}(…)"
            raise SpecError(f"kind={kind.value!r} and {name}={part!r} don't go together; {remedy}")
    if spec.sparse is not None:
        _check_sparse(spec, spec.sparse)
    if spec.indexer is not None:
        _check_indexer(spec, spec.indexer)
    if spec.recurrent is not None:
        scale = None if spec.scale == 1.0 / math.sqrt(spec.head_size) else spec.scale
        spec.recurrent.check_within(kind, spec.num_heads, spec.dtype, spec.variant, scale)
    if not kind.is_grouped and spec.num_kv_heads != spec.num_heads:
        raise SpecError(
            f"num_kv_heads={spec.num_kv_heads}: {kind.value} has no groups; leave it out, or set it to "
            f"{spec.num_heads}"
        )
    if kind in VALUELESS and spec.v_head_size != spec.head_size:
        raise SpecError(f"v_head_size={spec.v_head_size}: {kind.value} has no values; leave it out")
    if spec.sparse is not None or spec.latent is not None:
        _check_no_mask(spec)
    if spec.latent and spec.head_size <= spec.latent.rope_head_size:
        raise SpecError(
            f"head_size={spec.head_size} must exceed latent.rope_head_size="
            f"{spec.latent.rope_head_size}: it counts the part without positions and the rope part"
        )


def _check_no_mask(spec: LayerSpec) -> None:
    """No position hides or favours a key beside a sparse choice, or over latents. Raises `SpecError`."""
    why = "a choice names the keys that count" if spec.sparse else "all latents count"
    for name in ("sliding_window", "window_right", "chunk_size", "alibi", "role"):
        value = getattr(spec, name)
        if all(value is not plain for plain in (None, False, Role.DECODER)):
            raise SpecError(f"{name}={value!r}: {why}; leave it out")


def _check_sparse(spec: LayerSpec, sparse: SparseSpec) -> None:
    """The parts of a choice go together. Raises `SpecError`."""
    if sparse.value_in_key and spec.v_head_size > spec.head_size:
        raise SpecError(
            f"v_head_size={spec.v_head_size}: with sparse.value_in_key a value is a part of its key, of "
            f"head_size={spec.head_size}"
        )
    compressor = sparse.compressor
    if compressor is not None and compressor.size != spec.num_kv_heads * spec.head_size:
        raise SpecError(
            f"sparse.compressor.size={compressor.size}: a key has "
            f"{spec.num_kv_heads * spec.head_size} elements"
        )
    if sparse.turns_back and not sparse.value_in_key:
        raise SpecError(
            "sparse.turns_back=True: only values in keys carry their rotation; leave it out"
        )
    alone = SparseSpec(
        budget=sparse.budget, granularity=sparse.granularity, physical=sparse.physical
    )
    if spec.latent is not None and sparse != alone:
        raise SpecError(
            f"sparse={sparse!r}: all heads of MLA read the same chosen tokens' latents; give budget, "
            "granularity or physical alone"
        )
    if sparse.newest and spec.indexer is not None:
        raise SpecError("sparse.newest=True: there is no choice to make; leave indexer out")


def _check_indexer(spec: LayerSpec, indexer: IndexerSpec) -> None:
    """Check that an indexer's choice has the layer's form. Raises `SpecError`."""
    if spec.sparse is None:
        raise SpecError(f"kind={spec.kind.value!r} attends to no choice of keys; leave indexer out")
    if spec.sparse.physical:
        raise SpecError("sparse.physical=True: an indexer's ids are places in the sequence")
    most, group = spec.sparse.budget, spec.sparse.granularity * spec.sparse.tokens_per_entry
    choices = spec.sparse.choices(spec.num_heads, spec.num_kv_heads)
    own = indexer.pool * indexer.tokens_per_entry
    budget = indexer.budget if isinstance(indexer.budget, int) else 0
    for wrong, name, value, wanted in (
        (own != group, "pool * tokens_per_entry", own, f"{group}, the tokens that an id names"),
        (indexer.choices != choices, "choices", indexer.choices, f"{choices}, the layer's"),
        (budget + indexer.tail > most, "budget", indexer.budget, f"{most - indexer.tail} at most"),
    ):
        if wrong:
            raise SpecError(f"indexer.{name}={value}: it must be {wanted}")
