"""How are blocks that sequences share read once? A decode as calls and merges, by shared prefix.

Each run of shared blocks is one sequence whose queries are those of all its rows (Hydragen, arXiv
2402.05099; FlashInfer's cascade, arXiv 2501.01005); each row's own rest is a decode; the parts are
attention states and merge. Any backend with an LSE serves both.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from polyattn.registry.capabilities import check
from polyattn.registry.info import BackendInfo
from polyattn.runtime.backend import AttentionBackend, LayerParams, MergeBackend
from polyattn.runtime.batch import Batch
from polyattn.runtime.block_tables import without_first
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.kv_cache import KVCache
from polyattn.runtime.merge import MergeBuffers
from polyattn.runtime.plan import Plan
from polyattn.runtime.shared_prefix import Levels, SharedRun, may_share, shared_prefixes
from polyattn.spec.decompose import over_context, unrotated
from polyattn.spec.kinds import Role
from polyattn.spec.layer import LayerSpec

CALL_US = {"cpu": 300.0}
ACCELERATOR_CALL_US = 18.0
"""What a call and its merge cost beside the keys that they read, in microseconds: the sharing must save
more. Measured on an H200 over 4,096 shared tokens: rows break even between 8 and 16 of them, of which the
saved bytes take 24 and 52 us at its stated bandwidth (benchmarks/results/h200/2026-11-22.md)."""
CPU_BANDWIDTH = 10.0
"""GB/s where a device states none."""


@dataclass(frozen=True)
class SharedCall:
    """One level: which query rows it takes (None: all, in order), and the backend's plan for it."""

    rows: Tensor | None
    plan: Plan


class PrefixPlan(Plan):
    """The levels' calls, and the decode of what each row has for itself."""

    __slots__ = ("levels", "own", "saved_bytes")

    def __init__(self, batch: Batch, levels: list[SharedCall], own: Plan, saved_bytes: int):
        super().__init__(batch)
        self.levels, self.own, self.saved_bytes = levels, own, saved_bytes


def why_not(spec: LayerSpec) -> str | None:
    """Say why a layer's decode can't be taken apart by shared prefix, or None."""
    if spec.latent is not None:
        return "MLA: no backend's absorbed decode takes the queries of many rows over one context"
    for name, asked in (
        ("a sliding window", spec.sliding_window), ("chunks", spec.chunk_size),
        ("ALiBi", spec.alibi), ("a bitwise batch-invariant result", spec.batch_invariant),
        ("positions within the cache", unrotated(spec).rope),
        (f"the functions of {spec.variant}", spec.variant), ("a step's mask", spec.mask),
        ("quantised queries or outputs", spec.qkv_dtype != "auto" or spec.out_dtype != "auto"),
    ):  # fmt: skip
        if asked:
            return f"{name}: a shared key's part depends on each row's own position or batch"
    if spec.role is not Role.DECODER or not spec.causal:
        return "only a causal decoder's rows end in keys of their own"
    return None


class PrefixDecode:
    """Runs decodes that share leading blocks; stands where a backend does in a step's calls."""

    def __init__(self, group: LayerGroup, shared: BackendInfo, own: BackendInfo):
        self.group, spec = group, unrotated(group.spec)
        self.cache = group.cache_format
        with_lse, load, form = spec.replace(needs_lse=True), group.load, group.kernel_format
        plain = with_lse.replace(learned_sinks=False)
        self.shared = load("prefill", shared, AttentionBackend, plain, form(shared))
        self.own = load("decode", own, AttentionBackend, with_lse, form(own))
        self.merge = group.backend("merge", MergeBackend)
        self.buffers = MergeBuffers()

    @classmethod
    def of(cls, group: LayerGroup) -> PrefixDecode | None:
        """Return the runner for a group, or None where no two of its candidates can serve it."""
        spec, selection = unrotated(group.spec), group.selection
        if not spec.cached or why_not(spec) or spec.graph_capture:
            return None
        if spec.length_bounds:
            return None
        with_lse, device = spec.replace(needs_lse=True), group.device
        over_all = over_context(with_lse.replace(learned_sinks=False))
        candidates = dict(selection.candidates)
        whole = group.cache_format
        found: list[BackendInfo] = []
        for phase, asked in (("prefill", over_all), ("decode", with_lse)):
            able = [
                info
                for info in candidates.get(phase, ())
                if group.kernel_format(info) == whole
                and not check(info.capabilities, asked, device, phase)
            ]
            if not able:
                return None
            found.append(able[0])
        return cls(group, found[0], found[1])

    def plan(self, batch: Batch) -> PrefixPlan | None:
        """Return the plan of a step of decodes; None where nothing is shared, or not enough."""
        table = batch.host_block_table
        if table is None or not may_share(table):
            return None
        assert self.cache is not None
        size = self.cache.block_size
        # A row's last token is its own: something is left for its decode.
        levels = shared_prefixes(table, [max(n - 1, 0) for n in batch.lens], size)
        per_block = size * self.cache.bytes_per_token
        saved = sum(run.saved for level in levels for run in level) * per_block
        if not saved or self._us_saved(saved) <= (len(levels) + 1) * self._call_us():
            return None
        calls = [self._level(batch, level, size) for level in levels]
        return PrefixPlan(batch, calls, self._own(batch, levels, size), saved)

    def _us_saved(self, saved_bytes: int) -> float:
        return saved_bytes / (self.group.device.bandwidth or CPU_BANDWIDTH) / 1e3

    def _call_us(self) -> float:
        return CALL_US.get(self.group.device.platform, ACCELERATOR_CALL_US)

    def _level(self, batch: Batch, level: tuple[SharedRun, ...], size: int) -> SharedCall:
        assert batch.block_table is not None
        rows = [row for run in level for row in run.rows]
        width = max(run.count for run in level)
        table = batch.block_table.new_zeros(len(level), width)
        for index, run in enumerate(level):
            blocks = slice(run.first, run.first + run.count)
            table[index, : run.count] = batch.block_table[run.rows[0], blocks]
        starts = [0, *accumulate(len(run.rows) for run in level)]
        keys = Batch(starts, [run.count * size for run in level], table, device=batch.device)
        whole = rows == list(range(batch.num_seqs))
        taken = None if whole else torch.tensor(rows, dtype=torch.int64, device=batch.device)
        return SharedCall(taken, self.shared.plan(keys.over_context()))

    def _own(self, batch: Batch, levels: Levels, size: int) -> Plan:
        """Plan the rows over what lies behind their shared blocks."""
        assert batch.block_table is not None
        skipped = [0] * batch.num_seqs
        for level in levels:
            for run in level:
                for row in run.rows:
                    skipped[row] = run.first + run.count
        table = without_first(batch.block_table, skipped)
        lens = [n - s * size for n, s in zip(batch.lens, skipped, strict=True)]
        return self.own.plan(Batch(batch.starts, lens, table, device=batch.device))

    def run(
        self,
        plan: PrefixPlan,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Attend to the rows' own keys, then to each level's shared ones, merged in float32."""
        total, total_lse, part, part_lse = self.buffers.take(query, self.group.spec.v_head_size)
        self.own.run(plan.own, query, None, None, cache, params, part, total_lse)
        total.copy_(part)
        plain = LayerParams(k_scale=params.k_scale, v_scale=params.v_scale)
        for level in plan.levels:
            rows = level.rows
            taken = query if rows is None else query[rows]
            found, found_lse = part[: len(taken)], part_lse[: len(taken)]
            self.shared.run(level.plan, taken, None, None, cache, plain, found, found_lse)
            if rows is None:
                self.merge.run(total, total_lse, found, found_lse)
            else:
                some, some_lse = total[rows], total_lse[rows]
                self.merge.run(some, some_lse, found, found_lse)
                total[rows], total_lse[rows] = some, some_lse
        out.copy_(total)
        if lse is not None:
            lse.copy_(total_lse)
