"""vLLM's CPU attention against polyattn's, over equal caches: CPU time of a layer's call, one thread.

    python integrations/vllm/bench.py
    python integrations/vllm/bench.py --steps    # of one sequence: the builder's plan and all layers

Both store the step's keys and values and attend, planned before; they take turns in one process, so that
a busy machine slows both. The ratio is vLLM's median over ours.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from polyattn import Attention, Batch, KVCache, LayerGroup, LayerSpec, select, settings
from polyattn_vllm.attention import PolyattnImpl
from polyattn_vllm.layouts import LAYOUTS
from polyattn_vllm.step import Builder
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import cpu_attn

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

    isa = cpu_attn._get_attn_isa(dtype, BLOCK, SIZE)
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


def side(own: bool, layers: int, sizes: tuple[int, int, int], dtype: torch.dtype) -> Any:
    """Return a builder of metadata and its layers, which have (heads, KV heads, size)."""
    heads, kv_heads, size = sizes
    known: dict[str, Any] = {}
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=dtype, max_model_len=4096, is_mm_prefix_lm=False, rswa_window=None,
            get_num_attention_heads=lambda parallel: heads,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        compilation_config=SimpleNamespace(static_forward_context=known, cudagraph_mode=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: LAYOUTS["HND"], cache_dtype="auto"
        ),
        device_config=SimpleNamespace(device=torch.device("cpu")),
        attention_config=SimpleNamespace(use_non_causal=False),
        diffusion_config=None, speculative_config=None,
    )  # fmt: skip
    cpu_attn.get_current_vllm_config = lambda: config
    kind = cpu_attn.CPUAttentionBackendImpl if own else PolyattnImpl
    for number in range(layers):
        impl = kind(heads, size, size**-0.5, kv_heads, None, None, "auto")
        isa = cpu_attn._get_attn_isa(dtype, BLOCK, size, "auto")
        known[f"{number}"] = SimpleNamespace(
            impl=impl, isa=isa, head_size_v=size, _k_scale=torch.ones(1), _v_scale=torch.ones(1),
            _k_scale_float=1.0, _v_scale_float=1.0,
        )  # fmt: skip
    spec: Any = SimpleNamespace(
        block_size=BLOCK, num_kv_heads=kv_heads, head_size=size, non_causal=False
    )
    build: Any = cpu_attn.CPUAttentionMetadataBuilder if own else Builder
    return build(spec, [*known], config, torch.device("cpu")), list(known.values())


def step_times(
    layers: int, sizes: tuple[int, int, int], dtype: torch.dtype, length: int, repeats: int = 60
) -> dict[str, tuple[float, float]]:
    """Return for each side the medians of building and of a whole step, in seconds."""
    heads, kv_heads, size = sizes
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([length]).int()
    table, blocks = tables([length])
    slot = int(table[0, (length - 1) // BLOCK]) * BLOCK + (length - 1) % BLOCK
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens, num_reqs=1,
        num_actual_tokens=1, max_query_len=1, max_seq_len=length, causal=True,
        block_table_tensor=table, slot_mapping=torch.tensor([slot]), seq_lens_cpu_upper_bound=lens,
    )  # fmt: skip
    query, key, value = (torch.randn(1, n, size).to(dtype) for n in (heads, kv_heads, kv_heads))
    out = torch.empty_like(query)
    sides = {who: side(who == "vLLM", layers, sizes, dtype) for who in ("vLLM", "polyattn")}
    caches = {
        who: torch.randn(layers, blocks, kv_heads, BLOCK, 2 * size).to(dtype).unbind()
        for who in sides
    }
    took: dict[str, list[tuple[float, float]]] = {who: [] for who in sides}
    for turn in range(repeats + 3):
        for who, (builder, known) in sides.items():
            begun = time.process_time()
            metadata = builder.build(0, common)
            built = time.process_time()
            for layer, cache in zip(known, caches[who], strict=True):
                layer.impl.do_kv_cache_update(layer, key, value, cache, common.slot_mapping)
                layer.impl.forward(layer, query, key, value, cache, metadata, out)
            if turn >= 3:
                took[who].append((built - begun, time.process_time() - begun))
    return {
        who: (statistics.median(a for a, _ in each), statistics.median(b for _, b in each))
        for who, each in took.items()
    }


def steps() -> None:
    print("| layers | dtype | keys | vLLM, us | polyattn, us | ratio | builders alone |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for dtype in (torch.bfloat16, torch.float32):
        for layers, sizes in ((30, (9, 3, 64)), (16, (32, 8, 128))):
            for length in (16, 128, 1024):
                found = step_times(layers, sizes, dtype, length)
                (plan, own), (our_plan, ours) = found["vLLM"], found["polyattn"]
                what = f"{layers}, {sizes[0]}/{sizes[1]} heads of {sizes[2]} | {str(dtype)[6:]}"
                print(
                    f"| {what} | {length:,} | {1e6 * own:.0f} | {1e6 * ours:.0f} | {own / ours:.2f} | "
                    f"{plan / our_plan:.2f} |",
                    flush=True,
                )


def main() -> None:
    current_platform.import_kernels()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if "--steps" in sys.argv:
        steps()
        return
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
