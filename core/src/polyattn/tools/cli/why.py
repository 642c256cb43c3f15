"""`polyattn why`: which backends does a running process use, and why?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from polyattn.errors import SettingsError, describe
from polyattn.selection.running import Process, running
from polyattn.tools.cli import stdout
from polyattn.tools.cli.output import print_json, print_rows, say

COMMAND = 120
"""How much of a command the list of processes shows."""

NOBODY = (
    "no running process that you may look into has loaded a layer group; POLYATTN_WHY=0 keeps a "
    "process from writing its record"
)


def show(pid: int | None, as_json: bool, saved: Path | None) -> int:
    """Print a process's decisions, or the list of processes; 1 where there is none.

    A server's processes are those that it started. `saved`: a file of them, in place of those that run.
    """
    processes = list(running()) if saved is None else _read(saved)
    if pid is not None:
        everyone = ", ".join(str(process.pid) for process in processes) or "none"
        processes = [process for process in processes if pid in (process.pid, *process.ancestors)]
        if not processes and saved is not None:
            raise SettingsError(f"--saved={saved} has no process {pid}; its processes: {everyone}")
        if not processes:
            raise SettingsError(
                f"process {pid} has no record, nor has a process that it started: it has ended, or has "
                "loaded no layer group, or belongs to another user, or its POLYATTN_WHY is 0; "
                "`polyattn why` lists the others"
            )
    if as_json:
        print_json([asdict(process) for process in processes])
    elif not processes:
        say(NOBODY if saved is None else f"--saved={saved} has no process")
    elif len(processes) == 1:
        _print(processes[0])
    else:
        _list(processes)
    return int(not processes)


def _read(saved: Path) -> list[Process]:
    try:
        return [Process(**fields) for fields in json.loads(saved.read_text(encoding="utf-8"))]
    except OSError as error:
        raise SettingsError(f"--saved={saved}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise SettingsError(
            f"--saved={saved}: isn't what `polyattn why --json` prints ({describe(error)})"
        ) from error


def _list(processes: Sequence[Process]) -> None:
    rows = [
        {
            ">process": one.pid,
            ">server": one.ancestors[-1] if one.ancestors else "",
            ">decisions": len(one.decisions),
            ">fallbacks": len(one.fallbacks),
            "integrations": ", ".join(one.integrations),
            "command": (one.server or one.command)[:COMMAND],
        }
        for one in processes
    ]
    print_rows({heading: f"{{{heading}}}" for heading in rows[0]}, rows)
    say("`polyattn why PROCESS` prints a process's decisions")


def _print(process: Process) -> None:
    through = f" through {', '.join(process.integrations)}" if process.integrations else ""
    lines = [f"process {process.pid}, polyattn {process.version}{through}: {process.command}"]
    if process.ancestors:
        lines.append(f"started by process {process.ancestors[-1]}: {process.server}")
    for decision in process.decisions:
        lines += ["", decision["explain"]]
    if process.fallbacks:
        lines += ["", "not served by polyattn:", *(f"  {line}" for line in process.fallbacks)]
    # Another user's process may have written anything.
    lines = "\n".join(lines).split("\n")
    stdout.write("\n".join("".join(filter(str.isprintable, line)) for line in lines))
