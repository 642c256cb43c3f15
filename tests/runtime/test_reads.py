"""Is a wrong plan told from a right one? Mistakes in plans' own buffers, named with row, head, key."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from chips import h200
from polyattn import Batch, Device, LayerGroup, LayerSpec
from polyattn.conformance.boundaries import draw_turning, numbers_of, turning
from polyattn.errors import PluginError
from polyattn.families.attention.reference import visible
from polyattn.kernel import CacheFormat
from polyattn.runtime import plan_checks
from polyattn.runtime.graphs.step_buffers import StepBuffers
from polyattn.runtime.plan_checks import SHARE, PlanChecks, check_plan
from polyattn.runtime.reads import shows
from polyattn.runtime.step.shared_prefix import SharedRun
from polyattn.selection.cache_format import format_of
from polyattn.workload.dice import Dice
from polyattn.workload.steps import share_blocks
from polyattn_cpu.native import library

H200 = Device("cuda", "sm_90", torch_device="cpu")
BASE = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64, dtype="bfloat16")
needs_native = pytest.mark.skipif(library.why_not() is not None, reason="no native kernels")


def form_of(spec: LayerSpec) -> CacheFormat:
    return format_of(spec, H200, "NHD", 16)


def step_of(queries: list[int], lens: list[int], **more: Any) -> Batch:
    table = torch.arange(len(lens) * 400, dtype=torch.int32).view(len(lens), 400)
    return Batch([0, *np.cumsum(queries).tolist()], lens, table, **more)


def triton(spec: LayerSpec = BASE, sms: int = 16) -> Any:
    """TRITON_ATTN, as it plans on a small chip of Hopper's generation."""
    pytest.importorskip("triton")
    from polyattn_triton import launch
    from polyattn_triton.attention import TritonAttention

    with patch.object(launch, "facts", h200(sms, shared=1 << 30)):
        return TritonAttention(spec, form_of(spec), H200)


DECODES = step_of([1] * 5, [3000, 5, 0, 700, 1100])
PROMPTS = step_of([300, 20, 1, 0], [1500, 20, 700, 90])
MANY = step_of([200] * 12, [200 + 40 * i for i in range(12)])
EVEN = step_of([1] * 3, [2000, 1990, 2010])


def shared() -> Batch:
    levels = ((SharedRun((0, 1, 2), 0, 40),), (SharedRun((0, 2), 40, 9),))
    batch = step_of([1] * 4, [1000, 900, 1000, 77], shared_prefix=levels)
    table = batch.block_table
    assert table is not None
    share_blocks(table, levels)
    return batch


def add(at: Callable[[Any], int], by: int) -> Callable[[Any], None]:
    """Return what changes one number of a plan's work."""

    def change(plan: Any) -> None:
        plan.work[at(plan)] += by

    return change


def line(plan: Any) -> int:
    return 4 + (3 if plan.way == "listed" else 5) * int(plan.grid[0])


def replaced(name: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda plan: setattr(plan, name, change(plan))


def smaller_workspace(plan: Any) -> None:
    parts, lse, *others = plan.kept.own
    plan.kept.own = (parts[: len(parts) // 50], lse[: len(lse) // 50], *others)


def fewer_programs(plan: Any) -> tuple[int, int, int]:
    programs, heads, splits = plan.grid
    return programs - 1, heads, splits


def swapped(first: Callable[[Any], int], second: Callable[[Any], int]) -> Callable[[Any], None]:
    def change(plan: Any) -> None:
        a, b = first(plan), second(plan)
        plan.work[[a, b]] = plan.work[[b, a]]

    return change


def rest(plan: Any, what: int) -> int:
    """Where the sequences (1) and first rows (2) of the tiles of stretches begin."""
    return line(plan) + what * int(plan.work[3]) + 1


def ending(plan: Any) -> int:
    """A program in whose stretch the tile ends that it begins in."""
    share, programs = int(plan.work[0]), int(plan.grid[0])
    ends = plan.work[4 + 2 * programs : 4 + 3 * programs]
    return next(p for p in range(programs - 1) if ends[p] <= p * share + share)


def between(plan: Any) -> int:
    """A tile that no program begins in."""
    begun = set(plan.work[4 : 4 + plan.grid[0]].tolist())
    return next(tile for tile in range(int(plan.work[3])) if tile not in begun)


STRETCHES: dict[str, Callable[[Any], None]] = {
    "a share too short": add(lambda p: 0, -1),
    "a share too long": add(lambda p: 0, 1),
    "the line ends early": add(lambda p: 1, -1),
    "an item costs more": add(lambda p: 2, 1),
    "a program begins in another tile": add(lambda p: 4 + 2, 1),
    "a tile begins later for one program": add(lambda p: 4 + p.grid[0] + 3, 1),
    "a tile ends earlier for one program": add(lambda p: 4 + 2 * p.grid[0] + ending(p), -1),
    "a tile ends earlier": add(lambda p: line(p) + between(p) + 1, -1),
    "nobody merges": replaced("merging", lambda p: None),
    "too few programs merge": replaced(
        "merging", lambda p: p.merging._replace(programs=1, tiles=1)
    ),
    "a part has fewer rows": replaced("rows", lambda p: p.rows // 2),
    "one program is missing": replaced("grid", fewer_programs),
    "the workspace is too small": smaller_workspace,
}
TILED: dict[str, Callable[[Any], None]] = {
    "another sequence for one program": add(lambda p: 4 + 3 * p.grid[0] + 1, 1),
    "another row for one program": add(lambda p: 4 + 4 * p.grid[0] + 1, 4),
    "another sequence": add(lambda p: rest(p, 1) + between(p), 1),
    "another row": add(lambda p: rest(p, 2) + between(p), -1),
    "rows of two tiles are exchanged": swapped(
        lambda p: rest(p, 2) + between(p), lambda p: rest(p, 2) + between(p) - 1
    ),
}
WHOLE: dict[str, Callable[[Any], None]] = {
    "two tiles of one sequence": add(lambda p: 0, 1),
    "a tile begins a row later": add(lambda p: p.grid[0] + 1, 1),
    "a tile twice": lambda p: p.work[p.grid[0] :].fill_(0),
    "the last tile is missing": replaced("grid", fewer_programs),
}
EVENLY: dict[str, Callable[[Any], None]] = {
    "a sequence has no program": replaced("grid", fewer_programs),
    "more splits than one merges": replaced("grid", lambda p: (p.grid[0], p.grid[1], 200)),
    "a KV head has no program": replaced("grid", lambda p: (p.grid[0], 1, p.grid[2])),
    "parts lie in one another": replaced("rows", lambda p: p.rows // 2),
    "the workspace is too small": smaller_workspace,
}


def piece(field: int, by: int, which: int = 1) -> Callable[[Any], None]:
    return add(lambda p: 8 * which + field, by)


PREFIXES: dict[str, Callable[[Any], None]] = {
    "another row's table": piece(0, 3),
    "keys begin later": piece(1, 16),
    "keys begin earlier": piece(1, -1, 2),
    "keys end earlier": piece(2, -1),
    "other rows": piece(3, 1),
    "a row less": piece(4, -1, 0),
    "a part lies elsewhere": piece(5, 4),
    "the last piece is nobody's": lambda p: p.work[p.offsets[0] : p.offsets[1]].clamp_(
        max=int(p.work[p.offsets[1] - 1]) - 1
    ),
    "a row has a part less": add(lambda p: p.offsets[1] + 1, -1),
    "another part": add(lambda p: p.offsets[2], 4),
    "parts in another order": swapped(lambda p: p.offsets[2], lambda p: p.offsets[2] + 1),
    "the workspace is too small": smaller_workspace,
}
PLANTED = [
    *(("pieces", PROMPTS, name, bug) for name, bug in (STRETCHES | TILED).items()),
    *(("listed", DECODES, name, bug) for name, bug in STRETCHES.items()),
    *(("prefill", MANY, name, bug) for name, bug in WHOLE.items()),
    *(("split", EVEN, name, bug) for name, bug in EVENLY.items()),
]


@pytest.mark.parametrize(
    ("way", "batch", "name", "bug"), PLANTED, ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_mistake_in_a_plan_of_triton_s_is_told(
    way: str, batch: Batch, name: str, bug: Callable[[Any], None]
) -> None:
    backend = triton()
    plan = backend.plan_rows(batch, cut=way == "pieces")
    assert plan.way == way and check_plan(backend, plan, batch)
    bug(plan)
    with pytest.raises(PluginError, match=named(name)):
        check_plan(backend, plan, batch)


def named(name: str, *others: str) -> str:
    """Return what a planted mistake's message must say: row, head and key where keys are other ones."""
    return ROW_HEAD_AND_KEY if name in OF_KEYS else "|".join((NAMED, *others))


ROW_HEAD_AND_KEY = r"query token \d+, query head \d+, KV head \d+, key \d+: "
OF_KEYS = frozenset({
    "a KV head has no program", "a key of a unique block is hidden", "a launch has another one's tiles",
    "a launch is missing", "a launch runs twice", "a launch's share is too short",
    "a part begins later", "a part ends later", "a part has fewer rows",
    "a program begins in another tile", "a query less", "a row less",
    "a sequence doesn't use a shared block", "a sequence has no program", "a share too long",
    "a share too short", "a shared block lies elsewhere", "a tile begins a row later",
    "a tile begins later for one program", "a tile ends earlier", "a tile ends earlier for one program",
    "a tile twice", "a token less", "a unique block lies elsewhere", "an item costs more",
    "an own key is hidden", "another row", "another row for one program", "another row's unique block",
    "another sequence's tile", "keys begin earlier", "keys begin later", "keys begin later elsewhere",
    "keys end earlier", "no sequence's tile", "rows of two tiles are exchanged",
    "the last piece is nobody's", "the last tile is missing", "the line ends early",
    "two tiles of one sequence",
})  # fmt: skip
NAMED = (
    r"query token \d+, query head \d+, KV head \d+|rows \d+ to \d+, KV heads|partial result|"
    r"is computed \d times|key \d+|has other rows \(sequence \d+"
)


def on_device(batch: Batch) -> None:
    """Hide the host's copy of the block table, as where only a GPU has it."""
    batch.__dict__["host_block_table"] = None


@pytest.mark.parametrize("name", PREFIXES)
def test_a_mistake_in_a_plan_of_shared_prefixes_is_told(name: str) -> None:
    backend, batch = triton(), shared()
    plan = backend.plan(batch)
    assert check_plan(backend, plan, batch)
    on_device(batch)
    assert check_plan(backend, plan, batch)
    PREFIXES[name](plan)
    with pytest.raises(PluginError, match=named(name)):
        check_plan(backend, plan, batch)


def with_parts(plan: Any) -> Any:
    """Return the last of a step's launches that merges parts."""
    return [launch for launch in (plan, *plan.others) if launch.merging is not None][-1]


LAUNCHES: dict[str, Callable[[Any], Any]] = {
    "a launch is missing": lambda p: p.others.pop(),
    "a launch runs twice": lambda p: p.others.append(p.others[0]),
    "a launch has another one's tiles": lambda p: setattr(p.others[0], "place", p.place),
    "a launch's share is too short": lambda p: with_parts(p).work[:1].sub_(1),
    "nobody merges a launch's parts": lambda p: setattr(with_parts(p), "merging", None),
    "the workspace is too small": lambda p: smaller_workspace(with_parts(p)),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_mistake_in_one_of_several_launches_is_told(name: str) -> None:
    backend = triton(BASE.replace(batch_invariant="batch"))
    batch = step_of([1, 300, 1, 20, 8], [3000, 300, 90, 900, 4 * 1408])
    plan: Any = backend.plan(batch)
    assert len(plan.others) > 1 and check_plan(backend, plan, batch)
    LAUNCHES[name](plan)
    with pytest.raises(PluginError, match=named(name)):
        check_plan(backend, plan, batch)


def field(which: int, at: int, by: int) -> Callable[[Any], None]:
    """Return what changes one number of what the C++ planner lists: numbers, items or groups."""

    def change(listed: Any) -> None:
        array = listed[which]
        array[at if array.ndim == 1 else divmod(at, 100)] += by

    return change


NATIVE: dict[str, Callable[[Any], None]] = {
    "another sequence": field(1, 0, 1),
    "a token later": field(1, 1, 1),
    "a token less": field(1, 2, -1),
    "another KV head": field(1, 103, 1),
    "a KV head less": field(1, 4, -1),
    "keys begin later": field(1, 7, 1),
    "keys begin later elsewhere": field(1, 307, 1),
    "keys end earlier": field(1, 10, -1),
    "a part begins later": field(1, 9, 1),
    "a part ends later": lambda listed: np.add.at(
        listed[1][:, 10], np.flatnonzero((listed[1][:, 11] >= 0) & (listed[1][:, 9] == 0))[0], 1
    ),
    "two items share a part": lambda listed: np.copyto(
        listed[1][:, 11], np.minimum(listed[1][:, 11], 3)
    ),
    "a part is missing in its group": field(2, 1, -1),
    "a group begins with another part": field(2, 100, 1),
    "parts are sized by the last group": field(0, 3, -1500),
    "a thread's scratch is too small": field(0, 4, -(10**7)),
}


@needs_native
@pytest.mark.parametrize("name", NATIVE)
def test_a_mistake_in_a_native_plan_is_told(name: str) -> None:
    from polyattn_cpu.native.attention import NativeAttention

    spec = BASE.replace(dtype="float32")
    backend = NativeAttention(spec, form_of(spec), Device("cpu", "x86_64", torch_device="cpu"))
    batch = step_of([1, 16, 200, 0], [3000, 2000, 700, 80])
    plan: Any = backend.plan(batch)
    assert check_plan(backend, plan, batch)
    listed = plan.step.listed()
    NATIVE[name](listed)
    with (
        patch.object(type(plan.step), "listed", lambda self: listed),
        pytest.raises(PluginError, match=named(name, "waits for", "bytes of scratch")),
    ):
        check_plan(backend, plan, batch)


def other(part: str, name: str, at: int, by: int) -> Callable[[Any], None]:
    """Return what changes one number of a plan of PALLAS_ATTN's."""

    def change(plan: Any) -> None:
        held = getattr(plan.arrays, part)
        array = np.array(getattr(held, name))
        array.flat[at] += by
        plan.arrays = replace(plan.arrays, **{part: replace(held, **{name: array})})

    return change


TILES: dict[str, Callable[[Any], None]] = {
    "another sequence's tile": other("tiles", "seq", 1, 1),
    "no sequence's tile": other("tiles", "seq", 0, 1000),
    "a tile begins a row later": other("tiles", "start", 1, 1),
    "a tile begins a row earlier": other("tiles", "start", 1, -1),
    "other queries": other("tiles", "token", 0, 1),
    "a query less": other("pages", "query_lens", 0, -1),
    "a key less": other("pages", "seq_lens", 1, -1),
    "a key more": other("pages", "seq_lens", 1, 1),
    "other pages": other("pages", "first", 1, 1),
    "another page": other("pages", "table", 3, 1),
}


@pytest.mark.parametrize("kind", ["cached", "passed whole"])
@pytest.mark.parametrize("name", TILES)
def test_a_mistake_in_a_plan_of_pallas_s_is_told(kind: str, name: str) -> None:
    pytest.importorskip("jax")
    from polyattn_tpu.backends import PallasAttention

    cached = kind == "cached"
    spec = BASE if cached else BASE.replace(cached=False)
    device = Device("tpu", "v6e", torch_device="cpu")
    backend = PallasAttention(spec, form_of(spec) if cached else None, device)
    batch = step_of([200, 20, 1, 0], [1500, 20, 700, 90])
    plan = backend.plan(batch)
    assert check_plan(backend, plan, batch)
    TILES[name](plan)
    with pytest.raises(PluginError, match=named(name, "sequence \\d+", "tile \\d+")):
        check_plan(backend, plan, batch)


def tensor(name: str, at: int, by: int) -> Callable[[Any], None]:
    """Return what changes one number of a step's metadata."""

    def change(meta: Any) -> None:
        getattr(meta, name).view(-1)[at] += by

    return change


def hidden(name: str) -> Callable[[Any], None]:
    """Return what hides one pair that a mask shows."""

    def change(meta: Any) -> None:
        mask = getattr(meta, name)
        mask = mask if isinstance(mask, torch.Tensor) else mask[0]
        mask.view(-1)[mask.view(-1).nonzero()[-1]] = False

    return change


UNIFIED: dict[str, Callable[[Any], None]] = {
    "an own key is hidden": hidden("causal_masks"),
    "an own key too many is seen": lambda meta: meta.causal_masks[0][40].fill_(True),
    "a sequence doesn't use a shared block": hidden("member"),
    "another shared block": tensor("shared_blocks", 2, 1),
    "a shared block lies elsewhere": tensor("shared_starts", 2, 16),
    "a key of a unique block is hidden": hidden("unique_masks"),
    "another row's unique block": lambda meta: meta.unique_rows.sub_(1),
    "another sequence's unique block": lambda meta: meta.unique_groups.sub_(1),
    "a unique block lies elsewhere": lambda meta: meta.unique_starts.add_(16),
}


@pytest.mark.parametrize("name", UNIFIED)
def test_a_mistake_in_a_plan_of_the_hpu_s_is_told(name: str) -> None:
    from polyattn_hpu.attention import UnifiedAttention

    backend = UnifiedAttention(BASE, form_of(BASE), Device("hpu", "gaudi3", torch_device="cpu"))
    batch = step_of([30, 20, 1, 0], [150, 20, 700, 90])
    plan = backend.plan(batch)
    assert check_plan(backend, plan, batch)
    UNIFIED[name](plan.metadata(fresh=True))
    with pytest.raises(PluginError, match=named(name, "sequence \\d+")):
        check_plan(backend, plan, batch)


def test_thirty_mistakes_and_more_are_planted() -> None:
    kinds = (PLANTED, PREFIXES, LAUNCHES, NATIVE, TILES, UNIFIED)
    assert sum(map(len, kinds)) >= 86
    names = [name for *_, name, _ in PLANTED]
    names += [name for kind in (PREFIXES, LAUNCHES, NATIVE, TILES, UNIFIED) for name in kind]
    assert sum(name in OF_KEYS for name in names) >= 50  # told by row, head and key at once


def test_a_buffer_that_a_later_step_left_half_full_is_told() -> None:
    """A captured graph reads what the last plan wrote: work of another step isn't this step's."""
    spec = BASE.replace(graph_capture="single_token_decode")
    backend = triton(spec)
    first, later = step_of([1] * 4, [3000, 10, 700, 64]), step_of([1] * 4, [40, 2000, 0, 1])
    captured: Any = backend.plan(first)
    backend.plan(later, captured)
    assert check_plan(backend, captured, later)
    with pytest.raises(PluginError, match="query token"):
        check_plan(backend, captured, first)
    half = captured.work.clone()
    backend.plan(first, captured)
    captured.work[len(half) // 2 :] = half[len(half) // 2 :]
    with pytest.raises(PluginError, match="query token \\d+, query head \\d+, KV head \\d+"):
        check_plan(backend, captured, first)


def test_a_captured_forest_s_buffer_has_a_step_within_its_window() -> None:
    """Eagerly a plan without the window would do; the graph reads the captured one."""
    spec = BASE.replace(graph_capture="single_token_decode", sliding_window=64)
    backend = triton(spec)
    first, later = step_of([1] * 4, [3000, 10, 700, 64]), step_of([1] * 4, [40, 64, 0, 1])
    captured: Any = backend.plan(first.with_shared_prefix(()))
    backend.plan(later.with_shared_prefix(()), captured)
    assert check_plan(backend, captured, later)
    with pytest.raises(PluginError, match="query token"):
        check_plan(backend, captured, first)


def test_the_numbers_of_all_captured_plans_go_up_in_one_copy() -> None:
    """With the lengths, of a step with fewer rows than were captured."""
    spec = BASE.replace(graph_capture="single_token_decode")
    backends = [triton(spec), triton(spec.replace(sliding_window=64)), triton(spec)]
    buffers = StepBuffers(4, 1, 3008, BASE.block_size, "cpu")
    plans: list[Any] = [backend.plan(buffers.longest()) for backend in backends]
    buffers.staging.send()
    later = buffers.stage(step_of([1] * 3, [40, 2000, 1]))
    for backend, captured in zip(backends, plans, strict=True):
        backend.plan(later, captured)
    assert len(buffers.staging._runs) == 1
    buffers.staging.send()
    padded = step_of([1] * 4, [40, 2000, 1, 0])
    assert buffers.seq_lens.tolist() == padded.lens
    for backend, captured in zip(backends, plans, strict=True):
        assert check_plan(backend, captured, padded)


@pytest.mark.parametrize("between", ["nothing", "a refused step", "a step beside the staging"])
@pytest.mark.parametrize("window", [None, 64])
def test_a_captured_plan_is_sent_unless_the_device_has_it(between: str, window: int | None) -> None:
    """Its work list depends on how many tiles of keys each row has, and on nothing else."""
    spec = BASE.replace(graph_capture="single_token_decode", sliding_window=window)
    backend = triton(spec)
    buffers = StepBuffers(4, 1, 3008, 16, "cpu")
    captured: Any = backend.plan(buffers.longest())
    buffers.staging.send()

    def staged(lens: list[int]) -> tuple[Batch, list[tuple[int, int]]]:
        step = step_of([1] * 4, lens)
        backend.plan(buffers.stage(step), captured)
        return step, buffers.staging._runs

    other = step_of([1] * 4, [3000, 1, 1, 30])
    for lens in ([40, 1990, 35, 50], [41, 1991, 36, 51]):
        staged(lens)
        buffers.staging.send()
    lens = [42, 1992, 37, 52]
    if between == "a refused step":  # which then comes again
        staged(other.lens)
        lens = other.lens
    if between == "a step beside the staging":
        backend.plan(buffers.fill(other), captured)
        assert check_plan(backend, captured, other)
    step, runs = staged(lens)
    assert (runs == [(0, 4)]) == (between == "nothing")  # of the lengths alone
    buffers.staging.send()
    assert check_plan(backend, captured, step)
    step, _ = staged([42, 1992, 37, 2000])
    buffers.staging.send()
    assert check_plan(backend, captured, step)


def test_a_captured_step_s_buffer_has_room_for_any_step_s_tiles() -> None:
    """Four sequences' tiles are more than one sequence's of as many tokens."""
    backend = triton(BASE.replace(graph_capture="any"))
    first = step_of([900, 0, 0, 0], [2000, 9, 700, 64])
    later = step_of([257, 257, 257, 129], [300, 2000, 257, 226])
    first.num_contexts = later.num_contexts = 4
    captured = backend.plan(first)
    backend.plan(later, captured)
    assert check_plan(backend, captured, later)


MASKS: list[dict[str, Any]] = [
    {}, {"causal": False}, {"sliding_window": 5}, {"sliding_window": 5, "causal": False},
    {"sliding_window": 4, "sink_tokens": 3}, {"chunk_size": 7}, {"chunk_size": 9, "sliding_window": 4},
    {"window_right": 2, "sliding_window": 3, "causal": False},
]  # fmt: skip


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_rule_is_the_reference_s(mask: dict[str, Any]) -> None:
    for queries, keys in ((1, 20), (13, 20), (20, 13), (20, 20)):
        spec = BASE.replace(**mask)
        position = np.arange(queries)[:, None] + keys - queries
        found = shows(spec, position, np.arange(keys)[None], np.int64(keys))
        assert np.array_equal(
            found & np.ones((queries, keys), bool), visible(spec, queries, keys).numpy()
        )


def test_checks_stay_within_their_share() -> None:
    """The first plan is checked, then as many as a fifth of the time that plans take pays for."""
    now = [0.0]

    def taking(seconds: float, result: Any) -> Callable[..., Any]:
        def call(*_: Any) -> Any:
            now[0] += seconds
            return result

        return call

    call = SimpleNamespace(phase="decode", backend=None, plan=SimpleNamespace(batch=DECODES))
    step: Any = SimpleNamespace(calls=(call,))
    with (
        patch.object(plan_checks.time, "perf_counter", lambda: now[0]),
        patch.object(plan_checks, "check_calls", lambda step: None),
        patch.object(plan_checks, "check_plan", taking(1.0, True)),
    ):
        checks, counts = PlanChecks(), []
        for _ in range(12):
            checks(step, 1.0)
            counts.append(checks.checked)
    assert counts == [1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3]
    assert checks.spent <= SHARE * checks.planned + 1.0


def test_the_kit_and_the_setting_check_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LayerGroup(BASE.replace(dtype="float32")).plan_checks is None
    monkeypatch.setenv("POLYATTN_CHECKS", "1")
    group = LayerGroup(BASE.replace(dtype="float32"))
    assert group.plan_checks is not None and group.plan_checks.share < math.inf
    group.plan(step_of([1, 5], [30, 40]))
    assert group.plan_checks.plans
    if library.why_not() is None:
        assert group.plan_checks.checked


def test_lengths_at_which_sources_turn() -> None:
    """The native planner's 512 keys of a part and 64 of a tile are in its sources, and Triton's tiles."""
    numbers = numbers_of("polyattn_cpu")
    assert {16, 64, 512} <= set(numbers) and 128 in numbers_of("polyattn_triton")
    at = turning(numbers, BASE.replace(sliding_window=37, sink_tokens=5), 48)
    assert {36, 37, 38, 42, 47, 48, 49, 511, 512, 513, 127, 128, 129} <= set(at)
    rows = draw_turning(Dice(0), at, 200, 600)
    assert all(0 < query <= length <= 600 for query, length in rows)
    assert len({n for _, n in rows} & {511, 512, 513, 127, 128, 129, 37, 48}) > 2


def test_a_module_of_one_file_has_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the tutorial's plugin is: its path has no dot."""
    (tmp_path / "one_file_kernel.py").write_text("PART = 1 << 9\nTILE = 48\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert numbers_of("one_file_kernel:attend") == (9, 48, 512)
