"""Do two backends share one cache? Layout and block size, settled for a pair together."""

from __future__ import annotations

from dataclasses import dataclass

from polyattn.registry.capabilities import Rejection
from polyattn.registry.info import BackendInfo
from polyattn.spec.decompose import sparse_blocks
from polyattn.spec.layer import LayerSpec

COMMON_BLOCK_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class SharedCache:
    """The cache that a pair agrees on."""

    layout: str
    block_size: int


def share_cache(
    spec: LayerSpec, prefill: BackendInfo, decode: BackendInfo, layout: str | None = None
) -> SharedCache | Rejection:
    """Return the cache that both can use, or why there is none.

    The block size that the engine asked for is kept; a backend that takes only a divisor of it
    walks each block as several (block-table expansion), which needs layout NHD, where a block's
    tokens lie one after another.
    """
    if spec.sparse is not None:
        return _of_pages(spec, layout)
    pair = f"{prefill.name} with {decode.name}"
    first, second = prefill.capabilities, decode.capabilities
    common = [name for name in second.layouts if name in first.layouts]
    if layout is None:  # a contiguous cache is the engine's wish, nobody's choice
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


def _of_pages(spec: LayerSpec, layout: str | None) -> SharedCache | Rejection:
    """Return a sparse layer's cache: kernels are given views of it, pages of one head and token order."""
    if layout == "contiguous":
        return Rejection(
            "layout", "contiguous", "NHD, HND", "a sparse layer reads pages; unset the layout"
        )
    return SharedCache(layout or "NHD", sparse_blocks(spec)[0])


def _why_not_contiguous(spec: LayerSpec) -> Rejection | None:
    """Return why a layer's cache can't be one run of memory for each sequence, or None."""
    if spec.latent is not None or spec.v_head_size != spec.head_size:
        return Rejection(
            "layout", "contiguous", "keys and values of one size", "unset the layout, or use NHD or HND"
        )  # fmt: skip
    if spec.block_size is None:
        return Rejection(
            "block_size", "None", "a block that holds a whole sequence, in layout contiguous",
            "spec.replace(block_size=N), N the longest sequence's tokens",
        )  # fmt: skip
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
