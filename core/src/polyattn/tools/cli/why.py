"""`polyattn why`: which backends does a running process use, and why?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from polyattn.errors import SettingsError
from polyattn.selection.running import Process, running
from polyattn.tools.cli import stdout
from polyattn.tools.cli.output import add_row, console, print_json, table

NOBODY = (
    "no running process that you may look into has loaded a layer group; POLYATTN_WHY=0 keeps a "
    "process from writing its record"
)


def show(pid: int | None, as_json: bool) -> int:
    """Print a process's decisions, or the list of processes; 1 where there is none."""
    found = list(running())
    if pid is not None:
        found = [process for process in found if process.pid == pid]
        if not found:
            raise SettingsError(
                f"process {pid} has no record: it has ended, or it has loaded no layer group, or it "
                "belongs to another user, or its POLYATTN_WHY is 0; `polyattn why` lists the others"
            )
    if as_json:
        print_json([asdict(process) for process in found])
    elif not found:
        console.print(NOBODY, markup=False)
    elif len(found) == 1:
        _print(found[0])
    else:
        _list(found)
    return int(not found)


def _list(processes: Sequence[Process]) -> None:
    rows = table(">process", ">decisions", ">fallbacks", "integrations", "command")
    for one in processes:
        counts = (str(len(one.decisions)), str(len(one.fallbacks)))
        add_row(rows, str(one.pid), *counts, ", ".join(one.integrations), one.command)
    console.print(rows)
    console.print("`polyattn why PROCESS` prints a process's decisions", markup=False)


def _print(process: Process) -> None:
    through = f" through {', '.join(process.integrations)}" if process.integrations else ""
    lines = [f"process {process.pid}, polyattn {process.version}{through}: {process.command}"]
    for decision in process.decisions:
        lines += ["", decision["explain"]]
    if process.fallbacks:
        lines += ["", "not served by polyattn:", *(f"  {line}" for line in process.fallbacks)]
    # Another user's process may have written anything.
    stdout.write("\n".join("".join(filter(str.isprintable, line)) for line in _lines(lines)))


def _lines(texts: Sequence[str]) -> list[str]:
    return [line for text in texts for line in text.split("\n")]
