"""`polyattn doctor`: devices, plugins, settings and problems."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
from typing import Any

from rich.markup import escape

from polyattn import __version__
from polyattn.device import Device
from polyattn.errors import PluginError, PolyattnError, SettingsError, describe, plain
from polyattn.registry.capabilities import ANY_PLATFORM
from polyattn.registry.discovery import discover
from polyattn.registry.distributions import distributions, requires_of_polyattn
from polyattn.registry.info import API_VERSION
from polyattn.registry.installed import Registry
from polyattn.registry.integrations import integrations
from polyattn.registry.machine import Fault, Unset, ask_detector, load_problem
from polyattn.registry.requirements import of_another_release, requirement_problem
from polyattn.registry.timings import timings
from polyattn.settings import (
    FOREIGN_VARIABLES,
    VARIABLES,
    Settings,
    current_settings,
    read_config_file,
)
from polyattn.tools.cli.listing import backend_rows, plugin_rows
from polyattn.tools.cli.output import console, print_json, print_rows, say

TABLES: dict[str, dict[str, str]] = {
    "plugins": {
        "plugin": "name", "distribution": "distribution", "version": "version", "status": "status",
    },
    "integrations": {
        "integration": "name", "distribution": "distribution", "version": "version", "host": "host",
        "registered": "registered",
    },
    "backends": {"backend": "name", "plugin": "plugin", "state": "state"},
}  # fmt: skip
"""What is printed of each part of a report: the columns' headings, and their keys."""


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
    with contextlib.suppress(PolyattnError):  # said below
        discover()  # before torch is here: a plugin that imports it is seen
    problems: list[str] = []
    report: dict[str, Any] = {
        "polyattn": __version__,
        "api_version": API_VERSION,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "torch": _torch(problems),
        "variables": {
            name: plain(os.environ[name])
            for name in (*VARIABLES, *FOREIGN_VARIABLES)
            if name in os.environ
        },
        "devices": [],
        "timings": [],
        "plugins": [],
        "integrations": [each.to_dict() for each in integrations()],
        "backends": [],
    }
    problems += _requirements() + _mixed()
    problems += [row["problem"] for row in report["integrations"] if row["problem"]]
    try:
        settings = current_settings()
        report["notes"] = list(settings.notes)
        report["config_file"] = read_config_file(os.environ)[1] or None
        registry = discover(settings)
    except PolyattnError as error:
        problems.append(str(error))
    else:
        report["notes"] += registry.notes + _more_torch_importers(registry, settings)
        devices = _devices(registry, problems)
        report["devices"] = [str(device) for device in devices.values()]
        report["plugins"] = plugin_rows(registry)
        problems += registry.problems
        try:
            report["backends"] = _backends(registry, devices, problems)
            problems += _named(settings, registry, report["backends"])
        except SettingsError as error:  # a plugin's own setting
            problems.append(str(error))
        report["timings"] = _timings(settings, devices, problems)
    report["problems"] = problems
    return report


def _torch(problems: list[str]) -> str:
    try:
        import torch
    except Exception as error:
        problems.append(f"torch can't be imported: {describe(error)}")
        return "missing"
    return f"{torch.__version__}, {torch.get_num_threads()} CPU threads"


def _requirements() -> list[str]:
    """Return polyattn's own requirements that are missing: pip lets others replace a package."""
    own = [text for text in requires_of_polyattn() if "extra ==" not in text]
    return [f"{problem}; pip install '{t}'" for t in own if (problem := requirement_problem(t))]


def _mixed() -> list[str]:
    """Return the plugins and integrations that were made for another polyattn than the installed one."""
    told = {}
    for each in distributions():
        if not any(entry.group.startswith("polyattn.") for entry in each.entry_points):
            continue
        if problem := of_another_release(each):
            told[each.name] = f"{each.name} {each.version}: {problem}"
    return [*told.values()]


def _more_torch_importers(registry: Registry, settings: Settings) -> list[str]:
    """Return the notes on plugins that import torch after the first one, which imported it for all.

    They are asked in a process of their own, without those that are known, until there is no more.
    """
    code = "from polyattn import discover; import json; found = discover().torch_importers\n"
    code += "print('', json.dumps(found), sep='\\n')"  # a hook may have printed
    importers, known, notes = registry.torch_importers, list(settings.disabled_plugins), []
    while importers:
        known += importers
        environment = os.environ | {"POLYATTN_DISABLE_PLUGINS": ",".join(known)}
        try:
            answer = subprocess.run(
                [sys.executable, "-c", code],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
                timeout=settings.plugin_timeout * len(registry.plugins),
            )
            importers = json.loads(answer.stdout.splitlines()[-1])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            notes.append("whether more plugins' hook modules import torch couldn't be asked")
            break
        notes += importers.values()
    return notes


def _devices(registry: Registry, problems: list[str]) -> dict[str, Device]:
    """Return the device of each platform that is here."""
    devices = {}
    for name, claimed in registry.platforms.items():
        try:
            device = ask_detector(claimed)
        except PluginError as error:
            owner = registry.platform_owners[name]
            problems.append(f"{owner.origin}: platform {name}: {error} ({owner.removal})")
            continue
        if device is not None:
            devices[name] = device
    if not devices:
        remedy = "; ".join(registry.disabled) or 'install a plugin: pip install "polyattn[cpu]"'
        problems.append(f"no device is found; {remedy}")
    return devices


def _backends(
    registry: Registry, devices: dict[str, Device], problems: list[str]
) -> list[dict[str, Any]]:
    """Return `list`'s rows with each backend's state here. Ready backends are imported as well.

    A package that isn't installed is no problem; a plugin that can't keep its word is.
    """
    rows = backend_rows(registry)
    for row in rows:
        name, problem = row["name"], row["problem"]
        here = any(where in (*devices, ANY_PLATFORM) for where in row["platforms"])
        if problem is None and here:
            reason = load_problem(registry.backends[name])
            problem = row["problem"] = None if reason is None else Fault(reason)
        nowhere = f"no device of {', '.join(row['platforms'])} here"
        ready = "ready"
        if row["runs"]:
            device = next(devices[where] for where in row["platforms"] if where in devices)
            proof = registry.backends[name].proof_on(device, row["runs"])
            ready = f"ready: {row['runs']}, {proof.value}"
        row["state"] = problem or (ready if here else nowhere)
        if isinstance(problem, Fault):
            owner = registry.owners[name]
            problems.append(f"{owner.origin}: backend {name}: {problem} ({owner.removal})")
        elif isinstance(problem, Unset) and problem not in problems:
            problems.append(problem)
    return rows


def _named(settings: Settings, registry: Registry, rows: list[dict[str, Any]]) -> list[str]:
    """Return the problems of backends that settings name. polyattn never replaces one of them."""
    states = {row["name"]: row["state"] for row in rows}
    faults = []
    for override in (override for source in settings.sources for override in source):
        try:
            state = states[registry.backend(override.backend).name]
        except PluginError as error:
            why = str(error).partition("\n")[0]  # what else is wrong is said beside it
            faults.append(f"{override.source}={override}: {why}")
        else:
            if not state.startswith("ready"):
                faults.append(f"{override.source}={override} can't run here: {state}")
    return faults


def _timings(
    settings: Settings, devices: dict[str, Device], problems: list[str]
) -> list[dict[str, Any]]:
    """Return each timing table and its device, and the ignored parts of those for devices here.

    A table of another device is no problem, and neither is one that is out of date: priorities
    choose then. A file that isn't a table is a problem.
    """
    tables = timings(settings)
    problems += tables.broken
    return [
        {
            "path": table.path,
            "device": table.device,
            "measured": table.measured,
            "models": len(table.entries),
            "here": any(table.is_for(d) for d in devices.values()),
            "ignored": [note for d in devices.values() for note in table.notes(d)],
        }
        for table in tables.tables
    ]


def _print(report: dict[str, Any]) -> None:
    facts = ("polyattn", "api_version", "python", "system", "torch", "config_file")
    rows = [(name, report[name] or "none") for name in facts if name in report]
    rows += [("device", device) for device in report["devices"]]
    for row in report["timings"]:
        where = "" if row["here"] else "; no such device here"
        text = f"{row['path']}: {row['device']}, {row['models']} models of {row['measured']}{where}"
        rows.append(("timings", text))
    rows += [("set", f"{name}={text}") for name, text in report["variables"].items()]
    print_rows({"": "{name}", " ": "{fact}"}, ({"name": name, "fact": fact} for name, fact in rows))
    say("")
    for kind, columns in TABLES.items():
        if rows := report[kind]:  # no plugins or backends where a setting is wrong
            print_rows({heading: f"{{{key}}}" for heading, key in columns.items()}, rows)
            say("")
    variables = VARIABLES | FOREIGN_VARIABLES
    meanings = ({"name": name, "meaning": meaning} for name, meaning in variables.items())
    print_rows({"variable with an effect": "{name}", "meaning": "{meaning}"}, meanings)
    say("")
    ignored = [note for row in report["timings"] for note in row["ignored"]]
    for note in [*report.get("notes", []), *ignored]:
        say(f"note: {note}")
    for problem in report["problems"]:
        console.print(f"[red]problem[/]: {escape(problem)}", highlight=False)
    if not report["problems"]:
        console.print("[green]no problem found[/]")
