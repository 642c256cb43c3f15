"""The step behind all wrappers, with its masks, over pages or whole keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from polyattn import Batch, CustomMask, KVCache, PolyattnError
from polyattn.host import (
    CallOptions,
    RotaryTables,
    alibi_slopes,
    flash_window,
    group_for_call,
    refuse,
    run_plan,
    untraced,
    values_of,
)
from torch import Tensor

LOG2E = math.log2(math.e)
"""FlashInfer's LSE is to base 2."""
Result = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Scores:
    """A plan's options for scores. All but `mask` are FlashInfer's arguments.

    `mask`: bool (total,), the sequences' masks one after another, row by row.
    """

    causal: bool = False
    pos_encoding_mode: str = "NONE"
    window_left: int = -1
    logits_soft_cap: float | None = None
    sm_scale: float | None = None
    rope_scale: float | None = None
    rope_theta: float | None = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        modes = ("NONE", "ALIBI", "ROPE_LLAMA")
        if self.pos_encoding_mode not in modes:
            raise PolyattnError(
                f"pos_encoding_mode={self.pos_encoding_mode!r} is unknown; it is one of "
                f"{', '.join(modes)}"
            )
        if self.pos_encoding_mode == "ALIBI" and self.logits_soft_cap:
            raise PolyattnError(
                f"logits_soft_cap={self.logits_soft_cap} with pos_encoding_mode='ALIBI': FlashInfer caps "
                "scores with their bias, scaled twice; leave one out"
            )

    def options(
        self, size: int, window_left: int | None, scale: float, needs_lse: bool
    ) -> CallOptions:
        """Return a call's options. `scale` multiplies the scores' own, for heads of `size`."""
        left = self.window_left if window_left is None else window_left
        causal, before, after = flash_window(self.causal and self.mask is None, left, -1)
        own = 1 / math.sqrt(size) if self.sm_scale is None else float(self.sm_scale)
        cap = self.logits_soft_cap or None
        return CallOptions(causal, own * scale, before, after, cap, needs_lse=needs_lse)

    def rotated(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return tokens (tokens, heads, size) as ROPE_LLAMA's kernels rotate them on the fly."""
        size = tokens.shape[2]
        steps = torch.arange(0, size, 2, dtype=torch.float64, device=tokens.device) / size
        turns = (self.rope_theta or 1e4) ** -steps / (self.rope_scale or 1.0)
        angles = (positions[:, None] * turns).float()
        every = torch.arange(len(tokens), device=tokens.device)
        return RotaryTables(angles.cos(), angles.sin(), "neox").applied(tokens, every)


class Step:
    """The sequences of a plan, and the groups that serve them over pages or whole keys.

    `table`: int32 (num_seqs, columns) of pages; None: keys come whole.
    """

    def __init__(
        self,
        query_lens: Sequence[int],
        lens: Sequence[int],
        scores: Scores,
        device: torch.device,
        table: Tensor | None = None,
    ):
        self.query_lens, self.lens, self.scores = list(query_lens), list(lens), scores
        self.device, self.table = device, table

    @property
    def _mask(self) -> CustomMask | None:
        mask = self.scores.mask
        return None if mask is None else CustomMask(mask.to(self.device), over="all")

    def _batch(self, table: Tensor | None) -> Batch:
        starts = [0, *accumulate(self.query_lens)]
        return Batch(starts, self.lens, table, mask=self._mask, device=self.device)

    @cached_property
    def paged(self) -> Batch:
        """The step over pages."""
        return self._batch(self.table)

    @cached_property
    def whole(self) -> Batch:
        """The step over keys that are passed whole."""
        return self._batch(None)

    @untraced
    def attend(
        self,
        query: Tensor,
        keys: KVCache | tuple[Tensor, Tensor],
        *,
        window_left: int | None = None,
        scale: float = 1.0,
        sinks: Tensor | None = None,
        needs_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend for (tokens, heads, size). The LSE is to base 2, (tokens, heads)."""
        if query.dim() != 3 or query.shape[0] != sum(self.query_lens):
            raise PolyattnError(
                f"q is {tuple(query.shape)}; the plan is for {sum(self.query_lens)} tokens: "
                "(tokens, heads, size)"
            )
        scores, more = self.scores, dict[str, Any]()
        if sinks is not None and scores.pos_encoding_mode == "ALIBI":
            raise PolyattnError(
                "sinks with pos_encoding_mode='ALIBI': FlashInfer counts each step's queries from 0, "
                "which weighs a sink otherwise after a context; leave one out"
            )
        options = scores.options(query.shape[2], window_left, scale, needs_lse)
        if scores.mask is not None:
            more["mask"] = "custom"
        rotates = scores.pos_encoding_mode == "ROPE_LLAMA"
        short = options.causal and any(map(int.__lt__, self.lens, self.query_lens))
        if isinstance(keys, KVCache) and (rotates or short):
            keys = self._gathered(keys)
        if rotates:
            assert isinstance(keys, tuple)
            query = scores.rotated(query, self._positions(self.query_lens))
            keys = scores.rotated(keys[0], self._positions(self.lens)), keys[1]
        params: dict[str, Any] = {"sinks": None if sinks is None else sinks.float()}
        own = sinks is not None, scores.pos_encoding_mode == "ALIBI"
        if isinstance(keys, KVCache):
            form = keys.format
            if keys.key.dtype != query.dtype:
                more["kv_cache_dtype"] = form.dtype
            group = group_for_call(
                query, form.num_kv_heads, form.v_head_size, options, *own,
                block_size=form.block_size, layout=form.layout, **more,
            )  # fmt: skip
            group.check_format(form)
            out, lse = run_plan(group.plan_for(self.paged), query, None, None, keys, **params)
        else:
            heads, size = keys[1].shape[1:]
            group = group_for_call(query, heads, size, options, *own, cached=False, **more)
            out, lse = run_plan(group.plan_for(self.whole), query, *keys, **params)
        if lse is not None and scores.pos_encoding_mode == "ALIBI":
            lse += self._alibi_offset(query.shape[1])
        return out, None if lse is None else lse.mul_(LOG2E)

    def _alibi_offset(self, heads: int) -> Tensor:
        """Return what FlashInfer's LSE has more under ALiBi: its queries' positions count from 0."""
        before = [n - count for n, count in zip(self.lens, self.query_lens, strict=True)]
        each, counts = (torch.tensor(each, device="cpu") for each in (before, self.query_lens))
        offsets = each.repeat_interleave(counts)[:, None] * alibi_slopes(heads)
        return offsets.to(self.device)

    def _positions(self, counts: Sequence[int]) -> Tensor:
        """Return the positions of each sequence's last tokens, int64 (tokens,)."""
        rows = [
            torch.arange(n - count, n, device="cpu")
            for n, count in zip(self.lens, counts, strict=True)
        ]
        return torch.cat([torch.zeros(0, dtype=torch.int64, device="cpu"), *rows]).to(self.device)

    def _gathered(self, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Return keys and values out of their pages, sequences one after another."""
        assert self.table is not None
        places = self.table.long()[:, :, None] * cache.block_size
        places = (places + torch.arange(cache.block_size, device=self.device)).flatten(1)
        lens = torch.tensor(self.lens, device=self.device)
        at = places[torch.arange(places.shape[1], device=self.device) < lens[:, None]]
        block, offset = at // cache.block_size, at % cache.block_size
        return cache.key[block, offset], cache.value[block, offset]


def offsets_of(indptr: Tensor | Sequence[int]) -> Sequence[int]:
    """Return the offsets of an `indptr` on the host."""
    return values_of(indptr) if isinstance(indptr, Tensor) else indptr


def differences(offsets: Sequence[int]) -> list[int]:
    """Return the lengths between offsets."""
    return [after - before for before, after in pairwise(offsets)]


def token_counts(name: str, indptr: Tensor | Sequence[int]) -> list[int]:
    """Return each sequence's tokens. Raises `PolyattnError` unless the first is the tensor's first."""
    offsets = offsets_of(indptr)
    if len(offsets) and offsets[0]:
        raise PolyattnError(
            f"{name} begins with {offsets[0]}; it must begin with 0: pass the tokens from there on, and "
            f"{name} - {name}[0]"
        )
    return differences(offsets)


def block_table(
    offsets: Sequence[int], counts: Sequence[int], indices: Tensor, device: torch.device
) -> Tensor:
    """Return pages as int32 (num_seqs, columns); row i has `counts[i]` of them.

    `offsets` are those of the pages' `indptr`. Raises `PolyattnError` where `indices` end before them.
    """
    first, total = offsets[0] if len(offsets) else 0, sum(counts)
    if first + total > len(indices):
        raise PolyattnError(
            f"the indptr of pages ends with {first + total}, but there are {len(indices)} indices"
        )
    width = max(counts, default=0)
    column = torch.arange(width, device=device)
    used = column < torch.tensor(counts, device=device)[:, None]
    table = torch.zeros(len(counts), width, dtype=torch.int32, device=device)
    table[used] = indices[first : first + total].to(device, torch.int32)
    return table


def unpacked(
    packed: Tensor | None, mask: Tensor | None, query_lens: Sequence[int], lens: Sequence[int]
) -> Tensor | None:
    """Return the sequences' masks as booleans; `packed` has each one's bits from a byte's lowest on."""
    if packed is None or mask is not None:
        return None if mask is None else mask.flatten() != 0
    bits = packed.to(torch.uint8)[:, None] >> torch.arange(8, device=packed.device) & 1
    counts = [count * keys for count, keys in zip(query_lens, lens, strict=True)]
    firsts = accumulate((-(-count // 8) * 8 for count in counts), initial=0)
    flat = bits.flatten() != 0
    parts = [flat[first : first + count] for first, count in zip(firsts, counts, strict=False)]
    return torch.cat(parts) if parts else flat


def pages(cache: Any, layout: str) -> KVCache:
    """View FlashInfer's paged cache: a tuple of K and V, or one tensor with K and V second."""
    key, value = cache if isinstance(cache, tuple | list) else cache.unbind(1)
    if layout == "HND":
        key, value = key.transpose(1, 2), value.transpose(1, 2)
    return KVCache(key, value)


def checked_layout(layout: str) -> str:
    """Return a layout's name. Raises `PolyattnError`."""
    if layout not in ("NHD", "HND"):
        raise PolyattnError(f"kv_layout={layout!r} is unknown; it is NHD or HND")
    return layout


def plain_dtype(name: str, dtype: Any) -> torch.dtype | None:
    """Return a dtype that an argument names, torch's or a word."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    result = getattr(torch, str(dtype), None)
    if not isinstance(result, torch.dtype):
        raise PolyattnError(f"{name}={dtype!r} is no dtype of torch")
    return result


def product(**scales: float | Tensor | None) -> float:
    """Return the product of scales, None for 1. Raises `PolyattnError` for scales of several heads."""
    total = 1.0
    for name, scale in scales.items():
        if isinstance(scale, Tensor) and scale.numel() > 1:
            refuse("scales of each head aren't served; pass one number", **{name: scale})
        total *= 1.0 if scale is None else float(scale)
    return total


def result(
    out: Tensor,
    lse: Tensor | None,
    to: Tensor | None,
    lse_to: Tensor | None,
    v_scale: float | Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Result:
    """Return an output, and its LSE if there is one, in the caller's tensors where it passed any."""
    if (by := product(v_scale=v_scale)) != 1:
        out = out * by
    if to is not None and to.shape != out.shape:
        raise PolyattnError(f"out is {tuple(to.shape)}; it must be {tuple(out.shape)}")
    out = out.to(dtype or out.dtype) if to is None else to.copy_(out)
    if lse is None:
        return out
    return out, lse if lse_to is None else lse_to.copy_(lse)
