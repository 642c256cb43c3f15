"""Formats of cached rows: beside ml_dtypes' roundings, published formulas in float64, and by hand."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polyattn
import pytest
import torch
from format_accuracy import LINES, lines_of, row_of
from polyattn import Attention, Batch, KVCache, LayerGroup, LayerSpec, RowFormat, select
from polyattn.errors import CacheError, PluginError, SelectionError, SpecError
from polyattn.families.attention import reference
from polyattn.kernel import SharedRun
from polyattn.runtime.cache.rows import decoded, encoded, sizes_of, turned
from polyattn.spec.row_format import known_formats, row_format
from published_formats import PUBLISHED, SIZES, by_nvfp4, by_turboquant
from torch import Tensor
from unseen_format import registered

SPEC = LayerSpec(
    num_heads=4, num_kv_heads=2, head_size=32, v_head_size=48, dtype="float32",
    kv_cache_dtype="nvfp4", block_size=16,
)  # fmt: skip
SHIPPED = sorted(known_formats())


def back(name: str, x: Tensor) -> Tensor:
    """What a format makes of rows."""
    format = row_format(name)
    return decoded(encoded(x, format), format, x.shape[-1])


def normal(*shape: int, spread: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[-1])) * spread


@pytest.mark.parametrize(
    ("name", "size"), [(name, n) for name in PUBLISHED for n in SIZES.get(name, (32, 128, 192))]
)
def test_rows_are_what_the_published_formula_makes_of_them(name: str, size: int) -> None:
    """All but a few in ten thousand: a float32 quotient may lie on the other side of a tie."""
    x = normal(400, 3, size)
    found, wanted = back(name, x), PUBLISHED[name](x.flatten(0, 1)).view_as(x)
    same = (found - wanted).abs() <= 1e-6 * wanted.abs()
    assert same.double().mean() > 0.9998
    step = (wanted - x).abs().amax(-1, keepdim=True)
    assert ((found - x).abs() <= step * 1.01 + 1e-6).all()


@pytest.mark.parametrize("spread", [1e-3, 300.0, 1e5])
def test_nvfp4_rounds_as_ml_dtypes_at_any_size_of_numbers(spread: float) -> None:
    x = normal(50, 3, 64, spread=spread)
    assert torch.equal(back("nvfp4", x), by_nvfp4(x))


def test_turboquant_is_as_near_as_its_paper_says() -> None:
    """Of rows of any direction, four bits leave 0.009 of the squared norm (theorem 1's table)."""
    rows = normal(2000, 128)
    single = torch.eye(128)[:64] * 7.0  # all of a row in one element
    for x in (rows, single):
        lost = (back("turboquant4", x) - x).square().sum(-1) / x.square().sum(-1)
        assert lost.mean() < 0.0125
    assert 0.0085 < ((back("turboquant4", rows) - rows).norm() / rows.norm()) ** 2 < 0.0105


@pytest.mark.parametrize("size", [32, 128])
def test_turboquant_is_its_papers_algorithm(size: int) -> None:
    """Whole rows but a few, of which a float32 element may lie on the other side of a tie."""
    from polyattn.runtime.cache.formats.turboquant import CODEBOOK

    x = normal(1000, size, spread=3.0)
    off = (back("turboquant4", x) - by_turboquant(CODEBOOK, x)).abs().amax(-1)
    assert (off < 1e-5).double().mean() > 0.998


def test_turboquant_has_the_levels_of_lloyd_and_max() -> None:
    """A level is the mean of the normal numbers that are nearest to it."""
    from polyattn.runtime.cache.formats.turboquant import CODEBOOK

    levels = torch.tensor(CODEBOOK, dtype=torch.float64)
    edges = torch.cat([torch.tensor([-40.0]), (levels[1:] + levels[:-1]) / 2, torch.tensor([40.0])])
    density = torch.exp(-edges.square() / 2) / (2 * torch.pi) ** 0.5
    below = torch.special.ndtr(edges)
    means = (density[:-1] - density[1:]) / (below[1:] - below[:-1])
    torch.testing.assert_close(means, levels, rtol=0, atol=2e-5)


def test_a_turn_is_orthogonal_and_turns_back() -> None:
    x = normal(9, 64)
    format = row_format("turboquant4")
    there = turned(x, format)
    torch.testing.assert_close(there.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turned(there, format, back=True), x)


@pytest.mark.parametrize("name", ["fp8_ds_mla", "fp8_ds_v4"])
def test_deepseek_rows_lie_as_flash_mla_reads_them(name: str) -> None:
    """By offsets: 512 e4m3, 4 float32, 64 bf16; and 448 e4m3, 64 bf16, 7 e8m0, a byte of 0."""
    size, eight, group = (576, 512, 128) if name == "fp8_ds_mla" else (512, 448, 64)
    x = normal(20, size, spread=3.0)
    rows = encoded(x, row_format(name))
    codes = rows[:, :eight].contiguous().view(torch.float8_e4m3fn).double()
    if name == "fp8_ds_mla":
        assert rows.shape == (20, 656)
        scales, rope = rows[:, 512:528].contiguous().view(torch.float32).double(), rows[:, 528:]
        wanted = x[:, :512].unflatten(1, (-1, group)).abs().amax(-1) / 448
        torch.testing.assert_close(scales.float(), wanted)
    else:
        assert rows.shape == (20, 584) and not rows[:, 583].any()
        rope, scales = rows[:, 448:576], torch.exp2(rows[:, 576:583].double() - 127)
        largest = x[:, :448].unflatten(1, (-1, group)).abs().amax(-1).double()
        assert torch.equal(scales, torch.exp2(torch.ceil(torch.log2(largest / 448))))
    wide = rope.contiguous().view(torch.bfloat16)
    assert torch.equal(wide, x[:, eight:].bfloat16())
    held = torch.cat([codes * scales.repeat_interleave(group, 1), wide.double()], 1)
    assert torch.equal(decoded(rows, row_format(name), size), held.float())


def test_nvfp4_halves_go_to_even() -> None:
    """A block whose largest is 6 has scale 1: its numbers are e2m1's own, and what lies between."""
    x = torch.tensor(
        [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -5, 0.5, 4, 0.2, 4.9, -6]
    )
    wanted = [6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -4, 0.5, 4, 0, 4, -6]
    assert back("nvfp4", x).tolist() == wanted


def test_bytes_lie_as_said() -> None:
    """Element 0 in the low four bits of byte 0, element 1 in its high ones; then the block scales."""
    x = torch.zeros(32)
    x[0], x[1], x[31] = 6.0, -1.0, 12.0
    assert encoded(x, row_format("nvfp4")).tolist() == [
        0x7 | 0xA << 4, *[0] * 14, 0x70, 0x38, 0x40,
    ]  # e4m3's 1 and 2  # fmt: skip
    assert encoded(x, row_format("mxfp4"))[16:].tolist() == [128]  # 12 is 6 times 2
    x[31] = -8.0
    row = encoded(x, row_format("int4"))
    assert row.tolist() == [14 | 7 << 4, *[0x88] * 14, 0x08, 0x00, 0x3C]  # steps of 1


@pytest.mark.parametrize("name", SHIPPED)
def test_a_row_saturates_stays_zero_and_keeps_to_itself(name: str) -> None:
    """NaN and what no code reaches, in one row of several; numbers below any scale become small."""
    format = row_format(name)
    size = 128 if format.row_bytes(128) else sizes_of(format)[0]
    x = normal(6, size)
    x[1], x[2], x[3, 5], x[4] = 0.0, 2.0**-140, torch.nan, 1e30
    found = decoded(encoded(x, format), format, size)
    alone = torch.cat([decoded(encoded(row, format), format, size)[None] for row in x])
    rows = [0, 1, 2, 4, 5]
    assert torch.equal(found[rows], alone[rows])
    assert not found[1].any() and found[rows].isfinite().all()
    assert found[2].abs().max() <= 2.0**-20 and found[4].abs().max() > 100
    assert found.abs().nan_to_num(0).max() <= format.largest or format.turn
    assert (back(name, -x[:1]) + back(name, x[:1])).abs().max() < 0.7  # codes may be uneven


def test_nan_stays_where_it_is_and_what_is_too_large_saturates() -> None:
    x = torch.full((2, 32), 6.0)
    x[0, 3], x[1, 20] = torch.nan, torch.inf
    found = back("nvfp4", x)
    assert found[0, :16].isnan().all() and (found[0, 16:] == 6).all()
    assert (found[1, :16] == 6).all() and found[1, 20] == 448 * 6


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "VANILLA"])
@pytest.mark.parametrize("scales", ["number", "head"])
def test_a_layer_attends_to_what_its_cache_holds(backend: str, scales: str) -> None:
    group = LayerGroup(select(SPEC.replace(scales=scales), "cpu", backend=backend))
    k_scale = torch.tensor([0.5, 2.0]) if scales == "head" else 0.5
    layer = Attention(group, k_scale=k_scale, v_scale=torch.ones(2) if scales == "head" else 1.0)
    cache = group.allocate_cache(4)
    assert cache.format.dtype == "nvfp4"
    assert (cache.format.head_size, cache.format.v_head_size) == (32, 48)
    assert cache.key.shape == (4, 16, 2, 18) and cache.value.shape == (4, 16, 2, 27)
    assert cache.format.bytes_per_token == 2 * (18 + 27) == cache.key[0, 0].numel() + 54
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(20, h, d, generator=generator) for h, d in ((4, 32), (2, 32), (2, 48))
    )
    table = torch.tensor([[2, 3]], dtype=torch.int32)
    out = layer(query, key, value, cache, Batch.from_lens([20], [20], table, 16))
    each = torch.as_tensor(k_scale).reshape(-1, 1)
    kept = by_nvfp4((key / each).contiguous()) * each, by_nvfp4(value)
    expected, _ = reference.attend(SPEC, query, *kept)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["nvfp4", "int8_rows/int4"])
def test_both_layouts_and_one_storage(layout: str, dtype: str) -> None:
    spec = SPEC.replace(v_head_size=32, kv_cache_dtype=dtype)
    form = select(spec, "cpu", backend="TORCH_SDPA").cache_format
    assert form is not None
    form = replace(form, layout=layout, apart=32 if dtype == "nvfp4" else 16)
    cache = KVCache.allocate(form, 3)
    assert cache.key.shape == (3, 16, 2, 18 if dtype == "nvfp4" else 36)
    assert cache.value.shape == (3, 16, 2, 18) and cache.format == form
    assert cache.in_blocks_of(16)[0].format == replace(form, apart=16)


def test_who_does_not_claim_it_is_refused_by_name() -> None:
    with pytest.raises(SelectionError, match="kv_cache_dtype: wanted nvfp4"):
        select(SPEC, "cpu", backend="FLEX_ATTENTION")
    with pytest.raises(
        SpecError, match="head_size=40: kv_cache_dtype='nvfp4' has no rows of that size; .*: 32, 48"
    ):
        SPEC.replace(head_size=40)
    with pytest.raises(SpecError, match="kv_cache_dtype='nvfp5' is unknown; did you mean 'nvfp4'"):
        SPEC.replace(kv_cache_dtype="nvfp5")
    with pytest.raises(CacheError, match="rows of bytes, whose format is unknown: pass form="):
        KVCache(torch.zeros(1, 1, 1, 9, dtype=torch.uint8), torch.zeros(1, 1, 1, 9).byte())


def _signs(row: Tensor) -> Tensor:
    mean = row.abs().mean(-1, keepdim=True).clamp(max=65504).half()
    bits = (row < 0).unflatten(-1, (-1, 8)).int() << torch.arange(8, device=row.device)
    return torch.cat([bits.sum(-1).to(torch.uint8), mean.view(torch.uint8)], -1)


def _of_sign(row: Any, d: Any, size: int) -> Any:
    from polyattn.runtime.cache.bits import half_at

    return (1 - 2 * ((row[d // 8] >> (d % 8)) & 1)) * half_at(row, size // 8)


def _bytes_of_signs(size: int) -> int:
    return 0 if size % 8 else size // 8 + 2


SIGN = RowFormat(name="sign", encode=_signs, decode=_of_sign, row_bytes=_bytes_of_signs)


@pytest.fixture
def sign() -> Iterator[RowFormat]:
    """A user's format: each element's sign, and the mean of magnitudes."""
    polyattn.register_row_format(SIGN)
    yield SIGN
    polyattn.unregister_row_format("sign")


def test_a_users_format_serves_beside_another_of_values(sign: RowFormat) -> None:
    spec = SPEC.replace(v_head_size=32, kv_cache_dtype="sign/int8_rows")
    group = LayerGroup(select(spec, "cpu"))
    layer, cache = Attention(group), group.allocate_cache(4)
    assert cache.format.widths == (6, 36)
    query, key, value = normal(20, 4, 32), normal(20, 2, 32), normal(20, 2, 32)
    table = torch.tensor([[2, 3]], dtype=torch.int32)
    out = layer(query, key, value, cache, Batch.from_lens([20], [20], table, 16))
    held = key.sign() * key.abs().mean(-1, keepdim=True).half().float()
    expected, _ = reference.attend(spec, query, held, back("int8_rows", value))
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "VANILLA", "NATIVE_ATTN"])
def test_a_format_that_no_backend_knows_serves_chunks_and_a_shared_prefix(backend: str) -> None:
    """As Triton's `test_edges.py` has TRITON_ATTN do it, interpreted, or in a captured graph on a GPU."""
    with registered():
        spec = SPEC.replace(v_head_size=80, kv_cache_dtype="logs6/int8_rows")
        group = LayerGroup(select(spec, "cpu", backend=backend))
        layer, cache = Attention(group), group.allocate_cache(8)
        table = torch.tensor([[2, 3, 4], [2, 5, 6]], dtype=torch.int32)
        levels = ((SharedRun((0, 1), 0, 1),),)
        steps: list[tuple[list[int], list[int], Any]] = [
            ([18, 17], [18, 17], None), ([5, 3], [23, 20], None), ([1, 1], [24, 21], levels),
        ]  # fmt: skip
        for queries, lens, shared in steps:
            count = sum(queries)
            query, key, value = normal(count, 4, 32), normal(count, 2, 32), normal(count, 2, 80)
            batch = Batch.from_lens(queries, lens, table, 16, shared_prefix=shared)
            out = layer(query, key, value, cache, batch)
            wanted, _ = reference.forward(spec, query, key, value, cache, batch, layer.params)
            torch.testing.assert_close(out.double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", [*SHIPPED, "logs6"])
def test_a_format_takes_forty_lines_at_most(name: str) -> None:
    with registered():
        assert 5 < lines_of(row_format(name)) <= LINES


def test_lines_are_counted_without_what_is_no_code() -> None:
    """By hand: four fields; 4 lines that encode, 3 that decode, and 2 that count bytes."""
    assert lines_of(SIGN) == 4 + 4 + 3 + 2


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_the_table_of_the_documents_holds_what_is_measured(name: str) -> None:
    """Beside gguf's, torchao's and published formulas; `python tests/format_accuracy.py` prints it."""
    text = (Path(__file__).parents[2] / "benchmarks/results/formats.md").read_text()
    assert f"\n{row_of(row_format(name))}\n" in text


def test_a_format_is_pickled_by_name_and_version(sign: RowFormat) -> None:
    assert pickle.loads(pickle.dumps(sign)) is sign
    text = pickle.dumps(sign)
    polyattn.unregister_row_format("sign")
    polyattn.register_row_format(replace(sign, version=2))
    with pytest.raises(
        SpecError, match="'sign' was pickled as version 1, and here it is version 2"
    ):
        pickle.loads(text)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"encode": lambda row: row.half()}, "encode of float32 .* must return torch.uint8"),
        ({"decode": lambda row, d, size: row[d // 8] + 1.0}, "a row of zeros comes back as 1.0"),
        ({"encode": lambda row: row.nothing}, "a function fails on rows of 8: .*nothing"),
        ({"row_bytes": lambda size: 0}, "row_bytes has no size of 1 to"),
        (
            {"encode": lambda row: _signs(row) | ((row.abs() > 1e6).any(-1, keepdim=True) * 255).byte()},
            "encode must saturate",
        ),
        ({"largest": 1e-3}, "largest=0.001, and decode returns 65504"),
        ({"encode": lambda row: _signs(row / row.abs().max())}, "beside other rows; each row"),
        ({"encode": lambda row: _signs(-row)}, "has the other sign; encode must saturate"),
        ({"turn": lambda row, back: row * 2.0}, "turn of rows of 8, times its transpose"),
        ({"turn": lambda row, back: row.roll(1, -1)}, "turn of rows of 8, turned back"),
    ],
)  # fmt: skip
def test_functions_that_contradict_each_other_are_refused(changes: Any, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        polyattn.register_row_format(replace(SIGN, **changes))


def test_a_name_is_taken_once() -> None:
    with pytest.raises(PluginError, match="'int4' is registered already"):
        polyattn.register_row_format(replace(SIGN, name="int4"))
    with pytest.raises(SpecError, match="decode takes 1 arguments; it must take 3"):
        replace(SIGN, decode=_signs)
