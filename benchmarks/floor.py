"""How fast can this GPU merely read? The least time of any decode over as many bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from timing import graph_us, kernel_us


@triton.jit
def read_kernel(X, OUT, EACH, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Add up `EACH` tiles of a program's own."""
    program = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.range(0, EACH, num_stages=STAGES):
        at = (program * EACH + i) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(X + at).to(tl.float32)
    tl.store(OUT + program, tl.sum(total, 0))


def read_us(count: int) -> dict[str, float]:
    """Return the least microseconds to read `count` bytes once: L2 cold, and in a graph."""
    x = torch.zeros(count // 2, dtype=torch.bfloat16, device="cuda")
    out = torch.zeros(4096, device="cuda")
    best = None
    for programs in (512, 1024, 2048, 4096):
        for block, stages, warps in ((4096, 2, 4), (8192, 2, 8), (8192, 4, 8), (16384, 2, 8)):
            each = x.numel() // programs // block

            def call(p: int = programs, n: int = each, b: int = block, s: int = stages,
                     w: int = warps) -> None:  # fmt: skip
                read_kernel[(p,)](x, out, n, b, s, num_warps=w)

            if each:
                us = kernel_us(call, repeats=7)
                best = min(best or (us, call), (us, call), key=lambda found: found[0])
    assert best is not None
    return {"us": best[0], "graph_us": graph_us(best[1])}
