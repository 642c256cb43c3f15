"""Does each integration's page work from its first line, in an empty environment?

    pip wheel --no-deps --wheel-dir dist ./core ./plugins/* ./integrations/*
    python .ci/pages.py [--dist dist] [--pip "uv pip"] [PAGE ...]

`dist` has the wheels of this tree. For each page of docs/integrations that begins with `pip install`, it
makes an environment and runs that line there, then the page's blocks of Python that nothing keeps from
running. Last it asks polyattn about the integration. What pip is told otherwise (indexes) it takes from
its own variables. What ran goes to the record, which `tests/test_blocks.py` compares with the pages.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
import venv
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "integrations"
RECORD = ROOT / ".ci" / "pages.json"
INSTALL = re.compile(r"\A# .*\n+```bash\n(pip install [^#\n]*\S) +#")
PYTHON = re.compile(r"^```python\n(?!# not run in CI)(.*?)^```$", re.MULTILINE | re.DOTALL)
ASK = """
from polyattn.host import integrations
found = [i for i in integrations() if i.distribution == {name!r}]
assert found and not any(i.problem for i in found), found
import {module}
"""


def commands(page: Path) -> list[str]:
    """Return what a page is run by: its first line, its blocks of Python, and what asks for its state."""
    text = page.read_text()
    first = INSTALL.match(text)
    if first is None:
        return []
    name = "polyattn-" + page.stem.replace("_", "-")
    asked = ASK.format(name=name, module=name.replace("-", "_")).strip()
    return [first[1], *(block.strip() for block in PYTHON.findall(text)), asked]


def run(page: Path, dist: Path, pip: str) -> dict[str, Any]:
    """Run a page in an environment of its own. Raises `subprocess.CalledProcessError`."""
    install, *blocks = commands(page)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=pip == "pip")
        programs, links = Path(folder) / "bin", os.environ.get("PIP_FIND_LINKS", "")
        environment = os.environ | {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": folder,
            "PIP_FIND_LINKS": f"{dist} {links}", "UV_FIND_LINKS": f"{dist},{links}".rstrip(","),
        }  # fmt: skip
        words = install.replace("pip", pip, 1)
        subprocess.run(["bash", "-c", words], env=environment, cwd=folder, check=True)
        for block in blocks:
            subprocess.run(
                [programs / "python", "-c", block], env=environment, cwd=folder, check=True
            )
        freeze = ["bash", "-c", f"{pip} freeze"]
        said = subprocess.run(
            freeze, env=environment, capture_output=True, text=True, check=True
        ).stdout
    host = ("torch", page.stem, f"{page.stem}-cpu")
    versions = [line for line in said.splitlines() if line.partition("==")[0] in host]
    return {
        "commands": [install, *blocks], "date": str(date.today()), "pip": pip,
        "versions": versions, "seconds": round(time.monotonic() - start),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pages", nargs="*", help="by name, such as torch (default: all)")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--pip", default="pip", help="another installer that takes pip's words")
    arguments = parser.parse_args()
    found: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for page in sorted(PAGES.glob("*.md")):
        if commands(page) and (not arguments.pages or page.stem in arguments.pages):
            found[page.stem] = run(page, arguments.dist.resolve(), arguments.pip)
            print(page.stem, found[page.stem]["versions"], flush=True)
            RECORD.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
