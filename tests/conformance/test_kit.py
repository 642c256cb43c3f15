"""The conformance kit itself: one command, honest about a backend that lies."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from defaults import CPU_DEFAULT
from kits import PARTS, conforms, kit
from polyattn import Batch, LayerGroup, LayerSpec, RecurrentSpec, resolve_device
from polyattn.conformance import plugin
from polyattn.conformance.checks.table import run_case
from polyattn.conformance.derive import derive
from polyattn.conformance.draws import EXAMPLES, TRIES, Draw, attention_specs, require
from polyattn.conformance.draws import drawn as drawn_
from polyattn.conformance.harness.base import Harness
from polyattn.conformance.harness.rotation import RotationHarness
from polyattn.conformance.plugin import _asserted_here, _Kit
from polyattn.conformance.snapshot import runs_alone
from polyattn.families.recurrent.workload import RecurrentWorkload
from polyattn.registry.discovery import discover
from polyattn.registry.info import load_object
from polyattn.runtime.cache.kv_cache import quantize
from polyattn.runtime.rotation import Rotation
from polyattn.selection.tree import SERVICES
from polyattn.spec.kinds import AttentionKind
from polyattn.spec.sparse import INDEX_FORMS
from polyattn.workload.dice import Dice
from polyattn.workload.judge import judge

CPU = resolve_device("cpu")


NATIVE = [
    pytest.param(
        name, marks=(pytest.mark.skipif(CPU_DEFAULT != "NATIVE_ATTN", reason="not built"), *marks)
    )
    for name, *marks in (("NATIVE_ATTN",), ("NATIVE_MLA", pytest.mark.slow), ("NATIVE_STORE",))
]


BY_ROWS = {
    "NATIVE_ATTN": "rows_",
    "NATIVE_STORE": "cache and not (cache_int8- or cache_fp8_e or scales)",
}  # fmt: skip
"""Cases of row formats, which `test_row_formats_conform` has."""


OF_MANY_LAYERS = "published or combined or masks or pairs or search or process"
"""Cases of many layers or steps each; the example has a thousand random batches beside."""


CHECKED = {"POLYATTN_CHECKS": "1"}
"""Native scratch is NaN before each item: over kivi4, sums were read that nothing had written."""


@pytest.mark.parametrize("backend", [pytest.param("EXAMPLE_ATTN", marks=pytest.mark.slow), *NATIVE])
def test_a_backend_conforms(backend: str) -> None:
    left_out = [BY_ROWS[backend]] if backend in BY_ROWS else []
    left_out += [OF_MANY_LAYERS] if backend in ("NATIVE_ATTN", "EXAMPLE_ATTN") else []
    part = ("-k", f"not ({' or '.join(left_out)})") if left_out else ()
    found = conforms(backend, 26, *part, **CHECKED)
    assert found["cases"] == found["passed"] + found["refused"]
    if backend == "EXAMPLE_ATTN":
        assert found["refused"] > 10


@PARTS
@pytest.mark.parametrize("chosen", ["rows_", "not rows_"])
def test_sdpa_conforms(chosen: str, part: tuple[str, ...]) -> None:
    """NATIVE_ATTN, which serves its layers on most machines, has all published ones in CI."""
    conforms("TORCH_SDPA", 80, "-k", chosen, *part, **CHECKED)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [NATIVE[0], NATIVE[2]])
def test_row_formats_conform(backend: str) -> None:
    conforms(backend, 20 if backend == "NATIVE_STORE" else 130, "-k", BY_ROWS[backend], **CHECKED)


@pytest.mark.slow
@pytest.mark.parametrize("backend", NATIVE[:1])
def test_many_layers_conform(backend: str) -> None:
    """What `test_a_backend_conforms` leaves out of the fast tests."""
    conforms(backend, 100, "-k", f"({OF_MANY_LAYERS}) and not ({BY_ROWS[backend]})", **CHECKED)


@pytest.mark.slow
def test_flex_conforms_on_its_plain_cases() -> None:
    """All cases take eight minutes of compiling; these are mixed batches, and all refusals."""
    chosen = "decoder-mixed or refusal or nan-mixed or feature_alibi-mixed"
    assert conforms("FLEX_ATTENTION", 4, "-k", chosen)["refused"] >= 15


def test_an_unknown_backend_is_a_usage_error() -> None:
    ran, counts = kit("TORCH_SPDA")
    assert ran.returncode == 4 and not counts
    assert "did you mean 'TORCH_SDPA'" in ran.stdout + ran.stderr


ATTENTION = AttentionKind.ATTENTION


def test_the_kit_leaves_the_random_state_alone() -> None:
    """Neither its seed nor its search comes from generators that are the user's."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    config = SimpleNamespace(
        getoption=lambda name, default=None: "TORCH_MERGE" if name.endswith("backend") else default,
        option=SimpleNamespace(),
    )
    kit = _Kit(config)  # type: ignore[arg-type]
    assert kit.seed >= 0
    for backend, check in (("TORCH_SDPA", "plans"), ("TORCH_SCAN", "recurrent_search")):
        case = next(c for c in derive(discover().backends[backend], CPU) if c.check == check)
        run_case(case, backend, CPU, seed=3, budget=0.1)
    assert torch.equal(torch.get_rng_state(), before) and torch.initial_seed() == 5


def test_what_changed_in_the_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()

    def change() -> None:
        monkeypatch.setenv("A_NEW_NAME", "1")
        monkeypatch.setattr(torch.nn.functional, "softmax", print)
        monkeypatch.syspath_prepend(".")
        torch.set_num_threads(before + 1)

    runs_alone(lambda: None)
    with pytest.raises(AssertionError) as caught:
        runs_alone(change)
    torch.set_num_threads(before)
    said = str(caught.value)
    assert f"the number of threads ({before} became {before + 1})" in said
    assert "the environment (A_NEW_NAME)" in said and "sys.path" in said
    assert "functions (torch.nn.functional.softmax)" in said


@pytest.mark.parametrize("each", [False, True])
def test_what_a_first_import_changes_is_told_where_each_step_does(
    monkeypatch: pytest.MonkeyPatch, each: bool
) -> None:
    limit, state, ran = sys.getrecursionlimit(), random.getstate(), []

    def step() -> None:
        if each or not ran:
            monkeypatch.setitem(sys.modules, f"a_new_module_{len(ran)}", sys)
            os.environ["A_NEW_NAME"] = "1"
            random.random()
            sys.setrecursionlimit(limit + 1)
        ran.append(None)

    try:
        if each:
            with pytest.raises(AssertionError, match=r"random state.*A_NEW_NAME.*recursion limit"):
                runs_alone(step)
        else:
            runs_alone(step)
            assert (sys.getrecursionlimit(), random.getstate()) == (limit, state)
            assert "A_NEW_NAME" not in os.environ
        assert len(ran) == 2
    finally:
        os.environ.pop("A_NEW_NAME", None)
        sys.setrecursionlimit(limit)
        random.setstate(state)


def test_a_step_may_compile_where_nothing_is_imported() -> None:
    """torch's compiler raises the recursion limit then too: no compilation is a process' last."""
    limit, compiled = sys.getrecursionlimit(), set()

    def step(shape: int) -> None:
        if shape not in compiled:
            sys.setrecursionlimit(limit + 1)
        compiled.add(shape)

    try:
        for shape in (1, 2):
            runs_alone(partial(step, shape))
            assert sys.getrecursionlimit() == limit
        with pytest.raises(AssertionError, match="recursion limit"):
            runs_alone(lambda: sys.setrecursionlimit(limit + 1))
    finally:
        sys.setrecursionlimit(limit)


def test_a_kit_goes_on_where_its_report_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What passed on the same commit and machine counts, and isn't run again; nothing else does."""
    report = tmp_path / "report.json"
    given = {"backend": "TORCH_MERGE", "report": str(report), "resume": True}
    left_out: list[Any] = []
    config: Any = SimpleNamespace(
        getoption=lambda name, default=None: given.get(name.rpartition("-")[2], default),
        option=SimpleNamespace(),
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)),
    )
    monkeypatch.setattr(plugin, "_commit", lambda: "0123abc")
    first = _Kit(config)
    ids = [case.id for case in first.cases]
    for case in ids[:2]:
        told: Any = {"when": "call", "failed": False, "skipped": False, "passed": True}
        told |= {"outcome": "passed", "user_properties": [("plans", (3, 2))]}
        first.pytest_runtest_logreport(
            SimpleNamespace(nodeid=f"test[{case}]", **told)  # type: ignore[arg-type]
        )
    first._write()
    again = _Kit(config)
    assert again.seed == first.seed and again.summary()["ids"] == sorted(ids[:2])
    counts = ("cases", "passed", "plans", "plans_checked")
    assert [again.summary()[name] for name in counts] == [2, 2, 6, 4]
    items: Any = [SimpleNamespace(nodeid=f"test[{case}]") for case in ids]
    whole = list(items)
    again.pytest_collection_modifyitems(config, items)
    assert (left_out, items) == (whole[:2], whole[2:]) and items
    monkeypatch.setattr(plugin, "_commit", lambda: "0123abd")
    assert _Kit(config).summary()["ids"] == []
    monkeypatch.setattr(plugin, "_commit", lambda: "0123abc+")  # changed: who knows since when
    report.write_text(report.read_text().replace("0123abc", "0123abc+"))
    assert _Kit(config).summary()["ids"] == []


def test_a_search_is_repeated_by_its_seed() -> None:
    """The same layers, the same batches, on any machine: what fails once fails again."""
    drawn: list[list[str]] = []
    for _ in range(2):
        seen: list[str] = []

        def example(draw: Draw, seen: list[str] = seen) -> None:
            seen.append(f"{attention_specs(draw, CLAIMS, BASE)} {draw.lengths()}")

        harness = Harness("TORCH_SDPA", CPU, 7)
        harness.budget = 0.0
        assert drawn_(harness, example) == len(seen) > 0
        drawn.append(seen)
    assert drawn[0] == drawn[1]
    rows = [(1, 107), (1, 570), (5, 75), (11, 19), (12, 370), (1, 29)]
    assert Draw(7).lengths() == rows  # on any machine, whatever is loaded


def test_a_search_that_fails_says_what_it_drew() -> None:
    def wrong(draw: Draw) -> None:
        raise ValueError(f"after {len(draw.lengths())} rows")

    def unclaimed(draw: Draw) -> None:
        require(False)

    harness = Harness("TORCH_SDPA", CPU, 7)
    with pytest.raises(ValueError, match=r"after \d+ rows") as caught:
        drawn_(harness, wrong)
    assert caught.value.__notes__[0].startswith("draw 1 of seed 7: (query, length) [(")
    with pytest.raises(AssertionError, match=f"none of {TRIES} layers"):
        drawn_(harness, unclaimed)


def test_a_rotated_key_may_be_off_by_what_its_pair_s_float32_is() -> None:
    """Where one of a pair is beyond what 8 bits hold, the other may round to either side of a tie."""
    dice, dtype, scale = Dice(5, "cpu"), torch.float8_e4m3fn, 0.05
    pairs = 2000.0 * dice.normal(200_000, 1, 2)
    first, second = pairs[:, 0].double().unbind(-1)
    angle = torch.pi / 2 - torch.atan2(second, first) + 0.005 * dice.normal(200_000)
    cos, sin = angle.cos(), angle.sin()
    turns = torch.stack([cos, sin], 1).float()
    found = quantize(Rotation(turns, None, "neox", 2).applied(pairs), dtype, scale)
    exact = torch.stack([first * cos - second * sin, second * cos + first * sin], -1)[:, None]
    assert bool((found != quantize(exact.float(), dtype, scale)).any())
    harness = RotationHarness("TORCH_STORE", CPU, 0)
    harness.near("key", found, exact, dtype, scale)
    wrong = int((exact[:, 0, 0].abs() / scale < 100.0).nonzero()[0, 0])
    found[wrong, 0, 0] = 2.0 * found[wrong, 0, 0].float()
    said = f"key is wrong, first for token {wrong}: .* of its head"
    with pytest.raises(AssertionError, match=said):
        harness.near("key", found, exact, dtype, scale)


def test_a_failure_says_where_and_what_it_looks_like() -> None:
    """Who wrote the kernel reads of the worst row, of numbers that aren't finite, of an LSE's base."""
    batch = Batch.from_lens([1, 3], [9, 20])
    generator = torch.Generator().manual_seed(1)
    right = torch.randn(4, 2, 8, generator=generator), torch.randn(4, 2, generator=generator) + 3.0
    spec = BASE.replace(dtype="float32", needs_lse=True)

    def said(out: torch.Tensor, lse: torch.Tensor) -> str:
        with pytest.raises(AssertionError) as caught:
            judge("TORCH_SDPA", spec, batch, out, lse, right)
        return str(caught.value)

    wrong = right[0].clone()
    wrong[2, 1] *= -1
    text = said(wrong, right[1])
    assert (
        "1 of 8 rows (token, head): heads 1, sequences 1; the worst is head 1 of token 2 "
        "(sequence 1, query 1 of 3" in text
    )
    assert "place 18 of 20)" in text and "finite" not in text
    wrong[0, 0, 3] = torch.nan
    text = said(wrong, right[1])
    assert (
        "2 of 8 rows (token, head): heads all, sequences all; the worst is head 0 of token 0"
        in text
    )
    assert "(sequence 0, query 0 of 1, place 8 of 9); it isn't finite" in text
    assert "it is the logarithm of base 2, not natural" in said(right[0], right[1] * 1.4426950)
    missing = right[1].clone()
    missing[3, 1] = -torch.inf
    text = said(right[0], missing)
    assert "-inf instead of " in text and "head 1 of token 3" in text and "base 2" not in text


def test_claims_over_rows_of_bytes_alone_are_tested_over_those() -> None:
    """Of such a backend's claims only the formats had cases: no head size, feature or published layer."""
    info = discover().backends["TORCH_SDPA"]
    rows = replace(info.capabilities, kv_cache_dtypes=frozenset({"int4"}), cached=frozenset({True}))
    cases = [c for c in derive(replace(info, capabilities=rows), CPU) if c.check == "numeric"]
    assert {c.spec.kv_cache_dtype for c in cases} == {"int4"}
    assert len({c.spec.head_size for c in cases}) > 5 and any(c.spec.needs_lse for c in cases)


def test_the_last_words_are_the_seed_and_what_failed() -> None:
    config = SimpleNamespace(
        getoption=lambda name, default=None: "TORCH_MERGE" if name.endswith("backend") else default,
        option=SimpleNamespace(),
    )
    kit, lines = _Kit(config), []  # type: ignore[arg-type]
    kit.counts.update({("numeric", "failed"): 3, ("plans", "failed"): 1, ("plans", "passed"): 2})
    kit.failures.update({"numeric-many": "off by 2, " * 9, "numeric-mixed": "off by 3"})
    kit.pytest_terminal_summary(SimpleNamespace(write_line=lines.append))
    assert lines[0].endswith(f"4 failed, 0 skipped, seed {kit.seed}")
    assert lines[1] == "failed, by what was looked at: numeric 3, plans 1"
    assert lines[2] == "the smallest: numeric-mixed: off by 3"
    assert lines[3] == f'to run it alone, add: --polyattn-seed {kit.seed} -k "numeric-mixed"'


def test_a_failed_recurrence_says_where() -> None:
    """A state that was written for a padding row's slot -1 is another sequence's: its slot is named."""
    spec = LayerSpec(
        kind="gdn", num_heads=2, head_size=16, dtype="float32", recurrent=RecurrentSpec()
    )
    dice = Dice(3, "cpu")
    layer = RecurrentWorkload.layer_of(LayerGroup(spec), dice)
    step = RecurrentWorkload(layer, [(3, 3), (2, 9)], dice)
    out, (slot, other) = step.check().clone(), step.slots[:2]
    out[4, 1] += 1.0
    said = (
        "1 of 5 rows; the worst is head 1 of token 4 .sequence 1, query 1 of 2, place 8 of 9.; gdn"
    )
    with pytest.raises(AssertionError, match=f"the output is off by .*: {said}"):
        step.compare(out, None)
    step.states.data[other, 1] *= 2.0
    with pytest.raises(
        AssertionError, match=f"the state is .* head 1 of slot {other} .sequence 1.;"
    ):
        step.compare(step.out, None)
    assert slot != other


def test_a_backend_that_claims_too_little_learns_what() -> None:
    """Of the layer that is nearest to its claims; and what a kernel raises keeps its traceback."""
    config = SimpleNamespace(
        getoption=lambda name, default=None: "TORCH_MLA" if name.endswith("backend") else default,
        option=SimpleNamespace(),
    )
    kit = _Kit(config)  # type: ignore[arg-type]
    caps = kit.info.capabilities
    kit.info = replace(
        kit.info, capabilities=replace(caps, features=caps.features - {"v_head_size"})
    )
    kit.cases = derive(kit.info, CPU)
    assert not [case for case in kit.cases if case.check == "latent"]
    assert "\n  v_head_size: wanted a V head size" in kit.lacks()
    with pytest.raises(AssertionError) as ours:
        judge(
            "A",
            BASE,
            Batch.from_lens([1], [1]),
            torch.ones(1, 1, 8),
            None,
            (torch.zeros(1, 1, 8), None),
        )
    with pytest.raises(AssertionError) as theirs:
        raise AssertionError("a kernel's own")
    assert _asserted_here(ours.value) and not _asserted_here(theirs.value)


@pytest.mark.parametrize("backend", ["TORCH_MLA", "TORCH_SCAN", "EXAMPLE_ATTN"])
def test_a_search_runs_the_kernels(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw that isn't claimed is drawn anew: it doesn't count as one that passed."""
    info = discover().backends[backend]
    kind, ran = load_object(info.path), 0
    run = kind.run

    def counted(*given: object) -> None:
        nonlocal ran
        ran += 1
        run(*given)

    monkeypatch.setattr(kind, "run", counted)
    case = next(c for c in derive(info, CPU) if c.check.endswith("search"))
    run_case(case, backend, CPU, seed=3, budget=0.0)
    assert ran >= EXAMPLES // 2  # of MLA, steps of long queries alone reach another backend


CLAIMS = discover().backends["TORCH_SDPA"].capabilities
BASE = LayerSpec(num_heads=4, head_size=64)


@pytest.mark.parametrize("device", ["cpu", "h200", "mi300x", "tpu-v6e"])
def test_every_backend_gives_cases(device: str) -> None:
    """Whatever a backend claims, and whatever is new to claim: every combination is a layer."""
    for info in discover().backends.values():
        there = resolve_device(device)
        ids = [case.id for case in derive(info, there)]
        assert ids or there.platform not in info.capabilities.platforms, info.name
        assert len(ids) == len(set(ids)), info.name


def test_an_indexer_has_no_case_of_what_it_doesn_t_claim() -> None:
    """Without a claim it is DeepSeek-V3.2's: a ReLU, weights, one token an entry."""
    info = discover().backends["NATIVE_INDEX"]
    indexers = [c.spec.indexer for c in derive(info, CPU)]
    assert {form for i in indexers if i for form in i.forms} == set(INDEX_FORMS)
    plain = replace(info, capabilities=info.capabilities.but(indexes=frozenset()))
    cases = derive(plain, CPU)
    assert {c.batch for c in cases} >= {"mixed", "decode", "bounds", "edges"}
    for i in (c.spec.indexer for c in cases):
        assert i is not None
        assert (i.activation, i.fold, i.cache_dtype, i.within) == ("relu", "weighted", "auto", None)
        assert (i.tokens_per_entry, i.pool, i.forced_first + i.forced_last) == (1, 1, 0)


def test_cases_follow_from_the_claims() -> None:
    """Every claimed value has a numeric case, every unclaimed one a refusal."""
    for info in discover().backends.values():
        caps = info.capabilities
        if "cpu" not in caps.platforms or ATTENTION not in caps.kinds or caps.phases & SERVICES:
            continue
        cases = derive(info, CPU)
        labels = {c.label for c in cases if c.check == "numeric"}
        refused = {c.label for c in cases if c.check == "refusal"}
        for feature in ("sliding_window", "alibi", "learned_sinks", "lse", "logit_soft_cap"):
            claimed = feature in info.capabilities.features
            assert (f"decoder feature {feature}" in labels) == claimed
            assert (feature in refused) == (not claimed)
        ids = [c.id for c in cases]
        assert len(ids) == len(set(ids))


@pytest.mark.parametrize("seed", ["2", "7"])
def test_a_sequence_whose_cache_is_spoiled_reads_it(seed: str) -> None:
    """Of these draws the longest sequence's only token has no id, so its output can't change."""
    options = ("--polyattn-seed", seed, "-k", "latent_isolation-sparse")
    conforms("TORCH_MLA_SPARSE", 4, *options)
