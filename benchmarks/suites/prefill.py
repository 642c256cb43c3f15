"""Prompts, chunks after a context, encoders, other layers: many queries of each sequence."""

from __future__ import annotations

from polyattn import LayerSpec
from table import ATTENTION, BEST, LLAMA, PLAIN_CUDA, QWEN, Bar, K, Row, model

LEVEL = Bar(1.05, BEST)
BESIDE_CUDNN = ATTENTION | {
    "cuda": ("TRITON_ATTN", "FLASHINFER", "FLASH_ATTN_V3", "CUDNN_ATTENTION")
}
HOPPER = ["flashinfer.fa3", "flash_attn.varlen"]
VLLM = ["vllm.attention"]
LAYERS = {
    "32/8 of 64": LLAMA.replace(head_size=64),
    "32/8 of 128, window 1024": LLAMA.replace(sliding_window=1024),
    "16/4 of 256": LayerSpec(num_heads=16, num_kv_heads=4, head_size=256),
    "28/4 of 128": QWEN,
}
WIDE = {"cuda": ("TRITON_ATTN", "TORCH_SDPA")}
"""Of heads over 256, which no library serves."""
GIVEN = LLAMA.replace(cached=False, causal=False)

ROWS = [
    *(Row(f"1 x {n}", LLAMA, [(n, n)], BESIDE_CUDNN, LEVEL, HOPPER)
      for n in (2 * K, 4 * K, 8 * K, 16 * K)),
    Row("8 x 2k", LLAMA, "8q2k", BESIDE_CUDNN, LEVEL, HOPPER),
    Row("512 new after 8k", QWEN, [(512, 8 * K + 512)], ATTENTION, LEVEL, HOPPER),
    Row("4 x 512 new after 4k", QWEN, [(512, 4 * K + 512)] * 4, ATTENTION, LEVEL, HOPPER),
    Row("7k + 3 x 300", QWEN, "q7k_3q300", ATTENTION, LEVEL, HOPPER),
    Row("few tiles: 1 x 100", LLAMA, "q100", ATTENTION, LEVEL),
    Row("few tiles: 8 x 200", LLAMA, "8q200", ATTENTION, LEVEL),
    Row("few tiles: 16 x 60 after 500", LLAMA, "16q60s560", ATTENTION, LEVEL),
    Row("few tiles: 1 x 512 after 8k", LLAMA, "q512s8704", ATTENTION, LEVEL),
    *(Row(f"{name}: 4 x 4k", spec, "4q4k", PLAIN_CUDA, LEVEL) for name, spec in LAYERS.items()),
    *(Row(f"32/4 of {size}: 1 x 4k", LayerSpec(num_heads=32, num_kv_heads=4, head_size=size), "q4k",
          WIDE, LEVEL) for size in (320, 512, 576)),
    Row("gpt-oss: 1 x 4k", model("gpt-oss-20b"), "q4k", PLAIN_CUDA, LEVEL),
    Row("Gemma 2: 1 x 4k", model("gemma-2-9b"), "q4k", PLAIN_CUDA, LEVEL),
    Row("encoder, keys given whole: 8 x 1500", GIVEN, "8q1500",
        PLAIN_CUDA | {"cuda": ("TRITON_ATTN", "FLASH_ATTN_V3", "CUDNN_ATTENTION", "TORCH_SDPA")}, LEVEL),
    Row("64 ViT images of 577", LayerSpec(num_heads=16, head_size=64, cached=False, causal=False),
        [(577, 577)] * 64, {"cuda": ("TORCH_SDPA", "TRITON_ATTN", "FLASH_ATTN_V3", "CUDNN_ATTENTION")},
        Bar(1.15, BEST), ["pytorch.sdpa"], "new output"),
    Row("CPU: 1 x 2048, float32", LLAMA.replace(dtype="float32"), "q2k", {"cpu": ATTENTION["cpu"]},
        Bar(1.0), VLLM),
    Row("CPU: 4 x 512", LLAMA, "4q512", {"cpu": ATTENTION["cpu"]}, Bar(1.0), VLLM),
    Row("CPU: 512 new after 4096", LLAMA, "q512s4608", {"cpu": ATTENTION["cpu"]}, Bar(1.0), VLLM),
]  # fmt: skip
