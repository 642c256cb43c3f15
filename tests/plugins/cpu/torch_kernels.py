"""Puts float64 formulas in place of torch's CUDA kernels, and has TORCH_SDPA call them on a CPU.

A pytest plugin: `-p torch_kernels`. The formulas are by the operators' signatures and by what
flash-attn's README says of a causal mask and a window (they are aligned to the last query and
key), and xFormers' CausalFromBottomRight.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from formulas import attend, in_window
from polyattn import Device
from polyattn_cpu import packed, sdpa
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

CALLS = {"flash": 0, "efficient": 0, "dense": 0}


def _sequence(
    query: Tensor, key: Tensor, value: Tensor, scale: float, left: int, right: int
) -> tuple[Tensor, Tensor]:
    """Return (queries, heads, size) and (heads, queries): FlashAttention's +inf where none is seen."""
    output, lse = attend(
        query, key, value, in_window(len(query), len(key), left, right), scale=scale
    )
    return output.to(query.dtype), lse.masked_fill(lse == -torch.inf, torch.inf).float()


def _spans(starts: Tensor) -> list[slice]:
    assert starts.dtype == torch.int32
    ends = starts.tolist()
    return [slice(*pair) for pair in pairwise(ends)]


def flash(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float,
    window_size_left: int, window_size_right: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    CALLS["flash"] += 1
    assert query.dtype == key.dtype == value.dtype and query.dtype.itemsize == 2
    assert query.shape[2] == value.shape[2] <= 256
    longest, sequences = int(cum_seq_q.diff().max()), len(cum_seq_q) - 1
    # Told of single tokens, it takes as many as sequences ("shape '[2, 1, 8, 8]' is invalid").
    assert max_q == (longest if len(query) >= sequences else max(2, longest))
    assert max_k == int(cum_seq_k.diff().max())
    assert cum_seq_q[-1] == len(query) and cum_seq_k[-1] == len(key) == len(value)
    right = 0 if is_causal else window_size_right
    parts = [
        _sequence(query[q], key[k], value[k], scale, window_size_left, right)
        for q, k in zip(_spans(cum_seq_q), _spans(cum_seq_k), strict=True)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts], 1)


def efficient(
    query: Tensor, key: Tensor, value: Tensor, bias: None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, custom_mask_type: int,
    compute_log_sumexp: bool, *, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    CALLS["efficient"] += 1
    assert query.shape[2] == key.shape[2] == value.shape[2] and len(query) == len(key) == 1
    spans = list(zip(_spans(cu_seqlens_q), _spans(cu_seqlens_k), strict=True))
    right = {0: -1, 2: 0}[custom_mask_type]
    padded = -(-max_seqlen_q // 32) * 32
    lse = torch.full((len(spans), query.shape[2], padded), torch.inf)
    parts = []
    for row, (q, k) in enumerate(spans):
        output, own = _sequence(query[0, q], key[0, k], value[0, k], scale, -1, right)
        lse[row, :, : own.shape[1]] = own
        assert not (own == torch.inf).any(), "a query that sees no key divides by 0"
        parts.append(output)
    return torch.cat(parts)[None], lse


def dense(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float, enable_gqa: bool
) -> Tensor:
    """Check what keeps torch's public call from its slow kernels, and call it."""
    CALLS["dense"] += 1
    assert query.dim() == 4 and (query.shape[1] > key.shape[1]) is enable_gqa
    assert not is_causal or query.shape[2] == key.shape[2], "aligned to the first query and key"
    assert not enable_gqa or (query.dtype.itemsize == 2 and query.shape[3] <= 256)
    return scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def pytest_configure() -> None:
    """Put them in place: as a plugin only, so that a test which imports a formula changes nothing."""
    packed.FLASH, packed.EFFICIENT, packed.DENSE = flash, efficient, dense
    h100 = Device("cuda", "sm_90")
    sdpa.packs = lambda spec, device: packed.packs(spec, h100)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    calls = ", ".join(f"{name} {count}" for name, count in CALLS.items())
    terminalreporter.write_line(f"stand-in calls: {calls}")
