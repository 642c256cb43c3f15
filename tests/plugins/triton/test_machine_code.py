"""No kernel reads what nothing wrote: ptxas 12.8 compiled such ones, whose answers were wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton")

from ahead import CPU, compile_phase, device_of, launches, recorded
from machine_code import BYTES, code_of, read_unwritten, unwritten_in, waited_for
from polyattn import LayerSpec

WRITTEN = """
        /*0000*/                   UMOV UR34, UR46 ;
        /*0010*/              @!P0 HGMMA.64x32x16.F32 R56, R28, gdesc[UR32].tnspB, R56 ;
"""
BEFORE = """
        /*0000*/                   S2UR UR46, SR_CTAID.X ;
        /*0010*/                   ULDC.64 UR4, c[0x0][0x220] ;
        /*0020*/                   UMOV UR35, 0x80000020 ;
        /*0030*/                   LDG.E R43, desc[UR4][R8.64+0x10] ;
"""


def test_what_nothing_wrote_is_told() -> None:
    assert unwritten_in(BEFORE + WRITTEN) == []
    assert unwritten_in(WRITTEN) == [
        "UMOV UR34, UR46", "HGMMA.64x32x16.F32 R56, R28, gdesc[UR32].tnspB, R56",
    ]  # fmt: skip
    itself = "        /*0010*/                   UIADD3 UR34, UP0, UR34, 0x40, URZ ;"
    assert unwritten_in(BEFORE + itself) == ["UIADD3 UR34, UP0, UR34, 0x40, URZ"]


def test_what_nothing_wrote_is_told_of_the_kernel_that_reads_it() -> None:
    code = code_of(
        compile_phase(LayerSpec(num_heads=4, head_size=64), "sm_90", "write").asm["cubin"]
    )
    assert not read_unwritten([("whole", code)])
    cut = read_unwritten([("whole", code), ("cut", code[8 * BYTES :]), ("whole", code)])
    assert cut and all(text.startswith("cut: ") for text in cut)


@pytest.mark.parametrize("level", ["none", "batch"])
def test_merges_let_only_merges_be_scheduled(level: str) -> None:
    """At a level a step's classes are merged one after another. Else the 4 us of it are for nothing."""
    spec = LayerSpec(num_heads=28, num_kv_heads=4, head_size=128, batch_invariant=level)
    steps = launches(spec, "sm_90", [(1, 5000), (1, 9000), (4, 9000), (8, 700)])
    merges = [launch for launch in steps if launch.name == "merge_kernel"]
    assert len(merges) == 1 + (level != "none")
    codes = [launch.compiled("sm_90").asm["ptx"] for launch in merges]
    lets = ["griddepcontrol.launch_dependents" in code for code in codes]
    assert lets == [level != "none"] * len(merges)
    assert all("griddepcontrol.wait" in code for code in codes)


@pytest.mark.parametrize("phase", ["split", "paged", "prefix low"])
def test_heads_of_120_are_loaded_by_16_bytes(phase: str) -> None:
    """Each head's address is a multiple of 8 elements, which Triton can't see in its stride."""
    spec = LayerSpec(num_heads=4, num_kv_heads=1, head_size=120)
    code = compile_phase(spec, "sm_90", phase).asm["ptx"]
    assert "cp.async.cg.shared.global" in code and "ld.global.b16" not in code


@pytest.mark.parametrize("phase", ["write", "merge listed", "prefix merge"])
def test_heads_of_120_are_stored_several_elements_at_once(phase: str) -> None:
    spec = LayerSpec(num_heads=4, num_kv_heads=1, head_size=120)
    code = compile_phase(spec, "sm_90", phase).asm["ptx"]
    assert "st.global.v" in code and "st.global.b16" not in code


@pytest.mark.parametrize("what", ["rotated", "merged"])
def test_services_move_heads_of_120_several_elements_at_once(what: str) -> None:
    import torch
    from polyattn.kernel import KVCache, LayerParams, NewTokens, Rotation, StorePlan
    from polyattn.selection.cache_format import format_of
    from polyattn_triton.state_merge import TritonMerge
    from polyattn_triton.store import TritonStore

    spec, device = LayerSpec(num_heads=4, num_kv_heads=1, head_size=120), device_of("sm_90")
    form = format_of(spec, device, "NHD", 16)
    token, lse = torch.zeros(1, 4, 120, dtype=torch.bfloat16), torch.zeros(1, 4)
    with recorded() as log:
        if what == "merged":
            TritonMerge(spec, None, device).run(token, lse, token, lse)
        else:
            turns = Rotation(torch.zeros(1, 120), None, "neox", 120)
            cache, plan = KVCache.allocate(form, 1, CPU), StorePlan(torch.zeros(1).long())
            new = NewTokens(token, token[:, :1], token[:, :1])
            TritonStore(spec, form, device).run_rotated(
                plan, turns, new, cache, LayerParams(), False
            )
    code = log[0].compiled("sm_90").asm["ptx"]
    assert "st.global.v" in code and "st.global.b16" not in code and "ld.global.b16" not in code


def test_no_step_of_a_decode_waits_for_blocks() -> None:
    """Blocks that ptxas knows to be a warp's go to uniform registers as soon as they are loaded.

    On an H200 a sequence of 32k took 30.0 us so, and 25.4 where each thread has its own.
    """
    spec = LayerSpec(num_heads=28, num_kv_heads=4, head_size=128)
    assert not waited_for(compile_phase(spec, "sm_90", "many").asm["cubin"])


EIGHT_BITS = [
    ({"cached": False, "qkv_dtype": "fp8_e4m3"}, "pieces"),
    ({"kv_cache_dtype": "int8"}, "paged"),
    ({"kv_cache_dtype": "fp8_e4m3"}, "paged pieces"),
    ({"kv_cache_dtype": "int4"}, "paged"),
    ({"kv_cache_dtype": "int8"}, "prefix high"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "phase"), EIGHT_BITS, ids=lambda x: str(x))
def test_narrow_values_of_eight_bits_are_read_where_they_lie(
    fields: dict[str, Any], phase: str
) -> None:
    """`conftest.py` looks at each kernel. Of these all read V wrongly while a tile had 64 keys."""
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_size": 128, "v_head_size": 32}
    spec = LayerSpec(**sizes, dtype="bfloat16", **fields)
    assert compile_phase(spec, "sm_90", phase).asm["cubin"]


def exponents(ptx: str) -> set[str]:
    """Return which instructions make what a kernel takes a power of two of."""
    results = re.findall(r"^\s*([a-z][\w.]*)\s+(%\w+),", ptx, re.M)
    makers = {register: name for name, register in results}
    return {makers.get(each, "")[:3] for each in re.findall(r"ex2\.approx\S*\s+%\w+, (%\w+);", ptx)}


@pytest.mark.parametrize("phase", ["prefill", "paged pieces"])
def test_the_largest_logit_less_itself_is_zero(phase: str) -> None:
    """A fused product and difference is off by half a unit in the product's last place."""
    spec = LayerSpec(num_heads=8, num_kv_heads=2, head_size=128)
    makers = exponents(compile_phase(spec, "sm_90", phase).asm["ptx"])
    assert "sub" in makers and "fma" not in makers


@pytest.mark.parametrize(
    ("arch", "kind"), [("sm_80", "ptx"), ("sm_90", "ptx"), ("gfx942", "amdgcn")]
)
def test_float32_decodes_by_nvidias_tensor_cores(arch: str, kind: str) -> None:
    """Else the arithmetic units multiply all 16 rows of a tile for a group of four heads."""
    spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, dtype="float32")
    text = compile_phase(spec, arch, "decode").asm[kind]
    assert ("mma.sync" in text and "tf32" in text) == arch.startswith("sm_")
