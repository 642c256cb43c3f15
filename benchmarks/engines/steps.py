"""A step of nano-vllm's attention beside FlashAttention-3: decodes in a graph, prefills with planning."""

from __future__ import annotations

import time
from itertools import accumulate
from statistics import median
from typing import Any

import torch

from engines import fa3


@torch.inference_mode()
def decode_times(layers: int = 28) -> list[dict[str, Any]]:
    """What the decodes of one step take in a captured graph, Qwen3-0.6B's heads.

    Lengths near 800, and as uneven as nano-vllm's benchmark has them late: 100 to 2,048.
    Each side's 28 calls over caches of their own, pages of 256, tables as wide as nano-vllm's.
    """
    from polyattn_flash_attn import flash_attn_2

    from engines import Captured

    sides = {"polyattn": flash_attn_2, "FlashAttention-3": fa3.load()}
    heads, kv_heads, size, width, found = 16, 8, 128, 16, []
    even, uneven = (400, 1200), (100, 2048)
    for rows, (least, most) in (
        (1, even), (8, even), (64, even), (256, even), (64, uneven), (256, uneven),
    ):  # fmt: skip
        pages = -(-most // 256)
        lens = torch.randint(least, most, (rows,), dtype=torch.int32, device="cuda")
        table = torch.randperm(rows * pages, device="cuda").int().view(rows, pages)
        table = torch.nn.functional.pad(table, (0, width - pages))
        caches = torch.randn(
            2, layers if rows < 256 else 7, rows * pages, 256, kv_heads, size, device="cuda",
            dtype=torch.bfloat16,
        )  # fmt: skip
        query = torch.randn(rows, 1, heads, size, device="cuda", dtype=torch.bfloat16)
        row: dict[str, Any] = {"what": f"{rows} rows of {least} to {most}"}
        for who, functions in sides.items():

            def step(functions: Any = functions) -> torch.Tensor:
                for layer in range(layers):
                    at = layer % caches.shape[1]  # noqa: B023
                    out: torch.Tensor = functions.flash_attn_with_kvcache(
                        query, caches[0, at], caches[1, at], cache_seqlens=lens,  # noqa: B023
                        block_table=table, causal=True,  # noqa: B023
                    )  # fmt: skip
                return out

            graph = Captured(step)
            row[f"{who} us a layer"] = min(_graph_us(graph) for _ in range(5)) / layers
        found.append(
            row | {"ratio": row["FlashAttention-3 us a layer"] / row["polyattn us a layer"]}
        )
    return found


@torch.inference_mode()
def prefill_times(layers: int = 28, steps: int = 6, tokens: int = 16384) -> list[dict[str, Any]]:
    """What a prefill step's attention takes, host and device together, each step of other lengths.

    Of whole prompts, and of prompts whose first 256 tokens the cache holds (over pages, as nano-vllm
    goes on with a prompt); `of known lengths`: each step again, so that nothing is planned.
    """
    from polyattn_flash_attn import flash_attn_2

    sides = {"polyattn": flash_attn_2}
    if torch.cuda.is_available():
        sides["FlashAttention-3"] = fa3.load()
    heads, kv_heads, size, found = 16, 8, 128, []
    for paged in (False, True):
        row: dict[str, Any] = {"what": "pages" if paged else "whole prompts"}
        for who, functions in sides.items():
            given = [
                _prefill_step(seed, tokens, paged, heads, kv_heads, size) for seed in range(steps)
            ]
            for turn in ("compiling", "", " of known lengths"):
                spent = []
                for call in (
                    given if turn else [_prefill_step(99, tokens, paged, heads, kv_heads, size)]
                ):
                    _wait()
                    start = time.perf_counter()
                    for _ in range(layers):
                        functions.flash_attn_varlen_func(**call)
                    _wait()
                    spent.append(time.perf_counter() - start)
                row[f"{who} ms a step{turn}"] = median(spent) * 1e3
            del row[f"{who} ms a stepcompiling"]
        if len(sides) == 2:
            row["ratio"] = row["FlashAttention-3 ms a step"] / row["polyattn ms a step"]
        found.append(row)
    return found


def _prefill_step(
    seed: int, tokens: int, paged: bool, heads: int, kv_heads: int, size: int
) -> dict[str, Any]:
    """Return what nano-vllm calls `flash_attn_varlen_func` with, prompts of 100 to 1,024 tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw, lens = torch.Generator().manual_seed(seed), list[int]()
    while sum(lens) < tokens:
        lens.append(min(int(torch.randint(100, 1025, (), generator=draw)), tokens - sum(lens)))
    held = 256 if paged else 0
    starts = [0, *accumulate(lens)]
    with torch.inference_mode(False):  # as nano-vllm makes them, outside of its model's run
        cu = torch.tensor(starts, dtype=torch.int32).to(device)
        cu_k = torch.tensor([at + held * i for i, at in enumerate(starts)], dtype=torch.int32)
        cu_k = cu_k.to(device)
        table = torch.arange(len(lens) * 5, dtype=torch.int32, device=device).view(-1, 5)

    def filled(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, size, device=device, dtype=torch.bfloat16)

    where = (len(lens) * 5, 256, kv_heads) if paged else (tokens, kv_heads)
    return {
        "q": filled(tokens, heads), "k": filled(*where), "v": filled(*where), "cu_seqlens_q": cu,
        "cu_seqlens_k": cu_k, "max_seqlen_q": max(lens), "max_seqlen_k": max(lens) + held,
        "softmax_scale": size**-0.5, "causal": True, "block_table": table if paged else None,
    }  # fmt: skip


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _graph_us(graph: Any, replays: int = 10) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / replays * 1e3
