"""Which rows of bytes hold the same? Each bit counts, but those of NaN, and signs of zeros' extremes."""

from __future__ import annotations

import pytest
import torch
from polyattn import KVCache, row_formats
from polyattn.kernel import encoded
from polyattn.selection.cache_format import CacheFormat
from polyattn.workload.pages import alike, copied, same_cache

INT4 = row_formats()["int4"]


def _rows() -> torch.Tensor:
    row = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    row[1, 40], row[2] = torch.nan, 0.0
    return encoded(row, INT4)


def test_a_nans_sign_and_its_codes_may_differ() -> None:
    right = _rows()
    rows = right.clone()
    rows[1, 20:32] ^= 0x11  # codes whose scale is NaN
    rows[1, 35] ^= 0x80  # and its sign
    rows[2, 33] ^= 0x80  # the scale of zeros
    assert alike(rows, right, INT4, 64).all()


@pytest.mark.parametrize("row, byte", [(0, 3), (0, 32), (1, 3), (1, 32)])
def test_a_wrong_byte_counts_also_beside_nan(row: int, byte: int) -> None:
    right = _rows()
    rows = right.clone()
    rows[row, byte] ^= 1
    assert alike(rows, right, INT4, 64).tolist() == [i != row for i in range(3)]
    form = CacheFormat(block_size=4, num_kv_heads=1, head_size=64, v_head_size=64, dtype="int4")
    cache = KVCache.allocate(form, 1, "cpu")
    cache.key.fill_(0), cache.value.fill_(0)
    held = copied(cache)
    slots = torch.arange(3)
    cache.value[0, :3, 0], held.value[0, :3, 0] = rows, right
    with pytest.raises(AssertionError, match="quantised value is stored wrong"):
        same_cache(cache, held, slots)
    cache.value[0, :3, 0] = right
    same_cache(cache, held, slots)
