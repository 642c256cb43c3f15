"""TRITON_ATTN: launches the kernels that a plan asks for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

import torch
import triton
from polyattn.kernel import (
    STORAGE_DTYPES,
    Addressed,
    Batch,
    CacheFormat,
    ChosenPages,
    Device,
    Frame,
    Invariance,
    KVCache,
    LayerParams,
    LayerSpec,
    PackedStrides,
    PageStrides,
    Plan,
    Reads,
    RopeSpec,
    dequantized,
    in_turn,
    turned,
    write_output,
)
from torch import Tensor

from polyattn_triton.alike import AlikeAttention
from polyattn_triton.compiling.side_by_side import Compilers
from polyattn_triton.compiling.warm_up import blank_frame, blank_steps
from polyattn_triton.configs import Config
from polyattn_triton.exact import Exact, ExactPlan
from polyattn_triton.functions.pointwise import NOTHING, table
from polyattn_triton.functions.rows import NO_ROWS, Rows
from polyattn_triton.hopper.packing import packed_constants, packed_site, word_bytes
from polyattn_triton.kernels.decode import decode_kernel
from polyattn_triton.kernels.prefill import prefill_kernel
from polyattn_triton.kernels.turned import turn_kernel
from polyattn_triton.launch import UNFUSED, Launcher, Site, compiling_only, load, power
from polyattn_triton.merging import Merger
from polyattn_triton.paging import write_pages
from polyattn_triton.plan import AttentionPlan, StepPlan
from polyattn_triton.prefix import PrefixLauncher, PrefixPlan, PrefixStep
from polyattn_triton.reading import prefix_reads, reads_of
from polyattn_triton.turn_table import turns
from polyattn_triton.variants import (
    FULL_REGISTERS,
    decode_constants,
    in_pairs,
    paired,
    prefill_constants,
)

Strides = tuple[int, ...]


UNCUT_KEYS = 512
"""Of the longest sequence of a step whose tiles stay whole, so that it takes one launch."""

_turn = Launcher(turn_kernel)
TURNED_ROWS, TURNED_PART = 16, 32
"""Rows that a program turns, and how many columns of them at once."""


class TritonAttention(AlikeAttention):
    """Decode and prefill; kernels are specialised for the strides of their tensors."""

    name: ClassVar[str] = "TRITON_ATTN"
    reads_tensors = False

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        specified = spec.batch_invariant >= Invariance.MACHINES
        self.exact = Exact(spec, self.torch_device) if specified else None
        self._functions = NOTHING if self.generated is None else self.generated.constants
        self._captured: Callable[[], dict[str, Tensor]] = dict
        if self.generated is not None:
            self._captured = self.generated.trace.captured(self.torch_device)
        self._sites: dict[tuple[Any, ...], Site] = {}
        self.by_tensors = spec.scales != "number"
        self._turns: dict[int, tuple[Tensor, Tensor]] = {}
        self._one = torch.ones(spec.num_kv_heads, dtype=torch.float32, device=self.torch_device)
        self._no_scales = (self._one,) * 4
        rows = None if cache is None else cache.rows
        self._turned_rows = tuple(f if f.turn else None for f in rows or ()) or (None, None)
        sizes = spec.head_size, spec.v_head_size
        self._matrices = [
            None
            if f is None
            else turned(torch.eye(n, dtype=torch.float32, device=self.torch_device), f, back)
            for f, n, back in zip(self._turned_rows, sizes, (False, True), strict=True)
        ]
        self.prefixes: PrefixLauncher | None = None
        self.merger = Merger(spec, self.early, self._functions[-1] == 2)
        new = self.generated is not None and self.generated.new
        self.compilers = Compilers(soon=new and self.torch_device.type == "cuda")

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Plan:
        """Deal the step's tiles out; of rows that share keys, those once for all."""
        if reuse is not None:
            planner = self._planner(reuse)
            if isinstance(reuse, AttentionPlan):
                return planner.refill(reuse, batch)
            if isinstance(reuse, PrefixPlan):
                assert planner.prefixes is not None
                return planner.prefixes.plan(batch, reuse)
        longest = self.all_seen
        if longest and batch.max_query_len <= longest >= batch.max_seq_len:
            plan = self.windowless.plan(batch)
            assert isinstance(plan, StepPlan)
            plan.windowless = True
            return plan
        if self.exact is not None:
            return self.exact.plan(self.spec_of(batch), batch)
        if self.spec.batch_invariant:
            return self.plan_alike(batch)
        planned = batch.all_decode or not self.spec.graph_capture
        if batch.shared_prefix is not None and planned and self.in_one_tile:
            if self.prefixes is None:
                assert self.cache is not None
                self.prefixes = PrefixLauncher(
                    self.spec, self.cache.block_size, self.device, self.num_sms, self.workspace
                )
            return self.prefixes.plan(batch)
        return self.plan_rows(batch)

    @cached_property
    def windowless(self) -> TritonAttention:
        """The layer without its window and chunks, for steps in which they hide nothing."""
        spec = self.spec.replace(sliding_window=None, sink_tokens=0, chunk_size=None)
        other = type(self)(spec, self.cache, self.device)
        other.spaces, other.workspace = self.spaces, self.workspace
        return other

    def _planner(self, plan: Plan) -> TritonAttention:
        """Return what a plan is of: this layer, or `windowless`."""
        return self.windowless if isinstance(plan, StepPlan) and plan.windowless else self

    def page(self, chosen: ChosenPages) -> bool:
        return write_pages(chosen)

    def reads(self, plan: Plan, batch: Batch) -> Reads | None:
        if isinstance(plan, ExactPlan):
            return None
        planner = self._planner(plan)
        if isinstance(plan, PrefixPlan):
            assert planner.prefixes is not None
            return prefix_reads(planner.prefixes, plan, batch)
        assert isinstance(plan, AttentionPlan)
        return in_turn([reads_of(planner, launch, batch) for launch in (plan, *plan.others)])

    def prepare(self, phases: tuple[str, ...]) -> None:
        """Compile what a layer's functions are part of; others were when the backend was verified."""
        if self.generated is not None and self.torch_device.type == "cuda":
            with torch.cuda.device(self.torch_device):
                load(self.warm_up(phases))

    def warm_up(self, phases: tuple[str, ...]) -> list[Any]:
        """Compile what `phases` may run, side by side, and return it. Nothing runs."""
        frame = blank_frame(self.spec, self.cache, self.torch_device)
        cache, params, out, lse = frame.cache, frame.params, frame.out, frame.lse
        context = Frame(frame.query, None, None, cache, params, out, lse)
        keys = frame.key if cache is None else cache.key
        assert keys is not None
        quantized = keys.dtype.itemsize == 1
        with compiling_only(self.compilers) as compiled:
            for batch, params.inputs in blank_steps(
                self.spec, phases, self.torch_device, paged=cache is not None
            ):
                # A lone prompt stands for what is cut, which only some heads make worth it.
                plan = self.plan_rows(batch, cut=batch.num_seqs == 1)
                self.run(plan, frame)
                if cache is not None and plan.fresh:
                    self.run(plan, context)
                cut, wide = plan.merging, plan.way == "many" and plan.config == self.packed
                for merging in () if cut is None else cut.of_each_variant(wide):
                    plan.merging = merging
                    self.merge(plan, params, out, lse, quantized)
        return compiled

    def run(self, plan: Plan, frame: Frame) -> None:
        """Attend as planned; where rows are turned, with turned queries, and outputs turned back."""
        if isinstance(plan, ExactPlan):
            assert self.exact is not None
            self.exact.run(self.spec_of(plan.batch), plan, frame)
            return
        if self.all_seen and (planner := self._planner(plan)) is not self:
            planner.run(plan, frame)
            return
        of_key, of_value = self._turned_rows
        if of_key is not None:
            dtype = STORAGE_DTYPES[self.spec.dtype]
            rows = frame.query
            if rows.dtype.itemsize == 1:
                rows = dequantized(rows, frame.params.q_scale, torch.float32)
            query = torch.empty(rows.shape, dtype=dtype, device=rows.device)
            self._turn_rows(rows, query, 0)
            frame = frame.but(query=query)
        if of_value is None:
            self._run(plan, frame)
            return
        out = torch.empty(frame.out.shape, dtype=torch.float32, device=frame.out.device)
        self._run(plan, frame.but(out=out))
        self._turn_rows(out, frame.out, 1)

    def _turn_rows(self, rows: Tensor, out: Tensor, at: int) -> None:
        """Turn queries (0), or outputs back (1): by a product, but where a row's bits must be its own."""
        format, matrix = self._turned_rows[at], self._matrices[at]
        assert format is not None and matrix is not None
        narrow = out.dtype.itemsize == 1 or rows.stride(-1) != 1 or out.stride(-1) != 1
        if narrow or self.spec.batch_invariant or self.spec.dtype == "float32":
            write_output(out, turned(rows, format, back=bool(at)), 1.0)
            return
        tokens, heads, size = rows.shape
        count, strides = tokens * heads, (*rows.stride()[:2], *out.stride()[:2])
        grid = triton.cdiv(count, TURNED_ROWS), 1, 1
        constants = heads, size, power(size), TURNED_ROWS, TURNED_PART
        _turn(grid, (rows, matrix, out), (), strides, (count,), constants, {"num_warps": 4})

    def _run(self, plan: Plan, frame: Frame) -> None:
        query, cache, params = frame.query, frame.cache, frame.params
        out, lse = frame.out, frame.lse
        if isinstance(plan, PrefixPlan):
            assert cache is not None and self.prefixes is not None
            scales, factors = self._scales(query, params), self._factors(query, cache.key, params)
            self.prefixes.run(plan, PrefixStep(query, cache, params, out, lse, scales, factors))
            return
        assert isinstance(plan, AttentionPlan)
        parted: list[AttentionPlan] = []
        for launch in (plan, *plan.others):
            if not launch.beside:
                self._merge_all(parted, frame)
            if launch.grid[0]:
                ran = self._launch(launch, frame)
                if ran.merging is not None:
                    parted.append(ran)
        self._merge_all(parted, frame)

    def _launch(self, plan: AttentionPlan, frame: Frame) -> AttentionPlan:
        """Attend; returns the plan that ran."""
        query, cache, params = frame.query, frame.cache, frame.params
        out, lse = frame.out, frame.lse
        if plan.way in ("prefill", "pieces"):
            return self._prefill(plan, query, frame.key, frame.value, cache, params, out, lse)
        assert cache is not None
        self._decode(plan, query, cache, params, out, lse)
        return plan

    def _merge_all(self, plans: list[AttentionPlan], frame: Frame) -> None:
        """Merge what plans have cut, and forget them."""
        for plan in plans:
            source = frame.key if frame.cache is None else frame.cache.key
            assert source is not None
            self.merge(plan, frame.params, frame.out, frame.lse, source.dtype.itemsize == 1)
        plans.clear()

    def _prefill(
        self,
        plan: AttentionPlan,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache | None,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> AttentionPlan:
        """Attend; returns the plan that ran."""
        none = self._none
        packed = (
            plan.fresh
            and plan.widening is None
            and (cache is None or (cache.key.dtype == query.dtype and key is not None))
        )
        if packed:
            cache = None
        else:
            assert cache is not None
            key, value = cache.key, cache.value
        assert key is not None and value is not None
        factors = self._factors(query, key, params)
        if plan.at_once:
            assert self.hopper is not None
            tensors = (query, key, value, out, lse, factors[:2], self._inputs(plan, params))
            read = (None, None) if cache is None else self._rows(cache.alignment, False)[:2]
            if self.hopper(plan, self.spec_of(plan.batch), *tensors, read):
                return plan
            if plan.portable is None:  # what can't be described has a plan of its own
                plan.portable = self.portable_of(plan)
            plan = plan.portable
        inputs = self._inputs(plan, params)
        alignment = (1, 1) if cache is None else cache.alignment
        which = (plan.variant, query.stride(), key.stride(), value.stride(), out.stride(), key.dtype,
                 query.dtype, packed, lse is None, alignment)  # fmt: skip
        site = self._sites.get(which)
        if site is None:
            block_size = 1 if cache is None else cache.block_size
            site = self._sites[which] = self._prefill_site(
                plan, which[1:5], block_size, packed, lse is not None, inputs, alignment
            )
        site(
            plan.grid,
            (
                query, key, value, out, out if lse is None else lse,
                none if params.sinks is None else params.sinks,
                none if params.alibi_slopes is None else params.alibi_slopes,
                inputs, *self._scales(query, params),
            ),
            factors,
            (0 if lse is None else lse.stride(0), plan.table[0]),
            plan.kept,
        )  # fmt: skip
        return plan

    def _prefill_site(
        self,
        plan: AttentionPlan,
        strides: tuple[Strides, ...],
        block_size: int,
        packed: bool,
        lse: bool,
        inputs: Tensor,
        alignment: tuple[int, int] = (1, 1),
    ) -> Site:
        """Specialise the portable kernel for query, key, value and output of these strides.

        `packed`: keys go by token, not by block. `alignment`: the cache's.
        """
        config = self.paged_config if plan.fresh and not packed else plan.config
        where_seen = None
        if plan.lists is not None and self.generated is not None:
            where_seen = self.generated.where_seen
        constants = prefill_constants(
            self.spec_of(plan.batch), config, block_size, not packed, plan.way == "pieces",
            lse, self.device.arch, self._functions, where_seen, inputs.numel() - 1,
            NO_ROWS if packed else self._rows(alignment, False),
        )  # fmt: skip
        capped = self.spec.logit_soft_cap is not None  # such logits are small
        site = _site(prefill_kernel, strides, constants, config, packed, capped)
        if packed and paired(self.spec, config) and self.device.arch == "sm_90":
            site.options["maxnreg"] = FULL_REGISTERS
        return site

    def addressed(self, plan: Plan, strides: PackedStrides) -> Addressed | None:
        """Return the portable prefill's one launch over packed tensors of these strides.

        Short steps stay uncut for it; of others, those that were cut or are Hopper's own have none.
        """
        if self.all_seen and (planner := self._planner(plan)) is not self:
            return planner.addressed(plan, strides)
        spec = self.spec
        if spec.batch_invariant:  # its tiles may be of several launches
            return None
        assert isinstance(plan, AttentionPlan)
        if self.generated or spec.rope or self.by_tensors or not plan.grid[0]:
            return None
        if (spec.qkv_dtype, spec.out_dtype) != ("auto", "auto"):
            return None
        if plan.way == "pieces" or plan.at_once:
            if plan.batch.max_seq_len > UNCUT_KEYS:
                return None
            plan = self.plan_rows(plan.batch, uncut=True)
        width = spec.num_heads * spec.v_head_size
        each = (*((*s, 1) for s in strides[:3]), (width, spec.v_head_size, 1))
        dtype = STORAGE_DTYPES[spec.dtype]
        sites = []
        for lse in (False, True):
            which = (plan.variant, *each, dtype, dtype, True, not lse, (1, 1))
            if which not in self._sites:
                self._sites[which] = self._prefill_site(plan, each, 1, True, lse, self._none)
            sites.append(self._sites[which])
        return self._by_address(plan, sites, (plan.table[0],))

    def addressed_pages(self, plan: Plan, strides: PageStrides) -> Addressed | None:
        """Return the decode over pages of these strides: its launch, and its merge's."""
        if self.all_seen and (planner := self._planner(plan)) is not self:
            return planner.addressed_pages(plan, strides)
        spec = self.spec
        if spec.batch_invariant:
            return None
        assert isinstance(plan, AttentionPlan)
        decodes = plan.way not in ("prefill", "pieces") and plan.grid[0]
        if not decodes or self.generated or spec.rope or self.by_tensors:
            return None
        if (spec.qkv_dtype, spec.out_dtype, spec.stored_dtype) != ("auto", "auto", spec.dtype):
            return None
        each = (
            (*strides.query, 1),
            (*strides.key, 1),
            (*strides.value, 1),
            (spec.num_heads * spec.v_head_size, spec.v_head_size, 1),
        )
        dtype = STORAGE_DTYPES[spec.dtype]
        sites = [
            self._decode_site(plan, each, (dtype, dtype), lse, self._none) for lse in (False, True)
        ]
        return self._by_address(plan, sites, (*plan.table, plan.splits))

    def _by_address(
        self, plan: AttentionPlan, sites: list[Site], rest: tuple[int, ...]
    ) -> Addressed:
        """Return what attends to tensors as they are, by the site without an LSE or the one with it.

        `rest`: the free integers after the LSE's stride.
        """
        (plain, with_lse), spec = sites, self.spec
        none, scales, grid, kept = self._none, self._no_scales, plan.grid, plan.kept
        factors = spec.scale, 1.0, spec.logit_soft_cap or 1.0
        free, free_lse = (0, *rest), (spec.num_heads, *rest)
        merger, width = self.merger, spec.num_heads * spec.v_head_size

        def run(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            params: LayerParams,
            out: Tensor,
            lse: Tensor | None,
        ) -> None:
            sinks, alibi = params.sinks, params.alibi_slopes
            some = none if sinks is None else sinks, none if alibi is None else alibi
            tensors = query, key, value, out, out if lse is None else lse, *some, none, *scales
            site, ints = (plain, free) if lse is None else (with_lse, free_lse)
            site(grid, tensors, factors, ints, kept)
            if plan.merging is not None:
                strides = width, spec.v_head_size, 0 if lse is None else spec.num_heads
                merger(plan, sinks, scales[2:], 1.0, out, lse, strides)

        return run

    def _decode(
        self,
        plan: AttentionPlan,
        query: Tensor,
        cache: KVCache,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        none, inputs = self._none, self._inputs(plan, params)
        strides = query.stride(), *cache.strides[:2], out.stride()
        dtypes = query.dtype, cache.key.dtype
        packed = plan.config == self.packed and min(cache.alignment) >= word_bytes(cache.format)
        site = self._decode_site(
            plan, strides, dtypes, lse is not None, inputs, cache.alignment, packed
        )
        site(
            plan.grid,
            (
                query, cache.key, cache.value, out, out if lse is None else lse,
                none if params.sinks is None else params.sinks,
                none if params.alibi_slopes is None else params.alibi_slopes,
                inputs, *self._scales(query, params),
            ),
            self._factors(query, cache.key, params),
            (0 if lse is None else lse.stride(0), *plan.table, plan.splits),
            plan.kept,
        )  # fmt: skip

    def _decode_site(
        self,
        plan: AttentionPlan,
        strides: tuple[Strides, ...],
        dtypes: tuple[torch.dtype, torch.dtype],
        lse: bool,
        inputs: Tensor,
        alignment: tuple[int, int] = (1, 1),
        packed: bool = False,
    ) -> Site:
        """Specialise the kernel for query, key, value and output of these strides, once.

        `dtypes`: of queries and of the cache. `alignment`: the cache's. `packed`: the kernel is
        `hopper.packed`'s.
        """
        which = plan.variant, plan.rows, strides, dtypes, lse, alignment, packed, plan.beside > 0
        site = self._sites.get(which)
        if site is None and packed:
            assert self.cache is not None
            config = plan.config
            constants = packed_constants(self.spec, self.cache, config, plan.way, lse, plan.rows)
            site = self._sites[which] = packed_site(strides, constants, config)
        if site is None:
            _, of_key, of_value, _ = strides
            assert self.cache is not None
            constants = decode_constants(
                self.spec_of(plan.batch), plan.config, self.cache.block_size, plan.way, lse,
                self.device.arch, of_key == of_value, in_pairs(dtypes[1], of_value),
                NOTHING if plan.chosen else self._functions, inputs.numel() - 1, plan.rows,
                self._rows(alignment, True), plan.long,
            )  # fmt: skip
            site = self._sites[which] = _site(decode_kernel, strides, constants, plan.config, False)
            if plan.beside:
                site.options["launch_pdl"] = True
            if plan.way == "singles" and plan.config == self.full:
                site.options["maxnreg"] = FULL_REGISTERS
        return site

    def _rows(self, alignment: tuple[int, int], apart: bool) -> tuple[Any, ...]:
        """Return how a cache of rows of this alignment is read."""
        rows = Rows.of(self.cache, alignment, self.spec.dtype)
        return NO_ROWS if rows is None else rows.constants(apart)

    def _inputs(self, plan: AttentionPlan, params: LayerParams) -> Tensor:
        """Return where the functions' inputs lie, then the table that turns keys, as addresses.

        Made once for a layer's tensors and a plan.
        """
        generated, rope = self.generated, self.spec.rope
        if generated is not None and not (generated.reads or plan.lists is not None or rope):
            generated = None
        if plan.chosen or (generated is None and rope is None):
            return self._none
        captured = self._captured()
        tensors = (*params.inputs.values(), *captured.values())
        key = tuple([(t.data_ptr(), t.shape) for t in tensors])
        values = plan.inputs.get(key)
        if values is None:
            parts = []
            if generated is not None:
                inputs = {**plan.batch.inputs, **params.inputs, **captured}
                parts = [table(generated.trace, plan.batch.seq_index, inputs, plan.lists)]
            if rope is not None:
                parts.append(self._turned(rope, plan.config.block_n))
            values = plan.inputs[key] = parts[0] if len(parts) == 1 else torch.cat(parts)
        return values

    def _turned(self, rope: RopeSpec, block_n: int) -> Tensor:
        """Return the address of the table that keys are rotated by, int64 (1,)."""
        if block_n not in self._turns:
            made = turns(rope, block_n, self.torch_device)
            address = torch.tensor([made.data_ptr()], device=self.torch_device)
            self._turns[block_n] = (made, address)
        return self._turns[block_n][1]

    def _factors(
        self, query: Tensor, source: Tensor, params: LayerParams
    ) -> tuple[float, float, float]:
        """Return the scale of logits and of values, and the soft cap; `source`: the keys it reads."""
        scale, soft_cap, values = self.spec.scale, self.spec.logit_soft_cap or 1.0, 1.0
        if self.by_tensors:  # the kernel reads them
            return scale, values, soft_cap
        if source.dtype.itemsize == 1:
            scale, values = scale * params.k_scale, params.v_scale
        if query.dtype.itemsize == 1:
            scale *= params.q_scale
        return scale, values / params.out_scale, soft_cap

    def _scales(self, query: Tensor, params: LayerParams) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the scales that the kernel reads; where they are numbers, something in their place."""
        if not self.by_tensors:
            return self._no_scales
        # A query that was rotated before is no longer quantised.
        of_query = params.q_scale if query.dtype.itemsize == 1 else self._one
        return of_query, params.k_scale, params.v_scale, params.out_scale

    def merge(
        self,
        plan: AttentionPlan,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
        quantized: bool,
    ) -> None:
        """Merge the parts of a plan's cut tiles. `quantized`: the cache's elements are of 8 bits."""
        v_scale = 1.0
        if not self.by_tensors:
            v_scale = (params.v_scale if quantized else 1.0) / params.out_scale
        strides = out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0)
        self.merger(plan, params.sinks, self._scales(out, params)[2:], v_scale, out, lse, strides)


def _site(
    kernel: Any,
    strides: tuple[Strides, ...],
    constants: tuple[Any, ...],
    config: Config,
    packed: bool,
    fused: bool = True,
) -> Site:
    """Specialise a kernel for query, key, value and output of these strides.

    `packed`: keys by token, one "block" of them all. `fused`: products and sums may be one operation.
    """
    q, k, v, out = strides
    of_keys = (0, k[0], k[1], 0, v[0], v[1]) if packed else (*k[:3], *v[:3])
    return Site(
        kernel,
        (*q[:2], *of_keys, *out[:2]),
        constants,
        {"num_warps": config.num_warps, "num_stages": config.num_stages}
        | ({} if fused else UNFUSED),
    )
