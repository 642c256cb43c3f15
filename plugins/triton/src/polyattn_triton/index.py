"""TRITON_INDEX: one kernel scores a paged cache of index keys, another lists the best candidates."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import triton
from polyattn.kernel import (
    Batch,
    IndexBackend,
    IndexerSpec,
    IndexFrame,
    LayerSpec,
    Plan,
    arch_matches,
    token_places,
    visible_entries,
)
from torch import Tensor

from polyattn_triton.kernels.index import index_scores_kernel, index_select_kernel
from polyattn_triton.launch import Launcher, multiprocessors, power

try:
    from polyattn_triton.hopper.index import prompt_scores_kernel
except ImportError:  # a Triton whose Gluon lacks what the kernel needs: the portable one serves
    prompt_scores_kernel = None

SCORES = 256 << 20
"""Bytes of scores that are held at a time: longer steps come in pieces."""
TOKENS = 65_535
"""Tokens of a piece, at most: as many programs as a GPU takes in a grid's second axis."""
PART = 16384
"""Candidates that a program ranks, all in registers."""
FEW = 2048
"""And one that is compiled for few of them; it lists so many at a time."""
GROUP = 8
"""Entries of a group whose best is ranked first, where there are more than PART."""
TILE, LARGEST_TILE = 64, 128
"""Entries that a program scores at a time; a page of the keys most often has as many."""
TILES, PROMPT_TILES = 16, 32
"""Tiles of a program that scores."""
COLUMNS, HOPPER_COLUMNS = 128, 256
"""Heads of tokens for which a program of a prompt scores a tile of entries; their queries stay in shared
memory, of which Hopper has twice as much."""
WARPS, STAGES, SELECT_WARPS, MANY = 4, 3, 8, 512
"""Of programs that score, how many loads of keys are in flight in them, and of programs that rank: half
as many where rows are MANY, twice as many for the longest of few."""

HALF, HOPPER_STAGES, HOPPER_TILES = 128, 4, (4, 64)
"""Columns of the products that Hopper's own kernel has in flight, tiles of keys in shared memory, and how
many a program scores: few where programs are."""

_score = Launcher(index_scores_kernel)
_score_prompt = Launcher(prompt_scores_kernel)
_select = Launcher(index_select_kernel)


def scores_options(spec: LayerSpec, arch: str) -> dict[str, Any]:
    """Return `index_scores_kernel`'s launch options: AMD's shared memory holds one tile of keys."""
    assert spec.indexer is not None
    stages = STAGES if tile_of(spec.indexer) == TILE else STAGES - 1
    return {"num_warps": WARPS, "num_stages": stages if arch.startswith("sm_") else 1}


def scores_constants(
    spec: LayerSpec, page_size: int, decode: bool, arch: str, group: int = 1
) -> tuple[Any, ...]:
    """Return `index_scores_kernel`'s constants, in its order; `group`: as `group_of`."""
    indexer = spec.indexer
    assert indexer is not None
    heads = power(indexer.num_heads)
    columns = HOPPER_COLUMNS if arch_matches("sm_90+", arch) else COLUMNS
    # A score's bits follow from what is multiplied with it: at a level, its token's heads alone, by one
    # program for all steps.
    decode = decode and not spec.batch_invariant
    tokens = 1 if decode or spec.batch_invariant else max(1, columns // heads)
    return (
        indexer.num_heads, heads, indexer.head_size, power(indexer.head_size),
        indexer.tokens_per_entry, page_size, decode, tokens,
        tile_of(indexer), TILES if decode else PROMPT_TILES, indexer.activation == "relu",
        indexer.fold == "weighted", indexer.fold == "none", indexer.cache_dtype == "fp8_scaled",
        pooled(indexer), group, 2 if tokens > 1 and arch_matches("sm_90", arch) else 1,
        scores_options(spec, arch)["num_stages"],
    )  # fmt: skip


def has_own_prompt(spec: LayerSpec, page_size: int, arch: str) -> bool:
    """Whether Hopper's own kernel scores a prompt's e4m3 queries: DeepSeek's and GLM's sizes."""
    indexer = spec.indexer
    assert indexer is not None
    return (
        prompt_scores_kernel is not None
        and arch_matches("sm_90", arch)
        and not spec.batch_invariant
        and indexer.head_size == 128
        and power(indexer.num_heads) in (32, 64)
        and indexer.fold != "none"
        and page_size % TILE == 0
        and (tile_of(indexer), pooled(indexer)) == (TILE, 1)
    )


def prompt_constants(indexer: IndexerSpec, page_size: int, group: int) -> tuple[Any, ...]:
    """Return `prompt_scores_kernel`'s constants, in its order."""
    scored = indexer.activation == "relu", indexer.fold == "weighted"
    sizes = indexer.num_heads, power(indexer.num_heads), indexer.head_size, indexer.tokens_per_entry
    scaled = indexer.cache_dtype == "fp8_scaled"
    return *sizes, page_size, TILE, HALF, *scored, scaled, group, HOPPER_STAGES


def select_options(candidates: int, rows: int) -> dict[str, Any]:
    """Return `index_select_kernel`'s launch options; `candidates`: of a part of a row."""
    if rows >= MANY:
        return {"num_warps": SELECT_WARPS // 2}
    return {"num_warps": SELECT_WARPS * (2 if candidates > PART // 2 else 1)}


def group_of(indexer: IndexerSpec, entries: int) -> int:
    """Return of how many neighbours the best scores are ranked first: 1, where candidates are few."""
    simple = indexer.pool == 1 and indexer.within is None and indexer.fold != "none"
    forced = indexer.forced_first + indexer.forced_last
    simple = simple and not forced and isinstance(indexer.budget, int)
    return GROUP if simple and entries > PART else 1


def tile_of(indexer: IndexerSpec) -> int:
    """Return how many entries a program scores at a time: whole candidates, where they aren't large."""
    return indexer.pool if LARGEST_TILE % indexer.pool == 0 and indexer.pool > TILE else TILE


def pooled(indexer: IndexerSpec) -> int:
    """Return of how many entries the best score is written: of a candidate's, where a tile has them."""
    return 1 if tile_of(indexer) % indexer.pool or indexer.within else indexer.pool


def select_constants(
    indexer: IndexerSpec, candidates: int, decode: bool, listed: int, last: bool, group: int = 1
) -> tuple[Any, ...]:
    """Return `index_select_kernel`'s constants, in its order.

    `candidates`: of a part. `listed`: > 0, they are in groups of so many that an earlier pass lists.
    `last`: it writes the choice itself. `group`: entries of a score that is ranked.
    """
    entries = group * pooled(indexer)
    left = max(1, indexer.pool // entries)
    pool = int(triton.next_power_of_2(left))
    fitting = (size for size in (FEW, PART // 2) if candidates * pool <= size)
    block = max(16, min(PART, next(fitting, PART)) // pool)
    return (
        indexer.choices, indexer.forced_first, indexer.forced_last, indexer.tokens_per_entry,
        entries, left, pool, indexer.within or 0, block, max(16, min(block, FEW // pool)),
        candidates <= block, listed, isinstance(indexer.budget, float), indexer.tail and last, decode,
    )  # fmt: skip


class TritonIndex(IndexBackend):
    """Scores in float32. Rows of many candidates are cut, and the best of each part ranked again."""

    name: ClassVar[str] = "TRITON_INDEX"

    @property
    def multiplies_e4m3(self) -> bool:
        assert self.spec.indexer is not None
        return self.spec.indexer.cache_dtype != "auto" and arch_matches("sm_89+", self.device.arch)

    def run(self, plan: Plan, frame: IndexFrame) -> None:
        spec, batch = self.spec.indexer, plan.batch
        assert spec is not None
        entries = batch.max_seq_len // spec.tokens_per_entry
        if not batch.num_tokens or not (entries or spec.tail):
            frame.out.fill_(-1)
            return
        vector = 16 * group_of(
            spec, entries
        )  # rows of scores, and of groups' best, are whole vectors
        width = -(-max(entries, 1) // (vector * pooled(spec))) * vector
        most = min(max(1, SCORES // (4 * width * spec.choices)), TOKENS)
        for start in range(0, batch.num_tokens, most):
            self._piece(frame, batch, slice(start, min(start + most, batch.num_tokens)), width)

    def _scored(
        self, frame: IndexFrame, batch: Batch, rows: slice, width: int, group: int
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of some tokens, and of each group's entries the best."""
        spec, keys, table = self.spec.indexer, frame.keys, batch.block_table
        assert spec is not None and table is not None
        query = frame.query[rows]
        weights = query if frame.weights is None else frame.weights[rows]
        query = query if query.stride(2) == 1 else query.contiguous()
        tokens, size, arch = len(query), keys.shape[1], self.device.arch
        scales = keys.flatten()
        if spec.cache_dtype == "fp8_scaled":
            scales = scales.view(torch.float32)[size * spec.head_size // 4 :]
            keys = keys.view(torch.float8_e4m3fn)
        table = table if table.stride(1) == 1 else table.contiguous()
        entries = max(batch.max_seq_len // spec.tokens_per_entry, 1)
        scores = torch.empty(tokens * spec.choices, width, dtype=torch.float32, device=query.device)
        best = scores if group == 1 else scores.new_empty(len(scores), width // group)
        more: tuple[int, ...] = ()
        narrow = query.dtype == keys.dtype == torch.float8_e4m3fn
        if narrow and not batch.all_decode and has_own_prompt(self.spec, size, arch):
            constants, options = prompt_constants(spec, size, group), {"num_warps": WARPS}
            at_once = 2 * HALF // constants[1]
            all_tiles = -(-entries // TILE) * -(-tokens // at_once)
            each = all_tiles // (8 * multiprocessors(query.device))
            tiles = min(max(each, HOPPER_TILES[0]), HOPPER_TILES[1])
            score, run, more = _score_prompt, TILE * tiles, (tiles,)
        else:
            options = scores_options(self.spec, arch)
            constants = scores_constants(self.spec, size, batch.all_decode, arch, group)
            score, run, at_once = _score, constants[8] * constants[9], constants[7]
        score(
            (-(-entries // run), -(-tokens // at_once), 1),
            (
                query,
                keys,
                scales,
                weights,
                table,
                batch.query_start_loc,
                batch.seq_lens,
                scores,
                best,
            ),
            (spec.scale,),
            (*query.stride()[:2], *weights.stride()[:2], keys.stride(0), keys.stride(0) // 4),
            (table.stride(0), width, rows.start, tokens, batch.num_seqs, *more),
            constants,
            options,
        )
        return scores, best

    def _piece(self, frame: IndexFrame, batch: Batch, rows: slice, width: int) -> None:
        spec, out = self.spec.indexer, frame.out[rows]
        assert spec is not None
        entries = max(batch.max_seq_len // spec.tokens_per_entry, 1)
        group = group_of(spec, entries)
        scores, best = self._scored(frame, batch, rows, width, group)
        starts, lens = batch.query_start_loc, batch.seq_lens
        held, held_steps = scores, (0, 0)
        if spec.within is not None:
            assert frame.within is not None
            held = _held(frame.within[rows], -(-entries // spec.within))
            held_steps = (held.stride(0), held.stride(1) if held.shape[1] > 1 else 0)
        budgets = _budgets(spec, batch, rows)
        count = out.shape[2] - spec.tail

        # Parts' best are ranked again, or the entries of the groups that are best.
        ids, listed, ranked, left = out, 0, group, -(-entries // (spec.pool * group))
        while True:
            parts = -(-left // PART)
            whole = parts == 1 or 2 * parts * count > left
            parts, each = (1, left) if whole else (parts, PART)
            last, into = whole and ranked == 1, out
            if not last:
                into = torch.empty(len(scores), parts * count, dtype=torch.int32, device=out.device)
            _select(
                (len(scores), parts, 1),
                (scores if ranked == 1 else best, starts, lens, budgets, held, ids, into),
                (),
                held_steps,
                (rows.start, batch.num_seqs, count, ids.shape[-1], out.shape[2] if last else count,
                 width // ranked // 16, -(-each // 16), parts),
                select_constants(spec, each, batch.all_decode, listed, last, ranked),
                select_options(each, len(scores)),
            )  # fmt: skip
            if last:
                return
            ids, listed, left = into, 1, parts * count
            if whole:
                listed, ranked, left = ranked, 1, left * ranked


def _budgets(spec: IndexerSpec, batch: Batch, rows: slice) -> Tensor:
    """Return each token's budget if it is a fraction of the visible entries, or else any tensor."""
    if not isinstance(spec.budget, float):
        return batch.query_start_loc
    _, positions, ends = (each[rows] for each in token_places(batch))
    there = -(-visible_entries(spec.tokens_per_entry, positions, ends) // spec.pool)
    return torch.ceil(there.double() * spec.budget - 1e-9).int()


def _held(within: Tensor, blocks: int) -> Tensor:
    """Return which blocks of entries are among a token's candidates, uint8 (tokens, choices, blocks)."""
    named = within.long().clamp(min=-1, max=blocks)
    held = torch.zeros(*named.shape[:2], blocks + 2, dtype=torch.uint8, device=within.device)
    held.scatter_(2, named + 1, 1)
    return held[..., 1:-1].contiguous()
