"""TRITON_ATTN's rotation of cached keys beside the float64 reference; run with TRITON_INTERPRET=1.

Prints the ways that steps went, in order.
"""

from __future__ import annotations

from typing import Any

import torch
from polyattn import Attention, Batch, LayerGroup, LayerSpec, select
from polyattn.families.attention.reference import forward
from polyattn.spec.rope import RopeSpec

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, block_size=16, dtype="float32")
WINDOW = {"sliding_window": 32, "sink_tokens": 4}
YARN = {
    "scaling": "yarn", "factor": 4.0, "original_length": 64, "beta_fast": 32.0, "beta_slow": 1.0,
    "attention_factor": 1.1,
}  # fmt: skip
WARM = {"temperature": 0.1, "temperature_length": 8, "pairing": "gptj"}
CASES: tuple[tuple[list[int], list[int], dict[str, Any], dict[str, Any]], ...] = (
    ([1, 1], [40, 9], {}, {}),
    ([1, 1], [300, 30], {}, YARN),
    # After the window has left kept tokens, before, and in between, where a tile has both.
    ([1, 1, 1], [200, 9, 34], WINDOW, {}),
    ([1, 1, 1], [200, 9, 37], WINDOW | {"sink_tokens": 20}, {"pairing": "gptj", "rotary_size": 16}),
    ([3, 1, 2], [100, 9, 36], WINDOW, {"attention_factor": 1.3}),
    ([40, 20], [100, 20], WINDOW, {"rotary_size": 24}),
    ([60], [60], WINDOW, WARM),
    ([60, 40], [90, 50], {}, {}),
    ([1, 60], [50, 60], {"kv_cache_dtype": "int8"}, {}),
)


def main() -> None:
    ways = []
    for queries, lens, layer, turned in CASES:
        rope = RopeSpec(**({"rotary_size": 32, "base": 100.0, "positions": "cache"} | turned))
        spec = SPEC.replace(rope=rope, **layer)
        group = LayerGroup(select(spec, "cpu", backend="TRITON_ATTN"))
        scales = {"k_scale": 0.02, "v_scale": 0.02} if layer.get("kv_cache_dtype") else {}
        attention = Attention(group, rotate=True, **scales)
        columns = -(-max(lens) // 16)
        table = torch.randperm(columns * len(lens)).view(len(lens), columns).int()
        cache = group.allocate_cache(columns * len(lens))
        for stored in (cache.key, cache.value):
            stored.copy_((torch.randn(stored.shape) * (40 if scales else 1)).to(stored.dtype))
        batch = Batch.from_lens(queries, lens, table, 16)
        plan = group.plan(batch)
        q, k, v = (torch.randn(sum(queries), n, 32) for n in (4, 2, 2))
        found = attention(q, k, v, cache, plan)
        wanted, _ = forward(spec, q, None, None, cache, batch, attention.params)
        torch.testing.assert_close(found.double().view(wanted.shape), wanted, rtol=0, atol=2e-5)
        ways += [call.plan.way for call in plan.calls]
    print(" ".join(ways))


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
