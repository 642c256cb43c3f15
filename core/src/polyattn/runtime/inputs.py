"""What is refused of a call's tensors, whatever the layer?"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from polyattn.errors import BatchError, PolyattnError, describe, shown

P = ParamSpec("P")
R = TypeVar("R")


def bad_input(
    name: str,
    tensor: Tensor,
    shape: tuple[Any, ...],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> BatchError:
    """Return the error for a tensor of another shape, dtype or device than it must have."""
    wanted = f"({', '.join(map(str, shape))})" + (f" of {dtype}" if dtype else "")
    actual = f"{tuple(tensor.shape)} of {tensor.dtype}"
    if device is not None:
        wanted, actual = f"{wanted} on {device}", f"{actual} on {tensor.device}"
    if name == "query" and dtype is not None and tensor.dtype is not dtype:
        by = "qkv_dtype" if dtype.itemsize == 1 else "dtype"
        default = "; the default, also of a config without one, is bfloat16" * (by == "dtype")
        wanted += f". LayerSpec.{by} sets the dtype{default}"
    return BatchError(f"{name} is {actual}; it must be {wanted}")


def torch_device(value: Any, error: type[PolyattnError] = BatchError) -> torch.device:
    """Return a torch device from its name or itself. Raises `BatchError`, or `error` if passed."""
    try:
        return torch.device(value)
    except (TypeError, ValueError, RuntimeError) as why:
        raise error(f"device={shown(value)} is no torch device: {describe(why)}") from why


def same_device(one: torch.device, other: torch.device) -> bool:
    """Whether two devices are one; without an index (`cuda`) a device is any of its type."""
    return one == other or (one.type == other.type and None in (one.index, other.index))


def as_wide(tensor: Tensor) -> bool:
    """Whether the tensor's device has no wider integers than int32."""
    if tensor.dtype != torch.int32 or tensor.device.type in ("cpu", "cuda"):
        return False
    return tensor[:0].long().dtype == torch.int32


def check_is_tensor(
    name: str, value: Any, where: str = "", error: type[PolyattnError] = BatchError
) -> None:
    """Check that an argument is a tensor. Raises `BatchError`, or `error` if passed."""
    if isinstance(value, Tensor):
        check_has_address(name, value, error)
        return
    shape = getattr(value, "shape", None)
    what = f"={shown(value, 40)}" if shape is None else f" is an array of shape {shown(shape)} and"
    remedy = "" if value is None else "; torch.as_tensor makes one of an array or a list"
    raise error(f"{name}{what} must be a tensor{where}{remedy}")


def check_has_address(name: str, tensor: Tensor, error: type[PolyattnError] = BatchError) -> None:
    """Refuse a tensor that holds others, such as a DTensor. Raises `BatchError`, or `error` if passed."""
    if tensor.__class__ is not Tensor and hasattr(tensor, "__tensor_flatten__"):
        raise error(
            f"{name} is a {type(tensor).__name__}, which has no address; pass the tensor that it holds: "
            "of a DTensor to_local()"
        )


def check_parameter(name: str, tensor: Tensor, error: type[PolyattnError] = BatchError) -> None:
    """Refuse a parameter without an address or of complex numbers. Raises `BatchError`, or `error`.

    A conversion to kernels' dtypes would drop the imaginary part.
    """
    check_has_address(name, tensor, error)
    if tensor.is_complex():
        raise error(f"{name} is {tensor.dtype}; it must be real")


def check_is_real(name: str, tensor: Tensor) -> None:
    """Refuse what stands for other tensors: no kernel can read it. Raises `BatchError`."""
    if tensor.device.type == "meta":  # not is_meta, which is true of torchax's tensors too
        raise BatchError(
            f"{name} is on the meta device and holds no numbers; move it to a real device"
        )
    if isinstance(tensor, FakeTensor):
        raise BatchError(
            f"{name} is a FakeTensor and holds no numbers; leave FakeTensorMode, or use torch.compile"
        )
    if tensor.is_nested or tensor.layout is not torch.strided:
        what = "nested" if tensor.is_nested else str(tensor.layout)
        raise BatchError(
            f"{name} is {what}; kernels read dense tensors: pass packed or padded rows"
        )
    check_has_address(name, tensor)
    if torch._C._get_tracing_state() is not None:
        raise BatchError("torch.jit.trace can't record attention; use torch.compile instead")
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        raise BatchError("make_fx can't record attention; use torch.export instead")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise BatchError(
            f"{name} is inside torch.vmap or another torch.func transform; pass the whole batch instead"
        )


def as_tensor(name: str, value: Any, error: type[PolyattnError] = BatchError) -> Tensor:
    """Return a tensor, also from numbers. Raises `BatchError`, or `error` if passed."""
    if isinstance(value, Tensor):
        return value
    try:
        return torch.tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError) as why:
        raise error(f"{name}={shown(value)} must be a tensor or numbers: {describe(why)}") from why


def check_tensor(name: str, value: Any, device: torch.device, seen: bool = False) -> None:
    """Check that a layer's argument is a tensor on its device, because kernels use addresses.

    `seen`: the layer's earlier call was with real tensors. Raises `BatchError`.
    """
    if value.__class__ is not Tensor or value.device != device:
        check_is_tensor(name, value, f" on {device}")
        if not same_device(value.device, device):
            raise BatchError(f"{name} is on {value.device}, the layer on {device}; move it there")
    elif seen:
        return
    check_is_real(name, value)


Expected = tuple[Any, tuple[Any, ...], torch.dtype]
"""A call's tensor, and the shape and dtype that it must have."""


def check_tensors(device: torch.device, seen: bool = False, /, **expected: Expected) -> None:
    """Check a call's tensors, each by its name; `seen` as `check_tensor`. Raises `BatchError`."""
    for name, (tensor, shape, dtype) in expected.items():
        check_tensor(name, tensor, device, seen)
        if tensor.shape != shape or tensor.dtype is not dtype:
            raise bad_input(name, tensor, shape, dtype)


def check_apart(out: Tensor, **inputs: Tensor | None) -> None:
    """Check that each element of a caller's output has memory of its own. Raises `BatchError`."""
    if 0 in out.stride() and not out.is_contiguous():
        raise BatchError(f"out has strides {out.stride()}: its elements share memory; clone it")
    for name, tensor in inputs.items():
        if not isinstance(tensor, Tensor):
            continue
        if torch._C._is_alias_of(out, tensor) and _meet(out, tensor):  # type: ignore[attr-defined]
            raise BatchError(
                f"out shares memory with {name}, which is read while out is written; pass another tensor"
            )


def _meet(one: Tensor, other: Tensor) -> bool:
    """Whether two views of one storage share an element, or lie so that this is hard to say."""
    if not one.numel() or not other.numel():
        return False
    apart, (mine, theirs) = other.data_ptr() - one.data_ptr(), (_span(t, 0) for t in (one, other))
    if apart >= mine or -apart >= theirs:
        return False
    period = 0
    for dim in range(min(one.dim(), other.dim()) - 1):
        step, another = (t.stride(dim) * t.element_size() for t in (one, other))
        if step != another or not step or period % step:
            return True
        period, apart = step, apart % step
        if apart >= _span(one, dim + 1) and period - apart >= _span(other, dim + 1):
            return False  # rows, or heads, beside one another
    return True


def _span(tensor: Tensor, dim: int) -> int:
    """Return the bytes from the first element to the last along the dimensions from `dim` on."""
    pairs = zip(tensor.shape[dim:], tensor.stride()[dim:], strict=True)
    return (sum((n - 1) * stride for n, stride in pairs) + 1) * tensor.element_size()


def form_of(tensor: Tensor | None) -> tuple[Any, ...]:
    """Return a tensor's shape, strides, dtype and device; () of None."""
    return () if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def side_by_side(tensor: Tensor) -> Tensor:
    """Return a tensor without gaps within its rows: kernels stride by tokens and heads alone."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def check_slots(slot_mapping: Any, device: torch.device, seen: bool = False) -> None:
    """Check where `store` is to write to: (tokens,), int64 or int32. Raises `BatchError`."""
    check_tensor("slot_mapping", slot_mapping, device, seen)
    if slot_mapping.dim() != 1 or slot_mapping.dtype not in (torch.int64, torch.int32):
        raise bad_input("slot_mapping", slot_mapping, ("num_tokens",), torch.int64)


def check_aligned(**tensors: Tensor | None) -> None:
    """Check alignment for accelerators' kernels, which load 16 bytes at a time. Raises `BatchError`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.data_ptr() % 16:
            raise BatchError(
                f"{name} starts at an address that is not a multiple of 16 bytes; copy it, or slice at "
                "a multiple"
            )


def compiling() -> bool:
    """Return whether `torch.compile` or `torch.export` traces this thread's call.

    `torch.compiler.is_compiling` alone is true of all threads while one of them compiles.

    Examples:
        >>> from polyattn.host import compiling
        >>> compiling()
        False

    """
    return torch.compiler.is_compiling() and (
        torch.compiler.is_dynamo_compiling() or active_fake_mode() is not None
    )


# The public torch.compiler.disable imports torch._dynamo at once, which takes more than a second.
@_disable_dynamo
def _eagerly(function: Callable[..., R], args: Any, kwargs: Any) -> R:
    return function(*args, **kwargs)


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Let `torch.compile` break its graph at `function` and trace nothing in it.

    Args:
        function: any function or method. An eager call pays about 0.4 us.

    Returns:
        A function of the same arguments and results.

    Examples:
        >>> from polyattn.host import untraced
        >>> untraced(len)([1, 2])
        2

    """

    @wraps(function)
    def door(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return _eagerly(function, args, kwargs)
        return function(*args, **kwargs)

    return door


def in_forward_mode() -> bool:
    """Whether torch's forward-mode differentiation is on, where tensors may carry tangents."""
    return forward_ad._current_level >= 0


def asks_gradients(*tensors: Tensor | None) -> bool:
    """Return whether gradients are recorded and one of the tensors requires one.

    Args:
        tensors: the call's tensors, or None.

    Examples:
        >>> asks_gradients(torch.zeros(1, requires_grad=True), None)
        True

    """
    return torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )


def refuse_gradients(**tensors: Tensor | None) -> None:
    """Refuse tensors that require a gradient or carry a tangent: backends differentiate nothing.

    Args:
        tensors: the call's tensors by name, or None.

    Raises:
        BatchError: one requires a gradient while gradients are recorded, or is dual (forward mode).

    Examples:
        >>> with torch.no_grad():
        ...     refuse_gradients(query=torch.zeros(1, requires_grad=True))

    """
    if in_forward_mode():
        for name, tensor in tensors.items():
            if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
                raise BatchError(
                    f"{name} carries a tangent of forward-mode differentiation, which attention here "
                    "would lose; pass forward_ad.unpack_dual(tensor).primal"
                )
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise BatchError(
                f"{name} requires a gradient, and attention here is forward only; run it under "
                "torch.no_grad(), or detach it"
            )


def refuse(remedy: str = "leave it out, or uninstall()", /, **options: object) -> None:
    """Refuse, by name, arguments of a host that change a result and have no counterpart here.

    Args:
        remedy: what the caller can do, as the message ends.
        options: the arguments by name; None, False and 0 pass.

    Raises:
        PolyattnError: one has another value.

    Examples:
        >>> refuse(dropout_p=0.0)
        >>> refuse("use 0", dropout_p=0.1)
        Traceback (most recent call last):
        polyattn.errors.PolyattnError: dropout_p is given, which polyattn doesn't serve here; use 0

    """
    for name, value in options.items():
        if value is not None and (isinstance(value, Tensor) or value != 0):
            raise PolyattnError(f"{name} is given, which polyattn doesn't serve here; {remedy}")


def capturing(tensor: Tensor) -> bool:
    """Return whether a CUDA graph is being captured, during which nothing can be copied to the host.

    Args:
        tensor: any tensor of the call.

    Examples:
        >>> capturing(torch.zeros(1))
        False

    """
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def own_precision(device_type: str) -> AbstractContextManager[Any]:
    """Return a context in which autocast leaves the dtypes of a layer's computation alone.

    Args:
        device_type: torch's type of device ("cuda").

    Examples:
        >>> with torch.autocast("cpu"), own_precision("cpu"):
        ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
        torch.float32

    """
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return _AS_IT_IS


_AS_IT_IS = nullcontext()
