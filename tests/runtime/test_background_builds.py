"""A group serves with what is ready: candidates that take long to build join when they are built."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from polyattn import Attention, Batch, LayerGroup, LayerSpec, register, select, unregister
from polyattn.families.attention import reference
from polyattn.kernel import GraphCapture
from polyattn.plugin import BackendInfo, Capabilities, Priority, declare
from polyattn.runtime.builds import finish_all
from polyattn.selection.selection import Selection
from polyattn.spec.timing import TERMS, TimingModel
from polyattn.workload.compare import output_error
from polyattn_cpu.sdpa import TorchSDPA

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", block_size=16)


class Ready(TorchSDPA):
    """Builds nothing."""


class Slow(TorchSDPA):
    """Its build takes as long as the test likes."""

    may_end: ClassVar[threading.Event]
    fails: ClassVar[bool]
    built: ClassVar[list[tuple[str, ...]]]

    def prepare(self, phases: tuple[str, ...]) -> None:
        assert Slow.may_end.wait(30)
        if Slow.fails:
            raise RuntimeError("no compiler")
        Slow.built.append(phases)


CLAIMS = Capabilities(
    platforms={"cpu": ()},
    dtypes=frozenset({"float32"}),
    graph_capture=GraphCapture.SINGLE_TOKEN_DECODE,
    features=frozenset({"causal", "gqa", "deterministic", "batch_invariant"}),
)
BUILDS = [
    BackendInfo(
        name=name.upper(),
        summary="",
        path=f"{__name__}:{name}",
        capabilities=CLAIMS,
        priorities=(Priority(score=score),),
    )
    for name, score in (("Ready", 1000), ("Slow", 999))
]
declare(__name__, api_versions=(1, 1), backends=BUILDS)


@pytest.fixture(autouse=True)
def plugin() -> Iterator[None]:
    Slow.may_end, Slow.fails, Slow.built = threading.Event(), False, []
    register(sys.modules[__name__], "building")
    yield
    Slow.may_end.set()
    finish_all()
    unregister("building")


def chosen(spec: LayerSpec = SPEC) -> Selection:
    """Select READY, with times by which SLOW is the faster for every step."""
    found = select(spec, "cpu", verify=False)
    assert found.decision.decode == found.decision.prefill == "READY"
    times = {"READY": 100.0, "SLOW": 10.0}
    models = tuple(
        TimingModel(name, kind, tuple(us if term == "launch" else 0.0 for term in TERMS))
        for name, us in times.items()
        for kind in ("decode", "prefill", "chunked", "mixed", "short")
    )
    return replace(found, timings=models)


def decode() -> Batch:
    return Batch.from_lens([1, 1], [20, 9], torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), 16)


def who(plan: Any) -> list[str]:
    return [call.name for call in plan.calls]


def test_a_group_returns_at_once_and_a_candidate_joins_when_it_is_built(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """81 s on an H200, for a candidate that no step had wanted yet."""
    caplog.set_level(logging.INFO, "polyattn")
    began = time.monotonic()
    group = LayerGroup(chosen())
    assert time.monotonic() - began < 20 and not Slow.built
    layer, cache = Attention(group), group.allocate_cache(4)
    cache.key.normal_(), cache.value.normal_()
    batch = decode()
    first = group.plan(batch)
    assert who(first) == ["READY"]
    Slow.may_end.set()
    group.finish_builds()
    assert Slow.built == [("prefill", "decode")]
    second = group.plan(batch)
    assert who(second) == ["SLOW"]
    assert who(first) == ["READY"], "what was planned stays"
    assert who(group.plan(batch, first)) == ["READY"], "and what a captured graph reads"
    query, key, value = torch.randn(2, 4, 32), torch.randn(2, 2, 32), torch.randn(2, 2, 32)
    for plan in (first, second):
        out = layer(query, key, value, cache, plan)
        assert isinstance(out, torch.Tensor)
        wanted, _ = reference.forward(SPEC, query, None, None, cache, batch)
        assert output_error(out, wanted) < 2e-5
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "building SLOW (prefill, decode) for" in said and "SLOW is built after" in said


@pytest.mark.parametrize(
    "field", ["deterministic", "batch_invariant", "graph_capture"]
)  # fmt: skip
def test_where_kernels_must_not_change_the_first_plan_waits(field: str) -> None:
    spec = SPEC.replace(**{field: "single_token_decode" if field == "graph_capture" else True})
    group = LayerGroup(chosen(spec))
    threading.Timer(0.3, Slow.may_end.set).start()
    assert not Slow.built
    assert who(group.plan(decode())) == ["SLOW"] and Slow.built


def test_a_candidate_that_cant_be_built_is_left_out_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Slow.fails = True
    group = LayerGroup(chosen())
    Slow.may_end.set()
    group.finish_builds()
    assert who(group.plan(decode())) == ["READY"]
    assert "SLOW does not compete for" in caplog.text and "no compiler" in caplog.text


def test_the_selections_own_backend_is_built_before_its_group_returns() -> None:
    Slow.may_end.set()
    group = LayerGroup(select(SPEC, "cpu", backend="SLOW", verify=False))
    assert Slow.built == [("prefill", "decode")]
    assert who(group.plan(decode())) == ["SLOW"]
