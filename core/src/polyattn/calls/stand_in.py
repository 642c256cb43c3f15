"""Modules that stand in for a library's in this process, on demand."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType

from polyattn.registry.discovery import refresh
from polyattn.registry.distributions import find_spec
from polyattn.registry.requirements import HIDDEN


class StandIns:
    """Modules that stand in for a library's in this process, on demand.

    They replace an installed library only with `install(replace=True)`. While they stand in, the
    library's distributions serve no backend: a kernel's import would find the stand-in, which calls the
    backend.

    Args:
        names: for each module's name the module whose `__all__` it offers, None for a package that only
            holds others; parents come before their children.
        versions: for each root the version of the library whose signatures the functions have.
        distributions: the distributions of the real modules.

    Examples:
        >>> import json
        >>> stand_ins = StandIns({"no_such_library": json}, {"no_such_library": "1.0"}, ())
        >>> stand_ins.install()
        >>> import no_such_library
        >>> no_such_library.loads("[1]")
        [1]
        >>> stand_ins.uninstall()

    """

    def __init__(
        self,
        names: Mapping[str, ModuleType | None],
        versions: Mapping[str, str],
        distributions: tuple[str, ...],
    ):
        self.names, self.versions, self.distributions = names, versions, distributions
        self._installed: dict[str, ModuleType] = {}

    def install(self, *, replace: bool = False) -> None:
        """Let imports of these names resolve to the stand-ins in this process.

        Args:
            replace: hide a real package of the same name.

        Raises:
            ImportError: a root is really installed, and `replace` is False.

        """
        if self._installed:
            return
        for root in self.versions:
            if not replace and (root in sys.modules or find_spec(root) is not None):
                raise ImportError(
                    f"{root} is installed here; uninstall it, or call install(replace=True) to hide it "
                    "in this process"
                )
        for name, source in self.names.items():
            module = ModuleType(name, None if source is None else source.__doc__)
            module.__spec__ = importlib.util.spec_from_loader(name, loader=None)
            module.__path__ = []
            module.__version__ = self.versions[name.partition(".")[0]]  # type: ignore[attr-defined]
            if source is not None:
                module.__file__ = source.__file__  # `from name import …` names it where that fails
                module.__dict__.update({n: getattr(source, n) for n in source.__all__})
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(self._installed[parent], last, module)
            self._installed[name] = module
        sys.modules.update(self._installed)
        HIDDEN.update(
            dict.fromkeys(self.distributions, f"stand-ins for {', '.join(self.versions)}")
        )
        refresh()

    def uninstall(self) -> None:
        """Take back what `install` did; modules that were imported before it are found again."""
        for name, module in self._installed.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        self._installed.clear()
        for name in self.distributions:
            HIDDEN.pop(name, None)
        refresh()
