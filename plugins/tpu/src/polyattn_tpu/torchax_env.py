"""How is torchax imported? With torch from 2.13 on, beside overloads that torch no longer has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def named_overloads() -> Iterator[None]:
    """Let torchax name operators by dimension names, which torch 2.13 removed.

    torchax 0.0.13 lists them as keys of its tables (`aten.prod.dim_Dimname`) while it is imported, and
    fails where they are gone. Nothing can call them; a stand-in takes each one's place as a key.
    """
    from torch._ops import OpOverloadPacket

    real: Any = OpOverloadPacket.__getattr__

    def find(packet: Any, name: str) -> Any:
        try:
            return real(packet, name)
        except AttributeError:
            if "name" not in name.lower():
                raise
            return f"{packet}.{name}, which this torch has not"

    OpOverloadPacket.__getattr__ = find  # type: ignore[method-assign]
    try:
        yield
    finally:
        OpOverloadPacket.__getattr__ = real  # type: ignore[method-assign]


def complete_views() -> None:
    """Give torchax's views what its own functions ask of every tensor, and views of 0.0.13 lack."""
    from torchax.view import View

    if not hasattr(View, "_elem"):
        View._elem = property(View.jax, View.update)
        View.tolist = lambda view: view.jax().tolist()


def torchax() -> Any:
    """Return torchax, imported, with its environment made: `with polyattn_tpu.torchax().default_env()`.

    Raises `ImportError`.
    """
    with named_overloads():
        import torchax as module

        module.default_env()
    complete_views()
    return module
