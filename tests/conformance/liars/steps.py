"""Lies about steps: what is kept from one to the next, what is written beside, who disturbs whom."""

from __future__ import annotations

import torch
from liars.plain import GraphPlan, HonestBounds, HonestGraph, Plain
from polyattn.kernel import Batch, Frame, KVCache, LayerParams, Plan
from torch import Tensor


class FirstCache(Plain):
    """The first cache after a plan is every layer's."""

    by = ("layers",)

    def run(self, plan: Plan, frame: Frame) -> None:
        kept = self.__dict__.setdefault("kept", {})
        super().run(plan, frame.but(cache=kept.setdefault(id(plan), frame.cache)))


class FirstParameters(Plain):
    """The first layer's parameters are every layer's."""

    by = ("layers",)

    def run(self, plan: Plan, frame: Frame) -> None:
        first = self.__dict__.setdefault("first", frame.params)
        super().run(plan, frame.but(params=first))


class FirstScales(Plain):
    by = ("layers",)

    def scales(self, params: LayerParams) -> tuple[float, float]:
        found: tuple[float, float] = self.__dict__.setdefault("kept", super().scales(params))
        return found


class FirstSinks(Plain):
    by = ("layers",)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, params: LayerParams
    ) -> tuple[Tensor, Tensor]:
        sinks = self.__dict__.setdefault("sinks", params.sinks)
        kept = LayerParams(sinks, params.alibi_slopes, params.k_scale, params.v_scale)
        return super().attend(query, keys, values, kept)


class LastPlan(Plain):
    """The backend remembers a step: what was planned last is what runs."""

    by = ("plans",)

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Plan:
        self.last = Plan(batch)
        return self.last

    def run(self, plan: Plan, frame: Frame) -> None:
        same = len(frame.query) == self.last.batch.num_tokens
        super().run(self.last if same else plan, frame)


class FirstPlanOfTheseLengths(Plain):
    """A plan is reused where lengths are equal; tables may not be."""

    by = ("plans",)

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Plan:
        kept = self.__dict__.setdefault("kept", {})
        found: Plan = kept.setdefault((tuple(batch.starts), tuple(batch.lens)), Plan(batch))
        return found


class SharedWorkspace(Plain):
    """Lengths of the last plan of as many sequences overwrite those of the others."""

    by = ("plans", "search")

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Plan:
        kept = self.__dict__.setdefault("kept", {})
        kept[batch.num_seqs] = batch.lens
        return Plan(batch)

    def length(self, batch: Batch, index: int) -> int:
        lens: list[int] = self.__dict__["kept"][batch.num_seqs]
        return min(lens[index], batch.lens[index])


class ReadsOneEntryMore(Plain):
    """The block table's next entry is read ahead, and its block with it."""

    by = ("stale",)

    def blocks(self, batch: Batch, index: int, count: int) -> Tensor:
        assert batch.block_table is not None
        _ = torch.empty(1 << 20)[batch.block_table[index, count].long()]
        return super().blocks(batch, index, count)


class AttendsOneEntryMore(Plain):
    by = ("numeric",)

    def read(
        self, plan: Plan, cache: KVCache, index: int, params: LayerParams
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().read(plan, cache, index, params)
        assert plan.batch.block_table is not None
        after = plan.batch.block_table[index, -(-len(keys) // cache.block_size)]
        return keys, values + 0.0 * cache.value[after, 0].double()


class OneOwnerOfABlock(Plain):
    """A block belongs to the last sequence that has it."""

    by = ("shared",)

    def read(
        self, plan: Plan, cache: KVCache, index: int, params: LayerParams
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().read(plan, cache, index, params)
        table, size = plan.batch.block_table, cache.block_size
        assert table is not None
        for at in range(-(-len(keys) // size)):
            if (table[index + 1 :, at] == table[index, at]).any():
                keys[at * size : (at + 1) * size] = 0.0
        return keys, values


class TokensOfThisStepAlone(Plain):
    """New tokens' keys are taken from the cache only where this step stored them."""

    by = ("skipped",)

    def read(
        self, plan: Plan, cache: KVCache, index: int, params: LayerParams
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().read(plan, cache, index, params)
        count = plan.batch.query_lens[index]
        fresh, self.seen = keys[len(keys) - count :], True
        if plan.batch.lens[index] == count and count > 2:
            fresh[::2] = 0.0
        return keys, values


class ReadsHeadsFirst(Plain):
    """HND caches are read as if they were NHD."""

    by = ("layout",)

    def read(
        self, plan: Plan, cache: KVCache, index: int, params: LayerParams
    ) -> tuple[Tensor, Tensor]:
        if cache.layout == "HND":
            shape = cache.key.shape
            cache = KVCache(*(t.transpose(1, 2).reshape(shape) for t in (cache.key, cache.value)))
        return super().read(plan, cache, index, params)


class ContiguousCache(Plain):
    """Blocks follow one another, whatever the strides say."""

    by = ("packed",)

    def read(
        self, plan: Plan, cache: KVCache, index: int, params: LayerParams
    ) -> tuple[Tensor, Tensor]:
        if cache.key.stride(0) > cache.key[0].numel():
            flat = torch.empty_like(cache.key[0]).expand_as(cache.key).contiguous()
            cache = KVCache(cache.key.as_strided(flat.shape, flat.stride()), cache.value)
        return super().read(plan, cache, index, params)


class ContiguousQuery(Plain):
    by = ("strided",)

    def run(self, plan: Plan, frame: Frame) -> None:
        query = frame.query
        if not query.is_contiguous():
            dense = torch.empty(query.shape, dtype=query.dtype)
            query = query.as_strided(dense.shape, dense.stride())
        super().run(plan, frame.but(query=query))


class WritesBeside(Plain):
    """One row too many, where there is room for it."""

    by = ("out",)

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        out = frame.out
        room = out.untyped_storage().size() // out.itemsize - out.storage_offset() - out.numel()
        if room >= out[0].numel():
            out.as_strided((len(out) + 1, *out.shape[1:]), out.stride())[-1] = 0.0


class ScalesTheQuery(Plain):
    """The query is scaled where it lies."""

    by = ("numeric",)

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        frame.query.mul_(self.spec.scale)


class ClearsTheCache(Plain):
    """NaN behind the last token is in the way, and so it is removed."""

    by = ("numeric",)

    def run(self, plan: Plan, frame: Frame) -> None:
        if frame.cache is not None and frame.cache.key.dtype.itemsize > 1:
            frame.cache.value.nan_to_num_(0.0, 0.0, 0.0)
        super().run(plan, frame)


class OneMaximumForAll(Plain):
    """The query is quantised by one maximum over the batch."""

    by = ("isolation",)

    def run(self, plan: Plan, frame: Frame) -> None:
        scale = frame.query.abs().max() / 2000 if frame.query.numel() else 1.0
        super().run(plan, frame.but(query=(frame.query.double() / scale).round() * scale))


class NanInTheBatch(Plain):
    """All sequences' values are one matrix; a weight of zero doesn't hide NaN."""

    by = ("isolation",)

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        if frame.value is not None:
            out = frame.out
            out.copy_((out.double() + 0.0 * frame.value.double().sum()).to(out.dtype))


class KeysOfTheBatch(Plain):
    """Keys are centred, by their mean over the batch."""

    by = ("isolation",)

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        if frame.key is not None and len(frame.key):
            frame.out.mul_((1.0 + 1e-2 * frame.key.double().mean().tanh()).to(frame.out.dtype))


class InfinityIsLarge(Plain):
    """Infinite queries are clamped to the batch's largest finite number."""

    by = ("isolation",)

    def run(self, plan: Plan, frame: Frame) -> None:
        query = frame.query
        if query.numel() and not bool(query.isfinite().all()):
            query = torch.where(query.isfinite(), query, 0.0)
            query = query + 0.1 * query.abs().max()
        super().run(plan, frame.but(query=query))


class Dithers(Plain):
    by = ("deterministic",)

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        frame.out.mul_(1.0 + 4e-3 * torch.rand(()))


class SplitsByTheBatch(Plain):
    """How keys are split, and sums rounded, depends on how many sequences there are."""

    by = ("regrouped",)

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        frame.out.mul_(1.0 + 1e-3 * (plan.batch.num_seqs % 7))


class LengthsOfTheCapture(HonestGraph):
    """A replay reads the lengths that the capture had."""

    by = ("reuse",)

    def refill(self, plan: GraphPlan, batch: Batch) -> None:
        assert batch.block_table is not None
        plan.table.copy_(batch.block_table)


class TableOfTheCapture(HonestGraph):
    by = ("reuse",)

    def refill(self, plan: GraphPlan, batch: Batch) -> None:
        plan.lens.copy_(batch.seq_lens)


class NeverReuses(HonestGraph):
    """Every plan has fresh buffers, which no captured graph knows of."""

    by = ("reuse",)

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Plan:
        return GraphPlan(batch)


class HostLengths(HonestGraph):
    """What runs reads the host's list of the plan, frozen at the capture."""

    by = ("reuse",)

    def run(self, plan: GraphPlan, frame: Frame) -> None:
        held = Batch(plan.batch.starts, plan.batch.lens, plan.table)
        Plain.run(self, Plan(held), frame)


class BoundsAreLengths(HonestBounds):
    """A step planned by bounds attends to as many keys: right where a plan has the lengths."""

    by = ("bounds",)

    def run(self, plan: GraphPlan, frame: Frame) -> None:
        lens = plan.lens
        if self.spec.length_bounds:
            lens = torch.tensor(plan.batch.lens, dtype=torch.int32)
        Plain.run(self, Plan(Batch(plan.batch.starts, lens, plan.table)), frame)


class RefillsTheFirstRows(HonestGraph):
    """Only as many rows as the new step has are refilled; the padding keeps older ones."""

    by = ("reuse",)

    def refill(self, plan: GraphPlan, batch: Batch) -> None:
        assert batch.block_table is not None
        plan.lens[:3] = batch.seq_lens[:3]
        plan.table[:3] = batch.block_table[:3]
