"""How is a row measured? Builds each contender's workload, compares a part of it, and times it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from polyattn import Batch, Indexer, LayerGroup, LayerSpec, select
from polyattn.errors import SelectionError
from polyattn.families.attention.rotation import rotation_of
from polyattn.families.attention.workload import AttentionWorkload
from polyattn.families.recurrent import reference as recurrent_reference
from polyattn.families.recurrent.workload import RecurrentWorkload
from polyattn.families.sparse.index_workload import IndexWorkload
from polyattn.kernel import Frame, NewTokens
from polyattn.runtime.step.shared_prefix import SharedRun, shared_prefixes
from polyattn.workload.base import Workload, workload
from polyattn.workload.clock import Clock
from polyattn.workload.compare import output_error
from polyattn.workload.dice import Dice
from polyattn.workload.pages import fill
from polyattn.workload.tolerance import tolerance_of
from table import Other, Row
from torch.nn.functional import rms_norm

INDEX_PAGE = 64
"""Entries of a page of index keys."""
DRAWN = 256
"""Tokens of a recurrence's sequence that are drawn, on the host, and compared; the rest repeats them."""
FEW = 16
"""New tokens of a row up to which some backend of decodes takes it."""
Call = Callable[[], object]


def build(row: Row, other: Other, device: torch.device, shrink: int = 1) -> Any:
    """Return a contender's step of a row."""
    lengths, spec = row.lengths(shrink), row.spec.replace(**other.changes)
    indexes = (other.part or row.part).startswith("index")
    backend = f"index={other.backend}" if indexes and other.backend else None
    backend = backend or named(spec, other.backend, lengths)
    group = LayerGroup(select(spec, device, backend=backend))
    group.finish_builds()
    dice = Dice(0, group.torch_device, fast=True)
    if indexes:
        return IndexWorkload(Indexer(group), lengths, dice, block=INDEX_PAGE, full=True)
    if spec.recurrent is not None:
        return _recurrent(group, lengths, dice)
    if spec.latent is not None and not spec.chooses:
        return workload(group, lengths, dice, checks=False, weights=False)
    form = group.cache_format
    if form is None:  # an encoder's keys lie one after another
        return workload(group, lengths, dice, step={"spare": 0}, checks=False)
    cache = group.allocate_cache(sum(-(-n // form.block_size) for _, n in lengths) + 3)
    fill(cache)
    if spec.chooses:
        how = {} if spec.latent is None else {"weights": False}
        return workload(group, lengths, dice, step={"full": cache}, checks=False, **how)
    levels, first = [], 0
    for count, tokens in row.levels:
        blocks = max(1, tokens // form.block_size // shrink)
        starts = range(0, len(lengths), count)
        levels.append(tuple(SharedRun(tuple(range(s, s + count)), first, blocks) for s in starts))
        first += blocks
    layer = AttentionWorkload.layer_of(group, dice, checks=False)
    return AttentionWorkload(layer, lengths, dice, full=cache, shared=tuple(levels), spare=0)


def named(spec: LayerSpec, backend: str, lengths: Sequence[tuple[int, int]]) -> str | None:
    """Return how a backend is named for a step: for the phase that it runs, if it is one; "": none.

    A few new tokens a row may be a decode, as the decode's backend has it: both are named.
    """
    if spec.recurrent is not None or not backend:
        return backend or None
    decodes = sum(query == 1 for query, _ in lengths)
    if (spec.latent is not None and not spec.chooses) or decodes == len(lengths):
        return f"decode={backend}"
    few = all(query <= FEW for query, _ in lengths)
    return backend if decodes or few else f"prefill={backend}"


def _recurrent(group: LayerGroup, lengths: Sequence[tuple[int, int]], dice: Dice) -> Workload:
    """Return a recurrence's step whose tokens repeat those that are drawn."""
    few = [(min(q, DRAWN), n - q + min(q, DRAWN)) for q, n in lengths]
    work = workload(group, few, dice, checks=False)
    assert isinstance(work, RecurrentWorkload) and work.batch.state_slots is not None
    total, starts = sum(q for q, _ in lengths), [0, *torch.tensor(lengths)[:, 0].cumsum(0).tolist()]
    rows = torch.cat(
        [
            torch.arange(starts[i + 1] - starts[i]) % q + sum(n for n, _ in few[:i])
            for i, (q, _) in enumerate(few)
        ]
    ).to(work.device)
    assert len(rows) == total
    return work.but(
        lengths=list(lengths),
        tokens=[tensor[rows] for tensor in work.tokens],
        batch=work.step(lengths, work.batch.state_slots),
    )


def error_of(work: Any, call: Call) -> float:
    """Run a call and return the error of the shortest sequence's last token, or first tokens.

    Against the float64 reference. `call` writes `work.out`, or returns what belongs there.
    """
    index = min(range(len(work.lengths)), key=lambda i: work.batch.lens[i])
    if isinstance(work, RecurrentWorkload):
        return _recurrent_error(work, call, index)
    if isinstance(work, IndexWorkload):
        call()
        return work.error(work.batch.starts[1] - 1)
    work.out.fill_(torch.nan)
    _run(work, call)
    return float(work.token_error(index))


def _recurrent_error(work: RecurrentWorkload, call: Call, index: int) -> float:
    query, length = work.lengths[index]
    first, count = work.batch.starts[index], min(query, DRAWN)
    assert work.batch.state_slots is not None
    slot = int(work.batch.state_slots[index])
    states = work.states.data[slot : slot + 1].clone()
    tokens = {name: tensor[first : first + count] for name, tensor in work.tensors().items()}
    batch = Batch.from_lens([count], [length - query + count], state_slots=torch.zeros(1).long())
    expected, _ = recurrent_reference.forward(work.spec, tokens, work.layer.params, states, batch)
    _run(work, call)
    actual = work.out[first : first + count]
    return output_error(actual.reshape(count, -1), expected.reshape(count, -1))


def _run(work: Workload, call: Call) -> None:
    out = call()
    if isinstance(out, torch.Tensor) and out.data_ptr() != work.out.data_ptr():
        work.out.copy_(out.reshape(work.out.shape))


def attend(work: Any) -> Call:
    """A call of a layer whose new tokens are in the cache already."""
    return work.but(key=None, value=None).call  # type: ignore[no-any-return]


def new_output(work: Any) -> Call:
    """A call without `out`: it returns a new tensor, as libraries' functions do."""
    layer, inputs, plan = work.layer, work.inputs, work.plan
    return lambda: layer(*inputs, plan)


def unshared(work: Any) -> Call:
    """A call that reads shared blocks once for each sequence: the plan doesn't know of them."""
    batch = work.batch
    plain = Batch(
        batch.starts, batch.lens, batch.block_table, batch.slot_mapping, device=work.device,
        shared_prefix=(),
    )  # fmt: skip
    return attend(work.but(batch=plain))


def own_calls(work: Any) -> Call:
    """What a layer's call comes down to: the store's call, and the backends'."""
    plan, cache, layer = work.plan, work.cache, work.layer
    store = plan.before

    def run() -> None:
        store.backend.run(store.plan, work.key, work.value, cache, layer.params)
        for call in plan.calls:
            frame = Frame(work.query, work.key, work.value, cache, layer.params, work.out, None)
            call.run(frame if call.rows is None else frame.part(call.rows))

    return run


def captured(call: Call) -> Call:
    """A CUDA graph of a call; on the CPU, which captures nothing, the call."""
    if not torch.cuda.is_available():
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def narrow(work: Any) -> Call:
    """An indexer's call whose queries have 8 bits."""
    work.frame.query = work.frame.query.to(torch.float8_e4m3fn)
    return work.call  # type: ignore[no-any-return]


def store(work: Any) -> Call:
    """Store the new tokens' keys and values as they are."""
    before = work.plan.before
    return lambda: before.backend.run(
        before.plan, work.key, work.value, work.cache, work.layer.params
    )


def rotate_and_store(work: Any, norms_apart: bool = False) -> Call:
    """Norm and rotate queries and keys that lie in one fused projection, and store.

    `norms_apart`: torch norms them first, each head by the weight in the layer's dtype.
    """
    parts = (work.query, work.key, work.value)
    fused = torch.cat([part.flatten(1) for part in parts], dim=1)
    split = fused.split([part[0].numel() for part in parts], dim=1)
    query, key, value = (p.unflatten(1, q.shape[1:]) for p, q in zip(split, parts, strict=True))
    before, params = work.plan.before, work.layer.params
    rotation = rotation_of(work.spec, work.batch)
    run, norms, norm = before.rotated_by, before.norms(params), work.spec.qk_norm
    if not norms_apart or norms is None:
        new = NewTokens(query, key, value, norms=norms)
        return lambda: run(before.plan, rotation, new, work.cache, params, False)
    shape, weights = query.shape[2:], [w.to(query.dtype) for w in (norms.query, norms.key)]

    def apart() -> object:
        by = [rms_norm(x, shape, w, norm.eps) for x, w in zip((query, key), weights, strict=True)]
        return run(before.plan, rotation, NewTokens(*by, value), work.cache, params, False)

    return apart


def look(work: Any) -> Call:
    """Look for blocks that sequences share."""
    table, size = work.batch.host_block_table, work.cache.block_size
    return lambda: shared_prefixes(table, work.batch.lens, size)


def plan_unread(work: Any) -> Call:
    """Plan a step whose table only the device has: a new one each time, as an engine's is."""
    batch = work.batch.copy()
    batch.__dict__["host_block_table"] = None
    return lambda: work.group.plan(batch.copy())


@dataclass(frozen=True)
class Part:
    """What of a step is timed: by the device's clock or the host's; `gives` the step's output or not."""

    make: Callable[[Any], Call]
    host: bool = False
    gives: bool = True


PARTS = {
    "layer": Part(lambda work: work.call),
    "attend": Part(attend),
    "new output": Part(new_output),
    "unshared": Part(unshared),
    "graph": Part(lambda work: captured(work.call)),
    "own graph": Part(lambda work: captured(own_calls(work))),
    "index": Part(lambda work: work.call),
    "index of e4m3": Part(narrow),
    "store": Part(store, gives=False),
    "rotate and store": Part(rotate_and_store, gives=False),
    "norm apart": Part(partial(rotate_and_store, norms_apart=True), gives=False),
    "host of a call": Part(lambda work: work.call, host=True),
    "host of own calls": Part(own_calls, host=True),
    "plan": Part(lambda work: lambda: work.group.plan(work.batch), host=True, gives=False),
    "plan, unread": Part(plan_unread, host=True, gives=False),
    "read back": Part(lambda work: work.batch.block_table.cpu, host=True, gives=False),
    "look": Part(look, host=True, gives=False),
    "select": Part(lambda work: lambda: select(work.spec, work.device), host=True, gives=False),
}


def measure(
    row: Row, device: torch.device, clock: Clock, shrink: int = 1, against: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yield what each contender takes: `who`, and `us` and `error`, or `cannot`.

    `against`: which ones run beside the first; default all. Libraries run over the workload
    of the first contender that runs here. `absent`: it isn't here, or doesn't serve the layer, which
    says nothing of the row.
    """
    contenders = row.contenders(device.type)
    kept = [
        other for other in contenders if other in contenders[:1] or wanted(other.label, against)
    ]
    serving = None
    for other in kept:
        part = PARTS[other.part or row.part]
        result = _measured(other.label, partial(build, row, other, device, shrink), part, clock)
        serving = serving or (other if "us" in result else None)
        yield result
    for name in (name for name in row.libraries if serving and wanted(name, against)):
        part = Part(yardstick(name), gives=not name.startswith("machine."))
        yield _measured(name, partial(build, row, serving, device, shrink), part, clock)


def wanted(name: str, against: Sequence[str]) -> bool:
    """Return whether a contender is among those that were named, by a part of its name."""
    return not against or any(text.lower() in name.lower() for text in against)


def yardstick(name: str) -> Callable[[Any], Call]:
    """Return a library's function, `module.function` of `libraries/`."""
    module, function = name.split(".")
    found: Callable[[Any], Call] = getattr(importlib.import_module(f"libraries.{module}"), function)
    return found


def _measured(who: str, make: Callable[[], Workload], part: Part, clock: Clock) -> dict[str, Any]:
    try:
        work = make()
        call, record = part.make(work), {"who": who}
        if part.gives:
            error, allowed = error_of(work, call), tolerance_of(work.spec).output
            if not error <= allowed:
                return record | {"cannot": f"it is wrong: error {error:.2g}, allowed {allowed:g}"}
            record |= {"error": error}
        return record | {"us": clock.host_us(call) if part.host else clock.us(call)}
    except Exception as problem:  # one contender must not end the others
        said = str(problem).strip().splitlines() or [""]
        cannot = {"who": who, "cannot": f"{type(problem).__name__}: {said[0]}"[:160]}
        return cannot | {"absent": isinstance(problem, ImportError | SelectionError)}
    finally:
        if clock.device.type == "cuda":
            torch.cuda.empty_cache()
