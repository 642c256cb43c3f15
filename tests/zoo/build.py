"""Builds the zoo: one distribution for each way that a plugin can be broken, as pip leaves it."""

from __future__ import annotations

from pathlib import Path

from zoo.animals import ANIMALS, Animal


def module_of(name: str) -> str:
    return "zoo_" + name.replace("-", "_")


def build(folder: Path) -> Path:
    """Install every animal into a folder, and return that folder."""
    for animal in ANIMALS.values():
        install(folder, animal)
    corrupt(folder)
    return folder


def install(folder: Path, animal: Animal) -> None:
    """Write one distribution: its modules and its metadata."""
    module = module_of(animal.name)
    (folder / f"{module}.py").write_bytes(animal.source.encode("utf-8", "surrogateescape"))
    for path, source in animal.files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(source)
    info = folder / f"{module}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: zoo-{animal.name}\nVersion: 1.2\n"
    )
    point = animal.point or animal.name
    (info / "entry_points.txt").write_text(f"[polyattn.plugins]\n{point} = {module}\n")


def corrupt(folder: Path) -> None:
    """Damage one installed distribution's metadata, as a crashed installation would."""
    info = folder / "zoo_corrupt-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_bytes(b"\xff\xfe\x00garbage")
    (info / "entry_points.txt").write_text("[polyattn.plugins]\ncorrupt = zoo_corrupt\n")
