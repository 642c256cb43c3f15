"""Kernels compiled by other processes: into Triton's cache, or with a word about why not."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from polyattn import LayerSpec

pytest.importorskip("triton")

import triton
from ahead import compiling_for, launch_of
from polyattn_triton.compiling import side_by_side
from polyattn_triton.functions import pointwise
from polyattn_triton.launch import load

SPEC = LayerSpec(num_heads=4, head_size=64)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What Triton is asked for: a merge, for sm_90, in a cache that is empty."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(side_by_side, "BY_PROCESSES", True)
    taken: list[dict[str, Any]] = []

    class Taker(side_by_side.Compilers):
        def compile(self, asked: Any) -> None:
            taken.append(dict(asked))
            raise RuntimeError("nothing is compiled")

    with compiling_for("sm_90"), side_by_side.at_once(Taker()):
        launch_of(SPEC, "sm_90", "merge").handed()
    return taken[0]


def compiled_here(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Compile it, and say whether that had to be done."""
    hits: list[bool] = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit)
    )
    options = asked["options"].__dict__
    triton.compile(
        asked["src"], target=asked["target"], options=options, _env_vars=asked["env_vars"]
    )
    return hits == [False]


def test_a_process_compiles_what_is_then_loaded(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compilers = side_by_side.Compilers()
    compilers.compile(asked)
    compilers.end()
    assert not caplog.records
    assert not compiled_here(asked, monkeypatch)


@pytest.mark.parametrize("fault", ["no program", "it ends", "it can't"])
def test_what_fails_is_said_and_compiled_here(
    fault: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    if fault == "no program":
        monkeypatch.setattr(sys, "executable", "/no/such/python")
    elif fault == "it ends":
        monkeypatch.setattr(sys, "executable", "/bin/true")
    else:
        asked["env_vars"] = None
        monkeypatch.setattr(asked["src"], "signature", {"PARTS": "*no_such_type"})
    compilers = side_by_side.Compilers()
    with caplog.at_level(logging.WARNING, "polyattn"):
        compilers.compile(asked)
    compilers.end()
    assert "TRITON_ATTN compiles merge_kernel in this process" in caplog.text
    if fault != "it can't":
        assert compiled_here(asked, monkeypatch)


@pytest.mark.parametrize("by_processes", [True, False])
def test_a_kernel_that_fails_leaves_the_next_build_alone(
    by_processes: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Triton's own mode stays active behind a compiler's error."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(side_by_side, "BY_PROCESSES", by_processes)
    failing = launch_of(SPEC, "sm_90", "merge").but(AT_ONCE=3)  # a range of no power of two
    for _ in range(2):
        with compiling_for("sm_90"), side_by_side.at_once(side_by_side.Compilers()):
            asked = failing.handed()
        with pytest.raises(triton.CompilationError):
            load([asked])


class Deadly:
    """Ends whatever process unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (1,)


def test_one_that_dies_leaves_the_others_their_answers(asked: dict[str, Any]) -> None:
    compilers = side_by_side.Compilers()
    compilers.start()
    dead = compilers._sent(pickle.dumps(Deadly()))
    alive = compilers._sent(side_by_side.job_of(asked))
    assert dead.result(60) == "its process ended"
    assert alive.result(60) is None
    compilers.end()


def test_processes_end_with_the_build(asked: dict[str, Any]) -> None:
    """What is under way too; and with an object that nobody has any more."""
    compilers = side_by_side.Compilers()
    compilers.start()
    assert compilers._process is not None
    under_way = compilers._sent(side_by_side.job_of(asked))
    compilers.end()
    with pytest.raises(EOFError):
        under_way.result(60)
    compilers.start()
    process = compilers._process
    del compilers
    gc.collect()
    assert process.wait(60) == -signal.SIGTERM


def test_a_source_is_new_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pointwise.imported.cache_clear()
    spec = LayerSpec(num_heads=4, head_size=64, variant="flash_sigmoid")
    told = [pointwise.Generated.of(spec) for _ in range(2)]
    assert [one is not None and one.new for one in told] == [True, False]
    pointwise.imported.cache_clear()
