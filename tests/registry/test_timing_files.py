"""Where do tables of times come from, and what is said of a file that is none?"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from polyattn import settings
from polyattn.errors import SettingsError
from polyattn.registry.discovery import refresh
from polyattn.registry.timings import read_table, timings
from polyattn.spec.timing import KINDS, TERMS


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


def table(**fields: object) -> dict[str, object]:
    return {
        "format": 1, "device": {"platform": "cpu", "name": "x"}, "versions": {"torch": "1"},
        "models": [],
    } | fields  # fmt: skip


MODEL = {
    "backend": "TORCH_SDPA", "kind": KINDS[0], "layer": {}, "of": ["torch"],
    "coefficients": dict.fromkeys(TERMS, 1.0),
}  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"coefficients": dict.fromkeys(TERMS, 10**400)},
        {"of": [["torch"]]},
        {"of": [{"torch": 1}]},
        {"margin": 10**400},
        {"whole": 10**400},
    ],
    ids=["a coefficient of 400 digits", "of a list", "of a dict", "margin", "whole"],
)
def test_a_model_that_cannot_be_read_is_named_and_left_out(
    wrong: dict[str, object], tmp_path: Path
) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(table(models=[MODEL | wrong, MODEL])))
    found = read_table(path)
    assert len(found.entries) == 1
    (problem,) = found.problems
    assert problem.startswith("models[0]: ") and len(problem) < 600


def test_too_many_models_are_an_error_at_once(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(table(models=[{}] * 120_000)))
    with pytest.raises(SettingsError, match=r"120000 models are more than 4096"):
        read_table(path)
    path.write_text(" " * (9 << 20))
    with pytest.raises(SettingsError, match=r"it has more than 8388608 bytes"):
        read_table(path)


def test_a_fifo_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    os.mkfifo(path)
    with pytest.raises(SettingsError, match="it is no regular file"):
        read_table(path)
