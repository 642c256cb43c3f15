"""Imports torchax beside torch from 2.13 on, which no longer has some overloads that torchax names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


@contextmanager
def named_overloads() -> Iterator[None]:
    """Let torchax name operators by dimension names, which torch 2.13 removed.

    torchax 0.0.13 lists them as keys of its tables (`aten.prod.dim_Dimname`) while it is imported, and
    fails where they are gone (google/torchax#101; #102 fixes it for 0.0.14). Nothing can call them; a
    stand-in takes each one's place as a key.
    """
    from torch._ops import OpOverloadPacket

    real: Any = OpOverloadPacket.__getattr__

    def find(packet: Any, name: str) -> Any:
        try:
            return real(packet, name)
        except AttributeError:
            if "name" not in name.lower():
                raise
            return f"{packet}.{name}, which this torch doesn't have"

    OpOverloadPacket.__getattr__ = find  # type: ignore[method-assign]
    try:
        yield
    finally:
        OpOverloadPacket.__getattr__ = real  # type: ignore[method-assign]


def complete(module: Any) -> None:
    """Add what torchax 0.0.13's own functions, and polyattn's on its tensors, lack."""
    import jax
    import torch
    from torchax import tensor
    from torchax.ops import mappings, op_base, ops_registry
    from torchax.view import NarrowInfo, View

    def as_dtype(array: Any, dtype: Any) -> Any:
        word = mappings.t2j_dtype(dtype)
        return array.apply_jax(lambda words: jax.lax.bitcast_convert_type(words, word))

    environment = module.default_env()
    here = ops_registry.all_torch_functions[torch.Tensor.__getitem__].func

    def taken(part: Any) -> Any:
        if isinstance(part, list):
            part = torch.tensor(part, dtype=torch.int64 if not part else None, device="cpu")
        return environment.to_xla(part) if isinstance(part, torch.Tensor) else part

    def item(array: Any, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        moved = tuple(taken(part) for part in parts)
        return here(array, moved if isinstance(index, tuple) else moved[0])

    def write(view: Any, index: Any, value: Any) -> None:
        parts = index if isinstance(index, tuple) else (index,)
        arrays = environment.t2j_iso(tuple(taken(part) for part in parts))
        here = NarrowInfo(arrays if isinstance(index, tuple) else arrays[0])
        view.update(value, [*view.get_transformation_chain(), here])

    # A view's items are named by tensors too.
    View.__setitem__ = write
    # Otherwise their writes to a view are lost: torchax decomposes them over a copy of it.
    for name in ("index_copy", "masked_fill", "fill", "zero"):
        written = op_base.InplaceOp(getattr(torch.ops.aten, name))
        in_place = getattr(torch.ops.aten, f"{name}_")
        environment.override_op_definition(in_place, written, is_view_op=True)
    # An index may be on the CPU, or a list, as on any device.
    environment.override_op_definition(torch.Tensor.__getitem__, item, is_view_op=True)
    # Its functions read `_elem` of what may be a view, and torch's method knows no subclass.
    View._elem = property(View.jax, View.update)
    View.tolist = lambda view: view.jax().tolist()
    # Made without a device it is on the CPU, like torch.arange.
    tensor.TENSOR_CONSTRUCTORS.add(torch.randperm)
    # Its view knows shapes alone; this one reads the same bits as another dtype.
    environment.override_op_definition(torch.ops.aten.view.dtype, as_dtype)


@cache
def torchax() -> Any:
    """Return torchax, imported, with its environment made: `with polyattn_tpu.torchax().default_env()`.

    Raises `ImportError`.
    """
    with named_overloads():
        import torchax as module

        module.default_env()
    complete(module)
    return module
