"""The CUDA plugin's MLA and recurrent adapters, over fakes that bind and compute what they are asked.

Every call is bound against the signature recorded from the real package; the answer is computed in
float64 from the very arguments, in the library's own conventions, and compared with the reference.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from polyattn import Batch, Device, LayerSpec
from polyattn.checking.compare import lse_error, output_error
from polyattn.families.attention import reference
from polyattn.families.recurrent import inputs as samples
from polyattn.families.recurrent import reference as reference_recurrent
from polyattn.kernel import (
    AttentionBackend,
    CacheFormat,
    KVCache,
    LayerParams,
    RecurrentBackend,
    SparseBackend,
)
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
    query: Tensor, rows: Tensor, table: Any, starts: Any, lens: Any, scale: float, rank: int,
    page: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend over paged rows (pages, page, size), causal within a sequence's own tokens.

    A token that sees nothing has NaN and the LSE +inf.
    """
    out = torch.full((*query.shape[:2], rank), torch.nan, dtype=torch.float64)
    lse = torch.full(query.shape[:2], torch.inf, dtype=torch.float64)
    for index, length in enumerate(lens):
        pages = torch.as_tensor(table[index][: -(-length // page)]).long()
        for token in range(starts[index], starts[index + 1]):
            seen = length - (starts[index + 1] - 1 - token)
            if seen > 0:
                found = rows[pages].flatten(0, 1)[:seen]
                out[token], lse[token] = mqa(query[token], found, scale, rank)
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
            begins = list(range(len(query) + 1))
        else:
            p = self.planned
            assert p["head_dim_ckv"] == rank and p["page_size"] == page and p["causal"] is True
            starts, lens, scale = p["kv_indptr"].tolist(), p["kv_len_arr"].tolist(), p["sm_scale"]
            table = [p["kv_indices"][b:e] for b, e in itertools.pairwise(starts)]
            begins = p["qo_indptr"].tolist()
        out, lse = decode_all(query, rows, table, begins, lens, scale, rank, page)
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
    count, width = a["q"].shape[:2]
    assert a["causal"] == (width > 1)
    out, lse = decode_all(
        a["q"].flatten(0, 1), a["k_cache"][:, :, 0], a["block_table"],
        list(range(0, count * width + 1, width)), a["cache_seqlens"].tolist(), a["softmax_scale"],
        a["head_dim_v"], 64,
    )  # fmt: skip
    shape = (count, width)
    return out.unflatten(0, shape), lse.unflatten(0, shape).transpose(1, 2)


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, None, None]:
    a = bind("flash_attn_3", "flash_attn_with_kvcache", *args, **kwargs)
    assert a["causal"] is True and a["k_cache"].shape[1] <= 32
    starts = a["cu_seqlens_q"].tolist()
    query = torch.cat([a["qv"], a["q"]], dim=2)
    rows = torch.cat([a["v_cache"], a["k_cache"]], dim=3)[:, :, 0]
    out, lse = decode_all(
        query, rows, a["page_table"], starts, a["cache_seqlens"].tolist(), a["softmax_scale"],
        a["v_cache"].shape[3], rows.shape[1],
    )  # fmt: skip
    return out, lse.T, None, None


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
    flashinfer, mla, flash_mla, flash3 = (
        ModuleType(n) for n in ("flashinfer", "flashinfer.mla", "flash_mla", "flash_attn_interface")
    )
    flash3.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    mla.BatchMLAPagedAttentionWrapper = Wrapper  # type: ignore[attr-defined]
    mla.trtllm_batch_decode_with_kv_cache_mla = sparse_trtllm  # type: ignore[attr-defined]
    flash_mla.flash_mla_with_kvcache = flash_mla_with_kvcache  # type: ignore[attr-defined]
    flash_mla.flash_mla_sparse_fwd = flash_mla_sparse_fwd  # type: ignore[attr-defined]
    flash_mla.get_mla_metadata = lambda: ("schedule", None)  # type: ignore[attr-defined]
    for module in (flashinfer, mla, flash_mla, flash3):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def latent_step(page: int, queries: list[int], lens: list[int]) -> tuple[Batch, KVCache, Tensor]:
    form = CacheFormat(
        block_size=page, num_kv_heads=1, head_size=576, v_head_size=512, dtype="float32",
        value_in_key=True,
    )  # fmt: skip
    cache = KVCache.allocate(form, 20)
    cache.key.normal_()
    width = -(-max(lens) // page)
    table = torch.randperm(20)[: 4 * width].view(4, width).int()
    starts = [0, *itertools.accumulate(queries)]
    return Batch(starts, lens, table), cache, torch.randn(starts[-1], 8, 576)


LATENT = {
    "FlashInferMLA": ("flashinfer_mla", 32),
    "UpstreamFlashMLA": ("flashmla", 64),
    "CutlassMLA": ("flashinfer_mla", 128),
    "UpstreamFlashAttentionMLA": ("flash_attn_mla", 32),
}


SINGLE, SAME, RAGGED = [1, 1, 1, 1], [2, 2, 2, 2], [3, 1, 2, 4]


@pytest.mark.parametrize(
    ("backend", "queries"),
    [("CutlassMLA", SINGLE)]
    + [(b, q) for b in LATENT if b != "CutlassMLA" for q in (SINGLE, SAME, RAGGED)],
)
def test_latent_decode(backend: str, queries: list[int], libraries: None) -> None:
    """Two steps planned one after another, then run in the other order."""
    module, page = LATENT[backend]
    alone = backend == "CutlassMLA"  # no LSE, and single tokens
    batch, cache, query = latent_step(page, queries, LENS if max(queries) == 1 else [17, 9, 2, 64])
    kind = getattr(importlib.import_module(f"polyattn_cuda.{module}"), backend)
    made: AttentionBackend = kind(SPEC, cache.format, CUDA_ON_CPU)
    assert batch.block_table is not None
    other = Batch(batch.starts, [n and 4 for n in batch.lens], batch.block_table)
    plans = [(step, made.plan(step)) for step in (batch, other)]
    for step, plan in plans[::-1]:
        out = torch.full((len(query), 8, 512), torch.nan)
        lse = torch.full(out.shape[:2], torch.nan)
        made.run(plan, query, None, None, cache, LayerParams(), out, None if alone else lse)
        expected, expected_lse = reference.forward(absorbed(SPEC), query, None, None, cache, step)
        assert output_error(out, expected) < 1e-5
        if not alone:
            assert lse_error(lse, expected_lse) < 1e-4


@pytest.mark.parametrize(
    ("backend", "module"),
    [("FlashInferSparseMLA", "flashinfer_mla"), ("UpstreamFlashSparseMLA", "flashmla")],
)
def test_sparse_latent(backend: str, module: str, libraries: None) -> None:
    kind = getattr(importlib.import_module(f"polyattn_cuda.{module}"), backend)
    batch, cache, query = latent_step(64, [1, 1, 1, 1], LENS)
    made: SparseBackend = kind(SPARSE, cache.format, CUDA_ON_CPU)
    plan = made.plan(batch)
    slots = torch.randperm(20 * 64)[: 4 * 128].view(4, 128).int()
    slots[1] = -1
    slots[2, 5:] = -1
    out = torch.full((4, 8, 512), torch.nan)
    made.run(plan, query, slots, cache, LayerParams(), out, None)
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
    made: RecurrentBackend = getattr(polyattn_cuda.recurrent, backend)(spec, None, CUDA_ON_CPU)
    queries, lens = ([1] * 4, [5, 1, 0, 9]) if decode else ([6, 6, 1, 0, 3], [6, 9, 0, 4, 20])
    slots = torch.tensor([3, 0, -1, 5, 2][: len(lens)])
    batch = Batch.from_lens(queries, lens, state_slots=slots)
    generator = torch.Generator().manual_seed(len(queries))
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
    plan = made.plan(batch)
    made.plan(Batch.from_lens(queries, queries, state_slots=slots))  # another step's, in between
    out = torch.zeros(expected.shape)
    made.run(plan, inputs, params, states, out)
    rows = len(out)
    assert output_error(out.reshape(rows, -1), expected.reshape(rows, -1)) < 2e-5
    used = [s for s, q, n in zip(slots.tolist(), queries, lens, strict=True) if q and n]
    assert output_error(states[used].flatten(1), after[used].flatten(1)) < 2e-5
    assert bool(torch.isnan(states[1]).all()) and bool(torch.isnan(states[4]).all())
