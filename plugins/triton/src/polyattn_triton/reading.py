"""What does a plan have the kernels read? Each program's way through its work, all programs at a time.

Written after the kernels (`tiles`, `decode`, `prefill`, `parts`, `prefix`, `hopper.items`, `mla`), from
what lies in the plan's buffers. It shares nothing with what planned them: no mistake there is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from polyattn.kernel import Batch, Items, Keys, LayerSpec, Merges, Reads, no_merges
from torch import Tensor

if TYPE_CHECKING:
    from polyattn_triton.configs import MLAConfig
    from polyattn_triton.launch import Merge, Workspace
    from polyattn_triton.plan import AttentionPlan, LatentPlan
    from polyattn_triton.planning import PlannedAttention
    from polyattn_triton.prefix import PrefixLauncher, PrefixPlan

Ints = NDArray[np.int64]


class Step(NamedTuple):
    """The step's numbers as kernels load them. `queries`: of each sequence; 1 where they aren't asked."""

    starts: Ints
    lens: Ints
    queries: Ints


def step_of(batch: Batch) -> Step:
    starts = batch.query_start_loc.cpu().numpy().astype(np.int64)
    return Step(starts, batch.seq_lens.cpu().numpy().astype(np.int64), np.diff(starts))


class Work:
    """A buffer of work. What lies outside of it is told, and reads as 0."""

    def __init__(self, tensor: Any, faults: list[str]):
        self.array, self.faults = tensor.cpu().numpy().astype(np.int64), faults

    def __getitem__(self, at: Any) -> Any:
        at = np.asarray(at, np.int64)
        inside = (at >= 0) & (at < len(self.array))
        if not inside.all():
            where = int(at[~inside].flat[0])
            self.faults.append(f"place {where} of the work is read, which has {len(self.array)}")
        if not len(self.array):
            return 0 * at
        return np.where(inside, self.array[np.where(inside, at, 0)], 0)


@dataclass
class Pieces:
    """What programs do, one after another: (pieces,) each.

    `begin`, `end`: key tiles, counted from the first that the tile of rows sees; `part`: -1 if uncut.
    """

    seq: Ints
    row: Ints
    begin: Ints
    end: Ints
    part: Ints


def stretches(work: Work, programs: int, tiled: bool) -> Pieces:
    """Follow all programs through their stretches: `my_stretch`, `piece_of`, `next_tile`."""
    share, total, item, count = (int(work[i]) for i in range(4))
    program = np.arange(programs)
    column = 4 + program
    line = 4 + (5 if tiled else 3) * programs
    tile, low, high = (work[column + k * programs] for k in range(3))
    seq, row = (
        (work[column + 3 * programs], work[column + 4 * programs]) if tiled else (tile, 0 * tile)
    )
    at = program * share
    stop = np.minimum(at + share, total)
    reads: list[tuple[Ints, ...]] = []
    while True:
        some = at < stop
        if not some.any() or share <= 0 or len(reads) > count + 1:
            break
        program, at, stop, tile, low, high, seq, row = (
            x[some] for x in (program, at, stop, tile, low, high, seq, row)
        )
        keys_at = low + item
        first, last = low // share, (high - 1) // share
        part = np.where(last > first, 2 * program + (first == program), -1)
        reads.append(
            (seq, row, np.maximum(at - keys_at, 0), np.minimum(stop, high) - keys_at, part)
        )
        at, low = high, high
        tile = np.minimum(tile + 1, count - 1)
        high = work[line + tile + 1]
        seq, row = tile, 0 * tile
        if tiled:
            seq, row = work[line + count + 1 + tile], work[line + 2 * count + 1 + tile]
    if len(reads) > count + 1:
        work.faults.append(f"a program goes on after {count} tiles")
    none: tuple[Ints, ...] = (np.zeros(0, np.int64),) * 5
    return Pieces(*(np.concatenate(same) for same in zip(*(reads or [none]), strict=True)))


def merged_tiles(work: Work, programs: int, merge: Merge, tiled: bool) -> tuple[Ints, ...]:
    """Return the tiles that `merge_kernel` merges: sequences, first rows, first parts, how many."""
    share = max(1, int(work[0]))
    line = 4 + (5 if tiled else 3) * programs
    number = np.arange(merge.grid(1, 1)[0])
    if merge.by_tile:
        count = int(work[3])
        low, high = work[line + number], work[line + number + 1]
        seq, row = number, 0 * number
        if tiled:
            seq, row = work[line + count + 1 + number], work[line + 2 * count + 1 + number]
        mine = high > low
    else:
        column = 4 + number
        low, high = work[column + programs], work[column + 2 * programs]
        seq, row = work[column], 0 * number
        if tiled:
            seq, row = work[column + 3 * programs], work[column + 4 * programs]
        mine = number * share < np.minimum((number + 1) * share, int(work[1]))
    first, last = low // share, (high - 1) // share
    mine &= (first < last) & (merge.by_tile | (last == number))
    return seq[mine], row[mine], 2 * first[mine], (last - first + 1)[mine]


def tiles_seen(
    spec: LayerSpec, first: Ints, last: Ints, lens: Ints, block: int, apart: bool, causal: bool
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the key tiles of rows at these positions, as `tiles.keys_seen` and `tiles_seen` do."""
    window, chunk, kept_tokens = spec.sliding_window or 0, spec.chunk_size or 0, spec.sink_tokens
    low, high = 0 * lens, lens.copy()
    if chunk:
        low = np.minimum(np.maximum(low, first // chunk * chunk), lens)
        high = np.minimum(high, (last // chunk + 1) * chunk)
    if causal:
        high = np.minimum(high, last + 1)
    high = np.maximum(high, low)
    kept, near = low, low
    if window:
        stop = high
        near = np.minimum(np.maximum(low, first - window + 1), stop)
        if not causal:
            high = np.maximum(np.minimum(stop, last + window), near)
        if kept_tokens:
            kept = np.maximum(np.minimum(stop, kept_tokens), low)
            near = np.maximum(near, kept)
            high = np.maximum(high, near)
    begin = near // block
    end = np.where(high > near, -(-high // block), begin)
    skip_from, skip_by = 0 * begin, 0 * begin
    if kept_tokens:
        near_tile, begin = begin, low // block
        skip_from = np.where(kept > low, -(-kept // block), begin)
        if not apart:
            near_tile = np.maximum(near_tile, skip_from)
        skip_by = near_tile - skip_from
        end = np.maximum(end, near_tile) - skip_by
    return begin, end, skip_from, skip_by


def keys_of(
    spec: LayerSpec, begin: Ints, end: Ints, skip_from: Ints, skip_by: Ints, block: int, apart: bool
) -> Keys:
    """Return the keys of each item's tiles [`begin`, `end`); those from `skip_from` on lie apart."""
    item, far = np.arange(len(begin)), np.iinfo(np.int32).max
    if not spec.sink_tokens:
        return Keys(item, begin * block, end * block)
    most, least = (spec.sink_tokens, spec.sink_tokens) if apart else (far, 0)
    low = np.minimum(begin, skip_from), np.minimum(end, skip_from)
    up = np.maximum(begin, skip_from) + skip_by, np.maximum(end, skip_from) + skip_by
    return Keys(
        np.concatenate([item, item]),
        np.concatenate([low[0] * block, np.maximum(up[0] * block, least)]),
        np.concatenate([np.minimum(low[1] * block, most), up[1] * block]),
    )


def room_of(tensors: tuple[Tensor, ...], width: int) -> int:
    """Return how many rows of parts a workspace holds, whose outputs and LSEs `tensors` begins with."""
    rows: int = min(tensors[1].numel(), tensors[0].numel() // width)
    return rows


def reads_of(backend: PlannedAttention, plan: AttentionPlan, batch: Batch) -> Reads:
    """Return the reads of a plan of TRITON_ATTN."""
    if plan.chosen:  # pages that a mask chooses are a step of their own
        batch = plan.batch
    spec = backend.spec_of(batch).replace(mask=None) if plan.chosen else backend.spec_of(batch)
    faults: list[str] = []
    work = Work(plan.work, faults)
    if not plan.grid[0]:
        pieces, height = Pieces(*(np.zeros(0, np.int64),) * 5), plan.config.block_m
    elif plan.way in ("decode", "split", "many"):
        return _even(spec, plan, batch, backend.by_one, faults)
    elif plan.way == "prefill":
        height = plan.config.block_m
        pieces = _whole(plan, work, backend)
    else:
        height = plan.rows
        pieces = stretches(work, plan.grid[0], plan.way != "listed")
        if plan.long:
            tall, share = plan.config.block_m > 16, int(work[0])
            lens = step_of(batch).lens[np.clip(pieces.seq, 0, batch.num_seqs - 1)]
            if tall:  # `even_piece`
                rows = np.stack([pieces.seq, pieces.row])
                _, of, count = np.unique(rows, axis=1, return_inverse=True, return_counts=True)
                tiles = -(-lens // plan.config.block_n)
                halves = np.where(lens < plan.long, 2, np.where(lens < 2 * plan.long, 3, 6))
                each = np.minimum(-(-tiles // count[of.reshape(-1)]), share * halves // 2)
                begin = pieces.begin // share * each
                pieces = replace(pieces, begin=begin, end=begin + each)
            else:  # `times_longer`
                longer = np.where(lens < plan.long, 1, np.where(lens < 2 * plan.long, 2, 4))
                pieces = replace(pieces, begin=pieces.begin * longer, end=pieces.end * longer)
    reads = _over_tiles(spec, plan, batch, pieces, height, faults)
    if plan.merging is not None and plan.grid[0]:
        reads.merges = merges_of(
            plan.merging, work, plan.grid[0], plan.way != "listed", height, spec.gqa_ratio,
            spec.num_kv_heads, step_of(batch).queries,
        )  # fmt: skip
    reads.batch, reads.spec = batch, spec
    return reads


def merges_of(
    merge: Merge, work: Work, programs: int, tiled: bool, height: int, group: int, heads: int,
    queries: Ints,
) -> Merges:  # fmt: skip
    """Return what `merge_kernel` merges of tiles that were cut."""
    seq, row, part, count = merged_tiles(work, programs, merge, tiled)
    _, blocks, heads_merged = merge.grid(height, heads)
    covered = min(height, blocks * merge.rows(height))
    ends = (queries if tiled else np.ones_like(queries))[np.clip(seq, 0, len(queries) - 1)] * group
    which = np.repeat(np.arange(len(seq)), count)
    i = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    # The first part lies where the tile's first program begins it, the others where each comes in.
    places = (part[which] + np.where(i == 0, 1, 2 * i)) * height
    return Merges(
        seq, row, np.minimum(covered, ends - row), 0 * seq, np.full(len(seq), heads_merged),
        np.concatenate([[0], count.cumsum()]), places,
    )  # fmt: skip


def _over_tiles(
    spec: LayerSpec,
    plan: AttentionPlan,
    batch: Batch,
    pieces: Pieces,
    height: int,
    faults: list[str],
) -> Reads:
    """Return the reads of pieces of tiles, each for all KV heads."""
    step, group, block = step_of(batch), spec.gqa_ratio, plan.config.block_n
    few = plan.way != "listed"
    seq = np.clip(pieces.seq, 0, max(0, len(step.lens) - 1))
    rows_there = step.queries[seq] * group if few else np.full(len(seq), group)
    rows = np.minimum(height, rows_there - pieces.row)
    lens = step.lens[seq]
    context = lens - (step.queries[seq] if few else 1)
    first = context + pieces.row // group
    last = context + (np.minimum(pieces.row + height, rows_there) - 1) // group
    rotated = spec.rope is not None
    low, high, skip_from, skip_by = tiles_seen(
        spec, first, last, lens, block, rotated, spec.causal and few
    )
    begin, end = low, high
    if plan.way != "prefill":
        begin, end = low + pieces.begin, np.minimum(high, low + pieces.end)
    keys = keys_of(spec, begin, end, skip_from, skip_by, block, rotated)
    none = 0 * seq
    cut = pieces.part >= 0
    room, apart = 0, 0
    if plan.way != "prefill":
        room = room_of(plan.kept.tensors, spec.v_head_size)
        apart = 2 * plan.grid[0] * height
    items = Items(
        pieces.seq, pieces.row, rows, none, np.full(len(seq), spec.num_kv_heads),
        np.where(cut, pieces.part * height, -1), np.where(cut, rows, 0), pieces.seq,
    )  # fmt: skip
    return Reads(group, spec.num_kv_heads, items, keys, no_merges(), room, apart, faults=faults)


def _whole(plan: AttentionPlan, work: Work, backend: PlannedAttention) -> Pieces:
    """Return whole tiles: a program each, or as Hopper's own prefill deals them out (`hopper.items`)."""
    count, heads = plan.grid[0], plan.grid[1]
    tile = np.arange(count)
    if plan.at_once and backend.hopper is not None:
        jobs = count * heads
        programs = min(backend.hopper.programs, jobs) if plan.at_once == heads else jobs
        program = np.arange(programs)
        rounds = np.arange(-(-jobs // programs))[:, None]
        at = rounds * programs + np.where(rounds % 2 == 1, programs - 1 - program, program)
        at = np.sort(at[at < jobs])
        # A program ends with the first job that is beyond: none may come after it.
        section = at // (count * plan.at_once)
        inside = at - section * count * plan.at_once
        done = np.bincount(
            np.minimum(inside // plan.at_once, count - 1) * heads
            + section * plan.at_once
            + inside % plan.at_once,
            minlength=jobs,
        )
        for job in np.flatnonzero(done != 1)[:5].tolist():
            work.faults.append(
                f"tile {job // heads} of KV head {job % heads} is computed {done[job]} times"
            )
    none = 0 * tile
    return Pieces(work[tile], work[count + tile], none, none, none - 1)


def _even(
    spec: LayerSpec, plan: AttentionPlan, batch: Batch, at_once: int, faults: list[str]
) -> Reads:
    """Return the reads of even splits, which take a sequence's key tiles in turn."""
    step, group, block, heads = (
        step_of(batch),
        spec.gqa_ratio,
        plan.config.block_n,
        spec.num_kv_heads,
    )
    count, heads_run, splits = plan.grid
    seq = np.arange(min(count, len(step.lens)))
    if count != len(step.lens):
        faults.append(f"{count} sequences have programs, the step has {len(step.lens)}")
    rotated, last = spec.rope is not None, step.lens[seq] - 1
    low, high, skip_from, skip_by = tiles_seen(
        spec, last, last, step.lens[seq], block, rotated, False
    )
    high = np.minimum(high, low + step.lens[seq])
    if plan.way == "decode":
        items = Items(
            seq, 0 * seq, 0 * seq + group, 0 * seq, 0 * seq + heads_run, 0 * seq - 1, 0 * seq, seq
        )
        keys = keys_of(spec, low, high, skip_from, skip_by, block, rotated)
        reads = Reads(group, heads, items, keys, no_merges(), faults=faults)
        reads.batch, reads.spec = batch, spec
        return reads
    height = plan.rows
    # Each split of each sequence and KV head has its part.
    owner, split = np.repeat(seq, splits), np.tile(np.arange(splits), len(seq))
    places = (owner * heads * splits + split) * height
    items = Items(
        owner, 0 * owner, 0 * owner + group, 0 * owner, 0 * owner + heads_run, places,
        0 * owner + group, owner,
    )  # fmt: skip
    tiles = np.maximum(high - low, 0)
    of = np.repeat(seq, tiles)
    i = np.arange(len(of)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    tile = low[of] + i
    keys = keys_of(spec, tile, tile + 1, skip_from[of], skip_by[of], block, rotated)
    keys = keys._replace(item=(of * splits + i % splits)[keys.item])
    merges = no_merges()
    if plan.way == "split" or plan.merging is not None:
        merges = _of_splits(plan, seq, group, heads, at_once, faults)
    if plan.way == "split" and plan.kept.tensors[2].numel() < count * heads:
        faults.append(f"{count * heads} counters are needed, {plan.kept.tensors[2].numel()} there")
    room = room_of(plan.kept.tensors, spec.v_head_size)
    return Reads(
        group, heads, items, keys, merges, room, splits * height, faults=faults, batch=batch,
        spec=spec,
    )  # fmt: skip


def _of_splits(
    plan: AttentionPlan, seq: Ints, group: int, heads: int, at_once: int, faults: list[str]
) -> Merges:
    """Return what merges even splits: a program as many as it holds at once, a kernel all of them."""
    splits, height = plan.grid[2], plan.rows
    merged = min(splits, at_once) if plan.way == "split" else splits
    if plan.way == "many" and plan.merging is not None:
        grid = plan.merging.grid(height, heads)
        if grid[0] != len(seq) or grid[1] * plan.merging.rows(height) < group:
            faults.append(f"splits are merged by a grid of {grid}")
    return Merges(
        seq,
        0 * seq,
        0 * seq + group,
        0 * seq,
        0 * seq + heads,
        np.arange(len(seq) + 1) * merged,
        ((seq * heads * splits)[:, None] + np.arange(merged)).ravel() * height,
    )


def prefix_reads(launcher: PrefixLauncher, plan: PrefixPlan, batch: Batch) -> Reads:
    """Return the reads of a launch over shared keys: `prefix_kernel`, then `merge_parts_kernel`."""
    spec = launcher.spec
    faults: list[str] = []
    work = Work(plan.work, faults)
    group, heads, count = spec.gqa_ratio, spec.num_kv_heads, batch.num_tokens
    bounds, parts, listed, part_rows = plan.offsets
    programs = np.arange(plan.grid[0])
    first, last = work[bounds + programs], work[bounds + programs + 1]
    amount = np.maximum(last - first, 0)
    number = np.repeat(first - np.cumsum(amount) + amount, amount) + np.arange(amount.sum())
    field = number[:, None] * 8 + np.arange(6)
    table, begin, end, rows_at, rows, lies = work[field].T
    if (rows * group > plan.config.tall).any():
        faults.append(f"a tile of {plan.config.tall} rows is to hold {int(rows.max()) * group}")
    which = np.repeat(np.arange(len(rows)), rows)
    i = np.arange(len(which)) - np.repeat(np.cumsum(rows) - rows, rows)
    token = work[rows_at[which] + i]
    of_token = np.repeat(np.arange(batch.num_seqs), batch.host_query_lens)
    row_of = (np.arange(count) - np.array(batch.starts)[of_token]) * group
    token = np.clip(token, 0, count - 1)
    seq = of_token[token]
    items = Items(
        seq, row_of[token], 0 * seq + group, 0 * seq, 0 * seq + heads, lies[which] + i * group,
        0 * seq + group, table[which],
    )  # fmt: skip
    token = np.arange(count)
    begins, ends = work[parts + token], work[parts + token + 1]
    amount = np.maximum(ends - begins, 0)
    of = np.repeat(token, amount)
    at = np.arange(len(of)) - np.repeat(np.cumsum(amount) - amount, amount)
    merges = Merges(
        of_token, row_of, 0 * token + group, 0 * token, 0 * token + heads,
        np.concatenate([[0], amount.cumsum()]), work[listed + begins[of] + at],
    )  # fmt: skip
    keys = Keys(np.arange(len(seq)), begin[which], end[which])
    room = room_of(plan.kept.tensors, spec.v_head_size)
    return Reads(group, heads, items, keys, merges, room, part_rows, launcher.block_size, faults)


def latent_reads(
    spec: LayerSpec, config: MLAConfig, space: Workspace, plan: LatentPlan, batch: Batch
) -> Reads:
    """Return what TRITON_MLA reads of a step: tiles of (token, head) rows over one latent a token."""
    faults: list[str] = []
    work, step = Work(plan.work, faults), step_of(batch)
    assert spec.latent is not None
    heads, height, block = spec.num_heads, config.block_h, config.block_n
    if not plan.grid:
        pieces = Pieces(*(np.zeros(0, np.int64),) * 5)
    elif plan.way.split:
        pieces = stretches(work, plan.grid, True)
    else:
        tile = np.arange(plan.grid)
        pieces = Pieces(work[tile], work[plan.grid + tile], 0 * tile, 0 * tile, 0 * tile - 1)
    seq = np.clip(pieces.seq, 0, max(0, len(step.lens) - 1))
    queries = step.queries if plan.way.few else np.ones_like(step.queries)
    there, length = queries[seq] * heads, step.lens[seq]
    high = length
    if plan.way.few == 1:
        last = (np.minimum(pieces.row + height, there) - 1) // heads
        high = length - queries[seq] + last + 1
    tiles = -(-high // block)
    begin = 0 * tiles
    if plan.way.split:
        begin, tiles = pieces.begin, np.minimum(pieces.end, tiles)
    rows, cut = np.minimum(height, there - pieces.row), pieces.part >= 0
    items = Items(
        pieces.seq, pieces.row, rows, 0 * seq, 0 * seq + 1, np.where(cut, pieces.part * height, -1),
        np.where(cut, rows, 0), pieces.seq,
    )  # fmt: skip
    keys = Keys(np.arange(len(seq)), begin * block, tiles * block)
    merges, room = no_merges(), 0
    if plan.way.split:
        room = room_of((space.parts, space.part_lse), spec.latent.rank)
        if plan.merging is not None:
            merges = merges_of(plan.merging, work, plan.grid, True, height, heads, 1, queries)
    if plan.way.few == 2:
        spec = spec.replace(causal=False)
    return Reads(heads, 1, items, keys, merges, room, 0, faults=faults, spec=spec)
