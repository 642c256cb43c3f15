"""Which cases follow from the claims of a recurrent backend? Pure data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from polyattn.conformance.case import Case, captures
from polyattn.conformance.cases import invariance
from polyattn.conformance.cases.functions import FEATURES, refused, registered
from polyattn.conformance.cases.mla import refusals
from polyattn.device import Device
from polyattn.families.recurrent.workload import unusual
from polyattn.registry.capabilities import Capabilities, check
from polyattn.registry.info import BackendInfo
from polyattn.spec.kinds import DTYPES, AttentionKind, GraphCapture
from polyattn.spec.layer import LayerSpec
from polyattn.spec.recurrent import RecurrentSpec
from polyattn.workload.steps import RECURRENT


def _sized(heads: int, size: int, groups: int, value: int = 0, **form: Any) -> dict[str, Any]:
    return {
        "num_heads": heads,
        "num_kv_heads": groups,
        "head_size": size,
        "v_head_size": value or size,
        "recurrent": RecurrentSpec(**form),
    }


EACH, LAST = "each tokens target", "each sequences target"
"""Inputs of captured steps whose states go elsewhere."""
PUBLISHED: dict[AttentionKind, dict[str, dict[str, Any]]] = {
    AttentionKind.MAMBA1: {
        "Falcon-Mamba": {
            "num_heads": 512,
            "num_kv_heads": 512,
            "recurrent": RecurrentSpec(state_size=16),
        }
    },
    AttentionKind.MAMBA2: {
        "Falcon-H1": _sized(4, 128, 1, state_size=256),
        "Nemotron-H": _sized(16, 64, 8, state_size=128),
        "Zamba2": _sized(6, 64, 2, state_size=64),
        "Mamba2 of 80 heads": _sized(80, 16, 1, state_size=32),
    },
    AttentionKind.LINEAR: {"MiniMax": _sized(4, 128, 4, state_size=128)},
    AttentionKind.GDN: {
        "Qwen3-Next": _sized(4, 128, 2, 128, state_size=128, qk_norm=True),
        "head_size 192": _sized(2, 192, 2, 192, state_size=192, qk_norm=True),
        "v twice as wide": _sized(3, 64, 3, 128, state_size=64, qk_norm=True),
    },
    AttentionKind.KDA: {"Kimi": _sized(3, 128, 3, 128, state_size=128, qk_norm=True)},
    AttentionKind.RWKV6: {"World 1.6B": _sized(32, 64, 32, 64, state_size=64)},
    AttentionKind.RWKV7: {"65 heads": _sized(65, 16, 65, 16, state_size=16)},
    AttentionKind.RG_LRU: {"2560 channels": {"num_heads": 2560, "num_kv_heads": 2560}},
    AttentionKind.SHORT_CONV: {
        "3072 channels": {"num_heads": 3072, "num_kv_heads": 3072},
        "width 8": {"recurrent": RecurrentSpec(conv_width=8)},
    },
}
"""Sizes that published models have, of fewer heads, and beyond those of `specs`."""
MOVED = ("sequences", "tokens", "accepted")
"""Where states go: a sequence's to another slot, each token's to its own, on from an accepted one."""


def derive(info: BackendInfo, device: Device) -> list[Case]:
    """Return the cases of a recurrent backend's claims."""
    caps = info.capabilities
    cases = []
    dtype = next(d for d in ("bfloat16", "float16", "float32") if d in caps.dtypes)
    for kind in sorted(caps.kinds, key=lambda k: k.value):
        for label, spec in specs(kind, dtype):
            cases.append(Case("recurrence", f"{kind.value} {label}", spec, "mixed"))
        base = specs(kind, dtype)[0][1]
        for label, spec in _precisions(base):
            cases += [
                Case("recurrence", f"{kind.value} {label}", spec, name)
                for name in ("mixed", "tokens")
            ]
        for name in [name for name in RECURRENT if name != "mixed"]:
            cases.append(Case("recurrence", kind.value, base, name))
        for other in DTYPES:
            if other in caps.dtypes and other != dtype:
                cases.append(
                    Case("recurrence", f"{kind.value} {other}", base.replace(dtype=other), "mixed")
                )
        exact = next((d for d in ("float64", "float32") if d in caps.dtypes), dtype)
        cases.append(Case("pieces", kind.value, base.replace(dtype=exact), "none"))
        if kind is not AttentionKind.SHORT_CONV:
            for inputs in unusual(base):
                cases.append(Case("recurrence", kind.value, base, "mixed", inputs))
        cases += [
            Case(looked_at, kind.value, base, "mixed")
            for looked_at in ("recurrent_out", "recurrent_strided", "recurrent_plans")
        ]
        cases += [Case("state_targets", f"{kind.value} {how}", base, "mixed") for how in MOVED]
        for how in ("numbers", "nan", "inf"):
            cases.append(Case("state_isolation", f"{kind.value} {how}", base, "mixed"))
        cases += _captured(base, kind.value, caps, device)
        if kind is min(caps.kinds, key=lambda k: k.value):
            cases += [Case(name, kind.value, base, "tokens") for name in ("many_calls", "process")]
        cases.append(Case("recurrent_search", kind.value, base, "drawn"))
        cases += invariance.of_others(caps, base, kind.value, "mixed")
        cases += _with_drafts(kind, dtype, exact, caps, device)
        cases += refusals(caps, base, device, "prefill")
    return [
        c
        for c in cases
        if c.check == "refusal"
        or not (check(caps, c.spec, device) or (c.spec.variant and refused(info, c.spec)))
    ]


def _with_drafts(
    kind: AttentionKind, dtype: str, exact: str, caps: Capabilities, device: Device
) -> Iterator[Case]:
    """Yield the cases of a convolution's state with room for drafts."""
    for label, spec in specs(kind, dtype):
        form = spec.recurrent
        if form is None or not form.draft_tokens:
            continue
        label = f"{kind.value} {label}"
        for name in [name for name in RECURRENT if name != "mixed"]:
            yield Case("recurrence", label, spec, name)
        yield Case("pieces", label, spec.replace(dtype=exact), "none")
        yield Case("rejected_drafts", label, spec, "none")
        yield Case("state_targets", f"{label}, sequences", spec, "mixed")
        yield Case("state_isolation", f"{label}, nan", spec, "mixed")
        yield from _captured(spec, label, caps, device)


def _captured(spec: LayerSpec, label: str, caps: Capabilities, device: Device) -> Iterator[Case]:
    """Captured steps: of single tokens, of several, and of states that go elsewhere."""
    how = "recurrent_graph" if captures(device) else "recurrent_reuse"
    sizes = [("single_token_decode", "tokens"), ("uniform", "three each")]
    for capture, batch in sizes[: min(caps.graph_capture, len(sizes))]:
        asked = spec.replace(graph_capture=capture)
        yield Case(how, label, asked, batch)
        if caps.state_targets and spec.recurrent is not None and not spec.recurrent.draft_tokens:
            yield Case(how, label, asked, batch, EACH)
            yield Case(how, label, asked, batch, LAST)
    if caps.graph_capture >= GraphCapture.ANY:
        how = how.replace("recurrent", "recurrent_mixed")
        yield Case(how, label, spec.replace(graph_capture="any"), "mixed")


def _precisions(base: LayerSpec) -> Iterator[tuple[str, LayerSpec]]:
    """What states are kept in, and B and C come in: the options that not every kind has."""
    form = base.recurrent
    assert form is not None
    if base.kind in (AttentionKind.MAMBA1, AttentionKind.MAMBA2):
        yield "B and C in float32", base.replace(recurrent=replace(form, bc_in_float32=True))
    if base.kind is not AttentionKind.SHORT_CONV and base.dtype != "float64":
        for state_dtype in ("bfloat16", "float16"):
            yield (
                f"state {state_dtype}",
                base.replace(recurrent=replace(form, state_dtype=state_dtype)),
            )


def specs(kind: AttentionKind, dtype: str) -> list[tuple[str, LayerSpec]]:
    """Sizes that models have, odd ones, and every option of the kind."""

    def spec(
        heads: int, size: int = 1, groups: int = 0, value: int = 0, scale: float = 0, **form: Any
    ) -> LayerSpec:
        own = kind is AttentionKind.PHI_LINEAR and "feature_map" not in form
        return LayerSpec(
            kind=kind, num_heads=heads, num_kv_heads=groups, head_size=size, v_head_size=value,
            scale=scale, dtype=dtype, recurrent=RecurrentSpec(**form),
            variant=registered(FEATURES) if own else None,
        )  # fmt: skip

    if kind is AttentionKind.SHORT_CONV:
        return [
            ("silu", spec(136, conv_width=4, activation="silu")),
            ("width 3", spec(64, conv_width=3)),
            ("width 2", spec(33, conv_width=2)),
            ("drafts", spec(136, conv_width=4, draft_tokens=3, activation="silu")),
            ("width 2, drafts", spec(33, conv_width=2, draft_tokens=6)),
        ]
    if kind is AttentionKind.MAMBA1:
        return [
            ("state 16", spec(72, state_size=16)),
            ("no softplus", spec(24, state_size=8, dt_softplus=False)),
            ("gated", spec(72, state_size=16, gated=True)),
            ("grouped channels", spec(72, state_size=16, channel_groups=3)),
            ("grouped channels, gated", spec(200, state_size=8, channel_groups=2, gated=True)),
        ]
    if kind is AttentionKind.MAMBA2:
        return [
            ("64 x 128", spec(4, 64, 1, state_size=128)),
            ("groups", spec(6, 16, 3, state_size=32)),
            ("odd", spec(3, 24, 1, state_size=20, dt_softplus=False)),
            ("gated", spec(6, 24, 3, state_size=32, gated=True)),
        ]
    if kind is AttentionKind.LINEAR:
        return [("64", spec(4, 64, state_size=64)), ("odd", spec(3, 24, 3, 40, state_size=24))]
    if kind in (AttentionKind.RWKV6, AttentionKind.RWKV7):
        return [
            ("64", spec(4, 64, scale=1.0, state_size=64)),
            ("odd", spec(3, 24, 3, 40, state_size=24)),
        ]
    if kind is AttentionKind.RG_LRU:
        return [("136 channels", spec(136, state_size=1)), ("33 channels", spec(33, state_size=1))]
    if kind is AttentionKind.PHI_LINEAR:
        return [
            ("elu+1, grouped", spec(4, 64, 2, state_size=64, feature_map="elu+1")),
            ("a variant's", spec(4, 24, 2, 40, state_size=24)),
            ("relu, odd", spec(3, 24, 3, 40, state_size=24, feature_map="relu")),
        ]
    return [
        ("grouped, normed", spec(4, 64, 2, state_size=64, qk_norm=True)),
        ("odd", spec(3, 24, 3, 40, state_size=24)),
    ]
