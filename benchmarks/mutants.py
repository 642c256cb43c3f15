"""Seeds bugs into our own planners and kernels, one at a time: which do tests and kits notice? Resumable.
    python benchmarks/mutants.py --each 20 --jobs 16 --out benchmarks/results/cpu/mutants.jsonl
    python benchmarks/mutants.py --score --out benchmarks/results/cpu/mutants.jsonl

Each worker has a copy of the tree. A row of the output is a mutant: what was changed, and whether a test
failed (`killed`), the time ran out (`hung`), or nothing did (`survived`); `invalid`: no compiler takes
it. By hand: `equivalent`, why a survivor changes no answer; `judged`, who wrote the row.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import multiprocessing
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tokenize
from collections import Counter
from collections.abc import Iterator
from datetime import date
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from mutant_targets import NATIVE, TARGETS, Judge
from rows import current_commit

ROOT = Path(__file__).parents[1]
SOURCES = ("core/src", "plugins/*/src", "integrations/*/src", "examples/*/src")


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


LIBRARY = Path("plugins/cpu/src/polyattn_cpu/native/kernels.lib")
FLIPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
SWAPS = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min"}


C_RULES = (
    (r" (<=|>=|<|>|==|!=) ", "comparison", lambda m: f" {FLIPS[m[1]]} "),
    (r" [+-] 1\b(?![.\d])", "off by one", lambda m: ""),
    (r" (\+|-) (?=\w)", "sign", lambda m: " - " if m[1] == "+" else " + "),
    (r"\b(pa_|std::)(min|max)\b", "bound", lambda m: m[1] + SWAPS[m[2]]),
    (r" (&&|\|\|) ", "condition", lambda m: " || " if m[1] == "&&" else " && "),
    (r" \* \w*[sS]tride\w*", "stride", lambda m: ""),
    (r"__ATOMIC_ACQ_REL", "barrier", lambda m: "__ATOMIC_RELAXED"),
    (r"(?m)^ +(std::lock_guard.* lock\(.*\)|of->\w+\.wait\(.*\));$", "barrier", lambda m: ""),
    (r"(?m)^ +[\w.\->\[\]]+ [+|]?= [^;{}]*;$", "stale", lambda m: ""),
)
C_WORDS = re.compile(r"//.*|^ *#.*|\"[^\"\n]*\"|^.*(template|static_assert).*", re.MULTILINE)
ARGUMENT = r"(?:[^(),]|\((?:[^()]|\([^()]*\))*\))+"
BOUNDS, NEXT = "|".join(SWAPS), rf"(?:,(?! \w+=){ARGUMENT})+"
PYTHON_RULES = (
    (r"(?<= )(<=|>=|<|>|==|!=)(?=\s)", "comparison", lambda m: FLIPS[m[1]]),
    (r" [+-] 1\b(?![.\d])", "off by one", lambda m: ""),
    (r"(?<=\s)([+-])(?= )", "sign", lambda m: "-" if m[1] == "+" else "+"),
    (rf"\b({BOUNDS})(?=\({ARGUMENT}{NEXT}\))", "bound", lambda m: SWAPS[m[1]]),
    (rf"(?<![\w.])(?=([\w.]*\b(?:{BOUNDS})\(({ARGUMENT}){NEXT}\)))", "dropped bound",
     lambda m: m[2].strip()),
    (rf"-\(-({ARGUMENT}) // ({ARGUMENT})\)", "dropped tail", lambda m: f"({m[1]} // {m[2]})"),
    (r"\b(and|or)\b", "condition", lambda m: "or" if m[1] == "and" else "and"),
    (r" \* [\w.]*stride[\w.]*(\([^()]*\))?", "stride", lambda m: ""),
    # Of an attribute, an item, or by an operator; what goes on in the next line is left alone.
    (r"(?m)(?<=    )(\w+(\.\w+|\[[^=\n]*\])+ |\w+ (?!=))[^\w\s=<>!]{0,2}= .*[^(\[{,\n]$", "stale",
     lambda m: "pass"),
)  # fmt: skip


def blanked(text: str, spared: frozenset[str]) -> str:
    """Return a module's text with blanks in place of words, comments, and functions that are spared."""
    lines = text.splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]
    tokens = tokenize.generate_tokens(iter(lines).__next__)
    words = [t for t in tokens if t.type in (tokenize.STRING, tokenize.COMMENT)]
    gone = [(word.start, word.end) for word in words if " " in word.string]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name in spared:
            gone.append(((node.lineno, 0), (node.end_lineno or 0, 0)))
    for (line, column), (last, stop) in gone:
        begin, end = starts[line - 1] + column, starts[last - 1] + stop
        text = text[:begin] + re.sub(r"[^\n]", " ", text[begin:end]) + text[end:]
    return text


def changes(path: str, text: str, spared: frozenset[str]) -> Iterator[tuple[int, int, str, str]]:
    """Yield (start, stop, operator, replacement) for each place of a source that may be wrong."""
    python = path.endswith(".py")
    code = blanked(text, spared) if python else C_WORDS.sub(lambda m: " " * len(m[0]), text)
    for pattern, operator, change in PYTHON_RULES if python else C_RULES:
        for match in re.finditer(pattern, code):
            place = match.span() if match[0] else match.span(1)  # ahead: it may lie in another
            yield *place, operator, change(match)


def mutants(name: str) -> list[tuple[Mutant, str]]:
    """Return all mutants of a target with their files' texts, in one shuffled order."""
    target, found = TARGETS[name], []
    for path in target.files:
        text = (ROOT / path).read_text()
        found += [(Mutant(name, path, *c), text) for c in changes(path, text, target.spared)]
    random.Random(name).shuffle(found)
    return found


class Machine(NamedTuple):
    """What the workers share.

    `end`: of the run. `library`: by instruction set, the native library's hash without a bug. `sound`: by
    target, the seconds that its judges take without a bug, or what fails there.
    """

    end: float
    library: dict[str, str]
    sound: Any


def judged(name: str, machine: Machine, mutated: bool) -> tuple[str, str]:
    """Return what a target's judges say of the files as they are, and the first test that failed."""
    target, limit = TARGETS[name], time.monotonic()
    if target.files[0].startswith(NATIVE):
        if why := built(target.isa):
            return "invalid", why
        if mutated and digest() == machine.library[target.isa]:
            return "invalid", "the library is the same"
    for judge in target.judges:
        outcome, by = verdict(judge, name, limit, machine)
        if outcome != "survived":
            return outcome, by
    return "survived", ""


def verdict(judge: Judge, name: str, begun: float, machine: Machine) -> tuple[str, str]:
    """Return the same of one judge, in a process of its own."""
    log = Path(f"judge-{os.getpid()}.log").resolve()

    def run() -> None:
        with log.open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.setpgid(0, 0)
        os.environ |= judge.environment
        import pytest

        options = ("-x", "-q", "--tb=no", "-W", "ignore", "-p", "no:benchmark")
        os._exit(int(pytest.main([*options, *judge.arguments])))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    while process.is_alive():
        process.join(0.2)
        now, sound = time.monotonic(), machine.sound.get(name)
        slow = isinstance(sound, float) and now > begun + 4 * sound + 60
        if process.is_alive() and (slow or now > machine.end):
            os.killpg(process.pid or 0, 9)
            process.join()
            return ("hung" if slow else "late"), ""
    if process.exitcode == 0:
        return "survived", ""
    failed = re.search(r"(?:FAILED|ERROR) (\S+)", log.read_text())
    return "killed", failed[1] if failed else f"exit {process.exitcode}"


def built(isa: str) -> str:
    """Build the native kernels for one instruction set, quickly; return what the compiler objects to."""
    code = (
        "import sys; from polyattn_cpu.native import build; here = build.machine(); "
        "every = build.ISAS[here]; names = [*every]; "
        "name = sys.argv[1] or names[-2 if names[-1] == 'generic' else -1]; "
        "some = {name, build.BASES.get(name)} if sys.argv[1] else {name}; "
        "build.ISAS = {here: {n: every[n] for n in names if n in some}}; build.build(); "
        "from polyattn_cpu.native import library; assert name in library.isas(), 'not of this processor'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, isa], env={**os.environ, "CXXFLAGS": "-O1"}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    return done.stderr.strip()[-200:] if done.returncode else ""


def digest() -> str:
    return hashlib.sha256(LIBRARY.read_bytes()).hexdigest()


def enter(place: Path) -> None:
    """Work in a copy of the tree: its sources come first, here and in what is started from here."""
    os.chdir(place)
    sources = [str(path) for pattern in SOURCES for path in sorted(place.glob(pattern))]
    inherited = os.environ.get("PYTHONPATH", "").replace(str(ROOT), str(place))
    os.environ["PYTHONPATH"] = os.pathsep.join([*sources, inherited])
    sys.path[:0] = [str(place), *sources]


def work(place: Path, tasks: Any, results: Any, machine: Machine) -> None:
    """Judge what is in `tasks`: a target's name, or a mutant with its file's text."""
    enter(place)
    while time.monotonic() < machine.end:
        try:
            task = tasks.get(timeout=1)
        except queue.Empty:
            break
        begun = time.monotonic()
        if isinstance(task, str):
            outcome, by = judged(task, machine, mutated=False)
            seconds = time.monotonic() - begun
            machine.sound[task] = seconds if outcome == "survived" else by
            results.put((task, outcome, f"{by} {seconds:.0f} s"))
            continue
        mutant, text = task
        path = Path(mutant.path)
        path.write_text(text[: mutant.start] + mutant.after + text[mutant.stop :])
        outcome, by = judged(mutant.target, machine, mutated=True)
        path.write_text(text)
        seconds = round(time.monotonic() - begun, 1)
        row = mutant.row(text) | {"outcome": outcome, "by": by, "seconds": seconds}
        results.put((mutant.target, outcome, row))
    results.put(None)


def score(rows: list[dict[str, Any]]) -> None:
    """Print how many of each target's mutants were noticed, then which live without a reason."""
    print("| target | mutants | killed | equivalent, by argument | survived |")
    print("| - | - | - | - | - |")
    rows = [row for row in rows if row["outcome"] != "invalid"]
    for name in [*dict.fromkeys(row["target"] for row in rows), "all"]:
        mine = [row for row in rows if name in ("all", row["target"])]
        kinds = Counter("equivalent" if r.get("equivalent") else r["outcome"] for r in mine)
        print(
            f"| {name} | {len(mine)} | {kinds['killed'] + kinds['hung']} | {kinds['equivalent']} | "
            f"{kinds['survived']} |"
        )
    for row in filter(lives, rows):
        where = f"{row['id']} {row['path']}:{row['line']}"
        print(where, row["operator"], row["of"], "->", row["after"])


def lives(row: dict[str, Any] | None) -> bool:
    """Whether a mutant survived, and nobody has said why it changes no answer."""
    return row is not None and row["outcome"] == "survived" and not row.get("equivalent")


def chosen(names: list[str], rows: dict[str, Any], each: int, again: bool) -> list[Any]:
    """Return targets, what survived or was judged apart if `again`, then `each` new mutants of each."""
    old, new = [], []
    for name in names:
        found = [(mutant.row(text)["id"], (mutant, text)) for mutant, text in mutants(name)]
        old += [
            task for key, task in found if lives(rows.get(key)) or "judged" in rows.get(key, ())
        ]
        new.append([task for key, task in found if key not in rows][:each])
    turns = [task for turn in zip_longest(*new) for task in turn if task]
    return [*names, *(old if again else ()), *turns]


def judge_all(tasks: list[Any], args: argparse.Namespace) -> None:
    """Judge by so many workers, and write a row for each mutant of a target that passes without a bug."""
    fork, digests = multiprocessing.get_context("fork"), dict[str, str]()
    with fork.Manager() as manager, tempfile.TemporaryDirectory() as place:
        copies = [Path(place) / str(i) for i in range(args.jobs)]
        ignored = shutil.ignore_patterns(".*", "__pycache__", "results")
        for copy in copies:
            shutil.copytree(ROOT if copy == copies[0] else copies[0], copy, ignore=ignored)
            if copy == copies[0]:
                enter(copy)
                for isa in {TARGETS[t].isa for t in tasks if isinstance(t, str)}:
                    assert not (why := built(isa)), why
                    digests[isa] = digest()
        machine = Machine(time.monotonic() + args.seconds, digests, manager.dict())
        todo, results = fork.Queue(), fork.Queue()
        for task in tasks:
            todo.put(task)
        workers = [
            fork.Process(target=work, args=(copy, todo, results, machine)) for copy in copies
        ]
        for worker in workers:
            worker.start()
        waiting: list[tuple[str, dict[str, Any]]] = []
        for _ in workers:
            while (result := results.get()) is not None:
                name, outcome, row = result
                if isinstance(row, dict):
                    if outcome != "late":
                        waiting.append((name, row))
                else:
                    print(f"{name}, without a bug: {outcome} {row}", flush=True)
                for known, done in [w for w in waiting if w[0] in machine.sound]:
                    waiting.remove((known, done))
                    if isinstance(machine.sound[known], float):
                        keep(args, done)
        for worker in workers:
            worker.join()


def keep(args: argparse.Namespace, row: dict[str, Any]) -> None:
    row |= {"date": str(date.today()), "commit": args.commit}
    with args.out.open("a") as out:
        out.write(json.dumps(row) + "\n")
    print(row["outcome"], f"{row['path']}:{row['line']}", row["operator"], row["by"], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=30, help="new mutants of each target")
    parser.add_argument("--only", help="targets, by commas")
    parser.add_argument("--jobs", type=int, default=1, help="workers, each with a copy of the tree")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--commit", default="", help="where there is no git")
    parser.add_argument(
        "--again", action="store_true", help="judge survivors and rows with `judged` again"
    )
    parser.add_argument("--score", action="store_true", help="print what is in the output")
    args = parser.parse_args()
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    rows = {row["id"]: row for row in map(json.loads, lines)}  # the last of each
    if args.score:
        score([*rows.values()])
        return
    args.out = args.out.resolve()
    args.commit = args.commit or current_commit()
    names = args.only.split(",") if args.only else [*TARGETS]
    # Kernels are interpreted, whatever the machine has.
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                   "JAX_PLATFORMS": "cpu"}  # fmt: skip
    import torch  # once, for all that run

    torch.set_num_threads(1)
    judge_all(chosen(names, rows, args.each, args.again), args)


if __name__ == "__main__":
    main()
