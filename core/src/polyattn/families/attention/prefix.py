"""How are blocks that sequences share read once? A decode as calls and merges, by shared prefix.

Each run of shared blocks is one sequence whose queries are those of all its rows (Hydragen, arXiv
2402.05099; FlashInfer's cascade, arXiv 2501.01005). The rest of each row is a decode. The parts are
attention states, which are merged. Any backend that returns its LSE serves both.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from polyattn.registry.capabilities import check
from polyattn.registry.info import BackendInfo
from polyattn.runtime.backend import AttentionBackend, MergeBackend
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.merge import MergeBuffers, Merged
from polyattn.runtime.program import Call, Frame, LayerParams, Op, Plan, Rows
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.block_tables import without_first
from polyattn.runtime.step.shared_prefix import Levels, SharedRun
from polyattn.spec.decompose import over_context, unrotated
from polyattn.spec.layer import LayerSpec


class OverShared(Op):
    """Rows' queries over one level of shared blocks, without sinks."""

    def __init__(self, call: Call):
        self.inner = (call,)

    def run(self, frame: Frame) -> None:
        params = LayerParams(k_scale=frame.params.k_scale, v_scale=frame.params.v_scale)
        self.inner[0].run(frame.but(params=params))


class PrefixPlan(Plan):
    """The decode of each row's own keys and the levels' calls, merged."""

    __slots__ = ("merged",)

    def __init__(self, batch: Batch, merged: Merged):
        super().__init__(batch)
        self.merged = merged


def _over(spec: LayerSpec) -> str:
    """Return the phase whose backends read shared keys: MLA's prefill has keys of its own."""
    return "prefill" if spec.latent is None else "decode"


class PrefixDecode:
    """Runs decodes that share leading blocks, in a backend's place in a step's calls."""

    def __init__(self, group: LayerGroup, shared: BackendInfo, own: BackendInfo):
        self.group, spec = group, unrotated(group.spec)
        self.cache = group.cache_format
        with_lse, load, form = spec.replace(needs_lse=True), group.load, group.kernel_format
        plain = with_lse.replace(learned_sinks=False)
        self.shared = load(_over(spec), shared, AttentionBackend, plain, form(shared))
        self.own = load("decode", own, AttentionBackend, with_lse, form(own))
        self.merge = group.backend("merge", MergeBackend)
        self.buffers = MergeBuffers()

    @classmethod
    def of(cls, group: LayerGroup) -> PrefixDecode | None:
        """Return the runner for a group, or None where no two of its candidates can serve it."""
        spec, selection = unrotated(group.spec), group.selection
        with_lse, device = spec.replace(needs_lse=True), group.device
        over_all = over_context(with_lse.replace(learned_sinks=False))
        candidates = dict(selection.candidates)
        whole = group.cache_format
        infos: list[BackendInfo] = []
        for phase, asked in ((_over(spec), over_all), ("decode", with_lse)):
            able = [
                info
                for info in candidates.get(phase, ())
                if group.kernel_format(info) == whole
                and not check(info.capabilities, asked, device, phase)
            ]
            if not able:
                return None
            infos.append(able[0])
        return cls(group, infos[0], infos[1])

    @property
    def name(self) -> str:
        """The blocks that each backend reads, as text."""
        return f"{self.shared.name} over shared blocks, {self.own.name} over own ones"

    def plan(self, batch: Batch) -> PrefixPlan:
        """Return the plan of a step of decodes with a `shared_prefix`; it is never captured."""
        levels = batch.shared_prefix
        assert self.cache is not None and levels is not None
        size = self.cache.block_size
        own = Call("decode", self.own.name, self.own, self._own(batch, levels, size), None)
        shared = (self._level(batch, level, size) for level in levels)
        return PrefixPlan(batch, Merged([(None, own), *shared], self.merge, self.buffers))

    def _level(self, batch: Batch, level: tuple[SharedRun, ...], size: int) -> tuple[Rows, Op]:
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
        plan = self.shared.plan(keys.over_context())
        return taken, OverShared(Call("shared", self.shared.name, self.shared, plan, None))

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

    def run(self, plan: PrefixPlan, frame: Frame) -> None:
        """Attend to the rows' own keys, then to each level's shared ones, all of them in the cache."""
        plan.merged.run(frame.but(key=None, value=None))
