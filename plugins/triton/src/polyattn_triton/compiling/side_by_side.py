"""How are a group's kernels compiled at once? Each by another process, into Triton's cache on disk.

Half a kernel's time is Python's own: its source is walked through, and threads of one process take turns
at that. A process is started for each kernel under way, at most as many as there are processors, and ends
with the group's build. The kernels are then loaded from the cache, as a later process loads them.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from inspect import getclosurevars
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import triton
from triton import knobs

from polyattn_triton.compiling.worker import function_of

KNOWN = triton.__version__.startswith("3.6.")
"""Whether this Triton hands out what is compiled, and is launched, as it is read here."""
_log = logging.getLogger("polyattn")


class _Pickler(pickle.Pickler):
    """Says kernels, and functions that they are given, by their modules and names."""

    def reducer_override(self, given: Any) -> Any:
        if isinstance(given, triton.JITFunction):
            return function_of, (given.fn.__module__, given.fn.__name__)
        return NotImplemented


def folder() -> Path:
    """Return where generated modules are kept: beside Triton's own cache."""
    root = os.environ.get("TRITON_CACHE_DIR")
    return Path(root or Path.home() / ".triton" / "cache") / "polyattn"


def job_of(asked: Mapping[str, Any]) -> bytes:
    """Return what a worker takes, of what Triton was about to compile."""
    job = io.BytesIO()
    _Pickler(job).dump(
        (asked["src"], asked["target"], asked["options"].__dict__, asked["env_vars"])
    )
    return job.getvalue()


def is_cached(key: str, name: str) -> bool:
    """Whether a kernel is in Triton's cache on disk."""
    held = triton.runtime.cache.get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    file = f"{name[:150]}.json"
    return file in (held.get_group(file) or {})


class Worker:
    """A process that compiles."""

    def __init__(self) -> None:
        """Start it. Raises `OSError`."""
        paths = [str(folder()), *(path or "." for path in sys.path)]
        said = {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": knobs.cache.dir}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "polyattn_triton.compiling.worker"], env=os.environ | said,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def compile(self, job: bytes) -> str | None:
        """Return what went wrong, if anything did. Raises `OSError` or `EOFError` where it has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump(job, self._process.stdin)
        self._process.stdin.flush()
        found: str | None = pickle.load(self._process.stdout)
        return found

    def end(self) -> None:
        """End it, whatever it does."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()
        self._process.terminate()
        self._process.wait()


class Workers:
    """Processes that compile, started as they are needed and kept for the next kernel."""

    def __init__(self) -> None:
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        self._all: list[Worker] = []

    def compile(self, asked: Mapping[str, Any]) -> None:
        """Compile what Triton was asked for; where that fails a warning says so, and it isn't."""
        problem: str | None
        try:
            job = job_of(asked)
            try:
                worker = self._idle.get_nowait()
            except Empty:
                worker = Worker()
                self._all.append(worker)
            problem = worker.compile(job)
        except (OSError, EOFError, pickle.PickleError) as error:
            problem = f"its process failed, {type(error).__name__}: {error}"
        else:
            self._idle.put(worker)
        if problem is not None:
            _log.warning("TRITON_ATTN compiles %s in this process: %s", asked["src"].name, problem)

    def end(self) -> None:
        for worker in self._all:
            worker.end()


@contextmanager
def at_once() -> Iterator[None]:
    """Have Triton compile all that is warmed up at once: by processes where it is known how, or threads.

    One after another, where this Triton does no other.
    """
    asynchronous = getattr(triton, "AsyncCompileMode", None)
    if asynchronous is None:
        yield
        return
    workers, processors = Workers(), _processors()

    class Mode(asynchronous):  # type: ignore[misc, valid-type]
        def submit(self, key: str, compiling: Callable[[], Any], finalize: Any) -> Any:
            """Have a process compile what isn't cached, and load it."""
            asked = getclosurevars(compiling).nonlocals

            def compiled() -> Any:
                if not is_cached(key, asked["src"].name):
                    workers.compile(asked)
                return compiling()

            return super().submit(key, compiled, finalize)

    by_processes = KNOWN and sys.executable and processors > 1
    try:
        mode = Mode if by_processes else asynchronous
        with ThreadPoolExecutor(processors) as threads, mode(threads):
            yield
    finally:
        workers.end()


def _processors() -> int:
    """Return how many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
