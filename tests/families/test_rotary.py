"""Does a layer that rotates give what transformers' modules, and the formulas, make of it?"""

from __future__ import annotations

import dataclasses
from itertools import accumulate
from typing import Any

import pytest
import torch
from formulas import attend
from polyattn import Attention, Batch, LatentAttention, LayerGroup, LayerSpec, select
from polyattn.errors import BatchError, SpecError
from polyattn.families.attention.rope import query_temperature, rotate
from polyattn.families.attention.rotation import _on, rotation_of
from polyattn.families.mla.workload import latent_weights
from polyattn.runtime.graphs.mixed_buffers import MixedBuffers
from polyattn.runtime.graphs.step_buffers import StepBuffers, StepSize
from polyattn.spec.kinds import AttentionKind, Role
from polyattn.spec.latent import LatentSpec
from polyattn.spec.rope import RopeSpec
from polyattn_models import layer_specs
from torch import Tensor
from torch_operators import Operators
from transformers import LlamaConfig
from transformers.models.cohere.modeling_cohere import CohereRotaryEmbedding
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as turn_neighbours
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

SHORT, LONG = [1.0 + 0.1 * i for i in range(16)], [2.0 + 0.3 * i for i in range(16)]
SCALINGS: dict[str, dict[str, Any]] = {
    "none": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16},
    "longrope": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG,
                 "original_max_position_embeddings": 16},
}  # fmt: skip
SPEC = LayerSpec(
    num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", rope=RopeSpec(rotary_size=32)
)


class Layers:
    """A layer that rotates beside one that is given what is rotated, each with a cache of its own."""

    def __init__(self, spec: LayerSpec, store: str | None = None, **params: Any):
        backend = None if store is None else f"store={store}"
        self.spec, self.group = spec, LayerGroup(select(spec, "cpu", backend=backend))
        self.layer = Attention(self.group, rotate=True, checks=True, **params)
        self.bare = Attention(select(spec.replace(rope=None), "cpu"), checks=True)
        self.caches = self.group.allocate_cache(16), self.bare.group.allocate_cache(16)
        self.block = self.caches[0].block_size
        for cache in self.caches:  # a context that nobody stored is some numbers, the same in both
            cache.key.view(torch.uint8).zero_()
            cache.value.view(torch.uint8).zero_()

    def batch(self, queries: list[int], lens: list[int], **changes: Any) -> Batch:
        table = torch.randperm(16).int().view(len(lens), -1)
        return Batch.from_lens(queries, lens, table, self.block, **changes)

    def tokens(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        spec = self.spec
        shapes = (spec.num_heads, spec.head_size), (spec.num_kv_heads, spec.head_size)
        q, k = (torch.randn(count, *shape) for shape in shapes)
        return q, k, torch.randn(count, spec.num_kv_heads, spec.v_head_size)


def transformed(cfg: LlamaConfig, x: Tensor, positions: Tensor, module: Any, apply: Any) -> Tensor:
    """Return (tokens, heads, size) rotated by transformers' modules."""
    cos, sin = module(cfg)(x, positions[None])
    return apply(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)[0][0].transpose(0, 1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("pairing", ["neox", "gptj"])
@pytest.mark.parametrize("name", SCALINGS)
def test_like_transformers(name: str, pairing: str) -> None:
    """A prompt and then a token that crosses the trained length, as a model generates them."""
    cfg = LlamaConfig(
        hidden_size=128, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1,
        max_position_embeddings=16, rope_parameters={"rope_theta": 500.0} | SCALINGS[name],
        dtype="float32",
    )  # fmt: skip
    rope = layer_specs(cfg)[0].rope
    layers = Layers(SPEC.replace(rope=dataclasses.replace(rope, pairing=pairing)))
    own = (LlamaRotaryEmbedding, apply_rotary_pos_emb)
    module, apply = own if pairing == "neox" else (CohereRotaryEmbedding, turn_neighbours)
    table = torch.arange(16).int().view(1, -1)
    for count, length in ((15, 15), (1, 16), (1, 17), (30, 47)):
        batch = Batch.from_lens([count], [length], table, layers.block)
        q, k, v = layers.tokens(count)
        at = torch.arange(length - count, length)
        turned = [transformed(cfg, x, at, module, apply) for x in (q, k)]
        found = layers.layer(q, k, v, layers.caches[0], batch)
        expected = layers.bare(*turned, v, layers.caches[1], batch)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("store", ["TORCH_STORE", "NATIVE_STORE"])
@pytest.mark.parametrize("module", [Qwen2VLRotaryEmbedding, Qwen3VLTextRotaryEmbedding])
def test_positions_of_three_axes_like_qwen(store: str, module: Any) -> None:
    interleaved = module is Qwen3VLTextRotaryEmbedding
    rope = RopeSpec(
        rotary_size=32, base=1000.0, sections=(4, 6, 6), sections_interleaved=interleaved
    )
    cfg = LlamaConfig(
        hidden_size=128, num_attention_heads=4,
        rope_parameters={"rope_theta": 1000.0, "rope_type": "default", "mrope_section": [4, 6, 6]},
    )  # fmt: skip
    layers = Layers(SPEC.replace(rope=rope), store)
    q, k, v = layers.tokens(9)
    positions = torch.randint(0, 60, (3, 9))
    cos, sin = module(cfg)(q, positions[:, None])
    turned = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    batch = layers.batch([3, 6], [3, 6], positions=positions)
    found = layers.layer(q, k, v, layers.caches[0], batch)
    rotated = [x[0].transpose(0, 1) for x in turned]
    expected = layers.bare(*rotated, v, layers.caches[1], batch)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    text = layers.batch([9], [9])
    step = rotation_of(layers.spec, text)
    plain = rotation_of(SPEC.replace(rope=dataclasses.replace(rope, sections=None)), text)
    assert step is not None and plain is not None and torch.equal(step.turns, plain.turns)


def test_positions_given_and_derived_are_the_same_and_others_are_not() -> None:
    layers = Layers(SPEC)
    queries, lens = [1, 3, 0, 5], [20, 3, 7, 30]
    q, k, v = layers.tokens(9)
    torch.manual_seed(3)
    derived = layers.batch(queries, lens)
    ends = [torch.arange(n - c, n) for c, n in zip(queries, lens, strict=True)]
    at = torch.cat(ends)
    results = []
    for positions in (None, at, at.int(), at + 4):
        batch = Batch(
            [0, *accumulate(queries)], lens, derived.block_table, derived.slot_mapping,
            positions=positions,
        )  # fmt: skip
        cache = layers.group.allocate_cache(16)
        cache.key.zero_(), cache.value.zero_()
        results.append((layers.layer(q, k, v, cache, batch), cache.key.clone()))
    for other in results[1:3]:
        assert torch.equal(other[0], results[0][0]) and torch.equal(other[1], results[0][1])
    assert not torch.allclose(results[3][1], results[0][1])


def test_a_request_s_frequencies_are_its_own() -> None:
    """Dynamic NTK beside a longer request: the batch's longest changes nothing."""
    rope = RopeSpec(rotary_size=32, scaling="dynamic", factor=4.0, original_length=8)
    spec = SPEC.replace(rope=rope)
    alone = rotation_of(spec, Batch([0, 3], [3]))
    beside = rotation_of(spec, Batch([0, 3, 4, 9], [3, 100, 12]))
    twelve = rotation_of(spec, Batch([0, 5], [12]))
    assert alone is not None and beside is not None and twelve is not None
    assert torch.equal(beside.turns[:3], alone.turns)
    assert torch.equal(beside.turns[4:], twelve.turns)
    exact = rotate(torch.ones(5, 1, 32), torch.arange(7, 12), rope, length=12)
    found = twelve.applied(torch.ones(5, 1, 32))
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stored", ["auto", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("store", ["TORCH_STORE", "NATIVE_STORE"])
def test_fused_with_a_bias_and_padding(store: str, stored: str) -> None:
    """One fused tensor is its parts; padding rows write nothing, and what they hold reaches nobody."""
    spec = SPEC.replace(dtype="bfloat16", kv_cache_dtype=stored)
    bias = torch.randn(256)
    scales = {} if stored == "auto" else {"k_scale": 0.1, "v_scale": 0.05}
    layers = Layers(spec, store, qkv_bias=bias, **scales)
    fused = torch.randn(7, 256).bfloat16()
    fused[3] = torch.nan  # the padding row
    table = torch.arange(16).int().view(4, 4)
    batch = Batch.from_lens([2, 1, 1, 3], [5, 9, 0, 3], table, layers.block)
    cache = layers.caches[0]
    for part in (cache.key, cache.value):
        part.view(torch.uint8).zero_()
    out = layers.layer(fused, None, None, cache, batch)
    q, k, v = fused.split((128, 64, 64), dim=1)
    again = layers.group.allocate_cache(16)
    for part in (again.key, again.value):
        part.view(torch.uint8).zero_()
    apart = layers.layer(q, k.unflatten(1, (2, 32)), v, again, batch)
    assert torch.equal(out, apart) and out[3].eq(0).all() and not out.isnan().any()
    assert torch.equal(cache.key.view(torch.uint8), again.key.view(torch.uint8))
    written = (cache.key.view(torch.uint8) != 0).any(-1).any(-1).flatten().nonzero().flatten()
    assert set(written.tolist()) == {int(s) for s in batch.slot_mapping.tolist() if s >= 0}
    bias.mul_(2)  # a weight that is loaded later counts
    assert not torch.equal(layers.layer(fused, None, None, cache, batch), out)


def test_given_keys_turn_by_their_places() -> None:
    spec = SPEC.replace(cached=False, role=Role.ENCODER_ONLY, causal=False)
    group = LayerGroup(select(spec, "cpu"))
    layer, bare = Attention(group, rotate=True), Attention(select(spec.replace(rope=None), "cpu"))
    q, k, v = torch.randn(5, 4, 32), torch.randn(12, 2, 32), torch.randn(12, 2, 32)
    batch = Batch([0, 2, 5], [4, 5], key_starts=[1, 6])
    at = torch.tensor([2, 3, 2, 3, 4]), torch.tensor([0, 0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 0])
    turned = [rotate(x, a, spec.rope).float() for x, a in zip((q, k), at, strict=True)]
    expected = bare(*turned, v, None, group_plan(bare, batch))
    torch.testing.assert_close(
        layer(q, k, v, None, group.plan(batch)), expected, rtol=1e-5, atol=1e-5
    )


def group_plan(layer: Any, batch: Batch) -> Any:
    return layer.group.plan(batch)


@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("store", ["TORCH_STORE", "NATIVE_STORE"])
def test_latent_attention(store: str, absorbed: bool) -> None:
    """The rope parts of query and rope key turn, the latent doesn't; prefill and decode alike."""
    rope = RopeSpec(rotary_size=8, pairing="gptj", attention_factor=1.1)
    spec = LayerSpec(
        kind=AttentionKind.MLA, num_heads=4, head_size=24, v_head_size=16, dtype="float32",
        latent=LatentSpec(rank=32, rope_head_size=8), rope=rope,
    )  # fmt: skip
    weights = () if absorbed else latent_weights(spec, torch.Generator().manual_seed(1))
    group = LayerGroup(select(spec, "cpu", backend=f"store={store}"))
    layer = LatentAttention(group, *weights, rotate=True)
    bare = LatentAttention(select(spec.replace(rope=None), "cpu"), *weights)
    queries, lens = ([1, 1], [9, 30]) if absorbed else ([1, 12], [9, 12])
    tokens, width = sum(queries), 40 if absorbed else 24
    table = torch.arange(8).int().view(2, 4)
    batch = Batch.from_lens(queries, lens, table, group.cache_format.block_size)
    query, latent, key = (torch.randn(tokens, *s) for s in ((4, width), (32,), (8,)))
    caches = [g.allocate_cache(8) for g in (group, bare.group)]
    for cache in caches:
        cache.key.copy_(torch.linspace(-1, 1, cache.key.numel()).view_as(cache.key))
    at = batch.token_positions
    turned = rotate(query, at, rope, offset=width - 8).float()
    turned_key = rotate(key[:, None], at, rope)[:, 0].float()
    expected = bare(turned, latent, turned_key, caches[1], bare.group.plan(batch))
    found = layer(query, latent, key, caches[0], group.plan(batch))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(caches[0].key, caches[1].key, rtol=1e-6, atol=1e-6)


def test_compiled_whole() -> None:
    layers = Layers(SPEC)
    fused = torch.randn(4, 256)
    compiled = torch.compile(
        lambda x, plan: layers.layer(x * 2, None, None, layers.caches[0], plan),
        fullgraph=True,
        backend="eager",
    )
    for lens in ([2, 2], [3, 1]):
        plan = layers.group.plan(layers.batch(lens, [9, 20]))
        with torch.no_grad():
            found = compiled(fused, plan)
            expected = layers.layer(fused * 2, None, None, layers.caches[0], plan)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("scaling", ["none", "dynamic"])
def test_bounds_of_lengths_say_no_position(scaling: str) -> None:
    """Lengths that only the device has: of given positions a step turns right, without them by none."""
    rope = RopeSpec(rotary_size=32)
    if scaling == "dynamic":
        rope = RopeSpec(rotary_size=32, scaling="dynamic", factor=4.0, original_length=16)
    spec = SPEC.replace(rope=rope)
    query, key, value = torch.randn(1, 4, 32), torch.randn(1, 2, 32), torch.randn(1, 2, 32)
    table, slot = torch.tensor([[0, 1, 2]]).int(), torch.tensor([19])
    starts, ends = torch.tensor([0, 1]).int(), torch.tensor([20]).int()

    def attended(spec: LayerSpec, lens: list[int], positions: Tensor | None = None) -> Tensor:
        layer = Attention(select(spec, "cpu", backend="VANILLA"), rotate=True)
        cache = layer.group.allocate_cache(3)
        cache.key.fill_(0.5)
        cache.value.copy_(torch.linspace(-1, 1, cache.value.numel()).view_as(cache.value))
        batch = Batch.on_buffers([0, 1], lens, starts, ends, table, slot, positions)
        out = layer(query, key, value, cache, batch)
        assert isinstance(out, Tensor)
        return out

    expected, bounded = attended(spec, [20]), spec.replace(length_bounds=True)
    for positions in [None] if scaling == "none" else [None, torch.tensor([19])]:
        with pytest.raises(BatchError, match="leaves to the device the lengths"):
            attended(bounded, [40], positions)
    if scaling == "none":
        assert torch.equal(attended(bounded, [40], torch.tensor([19])), expected)
        longer = Batch.on_buffers([0, 1], [40], starts, ends, table, slot)
        exact = Batch([0, 1], [20], table, slot)
        rotations = [rotation_of(spec, batch) for batch in (longer, exact)]
        assert rotations[0] is not None and rotations[1] is not None
        assert torch.equal(rotations[0].turns, rotations[1].turns)


@pytest.mark.parametrize("prompts", [0, 1])
def test_captured_positions_follow_the_device_s_lengths(prompts: int) -> None:
    """A step whose host lengths are bounds: the graph's rows are turned by what the device has."""
    table, starts = torch.arange(16).int().view(2, 8), torch.tensor([0, 1, 2]).int()
    step = Batch.on_buffers(
        [0, 1, 2], [40, 50], starts, torch.tensor([20, 31]).int(), table, torch.tensor([19, 158])
    )
    buffers = StepBuffers(2, 1, 64, 16, "cpu", axes=1)
    if prompts:
        buffers = MixedBuffers(StepSize(2, prompts=1, prompt_tokens=4), 64, 16, "cpu", axes=1)
    buffers.fill(step)
    assert buffers.positions is not None
    assert [p for p in buffers.positions.tolist() if p] == [19, 30]


def test_a_captured_plan_is_refilled_in_place() -> None:
    rope = RopeSpec(rotary_size=32, temperature=0.1, temperature_length=4)
    group = LayerGroup(select(SPEC.replace(rope=rope), "cpu"))
    table = torch.arange(16).int().view(2, 8)
    first = group.plan(Batch.from_lens([1, 1], [3, 4], table, 16))
    held = first.before.rotation.turns, first.before.rotation.query_scale
    places = [tensor.data_ptr() for tensor in held]
    batch = Batch.from_lens([1, 1], [30, 50], table, 16)
    second = group.plan(batch, reuse=first)
    refilled = second.before.rotation
    assert [refilled.turns.data_ptr(), refilled.query_scale.data_ptr()] == places
    fresh = group.plan(batch).before.rotation
    assert torch.equal(held[0], fresh.turns) and torch.equal(held[1], fresh.query_scale)
    wanted = query_temperature(rope, torch.tensor([29, 49]))
    torch.testing.assert_close(held[1].double(), wanted, rtol=1e-6, atol=0)


def test_a_captured_plan_s_angles_are_computed_in_its_own_tensors() -> None:
    spec = SPEC.replace(
        rope=RopeSpec(rotary_size=32, scaling="linear", factor=4.0, attention_factor=1.1)
    )
    buffers = StepBuffers(2, 1, 128, 16, "cpu", axes=1)
    held = rotation_of(spec, buffers.batch([3, 4]))
    written: list[torch.Tensor] = []
    for lens in ([30, 50], [100, 1]):
        buffers.positions.copy_(torch.tensor(lens) - 1)
        batch = buffers.batch(lens)
        written.clear()
        with Operators(lambda name, args, result: written.append(result)):
            assert rotation_of(spec, batch, held) is held
        own = (buffers.positions, held.turns, held.angles, _on(spec.rope, 0, torch.device("cpu")))
        places, here = ({t.untyped_storage().data_ptr() for t in some} for some in (written, own))
        assert places and places <= here
        assert torch.equal(held.turns, rotation_of(spec, batch).turns)


def test_who_rotates_has_to_be_said() -> None:
    selection = select(SPEC, "cpu")
    with pytest.raises(SpecError, match="rotate=True if"):
        Attention(selection)
    assert not Attention(selection, rotate=False).params.rotate
    with pytest.raises(SpecError, match="rotate=True, and the spec has no rope"):
        Attention(select(SPEC.replace(rope=None), "cpu"), rotate=True)
    with pytest.raises(SpecError, match=r"qkv_bias has shape \(7,\)"):
        Attention(selection, rotate=True, qkv_bias=torch.zeros(7))
    layer = Attention(selection, rotate=True)
    cache = layer.group.allocate_cache(2)
    with pytest.raises(BatchError, match="store\\(\\) writes keys"):
        layer.store(torch.randn(1, 2, 32), torch.randn(1, 2, 32), cache, torch.zeros(1).long())
    assert "in the call in which" in selection.explain()


@pytest.mark.parametrize(
    ("positions", "says"),
    [
        (torch.zeros(3, 4).long(), "takes one axis"),
        (torch.zeros(5).long(), "shape (4,)"),
        (torch.zeros(4), "torch.int64"),
        (torch.tensor([0, 1, -1, 3]), "negative for token 2"),
    ],
)
def test_bad_positions(positions: Tensor, says: str) -> None:
    layers = Layers(SPEC)
    q, k, v = layers.tokens(4)
    layers.caches[0].key.zero_()
    with pytest.raises(BatchError) as caught:
        layers.layer(q, k, v, layers.caches[0], layers.batch([4], [4], positions=positions))
    assert says in str(caught.value) and layers.caches[0].key.eq(0).all()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope": RopeSpec(rotary_size=64)}, "head_size=32"),
        ({"rope": RopeSpec(rotary_size=32, positions="cache"), "cached": False}, "keeps none"),
    ],
)
def test_impossible_layers(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        SPEC.replace(**changes)


def streaming(
    cached: list[Tensor], query: Tensor, window: int, sinks: int, rope: RopeSpec
) -> Tensor:
    """Keep the first tokens and the last ones, number what is left anew, turn, attend: in float64."""
    keep = [i for i in range(len(cached[0])) if i < sinks or i >= len(cached[0]) - window]
    keys, values = (x[keep].double() for x in cached)
    keys = rotate(keys, torch.arange(len(keep)), rope)
    turned = rotate(query, torch.tensor([len(keep) - 1]), rope)
    return attend(turned, keys, values)[0]


def test_positions_within_the_cache_are_streaming_llm_s() -> None:
    rope = RopeSpec(rotary_size=32, base=30.0, positions="cache")
    spec = SPEC.replace(rope=rope, sliding_window=9, sink_tokens=3)
    group = LayerGroup(select(spec, "cpu"))
    layer, cache = Attention(group, rotate=True), group.allocate_cache(4)
    q, k, v = Layers(SPEC).tokens(50)
    table = torch.arange(4).int()[None]
    found = []
    for start, stop in ((0, 20), *((i, i + 1) for i in range(20, 50))):
        batch = Batch.from_lens([stop - start], [stop], table, group.cache_format.block_size)
        rows = slice(start, stop)
        found.append(layer(q[rows], k[rows], v[rows], cache, batch))
    expected = [streaming([k[: i + 1], v[: i + 1]], q[i : i + 1], 9, 3, rope) for i in range(50)]
    torch.testing.assert_close(torch.cat(found).double(), torch.cat(expected), rtol=0, atol=2e-5)
    stored = cache.key.flatten(0, 1)[:50]
    assert torch.equal(stored, k)  # as they came


def test_kernels_that_do_not_turn_what_they_read_say_so() -> None:
    spec = SPEC.replace(rope=RopeSpec(rotary_size=32, positions="cache"))
    chosen = select(spec, "cpu").decision
    assert (chosen.prefill, chosen.decode) == ("TORCH_SDPA", "TORCH_SDPA")
    native = [v for v in chosen.verdicts() if v.backend == "NATIVE_ATTN"]
    assert native and all("cache_positions" in str(v.rejections) for v in native)
    with pytest.raises(SpecError, match="pass rotate=True"):
        Attention(select(spec, "cpu"), rotate=False)
