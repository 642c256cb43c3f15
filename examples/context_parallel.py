"""A prompt and its decodes over the keys of several processes, by torchrun.

torchrun --nproc-per-node=2 examples/context_parallel.py
"""

from __future__ import annotations

import polyattn
import torch
import torch.distributed as dist
from polyattn_context_parallel import ContextAttention, ContextGroup, ContextParallel
from torch.distributed.device_mesh import init_device_mesh

kind = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if kind == "cuda" else "gloo")
if kind == "cuda":
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("context",))

dtype = "bfloat16" if kind == "cuda" else "float32"
spec = polyattn.LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, dtype=dtype, needs_lse=True)
group = polyattn.LayerGroup(spec)
shared = ContextGroup(group, ContextParallel(mesh["context"]), prefill="ring")
layer = ContextAttention(shared, polyattn.Attention(group))
cache = shared.allocate_cache(num_blocks=16)  # this process's part of each block
block_table = torch.arange(16, dtype=torch.int32, device=group.torch_device)[None]


def random(tokens: int, heads: int, seed: int) -> torch.Tensor:
    """The same numbers in every process, as a model's replicated layers would give."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, 128, generator=generator).to(cache.key)


batch = polyattn.Batch.from_lens([200], [200], block_table, shared.block_size)
mine = shared.tokens(batch)  # of the prompt every process computes its share
plan = shared.plan(batch, queries="own")
given = (random(200, 32, 1)[mine], random(200, 8, 2)[mine], random(200, 8, 3)[mine])
out, lse = layer(*given, cache, plan)
print(f"rank {dist.get_rank()}: {len(out)} of the prompt's 200 tokens")

for length in (201, 202, 203):  # of a decode every process has the query, and gets the output
    batch = polyattn.Batch.from_lens([1], [length], block_table, shared.block_size)
    given = (random(1, 32, length), random(1, 8, length), random(1, 8, -length))
    out, lse = layer(*given, cache, shared.plan(batch))
print(f"rank {dist.get_rank()}: after {length} tokens the LSE of head 0 is {lse[0, 0]:.4f}")
dist.destroy_process_group()
