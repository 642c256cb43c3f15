"""Which formats of cached rows does core bring? Their functions are in modules that import torch."""

from __future__ import annotations

from collections.abc import Callable

from polyattn.spec.row_format import RowFormat

_HOME = "polyattn.runtime.cache.formats"


def _named(
    name: str, module: str, row_bytes: Callable[[int], int], summary: str, which: str = "",
    largest: float = float("inf"), turn: str | None = None,
) -> RowFormat:  # fmt: skip
    home = f"{_HOME}.{module}"
    functions = f"{home}:encode{which}", f"{home}:decode{which}"
    return RowFormat(
        name=name, encode=functions[0], decode=functions[1], row_bytes=row_bytes, largest=largest,
        turn=turn and f"{home}:{turn}", summary=summary,
    )  # fmt: skip


def _grouped(group: int, bits: int, each: int) -> Callable[[int], int]:
    """Rows of `bits` an element, and `each` bytes for a group of so many."""
    return lambda size: 0 if size % group else size * bits // 8 + size // group * each


ROW_FORMATS = (
    _named(
        "nvfp4", "nvfp4", _grouped(16, 4, 1), "e2m1, a scale in e4m3 for each 16 (NVIDIA)",
        largest=6.0 * 448,
    ),
    _named("mxfp4", "mxfp4", _grouped(32, 4, 1), "e2m1, a power of two for each 32 (OCP)"),
    _named(
        "int4", "int4", _grouped(32, 4, 2), "4 bits, a float16 scale for each 32 (ggml's q4_0)",
        largest=65504.0,
    ),
    _named(
        "int8_rows", "eight_bits", lambda size: size + 4, "8 bits, a scale a token and head", "_int8"
    ),
    _named(
        "e4m3_rows", "eight_bits", lambda size: size + 4, "e4m3, a scale a token and head", "_e4m3"
    ),
    _named(
        "kivi4", "kivi", _grouped(32, 4, 4), "4 bits between each group's ends (KIVI)", "4",
        largest=65504.0,
    ),
    _named(
        "kivi2", "kivi", _grouped(32, 2, 4), "2 bits between each group's ends (KIVI)", "2",
        largest=65504.0,
    ),
    _named(
        "turboquant4", "turboquant",
        lambda size: 0 if size & (size - 1) or size < 8 else size // 2 + 4,
        "4 bits of a turned row, and its norm (TurboQuant)", largest=65504.0, turn="turn",
    ),
    _named(
        "fp8_ds_mla", "deepseek", lambda size: 656 if size == 576 else 0,
        "DeepSeek V3.2's latents, 656 bytes", "_v32",
    ),
    _named(
        "fp8_ds_v4", "deepseek", lambda size: 584 if size == 512 else 0,
        "DeepSeek V4's latents, 584 bytes", "_v4",
    ),
)  # fmt: skip
