"""Builds the metadata of one step of Unified Attention, on the host, from lengths and a block table.

Every key of every sequence belongs to exactly one part. A sequence of one query token takes all its
keys, its own included, from the cache. So a step of decodes has no causal part, and in a mixed step
the causal part leaves that token's key out, so that it counts once. A longer query takes the step's
own keys from the causal part if they are at hand, and its context from the cache. A layer without a
cache has all of its keys in the causal part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from polyattn.kernel import KeyRanges, LayerSpec, key_ranges
from torch import Tensor

from polyattn_hpu.buckets import SLICE, Bucket, Rounding, phase

Ints = NDArray[np.int64]
KEPT_MASKS = 1 << 28
"""Most elements of causal masks that a step keeps for all layers. Larger masks are made for each call."""


@dataclass(frozen=True)
class Tokens:
    """The query tokens, int32 (bucket.query,) each.

    A token sees its sequence's keys in `[kept_start, kept_stop)` and `[near_start, near_stop)`. Keys
    below `cached` are in the cache. The others are among the step's own, the key at position p in
    row `origin + p`. Padding sees nothing: `sequence` is bucket.logits, all else 0.
    """

    sequence: Tensor
    position: Tensor
    kept_start: Tensor
    kept_stop: Tensor
    near_start: Tensor
    near_stop: Tensor
    cached: Tensor
    origin: Tensor

    def sees(self, key: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """Return which keys at these positions the tokens see, (rows, keys).

        `key` (keys,), or (rows, keys) where each token has its own.
        """
        ranges = (self.kept_start, self.kept_stop, self.near_start, self.near_stop)
        inside: Tensor = _inside(key, KeyRanges(*(bound[rows][:, None] for bound in ranges)))
        return inside

    def sees_cached(self, key: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """Return the same for keys in the cache."""
        return self.sees(key, rows) & (key < self.cached[rows][:, None])

    def sees_own(self, width: int, rows: slice) -> Tensor:
        """Return the same for the step's own keys in rows 0 to `width`."""
        key = torch.arange(width, dtype=torch.int32, device=self.origin.device)
        key = key - self.origin[rows, None]
        return self.sees(key, rows) & (key >= self.cached[rows][:, None])


def _inside(key: Any, ranges: KeyRanges, width: int = 1) -> Any:
    """Return which of the keys, or of the blocks of `width` keys from there on, meet the ranges."""
    near = (key + width > ranges.near_start) & (key < ranges.near_stop)
    return near | (key + width > ranges.kept_start) & (key < ranges.kept_stop)


@dataclass(frozen=True)
class Metadata:
    """A step in the shapes of its bucket; int32 where nothing else is said.

    - `causal_masks`: for each slice of queries, which of the step's own keys it sees, bool
      (rows, bucket.keys, or keys up to the slice's end): one mask for causality, sequences, windows.
    - `shared_blocks`, `shared_starts` (bucket.shared,): a block, and its first key's position;
      `member` bool (bucket.logits + 1, bucket.shared): which sequences use it. A block that stands
      at two positions is two entries.
    - `unique_blocks` (bucket.unique,) or None, where entry i is block i; `unique_starts`;
      `unique_groups`: the sequence of each (bucket.logits where there is none); `unique_rows`: its
      query token; `unique_masks` bool (bucket.unique, block_size): which keys that sees.

    `exact` is the bucket before rounding.
    """

    bucket: Bucket
    exact: Bucket
    block_size: int
    tokens: Tokens
    causal_masks: Sequence[Tensor]
    shared_blocks: Tensor
    shared_starts: Tensor
    member: Tensor
    unique_blocks: Tensor | None
    unique_starts: Tensor
    unique_groups: Tensor
    unique_rows: Tensor
    unique_masks: Tensor


@dataclass(frozen=True)
class _Entries:
    """Cached blocks in use: of which sequence, which block, the position of its first key."""

    sequence: Ints
    block: Ints
    start: Ints

    def where(self, keep: NDArray[np.bool_] | Ints) -> _Entries:
        return _Entries(*(getattr(self, f.name)[keep] for f in fields(self)))

    def __len__(self) -> int:
        return len(self.block)


@dataclass(frozen=True)
class _Split:
    """The entries in two groups: shared ones by (block, position) with their users, and unique ones."""

    shared: _Entries
    users: tuple[Ints, Ints]
    unique: _Entries


def build(
    spec: LayerSpec,
    query_lens: Sequence[int],
    lens: Sequence[int],
    block_table: NDArray[np.int32] | None,
    block_size: int,
    *,
    fresh: bool = True,
    key_starts: Sequence[int] | None = None,
    rounding: Rounding,
    device: torch.device | str = "cpu",
) -> Metadata:
    """Return the metadata of a step.

    `lens` count context plus new tokens; `block_table` (num_seqs, max_blocks) on the host. `fresh`:
    the step's own keys will be at hand for the causal part. Without a block table all keys are at hand,
    and `key_starts` has the row at which each sequence's `lens` keys start.
    """
    queries, total = np.asarray(query_lens, np.int64), np.asarray(lens, np.int64)
    starts = np.cumsum(queries) - queries
    if block_table is not None:
        cached = np.where((queries > 1) & fresh, np.maximum(total - queries, 0), total)
        origin = starts - (total - queries)
    else:
        cached, origin = np.zeros_like(total), np.asarray(key_starts, np.int64)
    tokens = _tokens(spec, queries, total, cached, origin)
    parts = _split(spec, queries, total, cached, block_table, block_size)
    own = (queries > 0) & (total > cached)
    exact = Bucket(
        phase(bool(own.any()), len(parts.shared) > 0, len(parts.unique) > 0),
        int(queries.sum()),
        len(parts.shared),
        len(parts.unique),
        len(total),
    )
    in_order = tokens["origin"] + tokens["position"] == np.arange(exact.query)
    if own.any() and not (spec.causal and in_order.all()):
        exact = exact._replace(keys=int((origin + total)[own].max()))
    query, shared, unique, logits, keys = (rounding(size) for size in exact[1:6])
    bucket = Bucket(exact.phase, query, shared, unique, logits, keys)
    if len(parts.unique):
        span = rounding(int(parts.unique.block.max()) + 1)
        if span <= bucket.unique:
            bucket = bucket._replace(unique=span, contiguous=True)
            exact = exact._replace(contiguous=True)
    return _pack(tokens, parts, exact, bucket, block_size, torch.device(device))


def _tokens(
    spec: LayerSpec, queries: Ints, total: Ints, cached: Ints, origin: Ints
) -> dict[str, Ints]:
    """Return what `Tokens` holds, unpadded."""
    sequence = np.repeat(np.arange(len(queries)), queries)
    at = np.arange(len(sequence)) - (np.cumsum(queries) - queries)[sequence]
    position = (total - queries)[sequence] + at
    ranges = key_ranges(spec, position, position, total[sequence], np.minimum, np.maximum)
    return {
        "sequence": sequence,
        "position": position,
        **ranges._asdict(),
        "cached": cached[sequence],
        "origin": origin[sequence],
    }


def _split(
    spec: LayerSpec,
    queries: Ints,
    total: Ints,
    cached: Ints,
    block_table: NDArray[np.int32] | None,
    block_size: int,
) -> _Split:
    """Sort the cached blocks that any token sees into shared and unique ones."""
    nothing = np.zeros(0, np.int64)
    entries = _Entries(nothing, nothing, nothing)
    if block_table is not None:
        counts = np.where(queries > 0, -(-cached // block_size), 0).clip(min=0)
        sequence = np.repeat(np.arange(len(counts)), counts)
        index = np.arange(len(sequence)) - (np.cumsum(counts) - counts)[sequence]
        entries = _Entries(
            sequence, block_table[sequence, index].astype(np.int64), index * block_size
        )
        # Windows leave most blocks out.
        first, length = (total - queries)[sequence], total[sequence]
        ranges = key_ranges(spec, first, length - 1, length, np.minimum, np.maximum)
        entries = entries.where(_inside(entries.start, ranges, block_size))
    # How many tokens use a block: one makes it unique.
    uses = np.bincount(entries.block, weights=queries[entries.sequence])
    alone = uses[entries.block] == 1
    several = entries.where(~alone)
    key = several.block << 32 | several.start
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    return _Split(several.where(first), (several.sequence, which), entries.where(alone))


def _pack(
    tokens: dict[str, Ints],
    parts: _Split,
    exact: Bucket,
    bucket: Bucket,
    block_size: int,
    device: torch.device,
) -> Metadata:
    """Pad to the bucket and move to the device."""

    def placed(values: Ints, size: int, fill: int = 0, at: Ints | slice | None = None) -> Tensor:
        whole = np.full(size, fill, np.int32)
        whole[slice(len(values)) if at is None else at] = values
        return torch.from_numpy(whole).to(device)

    nobody = bucket.logits
    held = Tokens(
        **{
            name: placed(values, bucket.query, nobody if name == "sequence" else 0)
            for name, values in tokens.items()
        }
    )
    member = np.zeros((bucket.logits + 1, bucket.shared), np.bool_)
    member[parts.users] = True
    unique, size = parts.unique, bucket.unique
    at = unique.block if bucket.contiguous else None
    first = np.searchsorted(tokens["sequence"], unique.sequence)
    groups = placed(unique.sequence, size, nobody, at)
    starts, rows = placed(unique.start, size, 0, at), placed(first, size, 0, at)
    offsets = torch.arange(block_size, dtype=torch.int32, device=device)
    masks = held.sees_cached(starts[:, None] + offsets, rows) & (groups != nobody)[:, None]
    return Metadata(
        bucket=bucket,
        exact=exact,
        block_size=block_size,
        tokens=held,
        causal_masks=_causal_masks(held, bucket),
        shared_blocks=placed(parts.shared.block, bucket.shared),
        shared_starts=placed(parts.shared.start, bucket.shared),
        member=torch.from_numpy(member).to(device),
        unique_blocks=None if bucket.contiguous else placed(unique.block, size),
        unique_starts=starts,
        unique_groups=groups,
        unique_rows=rows,
        unique_masks=masks,
    )


class _Masks(Sequence[Tensor]):
    """The mask of each slice, built on access: for 128k queries all masks take 8 GiB."""

    def __init__(self, tokens: Tokens, bucket: Bucket):
        self._tokens, self._bucket = tokens, bucket

    def __len__(self) -> int:
        return -(-self._bucket.query // SLICE)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        rows = slice(index * SLICE, min((index + 1) * SLICE, self._bucket.query))
        return self._tokens.sees_own(self._bucket.keys or rows.stop, rows)


def _causal_masks(tokens: Tokens, bucket: Bucket) -> Sequence[Tensor]:
    """Return each slice's mask; none where no sequence brings keys of its own."""
    if bucket.phase[0] != "c":
        return ()
    masks = _Masks(tokens, bucket)
    return tuple(masks) if bucket.query * bucket.own_rows <= KEPT_MASKS else masks
