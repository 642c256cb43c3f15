"""Do the native CPU kernels read every byte of an 8-bit cache as what it stands for, at its place?"""

from __future__ import annotations

import pytest
import torch
from polyattn import LayerSpec
from polyattn.kernel import STORAGE_DTYPES, LayerParams
from polyattn_cpu.native import library
from test_native import ISAS, Step, needs_library


@needs_library
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 12, 20])
@pytest.mark.parametrize("stored", ["fp8_e4m3", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("isa", ISAS)
def test_each_byte_is_what_it_stands_for(monkeypatch, isa, stored, heads):
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    monkeypatch.setenv(library.PAIRS_VARIABLE, "1")
    spec = LayerSpec(
        num_heads=heads, num_kv_heads=1, head_size=256, dtype="bfloat16", kv_cache_dtype=stored
    )
    step = Step(spec, [1], [1])
    step.params, step.query = LayerParams(), torch.zeros_like(step.query)
    each = torch.arange(256).to(torch.uint8).view(STORAGE_DTYPES[stored])
    step.value[step.table[0, 0], 0, 0] = each
    out, _ = step.run()
    want = each.to(torch.bfloat16).expand_as(out)
    assert torch.equal(out.nan_to_num(nan=7e4), want.nan_to_num(nan=7e4))


@needs_library
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 12, 20])
@pytest.mark.parametrize("stored", ["auto", "fp8_e4m3", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("isa", ISAS)
def test_a_value_of_any_size_leaves_in_its_order(monkeypatch, isa, stored, heads):
    """Pairs of keys are added in the order of look-ups, by as many vectors as divide the value best."""
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    monkeypatch.setenv(library.PAIRS_VARIABLE, "1")
    for size in (7, 31, 33, 48, 64, 80, 96, 112, 160, 192, 200, 224, 320, 576):
        spec = LayerSpec(
            num_heads=heads, num_kv_heads=1, head_size=16, v_head_size=size, dtype="bfloat16",
            kv_cache_dtype=stored,
        )  # fmt: skip
        step = Step(spec, [1], [3])  # two keys and one, of equal weight
        step.params, step.query = LayerParams(), torch.zeros_like(step.query)
        each = (torch.arange(size) % 113 - 56).to(torch.bfloat16)
        if stored != "auto":
            each = each.to(STORAGE_DTYPES[stored])
        raw = each if stored == "auto" else each.view(torch.uint8)
        step.value.view(raw.dtype)[step.table[0, 0], :3, 0] = raw
        out, _ = step.run()
        assert torch.equal(out, each.to(torch.bfloat16).expand_as(out)), size
