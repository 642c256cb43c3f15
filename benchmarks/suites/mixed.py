"""Decodes and prefill in one step: one call for all rows, or two."""

from __future__ import annotations

from table import ATTENTION, BEST, LLAMA, MHA, QWEN, SHARD, Bar, Contender, Other, Row

BY: dict[str, tuple[Contender, ...]] = {
    "cuda": (
        "decode=TRITON_ATTN,prefill=FLASH_ATTN_V3", "TRITON_ATTN", "FLASHINFER", "FLASH_ATTN_V3",
    ),
    "cpu": tuple(ATTENTION["cpu"]),
}  # fmt: skip
WHOLE = ["flashinfer.holistic", "flashinfer.fa2", "flashinfer.fa3", "flash_attn.varlen"]
STEPS = {
    "40 x 2k + 2 x 1k": "40q1s2k_2q1k",
    "80 x 1k + 1,500": "80q1s1k_q1500",
    "10 x 8k + 512 after 8k": "10q1s8k_q512s8704",
    "1 x 64k + 31 x 1k + 1k": "q1s64k_31q1s1k_q1k",
}

ROWS = [
    *(Row(f"{heads}: {name}", spec, text, BY, Bar(1.1, BEST), WHOLE, part="attend")
      for heads, spec in (("28/4", QWEN), ("16/2", SHARD), ("16/16", MHA))
      for name, text in STEPS.items()),
    Row("32/8, as chosen: 32 x 2k + 2 x 1k", LLAMA, "32q1s2k_2q1k",
        {"cuda": (Other("as chosen", ""), *BY["cuda"]), "cpu": (Other("as chosen", ""), *BY["cpu"])},
        Bar(1.1, BEST)),
]  # fmt: skip
