"""How does a step read shared blocks once? This module finds them, and chooses a way.

There are three ways: each row alone; one launch of a backend that takes a batch's `shared_prefix`; or
calls and merges (`prefix`), which any backend with an LSE serves. A step shares only if that is
predicted to gain.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

import numpy as np
import torch

from polyattn.families.attention.prefix import PrefixDecode
from polyattn.registry.capabilities import check
from polyattn.runtime.backend import AttentionBackend
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.inputs import capturing
from polyattn.runtime.program import Call, Rows
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.block_tables import with_a_column
from polyattn.runtime.step.shared_prefix import Levels, may_share, most_saved
from polyattn.spec.decompose import unrotated
from polyattn.spec.kinds import Role
from polyattn.spec.layer import LayerSpec

CALL_US = {"cpu": 300.0}
ACCELERATOR_CALL_US = 18.0
"""What a call and its merge cost beside the keys that they read, in microseconds: the sharing must save
more. On an H200, over 4,096 shared tokens, 8 rows lose and 16 gain. Their saved bytes take 24 and 52 us
at its stated bandwidth (benchmarks/results/h200/2026-11-22.md)."""
LAUNCH_US = {"cpu": 0.0}
ACCELERATOR_LAUNCH_US = 12.0
"""The extra cost of reading shared keys in a backend's own launch, beside reading each row alone.
4 rows lose there and 8 gain; their saved bytes take 10 and 24 us."""
READ_BACK_US = {"cuda": 1000.0}
"""What reading a block table back from the device costs, in us. A layer must be able to save more.
The host waits for what the device still runs. The device then idles while the host plans. That takes 962
us for 64 rows of 2,080 blocks that share one run, and the copy 69 of them (an H100 whose host is slow,
benchmarks/results/h100.md, suite `prefix`). On platforms that aren't named here no table is read back."""
WAITING_RAISES = 2
"""What `torch.cuda.get_sync_debug_mode` returns after `set_sync_debug_mode("error")`."""
LONGEST_REST = 64
"""Steps for which no table is read back, at most, after tables in which too little was shared."""
ATTAINED = 0.4
"""The part of a device's nominal products that absorbed decodes reach: 404 of an H200's 989 TFLOP/s
(TRITON_MLA, 64 x 4,096). A latent that is read once is still multiplied by each row's heads."""
CPU_BANDWIDTH = 10.0
"""GB/s where a device states none."""


def why_not(spec: LayerSpec, served: Collection[str] = ()) -> str | None:
    """Return why a layer's decode can't be split by shared prefix, or None.

    `served`: what of `SHARED_FEATURES` a backend's own launch does.
    """
    if spec.sparse is not None:
        return "a choice of keys: each token reads its own rows of the cache"
    for name, asked in (
        ("a sliding window", spec.sliding_window and "sliding_window" not in served),
        ("tokens that all windows see", spec.sink_tokens),
        ("chunks", spec.chunk_size),
        ("ALiBi", spec.alibi and "alibi" not in served),
        ("a bitwise batch-invariant result", spec.batch_invariant),
        ("positions within the cache", unrotated(spec).rope),
        (f"the functions of {spec.variant}", spec.variant),
        ("a step's mask", spec.mask),
        ("quantised queries or outputs", spec.qkv_dtype != "auto" or spec.out_dtype != "auto"),
    ):
        if asked:
            return f"{name}: a shared key's part depends on each row's own position or batch"
    if spec.role is not Role.DECODER or not spec.causal:
        return "only a causal decoder's rows end in keys of their own"
    return None


class Sharing:
    """The ways in which a group serves decodes that share leading blocks.

    `native` reads them once in its own launch, `calls` as calls and merges. `reason`: why there is
    neither. `appends`: rows of several query tokens, too.
    """

    def __init__(
        self,
        group: LayerGroup,
        native: AttentionBackend | None,
        calls: PrefixDecode | None,
        reason: str = "",
        appends: bool = False,
    ):
        self.group, self.native, self.calls, self.reason = group, native, calls, reason
        self.appends = appends and not group.spec.graph_capture
        form = group.cache_format
        self.block_size, self.token_bytes = (
            (form.block_size, form.bytes_per_token) if form else (1, 0)
        )
        self.block_bytes = self.block_size * self.token_bytes
        self.rest = self.rested = 0

    @classmethod
    def of(cls, group: LayerGroup) -> Sharing:
        """Return it for a group; with a `reason` where its layers, or all its candidates, rule it out.

        Calls and merges aren't captured: how many there are differs from step to step. Lengths given
        as bounds don't say which blocks rows really share.
        """
        spec = unrotated(group.spec)
        asks = spec.cached and not spec.length_bounds
        native, served = _native(group, spec) if asks else (None, frozenset())
        reason = why_not(spec, served)
        if spec.length_bounds:
            reason = "length_bounds: bounds of lengths don't tell which blocks the rows share"
        if reason or not spec.cached:
            return cls(group, None, None, reason or "no layer with cached=False decodes")
        # A backend's own launch was faster than calls in every measurement of both.
        apart = native is None and not spec.graph_capture
        calls = PrefixDecode.of(group) if apart else None
        if native is None and calls is None:
            reason = "none of the candidates reads shared blocks once"
        return cls(group, native, calls, reason or "", "appends" in served)

    @cached_property
    def looks(self) -> bool:
        """Whether a step's table may be worth reading back at all."""
        priced = self.group.device.platform in READ_BACK_US
        return priced and not self.reason and not self.group.spec.graph_capture

    def look(self, step: Batch) -> bool:
        """Read a table that only the device has back to the host, where that may pay; return whether.

        It may where the lengths are exact and leave room for a layer to save more than it costs. After a
        table in which too little was shared, some steps' tables stay unread: 1, then 2, 4 and so on. A
        caller rules it out by a `shared_prefix`, be it empty, or by having torch raise where it waits.
        """
        if len(step.starts) < 3 or step.lens_are_bounds or step.shared_prefix is not None:
            return False
        if step.host_block_table is not None:
            return False
        table, device = step.block_table, self.group.device
        cost_us = READ_BACK_US.get(device.platform)
        if table is None or cost_us is None or not self._may_save(step, cost_us):
            return False
        if capturing(table) or (
            table.is_cuda and torch.cuda.get_sync_debug_mode() == WAITING_RAISES
        ):
            return False
        if self.rested < self.rest and not self.group.spec.deterministic:
            self.rested += 1
            return False
        step.read_block_table()
        return True

    def learn(self, shared: bool) -> None:
        """Skip some tables after one that shared nothing; look at the next one after one that did."""
        self.rest, self.rested = 0 if shared else min(self.rest * 2 or 1, LONGEST_REST), 0

    def _may_save(self, step: Batch, us: float) -> bool:
        """Whether a step's decodes could save more than that, going by their lengths alone."""
        # No step saves more than all of its blocks: that ends most looks.
        every = int(np.add.reduce(step.host_lens)) // self.block_size
        if self._saved_us(every * self.block_bytes) <= us:
            return False
        own = step.host_lens[step.host_query_lens == 1] - 1
        blocks = np.maximum(own, 0) // self.block_size
        most = int(blocks.sum() - blocks.max(initial=0))
        return self._saved_us(most * self.block_bytes) > us

    def call(self, batch: Batch, rows: Rows) -> Call | None:
        """Return a call for a batch of decodes; None if too little is shared, or no backend can.

        A capture with a `shared_prefix`, even an empty one, allows steps to share.
        """
        if self.reason or len(batch.starts) < 3 or not (batch.all_decode or self.appends):
            return None
        captures = bool(self.group.spec.graph_capture)
        if batch.shared_prefix is None:
            table = batch.host_block_table
            if captures or table is None or not may_share(table):
                return None
            most = most_saved(table, np.maximum(batch.host_contexts, 0), self.block_size)
            if self._way(1, most * self.block_bytes, batch) is None:
                return None
        levels = batch.find_shared_prefix(self.block_size)
        saved = self._saved_blocks(levels, batch) * self.block_bytes
        way = self.native if captures else self._way(len(levels), saved, batch)
        if way is None:
            return None
        plan = way.plan(with_a_column(batch).with_shared_prefix(levels))
        return Call("decode", way.name, way, plan, rows, saved_bytes=saved)

    def refill(self, call: Call, batch: Batch) -> None:
        """Write a later step's decodes into the plan of a captured call that may share."""
        levels = batch.shared_prefix
        if (
            levels is None or batch.staging is None
        ):  # staged ones are checked; the table comes later
            levels = batch.find_shared_prefix(self.block_size)
        call.backend.plan(with_a_column(batch).with_shared_prefix(levels), call.plan)

    def note(self, step: Batch, call: Call) -> str:
        """Describe what a step's decodes read once for several rows, or why they share nothing."""
        if call.phase != "decode" or call.plan.batch.num_seqs < 2:
            return ""
        if call.saved_bytes:
            runs = sum(map(len, call.plan.batch.shared_prefix or ()))
            saved = call.saved_bytes / 1e6
            return f"; reads {runs} shared prefixes once, which saves {saved:.3g} MB a layer"
        return f"; no shared prefix: {self.reason or self._why_none(step)}"

    def _why_none(self, step: Batch) -> str:
        if step.shared_prefix is None and self.group.spec.graph_capture:
            return "a captured step has them with StepGraphs(..., shared_prefix=True)"
        if step.shared_prefix is None and step.host_block_table is None:
            return (
                "unknown, because the block table is on the device only and wasn't read back; pass "
                "host_block_table= or shared_prefix= to Batch"
            )
        rows = [row for row, count in enumerate(step.query_lens) if count == 1]
        part = step.part(rows)
        saved = self._saved_blocks(part.find_shared_prefix(self.block_size), part)
        megabytes = saved * self.block_bytes / 1e6
        return f"it would save {megabytes:.3g} MB, too little" if saved else "rows share no blocks"

    def _saved_blocks(self, levels: Levels, batch: Batch) -> int:
        """Return the block reads that are saved where runs are read once; of a window, within it."""
        runs, window = [run for level in levels for run in level], self.group.spec.sliding_window
        if not window:
            return sum(run.saved for run in runs)
        saved, unseen = 0, (batch.host_contexts + 1 - window) // self.block_size
        for run in runs:
            first = np.maximum(unseen[list(run.rows)], run.first)
            seen = np.maximum(run.first + run.count - first, 0)
            saved += int(seen.sum() - seen.max())
        return saved

    def _way(
        self, levels: int, saved_bytes: int, batch: Batch
    ) -> AttentionBackend | PrefixDecode | None:
        """Return the backend predicted fastest for a step that saves that many bytes; None for none."""
        if not saved_bytes:
            return None
        platform, saved_us = self.group.device.platform, self._saved_us(saved_bytes)
        if not batch.all_decode:
            saved_us = self._appends_us(saved_bytes, batch)
        if self.native is not None:
            launch_us = LAUNCH_US.get(platform, ACCELERATOR_LAUNCH_US)
            return self.native if saved_us > launch_us else None
        calls_us = (levels + 1) * CALL_US.get(platform, ACCELERATOR_CALL_US)
        return self.calls if saved_us > calls_us else None

    def _appends_us(self, saved_bytes: int, batch: Batch) -> float:
        """Return what rows of several tokens save: bytes count only where products take no longer."""
        device, spec = self.group.device, self.group.spec
        if not device.matmul:
            return self._saved_us(saved_bytes)
        pairs = int(batch.host_query_lens @ batch.host_lens)
        flops = 2 * pairs * spec.num_heads * (spec.head_size + spec.v_head_size)
        product_us = flops / (ATTAINED * device.matmul * 1e6)
        whole_bytes = int(batch.host_lens.sum()) * self.token_bytes
        whole, less = self._saved_us(whole_bytes), self._saved_us(whole_bytes - saved_bytes)
        return max(whole, product_us) - max(less, product_us)

    def _saved_us(self, saved_bytes: int) -> float:
        device, spec = self.group.device, self.group.spec
        each = 1 / (device.bandwidth or CPU_BANDWIDTH)
        if spec.latent is not None and device.matmul:
            products = 2 * spec.num_heads * (spec.latent.size + spec.latent.rank)
            each -= products / self.token_bytes / (ATTAINED * device.matmul * 1e3)
        return saved_bytes * each / 1e3


def _native(group: LayerGroup, spec: LayerSpec) -> tuple[AttentionBackend | None, frozenset[str]]:
    """Return the first candidate that reads shared blocks in its own launch, and its claims of it."""
    whole = group.cache_format
    for info in dict(group.selection.candidates).get("decode", ()):
        claims = info.capabilities
        able = claims.shared_prefix and not why_not(spec, claims.shared_features)
        able = able and group.kernel_format(info) == whole
        if able and not check(claims, spec, group.device, "decode"):
            backend = group.candidate("decode", info, AttentionBackend)
            if backend is not None:
                return backend, claims.shared_features
    return None, frozenset()
