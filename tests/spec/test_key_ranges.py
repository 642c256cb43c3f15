"""Mask geometry by exhaustion: a block's ranges are exactly the keys that its masks show."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from polyattn import LayerSpec
from polyattn.families.attention.reference import visible
from polyattn.spec.key_ranges import key_ranges

MASKS = [
    {"causal": causal, "sliding_window": window, "window_right": right, "sink_tokens": kept,
     "chunk_size": chunk}
    for causal, window, right, kept, chunk in product(
        (True, False), (None, 1, 2, 5, 40), (None, 0, 1, 3), (0, 1, 4, 9), (None, 1, 3, 5, 16)
    )
    if not (causal and right is not None) and not (kept and window is None)
]  # fmt: skip
SHAPES = [(1, 0), (1, 1), (1, 13), (3, 13), (13, 13), (6, 1), (9, 3), (12, 7), (2, 0)]


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: "-".join(str(v) for v in mask.values()))
def test_a_blocks_ranges_are_exactly_what_its_masks_show(mask):
    spec = LayerSpec(num_heads=1, head_size=64, **mask)
    for queries, keys in SHAPES:
        seen = visible(spec, queries, keys)
        for first, last in product(range(queries), range(queries)):
            if first > last:
                continue
            shift = keys - queries
            kept_start, kept_stop, near_start, near_stop = key_ranges(
                spec, first + shift, last + shift, keys
            )
            assert 0 <= kept_start <= kept_stop <= near_start <= near_stop <= keys
            listed = [*range(kept_start, kept_stop), *range(near_start, near_stop)]
            shown = seen[first : last + 1].any(0).nonzero().flatten().tolist()
            assert listed == shown, (queries, keys, first, last)


def test_arrays_and_tensors_give_what_numbers_give():
    spec = LayerSpec(
        num_heads=1, head_size=64, causal=False, sliding_window=3, sink_tokens=4, chunk_size=8
    )
    first, last, keys = np.arange(-6, 20), np.arange(-6, 20) + 3, np.full(26, 20)
    last = np.minimum(last, 19)
    by_number = [
        key_ranges(spec, *row)
        for row in zip(first.tolist(), last.tolist(), keys.tolist(), strict=True)
    ]
    arrays = key_ranges(spec, first, last, keys, np.minimum, np.maximum)
    tensors = key_ranges(
        spec, *map(torch.from_numpy, (first, last, keys)), torch.minimum, torch.maximum
    )
    for of_array, of_tensor, numbers in zip(
        arrays, tensors, zip(*by_number, strict=True), strict=True
    ):
        assert of_array.tolist() == of_tensor.tolist() == list(numbers)
