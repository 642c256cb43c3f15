"""flex_attention by its definition: for tests of FLEX_ATTENTION that can't compile every shape.

Everything of FLEX_ATTENTION's own is run: masks, scores, padding, pages, what isn't finite.
"""

from __future__ import annotations

from collections.abc import Callable

import polyattn_cpu.flex as flex
import pytest
import torch
from torch import Tensor


class Mask:
    """What stands for torch's block mask: the function of which it is made."""

    def __init__(self, visible: Callable[..., Tensor], *args: object, device: str):
        self.visible = visible


def defined_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: Mask,
    scale: float,
    enable_gqa: bool,
) -> Tensor:
    """flex_attention as torch documents it: scores changed and masked, element by element."""
    if enable_gqa:
        each = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(each, 1) for t in (key, value))
    b, h = torch.zeros((), dtype=torch.int64), torch.arange(query.shape[1])[:, None, None]
    at = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])[None]
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if score_mod is not None:
        scores = score_mod(scores, b, h, *at)
    scores = scores.masked_fill(~block_mask.visible(b, h, *at), -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(nan=0.0)
    return (weights @ value.float()).to(query.dtype)


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let FLEX_ATTENTION call the definition."""
    monkeypatch.setattr(flex, "create_block_mask", Mask)
    monkeypatch.setattr(flex, "_compiled", defined_flex)
