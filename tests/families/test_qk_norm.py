"""Does a layer that norms queries and keys give what transformers' attention modules give?"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from polyattn import Attention, Batch, LayerGroup, LayerSpec, NormSpec, RopeSpec, select
from polyattn.errors import BatchError, SpecError
from polyattn.spec.kinds import AttentionKind, Role
from polyattn.spec.latent import LatentSpec
from torch import Tensor
from transformers import Gemma3TextConfig, Olmo2Config, Qwen3Config
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.olmo2 import modeling_olmo2 as olmo2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

SIZES: dict[str, Any] = {
    "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1,
    "rms_norm_eps": 1e-2, "attention_bias": True, "attn_implementation": "eager",
}  # fmt: skip
HEADS = SIZES | {"head_dim": 16}
MODULES = {
    "qwen3": (Qwen3Config(**HEADS), qwen3.Qwen3Attention, qwen3.Qwen3RotaryEmbedding),
    "gemma3": (
        Gemma3TextConfig(**HEADS, layer_types=["full_attention"]), gemma3.Gemma3Attention,
        gemma3.Gemma3RotaryEmbedding,
    ),
    "olmo2": (Olmo2Config(**SIZES), olmo2.Olmo2Attention, olmo2.Olmo2RotaryEmbedding),
}  # fmt: skip
SPEC = LayerSpec(
    num_heads=4, num_kv_heads=2, head_size=16, dtype="float32", qk_norm=NormSpec(),
    rope=RopeSpec(rotary_size=16),
)  # fmt: skip


def module_of(name: str) -> tuple[Any, Any]:
    """Return transformers' module with random weights, and its rotary embedding."""
    config, attention, rotary = MODULES[name]
    module = attention(config, layer_idx=0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.3)
    return module.eval(), rotary(config)


def expected(name: str, module: Any, rotary: Any, x: Tensor) -> Tensor:
    """Return what the module gives for one prompt x (tokens, hidden)."""
    at = torch.arange(len(x))[None]
    layers = {"layer_type": "full_attention"} if name == "gemma3" else {}
    mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        out = module(
            x[None], position_embeddings=rotary(x[None], at, **layers), attention_mask=mask
        )
    return out[0][0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("store", ["TORCH_STORE", "NATIVE_STORE"])
@pytest.mark.parametrize("name", MODULES)
def test_like_transformers(name: str, store: str) -> None:
    """A prompt in two steps, from projections that have no bias yet, to the module's output."""
    module, rotary = module_of(name)
    (spec,) = LayerSpec.from_hf_config(MODULES[name][0].to_dict() | {"dtype": "float32"})
    assert spec.qk_norm is not None and spec.qk_norm.eps == 1e-2
    group = LayerGroup(select(spec, "cpu", backend=f"store={store}"))
    projections = [getattr(module, f"{x}_proj") for x in "qkv"]
    layer = Attention(
        group, rotate=True, q_norm=module.q_norm.weight, k_norm=module.k_norm.weight,
        qkv_bias=torch.cat([p.bias for p in projections]),
    )  # fmt: skip
    x = torch.randn(9, 48)
    cache, table = group.allocate_cache(4), torch.tensor([[1, 2]], dtype=torch.int32)
    out = []
    for first, last in ((0, 6), (6, 9)):
        batch = Batch.from_lens([last - first], [last], table, group.cache_format.block_size)
        rows = torch.cat([x[first:last] @ p.weight.detach().T for p in projections], 1)
        out.append(layer(rows, None, None, cache, batch).flatten(1))
    with torch.no_grad():
        found = module.o_proj(torch.cat(out))
    wanted = expected(name, module, rotary, x)
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


def test_a_layer_without_a_cache_and_one_whose_keys_are_another_s() -> None:
    weight = torch.rand(16) + 0.5
    q, k, v = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    normed = [torch.nn.functional.rms_norm(x, (16,), weight, 1e-6) for x in (q, k)]
    spec = SPEC.replace(cached=False, role=Role.ENCODER_ONLY, causal=False, rope=None)
    layer = Attention(spec, q_norm=weight, k_norm=weight)
    bare = Attention(spec.replace(qk_norm=None))
    batch = Batch([0, 2, 5], [2, 3])
    wanted = bare(*normed, v, None, bare.group.plan(batch))
    torch.testing.assert_close(layer(q, k, v, None, layer.group.plan(batch)), wanted)
    group = LayerGroup(select(SPEC.replace(rope=None), "cpu"))
    cache, table = group.allocate_cache(2), torch.tensor([[1]], dtype=torch.int32)
    plan = group.plan(Batch.from_lens([5], [5], table, group.cache_format.block_size))
    both = Attention(group, q_norm=weight, k_norm=weight)(q, k, v, cache, plan)
    reader = SPEC.replace(rope=None, kv_source=0)
    again = Attention(reader, q_norm=weight)
    plan = again.group.plan(Batch.from_lens([5], [5], table, group.cache_format.block_size))
    torch.testing.assert_close(again(q, None, None, cache, plan), both)


def test_weights_that_are_loaded_later_count() -> None:
    weight = torch.zeros(16)
    spec = SPEC.replace(rope=None, qk_norm=NormSpec(offset=1.0))
    layer = Attention(spec, q_norm=weight, k_norm=weight)
    torch.testing.assert_close(layer.params.q_norm, torch.ones(16))
    weight += 2
    torch.testing.assert_close(layer.params.k_norm, torch.full((16,), 3.0))


def test_bad_input_is_refused_by_name() -> None:
    weight = torch.ones(16)
    both = {"q_norm": weight, "k_norm": weight}
    with pytest.raises(SpecError, match=r"q_norm is missing.*qk_norm=None"):
        Attention(SPEC, rotate=True)
    layer = Attention(SPEC.replace(rope=None), q_norm=weight)
    cache, table = layer.group.allocate_cache(2), torch.tensor([[1]], dtype=torch.int32)
    batch = Batch.from_lens([1], [1], table, layer.group.cache_format.block_size)
    with pytest.raises(BatchError, match="k_norm is missing"):
        layer(*torch.randn(1, 8, 16).split((4, 2, 2), 1), cache, batch)
    with pytest.raises(SpecError, match="q_norm was given with rotate=False"):
        Attention(SPEC, rotate=False, **both)
    for wrong in (0, 1, "no", torch.ones(2)):  # 0 was neither refused nor False
        with pytest.raises(SpecError, match="rotate=.* must be True, False, or None"):
            Attention(SPEC, rotate=wrong, **both)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="q_norm was given, and the spec has no qk_norm"):
        Attention(SPEC.replace(qk_norm=None), rotate=True, **both)
    with pytest.raises(SpecError, match=r"k_norm has shape \(64,\); it must be \(16,\)"):
        Attention(SPEC, rotate=True, q_norm=weight, k_norm=torch.ones(64))
    Attention(SPEC, rotate=False)
    for changes, said in (
        ({"over": "row"}, "qk_norm.over='row' is unknown"),
        ({"eps": -1.0}, "qk_norm.eps=-1.0 must be 0 or more"),
        ({"offset": float("nan")}, "qk_norm.offset=nan must be a finite number"),
    ):
        with pytest.raises(SpecError, match=said):
            NormSpec(**changes)  # type: ignore[arg-type]
    latent = LatentSpec(rank=32, rope_head_size=8)
    with pytest.raises(SpecError, match=r"qk_norm=NormSpec.*leave it out for mla"):
        LayerSpec(
            kind=AttentionKind.MLA, num_heads=4, head_size=24, latent=latent, qk_norm=NormSpec()
        )
    with pytest.raises(SpecError, match="qk_norm=3 must be a NormSpec"):
        SPEC.replace(qk_norm=3)


def test_a_spec_is_its_json_and_explains_itself() -> None:
    spec = SPEC.replace(qk_norm=NormSpec(over="token", eps=1e-5))
    assert LayerSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    for store in ("TORCH_STORE", "NATIVE_STORE"):
        text = select(spec, "cpu", backend=f"store={store}").explain()
        assert "RMS norm of each token's query and key and rotary embedding" in text
        assert f"where a layer has rotate=True: in the call in which {store} stores" in text
    alone = select(dataclasses.replace(spec, rope=None), "cpu").explain()
    assert "where a layer has q_norm: in the call in which" in alone
