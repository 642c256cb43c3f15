"""NATIVE_ATTN's masks: its planner's ranges are core's, and every row sees exactly what they show."""

from __future__ import annotations

import ctypes
import random
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families.mask_grid import BEYOND, GRID
from polyattn import Device, LayerSpec
from polyattn.conformance.harness.base import Harness
from polyattn.kernel import key_ranges
from polyattn.registry.discovery import refresh
from polyattn.workload.base import workload
from polyattn_cpu.native import attention, build, library
from test_native import ISAS, Step, needs_library

HERE = Path(__file__).parent
NO_WINDOW = 2**31 - 1  # how engines write it

Ranges = Callable[[LayerSpec, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Ranges:
    """The C++ function that the planner and the kernels take ranges from, compiled by itself."""
    out = tmp_path_factory.mktemp("ranges") / "ranges.so"
    try:
        command = build.compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-I", str(build.SOURCES)]
    subprocess.run(
        [*command, *flags, str(HERE / "native_check" / "ranges.cpp"), "-o", str(out)], check=True
    )
    ranges = ctypes.CDLL(str(out)).ranges

    def run(spec: LayerSpec, first: np.ndarray, last: np.ndarray, lens: np.ndarray) -> np.ndarray:
        found = np.empty((len(first), 4), np.int32)
        columns = [np.ascontiguousarray(each, np.int64) for each in (first, last, lens)]
        pointers = [ctypes.c_void_p(each.ctypes.data) for each in (*columns, found)]
        ranges(attention.layer_bytes(spec), ctypes.c_int64(len(first)), *pointers)
        return found

    return run


def by_core(spec: LayerSpec, first: np.ndarray, last: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """Return core's ranges; those that touch as one, the near one."""
    kept_start, kept_stop, near_start, near_stop = key_ranges(
        spec, first, last, lens, np.minimum, np.maximum
    )
    touch = kept_stop == near_start
    kept_stop, near_start = (np.where(touch, kept_start, each) for each in (kept_stop, near_start))
    return np.stack([kept_start, kept_stop, near_start, near_stop], 1)


def masks(
    windows: tuple[int | None, ...], kept: tuple[int, ...], chunks: tuple[int | None, ...]
) -> list[LayerSpec]:
    return [
        LayerSpec(
            num_heads=1, head_size=64, causal=causal, sliding_window=window, sink_tokens=sinks,
            chunk_size=chunk,
        )
        for causal, window, sinks, chunk in product((True, False), windows, kept, chunks)
        if window is not None or not sinks
    ]  # fmt: skip


def test_blocks_and_rows_see_what_core_says(planned: Ranges) -> None:
    """Every block of neighbouring queries of every small step; a row is a block of one."""
    blocks = np.array(
        [
            (first + keys - queries, last + keys - queries, keys)
            for queries, keys in product(range(1, 20), range(20))
            for first in range(queries)
            for last in range(first, queries)
        ]
    ).T
    specs = masks((None, 1, 2, 3, 5, 40, NO_WINDOW), (0, 1, 4, 9, 30), (None, 1, 3, 5, 16))
    for spec in specs:
        assert (planned(spec, *blocks) == by_core(spec, *blocks)).all(), spec


def test_the_longest_sequences_see_what_core_says(planned: Ranges) -> None:
    dice = np.random.default_rng(0)
    edges = [1, 2, 3, 1023, 1024, 2**20, 2**29 - 1, 2**29]
    for spec in masks((None, *edges), (0, *edges), (None, *edges)):
        lens = dice.choice([0, *edges], 50)
        queries = dice.choice(edges, 50)
        first = dice.integers(0, queries)
        last = dice.integers(first, queries)
        blocks = [each + lens - queries for each in (first, last)]
        assert (planned(spec, *blocks, lens) == by_core(spec, *blocks, lens)).all(), spec


EDGES = sorted({max(0, at + by) for by in (-1, 0, 1) for at in (
    1, 8, 16, 64, 128, 256, 384, 512, 1024, 1088, 1536, 2048, 3072,
)})  # fmt: skip
"""Lengths around every number of keys at which the C++ changes its way."""
HEADS = [(1, 1), (2, 2), (8, 2), (6, 1), (12, 1), (16, 1), (17, 1), (34, 2), (71, 1)]
SCORES = 1 << 22
"""Of a step, all heads together: the reference has them whole, in float64."""


def drawn(dice: random.Random) -> Step:
    """Return a step of a random layer, with lengths, windows, chunks and kept tokens around edges."""
    heads, kv_heads = dice.choice(HEADS)
    size = dice.choice([16, 64, 72, 80, 120, 128])
    window = dice.choice([None, 1, 2, 3, 8, 40, 127, 300, 1024, NO_WINDOW])
    spec = LayerSpec(
        num_heads=heads, num_kv_heads=kv_heads, head_size=size, causal=dice.random() < 0.5,
        v_head_size=dice.choice([size, size, 24]), dtype=dice.choice(["float32", "float32", "bfloat16"]),
        sliding_window=window, chunk_size=dice.choice([None, None, None, 5, 130, 512, 1024]),
        sink_tokens=dice.choice([0, 0, 3, 9, 200, 513]) if window else 0,
        alibi=dice.random() < 0.2, learned_sinks=dice.random() < 0.2,
        logit_soft_cap=dice.choice([None, None, None, 5.0]),
    )  # fmt: skip
    # Of a KV head: around what decode takes at most, and one and several blocks of rows.
    group = heads // kv_heads
    rows = [group * dice.choice([1, 1, 1, 2, 3]), *(8, 16, 17, 32, 128, 384, 1024, 1500, 3000)]
    queries, lens, room = list[int](), list[int](), SCORES
    for _ in range(dice.choice([1, 2, 3, 5])):
        count = max(1, dice.choice(rows) // group + dice.choice([-1, 0, 0, 1]))
        length = dice.choice([*EDGES, count, count, count + dice.choice(EDGES)])
        if heads * count * length <= room:
            room -= heads * count * length
            queries.append(count)
            lens.append(length)
    step = Step(
        spec, queries or [1], lens or [40], block_size=dice.choice([1, 16, 48]),
        seed=dice.randrange(1 << 30),
    )  # fmt: skip
    if spec.alibi:  # logits of hundreds round by more than tolerances allow
        assert step.params.alibi_slopes is not None
        step.params.alibi_slopes.mul_(0.1)
    return step


@needs_library
@pytest.mark.parametrize("draws", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_random_layers_around_every_edge(monkeypatch: pytest.MonkeyPatch, draws: int) -> None:
    """Each instruction set runs each step: drawing it and its reference take most of the time."""
    monkeypatch.setenv(library.PAIRS_VARIABLE, "1")
    for seed in range(draws):
        step = drawn(random.Random(f"{draws} {seed}"))
        for isa in ISAS:
            monkeypatch.setenv(library.ISA_VARIABLE, isa)
            try:
                step.check()
            except AssertionError as error:
                shape = f"{step.spec}, {step.queries} of {step.lens}"
                raise AssertionError(f"{isa}, {seed}: {shape}") from error


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize(
    "isas",
    [
        pytest.param([isa for isa in ISAS if isa not in build.BASES], id="bases"),
        pytest.param(
            [isa for isa in ISAS if isa in build.BASES], id="others", marks=pytest.mark.sweep
        ),
    ],
)  # of float32, which goes to the base's kernels where an instruction set has one
def test_every_mask_of_the_grid(isas: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second instruction set has the first one's references, which take as long as a run."""
    if not isas:
        pytest.skip("no instruction set here that has a base")
    monkeypatch.setenv(library.PAIRS_VARIABLE, "1")
    cases = {name: case for name, case in (GRID | BEYOND).items() if case.spec.window_right is None}
    host, right, wrong = Device("cpu", "x86_64", torch_device="cpu"), {}, {}
    for isa in isas:
        with monkeypatch.context() as context:
            context.setenv(library.ISA_VARIABLE, isa)
            refresh()
            for name, (spec, lengths) in cases.items():
                step: Any = workload(Harness("NATIVE_ATTN", host, 5).group(spec), lengths, 5)
                vars(step).update({"expected": right[name]} if name in right else {})
                try:
                    step.check()
                except Exception as error:
                    wrong[isa, name] = str(error)
                right[name] = step.expected
    refresh()
    assert not wrong
