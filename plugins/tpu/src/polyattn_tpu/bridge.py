"""Converts torch tensors to JAX arrays and back: unwrapped, never shared with the host's memory.

A torchax tensor is a name for a JAX array, and a write to it gives it another array. CPU tensors (in
the interpreter's tests) are copied both ways.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import torch
from polyattn.kernel import ALLOCATORS, BatchError, CacheFormat, KVCache
from torch import Tensor

from polyattn_tpu.functions import DTYPES, Cache, whole_lanes, widened
from polyattn_tpu.torchax_env import torchax

Array = Any
RAW = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.int8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.int8, ml_dtypes.float8_e5m2),
}
"""Dtypes that NumPy lacks are copied as integers of the same width."""


def in_jax(tensor: Tensor) -> bool:
    """Whether a tensor is torchax's."""
    return tensor.device.type == "jax"


def to_jax(tensor: Tensor) -> Array:
    """Return the array behind a tensor, or a copy of one on the CPU."""
    if in_jax(tensor):
        return tensor.jax()  # type: ignore[attr-defined]
    if tensor.device.type != "cpu":
        raise BatchError(f"a tensor is on {tensor.device}; this backend takes jax, or cpu in tests")
    plain, kind = tensor.detach().contiguous(), None
    if tensor.dtype in RAW:
        word, kind = RAW[tensor.dtype]
        plain = plain.view(word)
    array = plain.numpy()
    return jnp.array(array if kind is None else array.view(kind), copy=True)


def to_torch(array: Array, like: Tensor) -> Tensor:
    """Return an array as a tensor on the CPU, of the dtype of `like`."""
    host = jax.device_get(array)
    if like.dtype in RAW:
        host = host.view({2: "int16", 1: "int8"}[host.dtype.itemsize])
        return torch.from_numpy(host.copy()).view(like.dtype)
    return torch.from_numpy(host.copy())


def assign(tensor: Tensor, array: Array) -> None:
    """Write an array to a tensor. A tensor of JAX becomes a name for this array."""
    if tensor.shape != array.shape:
        raise BatchError(f"a result of shape {array.shape} for a tensor of {tuple(tensor.shape)}")
    if not in_jax(tensor):
        tensor.copy_(to_torch(array, tensor))
        return
    source: Any = tensor
    array = array.astype(source.jax().dtype)
    if hasattr(source, "update"):  # a view writes to what it is a part of
        source.update(array)
    else:
        source.apply_jax_(lambda _: array)


def root(tensor: Any) -> Any:
    """Return the tensor that a view of torchax is a part of."""
    while hasattr(tensor, "parent"):
        tensor = tensor.parent
    return tensor


def pages(cache: KVCache) -> Cache:
    """Return a cache's pages: those that are there, or of a cache on the CPU a copy."""
    if in_jax(cache.key):
        blocks, size, heads, _ = cache.key.shape
        whole = cache.whole if isinstance(cache, SmallerPages) else cache
        return Cache(
            *(owner.jax().reshape(blocks, heads, size, owner.shape[3]) for owner in _owners(whole))
        )
    stored = [cache.key] if cache.value_in_key else [cache.key, cache.value]
    copied = (to_jax(tensor.transpose(1, 2)) for tensor in stored)
    return Cache(*(widened(array, whole_lanes(array.shape[3])) for array in copied))


def update_pages(cache: KVCache, change: Callable[[Cache, bool], Cache]) -> None:
    """Give a cache in JAX its next pages: `change(pages, donated)`.

    Pages are donated where no other tensor is a name for them (torchax's `clone` makes one).
    """
    owners = _owners(cache)
    alone = all(map(unshared, owners))
    made = change(Cache(*(owner.jax() for owner in owners)), alone)
    for owner, array in zip(owners, made, strict=False):
        owner.apply_jax_(lambda _, array=array: array)


def unshared(tensor: Any) -> bool:
    """Whether a torchax tensor is its array's only name."""
    return _holders(tensor) <= _ALONE


def _holders(tensor: Any) -> int:
    return sys.getrefcount(tensor._elem)


class _Holder:
    def __init__(self) -> None:
        self._elem = object()


_ALONE = _holders(_Holder())
"""`_holders` of an array that one tensor holds. The number depends on the interpreter."""


def _owners(cache: KVCache) -> list[Any]:
    views = [cache.key] if cache.value_in_key else [cache.key, cache.value]
    owners = [root(view) for view in views]
    for view, owner in zip(views, owners, strict=True):
        blocks, size, heads, width = view.shape
        if tuple(owner.shape) != (blocks, heads, size, whole_lanes(width)):
            raise BatchError(
                f"the cache's storage is {tuple(owner.shape)}; a TPU's holds whole pages of a head, "
                f"{(blocks, heads, size, whole_lanes(width))}: allocate it with group.allocate_cache(n)"
            )
    return owners


class JaxCache(KVCache):
    """A cache whose tensors have no strides: a block is pages of one head, of fewer tokens each."""

    def in_pages_of(self, size: int, heads: int = 1) -> tuple[KVCache, tuple[int, int, int]]:
        """Return a view, and what lies between pages, as `KVCache.in_pages_of` says."""
        _, block, there, _ = self.key.shape
        if heads != 1 and there != 1:
            raise BatchError(f"a page of {heads} heads isn't in one piece: a TPU's cache is HND")
        if block % size:
            raise BatchError(f"size={size} doesn't divide the block size, {block}")
        view = self._pages.get((size, heads))
        if view is None:
            steps = (there * block // size, 1, block // size)
            view = self._pages[size, heads] = SmallerPages(self, size), steps
        return view


class SmallerPages(KVCache):
    """A view of `whole` as pages of one head and `size` tokens, for reading."""

    def __init__(self, whole: KVCache, size: int):
        form = replace(whole.format, block_size=size, num_kv_heads=1, apart=0)
        pairs = zip((whole.key, whole.value), form.widths, strict=True)
        key, value = (_logical(root(view), width, (-1, 1, size)) for view, width in pairs)
        super().__init__(key, value, form)
        self.whole = whole


def allocate(form: CacheFormat, num_blocks: int) -> KVCache:
    """Return a cache in JAX: pages in the chip's layout, and logical views of them."""
    if form.apart:
        raise BatchError("a cache in JAX keeps K's and V's blocks in two arrays; leave apart out")
    environment = torchax().default_env()
    shape = (num_blocks, form.num_kv_heads, form.block_size)
    sizes = form.widths[:1] if form.value_in_key else form.widths
    views = []
    for size in sizes:
        array = jnp.zeros((*shape, whole_lanes(size)), DTYPES.get(form.dtype, jnp.uint8))
        views.append(_logical(environment.j2t_iso(array), size))
    if form.value_in_key:
        views.append(_logical(root(views[0]), form.widths[1]))
    return JaxCache(views[0], views[1], form)


def _logical(owner: Any, size: int, shape: tuple[int, ...] = ()) -> Tensor:
    """Return (blocks, block size, heads, size) as a view of (blocks, heads, block size, lanes).

    `shape`: another split of the same storage into blocks, heads and block sizes.
    """
    from torchax.view import NarrowInfo, View, ViewInfo

    class Swapped(ViewInfo):  # type: ignore[misc]
        """A block's tokens and heads, exchanged."""

        def transform_tensor(self, jax_array: Array) -> Array:
            taken = (*(shape or jax_array.shape[:3]), jax_array.shape[3])
            return jnp.swapaxes(jax_array.reshape(taken), 1, 2)

        def update_tensor(self, new_value: Array, jax_array: Array) -> Array:
            return jnp.swapaxes(new_value, 1, 2).reshape(jax_array.shape)

        def calculate_output_shape(self, source: Array) -> list[int]:
            return list(jax.eval_shape(self.transform_tensor, source).shape)

    swapped = View(owner, Swapped(), owner._env)
    view: Tensor = View(swapped, NarrowInfo((..., slice(0, size))), owner._env)
    return view


ALLOCATORS["jax"] = allocate
