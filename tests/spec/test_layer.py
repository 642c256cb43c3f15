from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import polyattn
import pytest
import torch
from polyattn import LayerSpec, select, select_layers
from polyattn.errors import ConfigError, SpecError
from polyattn.spec.decompose import group_layers
from polyattn.spec.fields import LONGEST
from polyattn.spec.latent import LatentSpec
from polyattn.spec.models import GROUP, model_reader
from polyattn.spec.norm import NormSpec
from polyattn.spec.recurrent import RecurrentSpec
from polyattn.spec.rope import RopeSpec
from polyattn.spec.sparse import CompressorSpec, IndexerSpec, SparseSpec
from polyattn.tools.cli.models import bundled, bundled_models

# model -> the groups of its layers: (count, what str(spec) says)
MODELS = {
    "bert-base-uncased": [(12, "attention, 12 heads of 64, bfloat16, encoder_only, non_causal")],
    "bloom-7b1": [(30, "attention, 32 heads of 128, float16, alibi")],
    "deepseek-v2-lite": [(27, "mla, 16 heads of 192/128, bfloat16, v_head_size")],
    "deepseek-v3": [(61, "mla, 128 heads of 192/128, bfloat16, v_head_size")],
    "deepseek-v3.2": [
        (
            61,
            "sparse_mla, 128 heads of 192/128, bfloat16, choice 2048, indexer 64 heads of 128 for 2048, "
            "v_head_size",
        )
    ],
    "falcon-7b": [(32, "attention, 71/1 heads of 64, bfloat16")],
    "gemma-2-9b": [
        (21, "attention, 16/8 heads of 256, bfloat16, logit_soft_cap, window 4096"),
        (21, "attention, 16/8 heads of 256, bfloat16, logit_soft_cap"),
    ],
    "gemma-3-12b": [
        (40, "attention, 16/8 heads of 256, bfloat16, window 1024"),
        (8, "attention, 16/8 heads of 256, bfloat16"),
    ],
    "gpt-oss-20b": [
        (12, "attention, 64/8 heads of 64, bfloat16, learned_sinks, window 128"),
        (12, "attention, 64/8 heads of 64, bfloat16, learned_sinks"),
    ],
    "jamba-v0.1": [
        (28, "short_conv, 8192 channels, bfloat16"),
        (28, "mamba1, 8192 channels, bfloat16"),
        (4, "attention, 32/8 heads of 128, bfloat16"),
    ],
    "lfm2-1.2b": [
        (10, "short_conv, 2048 channels, bfloat16"),
        (6, "attention, 32/8 heads of 64, bfloat16"),
    ],
    "llama-3.1-70b": [(80, "attention, 64/8 heads of 128, bfloat16")],
    "llama-3.1-8b": [(32, "attention, 32/8 heads of 128, bfloat16")],
    "mamba-2.8b": [
        (64, "short_conv, 5120 channels, float32"),
        (64, "mamba1, 5120 channels, float32"),
    ],
    "mamba2-2.7b": [
        (64, "short_conv, 5376 channels, bfloat16"),
        (64, "mamba2, 80/1 heads of 64, bfloat16"),
    ],
    "minimax-text-01": [
        (70, "linear, 64 heads of 128, bfloat16"),
        (10, "attention, 64/8 heads of 128, bfloat16"),
    ],
    "mistral-7b-v0.1": [(32, "attention, 32/8 heads of 128, bfloat16, window 4096")],
    "phi-3-mini-4k": [(32, "attention, 32 heads of 96, bfloat16, window 2047")],
    "qwen3-8b": [(36, "attention, 32/8 heads of 128, bfloat16")],
    "qwen3-next-80b-a3b": [
        (36, "short_conv, 8192 channels, bfloat16"),
        (36, "gdn, 32/16 heads of 128, bfloat16"),
        (12, "attention, 16/2 heads of 256, bfloat16"),
    ],
    "whisper-large-v3": [
        (32, "attention, 20 heads of 64, float16, encoder, non_causal"),
        (32, "attention, 20 heads of 64, float16"),
        (32, "attention, 20 heads of 64, float16, cross, non_causal"),
    ],
}


def test_every_bundled_model_is_in_the_table() -> None:
    assert bundled_models() == sorted(MODELS)


@pytest.mark.parametrize("model", MODELS)
def test_layers_of_a_real_model(model: str) -> None:
    groups = group_layers(LayerSpec.from_hf_config(bundled("models", f"{model}.json")))
    assert [(len(layers), str(spec)) for spec, layers in groups.items()] == MODELS[model]
    for spec in groups:
        assert LayerSpec.from_json(spec.to_json()) == spec
        assert hash(LayerSpec.from_json(spec.to_json())) == hash(spec)


def test_gemma_scales_by_its_query_scalar() -> None:
    spec = LayerSpec.from_hf_config(bundled("models", "gemma-2-9b.json"))[0]
    assert spec.scale == 256**-0.5 and spec.logit_soft_cap == 50.0


def test_a_layer_that_reads_anothers_keys_is_in_its_sources_group() -> None:
    own = LayerSpec(num_heads=4, head_size=32, dtype="float32")
    narrow = own.replace(sliding_window=8)
    reader = own.replace(kv_source=0)
    assert reader != own and "keys of layer 0" in str(reader)
    (first, second) = select_layers([own, narrow, reader], "cpu")
    assert (first.spec, first.layers, first.kv_source) == (own, (0, 2), (0, 0))
    assert (first.num_caches(2), second.kv_source) == (1, (1,))
    assert select(reader, "cpu") == select(own, "cpu")
    for specs in (
        [own, reader.replace(kv_source=1)],
        [narrow, reader],
        [own, reader, own.replace(kv_source=1)],
    ):
        with pytest.raises(SpecError, match="must be an earlier layer"):
            select_layers(specs, "cpu")
    for changes in ({"role": "encoder", "causal": False}, {"cached": False}):
        with pytest.raises(SpecError, match="kv_source=0 is for a decoder's attention"):
            reader.replace(**changes)


def test_config_object_and_nested_text_config() -> None:
    class Config:
        def to_dict(self) -> dict[str, object]:
            text = json.loads(bundled("models", "qwen3-8b.json").read_text())
            return {"model_type": "llava", "text_config": text}

    assert len(LayerSpec.from_hf_config(Config())) == 36


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"num_heads": 0}, "num_heads=0"),
        ({"head_size": -1}, "head_size=-1"),
        ({"num_heads": 6, "num_kv_heads": 4}, "num_heads=6 is not divisible by num_kv_heads=4"),
        ({"dtype": "bf17"}, "dtype='bf17'"),
        ({"dtype": "bfloat61"}, "did you mean 'bfloat16'"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype='fp4'"),
        ({"sliding_window": 0}, "use None for none"),
        ({"logit_soft_cap": 1000.5}, "logit_soft_cap=1000.5 must be positive, 1000 at most"),
        ({"logit_soft_cap": -1.0}, "logit_soft_cap=-1.0"),
        ({"sink_tokens": 4}, "needs a sliding_window"),
        ({"role": "cross"}, "causal=False"),
        ({"role": "decodr"}, "did you mean 'decoder'"),
        ({"kind": "mla"}, "latent=None don't go together; give latent=LatentSpec"),
        ({"kind": "mamba2"}, "recurrent=None don't go together; give recurrent=RecurrentSpec"),
        (
            {"kind": "mamba2", "recurrent": RecurrentSpec()},
            "recurrent.state_size=0: a mamba2 layer",
        ),
        (
            {"kind": "mamba2", "scale": 0.5, "recurrent": RecurrentSpec(state_size=8)},
            "scale=0.5: a mamba2 layer multiplies nothing by it",
        ),
        (
            {"kind": "mamba2", "v_head_size": 32, "recurrent": RecurrentSpec(state_size=8)},
            "v_head_size=32: mamba2 has no values",
        ),
        (
            {"kind": "linear", "recurrent": RecurrentSpec(dt_softplus=False)},
            "recurrent.dt_softplus=False: linear has no step size",
        ),
        ({"kind": "short_conv", "recurrent": RecurrentSpec()}, "recurrent.conv_width=0"),
        (
            {"kind": "mamba2", "recurrent": RecurrentSpec(state_size=8, qk_norm=True)},
            "recurrent.qk_norm=True: mamba2 has none",
        ),
        (
            {"kind": "gdn", "recurrent": RecurrentSpec(), "rope": RopeSpec(rotary_size=64)},
            "gdn layers don't rotate",
        ),
        ({"graph_capture": "always"}, "graph_capture='always'"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"scale": 10**400}, "scale=1000"),
        ({"logit_soft_cap": 10**400}, "logit_soft_cap=1000"),
        ({"graph_capture": 1.0}, "graph_capture=1.0"),
        ({"batch_invariant": np.True_}, "batch_invariant=np.True_"),
    ],
)
def test_impossible_layers(changes: dict[str, object], names: str) -> None:
    with pytest.raises(SpecError, match=".") as caught:
        LayerSpec(**({"num_heads": 4, "head_size": 64} | changes))  # type: ignore[arg-type]
    assert names in str(caught.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("not json", "not JSON"),
        ('{"num_hidden_layers": 2', "truncated"),
        ("[]", "must be a JSON object"),
        ('{"num_hidden_layers": 2, "num_attention_heads": 4}', "lacks the field 'model_type'"),
        ('{"model_type": 3}', "model_type=3"),
        ('{"model_type": "nemotron_h", "hidden_size": 64}', "hybrid_override_pattern is needed"),
        ('{"model_type": "llama", "num_attention_heads": "4"}', "'4'"),
        (
            '{"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["magic"]}',
            "layer_types[0]='magic'",
        ),
        ('{"model_type": "mpnet", "num_hidden_layers": 1}', "relative position bias"),
    ],
)
def test_bad_config_files(tmp_path: Path, text: str, names: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        LayerSpec.from_hf_config(tmp_path)
    assert names in str(caught.value) and str(path) in str(caught.value)


def test_missing_config_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        LayerSpec.from_hf_config(tmp_path / "config.json")


def test_without_a_reader_the_error_names_it_and_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_reader.cache_clear()
    monkeypatch.setattr("polyattn.spec.models.entry_points", lambda group: ())
    with pytest.raises(ConfigError, match=r"polyattn-models.* isn't installed; .*pip install"):
        LayerSpec.from_hf_config(tmp_path)
    broken = EntryPoint("huggingface", "absent_reader", GROUP)
    monkeypatch.setattr("polyattn.spec.models.entry_points", lambda group: (broken,))
    with pytest.raises(ConfigError, match=r"absent_reader, .* can't be loaded: .*reinstall"):
        LayerSpec.from_hf_config(tmp_path)


def test_unknown_field_in_json() -> None:
    with pytest.raises(SpecError, match="did you mean 'num_heads'"):
        LayerSpec.from_json('{"num_head": 4, "head_size": 64}')


@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_layers_repr_is_the_code_that_builds_it(model: str) -> None:
    for spec in set(LayerSpec.from_hf_config(bundled("models", f"{model}.json"))):
        assert eval(repr(spec), vars(polyattn)) == spec


def test_a_layers_repr_leaves_out_the_defaults() -> None:
    rope = RopeSpec(rotary_size=64, base=5e5)
    spec = LayerSpec(
        num_heads=8, head_size=64, rope=rope, kind="attention", graph_capture="uniform"
    )
    assert repr(spec) == (
        "LayerSpec(num_heads=8, head_size=64, graph_capture='uniform', "
        "rope=RopeSpec(rotary_size=64, base=500000.0))"
    )
    assert "scale=0.5, " in repr(spec.replace(scale=0.5))


def test_replace_keeps_what_was_derived_derived() -> None:
    spec = LayerSpec(num_heads=4, head_size=64)
    assert spec.replace(head_size=16).scale == 0.25
    assert spec.replace(head_size=16).v_head_size == 16
    assert spec.replace(v_head_size=32).replace(head_size=16).v_head_size == 32


@pytest.mark.parametrize("name", ["sliding_window", "window_right", "chunk_size", "sink_tokens"])
def test_more_than_the_longest_sequence_means_all_of_it(name: str) -> None:
    """Positions plus or minus a window stay within int32, whatever an engine writes for none."""
    base = LayerSpec(num_heads=1, head_size=64, causal=False, sliding_window=5)
    longest = LONGEST - (name == "window_right")
    spec = base.replace(**{name: longest})
    for size in (LONGEST, 2**31 - 1, 2**31, 2**40):
        wider = base.replace(**{name: size})
        assert getattr(wider, name) == longest and (wider, hash(wider)) == (spec, hash(spec))
        assert LayerSpec.from_json(wider.to_json()) == wider == wider.replace(num_heads=1)
    assert getattr(base.replace(**{name: longest - 1}), name) == longest - 1
    with pytest.raises(SpecError, match=f"{name}={2**40 + 1} is more than {2**40}"):
        base.replace(**{name: 2**40 + 1})


def test_endless_on_both_sides_is_one_window() -> None:
    spec = LayerSpec(num_heads=1, head_size=64, causal=False, sliding_window=2**31)
    assert spec.replace(window_right=2**31 - 1) == spec


def test_features_are_complete() -> None:
    spec = LayerSpec(
        num_heads=4, num_kv_heads=2, head_size=64, v_head_size=32, sliding_window=8, chunk_size=8,
        logit_soft_cap=1.0, alibi=True, learned_sinks=True, sink_tokens=1, needs_lse=True,
        deterministic=True, batch_invariant=True,
        rope=RopeSpec(
            rotary_size=64, positions="cache", scaling="dynamic", factor=2.0, original_length=4096
        ),
        variant="capped", mask="custom",
    )  # fmt: skip
    from polyattn.spec.features import FEATURES, RECURRENT

    others = RECURRENT | {
        "cache_positions_by_length",
        "length_bounds",
        "block_sparse",
        "tensor_scales",
        "head_scales",
        "fp8_inputs",
        "fp8_output",
        "step_invariant",
        "call_invariant",
        "machine_invariant",
    }
    assert spec.features | others == set(FEATURES) - {"non_causal", "window_right"}
    options = {"gated": True, "channel_groups": 2, "bc_in_float32": True, "state_dtype": "float16"}
    mamba = LayerSpec(
        kind="mamba1", num_heads=8, head_size=1, recurrent=RecurrentSpec(state_size=4, **options)
    )
    wide = {"wide_conv_states"}  # of short convolutions alone
    assert mamba.features == RECURRENT - wide | {"causal"}
    form = RecurrentSpec(conv_width=4, draft_tokens=3)
    convolution = LayerSpec(kind="short_conv", num_heads=8, head_size=1, recurrent=form)
    assert convolution.features == wide | {"causal"}
    assert "block_sparse" in spec.replace(mask="block_sparse").features
    assert "length_bounds" in spec.replace(mask=None, length_bounds=True).features
    with pytest.raises(
        SpecError, match="mask='custom' counts a sequence's keys, and with length_bounds"
    ):
        spec.replace(length_bounds=True)
    assert "window_right" in spec.replace(causal=False, window_right=0).features


def test_kv_heads_that_were_left_out_follow_the_heads() -> None:
    plain = LayerSpec(num_heads=4, head_size=64)
    assert plain.replace(num_heads=8) == LayerSpec(num_heads=8, head_size=64)
    grouped = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64)
    assert grouped.replace(num_heads=8).num_kv_heads == 2


@pytest.mark.parametrize("kind", ["mamba2", "linear", "gdn"])
def test_heads_are_a_multiple_of_a_recurrence_s_groups(kind: str) -> None:
    with pytest.raises(SpecError, match="num_heads=6 is not divisible by num_kv_heads=4"):
        LayerSpec(
            kind=kind, num_heads=6, num_kv_heads=4, head_size=16,
            recurrent=RecurrentSpec(state_size=16),
        )  # fmt: skip


HASH_IN_ANOTHER_PROCESS = """
import pickle, sys
from polyattn import LayerSpec, select, select_layers
read = pickle.load(open(sys.argv[1], "rb"))
fresh = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float16", sliding_window=9)
assert read == fresh and hash(read) == hash(fresh) and {fresh: 1}[read] == 1
"""


def test_a_pickled_spec_is_found_by_another_process(tmp_path: Path) -> None:
    """Strings hash otherwise there."""
    spec = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float16", sliding_window=9)
    path = tmp_path / "spec.pickle"
    path.write_bytes(pickle.dumps(spec))
    for seed in ("1", "2"):
        command = [sys.executable, "-c", HASH_IN_ANOTHER_PROCESS, str(path)]
        environment = os.environ | {"PYTHONHASHSEED": seed}
        found = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.bfloat16, "bfloat16"), ("torch.float16", "float16"), ("bf16", "bfloat16"),
     ("half", "float16"), (torch.float32, "float32"), ("FP16", "float16")],
)  # fmt: skip
def test_a_dtype_is_taken_as_people_type_it(dtype: Any, name: str) -> None:
    spec = LayerSpec(num_heads=8, head_size=64, dtype=dtype)
    assert spec.dtype == name and spec == LayerSpec(num_heads=8, head_size=64, dtype=name)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float8_e4m3fn, "fp8_e4m3"), (torch.float8_e5m2, "fp8_e5m2"), ("fp8", "fp8_e4m3"),
     (torch.int8, "int8"), (torch.bfloat16, "auto"), ("bfloat16", "auto")],
)  # fmt: skip
def test_a_caches_dtype_is_taken_as_people_type_it(dtype: Any, name: str) -> None:
    assert LayerSpec(num_heads=8, head_size=64, kv_cache_dtype=dtype).kv_cache_dtype == name


@pytest.mark.parametrize(
    ("field", "name"),
    [("head_dim", "head_size"), ("num_key_value_heads", "num_kv_heads"), ("sm_scale", "scale"),
     ("window_left", "window_left + 1"), ("num_head", "did you mean 'num_heads'")],
)  # fmt: skip
def test_another_engines_name_of_a_field_is_told_ours(field: str, name: str) -> None:
    for build in (lambda f: LayerSpec(**f), LayerSpec.from_dict):
        with pytest.raises(SpecError, match=re.escape(name)) as error:
            build({"num_heads": 8, "head_size": 64, field: 8})
        assert f"no field {field!r}" in str(error.value)


@pytest.mark.parametrize(
    ("part", "field", "name"),
    [
        (RopeSpec, "rope_theta", "calls it base"), (RopeSpec, "rotary_dim", "calls it rotary_size"),
        (NormSpec, "rms_norm_eps", "calls it eps"), (LatentSpec, "kv_lora_rank", "calls it rank"),
        (RecurrentSpec, "d_state", "calls it state_size"), (SparseSpec, "topk", "calls it budget"),
        (IndexerSpec, "index_n_heads", "calls it num_heads"),
        (CompressorSpec, "sizes", "did you mean 'size'"),
    ],
)  # fmt: skip
def test_a_part_tells_its_name_of_a_field(part: Any, field: str, name: str) -> None:
    with pytest.raises(SpecError, match=f"{part.__name__} has no field '{field}'; .*{name}"):
        part(**{field: 8})


def test_a_cache_of_another_float_dtype_is_told_why_not() -> None:
    with pytest.raises(
        SpecError, match="has the layer's dtype; leave it out, or set dtype='float16'"
    ):
        LayerSpec(num_heads=8, head_size=64, kv_cache_dtype="float16")


def test_what_is_no_mapping_of_fields_is_refused() -> None:
    with pytest.raises(SpecError, match=r"from_dict takes a mapping of fields, not \[1\]"):
        LayerSpec.from_dict([1])  # type: ignore[arg-type]
