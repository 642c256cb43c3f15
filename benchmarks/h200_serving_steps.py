"""What engines keep and capture, on one GPU: mixed steps, four-bit caches, streams, drafts' states.

    python benchmarks/h200_serving_steps.py [--out FILE.json] [--only mixed,four,...] [--seconds 90]

- `mixed`: decodes, rows of four tokens, and prompts beside decodes in one `StepGraphs`, each replay of
  one kind, drawn at random: bits beside the eager step as it is padded, allocations, and the replay's
  device time beside that of a graph of the backends' own calls (bar: 1 %).
- `four`: decode over an NVFP4 cache beside e4m3 and bf16, and what storing 8,192 tokens into each takes.
- `stream`: StreamingLLM's decode (window 1,024, 4 first tokens, rotated, a cyclic cache) at 10,000 and at
  1,000,000 tokens (bar: as fast).
- `drafts`: states after each of four drafts of 64 sequences, in one launch and token by token.

Device times with a cold L2 (`timing.py`), medians. Without a GPU the sections say that they need one.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from h200_serving import (
    DEVICE,
    LONGEST,
    SPEC,
    Model,
    Row,
    error_of,
    guarded,
    main,
    over_own,
    timed,
)
from polyattn import (
    Attention,
    Batch,
    CacheWindow,
    LayerGroup,
    LayerSpec,
    Recurrent,
    StepGraphs,
    StepSize,
    select,
)
from polyattn.families.attention import reference
from polyattn.families.recurrent.workload import recurrent_inputs, recurrent_params
from polyattn.spec.layer import RecurrentSpec
from polyattn.spec.rope import RopeSpec
from polyattn.workload.compare import output_error

KINDS = (StepSize(64), StepSize(32, 4), StepSize(32, prompts=4, prompt_tokens=1024))


def mixed_section(seconds: float) -> list[Row]:
    rows = []
    for backend in ("TRITON_ATTN", "FLASH_ATTN_V3"):
        for stored in ("auto", "fp8"):
            spec = SPEC.replace(
                kv_cache_dtype=stored, fp8_compute=stored == "fp8" and backend == "FLASH_ATTN_V3",
                graph_capture="any",
            )  # fmt: skip
            rows.append(
                guarded(f"mixed {backend} {stored}", lambda s=spec, b=backend: _mixed(s, b))
            )
    return rows


def drawn(model: Model, kind: StepSize) -> Batch:
    """Return a step of a kind: as many rows as fit at most, prompts among the decodes."""
    count = int(torch.randint(1, kind.rows + 1, ()))
    queries = [kind.query_len] * count
    if kind.prompts:
        cuts = torch.randint(1, kind.prompt_tokens // kind.prompts, (kind.prompts,)).tolist()
        for cut in cuts[: int(torch.randint(1, kind.prompts + 1, ()))]:
            queries.insert(int(torch.randint(0, len(queries) + 1, ())), max(2, cut))
    lens = [int(torch.randint(n, LONGEST, ())) for n in queries]
    at, width = torch.randperm(len(model.order)), -(-LONGEST // 16)
    table = model.order[at][: len(queries) * width].view(-1, width).to(torch.int32).to(DEVICE)
    return Batch.from_lens(queries, lens, table, 16)


def _mixed(spec: LayerSpec, backend: str) -> Row:
    model = Model(spec, backend)
    graphs = StepGraphs([model.group], model.step, KINDS, LONGEST)
    graphs.capture(model.inputs(1))
    reserved = torch.cuda.memory_reserved()
    counts = {"different": 0, "allocations": 0}
    worst, replays, end = 0.0, 0, time.monotonic() + 40
    while replays < 200 and time.monotonic() < end:
        batch = drawn(model, KINDS[int(torch.randint(0, len(KINDS), ()))])
        inputs = model.inputs(batch.num_tokens)
        _ = batch.seq_lens, batch.query_start_loc
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        found = graphs.replay(batch, inputs)
        after = torch.cuda.memory_stats()["allocation.all.allocated"]
        counts["allocations"] += after - before
        found = [one.clone() for one in found]
        graph = graphs.find(batch)
        assert graph is not None
        padded = model.group.plan(graph.buffers.fill(batch))
        eager = model.step({model.group: padded}, **graph.inputs)
        rows: Any = slice(0, batch.num_tokens)
        if graph.buffers.size.prompts:
            rows = graph.buffers.places[: batch.num_tokens]
        counts["different"] += not all(
            torch.equal(a, b[rows]) for a, b in zip(found, eager, strict=True)
        )
        if replays % 10 == 0:
            worst = max(worst, error_of(model, batch, inputs["query"], found[0]))
        replays += 1
    overhead = {}
    for graph in graphs.graphs:
        batch = drawn(model, graph.buffers.size)
        graph.replay(batch, model.inputs(batch.num_tokens))
        overhead[str(graph.buffers.size)] = over_own(model, graph)
    return {
        "replays": replays, **counts, "error": worst, "overhead": overhead,
        "graphs' memory, MB": round((torch.cuda.memory_reserved() - reserved) / 2**20),
    }  # fmt: skip


def four_section(seconds: float) -> list[Row]:
    return [guarded("decode TRITON_ATTN, nvfp4", _four), guarded("store nvfp4", _four_stored)]


def _four() -> Row:
    plain = SPEC.replace(graph_capture="none")
    rows, lens = [1] * 64, [LONGEST] * 64
    wide, eight, four = (
        timed(plain.replace(kv_cache_dtype=stored), "TRITON_ATTN", rows, lens, "run")
        for stored in ("auto", "fp8", "nvfp4")
    )
    long = timed(
        plain.replace(kv_cache_dtype="nvfp4"), "TRITON_ATTN", [2048] * 4, [4096] * 4, "run"
    )
    return {
        "bf16_us": wide, "fp8_us": eight, "nvfp4_us": four, "ratio": four / wide,
        "prefill 4 x 2048 after 2048, us": long,
    }  # fmt: skip


def _four_stored() -> Row:
    from timing import kernel_us

    found = {}
    for stored in ("auto", "fp8", "nvfp4"):
        model = Model(SPEC.replace(graph_capture="none", kv_cache_dtype=stored), "TRITON_ATTN")
        given = model.inputs(8192)
        table = torch.arange(512, dtype=torch.int32, device=DEVICE).view(1, -1)
        plan = model.group.plan(Batch.from_lens([8192], [8192], table, 16))
        layer, cache = model.layers[0], model.caches[0]
        found[f"{stored}_us"] = kernel_us(
            lambda p=plan, c=cache, n=layer, g=given: p.stored_by.run(
                p.store, g["key"], g["value"], c, n.params
            )
        )
        del model
    return found


def stream_section(seconds: float) -> list[Row]:
    return [guarded("stream TRITON_ATTN", _stream)]


def _stream() -> Row:
    from timing import kernel_us

    rope = RopeSpec(rotary_size=128)
    spec = SPEC.replace(graph_capture="none", sliding_window=1024, sink_tokens=4, rope=rope)
    group = LayerGroup(select(spec, DEVICE, backend="TRITON_ATTN"))
    layer, kept = Attention(group, checks=False, rotate=True), CacheWindow.of(spec, 16)
    assert kept is not None
    rows, found = 64, {}
    blocks = rows * kept.most_blocks(1)
    cache = group.allocate_cache(blocks)
    for stored in (cache.key, cache.value):
        stored.copy_(torch.randn(stored.shape, device=DEVICE))
    for tokens in (10_000, 100_000, 1_000_000):
        gone = len(kept.gone(tokens - 1))
        length = tokens - 16 * gone
        table = torch.randperm(blocks)[: rows * -(-length // 16)].view(rows, -1).int().to(DEVICE)
        where = torch.full((rows,), tokens - 1, dtype=torch.int64, device=DEVICE)
        batch = Batch.from_lens([1] * rows, [length] * rows, table, 16, positions=where)
        given = [torch.randn(rows, heads, 128, device=DEVICE).bfloat16() for heads in (32, 8, 8)]
        plan = group.plan(batch)
        out = layer(*given, cache, plan)
        found[f"{tokens} us"] = kernel_us(lambda g=given, p=plan: layer(*g, cache, p))
        turned = plan.rotation.applied_to_query(given[0]) if plan.rotation else given[0]
        keys, values = reference.read_cache(spec, cache, batch, 0, layer.params)
        bare = spec.replace(rope=None)
        wanted, _ = reference.attend(bare, turned[:1].double().cpu(), keys, values, layer.params)
        found[f"{tokens} error"] = output_error(out[:1].double().cpu(), wanted)
    found["1M over 10k"] = found["1000000 us"] / found["10000 us"]
    return {"blocks a sequence": kept.most_blocks(1), **found}


def drafts_section(seconds: float) -> list[Row]:
    shapes = {
        "mamba2": LayerSpec(
            kind="mamba2", num_heads=80, num_kv_heads=1, head_size=64,
            recurrent=RecurrentSpec(state_size=128, gated=True),
        ),
        "gdn": LayerSpec(
            kind="gdn", num_heads=32, num_kv_heads=16, head_size=128,
            recurrent=RecurrentSpec(state_size=128, qk_norm=True),
        ),
    }  # fmt: skip
    return [guarded(f"drafts {name}", lambda s=spec: _drafts(s)) for name, spec in shapes.items()]


def _drafts(spec: LayerSpec) -> Row:
    from timing import kernel_us

    dice = torch.Generator().manual_seed(0)
    group = LayerGroup(select(spec, DEVICE, backend="TRITON_SCAN"))
    layer = Recurrent(group, checks=False, **recurrent_params(spec, dice))
    rows, each = 64, 4
    states = group.allocate_states(rows * (each + 1))
    states.data.copy_(torch.randn(states.data.shape, generator=dice))
    targets = torch.arange(rows, rows * (each + 1), device=DEVICE).view(rows, each)
    batch = Batch.from_lens(
        [each] * rows, [100] * rows, state_slots=torch.arange(rows, device=DEVICE),
        state_targets=targets, device=DEVICE,
    )  # fmt: skip
    given, before = recurrent_inputs(spec, rows * each, dice, DEVICE), states.data.clone()
    found, outs = {}, []
    for name, at_once in (("at once", True), ("token by token", False)):
        group.planner.takes_drafts = at_once
        plan = group.planner.plan(batch)
        states.data.copy_(before)
        outs.append((layer(*given, states=states, plan=plan), states.data.clone()))
        found[f"{name} us"] = kernel_us(lambda p=plan: layer(*given, states=states, plan=p))
    (a, b), (c, d) = outs
    return {
        **found,
        "differ": float((a - c).abs().max()),
        "states differ": float((b - d).abs().max()),
    }


if __name__ == "__main__":
    main(
        __doc__,
        {
            "mixed": mixed_section,
            "four": four_section,
            "stream": stream_section,
            "drafts": drafts_section,
        },
    )
