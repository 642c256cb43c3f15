"""`F.scaled_dot_product_attention` on polyattn, as a function and inside a mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from polyattn import PolyattnError
from polyattn.host import asks_gradients, compiling, sdpa, sdpa_operator
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from polyattn_torch.ledger import LEDGER


class Unserved(PolyattnError):
    """A call that polyattn leaves to torch's own function."""


class SdpaMode(TorchFunctionMode):
    """Serves `torch.nn.functional.scaled_dot_product_attention` inside a `with`. Forward only.

    A call that needs gradients, or that polyattn can't serve, runs torch's own kernels. The report
    counts and names it.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            if func is F.multi_head_attention_forward:  # torch leaves the mode for all of it
                LEDGER.count_fallback(
                    "multi_head_attention_forward",
                    "a mode can't see inside; activate_flash_attention_impl('polyattn') does",
                )
            return func(*args, **kwargs)
        try:
            return scaled_dot_product_attention(*args, **kwargs)
        except PolyattnError as error:
            if not compiling():
                LEDGER.count_fallback("", str(error))
            return func(*args, **kwargs)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend as torch's function of this name does, (batch, heads, seqlen, size), or (…, seqlen, size).

    `is_causal` is aligned to the top left. Masks must show each query one interval of keys, the same for
    all heads. Forward only. Raises `PolyattnError` for a call that only torch's own function serves.
    """
    if dropout_p:
        raise Unserved(f"dropout_p={dropout_p}")
    if asks_gradients(query, key, value, attn_mask):
        raise Unserved(
            "gradients are asked for; activate_flash_attention_impl('polyattn') gives them"
        )
    if attn_mask is not None and is_causal:
        raise Unserved("attn_mask and is_causal together")
    device = "cpu" if query.is_cpu else "cuda" if query.is_cuda else query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (
            t.to(dtype) if t.is_floating_point() else t for t in (query, key, value)
        )
    dims = query.dim()
    if dims != 4:
        leading = query.shape[:-2]
        if not key.dim() == value.dim() == dims in (2, 3):
            raise Unserved(f"tensors of {dims}, {key.dim()} and {value.dim()} sizes")
        query, key, value = (
            t[None, None] if t.dim() == 2 else t[:, None] for t in (query, key, value)
        )
    elif not enable_gqa and query.shape[1] != key.shape[1]:
        raise Unserved("other KV heads than heads without enable_gqa")
    mask = None if attn_mask is None else _four_sizes(attn_mask, dims - 2, key.shape[2])
    if compiling():
        out: Tensor = sdpa_operator(
            query, key, value, mask, None, is_causal, scale, None, "torch"
        ).transpose(1, 2)
    elif torch._C._functorch.peek_interpreter_stack() is not None:
        raise Unserved("vmap, or another transform of torch.func")
    else:
        out, _ = sdpa(
            query, key, value, mask, is_causal=is_causal, scale=scale, heads_out=True,
            count=LEDGER.count,
        )  # fmt: skip
    return out if dims == 4 else out.reshape(*leading, *out.shape[2:])


def _four_sizes(mask: Tensor, leading: int, keys: int) -> Tensor:
    """View a mask as (rows or 1, heads or 1, queries or 1, keys); the same view until it changes."""
    if mask.dim() == 4 and mask.shape[3] == keys:
        return mask
    known = getattr(mask, "_polyattn_view", None)
    if known is not None and known[0] == (leading, keys):
        return known[1]  # type: ignore[no-any-return]
    if mask.dim() < 2:
        raise Unserved(f"a mask of shape {tuple(mask.shape)}")
    # Caching a view of the mask on the mask would create a reference cycle that nothing collects.
    view = mask.detach()
    if mask.dim() == 3:  # of (batch, seqlen, size) tensors the rows, else the heads
        view = view[:, None] if leading == 1 else view[None]
    view = view[(None,) * (4 - view.dim())]
    view = view.expand(*view.shape[:3], keys)
    mask._polyattn_view = ((leading, keys), view)  # type: ignore[attr-defined]
    return view
