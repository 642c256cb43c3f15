"""The native CPU kernels' cases, and what the machine can do at best: `cpu_bars.py` compares them.

The limits are what this process reads of 64 MiB and what `torch.mm` multiplies, measured in the same
rounds.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from measuring import build
from polyattn import LatentSpec, LayerSpec
from polyattn.kernel import Frame, IndexerSpec
from polyattn_cpu.native import build as native
from polyattn_cpu.native.attention import kernels
from polyattn_cpu.native.library import isa
from table import LLAMA, MHA, Other, Row

SMALL = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32")
WIDE = MHA.replace(num_heads=32, num_kv_heads=32, head_size=96)
MQA = LayerSpec(num_heads=71, num_kv_heads=1, head_size=64)
MLA = LayerSpec(
    kind="mla",
    num_heads=16,
    head_size=192,
    v_head_size=128,
    latent=LatentSpec(rank=512, rope_head_size=64),
)
MLA128 = MLA.replace(num_heads=128, num_kv_heads=128)
CASES: dict[str, tuple[LayerSpec, str, str]] = {
    "decode 8x2048 bf16": (LLAMA, "8q1s2k", ""),
    "decode 1x8192 bf16": (LLAMA, "q1s8k", ""),
    "decode 64x512 bf16": (LLAMA, "64q1s512", ""),
    "decode 8x1024 MHA 32x96 bf16": (WIDE, "8q1s1k", ""),
    "decode 1x32k + 3x1k 28/4 bf16": (LLAMA.replace(num_heads=28, num_kv_heads=4), "q1s32k_3q1s1k", ""),
    "decode 8x2048 64/8 bf16": (LLAMA.replace(num_heads=64), "8q1s2k", ""),
    "decode 8x2048 MQA 71x64 bf16": (MQA, "8q1s2k", ""),
    "decode 8x2048 fp16": (LLAMA, "8q1s2k", "float16"),
    "decode 8x2048 fp32": (LLAMA, "8q1s2k", "float32"),
    "decode 8x2048 e4m3": (LLAMA.replace(kv_cache_dtype="fp8_e4m3"), "8q1s2k", ""),
    "decode 8x2048 int8": (LLAMA.replace(kv_cache_dtype="int8"), "8q1s2k", ""),
    "decode 8x2048 MLA 16 heads bf16": (MLA, "8q1s2k", ""),
    "decode 8x2048 MLA 128 heads bf16": (MLA128, "8q1s2k", ""),
    "decode 8x2048 MLA 16 heads fp32": (MLA, "8q1s2k", "float32"),
    "decode 8x2048 MLA 128 heads fp32": (MLA128, "8q1s2k", "float32"),
    "decode 8x64 4/2x32 fp32": (SMALL, "8q1s64", "float32"),
    "prefill 1x2048 bf16": (LLAMA, "q2k", ""),
    "prefill 4x512 bf16": (LLAMA, "4q512", ""),
    "chunk 512 after 4096 bf16": (LLAMA, "q512s4608", ""),
    "prefill 1x2048 fp32": (LLAMA, "q2k", "float32"),
}  # fmt: skip
"""A layer, its step in `polyattn bench`'s grammar, and its dtype."""
INDEXERS: dict[str, tuple[tuple[int, ...], IndexerSpec, str]] = {
    "MSA": ((16, 4), IndexerSpec(
        num_heads=4, head_size=128, budget=16, activation="none", fold="none", pool=128, forced_last=1,
    ), "read"),
    "QSA": ((64, 4), IndexerSpec(
        num_heads=4, head_size=128, budget=512, fold="sum", tokens_per_entry=4, tail=True,
    ), "read"),
    "DSA, scaled e4m3": ((1,), IndexerSpec(
        num_heads=64, head_size=128, budget=2048, cache_dtype="fp8_scaled",
    ), "mm bf16"),
}  # fmt: skip
"""Sequences of 131,072 tokens that decode one, how an indexer chooses among them, and what limits it.

The first two have caches of 512 MiB, then of 128 and of 32, which some last caches hold."""


def step_of(spec: LayerSpec, steps: str, backend: str, part: str = "layer") -> Any:
    """Return a backend's step, as the suites build theirs."""
    return build(
        Row(steps, spec, steps, {}, part=part), Other(backend, backend), torch.device("cpu")
    )


class Case:
    """One step over a shuffled cache of blocks of 16, and what it costs at least."""

    def __init__(self, spec: LayerSpec, steps: str, dtype: str = "", backend: str = ""):
        self.spec = spec.replace(block_size=16, **({"dtype": dtype} if dtype else {}))
        backend = backend or ("NATIVE_ATTN" if spec.latent is None else "NATIVE_MLA")
        self.work = step_of(self.spec, steps, backend)
        self.bytes = sum(self.work.batch.lens) * self.work.cache.format.bytes_per_token
        self.flops = self.work.cost.flops

    def call(self) -> Callable[[], None]:
        """Return a call of the backend; the plan is made once, as in a step of many layers."""
        work = self.work
        (call,) = work.plan.calls
        frame = Frame(work.query, None, None, work.cache, work.layer.params, work.out, None)
        return lambda: call.run(frame)

    def hot_call(self) -> Callable[[], None]:
        """The same where the table names its first four numbers alone, which the second cache holds."""
        table, call = self.work.batch.block_table, self.call()
        far, near = table.clone(), table % 4

        def hot() -> None:
            table.copy_(near)
            call()
            table.copy_(far)

        return hot


@cache
def reader() -> Any:
    """Build and load what only reads, by torch's threads (cpu_read.cpp)."""
    made = Path(tempfile.mkdtemp()) / "cpu_read.so"
    source = Path(__file__).with_name("cpu_read.cpp")
    flags = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-Wno-psabi")
    threads = (f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu")
    command = [*native.compiler(), *flags, str(source), *threads, "-o", str(made)]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(made))
    library.read_runs.restype = ctypes.c_bool
    library.read_runs.argtypes = [ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int64] * 4]
    return library


def readings(case: Case) -> dict[str, Callable[[], object]]:
    """Return calls that read what `case` does, block after block as its table names them: the floor.

    `blocks` adds the lines up, `products` multiplies each as often as the case's query heads must, and
    that is all. Each asks for lines so many bytes ahead; the fastest is what this order allows.
    """
    cache, batch = case.work.cache, case.work.batch
    key, value, table = cache.key, cache.value, batch.block_table
    size = key.stride(0) * key.element_size()
    first = [t.data_ptr() for t in ((key,) if key.data_ptr() == value.data_ptr() else (key, value))]
    used = [row[: n // 16] for row, n in zip(table.tolist(), batch.lens, strict=True)]
    runs = torch.tensor([at + block * size for row in used for block in row for at in first])
    vectors = vectors_of_a_line(case.spec.dtype, key.element_size(), "avx512_bf16")
    heads = case.work.query.shape[1] // key.shape[2]
    products = heads * vectors
    ways = {"blocks": 0} | ({"products": products} if products in (1, 2, 4, 8) else {})
    return {
        f"{way} {ahead}": partial(read_runs, runs, size, ahead, count)
        for way, count in ways.items()
        for ahead in (0, 8192, 16384, 65536)
    }


def vectors_of_a_line(dtype: str, itemsize: int, *sets: str) -> int:
    """Return of how many registers' products a line of keys is, beside one of its own width.

    `sets`: those that multiply pairs of bfloat16.
    """
    pairs = isa() in sets and dtype == "bfloat16"
    return 64 // itemsize // (32 if pairs else 16)


def index_floors(
    work: Any, heads: int, read: Callable[[], object]
) -> dict[str, Callable[[], object]]:
    """Return loops over an indexer's pages in its table's order, and a call without a kernel.

    `read` comes before each, so that none finds in a cache what the one before it read.
    """
    keys, table = work.frame.keys, work.batch.block_table
    size = keys.stride(0) * keys.itemsize
    runs = (table.long() * size + keys.data_ptr()).flatten()
    products = heads * vectors_of_a_line("bfloat16", keys.itemsize, "amx", "avx512_bf16")
    calls = {"read": read, "before host": read, "host": partial(without_kernels, work.call)}
    for way, count in (("rows", 0), ("products", products)):
        for ahead in (0, 4096, 8192, 16384):
            name = f"{way} {ahead}"
            calls |= {f"before {name}": read, name: partial(read_runs, runs, size, ahead, count)}
    return calls


def read_runs(runs: torch.Tensor, size: int, ahead: int, products: int) -> None:
    assert reader().read_runs(
        torch.get_num_threads(), runs.data_ptr(), runs.numel(), size, ahead, products
    )


def without_kernels(*calls: Callable[[], object]) -> Callable[..., object]:
    """Call each while an empty function is in the place of attention's and an indexer's kernels.

    Returns that function. A step that is planned meanwhile goes on calling it.
    """
    library = kernels()
    empty: Callable[..., object] = library.pa_error
    with ExitStack() as stack:
        for name in ("pa_attend", "pa_attend_chosen", "pa_choose"):
            stack.callback(setattr, library, name, getattr(library, name))
            setattr(library, name, (lambda *_: 0) if name == "pa_choose" else empty)
        for call in calls:
            call()
    return empty


def limits() -> dict[str, tuple[Callable[[], object], float]]:
    """Return what the machine can do at best: a call, and the bytes or operations in it."""
    memory = torch.ones(16 << 20)
    a32, a16 = torch.randn(1024, 1024), torch.randn(2048, 2048).bfloat16()
    return {
        "read": (lambda: memory.sum(), 64 * 2**20),
        "mm fp32": (lambda: torch.mm(a32, a32), 2 * 1024**3),
        "mm bf16": (lambda: torch.mm(a16, a16), 2 * 2048**3),
    }
