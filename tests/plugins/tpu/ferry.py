"""Carries what the kit gives a layer from the host to tensors that live in JAX, and all of it back.

The kit draws its numbers and judges results on the host: torchax compiles a program for each shape
that an operator meets, and the kit's own operators would be most of them.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.cache.state_cache import StateCache, StateCacheSpec
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.step.batch import Batch
from polyattn_tpu.bridge import RAW, root, to_torch
from polyattn_tpu.torchax_env import torchax
from torch import Tensor

environment = torchax().default_env()


def array_of(tensor: Tensor) -> Any:
    """Return a host tensor's numbers, in JAX."""
    plain, kind = tensor.detach().contiguous(), None
    if tensor.dtype in RAW:
        word, kind = RAW[tensor.dtype]
        plain = plain.view(word)
    found = plain.numpy().copy()
    return jax.device_put(found if kind is None else found.view(kind))


def place(tensor: Tensor) -> tuple[Tensor, slice | tuple[slice, ...]]:
    """Return what a tensor is a part of, and which: itself where it is no plain slice of another."""
    base = tensor._base
    if base is None or not base.is_contiguous() or tensor.stride() != base.stride():
        return tensor, slice(None)
    rest, parts = tensor.storage_offset() - base.storage_offset(), []
    for step, size in zip(base.stride(), tensor.shape, strict=True):
        first, rest = divmod(rest, step)
        parts.append(slice(first, first + size))
    return base, tuple(parts)


class Carrier:
    """One call's things: those on the host, and those in JAX that stand for them."""

    def __init__(self, group: LayerGroup):
        self.group = group
        self.pairs: list[tuple[Tensor, Any]] = []
        self.results: list[tuple[Any, Any]] = []

    def there(self, thing: Any) -> Any:
        """Return what stands for a thing of the host in JAX: of a view, a view of the same whole."""
        if isinstance(thing, tuple):
            return tuple(map(self.there, thing))
        if isinstance(thing, dict):
            return {name: self.there(part) for name, part in thing.items()}
        if isinstance(thing, Tensor):
            whole, part = place(thing)
            made = environment.j2t_iso(array_of(whole))
            self.pairs.append((whole, made))
            made = made if whole is thing else made[part]
        elif isinstance(thing, KVCache):
            made = self._cache(thing)
        elif isinstance(thing, StateCache):
            made = StateCache(self.there(thing.data))
        elif isinstance(thing, Batch):
            made = moved(thing)
        else:
            return thing
        self.results.append((thing, made))
        return made

    def _cache(self, cache: KVCache) -> KVCache:
        made = self.group.allocate_cache(cache.num_blocks)
        for stored, view in _stored(cache, made):
            array = array_of(stored.transpose(1, 2))
            missing = root(view).shape[3] - array.shape[3]
            wide = np.pad(np.asarray(array), ((0, 0), (0, 0), (0, 0), (0, missing)))
            root(view).apply_jax_(lambda _, wide=wide: jax.device_put(wide))
        return made

    def back(self, result: Any) -> Any:
        """Bring all of it back, inputs too: the kit looks at whether one was written to."""
        for tensor, made in self.pairs:
            tensor.copy_(to_torch(made.jax(), tensor))
        for thing, made in self.results:
            if isinstance(thing, KVCache):
                for stored, view in _stored(thing, made):
                    found = to_torch(root(view).jax(), stored)
                    assert not found[..., stored.shape[3] :].float().any(), "written past a row"
                    stored.copy_(found.transpose(1, 2)[..., : stored.shape[3]])
        return self._home(result)

    def _home(self, result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(map(self._home, result))
        for thing, made in self.results:
            if made is result:
                return thing
        return host(result) if isinstance(result, Tensor) else result


def _stored(cache: KVCache, made: KVCache) -> list[tuple[Tensor, Any]]:
    pairs = [(cache.key, made.key)]
    return pairs if made.value_in_key else [*pairs, (cache.value, made.value)]


def host(tensor: Tensor) -> Tensor:
    """Return a tensor of JAX on the host."""
    found: Any = tensor
    return to_torch(found.jax(), torch.empty(0, dtype=tensor.dtype))


def moved(batch: Batch) -> Batch:
    """Return a batch whose tables are in JAX."""
    tables = (batch.block_table, batch.slot_mapping, batch.state_slots, batch.state_targets)
    table, slots, states, targets = (
        t if t is None else environment.j2t_iso(array_of(t)) for t in tables
    )
    given = {
        name: environment.j2t_iso(array_of(tensor))
        for name, tensor in batch.inputs.items()
        if batch.mask is None or not name.startswith("mask_")
    }
    found = Batch(
        batch.starts, batch.lens, table, slots, state_slots=states, state_targets=targets,
        key_starts=batch.key_starts, mask=batch.mask, inputs=given, device="jax",
    )  # fmt: skip
    return found if batch.causal else found.over_context()


class Ferry:
    """Something of polyattn's that runs in JAX, for callers on the host."""

    def __init__(self, inner: Any, group: LayerGroup):
        self.inner, self._group = inner, group

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if not callable(found) or isinstance(found, type):
            return found

        def call(*given: Any, **named: Any) -> Any:
            return self._call(found, given, named)

        return call

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._call(self.inner, given, named)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("inner", "_group"):
            super().__setattr__(name, value)
        else:
            setattr(self.inner, name, value)

    def _call(self, function: Any, given: Any, named: Any) -> Any:
        carrier = Carrier(self._group)
        with environment:
            moved = [carrier.there(thing) for thing in given]
            options = {name: carrier.there(thing) for name, thing in named.items()}
            result = function(*moved, **options)
        return carrier.back(result)


class HostGroup(Ferry):
    """A group in JAX whose caches and states are the host's."""

    def __init__(self, selection: Any):
        with environment:
            group = LayerGroup(selection)
        super().__init__(group, group)

    def allocate_cache(self, num_blocks: int) -> KVCache:
        return KVCache.allocate(self._group.cache_format, num_blocks)

    def allocate_states(self, num_slots: int) -> StateCache:
        return StateCacheSpec.for_layer(self._group.spec, num_slots).allocate()

    def backend(self, *given: Any, **named: Any) -> Ferry:
        with environment:
            return Ferry(self._group.backend(*given, **named), self._group)


class HostLayer(Ferry):
    """A layer in JAX whose parameters, as the kit reads them, are the host's."""

    def __init__(self, kind: type, group: HostGroup, *given: Any, **named: Any):
        carrier = Carrier(group.inner)
        with environment:
            moved = [carrier.there(thing) for thing in given]
            inner = kind(group.inner, *moved, **{k: carrier.there(v) for k, v in named.items()})
        super().__init__(inner, group.inner)
        self.__dict__["group"] = group

    def output_shape(self, tokens: int) -> Any:
        return self.inner.output_shape(tokens)

    @property
    def params(self) -> Any:
        given = self.inner.params
        if isinstance(given, dict):
            return {name: host(tensor) for name, tensor in given.items()}
        sinks, slopes = (t if t is None else host(t) for t in (given.sinks, given.alibi_slopes))
        inputs = {name: host(tensor) for name, tensor in given.inputs.items()}
        return type(given)(sinks, slopes, given.k_scale, given.v_scale, inputs=inputs)

    @property
    def weights(self) -> Any:
        given = self.inner.weights
        return given if given is None else tuple(map(host, given))
