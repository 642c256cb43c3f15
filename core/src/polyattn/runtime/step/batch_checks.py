"""Does a batch keep the contract? What the host knows is checked always, the tensors' values if asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from polyattn.errors import BatchError, shown
from polyattn.runtime.inputs import check_is_tensor, same_device
from polyattn.runtime.step.shared_prefix import check_shared_blocks
from polyattn.spec.checks import LONGEST
from polyattn.spec.key_ranges import key_ranges

if TYPE_CHECKING:
    from polyattn.runtime.cache.kv_cache import KVCache
    from polyattn.runtime.step.batch import Batch
    from polyattn.spec.layer import LayerSpec


LARGEST = (1 << 31) - 1
Integers = np.ndarray[Any, np.dtype[np.int64]]


def integers(name: str, values: Any) -> list[int]:
    """Return a list of Python's integers, of a sequence or a tensor. Raises `BatchError`."""
    if isinstance(values, torch.Tensor):
        if values.dim() != 1 or values.dtype not in (torch.int32, torch.int64):
            raise BatchError(
                f"{name} is {values.dtype} of shape {tuple(values.shape)}; it must be one-dimensional "
                "int32"
            )
        return list(values.tolist())
    if not isinstance(values, (Sequence, np.ndarray)) or isinstance(values, (str, bytes)):
        raise BatchError(f"{name}={shown(values)} must be a list of integers, or an int32 tensor")
    if isinstance(values, np.ndarray) and values.ndim != 1:
        raise BatchError(f"{name} has shape {values.shape}; it must be one-dimensional")
    found = list(values) if not isinstance(values, np.ndarray) else values.tolist()
    for index, value in enumerate(found if set(map(type, found)) - {int} else ()):
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
            remedy = "; .tolist() has a tensor's" if isinstance(value, torch.Tensor) else ""
            raise BatchError(f"{name}[{index}]={shown(value)} must be an integer{remedy}")
        found[index] = int(value)
    return found


def on_host(name: str, values: list[int]) -> Integers:
    """Return integers as int64, NumPy. Raises `BatchError` where kernels can't count so far."""
    try:
        found = np.array(values, np.int64)
    except OverflowError:
        found = None
    if found is None or found.max(initial=0) > LARGEST:
        raise BatchError(f"{name} has {max(values)}; kernels count tokens in int32, {LARGEST}")
    return found


def check_lengths(starts: Integers, lens: Integers) -> None:
    """Check that starts never decrease and lengths are not negative. Raises `BatchError`."""
    if not len(starts) or starts[0] != 0:
        raise BatchError(f"query_start_loc={starts[:4].tolist()}… must start with 0")
    if len(starts) != len(lens) + 1:
        raise BatchError(
            f"query_start_loc has {len(starts)} entries and seq_lens {len(lens)}; it needs one more "
            "than there are sequences"
        )
    queries = starts[1:] - starts[:-1]
    if queries.min(initial=0) < 0:
        index = int((queries < 0).argmax())
        raise BatchError(
            f"query_start_loc[{index + 1}]={starts[index + 1]} is less than the entry before it "
            f"({starts[index]}); it must never decrease"
        )
    if lens.min(initial=0) < 0:
        index = int((lens < 0).argmax())
        raise BatchError(f"seq_lens[{index}]={lens[index]} is negative")
    for name, counts in (("seq_lens", lens), ("query_lens", queries)):
        if counts.max(initial=0) > LONGEST:
            index = int(counts.argmax())
            raise BatchError(
                f"{name}[{index}]={counts[index]} is more than {LONGEST}, the longest sequence; split it"
            )


def check_tensors(batch: Batch) -> None:
    """Check the tensors' dtypes, shapes and devices. Raises `BatchError`."""
    many = getattr(batch.state_targets, "ndim", 1) == 2
    for name, tensor, dtype, shape in (
        ("block_table", batch.block_table, torch.int32, (batch.num_seqs, None)),
        ("slot_mapping", batch.slot_mapping, torch.int64, (batch.num_tokens,)),
        ("state_slots", batch.state_slots, torch.int64, (batch.num_seqs,)),
        (
            "state_targets", batch.state_targets, torch.int64,
            (batch.num_seqs, None) if many else (batch.num_seqs,),
        ),
    ):  # fmt: skip
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise BatchError(f"{name}={shown(tensor)} must be a tensor of {dtype}")
        fits = tensor.dim() == len(shape) and tensor.shape[0] == shape[0]
        if not (tensor.dtype == dtype or _as_wide(tensor)) or not fits:
            free = "tokens" if name == "state_targets" else "max_blocks"
            wanted = ", ".join(free if n is None else str(n) for n in shape)
            raise BatchError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; it must be {dtype} of shape "
                f"({wanted})"
            )
        if tensor.dim() == 2 and tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise BatchError(
                f"{name}'s columns are {tensor.stride(1)} apart; kernels need adjacent columns: "
                f"pass {name}.contiguous()"
            )
        if not same_device(tensor.device, batch.device):
            raise BatchError(f"{name} is on {tensor.device}, the batch on {batch.device}; move one")
    _check_shape_of_positions(batch)


def check_positions(batch: Batch, axes: int) -> None:
    """Check the positions of tokens that a layer rotates. Raises `BatchError`.

    `axes`: those of a position. One number for each token stands for every axis, as text has it.
    """
    if batch.positions is None or batch.positions.dim() == 1:
        return
    if batch.positions.shape[0] != axes:
        many = f"positions of {axes} axes, as rope.sections has" if axes > 1 else "one axis"
        raise BatchError(
            f"positions has shape {tuple(batch.positions.shape)}; the layer's rotary embedding takes "
            f"{many}: ({f'{axes}, ' if axes > 1 else ''}{batch.num_tokens}{',' * (axes == 1)})"
        )


def _check_shape_of_positions(batch: Batch) -> None:
    positions = batch.positions
    if positions is None:
        return
    check_is_tensor("positions", positions)
    whole = positions.dtype in (torch.int64, torch.int32)
    fits = positions.dim() in (1, 2) and positions.shape[-1] == batch.num_tokens
    if not whole or not fits:
        raise BatchError(
            f"positions is {positions.dtype} of shape {tuple(positions.shape)}; it must be torch.int64 "
            f"or torch.int32 of shape ({batch.num_tokens},), or (axes, {batch.num_tokens})"
        )
    if not same_device(positions.device, batch.device):
        raise BatchError(
            f"positions is on {positions.device}, the batch on {batch.device}; move one"
        )


def _as_wide(tensor: torch.Tensor) -> bool:
    """Whether int32 is all that the tensor's device has: widened, it stays what it is."""
    if tensor.dtype != torch.int32 or tensor.device.type in ("cpu", "cuda"):
        return False
    return tensor[:0].long().dtype == torch.int32


def check_queries(batch: Batch) -> int | None:
    """Check that each length counts its query's tokens, but a padding row's, which is 0.

    Returns the first padding row of several query tokens, None without one. Raises `BatchError`.
    """
    queries, lens = batch.host_query_lens, batch.host_lens
    missing = lens < queries
    if not missing.any():
        return None
    several = None
    for index in missing.nonzero()[0].tolist():
        query, length = batch.query_lens[index], batch.lens[index]
        if length:
            raise BatchError(
                f"seq_lens[{index}]={length} is shorter than its query of {query} tokens; it counts "
                "cached context plus new tokens"
            )
        if query > 1 and several is None:
            several = index
    return several


def check_padding(batch: Batch, unable: Sequence[str]) -> None:
    """Check the queries of a step. `unable`: who of those that may run it takes padding rows of one query
    token alone. Raises `BatchError`.
    """
    several = check_queries(batch)
    if several is not None and unable:
        raise BatchError(
            f"seq_lens[{several}]=0 is shorter than its query of {batch.query_lens[several]} tokens, and "
            f"{', '.join(sorted(set(unable)))} takes padding rows (length 0) of one query token "
            f"only; count cached context plus new tokens, pass padding as rows of one token, or choose a "
            "backend that claims padding_rows"
        )


def check_table_width(batch: Batch, block_size: int) -> None:
    """Check on the host that each length fits its row of the block table. Raises `BatchError`.

    `block_size` is the cache's: that of which the batch's slots were made must be the same.
    """
    if batch.block_table is None:
        return
    if batch.block_size not in (None, block_size):
        raise BatchError(
            f"block_size={batch.block_size}, with which the batch was made, differs from the cache's "
            f"{block_size}; pass the cache's block size to Batch.from_lens"
        )
    width = batch.block_table.shape[1]
    if batch.max_seq_len <= width * block_size:
        return
    index = batch.lens.index(batch.max_seq_len)
    raise BatchError(
        f"block_table has {width} blocks of {block_size} a sequence; sequence {index} of "
        f"length {batch.max_seq_len} needs {-(-batch.max_seq_len // block_size)}"
    )


def check_pages(spec: LayerSpec, batch: Batch, block_size: int) -> None:
    """Check on the host that a step over a cache says where each length lies. Raises `BatchError`."""
    if batch.block_table is None and batch.num_seqs:
        raise BatchError(
            f"{spec} attends over a cache; the batch has no block_table: pass Batch(block_table=...)"
        )
    check_table_width(batch, block_size)


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
    queries, lens = np.array(batch.query_lens)[rows], np.array(batch.lens)[rows]
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


def check_paged_batch(spec: LayerSpec, batch: Batch, block_size: int) -> None:
    """Check on the host the lengths and the block table of a step over a cache. Raises `BatchError`."""
    check_queries(batch)
    check_pages(spec, batch, block_size)


def check_on_device(batch: Batch, num_blocks: int, block_size: int) -> None:
    """Check what only the tensors' values tell; costs a copy to the host. Raises `BatchError`."""
    if batch.block_table is not None:
        table = batch.block_table.cpu()
        for index, length in enumerate(batch.lens):
            row = table[index, : -(-length // block_size)]
            bad = ((row < 0) | (row >= num_blocks)).nonzero()
            if bad.numel():
                at = int(bad[0])
                raise BatchError(
                    f"block_table[{index}, {at}]={int(row[at])} points outside the cache's "
                    f"{num_blocks} blocks"
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
    kept, count = slots[slots >= 0].unique(return_counts=True)
    if (count > 1).any():
        raise BatchError(
            f"slot_mapping writes slot {int(kept[count > 1][0])} twice in one step; each new token "
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
    """Check that each token's state, or each sequence's, has a slot of its own, and nothing else has."""
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
