"""A backend that fails or is wrong on this machine: passed over when automatic, raised when named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from defaults import CPU_DEFAULT
from polyattn import LayerGroup, LayerSpec, register, select, unregister
from polyattn.errors import PluginError, SelectionError
from polyattn.kernel import Frame
from polyattn.plugin import declare
from polyattn.registry.capabilities import Capabilities
from polyattn.registry.info import BackendInfo, Priority
from polyattn.runtime.backend import AttentionBackend, StoreBackend
from polyattn.runtime.program import Plan
from polyattn.workload.verify import steps
from polyattn_cpu.hooks import TORCH_SDPA
from polyattn_cpu.sdpa import TorchSDPA

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32")


class Wrong(TorchSDPA):
    """Right in prefill, wrong in decode."""

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(
            plan, frame.but(query=frame.query * 1.05 if plan.batch.all_decode else frame.query)
        )


class Failing(TorchSDPA):
    def run(self, plan: Plan, frame: Frame) -> None:
        if plan.batch.all_decode:
            raise RuntimeError("ninja: build stopped: subcommand failed")
        super().run(plan, frame)


class Exits(TorchSDPA):
    """Ends its process where it is built."""

    def __init__(self, *args: Any):
        raise SystemExit(5)


class Ends(TorchSDPA):
    """Ends its process where it runs."""

    def run(self, plan: Plan, frame: Frame) -> None:
        raise SystemExit(6)


class Silent(TorchSDPA):
    """Fails with an exception that has no text."""

    def __init__(self, *args: Any):
        class Mute(RuntimeError):
            def __str__(self) -> str:
                raise ValueError

        raise Mute


class Forgets(TorchSDPA):
    """Shows every key, whatever a window, a chunk or kept tokens say, and caps no logit."""

    def __init__(self, spec: LayerSpec, *rest: Any):
        every = spec.replace(
            sliding_window=None, window_right=None, sink_tokens=0, chunk_size=None,
            logit_soft_cap=None,
        )  # fmt: skip
        super().__init__(every, *rest)


class Short(TorchSDPA):
    """Is wrong where a window hides nothing in the whole step."""

    def run(self, plan: Any, frame: Any) -> None:
        super().run(plan, frame)
        if plan.batch.max_seq_len <= (self.spec.sliding_window or 0):
            frame.out.add_(1)


class Boasting(AttentionBackend):
    """Claims attention and has no `run`."""


class Unfit(StoreBackend):
    """Claims attention and is a store."""

    def run(self, *args: Any) -> None: ...


def info(name: str, score: int) -> BackendInfo:
    return BackendInfo(
        name=name,
        summary="",
        path=f"test_verify:{name.title()}",
        capabilities=Capabilities(platforms={"cpu": ()}, dtypes=frozenset({"float32"})),
        priorities=(Priority(score=score),),
    )


SCORES = {
    "WRONG": 999, "FAILING": 998, "BOASTING": 1, "UNFIT": 0, "EXITS": 0, "ENDS": 0, "SILENT": 0,
}  # fmt: skip
FORGETS = replace(TORCH_SDPA, name="FORGETS", path="test_verify:Forgets", priorities=())
SHORT = replace(TORCH_SDPA, name="SHORT", path="test_verify:Short", priorities=())
declare(
    __name__,
    api_versions=(1, 1),
    backends=[FORGETS, SHORT, *(info(name, score) for name, score in SCORES.items())],
)


@pytest.fixture(autouse=True)
def plugin() -> Iterator[None]:
    register(sys.modules[__name__], "verify-test")
    yield
    unregister("verify-test")


def test_verification_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    select(SPEC, "cpu", verify=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.initial_seed() == 5


def test_automatic_choice_passes_over_what_is_wrong_or_fails() -> None:
    assert select(SPEC, "cpu").decision.decode == "WRONG"  # without verification nobody knows
    decision = select(SPEC, "cpu", verify=True).decision
    assert decision.decode == decision.prefill == CPU_DEFAULT
    reasons = {v.backend: str(v.rejections) for v in decision.verdicts() if v.rejections}
    assert "its output is wrong" in reasons["WRONG"]
    assert "ninja: build stopped" in reasons["FAILING"]


@pytest.mark.parametrize(
    ("name", "says"),
    [("WRONG", "is wrong"), ("FAILING", "build stopped"), ("EXITS", "SystemExit: 5"),
     ("ENDS", "SystemExit: 6"), ("SILENT", "its text can't be shown")],
)  # fmt: skip
def test_a_named_backend_that_fails_is_raised(name: str, says: str) -> None:
    with pytest.raises(SelectionError, match=says):
        select(SPEC, "cpu", backend=name, verify=True)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    "mask",
    [{"sliding_window": 1024}, {"sliding_window": 8, "sink_tokens": 400}, {"chunk_size": 1000},
     {"logit_soft_cap": 50.0}, {"logit_soft_cap": 30.0, "dtype": "bfloat16"}],
    ids=str,
)  # fmt: skip
def test_masks_and_caps_are_tried_at_their_own_sizes(mask: dict[str, Any], cached: bool) -> None:
    spec = SPEC.replace(cached=cached, **mask)
    with pytest.raises(SelectionError, match="its output is wrong"):
        select(spec, "cpu", backend="FORGETS", verify=True)
    assert select(spec, "cpu", backend="TORCH_SDPA", verify=True).decision.prefill


def test_a_step_within_the_window_is_tried_too() -> None:
    """A backend may run other kernels for it."""
    spec = SPEC.replace(sliding_window=1024)
    with pytest.raises(SelectionError, match="its output is wrong"):
        select(spec, "cpu", backend="SHORT", verify=True)
    assert select(SPEC, "cpu", backend="SHORT", verify=True).decision.prefill


def test_a_window_of_a_million_tokens_is_tried_in_bounded_time() -> None:
    spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, sliding_window=1 << 20)
    for phase in ("prefill", "decode"):
        assert max(keys for _, keys in steps(spec, phase, 16)) == 4096 + 19
    assert select(spec, "cpu", backend="NATIVE_ATTN", verify=True).decision.prefill


def test_a_claim_without_its_method_is_found_when_the_backend_is_built() -> None:
    selection = select(SPEC, "cpu", backend="BOASTING", verify=False)
    with pytest.raises(
        PluginError, match="BOASTING can't be loaded .*abstract method.*ACKEND or backend= may"
    ):
        LayerGroup(selection)
    with pytest.raises(PluginError, match="UNFIT: test_verify:Unfit is no AttentionBackend"):
        LayerGroup(select(SPEC, "cpu", backend="UNFIT", verify=False))


@pytest.mark.parametrize(
    ("name", "says"), [("EXITS", "SystemExit: 5"), ("SILENT", "Mute: .its text can't")]
)
def test_a_class_that_exits_does_not_end_its_host(name: str, says: str) -> None:
    with pytest.raises(PluginError, match=f"backend {name} can't be loaded .*{says}"):
        LayerGroup(select(SPEC, "cpu", backend=name, verify=False))


def test_a_late_registration_is_never_stale() -> None:
    assert select(SPEC, "cpu").decision.decode == "WRONG"
    unregister("verify-test")
    assert select(SPEC, "cpu").decision.decode == CPU_DEFAULT
    with pytest.raises(PluginError, match="no plugin named"):
        unregister("verify-test")
    register(sys.modules[__name__], "verify-test")
    assert select(SPEC, "cpu").decision.decode == "WRONG"
    with pytest.raises(PluginError, match="registered already"):
        register(sys.modules[__name__], "verify-test")
