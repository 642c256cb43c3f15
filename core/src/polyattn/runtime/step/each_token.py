"""A step as decodes alone: then how a sequence is divided into steps changes nothing."""

from __future__ import annotations

import numpy as np
import torch

from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.chosen_pages import token_places


def each_token(batch: Batch) -> Batch:
    """Return the step with a row for each token, which sees what comes up to it."""
    table = batch.block_table
    assert table is not None
    queries, tokens = batch.host_query_lens, np.arange(batch.num_tokens)
    seq = np.repeat(np.arange(len(queries)), queries)
    ends = np.asarray(batch.host_starts)[1:]
    lens = np.maximum(np.asarray(batch.host_lens)[seq] - (ends[seq] - 1 - tokens), 0)
    at = torch.from_numpy(seq).to(table.device)
    rows = Batch([*range(len(seq) + 1)], lens.tolist(), table.index_select(0, at))
    if batch.lens_are_bounds:
        _, positions, there = token_places(batch)
        rows.__dict__["seq_lens"] = torch.minimum(positions + 1, there).clamp(min=0).int()
        rows.lens_are_bounds = True
    return rows
