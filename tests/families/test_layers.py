"""What layers promise beside their results: copies, checks of their own, parameters by reference."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families.steps import FAMILIES, MLA, SINKS, TABLE, Attending, Latent, Recurring
from polyattn import (
    Attention,
    Batch,
    Compressor,
    CompressorSpec,
    CustomMask,
    LatentAttention,
    LayerGroup,
    LayerSpec,
    NormSpec,
    Recurrent,
    RopeSpec,
    select,
)
from polyattn.errors import BatchError, SpecError
from polyattn.runtime.cache.bits import codebook
from polyattn.runtime.parameters import Weight


@FAMILIES
def test_layers_and_groups_can_be_copied(family: type[Any]) -> None:
    step = family()
    before = step.run(step.layer, step.batch)
    copied = copy.deepcopy(step.layer)
    assert copied is not step.layer and copied.group is step.layer.group
    assert torch.equal(step.run(copied, step.batch), before)
    model = copy.deepcopy(torch.nn.ModuleList([step.layer, step.layer]))
    assert torch.equal(step.run(model[1], step.batch), before)


@FAMILIES
def test_layers_and_groups_can_be_pickled(family: type[Any]) -> None:
    step = family()
    before = step.run(step.layer, step.batch)
    read, group = pickle.loads(pickle.dumps((step.layer, step.layer.group)))
    assert isinstance(group, LayerGroup) and group.spec == step.layer.spec
    assert group is read.group and group is not step.layer.group
    assert torch.equal(step.run(read, group.plan(step.batch)), before)


def test_checks_are_each_layer_s_own() -> None:
    step = Attending()
    group = step.layer.group
    loose, strict = (Attention(group, sinks=step.sinks, checks=on) for on in (False, True))
    twice = Batch.from_lens([1, 3], [20, 3], TABLE, 16)
    assert twice.slot_mapping is not None
    twice.slot_mapping[1] = twice.slot_mapping[2]
    plan = group.plan(twice)
    step.run(loose, plan)
    with pytest.raises(BatchError, match="twice in one step"):
        step.run(strict, plan)
    step.run(loose, plan)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sinks_count_when_they_are_loaded_later(dtype: torch.dtype) -> None:
    """A model is built first and its weights are read into it."""
    weight = torch.nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False)
    layer = Attention(select(SINKS, "cpu"), sinks=weight)
    step = Attending()
    without = step.run(layer, layer.plan(step.batch))
    loaded = torch.tensor([3.0, -1.0, 0.5, 2.0]).to(dtype)
    with torch.no_grad():
        weight.copy_(loaded)
    found = step.run(layer, layer.plan(step.batch))
    fresh = Attention(layer.group, sinks=loaded.float())
    assert torch.equal(found, step.run(fresh, layer.plan(step.batch)))
    assert not torch.equal(found, without)


class Model(torch.nn.Module):
    """What an engine builds: the weight is the model's, the layer only reads it."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False)
        self.attention = Attention(select(SINKS, "cpu"), sinks=self.sinks)


def saved(model: Model) -> Model:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "change",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved, lambda m: m.to(torch.bfloat16),
     lambda m: m.double().float()],
    ids=["deepcopy", "pickle", "torch.save", "bfloat16", "there and back"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_count_that_are_loaded_into_a_copied_or_moved_model(
    change: Callable[[Model], Model], dtype: torch.dtype
) -> None:
    step = Attending()
    model = change(Model(dtype))
    loaded = torch.tensor([3.0, -1.0, 0.5, 2.0])
    model.load_state_dict({"sinks": loaded}, strict=False)
    fresh = Attention(select(SINKS, "cpu"), sinks=loaded)
    expected = step.run(fresh, fresh.plan(step.batch))
    assert torch.equal(step.run(model.attention, step.batch), expected)


def test_a_model_is_built_on_the_meta_device_and_loaded() -> None:
    step = Attending()
    with torch.device("meta"):
        model = Model()
    assert model.sinks.is_meta
    with pytest.raises(SpecError, match=r"sinks is on the meta device.*`tensor`"):
        step.run(model.attention, step.batch)
    loaded = torch.tensor([3.0, -1.0, 0.5, 2.0])
    model.load_state_dict({"sinks": loaded}, strict=False, assign=True)
    weight = model.attention.sinks
    assert weight is not None
    with pytest.raises(SpecError, match=r"sinks has shape \(3,\); it must be \(4,\)"):
        weight.tensor = loaded[:3]
    weight.tensor = model.sinks
    fresh = Attention(model.attention.group, sinks=loaded)
    expected = step.run(fresh, step.batch)
    assert torch.equal(step.run(model.attention, step.batch), expected)


@pytest.mark.parametrize("backend", ["NATIVE_ATTN", "TORCH_SDPA", "VANILLA"])
def test_the_callers_default_device_changes_nothing(backend: str) -> None:
    """Engines set it (`torch.set_default_device("cuda")`); what is made on the host stays there."""
    spec = LayerSpec(
        num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", sliding_window=5, block_size=16,
        kv_cache_dtype="int4", rope=RopeSpec(rotary_size=32),
        mask="custom" if backend == "TORCH_SDPA" else None,
    )  # fmt: skip
    tokens = torch.randn(6, 4, 32), torch.randn(6, 2, 32), torch.randn(6, 2, 32)
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    outputs = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            group = LayerGroup(select(spec, "cpu", backend=backend, verify=True))
            mask = CustomMask.tree([[-1, 0, 0, 1, 3], [-1]]) if spec.mask else None
            batch = Batch.from_lens([5, 1], [5, 20], table, 16, mask=mask)
            cache = group.allocate_cache(4)
            for part in (cache.key, cache.value):
                part.zero_()
            outputs.append(Attention(group, rotate=True)(*tokens, cache, group.plan(batch)))
    assert torch.equal(*outputs)


def test_a_compressor_counts_on_the_host_under_any_default_device() -> None:
    compressor = Compressor(CompressorSpec(size=8, tokens_per_entry=4))
    rows, gates = torch.randn(2, 9, 8)
    batch = Batch.from_lens([5, 4], [5, 4], state_slots=torch.tensor([1, 0]))
    entries = []
    for device in ("cpu", "meta"):
        states = compressor.allocate_states(2)
        with torch.device(device):
            entries.append(compressor(rows, gates, states, batch))
    assert torch.equal(entries[0].rows, entries[1].rows)
    assert entries[1].ids.tolist() == [0, -1, 0]


@pytest.mark.parametrize(
    ("backend", "stored", "scales"),
    [
        ("NATIVE_ATTN", "turboquant4", "number"),
        ("TORCH_SDPA", "turboquant4", "number"),
        ("TORCH_SDPA", "int8", "head"),
    ],
)
def test_the_callers_default_dtype_changes_nothing(backend: str, stored: str, scales: str) -> None:
    """Engines set their model's. Each dtype comes first once: what is remembered isn't the first's."""
    spec = LayerSpec(
        num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", sliding_window=5, block_size=16,
        kv_cache_dtype=stored, scales=scales, rope=RopeSpec(rotary_size=32), needs_lse=True,
    )  # fmt: skip
    tokens = torch.randn(6, 4, 32), torch.randn(6, 2, 32), torch.randn(6, 2, 32)
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    outputs = []
    for dtype in (torch.float16, torch.float32, torch.float64):
        codebook.cache_clear()
        torch.set_default_dtype(dtype)
        try:
            group = LayerGroup(select(spec, "cpu", backend=backend))
            cache = group.allocate_cache(4)
            for part in (cache.key, cache.value):
                part.zero_()
            layer = Attention(group, rotate=True, k_scale=0.03, v_scale=0.03)
            batch = Batch.from_lens([5, 1], [5, 20], table, 16)
            outputs.append(layer(*tokens, cache, group.plan(batch)))
        finally:
            torch.set_default_dtype(torch.float32)
    for out, lse in outputs[1:]:
        assert torch.equal(out, outputs[0][0]) and torch.equal(lse, outputs[0][1])


def test_every_family_is_built_on_the_meta_device() -> None:
    latent, recurring = Latent(), Recurring()
    expected = [
        latent.run(latent.layer, latent.batch),
        recurring.run(recurring.layer, recurring.batch),
    ]
    weights, params = latent.layer.weights, recurring.layer.params
    assert weights is not None
    with torch.device("meta"):
        slopes = Attention(select(SINKS.replace(learned_sinks=False, alibi=True), "cpu"))
        mla = LatentAttention(latent.layer.group, *(torch.empty(w.shape) for w in weights))
        scan = Recurrent(
            recurring.layer.group, **{n: torch.empty(t.shape) for n, t in params.items()}
        )
    assert slopes.params.alibi_slopes is not None and not slopes.params.alibi_slopes.is_meta
    for step, layer in ((latent, mla), (recurring, scan)):
        with pytest.raises(SpecError, match="is on the meta device"):
            step.run(layer, step.batch)
    assert mla.w_uk is not None and mla.w_uv is not None
    mla.w_uk.tensor, mla.w_uv.tensor = weights
    for name, tensor in params.items():
        scan.weights[name].tensor = tensor
    assert torch.equal(latent.run(mla, latent.batch), expected[0])
    assert torch.equal(recurring.run(scan, recurring.batch), expected[1])


def test_a_weight_of_inference_mode_is_followed() -> None:
    """Such a tensor counts no versions."""
    step = Attending()
    with torch.inference_mode():
        weight = torch.zeros(4, dtype=torch.bfloat16)
        layer = Attention(select(SINKS, "cpu"), sinks=weight)
        weight += 2.0
    fresh = Attention(layer.group, sinks=torch.full((4,), 2.0))
    assert torch.equal(step.run(layer, step.batch), step.run(fresh, step.batch))


@FAMILIES
def test_a_layer_keeps_nothing_of_a_step(family: type[Any]) -> None:
    """Weights that can be trained, and no no_grad: no cache or state joins a graph."""
    step = family()
    layer = step.layer
    weights = [layer.sinks] if isinstance(layer, Attention) else []
    weights += [layer.w_uk, layer.w_uv] if isinstance(layer, LatentAttention) else []
    weights += layer.weights.values() if isinstance(layer, Recurrent) else []
    for weight in weights:
        weight.tensor = torch.nn.Parameter(weight.tensor)
    out = step.run(layer, step.batch)
    held = step.states.data if isinstance(step, Recurring) else step.cache.key
    assert not out.requires_grad and not held.requires_grad


def test_a_copy_made_in_inference_mode_is_written_in_place() -> None:
    """A captured graph reads it at its address."""
    sinks = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False)
    with torch.inference_mode():
        weight = Weight("sinks", sinks, torch.device("cpu"), torch.float32)
        read = weight.current()
    sinks.copy_(torch.arange(4))
    assert weight.current() is read and read.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("name", ["sinks", "q_norm"])
def test_weights_count_that_a_loader_writes_through_data(name: str) -> None:
    """torch counts no version there. After the first call the layer is told."""
    spec = LayerSpec(num_heads=4, head_size=16, dtype="float32", block_size=16, learned_sinks=True)
    spec = spec.replace(qk_norm=NormSpec(), rope=RopeSpec(rotary_size=16))
    weights = {"sinks": 4, "q_norm": 16, "k_norm": 16}
    mine = {n: torch.nn.Parameter(torch.zeros(size).bfloat16()) for n, size in weights.items()}
    layer = Attention(spec, rotate=True, **mine)
    cache, table = layer.group.allocate_cache(1), torch.zeros(1, 1, dtype=torch.int32)
    tokens = torch.randn(5, 4, 16)

    def same() -> bool:
        batch = Batch.from_lens([5], [5], table, 16)
        fresh = Attention(layer.group, rotate=True, **mine)
        out, expected = (one(tokens, tokens, tokens, cache, batch) for one in (layer, fresh))
        return torch.equal(out, expected)

    for weight in mine.values():
        weight.data.copy_(torch.randn(weight.shape))
    assert same()
    mine[name].data.copy_(torch.randn(mine[name].shape))
    getattr(layer, name).tensor = mine[name]
    assert same()


@FAMILIES
def test_gradients_are_refused_not_dropped(family: type[Any]) -> None:
    step = family()
    for index in [i for i, given in enumerate(step.inputs) if given.is_floating_point()]:
        inputs = [t.clone() for t in step.inputs]
        inputs[index].requires_grad_()
        with pytest.raises(BatchError, match="requires a gradient.*forward only"):
            step.run(step.layer, step.batch, *inputs)
        with torch.no_grad():
            step.run(step.layer, step.batch, *inputs)


@FAMILIES
@pytest.mark.parametrize("native", [True, False])
def test_autocast_lowers_nothing(
    family: type[Any], native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither both phases of a layer nor one of them, whose cache the other reads."""
    if not native:
        names = "attention=TORCH_SDPA,mla=TORCH_MLA,store=TORCH_STORE"
        monkeypatch.setenv("POLYATTN_BACKEND", names)
    step = family()
    expected = step.run(step.layer, step.batch)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(step.run(step.layer, step.batch), expected)


def test_autocast_to_another_half_refuses_no_latents() -> None:
    """As `torch.autocast("cuda")`, to float16, does around a layer of bfloat16."""
    step = Latent()
    half, inputs = MLA.replace(dtype="float16"), [each.half() for each in step.inputs]
    weights = step.layer.weights
    assert weights is not None
    layer = LatentAttention(select(half, "cpu"), *(weight.half() for weight in weights))
    step.cache = layer.group.allocate_cache(5)
    step.cache.key.normal_()
    expected = step.run(layer, step.batch, *inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(step.run(layer, step.batch, *inputs), expected)
        layer.store(*inputs[1:], step.cache, torch.arange(4))


@pytest.mark.parametrize("backend", ["NATIVE_ATTN", "TORCH_SDPA", "HPU_ATTN"])
def test_autocast_lowers_no_soft_cap(backend: str) -> None:
    """TORCH_SDPA multiplies by plain products there."""
    step = Attending()
    spec = SINKS.replace(logit_soft_cap=3.0)
    layer = Attention(select(spec, "cpu", backend=backend), sinks=step.sinks)
    expected = step.run(layer, step.batch)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(step.run(layer, step.batch), expected)
