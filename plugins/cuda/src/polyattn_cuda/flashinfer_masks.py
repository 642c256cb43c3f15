"""How does FLASHINFER serve a step's mask? By its custom masks, and over chosen pages alone."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from polyattn.kernel import (
    Batch,
    BatchError,
    ChosenPages,
    LayerSpec,
    Pointwise,
    chosen_pages,
    over_chosen_pages,
    window_sizes,
)
from torch import Tensor

Ints = NDArray[np.int64]
MOST_BITS = 1 << 32
"""Pairs of a step's queries and keys that are made a custom mask of."""


class StepMasks:
    """What a layer's step mask shows, beside its own: as bits, or as the pages there are."""

    def __init__(self, spec: LayerSpec, pointwise: Pointwise, block_size: int | None):
        self.spec, self.pointwise, self.block_size = spec, pointwise, block_size

    @classmethod
    def of(cls, spec: LayerSpec, block_size: int | None) -> StepMasks | None:
        """Return a layer's; None where it has no mask, or a variant, which is compiled with it."""
        pointwise = None if spec.mask is None or spec.variant else Pointwise.of(spec)
        return None if pointwise is None else cls(spec, pointwise, block_size)

    def over_chosen(self, batch: Batch) -> Batch | None:
        """Return decodes over the pages that blocks choose, None where a window counts places."""
        spec = self.spec
        if spec.mask != "block_sparse" or spec.sliding_window or spec.length_bounds:
            return None
        if not batch.all_decode:
            return None
        return None if self.block_size is None else over_chosen_pages(batch, self.block_size)

    def rows(self, batch: Batch, spec: LayerSpec) -> ChosenPages | None:
        """Return the rows of blocks over their pages alone; None where blocks aren't whole pages."""
        if spec.mask != "block_sparse" or self.block_size is None:
            return None
        return chosen_pages(batch, self.block_size, spec.causal)

    def over_rows(
        self, rows: ChosenPages, spec: LayerSpec, device: torch.device
    ) -> tuple[bool, Tensor | None, Tensor]:
        """Return what hides chosen keys, a causal mask or bits (pairs,), and who sees nothing (tokens,).

        A causal mask is aligned to the last chosen key: it is right where each row's own places are
        chosen whole; nothing is hidden where a row's chosen keys all lie before it. Raises `BatchError`.
        """
        window = window_sizes(spec)
        nobody = np.repeat(rows.lens == 0, rows.queries)
        if window == (-1, -1) and not spec.causal:
            return False, None, torch.from_numpy(nobody).to(device)
        own = self._own(rows)
        if window[0] < 0 and ((own == rows.queries) | (rows.lens == 0)).all():
            return True, None, torch.from_numpy(nobody).to(device)
        if window[0] < 0 and ((own == 0) | (rows.queries == 1)).all():
            return False, None, torch.from_numpy(nobody).to(device)
        _check_pairs(int((rows.queries * rows.lens).sum()))
        found = [self._row_bits(rows, i, spec, device) for i in range(len(rows.seq))]
        blind = torch.cat([~row.any(1) for row in found])
        return False, torch.cat([row.flatten() for row in found]), blind

    def _own(self, rows: ChosenPages) -> Ints:
        """Return how many keys at its own queries' places are chosen for each row."""
        assert self.block_size is not None
        first, start = rows.first[rows.row], rows.page * self.block_size
        stop = np.minimum(start + self.block_size, first + rows.queries[rows.row])
        found = np.zeros(len(rows.seq), np.int64)
        np.add.at(found, rows.row, (stop - np.maximum(start, first)).clip(min=0))
        return found

    def _row_bits(
        self, rows: ChosenPages, index: int, spec: LayerSpec, device: torch.device
    ) -> Tensor:
        """Return what one row's queries see of its chosen keys, bool (queries, keys)."""
        assert self.block_size is not None
        pages = torch.from_numpy(rows.page[rows.row == index]).to(device)
        key = (
            pages[:, None] * self.block_size + torch.arange(self.block_size, device=device)
        ).ravel()
        key = key[: int(rows.lens[index])]
        query = torch.arange(int(rows.queries[index]), device=device)[:, None] + int(
            rows.first[index]
        )
        return _visible(query, key, spec)

    def bits(self, batch: Batch, spec: LayerSpec) -> tuple[Tensor, Tensor]:
        """Return what the step's queries see, bool (pairs,), and who sees nothing (tokens,).

        Raises `BatchError`.
        """
        _check_pairs(sum(q * n for q, n in zip(batch.query_lens, batch.lens, strict=True)))
        found, blind = [], []
        for number, queries, keys in zip(batch.seq_ids, batch.query_lens, batch.lens, strict=True):
            device = batch.device
            query = torch.arange(keys - queries, keys, device=device)[:, None]
            key = torch.arange(keys, device=device)
            head = torch.zeros((), dtype=torch.int64, device=device)
            seen = self.pointwise.visible(
                (torch.tensor(number, device=device), head, query, key), batch.inputs
            )
            assert seen is not None
            seen = seen.expand(queries, keys) & _visible(query, key, spec)
            found.append(seen.flatten())
            blind.append(~seen.any(1))
        return torch.cat(found), torch.cat(blind)


def _check_pairs(pairs: int) -> None:
    if pairs > MOST_BITS:
        raise BatchError(
            f"a mask of {pairs} pairs of queries and keys: FLASHINFER takes {MOST_BITS} at most; give "
            "the step fewer tokens, or name TRITON_ATTN"
        )


def _visible(query: Tensor, key: Tensor, spec: LayerSpec) -> Tensor:
    """Return what the layer itself shows: places (queries, 1) and (keys,), bool (queries, keys)."""
    left, right = window_sizes(spec)
    seen = torch.ones(len(query), len(key), dtype=torch.bool, device=key.device)
    if spec.causal:
        seen &= key <= query
    if left >= 0:
        seen &= key >= query - left
    if right >= 0:
        seen &= key <= query + right
    return seen
