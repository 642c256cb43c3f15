"""Which cases follow from the claims of an MLA or a recurrent backend? Pure data, like `cases`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polyattn.conformance.case import Case, captures
from polyattn.device import Device
from polyattn.registry.capabilities import Capabilities, check
from polyattn.registry.info import BackendInfo
from polyattn.spec.kinds import DTYPES, KV_CACHE_DTYPES, AttentionKind
from polyattn.spec.layer import LatentSpec, LayerSpec, RecurrentSpec

TOPKS = (24, 128, 2048)


def derive_latent(info: BackendInfo, device: Device) -> list[Case]:
    """Return the cases of an MLA backend's claims."""
    caps = info.capabilities
    cases = []
    for kind in sorted(caps.kinds, key=lambda k: k.value):
        base = _latent_base(caps, kind)
        batches = ["decode", "padded", "mixed", "chunked", "empty", "late padding"]
        if kind is AttentionKind.SPARSE_MLA and "prefill" not in caps.phases:
            batches = ["decode", "padded", "empty"]
        cases += [Case("latent", kind.value, base, name) for name in batches]
        for label, spec in _latent_variants(caps, base):
            cases.append(Case("latent", f"{kind.value} {label}", spec, "decode"))
        cases.append(Case("latent_isolation", kind.value, base, "decode"))
        cases.append(Case("latent_replan", kind.value, base, "decode"))
        if caps.graph_capture and captures(device):
            spec = base.replace(graph_capture="single_token_decode")
            cases.append(Case("latent_graph", kind.value, spec, "decode"))
        cases += _refusals(caps, base, device, "decode")
    return [c for c in cases if c.check == "refusal" or not check(caps, c.spec, device, "decode")]


def _latent_base(caps: Capabilities, kind: AttentionKind) -> LayerSpec:
    rank = caps.latent_ranks.examples((64, 512))[0]
    small = rank < 512
    rope = 16 if small else 64
    topk = caps.topks.examples(TOPKS)[0] if kind is AttentionKind.SPARSE_MLA else None
    return LayerSpec(
        kind=kind,
        num_heads=16 if 16 in caps.gqa_ratios else 128,
        head_size=(32 if small else 128) + rope,
        v_head_size=32 if small else 128,
        dtype=next(d for d in ("bfloat16", "float16", "float32") if d in caps.dtypes),
        block_size=caps.preferred_block_size,
        latent=LatentSpec(rank=rank, rope_head_size=rope, topk=topk),
    )


def _latent_variants(caps: Capabilities, base: LayerSpec) -> Iterator[tuple[str, LayerSpec]]:
    for dtype in DTYPES:
        if dtype in caps.dtypes and dtype != base.dtype:
            yield f"dtype {dtype}", base.replace(dtype=dtype)
    for heads in caps.gqa_ratios.examples((1, 5, 128)):
        yield f"heads {heads}", base.replace(num_heads=heads, num_kv_heads=heads)
    if base.latent and base.latent.rank < 512 and 512 in caps.latent_ranks:
        latent = LatentSpec(rank=512, rope_head_size=64, topk=base.latent.topk)
        yield "rank 512", base.replace(head_size=192, v_head_size=128, latent=latent)
    for cached in KV_CACHE_DTYPES:
        if cached in caps.kv_cache_dtypes and cached != "auto":
            yield f"kv_cache_dtype {cached}", base.replace(kv_cache_dtype=cached)
    for size in caps.block_sizes.examples((1, 16, 32, 64, 128)):
        if size != base.block_size:
            yield f"block_size {size}", base.replace(block_size=size)
    expanded = caps.preferred_block_size * 2
    if expanded not in caps.block_sizes:
        yield f"expanded block_size {expanded}", base.replace(block_size=expanded)
    if "lse" in caps.features:
        yield "lse", base.replace(needs_lse=True)
    yield "scale", base.replace(scale=0.135)  # DeepSeek-V3's, with YaRN


def derive_recurrent(info: BackendInfo, device: Device) -> list[Case]:
    """Return the cases of a recurrent backend's claims."""
    caps = info.capabilities
    cases = []
    dtype = next(d for d in ("bfloat16", "float16", "float32") if d in caps.dtypes)
    for kind in sorted(caps.kinds, key=lambda k: k.value):
        for label, spec in _recurrent_specs(kind, dtype):
            cases.append(Case("recurrence", f"{kind.value} {label}", spec, "mixed"))
        base = _recurrent_specs(kind, dtype)[0][1]
        for name in ("fresh", "continued", "tokens", "padded", "empty"):
            cases.append(Case("recurrence", kind.value, base, name))
        for other in DTYPES:
            if other in caps.dtypes and other != dtype:
                cases.append(
                    Case("recurrence", f"{kind.value} {other}", base.replace(dtype=other), "mixed")
                )
        exact = next((d for d in ("float64", "float32") if d in caps.dtypes), dtype)
        cases.append(Case("pieces", kind.value, base.replace(dtype=exact), "none"))
        cases += [
            Case(looked_at, kind.value, base, "mixed")
            for looked_at in ("state_isolation", "recurrent_out", "recurrent_strided")
        ]
        if caps.graph_capture and captures(device):
            spec = base.replace(graph_capture="single_token_decode")
            cases.append(Case("recurrent_graph", kind.value, spec, "tokens"))
        cases += _refusals(caps, base, device, "prefill")
    return [c for c in cases if c.check == "refusal" or not check(caps, c.spec, device)]


def _recurrent_specs(kind: AttentionKind, dtype: str) -> list[tuple[str, LayerSpec]]:
    """Sizes that models have, odd ones, and every option of the kind."""

    def spec(heads: int, size: int = 1, groups: int = 0, value: int = 0, **form: Any) -> LayerSpec:
        return LayerSpec(
            kind=kind, num_heads=heads, num_kv_heads=groups, head_size=size, v_head_size=value,
            dtype=dtype, recurrent=RecurrentSpec(**form),
        )  # fmt: skip

    if kind is AttentionKind.SHORT_CONV:
        return [
            ("silu", spec(136, conv_width=4, activation="silu")),
            ("width 3", spec(64, conv_width=3)),
            ("width 2", spec(33, conv_width=2)),
        ]
    if kind is AttentionKind.MAMBA1:
        return [
            ("state 16", spec(72, state_size=16)),
            ("no softplus", spec(24, state_size=8, dt_softplus=False)),
        ]
    if kind is AttentionKind.MAMBA2:
        return [
            ("64 x 128", spec(4, 64, 1, state_size=128)),
            ("groups", spec(6, 16, 3, state_size=32)),
            ("odd", spec(3, 24, 1, state_size=20)),
        ]
    if kind is AttentionKind.LINEAR:
        return [
            ("64", spec(4, 64, state_size=64)),
            ("odd", spec(3, 24, 3, 40, state_size=24)),
        ]
    return [
        ("grouped, normed", spec(4, 64, 2, state_size=64, qk_norm=True)),
        ("odd", spec(3, 24, 3, 40, state_size=24)),
    ]


def _refusals(caps: Capabilities, base: LayerSpec, device: Device, phase: str) -> Iterator[Case]:
    attempts = {f"{base.kind.value} dtype {d}": base.replace(dtype=d) for d in DTYPES}
    if base.kind.is_latent:
        for cached in KV_CACHE_DTYPES:
            label = f"{base.kind.value} kv_cache_dtype {cached}"
            attempts[label] = base.replace(kv_cache_dtype=cached)
        attempts[f"{base.kind.value} lse"] = base.replace(needs_lse=True)
    for label, spec in attempts.items():
        if check(caps, spec, device, phase):
            yield Case("refusal", label, spec, "none")
