"""Do the kernels that round queries to e4m3 give torch's bits, and do they compile for Hopper?"""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreting import interpreted


@pytest.mark.slow
def test_kernels_round_as_torch_does() -> None:
    assert interpreted(Path(__file__).with_name("interpreted_rounding.py")).strip() == "16"


@pytest.mark.parametrize("single", [True, False])
def test_they_compile_for_hopper(single: bool) -> None:
    """Down to machine code, e4m3 conversions in pairs."""
    from polyattn_cuda.query_rounding import largest_kernel, round_kernel
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    sizes = {"HEADS": 8, "EACH": 4, "SIZE": 128, "BLOCK_T": 16, "BLOCK_E": 4, "BLOCK_D": 128}
    pointers = {"Q": "*bf16", "SEQ_OF": "*i64", "FOUND": "*i32"}
    numbers = {"tokens": "i32", "q_t": "i32", "q_h": "i32"}
    kernels = [(round_kernel, pointers | {"OUT": "*fp8e4nv", "SCALES": "*fp32"} | numbers
                | {"largest": "fp32", "least": "fp32"}, sizes | {"SINGLE": single})]  # fmt: skip
    if not single:
        kernels.append((largest_kernel, pointers | numbers, sizes))
    for kernel, signature, constants in kernels:
        # As a launch finds them: without these no load is vectorised.
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(kernel.arg_names)
            if name in pointers or name in ("OUT", "SCALES", "q_t", "q_h")
        }
        types = signature | dict.fromkeys(constants, "constexpr")
        source = ASTSource(kernel, types, constants, aligned)
        built = compiled(source, target=GPUTarget("cuda", 90, 32))
        assert built.asm["cubin"]
        if kernel is round_kernel:
            assert "cvt.rn.satfinite.e4m3x2" in built.asm["ptx"]
        assert "ld.global.v4" in built.asm["ptx"]
