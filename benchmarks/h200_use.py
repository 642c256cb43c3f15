"""Uses polyattn on this GPU as an engine would: verification, torch.compile, allocations, plans.

python benchmarks/h200_use.py
"""

from __future__ import annotations

import torch
from polyattn import Attention, Batch, LayerSpec, select
from polyattn.families.attention.workload import AttentionWorkload
from polyattn.tools.cli.benching import full_step, sampled_error


def verified() -> None:
    """`Attention(spec)` verifies what it chose, by default, on an accelerator."""
    layer = Attention(LayerSpec(num_heads=32, num_kv_heads=8, head_size=128))
    print("verified:", layer.group.selection)


def compiled() -> None:
    """One graph, the eager result."""
    selection = select(LayerSpec(num_heads=32, num_kv_heads=8, head_size=128), "cuda")
    step = full_step(selection, [(1, 2048)] * 8)
    step.call()

    def function(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return step.layer(query * 1.5, key, value, step.cache, step.plan) + 1

    eager = function(step.query, step.key, step.value)
    traced = torch.compile(function, fullgraph=True)(step.query, step.key, step.value)
    print("compiled, fullgraph: largest difference", (traced - eager).abs().max().item())


def allocations() -> None:
    """Device allocations of one planned call with `out=`."""
    for name in ("TRITON_ATTN", "FLASHINFER", "FLASH_ATTN_V3"):
        spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
        step = full_step(select(spec, "cuda", backend=name), [(1, 2048)] * 8)
        for _ in range(3):
            step.call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        step.call()
        after = torch.cuda.memory_stats()["allocation.all.allocated"]
        print(f"allocations in one decode call of {name}: {after - before}")


def large_queries() -> None:
    """Queries beyond float16's range over quantised caches: TRITON_ATTN multiplies in it."""
    for cached in ("fp8_e4m3", "fp8_e5m2", "int8"):
        spec = LayerSpec(
            num_heads=32, num_kv_heads=8, head_size=128, scale=128**-0.5 * 2.0**-20,
            kv_cache_dtype=cached,
        )  # fmt: skip
        step = full_step(select(spec, "cuda", backend="TRITON_ATTN"), [(1, 999)] * 4)
        step.query *= 2.0**20
        print(f"queries times 2^20 over {cached}: largest error {sampled_error(step):.4f}")


def replanned() -> None:
    """The host's time to plan a step of 64 decodes."""
    from timing import host_us

    for name in ("TRITON_ATTN", "FLASHINFER", "FLASH_ATTN_V3"):
        spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
        step = full_step(select(spec, "cuda", backend=name), [(1, 4096)] * 64)
        step.call()

        def plan(step: AttentionWorkload = step) -> None:
            batch = step.batch
            group = step.layer.group
            group.plan(Batch(batch.starts, batch.lens, batch.block_table, batch.slot_mapping))

        print(f"plan of 64 decodes on {name}: {host_us(plan, calls=50):.0f} us")


if __name__ == "__main__":
    verified()
    compiled()
    allocations()
    large_queries()
    replanned()
