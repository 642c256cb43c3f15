"""Attention to chosen keys: ids, pages, bad input, and lies about all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from polyattn import (
    Attention,
    Batch,
    Indexer,
    IndexerSpec,
    LayerGroup,
    LayerSpec,
    SparseAttention,
    SparseSpec,
    select,
)
from polyattn.errors import BatchError, SelectionError, SpecError
from polyattn.families.sparse import indexer, pages, planning, reference
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.settings import current
from polyattn.workload.base import workload
from polyattn.workload.dice import Dice

MSA = LayerSpec(
    kind="sparse", num_heads=8, num_kv_heads=2, head_size=16, dtype="float32", block_size=16,
    sparse=SparseSpec(budget=3, granularity=16, scope="kv_head"),
)  # fmt: skip
DSA = MSA.replace(sparse=SparseSpec(budget=20))
STEP = [(1, 1), (1, 70), (5, 19), (0, 4), (9, 9), (1, 0), (3, 200)]


def of(spec: LayerSpec = MSA, **sparse: Any) -> LayerSpec:
    assert spec.sparse is not None
    fields = {name: getattr(spec.sparse, name) for name in spec.sparse.__dataclass_fields__}
    return spec.replace(sparse=SparseSpec(**(fields | sparse)))


@pytest.mark.parametrize("backend", ["VANILLA", "TORCH_SDPA", "NATIVE_ATTN"])
@pytest.mark.parametrize(
    "spec",
    [
        of(scope="head", granularity=4, budget=9),
        of(DSA, physical=True, scope="kv_head"),
        of(DSA, tokens_per_entry=4),
        of(DSA.replace(num_kv_heads=1, v_head_size=8), value_in_key=True, tokens_per_entry=128),
        of().replace(learned_sinks=True, needs_lse=True, num_heads=14, num_kv_heads=7),
        of(granularity=24, budget=4).replace(logit_soft_cap=2.0, kv_cache_dtype="int8"),
    ],
    ids=str,
)
def test_every_backend_serves_every_choice(backend: str, spec: LayerSpec) -> None:
    workload(LayerGroup(select(spec, "cpu", backend=backend)), STEP, 1).check()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_choice_of_all_keys_is_plain_attention(layout: str, packed: bool) -> None:
    plain = Attention(LayerSpec(num_heads=8, num_kv_heads=2, head_size=16, dtype="float32"))
    settings = replace(current(), layout=layout)
    sparse = SparseAttention(select(of(budget=5, scope="all"), "cpu", settings=settings))
    order = (16, 2) if layout == "NHD" else (2, 16)
    caches = [plain.group.allocate_cache(40), sparse.group.allocate_cache(40)]
    if packed:
        caches[1] = KVCache.packed(torch.empty(40, 2, *order, 16), layout)
    table = (torch.randperm(39)[:15] + 1).int().view(3, 5)
    context = Batch.from_lens([64, 0, 23], [64, 0, 23], table, 16)
    old, slots = torch.randn(2, 87, 2, 16), context.slot_mapping
    assert slots is not None
    for layer, cache in zip((plain, sparse), caches, strict=True):
        cache.key.fill_(torch.nan)
        cache.value.fill_(torch.nan)
        layer.store(old[0], old[1], cache, slots)
    batch = Batch.from_lens([1, 20, 7], [65, 20, 30], table, 16)
    query, key, value = (torch.randn(28, heads, 16) for heads in (8, 2, 2))
    blocks = torch.tensor([[[4, 1, 0, 3, 2]]]).int().expand(28, 1, 5)
    chosen = sparse(query, key, value, caches[1], batch, choice=blocks)
    torch.testing.assert_close(
        chosen, plain(query, key, value, caches[0], batch), atol=1e-5, rtol=1e-5
    )


def test_a_step_in_pieces_is_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    group = LayerGroup(select(MSA, "cpu", backend="TORCH_SDPA"))
    step = workload(group, STEP, 4)
    whole = step.check().clone()
    monkeypatch.setattr(planning, "TABLE_BYTES", 8 * 4 * 2 * 3 * 5)
    plan = group.plan(step.batch)
    assert isinstance(plan, planning.SparseStep) and len(plan.pieces) == 4
    assert torch.equal(step.check("in pieces: ", plan), whole)


def test_an_id_that_comes_twice_counts_twice_or_is_refused() -> None:
    step = workload(LayerGroup(select(DSA, "cpu")), [(1, 30)], 2)
    step.choice[0, 0, :3] = torch.tensor([4, 9, 4])
    step.layer.checks = False
    step.check()
    step.layer.checks = True
    with pytest.raises(BatchError, match=r"choice\[0, 0\] names 4 twice"):
        step.run()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda w: {"choice": w.choice.long()}, r"choice.*int64.*int32"),
        (lambda w: {"choice": w.choice[:, :1]}, r"choice"),
        (lambda w: {"choice": w.choice.repeat(1, 1, 2)}, r"names 6 ids a token; .*budget is 3"),
        (lambda w: {"value": None}, "come together"),
        (lambda w: {"query": w.query[:, :4]}, "query"),
    ],
)
def test_bad_input_is_refused(change: Callable[[Any], dict[str, Any]], match: str) -> None:
    step = workload(LayerGroup(select(MSA, "cpu")), [(1, 30), (2, 9)], 2)
    before = step.cache.key.clone()
    with pytest.raises(BatchError, match=match):
        step.but(**change(step)).run()
    torch.testing.assert_close(step.cache.key, before, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"sliding_window": 4}, "choice names the keys"),
        ({"alibi": True}, "choice names the keys"),
        ({"sparse": None}, "give sparse=SparseSpec"),
        ({"kind": "attention"}, "leave sparse out"),
        ({"mask": "custom"}, "mask"),
    ],
)
def test_a_spec_that_means_two_things_is_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        MSA.replace(**fields)


@pytest.mark.parametrize(
    "fields", [{"budget": 0}, {"granularity": 0}, {"scope": "group"}, {"physical": 1},
               {"granularity": 4, "physical": True}, {"tokens_per_entry": -1}]
)  # fmt: skip
def test_a_choice_that_means_nothing_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"sparse.{next(iter(fields))}"):
        SparseSpec(**({"budget": 4} | fields))


def test_a_spec_is_json_and_back() -> None:
    assert LayerSpec.from_json(MSA.to_json()) == MSA and str(MSA).count("choice 3 of 16 by KV head")


def test_on_an_accelerator_the_host_waits_for_nothing() -> None:
    decision = select(MSA.replace(dtype="bfloat16", head_size=64), "h200").decision
    assert dict(decision.chosen)["decode"] == "TRITON_ATTN"
    with pytest.raises(SelectionError, match="length_bounds"):
        select(MSA, "h200", backend="TORCH_SDPA")


def _changed(**fields: Any) -> Callable[..., Any]:
    def lie(spec: LayerSpec, *args: Any) -> Any:
        return HONEST(of(spec, **fields), *args)

    return lie


def _ids(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    return lambda spec, ids, *args: HONEST(spec, change(ids), *args)


def _seen(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    return lambda spec, ids, visible, *args: HONEST(spec, ids, change(visible), *args)


def _after(change: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[..., Any]:
    return lambda *args: change(*HONEST(*args))


def _unsorted(spec: LayerSpec, ids: torch.Tensor, *args: Any) -> Any:
    """The last id of a token, not the largest, is taken for the incomplete one."""
    table, lens = HONEST(spec, ids, *args)
    kept = (lens > 16)[:, None] & (torch.arange(table.shape[1]) < 2)
    return torch.where(kept, table.flip(1), table), lens


HONEST = pages.pages_of
LIES: dict[str, Callable[..., Any]] = {
    "granularity": _changed(granularity=8),
    "scope of all": lambda spec, ids, *args: HONEST(spec, ids[:, :1].expand_as(ids), *args),
    "heads in turn": _ids(lambda ids: ids.flip(1)),
    "first id lost": _ids(lambda ids: ids[..., 1:]),
    "last id lost": _ids(lambda ids: ids[..., :-1]),
    "-1 is key 0": _ids(lambda ids: ids.clamp(min=0)),
    "ids from 1": _ids(lambda ids: torch.where(ids > 0, ids - 1, ids)),
    "the first twice": _ids(lambda ids: torch.cat([ids[..., :2], ids[..., :1]], -1)),
    "future keys": _seen(lambda seen: seen + 1),
    "not itself": _seen(lambda seen: seen - 1),
    "whole groups": _seen(lambda seen: (seen + 15) // 16 * 16),
    "complete groups": _seen(lambda seen: seen // 16 * 16),
    "everything is seen": _seen(lambda seen: seen * 0 + 10**6),
    "the step's longest": _seen(lambda seen: seen.amax().expand_as(seen)),
    "one page short": _after(lambda table, lens: (table, (lens - 16).clamp(min=0))),
    "one key short": _after(lambda table, lens: (table, (lens - 1).clamp(min=0))),
    "one key more": _after(lambda table, lens: (table, lens + (lens > 0))),
    "the next page": _after(lambda table, lens: (table + 1, lens)),
    "the other head": _after(lambda table, lens: (table ^ 1, lens)),
    "pages unsorted": _unsorted,
    "another token's": _after(lambda table, lens: (table.roll(2, 0), lens.roll(2))),
    "the first sequence's": lambda spec, ids, seen, seqs, *args: HONEST(
        spec, ids, seen, seqs * 0, *args
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_about_a_choice_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = workload(LayerGroup(select(MSA, "cpu", backend="TORCH_SDPA")), STEP, 7)
    step.check()
    monkeypatch.setattr(planning, "pages_of", LIES[name])
    with pytest.raises((AssertionError, IndexError, BatchError)):
        step.check()


def test_there_are_twenty_lies() -> None:
    assert len(LIES) >= 20


INDEXERS = {
    "DSA": IndexerSpec(num_heads=4, head_size=8, budget=6),
    "V4": IndexerSpec(num_heads=4, head_size=8, budget=5, tokens_per_entry=4),
    "MSA": IndexerSpec(
        num_heads=3, head_size=8, budget=3, activation="none", fold="none", pool=8, forced_first=1,
        forced_last=1,
    ),
    "QSA": IndexerSpec(num_heads=4, head_size=8, budget=5, fold="sum", tokens_per_entry=4, tail=True),
    "part": IndexerSpec(num_heads=2, head_size=8, budget=0.3, fold="sum", forced_last=2),
    "level 1": IndexerSpec(num_heads=4, head_size=8, budget=2, pool=8, forced_last=1),
    "level 2": IndexerSpec(num_heads=4, head_size=8, budget=6, within=8),
}  # fmt: skip


class IndexStep:
    """Sequences of index keys in a paged cache, which holds NaN elsewhere; whole numbers tie."""

    def __init__(self, spec: IndexerSpec, ties: bool, seed: int = 3):
        dice = Dice(seed)
        if ties:  # which a power of two keeps exact
            spec = replace(spec, scale=0.5)
        self.spec, self.queries, self.lens = spec, [1, 23, 1, 5, 1], [60, 40, 1, 33, 0]
        entries = [n // spec.tokens_per_entry for n in self.lens]
        table, blocks = dice.blocks(entries, 8)
        table[0, -1] = 10**6  # behind the length: never read
        self.batch = Batch.from_lens(self.queries, self.lens)
        self.batch.block_table = table
        tokens = sum(self.queries)
        self.query = dice.normal(tokens, spec.num_heads, 8)
        self.keys = [dice.normal(n, 8) for n in entries]
        self.weights = dice.normal(tokens, spec.num_heads) if spec.fold == "weighted" else None
        if ties:
            self.query, self.keys = self.query.round(), [k.round() for k in self.keys]
            self.weights = None if self.weights is None else self.weights.round()
        self.cache = torch.full((blocks, 8, 8), torch.nan)
        for row, own in zip(table.tolist(), self.keys, strict=True):
            for entry, key in enumerate(own):
                self.cache[row[entry // 8], entry % 8] = key
        self.within = None
        if spec.within is not None:
            self.within = torch.tensor([[[0, 3, 2, -1]]] * tokens).int()

    def chosen(self) -> list[list[list[int]]]:
        ids = Indexer(self.spec)(self.query, self.cache, self.batch, self.weights, self.within)
        return [[[i for i in row if i >= 0] for row in token] for token in ids.tolist()]

    def expected(self) -> list[list[list[int]]]:
        found, at = [], 0
        for keys, count, length in zip(self.keys, self.queries, self.lens, strict=True):
            for token in range(at, at + count):
                within = None if self.within is None else self.within[token, 0].tolist()
                weights = None if self.weights is None else self.weights[token]
                position = length - at - count + token
                found.append(
                    reference.choose(self.spec, self.query[token], keys, position, weights, within)
                )
            at += count
        return found


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("name", INDEXERS)
def test_an_indexer_chooses_as_its_definition_says(
    name: str, ties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = IndexStep(INDEXERS[name], ties)
    assert step.chosen() == step.expected()
    monkeypatch.setattr(indexer, "SCORES", 300)
    assert step.chosen() == step.expected(), "in pieces"


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"budget": 0}, "budget"), ({"budget": 1.5}, "budget"), ({"activation": "gelu"}, "activation"),
        ({"tail": True}, "tail"), ({"fold": "mean"}, "fold"), ({"pool": 0}, "pool"),
    ],
)  # fmt: skip
def test_an_indexer_that_means_nothing_is_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(SpecError, match=f"indexer.{match}"):
        IndexerSpec(**({"num_heads": 2, "head_size": 8, "budget": 4} | fields))


def test_an_indexer_refuses_what_it_would_misread() -> None:
    step = IndexStep(INDEXERS["DSA"], False)
    with pytest.raises(BatchError, match="weights are missing"):
        Indexer(step.spec)(step.query, step.cache, step.batch)
    with pytest.raises(BatchError, match="within was given"):
        Indexer(step.spec)(step.query, step.cache, step.batch, step.weights, step.weights)
    with pytest.raises(BatchError, match="keys"):
        Indexer(step.spec)(step.query, step.cache[..., :4], step.batch, step.weights)
