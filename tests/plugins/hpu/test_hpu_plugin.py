"""The Gaudi plugin: detection, profiles, what is served where, and its results beside TORCH_SDPA's."""

from __future__ import annotations

import random
import subprocess
import sys
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from polyattn import Attention, AttentionKind, Batch, LatentAttention, LayerSpec, select
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


def test_the_declaration_is_light() -> None:
    code = "import sys, polyattn_hpu.hooks; print('torch' in sys.modules, 'numpy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]


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


FEATURES: list[dict[str, Any]] = [
    {},
    {"sliding_window": 21},
    {"sliding_window": 13, "sink_tokens": 3},
    {"chunk_size": 24},
    {"causal": False},
    {"logit_soft_cap": 1.5},
    {"alibi": True},
    {"learned_sinks": True},
    {"v_head_size": 16},
    {"num_heads": 5, "num_kv_heads": 1},
    {"kv_cache_dtype": "fp8_e4m3"},
    {"kv_cache_dtype": "int8", "sliding_window": 21},
]


def random_batch(rng: random.Random, block: int) -> tuple[list[int], list[int], torch.Tensor, int]:
    """Decodes, prefills and padding rows in any order; some begin with the same blocks."""
    queries, lens, rows = [], [], []
    shared = list(range(rng.randint(0, 4)))
    free = iter(range(len(shared), 10_000))
    for _ in range(rng.randint(1, 7)):
        kind = rng.random()
        query = 1 if kind < 0.5 else rng.randint(0, 40)
        context = rng.choice([0, rng.randint(0, 90)])
        if kind < 0.05:
            queries.append(1), lens.append(0), rows.append([])
            continue
        length = context + query
        common = shared[: rng.randint(0, context // block)] if rng.random() < 0.6 else []
        rows.append([*common, *(next(free) for _ in range(-(-length // block) - len(common)))])
        queries.append(query)
        lens.append(length)
    width = max(1, *(len(row) for row in rows))
    table = torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int32)
    return queries, lens, table, next(free)


@pytest.mark.parametrize("part", range(4))
def test_agrees_with_torch_sdpa(part: int) -> None:
    """A thousand random batches in four parts, each within its dtype's tolerance."""
    rng = random.Random(part)
    generator = torch.Generator().manual_seed(part)
    for _ in range(250):
        block = rng.choice([1, 4, 16])
        changes = {"num_heads": 4, "num_kv_heads": 2} | rng.choice(FEATURES)
        dtype = rng.choice(["bfloat16", "float16", "float32", "float64"])
        spec = LayerSpec(head_size=32, dtype=dtype, block_size=block, needs_lse=True, **changes)
        compare(spec, *random_batch(rng, block), generator)


@cache
def layer_of(spec: LayerSpec, backend: str) -> Attention:
    params: dict[str, Any] = {}
    if spec.kv_cache_dtype != "auto":
        params = {"k_scale": 0.05, "v_scale": 0.07}
    if spec.learned_sinks:
        params["sinks"] = torch.linspace(-1, 2, spec.num_heads)
    return Attention(select(spec, "cpu", backend=backend), **params)


def compare(
    spec: LayerSpec,
    queries: list[int],
    lens: list[int],
    table: torch.Tensor,
    num_blocks: int,
    generator: torch.Generator,
) -> None:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(STORAGE_DTYPES[spec.dtype])

    block = spec.block_size
    assert block is not None
    # A padding row stores nothing.
    real = [max(n, q) for q, n in zip(queries, lens, strict=True)]
    stored = Batch.from_lens(queries, real, table, block)
    slots = stored.slot_mapping
    assert slots is not None
    for start, query, length in zip(stored.starts, queries, lens, strict=False):
        if query == 1 and length == 0:
            slots[start] = -1
    batch = Batch(stored.starts, lens, table, slots)
    tokens = batch.num_tokens
    query = random(tokens, spec.num_heads, spec.head_size)
    key = random(tokens, spec.num_kv_heads, spec.head_size)
    value = random(tokens, spec.num_kv_heads, spec.v_head_size)
    context = [random(num_blocks * block, spec.num_kv_heads, size) for size in
               (spec.head_size, spec.v_head_size)]  # fmt: skip
    results = []
    for backend in ("HPU_ATTN", "TORCH_SDPA"):
        layer = layer_of(spec, backend)
        stored_in = layer.group.allocate_cache(num_blocks)
        layer.store(*context, stored_in, torch.arange(num_blocks * block))
        results.append(layer(query, key, value, stored_in, batch))
    (output, lse), (expected, expected_lse) = results
    limit = tolerance_of(spec)
    assert output_error(output, expected) <= limit.output, (spec, queries, lens)
    assert lse_error(lse, expected_lse) <= limit.lse, (spec, queries, lens)


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
