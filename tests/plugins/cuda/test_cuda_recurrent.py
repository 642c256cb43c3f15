"""The CUDA plugin's recurrent adapters, over fakes that bind and compute what they are asked.

Every call is bound against the signature recorded from the real package; the answer is computed in
float64 from the very arguments, in the library's own conventions, and compared with the reference.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from fake_libraries.polyattn_fakes import bind
from polyattn import Batch, Device, LayerGroup, LayerSpec, select
from polyattn.errors import SelectionError
from polyattn.families.recurrent import reference as reference_recurrent
from polyattn.kernel import AttentionKind, RecurrentBackend, RecurrentFrame
from polyattn.spec.recurrence import form_of
from polyattn.spec.recurrent import RecurrentSpec
from polyattn.workload.base import workload
from polyattn.workload.steps import Lengths
from torch import Tensor

CUDA_ON_CPU = Device("cuda", "sm_90", torch_device="cpu")


def scan_by_reference(
    spec: LayerSpec, inputs: dict[str, Tensor], params: dict[str, Tensor], initial: Tensor,
    starts: list[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    outputs, finals = [], []
    for index in range(len(starts) - 1):
        rows = slice(starts[index], starts[index + 1])
        part = {name: t[rows].double() for name, t in inputs.items()}
        out, state = reference_recurrent.scan(spec, part, params, initial[index].double(), before=1)
        outputs.append(out)
        finals.append(state)
    return torch.cat(outputs), torch.stack(finals)


def delta(spec: LayerSpec, name: str) -> Any:
    """fla's delta rules: inputs as our reference names them."""

    def call(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        a = bind("fla", name, args, kwargs)
        assert a["cu_seqlens"].dtype == torch.int64 and a["output_final_state"] is True
        assert a["initial_state"].dtype == torch.float32
        if spec.kind is not AttentionKind.RWKV7:
            assert a["use_qk_l2norm_in_kernel"] is spec.recurrent.qk_norm
        inputs = {n: a[n][0] for n in form_of(spec).inputs}
        rates = inputs["g" if "g" in inputs else "w"]
        assert not name.startswith("chunk") or rates.min() >= -104, "chunks sum rates up in float32"
        out, final = scan_by_reference(
            spec.replace(scale=a["scale"]), inputs, {}, a["initial_state"],
            a["cu_seqlens"].tolist(),
        )  # fmt: skip
        return out[None].float(), final.float()

    return call


def fake_fla(spec: LayerSpec) -> ModuleType:
    """fla's operators: [1, tokens, heads, size], starts int64, float32 states."""
    module = ModuleType("fla.ops")

    def gated(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            a = bind("fla", name, args, kwargs)
            assert a["cu_seqlens"].dtype == torch.int64 and a["output_final_state"] is True
            q, k, v, g = (a[n][0] for n in "qkvg")
            assert q.shape[1] == v.shape[1], "query heads are value heads"
            outs, finals = [], []
            starts = a["cu_seqlens"].tolist()
            for index in range(len(starts) - 1):
                h = a["initial_state"][index].double()
                for t in range(starts[index], starts[index + 1]):
                    h = g[t].double().exp()[:, None, None] * h
                    h = h + k[t].double()[:, :, None] * v[t].double()[:, None]
                    outs.append(a["scale"] * torch.einsum("hk,hkv->hv", q[t].double(), h))
                finals.append(h)
            return torch.stack(outs)[None].float(), torch.stack(finals).float()

        return call

    for kind in ("gated_delta_rule", "kda", "rwkv7"):
        for how in ("chunk", "fused_recurrent"):
            setattr(module, f"{how}_{kind}", delta(spec, f"{how}_{kind}"))
    for name in ("chunk_simple_gla", "fused_recurrent_simple_gla"):
        setattr(module, name, gated(name))
    return module


def fake_mamba(spec: LayerSpec) -> ModuleType:
    """mamba-ssm's two kernels."""
    module = ModuleType("mamba_ssm")

    def mamba_chunk_scan_combined(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        a = bind("mamba_ssm", "mamba_chunk_scan_combined", args, kwargs)
        assert bool((a["A"] <= 0).all()), "what grows within a chunk is cut off"
        assert a["return_final_states"] is True
        steps = a["dt"] + a["dt_bias"]
        assert a["dt_softplus"] or bool((steps >= 0).all()), "it takes a negative step for 0"
        params = {"A": a["A"], "D": a["D"], "dt_bias": a["dt_bias"]}
        found = [
            scan_by_reference(
                spec, {n: a[n][i] for n in ("x", "dt", "B", "C")}, params,
                a["initial_states"][i : i + 1], [0, a["x"].shape[1]],
            )
            for i in range(len(a["x"]))
        ]  # fmt: skip
        return torch.stack([f[0] for f in found]).float(), torch.cat([f[1] for f in found]).float()

    def selective_state_update(*args: Any, **kwargs: Any) -> Tensor:
        a = bind("mamba_ssm", "selective_state_update", args, kwargs)
        assert a["A"].stride(1) == a["A"].stride(2) == 0 and a["dt"].stride(2) == 0
        params = {"A": a["A"][:, 0, 0], "D": a["D"][:, 0], "dt_bias": a["dt_bias"][:, 0]}
        slots = a["state_batch_indices"].long()
        inputs = {"x": a["x"], "dt": a["dt"][:, :, 0], "B": a["B"], "C": a["C"]}
        starts = list(range(len(slots) + 1))
        out, final = scan_by_reference(spec, inputs, params, a["state"][slots], starts)
        a["state"][slots] = final.float()
        return out.float()

    module.mamba_chunk_scan_combined = mamba_chunk_scan_combined  # type: ignore[attr-defined]
    module.selective_state_update = selective_state_update  # type: ignore[attr-defined]
    return module


def fake_conv(spec: LayerSpec) -> ModuleType:
    """causal-conv1d's two functions, channels before tokens."""
    module = ModuleType("causal_conv1d")

    def run(x: Tensor, a: dict[str, Any], state: Tensor) -> tuple[Tensor, Tensor]:
        assert a["activation"] == spec.recurrent.activation
        params = {"weight": a["weight"].double(), "bias": a["bias"].double()}
        found = [
            scan_by_reference(spec, {"x": x[i].T}, params, state[i : i + 1], [0, x.shape[2]])
            for i in range(len(x))
        ]
        return torch.stack([f[0].T for f in found]).float(), torch.cat(
            [f[1] for f in found]
        ).float()

    def causal_conv1d_fn(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        a = bind("causal_conv1d", "causal_conv1d_fn", args, kwargs)
        batch, channels, tokens = a["x"].stride()  # csrc/causal_conv1d.cpp has these checks
        assert channels == 1 and a["initial_states"].stride(1) == 1
        assert not (a["x"].shape[1] % 8 or batch % 8 or tokens % 8)
        assert 2 <= a["weight"].shape[1] <= 4
        return run(a["x"], a, a["initial_states"])

    def causal_conv1d_update(*args: Any, **kwargs: Any) -> Tensor:
        a = bind("causal_conv1d", "causal_conv1d_update", args, kwargs)
        out, final = run(a["x"][:, :, None], a, a["conv_state"])
        a["conv_state"].copy_(final)
        return out[:, :, 0]

    module.causal_conv1d_fn = causal_conv1d_fn  # type: ignore[attr-defined]
    module.causal_conv1d_update = causal_conv1d_update  # type: ignore[attr-defined]
    return module


def recurrent(kind: str, heads: int, size: int = 1, groups: int = 0, **form: Any) -> LayerSpec:
    return LayerSpec(
        kind=kind, num_heads=heads, num_kv_heads=groups, head_size=size, dtype="float32",
        recurrent=RecurrentSpec(**form),
    )  # fmt: skip


CASES = [
    ("FlashLinearAttention", recurrent("linear", 4, 8, state_size=8)),
    ("FlashLinearAttention", recurrent("gdn", 4, 8, 2, state_size=8, qk_norm=True)),
    ("FlashLinearChannels", recurrent("kda", 4, 8, 2, state_size=8, qk_norm=True)),
    ("FlashLinearChannels", recurrent("rwkv7", 4, 8, state_size=8)),
    ("MambaSSM", recurrent("mamba2", 4, 8, 2, state_size=16)),
    ("MambaSSM", recurrent("mamba2", 4, 8, 2, state_size=16, dt_softplus=False)),
    ("CausalConv1d", recurrent("short_conv", 16, conv_width=4, activation="silu")),
]


@pytest.mark.parametrize(("backend", "spec"), CASES)
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 5), (1, 1), (1, 0), (1, 9)],
        [(6, 6), (6, 9), (1, 0), (0, 4), (3, 20)],
        [(6, 9), (3, 20)],
    ],
    ids=str,
)
@pytest.mark.parametrize("numbers", ["usual", "growing", "resets"])
def test_recurrent(
    backend: str, spec: LayerSpec, lengths: Lengths, numbers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import polyattn_cuda.recurrent

    fla, mamba, conv = fake_fla(spec), fake_mamba(spec), fake_conv(spec)
    for name in ("fla", "mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name in ("", ".simple_gla", ".gated_delta_rule", ".kda", ".rwkv7"):
        monkeypatch.setitem(sys.modules, f"fla.ops{name}", fla)
    for name in ("ssd_combined", "selective_state_update"):
        monkeypatch.setitem(sys.modules, f"mamba_ssm.ops.triton.{name}", mamba)
    monkeypatch.setitem(sys.modules, "causal_conv1d", conv)
    made: RecurrentBackend = getattr(polyattn_cuda.recurrent, backend)(spec, None, CUDA_ON_CPU)
    group = LayerGroup(select(spec, "cpu", backend="VANILLA_SCAN"))
    step = {"numbers": numbers}
    work = workload(group, lengths, numbers=numbers, step=step).remembered()
    plan = made.plan(work.batch)
    fresh = [query for query, _ in lengths]
    made.plan(Batch.from_lens(fresh, fresh, state_slots=work.batch.state_slots))  # another step's
    strided = {
        name: torch.nn.functional.pad(tensor, (0, 3))[..., : tensor.shape[-1]]
        for name, tensor in work.tensors().items()
    }
    frame = RecurrentFrame(strided, work.layer.params, work.states.data, work.out)
    made.run(plan, frame)
    work.compare(work.out, None)
    work.check_memory()


@pytest.mark.parametrize(("channels", "width", "why"), [(16, 8, "conv_width"), (12, 4, "channels")])
def test_causal_conv1d_refuses_what_its_kernels_lack(channels: int, width: int, why: str) -> None:
    spec = recurrent("short_conv", channels, conv_width=width)
    select(recurrent("short_conv", 16, conv_width=4), "h200", backend="CAUSAL_CONV1D")
    with pytest.raises(SelectionError, match=f"{why}: wanted {width if width > 4 else channels}"):
        select(spec, "h200", backend="CAUSAL_CONV1D")
