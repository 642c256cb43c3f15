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
    RopeSpec,
    resolve_device,
    select,
)
from polyattn.errors import SelectionError, SpecError

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
            "rope.scaling='dynamic' turns a token by its sequence's length",
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


def test_mla_s_two_formulas_are_refused_with_the_level_that_there_is() -> None:
    spec = SPEC.replace(
        kind="mla", num_kv_heads=4, head_size=48, v_head_size=32, batch_invariant="steps",
        latent=LatentSpec(rank=64, rope_head_size=16),
    )  # fmt: skip
    with pytest.raises(SelectionError, match="ask for batch_invariant='batch'"):
        select(spec, "cpu")


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


def test_a_cost_that_was_not_measured_is_named_so(caplog: pytest.LogCaptureFixture) -> None:
    layer = LayerSpec(num_heads=24, num_kv_heads=8, head_size=128)
    for device, others in (
        ("h200", r"TORCH_SDPA \(\w+: [\d.]+ us for a"),
        ("mi300x", r"TORCH_SDPA and "),
    ):
        notes = " ".join(select(layer.replace(batch_invariant=True), device).decision.notes)
        said = rf"TORCH_SDPA runs prefill, not \w+; no timing table of this device has {others}"
        assert re.search(said, notes)
        assert notes[:60] in caplog.text
