"""How does a layer hold its parameters? By reference, in the form that kernels read."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.errors import PolyattnError, SpecError, finite, shown
from polyattn.runtime.inputs import check_parameter
from polyattn.spec.layer import LayerSpec


class Weight:
    """A tensor of the model in the form that kernels read: their dtype, their device.

    Kernels read the tensor itself if it has that form, else a copy, which is refreshed whenever the
    tensor has changed. So values count that are loaded after the layer was built, copied, pickled or
    moved, or was on the meta device. A parameter that was replaced (`load_state_dict(assign=True)`) is
    another tensor: assign it to `tensor`. torch doesn't count writes through `parameter.data`: after the
    layer's first call, assign the parameter to `tensor` again. `offset` is added to a copy.
    """

    def __init__(
        self,
        name: str,
        tensor: Tensor,
        device: torch.device,
        dtype: torch.dtype,
        offset: float = 0.0,
    ):
        self.name, self._device, self._dtype, self._offset = name, device, dtype, offset
        self._tensor = tensor
        self._read: Tensor | None = None
        self._is_copy = False
        self._seen: tuple[int, int] | None = None
        if tensor.device.type != "meta":
            self.current()
            self._seen = None  # loaders write through `.data`, which counts no version

    @classmethod
    def per_head(
        cls, name: str, tensor: Tensor | None, spec: LayerSpec, wanted: bool, device: torch.device
    ) -> Weight | None:
        """Return one number for each head, or None if the spec needs none. Raises `SpecError`."""
        if (tensor is not None) != wanted:
            field = "learned_sinks" if name == "sinks" else "alibi"
            text = f"{name} needs {field}=True in the spec; select with it, or leave {name} out"
            if wanted:
                text = (
                    f"{name}=None, and the spec has {field}=True; pass float32 ({spec.num_heads},)"
                )
            raise SpecError(f"{text} ({spec})")
        if tensor is None:
            return None
        check_shape(name, tensor, (spec.num_heads,))
        return cls(name, tensor, device, torch.float32)

    @property
    def tensor(self) -> Tensor:
        """The model's tensor. Another of the same shape may take its place; raises `SpecError`."""
        return self._tensor

    @tensor.setter
    def tensor(self, tensor: Tensor) -> None:
        check_shape(self.name, tensor, tuple(self._tensor.shape))
        self._tensor, self._seen = tensor, None

    def current(self) -> Tensor:
        """Return what kernels read: the same tensor, unless the model's was replaced or moved.

        Raises `SpecError` where the model's is on the meta device: it has no values yet.
        """
        tensor = self._tensor
        # What was made in inference mode counts no versions.
        seen = None if tensor.is_inference() else (_place(tensor), tensor._version)
        if self._read is not None and seen is not None and seen == self._seen:
            return self._read
        if tensor.device.type == "meta":  # not is_meta, which is true of torchax's tensors too
            raise SpecError(
                f"{self.name} is on the meta device and has no values; load the model's weights, and "
                f"where that replaced the parameter, set `tensor` of the layer's {self.name}"
            )
        form = tensor.dtype, tensor.device
        if not self._offset and form == (self._dtype, self._device) and tensor.is_contiguous():
            if self._read is None or self._is_copy or _place(self._read) != _place(tensor):
                # Itself where it may be: what JAX holds is another array after each write to it.
                self._read = tensor.detach() if tensor.requires_grad else tensor
                self._is_copy = False
        elif self._read is None or not self._is_copy:
            with torch.inference_mode(False):  # else no later value may be written into it
                self._read = tensor.detach().to(self._device, self._dtype, copy=True).contiguous()
            self._is_copy = True
        else:
            self._read.copy_(tensor.detach())
        if self._offset and self._is_copy:
            self._read += self._offset
        self._seen = seen
        return self._read


def check_shape(name: str, value: object, shape: tuple[int, ...]) -> None:
    """Check that a layer's parameter is a real tensor of this shape. Raises `SpecError`."""
    if not isinstance(value, Tensor):
        raise SpecError(f"{name}={shown(value)} must be a tensor of shape {shape}")
    check_parameter(name, value, SpecError)
    if value.shape != shape:
        raise SpecError(f"{name} has shape {tuple(value.shape)}; it must be {shape}")


def _place(tensor: Tensor) -> int:
    """Return where a tensor's numbers lie, 0 where its device has no addresses."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def positive(
    name: str, value: object, quantised: bool, error: type[PolyattnError] = SpecError
) -> float:
    """Return a scale. Raises `error` unless it is a positive number, and 1 without a use."""
    if not finite(value) or value <= 0:  # type: ignore[operator]
        raise error(f"{name}={shown(value)} must be a positive number")
    if value != 1.0 and not quantised:
        raise error(f"{name}={value!r} scales a quantised cache, and this one isn't; leave it out")
    return float(value)  # type: ignore[arg-type]
