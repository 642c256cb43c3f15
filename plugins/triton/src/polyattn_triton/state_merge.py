"""TRITON_MERGE: an attention state is merged into another in place, in one launch, allocating nothing."""

from __future__ import annotations

from typing import ClassVar

import triton
import triton.language as tl
from polyattn.kernel import MergeBackend
from torch import Tensor

from polyattn_triton.kernels.tiles import in_elements
from polyattn_triton.launch import Launcher

HEADS_AT_ONCE = 4


@triton.jit(do_not_specialize=["total_lse_t", "total_lse_h", "part_lse_t", "part_lse_h"])
def state_merge_kernel(
    TOTAL, TOTAL_LSE, PART, PART_LSE,
    total_t, total_h, part_t, part_h, total_lse_t, total_lse_h, part_lse_t, part_lse_h,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Merge a part's heads of a token into the total. Grid: (tokens, heads / BLOCK_H)."""
    total_t, total_h, part_t, part_h = in_elements((total_t, total_h, part_t, part_h), UNIT)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    at = tl.arange(0, BLOCK_D)
    there = head < HEADS
    both = there[:, None] & (at < D)[None, :]
    lse_at = TOTAL_LSE + token * total_lse_t + head * total_lse_h
    before = tl.load(lse_at, mask=there, other=0.0)
    more = tl.load(PART_LSE + token * part_lse_t + head * part_lse_h, mask=there, other=0.0)
    largest = tl.maximum(before, more)
    # Where neither saw a key, -inf - -inf is NaN, and there is nothing to weigh.
    unit = tl.where(largest == float("-inf"), 0.0, largest)
    old, new = tl.exp(before - unit), tl.exp(more - unit)
    sum = old + new
    weight = tl.where(sum == 0.0, 0.0, new / sum)
    total_at = TOTAL + token * total_t + head[:, None] * total_h + at[None, :]
    part_at = PART + token * part_t + head[:, None] * part_h + at[None, :]
    total = tl.load(total_at, mask=both, other=0.0).to(tl.float32)
    part = tl.load(part_at, mask=both, other=0.0).to(tl.float32)
    total += tl.where(weight[:, None] == 0.0, 0.0, (part - total) * weight[:, None])
    tl.store(total_at, total, mask=both)
    tl.store(lse_at, unit + tl.log(sum), mask=there)


_merge = Launcher(state_merge_kernel)


class TritonMerge(MergeBackend):
    """A few heads of one token a program."""

    name: ClassVar[str] = "TRITON_MERGE"

    def run(self, total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        tokens, heads, size = total.shape
        if tokens == 0:
            return
        _merge(
            (tokens, triton.cdiv(heads, HEADS_AT_ONCE), 1),
            (total, total_lse, part, part_lse),
            (),
            (*total.stride()[:2], *part.stride()[:2]),
            (*total_lse.stride(), *part_lse.stride()),
            (heads, size, HEADS_AT_ONCE, triton.next_power_of_2(size)),
            {"num_warps": 4},
        )
