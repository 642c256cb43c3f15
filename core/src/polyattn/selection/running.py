"""Which decisions does a running process use? Each process writes a record for `polyattn why`.

Whenever a `LayerGroup` loads a decision that is new to its process, the process appends a line of JSON
to `polyattn-UID/PID.jsonl` in the system's temporary folder. It removes the file when it ends. Only the
user can read the folder. A process that can't write there doesn't, and reports nothing.
"""

from __future__ import annotations

import atexit
import json
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from polyattn.errors import PolyattnError, SettingsError
from polyattn.registry.distributions import distributions
from polyattn.registry.integrations import GROUP
from polyattn.selection.selection import Decision
from polyattn.settings import current_settings

MOST_DECISIONS = 256
"""Decisions that a process writes down; a process of tests makes thousands."""

_written: dict[int, set[tuple[Any, ...]]] = {}
"""What this process has written down, by its ID: a fork begins with nothing."""

_quiet = threading.local()


@dataclass
class Process:
    """A running process that has loaded layer groups.

    - `ancestors`: the processes of the same Python that started it, nearest first: an engine's server
      is the last one of its workers'. Empty where the system doesn't tell.
    - `server`: the command of the last of them.
    - `integrations`: the modules of integrations that it had imported when it loaded the last one.
    - `decisions`: each decision as `to_dict` has it, its text under `explain`.
    - `fallbacks`: calls that a host served by its own attention, and why: a line for each reason.
    """

    pid: int
    began: str | None = None
    command: str = ""
    ancestors: list[int] = field(default_factory=list)
    server: str = ""
    version: str = ""
    integrations: list[str] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)


def record_decision(decision: Decision) -> None:
    """Record that this process has loaded a decision."""
    key = (decision.spec, decision.device, decision.chosen)
    _record(key, lambda: {"decision": {**decision.to_dict(), "explain": decision.explain()}})


@contextmanager
def unrecorded() -> Iterator[None]:
    """Record nothing of this thread: groups that only verify a backend serve no layer."""
    before, _quiet.on = getattr(_quiet, "on", False), True
    try:
        yield
    finally:
        _quiet.on = before


def record_fallback(line: str) -> None:
    """Record why a host served calls by its own attention."""
    _record((line,), lambda: {"fallback": line})


def running() -> Iterator[Process]:
    """Yield every running process of this machine whose record this user may read, by process ID.

    Removes the records of this user's processes that ended without removing them. Raises `SettingsError`
    where the machine has no temporary folder.
    """
    try:
        folder = Path(tempfile.gettempdir())
    except OSError as error:
        raise SettingsError(
            f"processes record what they run in a temporary folder: {error.strerror}; set TMPDIR"
        ) from error
    for path in sorted(folder.glob("polyattn-*/[0-9]*.jsonl")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            if not stat.S_ISREG(path.lstat().st_mode):
                continue
            process = Process(int(path.stem))
            for line in path.read_text(encoding="utf-8").splitlines():
                _read(process, json.loads(line))
            if _alive(process):
                process.ancestors = list(_ancestors(process.pid))
                process.server = _command(process.ancestors[-1]) if process.ancestors else ""
                yield process
            elif path.parent == _folder():
                path.unlink()


def _read(process: Process, line: dict[str, Any]) -> None:
    for key in ("began", "command", "version", "integrations"):
        if key in line:
            setattr(process, key, line[key])
    if "decision" in line:
        process.decisions.append(line["decision"])
    if "fallback" in line:
        process.fallbacks.append(line["fallback"])


def _record(key: tuple[Any, ...], line: Any) -> None:
    with suppress(OSError, PolyattnError):
        written = _written.setdefault(os.getpid(), set())
        quiet = getattr(_quiet, "on", False)
        if quiet or key in written or len(written) >= MOST_DECISIONS or not current_settings().why:
            return
        text = json.dumps({"integrations": _integrations(), **line()}, default=str) + "\n"
        path = _folder() / f"{os.getpid()}.jsonl"
        if not written:
            head = {"began": _began(os.getpid()), "command": " ".join(sys.orig_argv)[:300]}
            text = (
                json.dumps({**head, "version": sys.modules["polyattn"].__version__}) + "\n" + text
            )
            atexit.register(_remove, path, os.getpid())
        written.add(key)
        mode = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if len(written) > 1 else os.O_TRUNC)
        file = os.open(path, mode | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)


def _folder() -> Path:
    """Return this user's folder. Raises `OSError` where it isn't this user's alone."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"polyattn-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    entry = folder.lstat()
    if not stat.S_ISDIR(entry.st_mode) or (hasattr(os, "getuid") and entry.st_uid != user):
        raise PermissionError(f"{folder} isn't this user's")
    return folder


def _remove(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a fork's end isn't this process's
        with suppress(OSError):
            path.unlink()


def _integrations() -> list[str]:
    return sorted(_integration_modules() & sys.modules.keys())


@cache
def _integration_modules() -> frozenset[str]:
    entries = (e for dist in distributions() for e in dist.entry_points.select(group=GROUP))
    return frozenset(entry.value.partition(":")[0] for entry in entries)


def _status(pid: int) -> list[str]:
    """Return the kernel's fields of a process, from its state on; empty if unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _began(pid: int) -> str | None:
    """When a process began, in the kernel's ticks; None where that isn't known."""
    status = _status(pid)
    return status[19] if status else None


def _ancestors(pid: int) -> Iterator[int]:
    """Yield a process's parent, its parent and so on, as long as they run the same Python."""
    with suppress(OSError):
        python = Path(f"/proc/{pid}/exe").readlink()
        while status := _status(pid):
            pid = int(status[1])
            if Path(f"/proc/{pid}/exe").readlink() != python:
                return
            yield pid


def _command(pid: int) -> str:
    with suppress(OSError):
        text = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
        return " ".join(text.split("\0")).strip()[:300]
    return ""


def _alive(process: Process) -> bool:
    """Whether the process still runs; another one may have got its id."""
    if process.began is not None:
        return _began(process.pid) == process.began
    try:
        os.kill(process.pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True
