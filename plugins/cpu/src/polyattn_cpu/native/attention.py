"""NATIVE_ATTN, NATIVE_MLA: attention by the native kernels, a plan per step, a call per layer."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from polyattn.kernel import (
    STORAGE_DTYPES,
    Addressed,
    AddressedChoice,
    AttentionBackend,
    Batch,
    BatchError,
    CacheFormat,
    ChosenPages,
    Device,
    Frame,
    Invariance,
    LayerParams,
    LayerSpec,
    PackedStrides,
    PageStrides,
    Plan,
    Reads,
    absorbed,
    current_settings,
    turned,
)
from torch import Tensor

from polyattn_cpu.native.library import NativeError, isa, load
from polyattn_cpu.native.reading import reads
from polyattn_cpu.native.rows import program

DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "fp8_e4m3": 3, "fp8_e5m2": 4, "int8": 5}
"""`pa_dtype` of the names that a spec and a cache format use."""

TORCH_DTYPES = {STORAGE_DTYPES[name]: number for name, number in DTYPES.items()}

Ints = NDArray[np.signedinteger[Any]]

_LAYER = struct.Struct("@11i2f2P")
_BATCH = struct.Struct("@3i3P")
_TENSORS = struct.Struct("@8P14q2f")
_CHOSEN = struct.Struct("@7P5q13i")
_CALL = struct.Struct("@6Pq2f")
_OTHER_LENGTHS = 3


@cache
def kernels() -> ctypes.CDLL:
    """Load the library; with the setting `checks` an item finds NaN in its scratch."""
    lib = load()
    if current_settings().checks:
        lib.pa_poison()
    return lib


def layer_bytes(
    spec: LayerSpec, stored: str | None = None, cache: CacheFormat | None = None
) -> bytes:
    """Return `pa_layer` of a spec whose keys and values are stored as `stored` (default: its own).

    Rows of a `cache` become bfloat16 where the layer is of it, and float32 elsewhere. What they point
    to lasts as long as the process.
    """
    key_rows, value_rows = 0, 0
    if cache is not None and cache.rows is not None:
        stored = "bfloat16" if spec.dtype == "bfloat16" else "float32"
        of_key, of_value = cache.rows
        key_rows = program(of_key, cache.head_size).address
        v_size = cache.head_size if cache.value_in_key else cache.v_head_size
        value_rows = program(of_value, v_size).address
    return _LAYER.pack(
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_size,
        spec.v_head_size,
        DTYPES[spec.dtype],
        DTYPES[stored or spec.stored_dtype],
        spec.causal,
        spec.sliding_window or 0,
        spec.chunk_size or 0,
        spec.sink_tokens,
        (spec.batch_invariant >= Invariance.STEPS) + (spec.batch_invariant >= Invariance.MACHINES),
        spec.scale,
        spec.logit_soft_cap or 0.0,
        key_rows,
        value_rows,
    )


class StepPlan:
    """A step's work items, for all layers of one form. Its memory goes with the object."""

    __slots__ = ("_free", "handle")

    def __init__(
        self,
        layer: bytes,
        query_starts: Sequence[int],
        lens: Sequence[int],
        block_size: int = 0,
        key_starts: Sequence[int] | None = None,
        threads: int | None = None,
        by: str | None = None,
    ):
        """Plan `query_starts` (num_seqs + 1), `lens` (num_seqs): keys of each sequence.

        `block_size` 0: keys and values are packed tensors, and sequence i's begin at token
        `key_starts[i]`. `threads`: at most so many; default torch's number.
        `by`: an instruction set; default: the one that runs.
        """
        lib = kernels()
        numbers = [
            array("i", struct.pack(f"@{len(each)}i", *each))
            for each in (query_starts, lens, key_starts or ())
        ]
        batch = _BATCH.pack(
            len(lens),
            block_size,
            torch.get_num_threads() if threads is None else threads,
            *(each.buffer_info()[0] for each in numbers),  # of none: NULL
        )
        self._free = lib.pa_plan_free
        self.handle = lib.pa_plan_new((by or isa()).encode(), layer, batch)
        if not self.handle:
            raise NativeError(lib.pa_error().decode())

    def listed(self) -> tuple[Ints, Ints, Ints]:
        """Return numbers int64 (6,), items int32 (items, 13) and groups int32 (groups, 2).

        Their fields are `pa_plan_list`'s in the library's header.
        """
        lib, numbers = kernels(), np.zeros(6, np.int64)
        lib.pa_plan_list(self.handle, numbers.ctypes.data, None, None)
        items = np.zeros((int(numbers[0]), 13), np.int32)
        groups = np.zeros((int(numbers[1]), 2), np.int32)
        lib.pa_plan_list(self.handle, numbers.ctypes.data, items.ctypes.data, groups.ctypes.data)
        return numbers, items, groups

    def __del__(self) -> None:
        handle = getattr(self, "handle", None)
        if handle:
            self._free(handle)


def bound(plan: StepPlan, block_table: Tensor | None) -> Callable[[Frame], None]:
    """Return the call that attends for every sequence of the plan, for each layer of a form.

    With `block_table` int32 (num_seqs, max_blocks) it reads the frame's cache, whose last stride is 1;
    with None the frame's keys and values, (num_tokens, num_kv_heads, size). Sinks and slopes float32
    (num_heads,), contiguous. The call raises `BatchError` where the table points outside the cache.
    """
    lib, pack = kernels(), _TENSORS.pack
    call, paged = lib.pa_attend, block_table is not None
    table, row = (0, 0) if block_table is None else (block_table.data_ptr(), block_table.stride(0))

    # This runs once a layer, so it reads cached facts of the step and the cache.
    def attend(frame: Frame) -> None:
        query, params, out, lse = frame.query, frame.params, frame.out, frame.lse
        key: Any
        value: Any
        if paged:
            cache: Any = frame.cache
            key, value, blocks = cache.key, cache.value, cache.num_blocks
            (kb, kt, kh, _), (vb, vt, vh, _), _ = cache.strides
        else:
            key, value, kb, vb, blocks = frame.key, frame.value, 0, 0, 1
            kt, kh, _ = key.stride()
            vt, vh, _ = value.stride()
        qt, qh, _ = query.stride()
        ot, oh, _ = out.stride()
        lt, lh = (0, 0) if lse is None else lse.stride()
        sinks, alibi = params.sinks, params.alibi_slopes
        tensors = pack(
            query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(),
            0 if lse is None else lse.data_ptr(), table, 0 if sinks is None else sinks.data_ptr(),
            0 if alibi is None else alibi.data_ptr(),
            qt, qh, kb, kt, kh, vb, vt, vh, ot, oh, lt, lh, row, blocks,
            params.k_scale, params.v_scale,
        )  # fmt: skip
        if call(plan.handle, tensors):
            raise _failed(lib.pa_error().decode(), blocks)

    return attend


def _failed(text: str, blocks: int) -> Exception:
    if "block_table" in text:
        return BatchError(
            f"block_table points outside the cache's {blocks} blocks; the sequences that do were left "
            "out, and their outputs are unwritten"
        )
    return NativeError(text)


def addressed(
    plan: StepPlan,
    spec: LayerSpec,
    strides: PackedStrides | PageStrides,
    block_table: Tensor | None = None,
) -> Addressed:
    """Return `attend` over packed tensors, or pages, of these strides and any shapes."""
    lib, pack = kernels(), _TENSORS.pack
    call = lib.pa_attend
    keys = kb = vb = table = row = 0
    if isinstance(strides, PackedStrides):
        (qt, qh), (kt, kh), (vt, vh), keys = strides
    else:
        assert block_table is not None
        (qt, qh), (kb, kt, kh), (vb, vt, vh) = strides
        table, row = block_table.data_ptr(), block_table.stride(0)
    heads, size = spec.num_heads, spec.v_head_size
    ints = qt, qh, kb, kt, kh, vb, vt, vh, heads * size, size, heads, 1, row

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        sinks, alibi, blocks = params.sinks, params.alibi_slopes, key.shape[0] if table else keys
        tensors = pack(
            query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(),
            0 if lse is None else lse.data_ptr(), table, 0 if sinks is None else sinks.data_ptr(),
            0 if alibi is None else alibi.data_ptr(), *ints, blocks, params.k_scale, params.v_scale,
        )  # fmt: skip
        if call(plan.handle, tensors):
            raise _failed(lib.pa_error().decode(), blocks)

    return run


def addressed_choice(
    plan: StepPlan, spec: LayerSpec, strides: PageStrides, chosen: ChosenPages
) -> AddressedChoice:
    """Return `addressed` over the pages of choices of one shape, which each call writes.

    It reads and writes `chosen`'s tensors as long as it is called.
    """
    lib, pack, table = kernels(), _CALL.pack, chosen.table
    call = lib.pa_attend_chosen
    (qt, qh), (kb, kt, kh), (vb, vt, vh) = strides
    heads, size = spec.num_heads, spec.v_head_size
    ints = qt, qh, kb, kt, kh, vb, vt, vh, heads * size, size, heads, 1, table.stride(0), 0
    alike = _TENSORS.pack(*[0] * 5, table.data_ptr(), 0, 0, *ints, 1.0, 1.0)
    packed = _packed(chosen)

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
        choice: Tensor,
    ) -> bool:
        blocks, scales = key.shape[0], (params.k_scale, params.v_scale)
        inputs = query.data_ptr(), key.data_ptr(), value.data_ptr()
        results = out.data_ptr(), 0 if lse is None else lse.data_ptr()
        this = pack(*inputs, *results, choice.data_ptr(), blocks, *scales)
        failed = call(plan.handle, alike, packed, this)
        if failed and failed != _OTHER_LENGTHS:
            raise _failed(lib.pa_error().decode(), blocks)
        return not failed

    return run


def _packed(chosen: ChosenPages) -> bytes:
    """Return `pa_chosen` of a choice; the same in each call of the step but for its ids."""
    if chosen.facts is None:
        chosen.facts = _facts(chosen)
    (before, seqs, behind), ids = chosen.facts, chosen.choice
    tokens, choices, width = ids.shape
    return _CHOSEN.pack(ids.data_ptr(), *before, tokens, seqs, choices, width, *behind)


def _facts(chosen: ChosenPages) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """Return `pa_chosen`'s fields before, between and behind a choice's sizes."""
    sparse, batch, table = chosen.spec.sparse, chosen.batch, chosen.batch.block_table
    assert sparse is not None and table is not None
    tensors = table, batch.query_start_loc, batch.seq_lens, chosen.heads, chosen.table, chosen.lens
    strides = table.stride(0), chosen.table.stride(0), *chosen.steps
    before = *(tensor.data_ptr() for tensor in tensors), *strides, chosen.first
    sizes = len(chosen.heads), table.shape[1]
    entries = sparse.granularity, sparse.tokens_per_entry, chosen.block_size, chosen.page_size
    return before, batch.num_seqs, (*sizes, *entries, chosen.spec.causal, sparse.physical)


class NativePlan(Plan):
    """The step's work items, balanced over torch's threads; the same for every layer."""

    __slots__ = ("attend", "step")

    def __init__(self, batch: Batch, step: StepPlan, paged: bool):
        super().__init__(batch)
        self.step = step
        self.attend = bound(step, batch.block_table if paged else None)


class NativeAttention(AttentionBackend):
    """Decodes, short rows and prefills together. The same bits for any threads, in any batch."""

    name: ClassVar[str] = "NATIVE_ATTN"
    plans_by_lengths: ClassVar[bool] = True

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.stored = spec.dtype if cache is None else cache.dtype
        self.layer, self.by = layer_bytes(spec, self.stored, cache), isa()
        rows = None if cache is None else cache.rows
        turns = tuple(f if f.turn else None for f in rows or ())
        self.turns = turns if any(turns) else None

    def plan(self, batch: Batch, reuse: Plan | None = None) -> NativePlan:
        layer = self.layer
        if not batch.causal:
            layer = layer_bytes(self.spec_of(batch), self.stored, self.cache)
        if self.cache is None:
            step = StepPlan(
                layer, batch.starts, batch.lens, key_starts=batch.key_starts, by=self.by
            )
        else:
            step = StepPlan(layer, batch.starts, batch.lens, self.cache.block_size, by=self.by)
        return NativePlan(batch, step, self.cache is not None)

    def page(self, chosen: ChosenPages) -> bool:
        if kernels().pa_pages(_packed(chosen), torch.get_num_threads()):
            raise NativeError(
                f"NATIVE_ATTN by {self.by}: there is no memory; let other work end first"
            )
        return True

    def reads(self, plan: Plan, batch: Batch) -> Reads:
        assert isinstance(plan, NativePlan)
        size = 0 if self.cache is None else self.cache.block_size
        return reads(self.spec, *plan.step.listed(), size)

    def addressed(self, plan: Plan, strides: PackedStrides) -> Addressed:
        assert isinstance(plan, NativePlan) and self.cache is None
        return addressed(plan.step, self.spec, strides)

    def addressed_pages(self, plan: Plan, strides: PageStrides) -> Addressed | None:
        assert isinstance(plan, NativePlan)
        if self.turns is not None:
            return None
        return addressed(plan.step, self.spec, strides, plan.batch.block_table)

    def addressed_choice(
        self, plan: Plan, strides: PageStrides, chosen: ChosenPages
    ) -> AddressedChoice | None:
        assert isinstance(plan, NativePlan)
        if self.turns is not None:
            return None
        return addressed_choice(plan.step, self.spec, strides, chosen)

    def run(self, plan: NativePlan, frame: Frame) -> None:
        if self.turns is None:
            plan.attend(frame)
            return
        of_key, of_value = self.turns
        out = frame.out
        if of_key is not None:  # rows stay turned: queries turn with keys, outputs back
            frame = frame.but(query=turned(frame.query.float(), of_key).to(frame.query.dtype))
        if of_value is not None:
            frame = frame.but(out=torch.empty_like(out))
        plan.attend(frame)
        if of_value is not None:
            out.copy_(turned(frame.out.float(), of_value, back=True))


class NativeMLA(NativeAttention):
    """MQA whose one key is latent and rope key, and whose value is the key's first part."""

    name: ClassVar[str] = "NATIVE_MLA"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(absorbed(spec), cache, device)
