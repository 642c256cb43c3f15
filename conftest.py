"""What holds for every test of the workspace, before any imports torch?"""

from __future__ import annotations

import os

from hypothesis import settings

# One thread a process, and a process a core (-n): two workers' threads of torch, each waiting for
# the others' in a loop, take three times the processor time. Tests that are about threads name theirs.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Most of the time of Pallas' interpreter, and of small programs of JAX, is that of XLA's compiler.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
# A run draws what the last one drew: a change alone turns a test red.
# `--hypothesis-profile=default` draws anew.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")
