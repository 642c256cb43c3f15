"""Does hand-written source define the functions that it replaces?"""

from __future__ import annotations

import ast
import re

from polyattn.spec.variant import AttentionVariant


def written_problem(variant: AttentionVariant, language: str) -> str | None:
    """Return what a variant's source in a language lacks, in words for people, or None.

    Raises `SpecError` if its file can't be read.
    """
    text = variant.source(language)
    if text is None:
        return None
    label = f"sources[{language!r}]"
    if language == "cuda":
        defined = set(re.findall(r"\b(\w+)\s*\([^;{}]*\)\s*\{", text))
    else:
        try:
            body = ast.parse(text).body
        except SyntaxError as error:
            return f"{label}, line {error.lineno}: {error.msg}"
        defined = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    wanted = [name for name in ("score_mod", "mask_mod") if getattr(variant, name) is not None]
    missing = [name for name in wanted if name not in defined]
    return f"{label} defines no {' and no '.join(missing)}" if missing else None
