"""A recurrence without a layer, as a function: parameters and states come with the call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyattn.calls.memo import group_for, remembered
from polyattn.errors import BatchError
from polyattn.families.recurrent.layer import Recurrent
from polyattn.runtime.group import LayerGroup, StepPlan
from polyattn.runtime.inputs import check_parameter
from polyattn.runtime.step.batch import Batch


def recurrence(
    inputs: Sequence[Tensor],
    params: Mapping[str, Tensor],
    query_lens: Sequence[int],
    states: Tensor | None = None,
    **fields: Any,
) -> tuple[Tensor, Tensor]:
    """Run a recurrence over packed sequences. Forward only.

    Args:
        inputs: the kind's inputs in the order of `polyattn.spec.recurrence.FORMS`, (tokens, ...) each.
        params: the kind's parameters by their names there.
        query_lens: tokens of each sequence.
        states: (num_seqs, ...), what each sequence starts from; default: zero.
        fields: the fields of the `LayerSpec`, without `dtype`, which is the first input's.

    Returns:
        The output (tokens, ...), and the sequences' new states (num_seqs, ...), new tensors.

    Raises:
        BatchError: shapes don't fit, or a tensor requires a gradient.
        SpecError, SelectionError: as `select`.

    Examples:
        >>> q, k, v = torch.randn(3, 5, 2, 16)
        >>> layer = {"kind": "linear", "num_heads": 2, "head_size": 16, "recurrent": RecurrentSpec()}
        >>> decay = {"decay": torch.tensor([-0.5, -0.1])}
        >>> out, states = recurrence((q, k, v), decay, [3, 2], **layer)
        >>> out.shape, states.shape
        (torch.Size([5, 2, 16]), torch.Size([2, 2, 16, 16]))

    """
    group = group_for(inputs[0].device, dtype=inputs[0].dtype, **fields)
    layer = Recurrent(group, checks=False, **params)
    after = group.allocate_states(max(1, len(query_lens)))
    if states is not None:
        wanted = (len(query_lens), *after.data.shape[1:])
        if states.shape != wanted:
            raise BatchError(f"states have shape {tuple(states.shape)}; it must be {wanted}")
        check_parameter("states", states)
        after.data[: len(query_lens)].copy_(states)
    elif 0 in query_lens:  # no kernel writes the state of a sequence without tokens
        after.data.zero_()
    step = _plan(group, tuple(query_lens), states is not None)
    return layer(*inputs, states=after, plan=step), after.data[: len(query_lens)]


@remembered
def _plan(group: LayerGroup, query_lens: tuple[int, ...], continued: bool) -> StepPlan:
    # A sequence continues where its length exceeds its query.
    lens = [n + continued for n in query_lens]
    slots = torch.arange(len(lens), device=group.torch_device)
    return group.plan(Batch.from_lens(query_lens, lens, state_slots=slots))
