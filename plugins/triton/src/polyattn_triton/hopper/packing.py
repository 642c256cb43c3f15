"""Which decodes `hopper.packed` serves, and its launch arguments.

Plain layers with heads of 128, over e4m3, or rows that `FORMS` names.
"""

from __future__ import annotations

from typing import Any

import triton
from polyattn.kernel import CacheFormat, LayerSpec, arch_matches

from polyattn_triton.configs import Config
from polyattn_triton.functions.pointwise import Generated
from polyattn_triton.hopper.choice import is_plain
from polyattn_triton.launch import Site
from polyattn_triton.variants import SCALES

try:
    from polyattn_triton.hopper.packed import packed_kernel
except ImportError:  # a Triton whose Gluon lacks what the kernel needs: the portable one serves
    packed_kernel = None

PACKED, BY_HEAD = Config(16, 32, 1, 3), Config(16, 32, 1, 2)
"""Of a program, which is one warp, over rows by token and by head. They are copied by way of the L1,
which has the memory that programs leave. H100, int4, 64 x 4,096: 143 us by token, 115 by head; with each
other's stages 163 and 117. `PACKED` is that of rows with one scale, too: int8_rows 220 us (226 with
`BY_HEAD`), e4m3_rows 220 (227)."""
EIGHT = Config(16, 32, 1, 4)
"""Over e4m3, where programs fill the chip uncut, mxfp4 and turboquant4. H100, 64 x 4,096 by head: e4m3
185 us (199 by the portable kernel, by token), mxfp4 149 (`BY_HEAD` 154), turboquant4 172 (`PACKED`
183)."""
_NAMES = (
    "int4",
    "nvfp4",
    "mxfp4",
    "kivi4",
    "kivi2",
    "fp8_e4m3",
    "e4m3_rows",
    "int8_rows",
    "turboquant4",
)
FORMS = {name: form for form, name in enumerate(_NAMES)}
"""Formats whose bytes the kernel knows, and their number there."""
PLACES = 4
"""Programs of one warp over rows in a usual program's place."""
REGISTERS, ON_ONE = 168, 12
"""Of their threads, and how many programs are on a multiprocessor at once, with so many. With 128, and
sixteen programs, 24 decodes over int4 and nvfp4 took 1.00 to 1.05 of the time (H100)."""
OF_FOUR = ("mxfp4", "e4m3_rows", "int8_rows", "turboquant4")
"""Those whose rows begin at multiples of 4 bytes alone."""
ROWS = {(name, 1) for name in FORMS if name != "fp8_e4m3"}
"""Formats of rows among them."""


def word_bytes(cache: CacheFormat) -> int:
    """Return how many bytes are copied at once, which rows begin at multiples of."""
    return 16 if cache.rows is None else 4 if cache.dtype in OF_FOUR else 8


def packed_config(
    spec: LayerSpec, cache: CacheFormat | None, arch: str, generated: Generated | None
) -> Config | None:
    """Return the tiles of the decode over packed rows, or None where it doesn't serve a layer."""
    if cache is None or packed_kernel is None or generated is not None:
        return None
    rows = cache.rows
    known = cache.dtype == "fp8_e4m3"
    if rows is not None:
        known = rows[0] == rows[1] and (rows[0].name, rows[0].version) in ROWS
    fits = (
        known
        and arch_matches("sm_90", arch)
        and spec.qkv_dtype == "auto"
        and is_plain(spec.replace(kv_cache_dtype="auto", scales="number"))
        and not spec.sliding_window
        and spec.head_size == 128
        and spec.gqa_ratio <= 16
        and cache.block_size % 16 == 0
        and (cache.dtype != "mxfp4" or spec.dtype == "bfloat16")  # whose range its scales have
    )
    if not fits:
        return None
    if rows is None or cache.dtype in ("mxfp4", "turboquant4"):
        return EIGHT
    return BY_HEAD if cache.layout == "HND" and cache.dtype not in OF_FOUR else PACKED


def packed_bytes(cache: CacheFormat, config: Config) -> int:
    """Return how much shared memory a program takes."""
    return config.num_stages * config.block_n * sum(cache.widths)


def packed_constants(
    spec: LayerSpec, cache: CacheFormat, config: Config, way: str, lse: bool, rows: int
) -> tuple[Any, ...]:
    """Return `packed_kernel`'s constants, in its order. `rows`: of a part."""
    return (
        spec.gqa_ratio, spec.head_size, max(8, triton.next_power_of_2(spec.gqa_ratio)),
        config.block_n, cache.block_size, config.num_stages, FORMS[cache.dtype], rows, lse,
        way == "many", way == "listed", SCALES[spec.scales],
    )  # fmt: skip


def packed_options(config: Config) -> dict[str, int]:
    """Return a launch's options."""
    limit = {} if config == EIGHT else {"maxnreg": REGISTERS}
    return {"num_warps": config.num_warps, **limit}


def packed_site(
    strides: tuple[tuple[int, ...], ...], constants: tuple[Any, ...], config: Config
) -> Site:
    """Specialise the kernel for query, key, value and output of these strides."""
    q, k, v, out = strides
    ints = (*q[:2], k[0], k[2], v[0], v[2], *out[:2])
    return Site(packed_kernel, ints, (*constants, k[1], v[1]), packed_options(config))
