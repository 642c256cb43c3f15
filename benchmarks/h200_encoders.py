"""Encoders and cross-attention to keys that are given whole, on every backend that claims them.

    python benchmarks/h200_encoders.py [--seconds 120] [--backends FLASH_ATTN_V3 ...] [--small]

Images of one size, sentences of several, a decoder's tokens beside an encoder's keys; bf16. Rows of a few
tokens against float64, device time by CUDA events with a cold L2. `--small` runs tiny shapes on the CPU
(TORCH_SDPA), which isn't timed: a rehearsal.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from polyattn import Attention, Batch, LayerGroup, LayerSpec, Role, select
from polyattn.errors import SelectionError
from rows import Rows
from timing import kernel_us
from torch import Tensor

BACKENDS = (
    "FLASH_ATTN", "FLASH_ATTN_V3", "FLASH_ATTN_V4", "CUDNN_ATTENTION", "FLASHINFER", "TRITON_ATTN",
    "TORCH_SDPA",
)  # fmt: skip
IMAGES = LayerSpec(
    num_heads=16, head_size=64, role=Role.ENCODER_ONLY, cached=False, causal=False, dtype="bfloat16"
)
SENTENCES = IMAGES.replace(num_heads=12, num_kv_heads=12)
WIDE = IMAGES.replace(num_heads=16, num_kv_heads=16, head_size=80)
CROSS = LayerSpec(
    num_heads=20, head_size=64, role=Role.CROSS, cached=False, causal=False, dtype="bfloat16"
)
STEPS: dict[str, tuple[LayerSpec, list[tuple[int, int]]]] = {
    "64 images of 577": (IMAGES, [(577, 577)] * 64),
    "16 images of 1,025, heads of 80": (WIDE, [(1025, 1025)] * 16),
    "256 sentences of 8 to 263": (SENTENCES, [(8 + i, 8 + i) for i in range(256)]),
    "32 x 64 tokens to 1,500 keys": (CROSS, [(64, 1500)] * 32),
}


def small(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same kind of step, of a few tokens."""
    few = [(1 + q % 13, 1 + n % 29) for q, n in pairs[:3]]
    return [(a, a if q == n else b) for (a, b), (q, n) in zip(few, pairs, strict=False)]


def rows_in_float64(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention of few queries (tokens, heads, size) to all keys."""
    q, k, v = query.double(), key.double(), value.double()
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    weights = (torch.einsum("qhd,khd->hqk", q, k) * scale).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def measure(
    spec: LayerSpec, pairs: list[tuple[int, int]], backend: str, device: str
) -> dict[str, Any]:
    try:
        layer = Attention(LayerGroup(select(spec, device, backend=backend, verify=False)))
    except SelectionError as error:
        return {"refused": " ".join(str(error).split())[:160]}
    queries, lens = ([p[i] for p in pairs] for i in (0, 1))
    batch = Batch.from_lens(queries, lens, device=device)
    generator = torch.Generator(device).manual_seed(0)

    def randn(tokens: int, heads: int) -> Tensor:
        found = torch.randn(tokens, heads, spec.head_size, generator=generator, device=device)
        return found.to(torch.bfloat16)

    query = randn(sum(queries), spec.num_heads)
    key, value = (randn(sum(lens), spec.num_kv_heads) for _ in range(2))
    out = torch.empty_like(query)
    plan = layer.group.plan(batch)

    def call() -> Tensor:
        found: Tensor = layer(query, key, value, None, plan, out=out)
        return found

    call()
    worst = 0.0
    for index in (0, len(pairs) // 2, len(pairs) - 1):
        end, last = batch.starts[index + 1], sum(lens[: index + 1])
        some = slice(max(batch.starts[index], end - 4), end)
        keys = slice(last - lens[index], last)
        wanted = rows_in_float64(query[some], key[keys], value[keys], spec.scale)
        off = (out[some].double() - wanted).abs().max() / wanted.abs().max()
        worst = max(worst, float(off))
    us = kernel_us(call, 10) if device == "cuda" else 0.0
    return {"us": us, "error": worst, "right": worst < 1.5e-2}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--backends", nargs="+", default=BACKENDS)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    rows = Rows(options.seconds)
    device, backends = ("cpu", ["TORCH_SDPA"]) if options.small else ("cuda", options.backends)
    for name, (spec, pairs) in STEPS.items():
        for backend in backends:
            rows.add(
                f"{name}: {backend}",
                lambda s=spec, p=pairs, b=backend: measure(  # type: ignore[misc]
                    s, small(p) if options.small else p, b, device
                ),
            )
    print("wrong or failed:", rows.wrong() or "none")


if __name__ == "__main__":
    main()
