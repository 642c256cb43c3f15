"""How are 8-bit numbers scaled? Each one is multiplied by a scale, a number or a tensor.

Kernels read scales in tensors when they run. A value that an engine writes into one counts from the
next step on, also in a captured graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.errors import SpecError
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES, quantize
from polyattn.runtime.parameters import Weight, positive
from polyattn.spec.layer import LayerSpec

Scale = float | Tensor
"""A number, or float32 (num_kv_heads,) on the device."""


class ScaleTensor:
    """A scale that kernels read, float32 (num_kv_heads,), from a tensor that it references."""

    def __init__(self, name: str, tensor: Tensor, heads: int, device: torch.device):
        self.weight = Weight(name, tensor, device, torch.float32)
        self._heads = heads
        self._read: Tensor | None = None
        self._view: Tensor | None = None

    def current(self) -> Tensor:
        """Return the scale of each KV head: side by side, or of one number a view of stride 0."""
        read = self.weight.current()
        if read is not self._read or self._view is None:
            self._read, self._view = read, read.reshape(-1).expand(self._heads)
        return self._view


class LayerScales:
    """A layer's four scales: of a quantised query, key, value and output.

    A cache uses the key's and the value's.

    If the spec's `scales` are `"number"`s they are floats, else tensors, which are referenced and not
    read: their values may change at any time. After a capture (`captured`) no scale can be replaced,
    because the graph has the number or the tensor's address. Raises `SpecError`.
    """

    NAMES = ("q_scale", "k_scale", "v_scale", "out_scale")

    def __init__(self, spec: LayerSpec, device: torch.device, scales: dict[str, Scale]):
        self.spec, self._device = spec, device
        self.captured = False
        self.numbers: dict[str, float] = {}
        self.tensors: dict[str, ScaleTensor] = {}
        for name in self.NAMES:
            self.set(name, scales[name])

    def set(self, name: str, value: Scale) -> None:
        """Put another number, or another tensor, in a scale's place. Raises `SpecError`."""
        used = name in used_scales(self.spec)
        if self.captured and used:
            how = "" if self.spec.scales != "number" else "select with scales='tensor' and "
            raise SpecError(
                f"{name} is replaced after a graph was captured, which goes on with the old one; "
                f"{how}write into the tensor that the layer was given, or capture again with a new layer"
            )
        if self.spec.scales == "number":
            if isinstance(value, Tensor):
                raise SpecError(
                    f"{name} is a tensor, and the spec has scales='number'; select with "
                    "scales='tensor' or 'head', or pass a number"
                )
            self.numbers[name] = positive(name, value, used)
            return
        heads = self.spec.num_kv_heads
        many = self.spec.scales == "head" and name != "out_scale"
        if not isinstance(value, Tensor):
            number, shape = positive(name, value, used), (heads,) if many else ()
            value = torch.full(shape, number, dtype=torch.float32, device="cpu")
        elif not used:
            raise SpecError(f"{name} scales nothing of this layer; leave it out ({self.spec})")
        if value.shape != (heads,) if many else value.numel() != 1:
            wanted = f"({heads},), one a KV head" if many else "(), one number"
            raise SpecError(
                f"{name} has shape {tuple(value.shape)}; with scales={self.spec.scales!r} it must "
                f"be {wanted}"
            )
        if not value.is_floating_point():
            raise SpecError(f"{name} is {value.dtype}; it must be a floating-point tensor")
        self.tensors[name] = ScaleTensor(name, value, heads, self._device)

    def get(self, name: str) -> Scale:
        """Return a scale as `set` takes it: the number, or the tensor that kernels read."""
        return self.numbers[name] if self.numbers else self.tensors[name].weight.tensor


def used_scales(spec: LayerSpec) -> frozenset[str]:
    """Return the names of the scales that a layer uses."""
    names: set[str] = set()
    if spec.stored_dtype != spec.dtype:
        names |= {"k_scale", "v_scale"}
    if spec.qkv_dtype != "auto":
        names |= {"q_scale", "k_scale", "v_scale"}
    if spec.out_dtype != "auto":
        names.add("out_scale")
    return frozenset(names)


def input_dtype(spec: LayerSpec) -> torch.dtype:
    """Return the dtype of a layer's queries, keys and values."""
    return STORAGE_DTYPES[spec.dtype if spec.qkv_dtype == "auto" else spec.qkv_dtype]


def output_dtype(spec: LayerSpec) -> torch.dtype:
    """Return the dtype of a layer's output."""
    return STORAGE_DTYPES[spec.dtype if spec.out_dtype == "auto" else spec.out_dtype]


def of_heads(scale: Scale, heads: int) -> Scale:
    """Return a scale in the shape that multiplies (..., heads, size): a number, or (heads, 1)."""
    if not isinstance(scale, Tensor):
        return scale
    return scale.repeat_interleave(heads // len(scale))[:, None]


def dequantized(tensor: Tensor, scale: Scale, dtype: torch.dtype) -> Tensor:
    """Return a tensor of 8 bits dequantised into a wider dtype.

    Args:
        tensor: (tokens, heads, size); of 16 or more bits it is converted alone.
        scale: a number, or float32 (num_kv_heads,).
        dtype: of the result.

    Returns:
        (tokens, heads, size) in `dtype`.

    Examples:
        >>> query = torch.ones(1, 1, 2).to(torch.float8_e4m3fn)
        >>> dequantized(query, 0.5, torch.float32).flatten().tolist()
        [0.5, 0.5]

    """
    if tensor.dtype.itemsize > 1:
        return tensor.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    factor = of_heads(scale, tensor.shape[1])
    if isinstance(factor, Tensor):
        factor = factor.to(tensor.device, wide)
    return (tensor.to(wide) * factor).to(dtype)


def write_output(out: Tensor, values: Tensor, scale: Scale) -> None:
    """Write a kernel's output to the call's, quantised if that has 8 bits.

    Args:
        out: (tokens, heads, size), written.
        values: the output, of the same shape in a wider dtype.
        scale: the output's scale, a number or float32 (num_kv_heads,), whose first number counts.

    Examples:
        >>> out = torch.zeros(1, 1, 2, dtype=torch.float8_e4m3fn)
        >>> write_output(out, torch.tensor([[[1.0, 4.0]]]), 2.0)
        >>> out.float().flatten().tolist()
        [0.5, 2.0]

    """
    if out.dtype.itemsize > 1:
        out.copy_(values)
        return
    number = scale[:1] if isinstance(scale, Tensor) else scale
    out.copy_(quantize(values, out.dtype, number))
