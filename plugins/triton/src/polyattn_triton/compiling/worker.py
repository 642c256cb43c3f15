"""What does a process compile for another? Kernels, one job after another, into Triton's cache on disk.

`python -m polyattn_triton.compiling.worker`, started by `side_by_side`: jobs come by the standard input,
answers leave by the standard output, None or what went wrong, each pickled. It imports no torch: a second
of every process's time.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from typing import Any

import triton


def settle(function: Any) -> None:
    """Have Triton hash a kernel, or a function that one is given, after all that it calls.

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
    """Return a kernel, or a function that one calls, by its name: what a job has in its place."""
    return getattr(importlib.import_module(module), name)


def work(job: bytes) -> None:
    """Compile what `side_by_side.job_of` said."""
    source, target, options, variables = pickle.loads(job)
    for function in (source.fn, *source.constants.values()):
        settle(function)
    triton.compile(source, target=target, options=options, _env_vars=variables)


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what compilers print is no answer
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:  # whoever asked has ended, or wants no more
            return
        problem = None
        try:
            work(job)
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error)[:500]}"
        pickle.dump(problem, answers)
        answers.flush()


if __name__ == "__main__":
    main()
