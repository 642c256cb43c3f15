"""The CUDA plugin's MLA and recurrent adapters, over fakes that bind and compute what they are asked.

Every call is bound against the signature recorded from the real package; the answer is computed in
float64 from the very arguments, in the library's own conventions, and compared with the reference.
"""

from __future__ import annotations

import itertools
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from polyattn import (
    AttentionBackend,
    Batch,
    Device,
    KVCache,
    LayerParams,
    LayerSpec,
    RecurrentBackend,
)
from polyattn.checking.compare import lse_error, output_error
from polyattn.families import inputs as samples
from polyattn.families.attention import reference
from polyattn.families.recurrent import reference as reference_recurrent
from polyattn.runtime.kv_cache import KVCacheSpec
from polyattn.runtime.state_cache import StateCacheSpec
from polyattn.spec.decompose import absorbed
from polyattn.spec.layer import LatentSpec, RecurrentSpec
from polyattn.spec.recurrence import form_of
from test_signatures import bind
from torch import Tensor

CUDA_ON_CPU = Device("cuda", "sm_90", torch_device="cpu")
LENS = [17, 0, 5, 64]


def mqa(query: Tensor, rows: Tensor, scale: float, rank: int) -> tuple[Tensor, Tensor]:
    """One token's heads over given rows; returns (heads, rank) and (heads,)."""
    spec = LayerSpec(
        num_heads=query.shape[0], num_kv_heads=1, head_size=query.shape[1], v_head_size=rank,
        scale=scale, causal=False,
    )  # fmt: skip
    out, lse = reference.attend(spec, query[None], rows[:, None], rows[:, None, :rank])
    return out[0], lse[0]


def decode_all(
    query: Tensor, rows: Tensor, table: Any, lens: Any, scale: float, rank: int, page: int
) -> tuple[Tensor, Tensor]:
    """Decode each sequence over paged rows (pages, page, size); NaN where there are none."""
    out = torch.full((*query.shape[:2], rank), torch.nan, dtype=torch.float64)
    lse = torch.full(query.shape[:2], torch.inf, dtype=torch.float64)
    for index, length in enumerate(lens):
        if length:
            pages = torch.as_tensor(table[index][: -(-length // page)]).long()
            seen = rows[pages].flatten(0, 1)[:length]
            out[index], lse[index] = mqa(query[index], seen, scale, rank)
    return out, lse


class Wrapper:
    """FlashInfer's MLA wrapper."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.backend = bind(
            "flashinfer_mla", "BatchMLAPagedAttentionWrapper.__init__", *args, **kwargs
        )

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self.planned = bind("flashinfer_mla", "BatchMLAPagedAttentionWrapper.plan", *args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> None:
        a = bind("flashinfer_mla", "BatchMLAPagedAttentionWrapper.run", *args, **kwargs)
        query = torch.cat([a["q_nope"], a["q_pe"]], dim=2)
        rows = torch.cat([a["ckv_cache"], a["kpe_cache"]], dim=2)
        rank, page = a["q_nope"].shape[2], rows.shape[1]
        if self.backend.get("backend") == "cutlass":
            lens, table, scale = a["kv_len"].tolist(), a["page_table"], SPEC.scale
        else:
            p = self.planned
            assert p["head_dim_ckv"] == rank and p["page_size"] == page and p["causal"] is True
            starts, lens, scale = p["kv_indptr"].tolist(), p["kv_len_arr"].tolist(), p["sm_scale"]
            table = [p["kv_indices"][b:e] for b, e in itertools.pairwise(starts)]
        out, lse = decode_all(query, rows, table, lens, scale, rank, page)
        a["out"].copy_(out)
        if a.get("return_lse"):
            assert a["return_lse_base_on_e"] is True
            a["lse"].copy_(lse)


def sparse_trtllm(*args: Any, **kwargs: Any) -> None:
    a = bind("flashinfer_mla", "trtllm_batch_decode_with_kv_cache_mla", *args, **kwargs)
    assert a["sparse_mla_top_k"] == a["block_tables"].shape[2] and a["query"].dim() == 4
    rows = a["kv_cache"].flatten(0, 2)
    for index, slots in enumerate(a["block_tables"][:, 0]):
        chosen = slots[slots >= 0].long()
        assert len(chosen) == a["seq_lens"][index]
        if len(chosen):
            scale = a["bmm1_scale"]
            a["out"][index, 0] = mqa(a["query"][index, 0], rows[chosen], scale, a["kv_lora_rank"])[
                0
            ]


def flash_mla_with_kvcache(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    a = bind("flash_mla", "flash_mla_with_kvcache", *args, **kwargs)
    assert a["k_cache"].shape[1] == 64 and a["tile_scheduler_metadata"] == "schedule"
    out, lse = decode_all(
        a["q"][:, 0], a["k_cache"][:, :, 0], a["block_table"], a["cache_seqlens"].tolist(),
        a["softmax_scale"], a["head_dim_v"], 64,
    )  # fmt: skip
    return out[:, None], lse[:, :, None]


def flash_mla_sparse_fwd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    a = bind("flash_mla", "flash_mla_sparse_fwd", *args, **kwargs)
    assert a["indices"].dtype == torch.int32 and a["indices"].is_contiguous()
    query, rank = a["q"], a["d_v"]
    out = torch.full((*query.shape[:2], rank), torch.nan, dtype=torch.float64)
    lse = torch.full(query.shape[:2], torch.inf, dtype=torch.float64)
    for index, slots in enumerate(a["indices"][:, 0]):
        chosen = slots[slots >= 0].long()
        if len(chosen):
            out[index], lse[index] = mqa(query[index], a["kv"][chosen, 0], a["sm_scale"], rank)
    return out, lse, lse


SPEC = LayerSpec(
    kind="mla", num_heads=8, head_size=192, v_head_size=128, dtype="float32", needs_lse=True,
    latent=LatentSpec(rank=512, rope_head_size=64), scale=0.11,
)  # fmt: skip
SPARSE = SPEC.replace(kind="sparse_mla", latent=LatentSpec(rank=512, rope_head_size=64, topk=128))


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fakes of FlashInfer's and FlashMLA's modules."""
    flashinfer, mla, flash_mla = (
        ModuleType(n) for n in ("flashinfer", "flashinfer.mla", "flash_mla")
    )
    mla.BatchMLAPagedAttentionWrapper = Wrapper  # type: ignore[attr-defined]
    mla.trtllm_batch_decode_with_kv_cache_mla = sparse_trtllm  # type: ignore[attr-defined]
    flash_mla.flash_mla_with_kvcache = flash_mla_with_kvcache  # type: ignore[attr-defined]
    flash_mla.flash_mla_sparse_fwd = flash_mla_sparse_fwd  # type: ignore[attr-defined]
    flash_mla.get_mla_metadata = lambda: ("schedule", None)  # type: ignore[attr-defined]
    for module in (flashinfer, mla, flash_mla):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("polyattn_cuda.mla.flashmla_provider", lambda: "flash_mla")


def latent_step(page: int) -> tuple[Batch, KVCache, Tensor]:
    cache = KVCacheSpec(
        num_blocks=20, block_size=page, num_kv_heads=1, head_size=576, v_head_size=512,
        dtype="float32", value_in_key=True,
    ).allocate()  # fmt: skip
    cache.key.normal_()
    table = torch.randperm(20)[:8].view(4, 2).int()
    return Batch([0, 1, 2, 3, 4], LENS, table), cache, torch.randn(4, 8, 576)


@pytest.mark.parametrize(
    ("backend", "page"), [("FlashInferMLA", 32), ("FlashMLA", 64), ("CutlassMLA", 128)]
)
def test_latent_decode(backend: str, page: int, libraries: None) -> None:
    import polyattn_cuda.mla

    made: AttentionBackend = getattr(polyattn_cuda.mla, backend)(SPEC, CUDA_ON_CPU)
    batch, cache, query = latent_step(page)
    made.plan(batch)
    out, lse = torch.full((4, 8, 512), torch.nan), torch.full((4, 8), torch.nan)
    made.forward_decode(query, cache, LayerParams(), out, None if backend == "CutlassMLA" else lse)
    expected, expected_lse = reference.forward(absorbed(SPEC), query, None, None, cache, batch)
    assert output_error(out, expected) < 1e-5
    if backend != "CutlassMLA":
        assert lse_error(lse, expected_lse) < 1e-4


@pytest.mark.parametrize("backend", ["FlashInferSparseMLA", "FlashSparseMLA"])
def test_sparse_latent(backend: str, libraries: None) -> None:
    import polyattn_cuda.mla

    made: AttentionBackend = getattr(polyattn_cuda.mla, backend)(SPARSE, CUDA_ON_CPU)
    batch, cache, query = latent_step(64)
    made.plan(batch)
    slots = torch.randperm(20 * 64)[: 4 * 128].view(4, 128).int()
    slots[1] = -1
    slots[2, 5:] = -1
    out = torch.full((4, 8, 512), torch.nan)
    made.forward_sparse(query, cache, slots, LayerParams(), out, None)
    rows = cache.key.flatten(0, 2)
    for index in range(4):
        chosen = slots[index][slots[index] >= 0].long()
        expected, _ = mqa(query[index], rows[chosen], SPEC.scale, 512)
        assert output_error(out[index], expected) < 1e-5


def scan_by_reference(
    spec: LayerSpec, inputs: dict[str, Tensor], params: dict[str, Tensor], initial: Tensor,
    starts: list[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    outputs, finals = [], []
    for index in range(len(starts) - 1):
        rows = slice(starts[index], starts[index + 1])
        part = {name: t[rows].double() for name, t in inputs.items()}
        out, state = reference_recurrent.scan(spec, part, params, initial[index].double())
        outputs.append(out)
        finals.append(state)
    return torch.cat(outputs), torch.stack(finals)


def fake_fla(spec: LayerSpec) -> ModuleType:
    """fla's operators: [1, tokens, heads, size], starts int64, float32 states."""
    module = ModuleType("fla.ops")

    def gated(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            a = bind("fla", name, *args, **kwargs)
            assert a["cu_seqlens"].dtype == torch.int64 and a["output_final_state"] is True
            q, k, v, g = (a[n][0] for n in "qkvg")
            assert q.shape[1] == v.shape[1], "query heads are value heads"
            state = a["initial_state"].transpose(2, 3) if a["state_v_first"] else a["initial_state"]
            outs, finals = [], []
            starts = a["cu_seqlens"].tolist()
            for index in range(len(starts) - 1):
                h = state[index].double()
                for t in range(starts[index], starts[index + 1]):
                    h = g[t].double().exp()[:, None, None] * h
                    h = h + k[t].double()[:, :, None] * v[t].double()[:, None]
                    outs.append(a["scale"] * torch.einsum("hk,hkv->hv", q[t].double(), h))
                finals.append(h)
            final = torch.stack(finals)
            final = final.transpose(2, 3) if a["state_v_first"] else final
            return torch.stack(outs)[None].float(), final.float()

        return call

    def delta(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            a = bind("fla", name, *args, **kwargs)
            inputs = {n: a[n][0] for n in ("q", "k", "v", "g", "beta")}
            assert a["use_qk_l2norm_in_kernel"] is spec.recurrent.qk_norm
            out, final = scan_by_reference(
                spec.replace(scale=a["scale"]), inputs, {}, a["initial_state"],
                a["cu_seqlens"].tolist(),
            )  # fmt: skip
            return out[None].float(), final.float()

        return call

    for name in ("chunk_simple_gla", "fused_recurrent_simple_gla"):
        setattr(module, name, gated(name))
    for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
        setattr(module, name, delta(name))
    return module


def fake_mamba(spec: LayerSpec) -> ModuleType:
    """mamba-ssm's two kernels."""
    module = ModuleType("mamba_ssm")

    def mamba_chunk_scan_combined(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        a = bind("mamba_ssm", "mamba_chunk_scan_combined", *args, **kwargs)
        assert a["dt_softplus"] is True and a["return_final_states"] is True
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
        a = bind("mamba_ssm", "selective_state_update", *args, **kwargs)
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
        a = bind("causal_conv1d", "causal_conv1d_fn", *args, **kwargs)
        assert a["x"].stride(1) == 1 and a["initial_states"].stride(1) == 1
        return run(a["x"], a, a["initial_states"])

    def causal_conv1d_update(*args: Any, **kwargs: Any) -> Tensor:
        a = bind("causal_conv1d", "causal_conv1d_update", *args, **kwargs)
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
    ("FlashLinearAttention", recurrent("mamba2", 4, 8, 2, state_size=16)),
    ("FlashLinearAttention", recurrent("linear", 4, 8, state_size=8)),
    ("FlashLinearAttention", recurrent("gdn", 4, 8, 2, state_size=8, qk_norm=True)),
    ("MambaSSM", recurrent("mamba2", 4, 8, 2, state_size=16)),
    ("CausalConv1d", recurrent("short_conv", 12, conv_width=4, activation="silu")),
]


@pytest.mark.parametrize(("backend", "spec"), CASES)
@pytest.mark.parametrize("decode", [True, False])
def test_recurrent(
    backend: str, spec: LayerSpec, decode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import polyattn_cuda.recurrent

    fla, mamba, conv = fake_fla(spec), fake_mamba(spec), fake_conv(spec)
    for name in ("fla", "mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name in ("fla.ops", "fla.ops.simple_gla", "fla.ops.gated_delta_rule"):
        monkeypatch.setitem(sys.modules, name, fla)
    for name in ("ssd_combined", "selective_state_update"):
        monkeypatch.setitem(sys.modules, f"mamba_ssm.ops.triton.{name}", mamba)
    monkeypatch.setitem(sys.modules, "causal_conv1d", conv)
    made: RecurrentBackend = getattr(polyattn_cuda.recurrent, backend)(spec, CUDA_ON_CPU)
    queries, lens = ([1] * 4, [5, 1, 0, 9]) if decode else ([6, 6, 1, 0, 3], [6, 9, 0, 4, 20])
    slots = torch.tensor([3, 0, -1, 5, 2][: len(lens)])
    batch = Batch.from_lens(queries, lens, state_slots=slots)
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    params = {n: t.float() for n, t in samples.recurrent_params(spec, generator).items()}
    inputs = dict(
        zip(
            form_of(spec).inputs,
            samples.recurrent_inputs(spec, sum(queries), generator),
            strict=True,
        )
    )
    states = StateCacheSpec.for_layer(spec, 6).allocate().data.fill_(torch.nan)
    for slot, query, length in zip(slots.tolist(), queries, lens, strict=True):
        if length > query:
            states[slot] = torch.randn(states.shape[1:])
    expected, after = reference_recurrent.forward(spec, inputs, params, states, batch)
    made.plan(batch)
    out = torch.zeros(expected.shape)
    (made.forward_decode if decode else made.forward_prefill)(inputs, params, states, out)
    rows = len(out)
    assert output_error(out.reshape(rows, -1), expected.reshape(rows, -1)) < 2e-5
    used = [s for s, q, n in zip(slots.tolist(), queries, lens, strict=True) if q and n]
    assert output_error(states[used].flatten(1), after[used].flatten(1)) < 2e-5
    assert bool(torch.isnan(states[1]).all()) and bool(torch.isnan(states[4]).all())
