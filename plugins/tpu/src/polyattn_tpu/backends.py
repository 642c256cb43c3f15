"""The backends behind polyattn's interface: plans on the host, jitted functions over torchax's arrays."""

from __future__ import annotations

import functools
import os
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from polyattn.kernel import (
    AttentionBackend,
    Batch,
    BatchError,
    CacheFormat,
    Device,
    Frame,
    KVCache,
    LayerParams,
    LayerSpec,
    MergeBackend,
    Plan,
    Reads,
    RecurrentBackend,
    RecurrentFrame,
    SparseBackend,
    StoreBackend,
    StorePlan,
    absorbed,
    turned,
)
from torch import Tensor

from polyattn_tpu import functions, latent, recurrence
from polyattn_tpu.bridge import assign, in_jax, pages, to_jax, unshared, update_pages
from polyattn_tpu.buckets import Buckets
from polyattn_tpu.functions import Scales
from polyattn_tpu.planning import (
    by_of,
    pad,
    plan_bounded,
    plan_chunks,
    plan_dense,
    plan_paged,
    with_pages,
)
from polyattn_tpu.reading import reads_of
from polyattn_tpu.rows import Rows
from polyattn_tpu.step import Step


def buckets() -> Buckets:
    """Return the buckets that steps are padded to: `PALLAS_BUCKETS="tokens=4096,seqs=64"`."""
    text = os.environ.get("PALLAS_BUCKETS", "")
    arrays = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        if name not in ("tokens", "seqs", "pages") or not number.isdigit():
            raise BatchError(
                f"PALLAS_BUCKETS={text!r}: {part!r} must be tokens=, seqs= or pages= and a number"
            )
        arrays[name] = int(number)
    return Buckets(**arrays)


STATIC = ("spec", "functions", "lse", "interpret", "rows")
attend = jax.jit(functions.attend, static_argnames=STATIC)
attend_bounded = jax.jit(functions.attend_bounded, static_argnames=STATIC)
attend_given = jax.jit(functions.attend_given, static_argnames=STATIC)
attend_pages = jax.jit(latent.attend_pages, static_argnames=("spec",))
attend_rows = jax.jit(latent.attend_rows, static_argnames=("scale", "rank", "alike"))
merge = jax.jit(functions.merge)
recur = {
    donated: jax.jit(
        recurrence.recur, static_argnames=("spec",), donate_argnames=("states",) * donated
    )
    for donated in (False, True)
}


def rows_of(cache: CacheFormat | None) -> tuple[Rows, Rows] | None:
    """Return how a cache's rows of bytes are read and written; None: it has none."""
    if cache is None or cache.rows is None:
        return None
    return Rows(cache.rows[0], cache.head_size), Rows(cache.rows[1], cache.v_head_size)


stored = {
    donated: jax.jit(functions.write, donate_argnames=("cache",) * donated)
    for donated in (False, True)
}


class JaxPlan(Plan):
    """A step's pytree."""

    __slots__ = ("arrays",)

    def __init__(self, batch: Batch, arrays: Any):
        super().__init__(batch)
        self.arrays = jax.device_put(arrays)


class PallasAttention(AttentionBackend):
    """One ragged kernel for prefill, decode and mixed batches, over a cache or keys given whole."""

    name: ClassVar[str] = "PALLAS_ATTN"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.buckets = buckets()
        self.functions = functions.functions_of(spec)
        self.by = by_of(spec)
        self.rows = rows_of(cache)
        self._turned = tuple(r.format if r.format.turn else None for r in self.rows or ())

    def plan(self, batch: Batch, reuse: Plan | None = None) -> JaxPlan:
        group, alike = self.spec.gqa_ratio, bool(self.spec.batch_invariant)
        if not self.spec.cached:
            step = Step.from_batch(batch)
            return JaxPlan(batch, plan_dense(step, group, self.buckets, self.by))
        assert self.cache is not None
        size = self.cache.block_size
        if self.spec.length_bounds:
            step = Step.of(batch.query_lens, batch.lens)
            return JaxPlan(batch, plan_bounded(step, group, size, self.buckets, alike))
        step = Step.from_batch(batch)
        return JaxPlan(batch, plan_paged(step, group, size, self.buckets, self.by, alike))

    def reads(self, plan: Plan, batch: Batch) -> Reads | None:
        assert isinstance(plan, JaxPlan)
        arrays, size = plan.arrays, 0 if self.cache is None else self.cache.block_size
        if self.spec.length_bounds:
            if batch.num_seqs >= len(arrays.pages.query_lens):
                return None  # its rows take turns
            assert batch.block_table is not None
            arrays = with_pages(arrays, to_jax(batch.seq_lens), to_jax(batch.block_table))
        return reads_of(self.spec_of(batch), arrays, batch, size)

    def run(self, plan: JaxPlan, frame: Frame) -> None:
        """Attend. For a format that turns rows, turn the queries too, and turn the outputs back."""
        of_key, of_value = self._turned or (None, None)
        if of_key is not None:
            query = turned(frame.query.float(), of_key).to(frame.query.dtype)
            frame = frame.but(query=query)
        self._run(plan, frame)
        if of_value is not None and not (self.cache and self.cache.value_in_key):
            frame.out.copy_(turned(frame.out.float(), of_value, back=True))

    def _run(self, plan: JaxPlan, frame: Frame) -> None:
        params, lse = frame.params, frame.lse
        count, spec, batch = frame.query.shape[0], self.spec_of(plan.batch), plan.batch
        if not count:
            return
        rows = to_jax(frame.query)
        options = {
            "sinks": None if params.sinks is None else to_jax(params.sinks),
            "alibi_slopes": None if params.alibi_slopes is None else to_jax(params.alibi_slopes),
            "scales": Scales(params.k_scale, params.v_scale),
            "functions": self.functions,
            "lse": lse is not None,
        }
        if self.functions is not None:
            inputs = {**batch.inputs, **params.inputs}
            options["inputs"] = self.functions.given({n: to_jax(t) for n, t in inputs.items()})
        if frame.cache is None:
            assert frame.key is not None and frame.value is not None
            arrays = (to_jax(frame.key), to_jax(frame.value))
            result, logs = attend_given(
                plan.arrays, spec, pad(plan.arrays, rows), *arrays, **options
            )
        elif spec.length_bounds:
            assert batch.block_table is not None
            options |= {"rows": self.rows}
            device = to_jax(batch.seq_lens), to_jax(batch.block_table)
            result, logs = attend_bounded(
                plan.arrays, spec, rows, pages(frame.cache), *device, **options
            )
        else:
            held, rows = pages(frame.cache), pad(plan.arrays, rows)
            result, logs = attend(plan.arrays, spec, rows, held, rows=self.rows, **options)
        assign(frame.out, result[:count])
        if lse is not None:
            assign(lse, logs[:count])


class PallasMLA(PallasAttention):
    """Absorbed MLA decode: MQA whose one key is a latent, and whose value is the key's first part."""

    name: ClassVar[str] = "PALLAS_MLA"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(absorbed(spec), cache, device)


class XlaSparse(SparseBackend):
    """Chosen rows are gathered a few tokens at a time, and attended to in plain XLA."""

    name: ClassVar[str] = "XLA_MLA_SPARSE"

    def run(self, plan: Plan, frame: Frame) -> None:
        count, spec = frame.query.shape[0], self.spec
        assert spec.latent is not None and frame.cache is not None and frame.choice is not None
        if not count:
            return
        size = _bucket(count)
        result, logs = attend_rows(
            _padded(to_jax(frame.query), size),
            _padded(to_jax(frame.choice), size),
            pages(frame.cache),
            scale=spec.scale,
            rank=spec.latent.rank,
            k_scale=frame.params.k_scale,
            alike=bool(spec.batch_invariant),
        )
        assign(frame.out, result[:count])
        if frame.lse is not None:
            assign(frame.lse, logs[:count])


class XlaPages(AttentionBackend):
    """Pages of any size are gathered a few tokens at a time, and attended to in plain XLA."""

    name: ClassVar[str] = "XLA_PAGES"

    def plan(self, batch: Batch, reuse: Plan | None = None) -> JaxPlan:
        """Plan each token's row of the table, and how many of its keys come after the token."""
        counts, tokens = np.asarray(batch.query_lens, np.int32), np.arange(batch.num_tokens)
        row = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        after = (np.cumsum(counts)[row] - 1 - tokens).astype(np.int32)
        return JaxPlan(batch, (row, after))

    def run(self, plan: JaxPlan, frame: Frame) -> None:
        count, table = frame.query.shape[0], plan.batch.block_table
        assert frame.cache is not None and table is not None
        if not count:
            return
        size = _bucket(count)
        result, logs = attend_pages(
            *(_padded(array, size) for array in (to_jax(frame.query), *plan.arrays)),
            to_jax(plan.batch.seq_lens),
            to_jax(table),
            pages(frame.cache),
            spec=self.spec,
            scales=Scales(frame.params.k_scale, frame.params.v_scale),
        )
        assign(frame.out, result[:count])
        if frame.lse is not None:
            assign(frame.lse, logs[:count])


class XlaScan(RecurrentBackend):
    """Recurrences by chunks."""

    name: ClassVar[str] = "XLA_SCAN"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.buckets = buckets()

    def plan(self, batch: Batch, reuse: Plan | None = None) -> JaxPlan:
        return JaxPlan(batch, plan_chunks(Step.from_batch(batch), self.buckets))

    def run(self, plan: JaxPlan, frame: RecurrentFrame) -> None:
        inputs, params, states = frame.inputs, frame.params, frame.states
        count = frame.out.shape[0]
        if not count:
            return
        rows = {name: pad(plan.arrays, to_jax(tensor)) for name, tensor in inputs.items()}
        weights = {name: to_jax(tensor) for name, tensor in params.items()}
        own = in_jax(states) and not hasattr(states, "parent")
        run = recur[own and unshared(states)]
        result, after = run(plan.arrays, self.spec, rows, weights, to_jax(states))
        assign(states, after)
        assign(frame.out, result[:count])


class JaxStore(StoreBackend):
    """Keys and values scattered to their slots of pages that are donated."""

    name: ClassVar[str] = "JAX_STORE"

    def run(
        self, plan: StorePlan, key: Tensor, value: Tensor, cache: KVCache, params: LayerParams
    ) -> None:
        count = key.shape[0]
        if not count:
            return
        size = _bucket(count)
        slots = _padded(to_jax(plan.slots), size, -1)
        rows = [_padded(to_jax(tensor), size) for tensor in (key, value)]
        scales = Scales(params.k_scale, params.v_scale)
        update_pages(cache, lambda pages, alone: stored[alone](pages, *rows, slots, scales))


class JaxMerge(MergeBackend):
    """Attention states merged in one program."""

    name: ClassVar[str] = "JAX_MERGE"

    def run(self, total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        result, lse = merge(*map(to_jax, (total, total_lse, part, part_lse)))
        assign(total, result)
        assign(total_lse, lse)


def _bucket(count: int) -> int:
    return max(8, 1 << (count - 1).bit_length())


@functools.partial(jax.jit, static_argnames=("size", "rest"))
def _padded(array: Any, size: int, rest: int = 0) -> Any:
    widths = ((0, size - array.shape[0]), *((0, 0),) * (array.ndim - 1))
    return jnp.pad(array, widths, constant_values=rest)
