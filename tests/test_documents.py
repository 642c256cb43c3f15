"""Do the documents hold? What is generated is fresh, examples run, the site builds without a warning."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
from forks import python
from golden import messages
from golden.update import TABLES, table
from polyattn import discover
from polyattn.tools.cli.main import app
from polyattn.tools.cli.support import matrix
from tools.commands import here
from typer.main import get_command

ROOT = Path(__file__).parent.parent


def test_support_matrix_is_fresh() -> None:
    infos = sorted(discover().backends.values(), key=lambda b: b.name)
    fresh = matrix([info for info in infos if info.name != "EXAMPLE_ATTN"])
    assert (ROOT / "docs" / "support.md").read_text() == fresh, (
        "stale: python -m polyattn.tools.cli.support > docs/support.md"
    )


@pytest.mark.parametrize("name", TABLES)
def test_selection_tables_are_fresh(name: str) -> None:
    assert (ROOT / "tests" / "golden" / name).read_text() == table(TABLES[name]), (
        "a choice changed; if that is right: python tests/golden/update.py"
    )


@pytest.mark.parametrize(
    ("source", "listed"),
    [
        ("raise ValueError(f'{a} is no size; use 1')", ["{a} is no size; use 1"]),
        ("log.info('built %s', 1)", ["built %s"]),
        ("x = Option(help='Print JSON.')", ["Print JSON."]),
        ("def why():\n    return 'is not installed'", ["is not installed"]),
        ("@app.command()\ndef f():\n    'Show them.'", ["Show them."]),
        ("def f():\n    'This text is for developers.'\n    return 'fp8', 'two words'", []),
    ],
)  # fmt: skip
def test_the_list_has_what_a_user_can_meet(source: str, listed: list[str]) -> None:
    assert list(messages.messages(ast.parse(source))) == listed


def test_the_list_has_what_native_code_says() -> None:
    source = 'return (plan *)fail("no room for %d "\n  "parts; %s", n, "not this");'
    assert list(messages.native_messages(source)) == ["no room for %d parts; %s"]
    assert "block_table points outside the cache" in messages.listing()


def test_settings_are_documented() -> None:
    from polyattn.settings import FOREIGN_VARIABLES, SCOPES, VARIABLES

    text = (ROOT / "docs" / "settings.md").read_text()
    assert all(f"`{name}`" in text for name in (*VARIABLES, *FOREIGN_VARIABLES, *SCOPES))


PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "README.md",
        "docs/**/*.md",
        "*/*/README.md",
        "*/*/DESIGN.md",
        "CONTRIBUTING.md",
    )
    for path in ROOT.glob(pattern)
)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = "# not run in CI: "
"""How a block that can't run on a CPU says so, and why, to whoever reads it."""


def examples(page: str) -> list[str]:
    return BLOCK.findall((ROOT / page).read_text())


def test_there_are_examples() -> None:
    blocks = [block for page in PAGES for block in examples(page)]
    assert len(blocks) >= 6
    fences = sum((ROOT / page).read_text().count("```py") for page in PAGES)
    assert fences == len(blocks), "a fence of python that the expression doesn't see"
    silent = [b for b in blocks if NOT_RUN in b and not b.startswith(NOT_RUN)]
    assert not silent, "the reason stands in the first line"


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)])
def test_examples_run(page: str) -> None:
    """A page's blocks, one after another in a process of its own."""
    blocks = [block for block in examples(page) if not block.startswith(NOT_RUN)]
    for block in examples(page):
        compile(block, page, "exec")
    ran = python("-c", "\n".join(blocks), cwd=ROOT / "tests")
    assert ran.returncode == 0, ran.stderr


COMMAND = re.compile(r"^(?:\w+=\S+ )*polyattn ([a-z].*)$", re.MULTILINE)
QUICK = {"doctor", "explain", "list"}
"""Commands that answer at once. Others measure, serve or compile: their options alone are checked."""


def commands() -> list[str]:
    """The command lines that pages show: in fences, and whole in backticks."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
            found += [] if language else COMMAND.findall(block)
        found += re.findall(r"`polyattn ([a-z][^`…\n]*)`", text)
    lines = {line.partition(" #")[0].strip() for line in found}
    # Prose names an option without its value: `run --context-parallel`.
    return sorted(
        x
        for x in lines
        if "[" not in x and not re.search(r" --(context-parallel|weights|spec)$", x)
    )


def test_the_command_lines_that_pages_show_are_understood() -> None:
    """Each is parsed; those without a placeholder that answer at once are run."""
    group, ran = get_command(app), 0
    lines = commands()
    for line in lines:
        name, *arguments = shlex.split(re.sub(r"\bN\b", "2", line))
        command = group.commands[name]  # type: ignore[attr-defined]
        if name != "why" and arguments:
            command.make_context(name, list(arguments))
        if name in QUICK and not re.search(r"\b[A-Z]{2,}\b", line):
            code, _, said = here(name, *arguments)
            assert code in ((0, 1) if name == "doctor" else (0,)), f"{line}: {said}"
            ran += 1
    assert len(lines) > 25 and ran > 5


def test_a_new_reader_finds_the_kernel_by_folder_names() -> None:
    """The path that CONTRIBUTING tells, from `select` to a kernel, is there."""
    core, plugin = ROOT / "core/src/polyattn", ROOT / "plugins/cpu/src/polyattn_cpu"
    told = re.search(
        r"folder names alone\.(.*?)If a change", (ROOT / "CONTRIBUTING.md").read_text(), re.S
    )
    assert told is not None
    steps = re.findall(r"`([^`]+)`", told[1])
    assert len(steps) == 5
    for step in steps:
        where = plugin / step.partition("...")[2].strip("/") if "..." in step else core / step
        assert where.exists(), step


def test_tests_that_pages_name_are_there() -> None:
    text = (ROOT / "docs" / "proofs.md").read_text()
    named = re.findall(r"`((?:tests|integrations)/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 20
    for path, name in named:
        source = (ROOT / path).read_text()
        assert not name or f"def {name}(" in source, f"{path}::{name}"


SOURCES = {
    ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for pattern in ("core/src/polyattn", "plugins/*/src/*", "integrations/*/src/*")
    for root in ROOT.glob(pattern)
    for path in root.rglob("*.py")
}  # fmt: skip
"""Every module by its dotted name."""


def test_modules_that_prose_names_are_there() -> None:
    """`folder.module.NAME` in a page or a docstring is a module, and the module has the name."""
    tails = {}
    for name in SOURCES:
        for cut in range(1, name.count(".") + 1):
            tails[name.split(".", cut)[-1]] = name
    folders = {name.split(".")[1] for name in SOURCES if name.startswith("polyattn.")}
    folders.remove("spec")  # a layer's own spec is called so, too
    gone, seen = [], 0
    for path in (*SOURCES.values(), *(ROOT / page for page in PAGES)):
        for dotted in re.findall(r"`((?:\w+\.)+\w+)(?:\([^`]*\))?`", path.read_text()):
            first, *rest = dotted.split(".")
            if not (first.startswith("polyattn") or (first in folders and rest[0] != "py")):
                continue
            seen += 1
            heads = [dotted.rsplit(".", cut)[0] for cut in range(len(rest) + 1)]
            found = next((h for h in heads if h in SOURCES or h in tails), None)
            attribute = dotted.removeprefix(found or "").strip(".").partition(".")[0]
            module = SOURCES[tails.get(found, found)] if found else None
            stub = module and module.with_suffix(".pyi")  # which lists the names of `polyattn`
            source = "".join(p.read_text() for p in (module, stub) if p and p.exists())
            if found is None or (attribute and not re.search(rf"\b{attribute}\b", source)):
                gone.append(f"{path.relative_to(ROOT)}: {dotted}")
    assert seen > 30 and not gone


def test_files_that_pages_name_are_there() -> None:
    """A path in backticks that ends as a source file does lies somewhere in the tree."""
    every = [p.relative_to(ROOT).as_posix() for top in TREE for p in (ROOT / top).rglob("*.*")]
    every += [path.name for path in ROOT.iterdir()]
    named = [
        (page, path)
        for page in PAGES
        for path in re.findall(r"`([\w./-]+\.(?:py|md|sh|cpp|h|yml))`", (ROOT / page).read_text())
    ]
    gone = [
        (page, path) for page, path in named
        if "..." not in path and not any(f"/{p}".endswith("/" + path.removeprefix("./")) for p in every)
    ]  # fmt: skip
    assert len(named) > 40 and not gone


TREE = (
    "core",
    "plugins",
    "integrations",
    "examples",
    "tests",
    "docs",
    "benchmarks",
    ".ci",
    ".github",
)
