"""A step's parts, merged: the states' own sum, rounded once."""

from __future__ import annotations

import pytest
import torch
from polyattn import LayerSpec
from polyattn.registry.devices import resolve_device
from polyattn.runtime.merge import AttentionState, MergeBuffers, Merged, TorchMerge, merge_states
from polyattn.runtime.program import Frame, LayerParams, Op


class Known(Op):
    """A part whose state is known."""

    def __init__(self, state: AttentionState):
        self.state = state

    def run(self, frame: Frame) -> None:
        frame.out.copy_(self.state.output)
        assert frame.lse is not None
        frame.lse.copy_(self.state.lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_are_merged_as_states_are(count: int, dense: bool, dtype: torch.dtype) -> None:
    """Whether the output itself is merged, or a total in float32 is copied to it."""
    torch.manual_seed(count)
    states = [
        AttentionState(torch.randn(5, 4, 16).to(dtype), torch.randn(5, 4)) for _ in range(count)
    ]
    out = torch.full((5, 4, 16 if dense else 24), torch.nan, dtype=dtype)[..., :16]
    lse = torch.empty(5, 4)
    backend = TorchMerge(LayerSpec(num_heads=4, head_size=16), None, resolve_device("cpu"))
    merged = Merged([(None, Known(state)) for state in states], backend, MergeBuffers())
    merged.run(Frame(torch.randn(5, 4, 16).to(dtype), None, None, None, LayerParams(), out, lse))
    exact = merge_states([AttentionState(x.output.double(), x.lse.double()) for x in states])
    half = torch.finfo(dtype).eps / 2
    assert ((out.double() - exact.output).abs() <= half * exact.output.abs() + 1e-6).all()
    assert (lse - exact.lse).abs().max() < 1e-5
