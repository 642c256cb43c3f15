"""Variants and masks on PALLAS_ATTN in Pallas' interpreter, which a process has or has not."""

from __future__ import annotations

import sys

from test_variants import (
    LENS,
    VARIANTS,
    assert_functions_right,
    assert_right,
    masks_of_each_kind,
    register_variant,
    run,
)

DECODES = ([1] * 5, LENS[1])


def main(part: str) -> None:
    for variant in VARIANTS:
        register_variant(variant)
    if part == "masks":
        for spec, mask, lens in masks_of_each_kind():
            assert_right(*run(spec, "PALLAS_ATTN", lens, mask=mask))
    else:
        assert_functions_right("PALLAS_ATTN", LENS if part == "prefill" else DECODES)
    print("right")


main(sys.argv[1])
