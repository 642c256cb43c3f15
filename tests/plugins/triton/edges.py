"""Runs cases of Triton's backends that no claim's case meets, interpreted; no access leaves its tensor.

A program of its own, since Triton reads TRITON_INTERPRET when it is imported. Prints how many ran.
"""

from __future__ import annotations

import bounds
import torch
import triton
import triton.language as tl
from polyattn import Device, LatentSpec, LayerSpec
from polyattn.conformance.case import Case
from polyattn.conformance.checks.table import run_case
from polyattn.workload.steps import PAGES

BASE = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float16", block_size=16)
LATENT = LayerSpec(
    kind="mla", num_heads=16, head_size=48, v_head_size=32, dtype="float16", block_size=24,
    latent=LatentSpec(rank=64, rope_head_size=16),
)  # fmt: skip
CASES = [
    # A tile of keys that begins and ends within blocks.
    ("TRITON_MLA", Case("latent", "blocks of 24", LATENT, "decode")),
    ("TRITON_MLA", Case("latent", "blocks of 24", LATENT, "short queries")),
    # Weights without a softmax over values of 8 bits, which are loaded in pairs with one.
    (
        "TRITON_ATTN",
        Case(
            "functions", "sigmoid, int8",
            BASE.replace(variant="flash_sigmoid", kv_cache_dtype="int8"), "decode",
        ),
    ),
    # Decodes over pages that a mask chooses, where a score depends on the key's place.
    *(
        (
            "TRITON_ATTN",
            Case("functions", name, BASE.replace(mask="block_sparse", **fields), "decode", PAGES),
        )
        for name, fields in {
            "bias": {"variant": "relative_bias"}, "ALiBi": {"alibi": True},
        }.items()
    ),
]  # fmt: skip


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


if __name__ == "__main__":
    bounds.pytest_configure()
    check_that_bounds_are_told()
    device = Device("cpu", "x86_64", torch_device="cpu")
    for backend, case in CASES:
        run_case(case, backend, device, 0, 1)
    print(len(CASES))
