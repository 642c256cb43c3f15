"""Can a file be written? Checked before the work, not after."""

from __future__ import annotations

import os
from pathlib import Path

from polyattn.errors import SettingsError


def check_target(option: str, path: Path) -> None:
    """Raise `SettingsError` when no file can be written to `path`, which `option` names."""
    folder = path.parent
    if not folder.is_dir():
        raise SettingsError(f"{option}={path}: {folder} is no folder; create it first")
    if path.exists() and not path.is_file():  # nothing may take the place of a device or a fifo
        raise SettingsError(f"{option}={path}: is there already and not a regular file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise SettingsError(
            f"{option}={path}: may not be written; name another file: {option} FILE"
        )
