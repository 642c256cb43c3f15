"""The CUDA plugin's claims: the kit over fakes that bind signatures and compute, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapters import FAKES
from kits import OVER_FAKES, PARTS, conforms
from polyattn import Device, LayerGroup, LayerSpec, discover
from polyattn.api import select
from polyattn.errors import SelectionError, SpecError
from polyattn.registry.capabilities import check
from polyattn.workload.base import family_of
from polyattn.workload.dice import Dice
from polyattn.workload.tolerance import TOLERANCES, tolerance_of

pytest.importorskip("triton")
SPEC = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
QUANTISED = SPEC.replace(kv_cache_dtype="fp8_e4m3")


@PARTS
@pytest.mark.parametrize(
    ("backend", "profile"),
    [
        ("FLASH_ATTN", "a100"), ("FLASH_ATTN_V3", "h100-sxm"), ("FLASHINFER", "h100-sxm"),
        ("XFORMERS", "a100"),
    ],
)  # fmt: skip
def test_conforms_over_the_fake(backend: str, profile: str, part: tuple[str, ...]) -> None:
    conforms(
        backend, 40, "-p", "polyattn_on_cpu", "--polyattn-as", profile, *OVER_FAKES, *part,
        PYTHONPATH=str(FAKES), POLYATTN_DISABLE_PLUGINS="triton",
    )  # fmt: skip


def test_fp8_products_are_asked_for() -> None:
    """A kernel that rounds the query too serves only those who said that it may."""
    with pytest.raises(SelectionError, match="set fp8_compute=True"):
        select(QUANTISED, "h100-sxm", backend="FLASH_ATTN_V3")
    with pytest.raises(SpecError, match="fp8_compute=True goes with kv_cache_dtype='fp8_e4m3'"):
        SPEC.replace(fp8_compute=True)
    assert "fp8_compute" not in str(select(QUANTISED.replace(fp8_compute=True), "h100-sxm"))
    assert tolerance_of(QUANTISED) is TOLERANCES["bfloat16"]
    assert tolerance_of(QUANTISED.replace(fp8_compute=True)).output > 0.1


def test_bf16_begins_with_ampere() -> None:
    turing = Device("cuda", "sm_75")
    info = discover().backends["XFORMERS"].capabilities
    assert not check(info, SPEC.replace(dtype="float16"), turing)
    assert "bf16 products begin with sm_80" in str(check(info, SPEC, turing)[0])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        *(
            ({"head_size": size}, f"head_size: wanted {size}.*by 64 elements.*flashinfer#4299")
            for size in (80, 96, 112, 160)
        ),
        ({"head_size": 192, "kv_cache_dtype": "fp8_e4m3"}, "multiples of 128"),
        ({"head_size": 192, "v_head_size": 128}, "one size for keys and values"),
        ({"mask": "custom", "graph_capture": "single_token_decode"}, "no buffers of a graph's"),
        (
            {"mask": "block_sparse", "graph_capture": "single_token_decode"},
            "no buffers of a graph's",
        ),
    ],
)
def test_what_flashinfer_refuses(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(SelectionError, match=why):
        select(SPEC.replace(**changes), "h100-sxm", backend="FLASHINFER")
    taken = SPEC.replace(num_heads=56, head_size=192)
    assert select(taken, "h100-sxm", backend="FLASHINFER").decision.decode == "FLASHINFER"


def test_mla_prefills_on_hopper() -> None:
    spec = LayerSpec.from_hf_config(
        {"model_type": "deepseek_v3", "num_hidden_layers": 1, "num_attention_heads": 128,
         "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
         "hidden_size": 7168, "torch_dtype": "bfloat16"}
    )[0]  # fmt: skip
    for backend in ("FLASH_ATTN_V3", "FLASHINFER", "XFORMERS"):
        chosen = select(spec, "h200", backend=f"prefill={backend}").decision
        assert chosen.prefill == backend


def test_sinks_are_read_in_the_layer_s_dtype() -> None:
    """vLLM's FlashAttention-3 reads them in bf16, which a float16 layer's don't fit."""
    builds = discover().backend("FLASH_ATTN_V3").builds_on("cuda")
    reads = next(b.capabilities for b in builds if "learned_sinks" in b.capabilities.features)
    spec, hopper = SPEC.replace(learned_sinks=True), Device("cuda", "sm_90")
    assert not check(reads, spec, hopper)
    (refused,) = check(reads, spec.replace(dtype="float16"), hopper)
    assert "it reads sinks in bf16" in str(refused)
    group = LayerGroup(select(spec, "cpu", backend="TORCH_SDPA"))
    sinks = family_of(spec).layer_of(group, Dice(3)).params.sinks
    assert torch.equal(sinks, sinks.bfloat16().float()) and sinks.dtype == torch.float32


def test_flash_attention_3_gives_the_first_level_in_the_build_that_was_measured() -> None:
    """Captured steps too; 8-bit numbers were not compared, and chunks changed bits on an H200."""
    hopper = Device("cuda", "sm_90")
    builds = {
        b.build: b.capabilities for b in discover().backend("FLASH_ATTN_V3").builds_on("cuda")
    }
    preferred, measured = builds["flash-attn-3"], builds["vllm"]
    for level in ("batch", "steps", "calls"):
        spec = SPEC.replace(batch_invariant=level, graph_capture="any")
        assert bool(check(measured, spec, hopper)) == (level != "batch")
        assert check(preferred, spec, hopper)
    refused = map(str, check(measured, QUANTISED.replace(batch_invariant="batch"), hopper))
    assert any(
        "its bits were compared with 16-bit queries and keys alone" in why for why in refused
    )
