"""Ascend, Intel's GPUs and Trainium: adapters over fakes that bind the real signatures and compute."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from adapters import FAKES, check_given, check_paged
from kits import OVER_FAKES, PARTS, conforms
from polyattn import LayerSpec, select
from polyattn.errors import SelectionError
from polyattn.kernel import Batch, Device, Frame, KVCache, LayerParams
from polyattn.registry.devices import resolve_device

LLAMA = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
SMALL = LayerSpec(num_heads=6, num_kv_heads=2, head_size=128)
BACKENDS = {"ascend-910b": "ASCEND_ATTN", "xpu-b580": "XPU_FLASH_ATTN", "trn2": "NKI_ATTN"}
TIGHT = 2e-2
"""Of bfloat16, whose rounding of an output near 1 is 4e-3."""


@PARTS
@pytest.mark.parametrize("profile", BACKENDS)
def test_conforms_over_the_fake(profile: str, part: tuple[str, ...]) -> None:
    conforms(
        BACKENDS[profile], 30, "--polyattn-as", profile, *OVER_FAKES, *part,
        PYTHONPATH=str(FAKES), POLYATTN_DISABLE_PLUGINS="triton",
    )  # fmt: skip


def test_ascend_gathers_the_pages_of_a_cache_with_gaps(fakes: None) -> None:
    """Keys beside values in one tensor: the operator gets the pages that the step reads."""
    from polyattn_ascend.attention import FusedAttention

    torch.manual_seed(0)
    both = torch.randn(4, 128, 2, 256).bfloat16()
    joined = KVCache(both[..., :128], both[..., 128:])
    apart = KVCache(both[..., :128].contiguous(), both[..., 128:].contiguous())
    backend = FusedAttention(SMALL, joined.format, Device("npu", "910b", torch_device="cpu"))
    table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    batch = Batch.from_lens([1, 2], [200, 5], table, 128)
    query = torch.randn(3, 6, 128).bfloat16()
    found = [torch.empty_like(query) for _ in range(2)]
    for cache, out in zip((joined, apart), found, strict=True):
        frame = Frame(query, None, None, cache, LayerParams(), out, None)
        backend.run(backend.plan(batch), frame)
    assert torch.equal(*found)


def test_a_window_of_one_is_a_window_on_xpu(fakes: None) -> None:
    from polyattn_xpu.attention import VarlenAttention

    for spec in (SMALL.replace(sliding_window=1), SMALL.replace(sliding_window=1, needs_lse=True)):
        check_paged(VarlenAttention, spec, 64, TIGHT)
        check_given(VarlenAttention, spec, TIGHT)


@pytest.mark.parametrize(
    "change",
    [{}, {"causal": False}, {"sliding_window": 7}, {"chunk_size": 9},
     {"causal": False, "sliding_window": 7, "window_right": 3}],
    ids=["causal", "not causal", "window", "chunks", "window of two sides"],
)  # fmt: skip
@pytest.mark.parametrize("rows", [1 << 14, 12], ids=["whole", "cut"])
def test_neuron_by_hand(
    change: dict[str, Any], rows: int, fakes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole prompts, and prompts that take several calls."""
    from polyattn_neuron import attention

    monkeypatch.setattr(attention, "MOST_ROWS", rows)
    check_paged(attention.NkiAttention, SMALL.replace(**change), 16, TIGHT)
    check_given(attention.NkiAttention, SMALL.replace(**change), TIGHT)


def test_serves_its_own_hardware_and_says_why_not() -> None:
    for profile, name in BACKENDS.items():
        decision = select(LLAMA, profile).decision
        assert decision.prefill == decision.decode == name
        assert dict(decision.chosen)["store"] == "TORCH_STORE"
    refused = {
        "ascend-910b": {"sliding_window": 7}, "xpu-b580": {"alibi": True}, "trn2": {"dtype": "float16"},
    }  # fmt: skip
    for profile, change in refused.items():
        with pytest.raises(SelectionError, match=BACKENDS[profile]):
            select(LLAMA.replace(**change), profile, backend=BACKENDS[profile])


def test_declarations_are_light() -> None:
    """Those of all plugins: they import no library that computes."""
    plugins = Path(__file__).parents[2].glob("plugins/*/pyproject.toml")
    hooks = [f"polyattn_{plugin.parent.name}.hooks" for plugin in plugins]
    heavy = {"torch", "numpy", "jax", "triton", "mlx", "torch_npu", "nkilib"}
    code = f"import sys, {', '.join(hooks)}; print({heavy} & {{*sys.modules}})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_detects_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the libraries' own names of devices look like; nothing on a machine without them."""
    from polyattn_ascend import platform as ascend
    from polyattn_neuron import platform as neuron
    from polyattn_xpu import platform as xpu

    assert ascend.detect() is xpu.detect() is neuron.detect() is None
    assert "torch-neuronx is not installed" in str(neuron.ready())
    npu: Any = ModuleType("torch_npu")
    npu.npu = SimpleNamespace(
        is_available=lambda: True, current_device=lambda: 1,
        get_device_name=lambda index: ["Ascend910B3", "Ascend910_9362"][index],
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch_npu", npu)
    monkeypatch.setattr(ascend, "find_spec", lambda name: name)
    found = ascend.detect()
    assert found is not None and (found.arch, found.torch_device) == ("910c", "npu:1")
    found = ascend.detect("npu:0")
    assert found is not None and found.arch == resolve_device("ascend-910b").arch
    assert ascend.detect("cpu") is None and ascend.current() == "npu:1"

    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 0)
    for name, arch in (
        ("Intel(R) Arc(TM) B580 Graphics", "xe2"), ("Intel(R) Arc(TM) A770 Graphics", "xe"),
        ("Intel(R) Data Center GPU Max 1550", "pvc"),
    ):  # fmt: skip
        monkeypatch.setattr(torch.xpu, "get_device_name", lambda index, name=name: name)
        found = xpu.detect()
        assert found is not None and (found.arch, found.torch_device) == (arch, "xpu:0")
    assert xpu.detect("cuda") is None and xpu.current() == "xpu:0"

    cores = SimpleNamespace(
        device_count=lambda: 4,
        current_device=lambda: 0,
        get_device_name=lambda index: "trn2.3xlarge",
    )
    monkeypatch.setattr(torch, "neuron", cores, raising=False)
    monkeypatch.setitem(sys.modules, "torch_neuronx", ModuleType("torch_neuronx"))
    monkeypatch.setattr(neuron, "find_spec", lambda name: name)
    found = neuron.detect("neuron:2")
    assert found is not None and (found.arch, found.torch_device) == ("trn2", "neuron:2")
    assert neuron.detect("xpu") is None and neuron.ready() is None
