"""TORCH_STORE: keys and values go to their slots by torch's indexing, on any device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from polyattn.errors import BatchError
from polyattn.registry.capabilities import rotates
from polyattn.runtime.backend import StoreBackend
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES, KVCache, quantize, raw
from polyattn.runtime.cache.scales import dequantized
from polyattn.runtime.inputs import check_slots, check_tensors, side_by_side
from polyattn.runtime.program import Frame, LayerParams, Op, StorePlan
from polyattn.runtime.rotation import NewTokens, Norms, Rotation, prepared
from polyattn.runtime.step.batch import Batch
from polyattn.spec.layer import LayerSpec

if TYPE_CHECKING:
    from polyattn.runtime.backend import Prepared
    from polyattn.runtime.group import LayerGroup

RunRotated = Callable[..., "Prepared"]
"""`StoreBackend.run_rotated` of one store, its own or core's."""


class TorchStore(StoreBackend):
    """Never synchronises with the device; a latent cache's value is its key's first part."""

    name: ClassVar[str] = "TORCH_STORE"

    def run(
        self, plan: StorePlan, key: Tensor, value: Tensor, cache: KVCache, params: LayerParams
    ) -> None:
        stored = cache.key.dtype
        of_key, of_value = cache.format.rows or (None, None)
        scatter(cache.key, quantize(key, stored, params.k_scale, of_key), plan.slots)
        if not cache.value_in_key:
            scatter(cache.value, quantize(value, stored, params.v_scale, of_value), plan.slots)

    def run_rotated(
        self,
        plan: StorePlan,
        rotation: Rotation | None,
        new: NewTokens,
        cache: KVCache,
        params: LayerParams,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        dtype = new.query.dtype
        query, key, value = prepared(new, rotation)
        assert key is not None and value is not None
        if cache.key.dtype == dtype:
            key, value = key.to(dtype), value.to(dtype)
        # A quantised cache takes the rotated numbers unrounded, so that they are rounded once.
        self.run(plan, key, value, cache, params)
        return query.to(dtype), key.to(dtype) if keep else None, value.to(dtype) if keep else None


class Store(Op):
    """The work before a step's calls: bias, norm, rotation, storing new keys and values in the cache.

    `backend` stores; None if nothing is stored. `rotation` rotates the step's tokens in a layer that
    rotates, and `key_rotation` the keys of a layer without a cache. `keeps`: calls take rotated keys
    beside the cache.
    """

    def __init__(
        self,
        spec: LayerSpec,
        batch: Batch,
        backend: StoreBackend | None,
        rotated_by: RunRotated | None,
        rotation: Rotation | None,
        key_rotation: Rotation | None = None,
        keeps: bool = False,
    ):
        self.spec, self.batch, self.backend, self.rotated_by = spec, batch, backend, rotated_by
        self.rotation, self.key_rotation, self.keeps = rotation, key_rotation, keeps
        self.plan: StorePlan | None = None
        if backend is not None and batch.slot_mapping is not None:
            self.plan = backend.plan(batch.slot_mapping)
        # Whole keys must reach to the end of the last sequence.
        ends = [] if spec.cached else map(sum, zip(batch.key_starts, batch.lens, strict=True))
        self.keys_reach = max(ends, default=0)

    def run(self, frame: Frame) -> None:
        params = frame.params
        if params.rotate or params.qkv_bias is not None or params.q_norm is not None:
            self._prepare(frame)
        elif self.plan is not None and frame.key is not None:
            assert frame.value is not None and frame.cache is not None and self.backend is not None
            self.backend.run(self.plan, frame.key, frame.value, frame.cache, params)

    def _prepare(self, frame: Frame) -> None:
        """Add the bias, norm, rotate and store. Afterwards the frame holds attention's inputs."""
        query, key, value, params = frame.query, frame.key, frame.value, frame.params
        rotation = self.rotation if params.rotate else None
        if params.rotate and rotation is None:
            raise BatchError(
                "length_bounds=True leaves to the device the lengths that rotation needs; pass "
                "Batch(positions=...) and plan each step; if the rotation scales by length, rotate "
                "before and pass rotate=False"
            )
        if query.dtype.itemsize == 1:
            query, key, value = self._dequantized(query, key, value, params)
        new = NewTokens(query, key, value, params.qkv_bias, self.norms(params))
        if new.norms is not None and new.norms.key is None and key is not None:
            raise BatchError(
                "k_norm is missing, and the spec norms keys; build the layer with it, or pass None as "
                "key and value where another layer stores them"
            )
        if self.plan is not None and key is not None:
            assert frame.cache is not None and self.rotated_by is not None
            frame.query, frame.key, frame.value = self.rotated_by(
                self.plan, rotation, new, frame.cache, params, self.keeps_keys
            )
            return
        dtype, cached = query.dtype, self.spec.cached
        if not cached:
            assert key is not None and value is not None
            # No call reads behind the last sequence's keys.
            new = replace(new, key=key[: self.keys_reach], value=value[: self.keys_reach])
        query, key, value = prepared(new, rotation, self.key_rotation if rotation else None)
        frame.query, frame.key, frame.value = query.to(dtype), None, None
        if not cached:  # a cache would hold the keys already
            assert key is not None and value is not None
            frame.key, frame.value = key.to(dtype), value.to(dtype)

    def norms(self, params: LayerParams) -> Norms | None:
        """Return the norms that a layer's parameters ask for."""
        form = self.spec.qk_norm
        if form is None or params.q_norm is None:
            return None
        return Norms(params.q_norm, params.k_norm, form.eps, form.over)

    def _dequantized(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, params: LayerParams
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return in the layer's dtype what came quantised: rotations and biases are added to that."""
        dtype = STORAGE_DTYPES[self.spec.dtype]
        query = dequantized(query, params.q_scale, dtype)
        if key is None or value is None:
            return query, None, None
        return (
            query,
            dequantized(key, params.k_scale, dtype),
            dequantized(value, params.v_scale, dtype),
        )

    @cached_property
    def keeps_keys(self) -> bool:
        """Whether a call can take rotated keys beside the cache: of whole prompts, stored unrounded."""
        if not self.keeps or self.spec.stored_dtype != self.spec.dtype:
            return False
        lens = zip(self.batch.query_lens, self.batch.lens, strict=True)
        return any(1 < query == length for query, length in lens)


def claimed_rotation(group: LayerGroup, store: StoreBackend) -> RunRotated:
    """Return the op that norms, rotates and stores: the store's, if it claims so, or core's operators."""
    info, spec = group.selection.backend("store"), group.spec
    assert info is not None
    if rotates(info.capabilities, spec):
        return store.run_rotated
    return functools.partial(StoreBackend.run_rotated, store)


def store_rows(
    group: LayerGroup,
    key: Tensor,
    value: Tensor | None,
    cache: KVCache,
    slots: Tensor,
    params: LayerParams,
    dtype: torch.dtype,
    seen: bool = False,
) -> None:
    """Check rows (rows, heads, size) of `dtype` and store them outside a step; slots (rows,).

    `seen`: an earlier call for this cache checked its form. Raises `BatchError` and `CacheError`.
    """
    form, device = group.cache_format, group.torch_device
    assert form is not None
    check_slots(slots, device, seen)
    count, heads = slots.shape[0], form.num_kv_heads
    check_tensors(
        device,
        seen,
        key=(key, (count, heads, form.head_size), dtype),
        value=(value, (count, heads, form.v_head_size), dtype),
    )
    assert value is not None
    put_rows(group, key, value, cache, slots, params, seen)


def put_rows(
    group: LayerGroup,
    key: Tensor,
    value: Tensor,
    cache: KVCache,
    slots: Tensor,
    params: LayerParams,
    seen: bool = False,
) -> None:
    """Store rows that were checked, as `store_rows`. Raises `CacheError`."""
    if not seen:
        group.check_cache(cache)
    key, value = side_by_side(key), side_by_side(value)
    group.store.run(group.store.plan(slots.long().contiguous()), key, value, cache, params)


def scatter(cache: Tensor, new: Tensor, slots: Tensor) -> None:
    """Write rows (num_tokens, heads, size) to their slots of (blocks, block_size, heads, size)."""
    cache, new = raw(cache), raw(new.detach())
    blocks, offsets = slots // cache.shape[1], slots % cache.shape[1]
    if slots.device.type == "cpu":
        keep = slots >= 0
        if not bool(keep.all()):
            blocks, offsets, new = blocks[keep], offsets[keep], new[keep]
    elif slots.numel():
        # The host doesn't know how many slots are -1. Such a token repeats another token's write, or,
        # if all slots are -1, writes the old value back.
        keep = slots >= 0
        stand_in = keep.to(torch.uint8).argmax()
        places = torch.where(keep, slots, slots[stand_in]).clamp(min=0)
        blocks, offsets = places // cache.shape[1], places % cache.shape[1]
        spare = torch.where(keep[stand_in], new[stand_in], cache[blocks[0], offsets[0]])
        new = torch.where(keep[:, None, None], new, spare)
    cache.index_put_((blocks, offsets), new)
