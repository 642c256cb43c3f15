"""Is a config that can't be read refused by field, value and remedy, and never misread?"""

from __future__ import annotations

import copy
import json
import math
import re
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from distributions import install
from polyattn import AttentionKind, LayerSpec, Role
from polyattn.errors import ConfigError, nearest
from polyattn.tools.cli.models import bundled, bundled_models
from polyattn_models import (
    READERS,
    cache_scales,
    is_cache_scale,
    layer_specs,
    model_layers,
    read_config,
    weights_quantized,
)
from polyattn_models.config import read_values
from polyattn_models.encoders import READERS as ENCODERS
from polyattn_models.rotary import KNOWN
from tiny import CONFIG_MAPPING, tiny_values

LLAMA = {"model_type": "llama", "hidden_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
ODD: list[Any] = [
    "x",
    -1,
    0,
    1.5,
    True,
    10**30,
    10**400,
    math.nan,
    math.inf,
    [],
    {},
    [1],
    {"a": 1},
    None,
    "12",
]


RWKV7 = {
    "model_type": "rwkv7", "hidden_size": 256, "head_dim": 64, "num_hidden_layers": 2,
    "attn": None, "attn_mode": "chunk", "decay_low_rank_dim": 64, "norm_eps": 1e-5,
    "hidden_act": "sqrelu", "fuse_norm": False, "vocab_size": 65536, "num_heads": None,
}  # fmt: skip
"""As the publisher's 0.1B checkpoint says it, smaller."""


RWKV5 = {
    "model_type": "rwkv5", "hidden_size": 256, "attention_hidden_size": 256, "head_size": 64,
    "head_size_divisor": 8, "num_attention_heads": 64, "num_hidden_layers": 2, "rescale_every": 6,
    "layer_norm_epsilon": 1e-5, "model_version": "5_2", "intermediate_size": None,
}  # fmt: skip
"""As the publisher's world models say it, smaller."""
RWKV6_OF_FLA = {
    "model_type": "rwkv6", "hidden_size": 256, "num_heads": 2, "expand_k": 0.5, "expand_v": 1.0,
    "num_hidden_layers": 2, "attn_mode": "chunk", "proj_low_rank_dim": 32, "gate_low_rank_dim": 64,
    "hidden_act": "sqrelu", "hidden_ratio": 3.5, "norm_first": True, "norm_bias": True, "attn": None,
}  # fmt: skip
"""The fields of fla 0.6's class."""


def refused(values: dict[str, Any] | Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        layer_specs(values, **options)
    return str(caught.value)


def test_unknown_type_says_what_it_looks_like_and_how_to_say_so() -> None:
    values = LLAMA | {"model_type": "my_llama", "num_key_value_heads": 2}
    text = refused(values)
    assert "model_type='my_llama' is unknown" in text and "assume='llama'" in text
    assert layer_specs(values, assume="llama") == layer_specs(values | {"model_type": "llama"})
    assert "did you mean 'llama'" in refused(values, assume="llma")


def test_an_unread_field_is_refused_unless_it_is_said_to_be_harmless(
    caplog: pytest.LogCaptureFixture,
) -> None:
    values = LLAMA | {"sliding_window": 8}
    assert "sliding_window=8" in refused(values) and "ignore=('sliding_window',)" in refused(values)
    assert layer_specs(values, ignore=["sliding_window"]) == layer_specs(LLAMA)
    assert not caplog.records
    layer_specs(LLAMA, ignore=["slidingwindow"])
    assert "ignore='slidingwindow': " in caplog.text and "has no such field" in caplog.text
    assert layer_specs(LLAMA | {"sliding_window": None}) == layer_specs(LLAMA)
    inner = LLAMA | {"sliding_window": 8}
    assert "sliding_window=8" in refused({"model_type": "llava", "text_config": inner})


def test_a_field_that_nobody_reads_is_harmless(caplog: pytest.LogCaptureFixture) -> None:
    beside = {
        "use_mrope": True,
        "norm_type": "x",
        "full_attn_mod": 3,
        "transformers.js_config": {"a": 1},
    }
    assert layer_specs(LLAMA | beside) == layer_specs(LLAMA)
    neutral = {"is_causal": True, "alibi": False, "layer_types": None, "attention_chunk_size": None}
    assert layer_specs(LLAMA | neutral) == layer_specs(LLAMA)
    changes: list[dict[str, Any]] = [
        {"is_causal": False}, {"alibi": True}, {"layer_types": ["full_attention"] * 2},
        {"dual_chunk_attention_config": {"chunk_size": 4}}, {"num_key_value_head": 2},
    ]  # fmt: skip
    for read in changes:
        (name,) = read
        assert f"{name}=" in refused(LLAMA | read)
        assert layer_specs(LLAMA | read, strict=False) == layer_specs(LLAMA)
        assert f"{name}=" in caplog.text


def test_code_that_nobody_here_has_seen_may_read_any_field() -> None:
    """A type that is read as another: what transformers never heard of isn't passed over."""
    values = LLAMA | {"model_type": "my_llama", "vocab_size": 7, "rms_norm_eps": 1e-6}
    assert layer_specs(values, assume="llama") == layer_specs(LLAMA)
    assert "token_shift=2" in refused(values | {"token_shift": 2}, assume="llama")


def test_a_wrapper_says_what_its_text_is() -> None:
    text = LLAMA | {"num_key_value_heads": 2}
    for name in ("text_config", "llm_config"):
        wrapper = {"model_type": "my_vlm", name: text, "vision_config": {"depth": 3}, "merge": 2}
        said = refused(wrapper)
        assert (
            "its text_config is of type 'llama', which is known" in said
            and "--assume llama" in said
        )
        model = model_layers(wrapper, assume="llama")
        assert model.specs == layer_specs(text) and model.towers == ("text", "vision")
    known = {"model_type": "internvl", "text_config": text, "vision_config": {"model_type": "x"}}
    assert layer_specs(known) == layer_specs(text)
    assert "attn_window" not in refused(known | {"text_config": text | {"model_type": "x"}})


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "my_encoder", "rope_theta": 1e4},
        {"model_type": "x", "architectures": ["XForMaskedLM"], "num_key_value_heads": 2},
        {"model_type": "llama_bidirec", "num_key_value_heads": 2},
        {"model_type": "lama", "is_causal": False},
        {"model_type": "x", "type_vocab_size": 2, "num_attention_heads": 4},
        {"model_type": "x", "image_size": 224, "num_attention_heads": 4},
    ],
)
def test_no_causal_type_is_suggested_for_an_encoder(values: dict[str, Any]) -> None:
    said = refused(values)
    for name in re.findall(r"assume='([^']*)'|mean '([^']*)'", said):
        assert "".join(name) in ENCODERS, said


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "x", "alibi": True, "num_attention_heads": 4},
        {"model_type": "x", "position_embedding_type": "alibi", "num_attention_heads": 4},
        {"model_type": "x", "attn_config": {"alibi": True}, "num_key_value_heads": 4},
        {"model_type": "refact", "num_attention_heads": 4},
        {"model_type": "lama", "use_alibi": True, "rope_theta": 1e4},
    ],
)
def test_no_type_without_alibi_is_suggested_for_a_model_with_it(values: dict[str, Any]) -> None:
    said = refused(values)
    for name in re.findall(r"assume='([^']*)'|mean '([^']*)'", said):
        assert "".join(name) in ("bloom", "mpt"), said


PACKAGE = """
from polyattn import LayerSpec

def read(cfg):
    heads = cfg.need("heads")
    spec = LayerSpec(num_heads=heads, head_size=cfg.need("width") // heads, dtype=cfg.dtype)
    return LAYERS
"""


@pytest.mark.parametrize(
    "layers", ['[spec] * cfg.need("depth")', '{"text": [(spec,)] * cfg.need("depth")}']
)
def test_a_package_adds_a_type(
    layers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = (
        "[polyattn.readers]\nmy_type = my_models:read\nbroken = my_models:absent\nllama = x:y\n"
    )
    install(tmp_path, "my-models", "1.0", points=points)
    (tmp_path / "my_models.py").write_text(PACKAGE.replace("LAYERS", layers))
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    values = {"model_type": "my_type", "heads": 4, "width": 64, "depth": 3, "vocab_size": 100}
    assert [spec.head_size for spec in layer_specs(values)] == [16] * 3
    assert "lacks the field 'heads'" in refused({"model_type": "my_type"})
    assert "attn_window=4" in refused(values | {"attn_window": 4})
    assert "from my-models can't be loaded" in refused({"model_type": "broken"})
    assert len(layer_specs(LLAMA)) == 2  # our own types stay ours
    assert layer_specs(values | {"model_type": "their_type"}, assume="my_type") == layer_specs(
        values
    )


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"hidden_size": 97}, "hidden_size=97 isn't divisible by num_attention_heads=4"),
        ({"num_attention_heads": "4"}, "num_attention_heads='4' must be a positive integer"),
        ({"num_key_value_heads": 3}, "num_heads=4 is not divisible by num_kv_heads=3"),
        ({"rope_scaling": {"type": "yran", "factor": 2.0}}, "did you mean 'yarn'"),
        ({"rope_scaling": {"type": "yarn"}, "max_position_embeddings": "4k"}, "'4k'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_parameters.factor=None"),
        ({"rope_scaling": {"type": "linear", "factr": 2.0}}, "rope_parameters.factr=2.0"),
        ({"rope_scaling": 3}, "rope_parameters=3 must be a JSON object"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0 must be a positive number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"torch_dtype": "int3"}, "dtype='int3'"),
        ({"head_dim": 7}, "rotary_size=7"),
    ],
)
def test_bad_fields(changes: dict[str, Any], names: str) -> None:
    assert names in refused(LLAMA | changes)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "has 1 entries for 26 layers"),
        ({"model_type": "gemma3_text", "rope_parameters": {"rope_type": "default"}}, "full_attention"),
        ({"model_type": "gpt2", "n_head": 12, "num_attention_heads": 6}, "contradicts"),
        ({"model_type": "bert", "position_embedding_type": "relative_key"}, "'relative_key'"),
        ({"model_type": "mamba2", "num_heads": 3, "head_dim": 64}, "isn't expand x hidden_size"),
        ({"model_type": "jamba", "attn_layer_offset": 9}, "must be below attn_layer_period=8"),
        ({"model_type": "bamba", "time_step_limit": [0.0, 0.1]}, "time_step_limit=[0.0, 0.1]"),
        ({"model_type": "falcon", "alibi": True}, "text layers 0-31 need ALiBi that is scaled"),
        (RWKV5 | {"head_size": 48}, "head_size=48 doesn't divide attention_hidden_size=256"),
        (RWKV5 | {"model_version": "5_1"}, "model_version='5_1' can't be served"),
        (RWKV5 | {"model_type": "rwkv6", "expand_k": 0.5}, "expand_k=0.5 isn't understood"),
        (RWKV6_OF_FLA | {"num_heads": 3}, "expand_k=0.5 x hidden_size isn't a multiple of num_heads=3"),
        (RWKV6_OF_FLA | {"attn": {"layers": [1]}}, "attn={'layers': [1]}"),
        ({"model_type": "rwkv", "num_hidden_layers": 2}, "text layers 0-1 need the RWKV-4"),
        (RWKV7 | {"attn": {"layers": [1]}}, "attn={'layers': [1]}"),
        (RWKV7 | {"num_heads": 3}, "num_heads=3 x head_dim=64 isn't hidden_size=256"),
        (RWKV7 | {"value_dim": [256, 100]}, "value_dim=[256, 100] must be multiples"),
        (RWKV7 | {"token_shift": 2}, "token_shift=2 isn't understood for model_type='rwkv7'"),
        ({"model_type": "recurrent_gemma", "lru_width": 2559}, "is no multiple of num_attention_heads"),
        ({"model_type": "deberta-v2", "num_hidden_layers": 2},
         "text layers 0-1 need a learned relative position bias"),
    ],
)  # fmt: skip
def test_what_cant_be_served(values: dict[str, Any], names: str) -> None:
    assert names in refused(values)


def test_nothing_is_suggested_where_a_types_sizes_differ() -> None:
    """Baichuan of 7B has a rotary embedding, of 13B ALiBi; neither file says so."""
    values = LLAMA | {"model_type": "baichuan", "max_position_embeddings": 4096}
    assert "assume=" not in refused(values) and "look like no type" in refused(values)


def test_what_isnt_served_is_refused_by_that_whatever_else_a_file_has() -> None:
    """RWKV-5's own fields, under RWKV-4's name."""
    assert "text layers 0-1 need the RWKV-4 recurrence" in refused(RWKV5 | {"model_type": "rwkv"})


def test_both_bases_are_understood_where_all_layers_are_windowed() -> None:
    values = {"model_type": "gemma3_text", "num_hidden_layers": 4, "rope_theta": 1e6,
              "rope_local_base_freq": 1e4, "sliding_window": 512}  # fmt: skip
    assert {spec.rope.base for spec in layer_specs(values) if spec.rope} == {1e4}


def test_an_infinity_is_read_from_a_mapping_as_from_a_file(tmp_path: Path) -> None:
    """Who parses the file has a dict, with infinity as transformers 5 writes it."""
    values = {"model_type": "bamba", "num_hidden_layers": 2, "attn_layer_indices": [1],
              "time_step_limit": [0.0, {"__float__": "Infinity"}]}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    assert layer_specs(values) == layer_specs(path)


def test_an_older_name_of_a_type_and_a_tokenizers_class() -> None:
    """As transformers 4.57 wrote LFM2-VL, and Orion its own files."""
    text = {"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    values = {"text_config": text, "vision_config": {"model_type": "siglip2_vision_model"}}
    older, newer = ({"model_type": name} | values for name in ("lfm2-vl", "lfm2_vl"))
    assert layer_specs(older) == layer_specs(newer)
    orion = LLAMA | {"model_type": "orion", "tokenizer_class": "OrionTokenizer"}
    assert layer_specs(orion, assume="llama") == layer_specs(LLAMA)


@pytest.mark.parametrize("name", ["rwkv5", "rwkv6"])
def test_rwkv_5_and_6_are_one_recurrence(name: str) -> None:
    values = RWKV5 | {"model_type": name}
    spec = layer_specs(values)[1]
    assert (spec.kind, spec.num_heads, spec.head_size) == (AttentionKind.RWKV6, 4, 64)
    assert spec.scale == 1.0
    assert (
        layer_specs(values | {"attention_hidden_size": None, "hidden_size": 512})[0].num_heads == 8
    )


def test_rwkv_6_in_flas_fields() -> None:
    spec = layer_specs(RWKV6_OF_FLA)[1]
    assert (spec.kind, spec.num_heads, spec.scale) == (AttentionKind.RWKV6, 2, 1.0)
    assert (spec.head_size, spec.v_head_size) == (64, 128)
    assert layer_specs(RWKV6_OF_FLA | {"expand_k": 1, "expand_v": None})[0].head_size == 128


def test_rwkv7_is_its_recurrence() -> None:
    wide, narrow = layer_specs(RWKV7 | {"value_dim": [512, 256]})
    assert (narrow.kind, narrow.num_heads, narrow.head_size) == (AttentionKind.RWKV7, 4, 64)
    assert (wide.v_head_size, narrow.v_head_size, narrow.scale) == (128, 64, 1.0)
    assert layer_specs(RWKV7 | {"head_dim": None, "num_heads": 8})[0].head_size == 32
    assert layer_specs(RWKV7)[0].v_head_size == 64


def test_kimi_linear_is_kda_and_mla_without_positions() -> None:
    given = {"head_dim": 64, "num_heads": 8, "short_conv_kernel_size": 3}
    model = model_layers(
        {"model_type": "kimi_linear", "num_hidden_layers": 5, "linear_attn_config": given}
    )
    kda, mla = model.specs[0], model.specs[4]
    assert kda.kind is AttentionKind.KDA and (kda.num_heads, kda.head_size) == (8, 64)
    assert kda.recurrent is not None and kda.recurrent.conv_width == 3 and kda.recurrent.qk_norm
    assert mla.kind is AttentionKind.MLA and mla.rope is None and not model.unserved


def test_towers_are_models_by_themselves() -> None:
    model = model_layers(bundled("models", "gemma-3-12b.json"))
    assert model.towers == ("text", "vision") and len(model.specs) == 48
    assert {layer.specs[0].role for layer in model.tower("vision")} == {Role.ENCODER_ONLY}
    whisper = model_layers(bundled("models", "whisper-large-v3.json"))
    assert whisper.towers == ("encoder", "decoder") and len(whisper.specs) == 96
    mllama = model_layers({"model_type": "mllama"}).specs
    assert [i for i, s in enumerate(mllama) if s.role is Role.CROSS] == [
        3,
        8,
        13,
        18,
        23,
        28,
        33,
        38,
    ]
    clip = model_layers({"model_type": "clip"})
    assert clip.towers == ("text_model", "vision_model")
    assert [clip.tower(name)[0].specs[0].causal for name in clip.towers] == [True, False]


@pytest.mark.parametrize(
    ("model", "scale"),
    [("deepseek-v3", 0.1352337788608801), ("deepseek-v3.2", 0.1352337788608801),
     ("deepseek-v2-lite", 0.1147213867929261)],
)  # fmt: skip
def test_mla_scales_have_yarns_magnitude(model: str, scale: float) -> None:
    assert layer_specs(bundled("models", f"{model}.json"))[0].scale == pytest.approx(scale)


def test_scales_of_the_modelling_code() -> None:
    def scale(**values: Any) -> float:
        return layer_specs(values)[0].scale

    assert scale(model_type="granite", attention_multiplier=0.0078125) == 0.0078125
    assert scale(model_type="gpt_neo") == 1.0 and scale(model_type="gemma3n_text") == 1.0
    assert scale(model_type="gemma2", query_pre_attn_scalar=144) == 144**-0.5


COMPRESSED = {
    "num_bits": 8,
    "type": "float",
    "dynamic": False,
    "strategy": "tensor",
    "symmetric": True,
}
QUARK_OUTPUT = {
    "output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
}
QUARK = {
    "quant_method": "quark",
    "export": {"kv_cache_group": ["*k_proj", "*v_proj"]},
    "layer_quant_config": {"*k_proj": QUARK_OUTPUT, "*v_proj": QUARK_OUTPUT},
}
E4M3_SCHEMES: list[dict[str, Any]] = [
    {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": COMPRESSED}},
    {"compression_config": {"kv_cache_scheme": COMPRESSED | {"strategy": "attn_head"}}},
    {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}},
    {"quantization_config": {"quant_method": "modelopt",
                             "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}},
    {"quantization_config": QUARK},
]  # fmt: skip
OTHER_SCHEMES: list[tuple[dict[str, Any], str]] = [
    *(
        ({"quantization_config": {"kv_cache_scheme": COMPRESSED | change}}, "kv_cache_scheme={")
        for change in ({"type": "uint"}, {"type": "int", "num_bits": 4}, {"num_bits": 4},
                       {"dynamic": True}, {"strategy": "channel"}, {"symmetric": False})
    ),
    ({"quantization_config": {"quantization": {"kv_cache_quant_algo": "INT8"}}},
     "quantization_config.quantization.kv_cache_quant_algo='INT8'"),
    ({"quantization_config": {"kv_cache_quant_algo": "NVFP4", "kv_cache_scheme": COMPRESSED}},
     "quantization_config.kv_cache_scheme="),
    ({"quantization_config": QUARK | {"layer_quant_config": {"*k_proj": QUARK_OUTPUT}}},
     "quantization_config.export.kv_cache_group="),
    ({"quantization_config": {"quant_method": "quark", "export": {"kv_cache_group": ["*k_proj"]}}},
     "quantization_config.export.kv_cache_group="),
]  # fmt: skip
PLAIN_SCHEMES: list[dict[str, Any]] = [
    {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": None}},
    {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    {"quantization_config": {"quant_method": "quark", "export": {"kv_cache_group": []}}},
]


@pytest.mark.parametrize("scheme", E4M3_SCHEMES)
def test_a_checkpoints_e4m3_cache_is_read(scheme: dict[str, Any]) -> None:
    wanted = [spec.replace(kv_cache_dtype="fp8_e4m3") for spec in layer_specs(LLAMA)]
    assert layer_specs(LLAMA | scheme) == wanted
    assert layer_specs(LLAMA | scheme, kv_cache_dtype="auto") == wanted
    (spec, *_) = layer_specs({"model_type": "llava", "text_config": LLAMA | scheme})
    assert spec.kv_cache_dtype == "fp8_e4m3"
    own = layer_specs(LLAMA)
    assert layer_specs(LLAMA | scheme, kv_cache_dtype=own[0].dtype) == own


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        ({"kv_cache_scheme": COMPRESSED | {"type": "int"}}, "int8"),
    ],
)
def test_modelopts_nvfp4_and_a_cache_in_int8_are_read(scheme: dict[str, Any], dtype: str) -> None:
    model = LLAMA | {"head_dim": 32}
    wanted = [spec.replace(kv_cache_dtype=dtype) for spec in layer_specs(model)]
    assert layer_specs(model | {"quantization_config": scheme}) == wanted


def test_a_scheme_of_the_cache_alone_quantises_no_weights() -> None:
    def of(scheme: dict[str, Any]) -> bool:
        return weights_quantized(read_config(LLAMA | scheme))

    assert not of({}) and not of(E4M3_SCHEMES[0]) and not of(E4M3_SCHEMES[2])
    groups = {
        "quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"a": 1}}
    }
    fp8 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    assert of(groups) and of(fp8) and of({"quantization_config": QUARK}) and of(PLAIN_SCHEMES[1])
    assert is_cache_scale("model.layers.0.self_attn.k_scale") and not is_cache_scale(
        "lm_head.weight"
    )


def test_mimo_speaks_of_the_field_that_the_file_has() -> None:
    values = {"model_type": "mimo_v2_flash"} | tiny_values(CONFIG_MAPPING["mimo_v2_flash"])
    text = refused(values | {"hybrid_layer_pattern": [0, 0, 1, 1]})
    assert "hybrid_layer_pattern=[0, 0, 1, 1] must be" in text and "each sixth" in text


def test_a_wrappers_text_may_be_an_encoder_and_a_decoder() -> None:
    bart = {"model_type": "bart", "encoder_layers": 2, "decoder_layers": 3}
    specs = layer_specs({"model_type": "florence2", "text_config": bart})
    roles = [spec.role for spec in specs]
    assert roles == [Role.ENCODER] * 2 + [Role.DECODER, Role.CROSS] * 3


def test_a_bad_argument_is_not_the_files_fault(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    text = refused(path, kv_cache_dtype="fp9")
    assert text.startswith("kv_cache_dtype='fp9' is unknown")


@pytest.mark.parametrize(("scheme", "name"), OTHER_SCHEMES)
def test_another_cache_is_refused_unless_the_caller_names_its_dtype(
    scheme: dict[str, Any], name: str
) -> None:
    text = refused(LLAMA | scheme)
    assert name in text and "kv_cache_dtype='fp8_e4m3'" in text
    assert name in refused({"model_type": "llava", "text_config": LLAMA | scheme})
    (spec, *_) = layer_specs(LLAMA | scheme, kv_cache_dtype="fp8")
    assert spec.kv_cache_dtype == "fp8_e4m3"
    assert "kv_cache_dtype='int3'" in refused(LLAMA | scheme, kv_cache_dtype="int3")


@pytest.mark.parametrize("scheme", PLAIN_SCHEMES)
def test_quantised_weights_alone_change_no_layer(scheme: dict[str, Any]) -> None:
    assert layer_specs(LLAMA | scheme) == layer_specs(LLAMA)


def test_modelopts_own_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}})
    )
    assert layer_specs(tmp_path)[0].kv_cache_dtype == "fp8_e4m3"


def test_a_checkpoints_scales_are_read(tmp_path: Path) -> None:
    """Names as compressed-tensors, ModelOpt, Quark and AutoFP8 write them; weights' scales aren't."""
    safetensors = pytest.importorskip("safetensors.torch")
    heads = torch.tensor([0.5, 0.25])
    first = {
        "model.layers.0.self_attn.k_scale": torch.tensor(0.5),
        "model.layers.0.self_attn.v_scale": torch.tensor([0.25]),
        "model.layers.1.self_attn.k_proj.k_scale": torch.tensor(2.0, dtype=torch.bfloat16),
        "model.layers.1.self_attn.v_proj.v_scale": torch.tensor(4.0),
        "model.layers.1.self_attn.k_proj.weight_scale": torch.tensor(9.0),
        "model.layers.1.self_attn.k_proj.input_scale": torch.tensor(9.0),
        "model.layers.1.self_attn.q_proj.output_scale": torch.tensor(9.0),
    }
    second = {
        "language_model.model.layers.12.self_attn.k_proj.output_scale": torch.tensor(0.125),
        "model.layers.3.self_attn.kv_scale": torch.tensor(0.75),
        "model.layers.4.self_attn.k_scale": heads,
    }
    safetensors.save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    safetensors.save_file(second, tmp_path / "model-00002-of-00002.safetensors")
    scales = cache_scales(tmp_path)
    per_head = scales.pop(4)
    assert list(per_head) == ["k_scale"] and torch.equal(
        torch.as_tensor(per_head["k_scale"]), heads
    )
    assert scales == {
        0: {"k_scale": 0.5, "v_scale": 0.25},
        1: {"k_scale": 2.0, "v_scale": 4.0},
        3: {"k_scale": 0.75, "v_scale": 0.75},
        12: {"k_scale": 0.125},
    }
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        name = "model.layers.0.self_attn.k_scale"
        safetensors.save_file(
            {name: torch.tensor(wrong)}, tmp_path / "model-00001-of-00002.safetensors"
        )
        with pytest.raises(ConfigError, match=f"{name}.*must be positive and finite"):
            cache_scales(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"{}")
    with pytest.raises(ConfigError, match="can't be read, or is truncated"):
        cache_scales(tmp_path)


def test_layers_that_read_anothers_keys_say_whose() -> None:
    """Gemma 3n E4B: 20 layers keep keys, the other 15 read those of the last of their type."""
    shared = layer_specs({"model_type": "gemma3n_text"})
    assert [spec.kv_source for spec in shared[:20]] == [None] * 20
    assert [spec.kv_source for spec in shared[20:]] == [18, 18, 18, 18, 19] * 3
    alone = layer_specs({"model_type": "gemma3n_text", "num_kv_shared_layers": 0})
    assert [spec.replace(kv_source=None) for spec in shared] == alone != shared
    assert "from 0 to 34" in refused({"model_type": "gemma3n_text", "num_kv_shared_layers": 35})
    assert "of some type" in refused({"model_type": "gemma3n_text", "num_kv_shared_layers": 31})


@pytest.mark.parametrize("name", ["num_kv_shared_layers", "kv_source_layers", "cla_share_factor"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "deepseek_v3"])
def test_shared_keys_are_never_dropped(model_type: str, name: str) -> None:
    assert name in refused({"model_type": model_type, name: 2})


@pytest.mark.parametrize("model", bundled_models())
def test_bundled_configs_are_read_as_transformers_reads_them(model: str) -> None:
    """As a file, and as the object that transformers makes of it."""
    path = bundled("models", f"{model}.json")
    values, specs = dict(read_values(path)[0]), layer_specs(path)
    if values["model_type"] in CONFIG_MAPPING:
        config = CONFIG_MAPPING[values["model_type"]].from_dict(copy.deepcopy(values))
        ignored = set(config.to_dict()) - set(values)
        assert layer_specs(config, ignore=ignored) == specs
    for spec in specs:
        assert LayerSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("model_type", sorted(READERS))
def test_odd_values_are_refused_and_nothing_else(model_type: str, every: int) -> None:
    """Whatever stands in a field: specs, or a `ConfigError`. A tower's fields are its own type's.

    Of a type's pairs of field and value one in `every`; all values come in turn.
    """
    values: dict[str, Any] = {"model_type": model_type}
    if model_type in CONFIG_MAPPING:
        values |= tiny_values(CONFIG_MAPPING[model_type])
    paths = [(name,) for name in {*values, "rope_scaling", "rope_parameters", "layer_types"}]
    parts = {name: part for name, part in values.items() if isinstance(part, dict)}
    others = {n: part for n, part in parts.items() if part.get("model_type") not in READERS}
    paths += [(name, inner) for name, part in others.items() for inner in part]
    for path, odd in list(product(sorted(paths), ODD))[::every]:
        changed = copy.deepcopy(values)
        at = changed[path[0]] if len(path) == 2 else changed
        at[path[-1]] = odd
        try:
            assert isinstance(model_layers(changed).layers, tuple)
        except ConfigError as error:
            assert str(error).startswith("config")


@pytest.mark.parametrize(
    "model_type", ["llama", "deepseek_v3", "ministral3", "phi3", "qwen3_vl_text"]
)
@pytest.mark.parametrize("kind", ["yarn", "llama3", "longrope", "linear", "dynamic", "default"])
def test_odd_rope_parameters(model_type: str, kind: str) -> None:
    full: dict[str, Any] = dict.fromkeys(sorted(KNOWN), 2.0) | {"rope_type": kind}
    full |= {"short_factor": [1.0], "long_factor": [1.0], "mrope_section": [24, 20, 20]}
    for name in full:
        for odd in ODD:
            values = {"model_type": model_type, "rope_scaling": full | {name: odd}}
            try:
                assert model_layers(values).layers
            except ConfigError as error:
                assert str(error).startswith("config")


def test_no_type_is_near_another_by_accident() -> None:
    assert nearest("llama", READERS) == "; did you mean 'llama'?"


@pytest.mark.parametrize(
    ("model_type", "same"), [("mimo", "qwen2"), ("minimax_m1", "minimax_text_01")]
)
def test_a_type_whose_code_is_another_types(model_type: str, same: str) -> None:
    values = {
        "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "hidden_size": 4096, "rope_theta": 640000, "attn_type_list": [0] * 7 + [1],
        "num_nextn_predict_layers": 1,
    }  # fmt: skip
    if same == "qwen2":
        del values["attn_type_list"]
    specs = [model_layers({"model_type": name, **values}).specs for name in (model_type, same)]
    assert specs[0] == specs[1]


def test_a_factor_of_keys_that_no_layer_shares_changes_nothing() -> None:
    values = {"model_type": "hunyuan_v1_moe", "num_hidden_layers": 2, "cla_share_factor": 2}
    assert model_layers(values | {"use_cla": False}).specs == model_layers(values).specs
    with pytest.raises(ConfigError, match="use_cla=True"):
        model_layers(values | {"use_cla": True})
