"""Where are K and V? `KVCache` is one layer's pages in its `CacheFormat`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from polyattn.errors import CacheError, flag, nearest, shown
from polyattn.runtime.cache.huge_pages import on_huge_pages
from polyattn.runtime.cache.room import room
from polyattn.runtime.cache.rows import encoded
from polyattn.runtime.inputs import check_is_tensor, torch_device
from polyattn.selection.cache_format import CacheFormat
from polyattn.spec.kinds import LAYOUTS
from polyattn.spec.row_format import RowFormat

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
_DTYPE_NAMES = {dtype: name for name, dtype in STORAGE_DTYPES.items()}


def storage_dtype(name: str) -> torch.dtype:
    """Return the dtype of a cache's storage: of its elements, or of the bytes of its rows.

    Args:
        name: a cache's dtype (`"bfloat16"`, `"fp8_e4m3"`), or a row format's name.

    Returns:
        The dtype of torch; uint8 for rows of bytes.

    Examples:
        >>> storage_dtype("fp8_e4m3"), storage_dtype("fp8_ds_mla")
        (torch.float8_e4m3fn, torch.uint8)

    """
    return STORAGE_DTYPES.get(name, torch.uint8)


class KVCache:
    """One layer's paged keys and values.

    Both tensors may be views into one storage. They are logical views; their strides say how blocks lie
    in memory. The last dimension is contiguous. In a cache of rows it is bytes, and a latent's value is
    its key's row.

    Args:
        key: (num_blocks, block_size, num_kv_heads, head_size).
        value: (num_blocks, block_size, num_kv_heads, v_head_size).
        form: the format, if tensors don't tell it: of rows, and on devices whose tensors have no
            strides.

    Raises:
        CacheError: the tensors don't fit each other or the format.

    Examples:
        >>> cache = KVCache(torch.zeros(8, 16, 2, 64), torch.zeros(8, 16, 2, 64))
        >>> cache.num_blocks, cache.format.layout
        (8, 'NHD')

    """

    __slots__ = ("__dict__", "key", "value")

    def __init__(self, key: Tensor, value: Tensor, form: CacheFormat | None = None):
        check_is_tensor("key", key, error=CacheError)
        check_is_tensor("value", value, error=CacheError)
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
        if form is None:
            if key.dtype == torch.uint8:
                raise CacheError(
                    "key and value are rows of bytes, whose format is unknown: pass form=CacheFormat(...)"
                )
            return
        _check_form(form)
        sizes = (form.block_size, form.num_kv_heads, *form.widths)
        if sizes != (*key.shape[1:], value.shape[3]):
            raise CacheError(
                f"form has blocks of {form.block_size}, {form.num_kv_heads} KV heads of "
                f"{form.head_size}/{form.v_head_size}, {form.dtype}; key {tuple(key.shape)} and value "
                f"{tuple(value.shape)} are others"
            )
        self.format = form

    @classmethod
    def allocate(
        cls, form: CacheFormat, num_blocks: int, device: torch.device | str = "cpu"
    ) -> KVCache:
        """Return an uninitialised cache.

        Args:
            form: its format; a group's is `group.cache_format`.
            num_blocks: blocks, 1 or more.
            device: torch's device.

        Raises:
            CacheError: the number isn't positive, or the device has too little memory.

        """
        _check_form(form)
        device = torch_device(device, CacheError)
        special = ALLOCATORS.get(device.type, partial(cls._allocate, device=device))
        with room("num_blocks", num_blocks, form.block_size * form.bytes_per_token, device):
            return special(form, num_blocks)

    @classmethod
    def _allocate(cls, form: CacheFormat, num_blocks: int, device: torch.device) -> KVCache:
        dtype, n, b, h = storage_dtype(form.dtype), num_blocks, form.block_size, form.num_kv_heads
        of_key, of_value = form.widths

        def empty(*shape: int) -> Tensor:
            return on_huge_pages(torch.empty(*shape, dtype=dtype, device=device))

        if form.layout == "contiguous":
            if of_key != of_value or form.value_in_key:
                raise CacheError(f"{form} can't be contiguous: K and V differ in size")
            return cls.contiguous(empty(n, 2, h, b, of_key), form)
        if form.apart:
            if of_key != of_value or form.value_in_key or form.apart != 2 * b:
                raise CacheError(
                    f"{form}: only blocks of K and V of one size can alternate, {2 * b} tokens apart; "
                    "leave apart out, or bring the cache that it is of"
                )
            order = (b, h) if form.layout == "NHD" else (h, b)
            return cls.packed(empty(n, 2, *order, of_key), form.layout, form)
        sizes = (of_key,) if form.value_in_key else (of_key, of_value)
        if form.layout == "NHD":
            stored = [empty(n, b, h, size) for size in sizes]
        else:
            stored = [empty(n, h, b, size).transpose(1, 2) for size in sizes]
        value = stored[0][..., :of_value] if form.value_in_key else stored[1]
        return cls._of_rows(stored[0], value, form)

    @classmethod
    def _of_rows(cls, key: Tensor, value: Tensor, form: CacheFormat | None) -> KVCache:
        """Wrap tensors; their strides tell the layout. `form` stays for rows of bytes."""
        if form is None or form.rows is None:
            return cls(key, value)
        return cls(key, value, replace(form, layout=_layout(key), apart=_apart(key)))

    @classmethod
    def packed(
        cls, storage: Tensor, layout: str = "NHD", form: CacheFormat | None = None
    ) -> KVCache:
        """Return a cache over one tensor of blocks of keys and values.

        Args:
            storage: (num_blocks, 2, block_size, heads, size), or in HND's order.
            layout: `"NHD"` or `"HND"`.
            form: the format, if the storage holds rows of bytes.

        Returns:
            The cache, a view.

        Raises:
            CacheError: the storage has another shape, or the layout is unknown.

        """
        check_is_tensor("storage", storage, error=CacheError)
        if storage.dim() != 5 or storage.shape[1] != 2:
            raise CacheError(f"storage {tuple(storage.shape)} must be 5-D with 2 (K, V) second")
        if layout == "contiguous":
            return cls.contiguous(storage, form)
        if layout not in LAYOUTS:
            raise CacheError(f"layout={layout!r} is unknown{nearest(str(layout), LAYOUTS)}")
        if layout == "HND":
            storage = storage.transpose(2, 3)
        return cls._of_rows(storage[:, 0], storage[:, 1], form)

    @classmethod
    def joined(cls, storage: Tensor, form: CacheFormat, heads_first: bool = False) -> KVCache:
        """Return a cache over one tensor whose last dimension holds a key, then its value, then room.

        Args:
            storage: (num_blocks, block_size, heads, size); of an MLA latent, whose value is the first
                part of its key, (num_blocks, block_size, head_size). Bytes are read as `form.dtype`.
            form: the format.
            heads_first: the storage is (num_blocks, heads, block_size, size).

        Returns:
            The cache, a view.

        Raises:
            CacheError: the storage has another shape or dtype.

        """
        _check_form(form)
        check_is_tensor("storage", storage, error=CacheError)
        flag("heads_first", heads_first, CacheError)
        of_key, of_value = form.widths
        width = of_key if form.value_in_key else of_key + of_value
        dtype = storage_dtype(form.dtype)
        if storage.dtype not in (dtype, torch.uint8, torch.int8):
            raise CacheError(
                f"storage is {storage.dtype}; it must be {dtype}, the form's, or bytes"
            )
        room = storage.shape[-1:].numel() * storage.dtype.itemsize // dtype.itemsize
        if storage.dim() not in (3, 4) or room < width:
            raise CacheError(
                f"storage {tuple(storage.shape)} must have 3 or 4 sizes, the last at least {width} of "
                f"{dtype}"
            )
        whole = storage.view(dtype)
        if whole.dim() == 3:
            whole = whole[:, :, None]
        elif heads_first:
            whole = whole.transpose(1, 2)
        if whole.shape[1:3] != (form.block_size, form.num_kv_heads):
            raise CacheError(
                f"storage {tuple(storage.shape)} with heads_first={heads_first} has blocks of "
                f"{whole.shape[1]} and {whole.shape[2]} KV heads; the form's have {form.block_size} and "
                f"{form.num_kv_heads}"
            )
        key, rest = whole[..., :of_key], whole[..., of_key:]
        return cls._of_rows(key, (key if form.value_in_key else rest)[..., :of_value], form)

    @classmethod
    def contiguous(cls, storage: Tensor, form: CacheFormat | None = None) -> KVCache:
        """Return a cache over TensorRT-LLM's contiguous storage.

        Each sequence is one block of `max_len` tokens; its place in the storage is its entry of the
        block table (`sequence_table`).

        Args:
            storage: (sequences, 2, heads, max_len, size): a sequence's keys, then its values, by head.
            form: the format, if the storage holds rows of bytes.

        Returns:
            The cache, a view.

        Raises:
            CacheError: the storage has another shape.

        """
        cache = cls.packed(storage, "HND", form)
        form = replace(cache.format, layout="contiguous", apart=0)
        return cls(cache.key, cache.value, form)

    def sequence_table(self, sequences: Sequence[int] | Tensor) -> Tensor:
        """Return the block table of sequences in a contiguous cache.

        Args:
            sequences: each one's place in the storage; a tensor is copied to the host to be checked.

        Returns:
            int32 (sequences, 1).

        Raises:
            CacheError: the cache isn't contiguous, or a place is outside of it.

        """
        if self.layout != "contiguous":
            raise CacheError(f"{self} isn't contiguous; its block tables come from the engine")
        if hasattr(sequences, "tolist"):  # a tensor or an array
            sequences = sequences.tolist()
        if not isinstance(sequences, Sequence):
            raise CacheError(f"sequences={shown(sequences)} must be a list of places, or a tensor")
        for index, place in enumerate(sequences):
            if type(place) is not int or not 0 <= place < self.num_blocks:
                raise CacheError(
                    f"sequences[{index}]={place!r} must be a place from 0 to {self.num_blocks - 1}"
                )
        return torch.tensor(list(sequences), dtype=torch.int32, device=self.key.device).view(-1, 1)

    @cached_property
    def num_blocks(self) -> int:
        """Blocks in the cache."""
        return self.key.shape[0]

    @cached_property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.key.shape[1]

    @cached_property
    def value_in_key(self) -> bool:
        """Whether a value is the first part of its key: an MLA latent."""
        if "format" in self.__dict__:
            return self.format.value_in_key
        return self.value.data_ptr() == self.key.data_ptr()

    @cached_property
    def strides(self) -> tuple[Any, ...]:
        """What a kernel is specialised on: the strides of key and value, and their dtype."""
        return (self.key.stride(), self.value.stride(), self.key.dtype)

    @cached_property
    def alignment(self) -> tuple[int, int]:
        """Bytes, 16 at most, that each key's and each value's address is a multiple of."""
        key, value = (
            math.gcd(16, t.data_ptr(), *(t.element_size() * s for s in t.stride()[:3]))
            for t in (self.key, self.value)
        )
        return key, value

    @cached_property
    def format(self) -> CacheFormat:
        """The form of this cache."""
        return CacheFormat(
            block_size=self.block_size,
            num_kv_heads=self.key.shape[2],
            head_size=self.key.shape[3],
            v_head_size=self.value.shape[3],
            dtype=_DTYPE_NAMES.get(self.key.dtype, str(self.key.dtype)),
            layout=self.layout,
            value_in_key=self.value_in_key,
            apart=_apart(self.key),
        )

    @cached_property
    def layout(self) -> str:
        """The physical order within a block: NHD or HND (NHD where both fit)."""
        if "format" in self.__dict__:
            return self.format.layout
        return _layout(self.key)

    @cached_property
    def _blocks(self) -> dict[int, tuple[KVCache, int]]:
        return {}

    @cached_property
    def _pages(self) -> dict[tuple[int, int], tuple[KVCache, tuple[int, int, int]]]:
        return {}

    def in_blocks_of(self, size: int) -> tuple[KVCache, int]:
        """Return a view of the cache in smaller blocks, for a kernel that takes only those.

        Args:
            size: tokens of a smaller block, a divisor of the block size.

        Returns:
            The view, and a step: block i of this cache is blocks `i * step`, `i * step + 1` and so on
            of it.

        Raises:
            CacheError: the blocks can't be split so.

        """
        view = self._blocks.get(size)
        if view is None:
            if type(size) is not int or size < 1:
                raise CacheError(f"size={shown(size)} must be a positive integer")
            key, step = _split_blocks(self.key, size)
            value, value_step = _split_blocks(self.value, size)
            if step != value_step:
                raise CacheError(
                    f"key and value blocks of {self.block_size} can't both be walked in blocks of "
                    f"{size}: their strides differ ({self.key.stride()}, {self.value.stride()})"
                )
            form = None
            if self.key.dtype == torch.uint8:
                form = replace(self.format, block_size=size, apart=0)
            view = self._blocks[size] = (KVCache(key, value, form), step)
        return view

    def in_pages_of(self, size: int, heads: int = 1) -> tuple[KVCache, tuple[int, int, int]]:
        """Return a view of the cache as pages of one KV head, or all, and consecutive tokens of a block.

        The view is only for reading.

        Args:
            size: tokens of a page, a divisor of the block size.
            heads: 1, or the cache's KV heads.

        Returns:
            The view, whose pages overlap if heads or tokens alternate in memory; and the pages between
            neighbouring blocks, between runs of `size` tokens, and between heads.

        Raises:
            CacheError: the blocks can't be split so.

        """
        view = self._pages.get((size, heads))
        if view is None:
            if size < 1 or self.block_size % size:
                raise CacheError(f"size={size} doesn't divide the block size, {self.block_size}")
            (key, steps), (value, others) = (_paged(t, size, heads) for t in (self.key, self.value))
            if steps != others:
                raise CacheError(
                    f"keys and values have different strides ({self.key.stride()}, "
                    f"{self.value.stride()}), so "
                    f"that one table can't name the pages of both; allocate the cache in one layout"
                )
            form = replace(self.format, block_size=size, num_kv_heads=heads, layout="NHD", apart=0)
            view = self._pages[size, heads] = (KVCache(key, value, form), steps)
        return view

    def __repr__(self) -> str:
        n, b, h, d = self.key.shape
        return f"<KVCache: {n} blocks of {b}, {h} KV heads of {d}, {self.key.dtype}, {self.layout}>"


ALLOCATORS: dict[str, Callable[[CacheFormat, int], KVCache]] = {}
"""The allocator of caches for a type of torch device whose tensors have no strides; a plugin sets it."""


def _layout(key: Tensor) -> str:
    token, head = key.stride(1), key.stride(2)
    return "NHD" if token >= head or key.shape[2] == 1 else "HND"


def _apart(key: Tensor) -> int:
    """Return how many tokens, at least a block's, lie from one block's first to the next one's."""
    _, block, heads, _ = key.shape
    by_block, by_token, by_head, _ = key.stride()
    # NHD's blocks end with a token, HND's with a head.
    extent = max(block * by_token, heads * by_head, 1)
    return max(by_block * block // extent, block)


def quantize(
    tensor: Tensor, dtype: torch.dtype, scale: float | Tensor, rows: RowFormat | None = None
) -> Tensor:
    """Return `tensor / scale` in a cache's dtype, rounded and saturated if that is a quantised one.

    Args:
        tensor: (tokens, heads, size).
        dtype: of the cache's elements.
        scale: a number, or float32 (heads,).
        rows: the format of a cache of rows of bytes.

    Returns:
        (tokens, heads, size) in `dtype`; with `rows`, uint8 (tokens, heads, row_bytes).

    Raises:
        CacheError: `dtype` is another dtype of more than 8 bits.

    Examples:
        >>> quantize(torch.tensor([[[1.0, 300.0]]]), torch.int8, 2.0).tolist()
        [[[0, 127]]]

    """
    if tensor.dtype == dtype:
        return tensor
    if isinstance(scale, Tensor):
        divisor = scale[:, None].to(tensor.device)
    else:
        # On a GPU torch multiplies by a number's reciprocal; by a tensor it divides, as on the CPU.
        divisor = torch.full((), scale, dtype=torch.float32, device=tensor.device)
    if rows is not None:
        return encoded(tensor.float() / divisor, rows)
    if dtype == torch.int8:
        return (tensor.float() / divisor).round_().clamp_(-127, 127).to(dtype)
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        return (tensor.float() / divisor).clamp_(-limit, limit).to(dtype)
    raise CacheError(
        f"key or value is {tensor.dtype}, the cache {dtype}; cast one, or set kv_cache_dtype"
    )


def _check_form(form: Any) -> None:
    """Check that a form is one. Raises `CacheError`."""
    if not isinstance(form, CacheFormat):
        raise CacheError(
            f"form={shown(form)} must be a CacheFormat; a group's is group.cache_format"
        )


def raw(tensor: Tensor) -> Tensor:
    """Return a tensor of 8-bit floats as bytes, others as they are: many indexing kernels lack fp8.

    Args:
        tensor: any tensor.

    Returns:
        A view of dtype uint8, or the tensor itself.

    Examples:
        >>> raw(torch.zeros(2, dtype=torch.float8_e4m3fn)).dtype
        torch.uint8

    """
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8)
    return tensor


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


def _paged(tensor: Tensor, size: int, heads: int) -> tuple[Tensor, tuple[int, int, int]]:
    """View (blocks, block_size, all heads, width) as pages of `heads`, and say what lies between."""
    blocks, block, there, width = tensor.shape
    by_block, by_token, by_head, _ = tensor.stride()
    unit = math.gcd(by_block, size * by_token, by_head if heads < there else 0)
    steps = (by_block // unit, size * by_token // unit, by_head // unit)
    count = (
        (blocks - 1) * steps[0] + (block // size - 1) * steps[1] + (there - heads) * steps[2] + 1
    )
    if count > LARGEST_PAGE:
        raise CacheError(
            f"a cache of {tuple(tensor.shape)} has {count} pages of {size} tokens, and int32 names "
            f"{LARGEST_PAGE}; use a larger granularity, or fewer blocks"
        )
    strides = (unit, by_token, by_token if heads == 1 else by_head, 1)
    return tensor.as_strided((count, size, heads, width), strides), steps


LARGEST_PAGE = (1 << 31) - 1
