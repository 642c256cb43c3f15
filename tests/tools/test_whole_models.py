"""A whole model run by the engine is the model that transformers runs, token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from polyattn import LayerSpec
from polyattn.errors import SettingsError
from polyattn.tools.cli import main, running
from polyattn.tools.replay import engine as engine_module
from polyattn.tools.replay.trace import Request, sampled
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.llama import modeling_llama
from typer.testing import CliRunner
from whole_models import MODELS, Recorded, disagreement, engine, saved

TOLERANCE = 1e-4
"""Of the largest logit, in float32."""
STEPS = 32
QUICK = ("llama", "deepseek-v3", "jamba")
EVERY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "ModelRunner", Recorded)


def run(served: engine_module.Engine, forced: bool = False) -> tuple[Any, Recorded]:
    """Serve; `forced`: the request that came last is preempted twice."""
    steps = iter(range(1000))

    def preempt(done: int, total: int) -> None:
        if next(steps) in (5, 15) and forced:
            served.scheduler._preempt(served.scheduler.running[-1])

    report, model = served.run(preempt), served.model
    assert isinstance(model, Recorded)
    assert report.generated == sum(s.request.output for s in model.tokens)
    return report, model


@pytest.mark.parametrize("name", EVERY)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path, recorded: None) -> None:
    model = saved(name, tmp_path)
    requests = [Request(37, STEPS), Request(5, STEPS), Request(1, 9), Request(18, STEPS)]
    report, found = run(engine(tmp_path, requests, token_budget=16, check_tokens=1))
    assert max(found.widest) == 4, "prefill and decode ran in one batch"
    assert any(not step.decode and step.tokens == 16 for step in report.steps)
    for sequence in found.tokens:
        assert disagreement(found, sequence, model) < TOLERANCE
    assert report.checked > 0 and report.max_error < TOLERANCE


@pytest.mark.parametrize("name", EVERY)
def test_reused_prefixes_and_preemption(name: str, tmp_path: Path, recorded: None) -> None:
    model = saved(name, tmp_path)
    requests = [
        Request(40, STEPS, (1, 2, 3, 4, 5), 8), Request(33, STEPS, (1, 2, 3, 9), 8),
        Request(41, STEPS, (1, 2, 3, 4, 6), 8), Request(20, STEPS),
    ]  # fmt: skip
    options = {"blocks": 20, "token_budget": 24, "check_tokens": 0}
    specs = LayerSpec.from_hf_config(tmp_path)
    # States and windows alone never run out of cache.
    bounded = all(spec.kind.is_recurrent or spec.sliding_window for spec in specs)
    report, found = run(engine(tmp_path, requests, **options), forced=bounded)
    for sequence in found.tokens:
        assert disagreement(found, sequence, model) < TOLERANCE
    for cache in (usage.to_dict() for usage in report.usage):
        if cache["window"] is not None:
            window, size = cache["window"], cache["block_size"]
            assert cache["decode_blocks"] == -(-(window - 1) // size) + 1 < -(-(41 + STEPS) // size)
    recurrent = any(spec.kind.is_recurrent for spec in specs)
    assert report.shared_tokens > 0 and report.preemptions > 0
    assert (report.states_copied > 0) is recurrent


@pytest.mark.parametrize("name", ["mamba2", "jamba"])
def test_states_go_on_where_prefixes_part(name: str, tmp_path: Path, recorded: None) -> None:
    """Four samples of two prompts, room for one snapshot and for eight: the same tokens."""
    model = saved(name, tmp_path)
    given = [Request(49, 9, (1, 2, 3), 16), Request(40, 9, (1, 4, 5), 16)]
    reused = []
    for snapshots in (1, 8):
        options = {"token_budget": 48, "max_seqs": 2, "snapshots": snapshots, "check_tokens": 1}
        report, found = run(engine(tmp_path, sampled(given, 4), **options))
        for sequence in found.tokens:
            assert disagreement(found, sequence, model) < TOLERANCE
        assert report.max_error < TOLERANCE
        reused.append(report.shared_tokens)
    assert 0 < reused[0] <= reused[1] == 3 * 48 + 3 * 32


@pytest.mark.parametrize(("name", "limit"), [("llama-longrope", 128), ("llama-dynamic", 256)])
def test_a_sequence_that_would_change_its_frequencies_is_refused(
    name: str, limit: int, tmp_path: Path
) -> None:
    saved(name, tmp_path)
    options = {"token_budget": 64, "check_tokens": 0}
    engine(tmp_path, [Request(limit - 8, 8)], **options)
    with pytest.raises(
        SettingsError, match=rf"{limit + 1} tokens: rope_scaling='.*beyond {limit} "
    ):
        engine(tmp_path, [Request(4, 4), Request(limit - 8, 9)], **options)


def int8_by_row(x: Tensor) -> Tensor:
    """Return what int8 times a scale for each token and head holds of (..., head_size)."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def int8_by_layer(x: Tensor) -> Tensor:
    """Return what int8 times the tests' scale holds."""
    return (x / INT8_SCALE).round().clamp(-127, 127) * INT8_SCALE


def e4m3(weight: Tensor) -> Tensor:
    """Return what e4m3 times a scale for the matrix holds."""
    scale = weight.abs().max() / 448
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


INT8_SCALE = 0.25
INT8_SCHEME = {
    "quant_method": "compressed-tensors",
    "kv_cache_scheme": {"type": "int", "num_bits": 8},
}
QUANTISED = {
    "--kv-cache-dtype=int8_per_token_head": (int8_by_row, None),
    "--kv-cache-dtype=auto": (int8_by_layer, None),
    "--quantization=fp8": (None, e4m3),
}
"""Of each option what is left of cached keys and values, and of projections' weights."""


@pytest.mark.parametrize("option", QUANTISED)
def test_what_is_quantised_is_the_model_that_transformers_runs_over_the_same_numbers(
    option: str, tmp_path: Path, recorded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user asks for it: of a checkpoint whose cache is in int8, where the option says "auto"."""
    model: Any = saved("llama", tmp_path)
    cached, projected = QUANTISED[option]
    attend, rounded = modeling_llama.eager_attention_forward, []
    if cached is int8_by_layer:
        (tmp_path / "config.json").write_text(
            json.dumps(model.config.to_dict() | {"quantization_config": INT8_SCHEME})
        )
        scales = {f"model.layers.{i}.self_attn.{x}_proj.{x}_scale": torch.tensor(INT8_SCALE)
                  for i in range(model.config.num_hidden_layers) for x in "kv"}  # fmt: skip
        weights = tmp_path / "model.safetensors"
        save_file(load_file(weights) | scales, weights)

    def over_cached(
        layer: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any
    ) -> Any:
        assert cached is not None
        rounded.append(layer)
        return attend(layer, query, cached(key), cached(value), *rest, **more)

    if cached:
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", over_cached)
    for name, weight in model.named_parameters() if projected else ():
        if "_proj." in name:
            weight.copy_(projected(weight))
    found = served_by_command(tmp_path, monkeypatch, option)
    for sequence in found.tokens:
        assert disagreement(found, sequence, model) < TOLERANCE
    assert bool(rounded) == bool(cached)


@pytest.mark.parametrize("name", ["gemma3", "deepseek-v3"])
def test_the_command_serves_the_same_model(
    name: str, tmp_path: Path, recorded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a checkpoint's folder to tokens, as a user does it."""
    model = saved(name, tmp_path)
    found = served_by_command(tmp_path, monkeypatch)
    for sequence in found.tokens:
        assert disagreement(found, sequence, model) < TOLERANCE


def served_by_command(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Recorded:
    """Return the model after `polyattn run --weights FOLDER`."""
    engines = []

    def kept(*args: Any) -> engine_module.Engine:
        engines.append(engine_module.Engine(*args))
        return engines[-1]

    monkeypatch.setattr(running, "Engine", kept)
    app = CliRunner().invoke(
        main.app, ["run", "--weights", str(folder), "--requests", "2", "--scale", "0.1",
                   "--max-tokens", "6", "--cache-gb", "0.01", "--device", "cpu", "--json", *options],
    )  # fmt: skip
    assert app.exit_code == 0, app.output
    found = engines[0].model
    assert isinstance(found, Recorded)
    return found
