"""`ContextGroup` plans a step of several ranks. Each rank plans its own part of one batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal, TypeVar, cast, get_args

import torch
from polyattn import Batch, KVCache, LayerGroup, Role, StepPlan
from polyattn.errors import BatchError, SpecError, nearest
from polyattn.host import Op, by_phase
from torch import Tensor

from polyattn_context_parallel.heads import ByHeads
from polyattn_context_parallel.keys import (
    Layout,
    anchored,
    collected,
    held,
    masked,
    order_matters,
    plain_group,
)
from polyattn_context_parallel.merging import Merging, OverRanks
from polyattn_context_parallel.ops import Attend, GatherKeys, Room, ShareQueries, StoreKeys
from polyattn_context_parallel.ranks import ContextParallel, ParallelError
from polyattn_context_parallel.ring import Ring, RingKernels
from polyattn_context_parallel.shards import Blocks, Shares, Zigzag

Keys = Literal["blocks", "heads", "placed"]
Prefill = Literal["all_gather", "ring", "star"]
Merge = Literal["all_gather", "all_to_all"]
Queries = Literal["all", "own"]
T = TypeVar("T")


class ContextPlan(StepPlan):
    """A step of one `ContextGroup`: made once, run by each of its layers, on every rank.

    `batch`: the step's batch. `tokens`: the rows that each layer takes on this rank.
    `by_heads`: whether a layer returns only this rank's heads.
    """

    def __init__(
        self, shared: ContextGroup, batch: Batch, tokens: int, by_heads: bool, ops: list[Op]
    ):
        # The table is in the engine's blocks, so it stays out. The parts' plans check their own tables.
        super().__init__(shared.group, Batch(batch.starts, batch.lens, device=batch.device), ops)
        self.shared, self.batch = shared, batch
        self.tokens, self.by_heads = tokens, by_heads


class ContextGroup:
    """A `LayerGroup` whose sequences lie on several ranks. Every rank builds it at the same time.

    - `group`: of a decoder's causal layer with `needs_lse=True` (states can't merge without). With
      `keys="heads"`: of `heads_of_rank(spec, context.size)`.
    - `keys`: `"blocks"`: each rank holds its part of every block of `block_size` tokens, and the
    batch is the
      same on all ranks. `"heads"`: each rank holds all keys of its own heads. `"placed"`: the
      engine says where keys are, and each rank's batch speaks of its own.
    - `prefill`: how rows of several tokens are served that each rank has some of (`queries="own"`):
      `"all_gather"`; `"ring"`, for whole prompts; `"star"`, Star Attention's first phase, for
      placed keys.
    - `merge`: `"all_gather"` gives every rank all heads; `"all_to_all"` its own heads alone.

    Raises `SpecError` for what can't be served so, `ParallelError` where the ranks disagree.
    """

    def __init__(
        self,
        group: LayerGroup,
        context: ContextParallel,
        *,
        keys: Keys = "blocks",
        prefill: Prefill = "all_gather",
        merge: Merge = "all_gather",
    ):
        self.group, self.context, self.spec = group, context, group.spec
        self.keys, self.prefill, self.merge = keys, prefill, merge
        self.dtype: torch.dtype = getattr(torch, self.spec.dtype)
        error: Exception | None = None
        try:
            self._check()
            self._load()
        except Exception as failure:
            error = failure
        note = f"{self.spec.to_json()} {group.cache_format} {keys} {prefill} {merge}"
        digest = hashlib.sha256(note.encode()).hexdigest()[:8]
        words = f"{self.spec}, keys={keys!r}, prefill={prefill!r}, merge={merge!r}, {digest}"
        context.agree("the layer", words, error)

    def _check(self) -> None:
        for name, kinds in (("keys", Keys), ("prefill", Prefill), ("merge", Merge)):
            value = getattr(self, name)
            if value not in get_args(kinds):
                raise SpecError(f"{name}={value!r} is unknown{nearest(value, get_args(kinds))}")
        why = self._why_not()
        if why is not None:
            raise SpecError(f"{self.spec} over {self.context.size} ranks: {why}")

    def _why_not(self) -> str | None:
        """Return why this arrangement can't serve the layer, with a remedy, or None."""
        spec, size, ring = self.spec, self.context.size, self.prefill == "ring"
        place, by_heads = order_matters(spec), self.keys == "heads"
        whole = "use prefill='all_gather'"
        refusals = {
            "it has no keys to shard by sequence; run it whole on every rank":
                spec.kind.is_recurrent,
            "its tokens choose among keys of the whole sequence; run it whole on every rank":
                spec.sparse is not None,
            "dense_context: a piece of a prompt sees other keys than the whole one; use keys='heads'":
                not by_heads and spec.dense_context,
            "only a decoder's causal layer over a cache can be sharded":
                not spec.cached or spec.role is not Role.DECODER or not spec.causal,
            "qkv_dtype and out_dtype in 8 bits: states merge in the layer's own dtype":
                (spec.qkv_dtype, spec.out_dtype) != ("auto", "auto"),
            "its functions of scores, or a step's mask, refer to whole sequences and all heads":
                spec.has_functions,
            "length_bounds: ranks plan by exact lengths on the host; leave it out":
                spec.length_bounds,
            "its keys are rotated by their places in one cache":
                spec.rope is not None and spec.rope.positions == "cache",
            "states can't merge without their LSE; use spec.replace(needs_lse=True)":
                not by_heads and not spec.needs_lse,
            f"num_heads={spec.num_heads} isn't a multiple of the ranks, as merge='all_to_all' needs":
                not by_heads and self.merge == "all_to_all" and spec.num_heads % size > 0,
            f"{place}: a key's part depends on its place, which a ring's pieces lose; {whole}":
                ring and place is not None,
            f"{place}: a key's part depends on its place, which is the engine's; use keys='blocks'":
                self.keys == "placed" and place is not None,
            f"a ring passes keys, and MLA has latents; {whole}": ring and spec.latent is not None,
            f"a ring is for keys='blocks'; {whole}": ring and self.keys != "blocks",
            "prefill='star' leaves each part's keys where they are; use keys='placed'":
                self.prefill == "star" and self.keys != "placed",
        }  # fmt: skip
        return next((why for why, holds in refusals.items() if holds), None)

    def _load(self) -> None:
        """Load the backends of the layer's steps now, so that a missing one raises here."""
        assert self.group.cache_format is not None
        size = self.group.cache_format.block_size
        self.blocks = Blocks(size, self.context.rank, self.context.size)
        self.room = Room(self.group)
        if self.keys == "heads":
            return
        self.merging = Merging(self.group, self.context, self.merge == "all_to_all")
        if self.keys == "placed":
            self.states = plain_group(self.group)
            return
        self.states = plain_group(self.group, masked=False)
        # No backend's row expresses a window and ALiBi at once, so the keys of such rows are collected.
        self.decodes = not (masked(self.spec) and self.spec.alibi)
        self.ring = RingKernels(self.group, self.room) if self.prefill == "ring" else None

    @cached_property
    def unmasked(self) -> LayerGroup:
        """The group for several new tokens that see all keys."""
        return plain_group(self.group, causal=False)

    @property
    def block_size(self) -> int:
        """Tokens of a block in the batch's count. With `keys="blocks"`, all ranks' tokens of it."""
        return self.blocks.engine_block if self.keys == "blocks" else self.blocks.block_size

    def allocate_cache(self, num_blocks: int) -> KVCache:
        """Return this rank's part of a layer's cache of `num_blocks` blocks. Raises `CacheError`."""
        return self.group.allocate_cache(num_blocks)

    def input_shapes(self, query_size: int, key: Tensor | None) -> dict[str, tuple[int, ...]]:
        """Return the shape of a token's query, key and value: with `keys="heads"` of all ranks' heads."""
        spec, heads, kv = self.spec, self.spec.num_heads, self.spec.num_kv_heads
        if self.keys == "heads":
            heads *= self.context.size
            kv = key.shape[1] if key is not None else kv  # neighbours may have the same one
        keys: Sequence[tuple[int, ...]] = ((kv, spec.head_size), (kv, spec.v_head_size))
        if spec.latent is not None:
            keys = (spec.latent.rank,), (spec.latent.rope_head_size,)
        return {"query": (heads, query_size), "key": keys[0], "value": keys[1]}

    def tokens(self, batch: Batch) -> Tensor:
        """Return which of the step's tokens this rank has with `queries="own"`, int64, in order."""
        positions = Zigzag.of(batch, self.context.size).tokens(self.context.rank)
        return torch.from_numpy(positions).to(batch.device)

    def plan(self, batch: Batch, queries: Queries = "all") -> ContextPlan:
        """Prepare one step for every layer, on every rank at the same time.

        `batch`: the step, its block table and slots in blocks of `block_size`; the same on all
        ranks, but with placed keys. `queries`: `"all"` where every rank has all tokens of the step
        and gets all outputs; `"own"` where each has its `tokens(batch)` alone. Raises `BatchError`,
        `ParallelError`.
        """
        self.context.check()
        note, anchors = self._note(batch, queries), list[int]()
        if self.keys == "placed":
            self._together("the step", note, lambda: self._check_batch(batch, queries))
            if queries == "own":
                anchors = self.context.numbers(batch.lens)[0]
            else:
                self._check_one_stores(batch)
        return self._together("the step", note, lambda: self._plan(batch, queries, anchors))

    def _together(self, what: str, note: str, make: Callable[[], T]) -> T:
        """Return `make()` if it succeeds on every rank and all ranks' notes agree."""
        context, result, error = self.context, None, None
        try:
            result = make()
        except Exception as failure:
            error = failure
        if context.checks:
            context.agree(what, note, error)
        elif error is not None:
            context.break_off(error)
            raise error
        return cast(T, result)

    def _check_batch(self, batch: Batch, queries: str) -> None:
        if queries not in get_args(Queries):
            raise BatchError(f"queries={queries!r} is unknown{nearest(queries, get_args(Queries))}")
        if batch.mask is not None:
            raise BatchError("mask: a step over several ranks can't bring one; leave it out")
        if batch.lens_are_bounds:
            raise BatchError(
                "seq_lens are bounds: ranks plan by lengths; pass exact=True with them"
            )
        if self.keys == "placed" and queries == "own" and self.prefill != "star":
            raise BatchError(
                "placed keys with queries='own' are Star Attention's first phase; "
                "pass prefill='star' to ContextGroup"
            )
        if self.keys != "placed" or queries == "own" or batch.slot_mapping is not None:
            batch.check_queries()  # else the new tokens are another rank's
        batch.check_pages(self.block_size)

    def _note(self, batch: Batch, queries: str) -> str:
        """Describe the parts of this rank's plan that all ranks must share."""
        same = [queries, batch.num_seqs]
        if self.keys != "placed":
            same += [batch.starts, batch.lens, batch.slot_mapping is None]
        elif queries == "all":
            same += [batch.starts]
        digest = hashlib.sha256(repr(same).encode()).hexdigest()[:8]
        words = f"queries={queries!r}, {batch.num_seqs} sequences"
        if self.keys != "placed":
            words += f", query lengths {batch.query_lens[:6]}, seq_lens {batch.lens[:6]}"
            words += ", without slots" * (batch.slot_mapping is None)
        return f"{words}, {digest}"

    def _check_one_stores(self, batch: Batch) -> None:
        """Check that exactly one rank stores each new token. Raises `ParallelError`."""
        brought = self.context.numbers([batch.slot_mapping is not None])
        storing = [rank for rank, (n,) in enumerate(brought) if n]
        if len(storing) != 1:
            raise ParallelError(
                f"ranks {storing} bring slot_mapping; one rank, and no other, must keep the new tokens"
            )

    def _plan(self, batch: Batch, queries: str, anchors: list[int]) -> ContextPlan:
        self._check_batch(batch, queries)
        own, tokens = queries == "own", batch.num_tokens
        by_heads = self.merge == "all_to_all" and not own
        if self.keys == "heads":
            shares = Shares(batch, self.context)
            ops: list[Op] = [ByHeads(self.group.plan(batch), shares, own, by_heads)]
        elif self.keys == "placed":
            op = anchored(self.room, self.context, batch, anchors) if own else self._placed(batch)
            ops = [*self._stores(batch.slot_mapping), op]
        elif own and self.ring is not None:
            ops = [Ring(self.ring, self.context, self.blocks, batch)]
        else:
            slots = batch.slot_mapping
            ops = self._stores(None if slots is None else self.blocks.slots(slots))
            if own:
                ops.insert(0, GatherKeys(Shares(batch, self.context)))
                ops.append(collected(self.room, self.context, self.blocks, batch))
            else:
                ops += self._parts(batch)
        if own and self.keys != "placed":
            tokens = Zigzag.of(batch, self.context.size).counts[self.context.rank]
        return ContextPlan(self, batch, tokens, by_heads, ops)

    def _stores(self, slots: Tensor | None) -> list[Op]:
        return [] if slots is None else [StoreKeys(self.group, slots)]

    def _placed(self, batch: Batch) -> Op:
        """Plan placed keys. Every rank has all queries and its own keys; one rank stores the new ones."""
        several = batch.max_query_len > 1
        if several and self.spec.latent is not None:
            raise BatchError(
                "rows of several tokens over placed latents: an MLA layer takes them a token at a time, "
                "or with keys='blocks'"
            )
        group = self.unmasked if several and batch.slot_mapping is None else self.states
        mine = Batch(batch.starts, batch.lens, batch.block_table, device=batch.device)
        return OverRanks(Attend(group.plan(mine)), self.merging)

    def _parts(self, batch: Batch) -> list[Op]:
        """Split a step that every rank has whole into rows of one token and longer rows."""
        phases, ops = by_phase(batch), list[Op]()
        for part in (phases.decode, phases.prefill):
            if part is None or not part.batch.num_tokens:
                continue
            if part is phases.decode and self.decodes:
                op = held(self.states, self.room, part.batch, self.blocks, self.spec)
                ops.append(OverRanks(op, self.merging, part.rows))
            else:
                shares, by_heads = Shares(part.batch, self.context), self.merge == "all_to_all"
                op = collected(self.room, self.context, self.blocks, part.batch)
                ops.append(ShareQueries(op, shares, by_heads, part.rows))
        return ops

    def collected(self, cache: KVCache, batch: Batch) -> tuple[KVCache, Batch]:
        """Return the sequences' keys of all ranks, in order, as a cache and a batch over it.

        For checks and other processes. Every rank calls it. The result is valid until the next step.
        """
        layout = Layout.of(self.context, batch, self.blocks, [range(0)] * batch.num_seqs, new=False)
        room = self.room.take(layout.num_blocks)
        layout.fetch(cache, room)
        return room, Batch(batch.starts, batch.lens, layout.table, device=batch.device)

    def __repr__(self) -> str:
        return f"<ContextGroup: {self.spec}, keys={self.keys!r}; {self.context!r}>"
