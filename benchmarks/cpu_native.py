"""The native CPU kernels' cases, and what the machine can do at best: `cpu_bars.py` compares them.

The limits are what this process reads of 64 MiB and what `torch.mm` multiplies, measured in the same
rounds.
"""

from __future__ import annotations

import ctypes
import platform
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from polyattn import Batch, LayerSpec
from polyattn.kernel import (
    STORAGE_DTYPES,
    AttentionBackend,
    CacheFormat,
    Device,
    Frame,
    KVCache,
    LayerParams,
)
from polyattn_cpu.native import build
from polyattn_cpu.native.attention import NativeAttention
from polyattn_cpu.native.library import isa
from polyattn_cpu.sdpa import TorchSDPA

__all__ = ["CASES", "Case", "NativeAttention", "TorchSDPA", "limits", "readings"]

LLAMA = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
MLA = {"num_kv_heads": 1, "head_size": 576, "v_head_size": 512}
DECODE = ([1] * 8, [2048] * 8)
CASES: dict[str, tuple[dict[str, Any], list[int], list[int]]] = {
    "decode 8x2048 bf16": (LLAMA, *DECODE),
    "decode 1x8192 bf16": (LLAMA, [1], [8192]),
    "decode 64x512 bf16": (LLAMA, [1] * 64, [512] * 64),
    "decode 8x1024 MHA 32x96 bf16": ({"num_heads": 32, "head_size": 96}, [1] * 8, [1024] * 8),
    "decode 8x2048 64/8 bf16": (LLAMA | {"num_heads": 64}, *DECODE),
    "decode 8x2048 MQA 71x64 bf16": ({"num_heads": 71, "num_kv_heads": 1, "head_size": 64}, *DECODE),
    "decode 8x2048 fp16": (LLAMA | {"dtype": "float16"}, *DECODE),
    "decode 8x2048 fp32": (LLAMA | {"dtype": "float32"}, *DECODE),
    "decode 8x2048 e4m3": (LLAMA | {"kv_cache_dtype": "fp8_e4m3"}, *DECODE),
    "decode 8x2048 int8": (LLAMA | {"kv_cache_dtype": "int8"}, *DECODE),
    "decode 8x2048 MLA 16 heads bf16": (MLA | {"num_heads": 16}, *DECODE),
    "decode 8x2048 MLA 128 heads bf16": (MLA | {"num_heads": 128}, *DECODE),
    "decode 8x2048 MLA 16 heads fp32": (MLA | {"num_heads": 16, "dtype": "float32"}, *DECODE),
    "decode 8x2048 MLA 128 heads fp32": (MLA | {"num_heads": 128, "dtype": "float32"}, *DECODE),
    "decode 8x64 4/2x32 fp32": (
        {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float32"}, [1] * 8, [64] * 8,
    ),
    "prefill 1x2048 bf16": (LLAMA, [2048], [2048]),
    "prefill 4x512 bf16": (LLAMA, [512] * 4, [512] * 4),
    "chunk 512 after 4096 bf16": (LLAMA, [512], [4608]),
    "prefill 1x2048 fp32": (LLAMA | {"dtype": "float32"}, [2048], [2048]),
}  # fmt: skip


class Case:
    """One step over a shuffled cache of blocks of 16, and what it costs at least."""

    def __init__(self, features: dict[str, Any], queries: list[int], lens: list[int]):
        self.spec = LayerSpec(**features)
        spec, size = self.spec, 16
        stored = STORAGE_DTYPES[spec.stored_dtype]
        latent = spec.head_size == 576
        blocks = sum(-(-n // size) for n in lens)
        key = self._rows(stored, blocks, size, spec.num_kv_heads, spec.head_size)
        value = (
            key[..., : spec.v_head_size]
            if latent
            else self._rows(stored, blocks, size, spec.num_kv_heads, spec.v_head_size)
        )
        self.cache = KVCache(key, value)
        table = torch.zeros(len(lens), max(-(-n // size) for n in lens), dtype=torch.int32)
        order, at = torch.randperm(blocks).int(), 0
        for seq, length in enumerate(lens):
            count = -(-length // size)
            table[seq, :count] = order[at : at + count]
            at += count
        self.batch = Batch([0, *accumulate(queries)], lens, table)
        tokens = sum(queries)
        dtype = STORAGE_DTYPES[spec.dtype]
        self.query = torch.randn(tokens, spec.num_heads, spec.head_size).to(dtype)
        self.out = torch.empty(tokens, spec.num_heads, spec.v_head_size, dtype=dtype)
        self.format = CacheFormat(
            block_size=size, num_kv_heads=spec.num_kv_heads, head_size=spec.head_size,
            v_head_size=spec.v_head_size, dtype=spec.stored_dtype,
        )  # fmt: skip
        width = spec.head_size + (0 if latent else spec.v_head_size)
        self.bytes = sum(lens) * spec.num_kv_heads * width * stored.itemsize
        seen = sum(sum(range(n - q + 1, n + 1)) for q, n in zip(queries, lens, strict=True))
        self.flops = 2 * seen * spec.num_heads * (spec.head_size + spec.v_head_size)

    @staticmethod
    def _rows(stored: torch.dtype, *shape: int) -> torch.Tensor:
        rows = torch.randn(shape)
        return (rows * 10).to(stored) if stored == torch.int8 else rows.to(stored)

    def call(self, backend: type[AttentionBackend]) -> Callable[[], None]:
        """Return one layer's call; the plan is made once, as in a step of many layers."""
        made = backend(
            self.spec, self.format, Device("cpu", platform.machine(), torch_device="cpu")
        )
        plan, params = made.plan(self.batch), LayerParams(k_scale=0.1, v_scale=0.1)
        return lambda: made.run(
            plan, Frame(self.query, None, None, self.cache, params, self.out, None)
        )


@cache
def reader() -> Any:
    """Build and load what only reads (cpu_read.cpp)."""
    made = Path(tempfile.mkdtemp()) / "cpu_read.so"
    source = Path(__file__).with_name("cpu_read.cpp")
    flags = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-Wno-psabi")
    subprocess.run([*build.compiler(), *flags, str(source), "-o", str(made)], check=True)
    read = ctypes.CDLL(str(made)).read_runs
    read.restype, read.argtypes = ctypes.c_float, [ctypes.c_void_p, *[ctypes.c_int64] * 4]
    return read


def readings(case: Case) -> dict[str, Callable[[], object]]:
    """Return calls that read what `case` does, block after block as its table names them: the floor.

    `blocks` adds the lines up, `products` multiplies each as often as the case's query heads must, and
    that is all. Each asks for lines so many bytes ahead; the fastest is what this order allows.
    """
    key, value, table = case.cache.key, case.cache.value, case.batch.block_table
    assert table is not None
    size = key.stride(0) * key.element_size()
    first = [t.data_ptr() for t in ((key,) if key.data_ptr() == value.data_ptr() else (key, value))]
    lens = case.batch.seq_lens.tolist()
    used = [row[: n // 16] for row, n in zip(table.tolist(), lens, strict=True)]
    runs = torch.tensor([at + block * size for row in used for block in row for at in first])
    pairs = isa() == "avx512_bf16" and case.spec.dtype == "bfloat16"
    vectors = 64 // key.element_size() // (32 if pairs else 16)  # of products, that a line makes
    products = case.spec.num_heads // case.spec.num_kv_heads * vectors
    ways = {"blocks": 0} | ({"products": products} if products in (1, 2, 4, 8) else {})
    return {
        f"{way} {ahead}": partial(_read, runs, size, ahead, count)
        for way, count in ways.items()
        for ahead in (0, 8192, 16384, 65536)
    }


def _read(runs: torch.Tensor, size: int, ahead: int, products: int) -> None:
    reader()(runs.data_ptr(), len(runs), size, ahead, products)


def limits() -> dict[str, tuple[Callable[[], object], float]]:
    """Return what the machine can do at best: a call, and the bytes or operations in it."""
    memory = torch.ones(16 << 20)
    a32, a16 = torch.randn(1024, 1024), torch.randn(2048, 2048).bfloat16()
    return {
        "read": (lambda: memory.sum(), 64 * 2**20),
        "mm fp32": (lambda: torch.mm(a32, a32), 2 * 1024**3),
        "mm bf16": (lambda: torch.mm(a16, a16), 2 * 2048**3),
    }
