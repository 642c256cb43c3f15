"""The CUDA plugin's MLA adapters, over fakes that bind and compute what they are asked.

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
from fake_libraries.polyattn_fakes import bind, by_columns
from polyattn import Batch, Device, LayerSpec, SparseSpec
from polyattn.families.attention import reference
from polyattn.kernel import (
    AttentionBackend,
    CacheFormat,
    Frame,
    KVCache,
    LayerParams,
    SparseBackend,
)
from polyattn.runtime.cache.rows import decoded, encoded
from polyattn.spec.decompose import absorbed
from polyattn.spec.latent import LatentSpec
from polyattn.spec.row_format import row_format
from polyattn.workload.compare import lse_error, output_error
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

    record = "flashinfer_mla"

    def __init__(self, *args: Any, **kwargs: Any):
        self.backend = bind(self.record, "BatchMLAPagedAttentionWrapper.__init__", args, kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self.planned = bind(self.record, "BatchMLAPagedAttentionWrapper.plan", args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> None:
        a = bind(self.record, "BatchMLAPagedAttentionWrapper.run", args, kwargs)
        query = torch.cat([a["q_nope"], a["q_pe"]], dim=2)
        parts = [a["ckv_cache"], a["kpe_cache"]]
        if self.backend.get("backend") != "cutlass":
            planned = self.planned
            assert planned["q_data_type"] == query.dtype
            assert all(part.dtype == planned["kv_data_type"] for part in parts)
        if parts[0].dtype.itemsize == 1:  # what the library's own checks demand
            assert planned["kv_data_type"] == torch.float8_e4m3fn and query.dtype == torch.bfloat16
            scales = [float(a[name]) for name in ("ckv_scale", "kpe_scale")]
            parts = [part.double() * scale for part, scale in zip(parts, scales, strict=True)]
        else:
            assert a.get("ckv_scale") is None and a.get("kpe_scale") is None
        rows = torch.cat(parts, dim=2)
        rank, page = a["q_nope"].shape[2], rows.shape[1]
        if self.backend.get("backend") == "cutlass":
            lens, table, scale = a["kv_len"].tolist(), by_columns(a["page_table"]), SPEC.scale
            begins = list(range(len(query) + 1))
        else:
            p = self.planned
            assert p["head_dim_ckv"] == rank and p["page_size"] == page and p["causal"] is True
            starts, lens, scale = p["kv_indptr"].tolist(), p["kv_len_arr"].tolist(), p["sm_scale"]
            assert 5e4 * scale > 20, "hidden keys, whose logits are -5e4 before the scale, weigh"
            table = [p["kv_indices"][b:e] for b, e in itertools.pairwise(starts)]
            begins = p["qo_indptr"].tolist()
        out, lse = decode_all(query, rows, table, begins, lens, scale, rank, page)
        a["out"].copy_(out)
        if a.get("return_lse"):
            assert a["return_lse_base_on_e"] is True
            a["lse"].copy_(lse)


class Wrapper7(Wrapper):
    """The same of FlashInfer 0.7, which reads latents in e4m3."""

    record = "flashinfer_mla_0_7"


def sparse_trtllm(*args: Any, **kwargs: Any) -> None:
    a = bind("flashinfer_mla", "trtllm_batch_decode_with_kv_cache_mla", args, kwargs)
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
    a = bind("flash_mla", "flash_mla_with_kvcache", args, kwargs)
    if a.get("is_fp8_kvcache"):
        return sparse_decode(a)
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


def sparse_decode(a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Attend to rows of 656 bytes, as FlashMLA's interface describes them."""
    assert not a.get("causal") and a["q"].shape[1] == 1 and a["k_cache"].dtype is torch.uint8
    bytes_ = a["k_cache"].flatten(0, 2)
    eight = bytes_[:, :512].view(torch.float8_e4m3fn).double().unflatten(1, (4, 128))
    scales, rope = bytes_[:, 512:528].view(torch.float32), bytes_[:, 528:].view(torch.bfloat16)
    rows = torch.cat([(eight * scales[..., None]).flatten(1), rope.double()], 1)
    out, _, lse = flash_mla_sparse_fwd(
        a["q"][:, 0], rows[:, None], a["indices"], a["softmax_scale"], a["head_dim_v"]
    )
    return out[:, None], lse[..., None]


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, None, None]:
    a = bind("flash_attn_3", "flash_attn_with_kvcache", args, kwargs)
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
    a = bind("flash_mla", "flash_mla_sparse_fwd", args, kwargs)
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
SPARSE = SPEC.replace(kind="sparse_mla", sparse=SparseSpec(budget=128))


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
    table = torch.cat([table, torch.full_like(table, -1)], 1)[:, :width]  # of a wider one
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
    ("backend", "queries", "scale"),
    [("CutlassMLA", SINGLE, SPEC.scale), ("FlashInferMLA", SAME, 1e-6)]
    + [(b, q, SPEC.scale) for b in LATENT if b != "CutlassMLA" for q in (SINGLE, SAME, RAGGED)],
)
def test_latent_decode(backend: str, queries: list[int], scale: float, libraries: None) -> None:
    """Two steps planned one after another, then run in the other order."""
    module, page = LATENT[backend]
    alone = backend == "CutlassMLA"  # no LSE, and single tokens
    batch, cache, query = latent_step(page, queries, LENS if max(queries) == 1 else [17, 9, 2, 64])
    kind = getattr(importlib.import_module(f"polyattn_cuda.{module}"), backend)
    spec = SPEC.replace(scale=scale)
    made: AttentionBackend = kind(spec, cache.format, CUDA_ON_CPU)
    assert batch.block_table is not None
    other = Batch(batch.starts, [n and 4 for n in batch.lens], batch.block_table)
    plans = [(step, made.plan(step)) for step in (batch, other)]
    for step, plan in plans[::-1]:
        out = torch.full((len(query), 8, 512), torch.nan)
        lse = torch.full(out.shape[:2], torch.nan)
        made.run(plan, Frame(query, None, None, cache, LayerParams(), out, None if alone else lse))
        expected, expected_lse = reference.forward(absorbed(spec), query, None, None, cache, step)
        assert output_error(out, expected) < 1e-5
        if not alone:
            assert lse_error(lse, expected_lse) < 1e-4


@pytest.mark.parametrize(("heads", "programs"), [(8, 4), (64, 4), (65, 8)])
def test_flash_attns_captured_latents_split_by_the_step_s_shape(
    heads: int, programs: int, fakes: None, libraries: None
) -> None:
    """By 132 multiprocessors; its programs take 64 heads. Eager steps leave it to the library."""
    from polyattn_cuda.flash_attn_mla import UpstreamFlashAttentionMLA

    batch, cache, _ = latent_step(32, SINGLE, LENS)
    spec = SPEC.replace(num_heads=heads)
    for capture, splits in (("uniform", 132 // programs), ("none", 0)):
        backend = UpstreamFlashAttentionMLA(
            spec.replace(graph_capture=capture), cache.format, CUDA_ON_CPU
        )
        assert backend.plan(batch).splits == min(splits, 32)


@pytest.mark.parametrize("queries", [SINGLE, SAME, RAGGED])
@pytest.mark.parametrize("stored", ["bfloat16", "fp8_e4m3"])
def test_flashinfers_latents_in_e4m3(
    stored: str, queries: list[int], libraries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer 0.7: one scale of the latent cache, for both of its parts."""
    from polyattn_cuda.flashinfer_mla import FlashInferMLA

    mla: Any = sys.modules["flashinfer.mla"]
    monkeypatch.setattr(mla, "BatchMLAPagedAttentionWrapper", Wrapper7)
    cached = "auto" if stored == "bfloat16" else stored
    spec = SPEC.replace(dtype="bfloat16", kv_cache_dtype=cached)
    lens = LENS if max(queries) == 1 else [17, 9, 2, 64]
    batch, full, query = latent_step(32, queries, lens)
    form = CacheFormat(
        block_size=32, num_kv_heads=1, head_size=576, v_head_size=512, dtype=stored,
        value_in_key=True,
    )  # fmt: skip
    cache, query = KVCache.allocate(form, 20), query.bfloat16()
    params = LayerParams(k_scale=0.25, v_scale=0.25)
    cache.key.copy_((full.key / (0.25 if cached != "auto" else 1.0)).to(cache.key.dtype))
    made = FlashInferMLA(spec, form, CUDA_ON_CPU)
    out = torch.full((len(query), 8, 512), torch.nan, dtype=torch.bfloat16)
    lse = torch.full(out.shape[:2], torch.nan)
    made.run(made.plan(batch), Frame(query, None, None, cache, params, out, lse))
    wanted, wanted_lse = reference.forward(absorbed(spec), query, None, None, cache, batch, params)
    assert output_error(out, wanted) < 4e-3 and lse_error(lse, wanted_lse) < 1e-4


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
    made.run(plan, Frame(query, None, None, cache, LayerParams(), out, None, slots))
    rows = cache.key.flatten(0, 2)
    for index in range(4):
        chosen = slots[index][slots[index] >= 0].long()
        expected, _ = mqa(query[index], rows[chosen], SPEC.scale, 512)
        assert output_error(out[index], expected) < 1e-5


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_flashmlas_rows_of_656_bytes(scale: float, libraries: None) -> None:
    from polyattn_cuda.flashmla import UpstreamFlashSparseMLA

    spec = SPARSE.replace(dtype="bfloat16", kv_cache_dtype="fp8_ds_mla")
    form = CacheFormat(
        block_size=64, num_kv_heads=1, head_size=576, v_head_size=512, dtype="fp8_ds_mla",
        value_in_key=True,
    )  # fmt: skip
    cache, v32 = KVCache.allocate(form, 4), row_format("fp8_ds_mla")
    cache.key.copy_(encoded(torch.randn((*cache.key.shape[:3], 576)), v32))
    slots = torch.stack([torch.randperm(256)[:128] for _ in range(3)]).int()
    slots[1], slots[2, 5:] = -1, -1
    query, out = torch.randn(3, 8, 576).bfloat16(), torch.empty(3, 8, 512, dtype=torch.bfloat16)
    lse, params = torch.empty(3, 8), LayerParams(k_scale=scale, v_scale=scale)
    made = UpstreamFlashSparseMLA(spec, form, CUDA_ON_CPU)
    made.run(made.plan(Batch([0, 1, 2, 3], [9, 9, 9], torch.zeros(3, 1).int())),
             Frame(query, None, None, cache, params, out, lse, slots))  # fmt: skip
    rows = scale * decoded(cache.key, v32, 576).flatten(0, 2)
    assert not out[1].any() and lse[1].eq(-torch.inf).all()
    for index in (0, 2):
        chosen = slots[index][slots[index] >= 0].long()
        wanted, wanted_lse = mqa(query[index].float(), rows[chosen], SPEC.scale, 512)
        assert output_error(out[index], wanted) < 4e-3 and lse_error(lse[index], wanted_lse) < 1e-4
