"""The reference made selectable: only where it is named, and then for everything."""

from __future__ import annotations

import pytest
import torch
from polyattn import Attention, Batch, LayerGroup, LayerSpec, select
from polyattn.errors import SelectionError
from polyattn.families.attention import reference
from polyattn.registry.discovery import discover
from polyattn.spec.features import FEATURES, RECURRENT

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float64", block_size=16)
BITS = {"step_invariant", "call_invariant"}
"""Which torch's products don't give: their sums follow from the number of rows."""


@pytest.mark.parametrize("device", ["cpu", "h200", "mi300x", "gaudi3", "tpu-v6e"])
def test_it_is_never_chosen_by_itself(device: str) -> None:
    for dtype in ("float64", "bfloat16"):
        try:
            decision = select(SPEC.replace(dtype=dtype), device).decision
        except SelectionError as error:
            assert "backend='VANILLA'" in str(error)
            continue
        assert not any("VANILLA" in name for _, names in decision.candidates for name in names)


@pytest.mark.parametrize("device", ["cpu", "h200", "mi300x"])
def test_where_it_is_named_it_serves(device: str) -> None:
    for dtype in ("float64", "bfloat16"):
        decision = select(SPEC.replace(dtype=dtype), device, backend="VANILLA").decision
        assert (decision.prefill, decision.decode) == ("VANILLA", "VANILLA")


def test_it_claims_every_feature_that_there_is() -> None:
    assert (
        discover().backend("VANILLA").capabilities.features
        == frozenset(FEATURES) - RECURRENT - BITS
    )


def test_a_layer_that_nobody_serves_is_told_of_it() -> None:
    with pytest.raises(SelectionError, match="VANILLA can, slowly, and only where named"):
        select(SPEC, "gaudi3")


def test_its_numbers_are_the_references() -> None:
    layer = Attention(LayerGroup(select(SPEC, "cpu", backend="VANILLA")))
    table = torch.tensor([[1], [2]], dtype=torch.int32)
    batch = Batch.from_lens([3, 1], [3, 1], table, 16)
    query, key, value = (torch.randn(4, h, 16, dtype=torch.float64) for h in (4, 2, 2))
    cache = layer.group.allocate_cache(3)
    out = layer(query, key, value, cache, batch)
    for rows in (slice(0, 3), slice(3, 4)):
        expected, _ = reference.attend(SPEC, query[rows], key[rows], value[rows])
        assert torch.equal(out[rows], expected)
