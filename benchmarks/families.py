"""MLA decode and Mamba-2 on one GPU: ours beside every library that runs there.

    python benchmarks/families.py --out DIR

Device times with a cold L2 (see `timing.py`). A library's own call is timed beside our adapter of it.
Writes families.json and prints a table.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from polyattn import Batch, LatentAttention, LayerGroup, LayerSpec, Recurrent, select
from polyattn.families.mla.absorption import absorb
from polyattn.families.mla.workload import latent_weights
from polyattn.families.recurrent.workload import recurrent_inputs, recurrent_params
from polyattn.runtime.step.cost import batch_cost
from polyattn.tools.cli.benching import measure_limits
from polyattn.tools.cli.models import bundled
from timing import kernel_us

DEVICE = torch.device("cuda")
GENERATOR = torch.Generator()
MLA_BACKENDS = ("TRITON_MLA", "FLASHMLA", "FLASHINFER_MLA", "FLASH_ATTN_MLA")
SAME_BLOCKS = ("FLASHMLA", "FLASHINFER_MLA")
MLA_SHAPES = ((64, 4096), (16, 4096), (128, 2048), (1, 8192))


def model_spec(model: str) -> LayerSpec:
    return LayerSpec.from_hf_config(bundled("models", f"{model}.json"))[0]


class LatentDecode:
    """One absorbed decode over random pages, without the projections around it."""

    def __init__(self, spec: LayerSpec, backend: str, count: int, length: int):
        GENERATOR.manual_seed(0)
        group = LayerGroup(select(spec, "cuda", backend=f"decode={backend}"))
        self.layer = LatentAttention(group, *latent_weights(spec, GENERATOR))
        size = group.cache_format.block_size
        blocks = -(-length // size)
        table = torch.randperm(count * blocks).view(count, blocks).int().to(DEVICE)
        self.cache = group.allocate_cache(count * blocks)
        for page in self.cache.key:  # all at once in float32 would be four times an 8-bit cache
            page.copy_(torch.randn(page.shape, device=DEVICE))
        self.batch = Batch.from_lens([1] * count, [length] * count, table, size)
        (self.call,) = group.plan(self.batch).calls
        size = self.call.block_size or size  # None: as the cache has them
        self.view = self.cache.in_blocks_of(size)[0]
        query = torch.randn(count, spec.num_heads, spec.head_size, device=DEVICE)
        self.query = absorb(query.bfloat16(), self.layer.weights[0])
        self.out = torch.empty_like(self.query[..., : spec.latent.rank])

    def __call__(self) -> None:
        params = self.layer.params
        self.call.backend.run(
            self.call.plan, self.query, None, None, self.view, params, self.out, None
        )


def mla(spec: LayerSpec, limits: dict[str, float]) -> list[dict[str, Any]]:
    rows = []
    for count, length in MLA_SHAPES:
        outputs: dict[str, torch.Tensor] = {}
        for name in MLA_BACKENDS:
            torch.manual_seed(count)
            row: dict[str, Any] = {"what": f"MLA decode {count} x {length}", "backend": name}
            try:
                step = LatentDecode(spec, name, count, length)
                row["us"] = kernel_us(step)
            except Exception as error:
                row["cannot"] = f"{type(error).__name__}: {error}"[:200]
                rows.append(show(row))
                continue
            cost = batch_cost(spec, step.batch)
            row |= {"tb_s": cost.bytes / row["us"] / 1e6, "tflop_s": cost.flops / row["us"] / 1e6}
            row["limit_us"] = max(
                cost.bytes / limits["copy_gb_per_s"] / 1e3,
                cost.flops / limits["matmul_tflop_per_s"] / 1e6,
            )
            outputs[name] = step.out.float()
            rows.append(show(row))
            del step
        for name, out in outputs.items():
            # Where blocks are as large, the same seed makes the same problem.
            error = float((out - outputs["TRITON_MLA"]).norm() / out.norm())
            if name in SAME_BLOCKS:
                print(f"{count} x {length} {name}: differs from TRITON_MLA by {error:.1e}")
    return rows


class Scan:
    """One recurrent layer over one batch."""

    def __init__(self, spec: LayerSpec, backend: str, queries: list[int], lens: list[int]):
        group = LayerGroup(select(spec, "cuda", backend=backend))
        params = recurrent_params(spec, GENERATOR)
        self.layer = Recurrent(group, **params)
        self.states = group.allocate_states(len(lens))
        self.states.data.normal_()
        slots = torch.randperm(len(lens)).to(DEVICE)
        self.batch = Batch.from_lens(queries, lens, state_slots=slots, device=DEVICE)
        self.inputs = recurrent_inputs(spec, sum(queries), GENERATOR, DEVICE)
        self.plan = group.plan(self.batch)
        self.out = torch.empty_like(self.layer(*self.inputs, states=self.states, plan=self.plan))

    def __call__(self) -> None:
        self.layer(*self.inputs, states=self.states, plan=self.plan, out=self.out)


def library_calls(scan: Scan, count: int, length: int) -> dict[str, Callable[[], object]]:
    """The libraries' own calls on the same inputs, without our adapters."""
    x, dt, B, C = scan.inputs
    params, states = scan.layer.params, scan.states.data
    found: dict[str, Callable[[], object]] = {}
    shaped = [t.unflatten(0, (count, length)) for t in (x, dt, B, C)]
    try:
        if length == 1:
            from mamba_ssm.ops.triton.selective_state_update import selective_state_update

            size, state = x.shape[2], states.shape[3]
            A = params["A"][:, None, None].expand(-1, size, state)
            D, bias = (params[n][:, None].expand(-1, size) for n in ("D", "dt_bias"))
            step = dt[..., None].expand(-1, -1, size)
            found["mamba-ssm"] = lambda: selective_state_update(
                states, x, step, A, B, C, D=D, dt_bias=bias, dt_softplus=True
            )
        else:
            from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

            found["mamba-ssm"] = lambda: mamba_chunk_scan_combined(
                shaped[0], shaped[1], params["A"], shaped[2], shaped[3], 256, D=params["D"],
                dt_bias=params["dt_bias"], dt_softplus=True, return_final_states=True,
            )  # fmt: skip
    except ImportError as error:
        print("mamba-ssm:", error)
    try:
        from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

        call = fused_recurrent_simple_gla if length == 1 else chunk_simple_gla
        heads = x.shape[1]
        q, k = (t.expand(-1, -1, heads, -1).contiguous() for t in (shaped[3], shaped[2]))
        g = (torch.nn.functional.softplus(shaped[1].float()) * params["A"]).contiguous()
        found["fla"] = lambda: call(
            q=q, k=k, v=shaped[0], g=g, scale=1.0, initial_state=states, output_final_state=True,
            state_v_first=True,
        )  # fmt: skip
    except ImportError as error:
        print("fla:", error)
    return found


def share_configs(index: int, count: int) -> None:
    """Leave each autotuned kernel of the libraries a part of its configurations.

    Processes that do so side by side fill Triton's cache; the timed process then tries out all.
    """
    import gc

    from triton.runtime import Autotuner

    for found in gc.get_objects():
        if isinstance(found, Autotuner):
            found.configs = found.configs[index::count] or found.configs[:1]


def scans(
    spec: LayerSpec, what: str, backends: tuple[str, ...], queries: list[int], lens: list[int],
    limits: dict[str, float], direct: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    rows = []
    for name in backends:
        row: dict[str, Any] = {"what": what, "backend": name}
        try:
            step = Scan(spec, name, queries, lens)
            row["us"] = kernel_us(step)
        except Exception as error:
            row["cannot"] = f"{type(error).__name__}: {error}"[:200]
        else:
            cost = batch_cost(spec, step.batch)
            row |= {"tb_s": cost.bytes / row["us"] / 1e6, "tflop_s": cost.flops / row["us"] / 1e6}
            row["limit_us"] = cost.bytes / limits["copy_gb_per_s"] / 1e3
        rows.append(show(row))
    if direct:
        step = Scan(spec, backends[0], queries, lens)
        for name, call in library_calls(step, len(lens), queries[0]).items():
            row = {"what": what, "backend": f"{name} (its own call)"}
            try:
                row["us"] = kernel_us(call)
            except Exception as error:
                row["cannot"] = f"{type(error).__name__}: {error}"[:200]
            rows.append(show(row))
    return rows


def show(row: dict[str, Any]) -> dict[str, Any]:
    """Print a row as soon as it is known."""
    head = f"{row['what']:28} {row['backend']:28}"
    if "cannot" in row:
        print(f"{head} cannot: {row['cannot']}", flush=True)
    else:
        print(
            f"{head} {row['us']:9.1f} us {row.get('tb_s', 0):6.2f} TB/s {row.get('tflop_s', 0):7.1f} "
            f"TFLOP/s, limit {row.get('limit_us', 0):8.1f} us", flush=True,
        )  # fmt: skip
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--warm", metavar="I/N", help="only compile: the I-th of N parts of what libraries try out"
    )
    args = parser.parse_args()
    deepseek, mamba2 = model_spec("deepseek-v3"), model_spec("mamba2-2.7b")
    gdn, linear = model_spec("qwen3-next-80b-a3b"), model_spec("minimax-text-01")
    conv = model_spec("lfm2-1.2b")
    mamba1 = model_spec("jamba-v0.1")
    if args.warm:
        share_configs(*map(int, args.warm.split("/")))
        for queries, lens in (([4096] * 8, [4096] * 8), ([1] * 128, [4096] * 128)):
            step = Scan(mamba2, "TRITON_SCAN", queries, lens)
            for call in library_calls(step, len(lens), queries[0]).values():
                call()
            for spec in (gdn, linear):
                Scan(spec, "FLA", queries, lens)()
        return
    limits = measure_limits(deepseek, DEVICE)
    ours, libraries = ("TRITON_SCAN",), ("TRITON_SCAN", "FLA", "MAMBA_SSM")
    long, many = ([4096] * 8, [4096] * 8), ([1] * 128, [4096] * 128)
    rows: list[dict[str, Any]] = []
    rows += scans(mamba2, "Mamba-2 prefill 8 x 4096", libraries, *long, limits, direct=True)
    rows += scans(mamba2, "Mamba-2 decode 128", libraries, *many, limits, direct=True)
    rows += scans(gdn, "GDN prefill 8 x 4096", libraries[:2], *long, limits)
    rows += scans(gdn, "GDN decode 128", libraries[:2], *many, limits)
    rows += scans(linear, "linear prefill 8 x 4096", libraries[:2], *long, limits)
    rows += scans(linear, "linear decode 128", libraries[:2], *many, limits)
    rows += scans(conv, "short conv prefill 8 x 4096", ours, *long, limits)
    rows += scans(mamba1, "Mamba-1 prefill 8 x 4096", ours, *long, limits)
    rows += scans(mamba1, "Mamba-1 decode 128", ours, *many, limits)
    rows += mla(deepseek, limits)
    result = {
        "date": str(date.today()), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "python": platform.python_version(), "limits": limits, "rows": rows,
    }  # fmt: skip
    if args.out:
        (args.out / "families.json").write_text(json.dumps(result, indent=1) + "\n")
    print({name: round(value, 1) for name, value in limits.items()})


if __name__ == "__main__":
    main()
