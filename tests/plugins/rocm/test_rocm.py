"""The ROCm adapters by value: over fakes that bind the real signatures and compute."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from adapters import FAKES, check_given, check_paged
from kits import OVER_FAKES, PARTS, conforms, kit
from polyattn import discover
from polyattn.api import select
from polyattn.errors import SelectionError
from polyattn.registry.devices import resolve_device
from polyattn.registry.discovery import refresh
from polyattn.runtime.conventions import at_least
from polyattn.spec.layer import LayerSpec


def over_the_fakes(computes: str) -> dict[str, str]:
    """The variables for a kit over the fakes, whose chip computes the fp8 of `computes`."""
    return {
        "PYTHONPATH": str(FAKES), "FAKE_GFX": computes, "POLYATTN_DISABLE_PLUGINS": "triton"
    }  # fmt: skip


OF_FP8 = "fp8 or pairs or search"
"""Cases in which MI300X and MI355X differ: both have the same ones, layer by layer."""


@PARTS
@pytest.mark.parametrize(
    ("backend", "profile"), [("ROCM_ATTN", "mi300x"), ("ROCM_FLASH_ATTN", "mi250x")]
)
def test_conforms_over_the_fake(backend: str, profile: str, part: tuple[str, ...]) -> None:
    options = ("--polyattn-as", profile, *OVER_FAKES, *part)
    conforms(backend, 40, *options, **over_the_fakes("gfx942"))


@pytest.mark.parametrize(
    ("chosen", "least"),
    [
        pytest.param(OF_FP8, 12, marks=pytest.mark.slow),
        pytest.param("", 40, marks=pytest.mark.sweep),
    ],
)
def test_conforms_over_the_fake_of_ocp_fp8(chosen: str, least: int) -> None:
    options = ("-k", chosen, "--polyattn-as", "mi355x", "-x")
    conforms("ROCM_ATTN", least, *options, **over_the_fakes("gfx950"))


@pytest.mark.slow
def test_the_wrong_fp8_flavour_is_caught() -> None:
    """The negative control: a chip that computes OCP bits over a cache that was written as FNUZ."""
    of_fp8 = ("-k", OF_FP8, "--polyattn-as", "mi300x", "-x")
    _, counts = kit("ROCM_ATTN", *of_fp8, **over_the_fakes("gfx950"))
    assert counts["failed"] == 1  # -x stops at the first


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_of_one_is_a_window(causal: bool, fakes: None) -> None:
    """Both libraries read its sizes, (0, 0), as none where slopes are missing."""
    from polyattn_rocm.aiter import AiterAttention
    from polyattn_rocm.flash_attn import CkFlashAttention

    spec = LayerSpec(
        num_heads=6, num_kv_heads=2, head_size=64, dtype="float16", sliding_window=1, causal=causal
    )
    for kind, block_size in ((AiterAttention, 16), (CkFlashAttention, 256)):
        check_paged(kind, spec, block_size, 3e-3)
        check_given(kind, spec, 3e-3)
    check_given(AiterAttention, spec.replace(logit_soft_cap=2.0), 3e-3)


@pytest.mark.parametrize(
    ("changes", "backend", "said"),
    [
        ({"logit_soft_cap": 30.0}, "ROCM_FLASH_ATTN", "takes softcap= and ignores it"),
        ({"logit_soft_cap": 30.0, "alibi": True}, "decode=ROCM_ATTN", "after ALiBi's bias"),
        (
            {"logit_soft_cap": 30.0, "sliding_window": 128},
            "decode=ROCM_ATTN",
            "caps the scores of hidden keys",
        ),
    ],
)
def test_what_its_sources_do_otherwise_is_refused(
    changes: dict[str, Any], backend: str, said: str
) -> None:
    """Read in flash-attn's csrc/flash_attn_ck and AITER's csrc/cpp_itfs/pa/pa_kernels.cuh."""
    spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, **changes)
    with pytest.raises(SelectionError, match=said):
        select(spec, "mi300x", backend=backend)


def test_each_chip_says_why_not() -> None:
    spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
    with pytest.raises(SelectionError, match="arch: wanted gfx90a"):
        select(spec, "mi250x", backend="ROCM_ATTN")
    with pytest.raises(SelectionError, match="head_size: wanted 96"):
        select(spec.replace(head_size=96), "mi300x", backend="ROCM_ATTN")
    decision = select(spec.replace(kv_cache_dtype="fp8_e4m3"), "mi300x").decision
    assert decision.decode == "ROCM_ATTN" and decision.prefill != "ROCM_ATTN"


class FakeProperties:
    gcnArchName = "gfx942:sramecc+:xnack-"
    name = "AMD Instinct MI300X"


def test_a_rocm_machine_is_no_nvidia_one(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """`torch.cuda` answers on both; what tells them apart is `torch.version.hip`."""
    refresh()  # the machine is another one now, and so it is again at the end
    request.addfinalizer(refresh)
    from polyattn_cuda.platform import detect as detect_cuda
    from polyattn_rocm.platform import detect as detect_rocm

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: FakeProperties)
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    found = detect_rocm()
    assert found is not None and (found.platform, found.arch) == ("rocm", "gfx942")
    assert found.fp8 == "fnuz" and found.torch_device == "cuda:0"
    assert detect_cuda() is None and detect_rocm("cpu") is None
    assert resolve_device().platform == "rocm"
    from polyattn_rocm.platform import current

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert current() == "cuda:3"
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H200")
    assert detect_rocm() is None
    found = detect_cuda()
    assert found is not None and (found.platform, found.arch) == ("cuda", "sm_90")


def test_every_vendor_is_installed_beside_the_others() -> None:
    """One machine with all plugins: each profile's choice is of its own platform."""
    backends = discover().backends
    assert {"ROCM_ATTN", "FLASH_ATTN_V3", "PALLAS_ATTN", "TRITON_ATTN"} <= set(backends)
    spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
    for profile in ("mi250x", "mi300x", "mi355x", "h200", "tpu-v6e", "x86-amx"):
        decision = select(spec, profile).decision
        for name in (decision.prefill, decision.decode):
            assert decision.device.platform in backends[name].capabilities.platforms


def test_a_denied_plugin_is_never_imported() -> None:
    code = (
        "import sys, polyattn; from polyattn import LayerSpec, select;"
        "select(LayerSpec(num_heads=8, head_size=64), 'cpu');"
        "denied = ('polyattn_rocm', 'polyattn_tpu', 'polyattn_cuda');"
        "print([m for m in sys.modules if m.startswith(denied)])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env=os.environ | {"POLYATTN_DISABLE_PLUGINS": "rocm,tpu,cuda"},
    )  # fmt: skip
    assert found.stdout.strip() == "[]"


def test_an_outgrown_workspace_lives_on() -> None:
    """A graph captured for a smaller batch writes to it when it is replayed."""
    outgrown: list[torch.Tensor] = []
    first = at_least(torch.empty(0), 10, outgrown)
    assert at_least(first, 10, outgrown) is first and len(outgrown) == 1
    second = at_least(first, 11, outgrown)
    assert second.numel() == 20 and outgrown[-1] is first
