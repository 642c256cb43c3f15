"""Chunked recurrences after a token that forgets nearly all: sums are large, their differences count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from polyattn import Batch, LayerSpec, Recurrent, RecurrentSpec, select
from polyattn.families.recurrent import reference
from polyattn.families.recurrent.workload import recurrent_inputs, recurrent_params
from polyattn.spec.recurrence import form_of
from polyattn_cpu.scans import delta_scan, gated_scan, low_rank_scan
from torch import Tensor

TOKENS = 40


def rates(*shape: int, at: int, generator: torch.Generator) -> Tensor:
    found = -0.02 * torch.rand(*shape, generator=generator)
    found.select(at, 5).fill_(-900.0)
    return found


def gated(dtype: torch.dtype) -> Tensor:
    dice = torch.Generator().manual_seed(1)
    q, k = (torch.randn(TOKENS, 1, 16, generator=dice) for _ in range(2))
    v, g = torch.randn(TOKENS, 2, 8, generator=dice), rates(TOKENS, 2, at=0, generator=dice)
    state = torch.randn(1, 16, 16, generator=dice).to(dtype)
    out = torch.empty(TOKENS, 2, 8, dtype=dtype)
    gated_scan(*(t.to(dtype) for t in (q, k, v, g)), state, out)
    return out


def delta(dtype: torch.dtype) -> Tensor:
    dice = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, TOKENS, 16, generator=dice) for _ in range(3))
    g, beta = rates(2, TOKENS, at=1, generator=dice), torch.rand(2, TOKENS, generator=dice)
    state = torch.randn(2, 16, 16, generator=dice)
    return delta_scan(*(t.to(dtype) for t in (q, k / 4, v, g, beta, state)))


def low_rank(dtype: torch.dtype) -> Tensor:
    dice = torch.Generator().manual_seed(1)
    q, k, v, a, b = (torch.randn(2, TOKENS, 16, generator=dice) for _ in range(5))
    g, state = rates(2, TOKENS, 16, at=1, generator=dice), torch.randn(2, 16, 16, generator=dice)
    return low_rank_scan(*(t.to(dtype) for t in (q, k, v, g, a / 8, b / 8, state)))


@pytest.mark.parametrize("scan", [gated, delta, low_rank])
def test_a_token_that_forgets_all_costs_no_precision_after_it(
    scan: Callable[[torch.dtype], Tensor],
) -> None:
    found, expected = scan(torch.float32).double(), scan(torch.float64)
    error = (found - expected).norm() / expected.norm()
    assert float(error) < 2e-6, float(error)


@pytest.mark.parametrize("kind", ["gdn", "kda", "rwkv6", "rwkv7"])
@pytest.mark.parametrize("rate", [-1e6, -1e30, -torch.inf])
def test_a_token_that_forgets_all_is_exact(kind: str, rate: float) -> None:
    """An engine so begins another text within a sequence."""
    spec = LayerSpec(
        kind=kind, num_heads=2, head_size=16, dtype="float32", recurrent=RecurrentSpec()
    )  # type: ignore[arg-type]
    dice = torch.Generator().manual_seed(1)
    params = recurrent_params(spec, dice)
    named = dict(zip(form_of(spec).inputs, recurrent_inputs(spec, TOKENS, dice), strict=True))
    named["w" if "w" in named else "g"][::7] = rate
    batch = Batch.from_lens([TOKENS], [TOKENS + 1], state_slots=torch.tensor([0]))
    layer = Recurrent(select(spec, "cpu", backend="TORCH_SCAN"), **params)
    states = layer.group.allocate_states(1)
    states.data.normal_(generator=dice)
    expected, after = reference.forward(spec, named, params, states.data, batch)
    out = layer(*named.values(), states=states, plan=batch)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)
    torch.testing.assert_close(states.data.double(), after, rtol=0, atol=3e-6)


def test_linear_attention_with_keys_of_one_element_sums_values() -> None:
    spec = LayerSpec(
        kind="linear", num_heads=4, num_kv_heads=2, head_size=1, v_head_size=8, dtype="float32",
        scale=1.0, recurrent=RecurrentSpec(),
    )  # fmt: skip
    layer = Recurrent(select(spec, "cpu", backend="TORCH_SCAN"), decay=torch.zeros(4))
    states, slots = layer.group.allocate_states(1), torch.tensor([0])
    dice = torch.Generator().manual_seed(1)
    v, one = torch.randn(5, 4, 8, generator=dice), torch.ones(5, 2, 1)
    out = layer(one, one, v, states=states, plan=Batch.from_lens([5], [5], state_slots=slots))
    torch.testing.assert_close(out, v.cumsum(0))
    torch.testing.assert_close(states.data[0, :, 0], v.sum(0))


@pytest.mark.parametrize("backend", ["VANILLA_SCAN", "TORCH_SCAN"])
def test_a_channel_that_hardly_forgets_takes_up_what_its_root_says(backend: str) -> None:
    """1 - a a of a = exp(-r) is 2 r to the first order: no difference of 1 and what is nearly 1."""
    spec = LayerSpec(
        kind="rg_lru", num_heads=8, head_size=1, dtype="float64", recurrent=RecurrentSpec()
    )
    rate = torch.full((8,), -30.0, dtype=torch.float64)
    layer = Recurrent(select(spec, "cpu", backend=backend), Lambda=rate)
    states, dice = layer.group.allocate_states(1), torch.Generator().manual_seed(1)
    states.data.zero_()
    x, gate, forget = torch.randn(3, 1, 8, generator=dice, dtype=torch.float64)
    batch = Batch.from_lens([1], [2], state_slots=torch.tensor([0]))
    out = layer(x, gate, forget, states=states, plan=batch)
    root = (2 * 8 * rate.exp() * forget.sigmoid()).sqrt()
    torch.testing.assert_close(out, root * gate.sigmoid() * x, rtol=1e-11, atol=0)
