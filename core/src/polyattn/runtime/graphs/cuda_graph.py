"""CUDA graphs of whole steps: any number of layers and groups in one capture, a graph for each size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from polyattn.errors import BatchError, flag, shown
from polyattn.runtime.builds import finish_all
from polyattn.runtime.cache.kv_cache import raw
from polyattn.runtime.graphs.mixed_buffers import MixedBuffers
from polyattn.runtime.graphs.step_buffers import StepBuffers, StepSize
from polyattn.runtime.group import LayerGroup, StepPlan, on_the_host
from polyattn.runtime.inputs import bad_input, check_is_tensor
from polyattn.runtime.step.batch import Batch

Step = Callable[..., Any]
"""`step(plans, **inputs)`: runs the layers with their groups' plans; returns tensors by token."""


class StepGraph:
    """One captured step, for up to as many rows, tokens and keys as its buffers hold.

    The graph has a plan for each group, which `replay` plans again into the same buffers.
    """

    def __init__(self, groups: Sequence[LayerGroup], step: Step, buffers: StepBuffers):
        self.groups, self.step, self.buffers = groups, step, buffers
        self.plans: dict[LayerGroup, StepPlan] = {}
        self.reads_tensors = False  # whether plans are refilled by what the device holds
        self.inputs: dict[str, Tensor] = {}
        self.graph = torch.cuda.CUDAGraph()
        self.mixed = isinstance(buffers, MixedBuffers)
        # The tensors that the graph writes, in its order of tokens, and room for them in a step's.
        self.results: list[Tensor] = []
        self.taken: list[Tensor] = []
        self.form: TreeSpec

    def capture(self, inputs: Mapping[str, Tensor], pool: Any, side: Any) -> None:
        """Record the step on the stream `side` of the current device, its memory in `pool`.

        `inputs` (tokens, …) say dtype and trailing shape; values don't matter.

        The longest lengths are planned, so that no later step needs more.
        """
        tokens, batch = self.buffers.num_tokens, self.buffers.longest()
        self.inputs = {n: t.new_zeros(tokens, *t.shape[1:]) for n, t in inputs.items()}
        self.plans = {group: group.plan(group.planner.own(batch)) for group in self.groups}
        self.reads_tensors = any(g.planner.reads_tensors(p) for g, p in self.plans.items())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():  # kernels compile outside the capture
            for _ in range(2):
                self.step(self.plans, **self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self.graph, pool, side), torch.no_grad():
            self.results, self.form = tree_flatten(self.step(self.plans, **self.inputs))
        if self.mixed:
            self.taken = [torch.empty_like(result) for result in self.results]

    def replay(self, batch: Batch, inputs: Mapping[str, Tensor]) -> Any:
        """Run one step, which fits. Returns views of its results, valid until the next replay."""
        buffers, tokens = self.buffers, batch.num_tokens
        for group in self.groups:
            group.check(batch)
            problem = group.planner.replay_problem(batch)
            if problem is not None:
                raise BatchError(problem)
        beside = self._checked(batch, inputs)
        filled = buffers.stage(batch)
        if self.reads_tensors:
            buffers.copy(batch, beside)
        with on_the_host():
            for group, plan in self.plans.items():
                group.planner.refill(plan, group.planner.own(filled))
        if self.reads_tensors:
            buffers.staging.send()
        else:
            buffers.copy(batch, beside)
        if not self.mixed:
            self.graph.replay()
            return self._formed([result[:tokens] for result in self.results])
        places = buffers.rows(batch)
        assert isinstance(places, Tensor)
        for name, tensor in inputs.items():
            raw(self.inputs[name]).index_copy_(0, places, raw(tensor))
        self.graph.replay()
        taken = [each[:tokens] for each in self.taken]
        for result, out in zip(self.results, taken, strict=True):
            torch.index_select(raw(result), 0, places, out=raw(out))
        return self._formed(taken)

    def _formed(self, results: list[Tensor]) -> Any:
        """Return results in the form in which the step returned them."""
        return results[0] if self.form.is_leaf() else tree_unflatten(results, self.form)

    def _checked(self, batch: Batch, inputs: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return where inputs go, and these; of a mixed step none, whose tokens go to places.

        Refuses what the buffers have no room for, and what would leave them an earlier step's.
        """
        placed = batch.first_positions is not None
        apart = "key_starts" in vars(batch) and not batch.keys_packed
        if batch.mask is not None or batch.inputs or placed or apart:
            brings = batch.mask is not None, bool(batch.inputs), placed, apart
            field = ("mask", "inputs", "first_positions", "key_starts")[brings.index(True)]
            raise BatchError(f"{field} can't be replayed; run such a step eagerly")
        if inputs.keys() != self.inputs.keys():
            raise BatchError(
                f"inputs are {sorted(inputs)}; the captured step takes {sorted(self.inputs)}"
            )
        beside, tokens = [], batch.num_tokens
        for name, tensor in inputs.items():
            if tensor.__class__ is not Tensor:
                check_is_tensor(name, tensor)
            wanted = self.inputs[name]
            shape = tokens, *wanted.shape[1:]
            if tensor.shape != shape or tensor.dtype is not wanted.dtype:
                raise bad_input(name, tensor, shape, wanted.dtype)
            if not self.mixed:
                beside.append((self.buffers.first(wanted, tokens), tensor))
        return beside


class StepGraphs:
    """The captured steps of a model, one graph for each size; a step runs in the smallest that fits.

    Call `capture` once, then `replay` for each step. The graphs share one pool of memory, so a result is
    valid until the next replay of any of them.

    Args:
        groups: the groups whose layers a step runs.
        step: `step(plans, **inputs)` runs the model's layers; `plans[group]` is a group's plan.
        sizes: each a `StepSize`, or a number of rows of `query_len` tokens. Rows of several tokens need
            groups of `graph_capture="uniform"`, sizes with prompts need `"any"`.
        max_len: the most keys of a row.
        query_len: query tokens of a row.
        shared_prefix: whether layers read blocks that rows share once for all of them, if their backend
            does so in its own launch. That launch is captured, whatever later steps share.

    Raises:
        SpecError, BatchError: a group can't be captured, or no size fits.

    Examples:
        >>> spec = LayerSpec(num_heads=4, head_size=64, graph_capture="single_token_decode")
        >>> if torch.cuda.is_available():
        ...     layer = Attention(LayerGroup(spec))
        ...     cache = layer.group.allocate_cache(num_blocks=512)
        ...     def step(plans, query, key, value):  # the model's layers
        ...         return layer(query, key, value, cache, plans[layer.group])
        ...     graphs = StepGraphs([layer.group], step, sizes=[8, 64], max_len=4096)
        ...     inputs = dict.fromkeys(("query", "key", "value"), cache.key.new_zeros(3, 4, 64))
        ...     graphs.capture(inputs)
        ...     table = torch.tensor([[1], [2], [3]], dtype=torch.int32, device="cuda")
        ...     batch = Batch.from_lens([1, 1, 1], [5, 9, 1], table, cache.block_size)
        ...     out = graphs.replay(batch, inputs)

    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        step: Step,
        sizes: Sequence[int | StepSize],
        max_len: int,
        query_len: int = 1,
        shared_prefix: bool = False,
    ):
        if not isinstance(groups, Sequence) or not all(isinstance(g, LayerGroup) for g in groups):
            raise BatchError(f"groups={shown(groups)} must be a list of LayerGroup")
        flag("shared_prefix", shared_prefix, BatchError)
        blocks = {g.cache_format.block_size for g in groups if g.cache_format is not None}
        if not groups:
            raise BatchError("a captured step needs the groups of its layers")
        if len(blocks) > 1:
            raise BatchError(
                f"a captured step has one block table; its groups walk blocks of {sorted(blocks)}"
            )
        for group in groups:
            group.finish_builds()
        finish_all()
        self.device = device = groups[0].torch_device
        block_size = next(iter(blocks), None)
        axes = max(_axes(group) for group in groups)
        wanted = [n if isinstance(n, StepSize) else StepSize(n, query_len) for n in sizes]
        for size in wanted:
            _check(size, groups)
        pads = all(group.planner.padding_rows for group in groups)
        self.graphs = [
            StepGraph(
                groups, step, _buffers(size, max_len, block_size, device, axes, shared_prefix, pads)
            )
            for size in sorted(wanted, key=lambda n: (n.tokens, n.rows))
        ]

    def capture(self, inputs: Mapping[str, Tensor]) -> None:
        """Capture every size, the largest first, so that the smaller ones fit into its memory.

        Args:
            inputs: for each keyword argument of `step` a tensor (tokens, ...) of its dtype and trailing
                shape; values don't matter.

        Raises:
            BatchError, SpecError: a group can't be captured at a size.

        """
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(self.device):
            # torch's own is of the device that the process captured on first. Memory is a stream's.
            side = torch.cuda.Stream()
            for graph in reversed(self.graphs):
                graph.capture(inputs, pool, side)

    def find(self, batch: Batch) -> StepGraph | None:
        """Return the smallest graph that the step fits.

        Args:
            batch: the step.

        Returns:
            The graph, or None if the step must run eagerly.

        """
        for graph in self.graphs:
            if graph.buffers.fits(batch):
                return graph
        return None

    def replay(self, batch: Batch, inputs: Mapping[str, Tensor]) -> Any:
        """Run a step in the graph of its size.

        Args:
            batch: the step.
            inputs: the keyword arguments of `step`; they are copied into the graph's tensors.

        Returns:
            What `step` returned, for the step's own tokens; valid until the next replay.

        Raises:
            BatchError: the step fits no graph.

        """
        graph = self.find(batch)
        if graph is None:
            sizes = "; ".join(str(g.buffers.size) for g in self.graphs)
            raise BatchError(f"{batch} fits none of the captured sizes ({sizes}); run it eagerly")
        return graph.replay(batch, inputs)


def _axes(group: LayerGroup) -> int:
    """Return the axes of the positions that a group's layers rotate by, 0 where none does."""
    rope = group.spec.rope
    if rope is None or rope.positions == "cache":
        return 0
    return 1 if rope.sections is None else len(rope.sections)


def _check(size: StepSize, groups: Sequence[LayerGroup]) -> None:
    """Refuse a size that a group's backends weren't chosen for. Raises `BatchError`."""
    for group in groups:
        if group.spec.graph_capture < size.capture:
            wanted = size.capture.name.lower()
            raise BatchError(
                f"a captured step of {size} needs backends for it, and {group.spec} was selected with "
                f"graph_capture={group.spec.graph_capture.name.lower()!r}; say {wanted!r}"
            )
        problem = group.planner.size_problem(size)
        if problem is not None:
            raise BatchError(f"a captured step of {size}: {problem}")


def _buffers(
    size: StepSize,
    max_len: int,
    block_size: int | None,
    device: Any,
    axes: int,
    sharing: bool,
    pads: bool,
) -> StepBuffers:
    if size.prompts:
        return MixedBuffers(size, max_len, block_size, device, axes)
    return StepBuffers(
        size.rows, size.query_len, max_len, block_size, device, axes, sharing, pads,
        size.state_targets,
    )  # fmt: skip
