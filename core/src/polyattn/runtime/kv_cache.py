"""Where do K and V live? `KVCacheSpec` sizes a paged cache, `KVCache` is one layer's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from polyattn.errors import CacheError, nearest
from polyattn.registry.capabilities import LAYOUTS
from polyattn.selection.decision import Decision

STORAGE_DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """The size and form of one layer's paged cache. `dtype` is a key of `STORAGE_DTYPES`.

    `value_in_key`: an MLA latent: the first `v_head_size` elements of a key are its value.
    """

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    dtype: str
    layout: str = "NHD"
    value_in_key: bool = False

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "num_kv_heads", "head_size", "v_head_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value <= 0:
                raise CacheError(f"KVCacheSpec.{name}={value!r} must be a positive integer")
        if self.dtype not in STORAGE_DTYPES:
            raise CacheError(
                f"KVCacheSpec.dtype={self.dtype!r}{nearest(self.dtype, STORAGE_DTYPES)}"
            )
        if self.layout not in LAYOUTS:
            raise CacheError(f"KVCacheSpec.layout={self.layout!r}{nearest(self.layout, LAYOUTS)}")

    @classmethod
    def for_decision(cls, decision: Decision, num_blocks: int) -> KVCacheSpec:
        """Return the cache that a decision's backends share. Raises `CacheError` for encoders."""
        spec = decision.spec
        if decision.block_size is None:
            remedy = "ask for state_spec(n)" if spec.kind.is_recurrent else "pass cache=None"
            raise CacheError(f"{spec} keeps no keys and values; {remedy}")
        stored = spec.stored_dtype
        if stored == "fp8_e4m3" and decision.device.fp8 == "fnuz":
            stored = "fp8_e4m3fnuz"
        latent = spec.latent
        return cls(
            num_blocks=num_blocks,
            block_size=decision.block_size,
            num_kv_heads=1 if latent else spec.num_kv_heads,
            head_size=latent.size if latent else spec.head_size,
            v_head_size=latent.rank if latent else spec.v_head_size,
            dtype=stored,
            layout=decision.layout,
            value_in_key=latent is not None,
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take in one layer."""
        width = self.head_size + (0 if self.value_in_key else self.v_head_size)
        return self.num_kv_heads * width * STORAGE_DTYPES[self.dtype].itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache of one layer."""
        return self.num_blocks * self.block_size * self.bytes_per_token

    def allocate(self, device: torch.device | str = "cpu") -> KVCache:
        """Return an uninitialised cache."""
        dtype = STORAGE_DTYPES[self.dtype]

        def empty(size: int) -> Tensor:
            n, b, h = self.num_blocks, self.block_size, self.num_kv_heads
            if self.layout == "NHD":
                return torch.empty(n, b, h, size, dtype=dtype, device=device)
            return torch.empty(n, h, b, size, dtype=dtype, device=device).transpose(1, 2)

        key = empty(self.head_size)
        return KVCache(
            key, key[..., : self.v_head_size] if self.value_in_key else empty(self.v_head_size)
        )


class KVCache:
    """One layer's paged keys and values.

    `key` (num_blocks, block_size, num_kv_heads, head_size) and `value` (…, v_head_size) are
    logical views; strides say the physical layout. Both may be views into one storage. The last
    dimension must be contiguous. Raises `CacheError`.
    """

    __slots__ = ("__dict__", "key", "value")

    def __init__(self, key: Tensor, value: Tensor):
        if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
            raise CacheError(
                f"key {tuple(key.shape)} and value {tuple(value.shape)} must both be (num_blocks, "
                "block_size, num_kv_heads, head size)"
            )
        if key.dtype != value.dtype or key.device != value.device:
            raise CacheError(
                f"key ({key.dtype}, {key.device}) and value ({value.dtype}, {value.device}) must "
                "have one dtype and one device"
            )
        if key.stride(3) != 1 or value.stride(3) != 1:
            raise CacheError("the head-size dimension of key and value must be contiguous")
        self.key, self.value = key, value

    @classmethod
    def packed(cls, storage: Tensor, layout: str = "NHD") -> KVCache:
        """Wrap one 5-D tensor: (num_blocks, 2, block_size, heads, size), or HND's order."""
        if storage.dim() != 5 or storage.shape[1] != 2:
            raise CacheError(f"storage {tuple(storage.shape)} must be 5-D with 2 (K, V) second")
        if layout == "HND":
            storage = storage.transpose(2, 3)
        return cls(storage[:, 0], storage[:, 1])

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache."""
        return self.key.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.key.shape[1]

    @cached_property
    def value_in_key(self) -> bool:
        """Whether a value is the first part of its key: an MLA latent."""
        return self.value.data_ptr() == self.key.data_ptr()

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """What a kernel is specialised on: the strides of key and value, and their dtype."""
        return (self.key.stride(), self.value.stride(), self.key.dtype)

    @cached_property
    def layout(self) -> str:
        """The physical order within a block: NHD or HND (NHD where both fit)."""
        token, head = self.key.stride(1), self.key.stride(2)
        return "NHD" if token >= head or self.key.shape[2] == 1 else "HND"

    def write(
        self,
        key: Tensor,
        value: Tensor,
        slot_mapping: Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Store `key` and `value` (num_tokens, num_kv_heads, size) at their slots; -1 skips.

        A quantised cache stores `value / scale`, saturated. Never synchronises with the device.
        """
        for cache, new, scale in ((self.key, key, k_scale), (self.value, value, v_scale)):
            _scatter(cache, quantize(new, cache.dtype, scale), slot_mapping)

    @cached_property
    def _blocks(self) -> dict[int, tuple[KVCache, int]]:
        return {}

    def in_blocks_of(self, size: int) -> tuple[KVCache, int]:
        """View the cache in smaller blocks, for a kernel that takes only those.

        Returns the view and the number of its blocks from one block of this cache to the next;
        block i of this cache is blocks `i * step`, `i * step + 1`, … of the view.
        """
        found = self._blocks.get(size)
        if found is None:
            key, step = _split_blocks(self.key, size)
            value, value_step = _split_blocks(self.value, size)
            if step != value_step:
                raise CacheError(
                    f"key and value blocks of {self.block_size} can't both be walked in blocks of "
                    f"{size}: their strides differ ({self.key.stride()}, {self.value.stride()})"
                )
            found = self._blocks[size] = (KVCache(key, value), step)
        return found

    def __repr__(self) -> str:
        n, b, h, d = self.key.shape
        return f"<KVCache: {n} blocks of {b}, {h} KV heads of {d}, {self.key.dtype}, {self.layout}>"


def quantize(tensor: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return `tensor / scale` in `dtype`, rounded and saturated where that is a quantised one."""
    if tensor.dtype == dtype:
        return tensor
    if dtype == torch.int8:
        return (tensor.float() / scale).round_().clamp_(-127, 127).to(dtype)
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        return (tensor.float() / scale).clamp_(-limit, limit).to(dtype)
    raise CacheError(
        f"key or value is {tensor.dtype}, the cache {dtype}; cast one, or set kv_cache_dtype"
    )


def raw(tensor: Tensor) -> Tensor:
    """View a one-byte float as uint8: many indexing kernels know no fp8."""
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8)
    return tensor


def _scatter(cache: Tensor, new: Tensor, slot_mapping: Tensor) -> None:
    cache, new = raw(cache), raw(new)
    blocks, offsets = slot_mapping // cache.shape[1], slot_mapping % cache.shape[1]
    if slot_mapping.device.type == "cpu":
        keep = slot_mapping >= 0
        if not bool(keep.all()):
            blocks, offsets, new = blocks[keep], offsets[keep], new[keep]
    elif slot_mapping.numel():
        # Without asking the device how many slots are skipped: a skipped token repeats a kept
        # one's write, or, where all are skipped, writes back what is there.
        keep = slot_mapping >= 0
        stand_in = keep.to(torch.uint8).argmax()
        slots = torch.where(keep, slot_mapping, slot_mapping[stand_in]).clamp(min=0)
        blocks, offsets = slots // cache.shape[1], slots % cache.shape[1]
        spare = torch.where(keep[stand_in], new[stand_in], cache[blocks[0], offsets[0]])
        new = torch.where(keep[:, None, None], new, spare)
    cache.index_put_((blocks, offsets), new)


def _split_blocks(tensor: Tensor, size: int) -> tuple[Tensor, int]:
    n, block, heads, width = tensor.shape
    stride = tensor.stride()
    if block % size or stride[0] % (size * stride[1]):
        raise CacheError(
            f"blocks of {block} with strides {stride} can't be walked in blocks of {size}; "
            "that needs layout NHD and a block size that is a multiple"
        )
    step = stride[0] // (size * stride[1])
    count = (n - 1) * step + block // size
    view = tensor.as_strided((count, size, heads, width), (size * stride[1], *stride[1:]))
    return view, step
