"""Arguments of kernels that rotate keys as they load them (`cache_rope`): constants and a table."""

from __future__ import annotations

import math

import torch
from polyattn.kernel import LayerSpec, RopeSpec, inv_freq
from torch import Tensor

from polyattn_triton.launch import power

PAIRINGS = {"neox": 1, "gptj": 2}


def rope_constants(spec: LayerSpec, at: int) -> tuple[int, int, int]:
    """Return the kernels' arguments for keys' rotation: the pairing, the elements, the table's address.

    `at`: which of the functions' inputs is the table's address. Zeros: keys aren't rotated.
    """
    rope = spec.rope
    if rope is None or not (rope.span or rope.temperature):
        return 0, 0, 0
    return PAIRINGS[rope.pairing], rope.span, at


def turns(rope: RopeSpec, block_n: int, device: torch.device) -> Tensor:
    """Return the table that the kernels read: float32, computed in float64.

    The temperature, its length and offset, 0; each pair's frequency in turns of a circle, in two parts;
    then the cosine and the sine of each place in a tile of `block_n` keys. The padding turns nothing.
    """
    pairs = rope.span // 2
    width = power(pairs)
    frequencies = torch.zeros(width, dtype=torch.float64, device="cpu")
    frequencies[:pairs] = inv_freq(rope) / (2 * math.pi)
    high = frequencies.float()
    low = (frequencies - high.double()).float()
    angles = torch.arange(block_n, device="cpu")[:, None] * frequencies * (2 * math.pi)
    # Queries and keys are each multiplied by the factor: here both times.
    factor = rope.attention_factor**2
    places = torch.stack([angles.cos() * factor, angles.sin() * factor], 1)
    temperature = rope.temperature, rope.temperature_length or 1, rope.temperature_offset, 0.0
    head = torch.tensor(temperature, dtype=torch.float32, device="cpu")
    return torch.cat([head, high, low, places.flatten().float()]).to(device)
