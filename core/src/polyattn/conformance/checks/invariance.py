"""Does a token have the same bits in any batch, chunk or cache? Checks for each level of `Invariance`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from polyattn.conformance.case import Case
from polyattn.conformance.checks.captured import captured_lengths, mixed_refills, refills
from polyattn.conformance.checks.recurrent import recurrent_refills
from polyattn.conformance.harness.base import Harness, block_size
from polyattn.families.attention import specified as bits_of
from polyattn.families.recurrent.layer import Recurrent
from polyattn.runtime.cache.state_cache import StateCache
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.program import Frame
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.shared_prefix import SharedRun
from polyattn.spec.kinds import GraphCapture
from polyattn.workload.base import picked_rows
from polyattn.workload.dice import Dice
from polyattn.workload.pages import bits, copied
from polyattn.workload.steps import lens_of, paged

DRAWS = 12
"""Random batches, or ways of dividing sequences among steps, of one case."""
PROMPTS = {"short": (26, 9), "long": (1100, 17, 560)}
"""How long sequences are, beside the two that may share their first blocks: by the case's batch."""
SHARED = 2
"""Blocks that those two begin with."""
LENGTHS = (1, 5, 31, 32, 33, 70, 255, 256, 257, 530)
"""Keys of sequences whose bits are specified: around the ends of blocks and segments."""
DRAFTS = 3
"""Tokens of a recurrence's drafts at most."""
Piece = tuple[int, int, int]
"""A sequence, and the first and the last but one of its tokens that a step asks for."""


def same_bits(result: Tensor, expected: Tensor, what: str) -> None:
    """Assert that no bit differs. The error counts the elements that do."""
    differ = int((bits(result) != bits(expected)).sum())
    if differ:
        most = float((result.double() - expected.double()).abs().max())
        raise AssertionError(
            f"{what}: {differ} of {result.numel()} elements have other bits, off by up to {most:.3g}"
        )


def regrouped(case: Case, harness: Harness) -> None:
    """A request has the same bits, LSE and state in any batch, at any place, in any pages."""
    step = harness.work(case)
    out = step.check().clone()
    lse, states = _kept(step)
    queries, lens = lens_of(step.lengths)
    for requests in drawn_requests(harness.dice, len(queries), DRAWS):
        some = step.picked(requests)
        result = some.run()
        its_lse, its_states = _kept(some)
        real = [place for place, request in enumerate(requests) if lens[request]]
        # Some families don't write a padding row's output.
        asked = [requests[place] for place in real]
        counts = [queries[request] for request in requests]
        mine = picked_rows(counts, real, result.device)
        same = picked_rows(queries, asked, out.device)
        pairs = [("", result[mine], out[same])]
        if lse is not None and its_lse is not None:
            pairs.append(("LSE of ", its_lse[mine], lse[same]))
        if states is not None and its_states is not None:
            after = its_states[[some.slots[place] for place in real]]
            pairs.append(("the states after ", after, states[[step.slots[i] for i in asked]]))
        for what, its, expected in pairs:
            same_bits(its, expected, f"{what}requests {asked} of a step of {requests}")


def drawn_requests(dice: Dice, count: int, draws: int) -> Iterator[list[int]]:
    """Yield the requests of a batch: each one alone, then some of them, in any order and repeated."""
    yield from ([request] for request in range(min(count, draws // 2)))
    for _ in range(draws - min(count, draws // 2)):
        yield dice.integers(0, count, dice.choice((2, 3, 5, 9, 2 * count)))


def _kept(step: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return a step's LSE and the states that it left, where it has them."""
    states = step.__dict__.get("states")
    return copied_lse(step), None if states is None else states.data.clone()


def copied_lse(step: Any) -> Tensor | None:
    """Return a copy of a step's LSE, where it has one."""
    lse = step.__dict__.get("lse")
    return None if lse is None else lse.clone()


def planned_alike(case: Case, harness: Harness) -> None:
    """A step has the same bits eagerly and by a captured plan that had other steps before."""
    layer = harness.layer(case.spec)
    eager = _as_eager(layer, harness.group(case.spec.replace(graph_capture="none")))
    if case.spec.kind.is_recurrent:
        for scan, out, states in recurrent_refills(case, harness, layer):
            now = scan.but(layer=eager, states=StateCache(scan.states.data.clone()))
            real = scan.real_rows()
            same_bits(out[real], now.run()[real], "by a captured plan, and eagerly")
            same_bits(states.data[scan.used], now.states.data[scan.used], "the states so")
        return
    mixed = case.spec.graph_capture is GraphCapture.ANY
    lengths = case.batch if mixed else captured_lengths(case, block_size(layer))
    step = harness.step(layer, lengths)
    captured = step.check().clone()
    same_bits(step.but(layer=eager).run(), captured, "planned for a graph, and not")
    steps = mixed_refills(harness, layer) if mixed else refills(case, harness, layer)
    for work, out, lse in steps:
        plain = work.but(layer=eager)
        same_bits(out, plain.run(), "by a captured plan, and eagerly")
        if lse is not None and plain.lse is not None:
            same_bits(lse, plain.lse, "the LSE so")


def _as_eager(layer: Any, group: LayerGroup) -> Any:
    """Return a layer of another group with the same parameters."""
    if isinstance(layer, Recurrent):
        return Recurrent(group, checks=layer.checks, **layer.params)
    other = copy(layer)
    other.group = group
    return other


class Told:
    """Sequences, each told once as a whole prompt: `out` holds every token's bits.

    `shared`: the first two begin with the same blocks, which the first one stores. Of latents they are
    all.
    """

    def __init__(self, case: Case, harness: Harness, shared: bool = False):
        self.layer, self.dice = harness.layer(case.spec), harness.dice
        self.block = block_size(self.layer)
        self.totals = told_lengths(case.batch, self.block)
        how: dict[str, Any] = {}
        if shared and case.spec.kind.is_latent:
            self.totals, how = self.totals[:2], {"shared": SHARED}
        elif shared:
            how = {"shared": ((SharedRun((0, 1), 0, SHARED),),)}
        self.work = harness.step(self.layer, [(n, n) for n in self.totals], **how)
        assert self.work.cache is not None
        if shared:
            batch, second = self.work.batch, self.totals[0]
            assert batch.slot_mapping is not None and batch.block_table is not None
            slots = batch.slot_mapping.clone()
            slots[second : second + SHARED * self.block] = -1
            batch = Batch(batch.starts, batch.lens, batch.block_table, slots)
            self.work = self.work.but(batch=batch)
        self.before = copied(self.work.cache)
        self.out = self.work.check().clone()
        self.lse = copied_lse(self.work)
        self.forget()

    def forget(self) -> None:
        """Start over with an empty cache."""
        self.cache = copied(self.before)

    def ask(self, pieces: Sequence[Piece]) -> None:
        """Run a step of some pieces of sequences, and compare."""
        work, starts = self.work, self.work.batch.starts
        rows = torch.cat([torch.arange(starts[s] + a, starts[s] + b) for s, a, b in pieces])
        rows = rows.to(work.query.device)
        lengths = [(b - a, b) for _, a, b in pieces]
        assert work.batch.block_table is not None
        some = {name: getattr(work, name) for name in work.names}
        some = {name: None if tensor is None else tensor[rows] for name, tensor in some.items()}
        table = work.batch.block_table[[s for s, _, _ in pieces]]
        host = table.cpu().numpy()
        step = work.but(
            lengths=lengths,
            cache=self.cache,
            **some,
            batch=paged(lengths, table, self.block, host_block_table=host),
        )
        what = ", ".join(f"tokens {a} to {b} of sequence {s}" for s, a, b in pieces[:4])
        what += "…" if len(pieces) > 4 else ""
        same_bits(step.run(), self.out[rows], what)
        lse = copied_lse(step)
        if self.lse is not None and lse is not None:
            same_bits(lse, self.lse[rows], f"LSE of {what}")


def told_lengths(name: str, block: int) -> list[int]:
    """Return the lengths of the sequences."""
    first = (SHARED + 2) * block + 1
    return [first, first + 3, *PROMPTS[name]]


def chunked(case: Case, harness: Harness) -> None:
    """A token has the same bits in chunks of any sizes, with any others in the step."""
    told = Told(case, harness)
    for _ in range(max(2, DRAWS // 4) if case.batch == "short" else 1):
        told.forget()
        for pieces in drawn_pieces(told.dice, told.totals, told.block, case.batch == "long"):
            told.ask(pieces)


def drawn_pieces(
    dice: Dice, totals: Sequence[int], block: int, coarse: bool = False
) -> Iterator[list[Piece]]:
    """Yield steps until all tokens were asked for; now and then some again, as rejected drafts are.

    `coarse`: of long sequences, in fewer steps.
    """
    sizes: tuple[int, ...] = (1, 2, 3, 5, block - 1 or 1, block, block + 1, 40, 1 << 20)
    if coarse:
        sizes = (1, 7, 100, 300, 700)
    at = [0] * len(totals)
    while any(a < total for a, total in zip(at, totals, strict=True)):
        some = [i for i, total in enumerate(totals) if at[i] < total]
        order = [some[i] for i in dice.order(len(some)).tolist()]
        pieces = []
        for sequence in order[: dice.integer(1, len(order) + 1)]:
            first = at[sequence]
            if first and dice.integer(0, 6) == 0:
                first -= min(first, dice.integer(1, 5))
            last = min(totals[sequence], first + dice.choice(sizes))
            pieces.append((sequence, first, last))
            at[sequence] = max(at[sequence], last)
        yield pieces


def drafted(case: Case, harness: Harness) -> None:
    """The last tokens of a sequence have the same bits as decodes, as drafts and as a prompt's."""
    told = Told(case, harness)
    heads = [(i, 0, max(1, total - 12)) for i, total in enumerate(told.totals)]
    for drafts in (1, 2, 3, 5, 8, 12):
        told.forget()
        told.ask(heads)
        at = [last for _, _, last in heads]
        while pieces := [
            (i, a, min(a + drafts, total))
            for i, (a, total) in enumerate(zip(at, told.totals, strict=True))
            if a < total
        ]:
            told.ask(pieces)
            at = [min(a + drafts, total) for a, total in zip(at, told.totals, strict=True)]


def hits(case: Case, harness: Harness) -> None:
    """A sequence that finds its first blocks in the cache has the bits of one that computed them.

    So it does where the step's decodes read those blocks once for both.
    """
    told = Told(case, harness, shared=True)
    told.ask([(0, 0, told.totals[0])])
    hit = SHARED * told.block
    told.ask([(1, hit, told.totals[1] - 1)])
    last = [(i, told.totals[i] - 1, told.totals[i]) for i in (0, 1)]
    told.ask(last)
    told.ask(last[::-1])


def given_alike(case: Case, harness: Harness) -> None:
    """Packed calls without a cache, of whole prompts in any company, have the paged engine's bits."""
    told = Told(case, harness)
    spec = told.layer.spec
    layer = harness.layer(spec.replace(cached=False, block_size=None))
    work = told.work
    firsts = work.batch.starts
    for requests in drawn_requests(told.dice, len(told.totals), DRAWS):
        rows = picked_rows(told.totals, requests, work.query.device)
        lens = [told.totals[i] for i in requests]
        out = torch.full_like(told.out[rows], torch.nan)
        lse = None if told.lse is None else torch.full_like(told.lse[rows], torch.nan)
        batch = Batch.from_lens(lens, lens, device=work.query.device)
        tokens = work.query[rows], work.keys[rows], work.values[rows]
        layer.run(layer.plan(batch), tokens, None, out, lse)
        same_bits(out, told.out[rows], f"sequences {requests} packed, without a cache")
        if told.lse is not None and lse is not None:
            same_bits(lse, told.lse[rows], f"LSE of sequences {requests} packed")
    assert firsts[-1] == sum(told.totals)


def specified(case: Case, harness: Harness) -> None:
    """Every token has the specified bits: in any steps, of any sequences."""
    layer, dice, cpu = harness.layer(case.spec), harness.dice, torch.device("cpu")
    for _ in range(DRAWS // 3):
        lens = [dice.choice(LENGTHS) for _ in range(dice.integer(1, 5))]
        queries = [min(length, dice.choice((1, 1, 2, 9, length))) for length in lens]
        step = harness.step(layer, list(zip(queries, lens, strict=True)))
        out, lse = step.check(), copied_lse(step)
        expected = torch.empty(out.shape, device=cpu)
        expected_lse = None if lse is None else torch.empty(lse.shape, device=cpu)
        frame = Frame(
            step.query.cpu(), step.key, step.value, step.held, layer.params, expected, expected_lse
        )
        bits_of.run(layer.spec, step.batch, frame)
        what = f"(query, keys) {step.lengths}, beside the specification"
        same_bits(out.cpu(), expected, what)
        if lse is not None and expected_lse is not None:
            same_bits(lse.cpu(), expected_lse, f"the LSE of {what}")


def divided(case: Case, harness: Harness) -> None:
    """A recurrence's token, and the state after it, have the same bits however steps are divided.

    Some steps are drafts: each token's state goes to a slot of its own, and only some are accepted.
    """
    layer, dice = harness.layer(case.spec), harness.dice
    totals = [90, 37, 5, 1]
    whole = harness.step(layer, [(total, total) for total in totals])
    out = whole.check().clone()
    ended = whole.states.data[whole.slots[: len(totals)]].clone()
    room, starts = len(whole.states.data) + len(totals) * DRAFTS, whole.batch.starts
    for _ in range(DRAWS // 3):
        states = StateCache(ended.new_full((room, *ended.shape[1:]), torch.nan))
        at, slots = [0] * len(totals), dice.order(room)[: len(totals)].tolist()
        while unfinished := [i for i, total in enumerate(totals) if at[i] < total]:
            some = [unfinished[i] for i in dice.order(len(unfinished)).tolist()]
            some = some[: dice.integer(1, len(some) + 1)]
            sizes = (1, 1, 2, DRAFTS) if dice.integer(0, 3) == 0 else (1, 1, 2, 7, 16, 33, 64)
            counts = [min(totals[i] - at[i], dice.choice(sizes)) for i in some]
            pieces = list(zip(some, counts, strict=True))
            rows = [torch.arange(starts[i] + at[i], starts[i] + at[i] + n) for i, n in pieces]
            lengths = [(n, at[i] + n) for i, n in pieces]
            own, targets, drafts = torch.tensor([slots[i] for i in some]), None, max(counts)
            if drafts <= DRAFTS:
                others = [slot for slot in dice.order(room).tolist() if slot not in slots]
                targets = torch.tensor(others[: len(some) * drafts]).view(-1, drafts)
                for row, count in zip(targets, counts, strict=True):
                    row[count:] = -1
            chosen = torch.cat(rows).to(out.device)
            batch = whole.step(lengths, own, targets)
            result = layer(*(x[chosen] for x in whole.tokens), states=states, plan=batch)
            what = "drafts" if targets is not None else "steps"
            same_bits(result, out[chosen], f"{what} of {lengths}")
            for place, (i, count) in enumerate(pieces):
                if targets is not None:
                    count = dice.integer(1, count + 1)  # accepted
                    slots[i] = int(targets[place, count - 1])
                at[i] += count
        same_bits(states.data[slots], ended, "the states at the end")
