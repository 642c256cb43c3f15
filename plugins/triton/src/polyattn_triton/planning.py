"""TRITON_ATTN's plans: how are a step's tiles and their keys dealt out to a chip's programs?"""

from __future__ import annotations

from collections import defaultdict
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from polyattn.kernel import (
    AttentionBackend,
    Batch,
    CacheFormat,
    Device,
    LayerSpec,
    all_seen,
    current_settings,
    over_chosen_pages,
    storage_dtype,
    upload,
)
from torch import Tensor

from polyattn_triton.functions.pointwise import Generated
from polyattn_triton.hopper.choice import hopper_prefill
from polyattn_triton.hopper.packing import ON_ONE, PLACES, packed_bytes, packed_config
from polyattn_triton.launch import (
    MOST_AT_ONCE,
    WIDE_PARTS,
    Kept,
    Merge,
    Workspace,
    fitting,
    launches_early,
    multiprocessors,
)
from polyattn_triton.listing import Lister
from polyattn_triton.plan import AttentionPlan
from polyattn_triton.schedule import (
    EVEN,
    Chip,
    Ints,
    Line,
    Rates,
    Tiles,
    key_tiles,
    max_parts,
    most_key_tiles,
    most_keys,
    rows_of,
    stretches,
    units_of_decodes,
    whole,
)
from polyattn_triton.variants import (
    FEW_ON_ONE,
    FEW_SPLITS,
    LONGEST_FEW,
    MANY_ON_ONE,
    MAX_SPLITS,
    MIN_SPLIT_KEYS,
    MOST_FEW_KEYS,
    MOST_FEW_ROWS,
    TALLEST_FEW,
    even_splits,
    leaves_tail,
    most_merged_by_one,
    on_one,
    part_rows,
    shared_bytes,
    tallest_tile,
    tile_config,
)

RATES = Rates(item=1, least=2, merge=4)
"""Key tiles that a tile of queries costs beside its own, that are worth a program, and that it costs to
merge. Of 127 short steps on an H200, those whose longest tile has up to 4 more than a share took 0.87 of
the time uncut, those with 5 to 10 more 1.11."""
LONG, LONG_KEYS = 15, 5120
"""Decodes over e4m3 are those of rows from LONG key tiles of a multiprocessor on, if a sequence has more
keys than LONG_KEYS. H200, over the portable kernel's time: 4 x 8k 0.89, 16 x 4k 1.01, 8 x 2k 1.09. H100:
1 x 8k 0.90, 2 x 5k 1.06, and with one KV head 12 x 6k 0.97, 1 x 128k 0.69."""
MERGE = 6
"""And for prefill, of each program that a multiprocessor holds. Of 214 prefills and chunks on an H200 by
Hopper's own, whole tiles took 20 us and 1.6 for each of the fullest program's, stretches 29 us and 1.6.
Of 201 by the portable one, whole tiles took 0.73 of the time."""


def chip_of(places: int, heads: int, packed: bool) -> Chip:
    """Return what programs run on; `packed`: of one warp, whose many splits are merged at once."""
    return Chip(places, heads, PLACES, wide=WIDE_PARTS) if packed else Chip(places, heads)


def _alike(units: Ints, item: int) -> bool:
    """Whether decodes' tiles are so long, `item` included, that even splits of all end together."""
    mean = int(np.add.reduce(units)) / len(units) - item
    return bool(units.item(units.argmax()) - item <= EVEN * mean + 1)


class PlannedAttention(AttentionBackend):
    """Plans over tiles of (token, head of group) rows; keys are split where that helps."""

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        arch = device.arch
        self.decode_config = tile_config(spec, arch, "decode")
        self.few_config = tile_config(spec, arch, "few")
        self.prefill_config = tile_config(spec, arch, "prefill")
        # The plan lists tiles before it is known where the keys are read from.
        self.paged_config = replace(
            tile_config(spec, arch, "paged"),
            block_m=self.prefill_config.block_m,
            block_n=self.prefill_config.block_n,
        )
        self.torch_device = torch.device(str(device.torch_device))
        self.num_sms = multiprocessors(self.torch_device)
        self.generated = Generated.of(spec)
        self.packed = packed_config(spec, cache, arch, self.generated)
        # Over rows of bytes it serves all decodes; over e4m3, those that fill the chip uncut.
        self.in_rows = self.packed is not None and spec.in_rows
        if self.packed is not None and self.in_rows:
            self.decode_config = self.few_config = self.packed
        # A decode's programs are planned by the places of usual ones.
        self.places = self.num_sms * (PLACES if self.in_rows else 1)
        self.hopper = hopper_prefill(spec, arch, self.torch_device, self.generated)
        self.early = launches_early(arch)
        # A captured step is merged anyway.
        self.rates = replace(RATES, merge=0) if spec.graph_capture else RATES
        self.most_few_rows = MOST_FEW_ROWS
        tallest = tallest_tile(spec, arch)
        self.tallest_few, self.in_one_tile = min(TALLEST_FEW, tallest), spec.gqa_ratio <= tallest
        self.most_few_keys = MOST_FEW_KEYS
        # The fewest keys of one of several blocks that share a sequence; 0: none share one.
        asked = current_settings().multi_block
        self.least_split = MIN_SPLIT_KEYS if asked is None else asked
        least = -(-(asked or 0) // self.few_config.block_n)
        merge = self.rates.merge if asked is None else 0
        self.decode_rates = Rates(RATES.item, max(RATES.least, least), merge)
        self.chip = chip_of(self.places, spec.num_kv_heads, self.in_rows)
        self.all_seen = all_seen(spec)
        self.on_one = 0  # a tuner's override of the plan
        self.rows = part_rows(spec, self.few_config, False)
        self.by_one = 0 if self.in_rows else most_merged_by_one(spec, arch)
        self.quantized = storage_dtype(spec.stored_dtype).itemsize == 1
        self.spaces: dict[int, Workspace] = defaultdict(partial(Workspace, self.torch_device))
        self.workspace = self.spaces[0]
        self.lister = Lister.of(spec, self.torch_device)
        self._residents: dict[tuple[Any, ...], int] = {}
        self._none = torch.empty(0, dtype=torch.int32, device=self.torch_device)
        self._nowhere = self._none.data_ptr()

    def plan_rows(
        self,
        batch: Batch,
        portable: bool = False,
        uncut: bool = False,
        cut: bool = False,
    ) -> AttentionPlan:
        """Decide the way, and deal the step's tiles out; `portable`: not to Hopper's own prefill.

        `uncut`: each of a prefill's tiles to a program of its own, of the portable kernel. `cut`: none
        of them, though it be the slower.
        """
        chosen = self._over_chosen(batch) if self.spec.mask == "block_sparse" else None
        batch = chosen or batch
        plan = AttentionPlan(batch, self._none)
        plan.chosen = chosen is not None
        # A captured graph reads the capture's lists, whatever a later step's masks show.
        eager = not self.spec.graph_capture
        lister = self.lister if eager and self.lister and self.lister.takes(batch) else None
        table = batch.block_table
        if table is not None:
            plan.table = (table.stride(0), table.shape[1] - 1)
        captured = table is None or bool(batch.num_contexts)
        if batch.all_decode and not captured and lister is None and self.in_one_tile:
            self._plan_decode(plan)
        elif not captured and self._are_few(batch):
            self._plan_few(plan, lister)
        elif batch.num_contexts or (batch.lens_are_bounds and self.spec.graph_capture):
            self._plan_captured(plan)
        else:
            self._plan_prefill(plan, lister, portable, uncut, cut)
        self._keep(plan)
        return plan

    def refill(self, plan: AttentionPlan, batch: Batch) -> AttentionPlan:
        """Write a later step's work into a captured plan's, whose grid and merge serve any."""
        rates, tiles, sent = self.rates, None, None
        if plan.way == "listed":
            rates, staging, units = (
                self.decode_rates,
                batch.staging,
                self._decode_units(plan, batch),
            )
            sent = None if staging is None else (staging, staging.dropped, units.tobytes())
            if sent is not None and sent == plan.sent:
                return plan
            line = Line.of_units(units, int(units.max()))
            plan.sent = None
        elif plan.way in ("few", "pieces"):
            later = copy(plan)
            later.batch = batch
            tiles = self._tiles(later)
            line = Line.of(tiles.keys, rates.item)
        else:  # programs find their keys themselves
            return plan
        if plan.grid[0]:
            batch.upload(stretches(line, plan.grid[0], rates).work(tiles), plan.work)
            plan.sent = sent
        return plan

    def _keep(self, plan: AttentionPlan) -> None:
        """Collect the common arguments of a plan's launches, after planning."""
        batch, table = plan.batch, plan.batch.block_table
        space, place, (starts, lens) = self.spaces[plan.beside], plan.place, batch.lengths_at()
        table = table if table is not None else self._none
        work = self._nowhere if place is None else place.address
        if plan.way in ("prefill", "pieces"):
            keys: Tensor | None = self._none if plan.widening is None else plan.widening.origins
            if plan.fresh and plan.widening is None:
                keys = self._key_starts(batch)
            at = starts if keys is None else keys.data_ptr()
            plan.kept = Kept(
                (space.parts, space.part_lse, table),
                (lens, starts, at, work),
                lambda: (
                    batch.seq_lens,
                    batch.query_start_loc,
                    batch.query_start_loc if keys is None else keys,
                    plan.work,
                ),
            )
        else:
            plan.kept = Kept(
                (space.parts, space.part_lse, space.done, table),
                (lens, starts, work),
                lambda: (batch.seq_lens, batch.query_start_loc, plan.work),
            )
        config = plan.config
        plan.variant = (
            plan.way, config.block_m, config.block_n, config.num_warps, config.num_stages,
            batch.causal, plan.lists is not None, plan.chosen, plan.long,
        )  # fmt: skip

    def portable_of(self, plan: AttentionPlan) -> AttentionPlan:
        """Return the portable kernel's plan for what Hopper's own turned out not to take."""
        return self.plan_rows(plan.batch, portable=True)

    def _over_chosen(self, batch: Batch) -> Batch | None:
        """Return decodes over the pages that a block-sparse mask chooses: then there is none to ask.

        Not where a score depends on the key's place.
        """
        spec = self.spec
        placed = spec.variant or spec.alibi or spec.rope or spec.sliding_window or spec.chunk_size
        if placed or spec.length_bounds or self.cache is None:
            return None
        if not batch.all_decode:
            return None
        return over_chosen_pages(batch, self.cache.block_size)

    @cached_property
    def packed_on_one(self) -> int:
        """How many programs over packed numbers a multiprocessor holds at once."""
        assert self.packed is not None and self.cache is not None
        needed = packed_bytes(self.cache, self.packed)
        return fitting(self.torch_device, needed, ON_ONE)

    @cached_property
    def of_long(self) -> PlannedAttention:
        """What plans decodes over e4m3 that read much: as those over rows of bytes."""
        planner = copy(self)
        assert self.packed is not None
        planner.in_rows, planner.by_one = True, 0
        planner.decode_config = planner.few_config = self.packed
        planner.places = self.num_sms * PLACES
        planner.chip = chip_of(planner.places, self.spec.num_kv_heads, True)
        return planner

    def _is_long(self, batch: Batch) -> bool:
        """Whether a step over e4m3, not of rows, is planned as if it were: long, and few or uneven.

        What a captured graph runs doesn't follow from lengths. Of even lengths, 256 programs
        of the portable kernel took 0.89 of the time.
        """
        bound = self.spec.graph_capture or self.spec.length_bounds
        if self.packed is None or self.in_rows or bound or not self.least_split:
            return False
        heads, least = self.spec.num_kv_heads, LONG * self.packed.block_n * self.num_sms
        total, longest = int(batch.host_lens.sum()), batch.max_seq_len
        few = batch.num_seqs * heads <= self.num_sms or longest * batch.num_seqs > EVEN * total
        return few and longest > LONG_KEYS and total * heads >= least

    def _plan_decode(self, plan: AttentionPlan) -> None:
        """One tile a sequence: even splits of even lengths, else stretches."""
        if self._is_long(plan.batch):
            self.of_long._plan_decode(plan)
            return
        spec, batch = self.spec_of(plan.batch), plan.batch
        plan.config, plan.rows = self.few_config, self.rows
        if spec.length_bounds:  # any lengths up to those: splits take the device's tiles in turn
            self._plan_even(plan, self.splits(batch))
            return
        if not self.least_split:
            self._plan_even(plan, 1)
            return
        item, count, eager = self.decode_rates.item, batch.num_seqs, not spec.graph_capture
        units = None if eager and count == 1 else self._decode_units(plan, batch)
        if eager and (units is None or _alike(units, item)):
            splits = self.splits(batch)
            if not leaves_tail(count * spec.num_kv_heads * splits, self.places):
                self._plan_even(plan, splits)
                return
        plan.way, units = "listed", self._decode_units(plan, batch) if units is None else units
        self._deal(plan, Line.of_units(units, units.item(units.argmax())), None)

    def _decode_units(self, plan: AttentionPlan, batch: Batch) -> Ints:
        """Return how long the tiles of a step's decodes are."""
        spec, item, block = self.spec_of(batch), self.decode_rates.item, plan.config.block_n
        return units_of_decodes(spec, batch.host_lens, block, item)

    def _plan_even(self, plan: AttentionPlan, splits: int) -> None:
        """A program for each sequence, KV head and split. The device assigns the keys."""
        count, heads = plan.batch.num_seqs, self.spec.num_kv_heads
        if count * heads * splits > FEW_ON_ONE * self.places:
            plan.config = self.decode_config
            if self.packed is not None and splits == 1:
                plan.config = self.packed
        plan.grid = (count, heads, splits)
        plan.way, plan.splits = "split" if splits > 1 else "decode", splits
        if splits > max(1, self.by_one):
            wide = self.in_rows and splits > MOST_AT_ONCE
            plan.way, plan.merging = "many", Merge(count, count, splits, wide)
        self._reserve(plan.rows, MANY_ON_ONE * self.places)

    def splits(self, batch: Batch) -> int:
        """Return into how many even splits keys are cut: until the chip is full."""
        spec = self.spec
        if not self.least_split:
            return 1
        longest = int(most_keys(spec, batch.max_seq_len, 1))
        programs = max(1, batch.num_seqs * spec.num_kv_heads)
        # To merge many splits takes longer than a second program in a place gains, but for packed ones.
        if self.in_rows:
            wanted = max(1, self.num_sms * self.packed_on_one // programs)
        else:
            each = self.places // programs
            wanted = min(even_splits(programs, self.places), max(FEW_SPLITS, each))
        limit = MAX_SPLITS * (PLACES if self.in_rows else 1)
        most = max(1, min(wanted, -(-longest // self.least_split), limit))
        keys = -(-longest // self.few_config.block_n)
        return self.chip.splits(most, keys, batch.num_seqs, self.by_one)

    def _are_few(self, batch: Batch) -> bool:
        """Whether the decode kernel serves a step's queries: in one tile each, in several over few keys.

        What a captured graph runs doesn't follow from lengths.
        """
        group = self.spec.gqa_ratio
        single = batch.max_query_len == 1 and not self.in_one_tile
        if single or batch.max_query_len * group <= self.most_few_rows:
            return True
        bound = self.spec.graph_capture or self.spec.length_bounds
        if bound or batch.max_query_len > LONGEST_FEW:
            return False
        queries = batch.host_query_lens
        tiles = -(-queries * group // self.tallest_few)
        read = int(tiles @ most_keys(self.spec, batch.host_lens, queries)) * self.spec.num_kv_heads
        return read <= self.most_few_keys * self.num_sms

    def _plan_few(self, plan: AttentionPlan, lister: Lister | None) -> None:
        """Tiles as high as the longest query needs, by stretches; whose keys are listed by prefill."""
        spec = self.spec
        rows = min(plan.batch.max_query_len * spec.gqa_ratio, self.tallest_few)
        plan.config = tile_config(spec, self.device.arch, "few", rows)
        if lister is not None:
            self._plan_tiles(plan, lister, cut=True)
            return
        plan.way, plan.rows = "few", plan.config.block_m
        tiles = self._tiles(plan)
        self._deal(plan, Line.of(tiles.keys, self.rates.item), tiles)

    def _plan_prefill(
        self,
        plan: AttentionPlan,
        lister: Lister | None,
        portable: bool,
        uncut: bool,
        cut: bool,
    ) -> None:
        batch, bounded = plan.batch, self.spec.length_bounds
        exact = not bounded and batch.lens == batch.query_lens
        plan.fresh = batch.block_table is None or exact
        hopper = None if portable or uncut or bounded else self.hopper
        if hopper is not None and hopper.takes(plan, self.spec_of(batch)):
            plan.config, plan.at_once = hopper.config, hopper.heads
        else:
            plan.config = self.prefill_config if plan.fresh else self.paged_config
        if uncut:
            tiles = self._tiles(plan)
            self._one_each(plan, tiles, np.argsort(-tiles.keys, kind="stable"))
            return
        self._plan_tiles(plan, lister, cut)

    def _plan_captured(self, plan: AttentionPlan) -> None:
        """Stretches over pages, as many as a full chip's programs, whatever rows and lengths come."""
        batch, plan.config = plan.batch, self.paged_config
        plan.way, plan.rows = "pieces", plan.config.block_m
        tiles = self._tiles(plan)
        most = batch.num_tokens * self.spec.gqa_ratio // plan.config.block_m + batch.num_seqs
        self._deal(plan, Line.of(tiles.keys, self.rates.item), tiles, most)

    def _plan_tiles(self, plan: AttentionPlan, lister: Lister | None, cut: bool = False) -> None:
        """Whole tiles, the ones with most keys first, where they end together; else stretches.

        `cut`: stretches anyway.
        """
        plan.way = "prefill"
        tiles = self._tiles(plan)
        if not len(tiles.keys):
            return
        if cut or not self._plan_whole(plan, tiles):
            plan.way, plan.rows = "pieces", plan.config.block_m
            self._deal(plan, Line.of(tiles.keys, self.rates.item), tiles)
        if lister is not None:
            plan.lists = lister.listed(
                plan.batch, self.spec_of(plan.batch), plan.config, plan.work, len(tiles.keys)
            )

    def _plan_whole(self, plan: AttentionPlan, tiles: Tiles) -> bool:
        """Deal uncut tiles out, the ones with most keys first; False: they don't end together."""
        heads, resident = self.spec.num_kv_heads, self._resident(plan)
        slots = max(1, resident * self.num_sms // heads)
        rates = replace(RATES, merge=MERGE * resident)
        order = whole(tiles.keys, slots, rates)
        if order is None:
            return False
        if plan.at_once and self.hopper is not None:
            plan.at_once = self.hopper.heads_at_once(
                plan.batch.lens, tiles.keys[order] + rates.item
            )
        self._one_each(plan, tiles, order)
        return True

    def _one_each(self, plan: AttentionPlan, tiles: Tiles, order: Ints) -> None:
        """Give each tile a program of its own, in this order."""
        plan.way, plan.grid = "prefill", (len(order), self.spec.num_kv_heads, 1)
        work = np.empty((2, len(order)), np.int32)
        work[0], work[1] = tiles.seq[order], tiles.row[order]
        plan.place = plan.batch.later(work.ravel())

    def _tiles(self, plan: AttentionPlan, most: bool = False) -> Tiles:
        """Cut the queries into tiles, and count the key tiles that each one sees.

        `most`: that it may see where sequences have up to as many keys.
        """
        batch, group, config = plan.batch, self.spec.gqa_ratio, plan.config
        queries, lens = batch.host_query_lens, batch.host_lens
        some = queries if plan.requests is None else np.where(plan.requests[1], queries, 0)
        seq, row = rows_of(some, group, config.block_m)
        context, keys = (lens - queries)[seq], lens[seq]
        last = np.minimum(row + (config.block_m - 1), (queries * group - 1)[seq])
        count = most_key_tiles if most or self.spec.length_bounds else key_tiles
        first = context + row // group
        keys = count(self.spec_of(batch), first, context + last // group, keys, config.block_n)
        return Tiles(seq, row, keys)

    def _resident(self, plan: AttentionPlan) -> int:
        """Return how many of a plan's programs a multiprocessor holds at once."""
        key = (plan.way, plan.config, self.on_one)
        programs = self._residents.get(key)
        if programs is None:
            if plan.config == self.packed:
                programs = self.packed_on_one
            else:
                most = self.on_one or on_one(self.spec, plan.config, plan.way)
                needed = shared_bytes(self.spec, plan.config, plan.way)
                programs = fitting(self.torch_device, needed, most)
            self._residents[key] = programs
        return programs

    def _deal(
        self,
        plan: AttentionPlan,
        line: Line,
        tiles: Tiles | None,
        room: int = 0,
    ) -> None:
        """Give a full chip's programs stretches of the tiles, in a buffer that has `room` for more.

        Without `tiles` they are decodes' sequences.
        """
        heads, count = self.spec.num_kv_heads, len(line.ends) - 1
        if not count:
            return
        programs = max(1, self._resident(plan) * self.num_sms // heads)
        rates = self.decode_rates if tiles is None else self.rates
        captured = self.spec.graph_capture  # its grids serve any later step's tiles
        if tiles is None and not captured:
            least = rates.item + rates.least
            programs = self.chip.programs(programs, line.total, line.longest, least)
        plan.grid = (programs, heads, 1)
        dealt = stretches(line, programs, rates)
        if captured or dealt.parts > 1:
            cut = (programs, programs) if captured else (count, dealt.parts)
            plan.merging = Merge(programs, *cut)
        work = dealt.work(tiles)
        plan.place = plan.batch.later(work, len(work) + 3 * max(0, room - count))
        self._reserve(plan.rows, max(programs * heads, MANY_ON_ONE * self.places))

    def _reserve(self, rows: int, programs: int, beside: int = 0) -> None:
        """Have the workspace of a full chip at once: a captured graph goes on writing to it."""
        space = self.spaces[beside]
        space.reserve(max_parts(programs) * rows, self.spec.v_head_size, programs)

    def _key_starts(self, batch: Batch) -> Tensor | None:
        """Return where sequences' own keys start, on the device; None: where their queries do."""
        if batch.block_table is not None or (batch.keys_packed and batch.lens == batch.query_lens):
            return None
        return upload(np.array(batch.key_starts, np.int32), self.torch_device)
