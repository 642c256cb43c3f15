"""Are wide heads over chosen keys right by NATIVE_ATTN, K = V caches among them?"""

from __future__ import annotations

import pytest
import torch
from polyattn import Batch, LayerSpec, SparseAttention, SparseSpec, select
from polyattn.families.sparse import reference
from polyattn.workload.tolerance import tolerance_of
from polyattn_cpu.native import library

pytestmark = [
    pytest.mark.skipif(library.why_not() is not None, reason=f"native: {library.why_not()}"),
    pytest.mark.slow,
]
TABLE = [[5, 2, 7, 1, 0, 3, 4], [6, 8, 6, 6, 6, 6, 6]]


@pytest.mark.parametrize("isa", library.isas() if library.why_not() is None else ())
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("size", [256, 257, 320, 512, 576])
def test_wide_heads_agree_with_float64(monkeypatch, isa, dtype, size):
    """Published sizes, and one more than 256; 8 heads, and 64 whose keys are their values."""
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    torch.manual_seed(0)
    for heads, own_value in ((8, False), (64, True)):
        spec = LayerSpec(
            kind="sparse", num_heads=heads, num_kv_heads=1, head_size=size, dtype=dtype, needs_lse=True,
            v_head_size=min(size, 512) if own_value else size, block_size=16,
            sparse=SparseSpec(budget=40, value_in_key=own_value),
        )  # fmt: skip
        layer = SparseAttention(select(spec, "cpu", backend="NATIVE_ATTN"))
        cache = layer.group.allocate_cache(num_blocks=9)
        cache.key.copy_(torch.randn(cache.key.shape))
        if not own_value:
            cache.value.copy_(torch.randn(cache.value.shape))
        batch = Batch.from_lens([3, 1], [97, 31], torch.tensor(TABLE).int(), 16)
        query = torch.randn(4, heads, size).to(cache.key.dtype)
        choice = torch.stack([torch.randperm(97)[:40] for _ in range(4)]).int()[:, None]
        out, lse = layer(query, None, None, cache, batch, choice=choice)
        want, lse_want = reference.forward(spec, query, cache, batch, choice)
        allowed = tolerance_of(spec)
        assert float((out.double() - want).abs().max() / want.abs().max()) <= allowed.output
        assert torch.allclose(lse.double(), lse_want, atol=1e-4, rtol=0)
