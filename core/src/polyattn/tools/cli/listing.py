"""`polyattn list`: installed and missing plugins. Imports neither torch nor a vendor library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest
from textwrap import wrap
from typing import Any

from polyattn.registry.catalogue import install_command, not_installed
from polyattn.registry.discovery import discover
from polyattn.registry.info import BackendInfo
from polyattn.registry.installed import Registry
from polyattn.registry.integrations import integrations
from polyattn.registry.machine import availabilities, running
from polyattn.settings import current_settings
from polyattn.tools.cli.stdout import write

WIDTH = 100
"""Columns that a printed table takes at most."""


def show(as_json: bool, everything: bool = False) -> int:
    """Print plugins, integrations, backends and problems; with `everything`, missing ones too.

    A backend is "installed" when what it requires is there and its probe finds nothing missing.
    `doctor` tells whether its device is here too, which takes an import of torch.
    """
    registry = discover()
    rows = backend_rows(registry)
    missing = not_installed() if everything else {}
    if as_json:
        tables = {
            "plugins": plugin_rows(registry),
            "integrations": [host.to_dict() for host in integrations()],
            "backends": rows,
            "problems": registry.problems,
        }
        write(json.dumps(tables | ({"not_installed": missing} if everything else {}), indent=2))
        return 0
    plugins = [("plugin", "distribution", "version", "status")]
    plugins += [
        (r["name"], r["distribution"], r["version"], r["status"]) for r in plugin_rows(registry)
    ]
    engines = [("integration", "distribution", "version", "host", "registered")]
    engines += [
        (i.name, i.distribution, i.version, i.problem or i.host, i.registered)
        for i in integrations()
    ]
    backends = [("backend", "proof", "what it is", "state")]
    for row in rows:
        proof = ", ".join(f"{where} {how}" for where, how in row["proof"].items())
        here = [name for name, problem in row["builds"].items() if problem is None]
        state = row["problem"] or (f"installed: {', '.join(here)}" if here else "installed")
        backends.append((row["name"], proof, row["summary"], state))
    absent = [("not installed", "brings", "install")]
    absent += [
        (name, ", ".join(brings["backends"] + brings["profiles"]), install_command(name))
        for name, brings in missing.items()
    ]
    write("\n\n".join(columns(t) for t in (plugins, engines, backends, absent) if len(t) > 1))
    for problem in registry.problems:
        write(f"\nproblem: {problem}")
    if not registry.plugins:
        write(f"no plugin is installed: run {install_command('polyattn-cpu')}")
    return 0


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Align rows of text in `WIDTH` columns; long cells go on in further lines.

    By hand: importing rich would take half of this command's time.
    """
    by_column = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in by_column]
    words = [max(len(word) for cell in column for word in cell.split()) for column in by_column]
    while sum(widths) + 2 * (len(widths) - 1) > WIDTH and widths != words:
        spare = [width - word for width, word in zip(widths, words, strict=True)]
        widths[spare.index(max(spare))] -= 1
    lines = []
    for row in rows:
        cells = [
            wrap(cell, width, break_on_hyphens=False)
            for cell, width in zip(row, widths, strict=True)
        ]
        for line in zip_longest(*cells, fillvalue=""):
            padded = (part.ljust(width) for part, width in zip(line, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def plugin_rows(registry: Registry) -> list[dict[str, str]]:
    """Return a row for each plugin."""
    return [
        {
            "name": p.name,
            "distribution": p.dist,
            "version": p.version,
            "status": f"{p.status}: {p.problem}" if p.problem else p.status,
        }
        for p in registry.plugins
    ]


def backend_rows(registry: Registry) -> list[dict[str, Any]]:
    """Return a row for each backend; probes run side by side, each within its time."""
    timeout = current_settings().probe_timeout
    infos = sorted(registry.backends.values(), key=lambda b: b.name)

    problems = availabilities(infos, timeout)
    return [
        {
            "name": info.name,
            "plugin": registry.owners[info.name].name,
            "platforms": list(info.capabilities.platforms),
            "kinds": sorted(kind.value for kind in info.capabilities.kinds),
            "proof": {where: info.proof_at(where).value for where in info.proof},
            "problem": problem,
            "runs": "" if problem else running(info.runs, timeout),
            "builds": _builds(info, timeout),
            "summary": info.summary,
        }
        for info, problem in zip(infos, problems, strict=True)
    ]


def _builds(info: BackendInfo, timeout: float) -> dict[str, str | None]:
    """Return each package that brings a backend's library with why it isn't here, or None."""
    if not info.variants:
        return {}
    answers = availabilities(info.builds, timeout)
    return {build.build: answer for build, answer in zip(info.builds, answers, strict=True)}
