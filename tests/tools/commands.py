"""Runs a command line in the test's process, and makes lines by the thousand.

Those have real options and variables with values that nobody should give.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
from collections.abc import Iterator
from pathlib import Path

from polyattn.tools.cli.entry import run


def here(*args: str) -> tuple[int, str, str]:
    """Run a command line in this process; returns its exit code, its output and its errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(args)
    return code, out.getvalue(), err.getvalue()


VALUES = (
    "", "0", "-1", "1", "2", "1e9", "1e400", "nan", "inf", "9" * 30, "9" * 5000, "x", "[red]x[/]",
    "\x1b[31mred", "a" * 5000, "\udce9", "\u2028", "é", "None", "true", "cpu", "cuda:0", "cuda:x",
    "h200", "x86-amx", "gaudi3", "cpu:9", "meta", "TORCH_SDPA", "torch_sdpa", "prefill=TORCH_SDPA",
    "prefill.decode=X", "decode=", "=", ",", "mla=NOPE", "EXAMPLE_ATTN,prefill=FLEX_ATTENTION",
    "llama-3.1-8b", "bert-base-uncased", "mamba-2.8b", "deepseek-v2-lite", "auto", "int8", "fp8",
    "zipf", "one-long", "trace:/dev/null", "trace", "poisson:2",
    "8q1s2k", "q2k", "2q1s64", "q" * 9, "0q1", "999999999q1s1", "999999999999q1s1k", "q999999999k",
    "/", "/dev/null", "/nowhere/x", "/dev/full", "/proc/self/mem", ".", "..", "~", "x" * 300,
    "{}", "[]", "null", "{", "[" * 10_000, '{"a":' * 10_000, '{"num_heads": %s}' % ("9" * 5000),
    '{"num_heads": 4, "head_size": 64}', '{"num_heads": 4, "head_size": 64, "dtype": "float32"}',
    '{"num_heads": "4", "head_size": 64}', '{"num_heads": 4, "head_size": 1e3}',
    '{"num_heads": 4, "head_size": 64, "kind": "mamba2"}', '{"num_heads": true, "head_size": []}',
    '{"num_heads": 4, "head_size": 64, "dtype": {}}', '{"num_heads": 4, "head_size": 64, "role": 3}',
    '{"num_heads": 4, "head_size": 64, "latent": {"rank": "x"}}',
    '{"num_heads": 4, "head_size": 64, "sliding_window": "x", "alibi": 7}',
)  # fmt: skip
OPTIONS: dict[str, tuple[str, ...]] = {
    "list": ("--json", "--help", "--jsn"),
    "explain": ("--json", "--device=", "--backend=", "--spec=", "--batch=", "--assume=", "--ignore=",
                "MODEL", "--plot=", "--attention-backend=", "--kv-cache-dtype=", "--block-size="),
    "run": ("--json", "--device=", "--backend=", "MODEL", "--trace=", "--requests=", "--layers=",
            "--max-tokens=", "--scale=", "--token-budget=", "--max-seqs=", "--cache-gb=",
            "--block-size=", "--kv-cache-dtype=", "--fp8-compute", "--check=", "--seed=", "--plot=",
            "--weights=", "--arrivals=", "--context-parallel=", "--assume=", "--ignore=",
            "--quantization="),
    "bench": ("--json", "--device=", "--backend=", "--spec=", "--model=", "MODEL", "--block-size=",
              "--seconds=", "--lengths=", "--seed=", "--plot=", "--total-seconds=", "--assume=",
              "--ignore=", "--kv-cache-dtype="),
    "tune": ("--json", "--device=", "--backend=", "--model=", "--trace=", "--out=", "--no-quantized",
             "--plot=", "--assume=", "--ignore=", "--kv-cache-dtype=", "--block-size="),
    "why": ("--json", "MODEL"),
    "doctor": ("--json", "--help", "x"),
}  # fmt: skip
VARIABLES = (
    "POLYATTN_BACKEND", "POLYATTN_LAYOUT", "POLYATTN_VERIFY", "POLYATTN_CHECKS", "POLYATTN_CPU_ISA",
    "POLYATTN_PROBE_TIMEOUT", "POLYATTN_PLUGIN_TIMEOUT", "POLYATTN_TIMINGS", "POLYATTN_CONFIG",
    "POLYATTN_BACKENDS", "POLYATTN_", "VLLM_ATTENTION_BACKEND", "VLLM_USE_FLASHINFER",
)  # fmt: skip
QUICK = {
    "run": ["--requests=1", "--scale=0.01", "--max-tokens=1", "--cache-gb=0.05"],
    "bench": ["2q1s64", "--seconds=0.001", "--backend=TORCH_SDPA"],
    "tune": ["--seconds=0", "--out=timings.json", "--backend=TORCH_SDPA"],
}


def command_lines(seed: int, count: int, files: Path) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yield `count` times variables and a command line; some name files that `write_files` made."""
    dice = random.Random(seed)
    values = (*VALUES, *map(str, sorted(files.iterdir())))
    for _ in range(count):
        command = dice.choice((*OPTIONS, "explain", "explain", "run", "run"))
        line = [command, *QUICK.get(command, [])]
        for _ in range(dice.randint(0, 3)):
            option = dice.choice(OPTIONS[command])
            value = dice.choice(values)
            if option == "MODEL":
                line.append(value)
            else:
                line.append(option + value if option.endswith("=") else option)
        variables = {}
        if dice.random() < 0.2:
            variables[dice.choice(VARIABLES)] = dice.choice(values)
        yield variables, line


def write_files(folder: Path) -> Path:
    """Write configs and traces that no engine should have to read."""
    good = '{"input_length": 9, "output_length": 1, "note": "a\u2028b"}\n'
    for name, data in {
        "bom.jsonl": b"\xef\xbb\xbf" + good.encode(),
        "deep.jsonl": b"[" * 100_000,
        "long.jsonl": b'{"input_length": ' + b"9" * 5000 + b', "output_length": 1}',
        "bytes.jsonl": bytes(range(256)),
        "long.csv": b"ContextTokens,GeneratedTokens\n" + b"x" * 200_000 + b",1\n",
        "nul.csv": b"ContextTokens,GeneratedTokens\n1\x00,1\n",
        "deep.json": b'{"a":' * 100_000,
        "long.json": b'{"num_hidden_layers": ' + b"9" * 5000 + b"}",
        "list.json": b"[1]",
        "empty.json": b"",
        "types.json": b'{"model_type": 3, "num_hidden_layers": "x", "hidden_size": null}',
        "bom.toml": b'\xef\xbb\xbf[backend]\nprefill = "TORCH_SDPA"\n',
        "key.toml": b'[bakend]\nprefill = "TORCH_SDPA"\n',
        "types.toml": b"backend = 3\nverify = [1]\nplugins = {}\n",
        "deep.toml": b"a = " + b"[" * 100_000,
        "layers.json": b'{"num_hidden_layers": 2, "layer_types": 2, "hidden_size": 64, '
        b'"num_attention_heads": 4}',
    }.items():
        (folder / name).write_bytes(data)
    (folder / "folder.json").mkdir()
    (folder / "loop.json").symlink_to(folder / "loop.json")
    os.mkfifo(folder / "fifo.jsonl")
    os.mkfifo(folder / "fifo.json")
    return folder
