"""What does the host pay for a step: a layer's call, its plan, a choice of backends?"""

from __future__ import annotations

import random

from polyattn import LayerSpec
from polyattn.tools.lengths import DISTRIBUTIONS
from table import LATENT, LLAMA, QWEN, Contender, Other, Row, model

TINY = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32)
DEEPSEEK = model("deepseek-v3")
LENS = DISTRIBUTIONS["uniform"](256, 1024, random.Random(5))
NAMES = {
    "cuda": ("TRITON_ATTN", "FLASHINFER", "FLASH_ATTN_V3"),
    "cpu": ("NATIVE_ATTN", "TORCH_SDPA"),
}


def both(names: tuple[str, ...]) -> tuple[Contender, ...]:
    """A layer's call, and the calls that it comes down to."""
    own = (Other(f"{name}, its own calls", name, part="host of own calls") for name in names)
    return (*names, *own)


CALLS = {device: both(names) for device, names in NAMES.items()}

ROWS = [
    Row("a layer's call: one token after 16", LLAMA, "q1s17", CALLS, part="host of a call"),
    Row("a layer's call: one token after 16, 4/2 heads of 32", TINY, "q1s17", CALLS,
        part="host of a call"),
    Row("a layer's call: 64 x 64", LLAMA, "64q1s64", CALLS, part="host of a call"),
    Row("a plan: one token after 16", LLAMA, "q1s17", NAMES, part="plan"),
    Row("a plan: 256 uneven decodes", QWEN, [(1, n) for n in LENS], NAMES, part="plan"),
    Row("a plan: 32 decodes and 2 prompts", LLAMA, "32q1s2k_2q1k", NAMES, part="plan"),
    Row("MLA, a layer's call: one token after 8,191", DEEPSEEK, "q1s8k", LATENT,
        part="host of a call"),
    Row("MLA, a plan: one token after 8,191", DEEPSEEK, "q1s8k", LATENT, part="plan"),
    Row("`select`, known", LLAMA, "q1s17", {"cuda": ("TRITON_ATTN",), "cpu": ("NATIVE_ATTN",)},
        part="select"),
]  # fmt: skip
