"""Serves a model's attention layers over a trace, step by step, as an inference engine would.

There are no weights: queries, keys and values are random. All else is real: selection, paged caches,
batches, block tables, prefix sharing. Everything here uses polyattn's public API alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyattn import Attention, Batch, KVCache, LayerGroup, LayerSpec, Role
from polyattn.cache import STORAGE_DTYPES
from polyattn.cost import Cost, batch_cost
from polyattn.errors import CacheError, ConfigError
from polyattn.hf import Config
from polyattn.serving.blocks import BlockAllocator
from polyattn.serving.check import Checker
from polyattn.serving.report import Report, StepRecord
from polyattn.serving.scheduler import Pool, Running, Scheduled, Scheduler
from polyattn.serving.trace import Request

DECODER_PROMPT = 4
"""Tokens that an encoder-decoder model's decoder starts with (Whisper's task tokens)."""


@dataclass(frozen=True)
class Options:
    """How to serve. `layers` counts the layers of each group that really run."""

    layers: int = 1
    token_budget: int = 2048
    max_seqs: int = 64
    cache_bytes: int = 1 << 30
    check_tokens: int = 2
    seed: int = 0


class GroupRunner:
    """The layers of one group that run, and their caches."""

    def __init__(self, group: LayerGroup, options: Options, num_blocks: int):
        self.group, self.spec = group, group.spec
        self.generator = torch.Generator().manual_seed(options.seed)
        selection = group.selection
        self.device = torch.device(selection.device.torch_device or "cpu")
        quantized = self.spec.kv_cache_dtype != "auto"
        scale = 0.04 if self.spec.kv_cache_dtype == "int8" else 1.0
        count = min(options.layers, len(group.layers))
        self.layers = [
            Attention(
                selection,
                sinks=torch.randn(self.spec.num_heads, generator=self.generator)
                if self.spec.learned_sinks
                else None,
                k_scale=scale if quantized else 1.0,
                v_scale=scale if quantized else 1.0,
                checks=True,
            )
            for _ in range(count)
        ]
        self.caches: list[KVCache | None] = [None] * count
        if self.spec.role.has_cache:
            spec = selection.cache_spec(num_blocks)
            self.caches = [spec.allocate(self.device) for _ in range(count)]
        self._stock: dict[int, Tensor] = {}

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return random (query, key, value) for one layer and step.

        Drawn from a stock at a random place: fresh numbers for each layer would cost more than the
        attention that they are for.
        """
        spec = self.spec
        widths = (
            spec.num_heads * spec.head_size,
            spec.num_kv_heads * spec.head_size,
            spec.num_kv_heads * spec.v_head_size,
        )
        query, key, value = (self._draw(tokens, width) for width in widths)
        return (
            query.view(tokens, spec.num_heads, -1),
            key.view(tokens, spec.num_kv_heads, -1),
            value.view(tokens, spec.num_kv_heads, -1),
        )

    def _draw(self, tokens: int, width: int) -> Tensor:
        need = tokens * width
        stock = self._stock.get(width)
        if stock is None or len(stock) < 2 * need:
            stock = torch.randn(2 * max(need, 1 << 16), generator=self.generator)
            stock = stock.to(STORAGE_DTYPES[self.spec.dtype]).to(self.device)
            self._stock[width] = stock
        # Kernels load 16 bytes at a time, so the place is a multiple of 16 elements.
        at = int(torch.randint((len(stock) - need) // 16 + 1, (1,), generator=self.generator)) * 16
        return stock[at : at + need].view(tokens, width)

    def step(self, batch: Batch, checker: Checker, stores: bool = True) -> float:
        """Run every layer over `batch`; returns the seconds that the layers took."""
        seconds = 0.0
        for layer, cache in zip(self.layers, self.caches, strict=True):
            query, key, value = self.inputs(batch.num_tokens)
            given = (key, value) if stores else (None, None)
            started = self._clock()
            got = layer(query, *given, cache, batch)
            seconds += self._clock() - started
            out = got[0] if isinstance(got, tuple) else got
            checker.check(layer, query, given, cache, batch, out)
        return seconds

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class Engine:
    """A model's groups over one set of requests."""

    def __init__(self, groups: Sequence[LayerGroup], requests: Sequence[Request], options: Options):
        self.options, self.report = options, Report(requests=len(requests))
        self.checker = Checker(options.check_tokens, options.seed)
        by_role = {role: [g for g in groups if g.spec.role is role] for role in Role}
        self.pools: list[Pool] = []
        blocks = self._size_pools(by_role[Role.DECODER])
        self.decoders = [
            GroupRunner(g, options, n) for g, n in zip(by_role[Role.DECODER], blocks, strict=True)
        ]
        self.encoders = [
            GroupRunner(g, options, 0)
            for g in (*by_role[Role.ENCODER], *by_role[Role.ENCODER_ONLY])
        ]
        sources = [r.prompt for r in requests]
        self.crosses = [_Cross(g, options, max(sources)) for g in by_role[Role.CROSS]]
        self.sources: dict[Running, int] = {}
        if self.crosses:
            requests = [Request(DECODER_PROMPT, r.output) for r in requests]
        self.scheduler = Scheduler(requests, self.pools, options.token_budget, options.max_seqs)
        for index, running in enumerate(self.scheduler.waiting):
            self.sources[running] = sources[index]
        self.encoder_only = not self.decoders

    def _size_pools(self, groups: Sequence[LayerGroup]) -> list[int]:
        """Share the cache's bytes so that every group holds the same number of tokens."""
        per_token = sum(
            g.selection.cache_spec(1).bytes_per_token * min(self.options.layers, len(g.layers))
            for g in groups
        )
        counts = []
        for group in groups:
            size = group.selection.decision.block_size
            assert size is not None
            count = self.options.cache_bytes // per_token // size
            if count < 1:
                raise CacheError(
                    f"--cache-gb={self.options.cache_bytes / 2**30:g} holds not one block of {size} "
                    f"tokens at {per_token} bytes a token; raise it"
                )
            self.pools.append(Pool(size, BlockAllocator(count)))
            counts.append(count)
        return counts

    def run(self, progress: Callable[[int, int], None] | None = None) -> Report:
        """Serve all requests. `progress(done, total)` is called after each step."""
        total = len(self.sources)
        while plan := self.scheduler.step():
            self._step(plan)
            self.report.generated += self.scheduler.finish(plan)
            for cross in self.crosses:
                cross.release(item.sequence for item in plan if item.sequence.done)
            if progress:
                progress(total - len(self.scheduler.waiting) - len(self.scheduler.running), total)
        self.report.preemptions = self.scheduler.preemptions
        self.report.max_error, self.report.checked = self.checker.worst, self.checker.checked
        return self.report

    def _step(self, plan: list[Scheduled]) -> None:
        counts = [item.count for item in plan]
        lens = [item.start + item.count for item in plan]
        seconds = self._encode(plan)
        cost = Cost(0, 0)
        for index, runner in enumerate(self.decoders):
            pool = self.pools[index]
            table = _table([item.sequence.blocks[index] for item in plan], runner.device)
            batch = Batch.from_lens(counts, lens, table, pool.block_size)
            seconds += runner.step(batch, self.checker)
            cost += batch_cost(runner.spec, batch) * len(runner.layers)
        for cross in self.crosses:
            batch = cross.batch([(i.sequence, i.count) for i in plan], self.sources)
            seconds += cross.runner.step(batch, self.checker, stores=False)
            cost += batch_cost(cross.runner.spec, batch) * len(cross.runner.layers)
        if self.encoder_only:
            cost += sum(
                (batch_cost(r.spec, Batch.from_lens(counts, lens)) * len(r.layers)
                 for r in self.encoders),
                start=Cost(0, 0),
            )  # fmt: skip
        decode = all(item.count == 1 and item.start > 0 for item in plan)
        used = max((p.allocator.num_used / p.allocator.num_blocks for p in self.pools), default=0.0)
        for item in plan:
            if item.start == item.sequence.shared:
                self.report.shared_tokens += item.sequence.shared
        self.report.steps.append(StepRecord(decode, sum(counts), seconds, cost, used))

    def _encode(self, plan: list[Scheduled]) -> float:
        """Run the encoders over requests that start in this step, and fill the cross caches."""
        if not self.encoders:
            return 0.0
        fresh = [item.sequence for item in plan if item.start == 0]
        if not fresh:
            return 0.0
        seconds = 0.0
        lens = [self.sources[s] for s in fresh]
        for runner in self.encoders:
            seconds += runner.step(Batch.from_lens(lens, lens, device=runner.device), self.checker)
        for cross in self.crosses:
            cross.store(fresh, self.sources)
        return seconds


class _Cross:
    """A cross-attention group: its caches hold the encoder's keys and values of each request."""

    def __init__(self, group: LayerGroup, options: Options, longest: int):
        size = group.selection.decision.block_size
        assert size is not None
        self.size, self.per_request = size, -(-longest // size)
        count = self.per_request * options.max_seqs
        self.allocator = BlockAllocator(count)
        self.runner = GroupRunner(group, options, count)
        self.blocks: dict[Running, list[int]] = {}

    def store(self, sequences: Sequence[Running], sources: dict[Running, int]) -> None:
        for sequence in sequences:
            if sequence not in self.blocks:
                self.blocks[sequence] = [self.allocator.allocate() for _ in range(self.per_request)]
        lens = [sources[s] for s in sequences]
        table = _table([self.blocks[s] for s in sequences], self.runner.device)
        slots = Batch.from_lens(lens, lens, table, self.size).slot_mapping
        assert slots is not None
        for layer, cache in zip(self.runner.layers, self.runner.caches, strict=True):
            assert cache is not None
            _, key, value = self.runner.inputs(sum(lens))
            layer.write_kv(key, value, cache, slots)

    def batch(self, items: Sequence[tuple[Running, int]], sources: dict[Running, int]) -> Batch:
        table = _table([self.blocks[s] for s, _ in items], self.runner.device)
        starts = [0]
        for _, count in items:
            starts.append(starts[-1] + count)
        return Batch(starts, [sources[s] for s, _ in items], table)

    def release(self, sequences: Iterable[Running]) -> None:
        for sequence in sequences:
            for block in self.blocks.pop(sequence, []):
                self.allocator.release(block)


def _table(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    width = max((len(row) for row in rows), default=0)
    padded = [[*row, *([0] * (width - len(row)))] for row in rows]
    return torch.tensor(padded, dtype=torch.int32, device=device).view(len(rows), width)


def fit_requests(
    requests: Sequence[Request], cfg: Config, specs: Sequence[LayerSpec], max_tokens: int | None
) -> tuple[list[Request], int]:
    """Clip requests to what the model takes; returns them and how many were clipped."""
    if not specs:
        raise ConfigError(f"{cfg.source}: has no layer that can be served")
    roles = {spec.role for spec in specs}
    encoder_only = roles == {Role.ENCODER_ONLY}
    limit = cfg.get("max_source_positions", "max_position_embeddings", "max_target_positions")
    output_limit = cfg.get("max_target_positions")
    fitted, clipped = [], 0
    for request in requests:
        output = 1 if encoder_only else min(request.output, max_tokens or request.output)
        prompt = request.prompt
        if Role.CROSS in roles:
            prompt = min(prompt, limit or prompt)
            output = min(output, (output_limit or output + DECODER_PROMPT) - DECODER_PROMPT)
        elif limit is not None:
            prompt = max(1, min(prompt, limit - output))
        clipped += prompt < request.prompt
        fitted.append(Request(prompt, output, request.hash_ids, request.hash_block))
    return fitted, clipped
