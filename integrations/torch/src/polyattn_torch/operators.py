"""torch's flash operators on polyattn, registered as torch documents: its own autograd formulas stay.

The forward gives the output and the LSE; torch's backward reads both. `activate_flash_attention_impl`
registers, `restore_flash_attention_impl` takes it back. On the CPU that also makes torch's
`varlen_attn` run, which has no kernel there.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from polyattn import PolyattnError
from polyattn.host import (
    CallOptions,
    PackedKeys,
    attend_packed,
    flash_window,
    lens_between,
    packed_gradients,
    sdpa,
    values_of,
)
from torch import Tensor
from torch.library import Library, get_kernel

from polyattn_torch.ledger import LEDGER

_CPU = "_scaled_dot_product_flash_attention_for_cpu"
_CUDA = "_scaled_dot_product_flash_attention"
_PACKED = "_flash_attention_forward"
_inside = threading.local()


class Operators:
    """The registered operators, which torch's registry holds until `remove()`."""

    def __init__(self) -> None:
        self.original = {"CPU": get_kernel(f"aten::{_CPU}", "CPU")}
        self.library = Library("aten", "IMPL")
        with warnings.catch_warnings():  # torch warns of overriding, which is on purpose
            warnings.simplefilter("ignore")
            self._register()

    def _register(self) -> None:
        library = self.library
        library.impl(_CPU, self._cpu, "CPU", with_keyset=True, allow_override=True)
        devices = ["CPU"]
        if torch.cuda.is_available():
            devices.append("CUDA")
            self.original["CUDA"] = get_kernel(f"aten::{_CUDA}", "CUDA")
            library.impl(_CUDA, self._cuda, "CUDA", with_keyset=True, allow_override=True)
            self.original["packed"] = get_kernel(f"aten::{_PACKED}", "CUDA")
            library.impl(_PACKED, self._packed, "CUDA", with_keyset=True, allow_override=True)
        library.impl(_PACKED, varlen_forward, "CPU", allow_override=True)
        for device in devices:
            library.impl(
                f"{_PACKED}_no_dropout_inplace", varlen_forward_out, device, allow_override=True
            )
        library.impl("_flash_attention_backward", varlen_backward, "CPU", allow_override=True)

    def remove(self) -> None:
        """Give the operators back to torch's kernels."""
        self.library._destroy()

    def _cpu(
        self, keys: Any, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0,
        is_causal: bool = False, *, attn_mask: Tensor | None = None, scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        result = _served(query, key, value, dropout_p, is_causal, attn_mask, scale)
        if result is not None:
            return result
        return self.original["CPU"].call_boxed(  # type: ignore[no-any-return]
            keys, query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )

    def _cuda(
        self, keys: Any, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0,
        is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        result = None
        if not return_debug_mask:
            result = _served(query, key, value, dropout_p, is_causal, None, scale)
        if result is not None:
            return dense_results(query, key, *result)
        return self.original["CUDA"].call_boxed(  # type: ignore[no-any-return]
            keys, query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale
        )

    def _packed(self, keys: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        if getattr(_inside, "call", False):
            return self.original["packed"].call_boxed(keys, *args, **kwargs)  # type: ignore[no-any-return]
        return varlen_forward(*args, **kwargs)


@contextmanager
def _within() -> Iterator[None]:
    """Use torch's own operators within a call: a backend may call them itself, as TORCH_SDPA does."""
    _inside.call = True
    try:
        yield
    finally:
        _inside.call = False


def _served(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool,
    mask: Tensor | None, scale: float | None,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Return (batch, heads, queries, size) and the LSE (batch, heads, queries), or None for torch."""
    if getattr(_inside, "call", False):
        return None
    try:
        if dropout_p:
            raise PolyattnError(f"dropout_p={dropout_p}")
        if mask is not None and mask.dim() == 2:
            mask = mask[None, None]
        with torch.no_grad(), _within():
            out, lse = sdpa(
                query, key, value, mask, is_causal=is_causal, scale=scale, needs_lse=True,
                heads_out=True, count=LEDGER.count,
            )  # fmt: skip
    except PolyattnError as error:
        LEDGER.count_fallback("", str(error))
        return None
    assert lse is not None
    if mask is not None:  # torch's backward reads 0 where a query sees nothing
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
    return out, lse


def dense_results(query: Tensor, key: Tensor, out: Tensor, lse: Tensor) -> tuple[Any, ...]:
    """Return what `aten::_scaled_dot_product_flash_attention` returns: no dropout, so no random state."""
    nothing = query.new_empty(0)
    return (
        out, lse.contiguous(), None, None, query.shape[2], key.shape[2],
        torch.zeros(2, dtype=torch.uint64, device=query.device),
        torch.zeros((), dtype=torch.uint64, device=query.device), nothing,
    )  # fmt: skip


def varlen_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *,
    scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """`aten::_flash_attention_forward`: packed sequences, or dense (batch, seqlen, heads, size).

    `num_splits`: 1 asks for the same bits in any batch, as torch documents it. Other numbers have no
    effect here.
    """
    if dropout_p or return_debug_mask:
        raise PolyattnError(
            f"dropout_p={dropout_p}, return_debug_mask={return_debug_mask}: leave both out"
        )
    shape = query.shape
    if cum_seq_q is None:
        if block_table is not None or seqused_k is not None:
            raise PolyattnError("block_table and seqused_k go with cum_seq_q, for packed sequences")
        lens: Sequence[int] = (shape[1],) * shape[0]
        key_lens: Sequence[int] = (key.shape[1],) * shape[0]
        query, key, value = (t.flatten(0, 1) for t in (query, key, value))
        starts = None
    else:
        lens = lens_between(cum_seq_q)
        starts = None if cum_seq_k is None else values_of(cum_seq_k)[:-1]
        if seqused_k is not None:
            key_lens = values_of(seqused_k)
        elif cum_seq_k is not None:
            key_lens = lens_between(cum_seq_k, gap=True)
        else:
            raise PolyattnError("cum_seq_k is None; pass it, or seqused_k with a block_table")
    options = _options(is_causal, scale, window_size_left, window_size_right)
    options = options._replace(batch_invariant=num_splits == 1)
    keys = PackedKeys(
        key, value, key_lens, None if block_table is not None else starts, block_table
    )
    with torch.no_grad(), _within():
        out, lse = attend_packed(query, lens, keys, options, alibi_slopes=alibi_slopes)
    assert lse is not None
    # flash-attn's backward reads this for a query without visible keys.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    if cum_seq_q is None:
        out = out.view(*shape[:3], out.shape[2])
        lse_out = lse.view(*shape[:3]).transpose(1, 2).contiguous()
    else:
        lse_out = lse.T.contiguous()
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return out, lse_out, state, state.new_zeros(()), query.new_empty(0)


def varlen_forward_out(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`aten::_flash_attention_forward_no_dropout_inplace`: writes `out`, returns the LSE."""
    result, lse = varlen_forward(*args, **kwargs)[:2]
    out.copy_(result)
    return lse  # type: ignore[no-any-return]


def varlen_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    rng_state: Tensor, unused: Tensor, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`aten::_flash_attention_backward` on the CPU, where torch has none: the formula's gradients."""
    options = _options(is_causal, scale, window_size_left, window_size_right)
    keys = PackedKeys(key, value, lens_between(cum_seq_k))
    return packed_gradients(grad_out, query, lens_between(cum_seq_q), keys, options)


def _options(causal: bool, scale: float | None, left: int | None, right: int | None) -> CallOptions:
    sides = (-1 if side is None else side for side in (left, right))
    causal, before, after = flash_window(causal, *sides)
    return CallOptions(causal, scale, before, after, needs_lse=True)
