"""A fake of xFormers' CUTLASS operator: one KV head a query head, LSE (sequences, heads, padded)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from polyattn import LayerSpec
from polyattn.families.attention import reference
from polyattn.kernel import LayerParams
from polyattn_fakes import bind
from torch import Tensor


class FwOp:
    """The forward operator."""

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Attend block by block; what lies behind a block's queries in the LSE is NaN."""
        a = bind("xformers", "FwOp.apply", args, kwargs)
        given, mask = a["inp"], a["inp"].attn_bias
        query, key, value = given.query[0], given.key[0], given.value[0]
        assert query.shape[1] == key.shape[1] == value.shape[1] and query.is_contiguous()
        assert (len(query), len(key)) == (sum(mask.queries), sum(mask.keys))
        spec = LayerSpec(
            num_heads=query.shape[1], head_size=query.shape[2], v_head_size=value.shape[2],
            scale=given.scale, causal=mask.causal, sliding_window=mask.window, needs_lse=True,
        )  # fmt: skip
        out = torch.full((len(query), *value.shape[1:]), torch.nan, dtype=torch.float64)
        width = -(-max(mask.queries) // 32) * 32
        lse = torch.full((len(mask.queries), query.shape[1], width), torch.nan)
        first = start = 0
        for index, (queries, keys) in enumerate(zip(mask.queries, mask.keys, strict=True)):
            rows, columns = slice(first, first + queries), slice(start, start + keys)
            first, start = rows.stop, columns.stop
            if queries:
                out[rows], found = reference.attend(
                    spec, query[rows], key[columns].to(torch.float64),
                    value[columns].to(torch.float64), LayerParams(),
                )  # fmt: skip
                lse[index, :, :queries] = found.T.float()
        return out.to(query.dtype)[None], SimpleNamespace(lse=lse)
