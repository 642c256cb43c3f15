"""What does ptxas make of TRITON_ATTN's own prefill for Hopper? Machine code, counted without a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
from polyattn import LayerSpec

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
from ahead import compile_phase
from machine_code import told, usage
from polyattn_triton.configs import HOPPER

PLAIN = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
SHAPES = [
    pytest.param(changes, block_size, split, marks=mark)
    for mark, changes, block_size, split in (
        (pytest.mark.slow, {}, 16, True),
        (pytest.mark.slow, {}, 0, False),
        (pytest.mark.slow, {"head_size": 64}, 16, True),
        (pytest.mark.slow, {"sliding_window": 1000, "needs_lse": True}, 64, False),
        (pytest.mark.slow, {"head_size": 256}, 16, True),
        (pytest.mark.sweep, {"causal": False}, 0, False),
        (pytest.mark.slow, {"variant": "flash_sigmoid"}, 16, True),
        (pytest.mark.sweep, {"variant": "flash_sigmoid", "sliding_window": 100}, 0, False),
        (pytest.mark.sweep, {}, 16, False),
        (pytest.mark.sweep, {"sliding_window": 1000}, 16, True),
        (pytest.mark.sweep, {"causal": False, "needs_lse": True}, 16, True),
        (pytest.mark.sweep, {"needs_lse": True}, 256, False),
        (pytest.mark.sweep, {"head_size": 64, "dtype": "float16"}, 64, False),
        (pytest.mark.sweep, {"num_heads": 28, "num_kv_heads": 4, "needs_lse": True}, 64, True),
        (pytest.mark.sweep, {"num_heads": 8}, 8, False),
        (pytest.mark.sweep, {"head_size": 256, "sliding_window": 512}, 0, False),
    )
]


@pytest.mark.parametrize(("changes", "block_size", "split"), SHAPES)
def test_compiles_for_hopper(changes: dict[str, Any], block_size: int, split: bool) -> None:
    """Its program fits on a multiprocessor, and no register of the loops over keys lies in memory."""
    spec = PLAIN.replace(**changes)
    spec, config = spec.replace(block_size=block_size or None), HOPPER[spec.head_size]
    phase = ("paged" if block_size else "prefill") + " pieces" * split
    kernel = compile_phase(spec, "sm_90", phase, own=True)
    assert kernel.metadata.shared <= 227 << 10
    # Blocks looked up ahead and those of the tile before: Triton 3.6 can lose one of them.
    carried = [line for line in kernel.asm["ttgir"].splitlines() if "iter_args" in line]
    assert max(line.count("tensor<32xi32") for line in carried) == 2
    assert usage(kernel.asm["cubin"])["REG"] * 32 * config.num_warps <= 65536
    lines = told("nvdisasm", kernel.asm["cubin"], "-c", "-ndf").splitlines()
    labels = {line.strip()[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    loops = 0
    for end, line in enumerate(lines):
        target = re.search(r"BRA `\((\.L_x_\d+)\)", line)
        begin = labels.get(target[1], end) if target else end
        body = lines[begin:end]
        products = sum("HGMMA" in text for text in body)
        exponentials = sum("MUFU.EX2" in text for text in body)
        waits = [i for i, text in enumerate(body) if "WARPGROUP.DEPBAR" in text]
        short = end - begin < (1200 if spec.variant else 1000) and len(waits) == 2
        # A softmax has two more than scores: of what its rows' largest were and are.
        of_one = exponentials in ((64,) if spec.variant else (34, 66))
        if short and of_one and products in (12, 16, 20):
            loops += 1
            assert not any("LDL" in text or "STL" in text for text in body)
            # The softmax lies between the wait for the scores and that for the output.
            assert all(waits[0] < i < waits[1] for i, t in enumerate(body) if "MUFU.EX2" in t)
    # Of each group: with functions one, else with a mask and without, and with one where a window begins.
    expected = 1 if spec.variant else 3 if spec.sliding_window else 2
    assert loops == config.block_m // 64 * expected
