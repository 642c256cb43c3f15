"""TRITON_ATTN at `batch_invariant="machines"`: one kernel for all steps, and one that joins segments."""

from __future__ import annotations

import torch
import triton
from polyattn.kernel import Batch, Frame, LayerSpec, Plan
from torch import Tensor

from polyattn_triton.kernels.exact import exact_join_kernel, exact_kernel
from polyattn_triton.launch import Launcher, multiprocessors, power

ROWS = 16
"""Of a tile, where heads of a group aren't more."""
SEGMENT = 256
"""Keys of a segment: `specified.SEGMENT`."""
MOST_PARTS = 1 << 26
"""Numbers of all segments' states, 256 MiB: beyond, a tile's segments are one program's."""
ON_ONE = 4
"""Programs for each multiprocessor from which on segments aren't dealt out."""
OPTIONS = {"num_warps": 2, "enable_fp_fusion": False}

_attend = Launcher(exact_kernel)
_join = Launcher(exact_join_kernel)


class ExactPlan(Plan):
    """A step's tiles: int32 (tiles, 3), the sequence, the first token and where its keys begin.

    `rows`: of a tile. `segments`: of the longest sequence, dealt out to programs; 1: a program has all.
    """

    __slots__ = ("rows", "segments", "tiles")

    def __init__(self, batch: Batch, tiles: Tensor, rows: int, segments: int):
        super().__init__(batch)
        self.tiles, self.rows, self.segments = tiles, rows, segments


class Exact:
    """Plans and launches of a layer's steps on a device."""

    def __init__(self, spec: LayerSpec, device: torch.device):
        self.device = device
        self.enough = ON_ONE * multiprocessors(device) // spec.num_kv_heads
        self.none = torch.empty(0, dtype=torch.float32, device=device)

    def plan(self, spec: LayerSpec, batch: Batch) -> ExactPlan:
        """Plan a step; `spec`: the layer as this batch has it."""
        ratio, longest = spec.gqa_ratio, batch.max_query_len
        rows = int(triton.next_power_of_2(ratio * max(1, min(longest, ROWS // ratio))))
        starts = batch.key_starts if batch.block_table is None else [0] * batch.num_seqs
        counts = zip(batch.starts, batch.starts[1:], strict=False)
        tiles = [
            (seq, token, starts[seq])
            for seq, (first, end) in enumerate(counts)
            for token in range(0, end - first, rows // ratio)
        ]
        segments = -(-batch.max_seq_len // SEGMENT)
        numbers = len(tiles) * spec.num_kv_heads * segments * rows * power(spec.v_head_size)
        whole = len(tiles) >= self.enough or segments < 2 or numbers > MOST_PARTS
        listed = torch.tensor(tiles, dtype=torch.int32, device="cpu").view(-1, 3).to(self.device)
        return ExactPlan(batch, listed, rows, 1 if whole else segments)

    def run(self, spec: LayerSpec, plan: ExactPlan, frame: Frame) -> None:
        """Attend; `spec`: the layer as the plan's batch has it."""
        batch, query, out, params, cache = (
            plan.batch,
            frame.query,
            frame.out,
            frame.params,
            frame.cache,
        )
        key, value, (k_b, v_b), block_size = frame.key, frame.value, (0, 0), 0
        table, table_s = plan.tiles, 0
        if cache is not None:
            assert batch.block_table is not None
            key, value, block_size = cache.key, cache.value, cache.block_size
            k_b, v_b = key.stride(0), value.stride(0)
            table, table_s = batch.block_table, batch.block_table.stride(0)
        assert key is not None and value is not None
        count, width = len(plan.tiles), power(spec.v_head_size)
        if not count:
            return
        every = count * spec.num_kv_heads * plan.segments * plan.rows
        states = out.new_empty(every * width), out.new_empty(2 * every)
        lse = out if frame.lse is None else frame.lse
        sinks = self.none if params.sinks is None else params.sinks
        slopes = self.none if params.alibi_slopes is None else params.alibi_slopes
        tiles, starts, lens = plan.tiles, batch.query_start_loc, batch.seq_lens
        strides = (*query.stride()[:2], k_b, *key.stride()[-3:-1], v_b, *value.stride()[-3:-1])
        masks = spec.causal, spec.sliding_window or 0, spec.chunk_size or 0, spec.sink_tokens
        rows = spec.gqa_ratio, spec.v_head_size, width, plan.rows, *masks
        read = query, key, value, slopes, tiles, table, starts, lens, *states
        grid, free = (count, spec.num_kv_heads, plan.segments), (table_s, plan.segments)
        own = spec.head_size, block_size, spec.alibi
        _attend(grid, read, (spec.scale,), strides, free, (*rows, *own), OPTIONS)
        written = (*out.stride()[:2], *lse.stride()[:2])
        ends = spec.learned_sinks, frame.lse is not None
        tensors = out, lse, sinks, tiles, starts, lens, *states
        _join((*grid[:2], 1), tensors, (), written, free[1:], (*rows, *ends), OPTIONS)
