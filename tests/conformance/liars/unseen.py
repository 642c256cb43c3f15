"""Liars that were written before anybody looked whether the kit finds them: 45 of 59 it did.

Each is wrong in one manner that kernels were, or may be, from the contracts and from reports about
attention libraries.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from liars.told import Hooks, lies
from polyattn import AttentionKind, LayerSpec
from polyattn.kernel import Batch, Frame, KVCache, LayerParams, Plan, RecurrentFrame
from polyattn.plugin import Capabilities, Role
from polyattn.registry.builtin import TORCH_STORE
from polyattn.runtime.program import StorePlan
from polyattn.runtime.store import TorchStore
from polyattn_cpu.hooks import TORCH_MLA, TORCH_MLA_SPARSE, TORCH_SCAN
from polyattn_cpu.mla import TorchMLA, TorchSparseMLA
from polyattn_cpu.recurrent import TorchScan
from polyattn_cpu.sdpa import SdpaPlan, TorchSDPA
from torch import Tensor


def claims(features: str = "", **fields: Any) -> Capabilities:
    """A decoder over a cache in float32, and what else a liar needs."""
    return Capabilities(
        **{
            "platforms": {"cpu": ()},
            "dtypes": frozenset({"float32"}),
            "features": frozenset({"causal", "gqa", "lse", *features.split()}),
            **fields,
        }
    )


class Sdpa(TorchSDPA):
    """Right attention; a lie is told after it, or before it. `claimed`: the claims."""

    by: ClassVar[tuple[str, ...]] = ()
    claimed: ClassVar[Capabilities] = claims()

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Any:
        return SdpaPlan(batch, None, None)

    def run(self, plan: Any, frame: Frame) -> None:
        super().run(plan, self.before(plan, frame))
        self.spoil(plan.batch, frame)

    def before(self, plan: Any, frame: Frame) -> Frame:
        return frame

    def spoil(self, batch: Batch, frame: Frame) -> None:
        for index, (count, length) in enumerate(zip(batch.query_lens, batch.lens, strict=True)):
            if count and length and self.wrong(count, length):
                rows = slice(batch.starts[index], batch.starts[index + 1])
                self.lie(batch, frame, index, rows)

    def wrong(self, count: int, length: int) -> bool:
        return True

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        return

    def again(
        self, batch: Batch, frame: Frame, index: int, rows: slice, of: Batch | None = None,
        changes: dict[str, Any] | None = None, **fields: Any,
    ) -> None:  # fmt: skip
        """Write a sequence's results of another spec, or another step."""
        other = TorchSDPA(self.spec.replace(**fields), self.cache, self.device)
        out = torch.empty_like(frame.out)
        lse = None if frame.lse is None else torch.empty_like(frame.lse)
        one = (of or batch).copy()
        other.run(SdpaPlan(one, None, None), frame.but(out=out, lse=lse, **(changes or {})))
        frame.out[rows] = out[rows]
        if frame.lse is not None and lse is not None:
            frame.lse[rows] = lse[rows]


def shorter(batch: Batch, index: int, length: int, row: Tensor | None = None) -> Batch:
    """A step whose sequence has another length, and another row of the block table."""
    other = batch.copy()
    for name in ("host_lens", "seq_lens", "key_starts", "max_seq_len"):
        other.__dict__.pop(name, None)
    if row is not None:
        assert batch.block_table is not None
        table = batch.block_table.clone()
        table[index, : len(row)] = row
        other = other.with_block_table(table)
    other.lens = [*batch.lens]
    other.lens[index] = length
    return other


class Otherwise(Sdpa):
    """Computes some sequences as a layer of other fields would, or of a shorter length."""

    other: ClassVar[Callable[[Any, int, int], Any]]

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        count, length = batch.query_lens[index], batch.lens[index]
        if other := self.other(count, length):
            step = shorter(batch, index, other) if isinstance(other, int) else None
            self.again(batch, frame, index, rows, step, **({} if step else other))

    @property
    def block(self) -> int:
        assert self.cache is not None
        return self.cache.block_size


ENCODERS = {"roles": frozenset({Role.ENCODER}), "cached": frozenset({False})}
OTHERWISE: dict[str, tuple[Capabilities, Callable[[Any, int, int], Any]]] = {
    # A decode splits keys into 16 parts of 512 at most.
    "SixteenSplits": (claims(), lambda self, count, length: count == 1 and length > 8192 and 8192),
    # Pages of 64: a length that fills its last page has one page less.
    "FullLastPage": (claims(), lambda self, count, length: (
        count == 1 and self.block >= 64 and length % self.block == 0 and length - self.block)),
    # A small kernel for a few tokens after a short context takes the default scale.
    "UnderSixteenKeys": (claims(), lambda self, count, length: (
        1 < count < length < 16 and {"scale": self.spec.head_size**-0.5})),
    # The window is a signed 16-bit number.
    "WindowInSixteenBits": (claims("sliding_window"), lambda self, count, length: (
        (window := self.spec.sliding_window or 0) >= 1 << 15
        and {"sliding_window": max(1, window % (1 << 15))})),
    # A length that is the window's has its first key cut.
    "WindowAsLongAsTheText": (claims("sliding_window"), lambda self, count, length: (
        length == self.spec.sliding_window and length > 1 and {"sliding_window": length - 1})),
    # After a context that ends within a block the window is longer by what lies in that block.
    "WindowFromTheBlock": (claims("sliding_window"), lambda self, count, length: (
        length > count > 1 and self.spec.sliding_window and (inside := (length - count) % self.block)
        and {"sliding_window": self.spec.sliding_window + inside})),
    # The cap is applied to unscaled logits where the scale isn't the usual one.
    "CapBeforeTheScale": (claims("logit_soft_cap"), lambda self, count, length: (
        self.spec.logit_soft_cap and abs(self.spec.scale - self.spec.head_size**-0.5) > 1e-6
        and {"logit_soft_cap": self.spec.logit_soft_cap * self.spec.scale})),
    # Kept first tokens are those of the first block.
    "OneBlockOfSinks": (claims("sliding_window sink_tokens"), lambda self, count, length: (
        self.spec.sink_tokens > self.block and {"sink_tokens": self.block})),
    # No more first tokens are kept than the window is long.
    "SinksWithinTheWindow": (claims("sliding_window sink_tokens"), lambda self, count, length: (
        self.spec.sink_tokens > (self.spec.sliding_window or 1 << 30)
        and {"sink_tokens": self.spec.sliding_window})),
    # A two-sided window of an odd length is one longer.
    "EvenWindows": (claims("sliding_window non_causal", **ENCODERS), lambda self, count, length: (
        not self.spec.causal and (self.spec.sliding_window or 0) % 2
        and {"sliding_window": self.spec.sliding_window + 1})),
    # A text that is less than a block beyond a chunk's end has no chunks.
    "LastChunkOfOneBlock": (claims("chunked"), lambda self, count, length: (
        self.spec.chunk_size and length > self.spec.chunk_size
        and 0 < length % self.spec.chunk_size < self.block and {"chunk_size": None})),
}  # fmt: skip
"""What each claims, and of which sequences (new tokens, length) it computes what else."""
globals().update(
    lies(__name__, *((Otherwise, "other", {name: other}) for name, (_, other) in OTHERWISE.items()))
)


class SinkForEachPart(Sdpa):
    """Beyond 1024 keys each of two parts counts the sink."""

    claimed = claims("learned_sinks")

    def wrong(self, count: int, length: int) -> bool:
        return self.spec.learned_sinks and count == 1 and length > 1024

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        assert frame.params.sinks is not None
        params = replace(frame.params, sinks=frame.params.sinks + 0.6931)
        self.again(batch, frame, index, rows, changes={"params": params})


# Sizes that models have.


class TailOf160(Sdpa):
    """A second tile of 64 elements is masked away where the head has no full one."""

    def before(self, plan: Any, frame: Frame) -> Frame:
        size, query = self.spec.head_size, frame.query
        if size > 128 and size % 64:
            query = query.clone()
            query[..., size - size % 64 :] = 0.0
        return frame.but(query=query)


class WideKeysShortPages(Sdpa):
    """DeepSeek's prompt shape in one block of keys, with pages that aren't 128."""

    claimed = claims("v_head_size")

    def wrong(self, count: int, length: int) -> bool:
        assert self.cache is not None
        wide = self.spec.head_size == 192 and self.spec.v_head_size == 128
        return wide and length <= 128 and self.cache.block_size != 128

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        frame.out[rows] = frame.out[rows].roll(1, -1)


class SixtyFourSlopes(Sdpa):
    """Room for 64 slopes, which start again."""

    claimed = claims("alibi")

    def before(self, plan: Any, frame: Frame) -> Frame:
        slopes = frame.params.alibi_slopes
        if slopes is None:
            return frame
        again = slopes[torch.arange(len(slopes)) % 64]
        return frame.but(params=replace(frame.params, alibi_slopes=again))


def group_tail(self: Any, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
    """Heads of a group beyond the largest power of two aren't computed."""
    whole = 1 << (self.spec.gqa_ratio.bit_length() - 1)
    for head in range(self.spec.num_heads):
        if head % self.spec.gqa_ratio >= whole:
            frame.out[rows, head] = 0.0


def second_tile(self: Any, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
    """One KV head for more than 64: the LSE of the second tile is the first one's."""
    heads = self.spec.num_heads
    if self.spec.num_kv_heads == 1 and heads > 64 and frame.lse is not None:
        frame.lse[rows, 64:] = frame.lse[rows, : heads - 64].clone()


def sixteen_per_group(self: Any, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
    """A decode has room for 16 query heads to a KV head."""
    ratio = self.spec.gqa_ratio
    if batch.query_lens[index] == 1 and ratio > 16:
        groups = frame.out[rows].view(-1, self.spec.num_kv_heads, ratio, frame.out.shape[2])
        groups.copy_(groups[:, :, torch.arange(ratio) % 16].clone())


def one_row_tile(self: Any, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
    """A last tile of one row repeats the row before it."""
    count = batch.query_lens[index]
    if count > 64 and count % 64 == 1:
        frame.out[rows.stop - 1] = frame.out[rows.stop - 2].clone()


globals().update(lies(__name__, (Sdpa, "lie", {
    "GroupTail": group_tail, "SecondTileOfHeads": second_tile, "SixteenPerGroup": sixteen_per_group,
    "OneRowTile": one_row_tile,
})))  # fmt: skip


class BigPagesFarKeys(Sdpa):
    """Of pages of 256 and more only the first 4096 tokens and the last page are read."""

    def wrong(self, count: int, length: int) -> bool:
        assert self.cache is not None
        return count == 1 and self.cache.block_size >= 256 and length > 4096 + self.cache.block_size

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        assert self.cache is not None and batch.block_table is not None
        size, length = self.cache.block_size, batch.lens[index]
        pages, first = -(-length // size), 4096 // size
        own = batch.block_table[index]
        row = torch.cat([own[:first], own[pages - 1 : pages]])
        step = shorter(batch, index, first * size + length - (pages - 1) * size, row)
        self.again(batch, frame, index, rows, step)


class SequencesModulo128(Sdpa):
    """Decodes beyond 128 read the table's rows from its start again."""

    def spoil(self, batch: Batch, frame: Frame) -> None:
        if not batch.all_decode or batch.num_seqs <= 128:
            return
        assert batch.block_table is not None
        rows = torch.arange(batch.num_seqs) % 128
        other = batch.with_block_table(batch.block_table[rows])
        for name in ("host_lens", "seq_lens", "key_starts", "max_seq_len"):
            other.__dict__.pop(name, None)
        other.lens = [batch.lens[i] for i in rows.tolist()]
        self.again(batch, frame, 0, slice(0, batch.num_tokens), other)


# Combinations.


class AlibiBothWays(Sdpa):
    """Without a causal mask the distance is an absolute number."""

    claimed = claims(
        "alibi non_causal",
        roles=frozenset({Role.DECODER, Role.ENCODER}),
        cached=frozenset({True, False}),
    )

    def _bias(self, query: Tensor, span: Any, first: int, call: Any) -> Any:
        bias, blind = super()._bias(query, span, first, call)
        if self.spec.alibi and not call.spec.causal and bias is not None:
            place = torch.arange(first, first + len(query))[:, None]
            ahead = (span.positions() - place).clamp(min=0).to(bias.dtype)
            bias = bias - 2 * call.params.alibi_slopes[:, None, None] * ahead
        return bias, blind


class DraftsOverInt8Window(Sdpa):
    """Of 2 to 8 queries over a quantised cache, beyond a window, one head of the last isn't masked."""

    claimed = claims("sliding_window", kv_cache_dtypes=frozenset({"auto", "int8"}))

    def wrong(self, count: int, length: int) -> bool:
        window = self.spec.sliding_window or 1 << 30
        return 2 <= count <= 8 and length > window and self.spec.kv_cache_dtype == "int8"

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        held = frame.out[rows].clone()
        self.again(batch, frame, index, rows, sliding_window=None)
        new = frame.out[rows.stop - 1, 0].clone()
        frame.out[rows] = held
        frame.out[rows.stop - 1, 0] = new


class SinklessLse(Sdpa):
    """A prompt's LSE lacks the sink."""

    claimed = claims("learned_sinks")

    def wrong(self, count: int, length: int) -> bool:
        return self.spec.learned_sinks and count > 1

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        if frame.lse is not None and frame.params.sinks is not None:
            sinks, whole = frame.params.sinks, frame.lse[rows]
            bare = whole + torch.log(-torch.expm1(sinks - whole))
            frame.lse[rows] = torch.where(whole == -torch.inf, whole, bare)


class SameQuerySameAnswer(Sdpa):
    """Decodes with the same query are taken for one request."""

    def spoil(self, batch: Batch, frame: Frame) -> None:
        if batch.all_decode:
            for row in range(1, batch.num_tokens):
                same = (frame.query[:row] == frame.query[row]).flatten(1).all(1).nonzero()
                if len(same) and batch.lens[row] and batch.lens[int(same[0])]:
                    frame.out[row] = frame.out[int(same[0])].clone()


# Layouts that contracts promise.


class BlocksInSixteenBits(Sdpa):
    """The number of a block is a signed 16-bit one."""

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Any:
        table = batch.block_table
        if table is not None and table.numel() and int(table.max()) >= 1 << 15:
            batch = batch.with_block_table(table % (1 << 15))
        return super().plan(batch, reuse)


class StoreOf(TorchStore):
    by: ClassVar[tuple[str, ...]] = ()
    claimed: ClassVar[Capabilities] = TORCH_STORE.capabilities


class StopsAtSkipped(StoreOf):
    """The first skipped token ends the step's."""

    def run(self, plan: StorePlan, key: Any, value: Any, cache: KVCache, params: Any) -> None:
        kept = int((plan.slots >= 0).long().cumprod(0).sum())
        super().run(StorePlan(plan.slots[:kept]), key[:kept], value[:kept], cache, params)


class TwoHeadsAtATime(StoreOf):
    """The last of an odd number of heads, three or more, isn't stored."""

    def run(
        self, plan: StorePlan, key: Tensor, value: Tensor, cache: KVCache, params: LayerParams
    ) -> None:
        heads = key.shape[1]
        if heads > 2 and heads % 2 and not isinstance(params.k_scale, Tensor):
            even = slice(0, heads - 1)
            part = copy.copy(cache)
            part.key, part.value = cache.key[:, :, even], cache.value[:, :, even]
            key, value, cache = key[:, even], value[:, even], part
        super().run(plan, key, value, cache, params)


# State.


class After20Groups(Sdpa):
    """Wrong from the 21st of its objects on."""

    made: ClassVar[int] = 0

    def __init__(self, *given: Any):
        super().__init__(*given)
        type(self).made += 1
        self.late = type(self).made > 20

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        if self.late:
            frame.out[rows] *= 1.3


class AfterAGreatStep(Sdpa):
    """After a step of over 512 tokens a small one leaves its LSE unwritten."""

    def run(self, plan: Any, frame: Frame) -> None:
        great = self.__dict__.get("great", False)
        self.great = great or plan.batch.num_tokens > 512
        held = None if frame.lse is None else frame.lse.clone()
        super().run(plan, frame)
        if great and held is not None and plan.batch.num_tokens < 64 and frame.lse is not None:
            frame.lse.copy_(held)


class EachCallOf256(Sdpa):
    """A counter of eight bits is 0 in between."""

    def run(self, plan: Any, frame: Frame) -> None:
        super().run(plan, frame)
        self.calls = self.__dict__.get("calls", 0) + 1
        if self.calls % 256 == 0 and frame.lse is not None:
            frame.lse.add_(1.0)


class TwoPlansAlive(Sdpa):
    """A third plan is laid where the first was."""

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Any:
        ring = self.__dict__.setdefault("ring", [])
        made = super().plan(batch, reuse)
        ring.append(made)
        if len(ring) > 2:
            old = ring.pop(0)
            if old.batch.num_seqs == batch.num_seqs and old.batch.starts == batch.starts:
                old.batch, old.reader = made.batch, made.reader
        return made


class AfterAnEmptyStep(Sdpa):
    """A step of padding alone (a warm-up) leaves the next one's output as it was."""

    def run(self, plan: Any, frame: Frame) -> None:
        before, self.empty = self.__dict__.get("empty", False), not any(plan.batch.lens)
        held = frame.out.clone()
        super().run(plan, frame)
        if before:
            frame.out.copy_(held)


class CompiledWithoutTheScale(Sdpa):
    """Compiled code is found again by sizes and dtypes alone, not by the scale."""

    scales: ClassVar[dict[Any, float]] = {}

    def __init__(self, spec: LayerSpec, *given: Any):
        sizes = (spec.num_heads, spec.num_kv_heads, spec.head_size, spec.v_head_size, spec.dtype)
        super().__init__(
            spec.replace(scale=type(self).scales.setdefault(sizes, spec.scale)), *given
        )


class OnePlanForManyLayers(Sdpa):
    """A plan's counters overflow with the 65th layer that uses it."""

    def run(self, plan: Any, frame: Frame) -> None:
        super().run(plan, frame)
        uses = self.__dict__.setdefault("uses", {})
        count = uses[id(plan)] = uses.get(id(plan), (0, plan))[0] + 1, plan
        if count[0] > 64:
            frame.out.mul_(1.3)


# The process.


class SetsAVariable(Sdpa):
    def __init__(self, *given: Any):
        super().__init__(*given)
        os.environ["OMP_NUM_THREADS"] = "2"


# Latents and recurrences.


class Latents(Hooks, TorchMLA):
    by: ClassVar[tuple[str, ...]] = ()
    claimed = TORCH_MLA.capabilities


class Chosen(Hooks, TorchSparseMLA):
    by: ClassVar[tuple[str, ...]] = ()
    claimed = TORCH_MLA_SPARSE.capabilities


class Scan(Hooks, TorchScan):
    by: ClassVar[tuple[str, ...]] = ()


def scans(*kinds: AttentionKind) -> Capabilities:
    return replace(TORCH_SCAN.capabilities, kinds=frozenset(kinds), dtypes=frozenset({"float32"}))


def up_to_a_hole(choice: Tensor) -> Tensor:
    return choice.masked_fill(~(choice >= 0).int().cumprod(1).bool(), -1)


def first_states(self: Any, plan: Any, frame: RecurrentFrame) -> RecurrentFrame:
    """Of a state's elements the first 128 are read."""
    read = frame.inputs["C"].clone()
    read[..., 128:] = 0.0
    return frame.but(inputs={**frame.inputs, "C": read})


globals().update(lies(__name__, (Latents, "after", {
    # Heads beyond 64 have the first ones' results.
    "SixtyFourLatentHeads": lambda self, plan, frame: frame.out.copy_(
        frame.out[:, torch.arange(frame.out.shape[1]) % 64].clone()),
})))  # fmt: skip
globals().update(lies(__name__, (Chosen, "before", {
    # The first -1 ends a choice.
    "StopsAtAHole": lambda self, plan, frame: frame.but(choice=up_to_a_hole(frame.choice)),
    # Of a choice the first 1024 are read.
    "ChoosesAThousand": lambda self, plan, frame: frame.but(choice=frame.choice[:, :1024]),
})))  # fmt: skip
globals().update(lies(__name__, (Scan, "before", {"StatesOf128": first_states})))
globals()["StatesOf128"].claimed = scans(AttentionKind.MAMBA2)


class AloneIsFresh(Scan):
    """A step of one sequence has no initial state."""

    claimed = scans(AttentionKind.GDN)

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Any:
        plan = super().plan(batch, reuse)
        if batch.num_seqs == 1 and batch.query_lens[0] > 1:
            plan.before = [0]
        return plan


class ForgetsShortContinuations(Scan):
    """A few tokens, less than the convolution is wide, replace its whole state."""

    claimed = scans(AttentionKind.SHORT_CONV)

    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        super().run(plan, frame)
        width = frame.states.shape[2]
        for slot, count, before in zip(plan.slots, plan.batch.query_lens, plan.before, strict=True):
            if slot >= 0 and 1 < count < width and before:
                frame.states[slot, :, : width - count] = 0.0


class SlotsInOrder(Scan):
    """States are written in the order of their slots."""

    claimed = scans(AttentionKind.MAMBA2)

    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        super().run(plan, frame)
        slots = [slot for slot in plan.slots if slot >= 0]
        if plan.batch.all_decode and slots != sorted(slots):
            frame.states[sorted(slots)] = frame.states[slots].clone()


class RingInSixteenBits(Scan):
    """A ring's position is a signed 16-bit number."""

    claimed = scans(AttentionKind.SHORT_CONV)

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Any:
        plan = super().plan(batch, reuse)
        plan.before = [n if n < 1 << 15 else n % (1 << 15) for n in plan.before]
        return plan


for _name, (_claims, _) in OTHERWISE.items():
    globals()[_name].claimed = _claims
BASES = {Sdpa, Otherwise, StoreOf, Latents, Chosen, Scan}
ALL: list[Any] = [
    kind for kind in list(vars().values())
    if getattr(kind, "__module__", "") == __name__ and hasattr(kind, "claimed") and kind not in BASES
]  # fmt: skip
CAUGHT = json.loads(Path(__file__).with_name("caught.json").read_text())
for _index in range(len(ALL)):
    ALL[_index].by = (CAUGHT.get(ALL[_index].__name__, "numeric").partition("-")[0],)
