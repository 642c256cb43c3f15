"""An honest backend in few lines, every step of which a liar can override."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from polyattn.families.attention import reference
from polyattn.kernel import AttentionBackend, Batch, Frame, KVCache, LayerParams, LayerSpec, Plan
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""Keys and values of a sequence, or output and LSE."""


class Plain(AttentionBackend):
    """Attention as it is defined, a sequence at a time, in float64.

    `by`: the checks of the kit that must find a lie; an honest backend has none to be found by.
    """

    by: ClassVar[tuple[str, ...]] = ()

    def run(self, plan: Plan, frame: Frame) -> None:
        key, value, cache = frame.key, frame.value, frame.cache
        params, out, lse = frame.params, frame.out, frame.lse
        batch, spec = plan.batch, self.spec_of(plan.batch)
        if spec is not self.spec:
            other = type(self)(spec, self.cache, self.device)
            Plain.run(other, plan, frame)
            return
        for index in range(batch.num_seqs):
            rows = slice(batch.starts[index], batch.starts[index + 1])
            if rows.start == rows.stop:
                continue
            if cache is None:
                assert key is not None and value is not None
                own = self.own(batch, index)
                keys, values = key[own], value[own]
            else:
                keys, values = self.read(plan, cache, index, params)
            if not len(keys):
                self.nothing(out[rows], None if lse is None else lse[rows])
                continue
            found = self.attend(frame.query[rows], keys, values, params)
            out[rows] = self.quantised(found[0], out.dtype, params)
            if lse is not None:
                lse[rows] = self.stored_lse(found[1]).to(lse.dtype)

    def own(self, batch: Batch, index: int) -> slice:
        """Return which of the keys that are given whole are a sequence's."""
        first = batch.key_starts[index]
        return slice(first, first + batch.lens[index])

    def length(self, batch: Batch, index: int) -> int:
        return batch.lens[index]

    def blocks(self, batch: Batch, index: int, count: int) -> Tensor:
        assert batch.block_table is not None
        return batch.block_table[index, :count].long()

    def read(self, plan: Plan, cache: KVCache, index: int, params: LayerParams) -> Pair:
        length = self.length(plan.batch, index)
        blocks = self.blocks(plan.batch, index, -(-length // cache.block_size))
        quantised = cache.key.dtype.itemsize == 1
        found = []
        scales = self.scales(params) if quantised else (1.0, 1.0)
        for stored, scale in zip((cache.key, cache.value), scales, strict=True):
            each = scale.double()[:, None] if isinstance(scale, Tensor) else scale
            found.append(stored[blocks].flatten(0, 1)[:length].double() * each)
        return found[0], found[1]

    def scales(self, params: LayerParams) -> tuple[Any, Any]:
        return params.k_scale, params.v_scale

    def out_scale(self, params: LayerParams) -> float:
        given = params.out_scale
        return float(given[0]) if isinstance(given, Tensor) else given

    def quantised(self, output: Tensor, dtype: torch.dtype, params: LayerParams) -> Tensor:
        if dtype.itemsize > 1:
            return output.to(dtype)
        return (output / self.out_scale(params)).clamp(-448, 448).to(dtype)

    def scale(self) -> float:
        return self.spec.scale

    def grouped(self, tensor: Tensor) -> Tensor:
        """Repeat KV heads for their query heads."""
        return tensor.repeat_interleave(self.spec.gqa_ratio, dim=1)

    def visible(self, queries: int, keys: int) -> Tensor:
        return reference.visible(self.spec, queries, keys)

    def capped(self, scores: Tensor) -> Tensor:
        cap = self.spec.logit_soft_cap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def slopes(self, params: LayerParams) -> Tensor:
        assert params.alibi_slopes is not None
        return params.alibi_slopes

    def distance(self, queries: int, keys: int) -> Tensor:
        return torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]

    def biased(self, scores: Tensor, params: LayerParams) -> Tensor:
        if not self.spec.alibi:
            return scores
        distance = self.distance(scores.shape[1], scores.shape[2])
        return scores + self.slopes(params).double()[:, None, None] * distance

    def logits(self, query: Tensor, keys: Tensor, params: LayerParams) -> Tensor:
        """(heads, queries, keys)"""
        scores = torch.einsum("qhd,khd->hqk", query.double(), self.grouped(keys.double()))
        return self.biased(self.capped(scores * self.scale()), params)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, params: LayerParams) -> Pair:
        """Return (queries, heads, size) and the LSE (queries, heads)."""
        scores = self.logits(query, keys, params)
        mask = self.visible(scores.shape[1], scores.shape[2])
        scores = scores.masked_fill(~mask, -torch.inf)
        if params.sinks is not None:
            sinks = params.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sinks], dim=2)
        lse = torch.logsumexp(scores, dim=2)
        weights = self.weights(scores, lse)[..., : len(keys)]
        out = torch.einsum("hqk,khd->qhd", weights, self.grouped(values.double()))
        return out, lse.T

    def weights(self, scores: Tensor, lse: Tensor) -> Tensor:
        return torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])

    def stored_lse(self, lse: Tensor) -> Tensor:
        return lse

    def nothing(self, out: Tensor, lse: Tensor | None) -> None:
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)


class Honest(Plain):
    """What the liars are when they don't lie."""


class GraphPlan(Plan):
    """The step in tensors of its own, which a captured graph goes on reading."""

    __slots__ = ("lens", "table")

    def __init__(self, batch: Batch):
        super().__init__(batch)
        assert batch.block_table is not None
        self.lens, self.table = batch.seq_lens.clone(), batch.block_table.clone()


class HonestGraph(Plain):
    """Reads lengths and tables from its plan's tensors alone, and refills them."""

    planned: ClassVar[type[GraphPlan]] = GraphPlan

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Plan:
        if isinstance(reuse, self.planned):
            self.refill(reuse, batch)
            return reuse
        return self.planned(batch)

    def refill(self, plan: GraphPlan, batch: Batch) -> None:
        assert batch.block_table is not None
        plan.lens.copy_(batch.seq_lens)
        plan.table.copy_(batch.block_table)

    def held(self, plan: GraphPlan) -> Batch:
        """Return the step as a plan's tensors have it."""
        return Batch(plan.batch.starts, plan.lens, plan.table)

    def run(self, plan: GraphPlan, frame: Frame) -> None:
        held = self.held(plan)
        held.causal = plan.batch.causal
        super().run(Plan(held), frame)  # type: ignore[arg-type]


class HonestBounds(HonestGraph):
    """Reads the batch's own tensors, whatever they hold by then."""

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Plan:
        plan = GraphPlan(batch)
        assert batch.block_table is not None
        plan.lens, plan.table = batch.seq_lens, batch.block_table
        return plan


def window(spec: LayerSpec) -> int:
    """A window, or more tokens than any sequence has."""
    return spec.sliding_window or 1 << 30
