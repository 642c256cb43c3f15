"""Mamba-1's prefill and the recurrences by channel and by token on one GPU, beside their bytes and fla.

    python benchmarks/h200_scan.py [--out FILE.json] [--seconds 150] [--tries] [--device cpu]

Device times with a cold L2 (see `timing.py`). First every kind is compared with the float64 formulas,
Mamba-1 whole and in pieces; then come times, the limit being the bytes that a step must move, at the
speed of a copy; then fla's; with `--tries` configurations that `configs` doesn't have. A failing row is
printed and the others run; no new row starts after `--seconds`. On a CPU (TRITON_INTERPRET=1) all runs
at tiny sizes but the clock.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import polyattn_triton.channels as channels
import polyattn_triton.configs as configs
import polyattn_triton.selective as selective
import torch
from polyattn import Batch, LayerGroup, LayerSpec, Recurrent, select
from polyattn.families.recurrent.reference import forward
from polyattn.families.recurrent.workload import recurrent_inputs, recurrent_params, recurrent_state
from polyattn.kernel import RecurrentSpec
from polyattn.runtime.step.cost import batch_cost
from rows import Rows
from timing import kernel_us

KINDS = {
    "Mamba-1 (Jamba)": ("mamba1", 8192, 1, RecurrentSpec(state_size=16)),
    "Mamba-1 (130m)": ("mamba1", 1536, 1, RecurrentSpec(state_size=16)),
    "KDA (Kimi Linear)": ("kda", 32, 128, RecurrentSpec(state_size=128, qk_norm=True)),
    "RWKV-7 (2.9B)": ("rwkv7", 40, 64, RecurrentSpec(state_size=64)),
    "RG-LRU (2B)": ("rg_lru", 2560, 1, RecurrentSpec(state_size=1)),
    "normalised linear": (
        "phi_linear", 16, 64, RecurrentSpec(state_size=64, feature_map="elu+1"),
    ),
}  # fmt: skip
"""Kind, heads, head size and form of each, as the model in brackets has them."""
STEPS = {
    "8 x 4096": ([4096] * 8, [4096] * 8),
    "1 x 8192": ([8192], [8192]),
    "1 x 8192 after 1000": ([8192], [9192]),
    "decode 128": ([1] * 128, [4096] * 128),
}
TILES = {
    "KDA (Kimi Linear)": (
        (32, 16, 2, 1), (32, 16, 4, 1), (64, 16, 4, 2), (64, 16, 8, 1), (128, 16, 4, 1),
        (128, 16, 8, 1), (128, 16, 8, 2),
    ),
    "RWKV-7 (2.9B)": (
        (16, 16, 1, 1), (32, 16, 2, 1), (32, 16, 4, 1), (64, 16, 2, 1), (64, 16, 4, 2), (64, 16, 8, 1),
    ),
}  # fmt: skip
"""Configurations of prefills to try: values, chunk, warps, stages."""
CUTS = {
    "8 x 4096": ((64, 3, 0), (64, 4, 0), (64, 6, 0), (32, 6, 0), (32, 8, 0), (64, 4, 2048)),
    "1 x 8192": (
        (128, 2, 186),
        (128, 2, 384),
        (128, 2, 497),
        (128, 2, 640),
        (64, 4, 256),
        (64, 4, 512),
        (64, 4, 993),
        (32, 4, 256),
        (32, 4, 512),
    ),
}
"""Mamba-1's ways to try: channels of a program, tokens loaded ahead, tokens of a piece (0: whole)."""

DRAWN = 2048
"""Tokens that are drawn at random, on the host; more of them repeat."""


def spec_of(name: str, dtype: str, heads: int | None = None) -> LayerSpec:
    """Return a layer of KINDS."""
    kind, count, size, form = KINDS[name]
    return LayerSpec(
        kind=kind, num_heads=heads or count, head_size=size, dtype=dtype, recurrent=form
    )


class Step:
    """One recurrent layer over one batch."""

    def __init__(
        self, spec: LayerSpec, backend: str, device: str, queries: list[int], lens: list[int]
    ):
        self.generator = torch.Generator().manual_seed(0)
        self.group = LayerGroup(select(spec, device, backend=backend))
        self.layer = Recurrent(self.group, **recurrent_params(spec, self.generator))
        self.states = self.group.allocate_states(len(lens))
        shape = tuple(self.states.data.shape)
        self.states.data.copy_(recurrent_state(spec, shape, self.generator))
        slots = torch.randperm(len(lens), generator=self.generator).to(device)
        self.batch = Batch.from_lens(queries, lens, state_slots=slots, device=device)
        drawn = recurrent_inputs(spec, min(sum(queries), DRAWN), self.generator, device)
        repeats = -(-sum(queries) // DRAWN)
        self.inputs = [
            tensor.repeat(repeats, *[1] * (tensor.dim() - 1))[: sum(queries)] for tensor in drawn
        ]
        self.plan = self.group.plan(self.batch)

    def __call__(self) -> torch.Tensor:
        return self.layer(*self.inputs, states=self.states, plan=self.plan)  # type: ignore[no-any-return]

    def pieces(self) -> int:
        """Return in how many pieces Mamba-1's sequences run, 0 for whole ones."""
        cuts = [getattr(call.plan, "cut", None) for call in self.plan.calls]
        return sum(cut.pieces.count for cut in cuts if cut is not None and cut.pieces is not None)

    def errors(self) -> tuple[float, float]:
        """Return how far output and states are from float64, of the largest element."""
        names = list(self.layer.form.inputs)
        given = dict(zip(names, self.inputs, strict=True))
        out, after = forward(
            self.layer.spec, given, self.layer.params, self.states.data, self.batch
        )
        found = self().double().cpu()
        states = self.states.data.double().cpu()
        return (
            float((found - out).abs().max() / out.abs().max()),
            float((states - after).abs().max() / after.abs().max()),
        )


def check(name: str, backend: str, device: str, dtype: str, lengths: list[int]) -> dict[str, Any]:
    """Compare with float64, few heads."""
    heads = {"mamba1": 136, "rg_lru": 136}.get(KINDS[name][0], 2)
    spec = spec_of(name, dtype, heads)
    step = Step(spec, backend, device, lengths, [n + 5 * (i % 2) for i, n in enumerate(lengths)])
    out, states = step.errors()
    bar = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-5}[dtype]
    chunked = KINDS[name][0] in ("kda", "rwkv7")  # products in the layer's dtype make the state
    return {
        "pieces": step.pieces(), "out": out, "states": states, "bar": bar,
        "right": out < bar and states < (bar if chunked else 1e-3),
    }  # fmt: skip


def copy_speed() -> float:
    """Return the bytes that a copy moves in a microsecond, read and written together."""
    source = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    goal = torch.empty_like(source)
    return 2 * source.numel() / kernel_us(lambda: goal.copy_(source))


def timed(spec: LayerSpec, backend: str, step: str, speed: float) -> dict[str, Any]:
    """Time one step on the GPU."""
    run = Step(spec, backend, "cuda", *STEPS[step])
    us = kernel_us(run, repeats=10)
    limit = batch_cost(spec, run.batch).bytes / speed
    return {"us": us, "limit_us": limit, "ratio": us / limit, "pieces": run.pieces()}


def tried(
    spec: LayerSpec, step: str, tile: tuple[int, int, int, int], speed: float
) -> dict[str, Any]:
    """Time a prefill with another configuration."""
    before = configs.SCAN_TABLE
    others = [
        replace(row, config=configs.ScanConfig(*tile))
        for row in before
        if row.kind is spec.kind and row.phase == "prefill"
    ]
    configs.SCAN_TABLE = (*others, *before)
    try:
        return timed(spec, "TRITON_SCAN", step, speed)
    finally:
        configs.SCAN_TABLE = before


def cut_so(
    spec: LayerSpec, step: str, channels: int, ahead: int, tokens: int, speed: float
) -> dict[str, Any]:
    """Time Mamba-1's prefill another way than is chosen."""
    way = selective.way_of
    config = configs.SelectiveConfig(channels, ahead, 1.0, 1.0)
    selective.way_of = lambda *given: (config, tokens)  # type: ignore[assignment]
    try:
        return timed(spec, "TRITON_SCAN", step, speed)
    finally:
        selective.way_of = way


def pairs_alone(spec: LayerSpec, step: str, speed: float) -> dict[str, Any]:
    """Time the first of a prefill's two kernels alone."""
    second = channels._chunk
    channels._chunk = lambda *words: None  # type: ignore[assignment]
    try:
        return timed(spec, "TRITON_SCAN", step, speed)
    finally:
        channels._chunk = second


def times(rows: Rows, backends: dict[str, str], dtype: str, long: list[int], tries: bool) -> None:
    """Add what steps take on the device, beside the time of their bytes."""
    speed = copy_speed()
    print(f"copy: {speed / 1e6:.2f} TB/s")
    for name, backend in backends.items():
        spec = spec_of(name, dtype)
        for step in STEPS:
            rows.add(
                f"{name} {step} {backend}",
                lambda s=spec, b=backend, t=step: timed(s, b, t, speed),
            )
    for name in [n for n in backends if KINDS[n][0] in ("kda", "rwkv7")]:
        spec = spec_of(name, dtype)
        rows.add(
            f"{name} 8 x 4096 TRITON_SCAN, pairs alone",
            lambda s=spec: pairs_alone(s, "8 x 4096", speed),
        )
        rows.add(
            f"{name} {dtype} FLA_CHANNELS: errors",
            lambda n=name: check(n, "FLA_CHANNELS", "cuda", dtype, long),
        )
        for step in ("8 x 4096", "decode 128"):
            rows.add(
                f"{name} {step} FLA_CHANNELS",
                lambda s=spec, t=step: timed(s, "FLA_CHANNELS", t, speed),
            )
    for name in [n for n in backends if n in TILES and tries]:
        for tile in TILES[name]:
            rows.add(
                f"{name} 8 x 4096, values/chunk/warps/stages {tile}",
                lambda n=name, t=tile: tried(spec_of(n, dtype), "8 x 4096", t, speed),
            )
    for name in [n for n in backends if KINDS[n][0] == "mamba1" and tries]:
        for step, cuts in CUTS.items():
            for cut in cuts:
                rows.add(
                    f"{name} {step}, channels/ahead/piece {cut}",
                    lambda n=name, t=step, c=cut: cut_so(spec_of(n, dtype), t, *c, speed),
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tries", action="store_true", help="other tiles and cuts, too")
    parser.add_argument("--kinds", nargs="+", default=sorted({k for k, *_ in KINDS.values()}))
    given = parser.parse_args()
    gpu = given.device == "cuda"
    dtype, rows = ("bfloat16" if gpu else "float16"), Rows(given.seconds)
    backends = {
        name: "TRITON_SCAN" if kind in ("mamba1", "kda", "rwkv7") else "TRITON_TOKEN_SCAN"
        for name, (kind, *_) in KINDS.items()
        if kind in given.kinds
    }
    long = [150, 33, 1, 17] if gpu else [70, 1]
    for name, backend in backends.items():
        for kind in (dtype, "float32"):
            rows.add(
                f"{name} {kind} {backend}: errors",
                lambda n=name, b=backend, k=kind: check(n, b, given.device, k, long),
            )
    if gpu:
        times(rows, backends, dtype, long, given.tries)
    machine = torch.cuda.get_device_name() if gpu else "interpreter"
    rows.finish(given.out, {"machine": machine, "torch": torch.__version__})


if __name__ == "__main__":
    main()
