"""Caches and products in 8 and 4 bits: what of bf16's time they take."""

from __future__ import annotations

from polyattn import LayerSpec
from table import LLAMA, Bar, Contender, K, Other, Row

E4M3 = {"kv_cache_dtype": "fp8"}
QUERIES = E4M3 | {"qkv_dtype": "fp8"}
PRODUCTS = QUERIES | {"fp8_compute": True}
FASTER = 1 / 1.4
"""A prefill in e4m3 is to be 1.4 times as fast as bf16's."""


def of(name: str, label: str, changes: dict[str, object]) -> tuple[Contender, Contender]:
    return Other(f"{name} {label}", name, changes), Other(f"{name} bf16", name)


CACHES = ("fp8_e4m3", "fp8_e5m2", "int8")
HEADS = {64: (64, 8), 128: (32, 8), 256: (16, 4)}
"""As many products at each head size."""


def caches(name: str) -> list[Contender]:
    return [*(Other(f"{name} {c}", name, {"kv_cache_dtype": c}) for c in CACHES), f"{name}"]


NEAR = {"nvfp4": 1.56, "int4": 1.56, "fp8_e4m3": 1.03}
"""What decodes over these caches are to take of a copy that moves as many bytes: 110 and 128 us of
64 x 4096 on an H200, whose memory moves 4.3 TB/s."""
SMALL_BLOCKS = LLAMA.replace(block_size=16)


def of_format(name: str, label: str = "", **changes: object) -> Other:
    return Other(f"TRITON_ATTN {name}{label}", "TRITON_ATTN", {"kv_cache_dtype": name, **changes})


def decode_of(name: str, step: str, lens: list[int], bar: Bar, **changes: int) -> Row:
    """A decode beside e4m3's, bf16's, a copy that moves its bytes and a sum that reads them."""
    by = [of_format(name), *(of_format(n) for n in ("fp8_e4m3", "auto") if n != name)]
    spec = SMALL_BLOCKS.replace(**changes)
    return Row(f"formats: {name}, {step}", spec, [(1, n) for n in lens], {"cuda": by}, bar,
               ["machine.copy", "machine.read"], "attend")  # fmt: skip


def prefill_of(name: str, tokens: int, before: int = 0) -> Row:
    """A prompt over a narrow cache beside the portable kernel, which makes no 16-bit copies."""
    by = [of_format(name), of_format(name, ", portable", logit_soft_cap=1e4)]
    after = f" after {before}" if before else ""
    return Row(f"formats: {name}, prompt of {tokens}{after}", SMALL_BLOCKS, [(tokens, before + tokens)],
               {"cuda": by}, Bar(1.05, f"TRITON_ATTN {name}, portable"), part="attend")  # fmt: skip


def prefill(size: int, tokens: int) -> Row:
    heads, kv_heads = HEADS[size]
    spec = LayerSpec(num_heads=heads, num_kv_heads=kv_heads, head_size=size, block_size=64)
    by = {"cuda": of("FLASH_ATTN_V3", "e4m3", PRODUCTS)}
    bar = Bar(FASTER, "FLASH_ATTN_V3 bf16")
    return Row(
        f"heads of {size}: {tokens} tokens", spec, [(tokens, tokens)], by, bar, part="attend"
    )


TRITON_PREFILL = {
    "cuda": (
        Other("TRITON_ATTN e4m3", "TRITON_ATTN", PRODUCTS),
        Other("TRITON_ATTN e4m3 in float16", "TRITON_ATTN", QUERIES),
        Other("TRITON_ATTN e4m3 cache", "TRITON_ATTN", E4M3),
        Other("TRITON_ATTN bf16, portable", "TRITON_ATTN", {"logit_soft_cap": 1e4}),
        Other("TRITON_ATTN bf16", "TRITON_ATTN"),
    ),
    "cpu": of("NATIVE_ATTN", "e4m3", E4M3),
}  # fmt: skip
"""Hopper's own kernel takes no soft cap: with one so large the portable one runs, to the same result."""

ROWS = [
    Row("decode 64 x 4096", LLAMA.replace(block_size=16), "64q1s4k",
        {"cuda": of("TRITON_ATTN", "e4m3", E4M3), "cpu": of("NATIVE_ATTN", "e4m3", E4M3)},
        Bar(0.62, "TRITON_ATTN bf16")),
    Row("decode 64 x 4096, queries too", LLAMA.replace(block_size=16), "64q1s4k",
        {"cuda": of("FLASH_ATTN_V3", "e4m3", PRODUCTS)}, Bar(0.62, "FLASH_ATTN_V3 bf16")),
    *(Row(f"caches: {n} x {m}", LLAMA, [(1, m)] * n,
          {"cuda": [*caches("TRITON_ATTN"), *of("FLASHINFER", "fp8_e4m3", E4M3)],
           "cpu": caches("NATIVE_ATTN")}, part="attend")
      for n, m in ((1, 8192), (16, 4096), (64, 4096))),
    *(decode_of(n, "64 x 4096", [4096] * 64, Bar(most, "machine.copy")) for n, most in NEAR.items()),
    *(decode_of(n, "64 x 4096", [4096] * 64, Bar(1.0, "TRITON_ATTN fp8_e4m3"))
      for n in ("mxfp4", "kivi4", "kivi2", "turboquant4")),
    *(decode_of(n, "64 x 4096", [4096] * 64, Bar(1.0, "TRITON_ATTN auto"))
      for n in ("int8_rows", "e4m3_rows")),
    *(decode_of(n, "1 x 128k", [128 * K], Bar(0.75, "TRITON_ATTN fp8_e4m3")) for n in ("nvfp4", "int4")),
    decode_of("int4", "1 x 128k, one KV head", [128 * K], Bar(1.0, "TRITON_ATTN fp8_e4m3"),
              num_heads=8, num_kv_heads=1),
    decode_of("nvfp4", "64 of 1 to 8k", [128 * (i + 1) - i for i in range(64)],
              Bar(0.75, "TRITON_ATTN fp8_e4m3")),
    *(prefill_of(n, tokens) for n in ("nvfp4", "mxfp4") for tokens in (256, 512, K, 2 * K, 4 * K, 8 * K)),
    *(prefill_of(n, 256, 4 * K) for n in ("nvfp4", "mxfp4")),
    Row("CPU: decode 8 x 2048, e4m3", LLAMA, "8q1s2k", {"cpu": of("NATIVE_ATTN", "e4m3", E4M3)},
        Bar(1.0, "NATIVE_ATTN bf16")),
    Row("CPU: decode 8 x 2048, int8", LLAMA, "8q1s2k",
        {"cpu": of("NATIVE_ATTN", "int8", {"kv_cache_dtype": "int8"})}, Bar(1 / 1.3, "NATIVE_ATTN bf16")),
    *(prefill(size, tokens) for size in HEADS for tokens in (4 * K, 16 * K)),
    *(Row(f"prefill {n} x {m}", LLAMA.replace(block_size=16), [(m, m)] * n, TRITON_PREFILL, part="attend")
      for n, m in ((8, 2048), (1, 16384))),
]  # fmt: skip
