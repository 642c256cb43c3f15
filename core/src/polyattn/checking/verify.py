"""Is a chosen backend right on this machine? One tiny batch of each phase against the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.api import Selection
from polyattn.checking.tolerance import lse_error, output_error, tolerance_of
from polyattn.errors import PolyattnError
from polyattn.families import inputs as samples
from polyattn.families.attention import reference
from polyattn.families.attention.layer import Attention
from polyattn.families.mla import reference as reference_latent
from polyattn.families.mla.layer import LatentAttention
from polyattn.families.recurrent import reference as reference_recurrent
from polyattn.families.recurrent.layer import Recurrent
from polyattn.registry.discovery import Registry
from polyattn.runtime.batch import Batch
from polyattn.runtime.kv_cache import STORAGE_DTYPES, KVCache
from polyattn.selection.decision import Decision
from polyattn.spec.layer import LayerSpec, Role


def verify_decision(decision: Decision, registry: Registry) -> dict[str, str]:
    """Return, for each chosen backend that fails or is wrong on this machine, what happened."""
    wrong: dict[str, str] = {}
    for phase, name in (("prefill", decision.prefill), ("decode", decision.decode)):
        if name is not None and name not in wrong:
            problem = _problem(decision, registry, phase)
            if problem:
                wrong[name] = f"{phase}: {problem}"
    return wrong


def _problem(decision: Decision, registry: Registry, phase: str) -> str | None:
    spec = decision.spec
    inputs = _Inputs(spec, str(decision.device.torch_device))
    try:
        if spec.kind.is_recurrent:
            return _run_recurrent(Selection(decision, registry), phase, inputs)
        if spec.kind.is_latent:
            return _run_latent(Selection(decision, registry), phase, inputs)
        sinks = inputs.random(spec.num_heads).float() if spec.learned_sinks else None
        layer = Attention(Selection(decision, registry), sinks=sinks)
        if spec.role.has_cache:
            return _run_cached(layer, phase, inputs)
        return _run_dense(layer, inputs)
    except PolyattnError as error:
        return str(error)
    except Exception as error:  # whatever a vendor's library raises is a reason, not our end
        return f"{type(error).__name__}: {error}"


class _Inputs:
    """Random inputs of one layer on one device."""

    def __init__(self, spec: LayerSpec, device: str):
        self.spec, self.device = spec, device
        self.generator = torch.Generator().manual_seed(torch.seed() % 2**31)

    def random(self, *shape: int) -> Tensor:
        values = torch.randn(*shape, generator=self.generator)
        return values.to(STORAGE_DTYPES[self.spec.dtype]).to(self.device)

    def step(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        spec = self.spec
        return (
            self.random(tokens, spec.num_heads, spec.head_size),
            self.random(tokens, spec.num_kv_heads, spec.head_size),
            self.random(tokens, spec.num_kv_heads, spec.v_head_size),
        )

    def fill(self, cache: KVCache) -> None:
        for stored in (cache.key, cache.value):
            values = torch.randn(stored.shape, generator=self.generator)
            if stored.dtype == torch.int8:
                values = (values * 32).clamp(-127, 127)
            stored.copy_(values.to(stored.dtype).to(stored.device))


def _paged_step(selection: Selection, phase: str, inputs: _Inputs) -> tuple[Batch, KVCache]:
    size = selection.decision.block_size
    assert size is not None
    lens = [1, size + 1, 3 * size]
    # A prefill that began with a single token would be taken for a decode.
    query_lens = [1, 1, 1] if phase == "decode" else [0, size, 5]
    table = torch.tensor([[3, 0, 0], [5, 1, 0], [2, 6, 4]], dtype=torch.int32)
    cache = selection.cache_spec(8).allocate(inputs.device)
    inputs.fill(cache)
    return Batch.from_lens(query_lens, lens, table.to(inputs.device), size), cache


def _run_latent(selection: Selection, phase: str, inputs: _Inputs) -> str | None:
    spec = selection.spec
    assert spec.latent is not None
    layer = LatentAttention(selection, *samples.latent_weights(spec, inputs.generator))
    batch, cache = _paged_step(selection, phase, inputs)
    tokens, topk = batch.num_tokens, None
    if spec.latent.topk:
        topk = samples.chosen_positions(
            batch.lens, batch.query_lens, spec.latent.topk, inputs.generator
        ).to(inputs.device)
    query = inputs.random(tokens, spec.num_heads, spec.head_size)
    latent = inputs.random(tokens, spec.latent.rank)
    rope = inputs.random(tokens, spec.latent.rope_head_size)
    got = layer(query, latent, rope, cache, batch, topk=topk)
    expected = reference_latent.forward(
        spec, query, cache, batch, layer.weights, layer.params, topk
    )
    return _compare(spec, got, expected)


def _run_recurrent(selection: Selection, phase: str, inputs: _Inputs) -> str | None:
    spec = selection.spec
    layer = Recurrent(selection, checks=False, **samples.recurrent_params(spec, inputs.generator))
    queries, lens = ([1, 1], [5, 1]) if phase == "decode" else ([0, 70, 5], [3, 70, 9])
    states = layer.state_spec(4).allocate(inputs.device)
    states.data.copy_(torch.randn(states.data.shape, generator=inputs.generator) * 0.5)
    slots = torch.tensor([3, 1, 0][: len(lens)], device=inputs.device)
    batch = Batch.from_lens(queries, lens, state_slots=slots, device=inputs.device)
    given = samples.recurrent_inputs(spec, sum(queries), inputs.generator, inputs.device)
    named = dict(zip(layer.form.inputs, given, strict=True))
    expected, after = reference_recurrent.forward(spec, named, layer.params, states.data, batch)
    out = layer(*given, states=states, batch=batch)
    limit, rows = tolerance_of(spec).output, len(out)
    error = output_error(out.reshape(rows, -1), expected.reshape(rows, -1))
    error = max(error, output_error(states.data.flatten(1), after.flatten(1)))
    if not error <= limit:
        return f"its output or state is wrong: relative error {error:.2g}, allowed {limit:g}"
    return None


def _run_cached(layer: Attention, phase: str, inputs: _Inputs) -> str | None:
    spec = layer.selection.spec
    batch, cache = _paged_step(layer.selection, phase, inputs)
    query, key, value = inputs.step(batch.num_tokens)
    if spec.role is Role.CROSS:
        got = layer(query, None, None, cache, batch)
    else:
        got = layer(query, key, value, cache, batch)
    expected = reference.forward(spec, query, None, None, cache, batch, layer.params)
    return _compare(spec, got, expected)


def _run_dense(layer: Attention, inputs: _Inputs) -> str | None:
    spec = layer.selection.spec
    batch = Batch.from_lens([1, 33], [1, 33], device=inputs.device)
    query, key, value = inputs.step(34)
    got = layer(query, key, value, None, batch)
    expected = reference.forward(spec, query, key, value, None, batch, layer.params)
    return _compare(spec, got, expected)


def _compare(
    spec: LayerSpec, got: Tensor | tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]
) -> str | None:
    out, lse = got if isinstance(got, tuple) else (got, None)
    limit = tolerance_of(spec)
    error = output_error(out, expected[0])
    if error > limit.output:
        return f"its output is wrong: relative error {error:.2g}, allowed {limit.output:g}"
    if lse is not None:
        error = lse_error(lse, expected[1])
        if error > limit.lse:
            return f"its LSE is wrong: error {error:.2g}, allowed {limit.lse:g}"
    return None
