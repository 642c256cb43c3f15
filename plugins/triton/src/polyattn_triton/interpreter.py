"""Triton's interpreter without work that has no effect: kernels run in about half of its time.

Each call of a device function goes through all names of `triton.language` for what to patch, and
finds that its launch did so. Each sum of int32 numbers is computed again as int64, for an assertion
that the interpreter's options (`debug`) leave out.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def hasten() -> None:
    """Patch once a launch, and compute no number for an assertion that isn't made."""
    options = interpreter.interpreter_builder.options
    object.__setattr__(options, "sanitize_overflow", options.debug)
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    complete: set[str] = set()

    @cache
    def languages(function: Any) -> frozenset[str]:
        modules = {"tl": tl, "core": tl.core}
        globals_ = function.__globals__.values()
        return frozenset(
            name for name, m in modules.items() if any(m is value for value in globals_)
        )

    def patch_once(function: Any) -> Any:
        names = languages(function)
        if names and names <= complete:
            return None  # a device function, which restores nothing
        scope = patch(function)
        complete.update(names)
        return scope

    def launch_alone(self: Any, *args: Any, **options: Any) -> Any:
        complete.clear()
        return launch(self, *args, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_alone
