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
    AttentionVariant,
    Batch,
    CacheFormat,
    Device,
    KVCache,
    LayerParams,
    LayerSpec,
    Plan,
    Pointwise,
)
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

PAD = 128
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
    """Where every row and key of the padded batch belongs, and which blocks of them meet."""

    __slots__ = (
        "at_k", "block_mask", "masked", "num_keys", "position_k", "position_q", "seq_k", "seq_q",
        "sequences_of_keys", "slots", "step_seq",
    )  # fmt: skip

    def __init__(self, spec: LayerSpec, batch: Batch, pointwise: Pointwise | None):
        super().__init__(batch)
        device = batch.device
        query_lens, lens = torch.tensor(batch.query_lens), torch.tensor(batch.lens)
        self.num_keys = int(lens.sum())
        rows, keys = _padded(batch.num_tokens), _padded(self.num_keys)
        seq_q, at_q = _rows(query_lens, rows)
        self.seq_k, self.at_k = _rows(lens, keys)
        context = torch.cat([lens - query_lens, torch.zeros(1, dtype=torch.int64)])
        self.position_q = (at_q + context[seq_q.clamp(max=len(lens))]).to(device)
        self.seq_q = seq_q.to(device)
        self.position_k = self.at_k.to(device)
        self.sequences_of_keys = self.seq_k.to(device)
        self.step_seq = torch.tensor([*batch.seq_ids, 0], device=device)[self.seq_q]
        # Functions are evaluated for padding, too: it stands where the first token does.
        self.position_q[batch.num_tokens :] = self.position_q[0]
        self.step_seq[batch.num_tokens :] = self.step_seq[0]
        self.position_k[self.num_keys :] = 0
        heads = 1
        # A mask whose inputs the step brings decides which blocks are computed; else it is the score's.
        self.masked = pointwise is not None and pointwise.mask_inputs <= batch.inputs.keys()
        own = self._sequence_mask(spec, self.seq_q, self.sequences_of_keys)
        if pointwise is not None and self.masked:
            own = _both(own, self.places, pointwise, batch.inputs)
            heads = spec.num_heads if spec.variant else 1
        self.block_mask = create_block_mask(own, 1, heads, rows, keys, device=str(device))
        self.slots: Tensor | None = None

    def places(self, h: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        """Return b, h, q_idx, kv_idx of a pair of rows of the padded batch; of strangers, key 0."""
        own = self.seq_q[q] == self.sequences_of_keys[k]
        return self.step_seq[q], h, self.position_q[q], torch.where(own, self.position_k[k], 0)

    def given_rows(self) -> Tensor:
        """Return where each key lies in tensors that are given whole, with gaps between sequences."""
        seq, at = self.seq_k[: self.num_keys], self.at_k[: self.num_keys]
        return (torch.tensor(self.batch.key_starts)[seq] + at).to(self.batch.device)

    def _sequence_mask(
        self, spec: LayerSpec, seq_q: Tensor, seq_k: Tensor
    ) -> Callable[..., Tensor]:
        position_q, position_k = self.position_q, self.position_k
        pad = self.batch.num_seqs

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            mask = (seq_q[q] == seq_k[k]) & (seq_k[k] < pad)
            at, key = position_q[q], position_k[k]
            if spec.causal:
                mask = mask & (key <= at)
            if spec.sliding_window is not None:
                near = key > at - spec.sliding_window
                if not spec.causal:
                    near = near & (key < at + spec.sliding_window)
                mask = mask & (near | (key < spec.sink_tokens))
            if spec.chunk_size is not None:
                mask = mask & (key // spec.chunk_size == at // spec.chunk_size)
            return mask

        return visible


class FlexAttention(AttentionBackend):
    """Masks and score changes are functions that torch compiles into the kernel."""

    name: ClassVar[str] = "FLEX_ATTENTION"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.pointwise = Pointwise.of(spec)

    def plan(self, batch: Batch, reuse: Plan | None = None) -> FlexPlan:
        return FlexPlan(self.spec, batch, self.pointwise)

    def _score(self, plan: FlexPlan, params: LayerParams) -> Callable[..., Tensor] | None:
        cap, slopes = self.spec.logit_soft_cap, params.alibi_slopes
        pointwise = self.pointwise
        hides = pointwise is not None and bool(pointwise.mask_mods) and not plan.masked
        scored = pointwise is not None and pointwise.score_mod is not None
        if cap is None and slopes is None and not scored and not hides:
            return None
        position_q, position_k, places = plan.position_q, plan.position_k, plan.places
        inputs = {**plan.batch.inputs, **params.inputs}

        def change(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            if cap is not None:
                score = cap * torch.tanh(score / cap)
            if slopes is not None:
                score = score + slopes[h] * (position_k[k] - position_q[q])
            if pointwise is not None:
                at = places(h, q, k)
                if scored:
                    score = pointwise.score(score, at, inputs)
                if hides:
                    score = torch.where(pointwise.visible(at, inputs), score, -torch.inf)
            return score

        return change

    def run(
        self,
        plan: Plan,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache | None,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        assert isinstance(plan, FlexPlan)
        if cache is not None:
            key, value = self._gather(plan, cache)
        else:
            assert key is not None and value is not None
            given = slice(plan.num_keys) if plan.batch.keys_packed else plan.given_rows()
            key, value = key[given], value[given]
        key, value, spoilt = _confined(plan, key, value)
        rows, keys = len(plan.position_q), len(plan.position_k)
        inputs = (_row(query, rows), _row(key, keys), _row(value, keys))
        with torch._dynamo.config.patch(recompile_limit=RECOMPILES):
            result = compiled_flex()(
                *inputs,
                score_mod=self._score(plan, params),
                block_mask=plan.block_mask,
                scale=self.spec.scale,
                enable_gqa=self.spec.gqa_ratio > 1,
            )
        out.copy_(result[0].transpose(0, 1)[: plan.batch.num_tokens])
        if spoilt is not None:
            out.masked_fill_(spoilt[plan.seq_q[: len(out)], None, None], torch.nan)

    def _gather(self, plan: FlexPlan, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Return all sequences' cached keys and values one after another."""
        size = cache.block_size
        if plan.slots is None:
            assert plan.batch.block_table is not None
            seq, at = plan.seq_k[: plan.num_keys], plan.at_k[: plan.num_keys]
            seq, at = seq.to(cache.key.device), at.to(cache.key.device)
            plan.slots = plan.batch.block_table[seq, at // size].long() * size + at % size
        block, offset = plan.slots // size, plan.slots % size
        return cache.key[block, offset], cache.value[block, offset]


def variant_problem(variant: AttentionVariant) -> str | None:
    """Say why a variant can't be served: `flex_attention` always takes a softmax."""
    return None if variant.softmax else "torch's flex_attention has no way without a softmax"


def _both(
    own: Callable[..., Tensor], places: Callable[..., tuple[Tensor, ...]], pointwise: Pointwise,
    inputs: dict[str, Tensor],
) -> Callable[..., Tensor]:  # fmt: skip
    """Return the mask of a row's own sequence and of the functions."""

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        mine, seen = own(b, h, q, k), pointwise.visible(places(h, q, k), inputs)
        return mine if seen is None else mine & seen

    return visible


def _confined(plan: FlexPlan, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keep what isn't finite to its own sequence: a masked weight of 0 times NaN is NaN.

    Returns keys and values with such tokens zeroed, and which sequences had one (None: none did).
    """
    finite = key.isfinite().flatten(1).all(1) & value.isfinite().flatten(1).all(1)
    if key.device.type == "cpu" and bool(finite.all()):
        return key, value, None
    kept = finite[:, None, None]
    spoilt = torch.zeros(plan.batch.num_seqs + 1, dtype=torch.int32, device=key.device)
    seq = plan.seq_k[: plan.num_keys].to(key.device)
    spoilt.index_add_(0, seq, (~finite).int())
    return torch.where(kept, key, 0), torch.where(kept, value, 0), spoilt > 0


def _padded(size: int) -> int:
    return max(-(-size // PAD), 1) * PAD


def _rows(lens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return each row's sequence (their number where it is padding) and its place in it."""
    seq = torch.full((total,), len(lens), dtype=torch.int64)
    used = int(lens.sum())
    seq[:used] = torch.repeat_interleave(torch.arange(len(lens)), lens)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)])
    return seq, torch.arange(total) - starts[seq]


def _row(tensor: Tensor, length: int) -> Tensor:
    """Return (1, heads, length, size), zeros behind."""
    padding = tensor.new_zeros(length - tensor.shape[0], *tensor.shape[1:])
    return torch.cat([tensor, padding]).transpose(0, 1)[None]
