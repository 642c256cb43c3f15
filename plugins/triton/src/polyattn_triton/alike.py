"""Which launches give a request the same bits in any batch? One for each class of a step's requests.

What a request's sums are depends on the kernel, on its tiles' sizes and on where its keys are cut. Here
all three follow from the request's own numbers of queries and keys: they are its class, and a launch has
the requests of one class. Keys are cut after each so many key tiles, and a program has one piece of one
tile: the device deals the pieces out.

Where steps must not count, either, all requests are of one class, by the portable prefill over tiles of
one height: a row then sums tiles of keys at the same places, in the same order, whatever rows are beside
it, and a tile that isn't cut rounds as a part does.

Pieces of a decode are of `PIECE` keys: their parts are 1.6 % of the bytes of 16-bit keys and values with
four heads of 128 a KV head (written once, read once), 4 us of 241 at 64 x 4,096 on an H200. Very long
decodes, which fill a chip by themselves, have longer ones.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import numpy as np
import triton
from polyattn.kernel import Batch, BatchError, CacheFormat, Device, Invariance, LayerSpec, Place

from polyattn_triton.launch import Merge
from polyattn_triton.plan import AttentionPlan
from polyattn_triton.planning import PlannedAttention
from polyattn_triton.schedule import ROOM, Ints, Tiles, launches_of, most_keys, segments
from polyattn_triton.variants import (
    FEW_ON_ONE,
    MANY_ON_ONE,
    MOST_FEW_ROWS,
    TALLEST_FEW,
    steps_config,
    tile_config,
)

PIECE = 512
"""Keys of a piece of a decode, and the fewest of a piece of a prefill."""
ENOUGH = 512
"""Pieces of all KV heads from which on a decode has pieces twice as long, and from twice as many keys on
four times: it fills a chip by itself, and a row's parts are merged by one program, 16 at a time."""
TALL_PIECE = 1408
"""Keys of a piece of a tile of more than `LOW` rows, at most, whose parts are as much larger. A request's
pieces are about as long (`even_piece`). Drafts after 4k keys have three: 64 x 4 of them took 143 us on an
H200, in four of 1,088 keys 149 (`benchmarks/results/h200/2026-11-28-levels-pieces.md`)."""
TALL_ENOUGH = 176
"""And pieces of such tiles from which on they are 1.5 times as long, and from twice as many keys on three
times: a lone request's are then on nearly all multiprocessors."""
TALL_MERGED = 4
"""Rows of such a tile that a program merges, four parts of each at once. Two rows and eight parts are as
fast (H200, 19 steps of drafts: 0.99 to 1.01). Others' go one by one: 1 x 8,192 took 18.9 us, two by two
19.4."""
LOW = 16
"""Rows of a low tile of drafts. Taller ones are all of one height: 32 requests of 1 to 8 new tokens took
59 us on an H100 in launches of three heights beside each other, of two 49."""
START, MERGE, PART = 128, 768, 3
"""What cutting a prefill costs, in keys that one program reads meanwhile (80 a us): to begin a piece, to
merge at all (`planning.MERGE`), and to write and read one part of 128 rows."""
SIZES = np.array([m << e for e in range(6, 18) for m in range(8, 16) if (m << e) % 128 == 0])
"""Keys of a prefill's pieces, in eighths of powers of two. A request of which the chip could hold four
takes powers of two alone, so that few classes are in a step."""
ROUNDS = 2
"""Rounds up to which a launch of decodes has four programs on a multiprocessor, where three take a round
more. H200: 4 x 8,192 takes 43 us for 46, 12 of Mooncake's trace 67 us for 70. In more rounds three are
mostly faster."""
STEPS_PIECE = 1024
"""Keys of a piece where steps must not count: longer, since a prompt's rows have parts, too."""
WHOLE, FRESH = 0, 1
"""The classes of prefills whose tiles aren't cut: over pages; and of prompts, whose keys are read as they
are given. Others' are keys of a piece, negative; or rows of a tile of the decode kernel."""


def pieces_of(tiles: Ints, keys: Ints, slots: int) -> Ints:
    """Return how many keys a piece of each prefill has, so that it ends first alone on a chip.

    `WHOLE`: of those whose tiles fill the chip's `slots`, or wouldn't end sooner in pieces. `tiles`: of
    all KV heads, (requests,). `keys`: of a tile, the most.
    """
    tiles_of: Ints = np.full(len(tiles), WHOLE)
    some = np.flatnonzero((tiles < slots) & (keys > PIECE))
    if len(some):
        count, lens = tiles[some, None], keys[some, None]
        pieces, rest = np.divmod(lens, SIZES)
        rounds = -(-count * pieces // slots)
        idle = rounds * slots - count * pieces  # of the last round: there shorter ones fit in turn
        turns = -(-count // np.maximum(idle, 1)) * (rest + START) - (SIZES + START)
        last = np.where(rest > 0, np.clip(turns, 0, rest + START), 0)
        parts = count * (pieces + (rest > 0))
        costs = rounds * (SIZES + START) + last + MERGE + PART * parts
        coarse = (4 * count <= slots) & (SIZES & (SIZES - 1) > 0)
        costs = np.where(coarse | (lens <= SIZES), np.inf, costs)
        best = costs.argmin(1)
        sooner = costs.min(1) < lens[:, 0] + START
        tiles_of[some[sooner]] = SIZES[best[sooner]]
    return tiles_of


def halves_of(lens: Ints, long: int, tall: bool) -> Ints:
    """Return how many halves of a usual piece those of such sequences have, as kernels compute it."""
    each = 1 if tall else 2
    return 2 + each * (lens >= long) + (2 + each) * (lens >= 2 * long)


class AlikeAttention(PlannedAttention):
    """Plans of layers with `batch_invariant`."""

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.piece, self.tall_piece = PIECE, TALL_PIECE
        self.steps_piece, self.room = STEPS_PIECE, ROOM
        # Beyond a window a sequence's length adds no keys; of bounds the kernel sees what is below.
        bounded = spec.sliding_window or spec.chunk_size or spec.length_bounds
        self.long = 0 if bounded else PIECE * ENOUGH // spec.num_kv_heads
        self.tall_long = 0 if bounded else TALL_PIECE * TALL_ENOUGH // spec.num_kv_heads
        # Decodes' with a stage less, which changes no bit: a fourth program fits on a multiprocessor.
        full = replace(self.decode_config, num_stages=self.few_config.num_stages)
        self.full = self.decode_config if full == self.few_config != self.decode_config else None
        self.any_step = spec.batch_invariant >= Invariance.STEPS
        self.steps_config = steps_config(spec, device.arch)
        # What is copied for Hopper's own prefill, and whether, depends on the step.
        if spec.batch_invariant and (spec.stored_dtype, spec.qkv_dtype) != (spec.dtype, "auto"):
            self.hopper = None

    def plan_alike(self, batch: Batch) -> AttentionPlan:
        """Plan a launch for each class of requests: the first one holds the others."""
        if self.any_step:
            return self._plan_any_step(batch)
        which = self.classes(batch)
        asked = np.unique(which[batch.host_query_lens > 0]).tolist() or [WHOLE]
        plans: list[AttentionPlan] = []
        for kind in asked:
            # Classes of the decode kernel run beside each other, where the chip lets them.
            beside = sum(plan.way == "few" for plan in plans) if self.early else 0
            plans.append(self._plan_class(batch, kind, which == kind, beside=beside))
        launches = [launch for plan in plans for launch in (plan, *plan.others)]
        launches[0].others = launches[1:]
        return launches[0]

    def refill(self, plan: AttentionPlan, batch: Batch) -> AttentionPlan:
        """Write decodes into a captured step's launches: of their programs, some have no piece.

        They were planned for the longest sequences.
        """
        if not self.spec.batch_invariant:
            return super().refill(plan, batch)
        for one in (plan, *plan.others):
            later = copy(one)
            later.batch = batch
            tiles = self._tiles(later)
            self._plan_pieces(later, tiles, self._piece_of(one, tiles), one)
        return plan

    def _is_captured(self, batch: Batch) -> bool:
        """Whether a graph may run a step's plan for other lengths: a decode's."""
        return bool(self.spec.graph_capture) and batch.all_decode and batch.block_table is not None

    def _plan_any_step(self, batch: Batch) -> AttentionPlan:
        """Plan all rows alike: pieces lie at the same keys for each of a sequence's rows."""
        plan, table = AttentionPlan(batch, self._none), batch.block_table
        plan.config, plan.fresh = self.steps_config, table is None
        if table is not None:
            plan.table = (table.stride(0), table.shape[1] - 1)
        plan.way, plan.rows = "pieces", plan.config.block_m
        if self._is_captured(batch):  # a later step's tiles are of the same requests
            plan.requests = FRESH, np.ones(batch.num_seqs, bool)
        return self._in_pieces(plan, self._tiles(plan))

    def _piece_of(self, plan: AttentionPlan, tiles: Tiles) -> int:
        """Return how many key tiles a piece has.

        Where a row's first key depends on its position, tiles aren't cut if steps must not count.
        """
        spec, keys = self.spec, self.steps_piece
        if self.any_step and (spec.sliding_window or spec.chunk_size):
            return int(tiles.keys.max(initial=1))
        if not self.any_step:
            assert plan.requests is not None
            kind = plan.requests[0]
            keys = -kind if kind < WHOLE else self.piece if kind <= LOW else self.tall_piece
        return max(1, keys // plan.config.block_n)

    def classes(self, batch: Batch) -> Ints:
        """Return each request's class, (sequences,)."""
        queries, lens, group = batch.host_query_lens, batch.host_lens, self.spec.gqa_ratio
        rows = queries * group
        few = (rows <= MOST_FEW_ROWS) | (queries == 1)
        if batch.block_table is None:
            few &= False
        least = tile_config(self.spec, self.device.arch, "few").block_m
        height = np.where((queries > 1) & (rows > LOW), TALLEST_FEW, np.maximum(rows, least))
        classes: Ints = 1 << np.ceil(np.log2(height)).astype(np.int64)
        if not few.all():
            tall, config = ~few, self.prefill_config
            tiles = -(-rows[tall] // config.block_m) * self.spec.num_kv_heads
            seen = most_keys(self.spec, lens[tall], queries[tall])
            classes[tall] = -pieces_of(tiles, seen, self.num_sms)
            if self.hopper is None or self.hopper.by_token:
                classes[tall & (classes == WHOLE) & (lens == queries)] = FRESH
        return classes

    def _plan_class(
        self, batch: Batch, kind: int, mine: Ints, portable: bool = False, beside: int = 0
    ) -> AttentionPlan:
        """Plan the requests of one class; `portable`: not to Hopper's own prefill. `beside`: a plan's."""
        plan, spec = AttentionPlan(batch, self._none), self.spec
        plan.requests, plan.beside = (kind, mine), beside
        table = batch.block_table
        if table is not None:
            plan.table = (table.stride(0), table.shape[1] - 1)
        if kind > FRESH:
            plan.way, plan.config = "few", tile_config(spec, self.device.arch, "few", kind)
            longest = int(batch.host_query_lens[mine].max()) * spec.gqa_ratio
            plan.rows = triton.next_power_of_2(min(longest, plan.config.block_m))
            plan.long = self.long if kind <= LOW else self.tall_long
            if batch.all_decode and self.in_one_tile:
                plan.way, plan.rows = "singles", self.rows
            return self._in_pieces(plan, self._tiles(plan))
        plan.fresh = table is None or kind == FRESH
        plan.config = self.prefill_config if plan.fresh else self.paged_config
        hopper = None if portable else self.hopper
        if hopper is not None and hopper.takes(plan, self.spec_of(batch)):
            plan.config, plan.at_once = hopper.config, hopper.heads
        tiles = self._tiles(plan)
        if kind in (WHOLE, FRESH):
            order = np.argsort(-tiles.keys, kind="stable")
            if plan.at_once and hopper is not None:
                costs = tiles.keys[order] + self.rates.item
                plan.at_once = hopper.heads_at_once(batch.host_lens[mine].tolist(), costs)
            self._one_each(plan, tiles, order)
        else:
            plan.way, plan.rows = "pieces", plan.config.block_m
            return self._in_pieces(plan, tiles, one=portable)
        self._keep(plan)
        return plan

    def _in_pieces(self, plan: AttentionPlan, tiles: Tiles, one: bool = False) -> AttentionPlan:
        """Cut each tile into pieces, in launches whose parts have `room` bytes, or in `one`.

        A request of a class is in one launch, so that the class's other kernel can take its tiles.
        """
        each = self._piece_of(plan, tiles)
        captured = self._is_captured(plan.batch)
        pieces = np.maximum(-(-self._units(plan, tiles, captured) // each), 1)
        of_one = 8 * self.spec.num_kv_heads * plan.rows * (self.spec.v_head_size + 1)
        ends = pieces.cumsum()
        if plan.requests is not None:
            ends = ends[np.searchsorted(tiles.seq, tiles.seq, "right") - 1]
        room = self.room // of_one
        if one or pieces.max(initial=0) <= 1:  # there are no parts
            room = int(ends.max(initial=0))
        launches = []
        for some in launches_of(ends, room):
            launches.append(copy(plan))
            launches[-1].beside = 0 if launches[:-1] else plan.beside
            mine = Tiles(tiles.seq[some], tiles.row[some], tiles.keys[some])
            if plan.requests is not None:
                kind, asked = plan.requests
                launches[-1].requests = kind, asked & np.isin(np.arange(len(asked)), mine.seq)
            self._plan_pieces(launches[-1], mine, each)
        if not launches:
            self._keep(plan)
            return plan
        launches[0].others = launches[1:]
        return launches[0]

    def _units(self, plan: AttentionPlan, tiles: Tiles, most: bool = False) -> Ints:
        """Return how many usual pieces' key tiles there are for each tile's: longer pieces count as one.

        `most`: for the tile, or for that of any shorter sequence.
        """
        if not plan.long:
            return tiles.keys
        tall, block = plan.config.block_m > LOW, plan.config.block_n
        halves = halves_of(plan.batch.host_lens[tiles.seq], plan.long, tall)
        units: Ints = -(-2 * tiles.keys // halves)
        if most:  # just below twice as many keys as `long`
            bound = -(-4 * plan.long // (block * (3 if tall else 4)))
            units = np.maximum(units, np.minimum(tiles.keys, bound))
        return units

    def _saves_a_round(self, programs: int) -> bool:
        """Whether four programs on a multiprocessor take a round less than three: `ROUNDS` at most."""
        rounds = -(-programs // (MANY_ON_ONE * self.num_sms))
        return rounds <= ROUNDS and rounds < -(-programs // (FEW_ON_ONE * self.num_sms))

    def _plan_pieces(
        self, plan: AttentionPlan, tiles: Tiles, each: int, captured: AttentionPlan | None = None
    ) -> None:
        """Give each piece of `each` key tiles a program, or one of a `captured` launch's."""
        least, heads, before = plan.grid[0], self.spec.num_kv_heads, None
        if captured is not None:
            before = captured.work
        elif self._is_captured(plan.batch):
            most = self._tiles(plan, most=True)
            least = segments(self._units(plan, most, True), each).programs
        units = self._units(plan, tiles)
        first = np.argsort(units - tiles.keys, kind="stable")  # the longest pieces
        tiles, units = Tiles(*(x[first] for x in (tiles.seq, tiles.row, tiles.keys))), units[first]
        dealt = segments(units, each, least)
        if captured is None:
            plan.grid = (dealt.programs, heads, 1)
            if plan.way == "singles" and self.full and self._saves_a_round(dealt.programs * heads):
                plan.config = self.full
            if dealt.programs > len(tiles.keys):
                tall = plan.way != "pieces" and plan.config.block_m > LOW
                alike = TALL_MERGED if tall else 1
                plan.merging = Merge(dealt.programs, len(tiles.keys), dealt.parts, alike=alike)
                self._reserve(plan.rows, dealt.programs * heads, plan.beside)
        elif dealt.programs > least:
            raise BatchError("a sequence is longer than a captured step was planned for")
        work = dealt.work(tiles)
        if before is None:
            plan.place = plan.batch.later(work)
        else:
            plan.place = Place.of(plan.batch.upload(work, before))
        self._keep(plan)

    def portable_of(self, plan: AttentionPlan) -> AttentionPlan:
        """Return the portable kernel's plan for the same requests."""
        if plan.requests is None:
            return super().portable_of(plan)
        return self._plan_class(plan.batch, *plan.requests, portable=True)
