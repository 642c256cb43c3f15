"""Does this machine meet each bar of the native CPU kernels? Every instruction set, in one visit.

python benchmarks/cpu_bars.py [--seconds N] [--sets amx,avx512] [--only share,two] [--cores N]
    [--out FILE.json]

Builds the library where it isn't built. Each instruction set has a process of its own, in which torch
is held to it, too (`ONEDNN_MAX_CPU_ISA`), on `--cores` cores of its own; where there are eight times as
many they run side by side. One thread's figures are its processor time, several threads' wall time;
what is compared takes turns, and the least of many counts. `--seconds` bounds each case. A section that
fails says so and leaves the others; a line that says `no` misses its bar.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from polyattn import LayerSpec, SparseSpec
from polyattn.kernel import IndexerSpec, RecurrentSpec
from rows import listed
from suites.sparse import MINIMAX, QWEN, V4_ROWS, V32_ROWS

ONEDNN = {
    "amx": "ALL", "avx512_bf16": "AVX512_CORE_BF16", "avx512": "AVX512_CORE", "avx2": "AVX2",
}  # fmt: skip
FAR = 128 << 20
"""Floats that are read before what must come from memory: 512 MiB, more than a last cache holds."""
SCANS: dict[str, tuple[int, dict[str, Any], float]] = {
    "Mamba-2 decode 8 seqs": (8, {
        "kind": "mamba2", "num_heads": 128, "num_kv_heads": 8, "head_size": 64,
        "recurrent": RecurrentSpec(state_size=128), "dtype": "bfloat16",
    }, 1.2),
    "gated delta rule decode 16 seqs": (16, {
        "kind": "gdn", "num_heads": 32, "num_kv_heads": 16, "head_size": 128,
        "recurrent": RecurrentSpec(state_size=128, qk_norm=True), "dtype": "bfloat16",
    }, 0.9),
    "short convolution decode 128 seqs": (128, {
        "kind": "short_conv", "num_heads": 8192, "head_size": 1,
        "recurrent": RecurrentSpec(conv_width=4, activation="silu"), "dtype": "bfloat16",
    }, 0.5),
}  # fmt: skip
"""Sequences, the layer, and the bytes of its states, read and written, as a share of read."""


def _pages(rows: int, page: int, keys: int) -> LayerSpec:
    """Return a layer of so many rows a KV head that chooses pages of so many keys."""
    sparse = SparseSpec(budget=keys // page, granularity=page, scope="kv_head")
    return MINIMAX.replace(num_heads=4 * rows, block_size=page, sparse=sparse)


SPARSE: dict[str, tuple[LayerSpec, Literal["NHD", "HND"]]] = {
    "MSA NHD": (MINIMAX, "NHD"),
    "MSA HND": (MINIMAX, "HND"),
    "QSA NHD": (QWEN, "NHD"),
    "QSA HND": (QWEN, "HND"),
    "V4": (V4_ROWS, "NHD"),
    "V3.2, 128 heads": (V32_ROWS, "NHD"),
    "V3.2, 16 heads": (V32_ROWS.replace(num_heads=16), "NHD"),
} | {
    f"{rows} rows, {keys} keys in pages of {page} {layout}": (_pages(rows, page, keys), layout)
    for layout in ("NHD", "HND")
    for rows, page, keys in (
        (8, 16, 512), (8, 64, 2048), (8, 128, 4096), (16, 16, 2048), (16, 64, 4096), (16, 128, 512),
    )
}  # fmt: skip
"""Sparse layers that decode; the last twelve are those that nothing was tuned on."""
LEVELS: dict[str, tuple[str, ...]] = {
    "NATIVE_ATTN": ("decode", "mixed", "prefill"),
    "NATIVE_MLA": ("mla",),
    "NATIVE_SCAN": ("recurrent",),
}
"""The backends that have the first level of `batch_invariant`, and the suites of their rows."""
TORCH_LEVELS: dict[str, tuple[str, ...]] = {
    "TORCH_SDPA": ("decode", "mixed", "prefill"),
    "TORCH_MLA": ("mla",),
    "TORCH_SCAN": ("recurrent",),
}
MOST_WORK = 1 << 27
"""Products of queries and keys, by element, that a row of theirs has at most."""
SHRUNK = {"recurrent": 128, "mla": 8}
"""By what those rows' lengths are divided; others' by 16."""
SECTIONS = "share,store,formats,two,busy,index,sparse,scan,levels,torch_levels"
Row = dict[str, Any]
Calls = dict[str, Callable[[], object]]


def turns(
    calls: Calls, seconds: float, clock: Callable[[], float], rounds: int = 4
) -> dict[str, list[float]]:
    """Return the seconds of each call; the calls take turns, at least so many rounds of them."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    until = time.perf_counter() + seconds
    while rounds > 0 or time.perf_counter() < until:
        for name, call in calls.items():
            started = clock()
            call()
            taken[name].append(clock() - started)
        rounds -= 1
    return taken


def least(calls: Calls, seconds: float, clock: Callable[[], float]) -> dict[str, float]:
    return {name: min(times) for name, times in turns(calls, seconds, clock).items()}


class Visit:
    """One instruction set's sections. Built in the child process, where torch may be imported."""

    def __init__(self, isa: str, seconds: float, cores: int):
        import cpu_native
        import torch

        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.isa, self.seconds, self.cores = isa, seconds, cores
        self.native, self.torch = cpu_native, torch
        self.rows: list[Row] = []

    def row(
        self, what: str, value: float, unit: str, bar: float | None = None, **more: float
    ) -> None:
        """Keep and print one figure; `bar` is the least it may be, or, negative, the most."""
        met = None if bar is None else (value >= bar if bar >= 0 else value <= -bar)
        self.rows.append({"isa": self.isa, "what": what, "value": value, "unit": unit, "bar": bar,
                          "met": met, **more})  # fmt: skip
        said = ""
        if bar is not None:
            said = f"  {'yes' if met else 'no '} ({'>=' if bar >= 0 else '<='} {abs(bar):g})"
        rest = " ".join(f"{k}={v:.4g}" for k, v in more.items())
        print(f"{self.isa:12} {what:44} {value:8.3g} {unit:9}{said}  {rest}", flush=True)

    def share(self) -> None:
        """Each case beside what this process reads and multiplies in the same rounds."""
        for name in self.native.CASES:
            self._share(name, name, time.thread_time)

    def two(self) -> None:
        """Wall time of two threads beside two threads' limits."""
        with self.threads(2):
            for name in ("decode 8x2048 bf16", "decode 1x8192 bf16", "decode 1x32k + 3x1k 28/4 bf16",
                         "decode 8x2048 fp32",
                         "prefill 1x2048 bf16", "prefill 1x2048 fp32"):  # fmt: skip
                self._share(name, f"{name}, 2 threads", time.perf_counter)

    def _share(self, name: str, label: str, clock: Callable[[], float]) -> None:
        case, bounds = self.case(name), self.limits()
        what, bar = self.bar_of(name)
        calls = {"native": case.call()}
        calls |= {key: call for key, (call, _) in bounds.items()}
        if what == "read":
            calls |= self.native.readings(case)
        best = least(calls, self.seconds, clock)
        took = best["native"]
        rate = {key: amount / best[key] for key, (_, amount) in bounds.items()}
        # The same bytes in the same order, and nothing else done.
        for way in ("blocks", "products"):
            floors = [best[key] for key in best if key.startswith(way)]
            if floors:
                rate[way] = case.bytes / min(floors)
        amount = case.bytes if what == "read" else case.flops
        self.row(
            label, amount / took / rate[what], f"of {what}", bar, ms=took * 1e3,
            gb_s=case.bytes / took / 1e9, gflops=case.flops / took / 1e9,
            **{key.replace(" ", "_"): speed / 1e9 for key, speed in rate.items()},
        )  # fmt: skip

    def limits(self) -> dict[str, tuple[Callable[[], object], float]]:
        """Return what torch does at best; not what it emulates, which takes most of a minute."""
        fast = self.isa in ("amx", "avx512_bf16")
        return {k: v for k, v in self.native.limits().items() if fast or k != "mm bf16"}

    def case(self, name: str, backend: str = "") -> Any:
        return self.native.Case(*self.native.CASES[name], backend)

    def bar_of(self, name: str) -> tuple[str, float | None]:
        """Return the limit that a case is held against, and the share of it that is asked for."""
        known = self.isa in ("amx", "avx512_bf16", "avx512")  # the bars speak of these
        fast = self.isa in ("amx", "avx512_bf16") and "bf16" in name
        if name.startswith(("prefill", "chunk")):
            bar: float | None = 0.8 if "fp32" in name else 0.6 if fast else 0.85
            return "mm bf16" if fast else "mm fp32", bar if known and "4x512" not in name else None
        if "MQA" in name:
            return "mm fp32", 0.55 if known else None
        if not known or any(part in name for part in ("64/8", "e4m3", "int8", "4/2x32")):
            return "read", None
        return "read", 0.6 if "MLA" in name else 0.75

    def store(self) -> None:
        """Decode over each storage, alternating: what 8 bits are worth."""
        names = [f"decode 8x2048 {s}" for s in ("bf16", "fp16", "fp32", "e4m3", "int8")]
        calls = {n: self.case(n).call() for n in names}
        best = least(calls, 2 * self.seconds, time.thread_time)
        base = best[names[0]]
        for name, bar in zip(names[1:], (None, None, 1.0, 1.3), strict=True):
            self.row(f"{name}: bf16's time / its", base / best[name], "x", bar)

    def formats(self) -> None:
        """Decode 64 x 4,096 tokens over 4 and 8 bits beside bfloat16, alternating: medians.

        The bars speak of both cores, as engines decode, and of more than the last cache holds. `hot`: the
        same ratio where a table names four blocks alone: below the bar, a format's instructions miss it.
        """
        some = {"int4": 1.6, "int8": 1.3, "int8_rows": 1.3}
        bars, llama = some | dict.fromkeys(("mxfp4", "nvfp4", "kivi4")), self.native.LLAMA
        for count, clock in ((2, time.perf_counter), (1, time.thread_time)):
            with self.threads(count):
                specs = {name: llama.replace(kv_cache_dtype=name) for name in ("auto", *bars)}
                cases = {n: self.native.Case(spec, "64q1s4k") for n, spec in specs.items()}
                calls: Calls = {n: case.call() for n, case in cases.items()}
                calls |= {f"{n}, hot": case.hot_call() for n, case in cases.items()}
                taken = turns(calls, 3 * self.seconds, clock, 9)
            for name, bar in bars.items():
                ratio, hot = (
                    statistics.median(a / b for a, b in zip(taken["auto"], its, strict=True))
                    for its in (taken[name], taken[f"{name}, hot"])
                )
                self.row(
                    f"decode 64x4096 {name}, threads {count}: bf16's time / its",
                    ratio, "x", bar if count == 2 else None,
                    ms=statistics.median(taken[name]) * 1e3, hot=hot,
                )  # fmt: skip

    def index(self) -> None:
        """An indexer's decode in bfloat16 over scattered pages of 64, beside what limits it.

        `of_mm`, `bar_of_mm`, `rows_of_read` and `products_of_read`: as those of `sparse`, as is the read
        before each call. Loops read the indexer's pages in its order; they convert, sum and choose
        nothing, in turns of their own, as there is time for few. Where products are below the bar, no
        kernel of this instruction set meets it. `ns`: of a key. `host`: ms of a call whose kernel does
        nothing; `floor`: products and that together. `of_read`: the share of the read before each call.
        """
        memory = self.torch.ones(FAR)
        for name, (counts, spec, what) in self.native.INDEXERS.items():
            for seqs in counts:
                self._index(f"index {name}, {seqs} seqs", spec, seqs, what, memory)

    def _index(self, label: str, spec: IndexerSpec, seqs: int, what: str, memory: Any) -> None:
        from polyattn.conformance.cases.index import layer_for

        layer = layer_for(spec, "bfloat16")
        work = self.native.step_of(layer, f"{seqs}q1s128k", "NATIVE_INDEX", "index")
        bounds = self.limits() | {"read": (memory.sum, memory.nbytes)}
        limit, amount = bounds[what if what in bounds else "mm fp32"]
        multiply, rate = bounds["mm bf16" if "mm bf16" in bounds else "mm fp32"]
        calls: Calls = {"before": memory.sum, "index": work.call, "limit": limit}
        floors = self.native.index_floors(work, spec.num_heads, limit) if what == "read" else {}
        best = least(calls, 3 * self.seconds, time.thread_time)
        best |= least(floors | {"mm": multiply}, len(floors) / 3 * self.seconds, time.thread_time)
        entries = seqs * ((1 << 17) // spec.tokens_per_entry)
        keys = entries * work.frame.keys.shape[2] * work.frame.keys.itemsize
        products = 2 * entries * spec.num_heads * spec.head_size
        share = (keys if what == "read" else products) / best["index"] / (amount / best["limit"])
        of_mm = products / best["index"] / (rate / best["mm"])
        more = {"of_mm": of_mm, "bar_of_mm": of_mm * 0.7 / share}
        more["of_read"] = keys / best["index"] / (memory.nbytes / best["before"])
        if what == "read":
            for way in ("rows", "products"):
                took = min(best[key] for key in best if key.startswith(way))
                more[f"{way}_of_read"] = keys / took / (amount / best["read"])
            more["floor"] = keys / (took + best["host"]) / (amount / best["read"])
            more["host"] = best["host"] * 1e3
        self.row(label, share, f"of {what}", 0.7, ms=best["index"] * 1e3, gb_s=keys / best["index"] / 1e9,
                 ns=best["index"] / entries * 1e9, **more)  # fmt: skip

    def sparse(self) -> None:
        """A decode of chosen keys by all cores, as engines decode, and by one thread.

        `rows_of_read`, `products_of_read`: loops that read the same rows, and that multiply them as
        often as this instruction set's pairs of bfloat16 must. `of_mm`, `bar_of_mm`: the products beside
        torch's matrix product, and those that the bar takes. Before each call 512 MiB are read, so that
        none finds in a cache what the one before it read.

        A call is a layer's in a planned step, as those of all layers of a step but the first are.

        `floor`: the share of rows and `host` alone. In ms: `host`, a call whose native part does nothing;
        `empty`, such a part; `team`, some lines read by each thread; `hot`, one block alone; `first`, a
        step's planning and its first layer.
        """
        memory = self.torch.ones(FAR)
        for name, (spec, layout) in SPARSE.items():
            for count, clock in ((self.cores, time.perf_counter), (1, time.thread_time)):
                with self.threads(count):
                    label = f"sparse {name}, threads {count}"
                    self._sparse(label, spec, layout, memory, clock, 0.6 if count > 1 else None)

    def _sparse(
        self,
        label: str,
        spec: LayerSpec,
        layout: Literal["NHD", "HND"],
        memory: Any,
        clock: Callable[[], float],
        bar: float | None,
    ) -> None:
        torch, part, (calls, step, cache) = self.torch, spec.sparse, self._choosing(spec, layout)
        assert part is not None
        seqs, (runs, size) = step.batch.num_seqs, self._runs(step, cache)
        bounds = self.limits()
        multiply, flops = bounds["mm bf16" if "mm bf16" in bounds else "mm fp32"]
        ratio = spec.num_heads // spec.num_kv_heads
        for n in (0, 4096, 16384):
            calls[f"rows {n}"] = partial(self.native.read_runs, runs, size, n, 0)
            if self.isa != "amx" and ratio <= 16:
                calls[f"products {n}"] = partial(self.native.read_runs, runs, size, n, ratio)
        calls["mm"] = multiply
        calls["team"] = partial(self.native.read_runs, runs[: torch.get_num_threads()], 256, 0, 0)
        turns: Calls = {}
        for key, call in calls.items():
            turns |= {f"read {key}": memory.sum, key: call}
        best = least(turns, self.seconds, clock)
        of_read = memory.nbytes / min(took for key, took in best.items() if key.startswith("read"))

        def share(way: str, more: float = 0.0) -> float:
            took = min((best[key] for key in calls if key.startswith(way)), default=float("nan"))
            return len(runs) * size / (took + more) / of_read

        width = spec.head_size + spec.v_head_size
        done = 2 * seqs * spec.num_heads * part.most * width
        of_mm = done / best["sparse"] / (flops / best["mm"])
        ms = {key: best[key] * 1e3 for key in ("host", "empty", "team", "hot", "first")}
        self.row(label, share("sparse"), "of read", bar, ms=best["sparse"] * 1e3, gb_s=of_read / 1e9,
                 of_mm=of_mm, bar_of_mm=of_mm * 0.6 / share("sparse"), run_bytes=size,
                 rows_of_read=share("rows"), products_of_read=share("products"),
                 floor=share("rows", best["host"]), **ms)  # fmt: skip

    def _choosing(self, spec: LayerSpec, layout: Literal["NHD", "HND"]) -> tuple[Calls, Any, Any]:
        """Return a layer's calls, `sparse` and those that explain it, its step and its cache."""
        from polyattn import Batch, LayerGroup, SparseAttention, select
        from polyattn.settings import current_settings

        torch, length, seqs = self.torch, 1 << 13, 32
        settings = replace(current_settings(), layout=layout)
        selection = select(spec, "cpu", backend="NATIVE_ATTN", settings=settings)
        layer = SparseAttention(LayerGroup(selection), checks=False)
        block, part = layer.group.cache_format.block_size, spec.sparse
        assert part is not None
        cache = layer.group.allocate_cache(seqs * length // block)
        for stored in (cache.key, cache.value):
            stored[:] = torch.randn_like(stored[:1])
        table = torch.randperm(len(cache.key)).int().view(seqs, -1)
        lens = list(range(seqs + 1)), [length * part.tokens_per_entry] * seqs
        batch, near = (Batch(*lens, x) for x in (table, torch.zeros_like(table)))
        step, idle, hot = (layer.group.plan(each) for each in (batch, batch, near))
        query = torch.randn(seqs, spec.num_heads, spec.head_size).bfloat16()
        inputs = query, None, None, cache
        scopes = part.choices(spec.num_heads, spec.num_kv_heads)
        ids = torch.rand(seqs, scopes, length // part.granularity)
        choice = ids.topk(part.budget).indices.sort().values.int()  # ascending, as an indexer's
        calls: Calls = {
            name: partial(layer, *inputs, each, choice=choice)
            for name, each in {"sparse": step, "host": idle, "hot": hot}.items()
        }
        calls["first"] = lambda: layer(*inputs, layer.group.plan(batch), choice=choice)
        calls["sparse"](), calls["hot"]()
        host = calls["host"]  # the later one by the plan that the first one made
        calls["empty"] = self.native.without_kernels(host, host)
        return calls, step, cache

    def _runs(self, step: Any, cache: Any) -> tuple[Any, int]:
        """Return where the runs of memory are that a step's rows read, and their bytes."""
        (piece,), planner = step.pieces, step.planner
        view, _ = cache.in_pages_of(planner.page_size, planner.spec.num_kv_heads)
        _, tokens, heads, width = view.key.shape
        unit, by_token, *_ = view.key.stride()
        inside = self.torch.arange(tokens) * by_token
        if by_token == heads * width:
            tokens, inside = 1, inside[:1]
        at = (piece.table.long()[:, :, None] * unit + inside).flatten(1) * view.key.itemsize
        stored = (view.key,) if view.value_in_key else (view.key, view.value)
        runs = self.torch.cat([at + part.data_ptr() for part in stored], 1).flatten()
        row = sum(part[0, 0].numel() for part in stored) * view.key.itemsize
        return runs, len(piece.lens) * row * int(piece.lens[0]) // len(runs)

    def levels(self) -> None:
        """What the first level of `batch_invariant` takes beside none: suites' rows, in turns."""
        self._levels(LEVELS)

    def torch_levels(self) -> None:
        """The same of torch's backends, which take several times as long."""
        self._levels(TORCH_LEVELS)

    def _levels(self, backends: dict[str, tuple[str, ...]]) -> None:
        from pages import suite

        for backend, suites in backends.items():
            ratios: dict[str, float] = {}
            for name, row in ((n, row) for n in suites for row in suite(n)):
                longest = max(query for query, _ in row.lengths())
                # Several tokens of latents are expanded, for which those rows have no weights.
                if backend not in row.by.get("cpu", ()) or (row.spec.latent and longest > 1):
                    continue
                ratio = self._level(backend, row, SHRUNK.get(name, 16))
                ratios[f"{name}: {row.name}"] = ratio
                self.row(f"{backend} at a level: {name}: {row.name}", ratio, "x")
            mean = statistics.geometric_mean(ratios.values())
            worst = max(ratios, key=ratios.__getitem__)
            self.row(f"{backend} at a level: geometric mean", mean, "x", -1.05, rows=len(ratios))
            self.row(f"{backend} at a level, worst: {worst}", ratios[worst], "x", -1.15)

    def _level(self, backend: str, row: Any, shrink: int) -> float:
        """Return how many times as long a row takes at the level; longer rows shrink to `MOST_WORK`.

        A row that is off by more than a twentieth, either way, takes four times as many turns more.
        """
        from measuring import PARTS, build
        from table import Other

        device, each = self.torch.device("cpu"), row.spec.num_heads * row.spec.head_size
        while sum(q * n for q, n in row.lengths(shrink)) * each > MOST_WORK:
            shrink *= 2
        with self.torch.no_grad():
            free = build(row, Other("free", backend), device, shrink)
            level = build(
                row, Other("level", backend, {"batch_invariant": "batch"}), device, shrink
            )
            # The same memory for both: where it lies decides more than any level.
            both = {"free": free, "level": free.but(layer=level.layer)}
            calls: Calls = {who: PARTS[row.part].make(work) for who, work in both.items()}
            best = least(calls, self.seconds / 4, time.thread_time)
            if not 0.95 < best["level"] / best["free"] < 1.05:
                more = least(calls, self.seconds, time.thread_time)
                best = {who: min(took, more[who]) for who, took in best.items()}
        return best["level"] / best["free"]

    def scan(self) -> None:
        """A step of recurrent layers by one thread and by two: what their states move beside reading.

        `in_place`: the share of who changes as many bytes where they lie and does nothing else.
        """
        for name, (seqs, fields, bar) in SCANS.items():
            work = self.native.step_of(LayerSpec(**fields), f"{seqs}q1s100", "NATIVE_SCAN")
            same, (read, amount) = work.states.data[:seqs].clone(), self.limits()["read"]
            calls: Calls = {"scan": work.call, "read": read, "in place": same.neg_}
            moved = 2 * same.numel() * same.itemsize
            for count, clock in ((1, time.thread_time), (2, time.perf_counter)):
                with self.threads(count):
                    best = least(calls, self.seconds, clock)
                rate = amount / best["read"]
                share, floor = (moved / best[what] / rate for what in ("scan", "in place"))
                label = name if count == 1 else f"{name}, 2 threads"
                self.row(label, share, "of read", bar, ms=best["scan"] * 1e3, in_place=floor)

    @contextmanager
    def threads(self, count: int) -> Iterator[None]:
        self.torch.set_num_threads(count)
        try:
            yield
        finally:
            self.torch.set_num_threads(1)

    def busy(self) -> None:
        """Decode on two cores alone, after a norm, and beside four processes that never rest on them."""
        with self.threads(2):
            for backend, bar in (("NATIVE_ATTN", -6.0), ("TORCH_SDPA", None)):
                call = self.case("decode 8x2048 bf16", backend).call()
                self._after_a_norm(f"{backend} decode 8x2048", call)
                self._beside_four(f"{backend} decode 8x2048", call, bar)

    def _median(self, call: Callable[[], object]) -> float:
        (times,) = turns({"": call}, self.seconds, time.perf_counter, 9).values()
        return statistics.median(times)

    def _after_a_norm(self, name: str, call: Callable[[], object]) -> None:
        norm = partial(self.torch.nn.LayerNorm(4096), self.torch.randn(64, 4096))
        alone, both = (self._median(each) for each in (call, lambda: (norm(), call())))
        self.row(f"{name} and a norm before it, median", both / alone, "x alone", ms=both * 1e3)

    def _beside_four(self, name: str, call: Callable[[], object], bar: float | None) -> None:
        alone = self._median(call)
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
        try:
            time.sleep(0.3)
            loaded = self._median(call)
        finally:
            for other in others:
                other.kill()
                other.wait()
        self.row(f"{name} beside four, median", loaded / alone, "x alone", bar,
                 alone_ms=alone * 1e3, loaded_ms=loaded * 1e3)  # fmt: skip


def child(isa: str, seconds: float, cores: int, sections: list[str], out: Path) -> None:
    visit = Visit(isa, seconds, cores)
    for name in sections:
        try:
            getattr(visit, name)()
        except Exception as error:
            visit.rows.append(
                {"isa": isa, "what": name, "failed": f"{type(error).__name__}: {error}"}
            )
            print(f"{isa:12} {name} failed: {type(error).__name__}: {error}", flush=True)
        out.write_text(json.dumps(visit.rows))


def whole_cores() -> list[int]:
    """Return one processor number of each core."""
    found: dict[str, int] = {}
    for number in sorted(os.sched_getaffinity(0)):
        path = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
        found.setdefault(path.read_text() if path.exists() else str(number), number)
    return list(found.values())


def machine() -> Row:
    """Say what this is measured on."""
    import torch
    from pages import about
    from polyattn_cpu.native import build, library

    text = Path("/proc/cpuinfo").read_text()
    fields = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    shown = ("avx", "amx", "fma", "f16c")
    version = subprocess.run(
        [*build.compiler(), "--version"], capture_output=True, text=True
    ).stdout
    return about(torch.device("cpu")) | {
        "processor": fields.get("model name", platform.processor()),
        "family/model/stepping": [fields.get(k, "?") for k in ("cpu family", "model", "stepping")],
        "flags": [f for f in fields.get("flags", "").split() if f.startswith(shown)],
        "cores": len(whole_cores()), "load": os.getloadavg(), "compiler": version.splitlines()[0],
        "instruction sets": library.isas(), "command": " ".join(sys.argv),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--sets", default="amx,avx512_bf16,avx512,avx2")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--only", default=SECTIONS)
    parser.add_argument("--out", type=Path, default=Path("cpu_bars.json"))
    parser.add_argument("--child")
    chosen = parser.parse_args()
    sections = chosen.only.split(",")
    if chosen.child:
        child(chosen.child, chosen.seconds, chosen.cores, sections, chosen.out)
    else:
        parent(chosen, sections)


def parent(chosen: argparse.Namespace, sections: list[str]) -> None:
    """Build, start a process for each instruction set, gather and judge."""
    from polyattn_cpu.native import build, library

    if not build.build_or_say():
        sys.exit("no native library: see above")
    about = machine()
    print(json.dumps(about), flush=True)
    cores, running, rows = whole_cores(), [], []
    sets = [isa for isa in chosen.sets.split(",") if isa in library.isas()]
    apart = len(cores) >= 8 * chosen.cores
    for place, isa in enumerate(sets):
        out = chosen.out.with_suffix(f".{isa}.json")
        width = chosen.cores
        mine = cores[2 * width * place : 2 * width * place + width] if apart else cores[:width]
        # What only the best set is asked for: the rest of the time goes to the shares.
        some = sections if isa == sets[0] else [s for s in sections if s in ("share", "store")]
        command = [sys.executable, __file__, "--child", isa, "--seconds", str(chosen.seconds),
                   "--cores", str(chosen.cores), "--only", ",".join(some), "--out", str(out)]  # fmt: skip
        env = os.environ | {
            "POLYATTN_CPU_ISA": isa, "ONEDNN_MAX_CPU_ISA": ONEDNN.get(isa, "ALL"),
            "OMP_NUM_THREADS": str(chosen.cores),
        }  # fmt: skip
        if some:
            found = subprocess.Popen(["taskset", "-c", ",".join(map(str, mine)), *command], env=env)
            running.append((isa, found, out))
            if not apart:
                found.wait()
    for isa, found, out in running:
        found.wait()
        rows += (
            json.loads(out.read_text()) if out.exists() else [{"isa": isa, "failed": "all of it"}]
        )
        out.unlink(missing_ok=True)
    chosen.out.write_text(listed({"machine": about}, rows))
    missed = [r for r in rows if r.get("met") is False or "failed" in r]
    print(f"\n{sum(r.get('met') is True for r in rows)} bars met, {len(missed)} missed or failed:")
    for r in missed:
        print(f"  {r['isa']:12} {r.get('what', '')}: {r.get('failed') or round(r['value'], 3)}")


if __name__ == "__main__":
    main()
