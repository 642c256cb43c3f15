"""Is a result right, and if not, where is it wrong? Messages for a kernel's author."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable

import torch
from torch import Tensor

from polyattn.runtime.step.batch import Batch
from polyattn.spec.layer import LayerSpec
from polyattn.workload.compare import lse_error, output_error, row_errors
from polyattn.workload.steps import pairs
from polyattn.workload.tolerance import tolerance_of


def judge(
    who: str,
    spec: LayerSpec,
    batch: Batch,
    out: Tensor,
    lse: Tensor | None,
    expected: tuple[Tensor, Tensor | None],
    label: str = "",
    offset: float = 0.0,
    mistake: Callable[[], str] = str,
) -> None:
    """Assert that an output and an LSE, where there is one, are within the spec's tolerance.

    `offset`: what all logits lie near. `mistake`: says what a wrong output would be right for.
    """
    limit = tolerance_of(spec, offset)
    error = output_error(out, expected[0])
    assert error <= limit.output, (
        f"{label}the output is off by {error:.3g} (allowed {limit.output:g}){mistake()}: "
        f"{worst_row(batch, out, expected[0], limit.output)}; {spec}; "
        f"(query, length) {pairs(batch)}; {who}"
    )
    if lse is not None and expected[1] is not None:
        error = lse_error(lse, expected[1])
        assert error <= limit.lse, (
            f"{label}the LSE is off by {error:.3g} (allowed {limit.lse:g}): "
            f"{worst_lse(batch, lse, expected[1])}; {spec}; (query, length) {pairs(batch)}; {who}"
        )


def worst_row(batch: Batch, out: Tensor, expected: Tensor, limit: float) -> str:
    """Say which (token, head) row of an output is off most, and which are off at all."""
    errors = row_errors(out, expected)
    bad = ~(errors <= limit)
    token, head = divmod(int(errors.nan_to_num(torch.inf).argmax()), errors.shape[1])
    tokens, heads = (set(places.tolist()) for places in bad.nonzero(as_tuple=True))
    sequences = {bisect_right(batch.starts, place) - 1 for place in tokens}
    text = (
        f"{int(bad.sum())} of {bad.numel()} rows (token, head): heads {_numbers(heads, bad.shape[1])}, "
        f"sequences {_numbers(sequences, sum(map(bool, batch.query_lens)))}; the worst is head {head} of "
        f"{place_of(batch, token)}"
    )
    if not bool(torch.isfinite(out[token, head]).all()):
        text += (
            "; it isn't finite: what lies beyond a length, and unused cache, is NaN and infinities here, "
            "which a weight of 0 doesn't hide"
        )
    return text


def worst_lse(batch: Batch, lse: Tensor, expected: Tensor) -> str:
    """Say where an LSE is off most, and whether it is one of base 2."""
    lse, expected = lse.detach().to("cpu", torch.float64), expected.to("cpu", torch.float64)
    off = (lse - expected).abs().masked_fill(lse == expected, 0.0).nan_to_num(torch.inf)
    token, head = divmod(int(off.argmax()), off.shape[1])
    text = (
        f"{float(lse[token, head]):.5g} instead of {float(expected[token, head]):.5g} for head {head} of "
        f"{place_of(batch, token)}"
    )
    seen = expected.isfinite() & (expected.abs() > 0.1)
    ratios = lse[seen] / expected[seen]
    if len(ratios) and bool(((ratios - math.log2(math.e)).abs() < 0.01).all()):
        text += (
            "; all are log2(e) times what they must be: it is the logarithm of base 2, not natural"
        )
    return text


def _numbers(chosen: set[int], count: int) -> str:
    return "all" if len(chosen) == count else ", ".join(map(str, sorted(chosen)))


def place_of(batch: Batch, token: int) -> str:
    """Say which token of a step that is, and where in its sequence it stands."""
    row = bisect_right(batch.starts, token) - 1
    first, count, length = batch.starts[row], batch.query_lens[row], batch.lens[row]
    return (
        f"token {token} (sequence {row}, query {token - first} of {count}, place "
        f"{length - count + token - first} of {length})"
    )
