"""Which way is FlashInfer's XQA right over 8-bit keys on Hopper?

    python benchmarks/h200_xqa.py [--seconds 200]

For each head size and group: an e4m3 cache whose unused slots hold zeros, ordinary numbers or NaN, read
by the kernel that FlashInfer chooses on Hopper and by its general one; scales of one and others; a
window; sinks. Each against float64, timed at 64 x 4,096 where it is right. The modules are compiled
for a minute each, several at once.
"""

from __future__ import annotations

import argparse
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from timing import kernel_us
from torch import Tensor

LENS = [1, 5, 16, 17, 63, 64, 65, 200, 1000, 4096]
SHAPES = [(8, 2, 128, 16), (32, 4, 128, 32), (16, 16, 64, 64), (8, 4, 256, 16), (40, 8, 128, 16)]
KERNELS = {"Hopper's": True, "general": False}
UNUSED = {"zeros": 0.0, "numbers": 1.0, "NaN": float("nan")}
OTHERS = {
    "scales": {"k_scale": 0.5, "v_scale": 0.25},
    "equal scales": {"k_scale": 0.25, "v_scale": 0.25},
    "window": {"window": 48},
    "sinks": {"sinks": True},
    "float16": {"kind": torch.float16},
    "interleaved": {"interleaved": True},
}


class Problem:
    """Decodes over an e4m3 cache, and their result in float64."""

    def __init__(
        self, shape: tuple[int, int, int, int], lens: list[int], unused: float,
        k_scale: float = 1.0, v_scale: float = 1.0, window: int = 0, sinks: bool = False,
        kind: torch.dtype = torch.bfloat16, interleaved: bool = False,
    ):  # fmt: skip
        self.heads, self.kv_heads, self.size, self.block = shape
        self.lens, self.window = lens, window
        self.k_scale, self.v_scale = k_scale, v_scale
        generator = torch.Generator("cuda").manual_seed(1)

        def randn(*dims: int) -> Tensor:
            return torch.randn(*dims, generator=generator, device="cuda")

        columns = max(-(-n // self.block) for n in lens)
        pages = len(lens) * columns
        self.table = torch.randperm(pages, device="cuda", generator=generator)
        self.table = self.table.int().view(len(lens), columns)
        self.seq_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
        self.query = randn(len(lens), self.heads, self.size).to(kind)
        self.sinks = randn(self.heads) if sinks else None
        whole = torch.full(
            (pages, 2, self.block, self.kv_heads, self.size), unused, device="cuda"
        ).to(torch.float8_e4m3fn)
        if unused == 1.0:
            whole = randn(*whole.shape).to(torch.float8_e4m3fn)
        raw = whole.view(torch.uint8)
        for row, length in enumerate(lens):
            at = torch.arange(length, device="cuda")
            page = self.table[row, at // self.block].long()
            for half, scale in ((0, k_scale), (1, v_scale)):
                values = (randn(length, self.kv_heads, self.size) / scale).to(torch.float8_e4m3fn)
                raw[page, half, at % self.block] = values.view(torch.uint8)
        self.key, self.value = raw.view(torch.float8_e4m3fn).unbind(1)
        if not interleaved:
            self.key, self.value = (
                t.view(torch.uint8).contiguous().view(t.dtype) for t in (self.key, self.value)
            )

    def expected(self, rows: list[int]) -> Tensor:
        """Rows in float64."""
        found = []
        for row in rows:
            length = self.lens[row]
            at = torch.arange(length, device="cuda")
            page = self.table[row, at // self.block].long()
            q = self.query[row].double()
            k, v = (t.view(torch.uint8)[page, at % self.block].view(t.dtype).double() * s
                    for t, s in ((self.key, self.k_scale), (self.value, self.v_scale)))  # fmt: skip
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
            scores = torch.einsum("hd,khd->hk", q, k) * self.size**-0.5
            if self.window:
                scores = scores.masked_fill(at < length - self.window, float("-inf"))
            top = scores.amax(-1, keepdim=True)
            weights = (scores - top).exp()
            total = weights.sum(-1, keepdim=True)
            if self.sinks is not None:
                total = total + (self.sinks.double()[:, None] - top).exp()
            found.append(torch.einsum("hk,khd->hd", weights / total, v))
        return torch.stack(found)


def module(shape: tuple[int, int, int, int], kind: torch.dtype, window: bool) -> Any:
    from flashinfer.xqa import get_xqa_module

    heads, kv_heads, size, block = shape
    return get_xqa_module(
        kind, torch.float8_e4m3fn, block, size, heads // kv_heads, window, kind, 1
    )


WORK: dict[str, Tensor] = {}


def call(problem: Problem, hopper: bool, out: Tensor) -> Any:
    """What launches the kernel."""
    if not WORK:
        WORK["semaphores"] = torch.zeros(8 << 20, dtype=torch.uint8, device="cuda")
        WORK["scratch"] = torch.zeros(248 << 20, dtype=torch.uint8, device="cuda")
    p = problem
    shape = (p.heads, p.kv_heads, p.size, p.block)
    made = module(shape, p.query.dtype, p.window > 0)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    # The kernel multiplies logits by `q_scale * kv_scale / sqrt(size)`, outputs by `kv_scale`.
    q_scale, kv_scale = p.k_scale / p.v_scale, p.v_scale
    sinks = None if p.sinks is None else p.sinks.view(p.kv_heads, -1)
    return lambda: made.xqa(
        hopper, sms, p.kv_heads, p.window, q_scale, out.unsqueeze(1), 1.0,
        p.query.unsqueeze(1), sinks, p.key, p.value, None, None, p.table,
        p.table.shape[1] * p.block, p.seq_lens.unsqueeze(1), len(p.lens), kv_scale,
        WORK["semaphores"], WORK["scratch"], True, 1, None,
    )  # fmt: skip


def tried(shape: tuple[int, int, int, int], kernel: str, unused: str, **other: Any) -> str:
    problem = Problem(shape, LENS, UNUSED[unused], **other)
    out = torch.full_like(problem.query, 7.0)
    call(problem, KERNELS[kernel], out)()
    torch.cuda.synchronize()
    wanted = problem.expected(list(range(len(LENS))))
    off = (out.double() - wanted).abs().amax((1, 2)) / wanted.abs().amax((1, 2))
    if bool((off < 0.06).all()):
        return f"right ({float(off.max()):.4f})"
    said = " ".join(f"{n}:{float(o):.2g}" for n, o in zip(LENS, off, strict=True) if not o < 0.06)
    return f"WRONG at lengths {said}"


def timed(kernel: str) -> str:
    problem = Problem((32, 8, 128, 16), [4096] * 64, 0.0)
    out = torch.empty_like(problem.query)
    launch = call(problem, KERNELS[kernel], out)
    launch()
    wanted = problem.expected([0, 63])
    off = float((out[[0, 63]].double() - wanted).abs().max() / wanted.abs().max())
    return f"{kernel_us(launch, 20):.1f} us, error {off:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=200)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    kind = torch.bfloat16
    wanted = [(SHAPES[0], kind, False), (SHAPES[0], kind, True), (SHAPES[0], torch.float16, False),
              ((32, 8, 128, 16), kind, False), *((s, kind, False) for s in SHAPES[1:])]  # fmt: skip

    def build(given: tuple[Any, ...]) -> None:
        try:
            module(*given)
        except Exception as error:
            print(f"{given}: NOT BUILT {str(error)[-1200:]}", flush=True)

    started = time.monotonic()
    with ThreadPoolExecutor(len(wanted)) as pool:
        list(pool.map(build, wanted))
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    tries: list[tuple[str, Any]] = []
    for shape in SHAPES:
        for kernel in KERNELS:
            for unused in UNUSED:
                name = f"{shape}, {kernel}, unused slots of {unused}"
                tries.append((name, lambda s=shape, k=kernel, u=unused: tried(s, k, u)))
        if shape == SHAPES[0]:
            for name, other in OTHERS.items():
                for kernel in KERNELS:
                    tries.append((
                        f"{shape}, {kernel}, {name}",
                        lambda s=shape, k=kernel, o=other: tried(s, k, "zeros", **o),
                    ))  # fmt: skip
            for kernel in KERNELS:
                tries.append((f"64 x 4096, 32/8 x 128, {kernel}", lambda k=kernel: timed(k)))
    for name, run in tries:
        if time.monotonic() > end:
            print("the time is over")
            return
        try:
            print(f"{name}: {run()}", flush=True)
        except Exception as error:
            traceback.print_exc(limit=3)
            print(f"{name}: FAILED {str(error)[-300:]!r}", flush=True)


if __name__ == "__main__":
    main()
