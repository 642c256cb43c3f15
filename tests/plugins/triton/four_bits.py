"""Runs TRITON_ATTN and TRITON_STORE over nvfp4 caches in Triton's interpreter: `python four_bits.py`."""

from __future__ import annotations

import torch
from polyattn import Attention, Batch, KVCache, LayerGroup, LayerSpec, select
from polyattn.families.attention import reference
from polyattn.runtime.cache.kv_cache import quantize
from polyattn.runtime.cache.rows import decoded
from polyattn.spec.row_format import row_format

torch.set_num_threads(1)
SPEC = LayerSpec(
    num_heads=4, num_kv_heads=2, head_size=32, v_head_size=48, dtype="float32",
    kv_cache_dtype="nvfp4", block_size=16,
)  # fmt: skip
LAYERS = {
    "numbers": (SPEC, (0.5, 1.5)),
    "one tensor": (SPEC.replace(scales="tensor"), (torch.tensor(0.5), torch.tensor(1.5))),
    "by head": (
        SPEC.replace(head_size=80, v_head_size=32, scales="head"),
        (torch.tensor([0.5, 2.0]), torch.tensor([1.0, 0.25])),
    ),
}
STEPS = (([20, 1, 3], [20, 1, 3]), ([1, 1, 1], [21, 2, 4]), ([3, 1, 9], [24, 3, 13]))
TABLE = torch.tensor([[3, 9], [14, 1], [6, 11]], dtype=torch.int32)


def check(name: str) -> None:
    """Store and attend in three steps; raise where a byte or an output differs from torch's form."""
    spec, scales = LAYERS[name]
    names = "TRITON_ATTN,store=TRITON_STORE"
    layer = Attention(
        LayerGroup(select(spec, "cpu", backend=names)), k_scale=scales[0], v_scale=scales[1]
    )
    cache = layer.group.allocate_cache(16)
    for stored in (cache.key, cache.value):
        stored.fill_(0xFF)  # NaN where nothing was stored
    expected = KVCache(cache.key.clone(), cache.value.clone(), cache.format)
    chance = torch.Generator().manual_seed(3)
    for queries, lens in STEPS:
        count, d, dv = sum(queries), spec.head_size, spec.v_head_size
        query, key, value = (
            torch.randn(count, heads, size, generator=chance)
            for heads, size in ((4, d), (2, d), (2, dv))
        )
        key[0, 0, :6] = torch.tensor([1e-4, -1e-5, 900.0, -0.0, 3.0, 0.25])
        value[0, 1, :16] = 0.0
        batch = Batch.from_lens(queries, lens, TABLE, 16)
        out = layer(query, key, value, cache, batch)
        for held, new, scale in zip(
            (expected.key, expected.value), (key, value), scales, strict=True
        ):
            each = scale.expand(2) if isinstance(scale, torch.Tensor) else scale
            held.view(-1, *held.shape[2:])[batch.slot_mapping] = quantize(
                new, torch.uint8, each, row_format("nvfp4")
            )
        assert torch.equal(cache.key, expected.key), f"{name}: keys have other bytes"
        assert torch.equal(cache.value, expected.value), f"{name}: values have other bytes"
        wanted, _ = reference.forward(spec, query, key, value, cache, batch, layer.params)
        torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-4)
    held = decoded(cache.key[3], row_format("nvfp4"), spec.head_size)
    assert held.isfinite().any()


if __name__ == "__main__":
    for name in LAYERS:
        check(name)
        print(name, flush=True)
