"""A fake of xFormers' attention operators: binds the recorded signatures, computes with the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from xformers.ops.fmha import attn_bias, cutlass

__all__ = ["Inputs", "attn_bias", "cutlass"]


@dataclass
class Inputs:
    """What an operator is given; the fields and their order are the package's."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_bias: Any = None
    p: float = 0.0
    scale: float | None = None
    output_dtype: Any = None
    is_partial: bool = False
