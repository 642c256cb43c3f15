"""Serves a model's layers over a trace, step by step, as an inference engine would.

Selection, paged caches, state slots, batches, block tables and prefix sharing are real; only the
tensors are random, unless a whole model with weights is given. Everything here uses polyattn's public
API alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from polyattn import AttentionKind, Batch, LayerSpec, Role, SelectedLayers
from polyattn.errors import ConfigError
from polyattn.families.attention.sharing import why_not
from polyattn.runtime.step.cost import Cost, batch_cost
from polyattn.tools.replay.blocks import BlockAllocator
from polyattn.tools.replay.check import Checker
from polyattn.tools.replay.memory import block_table, pools_of, state_pool, step_batch, taken_copies
from polyattn.tools.replay.model.decoder import Decoder
from polyattn.tools.replay.model.runner import ModelRunner
from polyattn.tools.replay.model.step import GroupMemory
from polyattn.tools.replay.report import Report, StepRecord
from polyattn.tools.replay.runners import (
    AttentionRunner,
    LatentRunner,
    Options,
    RecurrentRunner,
    Runner,
    SparseRunner,
)
from polyattn.tools.replay.scheduler import Running, Scheduled, Scheduler
from polyattn.tools.replay.trace import Request
from polyattn.tools.replay.usage import Usage

DECODER_PROMPT = 4
"""Tokens that an encoder-decoder model's decoder starts with (Whisper's task tokens)."""


class Engine:
    """A model's groups over one set of requests, in order of arrival.

    With a `model` whose weights are loaded it is run whole; else each group's layers by themselves.
    Time is the steps' own: it passes while one runs, and leaps to the next arrival when none can.
    """

    def __init__(
        self,
        groups: Sequence[SelectedLayers],
        requests: Sequence[Request],
        options: Options,
        model: Decoder | None = None,
    ):
        self.options = options
        self.report = Report(requests=len(requests), whole_model=model is not None)
        self.checker = Checker(options.check_tokens, options.seed)
        self.now = 0.0
        self.last_token: dict[Running, float] = {}
        recurrent = [g for g in groups if g.spec.kind.is_recurrent]
        groups = [g for g in groups if not g.spec.kind.is_recurrent]
        by_role = {role: [g for g in groups if g.spec.role is role] for role in Role}
        self.pools = pools_of(by_role[Role.DECODER], options)
        self.decoders = [
            _cached(g, options, pool.allocator.num_blocks, model)
            for g, pool in zip(by_role[Role.DECODER], self.pools, strict=True)
        ]
        self.report.usage = [
            Usage(pool, _block_bytes(runner), why_not(runner.spec))
            for pool, runner in zip(self.pools, self.decoders, strict=True)
        ]
        self.recurrent: list[Runner] = [
            RecurrentRunner(g, options) if model is None else GroupMemory(g, options)
            for g in recurrent
        ]
        self.encoders = [
            AttentionRunner(g, options, 0)
            for g in (*by_role[Role.ENCODER], *by_role[Role.ENCODER_ONLY])
        ]
        sources = [r.prompt for r in requests]
        self.crosses = [_Cross(g, options, max(sources)) for g in by_role[Role.CROSS]]
        self.sources: dict[Running, int] = {}
        if self.crosses:
            requests = [replace(r, prompt=DECODER_PROMPT, hash_ids=()) for r in requests]
        states = [state_pool(self.pools, options)] if self.recurrent else []
        self.scheduler = Scheduler(
            requests, [*self.pools, *states], options.token_budget, options.max_seqs
        )
        for index, running in enumerate(self.scheduler.waiting):
            self.sources[running] = sources[index]
        self.model: ModelRunner | None = None
        if model is not None:
            memories = [r for r in (*self.decoders, *self.recurrent) if isinstance(r, GroupMemory)]
            self.model = ModelRunner(
                model, memories, self.scheduler.waiting, self.checker, options.seed
            )
        self.encoder_only = not self.decoders and not self.recurrent

    def run(self, progress: Callable[[int, int], None] | None = None) -> Report:
        """Serve all requests. `progress(done, total)` is called after each step."""
        total = len(self.sources)
        while True:
            plan = self.scheduler.step(self.now)
            if not plan:
                if not self.scheduler.waiting:
                    break
                arrival = self.scheduler.waiting[0].request.arrival
                assert arrival > self.now, "a request that has come is served when nothing else is"
                self.now = arrival
                continue
            self._step(plan)
            self._tell_times(plan)
            self.report.generated += self.scheduler.finish(plan)
            for cross in self.crosses:
                cross.release(item.sequence for item in plan if item.sequence.done)
            if progress:
                progress(total - len(self.scheduler.waiting) - len(self.scheduler.running), total)
        self.report.preemptions = self.scheduler.preemptions
        self.report.saved_bytes = sum(runner.saved_bytes for runner in self.decoders)
        if self.model is not None:
            self.report.prompts = self.model.prompts()
            self.report.outputs = self.model.outputs()
        self.report.max_error, self.report.checked = self.checker.worst, self.checker.checked
        return self.report

    def _tell_times(self, plan: list[Scheduled]) -> None:
        """Account for the tokens that the step brought: each came when it ended."""
        for sequence in (item.sequence for item in plan if item.generates):
            before = self.last_token.get(sequence)
            if before is None:
                self.report.first_token.append(self.now - sequence.request.arrival)
            else:
                self.report.between_tokens.append(self.now - before)
            self.last_token[sequence] = self.now

    def _step(self, plan: list[Scheduled]) -> None:
        counts = [item.count for item in plan]
        lens = [item.start + item.count for item in plan]
        seconds = self._encode(plan) + self._copy(plan)
        batches = self._batches(plan)
        cost = Cost(0, 0)
        for runner, batch in batches:
            cost += batch_cost(runner.spec, batch) * runner.count
            if self.model is None:
                seconds += runner.step(batch, self.checker)
        if self.model is not None:
            seconds += self.model.step(plan, [batch for _, batch in batches])
        for cross in self.crosses:
            batch = cross.batch([(i.sequence, i.count) for i in plan], self.sources)
            seconds += cross.runner.step(batch, self.checker)
            cost += batch_cost(cross.runner.spec, batch) * len(cross.runner.layers)
        if self.encoder_only:
            cost += sum(
                (
                    batch_cost(r.spec, Batch.from_lens(counts, lens)) * len(r.layers)
                    for r in self.encoders
                ),
                start=Cost(0, 0),
            )
        # All ranks have one clock, so that they schedule alike.
        if self.options.context is not None:
            seconds = self.options.context.longest(seconds)
        decode = all(item.count == 1 and item.start > 0 for item in plan)
        used = max((p.allocator.num_used / p.allocator.num_blocks for p in self.pools), default=0.0)
        for item in plan:
            if item.start == item.sequence.shared:
                self.report.shared_tokens += item.sequence.shared
        self.report.steps.append(StepRecord(decode, sum(counts), seconds, cost, used))
        self.now += seconds

    def _batches(self, plan: list[Scheduled]) -> list[tuple[Runner, Batch]]:
        """Return the step's batch for every group that has a cache or states."""
        counts = [item.count for item in plan]
        lens = [item.start + item.count for item in plan]
        batches = []
        for index, runner in enumerate(self.decoders):
            batch = step_batch(plan, index, self.pools[index], runner.spec, runner.device)
            batches.append((runner, batch))
            self.report.usage[index].count(plan, index)
        for runner in self.recurrent:
            slots = torch.tensor([item.sequence.held[-1].blocks[0] for item in plan])
            batch = Batch.from_lens(counts, lens, state_slots=slots.to(runner.device))
            batches.append((runner, batch))
        return batches

    def _copy(self, plan: list[Scheduled]) -> float:
        """Copy what sequences go on writing to while others use their beginning: blocks, states."""
        seconds = 0.0
        for index, copies in taken_copies(plan).items():
            if index < len(self.pools):
                self.report.usage[index].copied += len(copies)
                runners = self.decoders[index : index + 1]
            else:
                self.report.states_copied += len(copies)
                runners = self.recurrent
            for runner in runners:
                ends = (copies.values(), copies.keys())
                sources, targets = (torch.tensor([*e], device=runner.device) for e in ends)
                started = runner.clock()
                runner.copy_blocks(sources, targets)
                seconds += runner.clock() - started
        return seconds

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

    def __init__(self, layers: SelectedLayers, options: Options, longest: int):
        form = layers.selection.cache_format
        assert form is not None
        self.size, self.per_request = form.block_size, -(-longest // form.block_size)
        count = self.per_request * options.max_seqs
        self.allocator = BlockAllocator(count)
        self.runner = AttentionRunner(layers, options, count)
        self.blocks: dict[Running, list[int]] = {}

    def store(self, sequences: Sequence[Running], sources: dict[Running, int]) -> None:
        for sequence in sequences:
            if sequence not in self.blocks:
                self.blocks[sequence] = [self.allocator.allocate() for _ in range(self.per_request)]
        lens = [sources[s] for s in sequences]
        table = block_table([self.blocks[s] for s in sequences]).to(self.runner.device)
        slots = Batch.from_lens(lens, lens, table, self.size).slot_mapping
        assert slots is not None
        for layer, cache in zip(self.runner.layers, self.runner.caches, strict=True):
            assert cache is not None
            _, key, value = self.runner.inputs(sum(lens))
            layer.store(key, value, cache, slots)

    def batch(self, items: Sequence[tuple[Running, int]], sources: dict[Running, int]) -> Batch:
        table = block_table([self.blocks[s] for s, _ in items]).to(self.runner.device)
        starts = [0]
        for _, count in items:
            starts.append(starts[-1] + count)
        return Batch(starts, [sources[s] for s, _ in items], table)

    def release(self, sequences: Iterable[Running]) -> None:
        for sequence in sequences:
            for block in self.blocks.pop(sequence, []):
                self.allocator.release(block)


def _cached(
    layers: SelectedLayers, options: Options, num_blocks: int, model: Decoder | None
) -> Runner:
    """Return what runs a group of decoder layers, or in a whole model its memory."""
    if layers.num_caches(len(layers.layers)) < len(layers.layers) and (model or options.context):
        raise ConfigError(
            "layers that read another layer's keys (kv_source) are served without weights on one "
            "rank; leave out "
            "--weights and --context-parallel"
        )
    if model is not None:
        return GroupMemory(layers, options, num_blocks)
    if options.context is not None:
        return options.context.runner(layers, options, num_blocks)
    if layers.spec.kind is AttentionKind.SPARSE:
        return SparseRunner(layers, options, num_blocks)
    runner = LatentRunner if layers.spec.kind.is_latent else AttentionRunner
    return runner(layers, options, num_blocks)


def _block_bytes(runner: Runner) -> int:
    """Return the bytes of a block in all of a group's layers that run."""
    form = runner.group.cache_format
    assert form is not None
    return form.block_size * form.bytes_per_token * runner.num_caches


def fit_requests(
    requests: Sequence[Request], cfg: Any, specs: Sequence[LayerSpec], max_tokens: int | None
) -> tuple[list[Request], int]:
    """Clip requests to the model's length. Returns them and the number of clipped ones."""
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
        fitted.append(replace(request, prompt=prompt, output=output))
    return fitted, clipped
