"""What is right for a rotary embedding? Each scaling's formula, literally, in float64."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from polyattn.spec.rope import RopeSpec


def inv_freq(rope: RopeSpec, length: int = 0) -> Tensor:
    """Return the angle per position of each rotated pair (Su et al., 2021, with the rope's scaling).

    The scalings are those of transformers: linear, dynamic NTK, proportional, Llama 3's, YaRN (Peng et
    al., 2023) and LongRoPE (Ding et al., 2024).

    Args:
        rope: the layer's rope.
        length: tokens of the longest sequence; dynamic NTK and LongRoPE depend on it.

    Returns:
        float64 (span / 2,) on the CPU, in radians per token.

    Examples:
        >>> inv_freq(RopeSpec(rotary_size=4, base=10000.0)).tolist()
        [1.0, 0.01]

    """
    if rope.clockwise:
        return -inv_freq(dataclasses.replace(rope, clockwise=False), length)
    size = rope.exponent_size or rope.rotary_size
    base = rope.base
    if rope.scaling == "dynamic":
        assert rope.original_length is not None
        stretched = rope.factor * max(length, rope.original_length) / rope.original_length
        base *= (stretched - (rope.factor - 1)) ** (size / (size - 2))
    exponents = torch.arange(0, rope.rotary_size, 2, dtype=torch.float64, device="cpu") / size
    plain = base**-exponents
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "proportional":
        return torch.nn.functional.pad(
            plain / rope.factor, (0, (rope.span - rope.rotary_size) // 2)
        )
    if rope.scaling == "llama3":
        return _llama3(rope, plain)
    if rope.scaling == "yarn":
        return _yarn(rope, plain)
    if rope.scaling == "longrope":
        assert rope.original_length is not None
        factors = rope.long_factors if length > rope.original_length else rope.short_factors
        return plain / torch.tensor(factors, dtype=torch.float64, device="cpu")
    return plain


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Slow long waves by the factor, leave short ones, and blend those between (Llama 3.1)."""
    assert rope.original_length and rope.low_freq_factor and rope.high_freq_factor
    turns = rope.original_length * plain / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)
    return plain * keep + plain / rope.factor * (1 - keep)


def _yarn(rope: RopeSpec, plain: Tensor) -> Tensor:
    """A ramp over the pairs from those that turn `beta_fast` times to `beta_slow` (Peng et al.)."""
    assert rope.original_length and rope.beta_fast and rope.beta_slow

    def pair(turns: float) -> float:
        wave = rope.original_length / (turns * 2 * math.pi)  # type: ignore[operator]
        return rope.rotary_size * math.log(wave) / (2 * math.log(rope.base))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_size - 1)
    ramp = (torch.arange(len(plain), dtype=torch.float64, device="cpu") - low) / (
        (high - low) or 0.001
    )
    ramp = ramp.clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def angles(rope: RopeSpec, positions: Tensor, length: int = 0) -> Tensor:
    """Return each token's angles: float64, `(num_tokens, span / 2)`.

    `positions` is `(num_tokens,)`, or `(axes, num_tokens)` where `rope.sections` has several.
    """
    frequencies = inv_freq(rope, length)
    positions = positions.to(torch.float64)
    if positions.ndim == 1:
        return positions[:, None] * frequencies
    return positions[axes(rope)].T * frequencies


def axes(rope: RopeSpec) -> Tensor:
    """Return which axis of a position each pair follows: int64, `(span / 2,)`."""
    sections = rope.sections or (rope.span // 2,)
    if not rope.sections_interleaved:
        return torch.arange(len(sections), device="cpu").repeat_interleave(
            torch.tensor(sections, device="cpu")
        )
    # The axes take pairs in turn. The first one has the remaining pairs.
    owner = torch.zeros(sum(sections), dtype=torch.int64, device="cpu")
    for axis, count in list(enumerate(sections))[1:]:
        owner[axis : count * len(sections) : len(sections)] = axis
    return owner


def rotate(
    x: Tensor, positions: Tensor, rope: RopeSpec, length: int = 0, offset: int = 0
) -> Tensor:
    """Return `x` rotated, in float64: `(num_tokens, num_heads, head_size)`.

    `offset` is the first rotated element of a head: an MLA layer's rope part comes last.
    """
    x = x.to(torch.float64)
    turn = angles(rope, positions, length)[:, None]
    cos, sin = turn.cos() * rope.attention_factor, turn.sin() * rope.attention_factor
    before, part, after = x.split([offset, rope.span, x.shape[-1] - offset - rope.span], dim=-1)
    if rope.pairing == "neox":
        first, second = part.chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    else:
        first, second = part[..., 0::2], part[..., 1::2]
        rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
        rotated = rotated.flatten(-2)
    return torch.cat((before, rotated, after), -1)


def query_temperature(rope: RopeSpec, positions: Tensor) -> Tensor:
    """Return the factor of the query at each position: float64, `(num_tokens,)`."""
    if rope.temperature_length is None:
        return torch.ones(positions.shape, dtype=torch.float64, device="cpu")
    steps = (positions.to(torch.float64) + rope.temperature_offset) / rope.temperature_length
    return (1 + rope.temperature * torch.log1p(steps.floor())) * (
        1 + steps
    ) ** rope.temperature_power
