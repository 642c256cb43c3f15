"""Captured decodes of multi-head latent attention, four layers of one graph, on one GPU.

    python benchmarks/h200_latent_graphs.py [--out FILE.json] [--only FLASHMLA,...] [--seconds 90]

For each backend that claims it: graphs for 8, 32 and 64 rows, 200 replays over random lengths and tables:
bits beside the eager step as it is padded, allocations on the device in a replay, and the replay's device
time beside that of a graph of the stores' and backends' own calls (bars: none different, none, 1 %).

Without a GPU the sections say that they need one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from h200_serving import DEVICE, LAYERS, LONGEST, SIZES, Row, guarded, main, replayed
from polyattn import Batch, LatentAttention, LayerGroup, LayerSpec, select
from polyattn.kernel import StoreBackend
from polyattn.spec.layer import LatentSpec

BACKENDS = ("TRITON_MLA", "FLASHINFER_MLA", "FLASHMLA", "FLASH_ATTN_MLA")
SPEC = LayerSpec(
    kind="mla", num_heads=64, head_size=192, v_head_size=128, block_size=64,
    latent=LatentSpec(rank=512, rope_head_size=64), graph_capture="single_token_decode",
)  # fmt: skip


class Model:
    """Layers of one group that take absorbed queries, each with a cache full of numbers."""

    def __init__(self, backend: str):
        self.group = LayerGroup(select(SPEC, DEVICE, backend=f"decode={backend}"))
        self.layers = [LatentAttention(self.group, checks=False) for _ in range(LAYERS)]
        form = self.group.cache_format
        assert form is not None
        self.size = form.block_size
        blocks = max(SIZES) * -(-LONGEST // self.size) + 1
        self.caches = [self.group.allocate_cache(blocks) for _ in self.layers]
        for cache in self.caches:
            for page in cache.key:
                page.copy_(torch.randn(page.shape, device=DEVICE))
        self.order = torch.arange(1, blocks)

    def batch(self, rows: int) -> Batch:
        """Return rows of random lengths, their blocks in random order."""
        lens, width = torch.randint(1, LONGEST, (rows,)).tolist(), -(-LONGEST // self.size)
        at = torch.randperm(len(self.order))
        table = self.order[at][: rows * width].view(rows, width).to(torch.int32).to(DEVICE)
        batch = Batch.from_lens([1] * rows, lens, table, self.size)
        _ = batch.seq_lens, batch.query_start_loc  # on the device before a replay is looked at
        return batch

    def inputs(self, tokens: int) -> dict[str, torch.Tensor]:
        """Return random queries, latents and rope keys of one token each."""
        widths = {"query": (SPEC.num_heads, 576), "latent": (512,), "rope_key": (64,)}
        return {
            name: torch.randn(tokens, *shape, device=DEVICE).bfloat16()
            for name, shape in widths.items()
        }

    def step(self, plans: Any, query: Any, latent: Any, rope_key: Any) -> tuple[Any, ...]:
        """One step of all layers; each one's query is the same, so that no layer hides another's."""
        plan = plans[self.group]
        return tuple(
            layer(query, latent, rope_key, cache, plan)
            for layer, cache in zip(self.layers, self.caches, strict=True)
        )

    def own_calls(self, plan: Any, query: Any, latent: Any, rope_key: Any) -> None:
        """What the step comes down to: each layer's store and its backend's call."""
        (call,) = plan.calls
        store: Any = self.group.backend("store", StoreBackend, cache=self.group.cache_format)
        for layer, cache in zip(self.layers, self.caches, strict=True):
            out = query.new_empty(*query.shape[:2], 512)
            entry = torch.cat([latent, rope_key], dim=1)[:, None]
            store.run(plan.store, entry, entry[..., :512], cache, layer.params)
            call.backend.run(
                call.plan, query, None, None, call.view(cache), layer.params, out, None
            )


def section(backend: str, seconds: float) -> list[Row]:
    # FlashMLA's schedule is made once a capture: the replay's own plan has one.
    return [guarded(f"graph {backend}", lambda: replayed(Model(backend), planned=False))]


if __name__ == "__main__":
    main(__doc__, {backend: partial(section, backend) for backend in BACKENDS})
