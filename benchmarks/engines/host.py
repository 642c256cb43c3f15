"""What does a call on tiny tensors cost the host? Each way in, each backend, and where the time goes."""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from engines import DEVICE

ROWS, TOKENS, HEADS, SIZE = 8, 16, 8, 128
BACKENDS = (
    (None, "TRITON_ATTN", "FLASH_ATTN_V3", "TORCH_SDPA")
    if DEVICE == "cuda"
    else (None, "NATIVE_ATTN", "TORCH_SDPA")
)
Calls = dict[str, Callable[[], object]]
Row = dict[str, Any]


def host_us(call: Callable[[], object], calls: int = 100, rounds: int = 20) -> float:
    """Return the least host time of a call in microseconds: nothing waits for the device."""
    best = float("inf")
    for _ in range(rounds):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - start)
    return best / calls * 1e6


def tensors() -> list[Tensor]:
    """Return a query, keys and values, bf16 (rows, tokens, heads, size)."""
    return [
        torch.randn(ROWS, TOKENS, HEADS, SIZE, device=DEVICE, dtype=torch.bfloat16)
        for _ in range(3)
    ]


@torch.no_grad()
def ways() -> Iterator[Row]:
    """Each way in, and FlashAttention-3's operator itself, over torch's own function."""
    import polyattn
    from polyattn_flash_attn import flash_attn_2 as fa
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    q, k, v = tensors()
    first = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    cu = torch.arange(ROWS + 1, dtype=torch.int32, device=DEVICE) * TOKENS
    pages = 8
    cache = [
        torch.randn(ROWS * pages, 256, HEADS, SIZE, device=DEVICE, dtype=torch.bfloat16)
        for _ in range(2)
    ]
    table = torch.arange(ROWS * pages, dtype=torch.int32, device=DEVICE).view(ROWS, pages)
    lens = torch.full((ROWS,), 300, dtype=torch.int32, device=DEVICE)
    one = q[:, :1].contiguous()
    calls: Calls = {
        "torch sdpa": lambda: sdpa(*first, is_causal=True),
        "polyattn.attention": lambda: polyattn.attention(q, k, v, causal=True),
        "flash_attn_func": lambda: fa.flash_attn_func(q, k, v, causal=True),
        "flash_attn_varlen_func": lambda: fa.flash_attn_varlen_func(
            *flat, cu, cu, TOKENS, TOKENS, causal=True
        ),
        "flash_attn_with_kvcache": lambda: fa.flash_attn_with_kvcache(
            one, *cache, cache_seqlens=lens, block_table=table, causal=True
        ),
    } | bridges(first, q.transpose(1, 2))  # fmt: skip
    try:
        from engines import fa3

        fa3.load()
        calls["FlashAttention-3 varlen"] = lambda: fa3.flash_attn_varlen_func(
            *flat, TOKENS, cu, TOKENS, cu, causal=True
        )
        calls["FlashAttention-3 dense"] = lambda: fa3.flash_attn_func(q, k, v, causal=True)
        calls["FlashAttention-3 with_kvcache"] = lambda: fa3.flash_attn_with_kvcache(
            one, *cache, lens, table, causal=True
        )
    except Exception as error:
        print(f"no FlashAttention-3 here: {error}", flush=True)
    yield from over(calls)


def bridges(first: list[Tensor], turned: Tensor) -> Calls:
    """Return the ways in of the integrations whose hosts are here, for (rows, heads, tokens, size).

    `first`: by heads in memory, as GLM, Phi-3 and gpt-oss give their queries to transformers; `turned`:
    a query by tokens, as Llama, Qwen3, Mistral and Gemma-2 do.
    """
    found: Calls = {}
    try:
        import polyattn_transformers  # noqa: F401  (registers the name)
        from transformers import AttentionInterface

        attend, module = AttentionInterface()["polyattn"], torch.nn.Module().eval()
        found["transformers, as Llama's"] = lambda: attend(
            module, turned, *first[1:], None, is_causal=True
        )
        found["transformers, by heads"] = lambda: attend(module, *first, None, is_causal=True)
    except ImportError as error:
        print(f"no transformers here: {error}", flush=True)
    try:
        from polyattn_torch import scaled_dot_product_attention as served

        found["torch, the function"] = lambda: served(*first, is_causal=True)
    except ImportError as error:  # a torch without the registration
        print(f"no polyattn_torch here: {error}", flush=True)
    return found


def over(calls: Calls) -> Iterator[Row]:
    """Yield each call's host time, and over that of the first."""
    base = None
    for name, call in calls.items():
        try:
            call()
            microseconds = host_us(call)
        except Exception as error:
            yield {"what": name, "failed": f"{type(error).__name__}: {error}"[:200]}
            continue
        base = base or microseconds
        yield {"what": name, "host us": microseconds, "over": microseconds / base}


@torch.no_grad()
def backends() -> Iterator[Row]:
    """`polyattn.attention` by each backend: the whole call, the kernel's own part, and core's."""
    import polyattn
    from polyattn.calls.bound import BoundCall
    from polyattn.calls.memo import memo
    from polyattn.kernel import LayerParams

    q, k, v = tensors()
    for name, causal in product(BACKENDS, (True, False)):

        def call() -> object:
            return polyattn.attention(q, k, v, causal=causal, backend=name)  # noqa: B023

        row: Row = {"what": f"by {name or 'whom it chooses'}, {'causal' if causal else 'all keys'}"}
        try:
            memo.clear()
            call()
            row["whole us"] = host_us(call)
            (way,) = (call for call in memo.values() if isinstance(call, BoundCall))
            (only,) = way.step.calls
            row |= {"by": only.backend.name, "addressed": way.addressed is not None}
            run, addressed = way.run, way.addressed
            way.run = way.addressed = lambda *given: None
            if addressed is None:
                way.addressed = None
            row["core us"] = host_us(call)
            way.run, way.addressed = run, addressed
            flat = [t.flatten(0, 1) for t in (q, k, v)]
            out, plain = torch.empty_like(flat[0]), LayerParams()
            if addressed is not None:
                row["addressed us"] = host_us(lambda: addressed(*flat, plain, out, None))  # noqa: B023
            row["run us"] = host_us(lambda: run(*flat, None, plain, out, None))  # noqa: B023
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:200]
        yield row


@torch.no_grad()
def stages() -> Iterator[Row]:
    """What small things cost here, of which a call is made up."""
    from polyattn.calls.memo import place_of
    from polyattn.settings import current

    q, k, _ = tensors()
    device, flat = q.device, q.flatten(0, 1)
    sizes, strides = flat.shape, flat.stride()
    calls: Calls = {
        "an empty call": lambda: None,
        "shape and stride": lambda: (q.shape, q.stride(), k.shape, k.stride()),
        "device and dtype": lambda: (q.device, q.dtype, k.device, k.dtype),
        "new_empty": lambda: q.new_empty(sizes),
        "torch.empty": lambda: torch.empty(sizes, dtype=torch.bfloat16, device=device),
        "empty_like": lambda: torch.empty_like(q),
        "as_strided": lambda: q.as_strided(sizes, strides),
        "view": lambda: flat.view(q.shape),
        "key[:n]": lambda: flat[:100],
        "data_ptr": flat.data_ptr,
        "settings.current": current,
        "place_of": lambda: place_of(device),
        "autocast?": lambda: torch.is_autocast_enabled(device.type),
    }
    if DEVICE == "cuda":
        calls |= {
            "current_stream": lambda: torch.cuda.current_stream(device).cuda_stream,
            "raw stream": lambda: torch._C._cuda_getCurrentRawStream(0),
            "capturing?": torch.cuda.is_current_stream_capturing,
        } | launches()
    yield from over(calls)


def launches() -> Calls:
    """Return launches of a Triton kernel that does nothing: Triton's own way, and `launch.Site`'s."""
    from polyattn_triton.launch import Site

    from engines.kernels import nothing_kernel

    x = torch.zeros(64, device=DEVICE)
    site = Site(nothing_kernel, (2, 3), (), {})
    return {
        "Triton's launch": lambda: nothing_kernel[(1, 1, 1)](x, x, x, x, 1.0, 2, 3),
        "a site's launch": lambda: site((1, 1, 1), (x, x, x, x), (1.0,), ()),
    }


@torch.no_grad()
def profiled(calls: int = 2000, lines: int = 22) -> None:
    """Print which functions a dense and a packed call's host time goes to (by Python's profiler)."""
    import polyattn
    from polyattn_flash_attn import flash_attn_2 as fa

    q, k, v = tensors()
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    cu = torch.arange(ROWS + 1, dtype=torch.int32, device=DEVICE) * TOKENS
    ways: Calls = {
        "polyattn.attention": lambda: polyattn.attention(q, k, v, causal=True),
        "flash_attn_varlen_func": lambda: fa.flash_attn_varlen_func(
            *flat, cu, cu, TOKENS, TOKENS, causal=True
        ),
    }  # fmt: skip
    for name, call in ways.items():
        call()
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(calls):
            call()
        profile.disable()
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(lines)
        print(f"-- {name}, {calls} calls profiled\n{text.getvalue()[-3500:]}", flush=True)
