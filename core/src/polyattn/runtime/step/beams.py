"""Which keys does a beam see? TensorRT-LLM's `cache_indirection`, as a block table of single tokens.

A beam that continues another's hypothesis copies no key: the indirection names, for each token, the
beam that wrote it. Blocks of one token express just that. So every backend that takes them serves
beams, as rows of a decode. Beams of one sequence share the entries of its context, which decodes with
shared prefixes read once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from polyattn.errors import BatchError
from polyattn.runtime.inputs import check_is_tensor
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.integers import LARGEST, integers


def beam_batch(
    seq_lens: Sequence[int] | Tensor,
    block_table: Tensor,
    cache_indirection: Tensor,
    block_size: int,
    step: int | None = None,
) -> Batch:
    """Return a step of one new token for each beam, over blocks of one token.

    Rows are sequence by sequence, beam by beam.

    Args:
        seq_lens: (num_seqs,), tokens of each sequence's beams, the new one included; all beams of one
            are as long.
        block_table: int32 (num_seqs, beams, max_blocks), where each beam writes; the context's blocks
            may be the same for all beams of a sequence.
        cache_indirection: int32 (num_seqs, beams, max_len), the beam, 0 to beams - 1, that wrote each
            token a beam sees. Of the new token it is the beam itself, whatever is passed; entries past
            a length are never read.
        block_size: tokens in a block of `block_table`.
        step: single tokens from one block to the next, as `cache.in_blocks_of(1)` returns it; default:
            `block_size`, which it is where keys' blocks lie side by side in layout NHD.

    Returns:
        A batch over `cache.in_blocks_of(1)[0]`, of a group whose `block_size` is 1.

    Raises:
        BatchError: shapes, dtypes or values don't fit.

    Examples:
        >>> table = torch.tensor([[[0, 1], [0, 2]]], dtype=torch.int32)
        >>> written_by = torch.zeros(1, 2, 5, dtype=torch.int32)
        >>> batch = beam_batch([5], table, written_by, block_size=4)
        >>> batch.num_seqs, batch.block_table[1].tolist()
        (2, [0, 1, 2, 3, 8])

    """
    lens = integers("seq_lens", seq_lens)
    _check(lens, block_table, cache_indirection, block_size)
    step = block_size if step is None else step
    if type(step) is not int or step < block_size:
        raise BatchError(f"step={step!r} must be an integer, the block size, {block_size}, or more")
    num_seqs, beams, _ = block_table.shape
    table, indirection = (
        t.cpu().numpy().astype(np.int64) for t in (block_table, cache_indirection)
    )
    if table.max(initial=0) * step + block_size > LARGEST:
        raise BatchError(
            f"block_table names block {table.max()}, whose tokens in steps of {step} no int32 names; use "
            "lower blocks"
        )
    rows = np.zeros((num_seqs, beams, max(lens, default=0)), np.int32)
    own = np.arange(beams)[:, None]
    for index, length in enumerate(lens):
        at = np.arange(length)
        wrote = np.concatenate([indirection[index, :, : length - 1], own], axis=1)
        _check_beams(index, wrote, beams)
        rows[index, :, :length] = table[index][wrote, at // block_size] * step + at % block_size
    flat = rows.reshape(num_seqs * beams, -1)
    entries = torch.from_numpy(flat).to(block_table.device)
    each = [length for length in lens for _ in range(beams)]
    return Batch.from_lens([1] * len(each), each, entries, 1, host_block_table=flat)


def _check(lens: list[int], table: Tensor, indirection: Tensor, block_size: int) -> None:
    if type(block_size) is not int or block_size < 1:
        raise BatchError(f"block_size={block_size!r} must be a positive integer")
    for name, tensor in (("block_table", table), ("cache_indirection", indirection)):
        check_is_tensor(name, tensor)
        if tensor.dim() != 3 or tensor.dtype != torch.int32 or len(tensor) != len(lens):
            raise BatchError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be int32 (num_seqs, beams, …) "
                f"of {len(lens)} sequences"
            )
    if table.shape[1] != indirection.shape[1] or not table.shape[1]:
        raise BatchError(
            f"block_table has {table.shape[1]} beams and cache_indirection {indirection.shape[1]}; they "
            "must have as many, one or more"
        )
    room = min(table.shape[2] * block_size, indirection.shape[2])
    for index, length in enumerate(lens):
        if not 1 <= length <= room:
            raise BatchError(
                f"seq_lens[{index}]={length} must be 1 to {room}, what block_table and cache_indirection "
                "have room for"
            )


def _check_beams(
    index: int, wrote: np.ndarray[tuple[int, ...], np.dtype[np.int64]], beams: int
) -> None:
    bad = wrote[(wrote < 0) | (wrote >= beams)]
    if bad.size:
        raise BatchError(
            f"cache_indirection[{index}] names beam {int(bad[0])}; there are {beams}, from 0"
        )
