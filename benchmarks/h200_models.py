"""Whole models in bfloat16: are polyattn's logits as close to float64 as transformers' own?

python benchmarks/h200_models.py --spread --out DIR  on all GPUs, at sizes that their kernels serve
python benchmarks/h200_models.py --device cpu        tiny models (--large: the GPU's sizes)

Each shape is a model with random weights, saved by transformers in bfloat16. The engine serves three
requests; transformers computes the same tokens in bfloat16 and, from the same file, in float64 (its
norms and softmaxes stay in float32). An error is that of one token's logits, relative to their length.
`--spread` gives each shape a process of its own, so that their kernels compile side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers asks there for kernels
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import transformers
from polyattn.tools.replay import engine as engine_module
from polyattn.tools.replay.trace import Request
from rows import Rows
from torch import Tensor

# transformers runs its plain torch code, in float64 as in bfloat16: mamba-ssm's kernels know no float64.
sys.modules |= {"mamba_ssm": None, "causal_conv1d": None}  # type: ignore[dict-item]
ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "tools"), str(ROOT / "integrations" / "models" / "tests")]

from whole_models import MODELS, Recorded, engine, saved  # noqa: E402

PLAIN = {
    "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
    "intermediate_size": 2048, "vocab_size": 8192, "sliding_window": 256,
    "max_position_embeddings": 4096,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "llama": PLAIN, "qwen3": PLAIN, "gemma2": PLAIN, "gemma3": PLAIN,
    "gpt-oss": PLAIN | {"head_dim": 64, "num_attention_heads": 16, "intermediate_size": 1024},
    "deepseek-v3": PLAIN | {
        "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512,
        "q_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "moe_intermediate_size": 512},
    "mamba2": {"hidden_size": 1024, "num_heads": 32, "head_dim": 64, "state_size": 128,
               "n_groups": 1, "chunk_size": 256, "vocab_size": 8192},
    "jamba": PLAIN | {"mamba_d_state": 16, "mamba_dt_rank": 64},
}  # fmt: skip
"""Each shape at sizes that the GPU's kernels serve; what is left out is as in the tests."""
REQUESTS = {True: ((512, 32), (100, 32), (17, 32)), False: ((60, 16), (21, 16), (3, 16))}
"""Prompts and outputs, in tokens: of large models, and of tiny ones."""


def errors(found: Tensor, exact: Tensor) -> Tensor:
    """Return each token's error: float64 (tokens,)."""
    return (found.double() - exact).norm(dim=-1) / exact.norm(dim=-1)


def reference(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """Return transformers' model of a checkpoint."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).to(device)
    for module in model.modules():
        scale = getattr(module, "embed_scale", None)
        if isinstance(scale, Tensor):  # Gemma multiplies by it in the dtype that it was trained in
            module.embed_scale = scale.bfloat16().to(scale.dtype)
    return model.eval()


@torch.no_grad()
def compare(name: str, device: str, large: bool) -> dict[str, Any]:
    """Return the errors of one shape."""
    sizes = SIZES[name] if large else {}
    requests = [Request(*lengths) for lengths in REQUESTS[large]]
    began, spent = time.monotonic(), dict[str, float]()

    def lap(what: str) -> None:
        spent[what] = time.monotonic() - began - sum(spent.values())

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        saved(name, path, torch.bfloat16, **sizes)
        lap("saved")
        options = {"blocks": 1024, "device": device, "token_budget": 256, "check_tokens": 0}
        served = engine(path, requests, block_size=None, **options)
        lap("selected")
        served.run()
        lap("served")
        exact, theirs = (
            reference(path, torch.float64, device),
            reference(path, torch.bfloat16, device),
        )
        found = served.model
        assert isinstance(found, Recorded)
        ours_, theirs_, same = [], [], [0, 0, 0]
        for sequence, logits in found.seen.items():
            ids = torch.tensor([found.tokens[sequence][:-1]], device=device)
            wanted = exact(ids, use_cache=False).logits[0]
            own = torch.stack([logits[position][-1] for position in range(ids.shape[1])])
            other = theirs(ids, use_cache=False).logits[0]
            ours_.append(errors(own, wanted))
            theirs_.append(errors(other, wanted))
            best = wanted.argmax(-1)
            same[0] += len(best)
            same[1] += int((own.argmax(-1) == best).sum())
            same[2] += int((other.argmax(-1) == best).sum())
        lap("compared")
    ours, others = torch.cat(ours_), torch.cat(theirs_)
    kernels = sorted({r.group.selection.decision.summary() for r in found.memories})
    return {
        "model": name, "tokens": same[0], "kernels": kernels,
        "polyattn": summary(ours, same[1] / same[0]),
        "transformers": summary(others, same[2] / same[0]),
        "ratio_median": float(ours.median() / others.median()),
        "seconds": {what: round(seconds, 1) for what, seconds in spent.items()},
    }  # fmt: skip


def summary(error: Tensor, same: float) -> dict[str, float]:
    """Return an error's median and 99th percentile, and how often the likeliest token is exact's."""
    return {
        "median": float(error.median()), "p99": float(error.quantile(0.99)), "same_token": same
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """Return a row as people read it."""
    ours, others = row["polyattn"], row["transformers"]
    return (
        f"{row['model']:12} {row['tokens']:5} tokens: median {ours['median']:.3g} (transformers "
        f"{others['median']:.3g}), p99 {ours['p99']:.3g} ({others['p99']:.3g}), same token "
        f"{ours['same_token']:.3f} ({others['same_token']:.3f}); ratio {row['ratio_median']:.3f}; "
        f"seconds {row['seconds']}"
    )


def spread(names: list[str], device: str, seconds: float) -> list[dict[str, Any]]:
    """Compare each model in a process of its own, dealt over the GPUs; one that takes longer is ended."""
    end, rows = time.monotonic() + seconds, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for index, name in enumerate(names):
            gpu = {"CUDA_VISIBLE_DEVICES": str(index % max(1, torch.cuda.device_count()))}
            options = ["--models", name, "--device", device, "--out", f"{folder}/{name}"]
            with Path(f"{folder}/{name}.log").open("w") as log:
                started.append(subprocess.Popen(
                    [sys.executable, __file__, *options], stdout=log, stderr=subprocess.STDOUT,
                    env=os.environ | {"OMP_NUM_THREADS": "4"} | gpu))  # fmt: skip
        for name, process in zip(names, started, strict=True):
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            report = Path(f"{folder}/{name}/models.json")
            if report.is_file():
                rows += json.loads(report.read_text())["rows"]
            else:
                tail = Path(f"{folder}/{name}.log").read_text().splitlines()[-8:]
                print("\n".join([f"{name}:", *tail]), flush=True)
                rows.append(
                    {"what": name, "failed": f"no report; exit status {process.returncode}"}
                )
    return rows


def main() -> int:
    """Compare, print, write. Returns 1 where a median is above transformers' by more than --limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(MODELS))
    parser.add_argument("--limit", type=float, default=1.1, help="largest ratio of medians")
    parser.add_argument("--large", action="store_true", help="the GPU's sizes, on a CPU too")
    parser.add_argument("--seconds", type=float, default=300.0, help="no new model after these")
    parser.add_argument("--spread", action="store_true", help="each model in a process of its own")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    on_gpu = torch.device(given.device).type == "cuda"
    engine_module.ModelRunner = Recorded  # type: ignore[misc]
    transformers.utils.logging.disable_progress_bar()
    rows = Rows(given.seconds)
    if given.spread:
        rows.rows = spread(given.models, given.device, given.seconds)
    else:
        for name in given.models:
            rows.add(name, lambda n=name: compare(n, given.device, given.large or on_gpu))
    for row in rows.rows:
        if "ratio_median" in row:
            print(line(row))
    over = [r["what"] for r in rows.rows if r.get("ratio_median", 0) > given.limit]
    print(
        f"above {given.limit} x transformers' median error: {over or 'none'}; failed: "
        f"{rows.wrong() or 'none'}"
    )
    if given.out:
        machine = torch.cuda.get_device_name() if on_gpu else platform.processor()
        about = {"machine": machine, "date": str(date.today()), "torch": torch.__version__,
                 "transformers": transformers.__version__}  # fmt: skip
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "models.json").write_text(json.dumps({**about, "rows": rows.rows}, indent=1))
    return int(bool(over or rows.wrong()))


if __name__ == "__main__":
    sys.exit(main())
