"""Seeds bugs into our own planners and kernels, one at a time: which do narrow tests notice? Resumable.

    python benchmarks/mutants.py --each 20 --seconds 1800 --out benchmarks/results/cpu/mutants.jsonl
    python benchmarks/mutants.py --score --out benchmarks/results/cpu/mutants.jsonl

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
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
TRITON = "plugins/triton/src/polyattn_triton/"
NATIVE = "plugins/cpu/src/polyattn_cpu/native/csrc/"
TESTS = "tests/plugins/triton/"
CPU = "tests/plugins/cpu/"
SHAPES = ".py::test_every_shape_and_storage_agrees_with_float64"
PLANS = ("tests/runtime/test_arithmetic.py", "tests/runtime/test_reads.py")


class Judge(NamedTuple):
    """One run of pytest that looks for bugs."""

    arguments: tuple[str, ...]
    environment: dict[str, str] = {}


class Target(NamedTuple):
    """Files, what looks for bugs in them, narrow first, and functions that choose among right plans."""

    files: tuple[str, ...]
    judges: tuple[Judge, ...]
    spared: frozenset[str] = frozenset()


def kit(backend: str, chosen: str, **environment: str) -> Judge:
    arguments = ("--pyargs", "polyattn.conformance", "--polyattn-backend", backend,
                 "--polyattn-device", "cpu", "--polyattn-budget", "1", "--polyattn-seed", "0",
                 "-k", chosen)  # fmt: skip
    return Judge(arguments, environment)


def tests(*names: str) -> Judge:
    return Judge(names)


MIXED = "mixed and (feature_lse or gqa_3 or feature_sliding_window or feature_non_causal)"
LISTED = "beside_a_mask or forest or sparse or reuse or plans or stale"
TRITON_KIT = kit("TRITON_ATTN", f"({MIXED}) or ({LISTED})", TRITON_INTERPRET="1")
LATENT_KIT = kit("TRITON_MLA", "not search and not refusal", TRITON_INTERPRET="1")
SPARSE_KIT = kit("TRITON_MLA_SPARSE", "not search and not refusal", TRITON_INTERPRET="1")
NATIVE_KIT = kit("NATIVE_ATTN", f"({MIXED}) or ({LISTED}) or decode")
STORE_KIT = kit("NATIVE_STORE", "not search")
TARGETS = {
    "ranges": Target(
        ("core/src/polyattn/spec/key_ranges.py",), (tests("tests/spec/test_key_ranges.py"),)
    ),
    "schedule": Target(
        (TRITON + "schedule.py",),
        (tests(*PLANS, TESTS + "test_schedule.py"),),
        frozenset({"reading", "merging", "programs", "splits", "fullest"}),
    ),
    "planning": Target(
        (TRITON + "planning.py", TRITON + "mla.py"),
        (tests(*PLANS, TESTS + "test_planned.py"), TRITON_KIT, LATENT_KIT, SPARSE_KIT),
        frozenset({"splits", "_are_few", "_resident", "__init__", "_reserve"}),
    ),
    "prefixes": Target(
        (TRITON + "prefix_schedule.py",), (tests(*PLANS, TESTS + "test_prefix_schedule.py"),)
    ),
    "native": Target(
        tuple(NATIVE + n for n in ("api.cpp", "kernels.cpp", "item.h", "softmax.h", "tile_path.h")),
        (
            tests(*PLANS, *(CPU + f"test_native{name}" for name in ("_plans.py", "_masks.py", SHAPES))),
            NATIVE_KIT, STORE_KIT,
        ),
    ),
    "triton": Target(
        tuple(TRITON + f"kernels/{n}.py" for n in ("decode", "prefill", "parts", "tiles", "softmax")),
        (TRITON_KIT,),
    ),
    "pallas": Target(
        ("plugins/tpu/src/polyattn_tpu/kernel.py", "plugins/tpu/src/polyattn_tpu/planning.py"),
        (kit("PALLAS_ATTN", MIXED, PALLAS_INTERPRET="1"),),
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


class Source:
    """A module's text, and where the nodes of its tree lie in it."""

    def __init__(self, text: str, spared: frozenset[str]):
        self.text, self.spared = text, spared
        self.lines = text.splitlines(keepends=True)
        self.starts = [0, *accumulate(map(len, self.lines))]

    def span(self, node: Any) -> tuple[int, int]:
        """Return where a node begins and ends; the tree's columns count bytes."""
        places = ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        first, last = (
            self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())
            for line, column in places
        )
        return first, last

    def said(self, node: Any) -> str:
        return self.text[slice(*self.span(node))]

    def between(self, left: Any, right: Any, pattern: str) -> tuple[int, int]:
        """Return where the operator between two nodes lies."""
        begin, end = self.span(left)[1], self.span(right)[0]
        at = re.search(pattern, self.text[begin:end])
        assert at is not None
        return begin + at.start(), begin + at.end()

    def changes(self, node: ast.AST) -> Iterator[Change]:
        """Yield the changes of a node and of all below it."""
        if isinstance(node, ast.FunctionDef):
            for child in node.body if node.name not in self.spared else ():
                yield from self.changes(child)
            return
        if isinstance(node, (ast.Compare, ast.BinOp, ast.UnaryOp)):
            yield from self.of_arithmetic(node)
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in SWAPS and len(node.args) > 1:
                end = self.span(node.func)[1]
                yield end - len(name), end, "bound", SWAPS[name]
                yield *self.span(node), "dropped bound", self.said(node.args[0])
        elif isinstance(node, ast.BoolOp):
            at = self.between(node.values[0], node.values[1], r"\b(and|or)\b")
            yield *at, "condition", "or" if isinstance(node.op, ast.And) else "and"
        elif isinstance(node, (ast.Assign, ast.AugAssign)):
            held = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(held, (ast.Attribute, ast.Subscript)) or isinstance(node, ast.AugAssign):
                yield *self.span(node), "stale", "pass"
        for child in ast.iter_child_nodes(node):
            yield from self.changes(child)

    def of_arithmetic(self, node: ast.Compare | ast.BinOp | ast.UnaryOp) -> Iterator[Change]:
        if isinstance(node, ast.Compare):
            if len(node.ops) == 1 and not isinstance(
                node.ops[0], (ast.Is, ast.IsNot, ast.In, ast.NotIn)
            ):
                at = self.between(node.left, node.comparators[0], "<=|>=|==|!=|<|>")
                yield *at, "comparison", FLIPS[self.text[slice(*at)]]
        elif isinstance(node, ast.UnaryOp):
            inner = node.operand
            floors = isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.FloorDiv)
            if floors and isinstance(inner.left, ast.UnaryOp):
                floor = f"({self.said(inner.left.operand)} // {self.said(inner.right)})"
                yield *self.span(node), "dropped tail", floor
        elif isinstance(node.op, (ast.Add, ast.Sub)):
            at = self.between(node.left, node.right, r"[+-]")
            yield *at, "sign", "-" if isinstance(node.op, ast.Add) else "+"
            if isinstance(node.right, ast.Constant) and node.right.value == 1:
                yield self.span(node.left)[1], self.span(node.right)[1], "off by one", ""
        elif isinstance(node.op, ast.Mult) and "stride" in self.said(node.right):
            yield self.span(node.left)[1], self.span(node.right)[1], "stride", ""


def of_python(text: str, spared: frozenset[str]) -> Iterator[Change]:
    """Yield (start, stop, operator, replacement) for each place of a module that may be wrong."""
    source = Source(text, spared)
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield from source.changes(node)


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
    """Return what a target's judges say of the files as they are, and the first test that failed."""
    if target.files[0].startswith(NATIVE) and (why := built()):
        return "invalid", why
    end = time.monotonic() + seconds
    for judge in target.judges:
        outcome, by = verdict(judge, end - time.monotonic())
        if outcome != "survived":
            return outcome, by
    return "survived", ""


def verdict(judge: Judge, seconds: float) -> tuple[str, str]:
    """Return the same of one judge, in a process of its own."""
    log = Path(os.environ.get("TMPDIR", "/tmp")) / f"mutant-{os.getpid()}.log"

    def run() -> None:
        with log.open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.setpgid(0, 0)
        os.environ |= judge.environment
        import pytest

        os._exit(int(pytest.main(["-x", "-q", "--tb=no", *judge.arguments])))

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


def judge_all(name: str, args: argparse.Namespace, found: dict[str, Any], end: float) -> None:
    """Judge a target's mutants that aren't among the rows yet, after the files as they are."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(words, text=True, capture_output=True, check=False).stdout.strip()
    begun = time.monotonic()
    outcome, failed = judged(TARGETS[name], 1200)
    assert outcome == "survived", f"{name}: without a bug, {failed} fails"
    limit = 4 * (time.monotonic() - begun) + 20
    for mutant, text in mutants(name)[: args.each]:
        row, path = mutant.row(text), ROOT / mutant.path
        old = found.get(row["id"])
        if time.monotonic() > end or (old and not (args.again and old["outcome"] == "survived")):
            continue
        begun = time.monotonic()
        try:
            path.write_text(text[: mutant.start] + mutant.after + text[mutant.stop :])
            row["outcome"], row["by"] = judged(TARGETS[name], limit)
        finally:
            path.write_text(text)
        row["seconds"] = round(time.monotonic() - begun, 1)
        found[row["id"]] = row | {"date": str(date.today()), "commit": commit}
        with args.out.open("a") as out:
            out.write(json.dumps(found[row["id"]]) + "\n")
        print(
            row["outcome"], f"{row['path']}:{row['line']}", row["operator"], row["by"], flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=30, help="mutants of each target")
    parser.add_argument("--only", help="targets, by commas")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--again", action="store_true", help="judge survivors again")
    parser.add_argument("--score", action="store_true", help="print what is in the output")
    args = parser.parse_args()
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    found = {row["id"]: row for row in map(json.loads, lines)}  # the last of each
    if args.score:
        score([*found.values()])
        return
    args.out = args.out.resolve()
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    import torch  # once, for all that run

    torch.set_num_threads(1)
    end = time.monotonic() + args.seconds
    for name in args.only.split(",") if args.only else TARGETS:
        judge_all(name, args, found, end)


if __name__ == "__main__":
    main()
