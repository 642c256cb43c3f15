"""Variants and masks on PALLAS_ATTN in Pallas' interpreter, which a process has or has not."""

from __future__ import annotations

import sys

import torch
from test_variants import (
    BASE,
    LENS,
    VARIANTS,
    assert_right,
    masks_of_each_kind,
    register_variant,
    run,
    t5_buckets,
)

DECODES = ([1] * 5, LENS[1])


def functions(lens: tuple[list[int], list[int]]) -> None:
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(32, 4, generator=generator)
    document = torch.randint(0, 3, (5, 40), generator=generator).int()
    inputs = {
        "capped": {}, "striped": {}, "tempered": {"temperature": torch.rand(4) + 0.5},
        "relative_bias": {"bias": bias, "bucket_of_distance": t5_buckets(bidirectional=False)},
        "vision_local": {"grid_width": 5, "radius": 1}, "flash_sigmoid": {"sigmoid_bias": -2.0},
    }  # fmt: skip
    for name, given in inputs.items():
        assert_right(*run(BASE.replace(variant=name), "PALLAS_ATTN", lens, inputs=given))
    spec = BASE.replace(variant="documents")
    assert_right(*run(spec, "PALLAS_ATTN", lens, step={"document": document}))


def main(part: str) -> None:
    for variant in VARIANTS:
        register_variant(variant)
    if part == "masks":
        for spec, mask, lens in masks_of_each_kind():
            assert_right(*run(spec, "PALLAS_ATTN", lens, mask=mask))
    else:
        functions(LENS if part == "prefill" else DECODES)
    print("right")


main(sys.argv[1])
