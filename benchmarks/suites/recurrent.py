"""Recurrences: prompts and single tokens, beside the time in which their bytes are copied."""

from __future__ import annotations

from polyattn import LayerSpec
from polyattn.kernel import RecurrentSpec
from table import BEST, RECURRENT, Bar, Contender, Row, model

TOKEN: dict[str, tuple[Contender, ...]] = {
    "cuda": ("TRITON_TOKEN_SCAN",), "cpu": ("TORCH_SCAN",),
}  # fmt: skip
CHANNELS: dict[str, tuple[Contender, ...]] = {
    "cuda": ("TRITON_SCAN", "FLA_CHANNELS"), "cpu": tuple(RECURRENT["cpu"]),
}  # fmt: skip
SSM: dict[str, tuple[Contender, ...]] = {
    "cuda": ("TRITON_SCAN", "MAMBA_SSM"), "cpu": tuple(RECURRENT["cpu"]),
}  # fmt: skip


def layer(kind: str, heads: int, size: int, **form: object) -> LayerSpec:
    return LayerSpec(kind=kind, num_heads=heads, head_size=size, recurrent=RecurrentSpec(**form))


LAYERS = {
    "Mamba-2 (2.7B)": (model("mamba2-2.7b", "mamba2"), SSM),
    "gated delta rule (Qwen3-Next)": (model("qwen3-next-80b-a3b", "gdn"), RECURRENT),
    "linear (MiniMax)": (model("minimax-text-01", "linear"), RECURRENT),
    "short convolution (LFM2)": (model("lfm2-1.2b", "short_conv"), RECURRENT),
    "Mamba-1 (Jamba)": (model("jamba-v0.1", "mamba1"), RECURRENT),
    "Mamba-1 (130m)": (layer("mamba1", 1536, 1, state_size=16), RECURRENT),
    "KDA (Kimi Linear)": (layer("kda", 32, 128, state_size=128, qk_norm=True), CHANNELS),
    "RWKV-7 (2.9B)": (layer("rwkv7", 40, 64, state_size=64), CHANNELS),
    "RG-LRU (2B)": (layer("rg_lru", 2560, 1, state_size=1), TOKEN),
    "normalised linear": (
        layer("phi_linear", 16, 64, state_size=64, feature_map="elu+1"), TOKEN,
    ),
}  # fmt: skip
STEPS = {"8 x 4096": "8q4k", "1 x 8192 after 1000": "q8ks9192", "decode 128": "128q1s4k"}
ITS_OWN = ["fla.simple_gla", "fla.mamba_ssm"]

ROWS = [
    Row(f"{name}: {step}", spec, text, by, Bar(1.05, BEST),
        ["machine.copy", *(ITS_OWN if "Mamba-2" in name and step != "1 x 8192 after 1000" else ())])
    for name, (spec, by) in LAYERS.items()
    for step, text in STEPS.items()
]  # fmt: skip
