"""How do partial results combine? `(output, LSE)` is closed under merging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyattn.errors import BatchError, shown
from polyattn.runtime.backend import MergeBackend
from polyattn.runtime.inputs import bad_input, check_is_tensor
from polyattn.runtime.program import Frame, Op, Rows, by_request


@dataclass(frozen=True)
class AttentionState:
    """Attention over a part of the keys.

    Attributes:
        output: (num_tokens, num_heads, v_head_size).
        lse: float32 (num_tokens, num_heads), natural logarithm. A row that saw no key has output 0 and
            LSE -inf, the identity of `merge`.

    Examples:
        >>> nothing = AttentionState(torch.zeros(1, 2, 4), torch.full((1, 2), -torch.inf))
        >>> part = AttentionState(torch.ones(1, 2, 4), torch.zeros(1, 2))
        >>> bool((part.merge(nothing).output == part.output).all())
        True

    """

    output: Tensor
    lse: Tensor

    def merge(self, other: AttentionState) -> AttentionState:
        """Return the state over both parts' keys; associative and commutative.

        Args:
            other: the state of the same queries over other keys.

        """
        return merge_states([self, other])


def merge_states(states: list[AttentionState]) -> AttentionState:
    """Return the state over all parts' keys.

    Outputs are averaged with the weights `exp(lse_i - lse)`, where `lse = log(sum_i exp(lse_i))`.

    Args:
        states: one or more, over the same queries and different keys.

    Returns:
        The output in the first state's dtype, and the LSE in float32.

    Raises:
        BatchError: the list is empty, or shapes, dtypes or devices differ.

    Examples:
        >>> one = AttentionState(torch.ones(1, 1, 4), torch.zeros(1, 1))
        >>> two = AttentionState(torch.zeros(1, 1, 4), torch.zeros(1, 1))
        >>> merge_states([one, two]).output
        tensor([[[0.5000, 0.5000, 0.5000, 0.5000]]])

    """
    _check(states)
    lses = torch.stack([state.lse for state in states])
    lse = torch.logsumexp(lses, 0)
    # A row that no part saw has lse -inf; its weights would be exp(nan).
    weights = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0))
    total = torch.zeros_like(states[0].output, dtype=weights.dtype)
    for state, weight in zip(states, weights, strict=True):
        total += state.output.to(weights.dtype) * weight[..., None]
    return AttentionState(total.to(states[0].output.dtype), lse)


def _check(states: list[AttentionState]) -> None:
    """Check states, whose LSEs torch would broadcast. Raises `BatchError`."""
    if not isinstance(states, Sequence) or not states:
        raise BatchError(
            f"states={shown(states)} must be a list of one AttentionState or more, over the same queries"
        )
    for index, state in enumerate(states):
        if not isinstance(state, AttentionState):
            raise BatchError(
                f"states[{index}]={shown(state)} must be an AttentionState: AttentionState(output, lse)"
            )
        name = f"states[{index}]"
        check_is_tensor(f"{name}.output", state.output)
        check_is_tensor(f"{name}.lse", state.lse)
        first = states[0]
        wide = torch.float64 if first.lse.dtype is torch.float64 else torch.float32
        for part, tensor, shape, dtype in (
            ("output", state.output, first.output.shape, first.output.dtype),
            ("lse", state.lse, first.output.shape[:-1], wide),
        ):
            if tensor.shape != shape or tensor.dtype is not dtype:
                raise bad_input(f"{name}.{part}", tensor, tuple(shape), dtype)


class MergeBuffers:
    """Buffers in which attention states are merged: a total and the next part, reused from step to step.

    They have the shape of the last call. Totals are float32, or float64 for float64 queries.

    Examples:
        >>> total, total_lse, part, part_lse = MergeBuffers().take(torch.zeros(3, 4, 64).half(), 128)
        >>> total.shape, total.dtype, part.dtype
        (torch.Size([3, 4, 128]), torch.float32, torch.float16)

    """

    def __init__(self) -> None:
        self._key: Any = None
        self._kept: tuple[Tensor, Tensor, Tensor, Tensor]

    def take(
        self, query: Tensor, v_head_size: int, several: bool = True
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return buffers (total, its LSE, part, its LSE); the same ones for the same shape.

        Args:
            query: (num_tokens, num_heads, head size).
            v_head_size: of the outputs.
            several: False: the total is elsewhere; here it is empty.

        """
        rows = query.shape[:2]
        shape = (*rows, v_head_size)
        key = (shape, query.dtype, query.device, several)
        if key != self._key:
            precise = torch.float64 if query.dtype == torch.float64 else torch.float32
            self._key = key
            self._kept = (
                query.new_empty(shape if several else (0,), dtype=precise),
                query.new_empty(rows, dtype=precise),
                query.new_empty(shape),
                query.new_empty(rows, dtype=precise),
            )
        return self._kept


ALIGNED = 16
"""Bytes: what kernels store at a time."""


def is_dense(out: Tensor) -> bool:
    """Whether any backend writes an output of this layout."""
    return out.is_contiguous() and out.data_ptr() % ALIGNED == 0


class Merged(Op):
    """Attention to parts of the keys for the same queries, merged in float32.

    `parts` are ops, each with the queries that it is for; the first is for all of them. `rows` are the
    step's. `counts`: the queries of each request, merged by calls of their own, since a vectorised
    operator's last elements may have other bits than the same numbers elsewhere.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Rows, Op]],
        merge: MergeBackend,
        buffers: MergeBuffers,
        rows: Rows = None,
        counts: Sequence[int] | None = None,
    ):
        self.parts, self.merge, self.buffers, self.rows = tuple(parts), merge, buffers, rows
        self.counts = counts
        self.inner = [op for _, op in self.parts]

    def run(self, frame: Frame) -> None:
        """Run the parts one after another. Writes the merged output and LSE.

        Two parts of all rows are rounded once as they are merged, so the output is the total.
        """
        query, out = frame.query, frame.out
        (_, first), *others = self.parts
        direct = [rows for rows, _ in others] in ([], [None]) and is_dense(out)
        total, total_lse, part, part_lse = self.buffers.take(query, out.shape[2], not direct)
        first.run(frame.but(out=out if direct else part, lse=total_lse))
        if direct:
            total = out
        else:
            total.copy_(part)
        for rows, op in others:
            if rows is None:
                op.run(frame.but(out=part, lse=part_lse))
                for states in by_request(self.counts, total, total_lse, part, part_lse):
                    self.merge.run(*states)
                continue
            some, some_lse = total[rows], total_lse[rows]
            of_rows, found_lse = part[: len(some)], part_lse[: len(some)]
            op.run(frame.but(query=query[rows], out=of_rows, lse=found_lse))
            self.merge.run(some, some_lse, of_rows, found_lse)
            total[rows], total_lse[rows] = some, some_lse
        if not direct:
            out.copy_(total)
        if frame.lse is not None:
            frame.lse.copy_(total_lse)


def with_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add a learned logit a head to the softmax's denominator, in new tensors.

    Args:
        output: (tokens, heads, size).
        lse: float32 (tokens, heads), natural logarithm; -inf where a row saw no key.
        sinks: floats (heads,), a logit for each.

    Returns:
        The output, in the wider dtype of `output` and `lse`, and the LSE. A row that saw no key stays as
        it is: not even the sink counts.

    Examples:
        >>> output, lse = with_sinks(torch.ones(1, 2, 4), torch.zeros(1, 2), torch.zeros(2))
        >>> bool((output == 0.5).all())
        True

    """
    sinks = sinks.to(lse.dtype)
    weight = torch.sigmoid(lse - sinks).nan_to_num(0.0)  # -inf less -inf: no key, and no sink
    total = torch.logaddexp(lse, sinks).where(lse != -torch.inf, -torch.inf)
    return output * weight[..., None], total


class TorchMerge(MergeBackend):
    """TORCH_MERGE: a part's weight is `sigmoid(part_lse - total_lse)`."""

    name: ClassVar[str] = "TORCH_MERGE"

    def run(self, total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        # Where neither saw a key, -inf - -inf is NaN, and there is nothing to weigh.
        weight = torch.sub(part_lse, total_lse).sigmoid_().nan_to_num_(nan=0.0)
        wide = total.to(weight.dtype)  # the total itself, where that is float32
        wide.lerp_(part.to(wide.dtype), weight[..., None])
        if wide is not total:
            total.copy_(wide)
        torch.logaddexp(total_lse, part_lse, out=total_lse)
