"""Is each liar of a module observably wrong, for a use that is promised? `python witness.py third`"""

from __future__ import annotations

import gc
import importlib
import os
import random
import sys
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from polyattn import Attention, Batch, KVCache, LayerGroup, register, select
from polyattn.plugin import BackendInfo, Priority, hookimpl
from polyattn.runtime.merge import TorchMerge
from polyattn.settings import current
from polyattn.workload.base import workload


def name_of(kind: Any) -> str:
    return "X_" + "".join("_" + c if c.isupper() else c for c in kind.__name__).upper().strip("_")


def info(kind: Any) -> BackendInfo:
    return BackendInfo(
        name=name_of(kind), summary="a liar", path=f"{kind.__module__}:{kind.__name__}", capabilities=kind.claimed,
        priorities=(Priority(score=-100, why="for tests of the kit"),),
    )  # fmt: skip


class Plugin:
    def __init__(self, kinds: list[Any]):
        self.kinds = kinds

    @hookimpl
    def polyattn_api_versions(self) -> tuple[int, int]:
        return (1, 1)

    @hookimpl
    def polyattn_backends(self) -> list[BackendInfo]:
        return [info(kind) for kind in self.kinds]


HONEST = {"mla": "TORCH_MLA", "sparse_mla": "TORCH_MLA_SPARSE", "attention": "TORCH_SDPA"}


def group(kind: Any, honest: bool, spec: Any = None) -> LayerGroup:
    spec = spec or kind.shown[0]
    phase = kind.claimed.phases & {"store", "merge"}
    attends = HONEST.get(str(spec.kind.value), "TORCH_SCAN")
    if phase:
        service = f"TORCH_{next(iter(phase)).upper()}" if honest else name_of(kind)
        return LayerGroup(select(spec, backend=f"{next(iter(phase))}={service}"))
    settings = replace(current(), layout=getattr(kind, "layout", None) or None)
    return LayerGroup(select(spec, backend=attends if honest else name_of(kind), settings=settings))


def fails(call: Any) -> bool:
    try:
        call()
    except (AssertionError, IndexError):  # a lie may lead beyond a tensor
        return True
    return False


def plain(kind: Any, honest: bool) -> bool:
    work = workload(group(kind, honest), kind.shown[1], 3, step=getattr(kind, "step", {}))
    return fails(work.check)


def state(kind: Any, honest: bool) -> bool:
    made: Any = None
    spec = kind.shown[0].replace(needs_lse=True)
    for number in range(
        max(60, kind.most + 2 if kind.counted in ("calls", "plans", "layers of a plan") else 60)
    ):
        if kind.counted == "objects" or made is None:
            made = group(kind, honest, spec)
        if kind.counted in ("calls", "layers of a plan"):
            work = work if number else workload(made, [(1, 40)], 3)  # noqa: F821
        else:
            rows = 200 if "so far" in kind.counted else 1
            work = workload(
                made, [(1, 40 + number)] * rows if number < 30 else [(1, 40 + number)], 3
            )
        if fails(work.check):
            return True
    return False


def changed(kind: Any, honest: bool) -> bool:
    _, read, _ = importlib.import_module("liars.drawn").PROCESS[kind.what]
    before = read()
    workload(group(kind, honest), kind.shown[1], 3).check()
    return read() != before


def same_query(kind: Any, honest: bool) -> bool:
    work = workload(group(kind, honest), [(1, 9), (1, 30)], 3)
    return fails(work.but(query=work.query[:1].repeat(2, 1, 1)).check)


def strided_out(kind: Any, honest: bool) -> bool:
    work = workload(group(kind, honest), [(3, 9)], 3).remembered()
    wide = torch.full((3, 4, 128), 7.0)
    out = wide[:, :, :64]
    work.layer(*work.inputs, work.plan, out=out)
    return fails(lambda: work.compare(out, None)) or bool((wide[:, :, 64:] != 7.0).any())


def strided_query(kind: Any, honest: bool) -> bool:
    work = workload(group(kind, honest), [(3, 9)], 3)
    wide = torch.empty(3, 4, 192)
    wide[..., :64] = work.query
    return fails(work.but(query=wide[..., :64]).check)


def wide_table(kind: Any, honest: bool) -> bool:
    work = workload(group(kind, honest), [(1, 9), (1, 30)], 3)
    table = work.batch.block_table
    wide = torch.full((len(table), table.shape[1] + 3), -1, dtype=torch.int32)
    wide[:, : table.shape[1]] = table
    return fails(work.but(batch=work.batch.with_block_table(wide[:, : table.shape[1]])).check)


def packed(kind: Any, honest: bool) -> bool:
    return fails(workload(group(kind, honest), [(1, 40), (1, 30)], 3, step={"packed": True}).check)


def strided_keys(kind: Any, honest: bool) -> bool:
    work = workload(group(kind, honest), [(5, 40)], 3)
    wide = torch.empty(5, 2, 128)
    wide[..., :64] = work.key
    return fails(work.but(key=wide[..., :64]).check)


def skipped(kind: Any, honest: bool) -> bool:
    return fails(workload(group(kind, honest), [(5, 40)], 3, step={"skipped": True}).check)


def saturates(kind: Any, honest: bool) -> bool:
    work = workload(group(kind, honest, kind.shown[0].replace(kv_cache_dtype="int8")), [(5, 40)], 3)
    return fails(work.but(key=work.key * 100).check)


def two_scales(kind: Any, honest: bool) -> bool:
    made = group(kind, honest, kind.shown[0].replace(kv_cache_dtype="int8"))
    return fails(workload(Attention(made, k_scale=0.05, v_scale=0.1), [(5, 40)], 3).check)


def many_groups(kind: Any, honest: bool) -> bool:
    return any([fails(workload(group(kind, honest), [(1, 40)], 3).check) for _ in range(25)])


def same_lengths(kind: Any, honest: bool) -> bool:
    made = group(kind, honest)
    return any([fails(workload(made, [(1, 40), (1, 30)], seed).check) for seed in (1, 2)])


def two_layers(kind: Any, honest: bool) -> bool:
    made = group(kind, honest, kind.shown[0].replace(kv_cache_dtype="int8"))
    layers = [Attention(made, k_scale=s, v_scale=s) for s in (0.05, 0.1)]
    return any([fails(workload(layer, [(1, 40)], 3).check) for layer in layers])


def great(kind: Any, honest: bool) -> bool:
    made = group(kind, honest, kind.shown[0].replace(needs_lse=True))
    return any([fails(workload(made, lengths, 3).check) for lengths in ([(600, 600)], [(1, 40)])])


def calls(kind: Any, honest: bool) -> bool:
    work = workload(
        group(kind, honest, kind.shown[0].replace(needs_lse=True)), [(1, 40)], 3
    ).remembered()
    return any(
        [work.run() is None or fails(lambda: work.compare(work.out, work.lse)) for _ in range(300)]
    )


def three_plans(kind: Any, honest: bool) -> bool:
    made = group(kind, honest)
    works = [workload(made, [(1, 40 + n)], n) for n in range(3)]
    plans = [work.plan for work in works]
    return any([fails(lambda w=w, p=p: w.check(plan=p)) for w, p in zip(works, plans, strict=True)])


def empty(kind: Any, honest: bool) -> bool:
    made = group(kind, honest)
    return any([fails(workload(made, lengths, 3).check) for lengths in ([(1, 0)], [(1, 40)])])


def two_specs(kind: Any, honest: bool) -> bool:
    specs = [kind.shown[0], kind.shown[0].replace(scale=0.3)]
    return any([fails(workload(group(kind, honest, spec), [(1, 40)], 3).check) for spec in specs])


def many_layers(kind: Any, honest: bool) -> bool:
    work = workload(group(kind, honest), [(1, 40)], 3)
    return any([fails(work.check) for _ in range(70)])


def far_blocks(kind: Any, honest: bool) -> bool:
    work = workload(group(kind, honest), [(1, 40)], 3)
    small, far = work.cache, 33_000
    big = KVCache.allocate(small.format, far + small.num_blocks)
    big.key[far:], big.value[far:] = small.key, small.value
    big.key[:far], big.value[:far] = torch.nan, torch.nan
    table, size = work.batch.block_table, small.block_size
    table = torch.where(table > 0, table + far, 0).int()
    batch = Batch.from_lens([1], [40], table, size)
    return fails(work.but(cache=big, batch=batch).check)


def process(read: Any) -> Any:
    def changed(kind: Any, honest: bool) -> bool:
        before = read()
        workload(group(kind, honest), [(1, 40)], 3).check()
        return read() != before

    return changed


def kept(kind: Any, honest: bool) -> bool:
    work = workload(group(kind, honest), [(1, 40)], 3)
    there = weakref.ref(work.check())
    del work
    gc.collect()
    return there() is not None


def hole(kind: Any, honest: bool) -> bool:
    work = workload(group(kind, honest), kind.shown[1], 3)
    topk = work.topk.clone()
    topk[:, 3] = -1
    return fails(work.but(topk=topk).check)


def great_lse(kind: Any, honest: bool) -> bool:
    state = [
        torch.zeros(2, 1, 4),
        torch.full((2, 1), 100.0),
        torch.ones(2, 1, 4),
        torch.full((2, 1), 100.0),
    ]
    (TorchMerge if honest else kind).run(None, *state)
    return not bool(torch.isfinite(state[0]).all() and torch.isfinite(state[1]).all())


SPECIAL: dict[str, Any] = {
    "SameQuerySameAnswer": same_query, "OutputsInARow": strided_out, "QueriesInARow": strided_query,
    "TableInARow": wide_table, "PackedCacheInARow": packed, "StoresInARow": strided_keys,
    "StopsAtSkipped": skipped, "Int8Wraps": saturates, "KeysScaleForBoth": two_scales,
    "After20Groups": many_groups, "PlansByLengths": same_lengths, "FirstLayersScales": two_layers,
    "AfterAGreatStep": great, "EachCallOf256": calls, "TwoPlansAlive": three_plans, "AfterAnEmptyStep": empty,
    "CompiledWithoutTheScale": two_specs, "OnePlanForManyLayers": many_layers,
    "SeedsPython": process(random.getstate), "BlocksInSixteenBits": far_blocks, "StopsAtAHole": hole, "StopsTheCollector": process(gc.isenabled),
    "SilencesNumpy": process(np.geterr), "MediumPrecision": process(torch.get_float32_matmul_precision),
    "KeepsOutputs": kept, "SetsAVariable": process(lambda: dict(os.environ)), "MergesByExponentials": great_lse,
}  # fmt: skip


BY_BASE = {"DrawnState": state, "DrawnProcess": changed}


def main() -> None:
    module = importlib.import_module(f"liars.{sys.argv[1]}")
    register(Plugin(module.ALL), "unseen")
    bad = 0
    for kind in module.ALL:
        if sys.argv[2:] and kind.__name__ not in sys.argv[2:]:
            continue
        witness = SPECIAL.get(kind.__name__) or BY_BASE.get(kind.__mro__[1].__name__, plain)
        try:
            honest, liar = witness(kind, True), witness(kind, False)
        except Exception as error:  # noqa: BLE001
            honest, liar = None, f"{type(error).__name__}: {str(error)[:300]}"
        getattr(kind, "undo", int)()
        if honest is not False or liar is not True:
            bad += 1
            print(
                f"{kind.__name__} ({kind.__doc__}): honest fails {honest}, liar fails {liar}",
                flush=True,
            )
    print(f"{len(module.ALL)} liars, {bad} without a witness")


if __name__ == "__main__":
    sys.path.insert(0, "tests/conformance")
    main()
