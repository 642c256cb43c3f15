"""Which of torch's operators does a call run? Their names, arguments and results are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Tells `note` of each operator: its name (`aten.copy_.default`), its arguments, its result."""

    def __init__(self, note: Callable[[str, Any, Any], object]):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(str(func), args, result)
        return result
