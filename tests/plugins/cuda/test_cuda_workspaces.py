"""Whose scratch does FlashInfer write to? A group's own: two groups may run on two streams at once."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from builds import CPU, SMALL
from polyattn import Batch, LatentSpec, LayerGroup, LayerSpec, SparseSpec, select
from polyattn.calls import memo
from polyattn.kernel import CacheFormat, Frame, KVCache, LayerParams, SparseBackend
from polyattn.registry.discovery import discover
from polyattn.runtime.backend import Backend

pytest.importorskip("triton")

LATENT = LayerSpec(
    kind="mla", num_heads=8, head_size=192, v_head_size=128,
    dtype="float16", latent=LatentSpec(rank=512, rope_head_size=64),
)  # fmt: skip
PLAIN = SMALL.replace(needs_lse=False)
SPECS = {
    "FLASHINFER": PLAIN, "FLASHINFER_TRTLLM": PLAIN, "FLASHINFER_MLA": LATENT, "CUTLASS_MLA": LATENT,
    "FLASHINFER_MLA_SPARSE": LATENT.replace(
        kind="sparse_mla", sparse=SparseSpec(budget=4)
    ),
}  # fmt: skip
BUFFERS: list[torch.Tensor] = []
"""What the library's calls were given to write to, in order."""


class Wrapper:
    """Any of FlashInfer's wrappers: its buffer is for good."""

    def __init__(self, buffer: torch.Tensor, *args: Any, **kwargs: Any):
        self.buffer = buffer

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """Plan nothing."""

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Say where it writes."""
        BUFFERS.append(self.buffer)


@pytest.fixture(autouse=True)
def library(fakes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("flashinfer", "flashinfer.mla", "flashinfer.decode", "flashinfer.xqa")
    modules = flashinfer, mla, decode, xqa = [ModuleType(name) for name in names]
    for kind in ("BatchDecodeWithPaged", "BatchPrefillWithPaged", "BatchPrefillWithRagged"):
        setattr(flashinfer, f"{kind}KVCacheWrapper", Wrapper)
    mla.BatchMLAPagedAttentionWrapper = Wrapper  # type: ignore[attr-defined]
    mla.trtllm_batch_decode_with_kv_cache_mla = (  # type: ignore[attr-defined]
        lambda **given: BUFFERS.append(given["workspace_buffer"])
    )
    decode.trtllm_batch_decode_with_kv_cache = (  # type: ignore[attr-defined]
        lambda query, cache, workspace, *args, **kwargs: BUFFERS.append(workspace)
    )
    xqa.get_xqa_module = lambda *args: None  # type: ignore[attr-defined]
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    BUFFERS.clear()


def new_group() -> LayerGroup:
    return LayerGroup(select(PLAIN, CPU, backend="FLASHINFER"))


def form_of(spec: LayerSpec) -> CacheFormat:
    latent = spec is not PLAIN and spec.latent is not None
    heads, size, v_size = (1, 576, 512) if latent else (2, 64, 64)
    return CacheFormat(
        block_size=128, num_kv_heads=heads, head_size=size, v_head_size=v_size, dtype="float16",
        value_in_key=latent,
    )  # fmt: skip


def loaded(group: LayerGroup, name: str, spec: LayerSpec | None = None) -> Any:
    spec = spec or SPECS[name]
    return group.load("decode", discover().backends[name], Backend, spec, form_of(spec))


def written(backend: Any, plan: Any = None) -> torch.Tensor:
    """Run a step of one token; return what the library writes to."""
    spec, cache = backend.spec, KVCache.allocate(backend.cache, 2)
    batch = Batch([0, 1], [5], torch.zeros(1, 1, dtype=torch.int32))
    plan = plan or backend.plan(batch)
    size, v_size = cache.format.head_size, cache.format.v_head_size
    query, out = (torch.zeros(1, spec.num_heads, n).half() for n in (size, v_size))
    if isinstance(backend, SparseBackend):
        slots = torch.zeros(1, 4, dtype=torch.int32)
        backend.run(plan, Frame(query, None, None, cache, LayerParams(), out, None, slots))
    else:
        backend.run(plan, Frame(query, None, None, cache, LayerParams(), out, None))
    return BUFFERS[-1]


@pytest.mark.parametrize("name", SPECS)
def test_two_groups_never_share_a_buffer_and_one_groups_backends_do(name: str) -> None:
    one, other = new_group(), new_group()
    first = written(loaded(one, name))
    assert first.numel() >= 128 << 20 and not first.any()
    assert written(loaded(other, name)).data_ptr() != first.data_ptr()
    wider = SPECS[name].replace(num_heads=2 * SPECS[name].num_heads)
    assert written(loaded(one, name, wider)) is first


def test_what_counts_at_zero_is_apart_from_scratch() -> None:
    group = new_group()
    pairs = [("FLASHINFER", "FLASHINFER_TRTLLM"), ("FLASHINFER_MLA", "FLASHINFER_MLA_SPARSE")]
    for scratch, counters in pairs:
        first, second = (written(loaded(group, name)) for name in (scratch, counters))
        assert first.data_ptr() != second.data_ptr()


@pytest.mark.parametrize("name", ["FLASHINFER", "FLASHINFER_MLA"])
def test_a_captured_graphs_plan_keeps_its_buffer(name: str) -> None:
    """A later spec of the same group may need more."""
    group = new_group()
    backend = loaded(group, name, SPECS[name].replace(graph_capture="single_token_decode"))
    batch = Batch([0, 1], [5], torch.zeros(1, 1, dtype=torch.int32))
    captured = backend.plan(batch)
    before = written(backend, captured)
    larger = group.workspaces.scratch(before.device, 2 * before.numel())
    assert larger.numel() == 2 * before.numel() and larger is not before
    assert written(backend, backend.plan(batch, captured)) is before


def test_calls_without_a_group_share_where_one_thread_and_stream_runs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group is made for each way of calling: were scratch each one's own, it would add up."""

    def called(place: str, heads: int) -> LayerGroup:
        monkeypatch.setattr(memo, "place_of", lambda device: place)
        sizes = {"num_kv_heads": 1, "head_size": 64, "cached": False}
        return memo.group_for(torch.device("cpu"), dtype=torch.float32, num_heads=heads, **sizes)

    first, second, third = called("a", 1), called("a", 2), called("b", 1)
    assert first.workspaces is second.workspaces is not third.workspaces
