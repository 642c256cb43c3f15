"""Calls into plugins: bounded in time, and nothing that they raise or exit with reaches the host.

A call runs in a thread of its own. So one that hangs costs its time limit, and a KeyboardInterrupt
that a plugin raises is told from a user's Ctrl-C, which always arrives in the main thread.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

from polyattn.errors import PluginError, describe


class LatePluginError(PluginError):
    """A plugin that didn't answer in time."""


class PluginCall:
    """One call into a plugin, under way. `what` names it in errors: `"its probe"`."""

    def __init__(self, what: str, call: Callable[[], Any]):
        self.what = what
        self._call = call
        self._answer: Any = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self._run,), daemon=True).start()

    def _run(self) -> None:
        try:
            self._answer = self._call()
        except BaseException as error:  # SystemExit and KeyboardInterrupt of the plugin's own too
            self._error = error
        finally:
            self._done.set()

    def answer(self, seconds: float, setting: str) -> Any:
        """Return what it returned. Raises `PluginError` when it failed, `LatePluginError`.

        `setting` names the variable that `seconds` comes from.
        """
        if not self._done.wait(seconds):
            raise LatePluginError(
                f"{self.what} did not answer within {seconds:g} s; if it is slow and doesn't hang, set "
                f"{setting} higher"
            )
        if isinstance(self._error, PluginError):
            raise PluginError(describe(self._error)) from self._error
        if self._error is not None:
            raise PluginError(f"{self.what} failed: {describe(self._error)}") from self._error
        return self._answer


def within(seconds: float, setting: str, what: str, call: Callable[[], Any]) -> Any:
    """Return what `call` returns. Raises `PluginError` when it fails or is late."""
    return PluginCall(what, call).answer(seconds, setting)
