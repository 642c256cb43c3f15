"""Runs one case of an MLA or a recurrent backend: fresh inputs, poisoned states and cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyattn.checking.compare import lse_error, output_error
from polyattn.checking.tolerance import tolerance_of
from polyattn.conformance.cases import batches
from polyattn.conformance.harness import Harness, batch_with_padding, poison, without_new
from polyattn.families import inputs as samples
from polyattn.families.mla import reference as reference_latent
from polyattn.families.mla.layer import LatentAttention
from polyattn.families.recurrent import reference as reference_recurrent
from polyattn.families.recurrent.layer import Recurrent
from polyattn.runtime.batch import Batch
from polyattn.runtime.kv_cache import STORAGE_DTYPES, KVCache
from polyattn.runtime.state_cache import StateCache
from polyattn.spec.layer import LayerSpec

RECURRENT_BATCHES = {
    "mixed": [
        (1, 9),
        (1, 1),
        (1, 0),
        (1, 300),
        (0, 7),
        (5, 5),
        (70, 70),
        (129, 140),
        (3, 80),
        (1, 2),
    ],
    "fresh": [(1, 1), (2, 2), (64, 64), (65, 65), (200, 200), (31, 31)],
    "continued": [(2, 3), (16, 40), (64, 100), (66, 166), (3, 4)],
    "tokens": [(1, 5), (1, 1), (1, 17), (1, 4096)],
    "padded": [(1, 5), (1, 0), (1, 1), (1, 0)],
    "empty": [(0, 0), (0, 7)],
}
"""(query length, sequence length) pairs: longer sequences continue, equal ones start fresh."""


@dataclass
class LatentStep:
    """All that one step of one MLA layer takes."""

    batch: Batch
    query: Tensor
    latent: Tensor
    rope: Tensor
    cache: KVCache
    topk: Tensor | None


@dataclass
class RecurrentStep:
    """All that one step of one recurrent layer takes."""

    batch: Batch
    inputs: list[Tensor]
    states: StateCache
    used: list[int]


class FamilyHarness:
    """Builds and runs MLA and recurrent layers of one backend on one device."""

    def __init__(self, base: Harness):
        self.base, self.device, self.generator = base, base.torch_device, base.generator

    def random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self.base.random(*shape, dtype=dtype)

    # MLA

    def latent_layer(self, spec: LayerSpec) -> LatentAttention:
        """Return an MLA layer with random weights."""
        weights = samples.latent_weights(spec, self.generator)
        scale = {"auto": 1.0, "int8": 0.04}.get(spec.kv_cache_dtype, 0.5)
        return LatentAttention(self.base.select(spec), *weights, k_scale=scale, checks=True)

    def latent_step(
        self, layer: LatentAttention, lengths: Sequence[tuple[int, int]] | str
    ) -> LatentStep:
        """Return a step whose context is in the cache and whose unused cache is NaN."""
        spec = layer.selection.spec
        assert spec.latent is not None
        block = layer.selection.decision.block_size
        assert block is not None
        if isinstance(lengths, str):
            lengths = batches(lengths, block)
        queries, lens = [q for q, _ in lengths], [n for _, n in lengths]
        dtype, tokens, size = STORAGE_DTYPES[spec.dtype], sum(queries), spec.latent.size
        table, num_blocks = self.base.block_table(lens, block)
        cache = layer.selection.cache_spec(num_blocks).allocate(self.device)
        poison(cache)
        whole = Batch.from_lens(lens, lens, table, block)
        rows = self.random(sum(lens), 1, size, dtype=dtype)
        scale = layer.params.k_scale
        slots = without_new(whole, queries, cross=False)
        cache.write(rows, rows[..., : spec.latent.rank], slots, scale, scale)
        topk = None
        if spec.latent.topk:
            chosen = samples.chosen_positions(lens, queries, spec.latent.topk, self.generator)
            topk = chosen.to(self.device)
        return LatentStep(
            batch_with_padding(queries, lens, table, block),
            self.random(tokens, spec.num_heads, spec.head_size, dtype=dtype),
            self.random(tokens, spec.latent.rank, dtype=dtype),
            self.random(tokens, spec.latent.rope_head_size, dtype=dtype),
            cache,
            topk,
        )

    def latent_run(self, layer: LatentAttention, step: LatentStep) -> tuple[Tensor, Tensor | None]:
        """Run the layer into a poisoned output."""
        spec = layer.selection.spec
        shape = (step.batch.num_tokens, spec.num_heads, spec.v_head_size)
        out = torch.full(shape, torch.nan, dtype=step.query.dtype, device=self.device)
        got = layer(
            step.query, step.latent, step.rope, step.cache, step.batch, topk=step.topk, out=out
        )
        result, lse = got if isinstance(got, tuple) else (got, None)
        assert result.data_ptr() == out.data_ptr(), "out= was given, and another tensor came back"
        return out, lse

    def latent_check(self, layer: LatentAttention, step: LatentStep, label: str = "") -> Tensor:
        """Run, compare with the reference that neither absorbs nor merges, and return the output."""
        spec = layer.selection.spec
        out, lse = self.latent_run(layer, step)
        expected, expected_lse = reference_latent.forward(
            spec, step.query, step.cache, step.batch, layer.weights, layer.params, step.topk
        )
        limit = tolerance_of(spec)
        error = output_error(out, expected)
        assert error <= limit.output, (
            f"{label}{self.base.backend} is off by {error:.3g} (allowed {limit.output:g}) for {spec}"
        )
        if lse is not None:
            error = lse_error(lse, expected_lse)
            # Absorbing rounds W_UK q once more, and the logits with it.
            allowed = 4 * limit.lse
            assert error <= allowed, f"{label}LSE is off by {error:.3g} (allowed {allowed:g})"
        return out

    # Recurrences

    def recurrent_layer(self, spec: LayerSpec) -> Recurrent:
        """Return a recurrent layer with random parameters."""
        params = samples.recurrent_params(spec, self.generator)
        return Recurrent(self.base.select(spec), checks=True, **params)

    def recurrent_step(
        self, layer: Recurrent, lengths: Sequence[tuple[int, int]] | str
    ) -> RecurrentStep:
        """Return a step whose continuing sequences have random states; all others are NaN."""
        if isinstance(lengths, str):
            lengths = RECURRENT_BATCHES[lengths]
        spec = layer.selection.spec
        queries, lens = [q for q, _ in lengths], [n for _, n in lengths]
        count = len(lengths) + 2
        states = layer.state_spec(count).allocate(self.device)
        states.data.fill_(torch.nan)
        order = torch.randperm(count, generator=self.generator)[: len(lengths)].tolist()
        slots, used = [], []
        for (query, length), slot in zip(lengths, order, strict=True):
            padding = query == 1 and length == 0
            slots.append(-1 if padding else slot)
            if length > query:
                value = self.random(*states.data.shape[1:], dtype=states.data.dtype)
                states.data[slot] = value * 0.5
            if query and not padding:
                used.append(slot)
        batch = Batch.from_lens(
            queries, lens, state_slots=torch.tensor(slots, dtype=torch.int64, device=self.device),
            device=self.device,
        )  # fmt: skip
        inputs = samples.recurrent_inputs(spec, sum(queries), self.generator, self.device)
        return RecurrentStep(batch, inputs, states, used)

    def recurrent_check(self, layer: Recurrent, step: RecurrentStep) -> Tensor:
        """Run and compare output and states with the recurrence as published."""
        spec = layer.selection.spec
        named = dict(zip(layer.form.inputs, step.inputs, strict=True))
        before = step.states.data.clone()
        expected, after = reference_recurrent.forward(spec, named, layer.params, before, step.batch)
        out = torch.full(expected.shape, torch.nan).to(self.device, STORAGE_DTYPES[spec.dtype])
        layer(*step.inputs, states=step.states, batch=step.batch, out=out)
        self.compare(spec, out[self.real_rows(step.batch)], expected[self.real_rows(step.batch)])
        now = step.states.data
        self.compare(spec, now[step.used].flatten(1), after[step.used].flatten(1), "state ")
        kept = [slot for slot in range(len(before)) if slot not in step.used]
        same = torch.equal(
            torch.nan_to_num(now[kept].float(), 7.0), torch.nan_to_num(before[kept].float(), 7.0)
        )
        assert same, "a slot that no sequence of the step has was written"
        return out

    def compare(self, spec: LayerSpec, found: Tensor, expected: Tensor, label: str = "") -> None:
        """Assert that two tensors agree: by token, or by slot."""
        rows = len(expected)
        error = output_error(found.reshape(rows, -1), expected.reshape(rows, -1)) if rows else 0.0
        limit = tolerance_of(spec).output
        assert error <= limit, (
            f"{self.base.backend}: {label}is off by {error:.3g} (allowed {limit:g}) for {spec}"
        )

    @staticmethod
    def real_rows(batch: Batch) -> Tensor:
        """Return which tokens belong to no padding row."""
        assert batch.state_slots is not None
        real = (batch.state_slots >= 0).cpu()
        return torch.repeat_interleave(real, torch.tensor(batch.query_lens))
