"""What does the layer compute? `LayerSpec` says everything that can change which kernel is right."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Self

from polyattn.errors import SpecError, shown
from polyattn.spec.checks import (
    LONGEST,
    check_fields,
    check_latent,
    check_recurrent,
    check_relations,
    member,
    no_field,
)
from polyattn.spec.features import features
from polyattn.spec.kinds import AttentionKind, GraphCapture, Invariance, Role, dtype_name
from polyattn.spec.models import model_reader
from polyattn.spec.rope import RopeSpec
from polyattn.spec.sparse import SparseSpec


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """The latent part of an MLA layer. Sizes are in elements.

    Attributes:
        rank: of the latent, which is the value and the first part of the key.
        rope_head_size: of the rope key, which all heads share.
        topk: of a sparse MLA layer, the most tokens that a query attends to; None: all.
        index_heads: heads of its indexer's queries; 0: no indexer.
        index_head_size: of the indexer's queries and keys.

    Raises:
        SpecError: a size isn't one.

    Examples:
        >>> LatentSpec(rank=512, rope_head_size=64).size
        576

    """

    rank: int
    rope_head_size: int
    topk: int | None = None
    index_heads: int = 0
    index_head_size: int = 0

    def __post_init__(self) -> None:
        check_latent(self)

    @property
    def size(self) -> int:
        """Elements that the cache holds for each token: the latent and the rope key."""
        return self.rank + self.rope_head_size


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec:
    """The recurrent part of a layer; `polyattn.spec.recurrence` says which fields fit which kind.

    Attributes:
        state_size: elements of Mamba's state for each channel.
        conv_width: inputs that the short convolution sees, the newest included.
        draft_tokens: D, the most tokens of a step that may be rejected. The convolution's state is then
            a ring of conv_width - 1 + D inputs; position p's is in column p modulo that. The sequence's
            next length says how many were rejected.
        activation: after the short convolution: `"silu"` or None.
        dt_softplus: Mamba's step size is softplus(dt + dt_bias).
        qk_norm: a delta rule's queries and keys are scaled to length 1 first.
        feature_map: of linear attention with a normaliser, applied to queries and keys: `"elu+1"` or
            `"relu"`.
        gated: Mamba takes a gate z beside x, and returns y silu(z).
        channel_groups: groups of Mamba-1's channels; each has a B and a C of its own.
        bc_in_float32: Mamba's B and C are float32 whatever the layer's dtype.
        state_dtype: of the state between steps: `"bfloat16"` or `"float16"`; `"auto"`: float32, for a
            convolution the layer's dtype. A step computes in float32 and rounds the new state.

    Raises:
        SpecError: a field has a value that no layer has.

    Examples:
        >>> conv = RecurrentSpec(conv_width=4, activation="silu")
        >>> LayerSpec(kind="short_conv", num_heads=64, head_size=1, recurrent=conv).kind.value
        'short_conv'

    """

    state_size: int = 0
    conv_width: int = 0
    draft_tokens: int = 0
    activation: str | None = None
    dt_softplus: bool = True
    qk_norm: bool = False
    feature_map: str | None = None
    gated: bool = False
    channel_groups: int = 1
    bc_in_float32: bool = False
    state_dtype: str = "auto"

    def __post_init__(self) -> None:
        check_recurrent(self)


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer of attention, or of what is in its place: frozen, hashable, no tensors, JSON round trip.

    Sizes are in elements, windows in tokens. A window, a chunk and sink tokens count up to 2^29, the
    longest sequence; a larger value is stored as that one.

    Attributes:
        kind: what the layer computes.
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
        role: where the layer is in its model.
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
        logit_soft_cap: scores become cap * tanh(score / cap) (Gemma 2).
        alibi: adds `-slope * distance` to each score (Press et al., 2022); `Attention` has the slopes.
        learned_sinks: one learned logit for each head joins the softmax's denominator (gpt-oss).
        sink_tokens: S: a window never hides the first S keys (StreamingLLM).
        dense_context: a whole prompt in one step sees all of its keys; the window and the sink tokens
            apply to rows that continue from a cache (TensorRT-LLM's dense context phase).
        needs_lse: whether calls return the LSE.
        graph_capture: which steps the caller captures.
        length_bounds: steps are planned by upper bounds of the lengths (`Batch.on_buffers`), and
            kernels read the lengths on the device, so that a graph replays without a new plan. Query
            lengths are exact.
        deterministic: equal calls give equal bits.
        batch_invariant: what must not change a bit of a token's result: `"batch"` (or True), `"steps"`
            or `"calls"`, the levels of `Invariance`.
        latent: the latent part of an MLA layer.
        recurrent: the recurrent part of a recurrence.
        rope: the rotation of queries and keys. The layer's `rotate=` says whether the layer applies it;
            kernels do only if `rope.positions` is `"cache"`.
        sparse: of kind `"sparse"`, the meaning of the ids that choose a token's keys.
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

    kind: AttentionKind = AttentionKind.ATTENTION
    num_heads: int
    num_kv_heads: int = 0
    head_size: int
    v_head_size: int = 0
    scale: float = 0.0
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    qkv_dtype: str = "auto"
    out_dtype: str = "auto"
    scales: str = "number"
    fp8_compute: bool = False
    block_size: int | None = None
    role: Role = Role.DECODER
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
    graph_capture: GraphCapture = GraphCapture.NONE
    length_bounds: bool = False
    deterministic: bool = False
    batch_invariant: Invariance = Invariance.NONE
    latent: LatentSpec | None = None
    recurrent: RecurrentSpec | None = None
    rope: RopeSpec | None = None
    sparse: SparseSpec | None = None
    variant: str | None = None
    mask: str | None = None

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        for name in fields:
            if name not in cls.__dataclass_fields__:
                raise SpecError(no_field("LayerSpec", name, cls.__dataclass_fields__))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        if isinstance(self.batch_invariant, bool):
            set_(self, "batch_invariant", Invariance(self.batch_invariant))
        for name, enum in (
            ("kind", AttentionKind),
            ("role", Role),
            ("graph_capture", GraphCapture),
            ("batch_invariant", Invariance),
        ):
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
        check_fields(self)
        for name, part in _PARTS.items():
            if not isinstance(getattr(self, name), (part, type(None))):
                raise SpecError(
                    f"{name}={shown(getattr(self, name))} must be a {part.__name__}, or None for none"
                )
        for name, most in _SATURATED.items():
            if (getattr(self, name) or 0) > most:
                set_(self, name, most)
        set_(self, "scale", float(self.scale) or 1.0 / math.sqrt(self.head_size))
        check_relations(self)
        if self.window_right is not None and self.window_right + 1 == self.sliding_window:
            set_(self, "window_right", None)  # what the window means anyway
        # The spec is the key of every look-up on the way to a kernel, so hash it once.
        fields = tuple(getattr(self, f.name) for f in dataclasses.fields(self))
        set_(self, "_hash", hash(fields))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields alone: strings hash otherwise in another process."""
        return _unpickled, ({f.name: getattr(self, f.name) for f in dataclasses.fields(self)},)

    def _derived(self) -> dict[str, Any]:
        """Return what fields that were left out follow from."""
        return {
            "num_kv_heads": self.num_heads,
            "v_head_size": self.head_size,
            "cached": self.role in (Role.DECODER, Role.CROSS),
        }

    @property
    def gqa_ratio(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def stored_dtype(self) -> str:
        """The dtype of what the cache holds: `kv_cache_dtype`, or the model's."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    def replace(self, **changes: Any) -> LayerSpec:
        """Return a copy with `changes`; sizes that were defaults follow what they derive from."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name, default in self._derived().items():
            if getattr(self, name) == default:
                values[name] = _DERIVED[name]
        if self.scale == 1.0 / math.sqrt(self.head_size):
            values["scale"] = 0.0
        return LayerSpec(**(values | changes))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as JSON values."""
        out: dict[str, Any] = {}
        derived = self._derived()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            default = derived[field.name] if field.name == "cached" else field.default
            if value == default:
                continue
            if isinstance(value, RopeSpec):
                out[field.name] = value.to_dict()
                continue
            if isinstance(value, Enum):
                value = value.name.lower() if isinstance(value, IntEnum) else value.value
            out[field.name] = (
                dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
            )
        return out

    def to_json(self) -> str:
        """Return the spec as JSON text; `from_json` reads it back."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LayerSpec:
        """Build a spec from `to_dict`'s form. Raises `SpecError` on an unknown field."""
        given = dict(values)
        for name, part in (
            ("latent", LatentSpec), ("recurrent", RecurrentSpec), ("sparse", SparseSpec),
        ):  # fmt: skip
            if isinstance(given.get(name), Mapping):
                given[name] = _part(name, part, given[name])
        if isinstance(given.get("rope"), Mapping):
            given["rope"] = RopeSpec.from_dict(given["rope"])
        try:
            return cls(**given)
        except TypeError as error:
            raise SpecError(f"LayerSpec: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> LayerSpec:
        """Build a spec from `to_json`'s text. Raises `SpecError`."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise SpecError(f"LayerSpec: not JSON: {error}") from error
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

        `config` is a mapping, a config object (`to_dict`), or the path of a `config.json` or of
        a directory that holds one. `assume` names the type to read it as; `ignore` the fields
        that don't change attention; `strict=False` warns of those that aren't understood instead
        of refusing them; `kv_cache_dtype` what the caches hold. By default, and for `"auto"`, it is
        what the checkpoint asks for, else the model's dtype. `polyattn-models` reads the config.
        Raises `ConfigError`, also where that isn't installed.
        """
        return model_reader().layer_specs(
            config, assume=assume, ignore=ignore, strict=strict, kv_cache_dtype=kv_cache_dtype
        )

    def __str__(self) -> str:
        """One line that a log can carry: what is unusual about the layer, not every field."""
        heads = (
            f"{self.num_heads} heads"
            if self.num_heads == self.num_kv_heads
            else f"{self.num_heads}/{self.num_kv_heads} heads"
        )
        size = (
            f"{self.head_size}"
            if self.head_size == self.v_head_size
            else f"{self.head_size}/{self.v_head_size}"
        )
        sized = f"{heads} of {size}"
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
        if self.kv_source is not None:
            words.append(f"keys of layer {self.kv_source}")
        words += sorted(features(self) - {"causal", "gqa"})
        if self.sliding_window:
            words[words.index("sliding_window")] = f"window {self.sliding_window}"
        if self.variant:
            words[words.index("variant")] = f"variant {self.variant}"
        return ", ".join(words)


_PARTS: dict[str, type[Any]] = {
    "latent": LatentSpec, "recurrent": RecurrentSpec, "rope": RopeSpec, "sparse": SparseSpec,
}  # fmt: skip
_SATURATED = {
    "sliding_window": LONGEST, "window_right": LONGEST - 1, "chunk_size": LONGEST,
    "sink_tokens": LONGEST,
}  # fmt: skip
"""What says "all keys" in each field; more of it means the same."""
_DERIVED: dict[str, Any] = {"num_kv_heads": 0, "v_head_size": 0, "cached": None}
"""What says that a field was left out."""


def _unpickled(values: dict[str, Any]) -> LayerSpec:
    return LayerSpec(**values)


def _part(name: str, part: type[Any], values: Mapping[str, Any]) -> Any:
    known = {f.name for f in dataclasses.fields(part)}
    for field in values:
        if field not in known:
            raise SpecError(no_field(name, str(field), known))
    try:
        return part(**values)
    except TypeError as error:
        raise SpecError(f"{name}: {error}") from error
