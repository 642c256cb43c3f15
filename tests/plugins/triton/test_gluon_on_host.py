"""Do Hopper's own kernels address what they should? Run as they are on the host, each access checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import pairwise, product
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("triton")
import numpy as np
import torch
from chips import h200
from gluon_on_host import on_host
from polyattn import Batch, Device, IndexerSpec, KVCache, LatentSpec, LayerSpec, SparseSpec
from polyattn.conformance.cases.index import layer_for
from polyattn.families.attention import reference
from polyattn.families.sparse.index_workload import IndexWorkload
from polyattn.families.sparse.reference import scored
from polyattn.kernel import CacheFormat, Frame, LayerParams, quantize, turned
from polyattn.runtime.cache.formats.turboquant import CODEBOOK
from polyattn.selection.cache_format import format_of
from polyattn.workload.compare import lse_error, output_error
from polyattn.workload.dice import Dice
from polyattn.workload.tolerance import tolerance_of
from polyattn_triton import index, launch, mla
from polyattn_triton.attention import TritonAttention
from polyattn_triton.functions.rows import table_asm
from polyattn_triton.hopper import unpacking
from pretending import merging_costs_nothing
from ptx_on_host import run_ptx

HOPPER = Device("cuda", "sm_90", torch_device="cpu")


def backend_of(spec: LayerSpec, form: CacheFormat, sms: int) -> TritonAttention:
    """TRITON_ATTN as on an H200 with so many multiprocessors."""
    with patch.object(launch, "facts", h200(sms)):
        return TritonAttention(spec, form, HOPPER)


def filled(
    spec: LayerSpec, block: int, layout: str, lens: list[int], far: int = 0, large: float = 1.0
) -> tuple[KVCache, torch.Tensor]:
    """Return a cache whose blocks are in any order, all else in it NaN, and its block table.

    `far`: so many blocks come first, of which nothing is in memory. `large`: what some values are
    multiplied by.
    """
    chance = torch.Generator().manual_seed(0)
    width = max(1, max(-(-n // block) for n in lens))
    count = width * len(lens)
    cache = KVCache.allocate(format_of(spec, HOPPER, layout, block), far + count)
    table = far + torch.randperm(count, generator=chance).int().view(len(lens), width)
    for stored, size, rows in zip(
        (cache.key, cache.value), (spec.head_size, spec.v_head_size), cache.format.rows or (None, None),
        strict=True,
    ):  # fmt: skip
        stored[far:].fill_(255 if stored.dtype == torch.uint8 else float("nan"))
        for pages, length in zip(table, lens, strict=True):
            new = torch.randn(length, spec.num_kv_heads, size, generator=chance)
            if stored is cache.value:
                new[40:] *= large
            lay(new if rows is None else quantize(new, torch.uint8, 1.0, rows), stored, pages)
    return cache, table


def leave(cache: KVCache, table: torch.Tensor, firsts: list[int], window: int) -> None:
    """Fill the blocks with NaN that the windows of the sequences' first tokens have left."""
    for pages, first in zip(table, firsts, strict=True):
        gone = max(0, first - window + 1) // cache.block_size
        for stored in (cache.key, cache.value):
            stored[pages[:gone].long()] = torch.nan


def lay(new: torch.Tensor, stored: torch.Tensor, pages: torch.Tensor) -> None:
    """Lay a sequence's rows into its blocks."""
    for page, rows in zip(pages.tolist(), new.split(stored.shape[1]), strict=False):
        stored[page, : len(rows)] = rows


def run(
    spec: LayerSpec, queries: list[int], lens: list[int], block: int = 16, layout: str = "NHD",
    sms: int = 3, order: tuple[int, ...] = (0, 1, 2), fresh: bool = False, far: int = 0,
    large: float = 1.0,
) -> tuple[str, list[str]]:  # fmt: skip
    """Run a step; its outputs are float64's, each written once. Returns the way, and the kernels."""
    cache, table = filled(spec, block, layout, lens, far, large)
    chance = torch.Generator().manual_seed(1)
    query = torch.randn(sum(queries), spec.num_heads, spec.head_size, generator=chance).bfloat16()
    batch = Batch.from_lens(queries, lens, table, block)
    batch.causal = spec.causal
    key = value = None
    if fresh:
        place = [(seq, at) for seq, n in enumerate(lens) for at in range(n)]
        blocks = [int(table[seq, at // block]) for seq, at in place]
        slots = [at % block for _, at in place]
        key, value = cache.key[blocks, slots], cache.value[blocks, slots]
    out = torch.full_like(query, float("nan"))
    frame = Frame(
        query, key, value, cache, LayerParams(), out, torch.full(out.shape[:2], float("nan"))
    )
    backend = backend_of(spec, cache.format, sms)
    plan = backend.plan(batch)
    wanted, lse = reference.forward(spec, query, key, value, cache, batch, frame.params)
    if spec.sliding_window:
        firsts = [n - q for q, n in zip(queries, lens, strict=True)]
        leave(cache, table, firsts, spec.sliding_window)
    with patch.object(TritonAttention, "_turn_rows", by_torch), on_host(order) as launches:
        backend.run(plan, frame)
    tolerance = tolerance_of(spec)
    assert output_error(out, wanted) <= tolerance.output
    assert lse_error(frame.lse, lse) <= tolerance.lse
    rows = cache.format.rows  # what is turned back is float32 first
    each_written_once(launches, out.float() if rows and rows[1].turn else out, frame.lse)
    return plan.way, [kernel.fn.__name__ for kernel, _ in launches]


def by_torch(backend: TritonAttention, rows: torch.Tensor, out: torch.Tensor, at: int) -> None:
    """Turn queries, or outputs back, as `kernels.turned` does, which is no kernel of Hopper's own."""
    format = backend._turned_rows[at]
    assert format is not None
    out.copy_(turned(rows, format, back=bool(at)))


def each_written_once(launches: list[Any], out: torch.Tensor, lse: torch.Tensor) -> None:
    """Of all launches together: each element of the outputs, and nothing else of their storages."""
    for name, tensor in (("OUT", out), ("LSE", lse)):
        written = np.concatenate(
            [each for _, storages in launches for each in storages[name].written]
        )
        grid = np.indices([*tensor.shape]).reshape(tensor.ndim, -1)
        places = np.array(tensor.stride()) @ grid * tensor.element_size()
        assert np.array_equal(np.sort(written), np.sort(places)), name


PLAIN = LayerSpec(num_heads=6, num_kv_heads=2, head_size=64, dtype="bfloat16", needs_lse=True)
ORDERS = {"consumers first": (0, 1, 2), "copies first": (2, 1, 0)}
"""Which role of a program goes on where several could: what lacks a wait for the other fails in one."""
RAGGED = [300, 1, 0, 40], [300, 200, 77, 555]
PREFILLS: dict[str, tuple[dict[str, Any], tuple[list[int], list[int]], dict[str, Any]]] = {
    "plain": ({}, RAGGED, {}),
    "a window": ({"sliding_window": 150}, RAGGED, {"layout": "HND"}),
    "not causal": ({"causal": False}, ([130, 7], [400, 7]), {"block": 32}),
    "groups of 5": (
        {"num_heads": 5, "num_kv_heads": 1, "head_size": 128},
        ([65, 3], [130, 300]),
        {},
    ),
    "heads of 256": (
        {"num_heads": 2, "num_kv_heads": 1, "head_size": 256},
        ([70], [200]),
        {"sms": 1},
    ),
    "blocks of 256": ({"head_size": 128}, ([50, 60], [700, 60]), {"block": 256}),
    "its own keys": ({"head_size": 128}, ([200, 30], [200, 30]), {"fresh": True}),
    "pieces": ({}, ([9, 70], [1000, 800]), {"sms": 14}),
    "pieces of a window": ({"sliding_window": 757}, ([64], [2100]), {"sms": 10}),
    "pieces of its own keys": ({"head_size": 128}, ([520], [520]), {"sms": 22, "fresh": True}),
}


def mostly_slow(names: Iterable[Any], *fast: Any) -> list[Any]:
    return [pytest.param(n, marks=() if n in fast else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("name", mostly_slow(PREFILLS, "a window", "not causal"))
def test_prefill(monkeypatch: pytest.MonkeyPatch, name: str, order: tuple[int, ...]) -> None:
    changes, (queries, lens), more = PREFILLS[name]
    merging_costs_nothing(monkeypatch)
    way, kernels = run(PLAIN.replace(**changes), queries, lens, order=order, **more)
    assert kernels[0] == "prefill_hopper_kernel"
    assert (way == "pieces") is (len(kernels) == 2) is (name.partition(" ")[0] == "pieces")


DECODES: dict[str, tuple[dict[str, Any], list[int], int]] = {
    "decode": ({}, [40, 33, 64, 47], 1),
    "decode, by head": ({"block_size": 32}, [40, 33], 1),
    "listed": ({"num_heads": 16, "num_kv_heads": 2}, [700, 5, 64, 0, 1], 4),
    # A sequence ends where a program does: it isn't cut.
    "listed, at an end": ({"num_heads": 16, "num_kv_heads": 2}, [224, 192, 512], 4),
    "many": ({}, [500, 470], 8),
    # More parts than a program usually merges at once: a row's columns are several programs'.
    "many, of many": ({"num_heads": 2, "num_kv_heads": 1}, [2300], 24),
}


OF_ROWS = (
    "int4", "nvfp4", "mxfp4", "kivi4", "kivi2", "e4m3_rows", "int8_rows", "turboquant4"
)  # fmt: skip
PACKED = [(form, name) for form in OF_ROWS for name in DECODES]
PACKED += [("fp8_e4m3", name) for name in DECODES if name.startswith("decode")]
OF_ANY_FORM = ("listed, at an end", "many, of many")
"""Where a row is cut and merged, which no format changes: CI has one."""


def marks_of(form: str, name: str) -> Any:
    if form != OF_ROWS[0] and name in OF_ANY_FORM:
        return pytest.mark.sweep
    return () if name == "decode" else pytest.mark.slow


@pytest.mark.parametrize(
    ("form", "name"), [pytest.param(*case, marks=marks_of(*case)) for case in PACKED]
)
def test_packed_decode(form: str, name: str) -> None:
    changes, lens, sms = DECODES[name]
    spec = PLAIN.replace(head_size=128, kv_cache_dtype=form, **changes)
    layout = "HND" if name.endswith("head") else "NHD"
    way, kernels = run(spec, [1] * len(lens), lens, spec.block_size or 16, layout, sms=sms)
    assert kernels == ["packed_kernel"] + ["merge_kernel"] * (not name.startswith("decode"))
    assert way == name.partition(",")[0]


@pytest.mark.parametrize(
    ("lens", "changes", "way"),
    [
        ([131072], {}, "many"),
        ([8192] * 4, {}, "many"),
        ([131072] + [1024] * 63, {}, "listed"),
        ([8192], {}, "many"),
        ([131072], {"num_heads": 8, "num_kv_heads": 1}, "many"),
        ([5120] * 2, {}, None),
        ([1024], {}, None),
        ([4096] * 16, {}, None),
        ([8192] * 32, {"num_heads": 28, "num_kv_heads": 4}, "many"),
        ([8192] * 64, {"num_heads": 28, "num_kv_heads": 4}, None),
        ([131072], {"graph_capture": "single_token_decode"}, None),
        ([4096] * 64, {}, "decode"),
    ],
    ids=[
        "long",
        "a few",
        "one long",
        "of 8k",
        "one KV head",
        "of 5k",
        "short",
        "of 4k",
        "few heads",
        "many heads",
        "captured",
        "many",
    ],
)
def test_long_decodes_over_e4m3_are_packed(
    lens: list[int], changes: dict[str, Any], way: str | None
) -> None:
    """And those that fill the chip uncut; `way`: None where the portable kernel serves."""
    heads = {"num_heads": 32, "num_kv_heads": 8} | changes
    spec = PLAIN.replace(head_size=128, kv_cache_dtype="fp8_e4m3", **heads)
    backend = backend_of(spec, format_of(spec, HOPPER, "NHD", 16), 132)
    table = torch.zeros(len(lens), max(lens) // 16, dtype=torch.int32)
    plan = backend.plan_rows(Batch.from_lens([1] * len(lens), lens, table, 16))
    assert (plan.config == backend.packed) is (way is not None)
    assert way in (None, plan.way)


def test_large_values_after_small_ones_leave_weights_in_float16() -> None:
    """int4's weights are multiplied by scales: of these up to 5,000, 2^14 of them would overflow."""
    run(PLAIN.replace(head_size=128, kv_cache_dtype="int4"), [1, 1], [70, 41], large=1e4)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["auto", "int4", "nvfp4"])
def test_caches_beyond_2_31_elements(form: str) -> None:
    """Places there need 64 bits: what overflows 32 is an error."""
    spec = PLAIN.replace(head_size=128, kv_cache_dtype=form)
    queries = [70, 1] if form == "auto" else [1, 1]
    _, kernels = run(spec, queries, [90, 37], far=(1 << 31) // (16 * 2 * 72) + 9)
    assert kernels[0] == ("prefill_hopper_kernel" if form == "auto" else "packed_kernel")


LATENTS: dict[str, tuple[list[int], list[int], int]] = {
    "whole": ([1, 1, 1], [200, 0, 64], 6),
    "whole, few": ([3, 1, 2], [200, 1, 65], 8),
    "pieces": ([1, 1], [900, 130], 5),
    "pieces, few": ([4, 2], [700, 129], 9),
    "pieces, few over a context": ([5, 1, 3], [320, 64, 128], 7),
}


def thinned() -> Iterator[Any]:
    """Yield cases of MLA. Of those of several tokens the sweep has two in three.

    The others have any three values together, but for a third of the names with blocks and heads.
    """
    values: list[tuple[Any, ...]] = [("auto", "fp8_e4m3"), (16, 64, 128), (16, 17, 32, 33, 64)]
    for name, *at in product(LATENTS, *(range(len(each)) for each in values)):
        most = max(LATENTS[name][0])  # 3, 4 and 5
        case = [each[i] for i, each in zip(at, values, strict=True)]
        rare = most > 1 and (most + sum(at)) % 3
        yield pytest.param(name, *case, marks=pytest.mark.sweep if rare else pytest.mark.slow)


@pytest.mark.parametrize(("name", "stored", "block", "heads"), [*thinned()])
def test_mla(name: str, stored: str, block: int, heads: int) -> None:
    """Heads of one token are columns, 16 or 32: over e4m3 all, else up to 32 of them. Others are rows.

    These are in lockstep over e4m3. So are all over blocks that hold no whole tile.
    """
    queries, lens, sms = LATENTS[name]
    kernel = "latents_kernel" if stored == "auto" else "mla_hopper_kernel"
    if max(queries) == 1 and block % 64 == 0 and (heads <= 32 or stored != "auto"):
        kernel = "few_heads_kernel" if stored == "auto" else "latent_bytes_kernel"
    context = name.endswith("context")
    latent(queries, lens, block, heads, sms, None, context, stored=stored, kernel=kernel)


@pytest.mark.parametrize("heads", [33, 64, pytest.param(128, marks=pytest.mark.slow)])
def test_mla_over_bytes_in_halves(heads: int) -> None:
    """Two programs have half of a tile of 64 rows each, with few tiles of keys, too."""
    more = {"stored": "fp8_e4m3", "kernel": "latent_bytes_kernel"}
    latent([1, 1, 1], [900, 0, 130], 64, heads, 1, None, **more)
    latent([1, 1], [900, 180], 64, heads, 2, None, **more)
    latent([1, 1], [90, 18], 64, heads, 5, None, **more)


@pytest.mark.parametrize("heads", [16, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rising", [100.0, 12.0, -100.0])
def test_mla_of_logits_that_rise_and_fall(rising: float, heads: int) -> None:
    """Weights are relative to a largest logit that grows in each tile, in few, or in the first alone."""
    more = {"stored": "fp8_e4m3", "kernel": "latent_bytes_kernel"}
    latent([1, 1], [900, 130], 64, heads, 5, None, rising=rising, **more)


@pytest.mark.parametrize(
    "stored, queries", [("auto", [1, 1]), ("auto", [4, 2]), ("fp8_e4m3", [1, 1])]
)
def test_mla_by_another_kernel(stored: str, queries: list[int]) -> None:
    """Rows that the copy engine can't describe are copied in lockstep."""
    with patch.object(mla, "latent_boxes", lambda *_: None):
        latent(queries, [900, 130], 64, 20, 5, None, stored=stored, kernel="mla_hopper_kernel")


@pytest.mark.slow
@pytest.mark.parametrize("heads, block, stored, kernel", [
    (33, 16, "fp8_e4m3", "mla_hopper_kernel"), (16, 64, "auto", "few_heads_kernel"),
    (16, 64, "fp8_e4m3", "latent_bytes_kernel"), (96, 64, "auto", "latents_kernel"),
])  # fmt: skip
def test_mla_of_heads_beyond_2_31_elements(
    heads: int, block: int, stored: str, kernel: str
) -> None:
    """A head's place needs 64 bits: what overflows 32 is an error."""
    far = (1 << 31) // (heads - 1) + 8
    latent([1], [130], block, heads, 5, None, stored=stored, kernel=kernel, far=far)


@pytest.mark.parametrize("block", [16, 64, 128])
@pytest.mark.parametrize("name", mostly_slow(LATENTS))
def test_mla_by_roles(name: str, block: int) -> None:
    """Two tiles of rows or more a sequence: one group of warps scores, another follows."""
    queries, lens, sms = LATENTS[name]
    context = name.endswith("context")
    latent(queries, lens, block, 96, sms, None, context, kernel="latents_kernel")


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("topk, sms", [(100, 6), pytest.param(640, 3, marks=pytest.mark.slow)])
def test_sparse_mla(topk: int, sms: int, block: int) -> None:
    latent([1, 2], [300, 700], block, 20, sms, topk, kernel="mla_hopper_kernel")


def latents(
    form: CacheFormat, lens: list[int], chance: torch.Generator, rising: bool = False
) -> tuple[KVCache, torch.Tensor]:
    """Return a cache of random latents, NaN behind each sequence's last, and its block table.

    `rising`: a sequence's first column goes from -1 to 1.
    """
    block = form.block_size
    width = max(-(-n // block) for n in lens)
    cache = KVCache.allocate(form, width * len(lens))
    table = torch.randperm(width * len(lens), generator=chance).int().view(len(lens), width)
    cache.key.fill_(float("nan"))
    for pages, length in zip(table, lens, strict=True):
        new = torch.randn(length, 1, 576, generator=chance).bfloat16()
        if rising:
            new[:, 0, 0] = torch.linspace(-1, 1, length)
        lay(new, cache.key, pages)
    return cache, table


def seen(
    tokens: list[tuple[int, int]],
    table: torch.Tensor,
    block: int,
    topk: int | None,
    chance: torch.Generator,
) -> tuple[list[list[int]], torch.Tensor | None]:
    """Return the slots that tokens of (sequence, keys) see, and the choice of some of these."""
    slots = [
        [int(table[s, at // block]) * block + at % block for at in range(max(n, 0))]
        for s, n in tokens
    ]
    if not topk:
        return slots, None
    slots = [
        [x[at] for at in torch.randperm(len(x), generator=chance)[: topk - 7].tolist()]
        for x in slots
    ]
    padded = [[-1] * 3 + x + [-1] * (topk - 3 - len(x)) for x in slots]
    return slots, torch.tensor(padded, dtype=torch.int32)


def apart(x: torch.Tensor, far: int) -> torch.Tensor:
    """Return a copy of [tokens, heads, size] whose heads lie `far` from one another."""
    heads = x.shape[1]
    return torch.empty_strided(x.shape, (heads * far, far, 1), dtype=x.dtype).copy_(x)


def latent(
    queries: list[int],
    lens: list[int],
    block: int,
    heads: int,
    sms: int,
    topk: int | None,
    context: bool = False,
    stored: str = "auto",
    *,
    kernel: str,
    far: int = 0,
    rising: float = 0.0,
) -> None:
    """Run a step of TRITON_MLA, or of TRITON_MLA_SPARSE; its outputs are float64's, each written once.

    `context`: all keys are before the queries. `kernel`: which runs.
    `far`: how far heads lie from one another, in elements. `rising`: logits go from less that to it.
    """
    spec = LayerSpec(
        kind="sparse_mla" if topk else "mla", num_heads=heads, num_kv_heads=heads, head_size=192,
        v_head_size=128, dtype="bfloat16", latent=LatentSpec(rank=512, rope_head_size=64),
        sparse=SparseSpec(budget=topk) if topk else None, needs_lse=True, kv_cache_dtype=stored,
    )  # fmt: skip
    form = format_of(spec, HOPPER, "NHD", block)
    chance = torch.Generator().manual_seed(len(lens))
    cache, table = latents(form, lens, chance, rising != 0)
    query = torch.randn(sum(queries), heads, 576, generator=chance).bfloat16()
    if rising:
        query[..., 0] = rising / spec.scale
    out = query.new_full((len(query), heads, 512), float("nan"))
    lse = torch.full(out.shape[:2], float("nan"))
    if far:
        query, out = (apart(x, far) for x in (query, out))
    rows = [(seq, q, n) for seq, (q, n) in enumerate(zip(queries, lens, strict=True))]
    tokens = [(s, n if context else n - q + at + 1) for s, q, n in rows for at in range(q)]
    slots, choice = seen(tokens, table, block, topk, chance)
    with patch.object(launch, "facts", h200(sms)):
        backend = (mla.TritonMLASparse if topk else mla.TritonMLA)(spec, form, HOPPER)
    batch = Batch.from_lens(queries, lens, table, block)
    plan = backend.plan(batch.over_context() if context else batch)
    with on_host() as launches:
        backend.run(plan, Frame(query, None, None, cache, LayerParams(), out, lse, choice=choice))
    merges = ["merge_kernel"] * (plan.merging is not None)
    assert [k.fn.__name__ for k, _ in launches] == [kernel, *merges]
    if merges:  # over e4m3 parts are in float16, but in lockstep
        places = np.sort(np.concatenate(launches[0][1]["PARTS"].written))
        assert np.diff(places).min() == (2 if kernel == "latent_bytes_kernel" else 4)
    held = cache.key.double().view(-1, 576)
    wanted = torch.zeros(out.shape, dtype=torch.float64)
    sums = torch.full(lse.shape, -torch.inf).double()
    for at, mine in enumerate(slots):
        if mine:
            scores = query[at].double() @ held[mine].T * spec.scale
            wanted[at], sums[at] = scores.softmax(1) @ held[mine][:, :512], scores.logsumexp(1)
    assert output_error(out, wanted) <= tolerance_of(spec).output
    assert lse_error(lse, sums) <= tolerance_of(spec).lse
    each_written_once(launches, out, lse)


def registers_of(*pairs: Any) -> list[Any]:
    """Return the registers that hold two numbers of 16 bits each."""
    return [np.ascontiguousarray(x).view(np.uint32).reshape(-1) for x in pairs]


UNITS = np.arange(1 << 16, dtype=np.uint16)


def test_every_unit_of_four_bits() -> None:
    """Each of 65,536 units, beside each of 7 others and by some scales: the four numbers, in order."""
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibble = [UNITS >> 4 * at & 15 for at in range(4)]
    integers = [x.astype(np.float64) - 8 for x in nibble]
    opposite = [np.where(x & 8, 1, -1) * e2m1[x & 7] * 2.0**-14 for x in nibble]
    # Bytes of e4m3: 1, 0.5, the largest, the smallest, zero.
    some = {0x38: 1.0, 0x30: 0.5, 0x7E: 448.0, 0x01: 2.0**-9, 0x00: 0.0, 0xB8: -1.0}
    for turn in (0, 1, 256, 4097, 32768):
        pair = np.stack([UNITS, np.roll(UNITS, turn)], -1)

        def right(
            asm: Any, numbers: list[Any], scales: Any, *others: Any, turn: int = turn
        ) -> None:
            registers = registers_of(pair)  # noqa: B023
            registers += [np.full(len(pair), x, np.uint32) for x in others]  # noqa: B023
            for bits, wanted in zip(run_ptx(asm, 4, registers), numbers, strict=True):
                found = bits.view(np.float16).reshape(-1, 2).astype(np.float64)
                assert (found[:, 0] == wanted * scales[0]).all()
                assert (found[:, 1] == np.roll(wanted, turn) * scales[1]).all()

        right(unpacking.INTEGERS, integers, (1.0, 1.0))
        codes = [x * (16.0 if at % 2 else 1.0) * 2.0**-24 for at, x in enumerate(nibble)]
        right(unpacking.CODES, codes, (1.0, 1.0))
        for (low, first), (high, second) in pairwise(some.items()):
            words = [np.array([x], np.uint32) for x in (low | high << 8, 0x3038, 0x5140)]
            halves = [int(x[0]) for x in run_ptx(unpacking.HALVES, 4, words)]
            # A row's two units are of one group; of two rows each has its own.
            for one, other, by in (
                (0, 0, (first, first)),
                (0, 1, (first, 1.0)),
                (2, 3, (second, 0.5)),
            ):
                right(unpacking.E2M1, opposite, by, halves[one] | halves[other] << 16)


@pytest.mark.parametrize("bits", [4, 2])
def test_every_unit_of_steps(bits: int) -> None:
    """Codes times their own group's step, from its least number on, as one rounding gives it."""
    pair = np.stack([UNITS, np.roll(UNITS, 4097)], -1)
    ends = np.array([[0.25, -3.0], [1.7, 0.1]], np.float16)
    scales = [np.full(len(pair), x, np.uint32) for x in ends.view(np.uint32)[:, 0]]
    asm = unpacking.STEPS if bits == 4 else unpacking.QUARTERS
    parts = run_ptx(asm, 16 // bits, [*registers_of(pair), *scales])
    for at, numbers in enumerate(parts):
        codes = (pair >> bits * at & (1 << bits) - 1).astype(np.float64)
        wanted = codes * ends[:, 0].astype(np.float64) + ends[:, 1].astype(np.float64)
        assert np.array_equal(numbers.view(np.float16).reshape(-1, 2), wanted.astype(np.float16))


def test_every_unit_of_powers() -> None:
    """e2m1's numbers times powers of two that float16 can't hold, exact in bfloat16."""
    pair = np.stack([UNITS, np.roll(UNITS, 4097)], -1)
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for powers in ((1.0, 2.0**-120), (2.0**124, 2.0**-3)):
        by = torch.tensor(powers).bfloat16()
        scales = np.broadcast_to(by.view(torch.int16).numpy(), pair.shape)
        for at, bits in enumerate(run_ptx(unpacking.POWERS, 4, registers_of(pair, scales))):
            codes = torch.from_numpy((pair >> 4 * at & 15).astype(np.int64))
            wanted = torch.where(codes >= 8, -1, 1) * e2m1[codes & 7] * by.float()
            numbers = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)
            assert torch.equal(numbers.float().view(-1, 2), wanted)


def test_every_byte() -> None:
    """Of two units each operand has one's two numbers, or both's first ones and both's second ones."""
    pair = np.stack([UNITS, np.roll(UNITS, 4097)], -1)
    numbers = pair.view(np.int8).astype(np.float16)
    for asm, places in (
        (unpacking.BYTES_BESIDE, ((0, 1), (2, 3))),
        (unpacking.BYTES_BELOW, ((0, 2), (1, 3))),
    ):
        for bits, mine in zip(run_ptx(asm, 2, registers_of(pair)), places, strict=True):
            assert np.array_equal(bits.view(np.float16).reshape(-1, 2), numbers[:, list(mine)])


def test_every_unit_of_levels() -> None:
    """Of two units each operand has neighbours of one's four numbers, or both's numbers of a place."""
    pair = np.stack([UNITS, np.roll(UNITS, 4097)], -1)
    codes = np.stack([pair >> 4 * at & 15 for at in range(4)], -1).reshape(-1, 8)
    numbers = np.array(CODEBOOK, np.float16)[codes]
    for asm, places in (
        (unpacking.LEVELS_BESIDE, ((0, 1), (2, 3), (4, 5), (6, 7))),
        (unpacking.LEVELS_BELOW, ((0, 4), (1, 5), (2, 6), (3, 7))),
    ):
        for bits, mine in zip(run_ptx(asm, 4, registers_of(pair)), places, strict=True):
            assert np.array_equal(bits.view(np.float16).reshape(-1, 2), numbers[:, list(mine)])


def test_a_table_of_sixteen() -> None:
    """Four codes at once, each a byte, of a codebook: what torch has in its place, as float16."""
    codes = np.stack([UNITS >> 4 * at & 15 for at in range(4)], -1).astype(np.uint8)
    pairs = run_ptx(table_asm([*CODEBOOK]), 2, [codes.view(np.uint32).reshape(-1)])
    numbers = np.stack([x.view(np.float16).reshape(-1, 2) for x in pairs], 1).reshape(-1, 4)
    assert np.array_equal(numbers, np.array(CODEBOOK, np.float16)[codes])


def test_every_unit_of_e4m3() -> None:
    """Of two units each operand has one's two numbers, or both's first ones and both's second ones."""
    pair = np.stack([UNITS, np.roll(UNITS, 4097)], -1)
    numbers = torch.from_numpy(pair.view(np.uint8)).view(torch.float8_e4m3fn).half().numpy()
    for asm, places in ((unpacking.BESIDE, ((0, 1), (2, 3))), (unpacking.BELOW, ((0, 2), (1, 3)))):
        for bits, mine in zip(run_ptx(asm, 2, registers_of(pair)), places, strict=True):
            found = bits.view(np.float16).reshape(-1, 2)
            assert np.array_equal(found, numbers[:, list(mine)], equal_nan=True)


INDEXERS = {
    "DSA": IndexerSpec(num_heads=64, head_size=128, budget=40, cache_dtype="fp8_scaled"),
    "V4, 20 heads": IndexerSpec(
        num_heads=20, head_size=128, budget=9, tokens_per_entry=4, cache_dtype="fp8_scaled"
    ),
    "a sum": IndexerSpec(
        num_heads=32,
        head_size=128,
        budget=40,
        fold="sum",
        activation="none",
        cache_dtype="fp8_e4m3",
    ),
}


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("name", INDEXERS)
def test_scores_of_prompts(name: str, group: int) -> None:
    """Tokens of several sequences a program, several programs a sequence, and what nobody sees is NaN."""
    form, lengths = INDEXERS[name], [(1, 300), (9, 700), (0, 5), (3, 3)]
    spec = layer_for(form, "bfloat16")
    work = IndexWorkload(spec, lengths, Dice(0), block=128)
    frame, batch = work.frame, work.batch
    frame.query = frame.query.to(torch.float8_e4m3fn)
    backend, ranked = index.TritonIndex(spec, None, HOPPER), []
    with on_host() as launches, ExitStack() as stack:
        stack.enter_context(patch.object(index, "group_of", lambda *_: group))
        stack.enter_context(patch.object(index, "_select", lambda *call: ranked.append(call[1][0])))
        backend.run(backend.plan(batch), frame)
    kernel, storages = launches[0]
    tokens = [(n - q + i + 1) // form.tokens_per_entry for q, n in lengths for i in range(q)]
    assert len(launches) == 1 and kernel is index.prompt_scores_kernel
    best = torch.from_numpy(storages["BEST"].bytes).view(torch.float32).view(len(tokens), -1)
    scores = torch.from_numpy(storages["OUT"].bytes).view(torch.float32).view(len(tokens), -1)
    for token, there in enumerate(tokens):
        exact = torch.tensor([*scored(spec, batch, frame, token)[0].values()])
        assert len(exact) == there, "the reference's candidates are those that are seen"
        if not there:
            continue
        assert (scores[token, :there] - exact).abs().max() < 1e-5 * exact.abs().max()
        if group > 1:
            wanted = [
                scores[token, i : min(i + group, there)].max() for i in range(0, there, group)
            ]
            assert best[token, : len(wanted)].tolist() == wanted
