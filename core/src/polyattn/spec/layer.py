"""What does the layer compute? `LayerSpec` says everything that can change which kernel is right."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

from polyattn.errors import SpecError, nearest
from polyattn.spec.rope import RopeSpec

DTYPES = ("float64", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2", "int8")


class AttentionKind(str, Enum):
    """The family of a layer: what fills the place of attention in it."""

    ATTENTION = "attention"
    MLA = "mla"
    SPARSE_MLA = "sparse_mla"
    MAMBA1 = "mamba1"
    MAMBA2 = "mamba2"
    LINEAR = "linear"
    GDN = "gdn"
    SHORT_CONV = "short_conv"

    @property
    def is_recurrent(self) -> bool:
        """Whether the layer keeps a per-sequence state instead of keys and values."""
        return self not in (
            AttentionKind.ATTENTION,
            AttentionKind.MLA,
            AttentionKind.SPARSE_MLA,
        )

    @property
    def is_latent(self) -> bool:
        """Whether the layer caches an MLA latent."""
        return self in (AttentionKind.MLA, AttentionKind.SPARSE_MLA)


class Role(str, Enum):
    """Where the layer stands in its model."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    CROSS = "cross"

    @property
    def has_cache(self) -> bool:
        """Whether keys and values outlive the step that made them."""
        return self in (Role.DECODER, Role.CROSS)


class GraphCapture(IntEnum):
    """Which steps the caller captures in a device graph; a higher level includes the lower ones."""

    NONE = 0
    SINGLE_TOKEN_DECODE = 1
    UNIFORM = 2
    ANY = 3


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """The latent part of an MLA layer (sizes in elements)."""

    rank: int
    rope_head_size: int
    topk: int | None = None
    index_heads: int = 0
    index_head_size: int = 0

    @property
    def size(self) -> int:
        """Elements that the cache holds for each token: the latent and the rope key."""
        return self.rank + self.rope_head_size


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec:
    """A recurrent layer, sizes in elements; `polyattn.spec.recurrence` says what fits which kind.

    - `activation`: what follows the short convolution: `"silu"`, or None.
    - `dt_softplus`: Mamba's step size is softplus(dt + dt_bias).
    - `qk_norm`: queries and keys of a delta rule are scaled to length 1 first.
    """

    state_size: int = 0
    conv_width: int = 0
    activation: str | None = None
    dt_softplus: bool = True
    qk_norm: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One attention (or attention-like) layer: frozen, hashable, no tensors, JSON round trip.

    Sizes are in elements, windows in tokens. `v_head_size` defaults to `head_size`, `scale`
    to `1/sqrt(head_size)`, `num_kv_heads` to `num_heads`. Raises `SpecError`.

    - `sliding_window` W: a query sees itself and the W - 1 keys before it.
    - `chunk_size` C: a query sees only the keys of its own chunk `position // C` (Llama 4).
    - `learned_sinks`: one learned logit a head joins the softmax's denominator (gpt-oss).
    - `sink_tokens` S: the first S keys stay visible beyond the window (StreamingLLM).
    - `alibi`: adds `-slope * distance` to each logit; slopes belong to `Attention`.
    - `block_size` None lets the selector choose.
    - `rope`: how queries and keys are rotated before they come here; no kernel is asked for it.
    - `fp8_compute`: over an e4m3 cache the queries and the softmax's weights may be rounded to e4m3
      as well, for kernels that multiply in it; `checking.tolerance.FP8_COMPUTE` is the tolerance.
    """

    kind: AttentionKind = AttentionKind.ATTENTION
    num_heads: int
    num_kv_heads: int = 0
    head_size: int
    v_head_size: int = 0
    scale: float = 0.0
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    fp8_compute: bool = False
    block_size: int | None = None
    role: Role = Role.DECODER
    causal: bool = True
    sliding_window: int | None = None
    chunk_size: int | None = None
    logit_soft_cap: float | None = None
    alibi: bool = False
    learned_sinks: bool = False
    sink_tokens: int = 0
    needs_lse: bool = False
    graph_capture: GraphCapture = GraphCapture.NONE
    deterministic: bool = False
    batch_invariant: bool = False
    latent: LatentSpec | None = None
    recurrent: RecurrentSpec | None = None
    rope: RopeSpec | None = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        for name, enum in (
            ("kind", AttentionKind),
            ("role", Role),
            ("graph_capture", GraphCapture),
        ):
            set_(self, name, _member(name, getattr(self, name), enum))
        set_(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        set_(self, "v_head_size", self.v_head_size or self.head_size)
        _check_fields(self)
        set_(self, "scale", float(self.scale) or 1.0 / math.sqrt(self.head_size))
        _check_relations(self)
        # The spec is the key of every look-up on the way to a kernel, so hash it once.
        fields = tuple(getattr(self, f.name) for f in dataclasses.fields(self))
        set_(self, "_hash", hash(fields))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

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
        if "head_size" in changes:
            if self.v_head_size == self.head_size:
                values["v_head_size"] = 0
            if self.scale == 1.0 / math.sqrt(self.head_size):
                values["scale"] = 0.0
        return LayerSpec(**(values | changes))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as JSON values."""
        out: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == field.default:
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
        known = {f.name for f in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise SpecError(f"LayerSpec has no field {name!r}{nearest(name, known)}")
        given = dict(values)
        for name, part in (("latent", LatentSpec), ("recurrent", RecurrentSpec)):
            if isinstance(given.get(name), Mapping):
                given[name] = part(**given[name])
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
    ) -> list[LayerSpec]:
        """Return the specs of the layers that a Hugging Face model serves text with, in order.

        `config` is a mapping, a config object (`to_dict`), or the path of a `config.json` or of
        a directory that holds one. `assume` names the type to read it as; `ignore` the fields
        that don't change attention. Raises `ConfigError`.
        """
        from polyattn.spec.huggingface import layer_specs

        return layer_specs(config, assume=assume, ignore=ignore)

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
        words += sorted(features(self) - {"causal", "gqa"})
        if self.sliding_window:
            words[words.index("sliding_window")] = f"window {self.sliding_window}"
        return ", ".join(words)


FEATURES = {
    "causal": "a causal mask, aligned to the bottom right",
    "non_causal": "no causal mask",
    "gqa": "fewer KV heads than query heads",
    "v_head_size": "a V head size that differs from the K head size",
    "sliding_window": "a sliding window",
    "chunked": "chunked attention",
    "logit_soft_cap": "logit soft capping",
    "alibi": "ALiBi",
    "learned_sinks": "learned sink logits",
    "sink_tokens": "kept first tokens beyond the window",
    "lse": "returning the log-sum-exp",
    "deterministic": "the same bits from the same inputs",
    "batch_invariant": "the same bits for a request in any batch",
}
"""Every feature that a `LayerSpec` can ask for and a backend must claim, with what it means."""


def features(spec: LayerSpec) -> frozenset[str]:
    """Return the names in `FEATURES` that `spec` asks for."""
    wanted = {
        "causal": spec.causal,
        "non_causal": not spec.causal,
        "gqa": spec.num_kv_heads != spec.num_heads,
        "v_head_size": spec.v_head_size != spec.head_size,
        "sliding_window": spec.sliding_window is not None,
        "chunked": spec.chunk_size is not None,
        "logit_soft_cap": spec.logit_soft_cap is not None,
        "alibi": spec.alibi,
        "learned_sinks": spec.learned_sinks,
        "sink_tokens": spec.sink_tokens > 0,
        "lse": spec.needs_lse,
        "deterministic": spec.deterministic,
        "batch_invariant": spec.batch_invariant,
    }
    return frozenset(name for name, asked in wanted.items() if asked)


def _member(name: str, value: Any, enum: type[Enum]) -> Enum:
    if isinstance(value, str) and issubclass(enum, IntEnum):
        value = enum.__members__.get(value.upper(), value)
    try:
        return enum(value)
    except ValueError:
        valid = [m.name.lower() if issubclass(enum, IntEnum) else m.value for m in enum]
        raise SpecError(f"{name}={value!r} is unknown{nearest(str(value), valid)}") from None


def _check_fields(spec: LayerSpec) -> None:
    for name in ("num_heads", "num_kv_heads", "head_size", "v_head_size"):
        _positive(name, getattr(spec, name))
    for name in ("block_size", "sliding_window", "chunk_size"):
        if getattr(spec, name) is not None:
            _positive(name, getattr(spec, name), "; use None for none")
    if spec.dtype not in DTYPES:
        raise SpecError(f"dtype={spec.dtype!r} is unknown{nearest(spec.dtype, DTYPES)}")
    if spec.kv_cache_dtype not in KV_CACHE_DTYPES:
        raise SpecError(
            f"kv_cache_dtype={spec.kv_cache_dtype!r} is unknown"
            f"{nearest(spec.kv_cache_dtype, KV_CACHE_DTYPES)}"
        )
    if not math.isfinite(spec.scale) or spec.scale < 0:
        raise SpecError(f"scale={spec.scale!r} must be a positive number, or 0 for the default")
    cap = spec.logit_soft_cap
    if cap is not None and not (math.isfinite(cap) and cap > 0):
        raise SpecError(f"logit_soft_cap={cap!r} must be positive; use None for none")
    if not isinstance(spec.sink_tokens, int) or spec.sink_tokens < 0:
        raise SpecError(f"sink_tokens={spec.sink_tokens!r} must be 0 or more")


def _check_relations(spec: LayerSpec) -> None:
    if spec.num_heads % spec.num_kv_heads and not spec.kind.is_recurrent:
        raise SpecError(
            f"num_heads={spec.num_heads} is not divisible by num_kv_heads={spec.num_kv_heads}; "
            "each KV head serves the same number of query heads"
        )
    if spec.sink_tokens and spec.sliding_window is None:
        raise SpecError(
            f"sink_tokens={spec.sink_tokens} needs a sliding_window; without one every key is kept"
        )
    if spec.fp8_compute and spec.kv_cache_dtype != "fp8_e4m3":
        raise SpecError(
            f"fp8_compute=True goes with kv_cache_dtype='fp8_e4m3', not {spec.kv_cache_dtype!r}"
        )
    if spec.role in (Role.CROSS, Role.ENCODER, Role.ENCODER_ONLY) and spec.causal:
        raise SpecError(f"role={spec.role.value!r} is not causal; set causal=False")
    if spec.role is Role.CROSS and (spec.sliding_window or spec.chunk_size or spec.alibi):
        raise SpecError("role='cross' has no positions to window, chunk or bias; drop those fields")
    if spec.kind.is_latent != (spec.latent is not None):
        raise SpecError(f"kind={spec.kind.value!r} and latent={spec.latent!r} don't go together")
    if spec.kind is AttentionKind.SPARSE_MLA and not (spec.latent and spec.latent.topk):
        raise SpecError("kind='sparse_mla' needs latent.topk, the tokens each query attends to")
    if spec.kind.is_recurrent != (spec.recurrent is not None):
        raise SpecError(
            f"kind={spec.kind.value!r} and recurrent={spec.recurrent!r} don't go together"
        )
    if spec.recurrent and spec.recurrent.activation not in (None, "silu"):
        raise SpecError(
            f"recurrent.activation={spec.recurrent.activation!r} must be 'silu' or None"
        )
    if spec.latent and spec.head_size <= spec.latent.rope_head_size:
        raise SpecError(
            f"head_size={spec.head_size} must exceed latent.rope_head_size="
            f"{spec.latent.rope_head_size}: it counts the part without positions and the rope part"
        )


def _positive(name: str, value: Any, hint: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise SpecError(f"{name}={value!r} must be a positive integer{hint}")
