"""The Gaudi plugin: detection, profiles, what is served where, and its results beside TORCH_SDPA's."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from polyattn import AttentionKind, Batch, LatentAttention, LayerSpec, select
from polyattn.errors import SelectionError
from polyattn.families.mla import reference as mla_reference
from polyattn.families.mla.workload import latent_weights
from polyattn.registry.devices import resolve_device
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES, quantize
from polyattn.runtime.store import scatter
from polyattn.spec.latent import LatentSpec
from polyattn.workload.compare import lse_error, output_error
from polyattn.workload.tolerance import tolerance_of
from polyattn_hpu import platform, unified

LLAMA = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)


def bridge(name: str, available: bool = True) -> ModuleType:
    """A stand-in for `habana_frameworks.torch.hpu`."""
    made = ModuleType("habana_frameworks.torch.hpu")
    made.is_available = lambda: available  # type: ignore[attr-defined]
    made.current_device = lambda: 3  # type: ignore[attr-defined]
    made.get_device_name = lambda index=None: name  # type: ignore[attr-defined]
    return made


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(module: ModuleType) -> None:
        monkeypatch.setattr(platform, "find_spec", lambda name: object())
        package = ModuleType("habana_frameworks")
        torch_part = ModuleType("habana_frameworks.torch")
        torch_part.hpu = module  # type: ignore[attr-defined]
        for name, found in (
            ("habana_frameworks", package),
            ("habana_frameworks.torch", torch_part),
            ("habana_frameworks.torch.hpu", module),
        ):
            monkeypatch.setitem(sys.modules, name, found)

    return run


@pytest.mark.parametrize(("name", "fp8"), [("GAUDI2", None), ("GAUDI3", "ocp")])
def test_detects(name: str, fp8: str | None, install: Any) -> None:
    install(bridge(name))
    found = platform.detect()
    assert found is not None and (found.platform, found.arch) == ("hpu", name.lower())
    assert found.fp8 == fp8 and found.torch_device == "hpu:3"
    found = platform.detect("hpu:1")
    assert found is not None and found.torch_device == "hpu:1"
    assert platform.detect("cuda:0") is None and platform.detect("cpu") is None


def test_detects_nothing_where_there_is_nothing(install: Any) -> None:
    assert platform.detect() is None and platform.detect("hpu") is None
    install(bridge("GAUDI3", available=False))
    assert platform.detect() is None


@pytest.mark.parametrize("profile", ["gaudi2", "gaudi3"])
def test_serves_gaudi(profile: str) -> None:
    device = resolve_device(profile)
    assert (device.platform, device.arch) == ("hpu", profile)
    decision = select(LLAMA, profile).decision
    assert (decision.prefill, decision.decode) == ("HPU_ATTN", "HPU_ATTN")
    assert decision.cache is not None and decision.cache.block_size == 128


def test_each_gaudi_says_why_not() -> None:
    cached = LLAMA.replace(kv_cache_dtype="fp8_e4m3")
    assert select(cached, "gaudi3").decision.decode == "HPU_ATTN"
    with pytest.raises(SelectionError, match="240"):
        select(cached, "gaudi2")
    with pytest.raises(SelectionError, match="no float64"):
        select(LLAMA.replace(dtype="float64"), "gaudi3")


def test_the_cpu_prefers_its_own() -> None:
    assert select(LLAMA, "x86-amx").decision.decode == "NATIVE_ATTN"
    assert select(LLAMA, "x86-amx", backend="HPU_ATTN").decision.decode == "HPU_ATTN"


MLA = LayerSpec(
    kind=AttentionKind.MLA, num_heads=4, head_size=24, v_head_size=16, needs_lse=True, block_size=8,
    latent=LatentSpec(rank=32, rope_head_size=8),
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("cached", ["auto", "int8"])
def test_mla_over_a_shared_prefix(dtype: str, cached: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three decodes share two blocks of latents; each block is read once, a prefill goes beside."""
    spec = MLA.replace(dtype=dtype, kv_cache_dtype=cached)
    generator = torch.Generator().manual_seed(3)
    scale = {"k_scale": 0.04} if cached == "int8" else {}
    selection = select(spec, "cpu", backend="decode=HPU_MLA,prefill=HPU_ATTN")
    layer = LatentAttention(selection, *latent_weights(spec, generator), **scale)
    cache = layer.group.allocate_cache(12)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(STORAGE_DTYPES[dtype])

    scatter(
        cache.key, quantize(random(96, 1, 40), cache.key.dtype, scale.get("k_scale", 1.0)),
        torch.arange(96),
    )  # fmt: skip
    table = torch.tensor([[9, 2, 1, 0], [9, 2, 3, 4], [9, 2, 5, 6], [7, 8, 10, 0]])
    batch = Batch.from_lens([1, 1, 1, 6], [20, 30, 25, 17], table.int(), 8)
    read: list[torch.Tensor] = []
    fetch = unified.fetch
    monkeypatch.setattr(
        unified, "fetch", lambda stored, blocks: read.append(blocks) or fetch(stored, blocks)
    )
    query, latents, rope = random(9, 4, 24), random(9, 32), random(9, 8)
    out, lse = layer(query, latents, rope, cache, batch)
    blocks = [block for got in read for block in got.tolist()]
    # Both shapes are rounded to themselves here, so that no block is there as padding.
    assert sorted(blocks) == [1, 2, 3, 4, 5, 6, 9]
    assert layer.weights is not None
    expected = mla_reference.forward(spec, query, cache, batch, layer.weights, layer.params)
    limit = tolerance_of(spec)
    assert output_error(out, expected[0]) <= limit.output
    assert lse_error(lse, expected[1]) <= limit.lse
