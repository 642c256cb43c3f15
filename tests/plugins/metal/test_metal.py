"""The Metal plugin: detection, what is served where, tiles, and the kit on MLX's CPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from kits import conforms
from polyattn import Attention, Batch, LayerSpec, select
from polyattn.errors import SelectionError
from polyattn.registry.devices import resolve_device
from polyattn_metal import platform

pytest.importorskip("mlx.core")

LLAMA = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)


def test_detects(monkeypatch: pytest.MonkeyPatch) -> None:
    core: Any = ModuleType("mlx.core")
    core.metal = SimpleNamespace(is_available=lambda: True)
    core.device_info = lambda: {"device_name": "Apple M3 Max"}
    monkeypatch.setitem(sys.modules, "mlx.core", core)
    monkeypatch.setattr(sys.modules["mlx"], "core", core)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    found = platform.detect()
    assert found is not None and (found.platform, found.arch) == ("metal", "m3-max")
    assert found.torch_device == "mps:0" and resolve_device("metal-m3-max").arch == found.arch
    assert platform.detect("cpu") is None
    monkeypatch.setattr(sys, "platform", "linux")
    assert platform.detect("mps") is None


def test_serves_metal_and_says_why_not() -> None:
    decision = select(LLAMA, "metal-m4").decision
    assert (decision.prefill, decision.decode) == ("MLX_ATTN", "MLX_ATTN")
    for change, reason in (
        ({"dtype": "float64"}, "no float64"),
        ({"kv_cache_dtype": "fp8"}, "int8"),
    ):
        with pytest.raises(SelectionError, match=reason):
            select(LLAMA.replace(**change), "metal-m4")
    assert select(LLAMA, "cpu").decision.decode != "MLX_ATTN"


@pytest.mark.parametrize("scores", [1 << 24, 48])
@pytest.mark.parametrize("change", [{}, {"sliding_window": 5, "sink_tokens": 2}, {"chunk_size": 6}])
def test_tiles_of_any_size_agree(
    scores: int, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts cut between queries, and rows of one token side by side or alone, beside TORCH_SDPA."""
    from polyattn_metal import planning

    monkeypatch.setattr(planning, "SCORES", scores)
    spec = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32", **change)
    torch.manual_seed(0)
    query, (key, value) = torch.randn(18, 4, 16), torch.randn(2, 18, 2, 16)
    context = torch.randn(2, 128, 2, 16)
    found = []
    for backend in ("MLX_ATTN", "TORCH_SDPA"):
        layer = Attention(select(spec, "cpu", backend=backend))
        cache = layer.group.allocate_cache(8)
        layer.store(context[0], context[1], cache, torch.arange(128))
        table = torch.tensor([[0, 1], [2, 0], [3, 4], [5, 6], [7, 0]], dtype=torch.int32)
        batch = Batch.from_lens([11, 1, 1, 4, 1], [19, 16, 17, 30, 2], table, cache.block_size)
        plan = layer.group.plan(batch)
        found.append(layer(query, key, value, cache, plan))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "cases", "least"), [("MLX_ATTN", "given or search", 20), ("MLX_MLA", "", 30)]
)
def test_conforms(backend: str, cases: str, least: int) -> None:
    """MLA's kit whole; of attention's, whose 350 cases take minutes, a part."""
    conforms(backend, least, "-k", cases)
