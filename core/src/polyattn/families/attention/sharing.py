"""Who reads the blocks that sequences share once for all? Looks for them, and weighs the ways to read them.

Each row by itself; in the launch of a backend that takes a batch's `shared_prefix`; or as calls and
merges (`prefix`), which any backend with an LSE serves. Only what is predicted to win is used.
"""

from __future__ import annotations

from polyattn.errors import BatchError
from polyattn.families.attention.prefix import PrefixDecode
from polyattn.registry.capabilities import check
from polyattn.runtime.backend import AttentionBackend
from polyattn.runtime.batch import Batch
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.plan import Call, Rows
from polyattn.runtime.shared_prefix import Levels, may_share, shared_prefixes
from polyattn.spec.decompose import unrotated
from polyattn.spec.kinds import Role
from polyattn.spec.layer import LayerSpec

CALL_US = {"cpu": 300.0}
ACCELERATOR_CALL_US = 18.0
"""What a call and its merge cost beside the keys that they read, in microseconds: the sharing must save
more. Measured on an H200 over 4,096 shared tokens: rows break even between 8 and 16 of them, of which the
saved bytes take 24 and 52 us at its stated bandwidth (benchmarks/results/h200/2026-11-22.md)."""
LAUNCH_US = {"cpu": 0.0}
ACCELERATOR_LAUNCH_US = 5.0
"""What a launch of its own costs beside one that reads each row by itself."""
CPU_BANDWIDTH = 10.0
"""GB/s where a device states none."""


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


class Sharing:
    """What a group can do with decodes that share leading blocks."""

    def __init__(
        self, group: LayerGroup, native: AttentionBackend | None, calls: PrefixDecode | None
    ):
        self.group, self.native, self.calls = group, native, calls

    @classmethod
    def of(cls, group: LayerGroup) -> Sharing | None:
        """Return it for a group, None where its layers, or all its candidates, rule it out."""
        spec = unrotated(group.spec)
        if not spec.cached or why_not(spec) or spec.graph_capture:
            return None
        native, calls = _native(group, spec), PrefixDecode.of(group)
        return None if native is None and calls is None else cls(group, native, calls)

    def call(self, batch: Batch, rows: Rows) -> Call | None:
        """Return a call for a batch of decodes; None where nothing is shared, or not enough."""
        form = self.group.cache_format
        assert form is not None
        size = form.block_size
        levels = self._levels(batch, size)
        saved = sum(run.saved for level in levels for run in level) * size * form.bytes_per_token
        way = self._way(len(levels), saved)
        if way is None:
            return None
        plan = way.plan(batch.with_shared_prefix(levels))
        return Call("decode", way.name, way, plan, rows, size, saved_bytes=saved)

    def _levels(self, batch: Batch, size: int) -> Levels:
        """Return the forest that the batch was given, or that its table shows."""
        # A row's last token is its own: something is left that it alone attends to.
        if batch.shared_prefix is not None:
            _check_lens(batch.shared_prefix, batch.lens, size)
            return batch.shared_prefix
        table = batch.host_block_table
        if table is None or not may_share(table):
            return ()
        return shared_prefixes(table, [max(n - 1, 0) for n in batch.lens], size)

    def _way(self, levels: int, saved_bytes: int) -> AttentionBackend | PrefixDecode | None:
        """Return who is predicted to run a step that saves so many bytes fastest, None for nobody."""
        if not saved_bytes:
            return None
        device = self.group.device
        saved_us = saved_bytes / (device.bandwidth or CPU_BANDWIDTH) / 1e3
        if self.native is not None:
            launch_us = LAUNCH_US.get(device.platform, ACCELERATOR_LAUNCH_US)
            return self.native if saved_us > launch_us else None
        calls_us = (levels + 1) * CALL_US.get(device.platform, ACCELERATOR_CALL_US)
        return self.calls if saved_us > calls_us else None


def _native(group: LayerGroup, spec: LayerSpec) -> AttentionBackend | None:
    """Return the first candidate that reads shared blocks in its own launch."""
    whole = group.cache_format
    for info in dict(group.selection.candidates).get("decode", ()):
        able = info.capabilities.shared_prefix and group.kernel_format(info) == whole
        if able and not check(info.capabilities, spec, group.device, "decode"):
            return group.load("decode", info, AttentionBackend, cache=whole)
    return None


def _check_lens(levels: Levels, lens: list[int], size: int) -> None:
    for level in levels:
        for run in level:
            short = min(run.rows, key=lambda row: lens[row])
            if lens[short] <= (run.first + run.count) * size:
                raise BatchError(
                    f"shared_prefix has blocks {run.first} to {run.first + run.count} of {size} tokens "
                    f"for row {short}, whose length is {lens[short]}; a row's last token is its own: "
                    "end the run before it"
                )
