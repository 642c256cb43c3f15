"""What does `batch_invariant` mean, who is chosen for it, and what is refused?"""

from __future__ import annotations

import re

import pytest
from fakes import GENERAL, backend, choose
from polyattn import (
    GraphCapture,
    Invariance,
    LatentSpec,
    LayerSpec,
    RecurrentSpec,
    RopeSpec,
    resolve_device,
    select,
)
from polyattn.errors import SelectionError, SpecError
from polyattn.selection.invariance import costs
from polyattn.spec.decompose import convolution

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, batch_invariant=True)
PHASES = ("prefill", "decode")
LEVELS = ("batch", "steps", "calls")


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_has_one_form_however_it_is_written(level: str) -> None:
    number = Invariance[level.upper()]
    spec = SPEC.replace(batch_invariant=level)
    assert spec == SPEC.replace(batch_invariant=number) == LayerSpec.from_json(spec.to_json())
    assert (spec == SPEC) == (level == "batch")
    assert SPEC.replace(batch_invariant=False).to_dict().get("batch_invariant") is None


def test_a_level_that_is_not_there_is_named() -> None:
    with pytest.raises(SpecError, match="batch_invariant='step' is unknown.*steps"):
        SPEC.replace(batch_invariant="step")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"dense_context": True, "sliding_window": 8}, "dense_context=True shows a prompt other"),
        (
            {"rope": RopeSpec(rotary_size=64, scaling="dynamic", factor=2.0, original_length=64)},
            "rope.scaling='dynamic' rotates a token by its sequence's length",
        ),
    ],
)
def test_what_differs_from_step_to_step_is_refused_where_steps_must_not_count(
    fields: dict[str, object], why: str
) -> None:
    assert SPEC.replace(**fields).batch_invariant is Invariance.BATCH
    with pytest.raises(SpecError, match=f"batch_invariant='steps': {why}"):
        SPEC.replace(batch_invariant="steps", **fields)


def test_a_cache_that_rounds_is_no_call_without_one() -> None:
    assert SPEC.replace(batch_invariant="steps", kv_cache_dtype="int8")
    with pytest.raises(SpecError, match="a cache of int8 rounds keys"):
        SPEC.replace(batch_invariant="calls", kv_cache_dtype="int8")


def test_mla_has_two_levels_and_what_it_lacks_is_refused_by_name() -> None:
    spec = SPEC.replace(
        kind="mla", num_kv_heads=4, head_size=48, v_head_size=32,
        latent=LatentSpec(rank=64, rope_head_size=16),
    )  # fmt: skip
    for name in ("NATIVE_MLA", "TORCH_MLA"):
        assert select(spec, "cpu", backend=f"decode={name}").decision.decode == name
        steps = select(spec.replace(batch_invariant="steps"), "cpu", backend=name).decision
        assert (steps.decode, steps.prefill) == (name, name)  # each token is a decode
    with pytest.raises(SelectionError, match="ask for batch_invariant='steps'"):
        select(spec.replace(batch_invariant="calls"), "cpu")
    with pytest.raises(SelectionError, match="a GPU's products were not compared"):
        select(spec, "h200", backend="decode=TORCH_MLA")
    assert select(spec, "h200").decision.decode == "TRITON_MLA"
    with pytest.raises(SelectionError, match="its launches follow from the step"):
        select(
            spec.replace(graph_capture="single_token_decode"), "h200", backend="decode=TRITON_MLA"
        )


def test_a_recurrence_s_rounded_states_are_refused_where_steps_must_not_count() -> None:
    spec = LayerSpec(
        kind="gdn", num_heads=4, num_kv_heads=2, head_size=16, batch_invariant="steps",
        recurrent=RecurrentSpec(conv_width=4),
    )  # fmt: skip
    before = convolution(spec)
    assert before is not None and before.batch_invariant is Invariance.STEPS
    assert select(spec, "cpu", backend="TORCH_SCAN")
    narrow = spec.replace(recurrent=RecurrentSpec(conv_width=4, state_dtype="bfloat16"))
    with pytest.raises(SelectionError, match="a state is rounded at the end of each step"):
        select(narrow, "cpu", backend="TORCH_SCAN")


CLAIMS = {
    "features": frozenset({"causal", "gqa", "batch_invariant", "step_invariant", "call_invariant"})
}
GIVEN = frozenset({True, False})
PREFILLS = backend("PREFILLS", 90, phases=frozenset({"prefill"}), cached=GIVEN, **CLAIMS)
DECODES = backend("DECODES", 90, phases=frozenset({"decode"}), **CLAIMS)
BOTH = backend("BOTH", 60, cached=GIVEN, **CLAIMS)


def test_one_backend_runs_prefill_and_decode_where_steps_must_not_count() -> None:
    for level in LEVELS:
        spec = SPEC.replace(batch_invariant=level)
        chosen = dict(choose(PREFILLS, DECODES, BOTH, GENERAL, spec=spec).chosen)
        pair = ("PREFILLS", "DECODES") if level == "batch" else ("BOTH", "BOTH")
        assert (chosen["prefill"], chosen["decode"]) == pair
        given = dict(choose(PREFILLS, BOTH, spec=spec.replace(cached=False)).chosen)
        assert given["prefill"] == ("BOTH" if level == "calls" else "PREFILLS")


@pytest.mark.parametrize("fields", [{"length_bounds": True}, {"graph_capture": "any"}])
def test_one_backend_runs_steps_whose_phases_the_batch_decides(fields: dict[str, object]) -> None:
    features = {"features": CLAIMS["features"] | {"length_bounds"}}
    captures = {"graph_capture": GraphCapture.ANY}
    pair = (
        backend("PREFILLS", 90, phases=frozenset({"prefill"}), **features, **captures),
        backend("DECODES", 90, phases=frozenset({"decode"}), **features, **captures),
    )
    both = backend("BOTH", 60, **features, **captures)
    for invariant in (False, True):
        spec = SPEC.replace(batch_invariant=invariant, **fields)
        names = {n for p, n in choose(*pair, both, GENERAL, spec=spec).chosen if p in PHASES}
        assert names == ({"BOTH"} if invariant else {"PREFILLS", "DECODES"})


def test_steps_with_kept_first_tokens_are_refused_by_name() -> None:
    spec = SPEC.replace(batch_invariant="steps", sliding_window=8, sink_tokens=2)
    with pytest.raises(SelectionError, match="kept first tokens and the window may share a tile"):
        select(spec, resolve_device("cpu"), backend="NATIVE_ATTN")


LAYER = LayerSpec(num_heads=24, num_kv_heads=8, head_size=128)


@pytest.mark.parametrize(
    ("device", "fields", "costly", "free"),
    [("a100", {}, "TRITON_ATTN", "FLASHINFER"), ("mi300x", {}, "TRITON_ATTN", "ROCM_ATTN")],
)
def test_a_cost_that_was_not_measured_is_named_so(
    device: str, fields: dict[str, object], costly: str, free: str, caplog: pytest.LogCaptureFixture
) -> None:
    layer = LAYER.replace(batch_invariant=True, **fields)
    notes = " ".join(select(layer, device).decision.notes)
    said = (
        f"{costly} runs prefill, not {free}; no timing table of this device has {costly} and {free}"
    )
    assert said in notes and said in caplog.text


def test_the_time_that_was_measured_stands_beside_the_name_of_the_other() -> None:
    free = select(LAYER, "h200")
    sdpa = select(LAYER.replace(batch_invariant=True), "h200", backend="TORCH_SDPA")
    lines = costs(sdpa, free, free.timings)
    assert any(
        re.search(r"no timing table of this device has TORCH_SDPA \(\w+: [\d.]+ us for a", line)
        for line in lines
    )


def test_triton_gives_the_levels_on_a_gpu_and_names_what_it_does_not_give_them_for() -> None:
    for device, level in (
        ("h200", "batch"),
        ("h200", "calls"),
        ("mi300x", "steps"),
        ("a100", "batch"),
    ):
        chosen = dict(select(LAYER.replace(batch_invariant=level), device).decision.chosen)
        assert chosen["prefill"] == chosen["decode"] == "TRITON_ATTN"
    captured = LAYER.replace(batch_invariant="steps", graph_capture="single_token_decode")
    assert select(captured, "h200").decision.decode == "TRITON_ATTN"
    for fields, why in (
        ({"graph_capture": "uniform"}, "the number of launches follows the step's rows"),
        ({"length_bounds": True}, "keys are cut by each request's own length"),
        ({"batch_invariant": "steps", "mask": "block_sparse"}, "compared within a step alone"),
        (
            {"batch_invariant": "steps", "rope": RopeSpec(rotary_size=64, positions="cache")},
            "keys are turned to places after the last token of a tile of rows",
        ),
    ):
        layer = LAYER.replace(**{"batch_invariant": "batch", **fields})
        with pytest.raises(SelectionError, match=why):
            select(layer, "h200", backend="TRITON_ATTN")
