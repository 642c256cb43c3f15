"""Writes what an installed distribution leaves in a folder: its metadata and its entry points."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path, name: str, version: str, requires: str = "", points: str = "") -> None:
    """Write a `dist-info` folder. `requires`: further lines of metadata; `points`: entry points."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
    )
    (info / "entry_points.txt").write_text(points)
