"""Judges TRITON_INDEX on a GPU: its choices beside TORCH_INDEX's, its time beside the time of its bytes.

    python benchmarks/h200_index.py [--rows TEXT] [--set TILES=16 WARPS=8] [--out results/MACHINE.jsonl]

A row is a decode of 64 sequences of 131,072 tokens, or a prompt. `share` is a part of the bandwidth at
which a sum reads 1 GiB here; its bar is 0.8. `scores_us` is without the second kernel. `--set` changes
constants of the backend's module, to tune them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from unittest import mock

import polyattn_triton.index as module
import torch
from polyattn import Batch, Indexer, IndexerSpec, select
from polyattn.conformance.cases.index import layer_for
from polyattn.workload.clock import Clock

ROWS: dict[str, tuple[IndexerSpec, int, int, int]] = {
    "DSA decode, scaled e4m3": (
        IndexerSpec(num_heads=64, head_size=128, budget=2048, cache_dtype="fp8_scaled"), 64, 1, 1 << 17,
    ),
    "DSA decode, bf16": (IndexerSpec(num_heads=64, head_size=128, budget=2048), 64, 1, 1 << 17),
    "V4 decode, scaled e4m3": (
        IndexerSpec(
            num_heads=64, head_size=128, budget=512, tokens_per_entry=4, cache_dtype="fp8_scaled"
        ), 64, 1, 1 << 17,
    ),
    "MSA decode, bf16": (
        IndexerSpec(
            num_heads=4, head_size=128, budget=16, activation="none", fold="none", scale=1.0, pool=128,
            forced_last=1,
        ), 64, 1, 1 << 17,
    ),
    "QSA decode, bf16": (
        IndexerSpec(num_heads=4, head_size=128, budget=512, fold="sum", tokens_per_entry=4, tail=True),
        64, 1, 1 << 17,
    ),
    "DSA prompt, scaled e4m3": (
        IndexerSpec(num_heads=64, head_size=128, budget=2048, cache_dtype="fp8_scaled"), 1, 4096, 16384,
    ),
}  # fmt: skip
"""The indexer, sequences, new tokens and tokens of each."""
PAGE = 64


def measured(name: str, clock: Clock, peak: float) -> dict[str, Any]:
    """Return a row's times in microseconds, and how many of the ids differ from TORCH_INDEX's."""
    spec, seqs, new, length = ROWS[name]
    layer, device = layer_for(spec, "bfloat16"), clock.device
    indexer = Indexer(select(layer, device, backend="index=TRITON_INDEX"))
    entries = length // spec.tokens_per_entry
    pages = entries // PAGE
    table = torch.randperm(seqs * pages, device=device).int().view(seqs, pages)
    batch = Batch.from_lens([new] * seqs, [length] * seqs, device=device)
    batch.block_table = table
    keys = indexer.allocate_cache(seqs * pages, PAGE)
    for first in range(0, seqs * entries, 1 << 20):
        rows = torch.arange(first, min(first + (1 << 20), seqs * entries), device=device)
        drawn = torch.randn(len(rows), spec.head_size, device=device, dtype=torch.bfloat16)
        indexer.store(drawn, keys, rows)
    query = torch.randn(
        seqs * new, spec.num_heads, spec.head_size, device=device, dtype=torch.bfloat16
    )
    weights = None
    if spec.fold == "weighted":
        weights = torch.randn(seqs * new, spec.num_heads, device=device)
    found = indexer(query, keys, batch, weights)
    torch.cuda.reset_peak_memory_stats()
    us = clock.us(lambda: indexer(query, keys, batch, weights))
    with mock.patch.object(module, "_select", lambda *args: None):
        scores_us = clock.us(lambda: indexer(query, keys, batch, weights))
    few = min(seqs, 4)
    part, rows = batch.part(slice(0, few)), slice(0, few * new)
    plain = Indexer(select(layer, device, backend="index=TORCH_INDEX"))
    wanted = plain(query[rows], keys, part, None if weights is None else weights[rows])
    pairs = zip(found[rows].flatten(0, 1).tolist(), wanted.flatten(0, 1).tolist(), strict=True)
    differing = [len({*one} ^ {*other}) // 2 for one, other in pairs]
    of = int((wanted >= 0).sum())
    graph, changed = replayed(indexer, query, keys, batch, weights)
    read = seqs * entries * keys.shape[2] * keys.element_size()
    products = 2 * spec.num_heads * spec.head_size * sum(
        (length - new + at + 1) // spec.tokens_per_entry for at in range(new)
    ) * seqs  # fmt: skip
    return {
        "row": name, "us": us, "scores_us": scores_us, "bytes_us": read / peak, "share": read / peak / us,
        "tflops": products / us / 1e6, "graph_us": clock.us(graph.replay), "replays_differing": changed,
        "ids_differing": sum(differing) / max(of, 1), "ids": of,
    }  # fmt: skip


def replayed(
    indexer: Indexer, query: torch.Tensor, keys: torch.Tensor, batch: Batch, weights: Any
) -> tuple[Any, int]:
    """Return a captured graph, and how many of 20 replays with other queries differ from eager."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = indexer(query, keys, batch, weights)
    wrong = 0
    for _ in range(20):
        query.copy_(torch.randn_like(query))
        graph.replay()
        wrong += not torch.equal(ids, indexer(query, keys, batch, weights))
    return graph, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", default="")
    parser.add_argument("--set", nargs="*", default=[])
    given, device = parser.parse_args(), torch.device("cuda")
    out = given.out
    for name, value in (each.split("=") for each in given.set):
        setattr(module, name, int(value))
    clock = Clock(device)
    held = torch.ones(1 << 28, device=device)
    peak = held.numel() * 4 / clock.us(held.sum)
    print(f"{torch.cuda.get_device_name()}: reads {peak / 1e6:.2f} TB/s", flush=True)
    for name in (name for name in ROWS if given.rows in name):
        row = measured(name, clock, peak) | {"device": torch.cuda.get_device_name()}
        row |= {"set": given.set} if given.set else {}
        print(json.dumps(row), flush=True)
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
