"""What a person types and reads: options by other engines' names, bounds, ratios, predicted times."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from polyattn import LayerSpec, Recurrent, resolve_device
from polyattn.conformance import claim
from polyattn.registry.builtin_row_formats import ROW_FORMATS
from polyattn.runtime.step.cost import Cost
from polyattn.tools.cli import output, weights
from polyattn.tools.cli.benching import Bench, _of_this_kind, measure_limits
from polyattn.tools.cli.main import app
from polyattn.tools.cli.options import TuneOptions
from polyattn.tools.cli.plots import plot_values
from polyattn.tools.cli.tuning import _layers
from rich.console import Console
from tools.commands import here
from typer.main import get_command
from typer.testing import CliRunner

SPEC = LayerSpec(num_heads=4, head_size=64, dtype="float32")
SMALL = ("--spec", SPEC.to_json())


def test_bench_leaves_the_reference_and_other_kinds_out() -> None:
    names = _of_this_kind(SPEC, resolve_device("cpu"), reference=False)
    assert {"NATIVE_ATTN", "TORCH_SDPA"} <= set(names)
    assert not {"VANILLA", "TORCH_SCAN", "TORCH_MLA", "TORCH_STORE", "FLASH_ATTN"} & set(names)
    assert "VANILLA" in _of_this_kind(SPEC, resolve_device("cpu"), reference=True)


RECURRENCES = {
    "gdn": {"head_size": 16, "recurrent": {}},
    "mamba2": {"head_size": 16, "recurrent": {"state_size": 16}},
    "rwkv7": {"head_size": 16, "recurrent": {}},
}


@pytest.mark.parametrize("kind", RECURRENCES)
def test_bench_times_a_recurrence(kind: str) -> None:
    """Prompts, one of them after others, and decodes; what isn't a recurrence's backend is left out."""
    spec = json.dumps({"kind": kind, "num_heads": 2, "dtype": "float32", **RECURRENCES[kind]})
    args = ("bench", "q80_2q1s30_q70s90", "--spec", spec, "--seconds", "0.001")
    code, out, errors = here(*args, "--json")
    assert code == 0, errors
    rows = {row["backend"]: row for row in json.loads(out)["rows"]}
    assert {"NATIVE_SCAN", "TORCH_SCAN"} <= rows.keys() and "TORCH_SDPA" not in rows
    assert all(0 < rows[name]["error"] < 1e-4 for name in ("NATIVE_SCAN", "TORCH_SCAN")), rows
    assert "--shared-prefix=3: a layer of kind" in here(*args, "--shared-prefix", "3")[2]


def test_a_recurrence_that_goes_wrong_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that isn't read, in a sequence that goes on."""
    run = Recurrent.forward

    def forgetful(layer: Recurrent, *inputs: Any, states: Any, **how: Any) -> Any:
        states.data.zero_()
        return run(layer, *inputs, states=states, **how)

    monkeypatch.setattr(Recurrent, "forward", forgetful)
    spec = json.dumps({"kind": "gdn", "num_heads": 2, "dtype": "float32", **RECURRENCES["gdn"]})
    args = ("bench", "2q1s30", "--spec", spec, "--seconds", "0.001", "--backend", "TORCH_SCAN")
    code, out, _ = here(*args, "--json")
    assert code == 1 and "its result is wrong" in json.loads(out)["rows"][0]["cannot"]


def test_bench_prints_ratios_to_the_best() -> None:
    args = ("bench", "2q1s64", *SMALL, "--seconds", "0.001", "--backend", "VANILLA")
    code, out, _ = here(*args, "--attention-backend", "CPU_ATTN", "--json")
    first, second = json.loads(out)["rows"]
    assert code == 0 and (first["backend"], first["over_best"]) == ("NATIVE_ATTN", 1.0)
    assert second["backend"] == "VANILLA"
    assert second["over_best"] == pytest.approx(second["ms"] / first["ms"])
    assert "/ best" in here(*args)[1]


def test_bench_begins_nothing_after_its_time() -> None:
    args = ("bench", "2q1s64", *SMALL, "--backend", "TORCH_SDPA", "--seconds", "0.001", "--json")
    code, out, _ = here(*args, "--total-seconds", "1e-9")
    assert code == 1
    assert "TORCH_SDPA isn't measured" in json.loads(out)["rows"][0]["cannot"]
    assert "--total-seconds=0.0 must be positive" in here(*args, "--total-seconds", "0")[2]


def test_a_batch_is_held_against_the_level_of_memory_that_it_fits_in() -> None:
    bench = object.__new__(Bench)
    bench.limits = {
        "copies_gb_per_s": {2**18: 100.0, 2**20: 50.0, 2**24: 10.0},
        "matmul_tflop_per_s": 1.0,
    }
    for size, rate in ((2**10, 100), (2**18, 100), (2**19, 100), (2**20, 50), (2**30, 10)):
        assert bench._limit(Cost(bytes=size, flops=0)) == pytest.approx(size / rate / 1e9)
    assert bench._limit(Cost(bytes=0, flops=10**12)) == 1.0


def test_a_larger_copy_is_never_the_faster_one() -> None:
    limits = measure_limits(SPEC, torch.device("cpu"))
    rates = limits["copies_gb_per_s"]
    assert limits["copy_gb_per_s"] == rates[2**28]
    assert sorted(rates) == [2**18, 2**20, 2**22, 2**24, 2**26, 2**28]
    in_order = [rates[size] for size in sorted(rates)]
    assert in_order == sorted(in_order, reverse=True)


@pytest.mark.parametrize("command", ["explain", "bench", "run", "build", "tune"])
def test_every_command_takes_the_engines_options(command: str) -> None:
    text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
    for option in ("--attention-backend", "--kv-cache-dtype", "--block-size"):
        assert option in text


def test_the_cache_dtypes_of_the_help_are_all_that_core_has() -> None:
    options = get_command(app).commands["explain"].params  # type: ignore[attr-defined]
    (told,) = (o.help for o in options if "--kv-cache-dtype" in o.opts)
    words = set(re.findall(r"\w+", told))
    assert {"auto", "fp8_e4m3", "fp8_e5m2", "int8"} | {f.name for f in ROW_FORMATS} <= words


def test_explain_reads_the_cache_as_the_engines_options_say() -> None:
    args = (
        "--attention-backend",
        "triton",
        "--kv-cache-dtype",
        "fp8",
        "--block-size",
        "64",
        "--json",
    )
    for layers in (("llama-3.1-8b",), ("--spec", '{"num_heads": 32, "head_size": 128}')):
        code, out, _ = here("explain", *layers, "--device", "h100-sxm", *args)
        (group,) = json.loads(out)["groups"]
        assert code == 0 and group["chosen"]["decode"] == "TRITON_ATTN"
        assert (group["spec"]["kv_cache_dtype"], group["spec"]["block_size"]) == ("fp8_e4m3", 64)
    code, out, _ = here("explain", "mamba-2.8b", "--device", "cpu", "--block-size", "64", "--json")
    assert code == 0  # a recurrence has no blocks


def test_tune_measures_the_cache_that_is_named() -> None:
    cpu = resolve_device("cpu")
    for models in ([], ["llama-3.1-8b"]):
        specs = _layers(TuneOptions(model=models, kv_cache_dtype="int8", block_size=32), cpu)
        assert {(s.kv_cache_dtype, s.block_size) for s in specs} == {("int8", 32)}


def test_explain_predicts_the_usual_steps_where_they_were_measured(tmp_path: Path) -> None:
    plot = tmp_path / "times.png"
    args = ("explain", "llama-3.1-8b", "--device", "h200")
    code, out, _ = here(*args, "--json", "--plot", str(plot))
    steps = json.loads(out)["groups"][0]["batches"]
    assert code == 0 and [s["calls"][0]["kind"] for s in steps.values()] == ["decode", "prefill"]
    assert all(len(s["calls"][0]["candidates"]) > 1 for s in steps.values())
    assert plot.read_bytes().startswith(b"\x89PNG")
    code, out, _ = here("explain", "llama-3.1-8b", "--device", "x86-amx", "--json")
    assert "batches" not in json.loads(out)["groups"][0]
    code, _, said = here("explain", "--device", "x86-amx", "--plot", str(plot))
    assert code == 2 and "there are no times to plot" in said


def test_a_slow_choice_says_how_slow_it_is() -> None:
    """The factor is that of the two predicted times."""
    args = ("explain", "llama-3.1-8b", "--device", "h200", "--json")
    found = json.loads(here(*args, "--backend", "decode=FLASH_ATTN_V3")[1])["groups"][0]
    (call,) = found["batches"]["32q1s4k"]["calls"]
    times = {row["backend"]: row["us"] for row in call["candidates"]}
    best = min(times, key=times.__getitem__)
    assert call["backend"] == "FLASH_ATTN_V3" != best
    factor = times["FLASH_ATTN_V3"] / times[best]
    assert call["why"] == f"FLASH_ATTN_V3, as named: {factor:.2f} times the time of {best}"


def test_values_are_plotted_as_points(tmp_path: Path) -> None:
    plot_values({"decode": {"A": 1.0, "B": 133.0}}, tmp_path / "p.svg", "title", "us")
    assert "<svg" in (tmp_path / "p.svg").read_text()


def test_run_asks_before_it_draws_many_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("run", "llama-3.1-8b", "--weights", "random", "--device", "cpu")
    code, _, said = here(*command)
    assert code == 2 and "draws 15 GiB; no terminal to ask at: pass --yes" in said
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(weights, "sys", SimpleNamespace(stdin=terminal, stderr=terminal))
    monkeypatch.setattr(weights.typer, "confirm", lambda text, err: False)
    code, _, said = here(*command)
    assert code == 2 and "the answer was no" in said


def test_run_prints_the_tokens_that_a_model_generated(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 16, "num_attention_heads": 2, "head_dim": 8,
        "num_hidden_layers": 1, "num_key_value_heads": 1, "intermediate_size": 32, "vocab_size": 64,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "torch_dtype": "float32", "rope_theta": 10000.0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        '{"input_length": 9, "output_length": 4}\n{"input_length": 5, "output_length": 2}'
    )
    command = ("run", str(tmp_path), "--trace", str(trace), "--device", "cpu", "--cache-gb", "0.01")
    report = json.loads(here(*command, "--weights", "random", "--json")[1])
    outputs = report["outputs"]
    assert [len(ids) for ids in report["prompts"]] == [9, 5]
    assert [len(ids) for ids in outputs] == [4, 2] and all(0 <= i < 64 for o in outputs for i in o)
    text = here(*command, "--weights", "random")[1]
    assert f"tokens of request 1: {' '.join(map(str, outputs[1]))}\n" in text
    assert "outputs" not in json.loads(here(*command, "--json")[1])


def test_a_table_takes_a_hundred_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(width=200)
    monkeypatch.setattr(output, "console", console)
    with console.capture() as captured:
        output.print_rows({"name": "A", "what it is": "{said}"}, [{"said": "word " * 60}])
    assert max(map(len, captured.get().splitlines())) <= 100


def test_a_shell_completes_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_POLYATTN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "polyattn ex")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert here()[1].split() == ["explain"]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("run mamba2-2.7b --sliding-window 5", "--sliding-window=5 needs attention layers"),
        ("run mamba2-2.7b --sink-tokens 2", "--sink-tokens=2 needs attention layers"),
        ("run mamba2-2.7b --fp8-compute", "--fp8-compute=True needs layers over a cache"),
        ("run llama-3.1-8b --snapshots 4", "--snapshots=4 needs recurrent layers"),
        ("claim polyattn:attention --device h100-sxm", "is a profile; claim needs a device"),
        ("explain --spec nofile.json", "'nofile.json' is not JSON: "),
        ('explain --spec {"num_heads":4}', "LayerSpec has no head_size; pass one"),
    ],
)
def test_an_option_that_changes_nothing_is_refused(command: str, says: str) -> None:
    device = () if "--device" in command else ("--device", "cpu")
    code, _, text = here(*command.split(), *device)
    assert code == 2 and says in text


def test_options_of_a_cache_are_noted_where_no_layer_has_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = ("--block-size", "64", "--kv-cache-dtype", "fp8", "--formats", "--device", "cpu")
    for model in ("mamba2-2.7b", "bert-base-uncased"):
        caplog.clear()
        code, text, _ = here("explain", model, *options)
        assert code == 0 and "--formats: no layer here has a cache" in text
        for said in ("--block-size=64 changes nothing", "--kv-cache-dtype=fp8 changes nothing"):
            assert said in caplog.text
    caplog.clear()
    here("explain", "llama-3.1-8b", *options)
    assert "changes nothing" not in caplog.text


def test_a_model_is_named_by_default_in_the_help() -> None:
    for command in ("explain", "build", "run", "bench"):
        assert "llama-3.1-8b" in here(command, "--help")[1]


def test_claim_computes_by_one_thread_and_leaves_the_process_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two threads that wait for each other took three times the processor time."""
    seen: list[int] = []
    monkeypatch.setattr(claim, "find", lambda *args: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        claim.find_at("textwrap:dedent", "cpu", 0, 0.0, print)
        assert seen == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
