"""MLA, sparse MLA and the recurrent families: selection, bad input, agreement, reuse of states."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from devices import everywhere
from kits import conforms
from polyattn import (
    Attention,
    AttentionKind,
    Batch,
    KVCache,
    LatentAttention,
    LayerGroup,
    LayerSpec,
    Recurrent,
    SparseSpec,
    StateCache,
    select,
)
from polyattn.conformance.cases.recurrent import specs
from polyattn.errors import BatchError, CacheError, PluginError, SelectionError, SpecError
from polyattn.families.mla import planning as mla_planning
from polyattn.families.mla import reference as reference_latent
from polyattn.families.mla.workload import latent_weights
from polyattn.families.recurrent.workload import recurrent_inputs, recurrent_params, unusual
from polyattn.runtime.cache.state_cache import StateCacheSpec
from polyattn.runtime.graphs.step_buffers import StepBuffers
from polyattn.runtime.plan_checks import check_calls
from polyattn.settings import Settings
from polyattn.spec.decompose import convolution, expanded, group_layers
from polyattn.spec.latent import LatentSpec
from polyattn.spec.recurrent import RecurrentSpec
from polyattn.tools.replay.check import Checker
from polyattn.workload.base import workload
from polyattn.workload.compare import output_error
from tools.commands import here

MLA = LayerSpec(
    kind="mla", num_heads=4, head_size=24, v_head_size=16, dtype="float64",
    latent=LatentSpec(rank=32, rope_head_size=8),
)  # fmt: skip
MAMBA2 = LayerSpec(
    kind="mamba2", num_heads=4, num_kv_heads=2, head_size=8, dtype="float64",
    recurrent=RecurrentSpec(state_size=16, conv_width=4, activation="silu"),
)  # fmt: skip
sweep = pytest.mark.sweep


@pytest.mark.parametrize(
    ("backend", "interpreted", "least"),
    [
        pytest.param("TORCH_MLA", False, 30, marks=pytest.mark.slow),
        pytest.param("TORCH_MLA_SPARSE", False, 30, marks=pytest.mark.slow),
        pytest.param("TORCH_STORE", False, 50, marks=pytest.mark.slow),
        ("TORCH_MERGE", False, 25),
        pytest.param("TORCH_SCAN", False, 70, marks=pytest.mark.slow),
        pytest.param("TRITON_MLA", True, 15, marks=sweep),
        pytest.param("TRITON_MLA_SPARSE", True, 15, marks=sweep),
        pytest.param("TRITON_SCAN", True, 60, marks=sweep),
        pytest.param("TRITON_TOKEN_SCAN", True, 50, marks=sweep),
    ],
)
def test_conforms(backend: str, interpreted: bool, least: int) -> None:
    conforms(backend, least, **{"TRITON_INTERPRET": "1"} if interpreted else {})


@pytest.mark.parametrize(
    "mask",
    [
        {"sliding_window": 16},
        {"chunk_size": 8},
        {"alibi": True},
        {"causal": False, "window_right": 0},
    ],
)
def test_no_position_hides_a_latent(mask: dict[str, Any]) -> None:
    """No form of MLA's decode has a mask over latents: the spec refuses it, not a selection later."""
    name, value = list(mask.items())[-1]
    with pytest.raises(SpecError, match=f"{name}={value!r}: all latents count; leave it out"):
        MLA.replace(**mask)


def test_a_convolution_is_asked_for_what_its_layer_is() -> None:
    """Whatever a layer promises, its short convolution must promise too."""
    layer = MAMBA2.replace(deterministic=True, batch_invariant="batch")
    conv = convolution(layer)
    assert conv is not None and conv.deterministic
    assert conv.batch_invariant is layer.batch_invariant
    assert select(conv, "cpu").decision.spec == conv and conv.scale == 1.0


def test_states_are_made_on_their_device() -> None:
    """More than any host could hold, on a device that holds nothing."""
    spec = StateCacheSpec.for_layer(MAMBA2, 1 << 40)
    assert spec.allocate("meta").data.device.type == "meta"


class Step:
    """A step of the small MLA layer: two decodes, a chunk after context, a fresh prompt."""

    def __init__(self, spec: LayerSpec = MLA):
        generator = torch.Generator().manual_seed(11)
        self.weights = latent_weights(spec, generator)
        self.layer = LatentAttention(select(spec, "cpu"), *self.weights, checks=True)
        lens, queries = [30, 1, 50, 20], [1, 1, 17, 20]
        self.cache = self.layer.group.allocate_cache(32)
        self.cache.key.normal_()
        table = torch.randperm(32)[:16].view(4, 4).int()
        self.batch = Batch.from_lens(queries, lens, table, self.cache.block_size)
        tokens = sum(queries)
        self.query = torch.randn(tokens, 4, 24, dtype=torch.float64)
        self.latent = torch.randn(tokens, 32, dtype=torch.float64)
        self.rope = torch.randn(tokens, 8, dtype=torch.float64)

    def run(self, **changes: Any) -> torch.Tensor:
        given = {
            "query": self.query, "latent": self.latent, "rope_key": self.rope, "cache": self.cache
        }  # fmt: skip
        return self.layer(**(given | changes), plan=self.batch)


def test_three_ways_agree_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Absorbed decode, expanded prefill and context merged in pieces: to the last digits."""
    monkeypatch.setattr(mla_planning, "EXPANDED_BYTES", 16 * 4 * 40 * 8)  # 16 tokens a piece
    step = Step()
    out = step.run()
    plan = step.layer.plan(step.batch)
    assert isinstance(plan, mla_planning.LatentStep)
    pieces = [call for call in plan.calls if call.phase == "prefill"]
    assert len(pieces) >= 3  # its own tokens, and more than one context piece
    expected, _ = reference_latent.forward(MLA, step.query, step.cache, step.batch, step.weights)
    assert output_error(out, expected) < 1e-12


@pytest.mark.parametrize("lost", ["none", "a key", "a token"])
def test_tokens_are_rows_of_their_own_where_steps_must_change_no_bit(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, each = MLA.replace(batch_invariant="steps"), mla_planning.each_token

    def less(batch: Batch) -> Batch:
        rows = each(batch)
        if lost == "a key":
            return Batch(rows.starts, [4, *rows.lens[1:]], rows.block_table)
        return rows if lost == "none" else rows.part(slice(1, None))

    monkeypatch.setattr(mla_planning, "each_token", less)
    group = LayerGroup(select(spec, "cpu", backend="TORCH_MLA"))
    group.plan_checks = None
    form = group.cache_format
    assert form is not None
    lens, table = [7, 0, 5, 40], torch.arange(12, dtype=torch.int32).view(4, 3)
    step = group.plan(Batch.from_lens([3, 1, 0, 2], lens, table, form.block_size))
    if lost != "none":
        with pytest.raises(PluginError, match="sequence 0, query token 0|5 tokens are planned"):
            check_calls(step)
        return
    check_calls(step)
    (call,) = step.calls
    assert (call.phase, call.plan.batch.lens) == ("decode", [5, 6, 7, 0, 39, 40])
    assert call.plan.batch.block_table[:, 0].tolist() == [0, 0, 0, 3, 9, 9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latent": torch.zeros(3, 32)}, "latent is"),
        ({"rope_key": torch.zeros(39, 9, dtype=torch.float64)}, "rope_key is"),
        ({"query": torch.zeros(39, 4, 24)}, "query is"),
        ({"choice": torch.zeros(39, 1, 4, dtype=torch.int32)}, "choice was given"),
        ({"query": [1]}, "query=.* must be a tensor on cpu"),
        ({"latent": torch.empty(39, 32, device="meta")}, "latent is on meta, the layer on cpu"),
        ({"rope_key": torch.empty(39, 8, device="meta")}, "rope_key is on meta"),
        ({"out": torch.empty(39, 4, 16, device="meta")}, "out is on meta"),
        ({"cache": None}, "cache is a NoneType; it must be a KVCache"),
    ],
)
def test_latent_bad_input(changes: dict[str, Any], message: str) -> None:
    step = Step()
    before = step.cache.key.clone()
    with pytest.raises(BatchError, match=message):
        step.run(**changes)
    assert torch.equal(step.cache.key, before)


def test_latents_that_were_stored_before() -> None:
    """An engine that stores by itself gives none with the query; storing apart is the same."""
    step, none = Step(), {"latent": None, "rope_key": None}
    expected, slots = step.run(), step.batch.slot_mapping
    assert slots is not None
    stored = step.cache.key.clone()
    step.batch = Batch(step.batch.starts, step.batch.lens, step.batch.block_table)
    step.layer.store(step.latent + 1, step.rope, step.cache, slots)
    assert not torch.equal(step.run(**none), expected)
    step.layer.store(step.latent, step.rope, step.cache, slots)
    assert torch.equal(step.cache.key, stored) and torch.equal(step.run(**none), expected)
    with pytest.raises(BatchError, match="latent and rope_key come together"):
        step.run(latent=None)
    with pytest.raises(BatchError, match="rope_key is"):
        step.layer.store(step.latent, step.latent, step.cache, slots)


def test_latent_bad_construction() -> None:
    selection = select(MLA, "cpu")
    w_uk, w_uv = latent_weights(MLA, torch.Generator())
    with pytest.raises(SpecError, match="w_uk has shape"):
        LatentAttention(selection, w_uv, w_uv)
    with pytest.raises(SpecError, match="k_scale=0"):
        LatentAttention(selection, w_uk, w_uv, k_scale=0)
    with pytest.raises(SpecError, match="use LatentAttention"):
        Attention(selection)
    with pytest.raises(SpecError, match="is no layer for LatentAttention"):
        LatentAttention(select(MAMBA2, "cpu"), w_uk, w_uv)
    with pytest.raises(SpecError, match="rope_head_size"):
        MLA.replace(head_size=8)


def test_latent_cache_saves() -> None:
    """DeepSeek-V3: 576 elements a token instead of 128 heads of 192 + 128."""
    from polyattn.tools.cli.models import bundled

    spec = LayerSpec.from_hf_config(bundled("models", "deepseek-v3.json"))[0]
    cache = select(spec, "cpu").cache_format
    assert cache is not None and cache.bytes_per_token == 576 * 2
    made = KVCache.allocate(cache, 1)
    assert made.value_in_key and made.key.shape[3] == 576 and made.value.shape[3] == 512


def test_who_serves_mla() -> None:
    """Prefill is asked of attention backends, decode of MLA ones; a name counts where it can."""
    decision = select(MLA, "cpu").decision
    assert (decision.prefill, decision.decode) == ("TORCH_SDPA", "TORCH_MLA")
    decision = select(MLA, "cpu", backend="TORCH_MLA").decision
    assert decision.decode == "TORCH_MLA" and "does not apply to the prefill" in decision.notes[0]
    with pytest.raises(SelectionError, match="kind"):
        select(MLA, "cpu", backend="decode=TORCH_SDPA")
    settings = Settings().with_backend("TORCH_SDPA", "POLYATTN_BACKEND")
    decision = select(MAMBA2, "cpu", settings=settings).decision
    assert decision.decode == "TORCH_SCAN" and "does not apply to mamba2" in decision.notes[0]


def test_layers_come_in_parts() -> None:
    conv = convolution(MAMBA2)
    assert conv is not None and conv.kind is AttentionKind.SHORT_CONV
    assert conv.num_heads == 4 * 8 + 2 * 2 * 16 and convolution(conv) is None
    assert list(group_layers([MAMBA2, MAMBA2])) == [conv, MAMBA2]
    assert expanded(MLA).head_size == 24 and expanded(MLA).needs_lse


def recurrent_step(
    queries: list[int], lens: list[int], slots: list[int]
) -> tuple[Recurrent, list[torch.Tensor], Batch]:
    generator = torch.Generator().manual_seed(3)
    params = recurrent_params(MAMBA2, generator)
    layer = Recurrent(select(MAMBA2, "cpu"), checks=True, **params)
    batch = Batch.from_lens(queries, lens, state_slots=torch.tensor(slots))
    return layer, recurrent_inputs(MAMBA2, sum(queries), generator), batch


def test_a_prefix_s_state_is_reused() -> None:
    """Two sequences that share a prefix: its state is computed once and copied."""
    layer, inputs, batch = recurrent_step([40], [40], [0])
    states = layer.group.allocate_states(3)
    whole = layer(*inputs, states=states, plan=batch)
    prefix = Batch.from_lens([25], [25], state_slots=torch.tensor([1]))
    layer(*(x[:25] for x in inputs), states=states, plan=prefix)
    states.copy(1, 2)
    rest = Batch.from_lens([15], [40], state_slots=torch.tensor([2]))
    tail = layer(*(x[25:] for x in inputs), states=states, plan=rest)
    assert output_error(tail, whole[25:]) < 1e-12
    with pytest.raises(CacheError, match="target=9"):
        states.copy(0, 9)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0, 0], "sequence 0's too"),
        ([0, 7], "there are 3 slots"),
        ([0, -1], "-1 is for padding"),
        ([0, -5], r"state_slots\[1\]=-5: there are 3 slots, and -1 is for padding"),
    ],
)
def test_state_slots_are_checked(slots: list[int], message: str) -> None:
    layer, inputs, batch = recurrent_step([2, 3], [2, 9], slots)
    states = layer.group.allocate_states(3)
    states.data.zero_()
    with pytest.raises(BatchError, match=message):
        layer(*inputs, states=states, plan=batch)
    assert not states.data.any()


@pytest.mark.parametrize("backend", ["VANILLA_SCAN", "TORCH_SCAN", "NATIVE_SCAN"])
@pytest.mark.parametrize("slots", [[3, 1], [1, 3]])
def test_a_slot_that_the_states_lack_is_refused_before_any_call(
    backend: str, slots: list[int]
) -> None:
    """Without checks, too, and by its place in the step, whichever phase its sequence is in."""
    spec = MAMBA2.replace(dtype="float32")
    group = LayerGroup(select(spec, "cpu", backend=backend))
    generator = torch.Generator().manual_seed(0)
    layer = Recurrent(group, checks=False, **recurrent_params(spec, generator))
    states = group.allocate_states(3)
    states.data.zero_()
    inputs = recurrent_inputs(spec, 3, generator)
    batch = Batch.from_lens([2, 1], [2, 9], state_slots=torch.tensor(slots))
    with pytest.raises(BatchError, match=rf"state_slots\[{slots.index(3)}\]=3: there are 3 slots"):
        layer(*inputs, states=states, plan=batch)
    assert not states.data.any()


@pytest.mark.parametrize("backend", ["VANILLA_SCAN", "TORCH_SCAN", "NATIVE_SCAN"])
@pytest.mark.parametrize("lens", [(1, 1, 1), (3, 2, 4)])
@pytest.mark.parametrize("negative", [-1, -5])
def test_negative_slots_touch_no_state(backend: str, lens: tuple[int, ...], negative: int) -> None:
    """Without checks, beside a length too: the first and the last slot are other requests'."""
    spec = MAMBA2.replace(dtype="float32")
    group = LayerGroup(select(spec, "cpu", backend=backend))
    generator = torch.Generator().manual_seed(0)
    layer = Recurrent(group, checks=False, **recurrent_params(spec, generator))
    inputs = recurrent_inputs(spec, sum(lens), generator)
    states = group.allocate_states(3)
    states.data.fill_(torch.nan)
    states.data[1] = torch.randn(states.data[1].shape, generator=generator)
    alone = group.allocate_states(1)
    alone.data.copy_(states.data[1:2])
    mine = slice(lens[0], lens[0] + lens[1])
    rest = Batch.from_lens([lens[1]], [9], state_slots=torch.tensor([0]))
    wanted = layer(*(x[mine] for x in inputs), states=alone, plan=rest)
    slots = torch.tensor([negative, 1, negative])
    batch = Batch.from_lens(lens, [9, 9, 9], state_slots=slots)
    out = layer(*inputs, states=states, plan=batch)
    assert output_error(out[mine], wanted) < 1e-6
    assert output_error(states.data[1], alone.data[0]) < 1e-6
    assert states.data[[0, 2]].isnan().all()


def test_a_capture_s_warm_up_may_consist_of_padding() -> None:
    """What a graph records first: lengths are the most, slots none, and the checks are on."""
    layer, inputs, _ = recurrent_step([1, 1], [1, 1], [0, 1])
    states = layer.group.allocate_states(3)
    states.data.zero_()
    buffers = StepBuffers(2, 1, 64, None, torch.device("cpu"))
    plan = layer.plan(buffers.batch([buffers.max_len] * 2))
    layer(*inputs, states=states, plan=plan)
    assert not states.data.any()
    buffers.state_slots.fill_(7)
    with pytest.raises(BatchError, match="there are 3 slots"):
        layer(*inputs, states=states, plan=plan)


def test_recurrent_bad_input() -> None:
    layer, inputs, batch = recurrent_step([2], [2], [0])
    states = layer.group.allocate_states(3)
    with pytest.raises(BatchError, match="takes x, dt, B, C"):
        layer(*inputs[:3], states=states, plan=batch)
    with pytest.raises(BatchError, match="B is"):
        layer(inputs[0], inputs[1], inputs[0], inputs[3], states=states, plan=batch)
    with pytest.raises(BatchError, match="no state_slots"):
        layer(*inputs, states=states, plan=Batch.from_lens([2], [2]))
    with pytest.raises(BatchError, match="dt is on meta, the layer on cpu"):
        layer(inputs[0], inputs[1].to("meta"), *inputs[2:], states=states, plan=batch)
    with pytest.raises(BatchError, match="x=1 must be a tensor on cpu"):
        layer(1, *inputs[1:], states=states, plan=batch)
    with pytest.raises(BatchError, match="states is a Tensor; it must be a StateCache"):
        layer(*inputs, states=states.data, plan=batch)
    with pytest.raises(BatchError, match="states is on meta"):
        layer(*inputs, states=StateCache(states.data.to("meta")), plan=batch)
    slots = torch.zeros(1, dtype=torch.int64, device="meta")
    with pytest.raises(BatchError, match="state_slots is on meta, the batch on cpu"):
        Batch.from_lens([2], [2], state_slots=slots, device="cpu")
    with pytest.raises(BatchError, match="the batch is on meta, the group on cpu"):
        layer(*inputs, states=states, plan=Batch.from_lens([2], [2], state_slots=slots))
    with pytest.raises(SpecError, match="no parameter 'decay'"):
        Recurrent(select(MAMBA2, "cpu"), decay=torch.zeros(4))
    with pytest.raises(SpecError, match=r"no parameter 'A_log'; A is -exp\(A_log\)"):
        Recurrent(select(MAMBA2, "cpu"), A_log=torch.zeros(4))
    with pytest.raises(SpecError, match="parameter A of mamba2 is missing"):
        Recurrent(select(MAMBA2, "cpu"))
    with pytest.raises(CacheError, match="keeps no state"):
        LayerGroup(select(MLA, "cpu")).allocate_states(3)
    with pytest.raises(CacheError, match=r"allocate_states\(n\)"):
        LayerGroup(select(MAMBA2, "cpu")).allocate_cache(3)


@pytest.mark.parametrize("model", ["jamba-v0.1", "qwen3-next-80b-a3b", "deepseek-v3.2"])
def test_run_serves_every_layer(model: str) -> None:
    few = ("--requests=3", "--scale=0.05", "--max-tokens=4")
    code, text, errors = here("run", model, *few, "--json")
    assert code == 0, errors
    report = json.loads(text)
    layers = {index for group in report["groups"] for index in group["layers"]}
    assert layers == set(range(len(layers))) and report["checked_tokens"] > 0
    assert report["max_error"] < 1.5e-2


@pytest.mark.parametrize("changes", [{"physical": True}, {"granularity": 4}, {}], ids=str)
def test_a_choice_of_latents_is_verified_by_what_its_ids_name(changes: dict[str, Any]) -> None:
    """Places in the cache, or groups of entries of which the last are missing, by hand in float64."""
    spec = MLA.replace(
        kind="sparse_mla", sparse=SparseSpec(budget=3, **changes), dtype="float32", block_size=16
    )
    selection = select(spec, "cpu")  # verified on tiny steps, whose sequences have few keys
    backend = selection.backend("decode")
    assert backend is not None and backend.name == "TORCH_MLA_SPARSE"
    weights = latent_weights(spec, torch.Generator().manual_seed(1))
    layer, generator = LatentAttention(selection, *weights), torch.Generator().manual_seed(2)
    cache = layer.group.allocate_cache(5)
    cache.key.copy_(torch.randn(cache.key.shape, generator=generator))
    table = torch.tensor([[3, 1], [4, 0]], dtype=torch.int32)
    lens, positions = [18, 3], [17, 0, 1, 2]  # the second has fewer keys than a group of 4
    batch = Batch.from_lens([1, 3], lens, table, 16)
    query = torch.randn(4, 4, 24, generator=generator)
    rope, latent = (torch.randn(4, size, generator=generator) for size in (8, 32))
    names = [[4, 0, -1], [0, -1, -1], [0, 1, -1], [-1, -1, -1]]
    rows = [table[0], table[1], table[1], table[1]]
    group, ids, seen = spec.sparse.granularity if spec.sparse else 1, [], []
    for position, blocks, named in zip(positions, rows, names, strict=True):
        entries = [n * group + i for n in named if n >= 0 for i in range(group)]
        entries = [entry for entry in entries if entry <= position]
        places = [int(blocks[entry // 16]) * 16 + entry % 16 for entry in entries]
        seen.append(places)
        ids.append(places + [-1] * (3 - len(places)) if "physical" in changes else named)
    choice = torch.tensor(ids, dtype=torch.int32)[:, None]
    checker = Checker(2, 0)
    for _ in range(4):
        out = layer(query, latent, rope, cache, layer.group.plan(batch), choice=choice)
        if "physical" not in changes:
            checker.check_latent(layer, query, cache, batch, choice, out)
    stored, (w_uk, w_uv) = cache.key.double().view(80, 40), (w.double() for w in weights)
    wanted = torch.zeros(4, 4, 16, dtype=torch.float64)
    for token, places in enumerate(seen):
        if places:
            nope = torch.einsum("tr,hnr->htn", stored[places, :32], w_uk)
            keys = torch.cat([nope, stored[places, 32:].expand(4, -1, -1)], 2)
            scores = torch.einsum("hd,htd->ht", query[token].double(), keys) * spec.scale
            values = torch.einsum("tr,hrv->htv", stored[places, :32], w_uv)
            wanted[token] = torch.einsum("ht,htv->hv", scores.softmax(1), values)
    expected, _ = reference_latent.forward(spec, query, cache, batch, weights, choice=choice)
    assert output_error(expected, wanted) < 1e-12
    assert output_error(out, wanted) < 1e-5


@everywhere("TORCH_MLA", "TRITON_MLA")
def test_prompts_outside_of_graphs_have_the_plans_of_prompts(device: str, backend: str) -> None:
    """An engine runs a captured layer's prompts by exact lengths: keys are made of latents."""
    heads = {"num_heads": 16, "head_size": 192, "v_head_size": 128}
    spec = MLA.replace(
        dtype="bfloat16", latent=LatentSpec(rank=512, rope_head_size=64), **heads,
        graph_capture="none" if device == "cpu" else "any",
    )  # fmt: skip
    group = LayerGroup(select(spec, device, backend=f"decode={backend}"))
    for lengths in ([(1, 40), (1, 90), (70, 200), (130, 130)], [(90, 90)]):
        work = workload(group, lengths)
        work.check()
        assert any(isinstance(op, mla_planning.Expanded) for op in work.plan.ops)


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_float16_holds_what_a_recurrence_draws(kind: str) -> None:
    for label, spec in specs(AttentionKind(kind), "float16"):
        group = LayerGroup(select(spec, "cpu", backend="VANILLA_SCAN"))
        for numbers in unusual(spec):
            work = workload(group, [(40, 80)] * 3, numbers=numbers, step={"numbers": numbers})
            most = float(work.expected[0].abs().max())
            assert most < torch.finfo(torch.float16).max, f"{label}, {numbers}: {most}"
