"""Does "measured" follow from records of results, and from nothing else?"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from polyattn import Device, LayerSpec, select
from polyattn.registry import info as declared
from polyattn.registry.discovery import discover
from polyattn.registry.info import BackendInfo, Proof
from polyattn.tools.cli import listing, support

ROOT = Path(__file__).parents[2]
CPU = Device("cpu", "x86_64")


@pytest.fixture
def made() -> ModuleType:
    """What makes the records of the result files."""
    spec = importlib.util.spec_from_file_location("proofs_made", ROOT / "benchmarks" / "proofs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Stand in for the records that there are."""

    def record(**changes: Any) -> None:
        row = {"where": "x86_64", "build": "", "runs": "", "whole": True, "cases": 9, "of": 9,
               "commit": "abc", "date": "2026-01-01", "path": "a.json"} | changes  # fmt: skip
        monkeypatch.setattr(declared, "_all", lambda: {"TORCH_SDPA": (declared.Record(**row),)})

    return record


def test_records_are_those_of_the_result_files(made: ModuleType) -> None:
    """Else: python benchmarks/proofs.py."""
    records = made.records()
    assert json.loads(made.PROOFS.read_text()) == json.loads(json.dumps(records))
    for rows in records.values():
        assert all((ROOT / row["path"]).is_file() and row["cases"] > 0 for row in rows)


def test_nothing_is_measured_without_a_record() -> None:
    """Of each backend, as each of its builds, wherever it speaks of."""
    for info in discover().backends.values():
        for build in info.builds:
            for where in info.proof:
                level = build.proof_at(where)
                if level in (Proof.MEASURED, Proof.IN_PART):
                    assert build.records(where), (info.name, where)
    flash = discover().backend("FLASH_ATTN")
    found = {b.build: b.proof_on(Device("cuda", "sm_90")) for b in flash.builds}
    assert found == {
        "flash-attn": Proof.SIGNATURE, "vllm": Proof.IN_PART, "torch": Proof.SIGNATURE
    }  # fmt: skip
    whole = discover().backend("TORCH_STORE")
    assert whole.proof_on(Device("cuda", "sm_90")) is Proof.MEASURED


def test_a_whole_record_is_measured_and_a_part_is_said_to_be_one(recorded: Any) -> None:
    info = discover().backend("TORCH_SDPA")
    recorded()
    assert info.proof_on(CPU) is Proof.MEASURED
    recorded(whole=False, cases=8)
    assert info.proof_on(CPU) is Proof.IN_PART
    assert info.records("x86_64")[0].text == "8 of 9 cases"
    recorded(where="aarch64")
    assert info.proof_on(CPU) is Proof.DECLARED
    recorded(build="another")
    assert replace(info, build="this").proof_on(CPU) is Proof.DECLARED
    recorded(runs="avx2")
    assert info.proof_on(CPU, "avx2") is Proof.MEASURED
    assert info.proof_on(CPU, "amx") is Proof.DECLARED


def test_a_record_raises_nothing_above_what_is_declared(recorded: Any) -> None:
    recorded()
    info = replace(discover().backend("TORCH_SDPA"), proof={"cpu": Proof.INTERPRETED})
    assert info.proof_on(CPU) is Proof.INTERPRETED


def test_a_stranger_has_no_record_of_ours(recorded: Any) -> None:
    recorded()
    info: BackendInfo = replace(discover().backend("TORCH_SDPA"), path="another.module:Class")
    assert info.proof_on(CPU) is Proof.DECLARED


def test_a_report_with_its_cases_is_held_against_today_s_claims(
    made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case less, and it is a part; with a failure, or of cases that are gone, it is nothing."""
    asked = sorted(made.wanted(discover().backend("TORCH_MERGE"), "cpu", "x86_64"))
    monkeypatch.setattr(made, "RESULTS", tmp_path)
    monkeypatch.setattr(made, "ROOT", tmp_path)
    monkeypatch.setattr(made, "batches", lambda: ())

    def level(**changes: Any) -> list[dict[str, Any]]:
        row = {"backend": "TORCH_MERGE", "device": "a CPU (cpu x86_64)", "cases": len(asked),
               "passed": len(asked), "failed": 0, "date": "2026-01-01", "commit": "abc", "build": "",
               "runs": "", "ids": asked} | changes  # fmt: skip
        (tmp_path / "kit.json").write_text(json.dumps(row))
        found: list[dict[str, Any]] = made.records().get("TORCH_MERGE", [])
        return found

    assert [(r["whole"], r["cases"]) for r in level()] == [(True, len(asked))]
    assert [(r["whole"], r["cases"]) for r in level(ids=asked[1:])] == [(False, len(asked) - 1)]
    assert [r["whole"] for r in level(ids=["gone"])] == [False]
    assert level(failed=1) == []


def test_explain_and_list_say_what_the_records_do(recorded: Any) -> None:
    recorded(whole=False, cases=8)
    layer = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64)
    selection = select(layer, device=CPU)
    said = selection.explain()
    assert "TORCH_SDPA for decode (priority 50, measured in part: 8 of 9 cases, a)" in said
    row = next(r for r in listing.backend_rows(discover()) if r["name"] == "TORCH_SDPA")
    assert row["proof"]["cpu"] == "measured in part"


def test_a_planted_claim_is_nowhere_called_measured(recorded: Any) -> None:
    """Every backend claims to be measured, and no record names any: no text says so."""
    recorded(where="no chip")
    planted = [
        replace(i, proof=dict.fromkeys(i.proof, Proof.MEASURED))
        for i in discover().backends.values()
    ]
    assert len(planted) > 30
    rows = [row for row in support.matrix(planted).splitlines() if row.startswith("|")]
    assert len(rows) >= len(planted) and not [row for row in rows if "measured" in row]
    for info in planted:
        for build in info.builds:
            assert all(build.proof_at(where) is Proof.DECLARED for where in info.proof)
    # No other test has this layer: choices are kept.
    layer = LayerSpec(num_heads=6, num_kv_heads=2, head_size=64)
    for device in (CPU, "h100-sxm"):
        said = select(layer, device=device).explain()
        assert " declared" in said and "measured)" not in said and "measured in part" not in said
    for row in listing.backend_rows(discover()):
        assert not [level for level in row["proof"].values() if "measured" in level]


def test_the_only_build_of_a_platform_has_its_records() -> None:
    """Such a build goes without a name where it is selected."""
    selection = select(LayerSpec(num_heads=8, head_size=64), "h100-sxm")
    (line, *_) = [x for x in selection.explain().splitlines() if "+ TRITON_ATTN" in x]
    assert " cases, h200/conformance-TRITON_ATTN): " in line
