"""What is a cache's format, and which format can two backends share? `CacheFormat`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from polyattn.device import Device
from polyattn.errors import CacheError, SpecError, flag, integer, nearest
from polyattn.registry.capabilities import Rejection
from polyattn.registry.info import BackendInfo
from polyattn.spec.decompose import sparse_blocks
from polyattn.spec.kinds import ITEM_BYTES, LAYOUTS, AttentionKind
from polyattn.spec.layer import LayerSpec
from polyattn.spec.row_format import RowFormat, is_rows, row_widths, rows_of


@dataclass(frozen=True, kw_only=True)
class CacheFormat:
    """The format of one layer's paged cache, whatever its number of blocks.

    Attributes:
        block_size: tokens of a block.
        num_kv_heads: of keys and values.
        head_size: of keys, in elements.
        v_head_size: of values, in elements.
        dtype: of the elements, or a row format's name, or two of them, `"KEYS/VALUES"`.
        layout: the order of a block's tokens (N), heads (H) and elements (D): `"NHD"` or `"HND"`; or
            `"contiguous"`: a block is a whole sequence of at most `block_size` tokens, and the storage
            is (sequences, 2, heads, block_size, size).
        value_in_key: of an MLA latent, whose first `v_head_size` elements are its value.
        apart: tokens from one block's first to the next block's first, in memory, if that isn't
            `block_size`, else 0. Twice that if blocks of keys and values alternate in one storage, more
            in a pool of several layers.

    Raises:
        CacheError: a value isn't one of a cache.

    Examples:
        >>> sizes = {"num_kv_heads": 8, "head_size": 128, "v_head_size": 128}
        >>> CacheFormat(block_size=16, dtype="bfloat16", **sizes).layout
        'NHD'

    """

    block_size: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    dtype: str
    layout: str = "NHD"
    value_in_key: bool = False
    apart: int = 0

    def __post_init__(self) -> None:
        for name in ("block_size", "num_kv_heads", "head_size", "v_head_size"):
            integer(f"CacheFormat.{name}", getattr(self, name), 1, error=CacheError)
        flag("CacheFormat.value_in_key", self.value_in_key, CacheError)
        integer("CacheFormat.apart", self.apart, 0, error=CacheError)
        if self.apart:
            integer("CacheFormat.apart", self.apart, self.block_size, error=CacheError)
        if self.apart == self.block_size:  # so that equal formats are equal
            object.__setattr__(self, "apart", 0)
        if not isinstance(self.dtype, str):
            raise CacheError(
                f"CacheFormat.dtype={self.dtype!r} must be a dtype's or a format's name"
            )
        if self.dtype not in ITEM_BYTES:
            try:
                self.widths  # noqa: B018
            except SpecError as error:
                raise CacheError(f"CacheFormat.dtype={self.dtype!r}: {error}") from error
        if not isinstance(self.layout, str) or self.layout not in LAYOUTS:
            raise CacheError(
                f"CacheFormat.layout={self.layout!r} is unknown{nearest(str(self.layout), LAYOUTS)}"
            )

    @property
    def block_stride(self) -> int:
        """Tokens from one block's first to the next block's first."""
        return self.apart or self.block_size

    @property
    def item_bytes(self) -> int:
        """Bytes of one of the storage's elements: of rows, 1."""
        return ITEM_BYTES.get(self.dtype, 1)

    @property
    def rows(self) -> tuple[RowFormat, RowFormat] | None:
        """The formats of keys and of values where they are rows of bytes."""
        return rows_of(self.dtype) if is_rows(self.dtype) else None

    @property
    def widths(self) -> tuple[int, int]:
        """How many of the storage's elements a head's key and its value take: of rows, bytes.

        A latent's value is its key's row.
        """
        if not is_rows(self.dtype):
            return self.head_size, self.v_head_size
        v_size = self.head_size if self.value_in_key else self.v_head_size
        return row_widths(self.dtype, self.head_size, v_size)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take in one layer."""
        key, value = self.widths
        return self.num_kv_heads * (key + (0 if self.value_in_key else value)) * self.item_bytes

    def in_blocks_of(self, size: int) -> CacheFormat:
        """Return the same cache as a kernel that takes only smaller blocks sees it.

        Args:
            size: the kernel's block size, in tokens, which divides this one.

        """
        return self if size == self.block_size else replace(self, block_size=size, apart=0)


def format_of(spec: LayerSpec, device: Device, layout: str, block_size: int) -> CacheFormat:
    """Return the cache format of a layer in this layout and block size on this device."""
    stored, latent = spec.stored_dtype, spec.latent
    if stored == "fp8_e4m3" and device.fp8 == "fnuz":
        stored = "fp8_e4m3fnuz"
    return CacheFormat(
        block_size=block_size,
        num_kv_heads=1 if latent else spec.num_kv_heads,
        head_size=latent.size if latent else spec.head_size,
        v_head_size=latent.rank if latent else spec.v_head_size,
        dtype=stored,
        layout=layout,
        value_in_key=latent is not None or bool(spec.sparse and spec.sparse.value_in_key),
    )


COMMON_BLOCK_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class SharedCache:
    """The cache that two backends share."""

    layout: str
    block_size: int


def share_cache(
    spec: LayerSpec,
    device: Device,
    prefill: BackendInfo,
    decode: BackendInfo,
    layout: str | None = None,
) -> SharedCache | Rejection:
    """Return the cache that both can use, or why there is none.

    The cache has the block size that the engine asked for. A backend that takes only a divisor of it
    walks each block as several (block-table expansion). That needs layout NHD, where a block's tokens
    lie one after another.
    """
    if spec.kind is AttentionKind.SPARSE:
        return _of_pages(spec, device, decode, layout)
    pair = f"{prefill.name} with {decode.name}"
    first, second = prefill.capabilities, decode.capabilities
    common = [name for name in second.layouts if name in first.layouts]
    if spec.in_rows and second.rows_layout in common:
        common.sort(key=lambda name: name != second.rows_layout)
    if layout is None:  # only the engine chooses a contiguous cache
        common = [name for name in common if name != "contiguous"]
    else:
        if layout not in common:
            return Rejection(
                "layout", layout, ", ".join(common) or "none in common", f"{pair}: unset the layout"
            )
        common = [layout]
        if layout == "contiguous" and (refused := _why_not_contiguous(spec)):
            return refused
    if not common:
        return Rejection(
            "layout",
            f"one layout for both of {pair}",
            f"{prefill.name}: {', '.join(first.layouts)}; {decode.name}: "
            f"{', '.join(second.layouts)}",
            "choose another backend for one phase",
        )
    for name in common:
        shared = _block_size(spec, name, prefill, decode)
        if shared is not None:
            return shared
    return Rejection(
        "block_size",
        f"{spec.block_size or 'any'} for both of {pair}",
        f"{prefill.name}: {first.block_sizes}; {decode.name}: {second.block_sizes}",
        "a size that is a multiple of one that each takes, with layout NHD",
    )


def _of_pages(
    spec: LayerSpec, device: Device, decode: BackendInfo, layout: str | None
) -> SharedCache | Rejection:
    """Return a sparse layer's cache. Kernels get views of it: pages of one head, in token order."""
    assert spec.sparse is not None
    if layout == "contiguous":
        return Rejection(
            "layout", "contiguous", "NHD, HND", "a sparse layer reads pages; unset the layout"
        )
    # A page of one head is then one run of memory, which CPUs alone read faster.
    by_head = spec.sparse.scope != "all" and not device.is_accelerator
    if layout is None:
        layout = "HND" if by_head and "HND" in decode.capabilities.layouts else "NHD"
    return SharedCache(layout, sparse_blocks(spec)[0])


def _why_not_contiguous(spec: LayerSpec) -> Rejection | None:
    """Return why a layer's cache can't be one run of memory for each sequence, or None."""
    if spec.latent is not None or spec.v_head_size != spec.head_size:
        return Rejection(
            "layout",
            "contiguous",
            "keys and values of one size",
            "unset the layout, or use NHD or HND",
        )
    if spec.block_size is None:
        return Rejection(
            "block_size",
            "None",
            "a block that holds a whole sequence, in layout contiguous",
            "spec.replace(block_size=N), N the longest sequence's tokens",
        )
    return None


def _block_size(
    spec: LayerSpec, layout: str, prefill: BackendInfo, decode: BackendInfo
) -> SharedCache | None:
    first, second = prefill.capabilities, decode.capabilities
    if spec.block_size is not None:
        sizes: tuple[int, ...] = (spec.block_size,)
    else:
        sizes = (second.preferred_block_size, first.preferred_block_size, *COMMON_BLOCK_SIZES)
    whole = [n for n in sizes if n in first.block_sizes and n in second.block_sizes]
    walked = [n for n in sizes if walks(prefill, layout, n) and walks(decode, layout, n)]
    size = next(iter((*whole, *walked)), None)
    return None if size is None else SharedCache(layout, size)


def walks(info: BackendInfo, layout: str, block_size: int) -> int | None:
    """Return the blocks in which a backend walks a cache of this form, None where it can't."""
    caps = info.capabilities
    if layout not in caps.layouts:
        return None
    if block_size in caps.block_sizes:
        return block_size
    return caps.block_sizes.divisor_of(block_size) if layout == "NHD" else None
