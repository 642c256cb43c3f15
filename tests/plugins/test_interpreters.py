"""Is what a plugin claims the same whatever the environment says? Interpreters are builds."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXPLAINED = """
import sys
from polyattn import LayerSpec, select
for device in ("h100-sxm", "mi300x", "tpu-v6e", "x86-amx"):
    print(select(LayerSpec(num_heads=32, num_kv_heads=8, head_size=128), device).explain())
"""
WITHOUT_JAX = """
import sys
sys.modules["jax"] = None
from polyattn import LayerSpec, select
spec = LayerSpec(num_heads=8, head_size=64, variant="relative_bias")
print(select(spec, "tpu-v6e").backend("prefill").name)
"""


def printed(code: str, **variables: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True,
        check=True, timeout=120,
    ).stdout  # fmt: skip


def test_a_profile_is_explained_alike_with_and_without_the_interpreters() -> None:
    plain = printed(EXPLAINED)
    assert "TRITON_ATTN" in plain and "PALLAS_ATTN" in plain
    assert printed(EXPLAINED, TRITON_INTERPRET="1", PALLAS_INTERPRET="1") == plain


def test_a_profile_takes_a_variant_without_its_library() -> None:
    pytest.importorskip("polyattn_tpu")
    assert printed(WITHOUT_JAX).strip() == "PALLAS_ATTN"


@pytest.mark.parametrize("path", sorted(ROOT.glob("plugins/*/src/*/hooks.py")), ids=str)
def test_declarations_read_no_variable(path: Path) -> None:
    names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if hasattr(node, "attr")}
    assert not names & {"environ", "getenv"}
