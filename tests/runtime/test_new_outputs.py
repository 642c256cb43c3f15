"""A call without `out` returns the tensor that a library made: nothing copies it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from devices import everywhere
from polyattn import Attention, Batch, LayerGroup, LayerSpec, attention, select
from polyattn.kernel import Frame, LayerParams, RecurrentFrame
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch_operators import Operators

SIZE = (3, 2, 64)
"""Tokens, heads and size of a frame's output."""


@contextmanager
def copies() -> Iterator[Counter[tuple[int, ...]]]:
    """Count the copies into tensors, by their shapes."""
    counts: Counter[tuple[int, ...]] = Counter()

    def note(name: str, args: Any, result: Any) -> None:
        if name == "aten.copy_.default":
            counts[tuple(args[0].shape)] += 1

    with Operators(note):
        yield counts


def encoder(device: str, backend: str, **fields: Any) -> tuple[Attention, Batch, list[Tensor]]:
    spec = LayerSpec(
        num_heads=4, head_size=64, dtype="float16", cached=False, causal=False, **fields
    )
    layer = Attention(LayerGroup(select(spec, device, backend=backend)))
    torch.manual_seed(0)
    tensors = [torch.randn(4 * 57, 4, 64).half().to(device) for _ in range(3)]
    return layer, Batch.from_lens([57] * 4, [57] * 4, device=device), tensors


def by_torch(tensors: list[Tensor]) -> Tensor:
    dense = [each.double().cpu().unflatten(0, (4, 57)).transpose(1, 2) for each in tensors]
    return scaled_dot_product_attention(*dense).transpose(1, 2).flatten(0, 1)


@everywhere("TORCH_SDPA", "TORCH_SDPA CUDNN_ATTENTION")
def test_a_library_s_output_is_not_copied(device: str, backend: str) -> None:
    layer, batch, tensors = encoder(device, backend)
    plan, out = layer.plan(batch), torch.full_like(tensors[0], torch.nan)
    with copies() as none:
        result = layer(*tensors, plan=plan)
    with copies() as one:
        written = layer(*tensors, plan=plan, out=out)
    assert written is out and none[out.shape] == 0 and one[out.shape] == 1
    assert result.is_contiguous() and torch.equal(result, out)
    assert torch.allclose(result.double().cpu(), by_torch(tensors), atol=2e-3)
    wide = out.new_zeros(4 * 57, 6, 64)
    assert layer(*tensors, plan=plan, out=wide[:, 1:5]).data_ptr() == wide[:, 1:].data_ptr()
    assert torch.equal(wide[:, 1:5], out) and not wide[:, 0].any() and not wide[:, 5].any()


@everywhere("TORCH_SDPA", "TORCH_SDPA CUDNN_ATTENTION")
def test_a_call_without_a_layer_copies_nothing(device: str, backend: str) -> None:
    tensors = encoder(device, backend)[2]
    dense = [each.unflatten(0, (4, 57)) for each in tensors]
    first = attention(*dense, backend=backend)
    with copies() as none:
        result = attention(*dense, backend=backend)  # as bound by the first
    assert not none[tuple(tensors[0].shape)]
    assert result.data_ptr() != first.data_ptr() and torch.equal(result, first)
    assert torch.allclose(result.flatten(0, 1).double().cpu(), by_torch(tensors), atol=2e-3)


@everywhere("TORCH_SDPA", "TORCH_SDPA CUDNN_ATTENTION")
def test_compiled_graphs_own_their_outputs(device: str, backend: str) -> None:
    layer, batch, tensors = encoder(device, backend)
    plan = layer.plan(batch)
    eager = layer(*tensors, plan=plan)
    compiled = torch.compile(lambda *given: layer(*given, plan=plan) * 2, backend="aot_eager")
    assert torch.equal(compiled(*tensors), eager * 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures")
def test_cuda_graphs_write_one_address() -> None:
    layer, batch, tensors = encoder("cuda", "TORCH_SDPA")
    plan = layer.plan(batch)
    layer(*tensors, plan=plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(*tensors, plan=plan)
    tensors[0].mul_(0.5)
    graph.replay()
    assert torch.allclose(out.double().cpu(), by_torch(tensors), atol=2e-3)


def frame_of(out: Tensor, fresh: bool) -> Frame:
    return Frame(out, None, None, None, LayerParams(), out, None, fresh=fresh)


@pytest.mark.parametrize("make", [
    lambda: torch.ones(SIZE, dtype=torch.float16),
    lambda: torch.ones(3, 64, 2).transpose(1, 2),
    lambda: torch.ones(3, 4, 64)[:, ::2],
], ids=["another dtype", "transposed", "with gaps"])  # fmt: skip
def test_what_is_unlike_a_new_output_is_copied(make: Any) -> None:
    out = torch.zeros(SIZE)
    for frame in (frame_of(out, True), RecurrentFrame({}, {}, out, out, fresh=True)):
        frame.set_out(make())
        assert frame.out is out and bool((out == 1).all())
        out.zero_()


def test_a_part_and_a_copy_write_the_frame_s_output() -> None:
    out = torch.zeros(SIZE)
    frame = frame_of(out, True)
    frame.part(slice(1, 2)).set_out(torch.ones(1, 2, 64))
    assert out[:, 0, 0].tolist() == [0, 1, 0]
    frame.but(lse=None).set_out(torch.full(SIZE, 2.0))
    assert frame.out is out and bool((out == 2).all())
    RecurrentFrame({}, {}, out, out, fresh=True).but(states=out).set_out(torch.ones(SIZE))
    assert bool((out == 1).all())


def test_eight_bits_are_quantised() -> None:
    out = torch.zeros(SIZE).to(torch.float8_e4m3fn)
    frame = frame_of(out, True)
    frame.params.out_scale = 0.5
    frame.set_out(torch.ones(SIZE))
    assert frame.out is out and bool((out.float() == 2).all())
