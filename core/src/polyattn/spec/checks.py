"""Is a value what its field takes? Each refusal names the field, its value and the remedy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from enum import Enum, IntEnum
from typing import Any, TypeVar

from polyattn.errors import PolyattnError, SpecError, nearest, shown

T = TypeVar("T")
LARGEST = 1 << 24
"""No head count, size or window of a model comes near; what exceeds it is a slip."""
LARGEST_BLOCK = 1 << 16
LONGEST = 1 << 29
"""Tokens of the longest sequence. A window, chunk or number of kept tokens beyond it hides nothing more,
and a position plus or minus either stays within int32, in which kernels count."""
LARGEST_WINDOW = 1 << 40
"""Engines write 2^31 - 1, 2^31 or 2^32 for none; what exceeds this is a slip."""


def member(name: str, value: Any, enum: type[Enum]) -> Enum:
    """Return the member of `enum` that `value` is or names. Raises `SpecError`."""
    if isinstance(value, str) and issubclass(enum, IntEnum):
        value = enum.__members__.get(value.upper(), value)
    try:
        if isinstance(value, bool):
            raise ValueError
        return enum(value)
    except ValueError:
        valid = [m.name.lower() if issubclass(enum, IntEnum) else m.value for m in enum]
        raise SpecError(f"{name}={value!r} is unknown{nearest(str(value), valid)}") from None


FIELDS_ELSEWHERE = {
    "head_dim": "head_size", "qk_head_dim": "head_size", "head_dim_qk": "head_size",
    "v_head_dim": "v_head_size", "head_dim_v": "v_head_size", "head_dim_vo": "v_head_size",
    "num_attention_heads": "num_heads", "num_qo_heads": "num_heads", "num_q_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads", "num_heads_kv": "num_kv_heads",
    "sm_scale": "scale", "softmax_scale": "scale", "scaling": "scale", "page_size": "block_size",
    "softcap": "logit_soft_cap", "soft_cap": "logit_soft_cap", "logits_soft_cap": "logit_soft_cap",
    "attn_logit_softcapping": "logit_soft_cap", "is_causal": "causal",
    "attention_chunk": "chunk_size", "attention_chunk_size": "chunk_size",
    "window": "sliding_window", "window_size": "sliding_window",
    "window_left": "sliding_window, which counts the query itself: window_left + 1",
    "kv_dtype": "kv_cache_dtype", "kv_data_type": "kv_cache_dtype", "cache_dtype": "kv_cache_dtype",
    "q_data_type": "dtype", "torch_dtype": "dtype", "sinks": "learned_sinks",
    "return_lse": "needs_lse", "alibi_slopes": "alibi", "rope_theta": "rope=RopeSpec(base=...)",
}  # fmt: skip
"""What transformers, vLLM, FlashInfer and flash-attn call a field, and its name here."""


def no_field(of: str, name: str, known: Collection[str]) -> str:
    """Say that there is no such field, and what it is called here."""
    here = FIELDS_ELSEWHERE.get(name, "")
    hint = (
        f"; polyattn calls it {here}" if here.partition(",")[0].partition("=")[0] in known else ""
    )
    return f"{of} has no field {name!r}{hint or nearest(name, known)}"


def from_fields(of: str, cls: type[T], values: Mapping[str, Any]) -> T:
    """Build a spec, or a part of one, from its fields. Raises `SpecError`."""
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise SpecError(no_field(of, str(name), known))
    try:
        return cls(**values)
    except TypeError as error:
        raise SpecError(f"{of}: {error}") from error


def as_fields(spec: Any, derived: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that differ from their defaults, or from what is `derived`, as JSON values."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if value == derived.get(field.name, field.default):
            continue
        if isinstance(value, Enum):
            value = value.name.lower() if isinstance(value, IntEnum) else value.value
        elif isinstance(value, tuple):
            value = list(value)
        elif hasattr(value, "to_dict"):
            value = value.to_dict()
        elif dataclasses.is_dataclass(value):
            value = dataclasses.asdict(value)  # type: ignore[arg-type]
        out[field.name] = value
    return out


def integer(
    name: str, value: Any, low: int, high: int = LARGEST, hint: str = "",
    error: type[PolyattnError] = SpecError,
) -> None:  # fmt: skip
    """Refuse anything but an integer from `low` to `high`."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low:
        wanted = "a positive integer" if low == 1 else f"an integer, {low} or more"
        raise error(f"{name}={value!r} must be {wanted}{hint}")
    if value > high:
        raise error(f"{name}={value!r} is more than {high}, the most that a layer can have")


def number(name: str, value: Any, hint: str, low: float = -math.inf) -> None:
    """Refuse anything but a finite real number, `low` or more."""
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or value < low:
        raise SpecError(f"{name}={value!r} must be {hint}")


def flag(name: str, value: Any, error: type[PolyattnError] = SpecError) -> None:
    """Refuse anything but True and False: a text, "no" too, would count as True."""
    if not isinstance(value, bool):
        raise error(f"{name}={shown(value)} must be True or False")


def choice(name: str, value: Any, valid: Collection[str]) -> None:
    """Check that a field's value is one of the names that it can have."""
    if not isinstance(value, str) or value not in valid:
        raise SpecError(f"{name}={value!r} is unknown{nearest(value, valid)}")
<<<<<<< HEAD


def check_fields(spec: LayerSpec) -> None:
    """Check each field of a layer by itself. Raises `SpecError`."""
    for name in ("num_heads", "num_kv_heads", "head_size", "v_head_size"):
        integer(name, getattr(spec, name), 1)
    for name in ("block_size", "sliding_window", "chunk_size"):
        if getattr(spec, name) is not None:
            high = LARGEST_BLOCK if name == "block_size" else LARGEST_WINDOW
            integer(name, getattr(spec, name), 1, high, "; use None for none")
    if spec.window_right is not None:
        integer("window_right", spec.window_right, 0, LARGEST_WINDOW, "; use None for none")
    if spec.kv_source is not None:
        integer("kv_source", spec.kv_source, 0, hint="; use None for the layer's own keys")
    integer("sink_tokens", spec.sink_tokens, 0, LARGEST_WINDOW)
    for name in _FLAGS:
        flag(name, getattr(spec, name))
    for name, valid in (
        ("dtype", DTYPES), ("qkv_dtype", QUANTISED_DTYPES), ("out_dtype", QUANTISED_DTYPES),
        ("scales", SCALES),
    ):  # fmt: skip
        choice(name, getattr(spec, name), valid)
    stored = spec.kv_cache_dtype
    if not isinstance(stored, str):
        choice("kv_cache_dtype", stored, KV_CACHE_DTYPES)
    elif stored not in KV_CACHE_DTYPES:
        rows_of(stored)
    if spec.variant is not None and not (
        isinstance(spec.variant, str) and NAME.fullmatch(spec.variant)
    ):
        raise SpecError(f"variant={spec.variant!r} must be a registered variant's name, or None")
    if spec.mask is not None:
        choice("mask", spec.mask, MASKS)
    number("scale", spec.scale, "a positive number, or 0 for the default")
    if spec.scale < 0:
        raise SpecError(f"scale={spec.scale!r} must be a positive number, or 0 for the default")
    if spec.logit_soft_cap is not None:
        number("logit_soft_cap", spec.logit_soft_cap, "positive; use None for none")
        if spec.logit_soft_cap <= 0:
            raise SpecError(f"logit_soft_cap={spec.logit_soft_cap!r} must be positive; use None")


_FLAGS = (
    "fp8_compute", "causal", "cached", "alibi", "learned_sinks", "needs_lse", "length_bounds",
    "deterministic", "dense_context",
)  # fmt: skip


def check_relations(spec: LayerSpec) -> None:
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
    _check_invariance(spec)
    if spec.window_right is not None and spec.causal:
        raise SpecError(
            f"window_right={spec.window_right}: a causal mask hides all keys after the query; leave it "
            "out, or set causal=False"
        )
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
    if spec.length_bounds and not spec.cached:
        raise SpecError(
            "length_bounds=True is for a cache whose lengths are on the device; leave it out"
        )
    if not spec.cached:
        _check_uncached(spec)
    _check_family(spec)
    _check_pointwise(spec)
    if spec.rope is not None:
        _check_rope(spec, spec.rope)


def _check_invariance(spec: LayerSpec) -> None:
    """What a layer computes must not itself depend on what its bits must not depend on."""
    level = spec.batch_invariant.name.lower()
    if spec.batch_invariant < Invariance.STEPS:
        return
    if spec.dense_context:
        raise SpecError(
            f"batch_invariant={level!r}: dense_context=True shows a prompt other keys when it comes in "
            "one step; drop one, or ask for batch_invariant='batch'"
        )
    if spec.rope is not None and spec.rope.scaling in ("dynamic", "longrope"):
        raise SpecError(
            f"batch_invariant={level!r}: rope.scaling={spec.rope.scaling!r} rotates a token by its "
            "sequence's length at that step; ask for batch_invariant='batch'"
        )
    if spec.batch_invariant >= Invariance.CALLS and spec.stored_dtype != spec.dtype:
        raise SpecError(
            f"batch_invariant={level!r}: a cache of {spec.stored_dtype} rounds keys that a call without "
            "one reads as they are; use kv_cache_dtype='auto', or ask for batch_invariant='steps'"
        )


def _check_quantised(spec: LayerSpec) -> None:
    """What comes or leaves in 8 bits is attention's, and scales have something to scale."""
    for name in ("qkv_dtype", "out_dtype"):
        value = getattr(spec, name)
        if value != "auto" and spec.kind.family != "attention":
            raise SpecError(
                f"{name}={value!r} is for attention over keys and values; leave it out for "
                f"{spec.kind.value} layers"
            )
    if spec.qkv_dtype != "auto" and spec.cached and spec.kv_cache_dtype != spec.qkv_dtype:
        raise SpecError(
            f"qkv_dtype={spec.qkv_dtype!r} needs kv_cache_dtype={spec.qkv_dtype!r}, not "
            f"{spec.kv_cache_dtype!r}: quantised inputs are stored unchanged"
        )
    if spec.kv_cache_dtype not in KV_CACHE_DTYPES:
        _check_rows(spec)
    scaled = spec.stored_dtype != spec.dtype or spec.qkv_dtype != "auto" or spec.out_dtype != "auto"
    if spec.scales != "number" and (spec.kind.family != "attention" or not scaled):
        raise SpecError(
            f"scales={spec.scales!r}: nothing is quantised that attention scales; leave it out, or set "
            "kv_cache_dtype, qkv_dtype or out_dtype"
        )


def _check_rows(spec: LayerSpec) -> None:
    """Rows hold heads of this size; a latent's are both key and value."""
    if spec.kind.is_recurrent:
        raise SpecError(
            f"kv_cache_dtype={spec.kv_cache_dtype!r} is for keys and values, and "
            f"{spec.kind.value} layers keep none; leave it out"
        )
    key, value = rows_of(spec.kv_cache_dtype)
    if spec.latent is None:
        key.width("head_size", spec.head_size)
        if spec.num_kv_heads > 1 or spec.v_head_size >= spec.head_size:  # else it may be a latent
            value.width("v_head_size", spec.v_head_size)
        return
    if key != value:
        raise SpecError(
            f"kv_cache_dtype={spec.kv_cache_dtype!r}: a latent is key and value in one row; name one "
            "format"
        )
    key.width("latent.rank + latent.rope_head_size", spec.latent.size)


def _check_rope(spec: LayerSpec, rope: RopeSpec) -> None:
    """The rotated part lies within a head, and in-cache positions need a cache of keys."""
    part, name = spec.head_size, "head_size"
    if spec.latent is not None:
        part, name = spec.latent.rope_head_size, "latent.rope_head_size"
    if rope.span > part or (spec.latent is not None and rope.span not in (0, part)):
        limit = f"{part} at most" if spec.latent is None else f"0 or {part}"
        raise SpecError(
            f"rope.rotary_size={rope.rotary_size} rotates {rope.span} elements; with {name}={part} "
            f"it must rotate {limit}"
        )
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
    for name in ("variant", "mask"):
        value = getattr(spec, name)
        if value is None:
            continue
        if spec.kind.family != "attention":
            raise SpecError(f"{name}={value!r} is for attention over keys, not {spec.kind.value}")
        if spec.role is Role.CROSS:
            raise SpecError(
                f"{name}={value!r}: role='cross' has no positions, and a query's keys are another "
                "sequence's; use a decoder's or an encoder's role"
            )


def _check_uncached(spec: LayerSpec) -> None:
    """Keys and values that don't outlive the step have no cache to describe."""
    if spec.kind.family != "attention":
        raise SpecError(f"cached=False: {spec.kind.value} layers keep what they attend to")
    for name, given, plain in (
        ("kv_cache_dtype", spec.kv_cache_dtype, "auto"),
        ("block_size", spec.block_size, None),
    ):
        if given != plain:
            raise SpecError(f"{name}={given!r} is about a cache, and cached=False; drop one")


def _check_family(spec: LayerSpec) -> None:
    kind = spec.kind.value
    if spec.kind.is_latent != (spec.latent is not None):
        remedy = "give latent=LatentSpec(…)" if spec.latent is None else "leave latent out"
        raise SpecError(f"kind={kind!r} and latent={spec.latent!r} don't go together; {remedy}")
    if spec.kind is AttentionKind.SPARSE_MLA and not (spec.latent and spec.latent.topk):
        raise SpecError("kind='sparse_mla' needs latent.topk, the tokens each query attends to")
    if (spec.kind is AttentionKind.SPARSE) != (spec.sparse is not None):
        remedy = "leave sparse out" if spec.sparse else "give sparse=SparseSpec(budget=…)"
        raise SpecError(f"kind={kind!r} and sparse={spec.sparse!r} don't go together; {remedy}")
    if spec.sparse is not None:
        _check_sparse(spec, spec.sparse)
    if spec.kind.is_recurrent != (spec.recurrent is not None):
        remedy = "leave it out" if spec.recurrent else "give recurrent=RecurrentSpec(…)"
        raise SpecError(
            f"kind={kind!r} and recurrent={spec.recurrent!r} don't go together; {remedy}"
        )
    if spec.recurrent is not None:
        _check_mamba(spec, spec.recurrent)
    if spec.kind in _UNGROUPED and spec.num_kv_heads != spec.num_heads:
        raise SpecError(
            f"num_kv_heads={spec.num_kv_heads}: {kind} has no groups; leave it out, or set it to "
            f"{spec.num_heads}"
        )
    mapped = spec.recurrent is not None and spec.recurrent.feature_map is not None
    if mapped != (spec.kind is AttentionKind.PHI_LINEAR):
        found = spec.recurrent and spec.recurrent.feature_map
        raise SpecError(
            f"kind={kind!r} and recurrent.feature_map={found!r} don't go together: "
            f"kind='phi_linear' takes one of {', '.join(FEATURE_MAPS)}, no other kind takes any"
        )
    if spec.latent and spec.head_size <= spec.latent.rope_head_size:
        raise SpecError(
            f"head_size={spec.head_size} must exceed latent.rope_head_size="
            f"{spec.latent.rope_head_size}: it counts the part without positions and the rope part"
        )


def _check_sparse(spec: LayerSpec, sparse: SparseSpec) -> None:
    """A choice says which keys count, and nothing else does. Raises `SpecError`."""
    for name, plain in (
        ("sliding_window", None), ("window_right", None), ("chunk_size", None), ("alibi", False),
        ("role", Role.DECODER),
    ):  # fmt: skip
        if getattr(spec, name) != plain:
            raise SpecError(
                f"{name}={getattr(spec, name)!r}: a sparse layer's choice names the keys that "
                f"count; leave it out"
            )
    if sparse.value_in_key and spec.v_head_size > spec.head_size:
        raise SpecError(
            f"v_head_size={spec.v_head_size}: with sparse.value_in_key a value is a part of its key, of "
            f"head_size={spec.head_size}"
        )


_UNGROUPED = (
    AttentionKind.SHORT_CONV, AttentionKind.MAMBA1, AttentionKind.RWKV7, AttentionKind.RG_LRU,
)  # fmt: skip


STATE_DTYPES = ("auto", "bfloat16", "float16")


def _check_mamba(spec: LayerSpec, recurrent: RecurrentSpec) -> None:
    """Check the options that only Mamba layers, or states of matrices, have. Raises `SpecError`."""
    kind, mamba1 = spec.kind.value, spec.kind is AttentionKind.MAMBA1
    mamba = mamba1 or spec.kind is AttentionKind.MAMBA2
    for name in ("gated", "bc_in_float32"):
        if getattr(recurrent, name) and not mamba:
            raise SpecError(f"recurrent.{name}=True: {kind} has none; only Mamba layers have one")
    if recurrent.draft_tokens and spec.kind is not AttentionKind.SHORT_CONV:
        raise SpecError(
            f"recurrent.draft_tokens={recurrent.draft_tokens}: only a short convolution's state has room "
            f"for drafts; {kind} keeps the state after each of them by Batch.state_targets"
        )
    if recurrent.channel_groups > 1 and (not mamba1 or spec.num_heads % recurrent.channel_groups):
        raise SpecError(
            f"recurrent.channel_groups={recurrent.channel_groups}: it is Mamba-1's, and divides its "
            f"channels, num_heads={spec.num_heads}; other kinds' groups are num_kv_heads"
        )
    if recurrent.state_dtype != "auto" and (
        spec.kind is AttentionKind.SHORT_CONV or spec.dtype == "float64"
    ):
        raise SpecError(
            f"recurrent.state_dtype={recurrent.state_dtype!r}: a {kind} state of a {spec.dtype} layer is "
            "in the layer's dtype; leave it out"
        )


def check_latent(latent: LatentSpec) -> None:
    """Check the latent part of an MLA layer. Raises `SpecError`."""
    integer("latent.rank", latent.rank, 1)
    integer("latent.rope_head_size", latent.rope_head_size, 0)
    if latent.topk is not None:
        integer("latent.topk", latent.topk, 1, hint="; use None for none")
    for name in ("index_heads", "index_head_size"):
        integer(f"latent.{name}", getattr(latent, name), 0)


def check_recurrent(recurrent: RecurrentSpec) -> None:
    """Check what makes a recurrent layer. Raises `SpecError`."""
    integer("recurrent.state_size", recurrent.state_size, 0)
    integer("recurrent.conv_width", recurrent.conv_width, 0)
    integer("recurrent.draft_tokens", recurrent.draft_tokens, 0)
    if recurrent.activation is not None:
        choice("recurrent.activation", recurrent.activation, ("silu",))
    if recurrent.feature_map is not None:
        choice("recurrent.feature_map", recurrent.feature_map, FEATURE_MAPS)
    integer("recurrent.channel_groups", recurrent.channel_groups, 1)
    choice("recurrent.state_dtype", recurrent.state_dtype, STATE_DTYPES)
    for name in ("dt_softplus", "qk_norm", "gated", "bc_in_float32"):
        flag(f"recurrent.{name}", getattr(recurrent, name))
=======
>>>>>>> main
