"""CUDA graphs: one captured decode step a batch size, re-planned into the same buffers."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.errors import BatchError
from polyattn.families.attention.layer import Attention
from polyattn.runtime.batch import Batch
from polyattn.runtime.kv_cache import STORAGE_DTYPES, KVCache


class DecodeGraph:
    """A captured decode step of `layer` for up to `num_seqs` sequences of up to `max_len` tokens.

    The buffers that the graph reads belong to it; `replay` copies a step's metadata and inputs into
    them, pads missing sequences, re-plans on the host and replays.
    """

    def __init__(
        self, layer: Attention, cache: KVCache, num_seqs: int, max_len: int, block_size: int
    ):
        spec = layer.selection.spec
        self.layer, self.cache, self.num_seqs, self.max_len = layer, cache, num_seqs, max_len
        device, dtype = cache.key.device, STORAGE_DTYPES[spec.dtype]
        self.block_table = torch.zeros(
            num_seqs, -(-max_len // block_size), dtype=torch.int32, device=device
        )
        self.slot_mapping = torch.full((num_seqs,), -1, dtype=torch.int64, device=device)
        self.starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(num_seqs, dtype=torch.int32, device=device)
        self.query = torch.zeros(
            num_seqs, spec.num_heads, spec.head_size, dtype=dtype, device=device
        )
        self.key = torch.zeros(
            num_seqs, spec.num_kv_heads, spec.head_size, dtype=dtype, device=device
        )
        self.value = self.key.new_zeros(num_seqs, spec.num_kv_heads, spec.v_head_size)
        self.out = self.query.new_zeros(num_seqs, spec.num_heads, spec.v_head_size)
        self.graph = torch.cuda.CUDAGraph()

    def _batch(self, lens: list[int]) -> Batch:
        return Batch.on_buffers(
            lens, self.starts, self.seq_lens, self.block_table, self.slot_mapping
        )

    def _step(self) -> None:
        self.layer(self.query, self.key, self.value, self.cache, out=self.out)

    def capture(self) -> None:
        """Record the step. The longest lengths are planned, so that no later step needs more."""
        self.seq_lens.zero_()
        self.layer.plan(self._batch([self.max_len] * self.num_seqs))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels compile and load outside the capture
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self.graph):
            self._step()

    def replay(self, query: Tensor, key: Tensor, value: Tensor, batch: Batch) -> Tensor:
        """Run one step; returns (num_tokens, num_heads, v_head_size), valid until the next."""
        count = batch.num_seqs
        if count > self.num_seqs or batch.num_decodes != count or batch.max_seq_len > self.max_len:
            raise BatchError(
                f"{batch} of up to {batch.max_seq_len} tokens doesn't fit a graph captured for "
                f"{self.num_seqs} decodes of up to {self.max_len}"
            )
        assert batch.block_table is not None and batch.slot_mapping is not None
        width = min(batch.block_table.shape[1], self.block_table.shape[1])
        self.block_table[:count, :width] = batch.block_table[:, :width]
        self.slot_mapping.fill_(-1)
        self.slot_mapping[:count] = batch.slot_mapping
        self.seq_lens.zero_()
        self.seq_lens[:count] = batch.seq_lens
        self.query[:count], self.key[:count], self.value[:count] = query, key, value
        self.layer.plan(self._batch(batch.lens + [0] * (self.num_seqs - count)))
        self.graph.replay()
        return self.out[:count]
