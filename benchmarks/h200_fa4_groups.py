"""Which rows does FlashAttention-4 get wrong where many query heads share a KV head?

    python benchmarks/h200_fa4_groups.py [--seconds 150]

Its varlen kernel over packed keys, called plainly, against float64: lengths with and without a
sequence that has no query, heads packed into rows or not, tiles of 128 rows instead of 192, causal and
not, one and two KV heads. A line for each: how many rows (token, head) are wrong, and which. Each
way compiles for a few seconds.
"""

from __future__ import annotations

import argparse
import itertools
import time
import traceback
from typing import Any

import torch
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
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "heads apart": {"pack_gqa": False},
    "tiles of 128": {"tile_mn": (128, 128)},
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


def wrong_rows(
    heads: tuple[int, int], size: int, pairs: list[tuple[int, int]], causal: bool, way: str
) -> str:
    """Run one way; return what is wrong in words."""
    from flash_attn.cute.interface import _flash_attn_fwd

    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> Tensor:
        found = torch.randn(*shape, generator=generator, device="cuda")
        return found.to(torch.bfloat16)

    queries, keys = (sum(p[i] for p in pairs) for i in (0, 1))
    query = randn(queries, heads[0], size)
    key, value = (randn(keys, heads[1], size) for _ in range(2))
    starts, key_starts = (
        torch.tensor([0, *itertools.accumulate(p[i] for p in pairs)]).int().cuda() for i in (0, 1)
    )
    out = torch.full_like(query, 7.0)
    _flash_attn_fwd(
        query, key, value, cu_seqlens_q=starts, cu_seqlens_k=key_starts,
        max_seqlen_q=max(q for q, _ in pairs), max_seqlen_k=max(n for _, n in pairs),
        causal=causal, out=out, **WAYS[way],
    )  # fmt: skip
    torch.cuda.synchronize()
    wanted = expected(query, key, value, pairs, causal)
    off = ((out.double() - wanted).abs().amax(-1) / wanted.abs().max()).nan_to_num(9.0)
    bad = off > ALLOWED
    if not bool(bad.any()):
        return f"right ({float(off.max()):.4f})"
    untouched = (out == 7.0).all(-1)
    rows = [
        f"{int(t)}.{int(h)}{'-' if untouched[t, h] else ''}" for t, h in bad.nonzero()[:24].cpu()
    ]
    return (
        f"WRONG {int(bad.sum())} of {bad.numel()} rows by up to {float(off.max()):.3g}, "
        f"{int((bad & untouched).sum())} never written; token.head: {' '.join(rows)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=150)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    first = [
        (h, 64, n, c, w) for h in HEADS[:2] for c in (True, False) for w in WAYS for n in LENGTHS
    ]
    rest = [(h, s, n, True, w) for h in HEADS[2:] for s in (64, 128) for w in WAYS for n in LENGTHS]
    for heads, size, name, causal, way in [*first, *rest]:
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
