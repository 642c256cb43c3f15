"""Where are the chosen keys? A choice as a block table and a length for each token and KV head.

Attention doesn't depend on the order of its keys. A token that attends to some of them is therefore a
decode over pages of its own: the chosen ones, complete pages first. Any paged kernel computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyattn.errors import BatchError, CacheError
from polyattn.runtime.cache.kv_cache import LARGEST_PAGE, KVCache
from polyattn.runtime.inputs import check_tensor
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.step_mask import BlockSparseMask
from polyattn.spec.layer import LayerSpec
from polyattn.spec.sparse import SparseSpec


def token_places(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's sequence, its position in it, and the sequence's length.

    They come from the device's lengths, which change between replays of a captured graph.

    Args:
        batch: the step.

    Returns:
        Three tensors, int64 (num_tokens,).

    Examples:
        >>> batch = Batch.from_lens([2, 1], [5, 9], torch.tensor([[0], [1]]).int(), 16)
        >>> [each.tolist() for each in token_places(batch)]
        [[0, 0, 1], [3, 4, 8], [5, 5, 9]]

    """
    tokens = torch.arange(batch.num_tokens, device=batch.device)
    if not batch.num_tokens:
        return tokens, tokens, tokens
    if batch.all_decode:
        lens = batch.seq_lens.long()
        return tokens, lens - 1, lens
    ends = batch.query_start_loc[1:].long()
    seqs = torch.searchsorted(ends, tokens + 1).clamp(max=batch.num_seqs - 1)
    lens = batch.seq_lens.long()[seqs]
    return seqs, lens - batch.query_start_loc.long()[seqs + 1] + tokens, lens


def positions_of(batch: Batch) -> Tensor:
    """Return the positions that a step's tokens are rotated by: the batch's, or those of its lengths.

    Where the host has only bounds of the lengths, those on the device count.

    Args:
        batch: the step.

    Returns:
        int64 (num_tokens,), or (axes, num_tokens).

    Examples:
        >>> positions_of(Batch.from_lens([2, 1], [5, 9])).tolist()
        [3, 4, 8]

    """
    if batch.lens_are_bounds and batch.positions is None:
        return token_places(batch)[1].clamp(min=0)
    return batch.token_positions


NONE = torch.iinfo(torch.int32).max
"""Stands for an id that names nothing, so that it comes last."""


def visible_entries(
    tokens_per_entry: int, positions: Tensor, lens: Tensor, causal: bool = True
) -> Tensor:
    """Return how many of its sequence's entries each token sees.

    Args:
        tokens_per_entry: tokens that one entry stands for.
        positions: int64 (num_tokens,), as `token_places` returns them.
        lens: int64 (num_tokens,), the length of each token's sequence.
        causal: False: a token sees its whole sequence.

    Returns:
        int64 (num_tokens,).

    Examples:
        >>> visible_entries(4, torch.tensor([2, 3, 8]), torch.tensor([9, 9, 9])).tolist()
        [0, 1, 2]

    """
    tokens = torch.minimum(positions + 1, lens) if causal else lens
    return tokens.clamp(min=0) // tokens_per_entry


def choice_of(spec: LayerSpec, choice: Tensor | None, batch: Batch) -> Tensor:
    """Return a call's choice: its own, or the newest groups, if the spec says so or these are all.

    Raises `BatchError` if it is missing.
    """
    sparse = spec.sparse
    assert sparse is not None
    if choice is not None:
        if sparse.newest:
            raise BatchError(
                "choice was given, and the layer attends to the newest keys; leave it out"
            )
        return choice
    if sparse.physical:
        raise BatchError(
            "choice is missing: physical ids have no order in which some are the newest"
        )
    most = sparse.budget * sparse.granularity
    if not sparse.newest and batch.max_seq_len // sparse.tokens_per_entry > most:
        names = "pass choice=indexer(...)" if spec.indexer else "pass choice=, or say newest=True"
        raise BatchError(
            f"choice is missing: sequences have up to {batch.max_seq_len} tokens, more than the sparse "
            f"budget={sparse.budget} holds; {names}"
        )
    return newest_groups(spec, batch)


def newest_groups(spec: LayerSpec, batch: Batch) -> Tensor:
    """Return the choice of the newest groups that each token sees, within the budget."""
    sparse = spec.sparse
    assert sparse is not None
    group = sparse.granularity
    _, positions, lens = token_places(batch)
    visible = visible_entries(sparse.tokens_per_entry, positions, lens, spec.causal)
    most = -(-(batch.max_seq_len // sparse.tokens_per_entry) // group) if batch.num_seqs else 0
    back = torch.arange(max(1, min(sparse.budget, most)), device=batch.device)
    ids = (-(-visible // group) - 1)[:, None] - back
    ids = ids.clamp(min=-1).int()[:, None]
    return ids.expand(-1, sparse.choices(spec.num_heads, spec.num_kv_heads), -1).contiguous()


def expected_choice(
    spec: LayerSpec, choice: Tensor, tokens: int, device: torch.device, seen: bool = False
) -> tuple[Tensor, tuple[int, ...], torch.dtype]:
    """Return a choice with the shape and the dtype that it must have. Raises `BatchError`."""
    sparse = spec.sparse
    assert sparse is not None
    check_tensor("choice", choice, device, seen)
    width = choice.shape[-1] if choice.dim() == 3 else sparse.budget
    if width > sparse.budget:
        raise BatchError(
            f"choice {tuple(choice.shape)} names {width} ids a token; the spec's sparse.budget is "
            f"{sparse.budget}"
        )
    shape = (tokens, sparse.choices(spec.num_heads, spec.num_kv_heads), width)
    return choice, shape, torch.int32


def check_ids(sparse: SparseSpec, choice: Tensor, cache: KVCache) -> None:
    """Refuse an id twice, and places outside the cache; costs a copy to the host."""
    ids = choice.cpu().sort(-1).values
    twice = ((ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] >= 0)).nonzero()
    if len(twice):
        token, scope, at = twice[0].tolist()
        raise BatchError(
            f"choice[{token}, {scope}] names {int(ids[token, scope, at])} twice; it would count twice"
        )
    places = cache.num_blocks * cache.block_size
    if sparse.physical and ids.numel() and int(ids.max()) >= places:
        raise BatchError(f"choice names place {int(ids.max())}; the cache has {places} of them")


def check_places(cache: KVCache) -> None:
    """Refuse a cache of more places than `places_of` can name. Raises `CacheError`."""
    places = cache.num_blocks * cache.block_size
    if places > LARGEST_PAGE:
        raise CacheError(
            f"cache has {cache.num_blocks} blocks of {cache.block_size}: {places} places, of which int32 "
            f"names {LARGEST_PAGE}; use fewer blocks"
        )


def places_of(
    spec: LayerSpec, choice: Tensor, batch: Batch, block_size: int, rows: slice = slice(None)
) -> Tensor:
    """Return the cache's places that all heads attend to, int32 (num_tokens, K), -1 for none.

    `choice` int32 (num_tokens, 1, K), of the step's tokens in `rows`; an id of several entries gives as
    many places. Never waits.
    """
    sparse, table = spec.sparse, batch.block_table
    assert sparse is not None
    each = choice[:, 0]
    if sparse.physical:
        return each
    group = sparse.granularity
    if group > 1:
        within = torch.arange(group, device=each.device)
        each = each[..., None].long()
        each = torch.where(each < 0, -1, each * group + within).flatten(1)
    if table is None or not table.shape[1]:
        return torch.full_like(each, -1)
    seqs, positions, lens = (part[rows] for part in token_places(batch))
    visible = visible_entries(sparse.tokens_per_entry, positions, lens, spec.causal)
    entries, width = each.clamp(min=0).long(), table.shape[1]
    at = seqs[:, None] * width + (entries // block_size).clamp(max=width - 1)
    places = table.reshape(-1)[at].long() * block_size + entries % block_size
    return places.int().masked_fill_((each < 0) | (entries >= visible[:, None]), -1)


@dataclass(slots=True, eq=False)
class ChosenPages:
    """A choice that becomes decodes over pages: what `AttentionBackend.page` reads and writes.

    All fields but `choice` are the same in each call of a step.

    Attributes:
        spec: the sparse layer.
        batch: the step.
        first: a token.
        heads: int64 (rows of a token,), the KV head of each.
        block_size: entries of a block of the batch's table.
        page_size: entries of a page.
        steps: pages between neighbouring blocks, runs and heads, as `KVCache.in_pages_of` says.
        table: int32 (tokens * rows of a token, pages), written: each row's pages, complete ones first.
            What lies behind them names any page that there is.
        lens: int32 (tokens * rows of a token,), written: how many entries each row attends to.
        choice: int32 (tokens, 1 or rows of a token, K), contiguous, of the tokens from `first` on.
        facts: what a backend keeps of the other fields from one call to the next.

    Examples:
        >>> ChosenPages.__slots__[:2]
        ('spec', 'batch')

    """

    spec: LayerSpec
    batch: Batch
    first: int
    heads: Tensor
    block_size: int
    page_size: int
    steps: tuple[int, int, int]
    table: Tensor
    lens: Tensor
    choice: Tensor
    facts: Any = None


def pages_of(
    sparse: SparseSpec, heads: Tensor, ids: Tensor, visible: Tensor, seqs: Tensor, table: Tensor,
    block_size: int, size: int, steps: tuple[int, int, int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the block table int32 (rows, pages) and the lengths int32 (rows,) of a choice.

    A row is a token and one of `heads` int64 (n,), the KV heads in the order of rows. `ids` int32
    (num_tokens, 1 or n, K); `visible`, `seqs` int64 (num_tokens,): how many entries a token sees, and
    its row of `table`, whose blocks have `block_size` entries. `size`, `steps`: of the pages, as
    `KVCache.in_pages_of` says. Never waits for the device.
    """
    group, each = sparse.granularity, ids.long()
    if sparse.physical:
        inside = each >= 0
        counts = inside.long()
    else:
        first = each * group
        inside = (each >= 0) & (first < visible[:, None, None])
        counts = (visible[:, None, None] - first).clamp(max=group)
        part = inside & (counts < group)
        inside &= ~part | (part.cumsum(-1) == 1)  # pages hold an incomplete group once
        counts = counts.where(inside, 0)
    # Of a token's groups only the last may be incomplete, and it has the largest id.
    order = each.masked_fill(~inside, NONE).sort(-1).values
    lens = counts.sum(-1)
    entries = order * group
    if group > size:
        within = torch.arange(0, group, size, device=ids.device)
        entries = (entries[..., None] + within).flatten(2)
    blocks = entries // block_size
    if not sparse.physical:
        width = table.shape[1]
        at = seqs[:, None, None] * width + blocks.clamp(max=max(width - 1, 0))
        blocks = table.reshape(-1)[at].long() if width else torch.zeros_like(at)
    by_block, by_run, by_head = steps
    pages = blocks * by_block
    if size < block_size:
        pages = pages + entries % block_size // size * by_run
    pages = pages.masked_fill(entries >= NONE, 0) + heads[:, None] * by_head
    lens = lens.expand(len(ids), len(heads))
    return pages.int().flatten(0, 1), lens.int().flatten()


def over_chosen_pages(batch: Batch, block_size: int) -> Batch | None:
    """Return decodes as the same queries over the blocks of keys that their mask chooses, packed.

    It serves kernels to which a key's position means nothing: the new batch has no mask, and its lengths
    count chosen keys alone.

    Args:
        batch: one query token a sequence, with a `BlockSparseMask`.
        block_size: tokens of a block of the block table.

    Returns:
        The new batch, or None if the mask's blocks aren't whole blocks of the cache.

    Examples:
        >>> table = torch.tensor([[4, 7, 5]], dtype=torch.int32)
        >>> mask = BlockSparseMask([0, 2], [0, 2], block=(1, 16))
        >>> over_chosen_pages(Batch.from_lens([1], [40], table, 16, mask=mask), 16).block_table[:, :2]
        tensor([[4, 5]], dtype=torch.int32)

    """
    mask, table = batch.mask, batch.block_table
    if not isinstance(mask, BlockSparseMask) or table is None or mask.block[1] % block_size:
        return None
    blocks = SparseSpec(budget=1, granularity=mask.block[1])
    lens = torch.tensor(batch.lens, device="cpu")
    columns = torch.arange(table.shape[1], device="cpu")[None]
    first = torch.zeros(len(lens), dtype=torch.int64, device="cpu")
    pages, chosen = pages_of(
        blocks,
        first[:1],
        _named(batch, mask),
        lens,
        first,
        columns,
        block_size,
        block_size,
        (1, 0, 0),
    )
    paged = Batch(
        batch.starts,
        chosen.tolist(),
        table.gather(1, pages.long().to(table.device)),
        device=batch.device,
    )
    paged.causal = batch.causal
    return paged


def _named(batch: Batch, mask: BlockSparseMask) -> Tensor:
    """Return the blocks that a mask names for decodes as their choice, int32 (num_seqs, 1, K)."""
    rows = -(-torch.tensor(batch.step_query_lens, device="cpu") // mask.block[0])
    row = (rows.cumsum(0) - rows)[torch.tensor(batch.seq_ids, dtype=torch.int64, device="cpu")]
    starts = torch.tensor(mask.indptr, device="cpu")
    blocks = torch.tensor([*mask.indices, -1], device="cpu")
    first, counts = starts[row], (starts[1:] - starts[:-1])[row]
    column = torch.arange(max([1, *counts.tolist()]), device="cpu")
    at = torch.where(column < counts[:, None], first[:, None] + column, len(blocks) - 1)
    ids = blocks[at].sort(1).values
    ids[:, 1:][ids[:, 1:] == ids[:, :-1]] = -1  # a block that is named twice is seen once
    return ids.int()[:, None]
