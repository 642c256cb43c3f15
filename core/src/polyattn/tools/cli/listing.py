"""`polyattn list`: who is installed, and what is missing? Imports neither torch nor a vendor library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from polyattn.registry.discovery import Registry, discover
from polyattn.registry.info import BackendInfo
from polyattn.registry.integrations import integrations
from polyattn.registry.machine import availabilities, running
from polyattn.settings import current
from polyattn.tools.cli.stdout import write


def show(as_json: bool) -> int:
    """Print plugins, integrations, backends and problems.

    A backend is "installed" when what it requires is there and its probe finds nothing missing.
    Whether its device is here as well, `doctor` says: asking imports torch.
    """
    registry = discover()
    rows = backend_rows(registry)
    if as_json:
        found = {
            "plugins": plugin_rows(registry),
            "integrations": [found.to_dict() for found in integrations()],
            "backends": rows,
        }
        write(json.dumps(found | {"problems": registry.problems}, indent=2))
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
    backends = [("backend", "platforms", "proof", "state", "what it is")]
    for row in rows:
        proof = ", ".join(f"{where} {how}" for where, how in row["proof"].items())
        here = [name for name, problem in row["builds"].items() if problem is None]
        state = row["problem"] or (f"installed: {', '.join(here)}" if here else "installed")
        backends.append((row["name"], ", ".join(row["platforms"]), proof, state, row["summary"]))
    write("\n\n".join(columns(t) for t in (plugins, engines, backends) if len(t) > 1))
    for problem in registry.problems:
        write(f"\nproblem: {problem}")
    if not registry.plugins:
        write('no plugin is installed: pip install "polyattn[cpu]"')
    return 0


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Align rows of text. By hand: importing rich would take half of this command's time."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


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
    timeout = current().probe_timeout
    infos = sorted(registry.backends.values(), key=lambda b: b.name)

    problems = availabilities(infos, timeout)
    return [
        {
            "name": info.name,
            "plugin": registry.owners[info.name].name,
            "platforms": list(info.capabilities.platforms),
            "kinds": sorted(kind.value for kind in info.capabilities.kinds),
            "proof": {where: proof.value for where, proof in info.proof.items()},
            "problem": problem,
            "runs": "" if problem else running(info, timeout),
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
