"""TRITON_STORE and TRITON_MERGE beside torch's: interpreted, and machine code for every target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreting import interpreted
from polyattn import LayerSpec, select

pytest.importorskip("triton")

STORES = """
import itertools
import torch
from polyattn import LayerSpec
from polyattn.kernel import CacheFormat, KVCache, LayerParams, StorePlan
from polyattn.registry.devices import resolve_device
from polyattn.runtime.store import TorchStore
from polyattn_triton.store import TritonStore

TOKENS, SLOTS = 7, torch.tensor([5, -1, 0, 33, -1, 17, 47])
params = LayerParams(k_scale=0.3, v_scale=0.07)
count = 0
for dtype, stored, heads, layout, latent in itertools.product(
    (torch.float32, torch.float16), ("same", "int8"), (1, 3), ("NHD", "HND"), (False, True)
):
    if latent and (heads > 1 or layout == "HND"):
        continue
    name = str(dtype).removeprefix("torch.") if stored == "same" else stored
    form = CacheFormat(
        block_size=8, num_kv_heads=heads, head_size=24, v_head_size=16, dtype=name, layout=layout,
        value_in_key=latent,
    )
    ours, theirs = (KVCache.allocate(form, 6) for _ in range(2))
    for cache in (ours, theirs):
        for tensor in (cache.key, cache.value):
            tensor.fill_(7)
    spec = LayerSpec(num_heads=heads, head_size=24, v_head_size=16)
    scale = params.k_scale
    # Wide in memory, so that tokens and heads have strides; halves of the scale are ties.
    wide = (torch.randn(TOKENS, heads, 64) * 9).to(dtype)
    wide[0] = (torch.arange(64) / 2 - 9).to(dtype) * scale
    wide[2, :, :4] = torch.tensor([1e4, -1e4, 0.0, -0.0], dtype=dtype)
    backends = TritonStore(spec, form, resolve_device("cpu")), TorchStore(spec, form, None)
    # One backend finds its kernel again by how tensors lie: views, whole ones, every second element.
    for key, value in (
        (wide[..., :24], wide[..., 30:46]),
        (wide[..., 3:27].contiguous(), wide[..., 40:56].contiguous()),
        (wide[..., 1:49:2], wide[..., :32:2]),
        (wide[..., :24], wide[..., 30:46].contiguous()),
    ):
        value = key[..., :16] if latent else value
        for store, cache in zip(backends, (ours, theirs)):
            store.run(StorePlan(SLOTS), key, value, cache, params)
        assert torch.equal(ours.key, theirs.key) and torch.equal(ours.value, theirs.value), form
    count += 1
print(count)
"""

MERGES = """
import torch
from polyattn.runtime.merge import AttentionState, TorchMerge, merge_states
from polyattn_triton.state_merge import TritonMerge

for dtype, heads, size in ((torch.float16, 3, 20), (torch.float32, 5, 128), (torch.float32, 8, 64)):
    # float32's numbers, as the kernel has them: an LSE of 60 rounded is 4e-6 of a weight.
    wide = torch.randn(2, 6, heads, size + 9).double()
    lse = (torch.randn(2, 6, heads + 2) * 30).double()
    lse[0, 0], lse[1, 1], lse[:, 2] = -torch.inf, -torch.inf, -torch.inf
    wide[0, 0], wide[1, 1], wide[:, 2] = 0.0, 0.0, 0.0
    parts = [AttentionState(wide[i, ..., :size], lse[i, :, :heads]) for i in range(2)]
    expected = merge_states(parts)
    total, total_lse = parts[0].output.float(), parts[0].lse.float()
    part = wide[1].to(dtype)[..., :size]
    places = total.data_ptr(), total_lse.data_ptr()
    TritonMerge(None, None, None).run(total, total_lse, part, parts[1].lse.float())
    assert places == (total.data_ptr(), total_lse.data_ptr())
    tight = 2e-3 if dtype == torch.float16 else 2e-6
    torch.testing.assert_close(total.double(), expected.output, rtol=tight, atol=tight)
    torch.testing.assert_close(total_lse.double(), expected.lse, rtol=2e-6, atol=2e-6)
print("merged")
"""


def printed(code: str, folder: Path) -> str:
    script = folder / "script.py"
    script.write_text(code)
    return interpreted(script).strip()


def test_what_is_stored_has_torchs_bits(tmp_path: Path) -> None:
    """In its own dtype and in int8, whose halves go to even; other slots aren't touched."""
    assert printed(STORES, tmp_path) == "20"


def test_merging_in_place_is_the_merge(tmp_path: Path) -> None:
    """Against the operator in float64; a row that nobody saw stays 0 with LSE -inf."""
    assert printed(MERGES, tmp_path) == "merged"


SPEC = LayerSpec(num_heads=32, head_size=128)
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx90a", "gfx942", "gfx950")


@pytest.mark.parametrize("arch", TARGETS)
def test_the_merge_compiles_to_machine_code(arch: str) -> None:
    from ahead import device_of, recorded
    from polyattn_triton.state_merge import TritonMerge

    kind = "cubin" if arch.startswith("sm_") else "hsaco"
    total, lse = torch.zeros(3, 32, 128), torch.zeros(3, 32)
    with recorded() as launches:
        TritonMerge(SPEC, None, device_of(arch)).run(total, lse, total.bfloat16(), lse.clone())
    kernel = launches[0].compiled(arch)
    assert len(kernel.asm[kind]) > 500


@pytest.mark.parametrize("form", ["fp8_e4m3", "fp8_e5m2"])
def test_nan_is_stored_as_nan(form: str) -> None:
    """A GPU's min and max drop NaN, where the interpreter's keep it: an H200 stored -448."""
    from ahead import compile_phase

    spec = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64, kv_cache_dtype=form)
    text = compile_phase(spec, "sm_90", "write").asm["ptx"]
    assert "max.NaN.f32" in text and "min.NaN.f32" in text


@pytest.mark.parametrize(("device", "form"), [("h200", "auto"), ("mi300x", "fp8_e4m3")])
def test_they_are_chosen_where_triton_compiles(device: str, form: str) -> None:
    chosen = select(
        LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, kv_cache_dtype=form), device
    ).decision
    assert chosen.backend("store") == "TRITON_STORE" and chosen.backend("merge") == "TRITON_MERGE"
    elsewhere = select(LayerSpec(num_heads=8, head_size=64), "x86-amx").decision
    assert elsewhere.backend("store") not in (None, "TRITON_STORE")
