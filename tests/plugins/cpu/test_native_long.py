"""Long prompts on NATIVE_ATTN: blocks of rows over all keys, of which the last may be small."""

from __future__ import annotations

import pytest
from polyattn import LayerSpec
from polyattn.families.attention import reference
from polyattn.kernel import Batch, KVCache
from test_native import Step, isa, needs_library  # noqa: F401

# Heads of one KV head, tokens: whose last block of rows was small, on which instruction set.
PROMPTS = {
    "avx2": (16, 1105, "float32"), "generic, neon": (8, 2257, "float32"), "avx512": (16, 4097, "float32"),
    "avx512_bf16": (8, 16_385, "bfloat16"),
}  # fmt: skip


@needs_library
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_long_prompt_s_last_tokens_see_all_keys(prompt: str, isa: str) -> None:  # noqa: F811
    heads, tokens, dtype = PROMPTS[prompt]
    if tokens > 8192 and isa not in ("avx512_bf16", "amx"):
        pytest.skip("minutes by this instruction set")
    spec = LayerSpec(num_heads=heads, num_kv_heads=1, head_size=16, dtype=dtype)
    step = Step(spec, [tokens], [tokens])
    out, _ = step.run()
    last = 20  # the last block's, and some of the one before
    batch = Batch.from_lens(
        [last], [tokens], step.table.clamp(max=len(step.key) - 1), step.block_size
    )
    wanted, _ = reference.forward(
        spec, step.query[-last:], None, None, KVCache(step.key, step.value), batch, step.params
    )
    off = (out[-last:].double() - wanted).abs().max() / wanted.abs().max()
    assert off <= (1.5e-2 if dtype == "bfloat16" else 1e-5)
