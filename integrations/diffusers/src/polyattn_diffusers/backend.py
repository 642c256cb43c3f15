"""An attention backend for diffusers' dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from diffusers.models import attention_dispatch
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.attention_processor import Attention, MochiAttention
from diffusers.models.modeling_utils import ModelMixin
from polyattn import PolyattnError
from polyattn.host import Ledger, asks_gradients, compiling, sdpa, sdpa_operator
from torch import Tensor

LEDGER = Ledger("diffusers", "diffusers' native attention")
_REGISTRY: Any = attention_dispatch._AttentionBackendRegistry
_NATIVE: Callable[..., Tensor] = _REGISTRY._backends[AttentionBackendName.NATIVE]


def add_name(name: str, function: Callable[..., Any]) -> AttentionBackendName:
    """Register `function`, and make `name` a member of diffusers' enumeration. Returns the member.

    `set_attention_backend` and `attention_backend` accept only members, and an enumeration with members
    can't be subclassed. So the new member is added to the enumeration's look-up tables.
    """
    if name in AttentionBackendName.__members__:
        return AttentionBackendName[name]
    member = str.__new__(AttentionBackendName, name)
    member._name_, member._value_ = name, name
    AttentionBackendName._member_map_[name] = member
    AttentionBackendName._value2member_map_[name] = member
    AttentionBackendName._member_names_.append(name)
    checks = [attention_dispatch._check_device, attention_dispatch._check_shape]
    _REGISTRY.register(member, constraints=checks)(function)
    _check_processors(name)
    return member


def _check_processors(name: str) -> None:
    """Make `set_attention_backend` refuse `name` for models whose processors never ask for a backend.

    diffusers itself skips such processors, so that they would silently go on with torch's sdpa. Where
    others of the model ask (HunyuanVideo's, but not its text refiner's), the report names them.
    """
    host: Any = ModelMixin
    set_backend = host.set_attention_backend

    @wraps(set_backend)
    def checked(model: ModelMixin, backend: str) -> None:
        if backend.lower() == name:
            kinds = (Attention, MochiAttention, AttentionModuleMixin)
            processors = [m.processor for m in model.modules() if isinstance(m, kinds)]
            unasked = [p for p in processors if not hasattr(p, "_attention_backend")]
            names = ", ".join(sorted({type(p).__name__ for p in unasked}))
            if unasked and len(unasked) == len(processors):
                raise PolyattnError(
                    f"{type(model).__name__}: {names} of diffusers attends without a backend, so that "
                    f'"{name}" would serve nothing of it; run the model under polyattn_torch.SdpaMode()'
                )
            if unasked:
                LEDGER.count_fallback(type(model).__name__, f"{names} attends without a backend")
        set_backend(model, backend)

    host.set_attention_backend = checked


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend for (batch, seqlen, heads, size), as diffusers' native backend does.

    Masks (batch, keys) or (batch or 1, 1, queries or 1, keys). Returns the output in the query's
    shape, and on request the LSE (batch, queries, heads), float32. Raises `PolyattnError` for context
    parallelism, and if no backend can return the LSE.
    """
    why = _refused(query, key, value, attn_mask, dropout_p, is_causal, _parallel_config)
    if why is None:
        try:
            return _serve(query, key, value, attn_mask, is_causal, scale, return_lse)
        except PolyattnError as error:
            why = str(error)
    if return_lse or _parallel_config is not None:
        raise PolyattnError(f"diffusers asks for the LSE or context parallelism: {why}")
    if not compiling():
        LEDGER.count_fallback("", why)
    return _NATIVE(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _refused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    parallel: Any,
) -> str | None:
    if parallel is not None:
        return "context parallelism, which this backend doesn't claim"
    if dropout_p:
        return f"dropout_p={dropout_p}"
    if mask is not None and is_causal:
        return "attn_mask and is_causal together"
    if asks_gradients(query, key, value):
        return "gradients are asked for"
    return None


def _serve(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    if mask is not None and mask.dim() == 2 and mask.shape == (query.shape[0], key.shape[1]):
        mask = mask[:, None, None]
    elif mask is not None and mask.dim() in (2, 3):
        mask = mask[(None,) * (4 - mask.dim())]
    if compiling() and not return_lse:
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        whole: Tensor = sdpa_operator(
            query, key, value, mask, None, is_causal, scale, None, "diffusers"
        )
        return whole
    out, lse = sdpa(
        query, key, value, mask, is_causal=is_causal, scale=scale, needs_lse=return_lse,
        heads_first=False, count=LEDGER.count,
    )  # fmt: skip
    return out if lse is None else (out, lse)
