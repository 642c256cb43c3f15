"""Do the benchmarks' suites hold? Rows build, one of each runs, and the generated pages are fresh."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forks import python

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import measuring  # noqa: E402
import pages  # noqa: E402
import run  # noqa: E402
from polyattn.workload.clock import Clock  # noqa: E402
from suites import NAMES  # noqa: E402
from table import LLAMA, Bar, Other, Row  # noqa: E402

CPU, SHRINK = torch.device("cpu"), 512
SMALL = {
    "decode": "24 of azure", "prefill": "few tiles: 8 x 200", "mixed": "16/2: 80 x 1k + 1,500",
    "mla": "16 heads: 8 x 2048", "recurrent": "KDA (Kimi Linear): 1 x 8192 after 1000",
    "prefix": "8 over 4k + 128", "eight_bit": "CPU: decode 8 x 2048, e4m3",
    "graphs": "NATIVE_ATTN: decode 8 x 4096", "store": "16 x 1 token, neox, e4m3",
    "host": "a plan: one token after 16", "same_bits": "decode: 24 of azure",
    "sparse": "MSA: decode 8 x 32k", "choice": "20/20 of 64: prompt of 700",
}  # fmt: skip
"""A row of each suite that runs on a CPU within a second."""


@pytest.mark.parametrize("name", NAMES)
def test_every_row_builds(name: str) -> None:
    """On the CPU, at short lengths; a row of GPUs alone as its layer's own choice."""
    rows = pages.suite(name)
    assert rows and len({row.name for row in rows}) == len(rows)
    for row in rows:
        other = next(iter(row.contenders("cpu")), Other("", ""))
        work = measuring.build(row, other, CPU, SHRINK)
        assert work.lengths == row.lengths(SHRINK)
        part = measuring.PARTS[other.part or row.part]
        assert callable(part.make(work))
        assert all(callable(measuring.yardstick(library)) for library in row.libraries)
        labels = [each.label for device in row.by for each in row.contenders(device)]
        assert row.bar is None or row.bar.of in (*labels, *row.libraries, "us", Bar(1).of)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_each_suite_runs(name: str) -> None:
    (row,) = (row for row in pages.suite(name) if row.name == SMALL[name])
    results = list(measuring.measure(row, CPU, Clock(CPU), 64))
    ran = [result for result in results if "us" in result]
    assert len(ran) == len(row.contenders("cpu")) + sum("machine" in n for n in row.libraries)
    gives = measuring.PARTS[row.contenders("cpu")[0].part or row.part].gives
    assert ("error" in ran[0]) == gives


def test_a_wrong_result_has_no_time() -> None:
    row = Row("wrong", LLAMA, "2q1s20", {"cpu": ("TORCH_SDPA",)})
    zeros = measuring.Part(lambda work: lambda: work.out.zero_())
    make = lambda: measuring.build(row, Other("", "TORCH_SDPA"), CPU)  # noqa: E731
    result = measuring._measured("zeros", make, zeros, Clock(CPU))
    assert "us" not in result and result["cannot"].startswith("it is wrong")


def test_a_contender_that_is_not_here_leaves_the_others() -> None:
    row = Row("x", LLAMA, "2q1s20", {"cpu": ("FLASHINFER", "TORCH_SDPA")}, None, ["machine.copy"])
    absent, *ran = measuring.measure(row, CPU, Clock(CPU))
    assert absent["absent"] and [result["who"] for result in ran] == ["TORCH_SDPA", "machine.copy"]
    assert all(result["us"] > 0 for result in ran)


def test_pages_are_fresh() -> None:
    for path in (BENCHMARKS / "results").glob("*.jsonl"):
        assert path.with_suffix(".md").read_text() == pages.page(path.stem, pages.read(path)), (
            "stale: python benchmarks/run.py --pages"
        )


def record(us: float, who: str, commit: str) -> dict[str, object]:
    return {
        "date": "2026-11-23", "commit": commit, "device": "a chip", "versions": {"torch": "2"},
        "suite": "decode", "row": "24 of azure", "who": who, "us": us, "error": 1e-3,
    }  # fmt: skip


def test_a_page_shows_the_newest_figure_of_each(tmp_path: Path) -> None:
    records = [record(30.0, "TRITON_ATTN", "1111111"), record(20.0, "FLASH_ATTN_V3", "1111111"),
               record(24.0, "TRITON_ATTN", "2222222")]  # fmt: skip
    (tmp_path / "chip.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (path,) = pages.write_pages(tmp_path)
    (line,) = (line for line in path.read_text().splitlines() if line.startswith("| 24 of azure"))
    assert "TRITON_ATTN 24.0; FLASH_ATTN_V3 20.0" in line and "30.0" not in line
    assert "| 1.20 |" in line and "**missed**" in line and "2222222" in line


def test_a_page_says_what_choosing_costs_among_what_was_measured(tmp_path: Path) -> None:
    """TRITON_ATTN is chosen for decodes; FLASHINFER of the two that a second row has figures of."""
    one, other = "1 x 128k + 63 x 1k", "24 of azure"
    figures = [(one, "TRITON_ATTN", 30.0), (one, "FLASHINFER", 20.0), (other, "FLASHINFER", 9.0),
               (other, "FLASH_ATTN_V3", 9.0), (other, "vllm.attention", 1.0)]  # fmt: skip
    records = [record(us, who, "1") | {"row": row} for row, who, us in figures]
    (tmp_path / "h100.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (path,) = pages.write_pages(tmp_path)
    assert path.read_text().endswith("| bfloat16, heads of 128 | decode | 2 | 1.225 | 1.50 |\n")


@pytest.mark.parametrize(
    ("bar", "ratio", "met"),
    [(None, 1.5, None), (Bar(1.6), 1.5, True), (Bar(2.0, "B"), 0.75, True), (Bar(20, "us"), 1.5, False),
     (Bar(1.0, "machine.copy"), 3.0, False), (Bar(1.0, "absent"), None, None)],
)  # fmt: skip
def test_the_first_one_is_held_to_the_bar(
    bar: Bar | None, ratio: float | None, met: bool | None
) -> None:
    row = Row("x", LLAMA, "q1s9", {"cpu": ("A", "B", "C")}, bar, ["machine.copy"])
    times = {"A": 30.0, "B": 40.0, "C": 20.0, "machine.copy": 10.0}
    assert pages.judged(row, times) == (ratio, met)
    del times["A"]
    assert pages.judged(row, times) == (None, None)


def test_list_prints_every_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--list"])
    run.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(len(pages.suite(name)) for name in NAMES)


def test_results_are_added_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "chip.jsonl"
    words = ["host", "--device", "cpu", "--rows", "a plan: one token after 16", "--against", "none",
             "--out", str(out), "--commit", "1234567"]  # fmt: skip
    for lines in (1, 2):
        monkeypatch.setattr(sys, "argv", ["run.py", *words])
        run.main()
        found = pages.read(out)
        assert len(found) == lines and found[-1]["who"] == "NATIVE_ATTN" and found[-1]["us"] > 0
        assert found[-1]["commit"] == "1234567" and found[-1]["versions"]["torch"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows, environ",
    [
        ("graphs.replayed(6, n, kind) for n in (0, 3) for kind in ('Runner', 'LatentRunner')", {}),
        (
            "[graphs.mixed(1, graphs.torch.float32, 'LatentRunner')]",
            {"TRITON_INTERPRET": "1", "POLYATTN_BACKEND": "TRITON_MLA"},
        ),
        (
            "graphs.mixed(1, graphs.torch.float32, sliding_window=n) for n in (None, 40)",
            {"TRITON_INTERPRET": "1", "POLYATTN_BACKEND": "TRITON_ATTN"},
        ),
    ],
    ids=["uniform", "latent", "mixed"],
)
def test_the_rehearsal_of_vllms_graphs(rows: str, environ: dict[str, str]) -> None:
    """vLLM's names stood in for, in a process of its own; `h200_engines.py` captures the same steps.

    Mixed steps run the plan of the capture, so that what isn't planned into its buffers is missed.
    """
    code = (
        "from engines import vllm_graphs as graphs; graphs.stand_in(); "
        f"found = list({rows}); assert all(row['right'] for row in found), found"
    )
    ran = python("-c", code, cwd=BENCHMARKS, **environ)
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_a_side_of_the_engines_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side is measured, in each round."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.33.0")
    from engines import serving

    def served(folder: Path, side: str, wanted: str) -> Iterator[tuple[str, dict[str, float]]]:
        if side == "vLLM":
            raise RuntimeError("no engine")
        yield "chat", {"tokens/s": 2.0}

    monkeypatch.setattr(serving, "served", served)
    monkeypatch.setattr(serving, "SIDES", ("vLLM", "polyattn"))
    assert [row["what"] for row in serving.measured(60, rounds=2)] == [
        "round 0 of vLLM", "chat: polyattn, round 0", "chat: polyattn, round 1", "round 1 of vLLM",
        "chat: polyattn",
    ]  # fmt: skip
