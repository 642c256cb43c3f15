"""Which pages does a sparse layer's choice name? One launch writes their block table and lengths."""

from __future__ import annotations

from typing import Any

import triton
from polyattn.kernel import ChosenPages

from polyattn_triton.kernels.choice import chosen_pages_kernel
from polyattn_triton.launch import Launcher

FEW_IDS = 64
"""Ids of a choice up to which one warp names their pages."""

_pages = Launcher(chosen_pages_kernel)


def pages_constants(chosen: ChosenPages) -> tuple[Any, ...]:
    """Return `chosen_pages_kernel`'s constants, in its order."""
    sparse, ids = chosen.spec.sparse, chosen.choice
    assert sparse is not None
    return (
        len(chosen.heads), ids.shape[1], int(triton.next_power_of_2(ids.shape[2])),
        sparse.granularity, sparse.tokens_per_entry, chosen.block_size, chosen.page_size,
        chosen.spec.causal, sparse.physical, chosen.batch.all_decode,
    )  # fmt: skip


def write_pages(chosen: ChosenPages) -> bool:
    """Write the table and the lengths; False: the step's own table has no column."""
    table = chosen.batch.block_table
    assert table is not None
    if not table.shape[1]:
        return False
    if len(chosen.choice):
        table = table if table.stride(1) == 1 else table.contiguous()
        ids, batch = chosen.choice, chosen.batch
        _pages(
            (len(ids), len(chosen.heads), 1),
            (ids, table, batch.query_start_loc, batch.seq_lens, chosen.heads, chosen.table,
             chosen.lens),
            (),
            chosen.steps,
            (table.stride(0), chosen.first, batch.num_seqs, ids.shape[2], chosen.table.stride(0),
             table.shape[1]),
            pages_constants(chosen),
            {"num_warps": 1 if ids.shape[2] <= FEW_IDS else 4},
        )  # fmt: skip
    return True
