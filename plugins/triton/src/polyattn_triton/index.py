"""TRITON_INDEX: one kernel scores a paged cache of index keys, another lists the best candidates."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import triton
from polyattn.kernel import (
    IndexBackend,
    IndexerSpec,
    IndexFrame,
    LayerSpec,
    Plan,
    token_places,
    visible_entries,
)
from torch import Tensor

from polyattn_triton.kernels.index import index_scores_kernel, index_select_kernel
from polyattn_triton.launch import Launcher, multiprocessors, power

SCORES = 256 << 20
"""Bytes of scores that are held at a time: longer steps come in pieces."""
PART = 16384
"""Candidates that a program ranks where a few rows have more."""
TILE = 128
"""Entries that a program scores at a time."""
TILES = 8
"""Tiles of a program that scores for one token."""
PROMPT_TOKENS = 8
"""Tokens of a prompt for which a program scores a tile of entries."""
CANDIDATES = 2048
"""Elements of a tile that is ranked."""
WARPS, STAGES, SELECT_WARPS = 4, 3, 8
"""Of programs that score, how many loads of keys are in flight in them, and of programs that rank."""

_score = Launcher(index_scores_kernel)
_select = Launcher(index_select_kernel)


def scores_options(arch: str) -> dict[str, Any]:
    """Return `index_scores_kernel`'s launch options: AMD's shared memory holds one tile of keys."""
    return {"num_warps": WARPS, "num_stages": STAGES if arch.startswith("sm_") else 1}


def scores_constants(spec: LayerSpec, page_size: int, decode: bool) -> tuple[Any, ...]:
    """Return `index_scores_kernel`'s constants, in its order."""
    indexer = spec.indexer
    assert indexer is not None
    return (
        indexer.num_heads, power(indexer.num_heads), indexer.head_size, power(indexer.head_size),
        page_size, *((1, TILE, TILES) if decode else (PROMPT_TOKENS, TILE, 1)),
        indexer.activation == "relu", indexer.fold == "weighted", indexer.fold == "none",
        indexer.cache_dtype == "fp8_scaled", pooled(indexer),
    )  # fmt: skip


def pooled(indexer: IndexerSpec) -> int:
    """Return of how many entries the best score is written: of a candidate's, where a tile has them."""
    return 1 if TILE % indexer.pool or indexer.within else indexer.pool


def select_constants(indexer: IndexerSpec, listed: bool, last: bool) -> tuple[Any, ...]:
    """Return `index_select_kernel`'s constants, in its order. `last`: it writes the choice itself."""
    left = indexer.pool // pooled(indexer)
    pool = int(triton.next_power_of_2(left))
    return (
        indexer.choices, indexer.forced_first, indexer.forced_last, left, pool,
        indexer.within or 0, max(16, CANDIDATES // pool), listed, indexer.tail and last,
    )  # fmt: skip


class TritonIndex(IndexBackend):
    """Scores in float32. Rows of many candidates are cut, and the best of each part ranked again."""

    name: ClassVar[str] = "TRITON_INDEX"

    def run(self, plan: Plan, frame: IndexFrame) -> None:
        spec, batch = self.spec.indexer, plan.batch
        assert spec is not None and batch.block_table is not None
        frame.out.fill_(-1)
        entries = batch.max_seq_len // spec.tokens_per_entry
        if not batch.num_tokens or not (entries or spec.tail):
            return
        seqs, positions, lens = token_places(batch)
        visible = visible_entries(spec.tokens_per_entry, positions, lens)
        there = -(-visible // spec.pool)
        budgets, tails = torch.full_like(visible, frame.out.shape[2] - spec.tail), visible
        if isinstance(spec.budget, float):
            budgets = torch.ceil(there.double() * spec.budget - 1e-9).long()
        if spec.tail:
            seen = torch.minimum(positions + 1, lens).clamp(min=0)
            rest = seen % spec.tokens_per_entry > 0
            tails = torch.where(rest, seen // spec.tokens_per_entry, -1)
        width = max(entries, 1)
        most = max(1, SCORES // (4 * width * spec.choices))
        ends = lens.clamp(min=0) // spec.tokens_per_entry
        for start in range(0, batch.num_tokens, most):
            rows = slice(start, min(start + most, batch.num_tokens))
            of_tokens = [each[rows] for each in (seqs, ends, visible, budgets, tails)]
            self._piece(frame, rows, of_tokens, batch.block_table, width, batch.all_decode)

    def _piece(
        self, frame: IndexFrame, rows: slice, of_tokens: list[Tensor], table: Tensor, width: int,
        decode: bool,
    ) -> None:  # fmt: skip
        spec, keys = self.spec.indexer, frame.keys
        assert spec is not None
        query, out = frame.query[rows], frame.out[rows]
        seqs, ends, visible, budgets, tails = of_tokens
        weights = query if frame.weights is None else frame.weights[rows]
        query = query if query.stride(2) == 1 else query.contiguous()
        tokens, size, scaled = len(query), keys.shape[1], spec.cache_dtype == "fp8_scaled"
        scales = keys.flatten()
        if scaled:
            scales = scales.view(torch.float32)[size * spec.head_size // 4 :]
            keys = keys.view(torch.float8_e4m3fn)
        table = table if table.stride(1) == 1 else table.contiguous()
        entries, width = width, -(-width // pooled(spec))  # of a row of scores
        scores = torch.empty(tokens * spec.choices, width, dtype=torch.float32, device=query.device)
        constants = scores_constants(self.spec, size, decode)
        _score(
            (-(-entries // (TILE * constants[7])), -(-tokens // constants[5]), 1),
            (query, keys, scales, weights, table, seqs, ends, visible, scores),
            (spec.scale,),
            (query.stride(0), query.stride(1), weights.stride(0), weights.stride(1),
             keys.stride(0), keys.stride(0) // 4),
            (tokens, width, table.stride(0)),
            constants,
            scores_options(self.device.arch),
        )  # fmt: skip
        visible = -(-visible // pooled(spec))
        held, held_steps = visible, (0, 0)
        if spec.within is not None:
            assert frame.within is not None
            held = _held(frame.within[rows], -(-entries // spec.within))
            held_steps = (held.stride(0), held.stride(1) if held.shape[1] > 1 else 0)
        most = -(-entries // spec.pool)
        count = out.shape[2] - spec.tail
        parts = -(-most // PART)
        few = len(scores) < 4 * multiprocessors(query.device)
        ids, listed = out, False
        if parts > 1 and few and 2 * parts * count <= most:
            listed = True
            ids = torch.full(
                (len(scores), parts * count), -1, dtype=torch.int32, device=query.device
            )
        each = PART if listed else most
        passes = [(False, parts if listed else 1, ids)] + [(True, 1, out)] * listed
        for second, programs, into in passes:
            _select(
                (len(scores), programs, 1),
                (scores, visible, budgets, tails, held, ids, into),
                (),
                held_steps,
                (ids.shape[-1] if second else 0, count if into is not out else out.shape[2],
                 width, each, programs),
                select_constants(spec, second, into is out),
                {"num_warps": SELECT_WARPS},
            )  # fmt: skip


def _held(within: Tensor, blocks: int) -> Tensor:
    """Return which blocks of entries are among a token's candidates, uint8 (tokens, choices, blocks)."""
    named = within.long().clamp(min=-1, max=blocks)
    held = torch.zeros(*named.shape[:2], blocks + 2, dtype=torch.uint8, device=within.device)
    held.scatter_(2, named + 1, 1)
    return held[..., 1:-1].contiguous()
