"""Rotating cached keys as they are loaded (StreamingLLM's form), on one GPU.

    python benchmarks/h200_cache_rope.py [--out FILE.json] [--seconds 90] [--only times] [--device cpu]

Device times with a cold L2: decode and prefill beside the same layer without rotation, and a window of
1,020 keys and 4 kept tokens after 10,000 tokens and after 1,000,000 (bar: as fast). Then errors against
the float64 reference: decode, a few queries and prefill, pairings, part of a head, scalings, kept first
tokens, 8-bit caches, long sequences (`--only errors`: these alone). A failing row is printed and the
others run. On a CPU (TRITON_INTERPRET=1) the errors alone, of the smallest steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from polyattn import Attention, Batch, LayerGroup, LayerSpec, select
from polyattn.families.attention.reference import forward
from polyattn.spec.rope import RopeSpec
from rows import Rows
from timing import kernel_us

BLOCK = 16
STREAM = {"sliding_window": 1020, "sink_tokens": 4}
SMALL = {"sliding_window": 96, "sink_tokens": 4}
YARN = {
    "scaling": "yarn", "factor": 4.0, "original_length": 256, "beta_fast": 32.0, "beta_slow": 1.0,
    "attention_factor": 1.14,
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "neox": ({}, {"rotary_size": 128}),
    "gptj": ({}, {"rotary_size": 128, "pairing": "gptj"}),
    "part of a head": ({}, {"rotary_size": 48}),
    "yarn": ({}, {"rotary_size": 128} | YARN),
    "kept tokens": (SMALL, {"rotary_size": 128}),
    "kept tokens, gptj, part": (SMALL, {"rotary_size": 64, "pairing": "gptj"}),
    "many kept tokens": (SMALL | {"sink_tokens": 150}, {"rotary_size": 128}),
    "e4m3": (SMALL | {"kv_cache_dtype": "fp8_e4m3"}, {"rotary_size": 128}),
    "int8": ({"kv_cache_dtype": "int8"}, {"rotary_size": 128}),
}
STEPS = {
    "decode": ([1, 1, 1, 1], [900, 3, 98, 150]),
    "few": ([4, 1, 3], [700, 9, 100]),
    "prefill": ([130, 40], [600, 40]),
}
LAYER: dict[str, Any] = {
    "num_heads": 32, "num_kv_heads": 8, "head_size": 128, "block_size": BLOCK, "dtype": "bfloat16",
}  # fmt: skip


class Step:
    """One layer over one batch; sequences' blocks lie in the cache's own random order.

    `held`: blocks that a sequence has, the later ones over the first again; 0: all of its own.
    """

    def __init__(
        self, spec: LayerSpec, device: str, queries: list[int], lens: list[int], held: int = 0
    ):
        self.group = LayerGroup(select(spec, device, backend="TRITON_ATTN"))
        small = {"k_scale": 0.025, "v_scale": 0.025} if spec.stored_dtype == "int8" else {}
        self.layer = Attention(self.group, rotate=True if spec.rope else None, **small)
        columns = [-(-n // BLOCK) for n in lens]
        own = [min(n, held or n) for n in columns]
        order, at = torch.randperm(sum(own)) + 1, 0
        table = torch.zeros(len(lens), max(columns), dtype=torch.int32)
        for row, (count, kept) in enumerate(zip(columns, own, strict=True)):
            table[row, :count] = order[at : at + kept][torch.arange(count) % kept]
            at += kept
        self.cache = self.group.allocate_cache(sum(own) + 1)
        for stored in (self.cache.key, self.cache.value):
            numbers = torch.randn(stored.shape, device=device)
            numbers = numbers * 40 if stored.dtype == torch.int8 else numbers
            stored.copy_(numbers.to(stored.dtype))
        self.batch = Batch.from_lens(queries, lens, table.to(device), BLOCK)
        heads = {"query": spec.num_heads, "key": spec.num_kv_heads, "value": spec.num_kv_heads}
        dtype = getattr(torch, spec.dtype)
        self.inputs = {
            name: torch.randn(sum(queries), count, spec.head_size, device=device).to(dtype)
            for name, count in heads.items()
        }
        self.plan = self.group.plan(self.batch)

    def __call__(self) -> torch.Tensor:
        return self.layer(**self.inputs, cache=self.cache, plan=self.plan)  # type: ignore[no-any-return]

    def attend(self) -> torch.Tensor:
        """Attend without storing."""
        out = torch.empty_like(self.inputs["query"])
        for call in self.plan.calls:
            call.backend.run(
                call.plan,
                self.inputs["query"],
                None,
                None,
                self.cache,
                self.layer.params,
                out,
                None,
            )
        return out


def layer_of(window: dict[str, Any], rope: dict[str, Any] | None, **changes: Any) -> LayerSpec:
    turned = None if rope is None else RopeSpec(positions="cache", base=5e5, **rope)
    return LayerSpec(**(LAYER | window | changes), rope=turned)


def check(device: str, dtype: str, case: str, step: str, held: int = 0) -> dict[str, Any]:
    """Compare with float64: two heads, one KV head."""
    window, rope = CASES[case]
    queries, lens = STEPS[step] if step in STEPS else ([1], [int(step)])
    if device == "cpu":
        queries, lens = [min(n, 6) for n in queries], [min(n, 120) for n in lens]
    spec = layer_of(window, rope, num_heads=2, num_kv_heads=1, dtype=dtype)
    run = Step(spec, device, queries, lens, held)
    found = run().double().cpu()
    params = run.layer.params
    wanted, _ = forward(spec, run.inputs["query"], None, None, run.cache, run.batch, params)
    error = float((found.view(wanted.shape) - wanted).abs().max() / wanted.abs().max())
    bar = {"bfloat16": 1.2e-2, "float16": 2e-3, "float32": 2e-5}[dtype]
    ways = [getattr(call.plan, "way", "") for call in run.plan.calls]
    return {"ways": "/".join(ways), "error": error, "bar": bar, "right": error < bar}


def timed(
    window: dict[str, Any], rope: dict[str, Any], queries: list[int], lens: list[int], held: int = 0
) -> dict[str, Any]:
    """Time one step's attention with rotation and without."""
    us = {}
    for name, given in (("turned", rope), ("plain", None)):
        run = Step(layer_of(window, given), "cuda", queries, lens, held)
        us[name] = kernel_us(run.attend)
        del run
        torch.cuda.empty_cache()
    return us | {"ratio": us["turned"] / us["plain"]}


def add_errors(rows: Rows, device: str) -> None:
    """Every case in every kind of step; a window's kept tokens in float32, after long streams, too."""
    gpu = device == "cuda"
    dtype = "bfloat16" if gpu else "float16"
    for case in CASES if gpu else ("kept tokens, gptj, part", "int8"):
        for step in STEPS:
            rows.add(f"{dtype} {case}, {step}", lambda c=case, s=step: check(device, dtype, c, s))
    for step in (*STEPS, "100000", "300000") if gpu else ():
        rows.add(
            f"float32 kept tokens, {step}",
            lambda s=step: check(device, "float32", "kept tokens", s, 40 if s not in STEPS else 0),
        )


def add_times(rows: Rows) -> None:
    """The bars' rows first."""
    whole, gptj = {"rotary_size": 128}, {"rotary_size": 128, "pairing": "gptj"}
    eight = {"kv_cache_dtype": "fp8_e4m3"}
    rows.add("decode 64 x 4096", lambda: timed({}, whole, [1] * 64, [4096] * 64))
    for length in (10_000, 1_000_000, 100_000):
        rows.add(
            f"decode 64 after {length}, 1,020 and 4 kept",
            lambda n=length: timed(STREAM, whole, [1] * 64, [n] * 64, 66),
        )
    rows.add("prefill 4 x 2048", lambda: timed({}, whole, [2048] * 4, [2048] * 4))
    rows.add("prefill 512 after 7680, kept", lambda: timed(STREAM, whole, [512], [8192]))
    rows.add("decode 64 x 4096, gptj", lambda: timed({}, gptj, [1] * 64, [4096] * 64))
    rows.add("decode 8 x 8192", lambda: timed({}, whole, [1] * 8, [8192] * 8))
    rows.add("decode 64 x 4096, e4m3", lambda: timed(eight, whole, [1] * 64, [4096] * 64))
    rows.add("prefill 512 after 7680", lambda: timed({}, whole, [512], [8192]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", choices=("times", "errors"))
    given = parser.parse_args()
    gpu = given.device == "cuda"
    torch.manual_seed(0)
    rows = Rows(given.seconds)
    if gpu and given.only != "errors":
        add_times(rows)
    if given.only != "times":
        add_errors(rows, given.device)
    machine = torch.cuda.get_device_name() if gpu else "interpreter"
    rows.finish(given.out, {"machine": machine, "torch": torch.__version__})


if __name__ == "__main__":
    main()
