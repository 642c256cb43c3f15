"""Where do tables of times come from, and what is said of a file that is none?"""

from __future__ import annotations

from pathlib import Path

import pytest
from polyattn import settings
from polyattn.errors import SettingsError
from polyattn.registry.discovery import refresh
from polyattn.registry.timings import read_table, timings


def test_a_file_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYATTN_TIMINGS", "/nowhere/timings.json")
    with pytest.raises(SettingsError, match="POLYATTN_TIMINGS='/nowhere/timings.json'"):
        settings.reload()
    monkeypatch.delenv("POLYATTN_TIMINGS")


@pytest.mark.parametrize("text", ["[]", '{"format": 99}', '{"format": 1}', "[" * 100_000, "\0"])
def test_what_is_no_table_is_an_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(SettingsError, match=str(path)):
        read_table(path)


def test_nobodys_home_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("no home directory")

    monkeypatch.setattr(Path, "home", nobody)
    refresh()
    assert all(Path(t.path).name != "timings.json" for t in timings(settings.current()).tables)
