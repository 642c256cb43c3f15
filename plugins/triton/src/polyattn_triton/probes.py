"""Can Triton compile here? It needs a C compiler for its launcher and a cache it can write to."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def interprets() -> str | None:
    """Say why Triton's interpreter doesn't run the kernels here, or None."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return "the interpreter is for tests; set TRITON_INTERPRET=1"


def compiles() -> str | None:
    """Say why Triton can't compile on this machine, or None."""
    if interprets() is None:
        return "TRITON_INTERPRET=1 makes Triton interpret its kernels; unset it"
    named = os.environ.get("CC")
    if named and not shutil.which(named):
        return f"CC={named!r} is not an executable; Triton builds its launcher with it"
    if not named and not any(shutil.which(name) for name in ("gcc", "clang", "cc")):
        return "Triton builds its launcher with a C compiler; none of gcc, clang, cc is on the PATH"
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton")
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        return f"Triton's cache {folder} can't be written; set TRITON_CACHE_DIR"
    return None
