"""Standard output belongs to the command: what plugins and libraries print goes to standard error.

So a program that reads `--json` reads JSON, even if a plugin or a C library below it prints.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

_own: TextIO | None = None


def stream() -> TextIO:
    """Return where the command's own output goes."""
    return sys.stdout if _own is None else _own


def write(text: str) -> None:
    """Write a line of the command's own output."""
    print(text, file=stream())


@contextmanager
def claimed() -> Iterator[None]:
    """Keep standard output for `stream()`, in Python and below it, until the end of the block."""
    global _own
    outer, saved = sys.stdout, None
    if _descriptor(outer) == 1:
        outer.flush()
        saved = os.dup(1)
        os.dup2(sys.stderr.fileno(), 1)
        _own = os.fdopen(saved, "w", encoding=outer.encoding, errors="replace")
    else:
        _own = outer
    sys.stdout = sys.stderr
    try:
        yield
        _own.flush()
    finally:
        sys.stdout, own, _own = outer, _own, None
        if saved is not None:
            os.dup2(saved, 1)
            with suppress(OSError):  # said already by the flush that failed first
                own.close()


def discard() -> None:
    """Drop the buffered output: it has no reader, and the interpreter would complain at its end."""
    if _descriptor(sys.stdout) == 1:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _descriptor(file: TextIO) -> int | None:
    try:
        return file.fileno()
    except (OSError, ValueError):  # a stream in memory, as in tests
        return None
