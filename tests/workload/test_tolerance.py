"""Where do tolerances come from? Steps in float64, with those roundings alone that it allows for."""

from __future__ import annotations

import math

import pytest
import torch
from polyattn import LayerSpec, resolve_device
from polyattn.conformance.harness.base import Harness
from polyattn.spec.kinds import AttentionKind
from polyattn.spec.latent import LatentSpec
from polyattn.workload.compare import lse_error, output_error, row_errors
from polyattn.workload.tolerance import LATENT, TOLERANCES, tolerance_of
from torch import Tensor

HEADS, NOPE, ROPE, RANK, KEYS = 16, 32, 16, 64, 40
SCALE = 0.7
"""Logits of up to 15: that is where a rounded query moves a weight most."""
E4M3FN = torch.float8_e4m3fn

SPEC = LayerSpec(
    kind=AttentionKind.MLA, num_heads=HEADS, head_size=NOPE + ROPE, v_head_size=NOPE, scale=SCALE,
    latent=LatentSpec(rank=RANK, rope_head_size=ROPE), needs_lse=True,
)  # fmt: skip


def rounded(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype).double()


def off_by_one_rounding(dtype: torch.dtype) -> tuple[float, float]:
    """Errors of a random layer's output and LSE in float64; the absorbed query alone is rounded."""
    query = rounded(HEADS, NOPE + ROPE, dtype=dtype)
    w_uk, w_uv = (
        (torch.randn(HEADS, *shape) / RANK**0.5).to(dtype).double()
        for shape in ((NOPE, RANK), (RANK, NOPE))
    )
    latent, rope = rounded(KEYS, RANK, dtype=dtype), rounded(KEYS, ROPE, dtype=dtype)
    absorbed = torch.einsum("hn,hnr->hr", query[:, :NOPE], w_uk)
    positions = torch.einsum("hn,tn->ht", query[:, NOPE:], rope)

    def attend(absorbed: Tensor) -> tuple[Tensor, Tensor]:
        logits = (absorbed @ latent.T + positions) * SCALE
        out = torch.einsum("ht,tr,hrv->hv", logits.softmax(-1), latent, w_uv)
        return out[None], logits.logsumexp(-1)[None]

    out, lse = attend(absorbed.to(dtype).double())
    expected, expected_lse = attend(absorbed)
    return output_error(out, expected), lse_error(lse, expected_lse)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_one_rounding_alone_uses_up_what_a_dtype_is_allowed(name: str) -> None:
    """So what MLA's decode exceeded was the tolerance's fault, not the kernel's."""
    torch.manual_seed(0)
    limit, allowed = TOLERANCES[name], tolerance_of(SPEC.replace(dtype=name))
    errors = [off_by_one_rounding(getattr(torch, name)) for _ in range(300)]
    out, lse = (max(found) for found in zip(*errors, strict=True))
    assert 0.8 * limit.output < out < allowed.output, out
    assert lse < allowed.lse / 2, lse


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_torch_mla_at_large_logits_is_within_its_tolerance(dtype: str) -> None:
    spec = SPEC.replace(dtype=dtype)
    assert tolerance_of(spec).output == LATENT * TOLERANCES[dtype].output
    harness = Harness("TORCH_MLA", resolve_device("cpu"), 5)
    layer = harness.layer(spec)
    for _ in range(20):
        harness.step(layer, [(1, 40), (1, 7), (1, 100)]).check()


def off_by_e4m3(heads: int, size: int, scale: float, dice: torch.Generator) -> tuple[float, float]:
    """Errors of decodes' outputs and LSE in float64; queries and weights alone are rounded to e4m3."""
    outs, lses, right, right_lses = [], [], [], []
    for keys in (3, 11, 24, 55, 64, 140, 343):
        query = torch.randn(heads, size, generator=dice).double()
        key, value = (torch.randn(keys, size, generator=dice).double() for _ in range(2))
        step = query.abs().max() / 448
        for asked, exact in ((query, True), ((query / step).to(E4M3FN).double() * step, False)):
            logits = asked @ key.T * scale
            weights = (logits - logits.amax(-1, keepdim=True)).exp()
            total = weights.sum(-1, keepdim=True)
            if not exact:
                weights = (weights * 256).to(E4M3FN).double() / 256
            (right if exact else outs).append(weights @ value / total)
            (right_lses if exact else lses).append(logits.logsumexp(-1))
    return (
        output_error(torch.cat(outs), torch.cat(right)),
        lse_error(torch.cat(lses), torch.cat(right_lses)),
    )


@pytest.mark.parametrize(("size", "scale"), [(64, 0.125), (64, 0.36), (128, 0.02), (128, 0.4)])
def test_what_e4m3_may_be_off_by_grows_as_logits_do(size: int, scale: float) -> None:
    """The worst of many rows is near what is allowed, and within it, however large logits are."""
    dice = torch.Generator().manual_seed(0)
    spec = LayerSpec(
        num_heads=32, num_kv_heads=1, head_size=size, scale=scale, kv_cache_dtype="fp8_e4m3",
        fp8_compute=True, needs_lse=True,
    )  # fmt: skip
    allowed = tolerance_of(spec)
    errors = [off_by_e4m3(32, size, scale, dice) for _ in range(40)]
    out, lse = (max(found) for found in zip(*errors, strict=True))
    assert 0.2 * allowed.output < out < allowed.output, out
    assert lse < allowed.lse, lse
    if scale * math.sqrt(size) > 1:  # a smaller logit's rounding is hidden by bfloat16's
        assert lse > 0.4 * allowed.lse, lse


@pytest.mark.parametrize(("size", "error"), [(1, 1e-6), (64, 1e-4)])
def test_a_row_of_one_element_is_measured_against_its_tokens_rows(size: int, error: float) -> None:
    right = torch.ones(5, 15, size, dtype=torch.float64)
    right[2, 3] = 1e-3
    out = right.clone()
    out[2, 3] += 1e-6
    assert output_error(out, right) == pytest.approx(error, rel=0.04)
    out[2, 3] = 0.05  # of another head, say
    errors = row_errors(out, right)
    assert float(errors[2, 3]) > 0.04 and int((errors > 1e-9).sum()) == 1
