"""Windows, steps of both kinds and prompts of latents: whose measured times choose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes import backend
from polyattn import LatentSpec, LayerGroup, LayerSpec, select
from polyattn.registry.devices import resolve_device
from polyattn.registry.timings import layer_class, timings
from polyattn.selection.prediction import Predictor, shape_of_step
from polyattn.selection.step_choice import ALL, StepChoice, step_choice
from polyattn.settings import current_settings
from polyattn.spec.decompose import expanded, expanded_context
from polyattn.spec.timing import TERMS, TimingModel
from polyattn.workload.base import workload

SPEC = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
PROCESSORS = 132
ROWS = [1] * 20 + [600], [4000] * 20 + [9000]


def model(name: str, kind: str, deal: str = "", **coefficients: float) -> TimingModel:
    values = tuple(coefficients.get(term, 0.0) for term in TERMS)
    return TimingModel(name, kind, values, deal=deal, processors=PROCESSORS if deal else 0)


A = backend("A", phases=frozenset({"prefill", "decode"}))
B = backend("B", phases=frozenset({"prefill", "decode", "mixed"}))
CHUNKS = model("B", "chunked", "cut", launch=10, product=2e-9)


def chosen(models: list[TimingModel]) -> StepChoice:
    members = {phase: {"A": A, "B": B} for phase in ("prefill", "decode")}
    return StepChoice(SPEC, models, members, {"prefill": "A", "decode": "A"})


def test_a_step_of_both_kinds_is_one_of_chunks_to_a_kernel_whose_keys_are_dealt_out() -> None:
    apart = [model("A", "decode", launch=90), model("A", "chunked", launch=900)]
    (call,) = chosen([*apart, CHUNKS]).calls(*ROWS)
    assert (call.name, call.kind, call.rows) == ("B", "mixed", ALL)
    chunks = Predictor(SPEC, [CHUNKS])
    (us,) = Predictor.evaluate(
        chunks.among("chunked", "B"), chunks.shape("chunked", *ROWS)
    ).values()
    assert call.times == {"B": pytest.approx(us)} and us > 100
    # Every part of the step counts, and what was measured of such steps counts first.
    decodes = Predictor.evaluate(
        chunks.among("chunked", "B"), chunks.shape("chunked", ROWS[0][20:], ROWS[1][20:])
    )
    assert decodes["B"] < us
    assert len(chosen([*apart, CHUNKS, model("B", "mixed", launch=2000)]).calls(*ROWS)) == 2
    assert len(chosen([*apart, replace(CHUNKS, deal="", processors=0)]).calls(*ROWS)) == 2


def test_a_window_that_hides_keys_has_a_kernel_of_its_own() -> None:
    """FlashAttention-3 masks every block of a windowed step, which takes longer."""
    spec = SPEC.replace(sliding_window=1000)
    plain = model("A", "prefill", "cut", launch=10, product=2e-9)
    windowed = model("A", "windowed", "cut", launch=30, product=3e-9)
    both, alone = Predictor(spec, [plain, windowed]), Predictor(spec, [plain])
    for tokens, other in ((1000, 1), (1001, 1.5)):
        rows = [tokens] * 3, [tokens] * 3
        us, before = (
            Predictor.evaluate(p.among("prefill", "A"), p.shape("prefill", *rows))["A"]
            for p in (both, alone)
        )
        assert us == pytest.approx(before if other == 1 else (before - 10) * other + 30)
    assert layer_class(spec) == layer_class(SPEC) | {"sliding_window": True}


def test_prompts_of_latents_go_to_whoever_is_the_fastest_at_such() -> None:
    spec = LayerSpec(
        kind="mla", num_heads=4, head_size=24, v_head_size=16, dtype="float32", block_size=16,
        latent=LatentSpec(rank=32, rope_head_size=8),
    )  # fmt: skip
    selection = select(spec, "cpu")
    assert selection.decision.prefill == "NATIVE_ATTN"
    times = (
        model("NATIVE_ATTN", "prefill", launch=50),
        model("TORCH_SDPA", "prefill", product=1e-3),
    )
    group = LayerGroup(replace(selection, timings=times))
    group.finish_builds()
    for queries, names in (([20], ["TORCH_SDPA"]), ([90, 80], ["NATIVE_ATTN"])):
        step = workload(group, [(n, n) for n in queries])
        assert [call.name for call in step.plan.calls] == names
        step.check()
    # What comes before a step's tokens stays with the selection's own, unless it has times, too.
    step = workload(group, [(20, 40)])
    assert [call.name for call in step.plan.calls] == ["TORCH_SDPA", "NATIVE_ATTN"]
    step.check()
    contexts = tuple(replace(m, kind="chunked") for m in times)
    group = LayerGroup(replace(selection, timings=times + contexts))
    group.finish_builds()
    for keys, name in ((10, "TORCH_SDPA"), (900, "NATIVE_ATTN")):
        step = workload(group, [(20, 20 + keys)])
        assert [call.name for call in step.plan.calls] == ["TORCH_SDPA", name]
        step.check()
    # Whose bits mustn't follow from the others' lengths has none to choose from.
    same = select(spec.replace(batch_invariant=True), "cpu")
    step = workload(LayerGroup(replace(same, timings=times)), [(20, 20)])
    assert [call.name for call in step.plan.calls] == ["NATIVE_ATTN"]
    # Latents' own shapes have none of heads' ways, whatever the table holds.
    dealt = [model("A", kind, "whole", launch=9) for kind in ("prefill", "chunked", "short")]
    assert Predictor(spec, dealt).among("prefill", "A") == []
    assert Predictor(spec, dealt).among("short", "A") == []


def test_prompts_of_latents_that_fit_in_low_tiles_have_times_of_their_own() -> None:
    spec = LayerSpec(
        kind="mla", num_heads=4, head_size=24, v_head_size=16, dtype="float32", block_size=16,
        latent=LatentSpec(rank=32, rope_head_size=8),
    )  # fmt: skip
    times = (
        model("NATIVE_ATTN", "prefill", launch=50),
        *(model("TORCH_SDPA", k, "whole", launch=us) for k, us in (("prefill", 60), ("short", 40))),
    )
    group = LayerGroup(replace(select(spec, "cpu"), timings=times))
    group.finish_builds()
    for tokens, name in ((64, "TORCH_SDPA"), (65, "NATIVE_ATTN")):
        step = workload(group, [(tokens, tokens)])
        assert [call.name for call in step.plan.calls] == [name]


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (SPEC, "A"),
        (SPEC.replace(num_kv_heads=16), "B"),
        (SPEC.replace(num_kv_heads=16, sliding_window=64), "A"),
    ],
)
def test_decodes_of_small_groups_may_have_a_kernel_of_their_own(spec: LayerSpec, name: str) -> None:
    models = [model("A", "decode", launch=20)]
    models += [model("B", kind, launch=us) for kind, us in (("decode", 30), ("ungrouped", 10))]
    predictor = Predictor(spec, models)
    among, shape = predictor.among("decode", "AB"), predictor.shape("decode", [1], [99])
    assert predictor.fastest(among, shape) == name


def test_the_second_of_two_calls_is_launched_while_the_first_runs() -> None:
    for host, one, names in ((1.0, 30, ["B"]), (1.0, 32, ["A", "A"]), (0.0, 32, ["B"])):
        apart = [model("A", "decode", launch=10), model("A", "chunked", launch=25)]
        models = [replace(m, host=host) for m in (*apart, model("B", "mixed", launch=one))]
        calls = chosen(models).calls(*ROWS)
        assert [call.name for call in calls] == names


def test_keys_are_counted_to_the_window_of_each_row() -> None:
    """Low tiles or tall ones: TRITON_ATTN's choice follows from the keys that rows see."""
    spec = SPEC.replace(sliding_window=64, num_heads=64)
    for window, kind in ((64, "low"), (50_000, "chunked")):
        shape = shape_of_step(
            spec.replace(sliding_window=window), np.array([12] * 20), np.array([40_000] * 20),
            deals={"whole": PROCESSORS},
        )  # fmt: skip
        assert (shape.dealt["whole"].kind == "chunked") == (kind == "chunked")


@pytest.mark.parametrize(
    ("changes", "lens", "loser"),
    [
        # us: TRITON_ATTN 2,194, FLASH_ATTN_V3 1,185; TRITON_ATTN 1,397, CUDNN_ATTENTION 995.
        (
            {"num_heads": 16, "head_size": 256, "sliding_window": 4096, "logit_soft_cap": 50.0},
            [105, 4000, 6000, 8000, 9275],
            "TRITON_ATTN",
        ),
        ({"head_size": 120}, [1817] * 15, "TRITON_ATTN"),
    ],
)
def test_an_h200s_slow_kernels_are_left(
    changes: dict[str, Any], lens: list[int], loser: str
) -> None:
    size = changes["head_size"]
    choice = step_choice(select(SPEC.replace(**changes, v_head_size=size), "h200"))
    assert choice is not None
    (call,) = choice.calls(lens, lens)
    assert call.name != loser  # a backend of which no times are known is never left for others
    assert call.times[loser] > min(call.times.values())


@pytest.mark.parametrize(
    ("heads", "queries", "keys", "us"),
    [
        # One low tile runs on each of 132 processors: 60 and 48 tiles, then 144, 256, 384 and 1,056.
        (20, [45] * 3, None, 10.7),
        (24, [62] * 2, None, 11.2),
        (24, [29] * 6, None, 16.0),
        (128, [57] * 2, None, 17.7),
        (128, [46] * 3, None, 23.0),
        (96, [46] * 11, None, 51.8),
        # 256 programs of long tiles, which are cut.
        (64, [26], [1326], 41.2),
        # Of 1,152 and 1,024 tall tiles, 57 and 91 % full, the fewer take as long.
        (96, [147] * 6, None, 88.4),
        (128, [116] * 8, None, 86.4),
    ],
)
def test_what_triton_attn_takes_for_prompts_and_contexts_of_latents(
    heads: int, queries: list[int], keys: list[int] | None, us: float
) -> None:
    """As an H200 does. `keys`: of contexts."""
    latent = LatentSpec(rank=512, rope_head_size=64)
    mla = LayerSpec(kind="mla", num_heads=heads, head_size=192, v_head_size=128, latent=latent)
    spec, kind = (expanded_context(mla), "chunked") if keys else (expanded(mla), "prefill")
    predictor = Predictor(spec, select(mla, "h200").timings)
    among = predictor.among(kind, ["TRITON_ATTN"])
    times = predictor.evaluate(among, predictor.shape(kind, queries, keys or queries))
    assert times["TRITON_ATTN"] == pytest.approx(us, rel=0.1)


@pytest.mark.parametrize(
    ("fields", "there"),
    [({}, True), ({"sliding_window": 512}, False), ({"logit_soft_cap": 30.0}, False)],
)
def test_a_field_of_a_class_that_is_null_is_one_that_layers_lack(
    fields: dict[str, Any], there: bool
) -> None:
    """FLASHINFER's times of heads of 256 are those of layers without windows and caps."""
    spec = LayerSpec(num_heads=16, num_kv_heads=2, head_size=256).replace(**fields)
    models = select(spec, "h200").timings
    assert any(m.backend == "FLASHINFER" for m in models) is there
    assert any(m.backend == "TRITON_ATTN" for m in models)


@pytest.mark.parametrize(("heads", "name"), [(60, "FLASH_ATTN_V3"), (75, "TRITON_ATTN")])
def test_sinks_over_more_than_64_heads_have_times_of_their_own(heads: int, name: str) -> None:
    """vLLM's FlashAttention-3 reads no more; torch weighs its outputs after the call.

    On an H200 a prompt of 6,438 tokens in 75/15 heads takes it 670 us, where 258 were predicted;
    TRITON_ATTN takes 348.
    """
    spec = LayerSpec(
        num_heads=heads, num_kv_heads=heads // 5, head_size=128, sliding_window=128,
        learned_sinks=True,
    )  # fmt: skip
    models = timings(current_settings()).models(spec, resolve_device("h200"))
    predictor, rows = Predictor(spec, models), [6438]
    both = predictor.among("prefill", ["TRITON_ATTN", "FLASH_ATTN_V3"])
    shape = predictor.shape("prefill", rows, rows)
    assert predictor.fastest(both, shape) == name
    us = predictor.evaluate(both, shape)["FLASH_ATTN_V3"]
    assert us < 230 if heads == 60 else us > 500
    assert layer_class(spec).get("heads") == (None if heads == 60 else 128)
