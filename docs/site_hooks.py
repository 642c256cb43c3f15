"""What does the site have that docs/ hasn't? The README as its first page, and the reference.

Links from a page to the repository's other files are shown as their paths; one that leads nowhere is a
warning, and with it an error.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from pathlib import Path
from typing import Any

import polyattn
import polyattn.host
import polyattn.kernel
import polyattn.plugin
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = {
    "polyattn": (polyattn, "The public names."),
    "plugin": (polyattn.plugin, "What a hook module imports; no torch."),
    "kernel": (polyattn.kernel, "What a backend's module imports."),
    "host": (polyattn.host, "What an integration imports beside `polyattn` and `polyattn.errors`."),
}
LINK = re.compile(r"\[([^\]]*)\]\(([^)#:]+)(#[^)]*)?\)")
TABLE, TAG = re.compile(r"<table>.*?</table>", re.DOTALL), re.compile(r"<[^>]+>")
log = logging.getLogger("mkdocs.hooks.polyattn")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made."""
    readme = LINK.sub(_from_root, (ROOT / "README.md").read_text())
    files.append(File.generated(config, "index.md", content=readme))
    for name, (module, what) in REFERENCE.items():
        names = (n for n in getattr(module, "__all__", vars(module)) if not n.startswith("_"))
        blocks = "\n\n".join(f"::: {module.__name__}.{n}" for n in names)
        text = f"# {module.__name__}\n\n{what}\n\n{blocks}\n"
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Show links out of docs/ as paths."""
    here = (ROOT / "docs" / page.file.src_uri).parent

    def shown(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = Path(os.path.normpath(here / target))
        if (ROOT / "docs") in path.parents or path.name == target == "index.md":
            return f"[{text}]({target}{anchor})"
        return _outside(text, path, page.file.src_uri)

    return LINK.sub(shown, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Name each cell of a table by its column, for screens that are too narrow for columns."""

    def named(table: re.Match[str]) -> str:
        names = [TAG.sub("", name) for name in re.findall(r"<th[^>]*>(.*?)</th>", table[0], re.S)]
        cells = itertools.cycle(names)
        return re.sub(
            "<td",
            lambda _: f'<td data-column="{name}"' if (name := next(cells)) else "<td",
            table[0],
        )

    return TABLE.sub(named, html)


def _from_root(match: re.Match[str]) -> str:
    """A link of the README, as one of docs/index.md."""
    text, target, anchor = match[1], match[2], match[3] or ""
    path = Path(os.path.normpath(ROOT / target))
    if (ROOT / "docs") in path.parents:
        return f"[{text}]({target.removeprefix('docs/')}{anchor})"
    return _outside(text, path, "README.md")


def _outside(text: str, path: Path, page: str) -> str:
    where = path.relative_to(ROOT).as_posix()
    if not path.exists():
        log.warning("%s links to %s, which isn't there", page, where)
    return f"{text} (`{where}`)" if where not in text else text
