"""Checks a batch against the contract: the host's numbers always, the tensors' values on request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from polyattn.errors import BatchError
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.shared_prefix import check_shared_blocks
from polyattn.spec.key_ranges import key_ranges

if TYPE_CHECKING:
    from polyattn.runtime.cache.kv_cache import KVCache
    from polyattn.spec.layer import LayerSpec


def check_positions(batch: Batch, axes: int) -> None:
    """Check the positions of tokens that a layer rotates. Raises `BatchError`.

    `axes`: those of a position. For text, one number for each token stands for every axis.
    """
    if batch.positions is None or batch.positions.dim() == 1:
        return
    if batch.positions.shape[0] != axes:
        many = f"positions of {axes} axes, as rope.sections has" if axes > 1 else "one axis"
        raise BatchError(
            f"positions has shape {tuple(batch.positions.shape)}; the layer's rotary embedding takes "
            f"{many}: ({f'{axes}, ' if axes > 1 else ''}{batch.num_tokens}{',' * (axes == 1)})"
        )


def check_bounds(spec: LayerSpec, batch: Batch) -> None:
    """Check that a layer of keys that goes by the host's lengths gets none that are bounds.

    On a CPU alone, where the buffer's lengths cost nothing to read. Raises `BatchError`.
    """
    bounded = spec.length_bounds or spec.graph_capture or spec.kind.is_recurrent
    if bounded or batch.seq_lens.device.type != "cpu":
        return
    for index, (most, length) in enumerate(zip(batch.lens, batch.seq_lens.tolist(), strict=False)):
        if most != length:
            raise BatchError(
                f"seq_lens[{index}]={length} in the buffer, {most} on the host; the layer goes by the "
                "host's; pass the lengths, or set length_bounds=True in its spec"
            )


def blocks_of_table(spec: LayerSpec, batch: Batch, cache: KVCache) -> int:
    """Return how many blocks a cache must have for a block table that lies on the host.

    Raises `BatchError` where that is more than `cache` has. Only entries that the step reads count; what
    others hold costs a closer look.
    """
    assert batch.block_table is not None
    size, blocks = cache.block_size, cache.num_blocks
    table = batch.block_table.numpy()[:, : -(-batch.max_seq_len // size)]
    numbers = table.view(np.uint32)  # a negative number is a large one
    most = int(numbers.max(initial=0))
    if most < blocks:
        return most + 1
    rows, columns = np.nonzero(numbers >= blocks)
    per_entry = 1 if spec.sparse is None else spec.sparse.tokens_per_entry
    queries, lens = np.array(batch.query_lens)[rows], np.array(batch.lens)[rows] // per_entry
    start, kept, near, stop = key_ranges(
        spec, lens - queries, lens - 1, lens, np.minimum, np.maximum
    )
    first, end = columns * size, columns * size + size
    read = (np.maximum(first, start) < np.minimum(end, kept)) | (
        np.maximum(first, near) < np.minimum(end, stop)
    )
    for at in np.flatnonzero(read & (queries > 0))[:1]:
        place = int(rows[at]), int(columns[at])
        raise BatchError(
            f"block_table[{place[0]}, {place[1]}]={table[place]} points outside the cache's "
            f"{blocks} blocks"
        )
    return blocks


def check_on_device(batch: Batch, num_blocks: int, block_size: int) -> None:
    """Check a batch's block table and slots by their values, which costs a copy to the host.

    Args:
        batch: the step.
        num_blocks: blocks of the cache.
        block_size: tokens of a block.

    Raises:
        BatchError: a block or a slot lies outside the cache, two tokens have one slot, or
            `host_block_table` isn't the table of the device.

    Examples:
        >>> table = torch.tensor([[9]], dtype=torch.int32)
        >>> check_on_device(Batch.from_lens([1], [5], table, 16), num_blocks=4, block_size=16)
        Traceback (most recent call last):
        polyattn.errors.BatchError: block_table[0, 0]=9 points outside the cache's 4 blocks

    """
    if batch.block_table is not None:
        table = batch.block_table.cpu()
        host = batch.host_block_table
        for index, length in enumerate(batch.lens):
            row = table[index, : -(-length // block_size)]
            bad = ((row < 0) | (row >= num_blocks)).nonzero()
            if bad.numel():
                at = int(bad[0])
                raise BatchError(
                    f"block_table[{index}, {at}]={int(row[at])} points outside the cache's "
                    f"{num_blocks} blocks"
                )
            theirs = row.numpy() if host is None else host[index, : len(row)]
            differs = np.flatnonzero(theirs != row.numpy())
            if len(differs):
                at = int(differs[0])
                raise BatchError(
                    f"host_block_table[{index}, {at}]={theirs[at]}, where block_table has "
                    f"{int(row[at])}; pass the same table, or leave host_block_table out"
                )
        if batch.shared_prefix is not None:
            check_shared_blocks(batch.shared_prefix, table.numpy())
    if batch.slot_mapping is None:
        return
    slots = batch.slot_mapping.cpu()
    if batch.positions is not None:
        bad = ((batch.positions.cpu() < 0) & (slots >= 0)).nonzero()
        if bad.numel():
            at = int(bad[0, -1])
            raise BatchError(f"positions is negative for token {at}; positions count from 0")
    bad = ((slots < -1) | (slots >= num_blocks * block_size)).nonzero()
    if bad.numel():
        at = int(bad[0])
        raise BatchError(
            f"slot_mapping[{at}]={int(slots[at])} is out of range: the cache has "
            f"{num_blocks * block_size} slots, and -1 skips"
        )
    each, count = slots[slots >= 0].unique(return_counts=True)
    if (count > 1).any():
        raise BatchError(
            f"slot_mapping writes slot {int(each[count > 1][0])} twice in one step; each new token "
            "needs a slot of its own"
        )
    for index, (query, length) in enumerate(zip(batch.query_lens, batch.lens, strict=True)):
        first = batch.starts[index]
        if length == 0 and bool((slots[first : first + query] != -1).any()):
            raise BatchError(
                f"seq_lens[{index}]=0 is shorter than its query of {query} token{'s' * (query > 1)}; a "
                f"padding row's slots must be -1, not {slots[first : first + query].tolist()[:4]}"
            )


def check_state_slots(batch: Batch, num_slots: int) -> None:
    """Check the values of `state_slots`; costs a copy to the host. Raises `BatchError`."""
    assert batch.state_slots is not None
    slots = batch.state_slots.tolist()
    taken: dict[int, int] = {}
    for index, slot in enumerate(slots):
        padding = batch.query_lens[index] > 0 and batch.lens[index] == 0
        padding = padding or (batch.lens_are_bounds and slot == -1)
        if not -1 <= slot < num_slots or (slot == -1) != padding:
            raise BatchError(
                f"state_slots[{index}]={slot}: there are {num_slots} slots, and -1 is for padding rows "
                "(query tokens, length 0)"
            )
        if slot in taken and slot != -1 and batch.state_targets is None:
            raise BatchError(
                f"state_slots[{index}]={slot} is sequence {taken[slot]}'s too; each needs its own"
            )
        taken[slot] = index
    if batch.state_targets is not None:
        _check_state_targets(batch, batch.state_targets, num_slots)


def _check_state_targets(batch: Batch, targets: torch.Tensor, num_slots: int) -> None:
    """Check that the states of all tokens, or of all sequences, have distinct slots."""
    taken: dict[int, str] = {}
    assert batch.state_slots is not None
    slots = batch.state_slots.tolist()
    sources = {slot: index for index, slot in enumerate(slots) if slot >= 0}
    shared = {slot for slot in slots if slots.count(slot) > 1}
    for index, row in enumerate(targets.view(batch.num_seqs, -1).tolist()):
        wanted = batch.query_lens[index] if slots[index] >= 0 else 0
        if targets.dim() == 1:
            wanted = min(wanted, 1)
        for token, slot in enumerate(row):
            what = f"state_targets[{index}{f', {token}' * (targets.dim() == 2)}]"
            missing = slot < 0 and token < wanted and not batch.lens_are_bounds
            if not -1 <= slot < num_slots or (slot >= 0 and token >= wanted) or missing:
                raise BatchError(
                    f"{what}={slot}: there are {num_slots} slots; each of a sequence's {wanted} "
                    f"states has one, and entries after them are -1"
                )
            if slot in sources and (sources[slot] != index or slot in shared):
                raise BatchError(
                    f"{what}={slot} is the slot that sequence {sources[slot]} starts from; only "
                    f"that sequence may write to it"
                )
            if slot in taken and slot >= 0:
                raise BatchError(f"{what}={slot} is {taken[slot]} too; each state needs its own")
            taken[slot] = what
