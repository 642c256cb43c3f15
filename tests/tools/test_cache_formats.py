"""Do the commands take every format of a cache's rows, a plugin's and a user's too?"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from polyattn import AttentionKind, LatentSpec, LayerSpec, row_formats
from polyattn.tools.tune import shapes, tuning
from polyattn.tools.tune.measuring import Measured, Times
from tools.commands import here
from unseen_format import registered

ATTENTION = LayerSpec(num_heads=4, num_kv_heads=2, head_size=128, dtype="float32")
LATENT = LayerSpec(
    kind=AttentionKind.MLA, num_heads=2, head_size=96, v_head_size=32, dtype="float32",
    latent=LatentSpec(rank=512, rope_head_size=64),
)  # fmt: skip
V4 = LATENT.replace(latent=LatentSpec(rank=448, rope_head_size=64))
LAYERS = {"fp8_ds_mla": LATENT, "fp8_ds_v4": V4}
FAST = ("int4", "turboquant4", "fp8_ds_mla", "logs6")
NAMES = (*row_formats(), "int8_rows/int4", "logs6")


def few(names: Iterable[str]) -> list[Any]:
    """Return names as parameters, most of them of slow tests."""
    slow = pytest.mark.slow
    return [n if n in FAST else pytest.param(n, marks=slow) for n in names]


@pytest.fixture(autouse=True)
def _known() -> Any:
    """A format that a user registers."""
    with registered():
        yield


def asked(*args: str, code: int = 0) -> Any:
    """Run a command with `--json`; returns what it prints."""
    found, out, err = here(*args, "--json")
    assert found == code, err
    return json.loads(out)


def config(folder: Path, spec: LayerSpec) -> str:
    """Write the config of a model of one such layer; returns its path."""
    sizes = {
        "num_hidden_layers": 1, "num_attention_heads": spec.num_heads, "torch_dtype": "float32",
        "num_key_value_heads": spec.num_kv_heads, "hidden_size": 64, "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    if spec.latent is None:
        text = {"model_type": "llama", "head_dim": spec.head_size, **sizes}
    else:
        text = {
            "model_type": "deepseek_v3", "kv_lora_rank": spec.latent.rank, "v_head_dim": 32,
            "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, **sizes,
        }  # fmt: skip
    path = folder / "config.json"
    path.write_text(json.dumps(text))
    return str(path)


@pytest.mark.parametrize("name", few(NAMES))
def test_run_serves_a_cache_of_any_format(name: str, tmp_path: Path) -> None:
    model = config(tmp_path, LAYERS.get(name, ATTENTION))
    options = ("--requests=2", "--scale=0.03", "--max-tokens=2", "--device=cpu")
    report = asked("run", model, *options, "--kv-cache-dtype", name)
    assert report["checked_tokens"] > 0 and report["groups"][0]["spec"]["kv_cache_dtype"] == name


@pytest.mark.parametrize("name", few(NAMES))
def test_bench_measures_any_format(name: str) -> None:
    """Its own check compares a token with the float64 reference; a wrong result isn't measured."""
    spec = LAYERS.get(name, ATTENTION)
    backend = "TORCH_MLA" if spec.latent else "TORCH_SDPA"
    options = ("--kv-cache-dtype", name, "--backend", backend, "--seconds=0.001", "--device=cpu")
    found = asked("bench", "2q1s40", "--spec", spec.to_json(), *options)
    rows = {row["backend"]: row for row in found["rows"]}
    assert rows[backend]["ms"] > 0 and found["spec"]["kv_cache_dtype"] == name


def test_bench_measures_the_prompts_of_mla_by_attentions_backends() -> None:
    options = ("--kv-cache-dtype=fp8_ds_mla", "--backend=TORCH_SDPA", "--seconds=0.001")
    found = asked("bench", "q24", "--spec", LATENT.to_json(), *options, "--device=cpu")
    assert [row["backend"] for row in found["rows"] if "ms" in row] == ["TORCH_SDPA"]


@pytest.mark.parametrize("name", few(n for n in NAMES if n not in LAYERS))
def test_explain_prices_a_format_by_its_own_times_once_tune_measured_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One backend alone is measured too: `explain` compares formats by it."""
    table, model = tmp_path / "timings.json", config(tmp_path, ATTENTION)
    monkeypatch.setattr(tuning, "LEAST_POINTS", 1)
    monkeypatch.setattr(
        tuning, "size_for", lambda *_: shapes.Size(keys=400, pairs=4000, longest=200)
    )
    us = iter(range(10, 10**6))
    monkeypatch.setattr(Measured, "step_times", lambda self, step: Times(float(next(us)), 0.0))
    options = ("--model", model, "--kv-cache-dtype", name, "--backend", "TORCH_SDPA")
    tuned = asked("tune", *options, "--device=cpu", "--out", str(table))
    assert {m["layer"]["stored"] for m in tuned["models"]} == {name}
    monkeypatch.setenv("POLYATTN_TIMINGS", str(table))
    line = ("explain", model, "--device", "cpu", "--backend", "TORCH_SDPA", "--formats")
    rows = {row["kv_cache_dtype"]: row for row in asked(*line)["groups"][0]["formats"]}
    alone = name if "/" not in name else "int4"
    assert rows[alone]["bytes_per_token"] < rows["auto"]["bytes_per_token"]
    assert bool(rows[alone]["us"]) == (alone == name) and not rows["auto"]["us"]


def test_a_format_that_is_unknown_or_has_no_such_rows_is_refused_by_every_command() -> None:
    for command in (("explain",), ("run",), ("bench", "2q1s64"), ("tune",)):
        model = (
            ("--model", "llama-3.1-8b") if command[0] in ("bench", "tune") else ("llama-3.1-8b",)
        )
        for name, says in (
            ("int4x", "did you mean 'int4'"),
            ("fp8_ds_v4", "has no rows of that size"),
        ):
            code, _, err = here(*command, *model, "--device=cpu", "--kv-cache-dtype", name)
            assert code == 2 and says in " ".join(err.split())
