"""What is generated is fresh: the support matrix and the selection tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden.update import EXPLAINED, TABLES, explained, table
from polyattn import discover
from polyattn.tools.cli.support import matrix

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


def test_a_tpu_s_explanations_are_fresh() -> None:
    assert (ROOT / "tests" / "golden" / EXPLAINED).read_text() == explained(TABLES["tpu.md"]), (
        "a verdict changed; if that is right: python tests/golden/update.py"
    )


def test_settings_are_documented() -> None:
    from polyattn.settings import FOREIGN_VARIABLES, VARIABLES

    text = (ROOT / "docs" / "settings.md").read_text()
    assert all(f"`{name}`" in text for name in (*VARIABLES, *FOREIGN_VARIABLES))
