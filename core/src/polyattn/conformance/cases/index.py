"""Which cases follow from what an indexer's backend claims? Pure data."""

from __future__ import annotations

from collections.abc import Iterator

from polyattn.conformance.case import Case
from polyattn.conformance.cases import invariance
from polyattn.device import Device
from polyattn.registry.capabilities import check
from polyattn.registry.info import BackendInfo
from polyattn.spec.kinds import DTYPES, AttentionKind, Invariance
from polyattn.spec.layer import LayerSpec
from polyattn.spec.sparse import IndexerSpec, SparseSpec

SIZES = {"num_heads": 4, "head_size": 32, "scale": 0.25}
"""A scale that is a power of two keeps whole numbers exact, so that they tie."""
INDEXERS = {
    "tokens": IndexerSpec(**SIZES, budget=6),  # type: ignore[arg-type]
    "entries": IndexerSpec(**SIZES, budget=5, tokens_per_entry=4),  # type: ignore[arg-type]
    "groups": IndexerSpec(**SIZES, budget=5, fold="sum", tokens_per_entry=4, tail=True),  # type: ignore[arg-type]
    "blocks": IndexerSpec(
        num_heads=3, head_size=32, scale=0.25, budget=4, activation="none", fold="none", pool=8,
        forced_first=1, forced_last=1,
    ),
    "one head": IndexerSpec(
        num_heads=1, head_size=32, scale=0.25, budget=40, fold="sum", activation="none"
    ),
    "many heads": IndexerSpec(num_heads=24, head_size=32, scale=0.25, budget=70),
    "part": IndexerSpec(num_heads=2, head_size=32, scale=0.25, budget=0.3, fold="sum", forced_last=2),
    "level 1": IndexerSpec(**SIZES, budget=2, pool=8, forced_last=1),  # type: ignore[arg-type]
    "odd pool": IndexerSpec(**SIZES, budget=3, pool=5),  # type: ignore[arg-type]
    "level 2": IndexerSpec(**SIZES, budget=6, within=8),  # type: ignore[arg-type]
    "one left": IndexerSpec(**SIZES, budget=6, within=1),  # type: ignore[arg-type]
    "8 bits": IndexerSpec(**SIZES, budget=6, cache_dtype="fp8_e4m3"),  # type: ignore[arg-type]
    "scaled": IndexerSpec(**SIZES, budget=6, cache_dtype="fp8_scaled"),  # type: ignore[arg-type]
    "size 128": IndexerSpec(num_heads=16, head_size=128, budget=64, scale=0.125),
}  # fmt: skip
"""DeepSeek-V3.2's, V4's, Qwen3.8's and MiniMax-M3's indexers, smaller, and what else a spec may say."""
NARROW = IndexerSpec(num_heads=32, head_size=128, budget=48, scale=0.125, cache_dtype="fp8_scaled")
"""GLM-5's, with fewer ids."""
BATCHES = ("mixed", "decode", "bounds", "edges")
"""Steps by name: `bounds` is planned by lengths that the device's don't reach."""


def layer_for(indexer: IndexerSpec, dtype: str) -> LayerSpec:
    """Return a layer that attends to what an indexer chooses."""
    most = indexer.budget if isinstance(indexer.budget, int) else 1 << 16
    return LayerSpec(
        kind=AttentionKind.SPARSE,
        num_heads=indexer.choices,
        head_size=64,
        dtype=dtype,
        indexer=indexer,
        sparse=SparseSpec(
            budget=most + indexer.tail,
            granularity=indexer.pool * indexer.tokens_per_entry,
            scope="kv_head" if indexer.choices > 1 else "all",
        ),
    )


def derive(info: BackendInfo, device: Device) -> list[Case]:
    """Return the cases of an indexer's claims."""
    return [c for c in _cases(info) if not check(info.capabilities, c.spec, device, "index")]


def _cases(info: BackendInfo) -> Iterator[Case]:
    dtypes = [dtype for dtype in DTYPES if dtype in info.capabilities.dtypes]
    first = "float32" if "float32" in dtypes else dtypes[0]
    for what in ("index", "index_ranked"):
        yield Case(what, "heads of 128", layer_for(NARROW, first), "narrow")
    for name, indexer in INDEXERS.items():
        spec = layer_for(indexer, first)
        for batch in BATCHES if name in ("tokens", "groups", "blocks") else BATCHES[:1]:
            yield Case("index", name, spec, batch)
        yield Case("index_ranked", name, spec, "mixed")
        level = invariance.level_of(info.capabilities)
        for each in sorted({Invariance.BATCH, level}) if level else ():
            label = name if each == Invariance.BATCH else f"{name} {each.name.lower()}"
            yield Case("index_regrouped", label, spec.replace(batch_invariant=each), "mixed")
        for dtype in dtypes:
            if name in ("tokens", "size 128") and dtype != spec.dtype:
                yield Case("index", f"{name} {dtype}", layer_for(indexer, dtype), "mixed")
