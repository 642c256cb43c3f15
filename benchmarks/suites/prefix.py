"""Decodes that share leading blocks: read once for all sequences, beside every sequence by itself."""

from __future__ import annotations

from collections.abc import Sequence

from polyattn import LayerSpec
from polyattn.families.attention.sharing import READ_BACK_US
from table import LLAMA, Bar, Contender, K, Other, Row

SPEC = LLAMA.replace(block_size=16)
E4M3 = {"kv_cache_dtype": "fp8_e4m3"}
PLAIN = "nothing shared"


def by(name: str, *more: Contender) -> tuple[Contender, ...]:
    return (name, Other(f"{name}, {PLAIN}", name, part="unshared"), *more)


BY = {
    "cuda": by("TRITON_ATTN", *by("FLASHINFER"), *by("FLASH_ATTN_V3")),
    "cpu": by("NATIVE_ATTN", *by("TORCH_SDPA")),
}
PLANS_ALONE = {"cuda": ("TRITON_ATTN",), "cpu": ("TORCH_SDPA",)}
PLANS = {
    device: (name, Other(f"{name}, table on the host", name, part="plan"))
    for device, (name,) in PLANS_ALONE.items()
}
EIGHT = {
    device: tuple(Other(each.label, each.backend, E4M3, each.part) if isinstance(each, Other)
                  else Other(each, each, E4M3) for each in by(name))
    for device, name in (("cuda", "TRITON_ATTN"), ("cpu", "NATIVE_ATTN"))
}  # fmt: skip


def shared(
    name: str, count: int, levels: Sequence[tuple[int, int]], own: int, bar: Bar | None = None,
    new: int = 1, spec: LayerSpec = SPEC,
) -> Row:  # fmt: skip
    """`count` sequences over `levels` of (sequences, tokens) with `own` tokens each, `new` new ones."""
    length = sum(tokens for _, tokens in levels) + own
    plain = new == 1 and spec is SPEC
    by, beside = (BY, ["flashinfer.cascade"]) if plain else (ALONE, [])
    return Row(name, spec, [(new, length)] * count, by, bar, beside, "attend", levels)


ALONE = {device: by(name) for device, name in (("cuda", "TRITON_ATTN"), ("cpu", "NATIVE_ATTN"))}
OVER_PLAIN = f"TRITON_ATTN, {PLAIN}"
ONE = ((64, 32 * K),)
TWO = ((64, 16 * K), (8, 8 * K))

ROWS = [
    shared("64 over 32k + 512", 64, ONE, 512, Bar(200, "us")),
    shared("8 x 8 over 16k + 8k + 512", 64, TWO, 512, Bar(1 / 3, OVER_PLAIN)),
    Row("64 x 4k, nothing shared", SPEC, "64q1s4k", BY, Bar(1.01, OVER_PLAIN), part="attend"),
    *(shared(f"{n} over 4k + 128", n, ((n, 4 * K),), 128) for n in (4, 8, 16, 32, 64)),
    shared("64 over 8k + 4k + 2k + 1k, 4 levels", 64,
           ((64, 8 * K), (16, 4 * K), (4, 2 * K), (2, K)), 128),
    *(shared(f"64 x {new} new over 32k + 512", 64, ONE, 512, Bar(1, OVER_PLAIN), new)
      for new in (2, 4, 16)),
    shared("64 x 4 new over 4k + 128", 64, ((64, 4 * K),), 128, Bar(1, OVER_PLAIN), 4),
    shared("a window of 4k: 64 over 8k + 512", 64, ((64, 8 * K),), 512, Bar(1, OVER_PLAIN), 1,
           SPEC.replace(sliding_window=4 * K)),
    shared("ALiBi: 64 over 8k + 512", 64, ((64, 8 * K),), 512, Bar(1, OVER_PLAIN), 1,
           SPEC.replace(alibi=True)),
    Row("64 over 32k + 512, e4m3", SPEC, [(1, 32 * K + 512)] * 64, EIGHT, part="attend", levels=ONE),
    Row("planning 64 over 32k + 512, table on the device", SPEC, [(1, 32 * K + 512)] * 64, PLANS,
        Bar(READ_BACK_US["cuda"], "us"), part="plan, unread", levels=ONE),
    Row("reading a table of 64 x 2080 blocks back", SPEC, [(1, 32 * K + 512)] * 64, PLANS_ALONE,
        part="read back", levels=ONE),
    Row("looking over 256 x 2048 blocks", SPEC.replace(num_heads=1, num_kv_heads=1, head_size=16),
        [(1, 2048 * 16)] * 256, {"cuda": ("TRITON_ATTN",), "cpu": ("TORCH_SDPA",)}, Bar(20, "us"),
        part="look"),
]  # fmt: skip
