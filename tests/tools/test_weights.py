"""Where weights come from and when requests come: what is right, and what is refused by name."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from polyattn import LayerSpec, select_layers
from polyattn.errors import ConfigError, SettingsError, TraceError, WeightsError
from polyattn.tools.cli import running
from polyattn.tools.cli.models import bundled, find_config
from polyattn.tools.cli.options import RunOptions
from polyattn.tools.cli.running import show
from polyattn.tools.cli.weights import whole_model
from polyattn.tools.replay.arrivals import Arrivals
from polyattn.tools.replay.engine import Engine
from polyattn.tools.replay.model import mixers, weights
from polyattn.tools.replay.model.decoder import Decoder
from polyattn.tools.replay.model.fields import Fields
from polyattn.tools.replay.model.weights import Checkpoint, RandomWeights, shapes_of
from polyattn.tools.replay.prompts import prompt_tokens
from polyattn.tools.replay.runners import AttentionRunner, Options
from polyattn.tools.replay.trace import Request, read_trace
from safetensors.torch import load_file, save_file
from tools.commands import here
from torch import Tensor
from whole_models import saved

Tensors = dict[str, Tensor]
UP, BIAS = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"
PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496, "qwen3-8b": 8_190_735_360,
    "gemma-2-9b": 9_241_705_984, "gemma-3-12b": 11_766_034_176, "gpt-oss-20b": 20_914_757_184,
    "mamba2-2.7b": 2_702_599_680, "jamba-v0.1": 51_570_323_328,
}  # fmt: skip
"""Parameters of the bundled models, as published; of Gemma 3 the text tower's."""


def decoder(model: str | Path) -> Decoder:
    return Decoder(Fields(model), LayerSpec.from_hf_config(model))


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    saved("llama", folder)
    return folder


def changed(source: Path, target: Path, change: Callable[[Tensors], Any]) -> Path:
    """Copy a checkpoint with other tensors."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def with_fields(source: Path, target: Path, **fields: Any) -> Path:
    """Copy a checkpoint with another config."""
    if target != source:
        shutil.copytree(source, target, dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | fields))
    return target


def options(**given: Any) -> RunOptions:
    plain: dict[str, Any] = {
        "requests": 3, "max_tokens": 3, "scale": 0.1, "token_budget": 64, "max_seqs": 8,
        "cache_gb": 0.01, "check": 1, "device": "cpu", "json": True,
    }  # fmt: skip
    return RunOptions(**(plain | given))


@pytest.mark.parametrize("model", PUBLISHED)
def test_bundled_models_have_their_published_sizes(model: str) -> None:
    shapes = shapes_of(decoder(find_config(model)))
    assert sum(math.prod(shape) for shape in shapes.values()) == PUBLISHED[model]


@pytest.mark.slow
def test_deepseek_has_its_published_size() -> None:
    shapes = shapes_of(decoder(find_config("deepseek-v3")))
    assert sum(math.prod(shape) for shape in shapes.values()) == 671_026_419_200


def test_random_weights_follow_from_seed_and_name_alone(tiny_llama: Path) -> None:
    shapes = list(shapes_of(decoder(tiny_llama)).items())
    first, second, other = RandomWeights(3), RandomWeights(3), RandomWeights(4)
    again = {name: second.tensor(name, shape) for name, shape in reversed(shapes)}
    for name, shape in shapes:
        assert torch.equal(first.tensor(name, shape), again[name])
        assert not torch.equal(first.tensor(name, shape), other.tensor(name, shape))
    # The same in every process: Python's own hash of a string isn't.
    assert first.tensor("a.weight", (2,)).tolist() == pytest.approx([0.2342863, -0.0613615])


@pytest.mark.parametrize("name", ["llama", "gemma2", "mamba2"])
def test_random_weights_are_served_from_the_command(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(name, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model = with_fields(tmp_path, tmp_path, dtype="bfloat16")
    assert show(options(model=str(model), weights="random", arrivals="poisson:2")) == 0
    said = capsys.readouterr()
    data = json.loads(said.out)
    waits = r"polyattn: drawing random weights, [0-9.e-]+ GiB, before the first step\n"
    assert re.fullmatch(waits, said.err)
    assert data["weights"] == "random" and data["arrivals"] == "poisson:2"
    assert data["generated_tokens"] == 9 and data["checked_tokens"] > 0
    assert 0 < data["latency"]["ttft_p50_ms"] <= data["latency"]["ttft_p99_ms"]
    assert 0 < data["latency"]["itl_p50_ms"] <= data["latency"]["itl_p99_ms"]
    assert "gb_per_s" not in data["decode"], "attention's bytes over a model's time mean nothing"
    assert show(options(model=str(model), weights="random", json=False)) == 0
    text = capsys.readouterr().out
    assert "weights: random, seed 0" in text and "to the first token p50" in text


def test_a_checkpoint_in_several_files_and_within_a_larger_model(
    tiny_llama: Path, tmp_path: Path
) -> None:
    tensors = load_file(tiny_llama / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    shutil.copy(tiny_llama / "config.json", tmp_path)
    where = {}
    for file, own in parts.items():
        save_file({f"language_model.{name}": tensors[name] for name in own}, tmp_path / file)
        where |= {f"language_model.{name}": file for name in own}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    model, source = decoder(tmp_path), Checkpoint(tmp_path)
    source.check(model)
    weights.load(model, source, torch.device("cpu"))
    for name, weight in model.named_parameters():
        assert torch.equal(weight, tensors[name])


CHANGES: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (lambda t: t.pop(UP), f"lacks {UP} (40, 96)"),
    "shape": (lambda t: t.update({UP: torch.ones(41, 96)}),
              f"{UP} has shape (41, 96), expected (40, 96) by the config"),
    "dtype": (lambda t: t.update({UP: torch.ones(40, 96, dtype=torch.int8)}), f"{UP} is I8"),
    "unread": (lambda t: t.update({BIAS: torch.ones(64)}), f"has {BIAS}"),
    "twice": (lambda t: t.update({f"language_model.{UP}": torch.ones(40, 96)}),
              "are the same weight; keep one"),
}  # fmt: skip


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something ran")

    monkeypatch.setattr(running, "select_layers", refuse)
    monkeypatch.setattr(weights, "load", refuse)


@pytest.mark.parametrize("case", CHANGES)
def test_another_models_tensors_are_refused_before_anything_runs(
    case: str, tiny_llama: Path, tmp_path: Path, nothing_runs: None
) -> None:
    change, says = CHANGES[case]
    folder = changed(tiny_llama, tmp_path, change)
    with pytest.raises(WeightsError) as caught:
        show(options(weights=str(folder)))
    assert says in str(caught.value) and str(folder) in str(caught.value)


def test_harmless_tensors_are_left_alone(tiny_llama: Path, tmp_path: Path) -> None:
    names = (
        "model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.4.enorm.weight",
        "vision_tower.patch.weight", "model.vision_tower.patch.weight",
    )  # fmt: skip
    folder = changed(tiny_llama, tmp_path, lambda t: t.update({n: torch.ones(2) for n in names}))
    Checkpoint(folder).check(decoder(folder))


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda f: _cut(f / "model.safetensors"), "can't be read, or is truncated"),
    "none": (lambda f: (f / "model.safetensors").unlink(), "has neither model.safetensors nor"),
    "index": (lambda f: _index(f, []), "has no weight_map"),
    "outside": (lambda f: _index(f, {UP: "../x.safetensors"}), f"{UP} is in '../x.safetensors'"),
    "absent": (lambda f: _index(f, {UP: "x.safetensors"}), "isn't beside it"),
    "elsewhere": (lambda f: _index(f, dict.fromkeys((*_names(f), BIAS), "model.safetensors")),
                  f"has {BIAS}"),
    "promised": (lambda f: _promised(f), f"lacks {UP}"),
}  # fmt: skip


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _names(folder: Path) -> list[str]:
    return sorted(load_file(folder / "model.safetensors"))


def _index(folder: Path, listed: Any) -> None:
    text = json.dumps({"weight_map": listed})
    (folder / "model.safetensors.index.json").write_text(text)


def _promised(folder: Path) -> None:
    """An index names a tensor that its file doesn't have."""
    _index(folder, dict.fromkeys(_names(folder), "model.safetensors"))
    tensors = load_file(folder / "model.safetensors")
    del tensors[UP]
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("case", FILES)
def test_broken_files_are_named(
    case: str, tiny_llama: Path, tmp_path: Path, nothing_runs: None
) -> None:
    change, says = FILES[case]
    folder = changed(tiny_llama, tmp_path, lambda t: None)
    change(folder)
    with pytest.raises(WeightsError) as caught:
        show(options(weights=str(folder)))
    assert says in str(caught.value)


FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "blocks": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
        "weight_block_size=[64, 64] must be [128, 128]",
    ),
    "type": ({"model_type": "olmo"}, "model_type='olmo' isn't run with weights"),
    "activation": ({"hidden_act": "silo"}, "hidden_act='silo' is unknown; did you mean 'silu'?"),
    "size": ({"vocab_size": -64}, "vocab_size=-64 must be a positive integer"),
    "flag": ({"tie_word_embeddings": 1}, "tie_word_embeddings=1 must be true or false"),
    "eps": ({"rms_norm_eps": "x"}, "rms_norm_eps='x' must be a positive number"),
}  # fmt: skip


@pytest.mark.parametrize("case", FIELDS)
def test_fields_are_refused_by_name(
    case: str, tiny_llama: Path, tmp_path: Path, nothing_runs: None
) -> None:
    fields, says = FIELDS[case]
    folder = with_fields(tiny_llama, tmp_path, **fields)
    with pytest.raises((ConfigError, WeightsError)) as caught:
        show(options(weights=str(folder)))
    assert says in str(caught.value) and str(folder) in str(caught.value)


MODELOPT = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
K_SCALE = "model.layers.1.self_attn.k_proj.k_scale"


def test_a_checkpoints_own_cache_dtype_and_scales_are_used(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = changed(tiny_llama, tmp_path, lambda t: t.update({K_SCALE: torch.tensor(0.5)}))
    with_fields(folder, folder, quantization_config=MODELOPT)
    layers, bind = [], mixers.SelfAttention.bind

    def bound(self: Any, *given: Any) -> None:
        bind(self, *given)
        layers.append(self.layer)

    monkeypatch.setattr(mixers.SelfAttention, "bind", bound)
    assert show(options(weights=str(folder))) == 0
    assert {layer.spec.kv_cache_dtype for layer in layers} == {"fp8_e4m3"}
    assert [layer.k_scale for layer in layers[:3]] == [1.0, 0.5, 1.0][: len(layers)]
    changed(tiny_llama, tmp_path, lambda t: t.update({K_SCALE: torch.ones(2)}))
    with_fields(folder, folder, quantization_config=MODELOPT)
    with pytest.raises(WeightsError, match="k_scale of layer 1 has 2 numbers, one a head"):
        show(options(weights=str(folder)))


CACHED = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor", "symmetric": True}
E4M3_WEIGHTS: dict[str, tuple[dict[str, Any], str, tuple[int, int]]] = {
    "ModelOpt": (MODELOPT | {"quant_algo": "FP8"}, "weight_scale", (-1, -1)),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "kv_cache_scheme": CACHED,
         "config_groups": {"group_0": {"weights": CACHED | {"strategy": "channel"}}}},
        "weight_scale", (1, -1),
    ),
    "blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]}, "weight_scale_inv", (128, 128),
    ),
}  # fmt: skip
"""Schemes of e4m3 weights, where their scales are, and of which rows and columns each is."""


def in_e4m3(tensors: Tensors, name: str, block: tuple[int, int], plain: bool) -> None:
    """Quantise linear weights as the method does; `plain`: store what they then stand for."""
    for weight in [n for n in tensors if n.endswith("_proj.weight")]:
        whole = tensors[weight].float()
        rows, columns = (k if k > 0 else n for n, k in zip(whole.shape, block, strict=True))
        scales = torch.stack([
            torch.stack([part.abs().amax() / 448 for part in strip.split(columns, 1)])
            for strip in whole.split(rows, 0)
        ])  # fmt: skip
        each = scales.repeat_interleave(rows, 0)[: len(whole)].repeat_interleave(columns, 1)
        each = each[:, : whole.shape[1]]
        small = (whole / each).to(torch.float8_e4m3fn)
        if plain:
            tensors[weight] = (small.double() * each.double()).to(tensors[weight].dtype)
            continue
        base = weight.removesuffix("weight")
        tensors[weight] = small
        tensors[base + name] = scales.squeeze() if scales.numel() == 1 else scales
        tensors[base + "input_scale"] = torch.tensor(0.25)


@pytest.mark.parametrize("scheme", E4M3_WEIGHTS)
def test_e4m3_weights_are_read_with_their_scales_and_the_caches(
    scheme: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """`run` and `explain` of a checkpoint as ModelOpt, compressed-tensors and DeepSeek write it."""
    fields, name, block = E4M3_WEIGHTS[scheme]
    folders = {plain: tmp_path / str(plain) for plain in (True, False)}
    for plain, folder in folders.items():

        def change(tensors: Tensors) -> None:
            in_e4m3(tensors, name, block, plain)  # noqa: B023
            tensors[K_SCALE] = torch.tensor(0.5)

        changed(tiny_llama, folder, change)
    folder = with_fields(folders[False], folders[False], quantization_config=fields)
    models = []
    for place in (folders[True], folder):
        model, source = decoder(place), Checkpoint(place)
        source.check(model)
        weights.load(model, source, torch.device("cpu"))
        models.append(model)
    wanted, found = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(wanted[n], found[n]) for n in shapes_of(models[0]))
    stored = {spec.kv_cache_dtype for spec in LayerSpec.from_hf_config(folder)}
    assert stored == ({"auto"} if scheme == "blocks" else {"fp8_e4m3"})
    whole = whole_model(str(folder), str(folder), LayerSpec.from_hf_config(folder), 0, None, "fp8")
    assert not whole.in_e4m3, "they are as they are"
    assert show(options(weights=str(folder))) == 0
    code, out, _ = here("explain", str(folder), "--device", "cpu", "--json")
    groups = json.loads(out)["groups"]
    assert code == 0 and {g["spec"].get("kv_cache_dtype", "auto") for g in groups} == stored


def test_quantised_weights_that_cannot_be_read_are_named(tiny_llama: Path, tmp_path: Path) -> None:
    fields, name, block = E4M3_WEIGHTS["ModelOpt"]
    first = "model.layers.0.self_attn.q_proj."

    def without(tensors: Tensors) -> None:
        in_e4m3(tensors, name, block, plain=False)
        del tensors[first + name]

    def packed(tensors: Tensors) -> None:
        tensors[first + "weight"] = tensors[first + "weight"].to(torch.int8)

    for change, says in (
        (without, f"{first}weight is F8_E4M3 without a weight_scale beside it"),
        (lambda t: (in_e4m3(t, name, block, plain=False), t.update({first + name: torch.ones(3)})),
         f"{first}{name} is F32 of shape (3,), expected one number"),
        (packed, f"{first}weight is I8"),
    ):  # fmt: skip
        folder = changed(tiny_llama, tmp_path / says[-9:].strip(), change)
        with_fields(folder, folder, quantization_config=fields)
        with pytest.raises(WeightsError) as caught:
            show(options(weights=str(folder)))
        assert says in str(caught.value) and "quantization_config=" in str(caught.value)


def test_experts_that_cannot_be_chosen_are_refused(tmp_path: Path) -> None:
    saved("deepseek-v3", tmp_path)
    for fields, says in (
        ({"n_group": 3}, "n_group=3 must divide n_routed_experts=8"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 must be at most n_routed_experts=8"),
        ({"topk_group": 5}, "topk_group=5 must be at most n_group=4"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ):
        with pytest.raises(ConfigError, match=says):
            decoder(with_fields(tmp_path, tmp_path / says[:7], **fields))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"weights": "/nowhere"}, "--weights='/nowhere' is no folder"),
        ({"weights": "random", "layers": 2}, "--layers=2 and --weights"),
        (
            {"weights": "random", "kv_cache_dtype": "int8"},
            "--weights=random doesn't bring; use int8_rows",
        ),
        ({"weights": "random", "quantization": "awq"}, "--quantization='awq' must be fp8"),
        ({"quantization": "fp8"}, "--quantization=fp8 is of --weights, and none are named"),
        ({"arrivals": "poisson"}, "--arrivals='poisson' must be trace, all, or poisson:RATE"),
        ({"arrivals": "poisson:-1"}, "--arrivals='poisson:-1'"),
        ({"arrivals": "poisson:nan"}, "--arrivals='poisson:nan'"),
        ({"arrivals": "later"}, "--arrivals='later'"),
    ],
)
def test_options_are_refused_by_name(given: dict[str, Any], says: str, nothing_runs: None) -> None:
    with pytest.raises(SettingsError) as caught:
        show(options(**given))
    assert says in str(caught.value)


def test_without_safetensors_the_remedy_is_said(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r'pip install "polyattn\[weights\]"'):
        Checkpoint(tiny_llama)


def test_prompts_are_equal_where_hashes_are() -> None:
    first = prompt_tokens(Request(40, 1, (7, 8, 9), 12), 0, 1000, seed=1)
    second = prompt_tokens(Request(36, 1, (7, 8, 5), 12), 1, 1000, seed=1)
    assert len(first) == 40 and first[:24] == second[:24] and first[24:36] != second[24:36]
    assert max(first) < 1000 and first == prompt_tokens(
        Request(40, 1, (7, 8, 9), 12), 0, 1000, seed=1
    )
    assert first != prompt_tokens(Request(40, 1, (7, 8, 9), 12), 0, 1000, seed=2)


def test_arrivals() -> None:
    requests = read_trace(bundled("azure_conversation.csv"), 3, times=True)
    times = [r.arrival for r in Arrivals.parse("trace").of(requests, 0)]
    assert times[:2] == pytest.approx([0.0, 4.314579])
    assert [r.arrival for r in Arrivals.parse("all").of(requests, 0)] == [0.0] * 3
    many = [Request(1, 1)] * 4000
    drawn = [r.arrival for r in Arrivals.parse("poisson:8").of(many, 5)]
    assert drawn == sorted(drawn) and drawn[-1] == pytest.approx(4000 / 8, rel=0.1)
    assert drawn == [r.arrival for r in Arrivals.parse("poisson:8").of(many, 5)]
    late = [Request(1, 1, arrival=9.0), Request(2, 1, arrival=3.0)]
    assert [(r.prompt, r.arrival) for r in Arrivals("trace").of(late, 0)] == [(2, 0.0), (1, 6.0)]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.csv", "ContextTokens,GeneratedTokens\n5,6\n", "lacks the column 'TIMESTAMP'"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nx,5,6\n", "line 2: TIMESTAMP='x'"),
        ("t.jsonl", '{"input_length": 3, "output_length": 4}', "timestamp=None"),
        ("t.jsonl", '{"input_length": 3, "output_length": 4, "timestamp": -1}', "timestamp=-1"),
    ],
)
def test_traces_without_times(tmp_path: Path, name: str, text: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_trace(path, times=True)
    assert says in str(caught.value)
    if "x" not in text:
        read_trace(path)


def test_latencies_count_from_each_requests_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes a second: the second request waits half of one, the third for nobody."""
    monkeypatch.setattr(AttentionRunner, "step", lambda *args, **kwargs: 1.0)
    spec = LayerSpec(num_heads=2, head_size=16, dtype="float32", block_size=8)
    requests = [Request(4, 3, arrival=t) for t in (0.0, 1.5, 20.25)]
    engine = Engine(select_layers([spec], "cpu"), requests, Options(cache_bytes=1 << 20))
    report = engine.run()
    assert report.first_token == [1.0, 1.5, 1.0]
    assert report.between_tokens == [1.0] * 6
    assert report.latency() == {
        "ttft_p50_ms": 1000.0, "ttft_p99_ms": 1500.0, "itl_p50_ms": 1000.0, "itl_p99_ms": 1000.0
    }  # fmt: skip
    assert engine.now == 23.25
