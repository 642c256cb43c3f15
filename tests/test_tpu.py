"""PALLAS_ATTN: interpreted against the reference, and compiled for real TPUs by libtpu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from polyattn import Batch, Device, KVCache, LayerParams, LayerSpec, select
from polyattn.checking.compare import output_error
from polyattn.errors import BatchError, SelectionError
from polyattn.families.attention import reference
from polyattn.runtime.kv_cache import KVCacheSpec
from polyattn.tools.cli.models import bundled, bundled_models

pytest.importorskip("jax")
ARCHS = ("v5e", "v5p", "v6e", "v7x")
slow = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def no_tpu() -> None:
    """JAX must not look for a TPU: it takes seconds, and there is none."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # two workers of pytest-xdist compile


def model_specs() -> dict[str, LayerSpec]:
    """Every distinct shape of a cached attention layer in the bundled models."""
    found: dict[tuple[object, ...], tuple[str, LayerSpec]] = {}
    for model in bundled_models():
        for spec in LayerSpec.from_hf_config(bundled("models", f"{model}.json")):
            if spec.kind.value != "attention" or not spec.cached or spec.dtype == "float16":
                continue
            if spec.alibi:
                continue
            shape = (spec.num_heads, spec.num_kv_heads, spec.head_size, spec.sliding_window,
                     spec.logit_soft_cap, spec.learned_sinks, spec.role)  # fmt: skip
            found.setdefault(shape, (f"{model} {spec.role.value} {spec.sliding_window}", spec))
    return dict(found.values())


BASE = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
VARIANTS = model_specs() | {
    "int8 cache": BASE.replace(kv_cache_dtype="int8"),
    "e4m3 cache": BASE.replace(kv_cache_dtype="fp8_e4m3"),
    "e5m2 cache": BASE.replace(kv_cache_dtype="fp8_e5m2"),
    "fp32": BASE.replace(dtype="float32"),
    "chunked": BASE.replace(chunk_size=8192),
    "lse": BASE.replace(needs_lse=True),
    "MHA of 256": BASE.replace(num_kv_heads=32, head_size=256),
}


@pytest.mark.parametrize(
    "arch", [pytest.param(a, marks=[] if a == "v6e" else [slow]) for a in ARCHS]
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiles_for_the_real_chip(arch: str, variant: str) -> None:
    """libtpu's own compiler, down to TPU code, at the shapes of real models."""
    from polyattn_tpu.aot import compile_phase

    for phase in ("prefill", "decode"):
        compiled = compile_phase(VARIANTS[variant], arch, phase, 64)
        assert compiled.memory_analysis().generated_code_size_in_bytes > 10_000


def test_vmem_bounds_the_pages() -> None:
    """The largest page that is claimed compiles on the smallest VMEM, and a larger one does not."""
    from polyattn_tpu.aot import compile_phase
    from polyattn_tpu.hooks import PALLAS_ATTN

    sizes = PALLAS_ATTN.capabilities.block_sizes
    widest = BASE.replace(dtype="float32", head_size=256)
    assert sizes.high is not None and compile_phase(widest, "v5e", "decode", sizes.high)
    with pytest.raises(Exception, match="RESOURCE_EXHAUSTED"):
        compile_phase(widest, "v5e", "decode", 8 * sizes.high)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "chosen",
    [
        "feature_lse or isolation or layout",
        pytest.param(
            "decoder and not pair and not head_size and not gqa and not block_size", marks=slow
        ),
        pytest.param("decoder and (head_size or gqa or block_size)", marks=slow),
        pytest.param("pair or not decoder", marks=slow),
    ],
)
def test_conforms_in_the_interpreter(chosen: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs",
         "polyattn.conformance", "--polyattn-backend", "PALLAS_ATTN", "--polyattn-device", "cpu",
         "--polyattn-report", str(report), "-k", chosen],
        cwd="/", env=os.environ | {"PALLAS_INTERPRET": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-1000:]
    counts = json.loads(report.read_text())
    assert counts["passed"] >= 4 and counts["failed"] == counts["skipped"] == 0


TPU_ON_CPU = Device("tpu", "v6e", torch_device="cpu")
SMALL = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float32")


def small_cache(blocks: int = 40) -> KVCache:
    cache = KVCacheSpec(
        num_blocks=blocks, block_size=16, num_kv_heads=2, head_size=64, v_head_size=64,
        dtype="float32", layout="HND",
    ).allocate()  # fmt: skip
    cache.key.normal_()
    cache.value.normal_()
    return cache


def test_lengths_change_without_recompiling() -> None:
    """A trace of steps of changing lengths compiles once a bucket, and every step is right."""
    from polyattn_tpu.attention import PallasAttention
    from polyattn_tpu.kernel import paged_attention

    backend, cache = PallasAttention(SMALL, TPU_ON_CPU), small_cache()
    before = paged_attention._cache_size()
    for step in range(12):
        lens = [17 + 5 * step, 3 + step, 40 + 2 * step]
        table = torch.randperm(39)[: 3 * 8].view(3, 8).int()
        batch = Batch.from_lens([1, 1, 1], lens, table, 16)
        query = torch.randn(3, 4, 64)
        out = torch.full_like(query, torch.nan)
        backend.plan(batch)
        backend.forward_decode(query, cache, LayerParams(), out, None)
        expected, _ = reference.forward(SMALL, query, None, None, cache, batch)
        assert output_error(out, expected) < 2e-5
    assert paged_attention._cache_size() == before + 1


def test_torch_and_jax_share_memory() -> None:
    from polyattn_tpu.bridge import to_jax, to_torch

    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        tensor = torch.zeros(4, 128, dtype=dtype)
        array = to_jax(tensor)
        assert array.unsafe_buffer_pointer() == tensor.data_ptr()
        assert to_torch(array).data_ptr() == tensor.data_ptr()


def test_a_cache_of_another_layout_is_refused() -> None:
    from polyattn_tpu.attention import pages_of

    with pytest.raises(BatchError, match="HND"):
        pages_of(torch.zeros(4, 16, 2, 64))


def test_rejections_speak_the_chip_s_language() -> None:
    with pytest.raises(SelectionError, match="sublanes.*VMEM"):
        select(BASE.replace(block_size=12), "tpu-v5e")
    with pytest.raises(SelectionError, match="multiples of 8"):
        select(BASE.replace(head_size=100), "tpu-v5e")
    decision = select(BASE, "tpu-v6e").decision
    assert (decision.prefill, decision.decode, decision.layout) == ("PALLAS_ATTN",) * 2 + ("HND",)
