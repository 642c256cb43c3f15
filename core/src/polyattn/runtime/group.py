"""Runs a selection: loads its backends, plans a step once for all layers, dispatches by phase."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from polyattn.device import Device
from polyattn.errors import BatchError, PluginError
from polyattn.registry.info import BackendInfo, load_object
from polyattn.runtime.backend import AttentionBackend, LayerParams
from polyattn.runtime.batch import Batch, check_lens_against_table, check_on_device
from polyattn.runtime.kv_cache import KVCache
from polyattn.spec.layer import AttentionKind, LayerSpec

if TYPE_CHECKING:
    from polyattn.api import Selection


Backend = TypeVar("Backend")


def load_backend(
    info: BackendInfo, spec: LayerSpec, device: Device, base: type[Backend]
) -> Backend:
    """Import and build a backend. Raises `PluginError`."""
    if not device.is_real:
        raise PluginError(
            f"{device} is a profile to reason about; select on this machine's device to run"
        )
    try:
        backend = load_object(info.path)(spec, device)
    except Exception as error:
        raise PluginError(
            f"backend {info.name} can't be loaded from {info.path}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(backend, base):
        raise PluginError(f"backend {info.name}: {info.path} is no {base.__name__}")
    if isinstance(backend, AttentionBackend):
        _check_claims(info, spec, backend)
    return backend


def _check_claims(info: BackendInfo, spec: LayerSpec, backend: AttentionBackend) -> None:
    """A claimed phase whose method is still the base's would fail in the middle of serving."""
    phases = info.capabilities.phases
    sparse = spec.kind is AttentionKind.SPARSE_MLA
    for name in ["sparse"] if sparse else sorted(phases):
        method = f"forward_{name}"
        if getattr(type(backend), method) is getattr(AttentionBackend, method):
            raise PluginError(
                f"backend {info.name} claims {', '.join(sorted(phases))} for {spec.kind.value} and "
                f"{info.path} has no {method}; write it, or claim less"
            )


class Walk:
    """Block-table expansion: a kernel that takes only smaller blocks walks each block as several."""

    def __init__(self, block_size: int | None, kernel_size: int | None):
        self.size = kernel_size
        self.ratio = (block_size or 1) // (kernel_size or block_size or 1)
        self._step = self.ratio
        self._tables: dict[tuple[int, int], Tensor] = {}

    def expand(self, batch: Batch) -> Batch:
        """Return the batch with a block table of the kernel's blocks."""
        if self.ratio == 1 or batch.block_table is None:
            return batch
        table = batch.block_table
        shape = (table.shape[0], table.shape[1] * self.ratio)
        out = self._tables.get(shape)
        if out is None or out.device != table.device:
            out = self._tables[shape] = table.new_empty(shape)
        for offset in range(self.ratio):
            out[:, offset :: self.ratio] = table * self._step + offset
        return batch.with_block_table(out)

    def moved(self, cache: KVCache) -> bool:
        """Whether the table was expanded for blocks that lie closer than this cache's do.

        So it is where K and V share a storage; the next `expand` is for this cache.
        """
        if self.ratio == 1:
            return False
        assert self.size is not None
        _, step = cache.in_blocks_of(self.size)
        moved = step != self._step
        self._step = step
        return moved

    def view(self, cache: KVCache) -> KVCache:
        """Return the cache in the kernel's blocks."""
        if self.ratio == 1:
            return cache
        assert self.size is not None
        return cache.in_blocks_of(self.size)[0]


class Runtime:
    """The loaded backends of one selection and the plan of the current step.

    Sequences of one query token at the front of a batch go to the decode backend, the rest to the
    prefill backend; one backend that claims `"mixed"` takes both in one launch.
    """

    def __init__(self, selection: Selection):
        decision = selection.decision
        self.spec, self.device = decision.spec, decision.device
        self.block_size = decision.block_size
        self.prefill = self._load(selection.prefill)
        self.decode: AttentionBackend = self.prefill
        self.mixed = (
            selection.decode is selection.prefill
            and "mixed" in selection.prefill.capabilities.phases
        )
        if selection.decode is not None and not self.mixed:
            self.decode = self._load(selection.decode)  # each phase keeps a plan of its own
        self.checks = False
        self.batch: Batch | None = None
        self._split = 0
        self.walks = [Walk(decision.block_size, size) for size in decision.kernel_block_sizes]

    def _load(self, info: BackendInfo) -> AttentionBackend:
        return load_backend(info, self.spec, self.device, AttentionBackend)

    def plan(self, batch: Batch) -> None:
        """Prepare one step for every layer of the selection. Raises `BatchError`."""
        check_lens_against_table(batch, self.block_size, causal=self.spec.causal)
        if self.spec.role.has_cache and batch.block_table is None and batch.num_seqs:
            raise BatchError(f"{self.spec} attends over a cache; the batch has no block_table")
        if not self.spec.role.has_cache and batch.lens != batch.query_lens:
            raise BatchError(f"{self.spec} keeps no cache; seq_lens must equal the query lengths")
        self.batch = None  # a plan that fails half-way must not look current
        self._split = batch.num_decodes if self.spec.role.has_cache else 0
        if self.mixed and 0 < self._split < batch.num_seqs:
            self.prefill.plan(self.walks[0].expand(batch))
        else:
            if self._split < batch.num_seqs:
                self.prefill.plan(self.walks[0].expand(batch.part(self._split, batch.num_seqs)))
            if self._split:
                self.decode.plan(self.walks[1].expand(batch.part(0, self._split)))
        self.batch = batch

    def _view(self, cache: KVCache, phase: int) -> KVCache:
        walk = self.walks[phase]
        if walk.moved(cache):
            assert self.batch is not None
            self.plan(self.batch)
        return walk.view(cache)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache | None,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Store the new keys and values and attend, as planned. Writes `out` (and `lse`)."""
        batch = self.batch
        assert batch is not None, "plan(batch) comes before forward"
        if cache is None:
            self.prefill.forward_prefill(query, key, value, None, params, out, lse)
            return
        if self.checks and self.device.is_accelerator:
            _check_aligned(query=query, key=key, value=value, out=out)
        if self.checks and not capturing(query):
            check_on_device(batch, cache.num_blocks, cache.block_size)
        if key is not None and value is not None and batch.slot_mapping is not None:
            self.decode.write_kv(key, value, cache, batch.slot_mapping, params)
        split, total = self._split, batch.num_seqs
        if split == total:
            if total:
                self.decode.forward_decode(query, self._view(cache, 1), params, out, lse)
        elif split == 0:
            view = self._view(cache, 0)
            self.prefill.forward_prefill(query, key, value, view, params, out, lse)
        elif self.mixed:
            view = self._view(cache, 0)
            self.prefill.forward_mixed(query, key, value, view, params, out, lse)
        else:
            self._forward_split(query, key, value, cache, params, out, lse)

    def _forward_split(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        at = self._split  # one token a decode, so the split of sequences is that of tokens
        self.decode.forward_decode(
            query[:at], self._view(cache, 1), params, out[:at], None if lse is None else lse[:at]
        )
        self.prefill.forward_prefill(
            query[at:],
            None if key is None else key[at:],
            None if value is None else value[at:],
            self._view(cache, 0),
            params,
            out[at:],
            None if lse is None else lse[at:],
        )


def _check_aligned(**tensors: Tensor | None) -> None:
    """Accelerators' kernels load 16 bytes at a time; some fault on anything else."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.data_ptr() % 16:
            raise BatchError(
                f"{name} starts at an address that is not a multiple of 16 bytes; copy it, or slice at "
                "a multiple"
            )


def capturing(query: Tensor) -> bool:
    """Whether a graph is being recorded: then nothing can be copied to the host."""
    return query.is_cuda and torch.cuda.is_current_stream_capturing()
