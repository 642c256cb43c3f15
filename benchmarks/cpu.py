"""The figures of the CPU side, as ratios in one run. Prints them; fails on nothing.

python benchmarks/cpu.py [--out FILE.json]
"""

from __future__ import annotations

import argparse
import compileall
import importlib
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from polyattn import (
    Attention,
    AttentionBackend,
    Batch,
    LatentAttention,
    LayerGroup,
    LayerSpec,
    Recurrent,
    discover,
    select,
)
from polyattn.families.attention.planning import AttentionStep
from polyattn.families.mla.workload import latent_weights
from polyattn.families.recurrent.workload import recurrent_inputs, recurrent_params
from polyattn.kernel import StoreBackend
from polyattn.tools.cli.benching import full_step
from polyattn.tools.cli.models import bundled

CPU = torch.device("cpu")


def best_ms(call: Callable[[], object], repeats: int = 7) -> float:
    call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times) * 1e3


def decode(dtype: str) -> dict[str, float]:
    """Batch 8 x 2,048 tokens, 32/8 heads of 128: ours against a gather and torch's SDPA."""
    spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, dtype=dtype, block_size=16)
    step = full_step(select(spec, "cpu", backend="TORCH_SDPA"), [(1, 2048)] * 8)
    table, cache = step.batch.block_table, step.cache
    assert table is not None

    def naive() -> torch.Tensor:
        keys, values = (
            t[table.long()].reshape(8, 2048, 8, 128).transpose(1, 2).repeat_interleave(4, 1)
            for t in (cache.key, cache.value)
        )
        return torch.nn.functional.scaled_dot_product_attention(
            step.query[:, :, None], keys, values
        )

    return _ratio(best_ms(naive), best_ms(step.call))


def prefill(dtype: str) -> dict[str, float]:
    """One prompt of 2,048 tokens: ours, paged, against one dense SDPA call."""
    spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, dtype=dtype, block_size=16)
    step = full_step(select(spec, "cpu", backend="TORCH_SDPA"), [(2048, 2048)])
    query, key, value = (t.transpose(0, 1)[None] for t in (step.query, step.key, step.value))

    def dense() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )

    return _ratio(best_ms(dense, 5), best_ms(step.call, 5))


def mamba2() -> dict[str, float]:
    """Mamba-2 2.7B, a prompt of 2,048 tokens: ours in chunks, against a loop over tokens."""
    spec = LayerSpec.from_hf_config(bundled("models", "mamba2-2.7b.json"))[0]
    generator = torch.Generator().manual_seed(0)
    layer = Recurrent(select(spec, "cpu"), **recurrent_params(spec, generator))
    states = layer.group.allocate_states(1)
    inputs = recurrent_inputs(spec, 2048, generator)
    slot = torch.zeros(1, dtype=torch.int64)
    whole = Batch.from_lens([2048], [2048], state_slots=slot)
    planned = layer.plan(whole)
    x, dt, B, C = (t.float() for t in inputs)
    A, D, bias = (layer.params[name] for name in ("A", "D", "dt_bias"))

    def loop() -> torch.Tensor:
        """The recurrence as it is written, a token at a time, in float32."""
        h, outs = torch.zeros(80, 64, 128), []
        for t in range(256):
            step = torch.nn.functional.softplus(dt[t] + bias)[:, None, None]
            h = torch.exp(step * A[:, None, None]) * h + step * x[t, :, :, None] * B[t][:, None]
            outs.append((h * C[t][:, None]).sum(-1) + D[:, None] * x[t])
        return torch.stack(outs)

    def steps() -> None:
        """Our own decode, a token at a time."""
        for t in range(64):
            batch = Batch.from_lens([1], [t + 1], state_slots=slot)
            layer(*(x[t : t + 1] for x in inputs), states=states, plan=batch)

    ours = best_ms(lambda: layer(*inputs, states=states, plan=planned), 9)
    # A part of each loop: every token costs the same.
    found = _ratio(8 * best_ms(loop, 3), ours)
    return found | {"over our own decode": 32 * best_ms(steps, 3) / ours}


def mla() -> dict[str, float]:
    """DeepSeek-V2-Lite, one decode after 2,048 tokens: absorbed, against expanded."""
    spec = LayerSpec.from_hf_config(bundled("models", "deepseek-v2-lite.json"))[0]
    generator = torch.Generator().manual_seed(0)
    layer = LatentAttention(select(spec, "cpu"), *latent_weights(spec, generator))
    cache = layer.group.allocate_cache(128)
    cache.key.normal_()
    table = torch.randperm(128)[None].int()
    batch = Batch.from_lens([1], [2048], table, cache.block_size)
    query = torch.randn(1, 16, 192).bfloat16()
    latent, rope = torch.randn(1, 512).bfloat16(), torch.randn(1, 64).bfloat16()
    assert layer.weights is not None
    w_uk, w_uv = layer.weights
    plan = layer.plan(batch)

    def expand() -> torch.Tensor:
        """Every head's keys and values of the whole context, then attention."""
        rows = cache.key[table[0].long()].flatten(0, 1)[:, 0]
        key = torch.einsum("tr,hnr->htn", rows[:, :512], w_uk)
        key = torch.cat([key, rows[None, :, 512:].expand(16, -1, -1)], dim=2)
        value = torch.einsum("tr,hrv->htv", rows[:, :512], w_uv)
        return torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None], key[None], value[None], scale=spec.scale
        )

    return _ratio(best_ms(expand), best_ms(lambda: layer(query, latent, rope, cache, plan)))


def _ratio(theirs: float, ours: float) -> dict[str, float]:
    return {"baseline_ms": theirs, "ours_ms": ours, "ratio": theirs / ours}


def selection() -> dict[str, float]:
    discover()
    spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
    cold = []
    for heads in range(1, 9):
        other = spec.replace(num_heads=heads * 8)
        started = time.perf_counter()
        select(other, "cpu")
        cold.append(time.perf_counter() - started)
    started = time.perf_counter()
    for _ in range(20000):
        select(spec, "cpu")
    return {
        "cold_first_ms": cold[0] * 1e3,
        "cold_median_ms": statistics.median(cold) * 1e3,
        "cached_us": (time.perf_counter() - started) / 20000 * 1e6,
    }


def layer_overhead() -> float:
    """Microseconds that `Attention.forward` adds to a backend that does nothing."""

    class Nothing(AttentionBackend):
        def run(self, *args: Any) -> None: ...

    class NoStore(StoreBackend):
        def run(self, *args: Any) -> None: ...

    spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
    group = LayerGroup(select(spec, "cpu"))
    layer, cache = Attention(group), group.allocate_cache(4)
    batch = Batch.from_lens([1], [17], torch.tensor([[2, 1]], dtype=torch.int32), 16)
    query, key = torch.randn(1, 32, 128).bfloat16(), torch.randn(1, 8, 128).bfloat16()
    out, plan = torch.empty_like(query), group.plan(batch)
    assert isinstance(plan, AttentionStep)
    plan.calls[0].backend = Nothing(spec, group.cache_format, group.device)
    plan.stored_by = NoStore(spec, group.cache_format, group.device)
    return best_ms(lambda: [layer(query, key, key, cache, plan, out=out) for _ in range(1000)])


def list_seconds() -> dict[str, float]:
    """Seconds of `polyattn list` with 300 other distributions on the path, the best of 9.

    Seconds of the processor (user and system) say what the command takes on a machine that others
    use too. Sources are compiled first, as pip does when it installs.
    """
    for plugin in discover().plugins:
        package = importlib.import_module(plugin.target.partition(".")[0])
        compileall.compile_dir(package.__path__[0], quiet=1)
    with tempfile.TemporaryDirectory() as folder:
        for index in range(300):
            info = Path(folder) / f"dist{index}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: dist{index}\nVersion: 1\n"
            )
            (info / "entry_points.txt").write_text("[console_scripts]\nx = x:y\n")
        command = [sys.executable, "-m", "polyattn.tools.cli", "list"]
        env = {"PYTHONPATH": folder, "PATH": "/usr/bin:/bin"}

        def run() -> tuple[float, float]:
            before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            subprocess.run(command, env=env, check=True, capture_output=True)
            after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
            used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            return used, wall

        used, wall = zip(*(run() for _ in range(9)), strict=True)
        return {"processor": round(min(used), 3), "wall": round(min(wall), 3)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    figures: dict[str, Any] = {
        "date": str(date.today()), "machine": f"{platform.processor() or platform.machine()}, "
        f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__, "command": "python benchmarks/cpu.py",
    }  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        figures[f"decode 8 x 2048, {dtype}, over gather + SDPA"] = decode(dtype)
        figures[f"prefill 1 x 2048, {dtype}, over one dense SDPA"] = prefill(dtype)
    figures["Mamba-2 prefill 1 x 2048, over a loop over tokens"] = mamba2()
    figures["MLA decode 1 x 2048, absorbed over expanded"] = mla()
    figures["select"] = selection()
    figures["layer adds, us"] = layer_overhead()
    figures["polyattn list, 300 distributions, s"] = list_seconds()
    print(json.dumps(figures, indent=1))
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
