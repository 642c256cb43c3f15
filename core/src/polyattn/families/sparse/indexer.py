"""Which keys does a token attend to? Scores over a paged cache of index keys, and the best of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from polyattn.errors import BatchError
from polyattn.families.sparse.pages import token_places, visible_entries
from polyattn.runtime.inputs import bad_input, check_tensor
from polyattn.runtime.step.batch import Batch
from polyattn.spec.sparse import IndexerSpec

SCORES = 1 << 24
"""Products that are held at a time."""


class Indexer:
    """Chooses each token's keys by scores over a cache of index keys. It never waits for the device.

    Args:
        spec: how entries are scored and chosen: DeepSeek-V3.2's, MiniMax-M3's or Qwen3.8's indexer, or
            another.

    Raises:
        SpecError: the argument isn't an `IndexerSpec`.

    Examples:
        >>> indexer = Indexer(IndexerSpec(num_heads=4, head_size=32, budget=8))
        >>> indexer.spec.budget
        8

    """

    def __init__(self, spec: IndexerSpec):
        self.spec = spec

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        batch: Batch,
        weights: Tensor | None = None,
        within: Tensor | None = None,
    ) -> Tensor:
        """Choose keys for each token of a step.

        Args:
            query: (num_tokens, num_heads, head_size).
            keys: (num_blocks, block_size, head_size), a paged cache with each sequence's entries, the
                step's own included.
            batch: the step; its block table says where the entries are.
            weights: (num_tokens, num_heads), if the spec folds heads by weights.
            within: int32 (num_tokens, scope or 1, n), the blocks of `spec.within` entries that count,
                -1 for none.

        Returns:
            int32 (num_tokens, scope, K): the best first, -1 for none; the tail comes last. Scores are
            float32, or float64 for float64 tensors.

        Raises:
            BatchError: a tensor doesn't fit the spec or the batch.

        """
        spec = self.spec
        self._check(query, keys, batch, weights, within)
        _seqs, positions, lens = token_places(batch)
        visible = visible_entries(spec.tokens_per_entry, positions, lens)
        most = -(-(batch.max_seq_len // spec.tokens_per_entry) // spec.pool)
        count = spec.budget if isinstance(spec.budget, int) else most
        ids = torch.full(
            (batch.num_tokens, spec.choices, count), -1, dtype=torch.int32, device=query.device
        )
        for rows, table, entries in self._parts(batch, keys.shape[1]):
            if not entries:
                continue
            scores = self._scores(query[rows], keys, table, entries, _part(weights, rows))
            chosen = self._best(scores, visible[rows], _part(within, rows), min(count, entries))
            ids[rows, :, : chosen.shape[2]] = chosen
        if not spec.tail:
            return ids
        m, seen = spec.tokens_per_entry, torch.minimum(positions + 1, lens)
        tail = torch.where(seen % m > 0, seen // m, -1).int()
        return torch.cat([ids, tail[:, None, None]], 2)

    def _parts(self, batch: Batch, block_size: int) -> Iterator[tuple[slice, Tensor, int]]:
        """Yield tokens whose keys are read together, their rows of the table, and how many entries.

        Runs of one-token sequences, and pieces of longer ones.
        """
        spec, table = self.spec, batch.block_table
        assert table is not None
        first = 0
        while first < batch.num_seqs:
            last, queries = first + 1, batch.query_lens
            if queries[first] == 1:
                while last < batch.num_seqs and queries[last] == 1:
                    last += 1
            longest = max(batch.lens[first:last]) // spec.tokens_per_entry
            step = max(1, SCORES // max(longest * spec.num_heads, 1))
            start, stop = batch.starts[first], batch.starts[last]
            for at in range(start, stop, step):
                rows = slice(at, min(at + step, stop))
                mine = slice(first, last)
                if last - first > 1:
                    mine = slice(first + at - start, first + rows.stop - start)
                yield rows, table[mine, : -(-longest // block_size)], longest
            first = last

    def _scores(
        self, query: Tensor, keys: Tensor, table: Tensor, entries: int, weights: Tensor | None
    ) -> Tensor:
        """Return scores (tokens, scope, entries); `table` has a row for each token, or one for all."""
        spec = self.spec
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        # Behind a sequence's length a table may hold anything; what lies there isn't seen.
        blocks = table.long().clamp(0, len(keys) - 1)
        rows = keys[blocks].flatten(1, 2)[:, :entries].to(dtype)
        if len(table) == 1:
            products = torch.einsum("thd,ed->the", query.to(dtype), rows[0])
        else:
            products = torch.bmm(query.to(dtype), rows.transpose(1, 2))
        products *= spec.scale
        if spec.activation == "relu":
            products.relu_()
        if spec.fold == "none":
            return products
        if weights is not None:
            products *= weights.to(dtype)[:, :, None]
        return products.sum(1, keepdim=True)

    def _best(self, scores: Tensor, visible: Tensor, within: Tensor | None, count: int) -> Tensor:
        """Return the ids of the best candidates, int32 (tokens, scope, count), -1 for none."""
        spec, entries = self.spec, scores.shape[2]
        place = torch.arange(entries, device=scores.device)
        seen = (place < visible[:, None])[:, None]
        if within is not None:
            assert spec.within is not None
            blocks = -(-entries // spec.within)
            named = within.long().clamp(min=-1, max=blocks)
            held = seen.new_zeros(*named.shape[:2], blocks + 2)
            held.scatter_(2, named + 1, True)
            seen = seen & held[..., 1:-1].repeat_interleave(spec.within, 2)[..., :entries]
        scores = scores.nan_to_num(nan=-torch.inf).masked_fill(~seen, -torch.inf)
        if spec.pool > 1:
            short = -entries % spec.pool
            scores = torch.nn.functional.pad(scores, (0, short), value=-torch.inf)
            scores = scores.unflatten(2, (-1, spec.pool)).amax(3)
            seen = torch.nn.functional.pad(seen, (0, short)).unflatten(2, (-1, spec.pool)).any(3)
        candidate = torch.arange(scores.shape[2], device=scores.device)
        there = -(-visible // spec.pool)
        if spec.forced_first or spec.forced_last:
            forced = (candidate < spec.forced_first) | (
                candidate >= (there - spec.forced_last)[:, None]
            )
            scores = scores.masked_fill(forced[:, None] & seen, torch.inf)
        # Sorted as they are, equal ones stay in the order of their ids; what isn't seen comes last.
        order = (
            scores.masked_fill(~seen, -torch.inf).sort(stable=True, dim=2, descending=True).indices
        )
        kept = seen.expand_as(scores).gather(2, order)
        order = order[..., :count].int().masked_fill(~kept[..., :count], -1)
        if isinstance(spec.budget, float):
            allowed = torch.ceil(there.double() * spec.budget - 1e-9)
            behind = torch.arange(order.shape[2], device=order.device) >= allowed[:, None]
            order = order.masked_fill(behind[:, None], -1)
        return order

    def _check(
        self, query: Tensor, keys: Tensor, batch: Batch, weights: Tensor | None, within: Tensor | None
    ) -> None:  # fmt: skip
        spec, tokens = self.spec, batch.num_tokens
        if batch.block_table is None:
            raise BatchError(
                "the batch has no block_table, and the index keys are in a paged cache: pass one"
            )
        check_tensor("query", query, batch.device)
        check_tensor("keys", keys, batch.device)
        if query.shape != (tokens, spec.num_heads, spec.head_size):
            raise bad_input("query", query, (tokens, spec.num_heads, spec.head_size))
        if keys.dim() != 3 or keys.shape[2] != spec.head_size:
            raise bad_input("keys", keys, ("num_blocks", "block_size", spec.head_size))
        longest = batch.max_seq_len // spec.tokens_per_entry
        if longest > batch.block_table.shape[1] * keys.shape[1]:
            raise BatchError(
                f"block_table has {batch.block_table.shape[1]} blocks of {keys.shape[1]}; the longest "
                f"sequence has {longest} entries"
            )
        if (weights is not None) != (spec.fold == "weighted"):
            raise BatchError(
                f"weights {'are missing' if weights is None else 'were given'}: fold={spec.fold!r}"
            )
        if weights is not None and weights.shape != (tokens, spec.num_heads):
            raise bad_input("weights", weights, (tokens, spec.num_heads))
        if (within is not None) != (spec.within is not None):
            raise BatchError(
                f"within {'is missing' if within is None else 'was given'}: within={spec.within!r}"
            )
        if within is not None and (
            within.dim() != 3 or len(within) != tokens or within.shape[1] not in (1, spec.choices)
        ):
            raise bad_input("within", within, (tokens, spec.choices, "blocks"))


def _part(tensor: Tensor | None, rows: slice) -> Tensor | None:
    return None if tensor is None else tensor[rows]
