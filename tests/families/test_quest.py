"""Quest's choice of pages: its scores bound every product, and what is chosen is what is read."""

from __future__ import annotations

import torch
from polyattn import choose_pages, page_bounds, page_scores


def test_scores_bound_every_product_of_their_page() -> None:
    generator = torch.Generator().manual_seed(2)
    keys = torch.randn(71, 2, 16, generator=generator)
    query = torch.randn(6, 16, generator=generator)
    scores = page_scores(query, *page_bounds(keys, 8))
    products = torch.einsum("hd,khd->hk", query, keys.repeat_interleave(3, 1))
    for page in range(9):
        most = products[:, page * 8 : page * 8 + 8].amax(1)
        assert (scores[:, page] >= most - 1e-5).all()
    # Of a page that holds one key alone the bound is that key's product.
    single = page_scores(query, *page_bounds(keys, 1))
    torch.testing.assert_close(single, products)


def test_the_best_pages_are_chosen_and_the_last() -> None:
    scores = torch.tensor([[0.0, 5.0, 1.0, 0.0, -9.0], [0.0, 0.0, 7.0, 0.0, -9.0]])
    assert choose_pages(scores, 3) == [1, 2, 4]
    assert choose_pages(scores, 1) == [4]
    assert choose_pages(scores, 99) == [0, 1, 2, 3, 4]
