"""What do calls cost whose work is small, recurrences, a whole `polyattn run`? Bars of `cpu_bars.py`."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from polyattn.kernel import IndexerSpec, RecurrentSpec

SCANS: dict[str, tuple[int, dict[str, Any], float | None]] = {
    "Mamba-2 decode 8 seqs": (8, {
        "kind": "mamba2", "num_heads": 128, "num_kv_heads": 8, "head_size": 64,
        "recurrent": RecurrentSpec(state_size=128), "dtype": "bfloat16",
    }, 0.6),
    "gated delta rule decode 16 seqs": (16, {
        "kind": "gdn", "num_heads": 32, "num_kv_heads": 16, "head_size": 128,
        "recurrent": RecurrentSpec(state_size=128, qk_norm=True), "dtype": "bfloat16",
    }, None),
    "short convolution decode 128 seqs": (128, {
        "kind": "short_conv", "num_heads": 8192, "head_size": 1,
        "recurrent": RecurrentSpec(conv_width=4, activation="silu"), "dtype": "bfloat16",
    }, None),
}  # fmt: skip
"""Sequences, the layer and its bar."""
INDEXERS: dict[str, tuple[int, IndexerSpec, str]] = {
    "MSA": (4, IndexerSpec(
        num_heads=4, head_size=128, budget=16, activation="none", fold="none", pool=128, forced_last=1,
    ), "read"),
    "QSA": (4, IndexerSpec(
        num_heads=4, head_size=128, budget=512, fold="sum", tokens_per_entry=4, tail=True,
    ), "read"),
    "DSA, scaled e4m3": (1, IndexerSpec(
        num_heads=64, head_size=128, budget=2048, cache_dtype="fp8_scaled",
    ), "mm bf16"),
}  # fmt: skip
"""Sequences of 131,072 tokens that decode one, how an indexer chooses among them, and what limits it."""
Calls = dict[str, Callable[[], object]]


def least(calls: Calls, seconds: float, clock: Callable[[], float]) -> dict[str, float]:
    """Return each call's least seconds; the calls take turns, at least four rounds of them."""
    best = dict.fromkeys(calls, float("inf"))
    until, rounds = time.perf_counter() + seconds, 0
    while rounds < 4 or time.perf_counter() < until:
        for name, call in calls.items():
            started = clock()
            call()
            best[name] = min(best[name], clock() - started)
        rounds += 1
    return best


def timed(call: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Return the least and the median of a call's seconds by the wall clock, of nine calls at least."""
    call()
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while len(taken) < 9 or time.perf_counter() < until:
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return min(taken), statistics.median(taken)


class CallBars:
    """Sections of a visit; what is measured is handed to `row`."""

    seconds: float
    native: Any
    torch: Any

    def row(
        self, what: str, value: float, unit: str, bar: float | None = None, **more: float
    ) -> None:
        """Keep one figure."""
        raise NotImplementedError

    def case(self, name: str) -> Any:
        """Return a step by its name."""
        raise NotImplementedError

    def tiny(self) -> None:
        """Eight tiny sequences beside one batched call of torch's over contiguous tensors."""
        from torch.nn.functional import scaled_dot_product_attention

        case = self.case("decode 8x64 4/2x32 fp32")
        query, key, value = (
            self.torch.randn(8, heads, rows, 32) for heads, rows in ((4, 1), (2, 64), (2, 64))
        )
        calls: Calls = {
            "native": case.call(self.native.NativeAttention),
            "torch": lambda: scaled_dot_product_attention(query, key, value, enable_gqa=True),
        }
        repeated = {n: (lambda c=c: [c() for _ in range(20)]) for n, c in calls.items()}
        best = least(repeated, self.seconds, time.thread_time)
        self.row("8 tiny sequences / one batched SDPA", best["native"] / best["torch"], "x", -1.5,
                 us=best["native"] / 20 * 1e6, torch_us=best["torch"] / 20 * 1e6)  # fmt: skip

    def overhead(self) -> None:
        """A call with one key, or of a padding row, over a layer whose backends do nothing."""
        from polyattn import Attention, Batch, LayerSpec, select
        from polyattn.kernel import KVCache
        from polyattn_cpu.native.attention import NativeAttention
        from polyattn_cpu.native.store import NativeStore

        spec, torch = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32), self.torch
        small = self.native.Case({"num_heads": 4, "num_kv_heads": 2, "head_size": 32}, [1], [1])
        query, key, value = (torch.randn(1, h, 32).bfloat16() for h in (4, 2, 2))

        def layer(keys: int) -> Callable[[], object]:
            made = Attention(select(spec, "cpu"))
            cache = KVCache(*torch.zeros(2, 4, 16, 2, 32, dtype=torch.bfloat16))
            batch = Batch([0, 1], [keys], torch.zeros(1, 1, dtype=torch.int32),
                          slot_mapping=torch.full((1,), keys - 1))  # fmt: skip
            plan, out = made.plan(batch), torch.empty(1, 4, 32, dtype=torch.bfloat16)
            return lambda: made(query, key, value, cache, plan, out=out)

        def nothing(self: object, *rest: object) -> None: ...

        call, padding = layer(1), layer(0)
        attend, store = NativeAttention.run, NativeStore.run

        def with_runs(
            attends: Any, stores: Any, call: Callable[[], object]
        ) -> Callable[[], object]:
            def repeat() -> None:
                NativeAttention.run, NativeStore.run = attends, stores  # type: ignore[method-assign]
                for _ in range(100):
                    call()
                NativeAttention.run, NativeStore.run = attend, store  # type: ignore[method-assign]

            return repeat

        calls = {
            "backend": with_runs(attend, store, small.call(NativeAttention)),
            "whole": with_runs(attend, store, call),
            "without attending": with_runs(nothing, store, call),
            "its own": with_runs(nothing, nothing, call),
            "padding": with_runs(attend, store, padding),
            "padding, without attending": with_runs(nothing, store, padding),
        }
        best = {n: t / 100 * 1e6 for n, t in least(calls, self.seconds, time.thread_time).items()}
        self.row("one key, the backend's call", best["backend"], "us", -5.0)
        self.row("a layer's call with nothing to do, attending's part",
                 best["padding"] - best["padding, without attending"], "us", -3.0,
                 whole=best["padding"])  # fmt: skip
        self.row("a layer's call of one key, attending's part", best["whole"] - best["without attending"],
                 "us", whole=best["whole"])  # fmt: skip
        self.row("a layer's call of one key, storing's part",
                 best["without attending"] - best["its own"], "us", own=best["its own"])  # fmt: skip

    def scan(self) -> None:
        """A step of recurrent layers: bytes of the states, read and written, beside reading.

        `in_place`: the share of who reads and writes as many and does nothing else.
        """
        from polyattn import Batch, LayerGroup, LayerSpec, Recurrent, select
        from polyattn.families.recurrent.workload import (
            recurrent_inputs,
            recurrent_params,
            recurrent_state,
        )

        memory, one = self.torch.ones(16 << 20), self.torch.Generator().manual_seed(0)
        for name, (seqs, fields, bar) in SCANS.items():
            spec = LayerSpec(**fields)
            for backend in ("NATIVE_SCAN", "TORCH_SCAN"):
                try:
                    group = LayerGroup(select(spec, "cpu", backend=backend))
                except ValueError as error:
                    print(
                        f"{self.isa:12} {name} {backend}: {str(error).splitlines()[0]}", flush=True
                    )
                    continue
                layer = Recurrent(group, **recurrent_params(spec, one))
                states = group.allocate_states(seqs)
                states.data.copy_(recurrent_state(spec, tuple(states.data.shape), one))
                inputs = recurrent_inputs(spec, seqs, one)
                batch = Batch(
                    [*range(seqs + 1)], [100] * seqs, state_slots=self.torch.randperm(seqs)
                )
                plan, amount = group.plan(batch), 2 * states.data.numel() * states.data.itemsize
                same = states.data.clone()
                calls: Calls = {
                    "scan": lambda: layer(*inputs, states=states, plan=plan),  # noqa: B023
                    "read": lambda: memory.sum(),
                    "in place": lambda: same.neg_(),  # noqa: B023
                }
                best = least(calls, self.seconds, time.thread_time)
                rate = 64 * 2**20 / best["read"]
                share, floor = (amount / best[what] / rate for what in ("scan", "in place"))
                asked = bar if backend == "NATIVE_SCAN" else None
                self.row(f"{name} {backend}", share, "of read", asked, ms=best["scan"] * 1e3,
                         in_place=floor)  # fmt: skip

    def index(self) -> None:
        """An indexer's decode in bfloat16 over scattered pages of 64, beside what limits it."""
        from polyattn import Batch, Indexer, select
        from polyattn.conformance.cases.index import layer_for

        torch = self.torch
        for name, (seqs, spec, what) in INDEXERS.items():
            indexer = Indexer(
                select(layer_for(spec, "bfloat16"), "cpu", backend="index=NATIVE_INDEX")
            )
            entries = (1 << 17) // spec.tokens_per_entry
            keys = indexer.allocate_cache(seqs * entries // 64, 64)
            drawn = torch.randn(seqs * entries, spec.head_size).bfloat16()
            indexer.store(drawn, keys, torch.arange(len(drawn)))
            table = torch.randperm(len(keys)).int().view(seqs, -1)
            batch = Batch.from_lens([1] * seqs, [1 << 17] * seqs).with_block_table(table)
            query = torch.randn(seqs, spec.num_heads, spec.head_size).bfloat16()
            weights = torch.randn(seqs, spec.num_heads) if spec.fold == "weighted" else None
            bounds = self.limits()
            limit, amount = bounds[what if what in bounds else "mm fp32"]
            calls: Calls = {
                "index": lambda: indexer(query, keys, batch, weights), "limit": limit,  # noqa: B023
            }  # fmt: skip
            best = least(calls, self.seconds, time.thread_time)
            products = 2 * seqs * entries * spec.num_heads * spec.head_size
            done = keys.numel() * keys.itemsize if what == "read" else products
            share = done / best["index"] / (amount / best["limit"])
            self.row(f"index {name}", share, f"of {what}", 0.7, ms=best["index"] * 1e3,
                     gb_s=keys.numel() * keys.itemsize / best["index"] / 1e9)  # fmt: skip

    def run(self) -> None:
        """`polyattn run` of the default model, two threads: by what is chosen beside TORCH_SDPA."""
        rates: dict[str, float] = {}
        command = [
            sys.executable,
            "-m",
            "polyattn",
            "run",
            "--requests",
            "8",
            "--check",
            "0",
            "--json",
        ]
        for _ in range(2):
            for named in ({}, {"POLYATTN_BACKEND": "TORCH_SDPA"}):
                done = subprocess.run(
                    command, env=os.environ | named, capture_output=True, text=True
                )
                if done.returncode:
                    raise RuntimeError(done.stderr.strip().splitlines()[-1])
                found = json.loads(done.stdout)
                by = found["groups"][0]["chosen"]["decode"]
                rate = found["tokens"] / (found["prefill"]["seconds"] + found["decode"]["seconds"])
                rates[by] = max(rate, rates.get(by, 0.0))
        chosen, torchs = rates.get("NATIVE_ATTN", 0.0), rates["TORCH_SDPA"]
        self.row("polyattn run, NATIVE_ATTN's tokens/s / TORCH_SDPA's", chosen / torchs, "x", 3.0,
                 native=chosen, torch=torchs)  # fmt: skip
