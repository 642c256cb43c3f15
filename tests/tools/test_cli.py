"""The commands as a user runs them: each in a process of its own once, its other cases in this one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
from defaults import CPU_DEFAULT
from distributions import install
from forks import python
from polyattn.registry import catalogue
from polyattn.registry.catalogue import install_advice
from polyattn.registry.devices import profiles
from polyattn.registry.discovery import discover
from polyattn.tools.cli import doctoring
from polyattn.tools.cli.models import bundled, bundled_models
from polyattn.tools.replay.trace import read_trace
from tools.commands import here


def polyattn(*args: str, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    found = python("-m", "polyattn.tools.cli", *args, **env)
    assert found.returncode == code, found.stdout + found.stderr
    return found


def test_list() -> None:
    text = polyattn("list").stdout
    assert "TORCH_SDPA" in text and "polyattn-cpu" in text and "measured" in text
    found = json.loads(here("list", "--json")[1])
    assert {"TORCH_SDPA", "FLEX_ATTENTION", "EXAMPLE_ATTN"} <= {
        b["name"] for b in found["backends"]
    }


def test_build_says_what_it_builds_and_for_how_long() -> None:
    spec = json.dumps({"num_heads": 4, "head_size": 64})
    found = polyattn("build", "--device", "cpu", "--spec", spec)
    assert "1 layers: attention, 4 heads of 64, bfloat16: built in" in found.stdout
    code, _, errors = here("build", "llama-3.1-8b", "--device", "h100-sxm")
    assert code == 2 and "is a profile to reason about" in errors


def test_integrations_are_listed() -> None:
    pytest.importorskip("polyattn_transformers")  # core's bounds are tested without integrations
    text = here("list")[1]
    found = json.loads(here("list", "--json")[1])
    hosts = {row["name"]: row["host"] for row in found["integrations"]}
    assert hosts.keys() >= {
        "diffusers",
        "flash-attn",
        "recurrent",
        "sglang",
        "torch",
        "transformers",
    }
    assert hosts["transformers"].startswith("transformers") and "polyattn-torch" in text
    assert "polyattn-transformers" in here("doctor")[1]


@pytest.mark.parametrize(
    "args", [["list"], ["explain", "llama-3.1-8b", "--device", "h200", "--json"]]
)
def test_a_reader_that_leaves_is_no_error(args: list[str]) -> None:
    """As `polyattn list | head` does."""
    command = [sys.executable, "-m", "polyattn.tools.cli", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


def test_explain_draws_every_verdict() -> None:
    text = polyattn("explain", "gemma-2-9b", "--device", "x86-amx").stdout
    assert "21 layers" in text and "=> prefill NATIVE_ATTN" in text and "FLEX_ATTENTION" in text
    data = json.loads(polyattn("explain", "gpt-oss-20b", "--device", "cpu", "--json").stdout)
    assert [g["chosen"]["decode"] for g in data["groups"]] == [CPU_DEFAULT, CPU_DEFAULT]
    flex = [c for s in data["groups"][0]["steps"] for c in s["candidates"]
            if c["backend"] == "FLEX_ATTENTION"]  # fmt: skip
    assert flex[0]["rejections"][0]["field"] == "learned_sinks"


def test_an_error_of_a_process_is_one_clear_message() -> None:
    text = polyattn("run", "--cache-gb", "0.00001", code=2).stderr
    assert "--cache-gb" in text and "Traceback" not in text


def test_explain_exits_1_when_a_layer_has_no_backend() -> None:
    text = polyattn("explain", "mamba2-2.7b", "--device", "gaudi3", code=1).stdout
    assert "none is for mamba2 layers on platform hpu" in text


@pytest.mark.slow
def test_streams_of_a_sparse_model_are_served_and_checked(tmp_path: Path) -> None:
    """DeepSeek-V4: windows, chosen entries with their index, all entries; weights are refused by name."""
    config = {
        "model_type": "deepseek_v4", "num_hidden_layers": 3, "compress_ratios": [0, 4, 128],
        "num_attention_heads": 4, "head_dim": 64, "qk_rope_head_dim": 32, "index_n_heads": 4,
        "index_head_dim": 32, "index_topk": 8, "sliding_window": 16, "torch_dtype": "float32",
        "hidden_size": 96,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    short = ("--requests=1", "--scale=0.4", "--max-tokens=5", "--device=cpu")
    code, text, errors = here("run", str(file), *short)
    assert code == 0, errors
    assert "20 tokens checked against the float64 reference" in " ".join(text.split())
    code, _, errors = here("run", str(file), *short, "--weights=random")
    assert code == 2 and "model_type='deepseek_v4' isn't run with weights" in errors


def test_an_unknown_type_is_read_as_it_is_said_to_be(tmp_path: Path) -> None:
    config = {
        "model_type": "my_llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1,
        "intermediate_size": 128, "vocab_size": 256, "attention_colour": "blue",
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    code, _, errors = here("explain", str(file))
    assert code == 2 and "--assume llama" in errors
    code, _, errors = here("explain", str(file), "--assume", "llama")
    assert (
        code == 2 and "attention_colour='blue'" in errors and "--ignore attention_colour" in errors
    )
    read = ("--assume", "llama", "--ignore", "attention_colour")
    code, text, _ = here("explain", str(file), *read)
    assert code == 0 and "4 heads of 16" in text
    code, text, _ = here("run", str(file), *read, "--requests", "1", "--scale", "0.01")
    assert code == 0 and "4 heads of 16" in text
    whole = ("--weights=random", "--requests=1", "--scale=0.01", "--max-tokens=1", "--device=cpu")
    code, _, errors = here("run", str(file), *read, *whole)
    assert code == 0, errors
    code, _, errors = here(
        "bench",
        "1q1s16",
        "--model",
        str(file),
        *read,
        "--seconds=0.001",
        "--device=cpu",
        "--backend=TORCH_SDPA",
    )
    assert code == 0, errors


def test_layers_that_read_anothers_keys_have_no_cache(tmp_path: Path) -> None:
    """Gemma 3n E4B: 35 layers of which 15 keep nothing; each is checked against the reference."""
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "gemma3n_text", "dtype": "float32"}')
    code, out, _ = here("explain", str(config), "--device=cpu")
    assert code == 0 and "layers 20-23, 25-28, 30-33 read the keys of layer 18" in out
    code, out, _ = here(
        "run", str(config), "--device=cpu", "--layers=35", "--requests=1", "--scale=0.1",
        "--max-tokens=2", "--json",
    )  # fmt: skip
    report = json.loads(out)
    assert code == 0 and report["checked_tokens"] == 2 * 35


def test_a_checkpoints_cache_is_served_unless_the_caller_names_another(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    text = {"model_type": "llama", "num_hidden_layers": 1, "dtype": "float32"}
    line = ["run", str(config), "--device=cpu", "--requests=1", "--scale=0.1", "--max-tokens=1"]
    config.write_text(json.dumps(text | {"quantization_config": {"kv_cache_quant_algo": "FP8"}}))
    for options, cache in (([], "fp8_e4m3"), (["--kv-cache-dtype=auto"], "fp8_e4m3"),
                           (["--kv-cache-dtype=float32"], None)):  # fmt: skip
        code, out, _ = here(*line, *options)
        assert code == 0 and ("fp8_e4m3" in out) == (cache is not None)
    config.write_text(json.dumps(text | {"quantization_config": {"kv_cache_quant_algo": "INT8"}}))
    code, _, err = here(*line)
    assert code == 2 and "quantization_config.kv_cache_quant_algo='INT8'" in err


def test_explain_compares_formats_of_the_cache() -> None:
    """Bytes by hand: 32 layers of 8 heads of 128, keys and values; int4 has 8 bytes of scales a row."""
    command = ("explain", "llama-3.1-8b", "--device", "h200", "--formats")
    (group,) = json.loads(here(*command, "--json")[1])["groups"]
    rows = {row["kv_cache_dtype"]: row for row in group["formats"]}
    bytes_of = {name: row["bytes_per_token"] for name, row in rows.items() if "cannot" not in row}
    assert list(bytes_of.values()) == sorted(bytes_of.values())
    for name, row in (("auto", 256), ("fp8_e4m3", 128), ("int8_rows", 132), ("int4", 72)):
        assert bytes_of[name] == 32 * 2 * 8 * row
    assert rows["auto"]["decode"] == "TRITON_ATTN" and rows["int4"]["decode"]
    assert list(rows["auto"]["us"]) == ["32q1s4k", "q2k"] and not rows["int4"]["us"]
    assert "has no rows of that size" in rows["fp8_ds_mla"]["cannot"]
    text = here(*command)[1]
    assert "cache formats" in text and "fp8_ds_mla: head_size=128" in text
    assert "-: no timing table for this device covers this layer" in text


def test_a_profile_is_its_plugins() -> None:
    command = ("explain", "llama-3.1-8b", "--device", "gaudi3")
    text = polyattn(*command, code=2, POLYATTN_DISABLE_PLUGINS="hpu").stderr
    assert "device 'gaudi3' isn't here: polyattn-hpu has it, but its plugin is disabled" in text


def test_every_extra_that_is_advised_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "_checkout", lambda: None)
    extras = set(metadata("polyattn").get_all("Provides-Extra") or ())
    for device in profiles(discover()).values():
        advised = re.findall(r"polyattn\[(\w+)\]", install_advice(device.platform))
        assert set(advised) <= extras
        assert bool(advised) == (device.platform in extras)


def test_explain_notes_a_scope_that_matched_nothing() -> None:
    text = polyattn("explain", "--device", "cpu", POLYATTN_BACKEND="mla=TORCH_SDPA").stdout
    assert "matched no layer" in text


def test_explain_says_who_runs_a_batch_that_was_not_measured() -> None:
    batch = ("explain", "llama-3.1-8b", "--device", "cpu", "--batch", "24q1s4k")
    text = polyattn(*batch, POLYATTN_TIMINGS="0").stdout
    assert f"by priority prefill {CPU_DEFAULT}, decode {CPU_DEFAULT}: no timing table for" in text


def test_doctor_names_a_package_below_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's pin may have replaced torch by one that pip would refuse."""
    needed = ["numpy>=1.26", "torch>=99", 'rich>=99; extra == "cli"']
    monkeypatch.setattr("polyattn.tools.cli.doctoring.requires_of_polyattn", lambda: needed)
    problems = [problem for problem in doctoring.examine()["problems"] if "99" in problem]
    assert len(problems) == 1
    assert problems[0].startswith("torch 2.") and "torch>=99 is needed" in problems[0]
    assert "pip install 'torch>=99'" in problems[0]


def test_doctor_names_a_plugin_of_another_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requires = [
        "polyattn>=99,<100",
        "polyattn-torch>=98",
        "torch>=97",
        "polyattn>=96; extra == 'x'",
    ]
    lines = "".join(f"Requires-Dist: {text}\n" for text in requires)
    points = (
        "[polyattn.integrations]\nnewer = newer:register\n[polyattn.plugins]\nnewer = newer_hooks\n"
    )
    install(tmp_path, "newer", "0.2", lines, points)
    (tmp_path / "newer_hooks.py").write_text(
        "from polyattn.plugin import Capabilities\nCapabilities(of_tomorrow=1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    problems = [p for p in doctoring.examine()["problems"] if p.startswith("newer 0.2")]
    told = (
        f"polyattn {doctoring.__version__} is installed, but polyattn>=99,<100 is needed; "
        "pip install --upgrade polyattn newer"
    )
    assert problems == [f"newer 0.2: {told}"]
    (broken,) = (plugin for plugin in discover().plugins if plugin.name == "newer")
    assert (
        broken.problem.startswith(f"{told} (its import or a hook failed: Typ")
        and "of_tomorrow" in broken.problem
    )


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("FLASHINFR", "POLYATTN_BACKEND=FLASHINFR: backend 'FLASHINFR' is unknown; did you mean 'FLASHI"),
        ("mla.decode=FLASHMLA", "POLYATTN_BACKEND=decode.mla=FLASHMLA can't run here: "),
        ("decode=TORCH_SDPA", ""),
    ],
)  # fmt: skip
def test_doctor_looks_at_the_backends_that_are_named(
    named: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every selection that such a name speaks of fails: none falls back."""
    monkeypatch.setenv("POLYATTN_BACKEND", named)
    problems = [p for p in doctoring.examine()["problems"] if "POLYATTN_BACKEND" in p]
    assert len(problems) == bool(says) and all(p.startswith(says) for p in problems)


def test_who_is_disabled_is_said_where_no_device_is_found() -> None:
    """At 3 a.m. somebody's variable is a likelier cause than a plugin that was never installed."""
    hidden = {"POLYATTN_DISABLE_PLUGINS": "cpu"}
    assert (
        "polyattn-cpu 0.1.0 is disabled: POLYATTN_DISABLE_PLUGINS (disable_plugins) names it"
        in polyattn("explain", "llama-3.1-8b", code=2, **hidden).stderr
    )
    problems = json.loads(polyattn("doctor", "--json", code=1, **hidden).stdout)["problems"]
    assert any(
        "no device is found; " in p and "polyattn-cpu 0.1.0 is disabled" in p for p in problems
    )


def test_doctor() -> None:
    data = json.loads(polyattn("doctor", "--json", POLYATTN_CHECKS="1").stdout)
    assert data["problems"] == [] and data["variables"] == {"POLYATTN_CHECKS": "1"}
    assert "cpu" in here("doctor")[1]
    assert "PLYATTN" in json.loads(
        polyattn("doctor", "--json", POLYATTN_PLYATTN="1", code=1).stdout
    )["problems"][0]  # fmt: skip


ATTENTION_MODELS = [m for m in bundled_models() if not m.startswith(("mamba", "deepseek"))]


SHORT = ("--requests", "5", "--scale", "0.03", "--max-tokens", "3", "--json")


def serve(model: str, *args: str) -> dict[str, Any]:
    code, text, errors = here("run", model, *SHORT, *args)
    assert code == 0, text + errors
    data: dict[str, Any] = json.loads(text)
    return data


@pytest.mark.parametrize("model", ATTENTION_MODELS)
def test_run_serves_every_model(model: str) -> None:
    trace = bundled("mooncake_conversation.jsonl")
    data = serve(model, "--trace", str(trace))
    outputs = [min(3, r.scaled(0.03).output) for r in read_trace(trace, 5)]
    assert data["checked_tokens"] > 0 and data["max_error"] < 0.01
    assert data["generated_tokens"] == (5 if model.startswith("bert") else sum(outputs))


def test_run_shares_prefixes_and_plots(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    line = {"input_length": 1100, "output_length": 2, "hash_ids": [1, 2, 3]}
    trace.write_text("\n".join([json.dumps(line)] * 5))
    plot = tmp_path / "p.png"
    data = serve("llama-3.1-8b", "--trace", str(trace), "--max-seqs", "1", "--plot", str(plot))
    assert data["shared_prefix_tokens"] == 4 * 32  # all 33 tokens but the last
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_run_shares_the_prompt_of_several_samples() -> None:
    """Of every request 4 samples; what they have in common is counted, and copied where it ends."""
    data = serve("llama-3.1-8b", "--samples", "4", "--block-size", "16")
    sharing = data["sharing"]
    assert data["requests"] == 20 and data["shared_prefix_tokens"] > 0
    assert sharing["blocks_copied"] > 0
    assert 0 < sharing["distinct_blocks"] < sharing["blocks_read"]
    per_block = 2 * 8 * 128 * 16 * 2
    saved = sharing["blocks_read"] - sharing["distinct_blocks"]
    assert sharing["shared_bytes"] == saved * per_block


def test_run_bounds_a_windows_memory() -> None:
    """gpt-oss' sliding layers hold their window's blocks, its full layers all that was served."""
    data = serve("gpt-oss-20b", "--scale", "0.5", "--block-size", "16", "--max-tokens", "5")
    sliding, full = sorted(data["cache"], key=lambda group: group["window"] is None)
    assert sliding["window"] == 128 and full["window"] is None
    assert sliding["decode_blocks"] <= -(-128 // 16) + 1 < full["decode_blocks"]
    assert sliding["blocks"] < full["blocks"]


def test_the_example_loop_runs() -> None:
    found = python(Path(__file__).parents[2] / "examples" / "serving_loop.py")
    assert found.stdout.count("new tokens after") == 4


def test_run_on_a_quantized_cache() -> None:
    text = polyattn("run", "llama-3.1-8b", *SHORT, "--kv-cache-dtype", "int8").stdout
    assert json.loads(text)["max_error"] < 0.01


def test_bench_counts_what_a_shared_prefix_saves() -> None:
    spec = '{"num_heads": 4, "head_size": 64, "dtype": "float32", "block_size": 16}'
    command = ("bench", "4q1s80", "--spec", spec, "--seconds", "0.02", "--backend", "TORCH_SDPA")
    (row,) = json.loads(here(*command, "--shared-prefix", "64", "--json")[1])["rows"]
    assert (row["blocks_read"], row["distinct_blocks"]) == (4 * 5, 4 + 4)
    assert row["shared_bytes"] == 12 * 16 * 2 * 4 * 64 * 4 and row["saved_bytes"] == 0
    assert "8 distinct" in here(*command, "--shared-prefix", "64")[1]
    code, _, said = here(*command, "--shared-prefix", "80")
    assert code == 2 and "--shared-prefix=80: a sequence of batch 4q1s80 has only 79 tokens" in said


def tiny_llama(folder: Path, heads: int, longest: int) -> None:
    """Write the config of a model of one layer, its heads 16 wide together."""
    config = {
        "model_type": "llama", "hidden_size": 16, "num_attention_heads": heads,
        "head_dim": 16 // heads, "num_hidden_layers": 1, "num_key_value_heads": 1,
        "intermediate_size": 32, "vocab_size": 64, "max_position_embeddings": longest,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float32", "rope_theta": 10000.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def test_run_streams(tmp_path: Path) -> None:
    """Sinks and a window, positions within the cache: a prompt and an output far beyond both."""
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"input_length": 90, "output_length": 40}')
    tiny_llama(tmp_path, heads=2, longest=512)
    command = ["run", str(tmp_path), "--trace", str(trace), "--max-tokens", "40", "--device", "cpu"]
    code, _, text = here(*command, "--sink-tokens", "3")
    assert code == 2 and "--sink-tokens=3 needs a window in every attention layer" in text
    command += ["--sliding-window", "24", "--sink-tokens", "3", "--block-size", "8"]
    for whole in ([], ["--weights", "random"]):
        data = json.loads(here(*command, *whole, "--cache-gb", "0.01", "--json")[1])
        (cache,) = data["cache"]
        assert (cache["window"], cache["sinks"]) == (24, 3)
        assert cache["decode_blocks"] == -(-(24 + 3) // 8) + 1
        assert data["checked_tokens"] > 0 and data["max_error"] < 1e-4


@pytest.mark.parametrize(
    ("window", "tokens"), [(64, 700), pytest.param(1024, 100_000, marks=pytest.mark.sweep)]
)
def test_a_windows_memory_is_bounded_by_the_window(
    window: int, tokens: int, tmp_path: Path
) -> None:
    """However much is generated: the window's and the sinks' blocks, and one that is being filled."""
    trace = tmp_path / "t.jsonl"
    trace.write_text(f'{{"input_length": {2 * window}, "output_length": {tokens}}}')
    tiny_llama(tmp_path, heads=1, longest=131072)
    command = (
        "run", str(tmp_path), "--trace", str(trace), "--max-tokens", str(tokens), "--device", "cpu",
        "--sliding-window", str(window), "--sink-tokens", "4", "--block-size", "16", "--check", "0",
        "--cache-gb", "0.01", "--json",
    )  # fmt: skip
    data = json.loads(here(*command)[1])
    (cache,) = data["cache"]
    assert data["generated_tokens"] == tokens
    assert cache["decode_blocks"] == -(-(window + 4) // 16) + 1


def test_bench(tmp_path: Path) -> None:
    plot = tmp_path / "b.png"
    spec = '{"num_heads": 4, "head_size": 64, "dtype": "float32"}'
    text = polyattn(
        "bench", "2q1s64", "q32_q1s40", "--spec", spec, "--seconds", "0.02", "--json",
        "--backend", "TORCH_SDPA", "--backend", "EXAMPLE_ATTN", "--plot", str(plot),
    ).stdout  # fmt: skip
    rows = json.loads(text)["rows"]
    assert {(r["batch"], r["backend"]) for r in rows} == {
        (b, n) for b in ("2q1s64", "q32_q1s40") for n in ("TORCH_SDPA", "EXAMPLE_ATTN")
    }
    assert all(r["selected"] == (r["backend"] == CPU_DEFAULT) for r in rows)
    assert plot.read_bytes().startswith(b"\x89PNG")
