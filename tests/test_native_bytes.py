"""Do the native CPU kernels read every byte of an 8-bit cache as what it stands for?"""

from __future__ import annotations

import pytest
import torch
from polyattn import LayerSpec
from polyattn.kernel import STORAGE_DTYPES, LayerParams
from polyattn_cpu.native import library
from test_native import ISAS, Step, needs_library


@needs_library
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 20])
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
