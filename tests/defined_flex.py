"""flex_attention by its definition: for tests of FLEX_ATTENTION that can't compile every shape.

Everything of FLEX_ATTENTION's own is run: masks, scores, padding, pages, what isn't finite.
"""

from __future__ import annotations

from collections.abc import Callable

import polyattn_cpu.flex as flex
import pytest
import torch
from polyattn_cpu.flex_blocks import BLOCK
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask


def allowed(mask: BlockMask, heads: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """Return what a block mask lets through: full blocks, and what its function says in partial ones."""
    found = mask.mask_mod(torch.zeros((), dtype=torch.int64), heads, rows, keys)
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    partial, full = (
        listed(count, index).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        for count, index in (
            (mask.kv_num_blocks, mask.kv_indices),
            (mask.full_kv_num_blocks, mask.full_kv_indices),
        )
    )
    return full | (partial & found)


def listed(count: Tensor, index: Tensor) -> Tensor:
    """Return which blocks a row of blocks has, bool (blocks of rows, blocks of keys)."""
    taken = torch.arange(index.shape[3]) < count[0, 0, :, None]
    found = torch.zeros(index.shape[2:], dtype=torch.bool)
    return found.scatter_(1, index[0, 0].long(), taken)


def defined_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool,
    kernel_options: dict[str, int] | None = None,
) -> Tensor:
    """flex_attention as torch documents it: scores changed and masked, element by element.

    `kernel_options`: of a compiled kernel's, None on a CPU.
    """
    assert kernel_options is None
    if enable_gqa:
        each = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(each, 1) for t in (key, value))
    b, h = torch.zeros((), dtype=torch.int64), torch.arange(query.shape[1])[:, None, None]
    at = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])[None]
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if score_mod is not None:
        scores = score_mod(scores, b, h, *at)
    scores = scores.masked_fill(~allowed(block_mask, h, *at), -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(nan=0.0)
    return (weights @ value.float()).to(query.dtype)


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let FLEX_ATTENTION call the definition."""
    monkeypatch.setattr(flex, "_compiled", defined_flex)
