"""Does a compiler fuse what the specified bits have apart? Compiled ahead, without a GPU."""

from __future__ import annotations

import re

import pytest
import triton
from polyattn_triton.exact import OPTIONS
from polyattn_triton.kernels.exact import exact_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SIZES = {
    "G": 4, "DV": 64, "WIDTH": 64, "BLOCK_M": 4, "CAUSAL": True, "WINDOW": 40, "CHUNK": 0,
    "SINK_TOKENS": 3, "D": 64, "BLOCK_SIZE": 16, "ALIBI": True,
}  # fmt: skip
INTEGERS = ("TILES", "TABLE", "STARTS", "LENS")


def compiled(target: GPUTarget, **options: object) -> dict[str, str]:
    """Return the kernel's code by its name in Triton; without options, with the launches' own."""
    names = exact_kernel.arg_names
    types = {
        name: "*i32" if name in INTEGERS else "*fp32" if name.isupper() else "i32" for name in names
    }
    types |= {"scale": "fp32", **dict.fromkeys(SIZES, "constexpr")}
    constants = {(names.index(name),): value for name, value in SIZES.items()}
    source = ASTSource(exact_kernel, types, constants)
    return triton.compile(source, target=target, options=OPTIONS | options).asm  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("target", "code", "fused"),
    [
        (GPUTarget("cuda", 90, 32), "ptx", r"\bfma\.rn\.f32|\.ftz\b"),
        (GPUTarget("hip", "gfx942", 64), "amdgcn", r"\bv_(pk_)?(fma|fmac|mad|mac)\w*_f32"),
    ],
    ids=["sm_90", "gfx942"],
)
def test_no_product_is_fused_with_a_sum(target: GPUTarget, code: str, fused: str) -> None:
    assert not re.findall(fused, compiled(target)[code])
    assert re.findall(fused, compiled(target, enable_fp_fusion=True)[code])
