"""Leases of wrappers. FlashInfer stores a step's plan in a wrapper, so each plan leases its own."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from polyattn.kernel import CacheFormat, LayerSpec, Plan

from polyattn_cuda.paging import Room, num_pages

WORKSPACE_BYTES = 128 << 20
"""FlashInfer's recommended workspace for parts of split keys. Each group has at least this much."""
MOST_IDLE = 32
"""Wrappers that wait for a plan; each keeps 8 MB of the device's memory and of the host's."""

LEAST_SCALE = 2.0**-10
"""Of logits. FlashInfer's are -5e4 where a key is hidden, before the scale: that must not weigh."""


def raising(scale: float) -> float:
    """Return the power of two that raises a scale to `LEAST_SCALE`, 1 for one that isn't below it."""
    return 2.0 ** max(0, math.ceil(math.log2(LEAST_SCALE / scale)))


class Lease:
    """A wrapper that one plan has for itself; `capacity`: pages that its own buffers hold.

    `room`: where a captured step's pages are gathered.
    """

    __slots__ = ("capacity", "copied", "device", "room", "wrapper")

    def __init__(self, wrapper: Any, capacity: int, device: torch.device):
        self.wrapper, self.capacity, self.device = wrapper, capacity, device
        self.room = Room.of(capacity, device) if capacity else None
        self.copied = torch.cuda.Event() if device.type == "cuda" else None

    @property
    def landed(self) -> bool:
        """Whether the device has fetched the last plan."""
        return self.copied is None or bool(self.copied.query())

    def plan(self, *args: Any, **options: Any) -> None:
        """Plan a step. The wrapper writes it to page-locked memory, which the device reads later.

        So what was planned before must have landed.
        """
        if self.copied is not None:
            self.copied.synchronize()
        self.wrapper.plan(*args, **options)
        if self.copied is not None:
            self.copied.record(torch.cuda.current_stream(self.device))


class WrapperPool:
    """A backend's wrappers, by what they are for. One comes back when its plan is collected.

    `make(kind, capacity)` builds a new one.
    """

    def __init__(self, make: Callable[[Any, int], Any], device: torch.device):
        self.make, self.device = make, device
        self.idle: list[tuple[Any, Lease]] = []

    def lease(self, owner: Plan, kind: Any, pages: int = 0) -> Lease:
        """Return a wrapper of `kind` whose buffers hold `pages`, for as long as `owner` lives."""
        free = self._take(kind, pages)
        if free is None:
            capacity = 1 << (pages - 1).bit_length() if pages else 0
            free = Lease(self.make(kind, capacity), capacity, self.device)
        weakref.finalize(owner, self.give_back, kind, free).atexit = False
        return free

    def lease_of_step(
        self, plan: Any, reuse: Any, spec: LayerSpec, cache: CacheFormat | None
    ) -> Lease:
        """Return the wrapper of a step of decodes: the captured plan's `reuse`, or one of its own.

        A captured step's has buffers for its sequences and their pages.
        """
        if reuse is not None:
            lease: Lease = reuse.lease
            return lease
        if not spec.graph_capture:
            return self.lease(plan, "decode")
        assert cache is not None
        pages = num_pages(plan.batch, cache.block_size)
        return self.lease(plan, ("decode", plan.batch.num_seqs), max(1, pages))

    def give_back(self, kind: Any, lease: Lease) -> None:
        """Store a wrapper for the next plan. If too many are idle, the oldest is dropped."""
        self.idle.append((kind, lease))
        if len(self.idle) > MOST_IDLE and self.idle[0][1].landed:
            self.idle.pop(0)

    def _take(self, kind: Any, pages: int) -> Lease | None:
        for index, (what, lease) in enumerate(self.idle):
            if what == kind and lease.capacity >= pages and lease.landed:
                del self.idle[index]
                return lease
        return None
