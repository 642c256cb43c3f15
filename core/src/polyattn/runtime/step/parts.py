"""What is a part of a step? Some of its sequences, as a batch of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from polyattn.runtime.step.shared_prefix import restricted
from polyattn.selection.pieces import largest


def fill_part(batch: Any, part: Any, seqs: slice | list[int]) -> Any:
    """Make an empty batch of some of a batch's sequences, without slots and positions.

    A slice gives views, so a captured graph reads the same buffers.
    """
    chosen = range(batch.num_seqs)[seqs] if isinstance(seqs, slice) else seqs
    part.host_lens, queries = batch.host_lens[seqs], batch.host_query_lens[seqs]
    part.lens, part.host_query_lens = part.host_lens.tolist(), queries
    part.host_starts = np.zeros(len(queries) + 1, np.int64)
    np.add.accumulate(queries, out=part.host_starts[1:])
    part.starts = part.host_starts.tolist()
    part.num_tokens, part.num_seqs = part.starts[-1], len(queries)
    part.max_query_len = largest(queries)
    part.all_decode = part.max_query_len == 1 and part.num_tokens == part.num_seqs
    part.device, part.slot_mapping, part.positions = batch.device, None, None
    part.mask, part.inputs = batch.mask, batch.inputs
    part.shared_prefix = None
    if batch.shared_prefix is not None:
        part.shared_prefix = restricted(batch.shared_prefix, chosen)
    own = batch.seq_ids
    part.seq_ids = own[seqs] if isinstance(seqs, slice) else [own[i] for i in chosen]
    part.step_query_lens = batch.step_query_lens
    part.causal, part.lens_are_bounds = batch.causal, batch.lens_are_bounds
    part.staging = batch.staging
    index: Any = seqs
    if not isinstance(seqs, slice):
        index = torch.tensor(seqs, dtype=torch.int64, device=batch.device)  # none, too
    part.block_table = None if batch.block_table is None else batch.block_table[index]
    part.state_slots = None if batch.state_slots is None else batch.state_slots[index]
    part.state_targets = None if batch.state_targets is None else batch.state_targets[index]
    if "seq_lens" in batch.__dict__:
        part.seq_lens = batch.seq_lens[index]
    if "host_block_table" in batch.__dict__ and batch.host_block_table is not None:
        part.host_block_table = batch.host_block_table[seqs]
    if "key_starts" in batch.__dict__ or batch.first_positions is not None:
        part.key_starts = [batch.key_starts[i] for i in chosen]
    if batch.first_positions is not None:
        part.first_positions = [batch.first_positions[i] for i in chosen]
    if "query_start_loc" in batch.__dict__ and isinstance(seqs, slice) and not chosen.start:  # type: ignore[union-attr]
        part.query_start_loc = batch.query_start_loc[: len(part.starts)]
    return part
