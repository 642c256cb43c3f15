"""A rank's ops around attention, over a layer's frame. They run as core's own ops do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from polyattn import KVCache, LayerGroup, StepPlan
from polyattn.host import Frame, Op, Rows, StoreBackend
from torch import Tensor

from polyattn_context_parallel.shards import Shares


class StoreKeys(Op):
    """New keys and values go to the frame's cache. `slots` int64 (num_tokens,), -1 skips."""

    def __init__(self, group: LayerGroup, slots: Tensor):
        self.store = group.backend("store", StoreBackend, cache=group.cache_format)
        self.plan = self.store.plan(slots.long())

    def run(self, frame: Frame) -> None:
        if frame.key is not None and frame.value is not None:
            assert frame.cache is not None
            self.store.run(self.plan, frame.key, frame.value, frame.cache, frame.params)


class Attend(Op):
    """Runs a plan of this rank's own over the keys in the frame's cache.

    `sinks`: whether learned sinks join here. Where states merge, sinks join once, over all ranks.
    """

    def __init__(self, plan: StepPlan, sinks: bool = False):
        self.plan, self.sinks, self.inner = plan, sinks, (plan,)

    def run(self, frame: Frame) -> None:
        params = frame.params if self.sinks else replace(frame.params, sinks=None)
        self.plan.run(frame.but(key=None, value=None, params=params))


class Room:
    """A cache for collected keys. A group's layers share it, and it grows with a step's need."""

    def __init__(self, group: LayerGroup):
        self.group = group
        self._cache: KVCache | None = None

    def take(self, num_blocks: int) -> KVCache:
        """Return a cache of at least this many blocks, with arbitrary content."""
        if self._cache is None or self._cache.num_blocks < num_blocks:
            self._cache = None  # frees the old cache before the new one is allocated
            self._cache = self.group.allocate_cache(max(num_blocks, 1))
        return self._cache


class InRoom(Op):
    """An op over keys that are collected, in order, in a cache that lasts for the call.

    `fetch(frame, inner)` copies other ranks' keys to the inner frame's cache. `slots` int64
    (num_tokens,): where the frame's own keys go there.
    """

    def __init__(
        self,
        op: Op,
        room: Room,
        num_blocks: int,
        fetch: Callable[[Frame, Frame], None] | None = None,
        slots: Tensor | None = None,
    ):
        self.op, self.room, self.num_blocks, self.fetch = op, room, num_blocks, fetch
        self.store = None if slots is None else StoreKeys(room.group, slots)
        self.inner = (op,)

    def run(self, frame: Frame) -> None:
        inner = frame.but(cache=self.room.take(self.num_blocks))
        if self.fetch is not None:
            self.fetch(frame, inner)
        if self.store is not None:
            self.store.run(inner)
        self.op.run(inner)


class GatherKeys(Op):
    """Gathers the keys of all ranks' tokens into the frame."""

    def __init__(self, shares: Shares):
        self.shares = shares

    def run(self, frame: Frame) -> None:
        frame.key, frame.value = keys_by(self.shares.all_tokens, frame)


class ShareQueries(Op):
    """Runs an op over this rank's share of the queries; every rank gets all outputs.

    `by_heads`: each rank gets only its own heads.
    """

    def __init__(self, op: Op, shares: Shares, by_heads: bool, rows: Rows):
        self.op, self.shares, self.by_heads, self.rows = op, shares, by_heads, rows
        self.inner = (op,)

    def run(self, frame: Frame) -> None:
        inner = room_for_out(frame.but(query=frame.query[self.shares.mine]), frame)
        self.op.run(inner)
        change = self.shares.all_tokens
        write_out(
            frame, inner, lambda t: self.shares.own_heads(change(t)) if self.by_heads else change(t)
        )


def keys_by(change: Callable[[Tensor], Tensor], frame: Frame) -> tuple[Any, Any]:
    """Return a frame's keys and values after `change`. A latent's value is its key's first part."""
    if frame.key is None or frame.value is None:
        return None, None
    key = change(frame.key)
    if frame.cache is not None and frame.cache.value_in_key:
        return key, key[..., : frame.value.shape[2]]
    return key, change(frame.value)


def room_for_out(inner: Frame, like: Frame) -> Frame:
    """Give `inner` an output and an LSE of its own, for its query."""
    query = inner.query
    inner.out = like.out.new_empty(*query.shape[:2], like.out.shape[2])
    inner.lse = None if like.lse is None else like.lse.new_empty(query.shape[:2])
    return inner


def write_out(frame: Frame, inner: Frame, change: Callable[[Tensor], Tensor]) -> None:
    """Write what another frame's output and LSE become."""
    frame.out.copy_(change(inner.out))
    if frame.lse is not None and inner.lse is not None:
        frame.lse.copy_(change(inner.lse))
