"""Which layer is of which type? Lists in newer files, periods and indices in older ones."""

from __future__ import annotations

from collections.abc import Callable

from polyattn_models.config import Config, unknown_choice

Pattern = Callable[[Config, int], list[str]]
"""Returns the types of so many layers, for a config that doesn't list them."""

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR, CONV = "linear_attention", "conv"
LEGACY = {
    "attention": FULL,
    "mamba": LINEAR,
    "recurrent": LINEAR,
    "deepseek_sparse_attention": "indexed_attention",
}
"""Older names of layer types."""


def all_of(kind: str) -> Pattern:
    """Every layer is of one type."""
    return lambda cfg, count: [kind] * count


def every(period: int, field: str = "", first: str = SLIDING, last: str = FULL) -> Pattern:
    """The last of each `period` layers is of another type; `field` overrides the period."""

    def pattern(cfg: Config, count: int) -> list[str]:
        length = (cfg.integer(field) if field else None) or period
        return [first if (i + 1) % length else last for i in range(count)]

    return pattern


def starting(period: int, field: str = "") -> Pattern:
    """The first of each `period` layers sees everything, the others a window."""

    def pattern(cfg: Config, count: int) -> list[str]:
        length = (cfg.integer(field) if field else None) or period
        return [SLIDING if i % length else FULL for i in range(count)]

    return pattern


def upper_layers(cfg: Config, count: int) -> list[str]:
    """The layers from `max_window_layers` on are windowed (Qwen)."""
    first = cfg.get("max_window_layers", default=0)
    return [SLIDING if i >= first else FULL for i in range(count)]


def lower_even_layers(cfg: Config, count: int) -> list[str]:
    """Every second layer below `max_window_layers` is windowed (Qwen-MoE)."""
    last = cfg.get("max_window_layers", default=0)
    return [SLIDING if (i + 1) % 2 and i < last else FULL for i in range(count)]


def layer_types(cfg: Config, count: int, pattern: Pattern, valid: tuple[str, ...]) -> list[str]:
    """Return the type of every layer: `layer_types`, or what the pattern gives without one."""
    derived, listed = pattern(cfg, count), cfg.items("layer_types", str, count)
    return derived if listed is None else named(cfg, "layer_types", listed, valid)


def named(cfg: Config, field: str, listed: list[str], valid: tuple[str, ...]) -> list[str]:
    """Return a list of types under today's names. Raises `ConfigError` for an unknown one."""
    kinds = [LEGACY.get(kind, kind) for kind in listed]
    for index, kind in enumerate(kinds):
        if kind not in valid:
            raise unknown_choice(cfg, f"{field}[{index}]", listed[index], valid)
    return kinds
