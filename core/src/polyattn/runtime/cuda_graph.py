"""CUDA graphs of whole steps: any number of layers and groups in one capture, one graph a batch size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyattn.errors import BatchError
from polyattn.runtime.batch import Batch
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.plan import StepPlan

Step = Callable[..., Any]
"""`step(plans, **inputs)`: runs the layers with their groups' plans; returns tensors by token."""


class StepBuffers:
    """The metadata that a captured graph reads: `num_seqs` rows of `query_len` tokens.

    `axes`: those of the tokens' positions, 0 where no layer rotates.

    `sharing`: whether steps are told which blocks their rows share.

    Missing sequences are padding: of one token, rows of length 0; of several, rows whose keys are
    whatever block 0 holds. Neither stores anything, and nobody reads their output.
    """

    def __init__(
        self, num_seqs: int, query_len: int, max_len: int, block_size: int | None, device: Any,
        axes: int = 0, sharing: bool = False,
    ):  # fmt: skip
        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.num_seqs, self.query_len, self.max_len = num_seqs, query_len, max_len
        self.block_size, self.sharing = block_size, sharing and block_size is not None
        tokens = num_seqs * query_len
        self.starts = torch.arange(0, tokens + 1, query_len, dtype=torch.int32, device=device)
        self.seq_lens = ints(num_seqs)
        self.block_table = ints(num_seqs, -(-max_len // block_size)) if block_size else None
        self.slot_mapping = ints(tokens, dtype=torch.int64) - 1 if block_size else None
        self.state_slots = ints(num_seqs, dtype=torch.int64) - 1
        places = (axes, tokens) if axes > 1 else (tokens,)
        self.positions = ints(*places, dtype=torch.int64) if axes else None

    @property
    def padding_len(self) -> int:
        """The length of a row that stands for no sequence."""
        return 0 if self.query_len == 1 else self.query_len

    def batch(self, lens: list[int]) -> Batch:
        """Return a batch over these buffers; `lens` is what `seq_lens` holds, or will at most."""
        starts = list(range(0, self.num_seqs * self.query_len + 1, self.query_len))
        batch = Batch.on_buffers(
            starts, lens, self.starts, self.seq_lens, self.block_table, self.slot_mapping,
            self.positions,
        )  # fmt: skip
        batch.state_slots = self.state_slots
        return batch.with_shared_prefix(()) if self.sharing else batch

    def fits(self, batch: Batch) -> bool:
        """Whether a step is of this shape, or smaller."""
        return (
            batch.num_seqs <= self.num_seqs
            and batch.num_tokens == batch.num_seqs * self.query_len
            and batch.max_query_len <= self.query_len
            and batch.max_seq_len <= self.max_len
        )

    def fill(self, batch: Batch) -> Batch:
        """Copy a step's metadata in; returns the step as the graph sees it."""
        count, tokens = batch.num_seqs, batch.num_tokens
        self.seq_lens.fill_(self.padding_len)
        self.seq_lens[:count] = batch.seq_lens
        if self.block_table is not None and batch.block_table is not None:
            width = min(batch.block_table.shape[1], self.block_table.shape[1])
            self.block_table[:count, :width] = batch.block_table[:, :width]
            self.block_table[count:] = 0
        if self.slot_mapping is not None:
            self.slot_mapping.fill_(-1)
            if batch.slot_mapping is not None:
                self.slot_mapping[:tokens] = batch.slot_mapping
        if self.positions is not None:
            self.positions.zero_()
            self.positions[..., :tokens] = batch.token_positions
        self.state_slots.fill_(-1)
        if batch.state_slots is not None:
            self.state_slots[:count] = batch.state_slots
        filled = self.batch(batch.lens + [self.padding_len] * (self.num_seqs - count))
        if self.sharing:  # padding comes last, so rows keep their numbers
            assert self.block_size is not None
            filled = filled.with_shared_prefix(batch.find_shared_prefix(self.block_size))
        return filled


class StepGraph:
    """One captured step of up to `num_seqs` rows of `query_len` tokens and `max_len` keys.

    The graph holds a plan of its own for each group, which `replay` plans anew into the same buffers.
    """

    def __init__(self, groups: Sequence[LayerGroup], step: Step, buffers: StepBuffers):
        self.groups, self.step, self.buffers = groups, step, buffers
        self.plans: dict[LayerGroup, StepPlan] = {}
        self.inputs: dict[str, Tensor] = {}
        self.graph = torch.cuda.CUDAGraph()
        self.result: Any = None

    def capture(self, inputs: Mapping[str, Tensor], pool: Any = None) -> None:
        """Record the step. `inputs` (tokens, …) say dtype and trailing shape; values don't matter.

        The longest lengths are planned, so that no later step needs more.
        """
        buffers = self.buffers
        tokens = buffers.num_seqs * buffers.query_len
        self.inputs = {n: t.new_zeros(tokens, *t.shape[1:]) for n, t in inputs.items()}
        buffers.seq_lens.fill_(buffers.padding_len)
        batch = buffers.batch([buffers.max_len] * buffers.num_seqs)
        self.plans = {group: group.plan(batch) for group in self.groups}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():  # kernels compile outside the capture
            for _ in range(2):
                self.step(self.plans, **self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self.graph, pool=pool), torch.no_grad():
            self.result = self.step(self.plans, **self.inputs)

    def replay(self, batch: Batch, inputs: Mapping[str, Tensor]) -> Any:
        """Run one step; returns views of what the step returned, valid until the next replay."""
        if not self.buffers.fits(batch):
            raise BatchError(
                f"{batch} of up to {batch.max_query_len} query tokens and {batch.max_seq_len} keys "
                f"doesn't fit a graph captured for {self.buffers.num_seqs} rows of "
                f"{self.buffers.query_len} and {self.buffers.max_len} keys"
            )
        filled = self.buffers.fill(batch)
        for group, plan in self.plans.items():
            group.plan(filled, reuse=plan)
        for name, tensor in inputs.items():
            self.inputs[name][: batch.num_tokens] = tensor
        self.graph.replay()
        return _first(self.result, batch.num_tokens)


class StepGraphs:
    """The captured steps of a model, one for each batch size; a step runs in the smallest that fits.

    - `groups`: whose layers the step runs; `step(plans, **inputs)` runs them.
    - `num_seqs`: the batch sizes; `query_len`: tokens of each row; `max_len`: the most keys of a row.
    - `shared_prefix`: whether layers shall read blocks that rows share once for all, where their backend
      does that in its own launch. That launch is captured then, whatever later steps share.

    The graphs share one pool of memory: their results are valid until the next replay of any.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        step: Step,
        num_seqs: Sequence[int],
        max_len: int,
        query_len: int = 1,
        shared_prefix: bool = False,
    ):
        sizes = {g.cache_format.block_size for g in groups if g.cache_format is not None}
        if not groups or len(sizes) > 1:
            raise BatchError(
                f"a captured step has one block table; its groups walk blocks of {sorted(sizes)}"
                if groups
                else "a captured step needs the groups of its layers"
            )
        device, block_size = groups[0].torch_device, next(iter(sizes), None)
        axes = max(_axes(group) for group in groups)
        self.graphs = [
            StepGraph(
                groups,
                step,
                StepBuffers(n, query_len, max_len, block_size, device, axes, shared_prefix),
            )
            for n in sorted(num_seqs)
        ]

    def capture(self, inputs: Mapping[str, Tensor]) -> None:
        """Record every size, the largest first, so that the smaller ones fit into its memory."""
        pool = torch.cuda.graph_pool_handle()
        for graph in reversed(self.graphs):
            graph.capture(inputs, pool)

    def find(self, batch: Batch) -> StepGraph | None:
        """Return the smallest graph that the step fits, None where it must run eagerly."""
        return next((graph for graph in self.graphs if graph.buffers.fits(batch)), None)

    def replay(self, batch: Batch, inputs: Mapping[str, Tensor]) -> Any:
        """Run a step in the graph for its size. Raises `BatchError` where there is none."""
        graph = self.find(batch)
        if graph is None:
            sizes = [g.buffers.num_seqs for g in self.graphs]
            raise BatchError(f"{batch} fits none of the captured sizes {sizes}; run it eagerly")
        return graph.replay(batch, inputs)


def _axes(group: LayerGroup) -> int:
    """Return the axes of the positions that a group's layers rotate by, 0 where none does."""
    rope = group.spec.rope
    if rope is None or rope.positions == "cache":
        return 0
    return 1 if rope.sections is None else len(rope.sections)


def _first(result: Any, tokens: int) -> Any:
    if isinstance(result, Tensor):
        return result[:tokens]
    return type(result)(_first(part, tokens) for part in result)
