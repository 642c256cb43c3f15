"""FLEX_ATTENTION: torch's flex_attention, compiled, over the whole batch in one call.

The batch's sequences lie one after another in one long row; the mask lets a query see only keys of
its own sequence. Lengths are padded to multiples of 128 so that few shapes are ever compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from polyattn.kernel import (
    AttentionBackend,
    Batch,
    CacheFormat,
    Device,
    Frame,
    KVCache,
    LayerParams,
    LayerSpec,
    Plan,
    Pointwise,
)
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from polyattn_cpu.flex_blocks import BLOCK, block_mask, intervals
from polyattn_cpu.flex_pointwise import Places, changes, kernel_options, masked_blocks

RECOMPILES = 256
"""Distinct layers and shapes in one process; torch's own limit of 8 is meant for one function."""

_compiled: Callable[..., Any] | None = None


def compiled_flex() -> Callable[..., Any]:
    """Return the compiled kernel, shared by all layers so that equal ones compile once."""
    global _compiled
    if _compiled is None:
        _compiled = torch.compile(flex_attention, dynamic=False)
    return _compiled


class FlexPlan(Plan):
    """Every row's and key's place in the padded batch, and the blocks with visible pairs.

    `own` int64 (rows,): where each query's own key lies among the packed keys. `places`: those of rows
    and keys in their sequences, for a layer's functions; `masked`: whether the blocks have their masks.
    """

    __slots__ = (
        "at_k", "block_mask", "masked", "num_keys", "own", "places", "seq_k", "seq_q", "slots",
    )  # fmt: skip

    def __init__(self, spec: LayerSpec, batch: Batch, pointwise: Pointwise | None):
        super().__init__(batch)
        query_lens, lens = (
            torch.tensor(each, dtype=torch.int64, device="cpu")
            for each in (batch.query_lens, batch.lens)
        )
        self.num_keys = int(lens.sum())
        seq_q, at_q = _rows(query_lens, _padded(batch.num_tokens))
        self.seq_k, self.at_k = _rows(lens, self.num_keys)
        nothing = torch.zeros(1, dtype=torch.int64, device="cpu")  # for padding rows
        context, length, start = (
            torch.cat([each, nothing])[seq_q]
            for each in (lens - query_lens, lens, lens.cumsum(0) - lens)
        )
        position = at_q + context
        seen = intervals(spec, position, length, start)
        self.block_mask = block_mask(seen, _padded(self.num_keys), batch.device)
        self.own, self.seq_q = (start + position).to(batch.device), seq_q.to(batch.device)
        self.slots: Tensor | None = None
        self.places: Places | None = None
        self.masked = False
        if pointwise is not None:
            self.places = Places(
                batch, seq_q, position, self.seq_k, self.at_k, _padded(self.num_keys)
            )
            # A mask with inputs of the step decides the blocks. Other masks apply to scores.
            self.masked = pointwise.mask_inputs <= batch.inputs.keys()
        if pointwise is not None and self.places is not None and self.masked:
            heads = spec.num_heads if spec.variant else 1
            self.block_mask = masked_blocks(
                self.block_mask, pointwise, self.places, batch.inputs, heads
            )


class FlexAttention(AttentionBackend):
    """Masks and score changes are functions that torch compiles into the kernel."""

    name: ClassVar[str] = "FLEX_ATTENTION"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.pointwise = Pointwise.of(spec)
        self.options = kernel_options(self.pointwise, torch.device(str(device.torch_device)).type)

    def plan(self, batch: Batch, reuse: Plan | None = None) -> FlexPlan:
        return FlexPlan(self.spec_of(batch), batch, self.pointwise)

    def _score(self, plan: FlexPlan, params: LayerParams) -> Callable[..., Tensor] | None:
        cap, slopes = self.spec.logit_soft_cap, params.alibi_slopes
        changed = None
        if self.pointwise is not None and plan.places is not None:
            inputs = {**plan.batch.inputs, **params.inputs}
            changed = changes(self.pointwise, plan.places, inputs, plan.masked)
        if cap is None and slopes is None and changed is None:
            return None
        own = plan.own

        def change(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            if cap is not None:
                score = cap * torch.tanh(score / cap)
            if slopes is not None:
                score = score + slopes[h] * (k - own[q])
            return score if changed is None else changed(score, h, q, k)

        return change

    def run(self, plan: FlexPlan, frame: Frame) -> None:
        key, value, out = frame.key, frame.value, frame.out
        if frame.cache is not None:
            key, value = self._gather(plan, frame.cache)
        else:
            assert key is not None and value is not None
            key, value = key[plan.batch.key_rows], value[plan.batch.key_rows]
        key, value, spoilt = _confined(plan, key, value)
        rows, keys = plan.block_mask.seq_lengths
        inputs = (_row(frame.query, rows), _row(key, keys), _row(value, keys))
        with torch._dynamo.config.patch(recompile_limit=RECOMPILES):
            result = compiled_flex()(
                *inputs,
                score_mod=self._score(plan, frame.params),
                block_mask=plan.block_mask,
                scale=self.spec.scale,
                enable_gqa=self.spec.gqa_ratio > 1,
                kernel_options=self.options,
            )
        out.copy_(result[0].transpose(0, 1)[: plan.batch.num_tokens])
        if spoilt is not None:
            out.masked_fill_(spoilt[plan.seq_q[: len(out)], None, None], torch.nan)

    def _gather(self, plan: FlexPlan, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Return all sequences' cached keys and values one after another."""
        size = cache.block_size
        if plan.slots is None:
            assert plan.batch.block_table is not None
            seq, at = plan.seq_k.to(cache.key.device), plan.at_k.to(cache.key.device)
            plan.slots = plan.batch.block_table[seq, at // size].long() * size + at % size
        block, offset = plan.slots // size, plan.slots % size
        return cache.key[block, offset], cache.value[block, offset]


def _confined(plan: FlexPlan, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keep values that aren't finite within their sequence: a masked weight of 0 times NaN is NaN.

    Returns keys and values with such tokens zeroed, and which sequences had one (None: none did).
    """
    finite = key.isfinite().flatten(1).all(1) & value.isfinite().flatten(1).all(1)
    if key.device.type == "cpu" and bool(finite.all()):
        return key, value, None
    valid = finite[:, None, None]
    spoilt = torch.zeros(plan.batch.num_seqs + 1, dtype=torch.int32, device=key.device)
    spoilt.index_add_(0, plan.seq_k.to(key.device), (~finite).int())
    return torch.where(valid, key, 0), torch.where(valid, value, 0), spoilt > 0


def _padded(size: int) -> int:
    return max(-(-size // BLOCK), 1) * BLOCK


def _rows(lens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return each row's sequence (their number where it is padding) and its place in it."""
    seq = torch.full((total,), len(lens), dtype=torch.int64, device="cpu")
    used = int(lens.sum())
    seq[:used] = torch.repeat_interleave(torch.arange(len(lens), device="cpu"), lens)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), lens.cumsum(0)])
    return seq, torch.arange(total, device="cpu") - starts[seq]


def _row(tensor: Tensor, length: int) -> Tensor:
    """Return (1, heads, length, size), zeros behind."""
    padding = tensor.new_zeros(length - tensor.shape[0], *tensor.shape[1:])
    return torch.cat([tensor, padding]).transpose(0, 1)[None]
