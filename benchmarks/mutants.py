"""Seeds bugs into our own planners and kernels, one at a time: which do narrow tests notice? Resumable.

    python benchmarks/mutants.py --each 20 --seconds 1800 --out benchmarks/results/mutants.jsonl
    python benchmarks/mutants.py --score --out benchmarks/results/mutants.jsonl

Run it in a clean checkout that nothing else uses, with the development environment: a mutant is
written into its file, and the file restored. Each row of the output is one mutant: what was changed, and
whether a test failed (`killed`), the time ran out (`hung`), or nothing noticed (`survived`). One that no
compiler takes, or that leaves the library as it was, is `invalid` and isn't counted. `equivalent`, added
by hand, is the argument why a survivor changes no answer.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
TRITON = "plugins/triton/src/polyattn_triton/"
NATIVE = "plugins/cpu/src/polyattn_cpu/native/csrc/"
TESTS = "tests/plugins/triton/"
CPU = "tests/plugins/cpu/"
PLANS = ("tests/runtime/test_arithmetic.py", "tests/runtime/test_reads.py")


class Target(NamedTuple):
    """Files, what looks for bugs in them, and functions that only choose among right plans."""

    files: tuple[str, ...]
    judge: tuple[str, ...]
    environment: dict[str, str] = {}
    spared: frozenset[str] = frozenset()


def kit(backend: str, chosen: str) -> tuple[str, ...]:
    return ("--pyargs", "polyattn.conformance", "--polyattn-backend", backend, "--polyattn-device",
            "cpu", "--polyattn-budget", "1", "--polyattn-seed", "0", "-k", chosen)  # fmt: skip


MIXED = "mixed and (feature_lse or gqa_3 or feature_sliding_window or feature_non_causal)"
TARGETS = {
    "ranges": Target(("core/src/polyattn/spec/key_ranges.py",), ("tests/spec/test_key_ranges.py",)),
    "schedule": Target(
        (TRITON + "schedule.py",),
        (*PLANS, TESTS + "test_schedule.py"),
        spared=frozenset({"reading", "merging", "programs", "splits", "fullest"}),
    ),
    "planning": Target(
        (TRITON + "planning.py", TRITON + "mla.py"),
        (*PLANS, TESTS + "test_planned.py"),
        spared=frozenset({"splits", "_are_few", "_resident", "__init__", "_reserve"}),
    ),
    "prefixes": Target(
        (TRITON + "prefix_schedule.py",), (*PLANS, TESTS + "test_prefix_schedule.py")
    ),
    "native": Target(
        tuple(NATIVE + n for n in ("api.cpp", "kernels.cpp", "item.h", "softmax.h", "tile_path.h")),
        (*PLANS, CPU + "test_native_plans.py", CPU + "test_native_masks.py"),
    ),
    "triton": Target(
        tuple(TRITON + f"kernels/{n}.py" for n in ("decode", "prefill", "parts", "tiles", "softmax")),
        kit("TRITON_ATTN", MIXED),
        {"TRITON_INTERPRET": "1"},
    ),
    "pallas": Target(
        ("plugins/tpu/src/polyattn_tpu/kernel.py", "plugins/tpu/src/polyattn_tpu/planning.py"),
        kit("PALLAS_ATTN", MIXED),
        {"PALLAS_INTERPRET": "1"},
    ),
}  # fmt: skip


class Mutant(NamedTuple):
    """A change of `[start, stop)` of a file's text."""

    target: str
    path: str
    start: int
    stop: int
    operator: str
    after: str

    def row(self, text: str) -> dict[str, Any]:
        line = text.count("\n", 0, self.start) + 1
        about = text.splitlines()[line - 1].strip()
        nth = text[: self.start].count(about)
        key = repr(
            (self.path, about, nth, self.start - text.rfind("\n", 0, self.start), self.after)
        )
        return {
            "id": hashlib.sha256(key.encode()).hexdigest()[:12], "target": self.target,
            "path": self.path, "line": line, "operator": self.operator, "of": about,
            "before": text[self.start : self.stop], "after": self.after,
        }  # fmt: skip


LIBRARIES: list[str] = []
"""Hashes of the native libraries that were built, the one without a bug first."""
FLIPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
SWAPS = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min"}
Change = tuple[int, int, str, str]


def of_python(text: str, spared: frozenset[str]) -> Iterator[Change]:
    """Yield (start, stop, operator, replacement) for each place of a module that may be wrong."""
    lines = [0]
    for line in text.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    characters = [len(text.encode()[:at].decode()) for at in lines]

    def span(node: Any) -> tuple[int, int]:
        whole = text.splitlines(keepends=True)
        begin = len(whole[node.lineno - 1].encode()[: node.col_offset].decode())
        end = len(whole[node.end_lineno - 1].encode()[: node.end_col_offset].decode())
        return characters[node.lineno - 1] + begin, characters[node.end_lineno - 1] + end

    def between(left: Any, right: Any, pattern: str) -> tuple[int, int] | None:
        begin, end = span(left)[1], span(right)[0]
        at = re.search(pattern, text[begin:end])
        return at and (begin + at.start(), begin + at.end())

    def visit(node: ast.AST) -> Iterator[Change]:
        if isinstance(node, ast.FunctionDef) and node.name in spared:
            return
        if isinstance(node, ast.FunctionDef):
            for child in node.body:
                yield from visit(child)
            return
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            at = between(node.left, node.comparators[0], "<=|>=|==|!=|<|>")
            if at:
                yield *at, "comparison", FLIPS[text[slice(*at)]]
        if isinstance(node, ast.BinOp):
            if isinstance(node.op, (ast.Add, ast.Sub)):
                at = between(node.left, node.right, r"[+-]")
                if at:
                    yield *at, "sign", "-" if text[at[0]] == "+" else "+"
                if isinstance(node.right, ast.Constant) and node.right.value == 1:
                    yield span(node.left)[1], span(node.right)[1], "off by one", ""
            if isinstance(node.op, ast.Mult) and "stride" in text[slice(*span(node.right))]:
                yield span(node.left)[1], span(node.right)[1], "stride", ""
        if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.BinOp):
            inner = node.operand
            if isinstance(inner.op, ast.FloorDiv) and isinstance(inner.left, ast.UnaryOp):
                tail = (
                    f"{text[slice(*span(inner.left.operand))]} // {text[slice(*span(inner.right))]}"
                )
                yield *span(node), "dropped tail", f"({tail})"
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in SWAPS and len(node.args) > 1:
                end = span(node.func)[1]
                yield end - len(name), end, "bound", SWAPS[name]
                yield *span(node), "dropped bound", text[slice(*span(node.args[0]))]
        if isinstance(node, ast.BoolOp):
            at = between(node.values[0], node.values[1], r"\b(and|or)\b")
            if at:
                yield *at, "condition", "or" if text[slice(*at)] == "and" else "and"
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            held = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(held, (ast.Attribute, ast.Subscript)) or isinstance(node, ast.AugAssign):
                yield *span(node), "stale", "pass"
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield from visit(node)


C_RULES = (
    (r" (<=|>=|<|>|==|!=) ", "comparison", lambda m: f" {FLIPS[m[1]]} "),
    (r" [+-] 1\b(?![.\d])", "off by one", lambda m: ""),
    (r" (\+|-) (?=\w)", "sign", lambda m: " - " if m[1] == "+" else " + "),
    (r"\b(pa_|std::)(min|max)\b", "bound", lambda m: m[1] + SWAPS[m[2]]),
    (r" (&&|\|\|) ", "condition", lambda m: " || " if m[1] == "&&" else " && "),
    (r" \* \w*[sS]tride\w*", "stride", lambda m: ""),
    (r"(?m)^ +[\w.\->\[\]]+ [+|]?= [^;{}]*;$", "stale", lambda m: ""),
)


def of_c(text: str) -> Iterator[Change]:
    """Yield the same of a C++ source, by its lines: there is no parser of it in the library."""
    code = re.sub(r"//.*|^ *#.*|\"[^\"\n]*\"|^.*(template|static_assert).*", lambda m: " " * len(m[0]),
                  text, flags=re.MULTILINE)  # fmt: skip
    for pattern, operator, change in C_RULES:
        for match in re.finditer(pattern, code):
            yield match.start(), match.end(), operator, change(match)


def mutants(name: str) -> list[tuple[Mutant, str]]:
    """Return all mutants of a target with their files' texts, in one shuffled order."""
    target, found = TARGETS[name], []
    for path in target.files:
        text = (ROOT / path).read_text()
        changes = of_python(text, target.spared) if path.endswith(".py") else of_c(text)
        found += [(Mutant(name, path, *change), text) for change in changes]
    random.Random(name).shuffle(found)
    return found


def judged(target: Target, seconds: float) -> tuple[str, str]:
    """Return what a target's tests say of the files as they are, and the first test that failed."""
    log = Path(os.environ.get("TMPDIR", "/tmp")) / f"mutant-{os.getpid()}.log"

    def run() -> None:
        with log.open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.setpgid(0, 0)
        os.environ |= target.environment
        import pytest

        os._exit(int(pytest.main(["-x", "-q", "--tb=no", *target.judge])))

    if target.files[0].startswith(NATIVE) and (why := built()):
        return "invalid", why
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(seconds)
    if process.is_alive():
        os.killpg(process.pid or 0, 9)
        process.join()
        return "hung", ""
    if process.exitcode == 0:
        return "survived", ""
    failed = re.search(r"(?:FAILED|ERROR) (\S+)", log.read_text())
    return "killed", failed[1] if failed else f"exit {process.exitcode}"


def built() -> str:
    """Build the native kernels for one instruction set, quickly; return why there is nothing to judge."""
    from polyattn_cpu.native import build

    name = next(name for name in reversed(build.ISAS[build.machine()]) if name != "generic")
    code = (f"from polyattn_cpu.native import build; flags = build.ISAS[build.machine()]['{name}']; "
            f"build.ISAS = {{build.machine(): {{'{name}': flags}}}}; build.build()")  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "CXXFLAGS": "-O1"}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return done.stderr.strip()[-200:]
    LIBRARIES.append(hashlib.sha256(build.LIBRARY.read_bytes()).hexdigest())
    same = len(LIBRARIES) > 1 and LIBRARIES[-1] == LIBRARIES[0]
    return f"the library for {name} is the same" if same else ""


def score(rows: list[dict[str, Any]]) -> None:
    """Print how many of each target's mutants were noticed, then which live without a reason."""
    print(
        "| target | mutants | killed | equivalent, by argument | survived |\n| - | - | - | - | - |"
    )
    rows = [row for row in rows if row["outcome"] != "invalid"]
    for name in [*dict.fromkeys(row["target"] for row in rows), "all"]:
        mine = [row for row in rows if name in ("all", row["target"])]
        kinds = Counter("equivalent" if r.get("equivalent") else r["outcome"] for r in mine)
        print(f"| {name} | {len(mine)} | {kinds['killed'] + kinds['hung']} | {kinds['equivalent']} | "
              f"{kinds['survived']} |")  # fmt: skip
    for row in rows:
        if row["outcome"] == "survived" and not row.get("equivalent"):
            print(
                row["id"],
                f"{row['path']}:{row['line']}",
                row["operator"],
                row["of"],
                "->",
                row["after"],
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=30, help="mutants of each target")
    parser.add_argument("--only", help="targets, by commas")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--again", action="store_true", help="judge survivors again")
    parser.add_argument(
        "--score", action="store_true", help="print what is in the output, and run nothing"
    )
    args = parser.parse_args()
    rows = (
        [json.loads(line) for line in args.out.read_text().splitlines()]
        if args.out.exists()
        else []
    )
    found = {row["id"]: row for row in rows}  # the last of each
    if args.score:
        score([*found.values()])
        return
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    import torch  # once, for all that run

    torch.set_num_threads(1)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], text=True, capture_output=True
    ).stdout.strip()
    end = time.monotonic() + args.seconds
    for name in args.only.split(",") if args.only else TARGETS:
        begun = time.monotonic()
        outcome, failed = judged(TARGETS[name], 1200)
        assert outcome == "survived", f"{name}: without a bug, {failed} fails"
        limit = 4 * (time.monotonic() - begun) + 20
        for mutant, text in mutants(name)[: args.each]:
            row, path = mutant.row(text), ROOT / mutant.path
            old = found.get(row["id"])
            if time.monotonic() > end or (
                old and not (args.again and old["outcome"] == "survived")
            ):
                continue
            begun = time.monotonic()
            try:
                path.write_text(text[: mutant.start] + mutant.after + text[mutant.stop :])
                row["outcome"], row["by"] = judged(TARGETS[name], limit)
            finally:
                path.write_text(text)
            row |= {
                "seconds": round(time.monotonic() - begun, 1),
                "date": str(date.today()),
                "commit": commit,
            }
            found[row["id"]] = row
            with args.out.open("a") as out:
                out.write(json.dumps(row) + "\n")
            print(
                row["outcome"],
                f"{row['path']}:{row['line']}",
                row["operator"],
                row["by"],
                flush=True,
            )


if __name__ == "__main__":
    main()
