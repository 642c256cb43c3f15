"""Does NATIVE_INDEX choose as the definition does, in every instruction set that this machine has?"""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path

import pytest
import torch
from polyattn import Indexer, IndexerSpec, LayerGroup, select
from polyattn.conformance.cases.index import layer_for
from polyattn.conformance.checks.table import run_case
from polyattn.conformance.derive import derive
from polyattn.errors import BatchError
from polyattn.families.sparse.index_workload import WHOLE, IndexWorkload
from polyattn.registry.devices import resolve_device
from polyattn.registry.discovery import discover
from polyattn.workload.dice import Dice
from polyattn.workload.steps import USUAL
from polyattn_cpu.native import library

sys.path.insert(0, str(Path(__file__).parent))
from guarded import at_an_end

pytestmark = pytest.mark.skipif(
    library.why_not() is not None, reason=f"native kernels: {library.why_not()}"
)
ISAS = library.isas() if library.why_not() is None else ("none",)

SPECS = {
    # The rows of a vector, of a panel, and of decode's products, one less and one more.
    **{
        f"{heads} heads of {size}": IndexerSpec(
            num_heads=heads, head_size=size, budget=9, scale=0.25, cache_dtype=stored
        )
        for heads, size, stored in (
            (1, 128, "auto"), (2, 33, "fp8_scaled"), (3, 64, "auto"),
            (5, 100, "fp8_e4m3"), (8, 129, "auto"),
            (9, 65, "auto"), (15, 128, "fp8_scaled"),
            (17, 31, "auto"), (47, 64, "fp8_e4m3"), (64, 128, "fp8_scaled"),
            (96, 128, "fp8_scaled"), (128, 64, "auto"),
        )
    },
    "blocks": IndexerSpec(
        num_heads=4, head_size=128, budget=3, scale=0.25, activation="none", fold="none", pool=50,
        forced_first=1, forced_last=1,
    ),
    "two levels": IndexerSpec(num_heads=16, head_size=64, budget=20, scale=0.25, within=8),
}  # fmt: skip


def step(spec, queries, lens, dtype="bfloat16", numbers=WHOLE):
    """A step of whole numbers, whose scores are exact and tie, over scattered pages."""
    lengths = list(zip(queries, lens, strict=True))
    return IndexWorkload(layer_for(spec, dtype), lengths, Dice(0), numbers=numbers)


def chosen(work, backend="NATIVE_INDEX"):
    indexer = Indexer(select(work.spec, "cpu", backend=f"index={backend}"))
    frame = work.frame
    return indexer(frame.query, frame.keys, work.batch, frame.weights, frame.within)


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    monkeypatch.setenv(library.ISA_VARIABLE, request.param)
    return request.param


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


FAST = ("5 heads of 100", "64 heads of 128", "blocks")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SPECS]
)
def test_it_chooses_what_torch_does(isa, name):
    # A tile of keys is 128 entries, an item of queries 64 tokens.
    for queries, lens in (([1, 1, 1], [127, 128, 257]), ([66, 1, 0, 3], [129, 1, 5, 300])):
        work = step(SPECS[name], queries, lens)
        assert torch.equal(chosen(work), chosen(work, "TORCH_INDEX"))


@pytest.mark.parametrize("block", [1, 5, 48, 64])
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 32, 64])
def test_keys_of_128_in_runs_of_any_length(heads, block, isa):
    """A vector's keys lie in one run of memory or in several; a last tile is a part of one."""
    spec = IndexerSpec(num_heads=heads, head_size=128, budget=9, scale=0.25)
    layer = layer_for(spec, "bfloat16")
    work = IndexWorkload(layer, [(1, 300), (1, 13)], Dice(0), block=block, numbers=WHOLE)
    assert torch.equal(chosen(work), chosen(work, "TORCH_INDEX"))


@pytest.mark.parametrize(
    "fields",
    [
        {"within": 8},
        {"within": 12},
        {"pool": 5},
        {"forced_first": 70, "forced_last": 3},
        {"fold": "none", "activation": "none"},
    ],
    ids=str,
)
@pytest.mark.parametrize("heads", [4, 64])
def test_runs_of_keys_of_128_end_anywhere(isa, threads, heads, fields):
    """At a block of `within`, or where a long sequence is cut, which is at a whole candidate."""
    threads(5)
    spec = IndexerSpec(num_heads=heads, head_size=128, budget=90, scale=0.25, **fields)
    work = step(spec, [1, 1], [20000, 21])
    assert torch.equal(chosen(work), chosen(work, "TORCH_INDEX"))


@pytest.mark.parametrize("bits", [0xFF, 0x87])
@pytest.mark.parametrize("heads, size", [(64, 128), (20, 80)])
def test_every_byte_of_a_scaled_key_counts_for_what_it_is(isa, heads, size, bits):
    """Zeros, subnormals, NaN, and scales of either sign; scores are sums of few values, and exact.

    Among all bytes subnormals seldom decide: 0x87 leaves few others.
    """
    form = {"scale": 0.25, "cache_dtype": "fp8_scaled"}
    spec = IndexerSpec(num_heads=heads, head_size=size, budget=150, **form)
    work = step(spec, [40, 1], [300, 200])
    frame, draw = work.frame, torch.Generator().manual_seed(0)
    blocks, page, _ = frame.keys.shape
    pages = frame.keys.view(torch.uint8).view(blocks, -1)
    bytes_ = torch.randint(0, 256, (blocks * page, size), generator=draw).to(torch.uint8) & bits
    normal = torch.rand(len(bytes_), generator=draw) < 0.5
    bytes_[normal] |= 8  # half of the keys have neither zeros nor subnormals
    nan = torch.rand(bytes_.shape, generator=draw) < 1e-3
    bytes_[(bytes_ & 0x7F == 0x7F) & ~nan] = 0xB9
    bytes_[nan] |= 0x7F
    signs = torch.randint(0, 2, (blocks * page,), generator=draw) * 2.0 - 1
    pages[:, : page * size] = bytes_.view(blocks, -1)
    pages[:, page * size :] = (signs / 4).view(torch.uint8).view(blocks, -1)
    token, head = torch.meshgrid(torch.arange(41), torch.arange(heads), indexing="ij")
    frame.query.zero_().scatter_(2, ((4 * head + token) % size)[..., None], 1.0)
    frame.weights.copy_((head // 5 == token % (heads // 5)) * (1 - 2 * (head % 2)))
    assert torch.equal(chosen(work), chosen(work, "TORCH_INDEX"))


@pytest.mark.skipif(sys.platform != "linux", reason="pages that nobody may touch are Linux's")
@pytest.mark.parametrize("name", FAST)
def test_nothing_is_read_behind_an_end(isa, threads, name):
    """A lane of no token, and the start of no sequence: no result tells of them."""
    threads(5)  # so that blocks of queries are counted, which decide whether sequences are cut
    for queries, lens in (([1, 1, 1], [127, 128, 257]), ([1, 3], [33, 9]), ([1], [8200])):
        work = step(SPECS[name], queries, lens)
        wanted, frame, batch = chosen(work, "TORCH_INDEX"), work.frame, work.batch
        for field in ("query", "weights", "keys"):
            if getattr(frame, field) is not None:
                setattr(frame, field, at_an_end(getattr(frame, field)))
        batch.block_table = at_an_end(batch.block_table)
        for field in ("query_start_loc", "seq_lens"):
            batch.__dict__[field] = at_an_end(getattr(batch, field))
        assert torch.equal(chosen(work), wanted)


def test_each_entry_is_a_block_of_its_own(isa):
    """More blocks than a small scratch holds, of which each token names a few."""
    spec = IndexerSpec(num_heads=3, head_size=32, budget=5, scale=0.25, within=1)
    work = step(spec, [3, 1], [9000, 20])
    within = torch.randint(0, 9000, (4, 1, 9), generator=torch.Generator().manual_seed(1)).int()
    within[3] %= 20
    work.frame.within = within
    assert torch.equal(chosen(work), chosen(work, "TORCH_INDEX"))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_threads_and_neighbours_change_no_choice(isa, threads, name):
    """Long sequences are cut for several threads, and their parts merged."""
    lens = [8191, 8192, 20000]
    threads(1)
    work = step(SPECS[name], [1, 1, 1], lens, numbers=USUAL)
    ids, frame = chosen(work), work.frame
    threads(5)
    assert torch.equal(ids, chosen(work))
    for at, length in enumerate(lens):
        alone = step(SPECS[name], [1], [length], numbers=USUAL)
        alone.frame.keys, alone.frame.query = frame.keys, frame.query[at : at + 1]
        alone.frame.weights = None if frame.weights is None else frame.weights[at : at + 1]
        alone.batch.block_table = work.batch.block_table[at : at + 1]
        assert torch.equal(ids[at], chosen(alone)[0])


@pytest.mark.slow
@pytest.mark.parametrize("budget", [127, 2048, 0.05])
def test_ties_and_rising_scores_fill_the_list_many_times(isa, budget):
    """Each key is better than those before it, or all are equal: the list is shortened often."""
    spec = IndexerSpec(
        num_heads=1, head_size=32, budget=budget, fold="sum", activation="none", scale=1.0
    )
    work = step(spec, [1], [12000], "float32")
    frame, entry = work.frame, torch.arange(12000)
    frame.query.zero_()
    frame.query[:, :, 0] = 1.0
    slots = work.batch.block_table[0, entry // 16].long() * 16 + entry % 16
    for score in (entry, -entry, entry % 7, entry * 0):
        frame.keys.view(-1, 32)[slots, 0] = score.float()
        assert torch.equal(chosen(work), chosen(work, "TORCH_INDEX"))


def uneven(kind):
    """Scores whose ranks lie in few bins, or apart: what a list is shortened by."""
    dice = torch.Generator().manual_seed(2)
    plain, far = torch.randn(6000, generator=dice), torch.rand(6000, generator=dice)
    return {
        "normal": plain,
        "falling": torch.linspace(2, 1, 6000),
        "of every exponent": plain.sign() * 2 ** (200 * far - 100),
        "one far above": torch.where(torch.arange(6000) == 50, 1e30, far),
        "half of them equal": torch.where(plain > 0, 3.0, far),
        "few that aren't equal": torch.where(far > 0.99, plain, -1.0),
        "infinite": torch.where(far > 0.7, torch.inf, torch.where(far > 0.3, plain, -torch.inf)),
        "not a number": torch.where(far > 0.95, plain, torch.nan),
        "zeros of both signs": torch.where(far > 0.9, plain, 0.0 * plain),
    }[kind]


@pytest.mark.parametrize("forced", [0, 700])
@pytest.mark.parametrize(
    "kind",
    [
        "normal", "falling", "of every exponent", "one far above", "half of them equal",
        "few that aren't equal", "infinite", "not a number", "zeros of both signs",
    ],
)  # fmt: skip
def test_lists_are_shortened_at_any_scores(isa, kind, forced):
    """By an estimate, which keeps more than it must, never less; by all bits where that has too many."""
    spec = IndexerSpec(
        num_heads=1, head_size=128, budget=750, fold="sum", activation="none", scale=1.0,
        forced_first=forced,
    )  # fmt: skip
    work = step(spec, [1], [6000], "float32")
    frame, entry = work.frame, torch.arange(6000)
    frame.query.zero_()
    frame.query[:, :, 0] = 1.0
    keys = frame.keys.view(-1, 128)
    keys.zero_()
    size = frame.keys.shape[1]
    slots = work.batch.block_table[0, entry // size].long() * size + entry % size
    keys[slots, 0] = uneven(kind)
    assert torch.equal(chosen(work), chosen(work, "TORCH_INDEX"))


@pytest.mark.parametrize("name", ["3 heads of 64", "1 heads of 128"])
def test_a_broken_table_is_refused(isa, name):
    work = step(SPECS[name], [1, 1], [40, 40])
    work.batch.block_table[1, 2] = 10**6
    with pytest.raises(BatchError, match="block_table points outside the index cache's 9 blocks"):
        chosen(work)


@pytest.mark.slow
def test_the_kits_cases_pass(isa):
    device = resolve_device("cpu")
    info = discover().backends["NATIVE_INDEX"].builds_on("cpu")[-1]
    cases = [
        case
        for case in derive(info, device)
        if case.batch != "mixed" or case.check == "index_ranked"
    ]
    for case in cases:
        run_case(case, "NATIVE_INDEX", device, 1)


def of_a_layer(work, **fields):
    """The arguments of another layer's call in the step."""
    frame, dice = work.frame, Dice(7)
    call = {"query": frame.query, "keys": frame.keys, "plan": work.batch, "weights": frame.weights}
    for name in ("query", "keys", "weights"):
        if call[name] is not None:
            drawn = dice.normal(*call[name].shape).round().to(call[name].dtype)
            call[name] = call[name].clone().copy_(drawn)
    return call | fields


def by_torch(layer, call):
    return Indexer(select(layer, "cpu", backend="index=TORCH_INDEX"))(**call)


@pytest.mark.parametrize("fold", ["sum", "weighted"])
def test_a_step_is_checked_once_for_its_layers(fold, monkeypatch):
    """Layers of a group share what the first one's call has found, and nothing of its tensors."""
    work = step(IndexerSpec(num_heads=4, head_size=128, budget=9, fold=fold), [1, 1], [300, 40])
    group = LayerGroup(select(work.spec, "cpu", backend="index=NATIVE_INDEX"))
    frame, other = work.frame, of_a_layer(work)
    first = other | {"query": frame.query, "keys": frame.keys, "weights": frame.weights}
    assert torch.equal(Indexer(group)(**first), by_torch(work.spec, first))
    with monkeypatch.context() as without:
        without.setattr(Indexer, "_check", None)
        choice = Indexer(group)(**other)
        work.batch.seq_lens[0] = 17  # as a captured step's lengths change
        shorter = Indexer(group)(**other)
    work.batch.seq_lens[0] = 300
    assert torch.equal(choice, by_torch(work.spec, other))
    if fold == "weighted":
        other["weights"] = other["weights"].bfloat16()
        assert torch.equal(Indexer(group)(**other), by_torch(work.spec, other))
    work.batch.seq_lens[0] = 17
    work.batch.lens_are_bounds = True
    assert torch.equal(shorter, by_torch(work.spec, other))


def test_another_step_or_form_is_checked_again():
    work = step(IndexerSpec(num_heads=4, head_size=128, budget=9, fold="sum"), [1, 1], [300, 40])
    indexer = Indexer(select(work.spec, "cpu", backend="index=NATIVE_INDEX"))
    call = of_a_layer(work)
    indexer(**call)
    query, keys, batch = call["query"], call["keys"], call["plan"]
    apart = torch.empty(2, 4, 256, dtype=torch.bfloat16)[..., :128].copy_(query)
    turned = query.clone().transpose(0, 1).contiguous().transpose(0, 1)
    table = batch.block_table.flip(1).contiguous()
    likes = [
        {"query": apart}, {"query": turned}, {"query": query.float().to(torch.float8_e4m3fn)},
        {"keys": torch.cat([keys, keys])}, {"plan": batch.copy()},
    ]  # fmt: skip
    for fields in likes:
        assert torch.equal(indexer(**call | fields), by_torch(work.spec, call | fields))
        assert torch.equal(indexer(**call), by_torch(work.spec, call))
    other = batch.copy()
    other.block_size = 2 * keys.shape[1]
    for fields, says in (
        ({"plan": other}, "block_size"),
        ({"query": query[:1]}, "query"), ({"query": query.float()}, "query"), ({"query": None}, "query"),
        ({"keys": keys[:, :, :64]}, "keys"), ({"keys": keys.float()}, "keys"),
        ({"weights": query[..., 0]}, "weights were given"),
        ({"within": table[:, None]}, "within was given"),
    ):  # fmt: skip
        with pytest.raises(BatchError, match=says):
            indexer(**call | fields)
        indexer(**call)
    batch.block_table = table = work.batch.block_table.clone()
    table[:, :2] = table[:, :2].flip(1)
    assert torch.equal(indexer(**call), by_torch(work.spec, call)), "another table"
    indexer(**call)
    table[0, 0] = len(keys)
    with pytest.raises(BatchError, match="points outside the index cache"):
        indexer(**call)
    table[0, 0] = 0
    batch.seq_lens = torch.tensor([33, 40]).int()
    batch.lens_are_bounds = True
    assert torch.equal(indexer(**call), by_torch(work.spec, call)), "other lengths"
    indexer(**call)
    batch.query_start_loc = torch.tensor([0, 2, 2]).int()
    batch.seq_lens[1] = 0
    fresh = Indexer(select(work.spec, "cpu", backend="index=NATIVE_INDEX"))
    assert torch.equal(indexer(**call), fresh(**call)), "other queries"


def test_a_copy_of_an_indexer_knows_no_addresses():
    work = step(IndexerSpec(num_heads=4, head_size=128, budget=9, fold="sum"), [1, 1], [300, 40])
    indexer = Indexer(select(work.spec, "cpu", backend="index=NATIVE_INDEX"))
    call = of_a_layer(work)
    choice = indexer(**call)
    assert torch.equal(pickle.loads(pickle.dumps(indexer))(**call), choice)
    copied, batch = copy.deepcopy((indexer, call["plan"]))
    call["plan"].block_table.fill_(len(call["keys"]))
    assert torch.equal(copied(**call | {"plan": batch}), choice)
