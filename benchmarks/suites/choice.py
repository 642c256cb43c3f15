"""Layers and lengths that no timing table was fitted to: what does choosing for each step cost?"""

from __future__ import annotations

import random
from typing import Any

from polyattn import LayerSpec
from polyattn.tools.cli.models import bundled
from polyattn.tools.lengths import of_trace
from polyattn.workload.steps import Lengths
from table import ATTENTION, LLAMA, QWEN, Contender, K, Row

SOURCE = random.Random(31_115)
CHAT = of_trace(bundled("azure_conversation.csv"))
ALONE = ("TRITON_ATTN", "FLASH_ATTN_V3", "FLASHINFER")
PAIRS = tuple(f"decode={a},prefill={b}" for a in ALONE[:2] for b in ALONE if a != b)


def layer(heads: int, kv_heads: int, size: int, **fields: Any) -> LayerSpec:
    return LayerSpec(num_heads=heads, num_kv_heads=kv_heads, head_size=size, **fields)


LAYERS = {
    "28/4 of 128": QWEN,
    "96/8 of 128": layer(96, 8, 128),
    "24/8 of 128, float16": layer(24, 8, 128, dtype="float16"),
    "20/20 of 64": layer(20, 20, 64),
    "32/8 of 80": layer(32, 8, 80),
    "32/32 of 96": layer(32, 32, 96),
    "16/4 of 256": layer(16, 4, 256),
    "32/8 of 128, window 4k": LLAMA.replace(sliding_window=4 * K),
    "16/8 of 256, soft cap": layer(16, 8, 256, logit_soft_cap=50.0),
    "32/8 of 128, e4m3 cache": LLAMA.replace(kv_cache_dtype="fp8_e4m3"),
}
STEPS: dict[str, Lengths] = {
    "1 x 128k + 63 x 1k": [(1, 128 * K), *[(1, K)] * 63],
    "200 of azure": [(1, n) for n in CHAT(200, 0, SOURCE)],
    "1 x 20k": [(1, 20_000)],
    "24 x 5 drafts, azure": [(5, n + 5) for n in CHAT(24, 0, SOURCE)],
    "prompt of 700": [(700, 700)],
    "6 prompts of azure": [(n, n) for n in CHAT(6, 0, SOURCE)],
    "2,048 new after 45k": [(2 * K, 47 * K)],
    "4 x 512 new after 8k": [(512, 8 * K + 512)] * 4,
    "80 decodes of azure + 1 x 1,500": [*((1, n) for n in CHAT(80, 0, SOURCE)), (1500, 1500)],
    "10 x 8k + 512 new after 9k": [*[(1, 8 * K)] * 10, (512, 9 * K)],
}
"""Decodes, short rows, prompts, chunks, and decodes and prefill in one step."""


def contenders(lengths: Lengths) -> dict[str, tuple[Contender, ...]]:
    mixed = min(lengths)[0] == 1 < max(lengths)[0]
    return {"cuda": (*ALONE, *(PAIRS if mixed else ())), "cpu": tuple(ATTENTION["cpu"])}


ROWS = [
    Row(f"{name}: {step}", spec, lengths, contenders(lengths), part="attend")
    for name, spec in LAYERS.items()
    for step, lengths in STEPS.items()
]
