"""Do the native kernels keep to torch's number of threads, in turn with torch's operators?"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import test_native
import test_native_scan
import torch
from polyattn_cpu.native import library

TASKS = Path("/proc/self/task")
THREADS = 3
pytestmark = [
    pytest.mark.skipif(
        library.why_not() is not None, reason=f"native kernels: {library.why_not()}"
    ),
    pytest.mark.skipif(not (TASKS.parent / "schedstat").exists(), reason="no /proc/self/schedstat"),
]


def tasks():
    """Return this process's threads and what each has spent, in nanoseconds."""
    found = {}
    for task in TASKS.iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            found[task.name] = int((task / "schedstat").read_text().split()[0])
    return found


def in_turn():
    """Return threads that native calls brought, and what they spent in a rest.

    By one thread, by torch's, in turn with torch, by callers at once. In a process of its own, where
    nothing has made threads yet.
    """
    attention = test_native.Step(test_native.make_spec(), [1] * 6, [500] * 6)
    scan = test_native_scan.drawn("convolution", "float32", [(1, 30)] * 20)
    torch.set_num_threads(THREADS)
    matrix, found = torch.randn(600, 600), []
    torch.mm(matrix, matrix)
    (matrix + matrix).sum()
    torches = set(tasks())
    for threads in (1, torch.get_num_threads()):
        attention.run(threads=threads)
        found.append(len(set(tasks()) - torches))
    for _ in range(20):
        torch.mm(matrix, matrix)
        attention.run(threads=torch.get_num_threads())
        (matrix + matrix).sum()
        scan.run()
    found.append(len(set(tasks()) - torches))
    callers = [
        threading.Thread(target=lambda: [attention.run(threads=THREADS) for _ in range(20)])
        for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    after = tasks()
    # A joined thread's task ends a little later.
    brought = set(after) - torches - {str(caller.native_id) for caller in callers}
    found.append(len(brought))
    time.sleep(0.3)
    rested = tasks()
    return found, sum(rested[task] - after[task] for task in brought)


def test_torch_s_threads_or_a_pool_as_large_serve_all_calls_and_the_pool_sleeps_between_them():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found, spent = pool.submit(in_turn).result(timeout=300)
    # The pool serves other callers, and all where a core of torch's threads has other work.
    assert found[:2] == [0, 0] and found[2] in (0, THREADS - 1) and found[3] == THREADS - 1
    assert spent < 20e6, "native threads take processor time where nothing is to be done"
