"""Drives an adapter by hand: plans alive side by side, run in any order, beside the reference."""

from __future__ import annotations

import random
import sys
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from polyattn import Batch, LayerSpec
from polyattn.families.attention import reference
from polyattn.kernel import (
    AttentionBackend,
    CacheFormat,
    Device,
    Frame,
    KVCache,
    LayerParams,
    alibi_slopes,
)
from polyattn.runtime.store import TorchStore
from polyattn.spec.decompose import over_context
from polyattn.workload.compare import lse_error, output_error
from torch import Tensor

FAKES = Path(__file__).parent / "fake_libraries"
LIBRARIES = (
    "flash_attn", "flash_attn_interface", "flashinfer", "xformers", "aiter", "torch_npu",
    "vllm_xpu_kernels", "nkilib",
)  # fmt: skip


def use_fakes(monkeypatch: pytest.MonkeyPatch, empty_row: float) -> None:
    """Let imports of the libraries find the fakes, for one test."""
    monkeypatch.syspath_prepend(FAKES)
    import polyattn_fakes

    monkeypatch.setattr(polyattn_fakes, "EMPTY_ROW", empty_row)
    for name in list(sys.modules):
        if name.split(".")[0] in LIBRARIES:
            monkeypatch.delitem(sys.modules, name)


class Step:
    """One step's batch, tensors and what they should give."""

    def __init__(
        self, spec: LayerSpec, cache: KVCache | None, batch: Batch, params: LayerParams, seed: int
    ):
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, spec.dtype)

        def drawn(count: int, heads: int, size: int) -> Tensor:
            return torch.randn(count, heads, size, generator=generator).to(dtype)

        self.spec, self.cache, self.batch, self.params = spec, cache, batch, params
        self.query = drawn(batch.num_tokens, spec.num_heads, spec.head_size)
        count = batch.num_tokens
        if cache is None:
            ends = [a + b for a, b in zip(batch.key_starts, batch.lens, strict=True)]
            count = max(ends, default=0) + 3
        self.key = drawn(count, spec.num_kv_heads, spec.head_size)
        self.value = drawn(count, spec.num_kv_heads, spec.v_head_size)
        if cache is not None and batch.slot_mapping is not None:
            store = TorchStore(spec, cache.format, Device("cpu", "x86_64"))
            store.run(store.plan(batch.slot_mapping), self.key, self.value, cache, params)
        if cache is None:  # what lies between the sequences' keys is nobody's
            used = torch.zeros(count, dtype=torch.bool)
            for start, length in zip(batch.key_starts, batch.lens, strict=True):
                used[start : start + length] = True
            self.key[~used], self.value[~used] = torch.nan, torch.nan

    def over_context(self) -> Step:
        """The same tensors, as a call over keys that all lie before the queries."""
        found = copy(self)
        found.batch, found.spec = self.batch.over_context(), over_context(self.spec)
        return found

    def run(self, backend: AttentionBackend, plan: Any, given: bool) -> tuple[float, float]:
        """Run with the new keys given or in the cache alone; returns the errors."""
        spec, batch = self.spec, self.batch
        shape = (batch.num_tokens, spec.num_heads, spec.v_head_size)
        out = torch.full(shape, torch.nan, dtype=self.query.dtype)
        lse = torch.full(shape[:2], torch.nan) if spec.needs_lse else None
        keys = (self.key, self.value) if given or self.cache is None else (None, None)
        backend.run(plan, Frame(self.query, *keys, self.cache, self.params, out, lse))
        expected, expected_lse = reference.forward(
            spec, self.query, self.key, self.value, self.cache, batch, self.params
        )
        return output_error(out, expected), 0.0 if lse is None else lse_error(lse, expected_lse)


def with_context(spec: LayerSpec, steps: list[tuple[str, Step]]) -> list[tuple[str, Step]]:
    """Add each step as a part over context, which the same object of a causal layer serves."""
    far = spec.sliding_window or spec.alibi or spec.chunk_size
    if not (spec.causal and spec.needs_lse) or far:
        return steps
    return steps + [(f"{kind} as context", step.over_context()) for kind, step in steps]


def paged_batch(form: CacheFormat, queries: list[int], lens: list[int], blocks: list[int]) -> Batch:
    """A batch whose blocks are taken from the end of `blocks`."""
    width = max(1, max(-(-n // form.block_size) for n in lens))
    rows = [
        [blocks.pop() for _ in range(-(-n // form.block_size))] + [0] * (width - -(-n // form.block_size))
        for n in lens
    ]  # fmt: skip
    table = torch.tensor(rows, dtype=torch.int32)
    return Batch.from_lens(queries, lens, table, form.block_size)


PAGED = {
    "decodes": ([1, 1, 1], [17, 300, 1]),
    "padding": ([1, 1, 1], [17, 0, 5]),
    "short rows": ([3, 1, 2, 3], [40, 9, 2, 3]),
    "as many tokens": ([4, 4], [4, 270]),
    "prompts": ([20, 1, 33], [20, 1, 33]),
    "chunks": ([18, 0, 40], [300, 5, 41]),
    "mixed": ([1, 25, 1], [30, 60, 0]),
}
GIVEN = {
    "packed": ([5, 1, 19], [5, 1, 19], None),
    "own lengths": ([5, 0, 19, 1], [9, 4, 30, 0], None),
    "gaps": ([7, 2], [12, 30], [40, 2]),
    "more queries than keys": ([20, 6], [3, 6], None),
    "single tokens": ([1, 1, 0], [8, 3, 2], None),
}


def params_of(spec: LayerSpec) -> LayerParams:
    """Return a layer's slopes and sinks, where its spec has them."""
    slopes = alibi_slopes(spec.num_heads) if spec.alibi else None
    sinks = torch.linspace(-4, 4, spec.num_heads).bfloat16().float() if spec.learned_sinks else None
    return LayerParams(alibi_slopes=slopes, sinks=sinks)


def check_paged(
    backend_class: type[AttentionBackend], spec: LayerSpec, block_size: int, tight: float,
    *, kinds: tuple[str, ...] = tuple(PAGED), lse_tight: float = 1e-3, given: bool = True,
) -> None:  # fmt: skip
    """Run steps over one cache: all planned first, then run in another order, twice."""
    device = Device("cuda", "sm_90", torch_device="cpu")
    form = CacheFormat(
        block_size=block_size, num_kv_heads=spec.num_kv_heads, head_size=spec.head_size,
        v_head_size=spec.v_head_size, dtype=spec.stored_dtype,
    )  # fmt: skip
    backend = backend_class(spec, form, device)
    needed = [-(-n // block_size) for kind in kinds for n in PAGED[kind][1]]
    cache = KVCache.allocate(form, sum(needed) + 1)
    cache.key.fill_(torch.nan), cache.value.fill_(torch.nan)
    blocks = list(range(1, sum(needed) + 1))
    random.Random(0).shuffle(blocks)
    params = params_of(spec)
    if spec.stored_dtype != spec.dtype:
        params.k_scale, params.v_scale = 0.5, 0.25
    steps = []
    for seed, kind in enumerate(kinds):
        queries, lens = PAGED[kind]
        whole = paged_batch(form, lens, lens, blocks)
        Step(spec, cache, whole, params, seed)  # stores the context too
        batch = Batch.from_lens(queries, lens, whole.block_table, block_size)
        steps.append((kind, Step(spec, cache, batch, params, 100 + seed)))
    steps = with_context(spec, steps)
    plans = {kind: backend.plan(step.batch) for kind, step in steps}
    order = steps[::-1] + steps
    for at, (kind, step) in enumerate(order):
        error, wrong = step.run(backend, plans[kind], given and at % 2 == 0)
        assert error < tight and wrong < lse_tight, (kind, error, wrong)


def check_given(
    backend_class: type[AttentionBackend], spec: LayerSpec, tight: float,
    *, lse_tight: float = 1e-3,
) -> None:  # fmt: skip
    """Run steps of a layer that keeps no cache, likewise."""
    spec = spec.replace(cached=False)
    backend = backend_class(spec, None, Device("cuda", "sm_90", torch_device="cpu"))
    params = params_of(spec)
    steps = []
    for seed, (kind, (queries, lens, starts)) in enumerate(GIVEN.items()):
        batch = Batch.from_lens(queries, lens, key_starts=starts)
        steps.append((kind, Step(spec, None, batch, params, seed)))
    steps = with_context(spec, steps)
    plans = {kind: backend.plan(step.batch) for kind, step in steps}
    for kind, step in steps[::-1] + steps:
        error, wrong = step.run(backend, plans[kind], True)
        assert error < tight and wrong < lse_tight, (kind, error, wrong)
