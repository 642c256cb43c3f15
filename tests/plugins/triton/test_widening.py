"""Hopper's own prefill over 8-bit caches: which steps' tokens are copied for it, and how?"""

from __future__ import annotations

import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from polyattn.kernel import Frame

pytest.importorskip("triton")
import numpy as np
import torch
from interpreting import interpreted
from polyattn import Batch, LayerSpec
from polyattn.kernel import STORAGE_DTYPES, KVCache, LayerParams
from polyattn_triton import attention
from polyattn_triton.configs import HOPPER
from polyattn_triton.hopper import widening
from polyattn_triton.hopper.widening import NARROW, seen
from pretending import pretended

SCRIPT = Path(__file__).parent / "widened.py"
E4M3 = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, kv_cache_dtype="fp8_e4m3")


@pytest.mark.slow
def test_interpreted() -> None:
    """Copies have torch's bits, and attention to them is attention to the cache."""
    lines = interpreted(SCRIPT, seconds=1200).splitlines()
    assert len(set(lines)) == 9 * 4, lines


@pytest.mark.parametrize("stored", NARROW)
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float16])
def test_every_number_is_one_of_16_bits(stored: str, wide: torch.dtype) -> None:
    numbers = torch.arange(-128, 128).to(torch.int8).view(STORAGE_DTYPES[stored])
    exact = numbers.double()
    assert torch.equal(numbers.to(wide).double().nan_to_num(7e4), exact.nan_to_num(7e4))


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 9}, {"causal": False}], ids=str)
def test_how_many_keys_are_seen(changes: dict[str, Any]) -> None:
    spec = E4M3.replace(**changes)
    queries, lens = np.array([5, 3, 0, 20, 1]), np.array([5, 40, 12, 7, 30])
    wanted = 0
    for query, length in zip(queries, lens, strict=True):
        for position in range(length - query, length):
            last = min(position, length - 1) if spec.causal else length - 1
            first = max(0, position - (spec.sliding_window or 99) + 1) if spec.causal else 0
            wanted += max(0, last - first + 1)
    assert seen(spec, queries, lens) == wanted


WHICH: list[tuple[dict[str, Any], list[int], list[int], bool]] = [
    ({}, [2048] * 8, [2048] * 8, True),
    ({}, [16384], [16384], True),
    ({"num_heads": 16, "num_kv_heads": 2}, [512] * 4, [4608] * 4, True),
    ({"kv_cache_dtype": "int8"}, [2048], [32768], True),
    ({"kv_cache_dtype": "fp8_e5m2", "dtype": "float16"}, [2048], [2048], True),
    ({"causal": False}, [1500], [1500], True),
    ({"sliding_window": 4096}, [512], [200_000], True),  # of which 4,672 tokens are copied
    ({"kv_cache_dtype": "nvfp4"}, [2048] * 8, [2048] * 8, True),
    ({"kv_cache_dtype": "nvfp4", "dtype": "float16"}, [2048], [8192], True),
    ({"kv_cache_dtype": "mxfp4"}, [2048], [8192], True),
    ({"kv_cache_dtype": "mxfp4", "dtype": "float16"}, [2048], [8192], False),  # not float16's
    (
        {"kv_cache_dtype": "int4"},
        [2048],
        [8192],
        False,
    ),  # a code times its scale is no 16-bit number
    ({"kv_cache_dtype": "nvfp4"}, [512], [512], True),
    ({"kv_cache_dtype": "nvfp4"}, [128], [128], False),  # too short
    ({"kv_cache_dtype": "nvfp4"}, [64], [4096], True),  # rows of bytes take longer to read
    ({"qkv_dtype": "fp8_e4m3"}, [2048] * 8, [2048] * 8, True),
    ({"head_size": 256}, [1024], [4096], True),
    ({}, [512], [512], True),
    ({}, [128], [128], False),  # too short
    ({}, [64], [4096], False),
    ({}, [64] * 16, [8192] * 16, False),  # few queries for each key
    ({}, [2048], [131_072], False),  # more than `MOST_BYTES`
    ({"head_size": 64}, [2048] * 8, [2048] * 8, False),  # slower by token
    ({"variant": "flash_sigmoid"}, [2048] * 8, [2048] * 8, False),
    ({"scales": "head"}, [2048] * 8, [2048] * 8, False),
    ({"logit_soft_cap": 30.0}, [2048] * 8, [2048] * 8, False),
    ({"out_dtype": "fp8_e4m3"}, [2048] * 8, [2048] * 8, False),
    ({"length_bounds": True}, [2048] * 8, [2048] * 8, False),
]


def stepped(queries: list[int], lens: list[int], width: int | None = None) -> Batch:
    """A step over pages of 16, whose blocks are all 0."""
    table = torch.zeros(len(lens), width or -(-max(lens) // 16), dtype=torch.int32)
    return Batch([0, *accumulate(queries)], lens, table)


@pytest.mark.parametrize(("changes", "queries", "lens", "wanted"), WHICH)
def test_which_steps_are_copied(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], queries: list[int], lens: list[int],
    wanted: bool,
) -> None:  # fmt: skip
    """Others are dealt out as if there were no such kernel."""
    spec = E4M3.replace(**changes)
    backend, _ = pretended(monkeypatch, spec)
    batch = stepped(queries, lens)
    plan, portable = backend.plan_rows(batch), backend.plan_rows(batch, portable=True)
    assert (plan.widening is not None) is (plan.at_once > 0) is wanted
    assert portable.widening is None and not portable.at_once
    if plan.widening is None:
        assert plan.variant == portable.variant and torch.equal(plan.work, portable.work)
        return
    assert plan.config == HOPPER[spec.head_size]
    copied = plan.widening.tokens
    assert copied == (4672 if spec.sliding_window else sum(lens))
    assert 4 * copied * spec.num_kv_heads * spec.head_size <= widening.MOST_BYTES


def ran(
    monkeypatch: pytest.MonkeyPatch, spec: LayerSpec, queries: list[int], lens: list[int],
    query: torch.Tensor | None = None,
) -> tuple[Any, list[Any], list[dict[str, Any]], list[Any]]:  # fmt: skip
    """Run a step that brings its own keys; returns its plan, copies, launches, and what was merged."""
    backend, launched = pretended(monkeypatch, spec)
    copied: list[Any] = []
    monkeypatch.setattr(widening, "_copy", lambda *given: copied.append(given))
    monkeypatch.setattr(backend, "merger", lambda *given: launched.append({"merged": given}))
    form = backend.cache
    assert form is not None
    cache, batch = KVCache.allocate(form, 1), stepped(queries, lens)
    plan = backend.plan_rows(batch)
    dtype = torch.bfloat16 if spec.qkv_dtype == "auto" else torch.float8_e4m3fn
    if query is None:
        query = torch.zeros(sum(queries), spec.num_heads, 128, dtype=dtype)
    key = torch.zeros(sum(queries), spec.num_kv_heads, 128, dtype=dtype)
    sites: list[Any] = []
    monkeypatch.setattr(
        attention, "_site", lambda *given: lambda grid, tensors, *_: sites.append((given[0], tensors))
    )  # fmt: skip
    out = torch.empty(query.shape, dtype=torch.bfloat16)
    params = LayerParams(q_scale=3.0, k_scale=0.5, v_scale=0.25)
    backend.run(plan, Frame(query, key, key, cache, params, out, None))
    if copied:
        assert copied[0][1][:2] == (cache.key, cache.value)  # not the step's own, unrounded keys
    return plan, copied, launched, sites


@pytest.mark.parametrize(
    "changes", [{}, {"qkv_dtype": "fp8_e4m3"}, {"sliding_window": 1000}], ids=str
)
@pytest.mark.parametrize(
    ("queries", "lens"), [([2048] * 4, [2048] * 4), ([512] * 4, [4608] * 4), ([700], [9000])]
)
def test_what_is_launched(
    monkeypatch: pytest.MonkeyPatch, queries: list[int], lens: list[int], changes: dict[str, Any]
) -> None:
    """The copies, then attention to them by token; scales are factors of logits and outputs."""
    spec = E4M3.replace(**changes)
    plan, copied, launched, sites = ran(monkeypatch, spec, queries, lens)
    made = plan.widening
    window = spec.sliding_window or 0
    lows = [max(0, n - q - window + 1) // 128 * 128 if window else 0
            for q, n in zip(queries, lens, strict=True)]  # fmt: skip
    firsts = [0, *accumulate(n - low for n, low in zip(lens, lows, strict=True))]
    assert made.tokens == firsts[-1]
    ((grid, tensors, _, ints, free, constants, _),) = copied
    assert grid == (-(-made.tokens // 64), 8, 1) and constants == (128, 64, 16, window, None, None)
    assert tensors[7][: len(lens)].tolist() == firsts[:-1]
    origins = [first - low for first, low in zip(firsts, lows, strict=False)]
    assert tensors[8][: len(lens)].tolist() == origins
    assert ints == (16384, 1024, 128, 16384, 1024, 128, 1024, 128)
    assert free == (-(-max(lens) // 16), made.tokens, len(lens), (len(lens) - 1).bit_length())
    named, *merged = launched
    assert not sites and named["KEY_STARTS"] is tensors[8]
    assert named["K"].base is tensors[2] and named["V"].base is tensors[3]
    assert tensors[2].shape == (made.tokens, 8, 128) and tensors[2].dtype == torch.bfloat16
    assert named["K"].block_shape == [128, 128] and not named["PAGED"]
    assert (named["k_b"], named["k_row"], named["k_col"], named["WINDOW"]) == (0, 0, 128, window)
    assert named["Q"].dtype == torch.bfloat16 and (named["q_t"], named["q_h"]) == (4096, 128)
    q_scale = 1.0 if spec.qkv_dtype == "auto" else 3.0
    assert named["scale"] == spec.scale * 0.5 * q_scale
    assert named["v_scale"] == 0.25 and named["SPLIT"] is (plan.way == "pieces") is bool(merged)
    assert all(given["merged"][3] == 0.25 for given in merged)


def test_what_cannot_be_described_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable kernel has a plan of its own, over the cache."""
    shifted = torch.zeros(8192 * 4096 + 4, dtype=torch.bfloat16)[4:].view(8192, 32, 128)
    plan, copied, launched, sites = ran(monkeypatch, E4M3, [2048] * 4, [2048] * 4, shifted)
    assert plan.widening is not None and plan.portable.widening is None
    assert not copied and not any("K" in given for given in launched)
    ((kernel, tensors),) = sites
    assert kernel is attention.prefill_kernel and tensors[1].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("fp8_e4m3", "bfloat16"), ("fp8_e5m2", "bfloat16"), ("int8", "float16"), ("int8", "bfloat16")],
)
def test_compiled(stored: str, dtype: str) -> None:
    """Whole sectors are moved, 16 bytes a thread at a time, and no register lies in memory."""
    from ahead import compile_phase
    from machine_code import told, usage

    spec = E4M3.replace(kv_cache_dtype=stored, dtype=dtype, sliding_window=1000)
    kernel = compile_phase(spec, "sm_90", "paged pieces", own=True, kernel="widen_kernel")
    asm = told("nvdisasm", kernel.asm["cubin"], "-c", "-ndf")
    assert len(re.findall(r"LDG\.E\.128", asm)) == 8 and len(re.findall(r"STG\.E\.128", asm)) == 16
    assert usage(kernel.asm["cubin"])["STACK"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "dtype"), [("nvfp4", "bfloat16"), ("nvfp4", "float16"), ("mxfp4", "bfloat16")]
)
def test_rows_of_bytes_are_copied_without_memory_of_a_thread(stored: str, dtype: str) -> None:
    from ahead import compile_phase

    spec = E4M3.replace(kv_cache_dtype=stored, dtype=dtype)
    kernel = compile_phase(spec, "sm_90", "paged pieces", own=True, kernel="widen_kernel")
    assert kernel.metadata.num_warps == 4 and ".local" not in kernel.asm["ptx"]
