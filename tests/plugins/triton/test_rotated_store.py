"""Does TRITON_STORE rotate and store as the float64 formulas say? Interpreted, and as machine code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreting import interpreted
from polyattn import Attention, LayerSpec
from polyattn.spec.norm import NormSpec
from polyattn.spec.rope import RopeSpec
from polyattn.workload.base import workload

pytest.importorskip("triton")
from ahead import Launch, group_of, recorded

TESTS = Path(__file__).parents[2]
SCRIPT = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import torch
from polyattn_triton.store import TritonStore
from rotated import CPU, check, specs

torch.manual_seed(0)
count = 0
for label, spec, layout, biased in specs(("float16",), ("auto", "int8")):
    store = TritonStore(spec, None, CPU)
    keep = count // 2 % 2 == 0
    try:
        check(store.run_rotated, spec, layout, biased, keep)
    except AssertionError as error:
        raise AssertionError(f"{{label}}, keep {{keep}}: {{error}}") from error
    count += 1
print(count)
"""


@pytest.mark.slow
def test_interpreted(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert interpreted(script).strip() == "42"


SPEC = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
FORMS = {
    "neox": SPEC.replace(rope=RopeSpec(rotary_size=128)),
    "gptj part": SPEC.replace(rope=RopeSpec(rotary_size=32, pairing="gptj")),
    "warm fp8": SPEC.replace(
        rope=RopeSpec(rotary_size=128, temperature=0.1, temperature_length=8192),
        kv_cache_dtype="fp8_e4m3",
    ),
    "normed": SPEC.replace(rope=RopeSpec(rotary_size=128), qk_norm=NormSpec()),
    "normed tokens": SPEC.replace(
        rope=RopeSpec(rotary_size=32, pairing="gptj"),
        qk_norm=NormSpec(over="token"),
        kv_cache_dtype="fp8_e4m3",
    ),
}


def storing(spec: LayerSpec, arch: str) -> Launch:
    """What stores keys and values with a bias, normed and rotated."""
    heads, norms = {"q_norm": spec.num_heads, "k_norm": spec.num_kv_heads}, {}
    if spec.qk_norm is not None:
        each = {n: count if spec.qk_norm.over == "token" else 1 for n, count in heads.items()}
        norms = {n: torch.ones(count * 128, dtype=torch.bfloat16) for n, count in each.items()}
    bias = torch.ones((spec.num_heads + 2 * spec.num_kv_heads) * 128, dtype=torch.bfloat16)
    layer = Attention(group_of(spec, arch, "TRITON_ATTN"), rotate=True, qkv_bias=bias, **norms)
    with recorded() as launches:
        workload(layer, [(3, 40)]).run()
    return launches[0]


@pytest.mark.parametrize(
    ("arch", "form"),
    [
        ("sm_90", "neox"),
        ("sm_90", "gptj part"),
        ("sm_90", "warm fp8"),
        ("sm_100", "neox"),
        ("gfx942", "warm fp8"),
        ("sm_90", "normed"),
        ("sm_90", "normed tokens"),
        ("sm_100", "normed"),
        ("gfx942", "normed tokens"),
    ],
)
def test_compiles_to_machine_code(arch: str, form: str) -> None:
    kernel = storing(FORMS[form], arch).compiled(arch)
    binary = kernel.asm["cubin" if arch.startswith("sm_") else "hsaco"]
    assert len(binary) > 500
    if arch.startswith("sm_"):
        # 16 bytes at a time, in and out: what moves bytes as fast as they go.
        assert "ld.global.v4" in kernel.asm["ptx"] and kernel.metadata.shared <= 48 << 10
