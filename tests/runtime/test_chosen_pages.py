"""Decodes over the pages that a block-sparse mask chooses are those under the mask."""

from __future__ import annotations

import pytest
import torch
from polyattn import Batch, BlockSparseMask, LayerSpec
from polyattn.families.attention import reference
from polyattn.kernel import KVCache, over_chosen_pages
from polyattn.selection.cache_format import CacheFormat
from polyattn.workload.pages import fill

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32", block_size=8)
FORM = CacheFormat(block_size=8, num_kv_heads=2, head_size=16, v_head_size=16, dtype="float32")
PAGES = [[0, 2, 4], [], [3], [1, 0, 1], [2]]
"""Of sequences of these lengths: a last page that is short, none, full, named twice, of a padding row."""
LENS = [33, 20, 32, 9, 0]


def batch_of(width: int, pages: list[list[int]] = PAGES) -> Batch:
    table = torch.randperm(25, generator=torch.Generator().manual_seed(0)).int().view(5, 5)
    pages = [*pages[:4], []]
    mask = BlockSparseMask.of_pages(pages, width)
    return Batch.from_lens([1] * 5, LENS, table, 8, mask=mask)


@pytest.mark.parametrize("width", [8, 16])
def test_the_same_as_under_the_mask(width: int) -> None:
    generator = torch.Generator().manual_seed(1)
    cache = KVCache.allocate(FORM, 25, torch.device("cpu"))
    fill(cache, generator)
    batch = batch_of(width, [[p * 8 // width for p in row] for row in PAGES])
    query = torch.randn(5, 4, 16, generator=generator)
    masked = reference.forward(SPEC.replace(mask="block_sparse"), query, None, None, cache, batch)
    chosen = over_chosen_pages(batch, 8)
    assert chosen is not None and chosen.mask is None and not chosen.inputs
    found = reference.forward(SPEC, query, None, None, cache, chosen)
    for ours, wanted in zip(found, masked, strict=True):
        assert torch.allclose(ours, wanted, atol=1e-12)
    assert not torch.allclose(
        masked[0], reference.forward(SPEC, query, None, None, cache, batch)[0]
    )


def test_a_part_of_a_step_counts_the_step_s_rows() -> None:
    table = torch.arange(12).int().view(3, 4)
    # Rows of 2 queries: one of the first sequence, two of the second, one of the third.
    mask = BlockSparseMask([0, 1, 2, 3, 5], [0, 3, 3, 1, 2], (2, 8))
    batch = Batch.from_lens([1, 3, 1], [9, 32, 20], table, 8, mask=mask)
    chosen = over_chosen_pages(batch.part([0, 2]), 8)
    assert chosen is not None and chosen.lens == [8, 12]
    assert chosen.block_table is not None and chosen.block_table[0, 0] == 0
    assert chosen.block_table[1].tolist() == [9, 10]


def test_blocks_that_are_no_whole_pages_stay_masked() -> None:
    assert over_chosen_pages(batch_of(12, [[0], [], [0], [], []]), 8) is None
    assert over_chosen_pages(Batch.from_lens([1], [8], torch.zeros(1, 1).int(), 8), 8) is None
