"""What a running process uses is told by another one: its decisions, its host's fallbacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from polyattn import LayerGroup, LayerSpec, select
from polyattn.host import Ledger
from polyattn.selection import running
from tools.commands import here

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float32")


@pytest.fixture(autouse=True)
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process as a fresh one, whose record lies in a folder of the test's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(running, "_written", {})
    monkeypatch.setattr(running.atexit, "register", lambda *args: None)
    return tmp_path / f"polyattn-{os.getuid()}" / f"{os.getpid()}.jsonl"


def test_why_prints_the_decisions_of_the_groups_that_were_loaded(record: Path) -> None:
    assert here("why")[0] == 1
    selection = select(SPEC, "cpu", verify=True)
    assert not record.exists()  # neither deciding nor verifying serves a layer
    for _ in range(2):
        LayerGroup(selection)
    code, out, _ = here("why", str(os.getpid()))
    assert code == 0 and out.count(selection.decision.explain()) == 1
    (process,) = json.loads(here("why", "--json")[1])
    assert process["pid"] == os.getpid() and len(process["decisions"]) == 1
    assert process["decisions"][0]["chosen"] == dict(selection.decision.chosen)
    assert record.stat().st_mode & 0o077 == 0 == record.parent.stat().st_mode & 0o077


def test_why_reads_what_was_saved(record: Path, tmp_path: Path) -> None:
    """A process of yesterday is answered for by its own `--json`; a file of anything else is refused."""
    LayerGroup(select(SPEC, "cpu"))
    saved, pid = tmp_path / "why.json", str(os.getpid())
    saved.write_text(here("why", "--json")[1])
    today = here("why", pid)
    record.unlink()
    assert here("why", "--saved", str(saved)) == here("why", pid, "--saved", str(saved)) == today
    code, _, said = here("why", "1", "--saved", str(saved))
    assert code == 2 and f"has no process 1; its processes: {pid}" in said
    for text in ("{}", "[]"):
        saved.write_text(text)
        assert here("why", "--saved", str(saved))[:2] == (1, f"--saved={saved} has no process\n")
    for text in ('{"groups": []}', "[", '[{"began": "1"}]'):
        saved.write_text(text)
        code, _, said = here("why", "--saved", str(saved))
        assert code == 2 and "isn't what `polyattn why --json` prints" in said
    assert here("why", "--saved", str(tmp_path / "none"))[0] == 2


def test_why_tells_what_a_host_served_itself() -> None:
    with pytest.warns(UserWarning, match="falls back"):
        Ledger("somebody", "somebody's own attention").count_fallback("Layer", "no kernel")
    assert "somebody: somebody's own attention for Layer: no kernel" in here("why")[1]
    del Ledger.known["somebody"]


def test_processes_that_ended_are_forgotten(record: Path) -> None:
    LayerGroup(select(SPEC, "cpu"))
    old = record.with_name("999999999.jsonl")
    head = json.loads(record.read_text().splitlines()[0])
    old.write_text(json.dumps({**head, "began": "1"}))
    code, _, said = here("why", "999999999")
    assert code == 2 and "has no record" in said
    assert not old.exists() and record.exists()


def test_several_processes_are_listed(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LayerGroup(select(SPEC, "cpu"))
    record.with_name("1.jsonl").write_text(record.read_text())
    monkeypatch.setattr(running, "_alive", lambda process: True)
    _, out, _ = here("why")
    assert {"1", str(os.getpid())} <= set(out.split())
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.skipif(not Path("/proc/self/exe").exists(), reason="the system has no /proc")
def test_a_servers_id_finds_its_workers(record: Path) -> None:
    """An engine's user knows the server, and a child of its child has loaded the groups."""
    LayerGroup(select(SPEC, "cpu"))
    head, decision = record.read_text().splitlines()
    record.unlink()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        began = running._began(worker.pid)
        text = "\n".join((json.dumps({**json.loads(head), "began": began}), decision))
        record.with_name(f"{worker.pid}.jsonl").write_text(text)
        (process,) = json.loads(here("why", str(os.getpid()), "--json")[1])
        assert process["pid"] == worker.pid and os.getpid() in process["ancestors"]
        assert (
            f"started by process {process['ancestors'][-1]}: " in here("why", str(os.getpid()))[1]
        )
        worker.communicate(b"\n")
    assert here("why", str(os.getpid()))[0] == 2


@pytest.mark.parametrize("where", ["no", "folder of another"])
def test_a_process_that_cannot_write_runs_on(
    record: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "no":
        monkeypatch.setenv("POLYATTN_WHY", "0")
    else:
        record.parent.symlink_to(record.parent.parent)
    LayerGroup(select(SPEC, "cpu"))
    assert not record.exists()


def test_a_machine_without_a_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    code, _, errors = here("why")
    assert code == 2 and "temporary folder: No usable" in errors and "set TMPDIR" in errors
