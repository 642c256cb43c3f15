"""Are the weights that Hopper's prefill hands on in pairs those that a product takes as they are?

Nothing here runs: both are compiled for sm_90, and what each register of the product's first operand is
made of is followed back to what was loaded.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

pytest.importorskip("polyattn_triton.hopper.prefill")
from polyattn_triton.hopper.prefill import _in_pairs, _of_pairs

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, OUTPUT.value, 2))
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def product(X, OUT, DTYPE: gl.constexpr, PAIRED: gl.constexpr):
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, SCORES))
    x = gl.load(X + row[:, None] * 128 + column[None, :])
    if PAIRED:
        p = _of_pairs(_in_pairs(x, DTYPE), DTYPE, WEIGHTS)
    else:
        p = gl.convert_layout(x.to(DTYPE), WEIGHTS)
    v = gl.allocate_shared_memory(DTYPE, [128, 64], SHARED)
    acc = warpgroup_mma(p, v, gl.zeros([64, 64], gl.float32, OUTPUT), is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, OUTPUT))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, OUTPUT))
    gl.store(OUT + row[:, None] * 64 + column[None, :], acc)


def operands(dtype: gl.dtype, paired: bool) -> list[tuple[str, str]]:
    """Return of each register of the products' first operands the addresses of its low and high half."""
    signature = {"X": "*fp32", "OUT": "*fp32", "DTYPE": "constexpr", "PAIRED": "constexpr"}
    fixed = {(2,): dtype, (3,): paired}
    source = GluonASTSource(
        product, signature, fixed, {(i,): [["tt.divisibility", 16]] for i in (0, 1)}
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm[
        "ptx"
    ]
    kind = "bf16" if dtype == gl.bfloat16 else "f16"
    known: dict[str, str] = {}
    halves: dict[str, tuple[str, str]] = {}
    bases: list[str] = []
    found: list[tuple[str, str]] = []
    for line in ptx.splitlines():
        words = re.findall(r"%\w+", line)
        if loaded := re.search(r"ld\.global\S* +\{?([^}\[]*)\}?, *\[ *(%\w+) *\+ *(\d+) *\]", line):
            if loaded[2] not in bases:
                bases.append(loaded[2])
            for place, register in enumerate(re.findall(r"%\w+", loaded[1])):
                known[register] = f"{bases.index(loaded[2])}+{int(loaded[3]) + 4 * place}"
        elif f"cvt.rn.{kind}x2.f32" in line:
            halves[words[0]] = (known[words[2]], known[words[1]])
        elif f"cvt.rn.{kind}.f32" in line or (
            re.search(r"\bmov\.b(32|16)\b", line) and len(words) == 2 and words[1] in known
        ):
            known[words[0]] = known[words[1]]
        elif re.search(r"\bmov\.b32\b", line) and len(words) == 2 and words[1] in halves:
            halves[words[0]] = halves[words[1]]
        elif re.search(r"\bmov\.b32\b", line) and len(words) == 3 and "{" in line:
            if line.index("{") > line.index(words[0]):  # joined
                halves[words[0]] = (known[words[1]], known[words[2]])
            elif words[2] in halves:  # taken apart
                known[words[0]], known[words[1]] = halves[words[2]]
        elif "wgmma.mma_async" in line:
            sets = re.findall(r"\{([^}]*)\}", line)
            found += [halves[register] for register in re.findall(r"%\w+", sets[1])]
    return found


@pytest.mark.parametrize("dtype", [gl.bfloat16, gl.float16], ids=["bfloat16", "float16"])
def test_pairs_are_the_operand_of_a_product(dtype: gl.dtype) -> None:
    paired = operands(dtype, True)
    assert len(paired) == 32 and len({half for both in paired for half in both}) == 64
    assert paired == operands(dtype, False)
