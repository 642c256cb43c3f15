"""Variants of Hopper's own prefill: which are tried, and what is one launched with on a step?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

DEVICE = "cuda"
STEPS = {
    "1 x 8192": ([8192], [8192]),
    "4 x 2048": ([2048] * 4, [2048] * 4),
    "ragged 8192": ([3517, 412, 2703, 1560], [3517, 412, 2703, 1560]),
    "4 x 512 after 4096": ([512] * 4, [4608] * 4),
    "1 x 2048 after 30k": ([2048], [32768]),
}


@dataclass(frozen=True)
class Variant:
    """One compiled kernel; `page` 0: keys by token, not over pages."""

    name: str
    page: int = 16
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    window: int = 0
    block_m: int = 128
    block_n: int = 128
    stages: int = 2
    turns: bool = True
    queries: int = 2
    causal: bool = True
    way: str = "whole"  # or one program a tile ("many")
    at_once: int = 8
    dtype: str = "bfloat16"
    lse: bool = False
    steps: tuple[str, ...] = tuple(STEPS)


BASE = Variant("pages of 16")
VARIANTS = (
    BASE,
    replace(BASE, name="pages of 16, a program a tile, 2 heads", way="many", at_once=2),
    replace(BASE, name="pages of 16, a program a tile, 1 head", way="many", at_once=1),
    replace(BASE, name="pages of 16, no turns", turns=False),
    replace(BASE, name="pages of 16, 64 keys, 4 stages", block_n=64, stages=4),
    replace(BASE, name="pages of 64", page=64),
    replace(BASE, name="pages of 256", page=256),
    replace(BASE, name="packed", page=0),
    replace(BASE, name="packed, a program a tile, 2 heads", page=0, way="many", at_once=2),
    replace(BASE, name="28/4 heads, lse", heads=28, kv_heads=4, lse=True),
    replace(BASE, name="8/8 heads, fp16", heads=8, dtype="float16", steps=("1 x 8192",)),
    replace(BASE, name="size 64", size=64, stages=3),
    replace(BASE, name="size 64, no turns", size=64, stages=3, turns=False),
    replace(BASE, name="size 64, lse", size=64, stages=3, lse=True),
    replace(BASE, name="window 1024", window=1024),
    replace(BASE, name="window 1024, packed", window=1024, page=0),
    replace(BASE, name="window 100, lse", window=100, lse=True, steps=("1 x 8192",)),
    replace(BASE, name="size 256", size=256, block_n=64, heads=16, kv_heads=4, queries=1),
    replace(BASE, name="pages of 16, 3 stages, 1 query", stages=3, queries=1),
)


class Step:
    """Tensors of a step, and the tiles dealt out, the longest first."""

    def __init__(self, variant: Variant, queries: list[int], lens: list[int]):
        import torch

        dtype = getattr(torch, variant.dtype)
        self.variant, self.queries, self.lens = variant, queries, lens
        self.group, self.scale = variant.heads // variant.kv_heads, variant.size**-0.5
        shape = (sum(queries), variant.heads, variant.size)
        self.query = torch.randn(shape, device=DEVICE).to(dtype)
        self.out = torch.full_like(self.query, torch.nan)
        self.lse = torch.full(shape[:2], torch.nan, device=DEVICE)
        self.parts = torch.empty(1, device=DEVICE)  # no keys are cut here
        self.keys: list[Any] = []
        self.table, self.kept = self.stored(dtype)
        self.work = self.dealt()
        self.grid, self.args = self.launch()

    def run(self) -> None:
        """Launch the kernel."""
        from polyattn_triton.hopper.prefill import prefill_hopper_kernel

        prefill_hopper_kernel[self.grid](*self.args, num_warps=4)

    def stored(self, dtype: Any) -> tuple[Any, Any]:
        """Keys and values, over permuted pages or by token, NaN in every slot that nobody may read.

        Returns the table and both in one tensor (2, ...); `keys` holds each sequence's.
        """
        import torch

        v = self.variant
        page = v.page or 64
        blocks = [-(-n // page) for n in self.lens]
        order, rest = torch.randperm(sum(blocks) + 3), (v.kv_heads, v.size)
        table = torch.full((len(self.lens), max(blocks) + 2), 1 << 29, dtype=torch.int32)
        shape = (2, len(order), page) if v.page else (2, sum(self.lens) + 5)
        kept = torch.full((*shape, *rest), torch.nan, dtype=dtype, device=DEVICE)
        at = first = 0
        for index, (length, held) in enumerate(zip(self.lens, blocks, strict=True)):
            ids = order[first : first + held]
            first += held
            table[index, :held] = ids.int()
            fresh = torch.randn(2, length, *rest, device=DEVICE).to(dtype)
            if v.page:
                padded = fresh.new_full((2, held * page, *rest), torch.nan)
                padded[:, :length] = fresh
                kept[:, ids.to(DEVICE)] = padded.view(2, held, page, *rest)
            else:
                kept[:, at : at + length] = fresh
            self.keys.append((fresh[0], fresh[1]))
            at += length
        return table.to(DEVICE), kept

    def dealt(self) -> Any:
        """Return the tiles, the longest first, as a plan lists them: sequences, then first rows."""
        import numpy as np
        from polyattn import LayerSpec
        from polyattn_triton.schedule import key_tiles, rows_of

        v, q, n = self.variant, np.array(self.queries), np.array(self.lens)
        seq, row = rows_of(q, self.group, v.block_m)
        last = np.minimum(row + v.block_m, q[seq] * self.group) - 1
        context = (n - q)[seq]
        spec = LayerSpec(
            num_heads=v.heads, num_kv_heads=v.kv_heads, head_size=v.size, causal=v.causal,
            sliding_window=v.window or None,
        )  # fmt: skip
        seen = key_tiles(
            spec, context + row // self.group, context + last // self.group, n[seq], v.block_n
        )
        longest = np.argsort(-seen, kind="stable")
        return np.concatenate([seq[longest], row[longest]])

    def launch(self) -> tuple[tuple[int, int, int], tuple[Any, ...]]:
        """Return the kernel's grid and arguments."""
        import numpy as np
        import torch
        from polyattn_triton.functions.pointwise import NOTHING
        from polyattn_triton.hopper.descriptors import described

        v = self.variant
        box = min(v.page, v.block_n) if v.page else v.block_n
        key, value = described(self.kept[0], box), described(self.kept[1], box)
        assert key is not None and value is not None
        starts, key_starts = (np.cumsum([0, *counts]) for counts in (self.queries, self.lens))
        lens, starts, key_starts, work = (
            torch.from_numpy(np.asarray(a, np.int32)).to(DEVICE)
            for a in (self.lens, starts, key_starts, self.work)
        )
        tiles, programs = len(self.work) // 2, len(self.work) // 2 * v.kv_heads
        if v.way == "whole":
            facts = torch.cuda.get_device_properties(0)
            programs = min(facts.multi_processor_count, programs)
        at_once = v.at_once if v.kv_heads % v.at_once == 0 else v.kv_heads
        args = (
            self.query, self.out, self.lse, self.parts, self.parts, self.parts,
            self.table, lens, starts, key_starts, work, self.scale, 1.0,
            *self.query.stride()[:2], *key[1], *value[1], *self.out.stride()[:2], key[0], value[0],
            self.lse.stride(0), self.table.stride(0), tiles, at_once,
            self.group, v.kv_heads, v.size, v.block_m, v.block_n, v.page or 1, bool(v.page), v.causal,
            v.window, v.lse, False, v.stages, v.turns, v.queries, *NOTHING,
        )  # fmt: skip
        return (programs, 1, 1), args

    def flops(self) -> float:
        """Multiplications and additions of the two products, what the mask hides left out."""
        pairs = sum(
            q * (n - q) + q * (q + 1) / 2 for q, n in zip(self.queries, self.lens, strict=True)
        )
        return 4.0 * pairs * self.variant.heads * self.variant.size

    def error(self, rows: int) -> tuple[float, float]:
        """The worst error of up to `rows` tokens' heads a sequence, and the LSE's, in float64."""
        import torch

        self.out.fill_(torch.nan)
        self.lse.fill_(torch.nan)
        self.run()
        worst = worst_lse = 0.0
        token = 0
        for index, count in enumerate(self.queries):
            if not count:
                continue
            chosen = torch.cat([torch.randperm(count)[:rows], torch.tensor([0, count - 1])])
            for part in torch.unique(chosen).to(DEVICE).split(16):
                wanted, lse = self.reference(index, token, part)
                got = self.out[token + part].double()
                off = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-30)
                worst = max(worst, float(off.nan_to_num(nan=9e9).max()))
                if self.variant.lse:
                    got = self.lse[token + part].double()
                    off = torch.where(got == lse, 0.0, (got - lse).abs())
                    worst_lse = max(worst_lse, float(off.nan_to_num(nan=9e9).max()))
            token += count
        if not bool(torch.isfinite(self.out).all()):
            worst = 9e9
        return worst, worst_lse

    def reference(self, index: int, token: int, part: Any) -> tuple[Any, Any]:
        """Outputs and LSE of a sequence's tokens `part`, the first of which is `token`, in float64.

        A token that sees no key has zeros, and an LSE of minus infinity.
        """
        import torch

        (key, value), count, length = self.keys[index], self.queries[index], self.lens[index]
        query = self.query[token + part].double().unflatten(1, (-1, self.group))
        scores = torch.einsum("thgd,khd->thgk", query, key.double()) * self.scale
        place = torch.arange(length, device=DEVICE) - (length - count + part)[:, None]
        hidden = (place > 0) & self.variant.causal
        if self.variant.window:
            hidden |= place <= -self.variant.window
        scores.masked_fill_(hidden[:, None, None], -torch.inf)
        out = torch.einsum("thgk,khd->thgd", scores.softmax(-1).nan_to_num(0.0), value.double())
        return out.flatten(1, 2), scores.logsumexp(-1).flatten(1, 2)
