"""Checked integers of a batch: Python's lists, or arrays on the host, and their way to a device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyattn.errors import BatchError, shown
from polyattn.selection.pieces import largest
from polyattn.spec.fields import LONGEST

LARGEST = (1 << 31) - 1
REMEMBERED = 1024
"""Decodes of a step up to which their starts are remembered: to count to 256 takes 10 us."""
INT = {int}
Integers = np.ndarray[Any, np.dtype[np.int64]]


def integers(name: str, values: Any) -> list[int]:
    """Return a list of Python's integers, of a sequence or a tensor. Raises `BatchError`."""
    if values.__class__ is list and set(map(type, values)) <= INT:
        return list(values)
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
    numbers = values.tolist() if isinstance(values, np.ndarray) else list(values)
    for index, value in enumerate(numbers if set(map(type, numbers)) - INT else ()):
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
            remedy = "; .tolist() has a tensor's" if isinstance(value, torch.Tensor) else ""
            raise BatchError(f"{name}[{index}]={shown(value)} must be an integer{remedy}")
        numbers[index] = int(value)
    return numbers


def one_each(name: str, numbers: Sequence[int], lens: list[int]) -> list[int]:
    """Return the places of some sequences' keys, as integers. Raises `BatchError`."""
    places = integers(name, numbers)
    if len(places) != len(lens) or any(not 0 <= place <= LARGEST for place in places):
        raise BatchError(
            f"{name}={shown(places)} must name one place, 0 to {LARGEST}, for each of {len(lens)} "
            "sequences"
        )
    return places


def on_host(starts: list[int], lens: list[int]) -> tuple[Integers, Integers, Integers, int, int]:
    """Return `query_start_loc`, `seq_lens` and the query tokens of each sequence as NumPy's int64.

    Behind them are the longest query and the longest sequence. Raises `BatchError` where starts decrease,
    a length is negative, or kernels don't count so far.
    """
    decodes = _decodes(len(lens)) if 0 < len(lens) <= REMEMBERED else None
    try:
        host_lens = np.array(lens, np.int64)
        # As unsigned numbers the negative ones are the largest: two looks instead of four.
        longest = 1, largest(host_lens.view(np.uint64))
        if decodes is not None and starts == decodes[0]:
            _, host_starts, queries = decodes
        else:
            host_starts = np.array(starts, np.int64)
            queries = host_starts[1:] - host_starts[:-1]
            longest = largest(queries.view(np.uint64)), longest[1]
    except OverflowError as error:
        raise _uncounted(starts, lens) or error from None
    one_more = len(starts) == len(lens) + 1
    if max(longest) <= LONGEST and one_more and starts[0] == 0 and starts[-1] <= LARGEST:
        return host_starts, host_lens, queries, *longest
    if beyond := _uncounted(starts, lens):
        raise beyond
    _check_lengths(host_starts, host_lens, queries)
    return host_starts, host_lens, queries, *longest


@lru_cache(maxsize=256)
def _decodes(count: int) -> tuple[list[int], Integers, Integers]:
    """Return where the queries of so many single tokens start, twice, and their lengths, read-only."""
    starts, queries = np.arange(count + 1), np.ones(count, np.int64)
    starts.flags.writeable = queries.flags.writeable = False
    return starts.tolist(), starts, queries


def page_locked(count: int, device: torch.device) -> Tensor:
    """Return int32 (count,) on the host, any numbers, from which a GPU copies while the host goes on.

    Args:
        count: of numbers.
        device: where they go. A GPU's copy keeps the memory from others, though the tensor be gone.

    Examples:
        >>> page_locked(3, torch.device("cpu")).shape
        torch.Size([3])

    """
    return torch.empty(count, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")


def upload(
    values: np.ndarray[Any, Any] | Tensor, device: torch.device, into: Tensor | None = None
) -> Tensor:
    """Copy numbers to a device. The host doesn't wait for what runs on a GPU before the copy.

    Args:
        values: any shape and dtype; a tensor is one of `page_locked`.
        device: where to.
        into: a buffer of the values' shape; None: a new one.

    Returns:
        `into`, or a new tensor of the values' dtype.

    Raises:
        RuntimeError: `into` has another shape, or memory runs out.

    Examples:
        >>> upload(np.arange(3), torch.device("cpu"))
        tensor([0, 1, 2])

    """
    on_gpu = device.type == "cuda"
    if isinstance(values, np.ndarray):
        host = torch.from_numpy(np.ascontiguousarray(values))
        if on_gpu:
            host = host.pin_memory()
    else:
        host = values
    if into is not None:
        return into.copy_(host, non_blocking=True)
    return host.to(device, non_blocking=on_gpu)


def _uncounted(starts: list[int], lens: list[int]) -> BatchError | None:
    for name, values in (("query_start_loc", starts), ("seq_lens", lens)):
        worst = max(values, key=abs, default=0)
        if abs(worst) > LARGEST:
            return BatchError(f"{name} has {worst}; kernels count tokens in int32, {LARGEST}")
    return None


def _check_lengths(starts: Integers, lens: Integers, queries: Integers) -> None:
    if not len(starts) or starts[0] != 0:
        raise BatchError(f"query_start_loc={starts[:4].tolist()}… must start with 0")
    if len(starts) != len(lens) + 1:
        raise BatchError(
            f"query_start_loc has {len(starts)} entries and seq_lens {len(lens)}; it needs one more "
            f"than there are sequences ({len(starts) - 1} query_lens for {len(lens)} seq_lens)"
        )
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
