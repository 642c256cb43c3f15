"""TRITON_ATTN's prefill multiplies e4m3 numbers where a layer lets weights be rounded to them.

As a program it runs interpreted, beside float64: `python test_eight_bits.py`.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from interpreting import interpreted
from polyattn import Batch, Device, LayerSpec
from polyattn.families.attention import reference
from polyattn.kernel import CacheFormat, Frame, KVCache, LayerParams
from polyattn.workload.compare import output_error
from polyattn.workload.tolerance import tolerance_of

pytest.importorskip("triton")
import triton.language as tl
from polyattn_triton.attention import TritonAttention
from polyattn_triton.variants import multiplies_eight_bits
from triton.runtime import interpreter

CPU, E4M3 = Device("cpu", "x86_64", torch_device="cpu"), torch.float8_e4m3fn
SPEC = LayerSpec(
    num_heads=4, num_kv_heads=2, head_size=32, dtype="float16", kv_cache_dtype="fp8_e4m3",
    qkv_dtype="fp8_e4m3", fp8_compute=True, block_size=16, needs_lse=True,
)  # fmt: skip
CHIPS_SPEC = SPEC.replace(num_heads=8, head_size=128, dtype="bfloat16", needs_lse=False)
LAYERS: dict[str, tuple[LayerSpec, Any]] = {
    "numbers": (SPEC, (0.5, 0.25, 2.0)),
    "by head": (
        SPEC.replace(scales="head", head_size=80),
        (torch.tensor([0.5, 0.25]), torch.tensor([0.25, 1.0]), torch.tensor([2.0, 0.5])),
    ),
    "window": (SPEC.replace(sliding_window=7, logit_soft_cap=20.0), (0.5, 0.25, 2.0)),
}
STEPS = (([40, 1, 23], [40, 1, 23]), ([33, 20, 29], [43, 21, 60]))


def convert(found: Any, given: Any, wanted: Any, how: Any) -> Any:
    """Round to e4m3 as torch does: Triton 3.6's interpreter loses what a mantissa carries over."""
    if wanted == tl.float8e4nv and given == tl.float32:
        exact = torch.from_numpy(np.ascontiguousarray(found).view(np.float32))
        return exact.to(E4M3).view(torch.uint8).numpy().reshape(found.shape)
    return plain_convert(found, given, wanted, how)


def check(name: str) -> None:
    """Attend over pages and over keys as given; raise where an output is further off than allowed."""
    spec, (q_scale, k_scale, v_scale) = LAYERS[name]
    one = torch.tensor(1.0) if spec.scales != "number" else 1.0
    params = LayerParams(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out_scale=one)
    form = CacheFormat(
        block_size=16, num_kv_heads=2, head_size=spec.head_size, v_head_size=spec.v_head_size,
        dtype="fp8_e4m3",
    )  # fmt: skip
    exact = TritonAttention(spec.replace(fp8_compute=False), form, CPU)
    made, chance = TritonAttention(spec, form, CPU), torch.Generator().manual_seed(3)
    cache = KVCache.allocate(form, 14)
    for stored in (cache.key, cache.value):
        stored.copy_(torch.randn(stored.shape, generator=chance).to(E4M3))
    table = torch.randperm(14, generator=chance)[:12].view(3, 4).int()
    for queries, lens in STEPS:
        batch = Batch.from_lens(queries, lens, table, 16)
        query = (torch.randn(sum(queries), 4, spec.head_size, generator=chance) * 2).to(E4M3)
        found = []
        for backend in (made, exact):
            out = torch.full(query.shape, torch.nan, dtype=torch.float16)
            lse = torch.full(query.shape[:2], torch.nan)
            backend.run(backend.plan(batch), Frame(query, None, None, cache, params, out, lse))
            found.append(out)
        wanted, wanted_lse = reference.forward(spec, query, None, None, cache, batch, params)
        off, least = (output_error(one, wanted) for one in found)
        assert off <= tolerance_of(spec).output, f"{name}: off by {off:.3g}"
        assert least < 3e-3 < off, f"{name}: {least:.3g}, {off:.3g}: weights aren't rounded"
        assert (lse - wanted_lse).abs().max() < 3e-3
        print(f"{name}: off by {off:.3g} (in 16 bits {least:.3g})", flush=True)
    _one_key(made, params, spec)


def _one_key(made: TritonAttention, params: LayerParams, spec: LayerSpec) -> None:
    """A weight of 1 is exact: a row of one key gives its value, whatever NaN lies behind."""
    form = made.cache
    assert form is not None
    cache, count = KVCache.allocate(form, 2), 20
    for stored in (cache.key, cache.value):
        stored.fill_(torch.nan)
        stored[0].copy_(torch.arange(spec.head_size).expand(16, 2, -1) * 0.5 - 3)
        stored[1, : count - 16].copy_(torch.ones(count - 16, 2, spec.head_size))
    batch = Batch.from_lens([count], [count], torch.tensor([[0, 1]]).int(), 16)
    query = torch.ones(count, 4, spec.head_size).to(E4M3)
    out = torch.empty(query.shape, dtype=torch.float16)
    made.run(made.plan(batch), Frame(query, None, None, cache, params, out, torch.empty(count, 4)))
    wanted, _ = reference.forward(spec, query, None, None, cache, batch, params)
    assert output_error(out[:1], wanted[:1]) < 1e-3 and bool(out.isfinite().all())


@pytest.mark.slow
def test_interpreted() -> None:
    told = interpreted(__file__)
    assert all(f"{name}: off by" in told for name in ("numbers", "by head", "window"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "rounds", "wanted"),
    [("sm_89", True, "e4m3"), ("sm_89", False, "f16"), ("sm_90", True, "f16")],
)
def test_compiled(arch: str, rounds: bool, wanted: str) -> None:
    """Both products are of e4m3 numbers, or neither is: then they are made float16."""
    from ahead import compile_phase

    asm = compile_phase(CHIPS_SPEC.replace(fp8_compute=rounds), arch, "paged").asm["ptx"]
    products = re.findall(r"mma(?:\.sync|_async)\.\S+?f32\.(\w+)\.(\w+)", asm)
    assert products and {kind for pair in products for kind in pair if kind != "f32"} == {wanted}


def test_which_chips_multiply_them() -> None:
    spec = CHIPS_SPEC
    chips = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950")
    found = [chip for chip in chips if multiplies_eight_bits(spec, chip)]
    assert found == ["sm_89", "sm_100", "sm_120", "gfx950"]
    for other in ({"qkv_dtype": "auto"}, {"fp8_compute": False}):
        assert not multiplies_eight_bits(spec.replace(**other), "sm_89")


if __name__ == "__main__":
    torch.set_num_threads(1)
    plain_convert, interpreter._convert_float = interpreter._convert_float, convert
    for name in LAYERS:
        check(name)
