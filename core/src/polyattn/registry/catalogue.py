"""What do polyattn's own distributions bring, installed or not, and which command installs them?

`catalogue.json` beside this file is generated from the plugins' declarations by
`python -m polyattn.tools.cli.catalogue`. It lets an error name the distribution that has an absent
backend or device profile. A test fails when it is stale.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

from polyattn.errors import nearest
from polyattn.registry.distributions import installed, requires_of_polyattn

CATALOGUE = Path(__file__).with_name("catalogue.json")
PREFIX = "polyattn-"


@cache
def catalogue() -> dict[str, dict[str, list[str]]]:
    """Return each plugin distribution's `backends`, `aliases`, `platforms`, `profiles` and `folder`."""
    read: dict[str, dict[str, list[str]]] = json.loads(CATALOGUE.read_text(encoding="utf-8"))
    return read


@cache
def _distributions_by_extra() -> dict[str, tuple[str, ...]]:
    """Our distributions that each extra of polyattn installs, as its metadata says."""
    names: dict[str, list[str]] = {}
    for text in requires_of_polyattn():
        match = re.match(r"(polyattn-[a-z0-9-]+).*\bextra\s*==\s*['\"]([a-z0-9-]+)['\"]", text)
        if match:
            names.setdefault(match[2], []).append(match[1])
    return {extra: tuple(each) for extra, each in names.items()}


def _plugins_by_extra() -> dict[str, tuple[str, ...]]:
    """The plugins among them: the reader of configs is none."""
    known = catalogue()
    return {
        extra: tuple(name for name in names if name in known)
        for extra, names in _distributions_by_extra().items()
    }


def our_distributions() -> frozenset[str]:
    """Return the distributions, plugins among them, that polyattn itself publishes."""
    return frozenset(name for names in _distributions_by_extra().values() for name in names)


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return an error's text and remedy for a name that no loaded plugin brings.

    Args:
        kind: `"backends"`, `"profiles"` or `"platforms"`.
        name: the name, in any case.
        known: the names that loaded plugins bring.

    Examples:
        >>> unknown("profiles", "h100-sxn", ["x86-amx"])
        "is unknown; did you mean 'h100-sxm'?"

    """
    ours: set[str] = set()
    for distribution, brings in catalogue().items():
        names = brings[kind] + (brings["aliases"] if kind == "backends" else [])
        ours.update(names)
        if name.casefold() not in map(str.casefold, names):
            continue
        if installed(distribution) is None:
            remedy = f"has it and isn't installed; run {install_command(distribution)}"
        else:
            remedy = "has it, but its plugin is disabled or broken; `polyattn list` says which"
        return f"isn't here: {distribution} {remedy}"
    listed = "`polyattn list --all` prints them" if kind == "backends" else ""
    return f"is unknown{nearest(name, {*ours, *known}, listed)}"


def not_installed() -> dict[str, dict[str, list[str]]]:
    """Return the part of the catalogue that isn't installed."""
    return {name: brings for name, brings in catalogue().items() if installed(name) is None}


def install_advice(platform: str) -> str:
    """Return how to install a platform: polyattn's extra if one exists, or else another plugin."""
    distribution = PREFIX + platform
    if platform in _plugins_by_extra():
        return f"run {install_command(distribution)}"
    return f"install a plugin that brings platform {platform!r}; polyattn has none of its own"


def install_command(distribution: str) -> str:
    """Return the command that installs a plugin of ours, with what its extra brings beside it.

    Where polyattn was installed from a checkout, the command installs from there.
    """
    extra = distribution.removeprefix(PREFIX)
    checkout = _checkout()
    if checkout is None:
        return f'{_pip()} install "polyattn[{extra}]"'
    brought = _plugins_by_extra()[extra]
    wanted = [name for name in brought if installed(name) is None] or brought
    folders = [str(checkout / folder) for name in wanted for folder in catalogue()[name]["folder"]]
    return " ".join([_pip(), "install", *folders])


def _checkout() -> Path | None:
    """Return the checkout that polyattn was installed from, None for a wheel (PEP 610)."""
    own = installed("polyattn")
    text = None if own is None else own.read_text("direct_url.json")
    origin = json.loads(text) if text else {}
    if "dir_info" not in origin:
        return None
    root = Path(url2pathname(urlparse(origin["url"]).path)).parent
    return root if (root / "plugins").is_dir() else None


def _pip() -> str:
    """Return how to call this environment's pip from a shell."""
    here = Path(sys.executable).parent
    on_path = shutil.which("pip")
    return "pip" if on_path and Path(on_path).parent == here else f"{sys.executable} -m pip"
