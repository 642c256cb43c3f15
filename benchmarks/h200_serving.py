"""What serving engines ask of attention, on one GPU: whole-step graphs, 8-bit inputs, caches and outputs.

    python benchmarks/h200_serving.py [--out FILE.json] [--only graph,scales,...] [--seconds 90]

Sections, each by itself (one that fails is named, and the others run):

- `kit`: TRITON_ATTN's and TRITON_STORE's conformance cases of scales, 8-bit inputs and outputs.
- `graph`: four layers of one captured step, in three batch sizes, replayed over random lengths and
  tables: bits beside the eager step as it is padded to the graph's size, and as it is; allocations of a
  replay, and the replayed graph's device time beside that of a graph of the stores' and backends' own
  calls (bar: 1 %).
- `scales`: a captured step whose scales are tensors, rewritten between replays: beside the eager step
  and the float64 reference.
- `decode`: 64 sequences of 4,096 keys over an e4m3 cache beside bf16 (bar: 0.62 of its time).
- `store`: fused QKV rotated and stored into an e4m3 cache beside moving its bytes (bar: 1.15).
- `prefill`: FlashAttention-3 over an e4m3 cache beside bf16 (bar: 1.4 times as fast), queries in bf16
  and in e4m3.

Device times with a cold L2 (`timing.py`), medians. Without a GPU the sections say that they need one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from polyattn import Attention, Batch, LayerGroup, LayerSpec, StepGraphs, select
from polyattn.errors import PolyattnError
from polyattn.families.attention import reference
from polyattn.runtime.cache.scales import input_dtype
from polyattn.tools.cli.benching import full_step, sampled_error
from polyattn.workload.compare import output_error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPEC = LayerSpec(
    num_heads=32, num_kv_heads=8, head_size=128, block_size=16, graph_capture="single_token_decode"
)
SIZES = (8, 32, 64)
LAYERS = 4
LONGEST = 4096
Row = dict[str, Any]


def random_batch(group: LayerGroup, rows: int, order: torch.Tensor, queries: int = 1) -> Batch:
    """Return rows of random lengths, their blocks in the cache's own random order."""
    lens = torch.randint(queries, LONGEST, (rows,)).tolist()
    size, at = 16, torch.randperm(len(order))
    width = -(-LONGEST // size)
    table = order[at][: rows * width].view(rows, width).to(torch.int32).to(DEVICE)
    batch = Batch.from_lens([queries] * rows, lens, table, size)
    _ = batch.seq_lens, batch.query_start_loc  # on the device before a replay is looked at
    return batch


class Model:
    """Layers of one group, each with a cache full of numbers."""

    def __init__(self, spec: LayerSpec, backend: str, **scales: Any):
        self.group = LayerGroup(select(spec, DEVICE, backend=backend))
        self.layers = [Attention(self.group, checks=False, **scales) for _ in range(LAYERS)]
        self.blocks = max(SIZES) * -(-LONGEST // 16) + 1
        self.caches = [self.group.allocate_cache(self.blocks) for _ in self.layers]
        for cache in self.caches:
            for stored in (cache.key, cache.value):
                stored.copy_(torch.randn(stored.shape, device=DEVICE).to(stored.dtype))
        self.order = torch.arange(1, self.blocks)

    def batch(self, rows: int) -> Batch:
        """Return rows of random lengths, their blocks in random order."""
        return random_batch(self.group, rows, self.order)

    def inputs(self, tokens: int) -> dict[str, torch.Tensor]:
        """Return random queries, keys and values of one token each."""
        spec = self.group.spec
        return {
            name: torch.randn(tokens, heads, 128, device=DEVICE).to(input_dtype(spec))
            for name, heads in (
                ("query", spec.num_heads), ("key", spec.num_kv_heads), ("value", spec.num_kv_heads)
            )
        }  # fmt: skip

    def step(self, plans: Any, query: Any, key: Any, value: Any) -> tuple[torch.Tensor, ...]:
        """One step of all layers; each one's query is the same, so that no layer hides another's."""
        plan = plans[self.group]
        return tuple(
            layer(query, key, value, cache, plan)
            for layer, cache in zip(self.layers, self.caches, strict=True)
        )

    def own_calls(self, plan: Any, query: Any, key: Any, value: Any) -> None:
        """What the step comes down to: each layer's store and its backends' calls."""
        for layer, cache in zip(self.layers, self.caches, strict=True):
            out = query.new_empty(plan.out_shape, dtype=plan.out_dtype)
            plan.stored_by.run(plan.store, key, value, cache, layer.params)
            for call in plan.calls:
                view = call.view(cache)
                rows = slice(None) if call.rows is None else call.rows
                call.backend.run(
                    call.plan,
                    query[rows],
                    key[rows],
                    value[rows],
                    view,
                    layer.params,
                    out[rows],
                    None,
                )


def graph_section(seconds: float) -> list[Row]:
    rows = []
    for backend in ("TRITON_ATTN", "FLASHINFER", "FLASH_ATTN_V3"):
        for stored in ("auto", "fp8"):
            spec = SPEC.replace(
                kv_cache_dtype=stored, fp8_compute=stored == "fp8" and backend == "FLASH_ATTN_V3"
            )
            rows.append(
                guarded(
                    f"graph {backend} {stored}", lambda s=spec, b=backend: replayed(Model(s, b))
                )
            )
    return rows


def replayed(model: Any, planned: bool = True) -> Row:
    """Capture a model's step and replay it; `planned`: as `_overhead`.

    A model has a `group`, and makes each `batch` and its `inputs`; `step` and `own_calls` run it.
    """
    graphs = StepGraphs([model.group], model.step, SIZES, LONGEST)
    graphs.capture(model.inputs(1))
    different = unpadded = allocated = 0
    replays, end = 0, time.monotonic() + 25
    while replays < 200 and time.monotonic() < end:
        rows = int(torch.randint(1, max(SIZES) + 1, ()))
        batch, inputs = model.batch(rows), model.inputs(rows)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        found = graphs.replay(batch, inputs)
        allocated += torch.cuda.memory_stats()["allocation.all.allocated"] - before
        found = [one.clone() for one in found]
        graph = graphs.find(batch)
        assert graph is not None
        padded = model.group.plan(graph.buffers.fill(batch))
        eager = model.step({model.group: padded}, **graph.inputs)
        different += not all(torch.equal(a, b[:rows]) for a, b in zip(found, eager, strict=True))
        alone = model.step({model.group: model.group.plan(batch)}, **inputs)
        unpadded += not all(map(torch.equal, found, alone))
        replays += 1
    return {
        "replays": replays, "different": different, "unlike the step unpadded": unpadded,
        "allocations": allocated,
        "overhead": _overhead(model, graphs, planned),
    }  # fmt: skip


def _overhead(model: Any, graphs: StepGraphs, planned: bool) -> dict[int, float]:
    """Return by how much the captured step takes longer than its own calls, captured, by batch size.

    `planned`: the calls are those of the replay's plan; else of one without what the capture left in it.
    """
    found = {}
    for graph in graphs.graphs:
        rows = graph.buffers.num_seqs
        batch = model.batch(rows)
        graphs.replay(batch, model.inputs(rows))
        plan = None if planned else model.group.plan(graph.buffers.fill(batch))
        found[rows] = over_own(model, graph, plan)
    return found


def over_own(model: Any, graph: Any, plan: Any = None) -> float:
    """Return by how much a replay of what was planned last takes longer than its own calls.

    `plan`: the calls', where the replay's has something left from the capture.
    """
    from timing import kernel_us

    plan = plan or graph.plans[model.group]
    own = torch.cuda.CUDAGraph()
    model.own_calls(plan, **graph.inputs)
    with torch.cuda.graph(own):
        model.own_calls(plan, **graph.inputs)
    pairs = [(kernel_us(graph.graph.replay), kernel_us(own.replay)) for _ in range(5)]
    return statistics.median(ours / theirs for ours, theirs in pairs) - 1


def scales_section(seconds: float) -> list[Row]:
    rows = []
    for scales in ("tensor", "head"):
        rows.append(guarded(f"scales {scales}", lambda s=scales: _scales(s)))
    return rows


def _scales(scales: str) -> Row:
    spec = SPEC.replace(kv_cache_dtype="fp8", qkv_dtype="fp8", out_dtype="fp8", scales=scales)
    shape = (8,) if scales == "head" else ()
    given = {name: torch.ones(shape, device=DEVICE) for name in ("q_scale", "k_scale", "v_scale")}
    given["out_scale"] = torch.full((), 0.01, device=DEVICE)
    model = Model(spec, "TRITON_ATTN", **given)
    graphs = StepGraphs([model.group], model.step, (16,), LONGEST)
    graphs.capture(model.inputs(1))
    different, worst = 0, 0.0
    for turn in range(20):
        batch, inputs = random_batch(model.group, 16, model.order), model.inputs(16)
        for name, size in (("q_scale", 0.3), ("k_scale", 0.5), ("v_scale", 0.5)):
            given[name].copy_(size * (0.5 + torch.rand(shape, device=DEVICE)))
        given["out_scale"].fill_(0.005 * (1 + turn % 3))
        found = [one.clone() for one in graphs.replay(batch, inputs)]
        eager = model.step({model.group: model.group.plan(batch)}, **inputs)
        different += not all(
            torch.equal(a.float(), b.float()) for a, b in zip(found, eager, strict=True)
        )
        worst = max(worst, error_of(model, batch, inputs["query"], found[0]))
    return {"replays": 20, "different": different, "error": worst}


def error_of(model: Model, batch: Batch, query: torch.Tensor, out: torch.Tensor) -> float:
    """Return the error of one sequence of the first layer, beside float64."""
    params, spec = model.layers[0].params, model.group.spec
    index = int(torch.argmin(torch.tensor(batch.lens)))
    row = slice(batch.starts[index], batch.starts[index + 1])
    keys, values = reference.read_cache(spec, model.caches[0], batch, index, params)
    asked = reference.exact(query[row], params.q_scale, torch.float64)
    expected, _ = reference.attend(spec, asked, keys, values, params)
    return output_error(reference.exact(out[row], params.out_scale, torch.float64), expected)


def timed(spec: LayerSpec, backend: str, queries: list[int], lens: list[int], what: str) -> float:
    """Return microseconds of a step, checked on one token; `what`: `run` stores, `attend` doesn't."""
    from timing import kernel_us

    step = full_step(select(spec, DEVICE, backend=backend), list(zip(queries, lens, strict=True)))
    sampled_error(step)
    return kernel_us(getattr(step, what))


def decode_section(seconds: float) -> list[Row]:
    rows = []
    for backend in ("TRITON_ATTN", "FLASHINFER", "FLASH_ATTN_V3"):
        for inputs in ("auto", "fp8"):
            if inputs == "fp8" and backend == "FLASHINFER":
                continue  # it takes no query in 8 bits here
            rows.append(
                guarded(
                    f"decode {backend}, q in {inputs}", lambda b=backend, i=inputs: _decode(b, i)
                )
            )
    return rows


def _decode(backend: str, inputs: str) -> Row:
    plain = SPEC.replace(graph_capture="none")
    eight = plain.replace(
        kv_cache_dtype="fp8", qkv_dtype=inputs, fp8_compute=backend == "FLASH_ATTN_V3"
    )
    rows, lens = [1] * 64, [LONGEST] * 64
    wide, narrow = (timed(spec, backend, rows, lens, "run") for spec in (plain, eight))
    return {"bf16_us": wide, "fp8_us": narrow, "ratio": narrow / wide, "bar": 0.62}


def store_section(seconds: float) -> list[Row]:
    def measured() -> Row:
        from h200_store import STORED, prefill

        return prefill(8192, "neox", STORED)

    return [guarded("store fused QKV, rotated, fp8", measured)]


def prefill_section(seconds: float) -> list[Row]:
    rows = []
    for inputs in ("auto", "fp8"):
        for count, length in ((8, 2048), (1, 16384)):
            rows.append(
                guarded(
                    f"prefill FLASH_ATTN_V3 {count} x {length}, q in {inputs}",
                    lambda i=inputs, c=count, n=length: _prefill(i, c, n),
                )
            )
    return rows


def _prefill(inputs: str, count: int, length: int) -> Row:
    plain = SPEC.replace(graph_capture="none", block_size=64)
    eight = plain.replace(kv_cache_dtype="fp8", qkv_dtype=inputs, fp8_compute=True)
    lens = [length] * count
    wide, narrow = (timed(spec, "FLASH_ATTN_V3", lens, lens, "attend") for spec in (plain, eight))
    return {"bf16_us": wide, "fp8_us": narrow, "faster": wide / narrow, "bar": 1.4}


def kit_section(seconds: float) -> list[Row]:
    rows = []
    chosen = {
        "FLASHINFER_MLA": "graph",
        "FLASHMLA": "graph",
        "FLASH_ATTN_MLA": "graph",
        "TRITON_ATTN": "graph or nvfp4 or feature_tensor_scales or feature_head_scales or feature_fp8 or "
        "pair_head_scales or pair_fp8_output or (layers and (scales or fp8))",
        "TRITON_STORE": "not zzz",
        "TRITON_SCAN": "not zzz",
        "TRITON_TOKEN_SCAN": "not zzz",
        "FLASH_ATTN_V3": "graph or feature_head_scales or feature_fp8_inputs or (layers and fp8)",
    }
    for backend, which in chosen.items():
        rows.append(guarded(f"kit {backend}", lambda b=backend, w=which: _kit(b, w, seconds)))
    return rows


def _kit(backend: str, which: str, seconds: float) -> Row:
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", "--pyargs",
         "polyattn.conformance", "--polyattn-backend", backend, "--polyattn-device", "cuda", "-k",
         which],
        cwd="/tmp", env={**os.environ, "OMP_NUM_THREADS": "4"}, capture_output=True, text=True,
        timeout=seconds, check=False,
    )  # fmt: skip
    lines = [line for line in found.stdout.splitlines() if line.strip()]
    wrong = [line[:200] for line in lines if line.startswith("E  ")][:3]
    summary = next((line for line in lines if line.startswith("polyattn conformance")), lines[-1:])
    return {"rc": found.returncode, "summary": summary, "wrong": wrong}


SECTIONS: dict[str, Callable[[float], list[Row]]] = {
    "graph": graph_section, "scales": scales_section, "decode": decode_section,
    "store": store_section, "prefill": prefill_section, "kit": kit_section,
}  # fmt: skip


def guarded(name: str, measure: Callable[[], Row]) -> Row:
    """Return what was measured, or what went wrong, with the time that it took."""
    started = time.monotonic()
    try:
        if DEVICE.type != "cuda":
            raise PolyattnError("needs a GPU")
        row = measure()
    except Exception as error:  # one section must not end the others
        last = traceback.extract_tb(error.__traceback__)[-1]
        row = {"failed": f"{type(error).__name__}: {str(error)[:300]} ({last.name}:{last.lineno})"}
    row = {"what": name} | row | {"took_s": round(time.monotonic() - started, 1)}
    print(json.dumps(row), flush=True)
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    return row


def main(doc: str | None = __doc__, sections: dict[str, Any] | None = None) -> None:
    """Run the sections that were asked for, and write what they found."""
    sections = sections or SECTIONS
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default=",".join(sections))
    parser.add_argument("--seconds", type=float, default=90)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = [row for name in options.only.split(",") for row in sections[name](options.seconds)]
    print("\n--- summary ---")
    for row in rows:
        print(
            "  ".join(
                f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()
            )
        )
    machine = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "none"
    if options.out:
        report = {"machine": machine, "torch": torch.__version__, "rows": rows}
        options.out.write_text(json.dumps(report, indent=1, default=str))


if __name__ == "__main__":
    main()
