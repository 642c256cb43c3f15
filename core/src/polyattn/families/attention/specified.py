"""What are the bits of attention at `batch_invariant="machines"`? Specified, in torch's operators.

`docs/invariance.md` has it in words. Each product and each sum is one operator here, so that it is
rounded once. None sums along a dimension, since torch's order of such sums differs by machine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.families.attention.alibi import alibi_slopes
from polyattn.families.attention.reference import visible
from polyattn.runtime.program import Frame, LayerParams
from polyattn.runtime.step.batch import Batch
from polyattn.spec.layer import LayerSpec

BLOCK, SEGMENT = 32, 256
"""Keys that share a maximum, and keys of a partial result; both from position 0 on."""
LOG2_E, LN2_HIGH, LN2_LOW = (
    float.fromhex(x) for x in ("0x1.715476p+0", "0x1.63p-1", "-0x1.bd0106p-13")
)
ROUNDER, LOWEST = 12582912.0, -86.0
"""1.5 * 2^23: what is added to it is rounded to an integer. Below the lowest, the exponential is 0."""
EXPONENTIAL = "0x1.6a23cep-10 0x1.123a2p-7 0x1.5558f2p-5 0x1.555492p-3 0x1.fffffcp-2 1 1"
"""Coefficients of a polynomial on [-ln(2) / 2, ln(2) / 2], the highest power's first."""
LOGARITHM = "0x1.c71c72p-3 0x1.24924ap-2 0x1.99999ap-2 0x1.555556p-1"
"""Those of the series of ln(f) in ((f - 1) / (f + 1))^2, without the first."""
SQRT_HALF = 0x3F3504F3
"""The bits of the root of 1/2."""
QUERIES = 128
"""Queries that are computed at once. The number bounds memory and changes no bit."""

State = tuple[Tensor, Tensor, Tensor]
"""Of rows: the maximum, the sum of weights, and the sums of weighted values."""


def exponential(x: Tensor) -> Tensor:
    """Return e^x for x <= 0."""
    shifted = x * LOG2_E + ROUNDER
    whole = shifted - ROUNDER
    rest = (x - whole * LN2_HIGH) - whole * LN2_LOW
    power = _polynomial(rest, EXPONENTIAL).view(torch.int32) + (shifted.view(torch.int32) << 23)
    return power.view(torch.float32).where(x >= LOWEST, 0.0)


def logarithm(x: Tensor) -> Tensor:
    """Return ln(x) for x >= 1."""
    bits = x.view(torch.int32)
    exponent = (bits - SQRT_HALF) >> 23
    mantissa = (bits - (exponent << 23)).view(torch.float32)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = ratio * (_polynomial(square, LOGARITHM) * square) + (ratio + ratio)
    whole = exponent.to(torch.float32)
    return whole * LN2_HIGH + (whole * LN2_LOW + series)


def _polynomial(x: Tensor, coefficients: str) -> Tensor:
    result = torch.zeros_like(x)
    for each in coefficients.split():
        result = result * x + float.fromhex(each)
    return result


def dots(query: Tensor, key: Tensor) -> Tensor:
    """Return products of rows of (..., queries, size) and (..., keys, size)."""
    padding = -query.shape[-1] % 4
    query, key = (torch.nn.functional.pad(x, (0, padding)) for x in (query, key))
    sums = query.new_zeros(*query.shape[:-1], key.shape[-2], 4)
    for column in range(0, query.shape[-1], 4):
        some = slice(column, column + 4)
        sums = sums + query[..., :, None, some] * key[..., None, :, some]
    return (sums[..., 0] + sums[..., 1]) + (sums[..., 2] + sums[..., 3])


def joined(a: State, b: State) -> State:
    """Return the state of the keys of both; where one has seen no key, the other's."""
    top = torch.maximum(a[0], b[0])
    by_a, by_b = exponential(a[0] - top), exponential(b[0] - top)
    total = a[1] * by_a + b[1] * by_b
    sums = a[2] * by_a[..., None] + b[2] * by_b[..., None]
    return _where(a[0] == -torch.inf, b, _where(b[0] == -torch.inf, a, (top, total, sums)))


def _where(mask: Tensor, a: State, b: State) -> State:
    return (
        torch.where(mask, a[0], b[0]),
        torch.where(mask, a[1], b[1]),
        torch.where(mask[..., None], a[2], b[2]),
    )


def _with_block(state: State, scores: Tensor, value: Tensor) -> State:
    """Return the state with a block's keys; scores are -inf where a row doesn't see a key."""
    top = torch.maximum(state[0], scores.amax(-1))
    shrink = exponential(state[0] - top)
    total, sums = state[1] * shrink, state[2] * shrink[..., None]
    seen = scores != -torch.inf
    weights = exponential(scores - top[..., None]).where(seen, 0.0)
    products = (weights[..., None] * value[..., None, :, :]).where(seen[..., None], 0.0)
    for weight, product in zip(weights.unbind(-1), products.unbind(-2), strict=True):
        total, sums = total + weight, sums + product
    return _where(~seen.any(-1), state, (top, total, sums))


def attend(
    spec: LayerSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: LayerParams,
    position: int,
    mask: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the output and the LSE of some queries of one sequence, as `reference.attend` does.

    All are float32 (tokens, heads, size). `position`: the first query's; `mask`: what the queries see.
    """
    ratio, keys = spec.gqa_ratio, len(key)
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    key, value = (x.repeat_interleave(ratio, dim=0) for x in (key, value))
    scores = dots(query, key) * torch.tensor(spec.scale, dtype=torch.float32, device="cpu").item()
    if spec.alibi:
        slopes = params.alibi_slopes
        slopes = alibi_slopes(spec.num_heads) if slopes is None else slopes
        at = torch.arange(query.shape[1], device=query.device)[:, None] + position
        distance = (torch.arange(keys, device=query.device) - at).to(torch.float32)
        scores = scores + slopes.to(query)[:, None, None] * distance
    scores = scores.masked_fill(~mask, -torch.inf)
    rows = scores.shape[:2]
    sums = query.new_zeros(*rows, spec.v_head_size)
    nothing = query.new_full(rows, -torch.inf), query.new_zeros(rows), sums
    state = nothing
    for first in range(0, keys, SEGMENT):
        part = nothing
        for block in range(first, min(keys, first + SEGMENT), BLOCK):
            some = slice(block, min(keys, block + BLOCK))
            part = _with_block(part, scores[..., some], value[:, some])
        state = joined(state, part)
    blind = state[0] == -torch.inf
    if spec.learned_sinks:
        assert params.sinks is not None
        sink = params.sinks.detach().to(query)[:, None].expand(rows)
        state = _where(blind, nothing, joined(state, (sink, torch.ones_like(sink), sums)))
    top, total, sums = state
    out = (sums / total[..., None]).masked_fill(blind[..., None], 0.0)
    lse = (top + logarithm(total)).masked_fill(blind, -torch.inf)
    return out.transpose(0, 1), lse.T


def run(spec: LayerSpec, batch: Batch, frame: Frame) -> None:
    """Compute a step into the frame's output and LSE, on its device."""
    frame.out.zero_()
    if frame.lse is not None:
        frame.lse.fill_(-torch.inf)
    for index, length in enumerate(batch.lens):
        start, end = batch.starts[index], batch.starts[index + 1]
        if not length or start == end:
            continue
        key, value = (x.to(frame.query.device) for x in _held(batch, frame, index, length))
        mask = visible(spec, end - start, length).to(key.device)
        for first in range(start, end, QUERIES):
            rows = slice(first, min(end, first + QUERIES))
            seen, position = mask[first - start :][:QUERIES], length - (end - first)
            query = frame.query[rows]
            out, lse = attend(spec, query, key, value, frame.params, position, seen)
            frame.out[rows] = out
            if frame.lse is not None:
                frame.lse[rows] = lse


def _held(batch: Batch, frame: Frame, index: int, length: int) -> tuple[Tensor, Tensor]:
    """Return a sequence's keys and values (tokens, heads, size)."""
    if frame.cache is None:
        assert frame.key is not None and frame.value is not None
        own = slice(batch.key_starts[index], batch.key_starts[index] + length)
        return frame.key[own], frame.value[own]
    assert batch.block_table is not None
    blocks = batch.block_table[index, : -(-length // frame.cache.block_size)].long()
    key, value = (
        stored[blocks].flatten(0, 1)[:length] for stored in (frame.cache.key, frame.cache.value)
    )
    return key, value
