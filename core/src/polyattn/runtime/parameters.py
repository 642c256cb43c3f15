"""How does a layer hold its parameters? By reference, in the form that kernels read."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polyattn.errors import SpecError
from polyattn.spec.layer import LayerSpec


class HeadValues:
    """A layer's numbers, one for each head or each element, which may be a model's own weight.

    Kernels read `dtype` on their device. Where the given tensor is that, it is what they read; else
    a copy is, refreshed in place whenever the tensor has changed.
    """

    def __init__(self, given: Tensor, device: torch.device, dtype: torch.dtype = torch.float32):
        self.given = given
        plain = given.dtype is dtype and given.device == device and given.is_contiguous()
        self._read = given.detach() if plain else given.detach().to(device, dtype).contiguous()
        self._version = None if plain else given._version

    @classmethod
    def of(
        cls, name: str, given: Tensor | None, spec: LayerSpec, wanted: bool, device: torch.device
    ) -> HeadValues | None:
        """Return the values, None where the spec asks for none. Raises `SpecError`."""
        if (given is not None) != wanted:
            raise SpecError(
                f"{name} {'is missing' if wanted else 'was given'}: the spec "
                f"{'asks for it' if wanted else 'does not ask for it'} ({spec})"
            )
        if given is None:
            return None
        if given.shape != (spec.num_heads,):
            raise SpecError(
                f"{name} has shape {tuple(given.shape)}; it must be ({spec.num_heads},)"
            )
        return cls(given, device)

    def current(self) -> Tensor:
        """Return what kernels read: the same tensor at each call."""
        if self._version is not None and self._version != self.given._version:
            self._read.copy_(self.given.detach())
            self._version = self.given._version
        return self._read


def positive(name: str, value: object, quantised: bool) -> float:
    """Return a scale. Raises `SpecError` unless it is a positive number, and 1 without a use."""
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type, operator]
        raise SpecError(f"{name}={value!r} must be a positive number")
    if value != 1.0 and not quantised:
        raise SpecError(
            f"{name}={value!r} scales a quantised cache, and this one isn't; leave it out"
        )
    return float(value)  # type: ignore[arg-type]
