"""Backends that exist on paper, for tests of selection: no kernel ever runs."""

from __future__ import annotations

from typing import Any

from polyattn.device import Device
from polyattn.registry.builtin import BUILTIN
from polyattn.registry.capabilities import Capabilities, one_of
from polyattn.registry.devices import resolve_device
from polyattn.registry.info import BackendInfo, Priority
from polyattn.selection.selection import Decision
from polyattn.selection.tree import Facts, decide
from polyattn.settings import Settings
from polyattn.spec.kinds import AttentionKind
from polyattn.spec.layer import LayerSpec

H100 = resolve_device("h100-sxm")
A100 = resolve_device("a100")


def backend(name: str, score: int = 50, **claims: Any) -> BackendInfo:
    claims.setdefault("platforms", {"cuda": ("sm_80+",)})
    return BackendInfo(
        name=name,
        summary="",
        path="nowhere:Nothing",
        capabilities=Capabilities(**claims),
        priorities=(Priority(score=score),),
    )


FAST_PREFILL = backend("FAST_PREFILL", 90, phases=frozenset({"prefill"}))
FAST_DECODE = backend("FAST_DECODE", 90, phases=frozenset({"decode"}))
GENERAL = backend(
    "GENERAL", 50,
    features=frozenset({"causal", "gqa", "alibi", "sliding_window", "lse"}),
    layouts=("NHD", "HND"),
)  # fmt: skip
HOPPER = backend("HOPPER", 95, platforms={"cuda": ("sm_90-sm_90",)}, head_sizes=one_of(64, 128))
HND_ONLY = backend("HND_ONLY", 80, layouts=("HND",))
BIG_BLOCKS = backend("BIG_BLOCKS", 70, block_sizes=one_of(64), preferred_block_size=64)
LATENT = backend("LATENT", kinds=frozenset({AttentionKind.MLA}))
MAMBA = backend("MAMBA", kinds=frozenset({AttentionKind.MAMBA2}))

LLAMA = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)


def choose(
    *backends: BackendInfo,
    spec: LayerSpec = LLAMA,
    device: Device = H100,
    settings: Settings | None = None,
    named: str | None = None,
    failed: dict[str, str] | None = None,
    unavailable: dict[str, str] | None = None,
) -> Decision:
    missing = unavailable or {}
    facts = Facts(
        backends={b.name: b for b in (*BUILTIN, *backends)},
        unavailable=lambda info: missing.get(info.name),
        rank=lambda phase, ranking: ranking,
        failed=failed or {},
    )
    settings = (settings or Settings()).with_backend(named, "argument backend")
    return decide(spec, device, facts, settings)
