"""What does a call cost the host? Each way into polyattn over `scaled_dot_product_attention`.

    python benchmarks/bridges.py

Tiny tensors, one thread, CPU time (so that what else runs on the machine counts less), the least of many
rounds. `nothing` replaces the kernel by one that returns at once: what is left is polyattn's own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import polyattn
import polyattn_flash_attn.flash_attn_2 as fa
import polyattn_transformers  # noqa: F401  (registers the name)
import torch
from polyattn.calls.memo import memo
from polyattn.calls.plans import plan_lengths
from polyattn.registry.info import load_object
from polyattn_diffusers.backend import attention as diffusers_attention
from polyattn_torch import SdpaMode
from polyattn_torch import scaled_dot_product_attention as served_sdpa
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ROUNDS, CALLS = 60, 100
HEADS, SIZE, TOKENS = 4, 16, 4


def least_us(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the least CPU time of each call, in microseconds, over rounds of many, taken in turn."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.process_time()
            for _ in range(CALLS):
                call()
            best[name] = min(best[name], time.process_time() - start)
    return {name: seconds / CALLS * 1e6 for name, seconds in best.items()}


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    """Make the kernel that serves these calls return at once."""
    spec = polyattn.LayerSpec(num_heads=HEADS, head_size=SIZE, dtype="float32", cached=False)
    backend: Any = polyattn.select(spec).backend("prefill")
    kernel: Any = load_object(backend.path)
    run, addressed = kernel.run, kernel.addressed
    kernel.run = lambda *args: None
    kernel.addressed = lambda *args: lambda *given: None
    memo.clear()  # what holds the kernel's methods
    try:
        yield
    finally:
        kernel.run, kernel.addressed = run, addressed
        memo.clear()


def ways(rows: int) -> dict[str, Callable[[], object]]:
    """Return each way of calling for `rows` sequences."""

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape)

    q, k, v = (tensor(rows, HEADS, TOKENS, SIZE) for _ in range(3))
    qs, ks, vs = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    flat = [t.flatten(0, 1) for t in (qs, ks, vs)]
    layer = polyattn.Attention(
        polyattn.LayerSpec(num_heads=HEADS, head_size=SIZE, dtype="float32", cached=False)
    )
    plan = plan_lengths(layer.group, (TOKENS,) * rows, (TOKENS,) * rows)
    attend = AttentionInterface()["polyattn"]
    module = Module().eval()
    cu = torch.arange(rows + 1, dtype=torch.int32) * TOKENS
    mode = SdpaMode()

    def inside() -> Tensor:
        with mode:
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return {
        "Attention(plan)": lambda: layer(*flat, None, plan),
        "polyattn.attention": lambda: polyattn.attention(qs, ks, vs, causal=True),
        "transformers": lambda: attend(module, q, k, v, None, is_causal=True),
        "diffusers": lambda: diffusers_attention(qs, ks, vs, is_causal=True),
        "torch, the function": lambda: served_sdpa(q, k, v, is_causal=True),
        "torch, the mode": inside,
        "flash_attn_func": lambda: fa.flash_attn_func(qs, ks, vs, causal=True),
        "flash_attn_varlen_func": lambda: fa.flash_attn_varlen_func(
            *flat, cu, cu, TOKENS, TOKENS, causal=True
        ),
    }


@torch.no_grad()
def main() -> None:
    """Print a table: each way over torch's own function, and with a kernel that does nothing."""
    torch.set_num_threads(1)
    print("| sequences | way | us | over torch's | doing nothing, us | over torch's |")
    print("| --- | --- | --- | --- | --- | --- |")
    for rows in (1, 8):
        q, k, v = (torch.randn(rows, HEADS, TOKENS, SIZE) for _ in range(3))

        def torchs() -> Tensor:
            return scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: B023

        calls = {"scaled_dot_product_attention": torchs} | ways(rows)
        whole = least_us(calls)
        with nothing():
            own = least_us({"scaled_dot_product_attention": torchs} | ways(rows))
        base, base_own = (found["scaled_dot_product_attention"] for found in (whole, own))
        for name in calls:
            print(
                f"| {rows} | {name} | {whole[name]:.1f} | {whole[name] / base:.2f} | {own[name]:.1f} | "
                f"{own[name] / base_own:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
