"""Is every model read as its own code computes? Tiny models of transformers are the oracle."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections import Counter
from typing import Any

import oracle
import pytest
import torch
import transformers
from polyattn import LayerSpec
from polyattn.errors import ConfigError
from polyattn.families.attention.alibi import alibi_slopes
from polyattn.families.attention.rope import rotate
from polyattn_models import READERS, ModelLayers, model_layers
from polyattn_models.encoders import RANDOM_BLOCKS
from polyattn_models.gpt import HASHED
from polyattn_models.multimodal import DRAFTS, NAMED, WRAPPERS
from tiny import CONFIG_MAPPING, build, inputs_of, tiny_config, tiny_values
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from variations import variations

transformers.logging.set_verbosity_error()

PUBLISHERS_CODE = {"kimi_k2", "mimo", "minimax_m1", "minimax_text_01", "rwkv5", "rwkv6", "rwkv7"}
"""Types that transformers has no code for."""
BY_THEIR_TOWERS = {
    "gemma3n",
    "llama4_vision_model",
    "mllama",
    "qwen2_5_omni",
    "qwen3_omni_moe",
    *WRAPPERS,
    *NAMED,
}
"""Needs a library for images, or images; the towers are compared by themselves."""
BY_ATTRIBUTES = {"bloom", "mpt"}
"""Models that add ALiBi outside any attention interface: compared below."""


def parts(model: ModelLayers) -> list[LayerSpec | None]:
    """Return the specs in the order in which the model's forward runs them."""
    layers = model.layers
    if model.model_type in ("clip", "siglip"):
        layers = model.tower("vision_model") + model.tower("text_model")
    elif "vision" in model.towers and "text" in model.towers:
        layers = model.tower("text")
    out: list[LayerSpec | None] = []
    for layer in layers:
        if model.model_type == "diffllama":  # the module attends once for each half of a value
            half = layer.specs[0].replace(v_head_size=layer.specs[0].head_size)
            out += [half, half.replace(kv_source=len(out))]
            continue
        out += [None if spec.variant else spec for spec in layer.specs]
        out += [None for _ in layer.missing]
    return out


@functools.cache
def accepted() -> list[str]:
    """Return the types whose tiny model can be compared."""
    return sorted(set(READERS) - PUBLISHERS_CODE - BY_THEIR_TOWERS - BY_ATTRIBUTES)


def compare(
    config: Any, values: dict[str, Any] | None = None, model: torch.nn.Module | None = None
) -> None:
    """Compare what is read with what the modules do; `model`: the config's, where it is built."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = model_layers(config if values is None else values)
        if not any(layer.specs for layer in read.layers):
            assert all(layer.missing for layer in read.layers)
            return
        model = build(config) if model is None else model
        specs = parts(read)
        if not specs:
            return
        assert oracle.differences(model, specs, **inputs_of(model, config)) == []


@pytest.mark.parametrize("model_type", accepted())
def test_specs_are_what_the_modules_do(model_type: str) -> None:
    """As an object, which lists what it derives, and as a hub file, which doesn't."""
    config = tiny_config(model_type)
    compare(config)
    values = {"model_type": model_type, "dtype": "float32"} | tiny_values(
        CONFIG_MAPPING[model_type]
    )
    by_object, by_file = model_layers(config), model_layers(values)
    if config.dtype is None:
        by_file = model_layers(values | {"dtype": "bfloat16"})
    assert by_file.layers == by_object.layers


MTP = {"use_mtp": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1}
PUBLISHED = {
    "qwen3_moe": {"max_window_layers": 2, "use_qk_norm": True, "use_sliding_window": False},
    "minimax_m2": {"use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True,
                   "attn_type_list": [1] * 4, "rotary_dim": 8} | MTP,
    "nemotron_h": {"rope_theta": 500.0, "partial_rotary_factor": 1.0, "attention_head_dim": 16,
                   "mtp_hybrid_override_pattern": "*E", "time_step_limit": [0.0, 1e308]},
    "glm_moe_dsa": {"rope_interleave": True, "indexer_rope_interleave": True,
                    "index_share_for_mtp_iteration": True, "index_topk_freq": 2,
                    "index_skip_topk_offset": 2,
                    "indexer_types": ["full", "full", "shared", "full"]},
    "qwen3_5_text": {"attn_output_gate": True, "output_gate_type": "swish",
                     "mamba_ssm_dtype": "float32", "partial_rotary_factor": 0.25},
}  # fmt: skip
"""Fields of publishers' own files that transformers' classes don't have."""


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_publishers_own_fields_say_what_the_type_does(model_type: str) -> None:
    values = tiny_values(CONFIG_MAPPING[model_type]) | PUBLISHED[model_type]
    config = CONFIG_MAPPING[model_type](**copy.deepcopy(values))
    compare(config, {"model_type": model_type, "dtype": "float32"} | copy.deepcopy(values))


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3_moe", {"max_window_layers": 2, "use_sliding_window": True}),
        ("qwen3_moe", {"use_qk_norm": False}),
        ("minimax_m2", {"attn_type_list": [1, 1, 0, 1]}),
        ("minimax_m2", {"qk_norm_type": "per_head"}),
        ("nemotron_h", {"attention_head_dim": 12}),
        ("nemotron_h", {"time_step_limit": [0.0, 0.1]}),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}),
        ("glm_moe_dsa", {"indexer_types": ["full"] * 4, "index_topk_freq": 3}),
        (
            "dots3_note_text",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "swa_rope_theta": 300.0},
        ),
        ("qwen3_5_text", {"attn_output_gate": False}),
        ("qwen3_5_text", {"partial_rotary_factor": 0.5}),
        ("tapas", {"is_decoder": True}),
    ],
)
def test_publishers_own_fields_that_say_otherwise_are_refused(
    model_type: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="|".join(changes)):
        model_layers({"model_type": model_type} | tiny_values(CONFIG_MAPPING[model_type]) | changes)


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": LINEAR}, {"rope_parameters": LINEAR, "rope_theta": 700.0},
        {"rope_parameters": {}}, {"swa_rope_theta": 300.0},
        {"rope_parameters": {
            f"{kind}_attention": dict(LINEAR) for kind in ("indexed", "sliding", "full")}},
        {"rope_parameters": LINEAR | {"rope_theta": 300.0}, "swa_rope_theta": 300.0},
    ],
    ids=str,
)  # fmt: skip
def test_windowed_layers_have_a_base_of_their_own_only_where_no_parameters_are(
    changes: dict[str, Any],
) -> None:
    values = tiny_values(CONFIG_MAPPING["dots3_note_text"]) | changes
    config = CONFIG_MAPPING["dots3_note_text"](**copy.deepcopy(values))
    compare(config, {"model_type": "dots3_note_text", "dtype": "float32"} | copy.deepcopy(values))


SEVERAL_AXES = (
    "cohere_compass_text", "cosmos3_edge_text", "glm4v_moe_text", "glm4v_text", "glm_ocr_text",
    "paddleocr_vl_text", "qwen2_5_omni_text", "qwen2_vl_text", "qwen3_omni_moe_text", "qwen3_vl_text",
)  # fmt: skip


@pytest.mark.parametrize("model_type", SEVERAL_AXES)
def test_pairs_follow_the_axes_that_the_modules_have_them_follow(model_type: str) -> None:
    config = tiny_config(model_type)
    model, (spec, *_) = build(config), model_layers(config).specs
    positions = torch.randint(0, 50, (3, 23))
    positions[:, 0] = 0
    tokens = torch.randint(3, 60, (1, 23))
    (call, *_) = oracle.record(model, input_ids=tokens, position_ids=positions[:, None])
    query = call.query[0].transpose(0, 1).double()
    assert spec.rope is not None and spec.rope.sections is not None
    expected = rotate(query[:1].expand_as(query), positions, spec.rope)
    torch.testing.assert_close(query, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("model_type", accepted())
def test_no_field_is_misread(model_type: str) -> None:
    """Every field renamed, dropped, added and changed: equal to the modules, or refused."""
    counts: Counter[str] = Counter()
    for what, values in variations(model_type):
        try:
            read = model_layers({"model_type": model_type} | copy.deepcopy(values))
        except ConfigError:
            counts["refused"] += 1
            continue
        if not any(layer.specs for layer in read.layers):
            assert all(layer.missing for layer in read.layers)
            counts["refused by name"] += 1
            continue
        try:
            config = CONFIG_MAPPING[model_type](**copy.deepcopy(values))
            model = build(config)
            with torch.no_grad():
                model(**inputs_of(model, config))
        except Exception:
            counts["no such model runs"] += 1
            continue
        try:
            compare(config, {"model_type": model_type} | copy.deepcopy(values), model)
        except AssertionError as error:
            raise AssertionError(f"{model_type}, {what}: {error}") from error
        counts["equal"] += 1
    print(model_type, dict(counts))
    assert counts["equal"] or counts["refused by name"]


@pytest.mark.parametrize("model_type", sorted(BY_ATTRIBUTES))
def test_alibi_models(model_type: str) -> None:
    config = tiny_config(model_type)
    (spec,) = set(model_layers(config).specs)
    module = next(m for m in build(config).modules() if type(m).__name__.endswith("Attention"))
    heads = module.num_heads if model_type == "bloom" else module.n_heads
    scale = module.inv_norm_factor if model_type == "bloom" else module.softmax_scale
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size) == (heads, heads, module.head_dim)
    assert math.isclose(spec.scale, scale) and spec.alibi and spec.causal and spec.rope is None
    if model_type == "bloom":
        from transformers.models.bloom.modeling_bloom import build_alibi_tensor

        bias = build_alibi_tensor(torch.ones(1, 5), heads, torch.float32)
        torch.testing.assert_close(bias[:, 0, 1] - bias[:, 0, 0], alibi_slopes(heads).float())
    else:
        from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

        bias = build_mpt_alibi_tensor(heads, 5)
        slopes = bias[:, 0, 1] - bias[:, 0, 0]
        torch.testing.assert_close(slopes, alibi_slopes(heads).float())


NEVER = {RANDOM_BLOCKS, HASHED, DRAFTS}
"""Why a type isn't served that no work of ours changes: what a token sees is drawn, or elsewhere."""


def _layers(model_type: str) -> tuple[Any, ...]:
    return model_layers(tiny_config(model_type)).served


def test_every_causal_model_is_equal_or_refused_by_name() -> None:
    refused = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in READERS]
    assert refused
    for name in refused:
        with pytest.raises(ConfigError, match=f"model_type='{name}' is unknown"):
            model_layers({"model_type": name, "num_attention_heads": 4})
    known = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(READERS))
    assert len(known) >= 187, "a type that was read isn't any more"
    for name in known:
        assert name in {*accepted(), *BY_ATTRIBUTES, *BY_THEIR_TOWERS}
    lacks = {name: {m for layer in _layers(name) for m in layer.missing} for name in known}
    served = [name for name, missing in lacks.items() if not missing]
    never = [name for name, missing in lacks.items() if missing & NEVER]
    assert len(served) >= 171 and len(served) + len(never) >= 176


def test_every_type_is_in_transformers_or_said_not_to_be() -> None:
    assert {name for name in READERS if name not in CONFIG_MAPPING} == PUBLISHERS_CODE


def test_the_table_of_models_is_fresh_and_has_all_that_are_read() -> None:
    import update_table

    assert update_table.PAGE.read_text() == update_table.page(), (
        "stale: python integrations/models/tests/update_table.py"
    )
    assert {name for kinds in update_table.MODELS.values() for name in kinds} <= set(READERS)


@pytest.mark.slow
def test_the_table_of_fields_is_fresh() -> None:
    import update_classes

    assert update_classes.TABLE.read_text() == update_classes.text(), (
        "stale: python integrations/models/tests/update_classes.py"
    )


@pytest.mark.parametrize("count", [3, 4, 9, 20])
def test_zambas_layers_without_a_list_are_its_config_s(count: int) -> None:
    """Three are fixed, the others go by a period that is counted from the fourth."""
    theirs = transformers.ZambaConfig(num_hidden_layers=count, hidden_size=64).layers_block_type
    fields = {"model_type": "zamba", "num_hidden_layers": count, "hidden_size": 64}
    layers = model_layers(fields).layers
    attends = [any(not spec.kind.is_recurrent for spec in layer.specs) for layer in layers]
    assert attends == [kind == "hybrid" for kind in theirs]
    form = layers[0].specs[-1].recurrent
    assert form is not None and form.channel_groups == 2
    with pytest.raises(ConfigError, match="n_mamba_heads=3 doesn't divide the 128 channels"):
        model_layers(fields | {"n_mamba_heads": 3})
