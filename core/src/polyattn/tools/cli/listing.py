"""`polyattn list`: who is installed, and what is missing? Imports neither torch nor a vendor library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

from polyattn.registry.discovery import Registry, discover
from polyattn.registry.info import BackendInfo
from polyattn.registry.machine import availabilities, running
from polyattn.registry.requirements import requirement_problem
from polyattn.settings import current
from polyattn.tools.cli.stdout import write

INTEGRATIONS = "polyattn.integrations"
"""The entry points by which distributions say which host they serve."""


def show(as_json: bool) -> int:
    """Print plugins, backends and problems.

    A backend is "installed" when what it requires is there and its probe finds nothing missing.
    Whether its device is here as well, `doctor` says: asking imports torch.
    """
    registry = discover()
    rows = backend_rows(registry)
    if as_json:
        found = {
            "plugins": plugin_rows(registry), "backends": rows, "integrations": integration_rows()
        }  # fmt: skip
        write(json.dumps(found | {"problems": registry.problems}, indent=2))
        return 0
    plugins = [("plugin", "distribution", "version", "status")]
    plugins += [
        (r["name"], r["distribution"], r["version"], r["status"]) for r in plugin_rows(registry)
    ]
    backends = [("backend", "platforms", "proof", "state", "what it is")]
    for row in rows:
        proof = ", ".join(f"{where} {how}" for where, how in row["proof"].items())
        here = [name for name, problem in row["builds"].items() if problem is None]
        state = row["problem"] or (f"installed: {', '.join(here)}" if here else "installed")
        backends.append((row["name"], ", ".join(row["platforms"]), proof, state, row["summary"]))
    integrations: list[Sequence[str]] = [("integration", "distribution", "version", "made for")]
    integrations += [tuple(row.values()) for row in integration_rows()]
    tables: list[Sequence[Sequence[str]]] = [plugins, backends]
    if len(integrations) > 1:
        tables.append(integrations)
    write("\n\n".join(columns(table) for table in tables))
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


def integration_rows() -> list[dict[str, str]]:
    """Return a row for each host that an installed distribution serves: `polyattn.integrations`.

    Nothing is imported: the entry point's name is the host's, and the distribution says its versions.
    """
    rows = []
    for point in sorted(entry_points(group=INTEGRATIONS), key=lambda point: point.name):
        dist = point.dist
        needs = [] if dist is None else dist.requires or []
        hosts = [r.partition(";")[0].strip() for r in needs if r.startswith(point.name)]
        host = hosts[0] if hosts else ""
        problem = requirement_problem(host) if host else None
        rows.append(
            {
                "name": point.name,
                "distribution": "" if dist is None else dist.name,
                "version": "" if dist is None else dist.version,
                "made for": f"{host}: {problem}" if problem else host,
            }
        )
    return rows


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
