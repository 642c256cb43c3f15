"""flash-attn's functions on polyattn: any device, any backend that polyattn has.

    import polyattn_flash_attn
    polyattn_flash_attn.install()            # `import flash_attn` and `import flash_attn_interface` now
    from flash_attn import flash_attn_func

Nothing is installed by importing this package, and a real flash-attn is never hidden unless asked.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from polyattn_flash_attn import bert_padding, flash_attn_2, flash_attn_3

VERSIONS = {"flash_attn": "2.8.3", "flash_attn_interface": "3.0.0"}
"""Whose signatures the functions have."""

_installed: dict[str, ModuleType] = {}


def install(*, replace: bool = False) -> None:
    """Let `import flash_attn` and `import flash_attn_interface` find these functions in this process.

    Raises `ImportError` where one of them is really there, unless `replace`.
    """
    for name in VERSIONS:
        if name in _installed or replace:
            continue
        if name in sys.modules or importlib.util.find_spec(name) is not None:
            raise ImportError(
                f"{name} is installed here; uninstall it, or say install(replace=True) to hide it in "
                "this process"
            )
    if _installed:
        return
    package = _module("flash_attn", flash_attn_2)
    package.__path__ = []
    interface = _module("flash_attn.flash_attn_interface", flash_attn_2)
    padding = _module("flash_attn.bert_padding", bert_padding)
    package.flash_attn_interface, package.bert_padding = interface, padding  # type: ignore[attr-defined]
    for module in (package, interface, padding, _module("flash_attn_interface", flash_attn_3)):
        _installed[module.__name__] = module
    sys.modules.update(_installed)


def uninstall() -> None:
    """Take back what `install` did; modules that were imported before it are found again."""
    for name, module in _installed.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    _installed.clear()


def _module(name: str, source: ModuleType) -> ModuleType:
    module = ModuleType(name, source.__doc__)
    module.__dict__.update({n: getattr(source, n) for n in source.__all__})
    module.__version__ = VERSIONS.get(name, VERSIONS["flash_attn"])  # type: ignore[attr-defined]
    module.__spec__ = importlib.util.spec_from_loader(name, loader=None)
    return module
