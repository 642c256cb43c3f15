"""Does each command and each block of the documents run here, or say why it can't?

`tests/test_documents.py` runs the blocks of Python, and `.ci/run` the README's first two commands.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import tomllib
from pathlib import Path

import polyattn
import pytest
from packaging.requirements import Requirement
from polyattn import settings
from test_documents import NOT_RUN, PAGES
from tools.commands import here

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORT = "run llama-3.1-8b --requests 2 --max-tokens 4 --scale 0.1"
QUICK = {"doctor", "explain", "list", "why"}
GATE = ("python3 -m venv", "pip wheel ")
"""How the README's commands begin that the gate and `tests/test_front_door.py` run."""
PROJECTS = {
    project["name"]: project
    for path in (ROOT / "core", *(ROOT / "plugins").iterdir(), *(ROOT / "integrations").iterdir())
    for project in [tomllib.loads((path / "pyproject.toml").read_text())["project"]]
}  # fmt: skip


def check_install(line: str) -> None:
    """A command that installs names distributions of this tree, extras that they have, folders of it."""
    comment, words = line.partition(" #")[2], shlex.split(line, comments=True)[2:]
    for requirement in map(Requirement, (w for w in words if not w.startswith("-"))):
        extras = PROJECTS[requirement.name].get("optional-dependencies", {})
        assert requirement.extras <= set(extras), line
    for folder in re.findall(r"pip install -e '?([\w/]+)", comment):
        assert (ROOT / folder / "pyproject.toml").exists(), line


def run_line(line: str, environment: pytest.MonkeyPatch, codes: tuple[int, ...]) -> str:
    """Run a line of a page, or check what of it can be; return what it prints."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        environment.setenv(*words.pop(0).split("=", 1))
    if not words:
        assert settings.current_settings().sources, line
    elif words[0] == "polyattn":
        assert words[1] in QUICK or shlex.join(words[1:]) == SHORT, (
            f"slow, and doesn't say so: {line}"
        )
        if words[1:] != ["why", "4711"]:
            code, out, errors = here(*words[1:])
            assert code in ((0, 1) if words[1] in ("doctor", "why") else codes), errors
            return out + errors
    elif words[:2] == ["pip", "install"]:
        check_install(line)
    elif words[:3] == ["python", "-m", "pytest"]:
        assert words[3].startswith(("tests", "integrations")) and (ROOT / words[3]).is_dir(), line
    else:
        assert line.startswith(GATE), f"neither runs nor says why it can't: {line}"
    return ""


def check_page(text: str) -> None:
    """Run a page's blocks in turn. A `text` block is what those before it print, a refusal too."""
    printed, blocks = "", FENCE.findall(text)
    for (language, block), (following, _) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if block.startswith(NOT_RUN):
            assert len(block.partition("\n")[0]) > len(NOT_RUN) + 10, "a reason has words"
            continue
        if language == "toml":
            tomllib.loads(block)
        elif language == "text":
            for part in re.split(r"…|\n", block):
                assert part.strip() in printed, f"not printed by the commands above: {part}"
        elif language != "python":
            assert language in ("", "bash"), language
            codes = (0, 1) if following == "text" else (0,)
            with pytest.MonkeyPatch.context() as environment:
                for line in filter(None, block.splitlines()):
                    printed += run_line(line, environment, codes)


@pytest.mark.parametrize("page", [p for p in PAGES if FENCE.search((ROOT / p).read_text())])
def test_each_block_of_a_page_runs_or_says_why_it_cannot(page: str) -> None:
    check_page((ROOT / page).read_text())


@pytest.mark.parametrize(
    "block",
    [
        "```\npolyattn tune\n```\n", "```bash\nmake all\n```\n", "```ruby\nputs 1\n```\n",
        "```\nPOLYATTN_BACKEND=NO_SUCH polyattn explain llama-3.1-8b --device nowhere\n```\n",
        "```\npip install polyattn-nothing\n```\n", '```\npip install "polyattn[nothing]"\n```\n',
        "```toml\n[\n```\n", "```text\nnever printed\n```\n", f"```\n{NOT_RUN}\nmake\n```\n",
    ],
)  # fmt: skip
def test_a_block_that_does_not_hold_is_seen(block: str) -> None:
    with pytest.raises((AssertionError, KeyError, tomllib.TOMLDecodeError)):
        check_page(block)


def test_a_table_of_overrides_is_one_that_is_read() -> None:
    (block,) = re.findall(
        r"```toml\n(\[backend\].*?)```", (ROOT / "docs/settings.md").read_text(), re.S
    )
    read = settings.load({}, tomllib.loads(block), "polyattn.toml")
    names = [override.backend for source in read.sources for override in source]
    assert names == ["FLASH_ATTN_V3", "FLASHINFER", "FLASHMLA"]
    assert set(names) <= set(polyattn.discover().backends)


def test_each_integrations_page_ran_from_its_first_line() -> None:
    """`.ci/pages.py` ran what the pages say now, in empty environments."""
    pages = runpy.run_path(str(ROOT / ".ci" / "pages.py"))
    said = {page.stem: pages["commands"](page) for page in pages["PAGES"].glob("*.md")}
    ran = json.loads(pages["RECORD"].read_text())
    assert {name: row["commands"] for name, row in ran.items()} == {
        n: c for n, c in said.items() if c
    }
