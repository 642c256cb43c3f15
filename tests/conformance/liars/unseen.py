"""Liars that were written before anybody looked whether the kit finds them: 45 of 59 it did.

Each is wrong in one manner that kernels were, or may be, from the contracts and from reports about
attention libraries.
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from polyattn import AttentionKind, LatentSpec, LayerSpec, RecurrentSpec, SparseSpec
from polyattn.kernel import Batch, Frame, KVCache, LayerParams, Plan, RecurrentFrame
from polyattn.plugin import Capabilities, Role
from polyattn.registry.builtin import TORCH_MERGE, TORCH_STORE
from polyattn.runtime.merge import TorchMerge
from polyattn.runtime.program import StorePlan
from polyattn.runtime.store import TorchStore
from polyattn_cpu.hooks import TORCH_MLA, TORCH_MLA_SPARSE, TORCH_SCAN
from polyattn_cpu.mla import TorchMLA, TorchSparseMLA
from polyattn_cpu.recurrent import TorchScan
from polyattn_cpu.sdpa import SdpaPlan, TorchSDPA
from torch import Tensor

Lengths = Sequence[tuple[int, int]]


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


def spec(**fields: Any) -> LayerSpec:
    return LayerSpec(
        **{"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "dtype": "float32"} | fields
    )


class Sdpa(TorchSDPA):
    """Right attention; a lie is told after it by `spoil`, or before it.

    `claimed`: the claims. `shown`: a layer and a step at which the lie shows.
    """

    by: ClassVar[tuple[str, ...]] = ()
    claimed: ClassVar[Capabilities] = claims()
    shown: ClassVar[tuple[LayerSpec, Lengths]] = (spec(), [(1, 40)])

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Any:
        return SdpaPlan(batch, None, None)

    def run(self, plan: Any, frame: Frame) -> None:
        super().run(plan, frame)
        self.spoil(plan.batch, frame)

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


# Sizes that models have.


class TailOf160(Sdpa):
    """A second tile of 64 elements is masked away where the head has no full one."""

    shown = spec(head_size=160), [(1, 40)]

    def run(self, plan: Any, frame: Frame) -> None:
        size, query = self.spec.head_size, frame.query
        if size > 128 and size % 64:
            query = query.clone()
            query[..., size - size % 64 :] = 0.0
        super().run(plan, frame.but(query=query))


class WideKeysShortPages(Sdpa):
    """DeepSeek's prompt shape in one block of keys, with pages that aren't 128."""

    claimed = claims("v_head_size")
    shown = spec(head_size=192, v_head_size=128), [(1, 100)]

    def wrong(self, count: int, length: int) -> bool:
        assert self.cache is not None
        wide = self.spec.head_size == 192 and self.spec.v_head_size == 128
        return wide and length <= 128 and self.cache.block_size != 128

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        frame.out[rows] = frame.out[rows].roll(1, -1)


class BigPagesFarKeys(Sdpa):
    """Of pages of 256 and more only the first 4096 tokens and the last page are read."""

    shown = spec(block_size=256), [(1, 6000)]

    def wrong(self, count: int, length: int) -> bool:
        assert self.cache is not None
        return count == 1 and self.cache.block_size >= 256 and length > 4096 + self.cache.block_size

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        assert self.cache is not None and batch.block_table is not None
        size, length = self.cache.block_size, batch.lens[index]
        pages, first = -(-length // size), 4096 // size
        row = torch.cat(
            [batch.block_table[index, :first], batch.block_table[index, pages - 1 : pages]]
        )
        self.again(
            batch,
            frame,
            index,
            rows,
            shorter(batch, index, first * size + length - (pages - 1) * size, row),
        )


class GroupTail(Sdpa):
    """Heads of a group beyond the largest power of two aren't computed."""

    shown = spec(num_heads=6, num_kv_heads=2), [(1, 40)]

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        ratio = self.spec.gqa_ratio
        whole = 1 << (ratio.bit_length() - 1)
        for head in range(self.spec.num_heads):
            if head % ratio >= whole:
                frame.out[rows, head] = 0.0


class SecondTileOfHeads(Sdpa):
    """One KV head for more than 64: the LSE of the second tile is the first one's."""

    shown = spec(num_heads=71, num_kv_heads=1, needs_lse=True), [(1, 40)]

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        heads = self.spec.num_heads
        if self.spec.num_kv_heads == 1 and heads > 64 and frame.lse is not None:
            frame.lse[rows, 64:] = frame.lse[rows, : heads - 64].clone()


class SixteenPerGroup(Sdpa):
    """A decode has room for 16 query heads to a KV head."""

    shown = spec(num_heads=64, num_kv_heads=2), [(1, 40)]

    def wrong(self, count: int, length: int) -> bool:
        return count == 1 and self.spec.gqa_ratio > 16

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        groups = frame.out[rows].view(
            -1, self.spec.num_kv_heads, self.spec.gqa_ratio, frame.out.shape[2]
        )
        over = groups[:, :, 16:]
        over.copy_(
            groups[:, :, :16].repeat(1, 1, -(-over.shape[2] // 16), 1)[:, :, : over.shape[2]]
        )


class SixteenSplits(Sdpa):
    """A decode splits keys into 16 parts of 512 at most."""

    shown = spec(), [(1, 9000)]

    def wrong(self, count: int, length: int) -> bool:
        return count == 1 and length > 8192

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        self.again(batch, frame, index, rows, shorter(batch, index, 8192))


class FullLastPage(Sdpa):
    """Pages of 64: a length that fills its last page has one page less."""

    shown = spec(block_size=64), [(1, 192)]

    def wrong(self, count: int, length: int) -> bool:
        assert self.cache is not None
        size = self.cache.block_size
        return count == 1 and size >= 64 and length % size == 0 and length > size

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        assert self.cache is not None
        self.again(
            batch,
            frame,
            index,
            rows,
            shorter(batch, index, batch.lens[index] - self.cache.block_size),
        )


class UnderSixteenKeys(Sdpa):
    """A small kernel for a few tokens after a short context takes the default scale."""

    shown = spec(scale=1.0), [(4, 9)]

    def wrong(self, count: int, length: int) -> bool:
        return 1 < count < length < 16

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        self.again(batch, frame, index, rows, scale=self.spec.head_size**-0.5)


class OneRowTile(Sdpa):
    """A last tile of one row repeats the row before it."""

    shown = spec(), [(129, 129)]

    def wrong(self, count: int, length: int) -> bool:
        return count > 64 and count % 64 == 1

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        frame.out[rows.stop - 1] = frame.out[rows.stop - 2].clone()


class SequencesModulo128(Sdpa):
    """Decodes beyond 128 read the table's rows from its start again."""

    shown = spec(), [(1, 20 + i % 7) for i in range(131)]

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


class SixtyFourSlopes(Sdpa):
    """Room for 64 slopes, which start again."""

    claimed = claims("alibi")
    shown = spec(num_heads=112, num_kv_heads=112, head_size=32, alibi=True), [(1, 90)]

    def run(self, plan: Any, frame: Frame) -> None:
        slopes = frame.params.alibi_slopes
        if slopes is not None and len(slopes) > 64:
            slopes = slopes[torch.arange(len(slopes)) % 64]
            frame = frame.but(params=replace(frame.params, alibi_slopes=slopes))
        super().run(plan, frame)


class WindowInSixteenBits(Sdpa):
    """The window is a signed 16-bit number."""

    claimed = claims("sliding_window")
    shown = spec(sliding_window=32768), [(1, 40)]

    def wrong(self, count: int, length: int) -> bool:
        return (self.spec.sliding_window or 0) >= 1 << 15

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        assert self.spec.sliding_window is not None
        self.again(
            batch, frame, index, rows, sliding_window=max(1, self.spec.sliding_window % (1 << 15))
        )


class WindowAsLongAsTheText(Sdpa):
    """A length that is the window's has its first key cut."""

    claimed = claims("sliding_window")
    shown = spec(sliding_window=128), [(1, 128)]

    def wrong(self, count: int, length: int) -> bool:
        return length == self.spec.sliding_window and length > 1

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        self.again(batch, frame, index, rows, sliding_window=batch.lens[index] - 1)


# Combinations.


class SinkForEachPart(Sdpa):
    """Beyond 1024 keys each of two parts counts the sink."""

    claimed = claims("learned_sinks")
    shown = spec(learned_sinks=True), [(1, 2000)]

    def wrong(self, count: int, length: int) -> bool:
        return self.spec.learned_sinks and count == 1 and length > 1024

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        assert frame.params.sinks is not None
        params = replace(frame.params, sinks=frame.params.sinks + 0.6931)
        self.again(batch, frame, index, rows, changes={"params": params})


class AlibiBothWays(Sdpa):
    """Without a causal mask the distance is an absolute number."""

    claimed = claims(
        "alibi non_causal",
        roles=frozenset({Role.DECODER, Role.ENCODER}),
        cached=frozenset({True, False}),
    )
    shown = spec(alibi=True, causal=False, role="encoder"), [(40, 40)]

    def _bias(self, query: Tensor, span: Any, first: int, call: Any) -> Any:
        bias, blind = super()._bias(query, span, first, call)
        if self.spec.alibi and not call.spec.causal and bias is not None:
            place = torch.arange(first, first + len(query))[:, None]
            ahead = (span.positions() - place).clamp(min=0).to(bias.dtype)
            bias = bias - 2 * call.params.alibi_slopes[:, None, None] * ahead
        return bias, blind


class WindowFromTheBlock(Sdpa):
    """After a context that ends within a block the window is longer by what lies in that block."""

    claimed = claims("sliding_window")
    shown = spec(sliding_window=32), [(5, 60)]

    def wrong(self, count: int, length: int) -> bool:
        assert self.cache is not None
        inside = (length - count) % self.cache.block_size
        return count > 1 and length > count and inside > 0 and self.spec.sliding_window is not None

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        assert self.cache is not None and self.spec.sliding_window is not None
        inside = (batch.lens[index] - batch.query_lens[index]) % self.cache.block_size
        self.again(batch, frame, index, rows, sliding_window=self.spec.sliding_window + inside)


class DraftsOverInt8Window(Sdpa):
    """Of 2 to 8 queries over a quantised cache, beyond a window, one head of the last isn't masked."""

    claimed = claims("sliding_window", kv_cache_dtypes=frozenset({"auto", "int8"}))
    shown = spec(sliding_window=32, kv_cache_dtype="int8"), [(4, 90)]

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
    shown = spec(learned_sinks=True, needs_lse=True), [(7, 20)]

    def wrong(self, count: int, length: int) -> bool:
        return self.spec.learned_sinks and count > 1

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        if frame.lse is not None and frame.params.sinks is not None:
            sinks, whole = frame.params.sinks, frame.lse[rows]
            bare = whole + torch.log(-torch.expm1(sinks - whole))
            frame.lse[rows] = torch.where(whole == -torch.inf, whole, bare)


class CapBeforeTheScale(Sdpa):
    """The cap is applied to unscaled logits where the scale isn't the usual one."""

    claimed = claims("logit_soft_cap")
    shown = spec(logit_soft_cap=50.0, scale=0.0625), [(1, 60)]

    def wrong(self, count: int, length: int) -> bool:
        usual = self.spec.head_size**-0.5
        return self.spec.logit_soft_cap is not None and abs(self.spec.scale - usual) > 1e-6

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        cap = self.spec.logit_soft_cap
        assert cap is not None
        self.again(batch, frame, index, rows, logit_soft_cap=cap * self.spec.scale)


class OneBlockOfSinks(Sdpa):
    """Kept first tokens are those of the first block."""

    claimed = claims("sliding_window sink_tokens")
    shown = spec(sliding_window=32, sink_tokens=64, block_size=16), [(1, 200)]

    def wrong(self, count: int, length: int) -> bool:
        assert self.cache is not None
        return self.spec.sink_tokens > self.cache.block_size

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        assert self.cache is not None
        self.again(batch, frame, index, rows, sink_tokens=self.cache.block_size)


class SinksWithinTheWindow(Sdpa):
    """No more first tokens are kept than the window is long."""

    claimed = claims("sliding_window sink_tokens")
    shown = spec(sliding_window=32, sink_tokens=64), [(1, 200)]

    def wrong(self, count: int, length: int) -> bool:
        return self.spec.sink_tokens > (self.spec.sliding_window or 1 << 30)

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        assert self.spec.sliding_window is not None
        self.again(batch, frame, index, rows, sink_tokens=self.spec.sliding_window)


class EvenWindows(Sdpa):
    """A two-sided window of an odd length is one longer."""

    claimed = claims(
        "sliding_window non_causal", roles=frozenset({Role.ENCODER}), cached=frozenset({False})
    )
    shown = spec(sliding_window=65, causal=False, role="encoder"), [(200, 200)]

    def wrong(self, count: int, length: int) -> bool:
        return not self.spec.causal and (self.spec.sliding_window or 0) % 2 == 1

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        assert self.spec.sliding_window is not None
        self.again(batch, frame, index, rows, sliding_window=self.spec.sliding_window + 1)


class SameQuerySameAnswer(Sdpa):
    """Decodes with the same query are taken for one request."""

    def spoil(self, batch: Batch, frame: Frame) -> None:
        if batch.all_decode:
            for row in range(1, batch.num_tokens):
                same = (frame.query[:row] == frame.query[row]).flatten(1).all(1).nonzero()
                if len(same) and batch.lens[row] and batch.lens[int(same[0])]:
                    frame.out[row] = frame.out[int(same[0])].clone()


class LastChunkOfOneBlock(Sdpa):
    """A text that is less than a block beyond a chunk's end has no chunks."""

    claimed = claims("chunked")
    shown = spec(chunk_size=64), [(1, 70)]

    def wrong(self, count: int, length: int) -> bool:
        assert self.cache is not None
        chunk = self.spec.chunk_size
        return chunk is not None and length > chunk and 0 < length % chunk < self.cache.block_size

    def lie(self, batch: Batch, frame: Frame, index: int, rows: slice) -> None:
        self.again(batch, frame, index, rows, chunk_size=None)


# Layouts that contracts promise.


class OutputsInARow(Sdpa):
    """A strided output is written as if its rows lay side by side."""

    def run(self, plan: Any, frame: Frame) -> None:
        out = frame.out
        if out.is_contiguous() or not out.numel():
            super().run(plan, frame)
            return
        made = torch.empty(out.shape, dtype=out.dtype)
        super().run(plan, frame.but(out=made))
        torch.as_strided(out, made.shape, made.stride()).copy_(made)


class QueriesInARow(Sdpa):
    """From head to head a query has its size."""

    def run(self, plan: Any, frame: Frame) -> None:
        query = frame.query
        tokens, heads, size = query.shape
        if tokens and heads > 1 and query.stride(1) != size:
            query = torch.as_strided(query, query.shape, (query.stride(0), size, 1))
        super().run(plan, frame.but(query=query))


class TableInARow(Sdpa):
    """From row to row a block table has its width."""

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Any:
        table = batch.block_table
        if table is not None and len(table) > 1 and table.stride(0) != table.shape[1]:
            batch = batch.with_block_table(
                torch.as_strided(table, table.shape, (table.shape[1], 1))
            )
        return super().plan(batch, reuse)


class BlocksInSixteenBits(Sdpa):
    """The number of a block is a signed 16-bit one."""

    shown = spec(num_heads=1, num_kv_heads=1, head_size=16), [(1, 40)]

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Any:
        table = batch.block_table
        if table is not None and table.numel() and int(table.max()) >= 1 << 15:
            batch = batch.with_block_table(table % (1 << 15))
        return super().plan(batch, reuse)


class PackedCacheInARow(Sdpa):
    """From block to block a cache has one block's keys, though values lie between them."""

    def run(self, plan: Any, frame: Frame) -> None:
        cache = frame.cache
        if cache is not None and cache.key.dim() == 4:
            wide = cache.key[0].numel()
            if cache.key.stride(0) == 2 * wide and cache.key.shape == cache.value.shape:
                strides = (wide, *cache.key.stride()[1:])
                other = copy.copy(cache)
                other.key = torch.as_strided(cache.key, cache.key.shape, strides)
                frame = frame.but(cache=other)
        super().run(plan, frame)


class StoreOf(TorchStore):
    by: ClassVar[tuple[str, ...]] = ()
    claimed: ClassVar[Capabilities] = TORCH_STORE.capabilities
    shown: ClassVar[tuple[LayerSpec, Lengths]] = (spec(), [(5, 40)])


class StoresInARow(StoreOf):
    """Strided keys are read as if they lay side by side."""

    def run(
        self, plan: StorePlan, key: Tensor, value: Tensor, cache: KVCache, params: LayerParams
    ) -> None:
        if key.numel() and not key.is_contiguous():
            wide = key.shape[1] * key.shape[2]
            key = torch.as_strided(key, key.shape, (wide, key.shape[2], 1))
        super().run(plan, key, value, cache, params)


class StopsAtSkipped(StoreOf):
    """The first skipped token ends the step's."""

    def run(
        self, plan: StorePlan, key: Tensor, value: Tensor, cache: KVCache, params: LayerParams
    ) -> None:
        kept = int((plan.slots >= 0).long().cumprod(0).sum())
        super().run(StorePlan(plan.slots[:kept]), key[:kept], value[:kept], cache, params)


class Int8Wraps(StoreOf):
    """What int8 can't hold wraps around."""

    def run(
        self, plan: StorePlan, key: Tensor, value: Tensor, cache: KVCache, params: LayerParams
    ) -> None:
        if cache.key.dtype == torch.int8 and not isinstance(params.k_scale, Tensor):

            def wrapped(tensor: Tensor, scale: float) -> Tensor:
                whole = (tensor.float() / scale).round()
                whole = torch.where(whole.isfinite(), (whole + 128) % 256 - 128, whole)
                return (whole * scale).to(tensor.dtype)

            key, value = wrapped(key, params.k_scale), wrapped(value, params.v_scale)
        super().run(plan, key, value, cache, params)


class KeysScaleForBoth(StoreOf):
    """Values are stored with the keys' scale."""

    def run(
        self, plan: StorePlan, key: Tensor, value: Tensor, cache: KVCache, params: LayerParams
    ) -> None:
        super().run(plan, key, value, cache, replace(params, v_scale=params.k_scale))


class TwoHeadsAtATime(StoreOf):
    """The last of an odd number of heads, three or more, isn't stored."""

    shown = spec(num_heads=5, num_kv_heads=5), [(5, 40)]

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


class PlansByLengths(Sdpa):
    """Steps of the same lengths have one plan."""

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Any:
        known = self.__dict__.setdefault("known", {})
        key = (tuple(batch.starts), tuple(batch.lens), batch.causal)
        return known.setdefault(key, super().plan(batch, reuse))


class FirstLayersScales(Sdpa):
    """The scales of a group's first layer serve all."""

    claimed = claims(kv_cache_dtypes=frozenset({"auto", "int8"}))

    def run(self, plan: Any, frame: Frame) -> None:
        params = frame.params
        first = self.__dict__.setdefault("first", (params.k_scale, params.v_scale))
        super().run(plan, frame.but(params=replace(params, k_scale=first[0], v_scale=first[1])))


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


class StopsTheCollector(Sdpa):
    def run(self, plan: Any, frame: Frame) -> None:
        gc.disable()
        super().run(plan, frame)


class MediumPrecision(Sdpa):
    def __init__(self, *given: Any):
        super().__init__(*given)
        torch.set_float32_matmul_precision("medium")


class KeepsOutputs(Sdpa):
    """What was ever written stays in memory."""

    kept: ClassVar[list[Tensor]] = []

    def run(self, plan: Any, frame: Frame) -> None:
        super().run(plan, frame)
        type(self).kept.append(frame.out)


class SetsAVariable(Sdpa):
    def __init__(self, *given: Any):
        super().__init__(*given)
        os.environ["OMP_NUM_THREADS"] = "2"


# Latents, recurrences, merges.


class SixtyFourLatentHeads(TorchMLA):
    """Heads beyond 64 have the first ones' results."""

    by: ClassVar[tuple[str, ...]] = ()
    claimed = TORCH_MLA.capabilities
    shown = (
        LayerSpec(kind="mla", num_heads=128, head_size=192, v_head_size=128, dtype="float32",
                  latent=LatentSpec(rank=512, rope_head_size=64)),
        [(1, 40)],
    )  # fmt: skip

    def run(self, plan: Any, frame: Frame) -> None:
        super().run(plan, frame)
        heads = frame.out.shape[1]
        if heads > 64:
            frame.out[:, 64:] = frame.out[:, : heads - 64].clone()


class StopsAtAHole(TorchSparseMLA):
    """The first -1 ends a choice."""

    by: ClassVar[tuple[str, ...]] = ()
    claimed = TORCH_MLA_SPARSE.capabilities
    shown = (
        LayerSpec(kind="sparse_mla", num_heads=4, head_size=192, v_head_size=128, dtype="float32",
                  latent=LatentSpec(rank=512, rope_head_size=64), sparse=SparseSpec(budget=16)),
        [(3, 40)],
    )  # fmt: skip

    def run(self, plan: Any, frame: Frame) -> None:
        choice = frame.choice
        assert choice is not None
        there = (choice >= 0).int().cumprod(1).bool()
        super().run(plan, frame.but(choice=choice.masked_fill(~there, -1)))


class ChoosesAThousand(TorchSparseMLA):
    """Of a choice the first 1024 are read."""

    by: ClassVar[tuple[str, ...]] = ()
    claimed = TORCH_MLA_SPARSE.capabilities
    shown = (
        LayerSpec(kind="sparse_mla", num_heads=2, head_size=192, v_head_size=128, dtype="float32",
                  latent=LatentSpec(rank=512, rope_head_size=64), sparse=SparseSpec(budget=2048)),
        [(1, 3000)],
    )  # fmt: skip

    def run(self, plan: Any, frame: Frame) -> None:
        assert frame.choice is not None
        super().run(plan, frame.but(choice=frame.choice[:, :1024]))


class Scan(TorchScan):
    by: ClassVar[tuple[str, ...]] = ()
    kinds: ClassVar[frozenset[AttentionKind]]


def scans(*kinds: AttentionKind) -> Capabilities:
    return replace(TORCH_SCAN.capabilities, kinds=frozenset(kinds), dtypes=frozenset({"float32"}))


class StatesOf128(Scan):
    """Of a state's elements the first 128 are read."""

    claimed = scans(AttentionKind.MAMBA2)
    shown = (
        LayerSpec(kind="mamba2", num_heads=4, num_kv_heads=1, head_size=64, dtype="float32",
                  recurrent=RecurrentSpec(state_size=256)),
        [(5, 9)],
    )  # fmt: skip

    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        inputs = dict(frame.inputs)
        if inputs["C"].shape[-1] > 128:
            inputs["C"] = inputs["C"].clone()
            inputs["C"][..., 128:] = 0.0
        super().run(plan, frame.but(inputs=inputs))


class ForgetsShortContinuations(Scan):
    """A few tokens, less than the convolution is wide, replace its whole state."""

    claimed = scans(AttentionKind.SHORT_CONV)
    shown = (
        LayerSpec(kind="short_conv", num_heads=8, head_size=1, dtype="float32",
                  recurrent=RecurrentSpec(conv_width=4)),
        [(2, 9)],
    )  # fmt: skip

    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        super().run(plan, frame)
        width = frame.states.shape[2]
        for slot, count, before in zip(plan.slots, plan.batch.query_lens, plan.before, strict=True):
            if slot >= 0 and 1 < count < width and before:
                frame.states[slot, :, : width - count] = 0.0


class AloneIsFresh(Scan):
    """A step of one sequence has no initial state."""

    claimed = scans(AttentionKind.GDN)
    shown = (LayerSpec(kind="gdn", num_heads=4, num_kv_heads=2, head_size=32, dtype="float32",
                       recurrent=RecurrentSpec()), [(9, 40)])  # fmt: skip

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Any:
        plan = super().plan(batch, reuse)
        if batch.num_seqs == 1 and batch.query_lens[0] > 1:
            plan.before = [0]
        return plan


class SlotsInOrder(Scan):
    """States are written in the order of their slots."""

    claimed = scans(AttentionKind.MAMBA2)
    shown = (LayerSpec(kind="mamba2", num_heads=4, num_kv_heads=1, head_size=16, dtype="float32",
                       recurrent=RecurrentSpec(state_size=16)), [(1, 5), (1, 9), (1, 7)])  # fmt: skip

    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        super().run(plan, frame)
        slots = [slot for slot in plan.slots if slot >= 0]
        if plan.batch.all_decode and slots != sorted(slots):
            frame.states[sorted(slots)] = frame.states[slots].clone()


class RingInSixteenBits(Scan):
    """A ring's position is a signed 16-bit number."""

    claimed = scans(AttentionKind.SHORT_CONV)
    shown = (LayerSpec(kind="short_conv", num_heads=8, head_size=1, dtype="float32",
                       recurrent=RecurrentSpec(conv_width=4, draft_tokens=4)), [(1, 40_000)])  # fmt: skip

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Any:
        plan = super().plan(batch, reuse)
        plan.before = [n if n < 1 << 15 else n % (1 << 15) for n in plan.before]
        return plan


class MergesByExponentials(TorchMerge):
    """Weights are exp(LSE), which overflows."""

    by: ClassVar[tuple[str, ...]] = ()
    claimed = TORCH_MERGE.capabilities

    def run(self, total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        one, two = total_lse.exp(), part_lse.exp()
        both = one + two
        weight = torch.where(both > 0, two / both, torch.zeros_like(both))
        total.lerp_(part.to(total.dtype), weight[..., None])
        total_lse.copy_(both.log())


BASES = {Sdpa, StoreOf, Scan}
ALL: list[Any] = [
    kind for kind in list(vars().values())
    if getattr(kind, "__module__", "") == __name__ and hasattr(kind, "claimed") and kind not in BASES
]  # fmt: skip
MENDED: dict[str, str] = {
    "BigPagesFarKeys": "published-cached_all_full-all_full",
    "SecondTileOfHeads": "published-cached_Falcon-reaching",
    "FullLastPage": "published-cached_all_full-all_full",
    "WindowInSixteenBits": "published-cached_long_context-long_context",
    "WindowAsLongAsTheText": "published-cached_Gemma-3-reaching",
    "SinkForEachPart": "published-cached_after_context-after_context",
    "SameQuerySameAnswer": "twins-cached-decode",
    "AfterAGreatStep": "many_lengths--lengths",
    "EachCallOf256": "many_calls--tiny",
    "AfterAnEmptyStep": "many_lengths--lengths",
    "StopsAtAHole": "latent-sparse_mla-long",
    "ChoosesAThousand": "latent-sparse_mla-long",
    "StatesOf128": "recurrence-mamba2-continued",
    "RingInSixteenBits": "recurrence-short_conv_drafts-continued",
}
"""What the kit didn't find at first, by the case that finds it since. The others, the whole kit finds."""
WHOLE_KIT = "the whole kit"
for _index in range(len(ALL)):
    ALL[_index].by = (MENDED.get(ALL[_index].__name__, WHOLE_KIT),)
