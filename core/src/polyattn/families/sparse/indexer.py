"""Which keys does a token attend to? Scores over a paged cache of index keys, and the best of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from polyattn.errors import BatchError, SpecError
from polyattn.families.sparse.index_cache import (
    index_cache_form,
    write_index_keys,
    zeroed_index_cache,
)
from polyattn.runtime.backend import AddressedIndex, IndexBackend
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES
from polyattn.runtime.cache.room import room
from polyattn.runtime.group import LayerGroup, StepPlan
from polyattn.runtime.inputs import (
    bad_input,
    check_slots,
    check_tensor,
    check_tensors,
    form_of,
    own_precision,
)
from polyattn.runtime.program import IndexFrame
from polyattn.runtime.step.batch import Batch
from polyattn.selection.selection import Selection
from polyattn.spec.layer import LayerSpec
from polyattn.spec.sparse import IndexerSpec


@dataclass(slots=True)
class LastCall:
    """A call that passed all checks: what another one must have in common with it.

    `step`: the batch, and its tensors. `forms`: `form_of` the query, the keys and the weights. `out`: a
    tensor of the output's shape. `run` does the call's work.
    """

    step: tuple[Any, ...]
    forms: tuple[Any, ...]
    out: Tensor
    run: AddressedIndex

    def again(
        self, query: Tensor, keys: Tensor, batch: Batch, weights: Tensor | None
    ) -> Tensor | None:
        """Run for other tensors, and return the choice; None where something differs."""
        step, table, starts, lens = self.step
        # A cold call pays for each object that it touches, so this calls few functions.
        if (
            batch is not step
            or batch.block_table is not table
            or batch.query_start_loc is not starts
            or batch.seq_lens is not lens
            or query.__class__ is not Tensor
            or keys.__class__ is not Tensor
            or (query.shape, query.stride(), query.dtype, query.device) != self.forms[0]
            or (keys.shape, keys.stride(), keys.dtype, keys.device) != self.forms[1]
            or (weights is not None and weights.__class__ is not Tensor)
            or form_of(weights) != self.forms[2]
        ):
            return None
        out = torch.empty_like(self.out)
        self.run(query, keys, weights, out)
        return out


class Indexer:
    """Chooses each token's keys by scores over a cache of index keys. It never waits for the device.

    Args:
        group: of a sparse layer whose spec has an `indexer`, as `Attention` takes it.

    Raises:
        SpecError: the spec has no indexer.
        SelectionError, PluginError: as `LayerGroup`.

    Examples:
        >>> spec = LayerSpec(
        ...     kind="sparse", num_heads=4, head_size=64, dtype="float32", sparse=SparseSpec(budget=8),
        ...     indexer=IndexerSpec(num_heads=4, head_size=32, budget=8),
        ... )
        >>> indexer = Indexer(spec)
        >>> keys = indexer.allocate_cache(num_blocks=2)
        >>> indexer.store(torch.randn(20, 32), keys, torch.arange(20))
        >>> batch = Batch.from_lens([1], [20], torch.tensor([[0]]).int(), 64)
        >>> indexer(torch.randn(1, 4, 32), keys, batch, torch.randn(1, 4)).shape
        torch.Size([1, 1, 8])

    """

    def __init__(self, group: LayerGroup | Selection | LayerSpec):
        self.group = group if isinstance(group, LayerGroup) else LayerGroup(group)
        layer = self.group.spec
        if layer.indexer is None:
            raise SpecError(f"{layer} has no indexer: give indexer=IndexerSpec(…)")
        self.spec: IndexerSpec = layer.indexer
        self.backend = self.group.backend("index", IndexBackend)
        self._dtype = STORAGE_DTYPES[layer.dtype]
        self._form = index_cache_form(layer)
        self._known_keys: Tensor | None = None  # of the last call

    def allocate_cache(self, num_blocks: int, block_size: int | None = None) -> Tensor:
        """Return a cache of index keys, (num_blocks, block_size, head_size).

        Args:
            num_blocks: of the cache.
            block_size: entries of a block; None: as the layer's own cache.

        Returns:
            Zeros; of `cache_dtype="fp8_scaled"` uint8 (num_blocks, block_size, head_size + 4).

        Raises:
            CacheError: the number isn't positive, or the device has too little memory.

        """
        form = self.group.cache_format
        assert form is not None
        size, dtype = self._form
        block, device = block_size or form.block_size, self.group.torch_device
        with room("num_blocks", num_blocks, block * size * dtype.itemsize, device):
            return zeroed_index_cache(self.group.spec, num_blocks, block, device)

    def store(self, keys: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
        """Write index keys.

        Args:
            keys: (rows, head_size), in the layer's dtype.
            cache: as `allocate_cache` returns it.
            slot_mapping: int64 (rows,), where each goes; -1 skips.

        Raises:
            BatchError: a tensor doesn't fit the spec; nothing has changed.

        """
        device = self.group.torch_device
        check_slots(slot_mapping, device)
        shape = (len(slot_mapping), self.spec.head_size)
        check_tensors(device, keys=(keys, shape, self._dtype))
        self._check_cache("cache", cache)
        write_index_keys(self.spec, cache, keys.detach(), slot_mapping.long())

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        plan: StepPlan | Batch,
        weights: Tensor | None = None,
        within: Tensor | None = None,
    ) -> Tensor:
        """Choose keys for each token of a step.

        Args:
            query: (num_tokens, num_heads, head_size), in the layer's dtype, or of e4m3 as it is; its
                scales belong into the weights (DeepGEMM, 2025).
            keys: a paged cache with each sequence's entries, the step's own included.
            plan: the step's batch, or a plan of it; the block table says where the entries are.
            weights: (num_tokens, num_heads), if the spec folds heads by weights.
            within: int32 (num_tokens, choices or 1, n), the blocks of `spec.within` entries that count,
                -1 for none.

        Returns:
            int32 (num_tokens, choices, K): ascending ids, the tail last; -1 behind them. Scores are
            float32, or float64 for float64 tensors.

        Raises:
            BatchError: a tensor doesn't fit the spec or the batch.

        """
        batch = plan.batch if isinstance(plan, StepPlan) else plan
        alike = within is None and not is_dynamo_compiling()
        last: LastCall | None = self.backend.last_call
        # The step's first layer has checked all that its layers share.
        if last is not None and alike:
            again = last.again(query, keys, batch, weights)
            if again is not None:
                return again
        self._check(query, keys, batch, weights, within)
        self._known_keys = keys
        own = query
        if query.dtype is not self._dtype and not self.backend.multiplies_e4m3:
            own = own.to(self._dtype)
        if query.requires_grad:
            own = own.detach()
        shape = (batch.num_tokens, self.spec.choices, chosen_width(self.spec, batch))
        out = torch.empty(shape, dtype=torch.int32, device=query.device)
        frame = IndexFrame(own, keys, weights, within, out)
        with own_precision(self.group.device_type):
            step, run = self.backend.plan(batch), None
            if alike and own is query and getattr(step, "batch", None) is batch:
                run = self.backend.addressed(step, frame)
            if run is None:
                self.backend.run(step, frame)
                return out
            run(query, keys, weights, out)
        tensors = batch.block_table, batch.query_start_loc, batch.seq_lens
        forms = form_of(query), form_of(keys), form_of(weights)
        like = out.new_empty(1).expand(shape)
        self.backend.last_call = LastCall((batch, *tensors), forms, like, run)
        return out

    def _check_cache(self, name: str, cache: Tensor) -> None:
        size, dtype = self._form
        if cache is not self._known_keys:
            check_tensor(name, cache, self.group.torch_device)
        if cache.dim() != 3 or cache.shape[2] != size or cache.dtype is not dtype:
            raise bad_input(name, cache, ("num_blocks", "block_size", size), dtype)
        if not cache.is_contiguous():
            raise BatchError(f"{name} isn't contiguous: its pages are read as they lie")

    def _check(
        self,
        query: Tensor,
        keys: Tensor,
        batch: Batch,
        weights: Tensor | None,
        within: Tensor | None,
    ) -> None:
        spec, tokens = self.spec, batch.num_tokens
        if batch.block_table is None:
            raise BatchError(
                "the batch has no block_table, and the index keys are in a paged cache: pass one"
            )
        shape = (tokens, spec.num_heads, spec.head_size)
        narrow = getattr(query, "dtype", None) is torch.float8_e4m3fn
        dtype = torch.float8_e4m3fn if narrow else self._dtype
        check_tensors(self.group.torch_device, query=(query, shape, dtype))
        self._check_cache("keys", keys)
        batch.check_queries()
        batch.check_pages(keys.shape[1], spec.tokens_per_entry)
        if (weights is not None) != (spec.fold == "weighted"):
            raise BatchError(
                f"weights {'are missing' if weights is None else 'were given'}: fold={spec.fold!r}"
            )
        if weights is not None:
            check_tensor("weights", weights, self.group.torch_device)
            if weights.shape != (tokens, spec.num_heads) or not weights.is_floating_point():
                raise bad_input("weights", weights, (tokens, spec.num_heads), torch.float32)
        if (within is not None) != (spec.within is not None):
            raise BatchError(
                f"within {'is missing' if within is None else 'was given'}: within={spec.within!r}"
            )
        if within is None:
            return
        check_tensor("within", within, self.group.torch_device)
        fits = within.dim() == 3 and len(within) == tokens and within.shape[1] in (1, spec.choices)
        if not fits or within.dtype is not torch.int32:
            raise bad_input("within", within, (tokens, spec.choices, "blocks"), torch.int32)


def chosen_width(spec: IndexerSpec, batch: Batch) -> int:
    """Return K, how many ids a token of a step has at most."""
    budget = spec.budget
    if isinstance(budget, float):
        most = -(-(batch.max_seq_len // spec.tokens_per_entry) // spec.pool)
        budget = max(1, math.ceil(most * budget - 1e-9))
    return budget + spec.tail
