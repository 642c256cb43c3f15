"""Where do all batches' tokens lie? In one cache, whatever isn't there yet NaN."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyattn.conformance.harness.attention import same_cache
from polyattn.conformance.harness.base import copied, poison, put
from polyattn.conformance.random_batches.compose import Composition
from polyattn.conformance.random_batches.functions import Brought
from polyattn.conformance.random_batches.tally import Tally
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.cache.scales import Scale
from polyattn.runtime.step.batch import Batch
from polyattn.selection.cache_format import CacheFormat


@dataclass
class Pages:
    """A cache that holds every batch's context, and what the batches store.

    - `key`, `value` (rows, …): what each query row stores, at `stored` (rows,); None stores nothing.
    - `held`: what the cache must hold after all batches.
    """

    cache: KVCache
    held: KVCache
    table: Tensor
    stored: Tensor | None
    key: Tensor
    value: Tensor

    @classmethod
    def of(
        cls,
        made: Composition,
        form: CacheFormat,
        key: Tensor,
        value: Tensor,
        scales: tuple[Scale, Scale],
        whole: bool = False,
    ) -> Pages:
        """Lay tokens out, `key` and `value` (tokens, …); `whole`: all are there before the steps."""
        device = key.device
        table, num_blocks = made.blocks(form.block_size)
        cache = KVCache.allocate(form, num_blocks, device)
        poison(cache)
        slots = torch.from_numpy(made.slots(table, form.block_size)).to(device)
        new, own = made.new_tokens()
        before = slots if whole else slots.masked_fill(torch.from_numpy(new).to(device), -1)
        put(cache, key, value, before, scales)
        held, rows, stored = copied(cache), torch.from_numpy(own).to(device), None
        if not len(slots):  # padding rows alone, and empty queries
            slots = torch.full((1,), -1, device=device)
            key, value = (t.new_zeros(1, *t.shape[1:]) for t in (key, value))
        key, value = key[rows], value[rows]
        if not whole:
            stored = slots[rows]
            stored[torch.from_numpy(np.repeat(made.padding, made.queries)).to(device)] = -1
            put(held, key, value, stored, scales)
        return cls(cache, held, torch.from_numpy(table).to(device), stored, key, value)

    def batches(
        self, made: Composition, brought: Brought | None = None
    ) -> Iterator[tuple[slice, Batch]]:
        """Return each batch and its query rows. `brought`: what its requests bring."""
        for index in range(made.count):
            seqs, rows = made.batch(index)
            starts = (made.row_starts[seqs.start : seqs.stop + 1] - rows.start).tolist()
            stored = None if self.stored is None else self.stored[rows]
            step = {} if brought is None else brought.step(made.request[seqs])
            yield rows, Batch(starts, made.lens[seqs].tolist(), self.table[seqs], stored, **step)

    def check(self, what: str, tally: Tally) -> None:
        """Count it as a failure where the cache doesn't hold what it must."""
        try:
            same_cache(self.cache, self.held, self.stored)
        except AssertionError as error:
            tally.fail(f"{what}: {error}")
