"""The mask function: transformers' own, so that a composed mask stays readable afterwards."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """Return the mask, bool (batch, 1, queries, keys), or None where the layer's `is_causal` says all.

    A causal mask is omitted only if the last query stands at the last key, where kernels align it. A
    model that reads its masks gets all of them, as numbers to add to the scores.
    """
    config = kwargs.get("config")
    unread = _passes_masks_on(type(config))
    aligned = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    # PaliGemma's layers call themselves bidirectional under a causal mask.
    aligned = aligned and not getattr(config, "use_bidirectional_attention", False)
    function = sdpa_mask if unread else eager_mask
    return function(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        allow_is_causal_skip=unread and allow_is_causal_skip and aligned,
        allow_is_bidirectional_skip=unread and allow_is_bidirectional_skip,
        **kwargs,
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _passes_masks_on(config: type) -> bool:
    """Return whether the models of a config class pass masks to attention unread, None among them.

    Other models add masks to scores, or combine them with their own masks, and expect numbers.
    """
    known: bool | None = _KNOWN.get(config)
    if known is None:
        file = sys.modules.get(config.__module__.replace("configuration_", "modeling_"))
        models = [
            each for each in vars(file).values()
            if isinstance(each, type) and issubclass(each, PreTrainedModel)
            and each.__module__ == file.__name__
        ] if file else []  # fmt: skip
        models = [each for each in models if each.config_class is config] or models
        known = bool(models) and all(
            each._supports_sdpa or (each._supports_flash_attn and each._supports_attention_backend)
            for each in models
        )
        _KNOWN[config] = known
    return known


_KNOWN: dict[type, bool] = {}
