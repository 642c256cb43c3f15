"""One new token, or a few, of each sequence: equal lengths, traces', skewed ones, other layers."""

from __future__ import annotations

import random
from collections.abc import Sequence

from polyattn import LayerSpec
from polyattn.spec.rope import RopeSpec
from polyattn.tools.cli.models import bundled
from polyattn.tools.lengths import DISTRIBUTIONS, of_trace
from table import ATTENTION, BEST, LLAMA, MHA, PLAIN_CUDA, QWEN, SHARD, Bar, K, Row, model

SOURCE = random.Random(1)
CHAT = of_trace(bundled("azure_conversation.csv"))
LONG = of_trace(bundled("mooncake_conversation.jsonl"))
UNIFORM, ZIPF = DISTRIBUTIONS["uniform"], DISTRIBUTIONS["zipf"]
CPU = {"cpu": ATTENTION["cpu"]}
COPY = ["machine.copy", "vllm.attention"]
LEVEL = Bar(1.05, BEST)
"""As fast as the best library, but for noise."""


def decodes(name: str, lens: Sequence[int], spec: LayerSpec = QWEN, bar: Bar | None = LEVEL) -> Row:
    return Row(name, spec, [(1, n) for n in lens], ATTENTION, bar, part="attend")


def other(name: str, spec: LayerSpec) -> Row:
    """A layer that asks for more: FlashInfer would compile its variant for minutes."""
    return Row(name, spec, "64q1s4k", PLAIN_CUDA, LEVEL, part="attend")


ROWS = [
    *(Row(f"equal {n} x {m}", LLAMA, [(1, m)] * n, ATTENTION, LEVEL,
          ["flashinfer.decode", "machine.copy"], part="attend")
      for n, m in ((1, 8192), (4, 8192), (16, 4096), (64, 4096), (128, 8192))),
    Row("CPU: 8 x 2048", LLAMA, "8q1s2k", CPU, Bar(1.0), COPY, "attend"),
    Row("CPU: 8 x 1024, 32/32 heads of 96", LayerSpec(num_heads=32, head_size=96), "8q1s1k", CPU,
        Bar(1.0), COPY, "attend"),
    Row("CPU: 8 x 2048, 71/1 heads of 64", LayerSpec(num_heads=71, num_kv_heads=1, head_size=64),
        "8q1s2k", CPU, Bar(1.0), COPY, "attend"),
    decodes("1 x 128k + 63 x 1k", [128 * K] + [K] * 63),
    decodes("the same in 64 equal", [(128 * K + 63 * K) // 64] * 64),
    decodes("12 of mooncake", LONG(12, 0, SOURCE)),
    decodes("24 of azure", CHAT(24, 0, SOURCE)),
    decodes("200 of azure", CHAT(200, 0, SOURCE)),
    decodes("64 uniform to 8k", UNIFORM(64, 4 * K, SOURCE)),
    decodes("64 Zipf of 2k", ZIPF(64, 2 * K, SOURCE)),
    decodes("16/2 heads: 1 x 128k + 63 x 1k", [128 * K] + [K] * 63, SHARD),
    decodes("16/2 heads: 5 of mooncake", LONG(5, 0, SOURCE), SHARD),
    decodes("16/16 heads: 40 x 2k", [2 * K] * 40, MHA),
    Row("16 new after 128k", QWEN, [(16, 128 * K + 16)], ATTENTION, LEVEL, part="attend"),
    Row("16/2 heads: 16 new after 128k", SHARD, [(16, 128 * K + 16)], ATTENTION, LEVEL, part="attend"),
    Row("64 x 4 new after 4k", QWEN, [(4, 4 * K + 4)] * 64, ATTENTION, LEVEL, part="attend"),
    Row("1 to 8 new, 32 of azure", QWEN, [(1 + i % 8, n + 8) for i, n in enumerate(CHAT(32, 0, SOURCE))],
        ATTENTION, LEVEL, part="attend"),
    other("a window, Mistral", model("mistral-7b-v0.1")),
    other("sinks, gpt-oss", model("gpt-oss-20b")),
    other("a soft cap, heads of 256, Gemma 2", model("gemma-2-9b")),
    other("a window, heads of 256, Gemma 3", model("gemma-3-12b")),
    *(Row(f"32/4 heads of {size}: 64 x 4k", LayerSpec(num_heads=32, num_kv_heads=4, head_size=size),
          "64q1s4k", {"cuda": ("TRITON_ATTN", "TORCH_SDPA")}, LEVEL) for size in (320, 512, 576)),
    Row("cached keys turned as they are loaded", LLAMA.replace(
            sliding_window=2044, sink_tokens=4, rope=RopeSpec(rotary_size=128, positions="cache")),
        "64q1s4k", {"cuda": ("TRITON_ATTN",), "cpu": ("TORCH_SDPA",)}, part="attend"),
]  # fmt: skip
