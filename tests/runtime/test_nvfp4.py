"""Keys and values in four bits: beside ml_dtypes' e2m1 and e4m3, and examples worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from polyattn import Attention, Batch, KVCache, LayerGroup, LayerSpec, select
from polyattn.errors import SelectionError, SpecError
from polyattn.families.attention import reference
from polyattn.runtime.cache import nvfp4
from torch import Tensor

ml_dtypes = pytest.importorskip("ml_dtypes")

SPEC = LayerSpec(
    num_heads=4, num_kv_heads=2, head_size=32, v_head_size=48, dtype="float32",
    kv_cache_dtype="nvfp4", block_size=16,
)  # fmt: skip


def by_ml_dtypes(x: Tensor) -> Tensor:
    """What NVFP4 makes of float32 (…, size), by ml_dtypes' roundings."""
    blocks = x.numpy().reshape(*x.shape[:-1], -1, 16)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(6)
    scale = np.minimum(scale, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(scale == 0, np.float32(0), blocks / scale).clip(-6, 6)
    found = ratio.astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale
    return torch.from_numpy(found.reshape(x.shape))


@pytest.mark.parametrize("size", [16, 32, 128, 192])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 300.0, 1e5])
def test_numbers_are_rounded_as_ml_dtypes_rounds(size: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(50, 3, size, generator=generator) * spread
    rows = nvfp4.packed(x)
    assert rows.dtype == torch.uint8 and rows.shape == (50, 3, nvfp4.row_bytes(size))
    assert nvfp4.head_size(rows.shape[-1]) == size
    expected = by_ml_dtypes(x)
    assert torch.equal(nvfp4.unpacked(rows, torch.float32), expected)
    assert torch.equal(reference.four_bits(rows).float(), expected)
    for narrow in (torch.bfloat16, torch.float16):  # exact there, too
        assert torch.equal(nvfp4.unpacked(rows, narrow).float(), expected)


def test_halves_go_to_even() -> None:
    """A block whose largest is 6 has scale 1: its numbers are e2m1's own, and what lies between."""
    x = torch.tensor(
        [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -5, 0.5, 4, 0.2, 4.9, -6]
    )
    wanted = [6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -4, 0.5, 4, 0, 4, -6]
    assert nvfp4.unpacked(nvfp4.packed(x), torch.float32).tolist() == wanted


def test_bytes_lie_as_said() -> None:
    """Element 0 in the low four bits of byte 0, element 1 in its high ones; then the block scales."""
    x = torch.zeros(32)
    x[0], x[1], x[31] = 6.0, -1.0, 12.0
    row = nvfp4.packed(x)
    assert row.tolist() == [0x7 | 0xA << 4, *[0] * 14, 0x70, 0x38, 0x40]  # e4m3's 1 and 2


def test_nan_stays_where_it_is_and_what_is_too_large_saturates() -> None:
    x = torch.full((2, 32), 6.0)
    x[0, 3], x[1, 20] = torch.nan, torch.inf
    found = nvfp4.unpacked(nvfp4.packed(x), torch.float32)
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
    kept = by_ml_dtypes((key / each).contiguous()) * each, by_ml_dtypes(value)
    expected, _ = reference.attend(SPEC, query, *kept)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_both_layouts_and_one_storage(layout: str) -> None:
    selection = select(SPEC.replace(v_head_size=32), "cpu", backend="TORCH_SDPA")
    form = selection.cache_format
    assert form is not None
    form = replace(form, layout=layout, interleaved=True)
    cache = KVCache.allocate(form, 3)
    assert cache.key.shape == cache.value.shape == (3, 16, 2, 18)
    assert replace(cache.format, interleaved=True) == form


def test_who_does_not_claim_it_is_refused_by_name() -> None:
    with pytest.raises(SelectionError, match="kv_cache_dtype: wanted nvfp4"):
        select(SPEC, "cpu", backend="NATIVE_ATTN")
    with pytest.raises(
        SpecError, match="head_size=40: kv_cache_dtype='nvfp4' takes multiples of 16"
    ):
        SPEC.replace(head_size=40)
