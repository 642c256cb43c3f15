"""How much of the cache has each group of layers, and which of a sequence's blocks does a step see?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyattn import Batch, LayerSpec, SelectedLayers
from polyattn.errors import CacheError
from polyattn.spec.cache_window import CacheWindow
from polyattn.tools.replay.pool import Pool
from polyattn.tools.replay.runners import Options
from polyattn.tools.replay.scheduler import Scheduled
from polyattn.tools.replay.state_pool import StatePool


def pools_of(groups: Sequence[SelectedLayers], options: Options) -> list[Pool]:
    """Share the cache's bytes so that every group holds as many tokens, none more than it can use.

    A group whose layers see only a window needs room for all sequences' windows and one step's tokens;
    the other groups get the rest. If several ranks share a block, each holds a part of it, and blocks
    that leave a window stay. Raises `CacheError` where there is not one block for each.
    """
    ranks = 1 if options.context is None else options.context.size
    forms = [g.selection.cache_format for g in groups]
    sizes, widths, most, windows = [], [], list[float](), []
    for group, form in zip(groups, forms, strict=True):
        assert form is not None, "every decoder that is no recurrence has a cache"
        window = CacheWindow.of(group.spec, form.block_size) if ranks == 1 else None
        sizes.append(form.block_size)
        widths.append(form.bytes_per_token * group.num_caches(options.layers))
        windows.append(window)
        most.append(float("inf") if window is None else _needed(window, options))
    counts: list[int] = [0] * len(forms)
    rest, left = float(options.cache_bytes), set(range(len(forms)))
    while left:
        tokens = rest / sum(widths[i] for i in left)
        few = {i for i in left if most[i] <= tokens}
        for index in few or left:
            counts[index] = int(min(tokens, most[index])) // sizes[index]
            rest -= most[index] * widths[index] if few else 0
        left -= few or left
    for size, count in zip(sizes, counts, strict=True):
        if count < 1:
            raise CacheError(
                f"--cache-gb={options.cache_bytes / 2**30:g} holds not one block of {size} "
                f"tokens at {sum(widths)} bytes a token; raise it"
            )
    shares = zip(sizes, counts, windows, strict=True)
    return [Pool(size * ranks, count, window) for size, count, window in shares]


SNAPSHOT_TOKENS = 16
"""Tokens between the places where states may be kept, in a model that has no blocks."""


def state_pool(pools: Sequence[Pool], options: Options) -> StatePool:
    """Return the slots of all recurrent layers, beside the blocks of the others' pools."""
    size = max((pool.block_size for pool in pools), default=SNAPSHOT_TOKENS)
    return StatePool(size, options.state_slots)


def _needed(window: CacheWindow, options: Options) -> int:
    """Return the tokens that all sequences' windows and one step's queries take at most."""
    blocks = options.max_seqs * (window.most_blocks() + 2)
    return blocks * window.block_size + options.token_budget


def step_batch(
    plan: Sequence[Scheduled], index: int, pool: Pool, spec: LayerSpec, device: torch.device
) -> Batch:
    """Return a step's batch for the group of the `index`-th pool.

    Where blocks have left its window a sequence is shorter by them; its tokens keep their positions.
    """
    held = [item.sequence.held[index] for item in plan]
    counts = [item.count for item in plan]
    gone = [h.gone * pool.block_size for h in held]
    lens = [i.start + i.count - n for i, n in zip(plan, gone, strict=True)]
    positions = None
    if any(gone) and spec.rope is not None and spec.rope.positions == "absolute":
        places = [p for i in plan for p in range(i.start, i.start + i.count)]
        positions = torch.tensor(places, dtype=torch.int64, device=device)
    table = block_table([h.blocks for h in held])
    return Batch.from_lens(
        counts,
        lens,
        table.to(device),
        pool.block_size,
        positions=positions,
        host_block_table=table.numpy(),
    )


def block_table(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return int32 (rows, blocks of the longest) on the host, padded with 0."""
    width = max((len(row) for row in rows), default=0)
    padded = [[*row, *([0] * (width - len(row)))] for row in rows]
    return torch.tensor(padded, dtype=torch.int32).view(len(rows), width)


def taken_copies(plan: Sequence[Scheduled]) -> dict[int, dict[int, int]]:
    """Take the copies that a step's sequences wait for: for each pool, the source of each target."""
    copies: dict[int, dict[int, int]] = {}
    for item in plan:
        for index, held in enumerate(item.sequence.held):
            for source, target in held.copies:
                copies.setdefault(index, {})[target] = source
            held.copies = []
    return copies
