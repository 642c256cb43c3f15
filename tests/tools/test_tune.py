"""Measuring, fitting and writing timing tables; lengths as they are drawn."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from polyattn import Batch, Device, LatentSpec, LayerGroup, LayerSpec, Role, select
from polyattn.errors import SettingsError
from polyattn.families.attention.roofline import visible_pairs
from polyattn.registry.devices import resolve_device
from polyattn.registry.discovery import discover
from polyattn.registry.timings import read_table
from polyattn.selection.prediction import Form, Predictor, StepShape, shape_of_step
from polyattn.settings import Settings
from polyattn.spec.timing import TERMS, TimingModel
from polyattn.tools.cli.models import bundled
from polyattn.tools.cli.options import TuneOptions
from polyattn.tools.cli.tuning import show
from polyattn.tools.lengths import DISTRIBUTIONS, lengths_named, of_trace, redrawn
from polyattn.tools.replay.trace import read_trace
from polyattn.tools.tune import tables, tuning
from polyattn.tools.tune.fitting import LEAST_POINTS, Fit, Point, features, fit, predict
from polyattn.tools.tune.measuring import Measured, Times, size_for
from polyattn.tools.tune.points import Measurement, PointsFile
from polyattn.tools.tune.shapes import COUNTS, Size, StepSample, counts_of, layers, samples
from polyattn.tools.tune.tables import fits, margin_of, margins, mean, regrets
from polyattn.workload.clock import Clock
from tools.commands import here

HEADS = [
    LayerSpec(num_heads=h, num_kv_heads=k, head_size=64) for h, k in ((32, 8), (8, 8), (16, 1))
]
SIZE = Size(keys=200_000, pairs=2_000_000, longest=100_000)
TRACE = {"trace": of_trace(bundled("azure_conversation.csv"))}


def points(kind: str, overlap: bool, coefficients: tuple[float, ...], noise: float) -> list[Point]:
    """Times that the formula itself gives, and a little noise."""
    source, found = random.Random(1), []
    for spec in HEADS:
        predictor = Predictor(spec, [TimingModel("A", kind, coefficients, overlap)])
        for step, sample in enumerate(samples(SIZE, 5, TRACE)):
            if sample.kind == kind:
                shape = shape_of_step(spec, sample.queries, sample.lens)
                us = predictor.evaluate(predictor.among(kind, ["A"]), shape)["A"]
                found.append(Point(spec, shape, us * source.lognormvariate(0, noise), step))
    return found


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_a_fit_predicts_what_it_was_not_fitted_to(kind: str, overlap: bool) -> None:
    truth = (6.0, 0.02, 4e-7, 3e-5, 2e-9, 5e-6)
    made = fit(points(kind, overlap, truth, 0.02))
    assert made is not None and made.error < 0.03
    assert made.form.overlap == overlap
    assert all(value >= 0 for value in made.coefficients)
    # Of other layers and lengths, which it hasn't seen.
    other = LayerSpec(num_heads=28, num_kv_heads=4, head_size=64)
    shape = shape_of_step(
        other, *(([1] * 40, [5000] * 40) if kind == "decode" else ([1, 900], [9000, 9000]))
    )
    guess, right = (
        Predictor(other, [TimingModel("A", kind, tuple(c), overlap)])
        for c in (made.coefficients, truth)
    )
    us = [p.evaluate(p.among(kind, ["A"]), shape)["A"] for p in (guess, right)]
    assert us[0] == pytest.approx(us[1], rel=0.1)


@pytest.mark.parametrize("window", [None, 1, 100, 700])
def test_products_are_those_that_are_seen(window: int | None) -> None:
    spec = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64, sliding_window=window)
    for query, length in ((500, 500), (300, 900), (50, 5000), (17, 60), (101, 101), (99, 150)):
        shape = shape_of_step(spec, [query, query], [length, length + 7])
        seen = visible_pairs(spec, query, length) + visible_pairs(spec, query, length + 7)
        assert shape.pairs == seen


def test_the_fit_predicts_as_the_choice_does() -> None:
    shapes = [StepShape(3, 9, 700, 500, 4000, 24, 2), StepShape(1, 1, 90_000, 90_000, 90_000, 8, 1)]
    coefficients = (5.0, 0.3, 2e-6, 4e-5, 1e-8, 3e-6)
    for overlap, whole, by_run in product((False, True), (0, 24), (False, True)):
        for spec in HEADS:
            model = TimingModel("A", "short", coefficients, overlap, whole=whole, by_run=by_run)
            predictor = Predictor(spec, [model])
            among = predictor.among("short", ["A"])
            table = features(
                [Point(spec, shape, 1.0, 0) for shape in shapes], Form(overlap, whole, by_run)
            )
            found = predict(table, np.array(coefficients), overlap)
            expected = [predictor.evaluate(among, shape)["A"] for shape in shapes]
            np.testing.assert_allclose(found, expected)
            terms = [sum(predictor.terms("short", "A", shape).values()) for shape in shapes]
            np.testing.assert_allclose(terms, expected)
            slower = (among[0]._replace(name="B", factor=1.01), *among)
            assert {predictor.fastest(slower, shape) for shape in shapes} == {"A"}
            faster = (among[0]._replace(name="B", factor=0.99), *among)
            assert {predictor.fastest(faster, shape) for shape in shapes} == {"B"}


def test_a_fit_finds_from_how_many_tiles_on_keys_stay_whole() -> None:
    """A library that cuts keys until its grid is full: the longest row counts from there on."""
    truth, found = (10.0, 0.0, 3e-7, 2e-5, 0.0, 0.0), []
    source = random.Random(4)
    for spec in HEADS:
        cutting = TimingModel("A", "decode", truth, True, whole=256)
        predictor = Predictor(spec, [cutting])
        for step, sample in enumerate(samples(SIZE, 5, TRACE)):
            if sample.kind == "decode":
                shape = shape_of_step(spec, sample.queries, sample.lens)
                us = predictor.evaluate(predictor.among("decode", ["A"]), shape)["A"]
                found.append(Point(spec, shape, us * source.lognormvariate(0, 0.02), step))
    made = fit(found)
    assert made is not None and made.error < 0.03
    between = sorted({p.shape.tiles for p in found})
    assert not [n for n in between if min(256, made.form.whole) <= n < max(256, made.form.whole)]
    # Rows enough and one much longer than the rest: as long as that one alone takes.
    spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=64)
    cutting = replace(cutting, coefficients=made.coefficients, **made.form._asdict())
    predictor = Predictor(spec, [cutting])
    among = predictor.among("decode", ["A"])
    few, many = (
        predictor.evaluate(among, shape_of_step(spec, [1] * n, [100_000] + [100] * (n - 1)))["A"]
        for n in (8, 64)
    )
    assert many > 2 * few


def test_an_outlier_does_not_lead_the_fit_astray() -> None:
    clean = points("decode", False, (6.0, 0.0, 4e-7, 0.0, 0.0, 0.0), 0.01)
    spoilt = [
        Point(p.spec, p.shape, 50 * p.us, p.step) if i == 7 else p for i, p in enumerate(clean)
    ]
    made = fit(spoilt)
    assert made is not None and made.error < 0.03


def test_too_few_points_are_no_fit() -> None:
    assert fit(points("decode", False, (6.0, 0.0, 4e-7, 0.0, 0.0, 0.0), 0.0)[:11]) is None


def test_samples_are_of_every_kind_and_within_bounds() -> None:
    found = list(samples(SIZE, 3, TRACE))
    assert found == list(samples(SIZE, 3, TRACE)) != list(samples(SIZE, 4, TRACE))
    for kind, count in COUNTS.items():
        mine = [s for s in found if s.kind == kind]
        assert len(mine) == count and {s.lengths for s in mine} == {*DISTRIBUTIONS, "trace"}
    # Whoever stops half-way has half of each.
    half = [s.kind for s in found[: len(found) // 2]]
    assert all(abs(half.count(kind) - count / 2) <= 1 for kind, count in COUNTS.items())
    for s in found:
        assert sum(s.lens) <= SIZE.keys + 17 * len(s.lens) and max(s.lens) <= SIZE.longest
        assert all(1 <= q <= n for q, n in zip(s.queries, s.lens, strict=True))
        most, least = max(s.queries), min(s.queries)
        expected = {
            "decode": most == 1, "short": least >= 2 and most <= 16,
            "prefill": least > 16 and s.queries == s.lens, "mixed": least == 1 and most > 16,
            "chunked": least > 16 and s.queries != s.lens,
        }  # fmt: skip
        assert expected[s.kind], s


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_hold_as_many_tokens(name: str) -> None:
    lens = lengths_named(name)(64, 1000, random.Random(2))
    assert len(lens) == 64 and min(lens) >= 1
    assert sum(lens) == pytest.approx(64_000, abs=64)
    largest = {"constant": 1000, "one-long": 32_000}.get(name)
    assert largest is None or max(lens) == pytest.approx(largest, rel=0.02)
    assert lengths_named(name)(1, 1000, random.Random(2)) == [1000]


def test_a_traces_lengths_are_its_requests() -> None:
    path = bundled("azure_conversation.csv")
    requests = read_trace(path)
    for n in lengths_named(f"trace:{path}")(50, 1, random.Random(0)):
        assert any(r.prompt <= n < r.prompt + r.output for r in requests)


def test_redrawn_batches_keep_their_queries() -> None:
    rows = [(512, 512)] * 3 + [(1, 1000)] * 8 + [(4, 3000)]
    found = redrawn(rows, "zipf", 1)
    assert found == redrawn(rows, "zipf", 1) != redrawn(rows, "zipf", 2)
    prompts = [(q, n) for q, n in found if q == n]
    rest = [(q, n) for q, n in found if q != n]
    assert len(prompts) == 3 and sum(n for _, n in prompts) == pytest.approx(1536, abs=3)
    assert sorted(q for q, _ in rest) == [1] * 8 + [4]
    assert sum(n for _, n in rest) == pytest.approx(11_000, abs=9)


@pytest.mark.parametrize("text", ["zip", "trace", "trace:", "", "uniform:3"])
def test_unknown_lengths_are_an_error(text: str) -> None:
    with pytest.raises(SettingsError, match="unknown"):
        lengths_named(text)


def sample(kind: str = "decode") -> StepSample:
    return StepSample(kind, "zipf", (1, 1), (30, 40))


def test_a_table_has_the_hosts_time_of_each_model() -> None:
    truths = {"TORCH_SDPA": CROSSING["A"], "HPU_ATTN": CROSSING["B"]}
    made = measurements(truths, 0.0)
    made = [replace(m, host=40.0 + m.step % 3) for m in made]
    data = tables.table(fits(made), select(HEADS[0], "cpu").device, discover())
    assert [m["host"] for m in data["models"]] == [41.0, 41.0]


def test_a_model_gives_way_only_to_one_of_as_many_points(tmp_path: Path) -> None:
    """The file of points is gone, so what a table has was fitted to more of them than there are now."""
    path, device = tmp_path / "t.json", select(HEADS[0], "cpu").device
    full = measurements({"TORCH_SDPA": CROSSING["A"], "HPU_ATTN": CROSSING["B"]}, 0.0)
    fewer = [m for m in full if m.step % 2 or m.backend == "TORCH_SDPA"]
    alone = [m for m in full if m.backend == "TORCH_SDPA"]

    def over(made: list[Measurement], changes: dict[str, Any]) -> tuple[Any, list[str]]:
        """What is written over a table of all points, with changes."""
        tables.write(tables.table(fits(full), device, discover()) | changes, path)
        assert read_table(path).problems == ()
        data = tables.table(fits(made), device, discover())
        return tables.with_fuller(data, path, device, made)

    was = tables.table(fits(full), device, discover())
    count = was["models"][0]["points"]
    few = tables.table(fits(fewer), device, discover())
    assert few["models"][0]["points"] < count == few["models"][1]["points"]
    for made, points in ((fewer, few["models"][0]["points"]), (alone, 0)):
        data, (note,) = over(made, {})
        assert data == was
        assert note.startswith("HPU_ATTN, decode, bfloat16 over bfloat16, heads of 64: the table's")
        assert f"fitted to {count} points, these are {points}; to start over, remove {path}" in note
    # Of as many points one backend's may have no model: of such a kernel's chunks a mixed step is one.
    without = was | {"models": was["models"][1:]}
    data, notes = tables.with_fuller(without, path, device, full)
    assert (data["models"], notes) == (without["models"], [])
    # As many points replace it; so do fewer, over what doesn't count here, or can't be read.
    faster = [replace(m, us=m.us / 2) for m in full if m.us]
    assert over(faster, {}) == (tables.table(fits(faster), device, discover()), [])
    for changes in (
        {"device": was["device"] | {"name": "another"}},
        {"versions": was["versions"] | {"polyattn-cpu": "0.0.1", "polyattn-hpu": "0.0.1"}},
    ):
        assert over(fewer, changes) == (few, [])
    path.write_text("no table")
    assert tables.with_fuller(few, path, device, fewer) == (few, [])


def test_points_go_on_where_they_ended(tmp_path: Path) -> None:
    path, facts = tmp_path / "a" / "p.jsonl", {"device": "X", "seed": 1}
    first = PointsFile(path, facts)
    first.add(Measurement(HEADS[0], 0, sample(), "A", 12.5))
    first.start(HEADS[0], 1, sample(), "A")
    with path.open("a") as file:
        file.write('{"spec": {"num_he')  # the process ended here
    again = PointsFile(path, facts)
    assert [m.us for m in again.measured()] == [12.5]
    assert [m.cannot for m in again.failed()] == ["the process ended in it"]
    assert again.found[HEADS[0], 0, "A"].sample == sample()
    with pytest.raises(SettingsError, match="device: X, now Y"):
        PointsFile(path, {"device": "Y", "seed": 1})


@pytest.mark.parametrize("text", ["", "[]\n", '{"facts": {"a": 1}}\n{"spec": 3}\n', "nonsense\n"])
def test_a_file_that_holds_no_points_is_an_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(SettingsError, match="remove it"):
        PointsFile(path, {"a": 1})


def measurements(truths: dict[str, tuple[float, ...]], noise: float) -> list[Measurement]:
    """Decodes of each layer, their times by the formula, and a little noise."""
    source, made = random.Random(3), []
    for name, truth in truths.items():
        for spec in HEADS:
            predictor = Predictor(spec, [TimingModel(name, "decode", truth)])
            for step, sample in enumerate(samples(SIZE, 5, TRACE)):
                if sample.kind == "decode":
                    m = Measurement(spec, step, sample, name, 1.0)
                    among = predictor.among("decode", [name])
                    us = predictor.evaluate(among, m.point().shape)[name]
                    made.append(replace(m, us=us * source.lognormvariate(0, noise)))
    return made


CROSSING = {"A": (20.0, 0.0, 1e-7, 0.0, 0.0, 0.0), "B": (5.0, 0.0, 1e-6, 0.0, 0.0, 0.0)}


def test_what_a_choice_costs_is_told_by_held_out_predictions() -> None:
    costs = regrets(fits(measurements(CROSSING, 0.0)))["decode"]
    assert len(costs) == 3 * COUNTS["decode"] and max(costs) < 1.02


def test_who_is_predicted_well_needs_no_margin() -> None:
    """However near its times are to the favourite's."""
    near = {"A": CROSSING["A"], "B": tuple(1.04 * c for c in CROSSING["A"])}
    (kept,) = margins(fits(measurements(near, 0.03))).values()
    assert kept == {"A": 0, "B": 0}
    # One that is much faster at some steps gets them.
    found = fits(measurements(CROSSING, 0.03))
    ((key, kept),) = margins(found).items()
    assert sorted(kept.values())[0] == 0 and max(kept.values()) < 0.5
    assert mean(regrets(found)["decode"]) < 1.01
    for name, margin in kept.items():
        assert margin_of((*key, name), 0.2, {key: kept}) == margin
    assert margin_of((key[0], "mixed", "A"), 0.2, {key: kept}) == 0.2


def test_each_backend_has_a_margin_of_its_own() -> None:
    """One that is predicted badly doesn't keep one that is predicted well from its steps."""
    layer = (("head_size", 64),)
    sample, spec = StepSample("decode", "x", (1,), (64,)), HEADS[0]
    truth = {
        "A": [(10.0, 10.0)] * 20,
        "B": [(8.0, 8.0), (11.0, 11.0)] * 10,
        "C": [(7.0, 30.0)] * 20,
    }
    by_class = {
        (layer, "decode", name): (
            Fit((1.0,) * 6, Form(), tuple(p for p, _ in values), 0.0),
            [Measurement(spec, step, sample, name, us) for step, (_, us) in enumerate(values)],
        )
        for name, values in truth.items()
    }
    (kept,) = margins(by_class).values()
    assert kept["B"] == 0 and kept["A"] < 0.2 and kept["C"] > 0.3
    assert max(regrets(by_class)["decode"]) == 1


def test_launches_by_run_are_told_from_launches_by_call() -> None:
    """A dense kernel is called once for each run of equal lengths, and its host time is so, too."""
    truth, source = (30.0, 0.0, 1e-7, 0.0, 1e-9, 0.0), random.Random(4)
    for by_run in (False, True):
        made = []
        for spec in HEADS:
            model = TimingModel("A", "prefill", truth, by_run=by_run)
            predictor = Predictor(spec, [model])
            among = predictor.among("prefill", ["A"])
            for step, lens in enumerate(
                [source.choice((300, 400)) for _ in range(source.randint(1, 9))] for _ in range(12)
            ):
                sample = StepSample("prefill", "x", tuple(lens), tuple(lens))
                m = Measurement(spec, step, sample, "A", 1.0)
                shape = m.point().shape
                us = predictor.evaluate(among, shape)["A"] * source.lognormvariate(0, 0.02)
                made.append(replace(m, us=us, host=100.0 * (shape.runs if by_run else 1)))
        ((key, (fitted, members)),) = fits(made).items()
        assert fitted.form.by_run == by_run
        by_class = {(*key[:2], "TORCH_SDPA"): (fitted, members)}
        (model,) = tables.table(by_class, resolve_device("cpu"), discover())["models"]
        assert (model.get("by_run", False), model["host"]) == (by_run, 100.0)


@pytest.mark.parametrize("deal", ["even", "cut", "pages"])
def test_a_fit_finds_how_latents_are_dealt_out(deal: str, tmp_path: Path) -> None:
    truth, source, made = (20.0, 8.0, 6e-8, 1e-4, 3e-9, 1e-6), random.Random(6), []
    latent = LatentSpec(rank=512, rope_head_size=64)
    for heads in (72, 96, 128):
        spec = LayerSpec(kind="mla", num_heads=heads, head_size=192, v_head_size=128, latent=latent)
        model = TimingModel("A", "decode", truth, deal=deal, processors=132)
        among = Predictor(spec, [model]).among("decode", ["A"])
        for step, sample in enumerate(samples(SIZE, 5, TRACE, counts_of(spec))):
            if sample.kind == "decode":
                m = Measurement(spec, step, sample, "A", 1.0)
                us = Predictor.evaluate(among, m.point(132).shape)["A"]
                made.append(replace(m, us=us * source.lognormvariate(0, 0.01)))
    ((key, (fitted, members)),) = fits(made, 132).items()
    assert fitted.form.deal == deal and fitted.error < 0.02
    # The table says to how many processors.
    by_class = {(*key[:2], "TORCH_SDPA"): (fitted, members)}
    tables.write(tables.table(by_class, resolve_device("h200"), discover(), 132), tmp_path / "t")
    (entry,) = read_table(tmp_path / "t").entries
    assert (entry.model.deal, entry.model.processors) == (deal, 132)
    assert fits(made)[key][0].form.deal == ""  # of a chip whose processors aren't known


def test_each_of_a_ways_kernels_is_fitted_to_all_the_steps_that_it_takes() -> None:
    """Chunks in low tiles are short rows to the fit, and short rows in tall tiles chunks."""
    truths = {
        "short": (9.0, 1.0, 1e-7, 0.0, 5e-9, 3e-7), "chunked": (14.0, 2.0, 5e-8, 0.0, 2e-9, 1e-7)
    }  # fmt: skip
    models = [TimingModel("A", k, t, deal="whole", processors=132) for k, t in truths.items()]
    source, made = random.Random(8), []
    for heads in ((6, 6), (12, 6), (16, 2)):
        spec = LayerSpec(num_heads=heads[0], num_kv_heads=heads[1], head_size=128)
        predictor = Predictor(spec, models)
        steps = samples(SIZE, 5, TRACE, {"short": 40, "chunked": 40})
        for step, sample in enumerate(steps):
            m = Measurement(spec, step, sample, "A", 1.0)
            us = predictor.among(sample.kind, ["A"])[0].us(m.point(132).shape)
            made.append(replace(m, us=us * source.lognormvariate(0, 0.01)))
    found = {kind: fit for (_, kind, _), fit in fits(made, 132).items()}
    for kind, (fitted, members) in found.items():
        assert fitted.form.deal == "whole" and fitted.error < 0.02
        assert {m.point(132).shape.dealt["whole"].kind or kind for m in members} == {kind}
    kinds = {kind: {m.sample.kind for m in members} for kind, (_, members) in found.items()}
    assert kinds["short"] == kinds["chunked"] == {"short", "chunked"} and kinds["low"] == {"short"}
    assert sum(len(members) for _, members in found.values()) == len(made)


def test_a_margin_is_beaten_or_not() -> None:
    spec = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64)
    shape = shape_of_step(spec, [1] * 4, [100] * 4)
    for faster, winner in ((9.5, "A"), (8.5, "B")):
        models = [
            TimingModel("A", "decode", (10.0, 0, 0, 0, 0, 0)),
            TimingModel("B", "decode", (faster, 0, 0, 0, 0, 0), margin=0.1),
        ]
        predictor = Predictor(spec, models)
        among = predictor.among("decode", ["A", "B"])
        assert predictor.fastest(among, shape) == winner
        assert predictor.evaluate(among, shape) == {"A": 10.0, "B": faster}  # as predicted
        assert predictor.fastest(among, shape, 9.0) == ""


def test_candidates_are_measured_over_one_cache_and_wrong_ones_named() -> None:
    spec = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32")
    selection = select(spec, "cpu")
    device = Device("cpu", "", torch_device="cpu")
    size = Size(2000, 10_000, 2000, 4)
    assert size_for(spec, device, 1 << 20).keys == (1 << 20) // (2 * 64 * 4)
    leave_out = set(discover().backends) - {"TORCH_SDPA", "HPU_ATTN"}
    measured = Measured(selection, Clock(torch.device("cpu")), size, leave_out)
    assert set(measured.layers) == {"TORCH_SDPA", "HPU_ATTN"}
    steps = [
        StepSample("decode", "", (1, 1), (300, 7)), StepSample("prefill", "", (20, 40), (20, 300)),
        StepSample("mixed", "", (1, 40), (300, 90)),
    ]  # fmt: skip
    times = [dict(measured.times(step, ["TORCH_SDPA", "HPU_ATTN"])) for step in steps]
    assert all(t.us > 0 and not t.host for step in times[:2] for t in step.values())
    assert times[2]["TORCH_SDPA"] == "takes this kind of step in several calls"
    assert times[2]["HPU_ATTN"].us > 0
    # One that computes something else is measured once, and named.
    layer = measured.layers["TORCH_SDPA"]

    class Wrong:
        plan, params, group, spec = layer.plan, layer.params, layer.group, layer.spec
        output_shape = layer.output_shape

        def __call__(self, query: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
            return layer(query * 1.1, *rest, **named)

    measured.layers["TORCH_SDPA"] = Wrong()
    measured._checked.clear()
    (said,) = dict(measured.times(steps[0], ["TORCH_SDPA"])).values()
    assert "wrong" in str(said)


def test_layers_are_mha_gqa_mqa_in_both_head_sizes() -> None:
    for accelerator in (False, True):
        found = layers(accelerator)
        ratios = {(s.head_size, s.num_heads // s.num_kv_heads) for s in found}
        assert {(size, 1) for size in (64, 128)} <= ratios
        assert any(s.num_kv_heads == 1 for s in found) and all(
            s.role is Role.DECODER for s in found
        )
    assert any(s.kv_cache_dtype == "fp8_e4m3" for s in layers(True))
    assert all(s.kv_cache_dtype == "auto" for s in layers(True, quantized=False))


def test_tune_writes_a_table_that_a_group_chooses_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of steps small enough for a test; who wins depends on the machine, that somebody does doesn't."""
    config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2,
              "hidden_size": 128, "num_hidden_layers": 1, "torch_dtype": "float32"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(tuning, "size_for", lambda *_: Size(1500, 10_000, 1000, 6))
    path, names = tmp_path / "t.json", ["TORCH_SDPA", "HPU_ATTN", "NATIVE_ATTN"]

    def tune(seconds: float) -> dict[str, Any]:
        options = TuneOptions(
            model=[str(tmp_path)], device="cpu", backend=names, out=path, seconds=seconds,
            json=True, batch_invariant="steps",
        )  # fmt: skip
        assert show(options) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    report = tune(120)
    assert report["points"] >= 2 * LEAST_POINTS and report["models"], report
    # Nothing is measured twice: what is there is fitted anew.
    again = tune(0)
    assert again["points"] == report["points"] and again["models"] == report["models"]
    spec = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32")
    selection = select(spec, "cpu", settings=Settings(timings=str(path)))
    free = [m for m in report["models"] if "batch_invariant" not in m["layer"]]
    assert {m.backend for m in selection.timings} == {m["backend"] for m in free}
    if len(free) < len(report["models"]):  # where a backend gives the level
        same_bits = select(
            spec.replace(batch_invariant="steps"), "cpu", settings=Settings(timings=str(path))
        )
        assert "batch_invariant='steps' costs: " in same_bits.explain()
    group = LayerGroup(selection)
    plan = group.plan(Batch([0, 1, 2], [300, 20], torch.zeros(2, 20, dtype=torch.int32)))
    assert plan.calls[0].name in {m.backend for m in selection.timings if m.kind == "decode"}


def test_tune_measures_a_layer_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "size_for", lambda *_: Size(500, 2000, 300, 3))
    spec = LayerSpec(num_heads=6, num_kv_heads=2, head_size=40, dtype="float32")
    command = ("tune", "--device", "cpu", "--out", str(tmp_path / "t.json"), "--seconds", "60")
    command += ("--backend", "TORCH_SDPA", "--backend", "HPU_ATTN", "--json", "--spec")
    code, out, errors = here(*command, spec.to_json(), "--block-size", "32")
    assert code == 0, errors
    classes = [model["layer"] for model in json.loads(out)["models"]]
    assert classes and {c["head_size"] for c in classes} == {40}
    lines = (tmp_path / "t.points.jsonl").read_text().splitlines()[1:]
    assert {json.loads(line)["spec"]["block_size"] for line in lines} == {32}
    assert "name different layers" in here(*command, spec.to_json(), "--model", "llama-3.1-8b")[2]
    gdn = json.dumps({"kind": "gdn", "num_heads": 2, "head_size": 16, "recurrent": {}})
    assert "--spec: has no layer of kind attention or mla" in here(*command, gdn)[2]


def test_tune_needs_a_device_to_run_on(tmp_path: Path) -> None:
    code, _, errors = here("tune", "--device", "h200", "--out", str(tmp_path / "t.json"))
    assert code == 2 and "profile" in errors


def test_explain_predicts_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {
        "format": 1, "device": {"platform": "cuda", "name": "NVIDIA H200"}, "measured": "2026-01-01",
        "versions": {}, "models": [
            {"backend": name, "kind": "decode", "layer": {"head_size": 128}, "overlap": True,
             "coefficients": dict.fromkeys(TERMS, 0.0) | {"launch": launch, "byte": byte}}
            for name, launch, byte in (("TRITON_ATTN", 9, 4e-7), ("FLASHINFER", 5, 3e-7))
        ],
    }  # fmt: skip
    path = tmp_path / "t.json"
    path.write_text(json.dumps(data))

    def explained(batch: str, *options: str, timings: str = str(path)) -> str:
        monkeypatch.setenv("POLYATTN_TIMINGS", timings)
        command = ("explain", "llama-3.1-8b", "--device", "h200", "--batch", batch, *options)
        code, text, errors = here(*command)
        assert code == 0, errors
        return text

    (group,) = json.loads(explained("24q1s4k", "--json"))["groups"]
    (call,) = group["batches"]["24q1s4k"]["calls"]
    assert call["backend"] == "FLASHINFER"
    bytes_read = 24 * 4096 * 2 * 8 * 128 * 2
    assert [c["us"] for c in call["candidates"]] == pytest.approx(
        [5 + 3e-7 * bytes_read, 9 + 4e-7 * bytes_read]
    )
    text = explained("24q1s4k")
    assert "TRITON_ATTN would take 1.3" in text and "launch" in text and "longest 4096" in text
    bare = explained("24q1s4k", timings="0")
    assert "by priority" in bare
    for model, host in zip(data["models"], (30.0, 500.0), strict=True):  # type: ignore[arg-type]
        model["host"] = host  # type: ignore[index]
    of_hosts = tmp_path / "hosts.json"
    of_hosts.write_text(json.dumps(data))
    text = explained("24q1s4k", timings=str(of_hosts))
    assert "TRITON_ATTN: FLASHINFER would take 2.9" in text and "500.0" in text
    assert "the host's time counts" not in text
    text = explained("2q1s400", timings=str(of_hosts))
    assert "the host needs 30 us a layer, and the device 10: the host's time counts" in text


def test_bench_draws_lengths(tmp_path: Path) -> None:
    command = ("bench", "6q1s64", "--backend", "TORCH_SDPA", "--seconds", "0.01", "--json")
    spec = HEADS[0].to_json()
    rows = json.loads(here(*command, "--spec", spec, "--lengths", "one-long")[1])["rows"]
    assert rows[0]["batch"] == "6q1s64 one-long" and rows[0]["error"] < 0.02
    code, _, errors = here(*command, "--spec", spec, "--lengths", "one-lnog")
    assert code == 2 and "one-long" in errors


@pytest.mark.parametrize("cached", ["auto", "fp8_e4m3", "int8_rows"])
def test_latents_are_measured_absorbed(cached: str) -> None:
    spec = LayerSpec(
        kind="mla", num_heads=4, num_kv_heads=4, head_size=32, v_head_size=32, block_size=16,
        latent=LatentSpec(rank=64, rope_head_size=16), dtype="float32", kv_cache_dtype=cached,
    )  # fmt: skip
    selection = select(spec, "cpu")
    assert {s.kind for s in samples(SIZE, 5, TRACE, counts_of(spec))} == {"decode", "short"}
    measured = Measured(selection, Clock(torch.device("cpu")), Size(2000, 10_000, 2000, 4))
    names = {"NATIVE_MLA", "TORCH_MLA"}
    assert set(measured.layers) >= names
    step = StepSample("decode", "", (1, 1), (300, 7))
    times = dict(measured.times(step, names))
    assert all(isinstance(each, Times) and each.us > 0 for each in times.values()), times
