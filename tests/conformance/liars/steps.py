"""Lies about steps: what is kept from one to the next, what is written beside, who disturbs whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from liars.plain import GraphPlan, HonestBounds, HonestGraph, Pair, Plain
from liars.told import Reading, Told, lies
from polyattn.kernel import Batch, Frame, KVCache, LayerParams, Plan
from torch import Tensor


def rounded(query: Tensor) -> Tensor:
    scale = query.abs().max() / 2000 if query.numel() else 1.0
    return (query.double() / scale).round() * scale


def clamped(query: Tensor) -> Tensor:
    if not query.numel() or bool(query.isfinite().all()):
        return query
    query = torch.where(query.isfinite(), query, 0.0)
    return query + 0.1 * query.abs().max()


def contiguous(query: Tensor) -> Tensor:
    if query.is_contiguous():
        return query
    return query.as_strided(query.shape, torch.empty(query.shape, dtype=query.dtype).stride())


def cleared(self: Any, plan: Plan, frame: Frame) -> Frame:
    """NaN behind the last token is in the way, and so it is removed."""
    if frame.cache is not None and frame.cache.key.dtype.itemsize > 1:
        frame.cache.value.nan_to_num_(0.0, 0.0, 0.0)
    return frame


def nan_of_all(self: Any, plan: Plan, frame: Frame) -> None:
    """All sequences' values are one matrix; a weight of zero doesn't hide NaN."""
    if frame.value is not None:
        frame.out.copy_((frame.out.double() + 0.0 * frame.value.double().sum()).to(frame.out.dtype))


def centred(self: Any, plan: Plan, frame: Frame) -> None:
    """Keys are centred, by their mean over the batch."""
    if frame.key is not None and len(frame.key):
        frame.out.mul_((1.0 + 1e-2 * frame.key.double().mean().tanh()).to(frame.out.dtype))


BEFORE = {
    "layers": {
        # The first cache after a plan is every layer's.
        "FirstCache": lambda self, plan, frame: frame.but(cache=self.once(id(plan), frame.cache)),
        # The first layer's parameters are every layer's.
        "FirstParameters": lambda self, plan, frame: frame.but(
            params=self.once("params", frame.params)
        ),
        "FirstScales": lambda self, plan, frame: frame.but(params=replace(frame.params, **self.once(
            "scales", {"k_scale": frame.params.k_scale, "v_scale": frame.params.v_scale}))),
        "FirstSinks": lambda self, plan, frame: frame.but(params=replace(
            frame.params, sinks=self.once("sinks", frame.params.sinks))),
    },
    "strided": {
        "ContiguousQuery": lambda self, plan, frame: frame.but(query=contiguous(frame.query)),
    },
    "isolation": {
        # The query is quantised by one maximum over the batch.
        "OneMaximumForAll": lambda self, plan, frame: frame.but(query=rounded(frame.query)),
        # Infinite queries are clamped to the batch's largest finite number.
        "InfinityIsLarge": lambda self, plan, frame: frame.but(query=clamped(frame.query)),
    },
    "numeric": {"ClearsTheCache": cleared},
}  # fmt: skip
AFTER = {
    "isolation": {"NanInTheBatch": nan_of_all, "KeysOfTheBatch": centred},
    # The query is scaled where it lies.
    "numeric": {"ScalesTheQuery": lambda self, plan, frame: frame.query.mul_(self.spec.scale)},
    "deterministic": {
        "Dithers": lambda self, plan, frame: frame.out.mul_(1.0 + 4e-3 * torch.rand(()))
    },
    # How keys are split, and sums rounded, depends on how many sequences there are.
    "regrouped": {
        "SplitsByTheBatch": lambda self, plan, frame: frame.out.mul_(
            1.0 + 1e-3 * (plan.batch.num_seqs % 7)
        )
    },
}
globals().update(lies(__name__, *(
    (Told, step, told, by)
    for step, tables in (("before", BEFORE), ("after", AFTER))
    for by, told in tables.items()
)))  # fmt: skip


def one_entry_more(
    self: Any, keys: Tensor, values: Tensor, cache: KVCache, batch: Batch, index: int
) -> tuple[Tensor, Tensor]:
    assert batch.block_table is not None
    after = batch.block_table[index, -(-len(keys) // cache.block_size)]
    return keys, values + 0.0 * cache.value[after, 0].double()


def one_owner(
    self: Any, keys: Tensor, values: Tensor, cache: KVCache, batch: Batch, index: int
) -> tuple[Tensor, Tensor]:
    """A block belongs to the last sequence that has it."""
    table, size = batch.block_table, cache.block_size
    assert table is not None
    for at in range(-(-len(keys) // size)):
        if (table[index + 1 :, at] == table[index, at]).any():
            keys[at * size : (at + 1) * size] = 0.0
    return keys, values


def of_this_step(
    self: Any, keys: Tensor, values: Tensor, cache: KVCache, batch: Batch, index: int
) -> tuple[Tensor, Tensor]:
    """New tokens' keys are taken from the cache only where this step stored them."""
    count = batch.query_lens[index]
    if batch.lens[index] == count and count > 2:
        keys[len(keys) - count :][::2] = 0.0
    return keys, values


REFILLED = {
    # A replay reads the lengths that the capture had.
    "LengthsOfTheCapture": lambda self, plan, batch: plan.table.copy_(batch.block_table),
    "TableOfTheCapture": lambda self, plan, batch: plan.lens.copy_(batch.seq_lens),
}
globals().update(lies(
    __name__,
    (Reading, "spoilt", {"AttendsOneEntryMore": one_entry_more}, "numeric"),
    (Reading, "spoilt", {"OneOwnerOfABlock": one_owner}, "shared"),
    (Reading, "spoilt", {"TokensOfThisStepAlone": of_this_step}, "skipped"),
    (HonestGraph, "refill", REFILLED, "reuse"),
))  # fmt: skip


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


class ReadsHeadsFirst(Plain):
    """HND caches are read as if they were NHD."""

    by = ("layout",)

    def read(self, plan: Plan, cache: KVCache, index: int, params: LayerParams) -> Pair:
        if cache.layout == "HND":
            shape = cache.key.shape
            cache = KVCache(*(t.transpose(1, 2).reshape(shape) for t in (cache.key, cache.value)))
        return super().read(plan, cache, index, params)


class ContiguousCache(Plain):
    """Blocks follow one another, whatever the strides say."""

    by = ("packed",)

    def read(self, plan: Plan, cache: KVCache, index: int, params: LayerParams) -> Pair:
        if cache.key.stride(0) > cache.key[0].numel():
            flat = torch.empty_like(cache.key[0]).expand_as(cache.key).contiguous()
            cache = KVCache(cache.key.as_strided(flat.shape, flat.stride()), cache.value)
        return super().read(plan, cache, index, params)


class WritesBeside(Plain):
    """One row too many, where there is room for it."""

    by = ("out",)

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        out = frame.out
        room = out.untyped_storage().size() // out.itemsize - out.storage_offset() - out.numel()
        if room >= out[0].numel():
            out.as_strided((len(out) + 1, *out.shape[1:]), out.stride())[-1] = 0.0


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
