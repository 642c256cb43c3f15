"""What does a process compile for another? Kernels, each by a fork of it, into Triton's cache on disk.

`python -m polyattn_triton.compiling.worker FD`, started by `side_by_side`: it imports Triton and the
kernels once, while its parent still traces. Jobs come by the socket FD with a number each;
answers leave with it, None or what went wrong. It imports no torch: a second of a process's time.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import triton
from triton.runtime import cache

LAUNCHERS = {"cuda": ("nvidia", "CudaLauncher"), "hip": ("amd", "HIPLauncher")}
"""What Triton launches a kernel by, of each of its backends: C, compiled for its arguments' types."""
IMPORTED = ("hopper.prefill", "kernels.prefill", "kernels.decode", "kernels.tile_lists")
"""Where the kernels are that a layer's functions are part of."""


def settle(function: Any) -> None:
    """Make Triton hash a kernel, or a function argument, after everything that it calls.

    Of what a function calls Triton 3.6 takes into its key the global constants that it happens to have
    looked at before: in another order the key differs, and another process compiles everything again.
    """
    if getattr(function, "hash", "") is not None:  # looked at before, interpreted, or no function
        return
    known = function.fn.__globals__
    for name in function.fn.__code__.co_names:
        if name in known and known[name] is not function:
            settle(known[name])
    function.cache_key  # noqa: B018


def function_of(module: str, name: str) -> Any:
    """Return a kernel, or a function that one calls, by the name that a job has in its place."""
    return getattr(importlib.import_module(module), name)


def work(job: bytes) -> None:
    """Compile the kernel of `side_by_side.job_of`, and its launcher."""
    importlib.invalidate_caches()  # a generated module may be younger than this process
    source, target, options, variables, key = pickle.loads(job)
    cache.triton_key = lambda: key  # the caller has hashed Triton itself: 0.4 s
    for function in (source.fn, *source.constants.values()):
        settle(function)
    kernel = triton.compile(source, target=target, options=options, _env_vars=variables)
    backend, launcher = LAUNCHERS[target.backend]
    with suppress(Exception):  # a failure here is raised again where the kernel is loaded
        drivers = importlib.import_module(f"triton.backends.{backend}.driver")
        getattr(drivers, launcher)(kernel.src, kernel.metadata)


def forked(job: bytes, asked: Connection) -> tuple[Connection, int]:
    """Start a job in a process of its own; returns where its answer will be, and its number."""
    answer, theirs = Pipe(duplex=False)
    process = os.fork()
    if process:
        theirs.close()
        return answer, process
    asked.close()
    problem = None
    try:
        work(job)
    except BaseException as error:
        problem = f"{type(error).__name__}: {str(error)[:500]}"
    theirs.send(problem)
    os._exit(0)


def serve(asked: Connection) -> None:
    """Answer jobs as they end. Raises `EOFError` or `OSError` when the other process is gone."""
    under_way: dict[Connection, tuple[int, int]] = {}
    while True:
        for ready in wait([asked, *under_way]):
            assert isinstance(ready, Connection)
            if ready is asked:
                number, job = asked.recv()
                answer, process = forked(job, asked)
                under_way[answer] = number, process
                continue
            number, process = under_way.pop(ready)
            try:
                problem = ready.recv()
            except EOFError:
                problem = "its process ended"
            ready.close()
            os.waitpid(process, 0)
            asked.send((number, problem))


def main() -> None:
    os.dup2(2, 1)  # compilers' prints don't belong to the output
    for name in IMPORTED:
        importlib.import_module(f"polyattn_triton.{name}")
    with suppress(EOFError, OSError):
        serve(Connection(int(sys.argv[1])))
    os.killpg(0, signal.SIGTERM)  # and all that compile for it: `side_by_side` gave it a group


if __name__ == "__main__":
    main()
