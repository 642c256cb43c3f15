"""`plan` lays a step's tokens out in tiles, in the shapes of a bucket.

Plans are pytrees: arrays that a jitted function takes, and static fields that it is compiled for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from polyattn.plugin import AttentionKind, BatchError, LayerSpec

from polyattn_tpu.buckets import Buckets
from polyattn_tpu.configs import CHUNK, DENSE_PAGE, block_tokens, pages_per_step, tile_tokens
from polyattn_tpu.hooks import ATTENDING
from polyattn_tpu.places import Places, pytree
from polyattn_tpu.step import Step

Array = Any


@pytree("step")
@dataclass(frozen=True, eq=False)
class Tiles:
    """The queries in tiles of `step` tokens of one sequence each.

    `seq`, `start`, `token` i32 (tiles,): a tile's sequence, its first token within the sequence, and
    within the step. At the step's end a tile begins earlier, before its sequence if need be (`start` is
    negative). Padding tiles belong to a sequence without tokens, behind the real ones.
    """

    seq: Array
    start: Array
    token: Array
    step: int


@pytree()
@dataclass(frozen=True, eq=False)
class Pages:
    """Each sequence's keys: `first` i32 (seqs,) into `table` i32 (pages,), and the lengths."""

    query_lens: Array
    seq_lens: Array
    first: Array
    table: Array


@pytree("cached", "num_tokens", "width", "page")
@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """A step of attention. `pack` i32 (pages, page): the passed key in each place, None if cached.

    `slots` i32 (tokens,): where each new token is stored, -1 for none; None where nothing is.
    `num_tokens`: rows that queries, keys and values are padded to (`pad`). `places`: None for a layer
    without functions of scores. `width`: of a plan by bounds, pages of each sequence's table; else 0.
    `page`: tokens of a page of the cache; 0 without one.
    """

    tiles: Tiles
    pages: Pages
    pack: Array | None
    slots: Array | None
    cached: bool
    num_tokens: int
    places: Places | None = None
    width: int = 0
    page: int = 0


@pytree()
@dataclass(frozen=True, eq=False)
class RecurrentPlan:
    """A step of a recurrence: chunks in the order of their sequences.

    `take` i32 (chunks, chunk): which token each place of a chunk holds; `put` i32 (tokens,): which place
    each token is at; `count` i32 (chunks,): real tokens;
    `slot` i32 (chunks,): the sequence's state; `first`, `last`, `fresh` bool (chunks,): whether it
    begins or ends its sequence, and whether that starts from zero.
    """

    take: Array
    put: Array
    count: Array
    slot: Array
    first: Array
    last: Array
    fresh: Array

    @property
    def num_tokens(self) -> int:
        """Rows that the inputs are padded to (`pad`)."""
        return int(self.put.shape[0])


def plan(
    step: Any, spec: LayerSpec, *, block_size: int | None = None, buckets: Buckets | None = None
) -> Any:
    """Plan one step for every layer of a spec: a pytree of arrays on JAX's default device.

    `step`: a `Step`, or a `polyattn.Batch`. `block_size`: tokens of a block of the cache, for a layer
    that has one (default: the spec's). Returns an `AttentionPlan`, or for a recurrence a
    `RecurrentPlan`. MLA is planned over its latents. Raises `BatchError`.
    """
    check_features(spec)
    if not isinstance(step, Step):
        check_batch(step, spec)
        step = Step.from_batch(step)
    buckets = buckets or Buckets()
    if spec.kind.is_recurrent:
        return jax.device_put(plan_chunks(step, buckets))
    group = spec.num_heads if spec.kind.is_latent else spec.gqa_ratio
    by = by_of(spec)
    if not spec.cached:
        return jax.device_put(plan_dense(step, group, buckets, by))
    size = block_size or spec.block_size
    if size is None:
        raise BatchError("block_size is missing: pass the cache's tokens per block to plan()")
    group, alike = 1 if spec.sparse is not None else group, bool(spec.batch_invariant)
    if spec.length_bounds:
        return jax.device_put(plan_bounded(step, group, size, buckets, alike))
    return jax.device_put(plan_paged(step, group, size, buckets, by, alike))


def check_features(spec: LayerSpec) -> None:
    """Raise `BatchError` for what a layer asks of JAX's functions in vain."""
    # Chosen keys are single tokens' pages, over which the kernels of attention run.
    kind = AttentionKind.ATTENTION if spec.kind is AttentionKind.SPARSE else spec.kind
    builds = (build.capabilities for info in ATTENDING for build in info.variants)
    claims = [each.features for each in builds if kind in each.kinds]
    missing = sorted(spec.features.difference(*claims)) if claims else [f"kind={kind.value!r}"]
    if missing:
        raise BatchError(
            f"{spec} asks for {', '.join(missing)}, which JAX's functions don't serve; do that outside, "
            "and plan a spec without it"
        )


def check_batch(batch: Any, spec: LayerSpec) -> None:
    """Raise `BatchError` for fields of a `polyattn.Batch` that a `Step` has no place for."""
    counts = spec.chunk_size or spec.sink_tokens  # from a text's beginning
    for name, asked in (
        ("state_targets", batch.state_targets is not None),
        ("first_positions", batch.first_positions is not None and counts),
    ):
        if asked:
            raise BatchError(
                f"{name}={getattr(batch, name)}: a Step has none; plan a batch without it"
            )


def by_of(spec: LayerSpec) -> str:
    """Return what a layer's functions of scores need of a plan: `""`, `"places"`, or `"pairs"` too."""
    if not spec.has_functions:
        return ""
    from polyattn_tpu.pointwise import Functions  # imports torch, which traces them

    functions = Functions.of(spec)
    if functions is None:
        return ""
    return "pairs" if functions.by_pair else "places"


def plan_paged(
    step: Step, group: int, block_size: int, buckets: Buckets, by: str = "", alike: bool = False
) -> AttentionPlan:
    """Plan attention over a paged cache. `by`: see `by_of`; `alike`: all steps in tiles of one size."""
    if step.block_table is None:
        raise BatchError("the step has no block_table, and the layer attends over a cache")
    counts = [-(-length // block_size) for length in step.seq_lens]
    if max(counts, default=0) > step.block_table.shape[1]:
        raise BatchError(
            f"block_table has {step.block_table.shape[1]} blocks of {block_size} a sequence; a sequence "
            f"of {max(step.seq_lens)} tokens needs {max(counts)}"
        )
    rows = [row[:count] for row, count in zip(step.block_table, counts, strict=True)]
    table = np.concatenate(rows) if rows else np.zeros(0, np.int32)
    tiles, tokens = _tiles(step, group, buckets, by, alike)
    slots = None
    if step.slots is not None:
        slots = _filled(tokens, step.slots, -1)
    pages = _pages(step, counts, table, buckets)
    places = _places(step, tokens, pages, block_size) if by else None
    return AttentionPlan(tiles, pages, None, slots, True, tokens, places, page=block_size)


def plan_bounded(
    step: Step, group: int, block_size: int, buckets: Buckets, alike: bool = False
) -> AttentionPlan:
    """Plan attention over a paged cache; the step has bounds of lengths, and `with_pages` puts them in.

    More single tokens than places are planned as so many: see `attend_bounded`.
    """
    slots, width = step.slots, max(1, -(-max(step.seq_lens, default=1) // block_size))
    if step.all_decode:
        most = max(1, min(buckets.seqs, buckets.tokens, buckets.pages // width))
        few = step.num_tokens if step.num_tokens <= most else 1 << (most.bit_length() - 1)
        ones = [1] * buckets.of_decodes(few)
        step = Step.of(ones, ones)
    tiles, tokens = _tiles(step, group, buckets, "", alike)
    pages = _pages(step, [width] * step.num_seqs, np.zeros(step.num_seqs * width), buckets)
    if slots is not None:
        slots = _filled(max(tokens, len(slots)), slots, -1)
    return AttentionPlan(tiles, pages, None, slots, True, tokens, width=width, page=block_size)


def with_pages(plan: AttentionPlan, seq_lens: Array, table: Array) -> AttentionPlan:
    """Return a plan by bounds with lengths i32 (seqs,) and tables i32 (seqs, `width` or more)."""
    if table.shape[1] < plan.width:
        raise BatchError(f"a table of {table.shape[1]} pages a sequence for bounds of {plan.width}")
    pages, flat = plan.pages, table[:, : plan.width].reshape(-1)
    lens = jax.numpy.pad(seq_lens, (0, len(pages.seq_lens) - len(seq_lens)))
    flat = jax.numpy.pad(flat, (0, len(pages.table) - len(flat)))
    return replace(plan, pages=replace(pages, seq_lens=lens, table=flat))


def plan_dense(step: Step, group: int, buckets: Buckets, by: str = "") -> AttentionPlan:
    """Plan attention to keys that are passed whole: one gather cuts them into pages."""
    counts = [-(-length // DENSE_PAGE) for length in step.seq_lens]
    starts = step.key_starts
    if starts is None:
        starts = tuple(np.cumsum((0, *step.seq_lens))[:-1].tolist())
    table = np.arange(sum(counts), dtype=np.int32)
    tiles, tokens = _tiles(step, group, buckets, by)
    pages = _pages(step, counts, table, buckets)
    places = _places(step, tokens, pages, DENSE_PAGE) if by else None
    pack = np.zeros((len(pages.table), DENSE_PAGE), np.int32)
    flat, at = pack.reshape(-1), 0
    for count, start, length in zip(counts, starts, step.seq_lens, strict=True):
        flat[at : at + length] = np.arange(start, start + length)
        at += count * DENSE_PAGE
    return AttentionPlan(tiles, pages, pack, None, False, tokens, places)


def plan_chunks(step: Step, buckets: Buckets) -> RecurrentPlan:
    """Plan a recurrence: single tokens as chunks of one, else chunks of `CHUNK` tokens."""
    if step.state_slots is None:
        raise BatchError("the step has no state_slots, and the layer keeps a state")
    size = 1 if step.all_decode else CHUNK
    slots = step.state_slots.tolist()
    if step.all_decode:
        tokens = chunks = buckets.of_decodes(step.num_tokens)
    else:
        tokens = buckets.of_tokens(step.num_tokens)
        chunks = -(-tokens // size) + buckets.of_seqs(step.num_seqs)
    take, put = np.zeros((chunks, size), np.int32), np.zeros(tokens, np.int32)
    numbers = np.zeros((2, chunks), np.int32)
    numbers[1] = -1
    flags = np.ones((3, chunks), bool)
    at = 0
    for start, count, length, slot in zip(
        step.starts, step.query_lens, step.seq_lens, slots, strict=True
    ):
        for first in range(0, count, size):
            real = min(size, count - first)
            take[at, :real] = np.arange(start + first, start + first + real)
            put[start + first : start + first + real] = at * size + np.arange(real)
            numbers[:, at] = real, slot
            flags[:, at] = first == 0, first + real == count, length <= count
            at += 1
    return RecurrentPlan(take, put, *numbers, *flags)


def pad(plan: AttentionPlan | RecurrentPlan, array: Array) -> Array:
    """Return an array (tokens, …) with rows of zeros behind, as many as the plan's functions take."""
    missing = plan.num_tokens - array.shape[0]
    if missing < 0:
        raise BatchError(
            f"an array of {array.shape[0]} rows for a plan of {plan.num_tokens} tokens"
        )
    if not missing:
        return array
    return jax.numpy.pad(array, ((0, missing), *((0, 0),) * (array.ndim - 1)))


def _places(step: Step, tokens: int, pages: Pages, page: int) -> Places:
    each = pages_per_step(page)
    keys, most = each * page, len(pages.query_lens) + len(pages.table) // each
    lens = np.asarray(step.seq_lens, np.int64)
    numbers = np.asarray(step.numbers or range(step.num_seqs), np.int64)
    counts, queries = -(-lens // keys), np.asarray(step.query_lens, np.int64)
    first = np.cumsum(counts) - counts
    within = np.arange(step.num_tokens) - np.repeat(step.starts, queries)
    lows = (np.arange(counts.sum()) - np.repeat(first, counts)) * keys
    longest = 1 << (max(1, int(counts.max(initial=1))) - 1).bit_length()
    return Places(
        _filled(tokens, np.repeat(numbers, queries), 0),
        _filled(tokens, np.repeat(lens - queries, queries) + within, 0),
        _filled(most, np.repeat(numbers, counts), 0),
        _filled(most, lows, 0),
        _filled(len(pages.query_lens), first, 0),
        longest,
    )


def _tiles(
    step: Step, group: int, buckets: Buckets, by: str, alike: bool = False
) -> tuple[Tiles, int]:
    if alike:  # a row's sums depend on the number of rows that are multiplied at a time
        size = block_tokens(group)
        tokens = buckets.of_tokens(max(size, step.num_tokens))
        count = min(tokens, -(-tokens // size) + buckets.of_seqs(step.num_seqs))
    elif step.all_decode:
        size, tokens = 1, buckets.of_decodes(step.num_tokens)
        count = tokens
    else:
        tokens = buckets.of_tokens(step.num_tokens)
        # Values of pairs take a block's room in VMEM, not a whole tile's.
        size = min(tile_tokens(group, tokens), block_tokens(group) if by == "pairs" else tokens)
        count = min(-(-tokens // size) + buckets.of_seqs(step.num_seqs), tokens)
    tile = np.zeros((3, count), np.int32)
    tile[0] = step.num_seqs
    at = 0
    for seq, (start, queries) in enumerate(zip(step.starts, step.query_lens, strict=True)):
        for first in range(0, queries, size):
            past = max(0, start + first + size - tokens)
            tile[:, at] = seq, first - past, start + first - past
            at += 1
    seqs, starts, first_tokens = tile
    return Tiles(seqs, starts, first_tokens, size), tokens


def _pages(step: Step, counts: list[int], table: Any, buckets: Buckets) -> Pages:
    # One more place, for the empty sequence that padding belongs to.
    places = 1 + (
        buckets.of_decodes(step.num_seqs) if step.all_decode else buckets.of_seqs(step.num_seqs)
    )
    first = np.concatenate([[0], np.cumsum(counts)])[:-1] if counts else np.zeros(0)
    return Pages(
        _filled(places, step.query_lens, 0),
        _filled(places, step.seq_lens, 0),
        _filled(places, first, 0),
        _filled(buckets.of_pages(len(table)), table, 0),
    )


def _filled(size: int, values: Any, rest: int) -> Any:
    array = np.full(size, rest, np.int32)
    array[: len(values)] = values
    return array
