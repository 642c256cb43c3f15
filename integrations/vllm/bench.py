"""vLLM's CPU attention against polyattn's, over equal caches: CPU time of a layer's call, one thread.

    python integrations/vllm/bench.py

Both store the step's keys and values and attend, planned before; they take turns in one process, so that
a busy machine slows both. The ratio is vLLM's median over ours.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from polyattn import Attention, Batch, KVCache, LayerGroup, LayerSpec, select, settings
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 64, 128
STEPS = {
    "decode 8 x 1,024": ([1] * 8, [1024] * 8, 30),
    "decode 32 x 512": ([1] * 32, [512] * 32, 20),
    "prefill 1 x 1,024": ([1024], [1024], 5),
    "prefill 8 x 256": ([256] * 8, [256] * 8, 5),
    "mixed 7 x 1,024, 256": ([1] * 7 + [256], [1024] * 7 + [256], 8),
}


def tables(lens: list[int]) -> tuple[torch.Tensor, int]:
    width = -(-max(lens) // BLOCK)
    blocks = len(lens) * width
    return torch.randperm(blocks).view(len(lens), width).int(), blocks


def calls(
    queries: list[int], lens: list[int], dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    table, blocks = tables(lens)
    batch = Batch.from_lens(queries, lens, table, BLOCK)
    tokens = batch.num_tokens
    query = torch.randn(tokens, HEADS, SIZE).to(dtype)
    key, value = (torch.randn(tokens, KV_HEADS, SIZE).to(dtype) for _ in range(2))
    storage = torch.randn(blocks, KV_HEADS, BLOCK, 2 * SIZE).to(dtype)

    isa = _get_attn_isa(dtype, BLOCK, SIZE)
    theirs = storage.clone().view(blocks, KV_HEADS, 2 * BLOCK, SIZE).chunk(2, dim=2)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(lens), num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=SIZE,
        seq_lens=batch.seq_lens, dtype=dtype, query_start_loc=batch.query_start_loc, causal=True,
        sliding_window_size=-1, isa=isa, enable_kv_split=True, dynamic_causal=None,
        kv_cache_dtype="auto",
    )  # fmt: skip
    out = torch.empty_like(query)

    def own() -> object:
        ops.cpu_attn_reshape_and_cache(
            key, value, *theirs, batch.slot_mapping, isa, k_scale=1.0, v_scale=1.0,
            kv_cache_dtype="auto",
        )  # fmt: skip
        return ops.cpu_attention_with_kv_cache(
            query=query, key_cache=theirs[0], value_cache=theirs[1], output=out,
            query_start_loc=batch.query_start_loc, seq_lens=batch.seq_lens, scale=SIZE**-0.5,
            causal=True, alibi_slopes=None, sliding_window=-1, block_table=table, softcap=0,
            scheduler_metadata=plan, s_aux=None, dynamic_causal=None, k_scale=1.0, v_scale=1.0,
            kv_cache_dtype="auto",
        )  # fmt: skip

    ours = storage.transpose(1, 2)
    cache = KVCache(ours[..., :SIZE], ours[..., SIZE:])
    spec = LayerSpec(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, block_size=BLOCK,
        dtype=str(dtype).removeprefix("torch."),
    )  # fmt: skip
    heads_first = replace(settings.current_settings(), layout="HND")
    layer = Attention(LayerGroup(select(spec, "cpu", backend="NATIVE_ATTN", settings=heads_first)))
    step = layer.plan(batch)
    return {"vLLM": own, "polyattn": lambda: layer(query, key, value, cache, step, out=out)}


def main() -> None:
    current_platform.import_kernels()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| step | dtype | vLLM, ms | polyattn, ms | ratio |\n| --- | --- | --- | --- | --- |")
    for dtype in (torch.bfloat16, torch.float32):
        for name, (queries, lens, repeats) in STEPS.items():
            contenders = calls(queries, lens, dtype)
            seconds: dict[str, list[float]] = {who: [] for who in contenders}
            for turn in range(repeats + 1):
                for who, call in contenders.items():
                    start = time.process_time()
                    call()
                    if turn:  # the first warms caches
                        seconds[who].append(time.process_time() - start)
            own, ours = (1e3 * statistics.median(seconds[who]) for who in ("vLLM", "polyattn"))
            kind = str(dtype).removeprefix("torch.")
            print(f"| {name} | {kind} | {own:.2f} | {ours:.2f} | {own / ours:.2f} |", flush=True)


if __name__ == "__main__":
    main()
