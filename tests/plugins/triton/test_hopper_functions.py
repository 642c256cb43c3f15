"""Which functions are called in Hopper's own prefill? Those of rows; others have the portable one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from polyattn import AttentionVariant, LayerSpec
from polyattn.runtime.functions.pointwise import Pointwise
from polyattn.runtime.functions.tracing import trace

pytest.importorskip("triton")

from polyattn_triton.configs import HOPPER
from polyattn_triton.functions.pointwise import Generated
from polyattn_triton.functions.source import by_row
from polyattn_triton.hopper.choice import hopper_config

PLAIN = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)


def sloped(score: Any, b: Any, h: Any, q: Any, k: Any, *, slopes: Any) -> Any:
    return torch.tanh(score) + slopes[h] * (k - q)


def same(b: Any, h: Any, q: Any, k: Any, *, document: Any) -> Any:
    return document[b, q] == document[b, k]


@pytest.mark.parametrize(
    ("functions", "taken"),
    [({"score_mod": sloped}, True), ({"mask_mod": same}, False),
     ({"score_mod": sloped, "mask_mod": same}, False),
     ({"score_mod": sloped, "sources": {"triton": "def score_mod(): ..."}}, False)],
    ids=["of rows", "a mask", "both", "by hand"],
)  # fmt: skip
def test_functions_of_rows_are_called_in_it(functions: dict[str, Any], taken: bool) -> None:
    """What is read for each key, or for each score, and what hides keys, has the portable kernel."""
    inputs = {"slopes": "float32[num_heads]", "document": "int32[num_seqs, *]"}
    variant = AttentionVariant(name="x", inputs=inputs, **functions)
    pointwise = Pointwise.of_variant(variant, "triton")
    traced = trace(pointwise.score_mod, pointwise.mask_mods, pointwise.inputs)
    assert by_row(traced) is taken
    for name, spec_takes in (
        ("flash_sigmoid", True),
        ("relative_bias", False),
        ("vision_local", False),
    ):
        spec = PLAIN.replace(variant=name)
        found = hopper_config(spec, "sm_90", Generated.of(spec))
        assert found == (HOPPER[128] if spec_takes else None)
    assert hopper_config(PLAIN.replace(variant="flash_sigmoid"), "sm_90") is None
