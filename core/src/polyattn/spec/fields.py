"""How are a spec's fields read, and how large may they be?"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from polyattn.errors import SpecError, nearest

T = TypeVar("T")
W = TypeVar("W")
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
        if isinstance(value, bool) or not isinstance(value, (int, str, Enum)):
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
    "return_lse": "needs_lse", "alibi_slopes": "alibi",
    "rope_theta": "rope=RopeSpec(base=...)|base", "theta": "base", "rope_type": "scaling",
    "rotary_dim": "rotary_size", "rope_dim": "rotary_size",
    "partial_rotary_factor": "rotary_size, in elements",
    "interleaved": "pairing, \"neox\" or \"gptj\"", "is_neox_style": "pairing, \"neox\" or \"gptj\"",
    "original_max_position_embeddings": "original_length", "mrope_section": "sections",
    "rms_norm_eps": "eps", "variance_epsilon": "eps",
    "kv_lora_rank": "rank", "qk_rope_head_dim": "rope_head_size",
    "d_state": "state_size", "ssm_state_size": "state_size",
    "d_conv": "conv_width", "conv_kernel": "conv_width", "conv_kernel_size": "conv_width",
    "topk": "budget", "top_k": "budget", "index_topk": "budget",
    "index_n_heads": "num_heads", "index_head_dim": "head_size",
}  # fmt: skip
"""What transformers, vLLM, FlashInfer and flash-attn call a field, and its name here.

Of several names, separated by `|`, the one counts that the spec has.
"""


def no_field(of: str, name: str, known: Collection[str]) -> str:
    """Return the error for an unknown field, with its name here."""
    for here in FIELDS_ELSEWHERE.get(name, "").split("|"):
        if re.split("[,=]", here)[0] in known:
            return f"{of} has no field {name!r}; polyattn calls it {here}"
    return f"{of} has no field {name!r}{nearest(name, known)}"


if TYPE_CHECKING:

    class Word(Generic[T, W]):
        """The type of a field that reads as `T` and may be passed as `W`, its name, too."""

        def __get__(self, spec: object, owner: object = None) -> T: ...
        def __set__(self, spec: object, value: T | W) -> None: ...


def word(default: Any) -> Any:
    """Return a field's default; a type checker takes it for any type."""
    return default


class Named:
    """A spec, or a part of one, that refuses an unknown field with its name here."""

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        known: Mapping[str, Any] = cls.__dataclass_fields__  # type: ignore[attr-defined]
        for name in fields:
            if name not in known:
                raise SpecError(no_field(cls.__name__, name, known))
        return super().__new__(cls)


def from_fields(of: str, cls: type[T], values: Mapping[str, Any]) -> T:
    """Build a spec, or a part of one, from its fields. Raises `SpecError`."""
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            raise SpecError(no_field(of, str(name), fields))
    for name, field in fields.items():
        needed = field.default is field.default_factory is dataclasses.MISSING
        if needed and name not in values:
            raise SpecError(f"{cls.__name__} has no {name}; pass one")
    return cls(**values)


def _changed(spec: Any, derived: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields that differ from their defaults, or from `derived` values; enums as words."""
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if value == derived.get(field.name, field.default):
            continue
        if isinstance(value, Enum):
            value = value.name.lower() if isinstance(value, IntEnum) else value.value
        yield field.name, value


def short_repr(spec: Any, derived: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return code that builds a spec, or a part of one, without the fields that have their defaults."""
    fields = ", ".join(f"{name}={value!r}" for name, value in _changed(spec, derived))
    return f"{type(spec).__name__}({fields})"


def as_fields(spec: Any, derived: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that differ from their defaults, or from `derived` values, as JSON values."""
    out: dict[str, Any] = {}
    for name, value in _changed(spec, derived):
        if isinstance(value, tuple):
            value = list(value)
        elif hasattr(value, "to_dict"):
            value = value.to_dict()
        elif dataclasses.is_dataclass(value):
            value = dataclasses.asdict(value)  # type: ignore[arg-type]
        out[name] = value
    return out
