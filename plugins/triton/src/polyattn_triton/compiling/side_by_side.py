"""How are a group's kernels compiled at once? Each by another process, into Triton's cache on disk.

Half a kernel's time is Python's own: its source is walked through, and threads of one process take turns
at that. So one process imports what compiling needs, from where a layer's functions are found to be new
on, and forks another for each kernel under way, at most as many as there are processors. It ends with the
group's build. The kernels are then loaded from the cache, as a later process loads them.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from inspect import getclosurevars
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import triton
from triton import knobs
from triton.runtime import cache, driver

from polyattn_triton.compiling import worker

KNOWN = triton.__version__.startswith("3.6.")
"""Whether this Triton's compilation and launch interfaces are those that this module reads."""
_log = logging.getLogger("polyattn")


class _Pickler(pickle.Pickler):
    """Pickles kernels, and functions that are their arguments, by their modules and names."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, triton.JITFunction):
            return worker.function_of, (value.fn.__module__, value.fn.__name__)
        return NotImplemented


def folder() -> Path:
    """Return the folder of generated modules, beside Triton's own cache."""
    root = os.environ.get("TRITON_CACHE_DIR")
    return Path(root or Path.home() / ".triton" / "cache") / "polyattn"


def job_of(asked: Mapping[str, Any]) -> bytes:
    """Return a worker's job from the kernel that Triton was about to compile."""
    job = io.BytesIO()
    options = asked["options"].__dict__
    _Pickler(job).dump(
        (asked["src"], asked["target"], options, asked["env_vars"], cache.triton_key())
    )
    return job.getvalue()


def is_cached(key: str, name: str) -> bool:
    """Return whether a kernel is in Triton's cache on disk."""
    held = triton.runtime.cache.get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    file = f"{name[:150]}.json"
    return file in (held.get_group(file) or {})


class Compilers:
    """A process that forks one for each kernel. The forks share its imports."""

    def __init__(self, soon: bool = False) -> None:
        """`soon`: kernels will be needed, so it begins to import their modules."""
        self._starting, self._sending = Lock(), Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection
        self._answers: Thread
        self._forgotten: weakref.finalize[Any, Any]
        self._waiting: dict[int, Future[str | None]] = {}
        if soon and BY_PROCESSES:
            with suppress(OSError):  # raised again where a kernel is needed
                self.start()

    def start(self) -> None:
        """Start its imports, unless they run already. Raises `OSError`."""
        with self._starting:
            if self._process is not None:
                return
            ours, theirs = Pipe()
            paths = [str(folder()), *(path or "." for path in sys.path)]
            said = {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": knobs.cache.dir}
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", worker.__name__, str(theirs.fileno())],
                    env=os.environ | said,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            self._connection = ours
            self._forgotten = weakref.finalize(self, _end_group, self._process.pid)
            self._forgotten.atexit = False  # it ends with this process anyhow
            self._answers = Thread(target=_deliver, args=(ours, self._waiting), daemon=True)
            self._answers.start()

    def compile(self, asked: Mapping[str, Any]) -> None:
        """Compile Triton's kernel in the worker; warn if that fails."""
        problem: str | None
        try:
            job = job_of(asked)
            self.start()
            problem = self._sent(job).result()
        except (OSError, EOFError, pickle.PickleError) as error:
            problem = f"its process failed, {type(error).__name__}: {error}"
        if problem is not None:
            _log.warning("TRITON_ATTN compiles %s in this process: %s", asked["src"].name, problem)

    def _sent(self, job: bytes) -> Future[str | None]:
        """Send a job, and return its future answer."""
        answer: Future[str | None] = Future()
        with self._sending:
            number = id(answer)
            self._waiting[number] = answer
            try:
                self._connection.send((number, job))
            except OSError:
                self._waiting.pop(number, None)
                raise
        return answer

    def end(self) -> None:
        """End it, and all that compile for it; it can be started again."""
        if self._process is None:
            return
        self._forgotten()
        self._process.wait()
        self._answers.join()
        self._connection.close()
        self._process = None


def _end_group(leader: int) -> None:
    """End a process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGTERM)


def _deliver(connection: Connection, waiting: dict[int, Future[str | None]]) -> None:
    """Hand answers to the callers that wait for them, until the process ends."""
    with suppress(EOFError, OSError):
        while True:
            number, problem = connection.recv()
            waiting.pop(number).set_result(problem)
    while waiting:
        waiting.popitem()[1].set_exception(EOFError("it has ended"))


@contextmanager
def at_once(compilers: Compilers) -> Iterator[None]:
    """Have Triton compile all that is warmed up at once: by processes where it is known how, or threads.

    One after another, where this Triton does no other. What fails is told where its result is asked for.
    """
    asynchronous = getattr(triton, "AsyncCompileMode", None)
    if asynchronous is None:
        yield
        return

    class Mode(asynchronous):  # type: ignore[misc, valid-type]
        def submit(self, key: str, compiling: Callable[[], Any], finalize: Any) -> Any:
            """Compile a kernel that isn't cached in a process, and load it."""
            asked = getclosurevars(compiling).nonlocals

            def compiled() -> Any:
                if not is_cached(key, asked["src"].name):
                    compilers.compile(asked)
                return compiling()

            return super().submit(key, compiled, finalize)

    if BY_PROCESSES:
        _look_up()
    try:
        mode = Mode if BY_PROCESSES else asynchronous
        # Triton 3.6 doesn't leave its mode where one raises, and no other is entered then.
        with ThreadPoolExecutor(_processors()) as threads, mode(threads, ignore_errors=True):
            yield
    finally:
        compilers.end()


def _look_up() -> None:
    """Have Triton hash itself while its driver's part is compiled, where this machine has none yet."""
    hashing = Thread(target=cache.triton_key)
    hashing.start()
    driver.active.get_current_device()
    hashing.join()


def _processors() -> int:
    """Return how many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


BY_PROCESSES = bool(KNOWN and sys.executable and hasattr(os, "fork") and _processors() > 1)
"""Whether kernels are compiled by other processes."""
