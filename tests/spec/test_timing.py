"""The terms that predictions are made of."""

from __future__ import annotations

from polyattn import LayerSpec
from polyattn.spec.timing import units


def test_units_count_what_the_terms_name() -> None:
    spec = LayerSpec(num_heads=28, num_kv_heads=4, head_size=128, kv_cache_dtype="fp8_e4m3")
    # One row; a key's bytes in all heads; in one; products of a pair; bytes of a token's query, output.
    assert units(spec) == (1, 4, 4 * 256, 256, 28 * 256, 28 * 256 * 2)
