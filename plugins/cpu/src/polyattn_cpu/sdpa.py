"""TORCH_SDPA: torch's fused attention over a paged cache.

On an NVIDIA GPU a step is one call where torch's kernels have what the layer needs (`packed`); else it
goes one sequence at a time. On the CPU it calls torch's own flash kernel, the one behind
`scaled_dot_product_attention`, because that also returns the LSE. Decode folds a KV head's query group
into the query dimension, so that each cached key is read once for the whole group.
"""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch
from polyattn.kernel import (
    STORAGE_DTYPES,
    AttentionBackend,
    AttentionState,
    Batch,
    CacheFormat,
    Device,
    Frame,
    LayerParams,
    LayerSpec,
    Plan,
    Pointwise,
    key_ranges,
    merge_states,
    window_sizes,
    with_sinks,
    write_output,
)
from torch import Tensor

from polyattn_cpu.alike import Alike
from polyattn_cpu.cache_rope import turned_in_cache
from polyattn_cpu.calls import Call, Given, Paged, Source
from polyattn_cpu.gather import PagedReader, Span, seen
from polyattn_cpu.packed import Packed, packs
from polyattn_cpu.pointwise import Places, changed, summed

QUERY_BLOCK = 256
"""Queries that share one mask or one score matrix, which bounds both."""


SCORES = 1 << 26
"""Scores of all heads that are held at a time, whatever the lengths."""


class SdpaPlan(Plan):
    """A plan. The first layer that reads the cache finds which blocks lie side by side."""

    __slots__ = ("alike", "packed", "reader")

    def __init__(self, batch: Batch, alike: Alike | None, packed: Packed | None):
        super().__init__(batch)
        self.reader, self.alike, self.packed = PagedReader(batch), alike, packed


class TorchSDPA(AttentionBackend):
    """Serves every feature. Plain matmuls compute what the fused kernel lacks (soft cap, wide V)."""

    name: ClassVar[str] = "TORCH_SDPA"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.pointwise = Pointwise.of(spec)

    def plan(self, batch: Batch, reuse: Plan | None = None) -> SdpaPlan:
        spec = self.spec_of(batch)
        plain = self._fused and spec.qkv_dtype == spec.out_dtype == "auto"
        alike = Alike.of(spec, batch) if plain else None
        packed = Packed.of(spec, batch, self.cache) if packs(spec, self.device) else None
        return SdpaPlan(batch, alike, packed)

    def run(self, plan: SdpaPlan, frame: Frame) -> None:
        query, key, value = frame.query, frame.key, frame.value
        cache, params, lse = frame.cache, frame.params, frame.lse
        spec = self.spec_of(plan.batch)
        if plan.alike is not None:
            plan.alike.run(spec, frame)
            return
        batch = plan.batch
        # New tokens are at hand in `key` and `value`, unless the cache holds them rounded.
        rounded = cache is not None and cache.key.dtype != query.dtype
        stored = cache.key if cache is not None else key
        assert stored is not None
        scales: tuple[float | Tensor, float | Tensor] = (1.0, 1.0)
        if stored.dtype.itemsize == 1:
            scales = self._wide(params.k_scale), self._wide(params.v_scale)
        if query.dtype.itemsize == 1:  # every wider dtype is exact
            query = query.to(STORAGE_DTYPES[self.spec.dtype])
            scales = (scales[0] * self._wide(params.q_scale), scales[1])
        if plan.packed is not None:
            tensors = plan.packed.read(key, value, cache, query.dtype)
            scale = spec.scale * scales[0]
            state = plan.packed.attend(
                query, *tensors, scale, summed=lse is not None or params.sinks is not None
            )
            frame.set_out(self._finished(state, params, scales[1], lse))
            return
        for index, length in enumerate(batch.lens):
            rows = slice(batch.starts[index], batch.starts[index + 1])
            source: Source
            if cache is None or (
                length == batch.query_lens[index] and key is not None and not rounded
            ):
                assert key is not None and value is not None
                first = rows.start if cache is not None else batch.key_starts[index]
                whole = slice(first, first + length)
                pair = (t[whole].to(query.dtype).transpose(0, 1) for t in (key, value))
                source = Given(*pair)
            else:
                source = Paged(plan.reader, cache, index, query.dtype)
            places = None
            if self.pointwise is not None:
                places = Places(spec, batch, index, params, query.device)
            call = Call(spec, source, length, params, *scales, places)
            self._sequence(query[rows], call, frame.out[rows], None if lse is None else lse[rows])

    def _wide(self, scale: float | Tensor) -> float | Tensor:
        """Return a scale in the precision that it is multiplied in."""
        if isinstance(scale, Tensor) and self.spec.dtype == "float64":
            return scale.double()
        return scale

    def _sequence(self, query: Tensor, call: Call, out: Tensor, lse: Tensor | None) -> None:
        count, length, source, spec = query.shape[0], call.length, call.source, call.spec
        if count == 0:
            return
        context = length - count
        if length == 0 or (spec.causal and context < 0):  # the first queries see nothing
            blind = count if length == 0 else -context
            out[:blind] = 0.0
            if lse is not None:
                lse[:blind] = -torch.inf
            if blind < count:
                self._sequence(
                    query[blind:], call, out[blind:], None if lse is None else lse[blind:]
                )
            return
        plain = not (spec.alibi or spec.logit_soft_cap or spec.sliding_window or spec.chunk_size)
        if spec.causal and plain and count > 1 and self._fused:
            state = self._causal(query, call, context)
            self._store(state, call.params, call.v_scale, out, lse)
            return
        step = QUERY_BLOCK if max(window_sizes(spec)) >= 0 else 4 * QUERY_BLOCK
        step = max(1, min(step, SCORES // (length * query.shape[1])))
        for at in range(0, count, step):
            rows = slice(at, min(at + step, count))
            first, last = context + rows.start, context + rows.stop - 1
            span = seen(spec, first, last, length)
            keys, values = source.read(span)
            state = self._block(query[rows], keys, values, span, first, call)
            own_lse = None if lse is None else lse[rows]
            self._store(state, call.params, call.v_scale, out[rows], own_lse)

    @cached_property
    def _fused(self) -> bool:
        spec = self.spec
        return (
            self.device.platform == "cpu"
            and spec.v_head_size == spec.head_size
            and spec.logit_soft_cap is None
            and self.pointwise is None
            and spec.scales == "number"  # torch's kernel takes its scale from the host
            and not self._turns
        )

    @cached_property
    def _turns(self) -> bool:
        rope = self.spec.rope
        return rope is not None and rope.positions == "cache"

    def _causal(self, query: Tensor, call: Call, context: int) -> AttentionState:
        """Attend to context and new tokens apart: the kernel's causal mask is aligned to the top left."""
        read = call.source.read
        tail = self._kernel(query, *read(Span(((context, call.length),))), call, causal=True)
        if context == 0:
            return tail
        head = self._kernel(query, *read(Span(((0, context),))), call)
        return merge_states([head, tail])

    def _kernel(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        call: Call,
        bias: Tensor | None = None,
        causal: bool = False,
    ) -> AttentionState:
        """`query` (queries, heads, size), K and V (KV heads, keys, size)."""
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query.transpose(0, 1)[None],
            keys[None],
            values[None],
            0.0,
            causal,
            attn_mask=None if bias is None else bias[None],
            scale=self.spec.scale * call.k_scale,
        )
        return AttentionState(output[0].transpose(0, 1), lse[0].T)

    def _block(
        self, query: Tensor, keys: Tensor, values: Tensor, span: Span, first: int, call: Call
    ) -> AttentionState:
        heads, rows = self.spec.num_heads, query.shape[0]
        if not span.size:
            none = query.new_full((rows, heads), -torch.inf, dtype=torch.float32)
            return AttentionState(query.new_zeros(rows, heads, values.shape[2]), none)
        if self._turns:
            query, keys = turned_in_cache(self.spec, query, keys, span, first, call.length)
        if self.pointwise is not None:
            return self._by_functions(self.pointwise, query, keys, values, span, first, call)
        bias, blind = self._bias(query, span, first, call)
        state = self._attend(query, keys, values, call, bias)
        if blind is None:
            return state
        return AttentionState(
            state.output.masked_fill(blind[:, None, None], 0.0),
            state.lse.masked_fill(blind[:, None], -torch.inf),
        )

    def _attend(
        self, query: Tensor, keys: Tensor, values: Tensor, call: Call, bias: Tensor | None
    ) -> AttentionState:
        if not self._fused:
            scores = self._scores(query, keys, call)
            return _weighted(scores if bias is None else scores.add_(bias), values)
        if query.shape[0] > 1:
            return self._kernel(query, keys, values, call, bias)
        heads, groups = keys.shape[0], self.spec.gqa_ratio
        if bias is not None and bias.shape[0] > 1:
            bias = bias.view(heads, groups, -1)
        folded = query.view(heads, groups, -1).transpose(0, 1)
        state = self._kernel(folded, keys, values, call, bias)
        return AttentionState(
            state.output.transpose(0, 1).reshape(1, heads * groups, -1), state.lse.T.reshape(1, -1)
        )

    def _bias(
        self, query: Tensor, span: Span, first: int, call: Call
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the scores' bias, (1 or heads, queries, keys), and the queries that see nothing.

        None for nothing to add, and where every query sees something.
        """
        spec, count = call.spec, query.shape[0]
        limited = spec.chunk_size or max(window_sizes(spec)) >= 0
        masked = limited and count > 1  # one query's span is exactly what it sees
        if not masked and not spec.alibi:
            return None, None
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        key = span.positions().to(query.device)
        position = torch.arange(first, first + count, device=query.device)[:, None]
        bias = torch.zeros(1, count, span.size, dtype=dtype, device=query.device)
        blind = None
        if masked:
            mask = _visible(spec, position, key, call.length)
            bias.masked_fill_(~mask, -torch.inf)
            if not spec.causal:
                blind = ~mask.any(1)
        if spec.alibi:
            bias = bias + _alibi(call.params, position, key, dtype)
        return bias, blind

    def _by_functions(
        self,
        pointwise: Pointwise,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        span: Span,
        first: int,
        call: Call,
    ) -> AttentionState:
        """Attend by torch operators, with a variant's functions and a step's mask on the scores."""
        assert call.places is not None
        scores = self._scores(query, keys, call)
        position = torch.arange(first, first + len(query), device=query.device)[:, None]
        key = span.positions().to(query.device)
        if self.spec.alibi:
            scores += _alibi(call.params, position, key, scores.dtype)
        mask = _visible(call.spec, position, key, call.length)
        scores, mask = changed(pointwise, call.places, scores, mask, span, first)
        if not pointwise.softmax:
            return summed(scores.masked_fill(~mask, 0.0), values)
        return _weighted(scores.masked_fill(~mask, -torch.inf), values)

    def _scores(self, query: Tensor, keys: Tensor, call: Call) -> Tensor:
        """Return the scaled, capped scores, (heads, queries, keys)."""
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        heads, groups, count = keys.shape[0], self.spec.gqa_ratio, query.shape[0]
        folded = query.to(dtype).view(count, heads, groups, -1).permute(1, 2, 0, 3)
        folded = folded.reshape(heads, groups * count, -1)
        scores = torch.bmm(folded, keys.to(dtype).transpose(1, 2))
        scores *= self.spec.scale * _beside(call.k_scale, (-1, 1, 1))
        cap = self.spec.logit_soft_cap
        if cap is not None:
            scores = scores.div_(cap).tanh_().mul_(cap)
        return scores.view(heads * groups, count, -1)

    def _store(
        self,
        state: AttentionState,
        params: LayerParams,
        v_scale: float | Tensor,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        write_output(out, self._finished(state, params, v_scale, lse), params.out_scale)

    def _finished(
        self,
        state: AttentionState,
        params: LayerParams,
        v_scale: float | Tensor,
        lse: Tensor | None,
    ) -> Tensor:
        """Return the output with values' scale and sinks; writes the LSE."""
        output = state.output
        if isinstance(v_scale, Tensor) or v_scale != 1.0:
            each = _beside(v_scale, (-1, 1), self.spec.gqa_ratio)
            output = output.to(torch.promote_types(output.dtype, torch.float32)) * each
        total = state.lse
        if params.sinks is not None:
            output, total = with_sinks(output, total, params.sinks)
        if lse is not None:
            lse.copy_(total)
        return output


def _alibi(params: LayerParams, position: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
    assert params.alibi_slopes is not None
    return params.alibi_slopes.to(dtype)[:, None, None] * (key - position).to(dtype)


def _weighted(scores: Tensor, values: Tensor) -> AttentionState:
    """Return the softmax's state of masked scores (heads, queries, keys); values by KV head."""
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return AttentionState(summed(weights, values).output, lse.T)


def _beside(scale: float | Tensor, shape: tuple[int, ...], times: int = 1) -> float | Tensor:
    """Return a scale as it multiplies: a number, or each KV head's `times` times in this shape."""
    return scale.repeat_interleave(times).view(shape) if isinstance(scale, Tensor) else scale


def _visible(spec: LayerSpec, position: Tensor, key: Tensor, length: int) -> Tensor:
    """Return which keys each query sees, bool (queries, keys); `position` is int64 (queries, 1)."""
    start, kept, near, stop = key_ranges(
        spec, position, position, torch.full_like(position, length), torch.minimum, torch.maximum
    )
    mask: Tensor = (key >= near) & (key < stop)
    if spec.sink_tokens:
        mask |= (key >= start) & (key < kept)
    return mask
