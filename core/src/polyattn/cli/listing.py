"""`polyattn list`: who is installed, and is it ready? Imports neither torch nor a vendor library."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from polyattn.backend import BackendInfo
from polyattn.cli.output import console, print_json, table
from polyattn.discovery import Registry, discover
from polyattn.platforms import availability
from polyattn.settings import current


def show(as_json: bool) -> None:
    """Print plugins, backends and problems."""
    registry = discover()
    rows = backend_rows(registry)
    if as_json:
        print_json(
            {"plugins": plugin_rows(registry), "backends": rows, "problems": registry.problems}
        )
        return
    plugins = table("plugin", "distribution", "version", "status")
    for row in plugin_rows(registry):
        plugins.add_row(row["name"], row["distribution"], row["version"], row["status"])
    console.print(plugins, "")
    backends = table("backend", "platforms", "proof", "state", "what it is")
    for row in rows:
        proof = ", ".join(f"{where} {how}" for where, how in row["proof"].items())
        state = row["problem"] or "ready"
        backends.add_row(row["name"], ", ".join(row["platforms"]), proof, state, row["summary"])
    console.print(backends)
    for problem in registry.problems:
        console.print(f"\n[red]problem[/]: {problem}", highlight=False)
    if not registry.plugins:
        console.print('no plugin is installed: pip install "polyattn[cpu]"', markup=False)


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

    def state(info: BackendInfo) -> str | None:
        return availability(info, timeout)

    with ThreadPoolExecutor(max_workers=max(1, len(infos))) as pool:
        problems = list(pool.map(state, infos))
    return [
        {
            "name": info.name,
            "plugin": registry.owners[info.name].name,
            "platforms": list(info.capabilities.platforms),
            "kinds": sorted(kind.value for kind in info.capabilities.kinds),
            "proof": {where: proof.value for where, proof in info.proof.items()},
            "problem": problem,
            "summary": info.summary,
        }
        for info, problem in zip(infos, problems, strict=True)
    ]
