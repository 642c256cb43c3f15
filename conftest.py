"""What holds for every test of the workspace, before any imports torch?"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

# One thread a process, and a process a core (-n): two workers' threads of torch, each waiting for
# the others' in a loop, take three times the processor time. Tests that are about threads name theirs.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Most of the time of Pallas' interpreter, and of small programs of JAX, is that of XLA's compiler.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
# Inductor would compile and load a program for each instruction set that the processor has.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# A run draws what the last one drew: a change alone turns a test red.
# `--hypothesis-profile=default` draws anew.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")
TESTS = f"{os.sep}tests{os.sep}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting makes only what stays, so that looking for garbage there is in vain.

    It took a quarter of each worker's collecting. Later collections of garbage skip what was made.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def later_tests_find_what_these_found(request: pytest.FixtureRequest) -> Iterator[None]:
    """A module's tests leave the process' settings as they were, and its imports our functions.

    The kit looks at each of its cases itself.
    """
    from polyattn.conformance.snapshot import RESTORED, SETTINGS, changes, snapshot

    before, modules = snapshot(), len(sys.modules)
    yield
    if TESTS not in str(request.path):
        return
    # Tests seed generators, commands set Typer's hook, and libraries set variables at their import.
    free = {"the hooks of exceptions", *(RESTORED if len(sys.modules) > modules else ())}
    kept = [n for n in SETTINGS if n not in free and not n.endswith("random state")]
    changed = changes({name: before[name] for name in kept}, modules)
    assert not changed, f"these tests change {', '.join(map(''.join, changed.items()))}"
    ours = [each for name, each in sys.modules.items() if name.startswith("polyattn")]
    patched = [
        f"{module.__name__}.{name}" for module in ours for name, value in vars(module).items()
        if TESTS in getattr(getattr(value, "__code__", None), "co_filename", "")
        and TESTS not in (module.__file__ or "")
    ]  # fmt: skip
    assert not patched, f"functions of tests stay in place of {patched}"
