"""Runs TRITON_ATTN over rows of bytes in Triton's interpreter: `python interpreted_rows.py`.

TRITON_STORE writes those of nvfp4.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from polyattn import Attention, Batch, KVCache, LayerGroup, LayerSpec, select
from polyattn.conformance.case import Case
from polyattn.conformance.checks.table import run_case
from polyattn.families.attention import reference
from polyattn.kernel import STORAGE_DTYPES, SharedRun
from polyattn.registry.devices import resolve_device
from polyattn.runtime.cache.kv_cache import quantize
from polyattn.runtime.cache.rows import decoded
from polyattn.spec.row_format import row_format
from polyattn.workload.compare import output_error
from polyattn.workload.tolerance import tolerance_of

sys.path.insert(0, str(Path(__file__).parents[2]))
from unseen_format import registered

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
            held[batch.slot_mapping // 16, batch.slot_mapping % 16] = quantize(
                new, torch.uint8, each, row_format("nvfp4")
            )
        assert torch.equal(cache.key, expected.key), f"{name}: keys have other bytes"
        assert torch.equal(cache.value, expected.value), f"{name}: values have other bytes"
        wanted, _ = reference.forward(spec, query, key, value, cache, batch, layer.params)
        torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-4)
    held = decoded(cache.key[3], row_format("nvfp4"), spec.head_size)
    assert held.isfinite().any()


FORMATS = (
    {"kv_cache_dtype": "int4", "v_head_size": 32, "dtype": "float16"},
    {"kv_cache_dtype": "turboquant4/kivi2", "head_size": 64, "v_head_size": 96, "needs_lse": True},
    {"kv_cache_dtype": "e4m3_rows/mxfp4", "v_head_size": 32, "sliding_window": 9},
    {"kv_cache_dtype": "int8_rows/turboquant4", "v_head_size": 32, "dtype": "float16"},
    {"kv_cache_dtype": "logs6", "head_size": 48, "v_head_size": 80},
)


def check_read(spec: LayerSpec) -> None:
    """Attend in three steps and over a shared prefix; raise where an output is too far off."""
    layer = Attention(
        LayerGroup(select(spec, "cpu", backend="TRITON_ATTN")), k_scale=0.5, v_scale=1.5
    )
    cache, chance = layer.group.allocate_cache(16), torch.Generator().manual_seed(3)
    dtype = STORAGE_DTYPES[spec.dtype]
    for stored in (cache.key, cache.value):
        stored.fill_(0xFF)
    shared = TABLE.clone()
    shared[:, 0] = TABLE[0, 0]
    steps = (*((*step, TABLE) for step in STEPS), ([1] * 3, [25, 17, 17], shared))
    for queries, lens, table in steps:
        query, key, value = (
            torch.randn(sum(queries), heads, size, generator=chance).to(dtype)
            for heads, size in ((4, spec.head_size), (2, spec.head_size), (2, spec.v_head_size))
        )
        levels = ((SharedRun((0, 1, 2), 0, 1),),) if table is shared else None
        batch = Batch.from_lens(queries, lens, table, 16, shared_prefix=levels)
        found = layer(query, key, value, cache, batch)
        out = found[0] if isinstance(found, tuple) else found
        wanted, _ = reference.forward(spec, query, key, value, cache, batch, layer.params)
        assert output_error(out, wanted) <= tolerance_of(spec).output, spec


def check_captured(spec: LayerSpec) -> None:
    """Refill what a captured step reads, with other rows and shared prefixes; raise if it is wrong."""
    asked = spec.replace(graph_capture="single_token_decode")
    for check, batch in (("reuse", "decode"), ("forest_reuse", "levels")):
        run_case(Case(check, "", asked, batch), "TRITON_ATTN", resolve_device("cpu"), seed=1)


if __name__ == "__main__":
    for name in LAYERS:
        check(name)
        print(name, flush=True)
    with registered():
        for fields in FORMATS:
            check_read(SPEC.replace(**fields))
            print(fields["kv_cache_dtype"], flush=True)
        check_captured(SPEC.replace(**FORMATS[-1]))
        print("captured", flush=True)
