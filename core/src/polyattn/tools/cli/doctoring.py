"""`polyattn doctor`: what is here, what is set, what is wrong."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

from rich.markup import escape

from polyattn import __version__
from polyattn.device import Device
from polyattn.errors import PolyattnError
from polyattn.registry.discovery import Registry, discover
from polyattn.registry.info import API_VERSION, load_object
from polyattn.settings import FOREIGN_VARIABLES, VARIABLES, current, read_config_file
from polyattn.tools.cli.listing import backend_rows, plugin_rows
from polyattn.tools.cli.output import console, print_json, table


def show(as_json: bool) -> int:
    """Print the report; return 1 when something is wrong."""
    report = examine()
    if as_json:
        print_json(report)
    else:
        _print(report)
    return int(bool(report["problems"]))


def examine() -> dict[str, Any]:
    """Return all that `doctor` knows, problems last."""
    problems: list[str] = []
    report: dict[str, Any] = {
        "polyattn": __version__,
        "api_version": API_VERSION,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "torch": _torch(problems),
        "variables": {
            name: os.environ[name]
            for name in (*VARIABLES, *FOREIGN_VARIABLES)
            if name in os.environ
        },
        "devices": [],
        "plugins": [],
        "backends": [],
    }
    try:
        settings = current()
        report["notes"] = list(settings.notes)
        report["config_file"] = read_config_file(os.environ)[1]
        registry = discover(settings)
    except PolyattnError as error:
        problems.append(str(error))
    else:
        report["devices"] = _devices(registry, problems)
        report["plugins"] = plugin_rows(registry)
        report["backends"] = backend_rows(registry)
        problems += registry.problems
        problems += _backend_problems(registry, report["backends"])
    report["problems"] = problems
    return report


def _torch(problems: list[str]) -> str:
    try:
        import torch
    except Exception as error:
        problems.append(f"torch can't be imported: {type(error).__name__}: {error}")
        return "missing"
    return f"{torch.__version__}, {torch.get_num_threads()} CPU threads"


def _devices(registry: Registry, problems: list[str]) -> list[str]:
    found = []
    for claimed in registry.platforms.values():
        try:
            device: Device | None = load_object(claimed.detect)(None)
        except Exception as error:
            problems.append(
                f"platform {claimed.name}: its detector {claimed.detect} failed: "
                f"{type(error).__name__}: {error}"
            )
            continue
        if device is not None:
            found.append(str(device))
    if not found:
        problems.append('no device is found; install a plugin: pip install "polyattn[cpu]"')
    return found


def _backend_problems(registry: Registry, rows: list[dict[str, Any]]) -> list[str]:
    """A package that isn't installed is no fault; a plugin that can't keep its word is."""
    found = []
    for row in rows:
        problem = row["problem"]
        faults = ("has no", "is missing", "syntax error", "did not answer", "its probe", "found:")
        if problem and any(fault in problem for fault in faults):
            found.append(f"{registry.owners[row['name']].origin}: {row['name']}: {problem}")
    return found


def _print(report: dict[str, Any]) -> None:
    facts = table("", "")
    facts.show_header = False
    for name in ("polyattn", "api_version", "python", "system", "torch", "config_file"):
        if name in report:
            facts.add_row(name, str(report[name]))
    for device in report["devices"]:
        facts.add_row("device", device)
    for name, text in report["variables"].items():
        facts.add_row("set", f"{name}={text}")
    console.print(facts, "")
    plugins = table("plugin", "distribution", "version", "status")
    for row in report["plugins"]:
        plugins.add_row(row["name"], row["distribution"], row["version"], escape(row["status"]))
    console.print(plugins, "")
    backends = table("backend", "plugin", "state")
    for row in report["backends"]:
        backends.add_row(row["name"], row["plugin"], escape(row["problem"] or "ready"))
    console.print(backends, "")
    variables = table("variable with an effect", "meaning")
    for name, meaning in (VARIABLES | FOREIGN_VARIABLES).items():
        variables.add_row(name, meaning)
    console.print(variables, "")
    for note in report.get("notes", []):
        console.print(f"note: {note}", markup=False)
    for problem in report["problems"]:
        console.print(f"[red]problem[/]: {escape(problem)}", highlight=False)
    if not report["problems"]:
        console.print("[green]no problem found[/]")
