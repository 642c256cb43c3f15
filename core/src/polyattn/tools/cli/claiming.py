"""`polyattn claim`: the conformance kit says what a function can do, and which case proves it."""

from __future__ import annotations

import sys
from typing import Any

from polyattn.errors import SettingsError
from polyattn.registry.info import load_object
from polyattn.tools.cli import stdout


def show(path: str, device: str | None, seed: int, seconds: float) -> int:
    """Print the decorator for `"module:function"`; 1 where nothing holds, or a case fails."""
    try:
        find_at = load_object("polyattn.conformance.claim:find_at")
    except ModuleNotFoundError as error:
        raise SettingsError(
            f'this command needs {error.name}: pip install "polyattn[conformance]"'
        ) from error
    findings = find_at(path, device, seed, seconds, _begin)
    _tell("")
    stdout.write(findings.manifest())
    return int(not findings.claims or bool(findings.failures))


def _begin(case: Any) -> None:
    _tell(case.id)


def _tell(text: str) -> None:
    """Show a line in place of the one before, without a thread, which forks wouldn't survive."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text[:78]}")
        sys.stderr.flush()
