"""Triton's backends where no claim's case goes: `python test_edges.py [DEVICE]` runs them.

Interpreted, no access leaves its tensor. Prints how many ran.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from interpreting import interpreted
from polyattn import Device, LatentSpec, LayerSpec
from polyattn.conformance.case import Case, captures
from polyattn.conformance.checks.table import run_case
from polyattn.registry.devices import resolve_device
from polyattn.workload.steps import PAGES

sys.path.insert(0, str(Path(__file__).parents[2]))
from unseen_format import registered

pytest.importorskip("triton")
import bounds
import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

BASE = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float16", block_size=16)
LATENT = LayerSpec(
    kind="mla", num_heads=16, head_size=48, v_head_size=32, dtype="float16", block_size=24,
    latent=LatentSpec(rank=64, rope_head_size=16),
)  # fmt: skip
TWENTY = LATENT.replace(num_heads=20, dtype="float32", block_size=16, needs_lse=True)
ATTENTION = [
    # Weights without a softmax over values of 8 bits, which are loaded in pairs with one.
    Case(
        "functions", "sigmoid, int8",
        BASE.replace(variant="flash_sigmoid", kv_cache_dtype="int8"), "decode",
    ),
    # Decodes over pages that a mask chooses, where a score depends on the key's place.
    *(
        Case("functions", name, BASE.replace(mask="block_sparse", **fields), "decode", PAGES)
        for name, fields in {
            "bias": {"variant": "relative_bias"}, "ALiBi": {"alibi": True},
        }.items()
    ),
]  # fmt: skip
LATENTS = [
    # A tile of keys that begins and ends within blocks.
    Case("latent", "blocks of 24", LATENT, "decode"),
    Case("latent", "blocks of 24", LATENT, "short queries"),
    # Two tiles of heads, whose last isn't full.
    Case("latent", "20 heads", TWENTY, "mixed"),
    Case("latent_shared", "20 heads", TWENTY, "decode"),
]
ROWS = BASE.replace(
    head_size=32, v_head_size=48, dtype="float32", kv_cache_dtype="nvfp4", needs_lse=True
)


def rows(device: Device) -> Iterator[tuple[str, Case]]:
    """Yield cases of rows of bytes, of keys unlike values, and of a format that no kernel knows."""
    for scales in ("number", "tensor", "head"):
        spec = ROWS.replace(scales=scales, head_size=80, v_head_size=32)
        yield "TRITON_STORE", Case("store", f"{scales} scales", spec, "some")
        yield "TRITON_ATTN", Case("numeric", f"{scales} scales", spec, "mixed")
    for spec in (
        ROWS.replace(kv_cache_dtype="int4", v_head_size=32, dtype="float16"),
        ROWS.replace(kv_cache_dtype="turboquant4/kivi2", head_size=64, v_head_size=96),
        ROWS.replace(kv_cache_dtype="e4m3_rows/mxfp4", v_head_size=32, sliding_window=9),
        ROWS.replace(kv_cache_dtype="int8_rows/turboquant4", v_head_size=32, dtype="float16"),
        ROWS.replace(kv_cache_dtype="logs6", head_size=48, v_head_size=80),
    ):
        name = spec.kv_cache_dtype
        for batch in ("decode", "prefill", "chunked"):
            yield "TRITON_ATTN", Case("numeric", name, spec, batch)
        if spec.sliding_window is None:
            yield "TRITON_ATTN", Case("forest", name, spec, "levels")
    captured = spec.replace(graph_capture="single_token_decode")
    how = "graph" if captures(device) else "reuse"
    for check, batch in ((how, "decode"), (f"forest_{how}", "levels")):
        yield "TRITON_ATTN", Case(check, "captured", captured, batch)


@triton.jit
def beyond(X, count):
    tl.store(X, tl.load(X + count))


def check_that_bounds_are_told() -> None:
    """One element past a tensor is refused, the last one isn't."""
    beyond[(1,)](torch.zeros(4), 3)
    try:
        beyond[(1,)](torch.zeros(4), 4)
    except Exception as error:
        assert "behind the end" in str(error)
    else:
        raise AssertionError("nobody told")


def check_that_low_addresses_are_known() -> None:
    """A table's address may lie below 4 GiB, where Pythons that aren't relocated have their heap."""
    pointer = TensorHandle(np.array([1 << 29], np.uint64), tl.pointer_type(tl.float32))
    table = bounds.Buffers((torch.tensor([1 << 29]),))
    table.check(pointer, TensorHandle(np.array([True]), tl.int1))


@pytest.mark.slow
def test_edges() -> None:
    """Blocks that no tile divides, 8-bit values without a softmax, chosen pages, keys of other rows."""
    assert int(interpreted(__file__, seconds=1200)) == 34


def test_heads_far_apart(tmp_path: Path) -> None:
    """A product of a head and its stride that int32 doesn't hold, of what is read and stored."""
    assert int(interpreted(Path(__file__).with_name("far_heads.py"), str(tmp_path))) == 3


if __name__ == "__main__":
    torch.set_num_threads(1)
    device = resolve_device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    if device.platform == "cpu":
        bounds.pytest_configure()
        check_that_bounds_are_told()
        check_that_low_addresses_are_known()
    with registered():
        cases = [
            *(("TRITON_ATTN", case) for case in ATTENTION),
            *(("TRITON_MLA", case) for case in LATENTS),
            *rows(device),
        ]
        for backend, case in cases:
            run_case(case, backend, device, 0, 1)
    print(len(cases))
