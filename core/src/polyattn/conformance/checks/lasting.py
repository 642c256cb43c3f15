"""Does a backend keep its promises of layouts, and over many calls, and to its process?"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polyattn.conformance.boundaries import numbers_of, turning
from polyattn.conformance.case import Case
from polyattn.conformance.checks.published import by_heads
from polyattn.conformance.harness.base import Harness
from polyattn.families.attention.workload import AttentionWorkload
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.cache.scales import used_scales
from polyattn.runtime.program import Plan
from polyattn.runtime.step.batch import Batch
from polyattn.workload.base import Workload

CALLS = 3001
"""Calls of one layer, as a reply of as many tokens makes them."""
LEAST_CALLS = 260
"""That many, however long they take."""
PATIENCE = 2
"""Budgets of seconds that all of them may take."""
FAR = (1 << 31) + (1 << 20)
"""Elements of a cache's keys: more than an int32 counts."""
COLUMNS = (1, 64)
"""Columns of block tables: one block for each sequence, and a power of two."""
LENGTHS, LEAST_LENGTHS, MANY_ROWS = 60, 30, 70
"""Steps, each with lengths that none before it had; the least number of them; the rows of one of
them."""
ROUNDS = 96
WHOLE_STEPS = ([(5, 5)], [(1, 9)])
"""Steps of one call, whose output a library may make."""
OF_LARGE = 4
"""One in so many of these steps is large: large steps may take other code."""
LEAKED = 24 << 20
"""Bytes by which a process may grow in these steps, because allocators keep memory."""


def strided_out(case: Case, harness: Harness) -> None:
    """`out=` may be some heads of a wider tensor; without it an output is its caller's alone."""
    layer = harness.layer(case.spec)
    step = harness.step(layer, case.batch)
    expected = step.check()
    for lengths in WHOLE_STEPS:
        own, other = (harness.step(layer, lengths) for _ in range(2))
        new = layer(*own.inputs, own.batch)
        own.compare(new, None, "without out=: ")
        before = new.clone()
        layer(*other.inputs, other.batch)
        assert torch.equal(new, before), f"{own.who} wrote an earlier call's output"
    tokens, heads, size = expected.shape
    wide = torch.full((tokens + 2, heads + 3, size), 7.0).to(expected)
    out = wide[1:-1, 1:-2]
    layer(*step.inputs, step.batch, out=out)
    step.compare(out, None, "out= of strided heads: ")
    out.fill_(7.0)
    assert bool((wide == 7).all()), "it wrote beside its output"


def strided_heads(case: Case, harness: Harness) -> None:
    """Query, key and value may lie head by head, as a projection that was transposed does."""
    step = harness.step(harness.layer(case.spec), case.batch)
    step = step.but(**{n: by_heads(tensor) for n, tensor in step.tensors().items()})
    assert step.query.stride(0) < step.query.stride(1)
    step.check("strided by heads: ")


def wide_table(case: Case, harness: Harness) -> None:
    """The block table may be a slice of a wider one, and have no column to spare."""
    step = harness.work(case, spare=0)
    batch, table = step.batch, step.batch.block_table
    step.check("a table without a spare column: ")
    wide = torch.full((len(table) + 2, table.shape[1] + 5), int(table.max())).to(table)
    wide[1:-1, 3:-2] = table
    sliced = Batch(batch.starts, batch.lens, wide[1:-1, 3:-2], batch.slot_mapping)
    step.but(batch=sliced).check("a slice of a wider table: ")
    # Its blocks are written where the first step's were.
    other = harness.step(step.layer, case.batch, spare=0)
    table.copy_(other.batch.block_table)
    again = Batch(batch.starts, batch.lens, table, other.batch.slot_mapping)
    other.but(batch=again).check("a table that is written again: ")
    size = step.cache.block_size
    for columns in COLUMNS:
        lengths = [(1, columns * size), (1, 1), (min(3, size), size)]
        harness.step(step.layer, lengths, spare=0).check(f"a table of {columns} columns: ")


def far_blocks(case: Case, harness: Harness) -> None:
    """Blocks lie beyond the 2^31st element of a cache. On a CPU unused pages take no memory."""
    group = harness.group(case.spec)
    form = group.cache_format
    assert form is not None
    blocks = FAR // (form.block_size * form.num_kv_heads * form.head_size) + 1
    if harness.torch_device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(harness.torch_device)
        if free < 3 * FAR * 2:
            pytest.skip("the device has too little memory for a cache of 2^31 elements")
    cache = group.allocate_cache(blocks)
    few = KVCache(cache.key[:64], cache.value[:64])
    lengths = [(1, form.block_size + 3), (1, 3 * form.block_size), (1, 5)]
    step: AttentionWorkload = harness.step(harness.layer(case.spec, group=group), lengths, full=few)
    near = step.batch.block_table
    assert near is not None
    table = torch.where(near % 2 == 0, near, blocks - near)
    for stored in (cache.key, cache.value):
        for block in table.flatten().tolist():
            rows = harness.dice.normal(*stored.shape[1:])
            stored[block] = rows.to(stored.dtype)
    batch = Batch.from_lens(*step_lens(step), table, form.block_size)
    step = step.but(cache=cache, batch=batch)
    step.call()
    for index in range(batch.num_seqs):
        error = step.token_error(index)
        assert error <= 0.1, f"{step.who} is off by {error:.3g} beyond 2^31 elements of a cache"


def step_lens(step: AttentionWorkload) -> tuple[list[int], list[int]]:
    """Return a step's lengths."""
    return step.batch.query_lens, step.batch.lens


def many_calls(case: Case, harness: Harness) -> None:
    """A layer's thousandth call gives what its first gave, under one plan and under new ones."""
    layer, end = harness.layer(case.spec), time.monotonic() + PATIENCE * harness.budget
    steps = [harness.step(layer, case.batch) for _ in range(2)]
    plan, starts = steps[0].plan, [_states(step) for step in steps]
    first = [step.check("first call: ") for step in steps]
    lses = [getattr(step, "lse", None) if case.spec.needs_lse else None for step in steps]
    for number in range(2, CALLS + 1):
        if number > LEAST_CALLS and number % 64 == 0 and time.monotonic() > end:
            break
        at = number % 2
        _rewind(steps[at], starts[at])
        out = steps[at].run(plan if not at else layer.group.plan(steps[at].batch))
        same = torch.allclose(out.float(), first[at].float(), rtol=2e-2, atol=2e-2)
        lse = lses[at]
        if lse is not None:
            same &= torch.allclose(steps[at].lse, lse, rtol=1e-2, atol=1e-2)
        assert same, f"call {number} of a layer gives something else than the first"
    _rewind(steps[0], starts[0])
    steps[0].check("last call: ", plan)


def many_lengths(case: Case, harness: Harness) -> None:
    """Steps of ever other lengths and sizes are right, and the first again after them.

    One has many rows, of lengths at which the backend's sources may take another path.
    """
    layer, end = harness.layer(case.spec), time.monotonic() + PATIENCE * harness.budget
    first = harness.step(layer, [(1, 9), (1, 30)]).remembered()
    first.check("first of many lengths: ")
    odd: dict[int, list[tuple[int, int]]] = {5: [(1, 0)]}  # after which others are right
    if "prefill" in harness.info.capabilities.phases:
        odd |= {9: [(0, 5)], 11: [(700, 700)], 13: [(1, 0), (0, 0)]}
    for number in range(1, LENGTHS + 1):
        if number > LEAST_LENGTHS and time.monotonic() > end:
            break
        lengths = [(1, 3 * number + row) for row in range(1 + number % 7)]
        if number == LEAST_LENGTHS // 2:
            at = turning(numbers_of(harness.info.path), case.spec)
            lengths = [(1, at[i]) for i in harness.dice.order(len(at))[:MANY_ROWS].tolist()]
        if number in odd:
            harness.step(layer, odd[number]).check(f"step {number}, of {odd[number]}: ")
        harness.step(layer, lengths).check(f"step {number} of other lengths: ")
    first.but().check("the first lengths again: ")
    with ThreadPoolExecutor(1) as other:
        other.submit(first.but().check, "in another thread: ").result()


def _states(step: Workload) -> Tensor | None:
    """Return a recurrence's states before its step."""
    states = getattr(step, "states", None)
    return None if states is None else states.data.clone()


def _rewind(step: Workload, states: Tensor | None) -> None:
    """Let a recurrence start where its step began."""
    if states is not None:
        step.__dict__["states"].data.copy_(states)


def reassigned(case: Case, harness: Harness) -> None:
    """A new scale counts from the next step on, also under the same plan."""
    step = harness.work(case)
    step.check("", step.plan)
    for factor in (1.75, 0.5):
        for name in sorted(used_scales(case.spec)):
            tensor = step.layer.scales.tensors.get(name)
            old = getattr(step.layer, name) if tensor is None else tensor.weight.tensor
            setattr(step.layer, name, old * factor)
        step.but().check(f"scales assigned again, times {factor}: ", step.plan)


def loaded_later(case: Case, harness: Harness) -> None:
    """Sinks and slopes that are loaded after a layer was built, planned and run count from then on."""
    layer = harness.layer(case.spec)
    step = harness.step(layer, case.batch)
    step.check("", step.plan)
    for weight in (layer.sinks, layer.alibi_slopes):
        if weight is not None:
            weight.tensor.copy_(weight.tensor.flip(0) * 0.5 + 0.75)
    step.but().check("parameters loaded later: ", step.plan)
    for weight in (layer.sinks, layer.alibi_slopes):
        if weight is not None:
            weight.tensor = weight.tensor.flip(0) + 0.25
    step.but().check("parameters replaced: ", step.plan)


def process(case: Case, harness: Harness) -> None:
    """Steps leave no plans, tensors, threads, open files or memory behind."""
    layer = harness.layer(case.spec)
    prefills = "prefill" in harness.info.capabilities.phases
    large = [(1, 9 + row) for row in range(MANY_ROWS // 2)] + [(130 if prefills else 1, 140)]
    steps = [harness.step(layer, lengths).remembered() for lengths in (case.batch, large)]

    def rounds(count: int) -> dict[str, int]:
        for number in range(count):
            step = steps[number % OF_LARGE == 0]
            step.but(plan=layer.group.plan(step.batch.copy())).run()
        gc.collect()
        alive = Counter(map(type, gc.get_objects()))
        return {
            "plans": sum(count for kind, count in alive.items() if issubclass(kind, Plan)),
            "tensors": alive[Tensor],
            "threads": threading.active_count(),
            "threads of the system": _entries("task"),
            "open files": _entries("fd"),
            "functions at exit": atexit._ncallbacks(),
            "bytes": _resident(),
        }

    rounds(ROUNDS // 4)
    before = rounds(ROUNDS // 4)
    with redirect_stdout(io.StringIO()) as printed:
        after = rounds(ROUNDS)
    assert not printed.getvalue(), f"its steps print: {printed.getvalue()[:80]!r}"
    grown = {name: after[name] - count for name, count in before.items()}
    resident = grown.pop("bytes")
    left = {name: more for name, more in grown.items() if more >= ROUNDS // 8}
    assert not left, f"{ROUNDS} steps that are gone left behind: {left}"
    assert resident < LEAKED, f"the process grew by {resident >> 20} MiB in {ROUNDS} steps"


def _entries(folder: str) -> int:
    """Return how many threads or open files the process has, 0 where the system doesn't say."""
    of = Path("/proc/self") / folder
    return len(list(of.iterdir())) if of.exists() else 0


def _resident() -> int:
    """Return the bytes that the process has in memory, 0 where the system doesn't say.

    What earlier work freed goes back to the system first. Else leaks fill it, and nothing grows.
    """
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0
