"""The function behind `attn_implementation="polyattn"`: one layer's attention of one forward pass."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from packaging.version import Version
from polyattn import PolyattnError
from polyattn.host import CallOptions, asks_gradients, attend_dense, compiling, sdpa
from torch import Tensor, nn
from transformers.generation.continuous_batching.input_outputs import PagedAttentionArgs
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils.generic import TransformersKwargs
from transformers.utils.output_capturing import _active_collector

from polyattn_transformers import paged
from polyattn_transformers.ledger import LEDGER
from polyattn_transformers.paged import VERSION

Found = tuple[Tensor, Tensor | None]


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None,
    softcap: float | None = None, **kwargs: Any,
) -> Found:  # fmt: skip
    """Attend as the model's eager attention does.

    `query` (batch, heads, queries, size), `key`, `value` (batch, KV heads, keys, size). Returns the
    output (batch, queries, heads, size) and, if the model's own attention served, its weights. Raises
    `PolyattnError` for an argument that neither polyattn nor the eager attention knows.
    """
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if is_causal is None:
        # `make_mask` omits a causal mask only for equal lengths. Without one, other layers see all keys.
        is_causal = getattr(module, "is_causal", True) and query.shape[2] == key.shape[2]
    sinks = kwargs.get("s_aux")
    sinks = module._parameters.get("sinks") if sinks is None else sinks
    # A single query is a decode: it sees all keys under either alignment.
    causal = is_causal and query.shape[2] > 1
    own, others, unknown = _own_attention(type(module).__module__, *kwargs)
    if unknown:
        _check_known(module, unknown, kwargs)
    indices = kwargs.pop("indices", None)
    if indices is not None:
        attention_mask = _selected(module, attention_mask, indices, key.shape[2])
    traced = compiling()
    why = _refused(module, others, (query, key, value, sinks), dropout, kwargs, traced)
    if "write_index" in kwargs:  # a step of continuous batching
        if why is not None:
            raise PolyattnError(f"continuous batching of {type(module).__name__}: {why}")
        return paged.attend(module, query, key, value, scaling, softcap, sinks, kwargs), None
    # Of a missing attribute, `Module.__getattr__` makes a message.
    if module.__dict__.get("_polyattn_invariance") and why not in TRAINING:
        call_options = CallOptions(is_causal, scaling, logit_soft_cap=softcap)
        return _invariant(module, query, key, value, attention_mask, call_options, sinks, why), None
    if why is None and traced:
        return torch.ops.polyattn.sdpa(
            query, key, value, attention_mask, sinks, causal, scaling, softcap, "transformers"
        ), None
    if why is None:
        try:
            return sdpa(
                query, key, value, attention_mask, is_causal=causal, scale=scaling,
                logit_soft_cap=softcap, sinks=sinks, count=LEDGER.count,
            )[0], None  # fmt: skip
        except PolyattnError as error:
            why = str(error)
    by_sdpa = why in TRAINING and softcap is None and sinks is None
    if not traced:
        LEDGER.count_fallback(type(module).__name__, f"{why}; sdpa serves" if by_sdpa else why)
    options: dict[str, Any] = {"scaling": scaling, "dropout": dropout}
    if by_sdpa:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, is_causal=is_causal, **options
        )
    if softcap is not None:
        options["softcap"] = softcap
    mask = _as_added(attention_mask, query, key, is_causal)
    return own(module, query, key, value, mask, **options, **kwargs)  # type: ignore[no-any-return]


def _invariant(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    call_options: CallOptions, sinks: Tensor | None, why: str | None,
) -> Tensor:  # fmt: skip
    """Attend at the model's level of `batch_invariant`. Raises `PolyattnError` unless rows are whole."""
    level: Any = module._polyattn_invariance
    if why is None and (mask is not None or query.shape[2] != key.shape[2]):
        why = "a mask, or keys of earlier steps"
    if why is not None or compiling():
        raise PolyattnError(
            f"batch_invariant={level!r}: {type(module).__name__} was called with "
            f"{why or 'torch.compile'}; pass whole sequences without padding, or serve them by "
            "continuous_batching_manager"
        )
    call_options = call_options._replace(batch_invariant=level)
    return attend_dense(
        query, key, value, call_options, heads_first=True, sinks=sinks, count=LEDGER.count
    )[0]


def _as_added(mask: Tensor | None, query: Tensor, key: Tensor, is_causal: bool) -> Tensor | None:
    """Return a mask as models' eager functions take it: what is added to the scores."""
    if mask is None and is_causal and query.shape[2] > 1:
        mask = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()[None, None]
    if mask is not None and mask.dtype is torch.bool:
        hidden = torch.finfo(query.dtype).min
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, hidden)
    return mask


SERVED = {
    "module", "query", "key", "value", "attention_mask", "scaling", "dropout", "softcap", "s_aux",
    "sinks", "is_causal", "sliding_window", "cache", "kwargs",
}  # fmt: skip
"""Arguments of models' eager functions that are understood here (windows are in the mask)."""

KNOWN = SERVED | set(TransformersKwargs.__annotations__) | set(PagedAttentionArgs.__annotations__)
KNOWN |= {
    "indices", "use_cache", "cache_position", "deterministic", "logits_to_keep", "return_dict",
    "token_type_ids", "mm_token_type_ids", "image_sizes",
}  # fmt: skip
"""Arguments that polyattn serves, or that attention doesn't need beside the mask."""


def _check_known(module: nn.Module, unknown: tuple[str, ...], kwargs: dict[str, Any]) -> None:
    """Raise for an unread argument: the model may expect a kernel of its own to read it."""
    for name in unknown:
        if kwargs[name] is not None:
            raise PolyattnError(
                f"{type(module).__name__} calls attention with {name}=, which polyattn doesn't know; "
                'load the model with attn_implementation="eager"'
            )


def _selected(module: nn.Module, mask: Tensor | None, indices: Tensor, keys: int) -> Tensor:
    """Return the bool mask of what `mask` shows at `indices` (batch, queries, keys that are seen)."""
    if Version("5.18") > VERSION:  # there such layers add masks to numbers themselves
        raise PolyattnError(
            f"{type(module).__name__} calls attention with indices=, which polyattn serves since "
            'transformers 5.18; upgrade it, or load the model with attn_implementation="eager"'
        )
    if mask is None:
        raise PolyattnError(
            f"{type(module).__name__} calls attention with indices= but without a mask; load the model "
            'with attn_implementation="eager"'
        )
    chosen = indices.new_zeros(*indices.shape[:2], keys, dtype=torch.bool)
    chosen.scatter_(-1, indices.long(), True)
    visible = mask if mask.dtype is torch.bool else mask == 0
    return visible & chosen[:, None]


@lru_cache(maxsize=256)
def _own_attention(
    module: str, *names: str
) -> tuple[Callable[..., Any], tuple[str, ...], tuple[str, ...]]:
    """Return the eager attention of a model's file, and which arguments it alone serves, or nobody."""
    own = getattr(sys.modules.get(module), "eager_attention_forward", sdpa_attention_forward)
    reads = inspect.signature(own).parameters.keys() - SERVED
    others = tuple(name for name in names if name in reads)
    return own, others, tuple(name for name in names if name not in KNOWN | reads)


TRAINING = ("gradients are asked for", "dropout")
"""Reasons to use sdpa instead, which has a backward and dropout but no soft cap or sinks."""


def _refused(
    module: nn.Module,
    others: tuple[str, ...],
    tensors: tuple[Tensor | None, ...],
    dropout: float,
    kwargs: dict[str, Any],
    traced: bool,
) -> str | None:
    """Return why a call can't be served, None where it can, for all but its mask."""
    # Hooks of models collect attention weights.
    collected = None if traced else _active_collector.get()  # type: ignore[no-untyped-call]
    if kwargs.get("output_attentions") or (
        collected and any("attentions" in name for name in collected)
    ):
        return "output_attentions=True"
    for name in others:
        if kwargs.get(name) is not None:
            return f"the argument {name}"
    if asks_gradients(*tensors):
        return TRAINING[0]
    if dropout and module.training:
        return TRAINING[1]
    return None
