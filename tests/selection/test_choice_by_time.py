"""Who runs a step where times were measured: by prediction, and never otherwise than it was named."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import H100, backend
from polyattn import Attention, Batch, Device, LatentSpec, LayerGroup, LayerSpec, select, settings
from polyattn.errors import SelectionError
from polyattn.families.attention import reference
from polyattn.plugin import declare, hookimpl
from polyattn.registry.capabilities import Capabilities
from polyattn.registry.devices import resolve_device
from polyattn.registry.discovery import discover, refresh, register, unregister
from polyattn.registry.info import BackendInfo, Priority
from polyattn.registry.timings import FORMAT, Timings, read_table, timings
from polyattn.selection.prediction import Predictor, StepShape, shape_of_decodes, shape_of_step
from polyattn.selection.step_choice import ALL, APART, QUEUED, StepChoice, step_choice
from polyattn.spec.recurrent import RecurrentSpec
from polyattn.spec.timing import KINDS, TERMS, TimingModel
from polyattn.tools.cli.models import bundled
from polyattn.workload.base import workload

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32")


def model(
    name: str, kind: str, overlap: bool = False, host: float = 0.0, **coefficients: float
) -> TimingModel:
    values = tuple(coefficients.get(t, 0.0) for t in TERMS)
    return TimingModel(name, kind, values, overlap, host=host)


def by_time(
    models: list[TimingModel], spec: LayerSpec = SPEC, **phases: list[BackendInfo]
) -> StepChoice:
    """The first of each phase is the selection's choice."""
    members = {phase: {i.name: i for i in infos} for phase, infos in phases.items()}
    return StepChoice(spec, models, members, {p: infos[0].name for p, infos in phases.items()})


A = backend("A", phases=frozenset({"prefill", "decode", "mixed"}), decode_query_lens=16)
B = backend("B", phases=frozenset({"prefill", "decode"}))
C = backend("C", phases=frozenset({"prefill", "decode", "mixed"}))
BALANCED = model("A", "decode", launch=20, byte=1e-3)
UNBALANCED = model("B", "decode", launch=5, byte=5e-4, longest=4e-3)


def test_equal_rows_go_to_one_and_a_long_row_among_short_ones_to_the_other() -> None:
    choice = by_time([BALANCED, UNBALANCED], decode=[A, B], prefill=[A, B])
    assert choice.decode([1000] * 64) == "B"
    assert choice.decode([64_000] + [10] * 63) == "A"


def test_a_margin_leaves_a_decode_with_who_is_slower_by_less() -> None:
    for margin, name in ((0.2, "A"), (0.3, "B")):
        choice = by_time(
            [replace(model("A", "decode", launch=20), margin=margin), model("B", "decode", launch=25)],
            decode=[A, B], prefill=[A, B],
        )  # fmt: skip
        assert choice.decode([1000] * 4) == name


def test_short_rows_that_the_usual_decodes_do_not_take_are_a_prefill() -> None:
    (call,) = by_time(
        [model("A", "decode", launch=20)], decode=[B], prefill=[C, A]
    ).calls([3, 3], [50, 50])  # fmt: skip
    assert (call.name, call.phase) == ("C", "prefill")


def test_who_launches_by_run_gets_prompts_of_equal_lengths() -> None:
    dense = replace(model("B", "prefill", launch=10, host=100.0), by_run=True)
    ragged = model("A", "prefill", launch=25, host=250.0)
    choice = by_time([ragged, dense], decode=[A, B], prefill=[A, B])

    def chosen(*lens: int) -> tuple[str, float]:
        (call,) = choice.calls(lens, lens)
        return call.name, call.prices["B"]

    # Neighbours of equal lengths are one run; 20 us on the device, and as the host's time.
    assert chosen(64, 64, 64, 64) == ("B", 100.0)
    assert chosen(64, 64, 32, 32) == ("B", 200.0)
    assert chosen(64, 32, 64) == ("A", 300.0)
    captured = StepShape(4, 64, 64, 16, 544, 4, 3)
    among = choice.predictor.captured(choice.predictor.among("prefill", ["A", "B"]))
    assert choice.predictor.fastest(among, captured) == "A"
    assert choice.predictor.fastest(among, captured._replace(runs=2)) == "B"
    # Rows as long as others whose new tokens are as many, behind a window, aren't neighbours alike.
    spec = SPEC.replace(sliding_window=8)
    assert [shape_of_step(spec, [20, 20], n).runs for n in ([99, 99], [99, 100])] == [1, 2]
    assert shape_of_step(spec, [1, 1], [99, 99]).runs == 2 == shape_of_decodes(spec, [99, 99]).runs


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prediction_is_the_sum_of_its_terms(overlap: bool) -> None:
    numbers = dict(zip(TERMS, (7, 0.5, 2e-3, 1e-3, 3e-5, 1e-4), strict=True))
    spec = SPEC.replace(sliding_window=700)
    predictor = Predictor(spec, [model("A", "prefill", overlap, **numbers)])
    shape = shape_of_step(spec, [5, 700, 1], [2000, 700, 30])
    # By hand: a row reads its own tokens and a window before the first of them, and multiplies a window.
    assert shape.keys == (5 + 699) + 700 + 30
    assert shape.pairs == 5 * 700 + 700 * 701 // 2 + 30
    total = predictor.evaluate(predictor.among("prefill", ["A"]), shape)["A"]
    terms = predictor.terms("prefill", "A", shape)
    assert sum(terms.values()) == pytest.approx(total)
    byte = 2 * (32 + 32) * 4
    busy = [2e-3 * byte * shape.keys, 1e-3 * (byte / 2) * shape.longest]
    busy.append(3e-5 * 4 * 64 * shape.pairs)
    assert terms["launch"] == 7 and terms["item"] == pytest.approx(0.5 * 2 * 3)
    assert terms["token"] == pytest.approx(1e-4 * 4 * 64 * 4 * 706)
    expected = max(busy) if overlap else sum(busy)
    assert total == pytest.approx(7 + 3 + terms["token"] + expected)


def test_decodes_have_the_shape_of_any_step() -> None:
    latent = LayerSpec(
        kind="mla", num_heads=20, head_size=48, v_head_size=32, dtype="float32",
        latent=LatentSpec(rank=64, rope_head_size=16),
    )  # fmt: skip
    for spec in (SPEC, SPEC.replace(sliding_window=100), SPEC.replace(chunk_size=64), latent):
        lens = [1, 99, 100, 101, 5000]
        assert shape_of_decodes(spec, lens) == shape_of_step(spec, [1] * 5, lens)


def test_short_rows_count_whole_tiles_of_queries() -> None:
    """Four tokens of a group of 2 are 8 rows: multiplied as 64. A prompt's are as they are."""
    assert shape_of_step(SPEC, [4, 1], [100, 50]).pairs == (100 + 50) * 64 // 2
    assert shape_of_step(SPEC, [16, 16], [100, 50]).pairs == (100 + 50) * 64 // 2
    wide = SPEC.replace(num_heads=32)
    assert shape_of_step(wide, [5, 2], [100, 50]).pairs == (100 * 128 + 50 * 64) // 16
    assert shape_of_step(SPEC, [17], [17]).pairs == 17 * 18 // 2


def test_tiles_are_counted_over_all_kv_heads() -> None:
    spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=64)
    assert shape_of_step(spec, [1, 33, 32], [50, 50, 50]).tiles == 8 * (1 + 2 + 1)
    assert shape_of_step(spec, [1] * 5, [50] * 5).tiles == 40
    mla = LayerSpec.from_hf_config(bundled("models", "deepseek-v3.json"))[0].replace(num_heads=129)
    assert (
        shape_of_decodes(mla, [50] * 5).tiles == shape_of_step(mla, [1] * 5, [50] * 5).tiles == 10
    )


def test_lengths_may_be_arrays() -> None:
    batch = Batch([0, 1, 2, 42], [7, 300, 90], torch.zeros(3, 20, dtype=torch.int32))
    choice = by_time([BALANCED, UNBALANCED], decode=[A, B], prefill=[A, B])
    assert choice.calls(batch.host_query_lens, batch.host_lens) == choice.calls(
        [1, 1, 40], batch.lens
    )
    assert choice.decode(batch.host_lens) == choice.decode(batch.lens)


def test_short_rows_go_to_whoever_takes_them_as_decodes_if_that_is_faster() -> None:
    models = [model("A", "short", launch=10), model("B", "short", launch=20)]
    (call,) = by_time(models, decode=[B, A], prefill=[B, A]).calls([4] * 3, [50] * 3)
    assert (call.phase, call.name) == ("decode", "A")
    # B takes one token a row as a decode: several are a prefill to it.
    models = [model("A", "short", launch=30), model("B", "short", launch=20)]
    (call,) = by_time(models, decode=[A, B], prefill=[A, B]).calls([4] * 3, [50] * 3)
    assert (call.phase, call.name) == ("prefill", "B")


@pytest.mark.parametrize(("together", "names"), [(25, ["C"]), (35, ["A", "B"])])
def test_one_call_for_a_mixed_step_competes_with_a_pair(together: int, names: list[str]) -> None:
    models = [
        model("A", "decode", launch=10), model("B", "decode", launch=15),
        model("A", "prefill", launch=25), model("B", "prefill", launch=20),
        model("C", "mixed", launch=together),
    ]  # fmt: skip
    choice = by_time(models, decode=[A, B, C], prefill=[A, B, C])
    calls = choice.calls([1, 1, 64], [100, 20, 64])
    assert [call.name for call in calls] == names
    assert (calls[0].rows == ALL) == (len(names) == 1)


def hosted(hosts: dict[str, float]) -> list[TimingModel]:
    """A and B, each at its best in one phase, and C, which takes a whole step in one call."""
    return [
        model("A", "decode", launch=10, host=hosts["A"]),
        model("B", "decode", launch=15, host=hosts["B"]),
        *(
            model(name, kind, launch=launch, product=product, host=hosts[name])
            for kind in ("prefill", "chunked")
            for name, launch, product in (("A", 25, 5e-7), ("B", 20, 1e-6))
        ),
        model("C", "mixed", launch=50, product=1e-6, host=hosts["C"]),
    ]


@pytest.mark.parametrize(
    ("hosts", "tokens", "names"),
    [
        # Two calls of 26 us on the device, and of 120 on the host, beside one of 50 and 60.
        ({"A": 40, "B": 80, "C": 60}, 17, ["C"]),
        # B is the slower for decodes, and its host isn't in the way.
        ({"A": 80, "B": 20, "C": 60}, 17, ["B", "B"]),
        # B's host is in the way, and A's device isn't.
        ({"A": 20, "B": 80, "C": 60}, 17, ["A", "A"]),
        # A long prompt: the device works for longer than the host needs for both calls.
        ({"A": 40, "B": 80, "C": 60}, 2000, ["A", "A"]),
        # What isn't known is taken for the slowest: 80. Two calls of 35 cost the host 80.5.
        ({"A": 35, "B": 80, "C": 0}, 17, ["C"]),
        ({"A": 34, "B": 80, "C": 0}, 17, ["A", "A"]),
        ({"A": 0, "B": 0, "C": 0}, 17, ["A", "B"]),
    ],
)
def test_a_mixed_step_takes_as_long_as_the_slower_of_device_and_host(
    hosts: dict[str, float], tokens: int, names: list[str]
) -> None:
    for level in ("none", "single_token_decode", "any"):  # no graph holds such a step
        spec = SPEC.replace(graph_capture=level)
        choice = by_time(hosted(hosts), spec, decode=[A, B, C], prefill=[A, B, C])
        calls = choice.calls([1, 1, tokens], [100, 20, tokens])
        assert [call.name for call in calls] == names
        for call in calls:
            own = choice.predictor.evaluate(choice.predictor.among(call.kind, "ABC"), call.shape)
            assert dict(call.times) == own
        total = sum(call.times[call.name] for call in calls) - QUEUED * (
            len(calls) > 1 and any(hosts.values())
        )
        host = sum(hosts[name] or max(hosts.values()) for name in names)
        host *= APART if len(calls) > 1 else 1
        assert [call.prices[call.name] for call in calls] == pytest.approx(
            [max(total, host)] * len(calls)
        )


@pytest.mark.parametrize(
    ("level", "decode", "short"),
    [("none", "B", "B"), ("single_token_decode", "A", "B"), ("uniform", "A", "A")],
)
def test_what_a_graph_replays_costs_the_host_nothing(level: str, decode: str, short: str) -> None:
    models = [
        model(name, kind, launch=us, host=host)
        for kind in ("decode", "short")
        for name, us, host in (("A", 10, 60), ("B", 30, 40))
    ]
    both = [A, replace(B, capabilities=A.capabilities)]
    choice = by_time(models, SPEC.replace(graph_capture=level), decode=both, prefill=both)
    assert choice.decode([50] * 3) == choice.calls([1] * 3, [50] * 3)[0].name == decode
    assert choice.calls([4] * 3, [50] * 3)[0].name == short


def test_one_call_that_ranks_below_decode_is_for_measured_times_alone() -> None:
    from polyattn.families.attention.planning import _mixes

    info = discover().backends["FLASH_ATTN_V3"]
    assert "mixed" in info.capabilities.phases and not _mixes(info, SPEC, H100)
    assert _mixes(A, SPEC, H100) and not _mixes(B, SPEC, H100)


def test_chunks_are_another_kind_than_whole_prompts() -> None:
    models = [model("A", "prefill", launch=10), model("B", "prefill", launch=20)]
    models += [model("A", "chunked", launch=20), model("B", "chunked", launch=10)]
    choice = by_time(models, decode=[A, B], prefill=[A, B])
    assert [c.name for c in choice.calls([40, 30], [40, 30])] == ["A"]
    assert [c.name for c in choice.calls([40, 30], [40, 31])] == ["B"]


def test_a_backend_named_for_decodes_keeps_them_in_a_mixed_step() -> None:
    models = [model("A", kind, launch=10) for kind in KINDS]
    models += [model("C", kind, launch=1) for kind in KINDS]
    calls = by_time(models, decode=[A], prefill=[C]).calls([1, 64], [100, 64])
    assert [(call.phase, call.name) for call in calls] == [("decode", "A"), ("prefill", "C")]


def test_what_nothing_was_measured_of_stays_with_the_selection() -> None:
    choice = by_time([model("B", "decode", launch=1)], decode=[A, B], prefill=[A, B])
    (call,) = choice.calls([64], [64])
    assert (call.name, call.times) == ("A", {})
    (call,) = choice.calls([4], [64])
    assert call.name == "A"
    # Nor does B take decodes from A, whose time nobody knows.
    assert choice.decode([64]) == "A"
    (call,) = choice.calls([1], [64])
    assert (call.name, set(call.times)) == ("A", {"B"})


# Tables


def written(path: Path, models: list[TimingModel], **changes: Any) -> Path:
    device = {"platform": "cpu", "name": _cpu().name}
    data = {
        "format": FORMAT, "device": device, "measured": "2026-01-01", "versions": {"torch": _torch()},
        "models": [
            {
                "backend": m.backend, "kind": m.kind, "of": ["torch"],
                "layer": {"head_size": 32} | ({"batch_invariant": m.level} if m.level else {}),
                "overlap": m.overlap, "whole": m.whole, "host": m.host,
                "coefficients": dict(zip(TERMS, m.coefficients, strict=True)),
            }
            for m in models
        ],
    }  # fmt: skip
    path.write_text(json.dumps(data | changes))
    return path


def _cpu() -> Device:
    return select(SPEC, "cpu").device


def _torch() -> str:
    return torch.__version__.split("+")[0]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a table that the setting names."""

    def use(models: list[TimingModel], **changes: Any) -> Path:
        path = written(tmp_path / "timings.json", models, **changes)
        monkeypatch.setenv("POLYATTN_TIMINGS", str(path))
        refresh()
        return path

    yield use
    refresh()


SHORT_KEYS = [
    model("TORCH_SDPA", "decode", launch=1, byte=1e-3),
    model("HPU_ATTN", "decode", launch=500, byte=1e-5),
    # The choice by priority, where it was built.
    model("NATIVE_ATTN", "decode", launch=1e6),
]


def test_a_group_chooses_for_each_step_and_computes_the_same(table: Any) -> None:
    table(SHORT_KEYS)
    selection = select(SPEC.replace(block_size=16), "cpu")
    assert {m.backend for m in selection.timings} >= {"TORCH_SDPA", "HPU_ATTN"}
    assert any("chosen for each step" in note for note in selection.decision.notes)
    group = LayerGroup(selection)
    layer = Attention(group)
    cache = group.allocate_cache(300)
    cache.key.normal_(), cache.value.normal_()
    ran = []
    for lens in ([5, 9], [4000, 30]):
        blocks = torch.randperm(300)[:260].to(torch.int32).repeat(2, 1)
        batch = Batch([0, 1, 2], lens, blocks)
        query = torch.randn(2, 4, 32)
        plan = group.plan(batch)
        ran.append(plan.calls[0].name)
        found = layer(query, None, None, cache, plan)
        expected, _ = reference.forward(group.spec, query, None, None, cache, batch, layer.params)
        torch.testing.assert_close(found, expected.float(), atol=2e-5, rtol=2e-5)
    assert ran == ["TORCH_SDPA", "HPU_ATTN"]


def test_under_a_captured_graph_the_captures_choice_holds(table: Any, monkeypatch: Any) -> None:
    table(SHORT_KEYS)
    group = LayerGroup(select(SPEC, "cpu"))
    blocks = torch.arange(260, dtype=torch.int32)[None]
    captured = group.plan(Batch([0, 1], [5], blocks))
    long = Batch([0, 1], [4000], blocks)
    assert captured.calls[0].name == "TORCH_SDPA"
    assert group.plan(long).calls[0].name == "HPU_ATTN"
    monkeypatch.setattr(StepChoice, "decode", lambda *_: pytest.fail("nobody chooses anew"))
    assert group.plan(long, reuse=captured).calls[0].name == "TORCH_SDPA"


def test_drafts_under_a_captured_graph_are_no_new_choice(table: Any, monkeypatch: Any) -> None:
    """Another choice would be of another phase than the captured call, and refuse the step."""
    table(SHORT_KEYS)
    group = LayerGroup(select(SPEC, "cpu"))
    blocks = torch.arange(260, dtype=torch.int32)[None]
    captured = group.plan(Batch([0, 3], [5], blocks))
    monkeypatch.setattr(StepChoice, "calls", lambda *_: pytest.fail("nobody chooses anew"))
    assert group.plan(Batch([0, 3], [4000], blocks), reuse=captured) is captured


LATENT = LayerSpec(
    kind="mla", num_heads=4, num_kv_heads=4, head_size=32, v_head_size=32, block_size=16,
    latent=LatentSpec(rank=64, rope_head_size=16), dtype="float32",
)  # fmt: skip


@pytest.mark.parametrize("cached", ["auto", "int8_rows"])
def test_decodes_over_latents_go_to_the_fastest_too(table: Any, cached: str) -> None:
    spec = LATENT.replace(kv_cache_dtype=cached)
    usual = select(spec, "cpu").decision.decode
    names = [usual, next(n for n in ("TORCH_MLA", "NATIVE_MLA") if n != usual)]
    table([model(names[0], "decode", launch=1, byte=1e-3), model(names[1], "decode", launch=200)])
    group, ran = LayerGroup(select(spec, "cpu")), []
    for lens in ([5, 9], [4000, 30]):
        step = workload(group, [(1, n) for n in lens], checks=False)
        ran.append(step.plan.calls[0].name)
        step.check()
    assert ran == names
    # Prompts are attended to without the cache, and what a graph has captured goes on running.
    workload(group, [(40, 40)], checks=False).check()
    short, long = (workload(group, [(1, n)], checks=False).batch for n in (5, 4000))
    captured = group.plan(short)
    assert group.plan(long).calls[0].name == names[1]
    assert group.plan(long, reuse=captured).calls[0].name == names[0]


def test_bits_that_must_not_depend_on_the_batch_have_one_backend(table: Any) -> None:
    table([
        model("TORCH_SDPA", "decode", launch=1, byte=1e-3),
        model("NATIVE_ATTN", "decode", launch=500, byte=1e-5),
    ])  # fmt: skip
    selection = select(SPEC.replace(batch_invariant=True), "cpu")
    assert any("one backend runs all steps" in note for note in selection.decision.notes)
    group = LayerGroup(selection)
    blocks = torch.arange(260, dtype=torch.int32)[None]
    ran = {group.plan(Batch([0, 1], [length], blocks)).calls[0].name for length in (5, 4000)}
    assert ran == {selection.backend("decode").name}  # type: ignore[union-attr]


def test_the_cost_of_invariance_is_said(table: Any, caplog: pytest.LogCaptureFixture) -> None:
    table([
        *(model("HPU_ATTN", kind, launch=10) for kind in ("decode", "prefill")),
        *(model(n, k, launch=1330) for n in ("NATIVE_ATTN", "TORCH_SDPA") for k in KINDS),
    ])  # fmt: skip
    free = select(SPEC, "cpu")
    assert not any("costs" in note for note in free.decision.notes)
    said = select(SPEC.replace(batch_invariant=True), "cpu")
    name = said.decision.decode
    assert f"costs: {name} runs decode, not HPU_ATTN; for a decode of 32" in said.explain()
    assert "1,330.0 us are predicted, 133.0 times 10.0 us" in caplog.text


def test_the_cost_of_a_level_that_was_measured_apart_is_said(table: Any) -> None:
    """Of one backend with it and without it; no other level's, and not the free layer's times."""
    name = select(SPEC.replace(batch_invariant="batch"), "cpu").decision.decode
    table([
        *(model(name, kind, launch=10) for kind in KINDS),
        *(replace(model(name, kind, launch=30), level="batch") for kind in KINDS),
        *(replace(model(name, kind, launch=70), level="steps") for kind in KINDS),
    ])  # fmt: skip
    said = select(SPEC.replace(batch_invariant="batch"), "cpu", backend=name).explain()
    assert f"'batch' costs: {name} runs decode, without it too; for a decode of 32" in said
    assert "30.0 us are predicted, 3.0 times 10.0 us" in said and "70.0" not in said
    free = select(SPEC, "cpu", backend=name)
    assert {m.coefficients[0] for m in free.timings} <= {10.0}
    assert "costs" not in free.explain()


def test_who_was_measured_faster_at_a_level_runs_it(table: Any) -> None:
    """Of those measured at it; without a level's times the ranks say, as where a backend is named."""
    spec = SPEC.replace(batch_invariant="batch")
    first = select(spec, "cpu").decision.decode
    able = dict(select(spec, "cpu").decision.candidates)["decode"]
    second = next(name for name in able if name != first)
    free = [
        model(name, kind, launch=us) for kind in KINDS for name, us in ((first, 9), (second, 3))
    ]
    table(free)
    assert select(spec, "cpu").decision.decode == first
    at_level = [replace(each, level="batch") for each in free]
    table([*free, *at_level])
    chosen = select(spec, "cpu").decision
    assert chosen.decode == chosen.prefill == second
    assert select(spec, "cpu", backend=first).decision.decode == first
    table([*free, *at_level[1::2]])
    assert select(spec, "cpu").decision.decode == first  # one alone is compared with nobody


def test_a_refusal_names_who_can_at_what_level_and_time(table: Any) -> None:
    spec = SPEC.replace(batch_invariant="steps", sliding_window=8, sink_tokens=2)
    table([model(n, k, launch=7) for n in ("NATIVE_ATTN", "TORCH_SDPA") for k in KINDS])
    with pytest.raises(
        SelectionError, match=r"at batch_invariant='batch': decode \w+ \(7.0 us for"
    ):
        select(spec, "cpu")
    spec = SPEC.replace(batch_invariant=True)
    with pytest.raises(SelectionError, match=r"where no backend is named: decode \w+ \(7.0 us"):
        select(spec, "cpu", backend="HPU_ATTN")


def test_a_named_backend_is_not_chosen_otherwise(table: Any) -> None:
    table([model("TORCH_SDPA", kind, launch=1) for kind in KINDS])
    group = LayerGroup(select(SPEC, "cpu", backend="HPU_ATTN"))
    batch = Batch([0, 1], [5], torch.zeros(1, 1, dtype=torch.int32))
    assert group.plan(batch).calls[0].name == "HPU_ATTN"


def test_zero_ignores_every_table(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table(SHORT_KEYS)
    monkeypatch.setenv("POLYATTN_TIMINGS", "0")
    assert select(SPEC, "cpu").timings == ()


def test_a_table_of_another_device_changes_nothing_here_and_says_so(table: Any) -> None:
    table(SHORT_KEYS, device={"platform": "cuda", "name": "NVIDIA H200"})
    selection = select(SPEC, "cpu")
    (note,) = [n for n in selection.decision.notes if "timing" in n]
    assert selection.timings == () and "ignored: it is of NVIDIA H200, not of " in note


def test_explain_says_where_times_come_from_or_that_there_are_none(monkeypatch: Any) -> None:
    def said(device: str, **changes: Any) -> list[str]:
        spec = LayerSpec(**{"num_heads": 32, "num_kv_heads": 8, "head_size": 64} | changes)
        notes = select(spec, device).decision.notes
        return [note for note in notes if "tim" in note]

    for device in ("a100", "l40s"):
        (note,) = said(device)
        assert note.startswith("no timing table covers this layer on ")
        assert note.endswith(": polyattn tune --model MODEL")
    assert "priorities choose" in said("h200", dtype="float32")[0]
    # The command measures what this layer asks for.
    (rows,) = said("h200", kv_cache_dtype="int4")
    assert rows.endswith("polyattn tune --model MODEL --kv-cache-dtype int4")
    (level,) = [n for n in said("h100", head_size=128, batch_invariant="steps") if "tune" in n]
    assert level.endswith("polyattn tune --model MODEL --batch-invariant steps")
    # A chip of an architecture that was measured is judged by the layers that are nearest.
    (near,) = said("h100", head_size=128)
    assert "timings_h200.json (NVIDIA H200, the nearest measured layers: bfloat16 over" in near
    assert "heads of 128)" in near
    assert "nearest" not in said("h200", head_size=128)[0]
    # What tune doesn't measure, a CPU, and a user who wants no times.
    assert not said("a100", cached=False) and not said("x86-avx512")
    monkeypatch.setenv("POLYATTN_TIMINGS", "0")
    refresh()
    assert not said("a100") and not said("h100")


def test_explain_says_that_times_choose_nothing_where_one_backend_has_them() -> None:
    spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
    named = select(spec, "h200", backend="prefill=TRITON_ATTN,decode=FLASHINFER").decision.notes
    assert any(n.startswith("times choose nothing: no phase has two") for n in named)
    (free,) = [n for n in select(spec, "h200").decision.notes if "times" in n]
    assert free.startswith("the backend is chosen for each step, by times measured in ")


def test_stale_models_are_named_and_ignored(table: Any) -> None:
    path = table(SHORT_KEYS, versions={"torch": "1.0.0"})
    selection = select(SPEC, "cpu")
    assert selection.timings == ()
    (note,) = [n for n in selection.decision.notes if str(path) in n]
    assert "HPU_ATTN, NATIVE_ATTN, TORCH_SDPA: measured with torch 1.0.0" in note
    assert _torch() in note and note.endswith("is installed; measure again: polyattn tune")


def test_a_broken_table_is_named_and_ignored(table: Any, tmp_path: Path) -> None:
    path = table(SHORT_KEYS)
    path.write_text("{")
    refresh()
    selection = select(SPEC, "cpu")
    assert selection.timings == ()
    assert any("can't be read" in note and str(path) in note for note in selection.decision.notes)


BAD_MODELS = {
    "kind='sideways'": {"kind": "sideways"},
    "must be finite": {"coefficients": dict.fromkeys(TERMS, -1)},
    "not all zero": {"coefficients": dict.fromkeys(TERMS, 0)},
    "exactly launch": {"coefficients": {"launch": 1}},
    "colour": {"layer": {"colour": "red"}},
    "list of packages": {"of": "torch"},
    "overlap='yes'": {"overlap": "yes"},
    "whole=-1": {"whole": -1},
    "whole=True": {"whole": True},
    "host=-1.0 must be finite": {"host": -1},
    "host=inf must be finite": {"host": float("inf")},
    "deal='cards' must be empty or one of even, padded": {"deal": "cards"},
    "deal='cut' needs the device's processors, 1 to 4096; they are 0": {"deal": "cut"},
}


@pytest.mark.parametrize("said", BAD_MODELS)
def test_a_bad_model_is_named_and_the_rest_counts(said: str, tmp_path: Path) -> None:
    path = written(tmp_path / "t.json", SHORT_KEYS)
    data = json.loads(path.read_text())
    data["models"][0] |= BAD_MODELS[said]
    path.write_text(json.dumps(data))
    found = read_table(path)
    assert [e.model.backend for e in found.entries] == ["HPU_ATTN", "NATIVE_ATTN"]
    assert len(found.problems) == 1 and said in found.problems[0]


def test_a_profile_has_what_was_measured_on_such_a_device(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t.json", SHORT_KEYS, device={"platform": "cuda", "name": "NVIDIA H200"},
        versions={"torch": "1.0.0"},
    )  # fmt: skip
    found = Timings((read_table(path),))
    # A profile assumes what was measured with; a device has what is installed there.
    assert len(found.models(SPEC, resolve_device("h200"))) == 3
    real = Device("cuda", "sm_90", "NVIDIA H200", torch_device="cuda:0")
    assert found.models(SPEC, real) == () and len(found.notes(SPEC, real, ())) == 2
    assert found.models(SPEC, H100) == () and len(found.notes(SPEC, H100, ())) == 1


def test_capped_layers_have_times_of_their_own_where_they_were_measured() -> None:
    """On an H100 prompts of 256 with a cap take TRITON_ATTN twice FLASH_ATTN_V3's time, others don't."""
    free = LayerSpec(num_heads=32, num_kv_heads=8, head_size=256)
    capped = free.replace(logit_soft_cap=50.0)
    (h100,) = (t for t in timings(settings.current_settings()).tables if "H100" in t.device)
    queries, lens = [512] * 4, [8704] * 4
    names = {}
    for spec in (free, capped):
        models = h100.models(spec, resolve_device("h100"))
        assert len({(m.backend, m.kind) for m in models}) == len(models)
        among = Predictor(spec, models).among("chunked", ["TRITON_ATTN", "FLASH_ATTN_V3"])
        times = Predictor.evaluate(among, shape_of_step(spec, queries, lens))
        names[spec] = times["TRITON_ATTN"] / times["FLASH_ATTN_V3"]
    assert names[capped] > 1.5 > names[free]


@pytest.mark.parametrize("device", ["h100", "h200"])
def test_heads_of_192_have_their_own_times(device: str) -> None:
    """8/4 heads, a prompt of the judging set on an H200: TRITON_ATTN 3,978 us, FLASH_ATTN_V3 2,262."""
    spec = LayerSpec(num_heads=8, num_kv_heads=4, head_size=192)
    choice = step_choice(select(spec, device))
    assert choice is not None
    for queries, lens in (([9000, 9000], [9000, 9000]), ([2000], [30_000])):
        assert [call.name for call in choice.calls(queries, lens)] == ["FLASH_ATTN_V3"]


@pytest.mark.parametrize("size", [64, 128])
def test_what_keeps_a_hopper_hosts_busy_is_not_chosen(size: int) -> None:
    """32 layers of 32 decodes and a prompt of 256: 150 us each in two calls, 99 in one (heads of 128)."""
    spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=size)
    selection = select(spec, "h100")
    queries, lens = [1] * 32 + [256], [1500] * 32 + [256]
    choice = step_choice(selection)
    alone = step_choice(
        replace(selection, timings=tuple(replace(m, host=1.0) for m in selection.timings))
    )
    assert choice is not None and alone is not None
    assert [call.name for call in choice.calls(queries, lens)] == ["FLASH_ATTN_V3"]
    assert len(alone.calls(queries, lens)) == 2


class WithTables:
    def __init__(self, answer: Any):
        self.answer = answer

    @hookimpl
    def polyattn_api_versions(self) -> tuple[int, int]:
        return (1, 1)

    @hookimpl
    def polyattn_timings(self) -> Any:
        return self.answer


def test_a_plugin_carries_tables_and_the_users_own_comes_first(table: Any, tmp_path: Path) -> None:
    theirs = written(tmp_path / "theirs.json", [model("TORCH_SDPA", "decode", launch=9)])
    register(WithTables([str(theirs)]), "tables")
    try:
        carried = [t.path for t in timings(settings.current_settings()).tables]
        assert str(theirs) in carried
        own = table(SHORT_KEYS)
        assert [t.path for t in timings(settings.current_settings()).tables] == [str(own), *carried]
    finally:
        unregister("tables")


@pytest.mark.parametrize("answer", ["/a.json", [Path("/a.json")], ["a.json"], ["/a\n.json"], [3]])
def test_a_plugin_that_answers_nonsense_is_broken(answer: Any) -> None:
    register(WithTables(answer), "tables")
    try:
        (record,) = [p for p in discover().plugins if p.name == "tables"]
        assert record.status == "broken" and "polyattn_timings()" in record.problem
    finally:
        unregister("tables")


WRONG = BackendInfo(
    name="LIAR",
    summary="",
    path="test_verify:Wrong",
    capabilities=Capabilities(platforms={"cpu": ()}, dtypes=frozenset({"float32"})),
    priorities=(Priority(score=1),),
)
"""A backend that is wrong, and would be chosen by its times alone."""
declare(__name__, api_versions=(1, 1), backends=[WRONG])


def test_a_candidate_is_verified_before_it_may_run(table: Any, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "workload"))
    register(sys.modules[__name__], "slow")
    try:
        table([model("LIAR", "decode", launch=1), *SHORT_KEYS])
        assert "LIAR" in {m.backend for m in select(SPEC, "cpu").timings}
        verified = select(SPEC, "cpu", verify=True)
        assert "LIAR" not in {m.backend for m in verified.timings}
        assert any(v.backend == "LIAR" and not v.accepted for v in verified.decision.verdicts())
    finally:
        unregister("slow")


@pytest.mark.parametrize(
    ("changes", "prefill"),
    [
        ({"head_size": 512}, "TRITON_ATTN"),
        ({"head_size": 576}, "TORCH_SDPA"),
        # What torch's kernels lack goes one sequence at a time.
        ({"head_size": 576, "logit_soft_cap": 50.0}, "TRITON_ATTN"),
    ],
)
def test_padded_heads_prompts_go_to_torch_on_a_gpu(changes: dict[str, Any], prefill: str) -> None:
    decision = select(LayerSpec(**{"num_heads": 32, "num_kv_heads": 4, **changes}), "h100").decision
    assert (decision.prefill, decision.decode) == (prefill, "TRITON_ATTN")


@pytest.mark.parametrize(
    ("changes", "torch_first"),
    [
        ({"head_size": 40}, True),
        ({"head_size": 64}, False),
        ({"head_size": 80}, True),
        ({"head_size": 128}, False),
        ({"head_size": 160}, True),
        (
            {"head_size": 80, "cached": True, "role": "cross"},
            False,
        ),  # torch copies pages: 1.9 to 3.9 times
        ({"head_size": 80, "sliding_window": 9}, False),  # torch's kernels mask what it hides
    ],
)
def test_encoders_heads_without_a_kernel_of_hoppers_go_to_torch(
    changes: dict[str, Any], torch_first: bool
) -> None:
    """On an H100 torch takes 0.3 to 1.03 of TRITON_ATTN's time; of 64 and of 128 as much or more."""
    spec = LayerSpec(**({"num_heads": 16, "cached": False, "causal": False} | changes))
    names = [info.name for info in dict(select(spec, "h100").candidates)["prefill"]]
    assert (names.index("TORCH_SDPA") < names.index("TRITON_ATTN")) is torch_first


@pytest.mark.parametrize(
    ("heads", "tokens", "lens", "best"),
    [
        (16, 1, [8192], "TRITON_MLA"),  # 28 us; 30, FLASHINFER_MLA 34
        (16, 1, [131_072, *[1024] * 63], "TRITON_MLA"),  # 92; 98, 108
        (16, 1, [4096] * 64, "TRITON_MLA FLASHINFER_MLA"),  # 87.3, 87.3; 97
        (40, 1, [159] * 40, "TRITON_MLA FLASH_ATTN_MLA FLASHINFER_MLA"),  # about 20
        (128, 1, [2500] * 90, "TRITON_MLA"),
        (
            128,
            3,
            range(1000, 9000, 200),
            "TRITON_MLA FLASHMLA",
        ),  # 317, 322; the others 402 and more
    ],
)
def test_latents_go_to_the_fastest_by_their_libraries_schedules(
    heads: int, tokens: int, lens: Sequence[int], best: str
) -> None:
    """As measured on H200s, the device alone; an H100 has the H200's times."""
    spec = LayerSpec(
        kind="mla", num_heads=heads, head_size=192, v_head_size=128,
        latent=LatentSpec(rank=512, rope_head_size=64),
    )  # fmt: skip
    for device in ("h100", "h200"):
        choice = step_choice(select(spec, device))
        assert choice is not None
        (call,) = choice.calls([tokens] * len(lens), list(lens))
        assert min(call.times, key=call.times.__getitem__) in best.split()


def test_kimis_prompts_go_to_the_kernel_in_chunks() -> None:
    spec = LayerSpec(kind="kda", num_heads=32, head_size=128, recurrent=RecurrentSpec(qk_norm=True))
    assert select(spec, "h100").decision.prefill == "TRITON_SCAN"
