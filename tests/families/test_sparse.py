"""Attention to chosen keys: ids, pages, bad input, and lies about all of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import polyattn
import pytest
import torch
from polyattn import (
    Attention,
    Batch,
    CompressorSpec,
    Indexer,
    IndexerSpec,
    LatentSpec,
    LayerGroup,
    LayerSpec,
    SparseAttention,
    SparseSpec,
    select,
)
from polyattn.conformance.case import Case
from polyattn.conformance.cases.index import INDEXERS, layer_for
from polyattn.conformance.checks.sparse import sparse_plans
from polyattn.conformance.harness.base import Harness
from polyattn.errors import BatchError, CacheError, SelectionError, SpecError
from polyattn.families.sparse import planning, reference, torch_index
from polyattn.families.sparse.index_workload import WHOLE, IndexWorkload
from polyattn.runtime.cache import kv_cache
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.step import chosen_pages
from polyattn.runtime.step.chosen_pages import choice_of
from polyattn.runtime.step.cost import batch_cost
from polyattn.settings import current_settings
from polyattn.tools.cli.entry import run as cli
from polyattn.workload.base import workload
from polyattn.workload.compare import output_error
from polyattn.workload.dice import Dice
from polyattn.workload.pages import bits
from polyattn.workload.verify import verify_decision

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


def test_pages_that_each_head_chooses_lie_by_head() -> None:
    """On CPUs, unless the engine sets the layout."""
    of_engine = replace(current_settings(), layout="NHD")
    for scope, layout in (("all", "NHD"), ("kv_head", "HND"), ("head", "HND")):
        spec = of(scope=scope)
        assert LayerGroup(select(spec, "cpu")).allocate_cache(1).format.layout == layout
        cache = select(spec, "cpu", settings=of_engine).decision.cache
        assert cache is not None and cache.layout == "NHD"
        cache = select(spec.replace(dtype="bfloat16"), "h200").decision.cache
        assert cache is not None and cache.layout == "NHD"


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "NATIVE_ATTN"])
@pytest.mark.parametrize("scope", ["all", "kv_head"])
def test_layers_of_one_cache_need_not_agree_on_its_layout(scope: str, backend: str) -> None:
    """Such as a dense layer's, or that of a layer with another scope: kernels get views."""
    step: Any = workload(LayerGroup(select(of(scope=scope), "cpu", backend=backend)), STEP, 3)
    form = step.cache.format
    other = replace(form, layout={"NHD": "HND", "HND": "NHD"}[form.layout])
    own, there = step.cache, KVCache.allocate(other, step.cache.num_blocks)
    there.key.copy_(own.key), there.value.copy_(own.value)
    assert there.layout == other.layout
    plan = step.group.plan(step.batch)
    for step.cache in (own, there, own):  # by one plan
        step.check("", plan)


def test_a_dense_layer_s_cache_serves_a_layer_that_chooses() -> None:
    dense = Attention(MSA.replace(kind="attention", sparse=None))
    cache = dense.group.allocate_cache(4)
    chooses = SparseAttention(of(budget=4))
    assert cache.layout == "NHD" and chooses.group.allocate_cache(4).layout == "HND"
    batch = Batch.from_lens([40], [40], torch.tensor([[3, 0, 2]]).int(), 16)
    query, key, value = torch.randn(40, 8, 16), torch.randn(40, 2, 16), torch.randn(40, 2, 16)
    whole = dense(query, key, value, cache, batch)
    choice = torch.tensor([0, 1, 2, -1]).int().expand(40, 2, -1).contiguous()
    assert output_error(chooses(query, None, None, cache, batch, choice=choice), whole) < 1e-5
    kind = replace(cache.format, block_size=32)
    with pytest.raises(CacheError, match="the cache's block_size is 32"):
        chooses(query, None, None, KVCache.allocate(kind, 4), batch, choice=choice)


@pytest.mark.parametrize("scope", ["all", "kv_head"])
def test_a_kernel_of_one_layout_keeps_to_it(scope: str) -> None:
    step: Any = workload(LayerGroup(select(of(scope=scope), "cpu", backend="EXAMPLE_ATTN")), STEP)
    step.check()
    form = step.cache.format
    assert form.layout == "NHD"
    step.cache = KVCache.allocate(replace(form, layout="HND"), step.cache.num_blocks)
    with pytest.raises(CacheError, match="the cache's layout is HND, the selection's NHD"):
        step.run()


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "NATIVE_ATTN"])
def test_an_incomplete_group_twice_shows_no_hidden_key(backend: str) -> None:
    """Pages hold it once: as an inner page its end would be read, later tokens' keys or nobody's."""
    work = workload(LayerGroup(select(MSA, "cpu", backend=backend)), [(1, 40), (5, 19)], 1)
    tokens = torch.tensor([2, 0, 1, 1, 1, 1])  # the last group that each one sees
    once, twice = (torch.full((6, 2, 3), -1, dtype=torch.int32) for _ in range(2))
    once[:, :, 0], twice[:, :, :2] = tokens[:, None], tokens[:, None, None]
    expected = work.but(choice=once).check().clone()
    work.layer.checks = False
    assert output_error(work.but(choice=twice).run(), expected) < 1e-6


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
    settings = replace(current_settings(), layout=layout)
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


@pytest.mark.parametrize("backend", ["VANILLA", "TORCH_SDPA", "NATIVE_ATTN"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_heads_of_one_choice_are_read_together(layout: str, backend: str) -> None:
    """A row of the call is a token with all its KV heads, where these lie together for each token."""
    settings = replace(current_settings(), layout=layout)
    for scope, rows in (("all", 1 if layout == "NHD" else 7), ("kv_head", 7)):
        spec = of(granularity=4, budget=9, scope=scope).replace(num_heads=14, num_kv_heads=7)
        step = workload(
            LayerGroup(select(spec, "cpu", backend=backend, settings=settings)), STEP, 1
        )
        step.check()
        (piece,) = step.plan.pieces
        assert len(piece.lens) == rows * step.batch.num_tokens


def test_a_step_in_pieces_is_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    group = LayerGroup(select(MSA, "cpu", backend="TORCH_SDPA"))
    step = workload(group, STEP, 4)
    whole = step.check().clone()
    monkeypatch.setattr(planning, "TABLE_BYTES", 8 * 4 * 2 * 3 * 5)
    plan = group.plan(step.batch)
    assert isinstance(plan, planning.SparseStep) and len(plan.pieces) == 4
    assert torch.equal(step.check("in pieces: ", plan), whole)


@pytest.mark.parametrize(("backend", "plans"), [("TORCH_SDPA", 1234), ("NATIVE_ATTN", 1123)])
def test_layers_whose_rows_are_as_long_share_a_plan(
    backend: str, plans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step's layers each brings its own choice: NATIVE_ATTN plans where lengths differ alone."""
    step = workload(LayerGroup(select(MSA, "cpu", backend=backend)), [(1, 70), (1, 90)], 4)
    instance, batches = step.plan.planner.backend, []
    plan = instance.plan
    monkeypatch.setattr(instance, "plan", lambda batch: batches.append(batch) or plan(batch))
    first = torch.tensor([[[0, 2, 1]] * 2] * 2).int()
    for choice, count in zip((first, first + 1, first[..., :2], first), str(plans), strict=True):
        step.but(choice=choice.contiguous()).check(f"{choice.tolist()}: ", step.plan)
        assert len(batches) == int(count)


@pytest.mark.parametrize("backend", ["VANILLA", "TORCH_SDPA", "NATIVE_ATTN"])
@pytest.mark.parametrize("granularity", [1, 4])
def test_a_choice_of_any_width(granularity: int, backend: str) -> None:
    """No id at all, one, a budget above all keys; widths around the kernels' pages and tiles."""
    spec = of(MSA.replace(needs_lse=True), scope="all", granularity=granularity, budget=80)
    step = workload(LayerGroup(select(spec, "cpu", backend=backend)), [(1, 1), (1, 70), (2, 19)], 6)
    ids = torch.randperm(80, generator=torch.Generator().manual_seed(1)).int()
    for width in (0, 1, 15, 16, 17, 63, 64, 65, 80):
        some = step.but(choice=ids[:width].expand(len(step.query), 1, width).contiguous())
        some.check(f"{width} ids: ")
        if not width:
            assert not some.out.any() and (some.lse == -torch.inf).all()


@pytest.mark.parametrize("kind", ["sparse", "sparse_mla"])
def test_a_cache_of_more_places_than_int32_names_is_refused_before_it_changes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = DSA
    if kind == "sparse_mla":
        latent = LatentSpec(rank=16, rope_head_size=8)
        spec = DSA.replace(kind=kind, num_kv_heads=8, head_size=24, v_head_size=16, latent=latent)
    work = workload(LayerGroup(spec), [(5, 19)])
    *inputs, cache = work.inputs
    for module in (kv_cache, chosen_pages):
        monkeypatch.setattr(module, "LARGEST_PAGE", cache.num_blocks * cache.block_size - 1)
    before = bits(cache.key).clone()
    with pytest.raises(CacheError, match="int32 names .* fewer blocks"):
        work.layer(*inputs, cache, work.plan, choice=work.choice)
    assert torch.equal(bits(cache.key), before)


def test_an_id_that_comes_twice_counts_twice_or_is_refused() -> None:
    step = workload(LayerGroup(select(DSA, "cpu")), [(1, 30)], 2)
    step.choice[0, 0, :3] = torch.tensor([4, 9, 4])
    step.layer.checks = False
    step.check()
    step.layer.checks = True
    with pytest.raises(BatchError, match=r"choice\[0, 0\] names 4 twice"):
        step.run()


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "NATIVE_ATTN"])
def test_sinks_of_infinity(backend: str) -> None:
    """-inf: as if there were none. inf: it takes all the weight, but of a token without keys."""
    spec = MSA.replace(learned_sinks=True, needs_lse=True)
    step = workload(LayerGroup(select(spec, "cpu", backend=backend)), STEP, 5)
    step.choice[1] = -1
    found = {}
    for sink in (-torch.inf, torch.inf):
        layer = SparseAttention(step.group, sinks=torch.full((spec.num_heads,), sink))
        one = step.but(layer=layer)
        one.run() if sink > 0 else one.check("sinks of -inf: ")
        found[sink] = one.out.clone(), one.lse.clone()
    plain = SparseAttention(select(spec.replace(learned_sinks=False), "cpu", backend=backend))
    assert torch.equal(found[-torch.inf][0], step.but(layer=plain).run())
    out, lse = found[torch.inf]
    empty = found[-torch.inf][1] == -torch.inf
    assert empty[1].all() and not empty.all()
    assert not out.any() and torch.equal(lse, torch.where(empty, -torch.inf, torch.inf))


@pytest.mark.parametrize("tokens_per_entry", [1, 4])
def test_a_window_at_its_edges(tokens_per_entry: int) -> None:
    """The newest groups of a sequence just shorter than a window, as long, and longer."""
    sparse = SparseSpec(budget=3, granularity=4, newest=True, tokens_per_entry=tokens_per_entry)
    spec = MSA.replace(block_size=8, sparse=sparse)
    group = 4 * tokens_per_entry
    lens = [n + d for n in (tokens_per_entry, group, 3 * group, 5 * group) for d in (-1, 0, 1)]
    step = workload(LayerGroup(select(spec, "cpu")), [(1, n) for n in lens if n], 3)
    step.choice = choice_of(spec, None, step.batch)
    expected, _ = reference.forward(spec, step.query, step.held, step.batch, step.choice)
    newest = step.layer(*step.inputs, step.plan)
    assert output_error(newest, expected) < 1e-5
    for row, n in enumerate(n for n in lens if n):
        seen = n // tokens_per_entry
        ids = {i for i in step.choice[row, 0].tolist() if i >= 0}
        assert ids == set(range(max(-(-seen // 4) - 3, 0), -(-seen // 4)))


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
    return lambda sparse, *args: HONEST(replace(sparse, **fields), *args)


def _ids(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    return lambda sparse, heads, ids, *args: HONEST(sparse, heads, change(ids), *args)


def _seen(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    return lambda sparse, heads, ids, visible, *args: HONEST(
        sparse, heads, ids, change(visible), *args
    )


def _after(change: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[..., Any]:
    return lambda *args: change(*HONEST(*args))


def _unsorted(*args: Any) -> Any:
    """The last id of a token, not the largest, is taken for the incomplete one."""
    table, lens = HONEST(*args)
    kept = (lens > 16)[:, None] & (torch.arange(table.shape[1]) < 2)
    return torch.where(kept, table.flip(1), table), lens


HONEST = chosen_pages.pages_of
LIES: dict[str, Callable[..., Any]] = {
    "granularity": _changed(granularity=8),
    "scope of all": _ids(lambda ids: ids[:, :1].expand_as(ids)),
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
    "the first sequence's": lambda sparse, heads, ids, seen, seqs, *args: HONEST(
        sparse, heads, ids, seen, seqs * 0, *args
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_about_a_choice_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = workload(LayerGroup(select(MSA, "cpu", backend="TORCH_SDPA")), STEP, 7)
    step.check()
    monkeypatch.setattr(planning, "pages_of", LIES[name])
    with pytest.raises((AssertionError, IndexError, BatchError)):
        step.check()


def test_pages_that_are_remembered_by_their_choice_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two layers with one choice, the second has other blocks."""
    harness = Harness("TORCH_SDPA", polyattn.resolve_device("cpu"), 3)
    case = Case("sparse_plans", "groups", of(granularity=4, budget=9), "decode")
    sparse_plans(case, harness)
    known: dict[int, Any] = {}
    monkeypatch.setattr(
        planning, "pages_of",
        lambda sparse, heads, ids, *args: known.setdefault(
            ids.data_ptr(), (ids, HONEST(sparse, heads, ids, *args))
        )[1],
    )  # fmt: skip
    with pytest.raises(AssertionError, match="the choice of the layer before it"):
        sparse_plans(case, harness)


def test_there_are_twenty_lies() -> None:
    assert len(LIES) >= 20


def index_step(name: str) -> tuple[Indexer, Batch, Any]:
    """Return an indexer, a step and its tensors, drawn as the kit draws them."""
    spec = layer_for(INDEXERS[name], "float32")
    indexer = Indexer(select(spec, "cpu", backend="index=TORCH_INDEX"))
    work = IndexWorkload(spec, [(1, 160), (7, 140), (5, 33), (1, 0)], Dice(3), numbers=WHOLE)
    return indexer, work.batch, work.frame


@pytest.mark.parametrize("name", ["tokens", "blocks", "groups", "level 2", "scaled"])
def test_an_indexer_chooses_as_its_definition_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexer, batch, frame = index_step(name)
    wanted = reference.indexed(indexer.group.spec, batch, frame)
    given = (frame.query, frame.keys, batch, frame.weights, frame.within)
    assert torch.equal(indexer(*given), wanted)
    monkeypatch.setattr(torch_index, "SCORES", 300)
    assert torch.equal(indexer(*given), wanted), "in pieces"
    narrow = replace(frame, query=frame.query.to(torch.float8_e4m3fn))
    wanted = reference.indexed(indexer.group.spec, batch, narrow)
    assert torch.equal(indexer(narrow.query, *given[1:]), wanted), "queries of e4m3"


def test_a_layer_with_an_indexer_needs_its_choice_beyond_the_budget() -> None:
    spec = layer_for(INDEXERS["tokens"], "float32")
    layer = SparseAttention(select(spec, "cpu"))
    cache, table = layer.group.allocate_cache(4), torch.arange(4, dtype=torch.int32)[None]
    cache.key.normal_(), cache.value.normal_()
    tensors = torch.randn(3, 1, spec.num_heads, spec.head_size).unbind(0)
    tensors = tensors[0], *(each[:, : spec.num_kv_heads] for each in tensors[1:])
    budget = spec.sparse.budget
    few = Batch.from_lens([1], [budget], table, cache.block_size)
    everything = torch.arange(budget, dtype=torch.int32)[None, None]
    out = layer(*tensors, cache, few)
    assert torch.equal(out, layer(*tensors, cache, few, choice=everything)), (
        "all keys are the choice"
    )
    more = Batch.from_lens([1], [budget + 1], table, cache.block_size)
    with pytest.raises(BatchError, match=rf"budget={budget} holds; pass choice=indexer\("):
        layer(*tensors, cache, more)
    other = SparseAttention(
        select(spec.replace(indexer=None), "cpu")
    )  # another layer's indexer chooses
    assert torch.equal(out, other(*tensors, cache, few))
    with pytest.raises(BatchError, match="pass choice=, or say newest=True"):
        other(*tensors, cache, more)


@pytest.mark.parametrize("form", ["auto", "fp8_e4m3", "fp8_scaled"])
def test_index_keys_are_stored_as_they_are_read(form: str) -> None:
    """DeepGEMM's pages: all keys of 8 bits, then a float32 scale for each; what is skipped stays."""
    spec = layer_for(replace(INDEXERS["tokens"], cache_dtype=form), "float32")
    indexer = Indexer(select(spec, "cpu"))
    cache, keys = indexer.allocate_cache(3, 8), torch.randn(5, 32) * 3
    keys[1] = 0.0
    before, slots = cache.clone(), torch.tensor([9, 0, -1, 23, 8])
    indexer.store(keys, cache, slots)
    pages = cache.flatten(1)
    for key, slot in zip(keys, slots.tolist(), strict=True):
        if slot < 0:
            continue
        at = slot % 8
        if form == "fp8_scaled":
            page = pages[slot // 8]
            scale = page[256 + 4 * at : 260 + 4 * at].view(torch.float32)
            assert scale == max(float(key.abs().max()), 1e-4) / 448
            stored = page[32 * at : 32 * at + 32].view(torch.float8_e4m3fn).float() * scale
        else:
            stored = cache[slot // 8, at].float()
        limit = 0.0 if form == "auto" else float(key.abs().max()) / 16
        assert (stored - key).abs().max() <= limit
    assert torch.equal(bits(cache[1, 2:7]), bits(before[1, 2:7])) or form == "fp8_scaled"
    assert torch.equal(bits(cache[0, 1:]), bits(before[0, 1:])) or form == "fp8_scaled"


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


@pytest.mark.parametrize("name", ["VANILLA_INDEX", "TORCH_INDEX", "NATIVE_INDEX"])
def test_no_block_within_which_to_choose(name: str) -> None:
    """A list without room names none, as one of -1 does."""
    parts = IndexerSpec(num_heads=2, head_size=16, budget=4, within=4)
    spec = MSA.replace(sparse=SparseSpec(budget=4), indexer=parts)
    indexer = Indexer(LayerGroup(select(spec, "cpu", backend=f"index={name}")))
    keys = indexer.allocate_cache(2).normal_()
    batch = Batch.from_lens([3], [20], torch.tensor([[1, 0]]).int(), keys.shape[1])
    query, weights = torch.randn(3, 2, 16), torch.randn(3, 2)
    for columns in (0, 2):
        within = torch.full((3, 1, columns), -1, dtype=torch.int32)
        assert (indexer(query, keys, batch, weights, within) == -1).all()


def test_an_indexer_refuses_what_it_would_misread() -> None:
    indexer, batch, frame = index_step("tokens")
    query, keys = frame.query, frame.keys
    with pytest.raises(BatchError, match="weights are missing"):
        indexer(query, keys, batch)
    with pytest.raises(BatchError, match="within was given"):
        indexer(query, keys, batch, frame.weights, frame.weights)
    for weights, says in ((frame.weights.long(), "int64"), (frame.weights.tolist(), "a tensor")):
        with pytest.raises(BatchError, match=f"weights.*{says}"):
            indexer(query, keys, batch, weights)
    with pytest.raises(BatchError, match="keys"):
        indexer(query, keys[..., :4], batch, frame.weights)
    with pytest.raises(BatchError, match="isn't contiguous"):
        indexer(query, keys.transpose(0, 1), batch, frame.weights)
    with pytest.raises(SpecError, match="has no indexer"):
        Indexer(DSA)


def test_an_indexer_looks_again_at_keys_that_it_knows() -> None:
    indexer, batch, frame = index_step("tokens")
    query, keys = frame.query.clone().requires_grad_(), frame.keys
    chosen = indexer(query, keys, batch, frame.weights)
    with pytest.raises(BatchError, match="keys is on meta"):
        indexer(query, keys.to("meta"), batch, frame.weights)
    assert torch.equal(indexer(query, keys, batch, frame.weights), chosen)
    keys.transpose_(0, 1)
    with pytest.raises(BatchError, match="isn't contiguous"):
        indexer(query, keys, batch, frame.weights)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"pool": 16, "fold": "none"}, r"choices=3: it must be 2, the layer's"),
        ({"num_heads": 2, "fold": "none"}, r"pool \* tokens_per_entry=1: it must be 16"),
        (
            {"num_heads": 2, "pool": 16, "fold": "none", "budget": 4},
            "budget=4: it must be 3 at most",
        ),
    ],
)
def test_an_indexer_of_another_choice_is_refused(fields: dict[str, Any], match: str) -> None:
    indexer = IndexerSpec(**({"num_heads": 3, "head_size": 8, "budget": 3} | fields))
    with pytest.raises(SpecError, match=f"indexer.{match}"):
        MSA.replace(indexer=indexer)


def test_who_indexes_is_selected_and_told() -> None:
    chosen = select(layer_for(INDEXERS["tokens"], "bfloat16"), "h200").decision
    assert chosen.backend("index") == "TRITON_INDEX" and "index TRITON_INDEX" in chosen.summary()
    named = select(layer_for(INDEXERS["tokens"], "float32"), "cpu", backend="index=VANILLA_INDEX")
    assert named.decision.backend("index") == "VANILLA_INDEX"
    with pytest.raises(SelectionError, match="index_fp8_scaled"):
        select(layer_for(INDEXERS["scaled"], "bfloat16"), "a100", backend="index=TRITON_INDEX")
    assert select(DSA, "cpu").decision.backend("index") is None


def test_layers_know_whose_choice_they_attend_to() -> None:
    """GLM-5.2's way: a layer without an indexer shares the choice of the nearest before it."""
    full = layer_for(INDEXERS["tokens"], "float32")
    shared = full.replace(indexer=None)
    dense = LayerSpec(num_heads=1, head_size=64, dtype="float32")
    specs = [dense, shared, full, shared, shared, dense, full, shared]
    groups = {g.spec: g.choice_source for g in polyattn.select_layers(specs, "x86-avx512")}
    assert groups == {dense: (None, None), full: (2, 6), shared: (None, 2, 2, 6)}
    steps = {s.question: s.answer for s in select(full, "x86-avx512").decision.steps}
    assert "128 bytes of index key for each token" in steps["Which indexer chooses the keys?"]
    blocks = layer_for(replace(INDEXERS["tokens"], pool=8), "float32")
    within = layer_for(replace(INDEXERS["tokens"], within=8), "float32")
    found = polyattn.select_layers([within, blocks, dense, within], "x86-avx512")
    assert [g.candidate_source for g in found] == [(None, 1), (None,), (None,)]


def test_explain_tells_streams_their_indexer_and_their_bytes(capsys: Any, tmp_path: Path) -> None:
    """DeepSeek-V4's layers, as the reader gives them: a window, chosen entries, all entries."""
    file = tmp_path / "config.json"
    ratios = [0, 4, 128, 4]
    config = {"model_type": "deepseek_v4", "num_hidden_layers": 4, "compress_ratios": ratios}
    file.write_text(json.dumps(config))
    specs = LayerSpec.from_hf_config(config)
    assert [LayerSpec.from_json(spec.to_json()) for spec in specs] == specs
    cli(["explain", str(file), "--device", "x86-avx512", "--json"])
    window, near, chosen, whole = json.loads(capsys.readouterr().out)["groups"]
    assert window["layers"] == [0] and near["layers"] == [1, 3, 5]
    assert (chosen["layers"], chosen["choice_source"]) == ([2, 6], [2, 6])
    assert whole["layers"] == [4] and "choice_source" not in whole
    bytes_of = [
        (g["context_bytes"]["keys"], g["context_bytes"]["index_keys"])
        for g in (near, chosen, whole)
    ]
    assert bytes_of == [(1024, 0), (256, 64), (8, 0)]
    cli(["explain", str(file), "--device", "x86-avx512"])
    text = " ".join(capsys.readouterr().out.split())
    assert "in the softmax of the layer before" in text
    assert (
        "a layer keeps 256 bytes of keys and values for a token of context, and 64 of index keys"
        in text
    )


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"compressor": CompressorSpec(size=16, tokens_per_entry=8)}, "tokens_per_entry=8"),
        ({"compressor": CompressorSpec(size=16, tokens_per_entry=1)}, "size=16: a key has 32"),
        ({"newest": True, "scope": "kv_head"}, "scope='kv_head'"),
    ],
)
def test_streams_that_cannot_be_are_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        MSA.replace(sparse=SparseSpec(**{"budget": 3} | fields))
    window = SparseAttention(MSA.replace(sparse=SparseSpec(budget=3, newest=True)))
    query, choice = torch.zeros(1, 8, 16), torch.zeros(1, 1, 1, dtype=torch.int32)
    batch = Batch.from_lens([1], [1], torch.zeros(1, 1, dtype=torch.int32), 16)
    with pytest.raises(BatchError, match="leave it out"):
        window(query, None, None, window.group.allocate_cache(1), batch, choice=choice)


@pytest.mark.parametrize("name", ["tokens", "blocks", "scaled"])
def test_verification_runs_the_indexer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, own = layer_for(INDEXERS[name], "float32"), torch_index.TorchIndex._scores
    found = select(layer, "cpu", backend="index=TORCH_INDEX")
    assert verify_decision(found) == {}
    monkeypatch.setattr(torch_index.TorchIndex, "_scores", lambda *args: -own(*args))
    assert verify_decision(found)["TORCH_INDEX"].startswith("index: the indexer's choice")


def test_the_roofline_counts_the_index() -> None:
    indexer = replace(INDEXERS["entries"], cache_dtype="fp8_scaled")
    spec = layer_for(indexer, "bfloat16")
    batch = Batch.from_lens([2, 1], [9, 100])
    more, less = (batch_cost(s, batch) for s in (spec, spec.replace(indexer=None)))
    # Entries of 4 tokens: of the tokens at 7 and 8 two each, of the last one 25; 36 bytes a key.
    assert more.flops - less.flops == 2 * (2 + 2 + 25) * 4 * 32
    assert more.bytes - less.bytes == (2 + 25) * 36 + 3 * 4 * (32 * 2 + 4)
