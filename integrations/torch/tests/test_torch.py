"""torch's attention functions served by polyattn, beside torch's own kernels and formulas."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import polyattn
import polyattn_torch
import pytest
import torch
from formulas import attend, in_window
from polyattn_torch import SdpaMode, operators
from polyattn_torch.operators import Operators, dense_results, varlen_forward
from torch import Tensor, nn
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.nn.functional import scaled_dot_product_attention as sdpa


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    torch.manual_seed(0)
    polyattn_torch.reset()
    yield
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()


def close(found: Tensor, wanted: Tensor, limit: float = 1e-5) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=limit, atol=limit)


def padding(rows: int, keys: int) -> Tensor:
    """Left padding, a different one for each row."""
    return torch.arange(keys) >= torch.arange(rows)[:, None, None, None]


SEES_NOTHING = torch.ones(2, 1, 7, 9, dtype=torch.bool)
SEES_NOTHING[0, :, 3] = False
CALLS: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "plain": ((4, 4, 7, 9), {}),
    "scale": ((4, 4, 7, 9), {"scale": 0.7}),
    "causal": ((4, 4, 9, 9), {"is_causal": True}),
    "causal, fewer queries": ((4, 4, 5, 9), {"is_causal": True}),
    "causal, more queries": ((4, 4, 9, 5), {"is_causal": True}),
    "causal, one query": ((4, 4, 1, 9), {"is_causal": True}),
    "grouped": ((4, 2, 7, 9), {"enable_gqa": True}),
    "padding": ((4, 4, 7, 9), {"attn_mask": padding(2, 9)}),
    "float padding": ((4, 4, 7, 9), {"attn_mask": padding(2, 9).float().log()}),
    "a mask for all rows": ((4, 4, 7, 9), {"attn_mask": torch.ones(7, 9).tril(2).bool()}),
    "a query that sees nothing": ((4, 4, 7, 9), {"attn_mask": SEES_NOTHING}),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_are_torchs() -> None:
    """A tensor inside vmap has no memory of its own that a kernel could read."""
    q, k = torch.randn(3, 2, 4, 5, 16), torch.randn(3, 2, 4, 7, 16)
    over = torch.vmap(lambda query, key: sdpa(query, key, key))
    wanted = over(q, k)
    with SdpaMode(), pytest.warns(UserWarning, match="vmap"):
        assert torch.equal(over(q, k), wanted)


def test_a_scale_of_nothing_is_no_default() -> None:
    q = torch.randn(1, 2, 5, 16)
    with SdpaMode(), pytest.warns(UserWarning, match="scale=0"):
        close(sdpa(q, q, q, scale=0.0), q.mean(2, keepdim=True).expand_as(q))


def tensors(heads: int, kv_heads: int, queries: int, keys: int) -> list[Tensor]:
    """Queries, keys and values, the latter as models have them: tokens first in memory."""
    key, value = (torch.randn(2, keys, kv_heads, 16).transpose(1, 2) for _ in range(2))
    return [torch.randn(2, heads, queries, 16), key, value]


@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_the_mode_gives_what_torch_gives(name: str) -> None:
    sizes, given = CALLS[name]
    qkv = tensors(*sizes)
    wanted = sdpa(*qkv, **given)
    with SdpaMode():
        close(sdpa(*qkv, **given), wanted)
    assert not polyattn_torch.report().fallbacks
    assert sum(polyattn_torch.report().served.values()) >= 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("queries", [1, 7])
@torch.no_grad()
def test_finite_numbers_hide_keys_from_no_query_that_sees_none(
    dtype: torch.dtype, queries: int
) -> None:
    """All such keys weigh the same. In float16 the least number leaves the scores as they are."""
    qkv = [t.to(torch.float32 if dtype is torch.float64 else dtype) for t in tensors(4, 2, 7, 9)]
    least, lowest = torch.finfo(dtype).min, -torch.inf
    mask = torch.zeros(2, 1, queries, 9, dtype=dtype)
    mask[0, :, :, :2] = mask[1, :, :4] = least
    mask[1, :, 1:3, 2:] = mask[0, :, 3:4] = lowest
    exact = mask if dtype is torch.float64 else mask.double()
    wanted = sdpa(*(t.double() for t in qkv), attn_mask=exact, enable_gqa=True)
    limit = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype, 1e-5)
    dense = [t.transpose(1, 2) for t in qkv]
    out, lse = polyattn.attention(*dense, mask=mask, return_lse=True)
    close(out.transpose(1, 2), wanted, limit)
    scores = (qkv[0].double() @ qkv[1].double().repeat_interleave(2, 1).mT) / 4 + exact
    shown = scores.logsumexp(-1).float().transpose(1, 2)
    torch.testing.assert_close(lse, shown, rtol=1e-5, atol=1e-2 if dtype.itemsize == 2 else 1e-5)
    sinks = polyattn.attention(*dense, mask=mask, sinks=torch.zeros(4))
    assert not sinks[1, : min(queries, 4)].any()


@pytest.mark.parametrize("leading", [(), (6,)])
@torch.no_grad()
def test_tensors_without_heads(leading: tuple[int, ...]) -> None:
    qkv = [torch.randn(*leading, 5, 16) for _ in range(3)]
    mask = torch.ones(5, 5).tril().bool()
    wanted = sdpa(*qkv, attn_mask=mask)
    with SdpaMode():
        found = sdpa(*qkv, attn_mask=mask)
    assert found.shape == wanted.shape
    close(found, wanted)
    assert not polyattn_torch.report().fallbacks


@torch.no_grad()
def test_a_mask_is_read_again_after_it_changed() -> None:
    qkv, mask = tensors(4, 4, 7, 9), torch.ones(7, 9, dtype=torch.bool)
    with SdpaMode():
        close(sdpa(*qkv, attn_mask=mask), sdpa(*qkv))
        mask[:, :4] = False
        found = sdpa(*qkv, attn_mask=mask)
    close(found, sdpa(*qkv, attn_mask=mask))
    with torch.inference_mode():
        qkv, mask = tensors(4, 4, 7, 9), torch.ones(7, 9, dtype=torch.bool)
        with SdpaMode():
            sdpa(*qkv, attn_mask=mask)
            mask[:, :4] = False
            found = sdpa(*qkv, attn_mask=mask)
        close(found, sdpa(*qkv, attn_mask=mask))


@pytest.mark.parametrize("shape", [(7, 9), (1, 7, 9), (2, 1, 7, 9)], ids=str)
@torch.no_grad()
def test_a_mask_that_its_caller_drops_is_freed(shape: tuple[int, ...]) -> None:
    mask = torch.ones(shape, dtype=torch.bool)
    with SdpaMode():
        sdpa(*tensors(4, 4, 7, 9), attn_mask=mask)
    dropped = weakref.ref(mask)
    del mask
    gc.collect()
    assert dropped() is None


@torch.no_grad()
def test_a_module_whose_inside_the_mode_does_not_see() -> None:
    module = nn.MultiheadAttention(32, 4, batch_first=True).train()  # eval has a path of its own
    x = torch.randn(2, 6, 32)
    wanted = module(x, x, x, need_weights=False)[0]
    with SdpaMode(), pytest.warns(UserWarning, match="a mode can't see inside"):
        assert torch.equal(module(x, x, x, need_weights=False)[0], wanted)
    polyattn_torch.reset()
    activate_flash_attention_impl("polyattn")
    close(module(x, x, x, need_weights=False)[0], wanted)
    assert sum(polyattn_torch.report().served.values()) == 1


@torch.no_grad()
def test_autocast_computes_in_its_dtype() -> None:
    qkv = tensors(4, 4, 7, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = sdpa(*qkv)
        with SdpaMode():
            found = sdpa(*qkv)
    assert found.dtype == wanted.dtype == torch.bfloat16
    close(found, wanted, 2e-2)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"dropout_p": 0.5}, "dropout_p=0.5"),
        ({"attn_mask": torch.tensor([True, False, True] * 3)[None].expand(7, 9)}, "with holes"),
        ({"attn_mask": torch.randn(7, 9)}, "adds numbers"),
        ({"attn_mask": torch.full((7, 9), -1e9)}, "adds numbers"),
        ({"attn_mask": torch.ones(1, 4, 7, 9, dtype=torch.bool)}, "differs between heads"),
    ],
)
@torch.no_grad()
def test_what_is_not_served_is_torchs_and_named(given: dict[str, Any], why: str) -> None:
    qkv = tensors(4, 4, 7, 9)
    torch.manual_seed(1)
    wanted = sdpa(*qkv, **given)
    torch.manual_seed(1)
    with SdpaMode(), pytest.warns(UserWarning, match="falls back to torch's own attention"):
        found = sdpa(*qkv, **given)
    assert torch.equal(found, wanted)
    assert [why in line for line in polyattn_torch.report().fallbacks] == [True]


def test_gradients_inside_the_mode_are_torchs() -> None:
    qkv = [t.requires_grad_() for t in tensors(4, 4, 7, 9)]
    wanted = torch.autograd.grad(sdpa(*qkv).square().sum(), qkv)
    with SdpaMode(), pytest.warns(UserWarning, match="gradients are asked for"):
        found = torch.autograd.grad(sdpa(*qkv).square().sum(), qkv)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


@torch.no_grad()
def test_compiled_without_a_break() -> None:
    qkv = tensors(4, 4, 9, 9)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with SdpaMode():
            return sdpa(q, k, v, is_causal=True) * 2

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    close(compiled(*qkv), sdpa(*qkv, is_causal=True) * 2)
    assert sum(polyattn_torch.report().served.values()) == 1


@torch.no_grad()
def test_the_operator_of_compiled_graphs_is_what_it_declares() -> None:
    """By torch's own checks, with values of another size than keys."""
    query, key, value = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 24)
    operator, mask = torch.ops.polyattn.sdpa.default, torch.ones(1, 1, 3, 5, dtype=torch.bool)
    for options in ((None, None, True), (mask, torch.randn(4), False)):
        arguments = (query, key, value, *options, 0.3, 5.0, "torch")
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def trained(qkv: list[Tensor], **given: Any) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in qkv]
    out = sdpa(*leaves, **given)
    return [out.detach(), *torch.autograd.grad((out * out.detach().cos()).sum(), leaves)]


@pytest.mark.parametrize("name", CALLS)
def test_the_registration_keeps_torchs_gradients(name: str) -> None:
    sizes, given = CALLS[name]
    qkv = tensors(*sizes)
    wanted = trained(qkv, **given)
    activate_flash_attention_impl("polyattn")
    found = trained(qkv, **given)
    report = polyattn_torch.report()
    restore_flash_attention_impl()
    for a, b in zip(found, wanted, strict=True):
        close(a, b)
    assert not report.fallbacks
    assert sum(report.served.values()) >= 1
    served = sum(polyattn_torch.report().served.values())
    trained(qkv, **given)
    assert sum(polyattn_torch.report().served.values()) == served, "restored, yet still served"


@torch.no_grad()
def test_the_registration_s_outputs_are_what_polyattn_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call that is counted as served, and torch's own kernel answers, gives the same numbers."""
    qkv, ours = tensors(4, 4, 9, 9), operators.sdpa

    def doubled(*args: Any, **more: Any) -> tuple[Tensor, Tensor | None]:
        out, lse = ours(*args, **more)
        return 2 * out, lse

    wanted = sdpa(*qkv, is_causal=True)
    monkeypatch.setattr(operators, "sdpa", doubled)
    activate_flash_attention_impl("polyattn")
    close(sdpa(*qkv, is_causal=True), 2 * wanted)


def test_a_backend_made_of_the_operator_reaches_torchs_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POLYATTN_BACKEND", "prefill=TORCH_SDPA")
    qkv = tensors(4, 4, 9, 9)
    wanted = trained(qkv, is_causal=True)
    activate_flash_attention_impl("polyattn")
    for a, b in zip(trained(qkv, is_causal=True), wanted, strict=True):
        close(a, b)
    assert all("TORCH_SDPA" in line for line in polyattn_torch.report().served)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 1), (3, -1)])
def test_varlen_attn_runs_on_a_cpu_with_gradients(window: tuple[int, int]) -> None:
    lens, key_lens = [3, 1, 6], [5, 4, 6]
    q, k, v = (torch.randn(sum(n), 4, 16, requires_grad=True) for n in (lens, key_lens, key_lens))
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int() for n in (lens, key_lens))
    activate_flash_attention_impl("polyattn")
    out, lse = varlen_attn(  # type: ignore[misc]
        q, k, v, cu_q, cu_k, 6, 6, window_size=window, scale=0.3, return_aux=AuxRequest(lse=True)
    )
    parts = [
        attend(a, b, c, in_window(len(a), len(b), *window), scale=0.3)
        for a, b, c in zip(q.split(lens), k.split(key_lens), v.split(key_lens), strict=True)
    ]
    wanted = torch.cat([p[0] for p in parts])
    close(out, wanted)
    close(lse, torch.cat([p[1] for p in parts], 1))
    weight = torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad((out * weight).sum(), [q, k, v]),
        torch.autograd.grad((wanted * weight).sum(), [q, k, v]),
        strict=True,
    ):
        close(a, b)


@torch.no_grad()
def test_varlen_attn_over_pages() -> None:
    lens, key_lens, page = [2, 1], [21, 7], 16
    q, pool = torch.randn(3, 4, 16), torch.randn(6, page, 2, 16)
    table = torch.tensor([[4, 1], [3, 0]], dtype=torch.int32)
    cu = torch.tensor([0, 2, 3], dtype=torch.int32)
    activate_flash_attention_impl("polyattn")
    out = varlen_attn(
        q, pool, pool, cu, None, 2, 21, window_size=(-1, 0), enable_gqa=True, block_table=table,
        seqused_k=torch.tensor(key_lens, dtype=torch.int32),
    )  # fmt: skip
    for row, (a, n) in enumerate(zip(q.split(lens), key_lens, strict=True)):
        keys = pool[table[row].long()].flatten(0, 1)[:n].repeat_interleave(2, 1)
        close(
            out.split(lens)[row],
            attend(a, keys, keys, in_window(len(a), len(keys), -1, 0), scale=0.25)[0],
        )  # type: ignore[union-attr]


@torch.no_grad()
def test_one_split_gives_a_sequence_its_bits_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own words for `num_splits=1`. Without it no level is asked for."""
    levels, attend_packed = set(), operators.attend_packed

    def seen(query: Tensor, lens: Any, keys: Any, asked: Any, **more: Any) -> Any:
        levels.add(asked.batch_invariant)
        return attend_packed(query, lens, keys, asked, **more)

    monkeypatch.setattr(operators, "attend_packed", seen)
    lens, key_lens = [1, 40, 3, 1], [700, 40, 90, 33]
    q, k = torch.randn(sum(lens), 8, 64), torch.randn(sum(key_lens), 1, 64)
    activate_flash_attention_impl("polyattn")

    def attended(which: Sequence[int], splits: int | None) -> list[Tensor]:
        some = [[part[i] for i in which] for part in (q.split(lens), k.split(key_lens))]
        cu_q, cu_k = (torch.tensor([0, *map(len, x)]).cumsum(0).int() for x in some)
        found = varlen_attn(
            torch.cat(some[0]), torch.cat(some[1]), torch.cat(some[1]), cu_q, cu_k, 40, 700,
            window_size=(-1, 0), enable_gqa=True, num_splits=splits,
        )  # fmt: skip
        return list(found.split([len(x) for x in some[0]]))  # type: ignore[union-attr]

    together = attended(range(4), 1)
    for some in ([0], [1], [2], [3], [3, 1, 0]):
        for found, i in zip(attended(some, 1), some, strict=True):
            assert torch.equal(found, together[i])
    assert levels == {True}
    attended([0], None)
    assert levels == {True, False}


def test_signatures_are_torchs() -> None:
    schemas = torch.ops.aten
    for function, schema, skipped in (
        (Operators._cpu, schemas._scaled_dot_product_flash_attention_for_cpu, 2),
        (Operators._cuda, schemas._scaled_dot_product_flash_attention, 2),
        (operators.varlen_forward, schemas._flash_attention_forward, 0),
        (operators.varlen_backward, schemas._flash_attention_backward, 0),
    ):
        ours = list(inspect.signature(function).parameters)[skipped:]
        assert ours == [a.name for a in schema.default._schema.arguments]


@torch.no_grad()
def test_what_cuda_would_be_given() -> None:
    """No GPU: the results' order and shapes, by value on the CPU."""
    q, k, v = (t.transpose(1, 2) for t in tensors(4, 4, 7, 9))
    out, lse, *_ = varlen_forward(q, k, v, None, None, 7, 9, 0.0, False, False)
    wanted = sdpa(*(t.transpose(1, 2) for t in (q, k, v)))
    close(out, wanted.transpose(1, 2))
    assert lse.shape == (2, 4, 7)
    results = dense_results(q.transpose(1, 2), k.transpose(1, 2), out, lse)
    names = [
        r.name for r in torch.ops.aten._scaled_dot_product_flash_attention.default._schema.returns
    ]
    assert len(results) == len(names)
    given = dict(zip(names, results, strict=True))
    assert (given["max_q"], given["max_k"]) == (7, 9)
    assert given["rng_state"].dtype == torch.uint64


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
def test_a_mask_that_numpy_writes_is_read_again(dtype: torch.dtype) -> None:
    """Torch counts no change of memory that it shares."""
    query, key, value = torch.randn(3, 1, 2, 8, 32, dtype=torch.float32)
    words = np.zeros((8, 8), np.uint8 if dtype is torch.bool else np.uint16)
    mask = torch.from_numpy(words).view(dtype).expand(1, 1, 8, 8)
    seen = 1 if dtype is torch.bool else 0
    hidden = 0 if dtype is torch.bool else 0xFF7F  # bfloat16's least number
    for shape in (np.tril, np.triu):
        words[:] = np.where(shape(np.ones((8, 8))), seen, hidden)
        out = polyattn_torch.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        exact = mask if dtype is torch.bool else mask.float()
        expected = sdpa(query, key, value, attn_mask=exact)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
