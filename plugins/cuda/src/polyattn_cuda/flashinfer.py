"""FLASHINFER: FlashInfer's wrappers. Planned once a step; its LSE is in base 2.

A prompt alone, without context, and keys that are passed whole are attended to as they lie (its ragged
wrapper), all else in pages: decodes by its decode wrapper, rows of a few tokens by the FA2 prefill,
which splits long keys among the processors as FA3's doesn't.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from polyattn.kernel import (
    STORAGE_DTYPES,
    AttentionBackend,
    Batch,
    CacheFormat,
    Device,
    Frame,
    LayerParams,
    LayerSpec,
    Plan,
    arch_matches,
    blank,
    empty_rows,
    window_sizes,
)
from torch import Tensor

from polyattn_cuda.flashinfer_variants import Functions, StepMasks
from polyattn_cuda.flashinfer_wrappers import WORKSPACE_BYTES, Lease, WrapperPool, raising
from polyattn_cuda.outputs import contiguous_after, quantized_after
from polyattn_cuda.paging import PackedKeys, page_lists

SHORT = 16
"""Query tokens of a sequence up to which its row counts as a decode."""
TILE_ROWS, FLOAT_BYTES, STEP_BYTES = 128, 4, 64 << 20
FA3_SIZES = ((64, 64), (128, 128), (256, 256), (192, 128))
"""Head sizes of keys and values that its FA3 kernels are instantiated for; FA2's take any 64s."""
MERGED_SIZES = (64, 128, 256, 512)
"""Value head sizes whose parts FlashInfer 0.6.13 can merge; the keys of others aren't split."""


def scratch_bytes(spec: LayerSpec, device: torch.device) -> int:
    """Return what parts of split rows may take: two tiles of 128 rows for each multiprocessor.

    A tile's rows are those of one KV head; FlashInfer counts each tile for all query heads. In steps of
    64 MiB, so that the specs of one group share one buffer.
    """
    sms = 1
    if device.type == "cuda":
        sms = torch.cuda.get_device_properties(device).multi_processor_count
    parts = 2 * sms * TILE_ROWS * spec.gqa_ratio
    needed = parts * (spec.v_head_size + 1) * FLOAT_BYTES + (1 << 20)
    return max(WORKSPACE_BYTES, -(-needed // STEP_BYTES) * STEP_BYTES)


class FlashInferPlan(Plan):
    """`keys` is there where the ragged wrapper runs. `origin` is the plan whose wrapper is reused."""

    __slots__ = ("__weakref__", "empty", "given", "keys", "lease", "origin")

    lease: Lease
    keys: PackedKeys | None
    origin: Plan | None

    def __init__(self, batch: Batch, causal: bool, origin: Plan | None = None):
        super().__init__(batch)
        assert origin is None or isinstance(origin, FlashInferPlan)
        self.empty: Tensor | None = empty_rows(batch, causal) if origin is None else origin.empty
        self.keys, self.origin = None, origin
        # The functions' inputs, by those of the layer.
        self.given: dict[Any, tuple[Any, ...]] = {}


class FlashInferAttention(AttentionBackend):
    """Wrappers of four kinds: decode, rows of a few tokens, paged and ragged prefill."""

    name: ClassVar[str] = "FLASHINFER"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.torch_device = torch.device(str(device.torch_device))
        self.dtype = STORAGE_DTYPES[spec.dtype]
        self.kv_dtype = STORAGE_DTYPES[cache.dtype] if cache else self.dtype
        self.quantized = self.kv_dtype.itemsize == 1
        # Each cached page is read once whatever the group; from four heads on, tensor cores are
        # what keeps up with the memory. Without them there are kernels of few ratios and sizes, and
        # they read what a window hides.
        windowed = window_sizes(spec)[0] >= 0
        self.tensor_cores = spec.gqa_ratio >= 4 or windowed or spec.head_size not in (64, 128, 256)
        sizes = (spec.head_size, spec.v_head_size)
        self.functions = Functions.of(spec, self.torch_device)
        self.masks = StepMasks.of(spec, None if cache is None else cache.block_size)
        # Its FA3 kernels over 8-bit keys don't compile (vllm-project/vllm#31843).
        fa3 = sizes in FA3_SIZES and not self.quantized and self.masks is None
        self.prefill_kernel = "auto" if fa3 else "fa2"
        if self.functions is not None:  # what is compiled of them is for one kind of kernels
            fa3 = fa3 and self.functions.by_fa3 and arch_matches("sm_90", device.arch)
            self.prefill_kernel = "fa3" if fa3 else "fa2"
        self.scratch = scratch_bytes(spec, self.torch_device)
        self.pool = WrapperPool(self._make, self.torch_device)
        # By what queries are divided; compiled functions hide logits that are scaled.
        self.raised = raising(spec.scale) if self.functions is None else 1.0
        self.options = {
            "window_left": window_sizes(spec)[0],
            "logits_soft_cap": spec.logit_soft_cap,
            "sm_scale": spec.scale * self.raised,
            "q_data_type": self.dtype,
            "kv_data_type": self.kv_dtype,
            "disable_split_kv": spec.v_head_size not in MERGED_SIZES,
        }

    def prepare(self, phases: tuple[str, ...]) -> None:
        """Plan for one token, because FlashInfer compiles kernels at their first plan."""
        table = None
        if self.cache is not None:
            table = torch.zeros(1, 1, dtype=torch.int32, device=self.torch_device)
        query_lens = [[SHORT + 1]] if "prefill" in phases else []
        for lens in [*query_lens, *([[1], [2]] if "decode" in phases else [])]:
            keys = [lens[0] if self.cache is None else min(lens[0], self.cache.block_size)]
            starts = [0, lens[0]]
            self.plan(Batch(starts, keys, table, device=self.torch_device))

    def plan(self, batch: Batch, reuse: Plan | None = None) -> FlashInferPlan:
        chosen = None if self.masks is None else self.masks.over_chosen(batch)
        batch = chosen or batch
        plan = FlashInferPlan(batch, self.spec_of(batch).causal, reuse)
        if not batch.num_tokens:
            return plan
        if self.masks is not None and batch.mask is not None:
            self._plan_masked(plan, self.masks)
            return plan
        # Its ragged FA3 reads beyond a prompt's last key, whose neighbour may hold NaN.
        fresh = batch.num_seqs == 1 and batch.lens == batch.query_lens and not self.quantized
        if self.cache is None or (fresh and batch.max_query_len > SHORT):
            self._plan_ragged(plan)
        elif batch.all_decode and self.functions is None:
            self._plan_decode(plan, reuse)
        else:
            self._plan_paged(plan)
        return plan

    def _make(self, kind: Any, capacity: int) -> Any:
        import flashinfer

        buffer = self.workspaces.scratch(self.torch_device, self.scratch)
        kernel = "fa2" if kind == "short" else self.prefill_kernel
        jit = {} if self.functions is None else {"jit_args": self.functions.jit_args(kernel)}
        if kind == "ragged":
            return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
                buffer, "NHD", backend=kernel, **jit
            )
        if kind in ("short", "paged"):
            return flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                buffer, "NHD", backend=kernel, **jit
            )
        make = flashinfer.BatchDecodeWithPagedKVCacheWrapper
        if kind == "decode":
            return make(buffer, "NHD", use_tensor_cores=self.tensor_cores)
        count = kind[1]

        def ints(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self.torch_device)

        return make(
            buffer,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=self.tensor_cores,
            paged_kv_indptr_buffer=ints(count + 1),
            paged_kv_indices_buffer=ints(capacity),
            paged_kv_last_page_len_buffer=ints(count),
        )

    def _plan_decode(self, plan: FlashInferPlan, reuse: Plan | None) -> None:
        """Plan decodes; where graphs are captured, in buffers of the wrapper's own."""
        spec, batch, cache = self.spec, plan.batch, self.cache
        assert cache is not None
        plan.lease = self.pool.lease_of_step(plan, reuse, spec, cache)
        indptr, indices, last = page_lists(batch, cache.block_size, plan.lease.room)
        plan.lease.plan(
            indptr, indices, last, spec.num_heads, spec.num_kv_heads, spec.head_size, cache.block_size,
            seq_lens=torch.from_numpy(batch.host_lens.astype(np.int32)), **self.options,
        )  # fmt: skip

    def _plan_paged(self, plan: FlashInferPlan, **masked: Tensor) -> None:
        spec, batch, cache = self.spec_of(plan.batch), plan.batch, self.cache
        assert cache is not None
        kind = "short" if batch.max_query_len <= SHORT else "paged"
        indptr, indices, last = page_lists(batch, cache.block_size)
        starts = torch.tensor(batch.starts, dtype=torch.int32, device="cpu")
        if masked:  # which it packs on the device
            starts, indptr, last = (t.to(self.torch_device) for t in (starts, indptr, last))
        plan.lease = self.pool.lease(plan, kind)
        plan.lease.plan(
            starts, indptr, indices, last, spec.num_heads,
            spec.num_kv_heads, spec.head_size, cache.block_size,
            causal=spec.causal and not masked, **self._options(masked),
        )  # fmt: skip

    def _plan_masked(self, plan: FlashInferPlan, masks: StepMasks) -> None:
        """Plan with a custom mask, which holds the layer's own, too."""
        spec = self.spec_of(plan.batch)
        bits, plan.empty = masks.bits(plan.batch, spec)
        if self.cache is None:
            self._plan_ragged(plan, custom_mask=bits)
        else:
            self._plan_paged(plan, custom_mask=bits)

    def _plan_ragged(self, plan: FlashInferPlan, **masked: Tensor) -> None:
        spec, batch = self.spec_of(plan.batch), plan.batch
        plan.keys = PackedKeys(batch, self.cache)
        plan.lease = self.pool.lease(plan, "ragged")
        place = self.torch_device if masked else torch.device("cpu")
        plan.lease.plan(
            torch.tensor(batch.starts, dtype=torch.int32, device=place),
            torch.tensor(plan.keys.starts, dtype=torch.int32, device=place),
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            head_dim_vo=spec.v_head_size,
            causal=spec.causal and not masked,
            **self._options(masked),
        )

    # The kernels of FlashAttention-2's kind take an output's address, not its strides
    # (flashinfer's prefill.cuh: `o_stride_n = num_qo_heads * HEAD_DIM_VO`).
    @quantized_after
    @contiguous_after
    def run(self, plan: FlashInferPlan, frame: Frame) -> None:
        cache, params, lse = frame.cache, frame.params, frame.lse
        if not plan.batch.num_tokens:
            return
        query, raised, scales = frame.query.contiguous(), self.raised, {}
        if self.quantized:
            more = raising(self.options["sm_scale"] * params.k_scale)
            raised *= more
            scales = {"k_scale": params.k_scale * more, "v_scale": params.v_scale}
        if raised > 1.0:
            query = query / raised
        if plan.keys is not None and frame.key is None and cache is not None:
            plan.keys = None  # they were stored before: read where they are
            self._plan_paged(plan)
        if plan.keys is not None:
            keys: tuple[Any, ...] = plan.keys.read(frame.key, frame.value, cache)
        else:
            assert cache is not None
            keys = ((cache.key, cache.value),)
        plan.lease.wrapper.run(
            query, *keys, *self._given(plan, params), out=frame.out, lse=lse,
            return_lse=lse is not None, **scales,
        )  # fmt: skip
        if lse is not None:
            lse.mul_(math.log(2.0))
        blank(plan.empty, frame.out, lse)  # older releases say -5e4 where nothing was attended to

    def _options(self, masked: dict[str, Tensor]) -> dict[str, Any]:
        """Return what wrappers plan with; a custom mask has the window in it."""
        return self.options | ({"window_left": -1} | masked if masked else {})

    def _given(self, plan: FlashInferPlan, params: LayerParams) -> tuple[Any, ...]:
        """Return what compiled functions are given, made once for a layer's tensors and a plan."""
        if self.functions is None:
            return ()
        key = tuple([(t.data_ptr(), t.shape) for t in params.inputs.values()])
        if key not in plan.given:
            plan.given[key] = self.functions.given(plan.batch, params)
        return plan.given[key]
