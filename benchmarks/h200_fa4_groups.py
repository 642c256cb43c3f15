"""Which rows does FLASH_ATTN_V4 get wrong where many query heads share a KV head?

    python benchmarks/h200_fa4_groups.py [--seconds 150]

Its varlen kernel over packed keys, called plainly, and the layer over pages, whose single tokens another
backend decodes; against float64, for lengths with and without a sequence that has no query. A line for
each: how many rows (token, head) are wrong, which, and who ran. Each way compiles for a few seconds.
"""

from __future__ import annotations

import argparse
import itertools
import time
import traceback

import torch
from polyattn import Attention, Batch, LayerGroup, LayerSpec, Role, select
from torch import Tensor

CHUNKS = [(0, 5), (3, 19), (16, 32), (5, 65), (1, 9), (29, 61)]
LENGTHS = {
    "chunks": CHUNKS,
    "none empty": CHUNKS[1:],
    "empty last": [*CHUNKS[1:], CHUNKS[0]],
    "one of 29": [(29, 61)],
    "one of 3": [(3, 19)],
    "two of 29": [(29, 61), (29, 61)],
    "two of 40": [(40, 61), (40, 40)],
    "one of 200": [(200, 300)],
}
HEADS = [(10, 2), (8, 2), (14, 2), (16, 2), (32, 2), (10, 1), (16, 1), (20, 4)]
ALLOWED = 0.015


def expected(
    query: Tensor, key: Tensor, value: Tensor, pairs: list[tuple[int, int]], causal: bool
) -> Tensor:
    """The rows in float64."""
    found, at, first = [], 0, 0
    for queries, length in pairs:
        q = query[at : at + queries].double()
        k, v = (t[first : first + length].double() for t in (key, value))
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        if causal:
            place = torch.arange(queries, device=q.device)[:, None] + length - queries
            hidden = torch.arange(length, device=q.device) > place
            scores = scores.masked_fill(hidden, float("-inf"))
        found.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        at, first = at + queries, first + length
    return torch.cat(found)


def inputs(heads: tuple[int, int], size: int, pairs: list[tuple[int, int]]) -> list[Tensor]:
    """Queries, and all keys and values, packed."""
    generator = torch.Generator("cuda").manual_seed(0)
    queries, keys = (sum(p[i] for p in pairs) for i in (0, 1))
    shapes = [(queries, heads[0], size), (keys, heads[1], size), (keys, heads[1], size)]
    return [
        torch.randn(*s, generator=generator, device="cuda").to(torch.bfloat16) for s in shapes
    ]  # fmt: skip


def by_the_kernel(
    tensors: list[Tensor], pairs: list[tuple[int, int]], causal: bool, out: Tensor
) -> str:
    """Call the library itself."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    starts, key_starts = (
        torch.tensor([0, *itertools.accumulate(p[i] for p in pairs)]).int().cuda() for i in (0, 1)
    )
    found, _ = flash_attn_varlen_func(
        *tensors, cu_seqlens_q=starts, cu_seqlens_k=key_starts,
        max_seqlen_q=max(q for q, _ in pairs), max_seqlen_k=max(n for _, n in pairs),
        causal=causal,
    )  # fmt: skip
    out.copy_(found)
    return "the kernel"


def by_the_layer(
    tensors: list[Tensor], pairs: list[tuple[int, int]], causal: bool, out: Tensor
) -> str:
    """Call a layer over pages of 16 whose unused slots hold NaN."""
    query, key, value = tensors
    spec = LayerSpec(
        num_heads=query.shape[1], num_kv_heads=key.shape[1], head_size=query.shape[2],
        dtype="bfloat16", causal=causal, role=Role.DECODER if causal else Role.CROSS, block_size=16,
    )  # fmt: skip
    selection = select(spec, "cuda", backend="prefill=FLASH_ATTN_V4", verify=False)
    layer = Attention(LayerGroup(selection))
    queries, lens = ([p[i] for p in pairs] for i in (0, 1))
    pages = [-(-n // 16) for n in lens]
    table = torch.zeros(len(lens), max(pages), dtype=torch.int32, device="cuda")
    cache = layer.group.allocate_cache(sum(pages) + 1)
    for half in (cache.key, cache.value):
        half.fill_(float("nan"))
    first = page = 0
    for row, length in enumerate(lens):
        table[row, : pages[row]] = torch.arange(page, page + pages[row], device="cuda")
        at = torch.arange(length, device="cuda")
        block = table[row, at // 16].long()
        cache.key[block, at % 16] = key[first : first + length]
        cache.value[block, at % 16] = value[first : first + length]
        first, page = first + length, page + pages[row]
    starts = [0, *itertools.accumulate(queries)]
    plan = layer.group.plan(Batch(starts, lens, table))
    layer(query, None, None, cache, plan, out=out)
    return " and ".join(f"{call.name} for {call.plan.batch.query_lens}" for call in plan.calls)


def wrong_rows(
    heads: tuple[int, int], size: int, pairs: list[tuple[int, int]], causal: bool, way: str
) -> str:
    """Run one way; return what is wrong in words."""
    tensors = inputs(heads, size, pairs)
    out = torch.full_like(tensors[0], 7.0)
    who = (by_the_kernel if way == "kernel" else by_the_layer)(tensors, pairs, causal, out)
    torch.cuda.synchronize()
    query, key, value = tensors
    wanted = expected(query, key, value, pairs, causal)
    off = ((out.double() - wanted).abs().amax(-1) / wanted.abs().max()).nan_to_num(9.0)
    bad = off > ALLOWED
    if not bool(bad.any()):
        return f"right ({float(off.max()):.4f}), {who}"
    untouched = (out == 7.0).all(-1)
    rows = [
        f"{int(t)}.{int(h)}{'-' if untouched[t, h] else ''}" for t, h in bad.nonzero()[:24].cpu()
    ]
    return (
        f"WRONG {int(bad.sum())} of {bad.numel()} rows by up to {float(off.max()):.3g}, "
        f"{int((bad & untouched).sum())} never written; token.head: {' '.join(rows)}; {who}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=150)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    tries = [
        (heads, size, name, causal, way)
        for way in ("layer", "kernel")
        for size in (64, 128)
        for heads in HEADS
        for causal in (True, False)
        for name in LENGTHS
    ]
    for heads, size, name, causal, way in tries:
        if time.monotonic() > end:
            print("the time is over")
            return
        label = f"{heads[0]}/{heads[1]} x {size}, {name}, {'causal' if causal else 'all'}, {way}"
        try:
            print(f"{label}: {wrong_rows(heads, size, LENGTHS[name], causal, way)}", flush=True)
        except Exception as error:
            traceback.print_exc(limit=3)
            print(f"{label}: FAILED {str(error)[-200:]!r}", flush=True)


if __name__ == "__main__":
    main()
