"""Is a rotary embedding what transformers' own modules and formulas make of it?"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from polyattn import Attention, LayerGroup, LayerSpec, select
from polyattn.errors import SpecError
from polyattn.families.attention.rope import angles, inv_freq, query_temperature, rotate
from polyattn.spec.decompose import group_layers
from polyattn.spec.rope import RopeSpec
from polyattn_models import layer_specs
from tiny import tiny_config
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.beam.modeling_beam import compute_attention_scaling
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as rotate_gptj
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale
from transformers.models.nanochat import modeling_nanochat as nanochat
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

SHORT, LONG = [1.0 + 0.1 * i for i in range(32)], [2.0 + 0.3 * i for i in range(32)]
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 512},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    "yarn of DeepSeek": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "beta_fast": 16,
                         "mscale_all_dim": 1.0, "original_max_position_embeddings": 512},
    "yarn not truncated": {"rope_type": "yarn", "factor": 8.0, "truncate": False,
                           "original_max_position_embeddings": 512},
    "longrope": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG,
                 "original_max_position_embeddings": 512},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 2.0},
    "proportional, all": {"rope_type": "proportional"},
}  # fmt: skip


def config(**changes: Any) -> LlamaConfig:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1}
    return LlamaConfig(**(sizes | {"max_position_embeddings": 2048} | changes))


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [100, 2048, 5000])
def test_frequencies_are_those_of_transformers(name: str, length: int) -> None:
    cfg = config(rope_parameters={"rope_theta": 50000.0} | SCALINGS[name])
    (spec,) = layer_specs(cfg)
    expected, factor = ROPE_INIT_FUNCTIONS[SCALINGS[name]["rope_type"]](cfg, "cpu", seq_len=length)
    assert spec.rope is not None and spec.rope.base == 50000.0
    assert spec.rope.attention_factor == pytest.approx(factor)
    frequencies = inv_freq(spec.rope, length)
    assert frequencies.dtype == torch.float64
    torch.testing.assert_close(frequencies, expected.double(), rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("pairing", ["neox", "gptj"])
def test_rotation_is_that_of_transformers(pairing: str) -> None:
    cfg = config(rope_parameters={"rope_theta": 500.0} | SCALINGS["yarn"])
    rope = dataclasses.replace(layer_specs(cfg)[0].rope, pairing=pairing)
    x, positions = torch.randn(9, 4, 64), torch.randint(0, 1000, (9,))
    cos, sin = LlamaRotaryEmbedding(cfg)(x, positions[None])
    if pairing == "gptj":
        cos, sin = (t[..., :32].repeat_interleave(2, -1) for t in (cos, sin))
    apply = apply_rotary_pos_emb if pairing == "neox" else rotate_gptj
    expected, _ = apply(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    out = rotate(x, positions, rope)
    torch.testing.assert_close(out, expected[0].transpose(0, 1).double(), rtol=0, atol=2e-3)
    assert (out - x).abs().max() > 0.5


def test_part_of_a_head() -> None:
    x, positions = torch.randn(5, 2, 24), torch.arange(5)
    rope = RopeSpec(rotary_size=8)
    out = rotate(x, positions, rope, offset=16)
    assert torch.equal(out[..., :16], x[..., :16].double())
    assert torch.equal(out[..., 16:], rotate(x[..., 16:], positions, rope))


@pytest.mark.parametrize(
    ("model_type", "module"),
    [("qwen2_vl_text", Qwen2VLRotaryEmbedding), ("qwen3_vl_text", Qwen3VLTextRotaryEmbedding)],
)
def test_positions_of_three_axes(model_type: str, module: Any) -> None:
    cfg = tiny_config(model_type)
    rope = layer_specs(cfg)[0].rope
    positions = torch.randint(0, 50, (3, 11))
    cos, _ = module(cfg)(torch.zeros(1), positions[:, None])
    cos = cos.reshape(-1, 11, rope.rotary_size) if cos.ndim == 4 else cos
    if len(cos) == 3:  # Qwen2-VL chooses each pair's axis when it applies them
        parts = cos.split(list(rope.sections) * 2, dim=-1)
        cos = torch.cat([part[i % 3] for i, part in enumerate(parts)], -1)[None]
    expected = cos[0, :, : rope.rotary_size // 2].double()
    torch.testing.assert_close(angles(rope, positions).cos(), expected, rtol=0, atol=1e-4)


def test_temperature_is_that_of_transformers() -> None:
    rope = layer_specs({"model_type": "ministral3"})[0].rope
    assert (rope.temperature, rope.temperature_length) == (0.1, 16384)
    positions = torch.tensor([0, 5, 16383, 16384, 100000])
    expected = get_llama_4_attn_scale(positions[None], 0.1, 16384).flatten().double()
    torch.testing.assert_close(query_temperature(rope, positions), expected, rtol=1e-6, atol=0)


def test_a_power_of_the_position_is_that_of_transformers() -> None:
    rope = layer_specs(tiny_config("beam"))[-1].rope
    positions = torch.tensor([0, 5, 2047, 100000])
    expected = compute_attention_scaling(positions[None]).flatten().double()
    torch.testing.assert_close(query_temperature(rope, positions), expected, rtol=1e-6, atol=0)


def test_clockwise_is_transformers_nanochat() -> None:
    cfg = tiny_config("nanochat")
    rope = layer_specs(cfg)[0].rope
    x, positions = torch.randn(9, 4, rope.rotary_size), torch.randint(0, 50, (9,))
    cos, sin = nanochat.NanoChatRotaryEmbedding(cfg)(x, positions[None])
    each = x.transpose(0, 1)[None]
    expected = nanochat.apply_rotary_pos_emb(each, each, cos, sin)[0][0].transpose(0, 1)
    torch.testing.assert_close(rotate(x, positions, rope), expected.double(), rtol=0, atol=1e-4)
    stretched = RopeSpec(
        rotary_size=64, scaling="llama3", factor=4.0, original_length=64, low_freq_factor=1.0,
        high_freq_factor=4.0,
    )  # fmt: skip
    assert torch.equal(
        inv_freq(dataclasses.replace(stretched, clockwise=True)), -inv_freq(stretched)
    )


def test_a_layer_does_not_turn_by_what_is_learned() -> None:
    rope = RopeSpec(rotary_size=64, learned=True)
    selection = select(LayerSpec(num_heads=2, head_size=64, rope=rope), "cpu")
    assert any("the model, by its weights" in note for note in selection.decision.notes)
    group = LayerGroup(selection)
    Attention(group, rotate=False)
    with pytest.raises(SpecError, match="rope.learned=True.*pass rotate=False"):
        Attention(group, rotate=True)


def test_round_trip_and_hash() -> None:
    cfg = config(rope_parameters={"rope_theta": 500.0} | SCALINGS["longrope"])
    (spec,) = layer_specs(cfg)
    again = LayerSpec.from_json(spec.to_json())
    assert again == spec and hash(again) == hash(spec) and again.rope == spec.rope
    assert spec.replace(num_heads=8).rope == spec.rope


def test_rope_is_asked_of_no_attention_kernel() -> None:
    plain = LayerSpec(num_heads=4, head_size=64)
    near, far = (plain.replace(rope=RopeSpec(rotary_size=64, base=b)) for b in (1e4, 1e6))
    assert near.features == plain.features and near != plain and near != far
    assert group_layers([near, far, plain]) == {near: [0], far: [1], plain: [2]}
    found, bare = select(near, "h100-sxm"), select(plain, "h100-sxm")
    assert found.spec == near and found.decision.chosen == bare.decision.chosen
    assert found.cache_format == bare.cache_format
    assert set(found.decision.notes) - set(bare.decision.notes)  # who rotates


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"rotary_size": 7}, "rope.rotary_size=7"),
        ({"rotary_size": True}, "rope.rotary_size=True"),
        ({"pairing": "neo"}, "did you mean 'neox'"),
        ({"base": 0.0}, "rope.base=0.0"),
        ({"base": float("nan")}, "rope.base=nan"),
        ({"base": 10**400}, "rope.base=1000"),
        ({"temperature_offset": 10**400}, "rope.temperature_offset=1000"),
        ({"scaling": "yran"}, "did you mean 'yarn'"),
        ({"scaling": "yarn"}, "needs rope.original_length"),
        ({"scaling": "longrope", "original_length": 8, "short_factors": [1.0]}, "1 entries"),
        ({"sections": [1, 2]}, "must sum to the 32"),
        ({"temperature": 0.1}, "temperature_length"),
        ({"temperature_power": 0.1}, "needs rope.temperature_length"),
        ({"learned": 1}, "rope.learned=1 must be true or false"),
        ({"clockwise": True, "positions": "cache"}, "rope.clockwise=True doesn't go with"),
        ({"positions": "relative"}, "rope.positions='relative'"),
        ({"thetaa": 1.0}, "no field 'thetaa'"),
    ],
)
def test_impossible_ropes(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(SpecError) as caught:
        RopeSpec.from_dict({"rotary_size": 64} | changes)
    assert names in str(caught.value)
