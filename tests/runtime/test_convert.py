"""Blocks of one cache in another: every pair of formats, layouts and block sizes, token by token."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest
import torch
from polyattn import CacheFormat, KVCache, convert_blocks
from polyattn.errors import CacheError
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES, quantize
from polyattn.runtime.cache.rows import decoded, sizes_of
from polyattn.spec.row_format import known_formats, row_format
from torch import Tensor
from unseen_format import registered

PLAIN = ("float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e4m3fnuz", "fp8_e5m2", "int8")
ROWS = tuple(name for name in sorted(known_formats()) if 128 in sizes_of(row_format(name)))
NAMES = (*PLAIN, *ROWS, "int8_rows/int4", "logs6/turboquant4")
"""AMD's e4m3, formats of keys beside others of values, and one that a user registers, too."""
FORMS = [
    (layout, interleaved, block)
    for layout, interleaved in (
        ("NHD", False),
        ("HND", False),
        ("NHD", True),
        ("contiguous", False),
    )
    for block in (16, 48)
]
HEADS, SIZE = 3, 128


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    with registered():
        yield


def of_part(name: str, part: int) -> str:
    """Return the format of keys (0) or of values."""
    return name.split("/")[part] if "/" in name else name


def forms_of(name: str) -> list[tuple[str, bool, int]]:
    """Return layouts that hold a format: keys and values of two sizes lie apart."""
    apart = ("NHD", "HND")
    return [form for form in FORMS if "/" not in name or (form[0] in apart and not form[1])]


def cache(name: str, form: tuple[str, bool, int], blocks: int) -> KVCache:
    layout, interleaved, block = form
    made = CacheFormat(block_size=block, num_kv_heads=HEADS, head_size=SIZE, v_head_size=SIZE,
                       dtype=name, layout=layout, apart=(1 + interleaved) * block)  # fmt: skip
    found = KVCache.allocate(made, blocks)
    found.key.view(torch.uint8).fill_(7)
    found.value.view(torch.uint8).fill_(7)
    return found


def written(name: str, values: Tensor, scale: float) -> Tensor:
    if name in PLAIN and STORAGE_DTYPES[name].itemsize > 1:
        return values.to(STORAGE_DTYPES[name])
    format = None if name in PLAIN else row_format(name)
    dtype = torch.uint8 if format else STORAGE_DTYPES[name]
    return quantize(values, dtype, scale, format)


def is_scaled(name: str) -> bool:
    return name not in PLAIN or STORAGE_DTYPES[name].itemsize == 1


def read(name: str, row: Tensor, scale: float) -> Tensor:
    if name not in PLAIN:
        return decoded(row, row_format(name), SIZE) * scale
    return row.float() * scale


@pytest.mark.parametrize("old", NAMES)
def test_any_format_becomes_any_other(old: str) -> None:
    generator = torch.Generator().manual_seed(5)
    for new in NAMES:
        draw = random.Random(f"{old}{new}")
        one, other = draw.choice(forms_of(old)), draw.choice(forms_of(new))
        source, target = cache(old, one, 9), cache(new, other, 9)
        tokens = 3 * 48
        ids = (torch.randperm(9, generator=generator)[: tokens // one[2]],
               torch.randperm(9, generator=generator)[: tokens // other[2]])  # fmt: skip
        scales = tuple(
            pair if is_scaled(name) else (1.0, 1.0)
            for name, pair in ((old, (0.5, 0.25)), (new, (0.75, 0.125)))
        )
        start, end = (
            (blocks.repeat_interleave(form[2]), torch.arange(form[2]).repeat(len(blocks)))
            for blocks, form in zip(ids, (one, other), strict=True)
        )
        rows = torch.randn(2, tokens, HEADS, SIZE, generator=generator)
        for part, tensor in enumerate((source.key, source.value)):
            row_bytes = written(of_part(old, part), rows[part], scales[0][part])
            tensor.view(torch.uint8)[start] = row_bytes.view(torch.uint8)
        convert_blocks(
            source,
            target,
            ids[0],
            ids[1].tolist(),
            source_scales=scales[0],
            target_scales=scales[1],
        )
        untouched = torch.ones(9, other[2], dtype=torch.bool)
        untouched[end] = False
        for part, pair in enumerate(((source.key, target.key), (source.value, target.value))):
            held = pair[0].view(torch.uint8)[start].view(pair[0].dtype)
            values = read(of_part(old, part), held, scales[0][part])
            wanted = written(of_part(new, part), values, scales[1][part]).view(torch.uint8)
            assert torch.equal(pair[1].view(torch.uint8)[end], wanted), new
            assert bool((pair[1].view(torch.uint8)[untouched] == 7).all()), new


@pytest.mark.parametrize("name", NAMES)
def test_equal_formats_and_scales_keep_every_byte(name: str) -> None:
    """NaNs and what no encoder writes too; in other blocks and another layout."""
    source, target = cache(name, ("NHD", False, 48), 2), cache(name, ("HND", False, 16), 6)
    for tensor in (source.key, source.value):
        tensor.view(torch.uint8).random_(0, 256)
    scale = torch.tensor([0.5, 1.0, 2.0]) if is_scaled(name) else 1.0
    convert_blocks(source, target, [1, 0], [5, 0, 3, 1, 2, 4],
                   source_scales=(scale, 1.0), target_scales=(scale, 1.0))  # fmt: skip
    for old, new in ((source.key, target.key), (source.value, target.value)):
        assert torch.equal(
            old[[1, 0]].contiguous().view(torch.uint8).flatten(0, 1),
            new[[5, 0, 3, 1, 2, 4]].contiguous().view(torch.uint8).flatten(0, 1),
        )


@pytest.mark.parametrize("elements", [1, 48 * HEADS * SIZE, 1 << 22])
def test_in_pieces(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyattn.runtime.cache.convert.AT_ONCE", elements)
    source = cache("float32", ("NHD", False, 16), 9)
    target = cache("bfloat16", ("NHD", False, 48), 3)
    source.key.normal_()
    source.value.normal_()
    convert_blocks(source, target, range(9), [2, 0, 1])
    assert torch.equal(target.key[[2, 0, 1]].flatten(0, 1), source.key.flatten(0, 1).bfloat16())
    assert torch.equal(target.value[[2, 0, 1]].flatten(0, 1), source.value.flatten(0, 1).bfloat16())


@pytest.mark.parametrize("name", ["bfloat16", "fp8_e4m3", "int4"])
@pytest.mark.parametrize(("old", "new"), [(16, 48), (48, 16), (16, 16), (64, 48)])
@pytest.mark.parametrize("tokens", [1, 16, 77, 95, 96])
def test_a_last_block_that_isn_t_full(name: str, old: int, new: int, tokens: int) -> None:
    source, target = cache(name, ("NHD", False, old), 8), cache(name, ("HND", False, new), 8)
    for tensor in (source.key, source.value):
        tensor.view(torch.uint8).random_(0, 256)
    ids = [list(range(7, 7 - -(-tokens // size), -1)) for size in (old, new)]
    convert_blocks(source, target, *ids, num_tokens=tokens)
    for one, other in ((source.key, target.key), (source.value, target.value)):
        rows, others = (
            t.view(torch.uint8)[at].flatten(0, 1) for t, at in zip((one, other), ids, strict=True)
        )
        assert torch.equal(rows[:tokens], others[:tokens])
        assert bool((others[tokens:] == 7).all())
        assert bool((other.view(torch.uint8)[: 8 - len(ids[1])] == 7).all())
    for bad in (tokens + 96, 0, -1, float(tokens), True):
        with pytest.raises(CacheError, match=r"to be written: .* num_tokens=|must be an integer"):
            convert_blocks(source, target, *ids, num_tokens=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "size"), [("fp8_ds_mla", 576), ("fp8_ds_v4", 512), ("int4", 576)])
def test_a_latent_is_one_row(name: str, size: int) -> None:
    forms = [
        CacheFormat(block_size=16, num_kv_heads=1, head_size=size, v_head_size=448, dtype=dtype,
                    value_in_key=True)
        for dtype in ("bfloat16", name, "float32")
    ]  # fmt: skip
    source, target, back = (KVCache.allocate(form, 2) for form in forms)
    source.key.normal_()
    convert_blocks(source, target, [0, 1], [1, 0])
    wanted = quantize(source.key.flatten(0, 1), torch.uint8, 1.0, row_format(name))
    assert torch.equal(target.key[[1, 0]].flatten(0, 1), wanted)
    convert_blocks(target, back, [1, 0], [0, 1])
    assert torch.equal(back.key.flatten(0, 1), decoded(wanted, row_format(name), size))


def test_a_cache_s_own_blocks_move_to_others_alone() -> None:
    one = cache("float32", ("NHD", False, 16), 6)
    one.key.normal_()
    before = one.key.clone()
    convert_blocks(one, one, [0, 1], [4, 5])
    assert torch.equal(one.key[[4, 5]], before[[0, 1]])
    with pytest.raises(CacheError, match="blocks are both read and written"):
        convert_blocks(one, one, [0, 1], [1, 2])
    assert torch.equal(one.key[:4], before[:4])


def test_a_head_s_scale_is_its_own() -> None:
    source, target = cache("int8", ("NHD", False, 16), 1), cache("float32", ("NHD", False, 16), 1)
    source.key.random_(-127, 128)
    source.value.random_(-127, 128)
    by_head = torch.tensor([0.5, 1.0, 2.0])
    convert_blocks(source, target, [0], [0], source_scales=(by_head, 3.0))
    assert torch.equal(target.key, source.key.float() * by_head[:, None])
    assert torch.equal(target.value, source.value.float() * 3)


@pytest.mark.parametrize(
    ("source_blocks", "target_blocks", "says"),
    [
        ([0, 9], [0, 1], r"source_blocks=\[0, 9\] must be ids from 0 to 8"),
        ([0, 1], [-1, 1], r"target_blocks=\[-1, 1\] must be ids from 0 to 8"),
        ([0, 1], [1, 1], r"target_blocks=\[1, 1\] names a block twice"),
        ([0, 1], [1], "target_blocks hold 16 tokens, .* 32 are to be written"),
        ([[0]], [1], "must be ids of blocks"),
        ([0.5], [1], "must be ids of blocks"),
        (None, [1], "source_blocks=None must be ids of blocks"),
        ([0], ["1"], r"target_blocks=\['1'\] must be ids of blocks"),
    ],
)
def test_what_is_refused_writes_nothing(
    source_blocks: list[int], target_blocks: list[int], says: str
) -> None:
    form = ("NHD", False, 16)
    source, target = cache("float32", form, 9), cache("bfloat16", form, 9)
    with pytest.raises(CacheError, match=says):
        convert_blocks(source, target, source_blocks, target_blocks)
    assert bool((target.key.view(torch.uint8) == 7).all())


@pytest.mark.parametrize("back", [False, True])
def test_scales_are_as_layers_take_them(back: bool) -> None:
    """A number, a tensor () of one, or one for each KV head."""
    form = ("NHD", False, 16)
    scaled, plain = cache("int8", form, 2), cache("float32", form, 2)
    scaled.key.random_(-100, 100), scaled.value.random_(-100, 100)
    plain.key.uniform_(-9, 9), plain.value.uniform_(-9, 9)
    source, target, name = (
        (plain, scaled, "target_scales") if back else (scaled, plain, "source_scales")
    )
    written = []
    for scale in (0.5, torch.tensor(0.5), torch.tensor([0.5]), torch.full((HEADS,), 0.5)):
        convert_blocks(source, target, [0, 1], [1, 0], **{name: (scale, scale)})
        written.append((target.key.clone(), target.value.clone()))
    for key, value in written[1:]:
        assert torch.equal(key, written[0][0]) and torch.equal(value, written[0][1])
    number = (0.5, math.nan), (0.0, 0.5), (0.5, -1.0), ("0.5", 0.5), (None, 0.5), (True, 0.5)
    for wrong in (0.5, (0.5,), (0.5, torch.ones(2)), (0.5, torch.tensor(1)), *number):
        with pytest.raises(CacheError, match=name):
            convert_blocks(source, target, [0], [0], **{name: wrong})
    other = "source_scales" if back else "target_scales"
    for scale in (0.5, torch.tensor(0.5)):
        with pytest.raises(CacheError, match=rf"{other}\[1\].* scales a quantised cache"):
            convert_blocks(source, target, [0], [0], **{other: (1.0, scale)})


def test_no_blocks_are_nothing_to_convert() -> None:
    one = cache("float32", ("NHD", False, 16), 6)
    convert_blocks(one, one, [], [])
    convert_blocks(one, one, [], [], num_tokens=0)
    assert bool((one.key.view(torch.uint8) == 7).all())


def test_caches_of_other_layers_are_refused() -> None:
    with pytest.raises(CacheError, match=r"target=.* must be a KVCache"):
        convert_blocks(cache("float32", ("NHD", False, 16), 1), [0], [0], [0])  # type: ignore[arg-type]
    forms = [
        CacheFormat(
            block_size=16, num_kv_heads=heads, head_size=64, v_head_size=size, dtype="float32"
        )
        for heads, size in itertools.product((1, 2), (64, 32))
    ]
    with pytest.raises(CacheError, match="num_kv_heads=1, target 2"):
        convert_blocks(KVCache.allocate(forms[0], 1), KVCache.allocate(forms[2], 1), [0], [0])
    with pytest.raises(CacheError, match="v_head_size=64, target 32"):
        convert_blocks(KVCache.allocate(forms[0], 1), KVCache.allocate(forms[1], 1), [0], [0])
