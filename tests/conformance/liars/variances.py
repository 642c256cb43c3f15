"""Lies about bits: results that are right, and other ones in other company, steps or calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from liars.plain import HonestGraph, Plain
from liars.told import Hooks, lies
from polyattn.families.attention import specified
from polyattn.families.attention.vanilla import Vanilla
from polyattn.families.sparse.torch_index import TorchIndex
from polyattn.kernel import Batch, Frame, IndexFrame, Plan, RecurrentFrame
from polyattn_cpu.mla import TorchMLA, TorchSparseMLA
from polyattn_cpu.recurrent import TorchScan
from polyattn_cpu.sdpa import TorchSDPA
from torch import Tensor

NUDGE = 1.004
"""One unit of bfloat16's last place, about: within every tolerance."""


class Same(Plain):
    """Whatever is asked beside a row, it has the same bits."""

    def nudged(self, batch: Batch, index: int) -> bool | slice:
        """Return whether a sequence's rows have other bits, or which of them do."""
        return False

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        batch, out = plan.batch, frame.out
        self.paged = frame.cache is not None
        for index in range(batch.num_seqs):
            which = self.nudged(batch, index)
            if which is not False:
                rows = out[batch.starts[index] : batch.starts[index + 1]]
                rows[slice(None) if which is True else which] *= NUDGE


class HonestSame(Same):
    by: ClassVar[tuple[str, ...]] = ()


REGROUPED = {
    "PlaceInTheBatch": lambda self, batch, index: index % 2 == 1,
    # Keys are split by the longest sequence.
    "LongestNeighbour": lambda self, batch, index: batch.max_seq_len > 40,
    # One sequence has a kernel of its own.
    "AloneIsAnother": lambda self, batch, index: batch.num_seqs == 1,
    # Tiles are as high as the step has tokens.
    "TokensOfTheStep": lambda self, batch, index: batch.num_tokens > 64,
    # Pages that lie in order are read in larger tiles.
    "ByItsPages": lambda self, batch, index: (
        batch.block_table is not None and int(batch.block_table[index, 0]) % 2 == 1
    ),
    # Splits end where the chip is full: work that the step has in all.
    "FullChip": lambda self, batch, index: sum(batch.lens) > 150,
    # Which key tiles a mask shows is listed where the step has several sequences.
    "MasksListedByTheStep": lambda self, batch, index: (
        self.spec.mask is not None and batch.num_seqs > 1
    ),
}
CHUNKED = {
    # Context and a chunk's own keys are merged.
    "ContextApart": lambda self, batch, index: batch.lens[index] > batch.query_lens[index] > 1,
    # A prompt's own keys are read as they come, in other tiles than the cache's.
    "WholePrompts": lambda self, batch, index: batch.query_lens[index] == batch.lens[index] > 20,
    # The last rows of a tile of 16 are masked otherwise.
    "RowOfTheTile": lambda self, batch, index: slice(15, None, 16),
}
HITS = {
    # A chunk that begins with a block skips a mask.
    "HitsOfBlocks": lambda self, batch, index: (
        batch.lens[index] > batch.query_lens[index]
        and (batch.lens[index] - batch.query_lens[index]) % 16 == 0
    )
}
LONG = {
    # More than 512 queries, or after 512 keys, are cut.
    "LongChunks": lambda self, batch, index: batch.query_lens[index] < batch.lens[index] > 512
}
GIVEN = {
    "GivenKeys": lambda self, batch, index: not self.paged,
    # Of packed keys the first sequence's are aligned.
    "PackedBehindOthers": lambda self, batch, index: not self.paged and batch.key_starts[index] > 0,
}
# A single token has decode's tile.
DECODES = {"DecodesApart": lambda self, batch, index: batch.query_lens[index] == 1}
DRAFTS = {"DraftsApart": lambda self, batch, index: 2 <= batch.query_lens[index] <= 8}
globals().update(lies(__name__, *((Same, "nudged", told, *by) for told, *by in (
    (REGROUPED, "regrouped"), (CHUNKED, "chunked"), (HITS, "hits"), (LONG, "chunked--long"),
    (GIVEN, "given_alike"), (DECODES, "chunked", "drafted"), (DRAFTS, "drafted"),
))))  # fmt: skip


class PlansForGraphs(HonestGraph):
    """A captured step's splits are as many as the chip's programs."""

    by = ("planned_alike",)

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        if self.spec.graph_capture:
            frame.out.mul_(NUDGE)


class SplitsOfTheLongest(HonestGraph):
    """What is planned into a captured plan keeps the splits of the longest lengths."""

    by = ("planned_alike",)
    refilled = False

    def refill(self, plan: Any, batch: Batch) -> None:
        super().refill(plan, batch)
        self.refilled = True

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        if self.refilled:
            frame.out.mul_(NUDGE)


class OneSequenceAtATime(TorchSDPA):
    """torch's tiles of queries follow from how many there are."""

    by = ("chunked",)


class ChunksFromTheStep(TorchScan):
    """Chunks of a recurrence begin where its step does."""

    by = ("divided",)

    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        none = [0] * len(plan.slots)
        self._sequences(plan, none, frame.inputs, frame.params, frame.states, frame.out)


class RoundsBetweenSteps(TorchScan):
    """A state is rounded where a step ends."""

    by = ("divided",)

    def run(self, plan: Any, frame: RecurrentFrame) -> None:
        super().run(plan, frame)
        written = [slot for slot in plan.slots if slot >= 0]
        frame.states[written] = frame.states[written].bfloat16().to(frame.states.dtype)


class Scans(Hooks, TorchScan):
    """Right recurrences, whose results a liar changes in the last place."""


class Latents(Hooks, TorchMLA):
    """Right attention to latents, whose results a liar changes in the last place."""


class Chosen(Hooks, TorchSparseMLA):
    """Right attention to what is chosen, whose results a liar changes in the last place."""


def nudge_states(frame: RecurrentFrame, slots: list[int], by: float) -> None:
    written = [slot for slot in slots if slot >= 0]
    frame.states[written] *= 1.0 + 1e-6 * by


def rows_of_one_request(self: Any, plan: Plan, frame: Frame) -> None:
    """Rows over the same pages are attended to together."""
    table = plan.batch.block_table
    assert table is not None
    same = (table[1:, :1] == table[:-1, :1]).nonzero()[:, 0]
    frame.out[same + 1] *= NUDGE


def by_the_batch(self: Any, plan: Plan, frame: Frame) -> None:
    frame.out.mul_(1.0 + 1e-3 * (plan.batch.num_seqs % 7))


def last_of_many(self: Any, plan: Plan, frame: Frame) -> None:
    """Rows that end a vector are merged otherwise: the last token of a step of many."""
    if plan.batch.num_seqs > 1:
        frame.out[-1:] *= NUDGE


def of_many_tokens(self: Any, plan: Plan, frame: Frame) -> None:
    """Chosen rows of several tokens are multiplied in one call."""
    if len(frame.query) > 4:
        frame.out.mul_(NUDGE)


AFTER: tuple[tuple[type[Any], str, Any, tuple[str, ...]], ...] = (
    (Latents, "ContextsByTheBatch", last_of_many, ("regrouped",)),
    (Latents, "LatentsByTheBatch", by_the_batch, ("regrouped",)),
    (Latents, "RowsOfOneRequest", rows_of_one_request, ("chunked", "drafted")),
    (Chosen, "ChoicesOfManyTokens", of_many_tokens, ("regrouped",)),
    (Scans, "ScansByTheBatch", by_the_batch, ("regrouped",)),
    # Outputs have the same bits, and the states that are left don't.
    (Scans, "StatesByTheBatch", lambda self, plan, frame: nudge_states(
        frame, plan.slots, plan.batch.num_seqs % 7), ("regrouped",)),
    # Of several sequences with a token each, the states that are left have other bits.
    (Scans, "StatesOfManyTokens", lambda self, plan, frame: nudge_states(
        frame, plan.slots, plan.batch.max_query_len == 1 and plan.batch.num_seqs > 1), ("divided",)),
)  # fmt: skip
globals().update(
    lies(__name__, *((base, "after", {name: does}, *by) for base, name, does, by in AFTER))
)


class ScoresByTheBatch(TorchIndex):
    """Scores of several tokens are summed in another order."""

    by = ("index_regrouped",)

    def run(self, plan: Plan, frame: IndexFrame) -> None:
        if plan.batch.num_seqs > 2:
            turned = frame.query.flip(-1) * (1.0 + 2.0**-22)
            frame = replace(frame, query=turned.flip(-1))
        super().run(plan, frame)


class Specified(Vanilla):
    """The specified bits, but for what `instead` replaces in their specification."""

    by: ClassVar[tuple[str, ...]] = ("specified",)
    instead: ClassVar[dict[str, Any]] = {}

    def run(self, plan: Plan, frame: Frame) -> None:
        with patch.multiple(specified, **self.instead):
            super().run(plan, frame)


class HonestSpecified(Specified):
    by = ()
    instead: ClassVar = {"QUERIES": 3}


def _fused(query: Tensor, key: Tensor) -> Tensor:
    sums = query.new_zeros(*query.shape[:-1], key.shape[-2], 4)
    for column in range(0, query.shape[-1], 4):
        some = slice(column, column + 4)
        products = query[..., :, None, some].double() * key[..., None, :, some].double()
        sums = (sums.double() + products).float()
    return (sums[..., 0] + sums[..., 1]) + (sums[..., 2] + sums[..., 3])


class FusedProducts(Specified):
    """A product isn't rounded before it is added."""

    instead: ClassVar = {"dots": _fused}


class AnotherOrder(Specified):
    """A head's columns are summed from the last one on."""

    instead: ClassVar = {"dots": lambda q, k, dots=specified.dots: dots(q.flip(-1), k.flip(-1))}


class AnotherPolynomial(Specified):
    """The exponential is the library's, which is more exact."""

    instead: ClassVar = {"exponential": torch.exp}


class LargerBlocks(Specified):
    instead: ClassVar = {"BLOCK": 64}


class LargerSegments(Specified):
    instead: ClassVar = {"SEGMENT": 512}
