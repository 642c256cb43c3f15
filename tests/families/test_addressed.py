"""Kernels that go by addresses: the same results as over views, whatever the tensors' strides."""

from __future__ import annotations

from typing import Any

import polyattn
import pytest
import torch
from polyattn.calls.bound import attend_whole
from polyattn.calls.dense import attend_dense
from polyattn.calls.memo import memo
from polyattn.calls.plans import CallOptions, group_for_call, plan_lengths, run_plan
from polyattn.kernel import BatchError
from torch import Tensor


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch.manual_seed(0)
    memo.clear()
    with torch.no_grad():
        yield
    memo.clear()


def laid_out(rows: int, tokens: int, heads: int, size: int, order: str) -> Tensor:
    """Return (batch, seqlen, heads, size), in memory as `order` says."""
    if order == "heads first":
        return torch.randn(rows, heads, tokens, size).transpose(1, 2)
    if order == "of a wider one":
        return torch.randn(rows, tokens, heads + 3, size + 5)[:, :, 1 : heads + 1, :size]
    if order == "tokens first":
        return torch.randn(tokens, rows, heads, size).transpose(0, 1)
    return torch.randn(rows, tokens, heads, size)


ORDERS = ("plain", "heads first", "of a wider one", "tokens first")


@pytest.mark.parametrize("backend", ["NATIVE_ATTN", "TORCH_SDPA"])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_dense_rows(order: str, heads_first: bool, backend: str) -> None:
    for other in ORDERS:
        q, k, v = (
            laid_out(3, n, h, 32, kind)
            for n, h, kind in ((7, 4, order), (11, 2, other), (11, 2, order))
        )
        tensors = [t.transpose(1, 2) for t in (q, k, v)] if heads_first else [q, k, v]
        asked = CallOptions(True, needs_lse=True, backend=backend)
        found, lse = attend_dense(*tensors, asked, heads_first=heads_first)
        wanted, wanted_lse = attend_dense(
            *(t.contiguous() for t in (q, k, v)), asked._replace(backend="VANILLA")
        )
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)
        assert found.is_contiguous() and lse is not None and lse.is_contiguous()


@pytest.mark.parametrize("heads_out", [False, True])
@pytest.mark.parametrize("heads_first", [False, True])
def test_results_lie_by_tokens_where_sizes_say_nothing(heads_first: bool, heads_out: bool) -> None:
    """As many heads as tokens: only strides tell a query that was copied from its result."""
    q, k, v = (torch.randn(2, 4, 4, 32) for _ in range(3))
    wide = torch.randn(2, 4, 4, 40)[..., :32].copy_(q)
    asked = CallOptions(backend="NATIVE_ATTN")
    order = {"heads_first": heads_first, "heads_out": heads_out}
    wanted = attend_dense(q, k, v, asked._replace(backend="VANILLA"), **order)[0]
    for query in (q, wide, wide.transpose(1, 2).contiguous().transpose(1, 2)):
        found = attend_dense(query, k, v, asked, **order)[0]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert (found.transpose(1, 2) if heads_out else found).is_contiguous()


def test_parameters_come_along() -> None:
    q, k, v = (torch.randn(2, n, 4, 32) for n in (3, 9, 9))
    sinks, slopes = torch.randn(4), torch.rand(4)
    for params in (
        {"sinks": sinks},
        {"alibi_slopes": slopes},
        {"sinks": sinks, "alibi_slopes": slopes},
    ):
        found, wanted = (
            polyattn.attention(q, k, v, causal=True, backend=name, **params)  # type: ignore[arg-type]
            for name in ("NATIVE_ATTN", "VANILLA")
        )
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_packed_tensors_are_checked_where_they_lie_otherwise() -> None:
    """What was found right once isn't looked at again; whatever differs in a size or a stride is."""
    q, k, v = (torch.randn(12, h, 32) for h in (4, 2, 2))
    asked = CallOptions(True, backend="NATIVE_ATTN")
    step = plan_lengths(group_for_call(q, 2, 32, asked, False, False, cached=False), (5, 7), (5, 7))
    lens = (5, 7), (5, 7), None
    first, _ = attend_whole(q, k, v, lens, asked)
    again, _ = attend_whole(q, k, v, lens, asked)
    wide = torch.randn(12, 5, 40)[:, 1:3, :32].copy_(v)
    strided = [attend_whole(q, k, wide, lens, asked)[0] for _ in range(2)]
    for found in (again, *strided, run_plan(step, q, k, v)[0]):
        assert torch.equal(found, first)
    for wrong in ((q[:-1], k, v), (q, k[:, :1], v), (q, k, v.double()), (q, k[:-1], v[:-1])):
        with pytest.raises(BatchError):
            attend_whole(*wrong, lens, asked)
    with torch.enable_grad(), pytest.raises(BatchError, match="gradient"):
        attend_whole(q, k.requires_grad_(), v, lens, asked)


def test_a_last_dimension_with_gaps_is_copied() -> None:
    q, k, v = (torch.randn(9, h, 64)[..., ::2] for h in (4, 2, 2))
    asked = CallOptions(backend="NATIVE_ATTN")
    step = plan_lengths(group_for_call(q, 2, 32, asked, False, False, cached=False), (9,), (9,))
    wanted = run_plan(step, *(t.contiguous() for t in (q, k, v)))[0]
    for _ in range(2):
        torch.testing.assert_close(attend_whole(q, k, v, ((9,), (9,), None), asked)[0], wanted)


@pytest.mark.parametrize(
    "backend", ["NATIVE_ATTN", "TORCH_SDPA", pytest.param("FLEX_ATTENTION", marks=pytest.mark.slow)]
)
def test_a_layer_copies_them_too(backend: str) -> None:
    spec = polyattn.LayerSpec(
        num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", cached=False
    )
    layer = polyattn.Attention(polyattn.LayerGroup(polyattn.select(spec, backend=backend)))
    batch = polyattn.Batch.from_lens([9], [9])
    q, k, v = (torch.randn(9, h, 64)[..., ::2] for h in (4, 2, 2))
    wanted = layer(*(t.contiguous() for t in (q, k, v)), None, batch)
    torch.testing.assert_close(layer(q, k, v, None, batch), wanted)
    with pytest.raises(BatchError, match="its last one must be 1"):
        layer(q, k, v, None, batch, out=torch.empty(9, 4, 64)[..., ::2])
