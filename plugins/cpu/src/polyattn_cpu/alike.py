"""Sequences of one length without a cache, a dense batch, in one call of torch's kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from polyattn.kernel import Batch, Frame, LayerSpec, with_sinks
from torch import Tensor


@dataclass(frozen=True)
class Alike:
    """`rows` sequences of as many queries and as many keys, whose keys lie `apart` tokens apart."""

    rows: int
    queries: int
    keys: int
    first: int
    apart: int

    @classmethod
    def of(cls, spec: LayerSpec, batch: Batch) -> Alike | None:
        """Return the batch's form where one call serves it; else None."""
        plain = not (spec.alibi or spec.chunk_size or spec.sliding_window)
        if spec.cached or not plain or spec.window_right is not None or not batch.num_tokens:
            return None
        queries, keys, starts = batch.query_lens[0], batch.lens[0], batch.key_starts
        apart = starts[1] - starts[0] if len(starts) > 1 else keys
        # The kernel's causal mask is aligned to the top left.
        aligned = not spec.causal or queries in (1, keys)
        regular = (
            set(batch.query_lens) == {queries}
            and set(batch.lens) == {keys}
            and apart >= 0
            and starts == [starts[0] + row * apart for row in range(len(starts))]
        )
        if not (regular and aligned and queries and keys):
            return None
        return cls(len(starts), queries, keys, starts[0], apart)

    def run(self, spec: LayerSpec, frame: Frame) -> None:
        """Attend, as `AttentionBackend.run`."""
        query, key, value, out, lse = frame.query, frame.key, frame.value, frame.out, frame.lse
        assert key is not None and value is not None
        heads = spec.num_heads
        if self.queries == 1:  # a KV head's queries read its keys together
            heads, count = spec.num_kv_heads, spec.gqa_ratio
            rows = query.reshape(self.rows, heads, count, spec.head_size)
        else:
            count = self.queries
            rows = query.view(self.rows, count, heads, spec.head_size).transpose(1, 2)
        causal = spec.causal and self.queries > 1
        output, own_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            rows, self._rows(key), self._rows(value), 0.0, causal, scale=spec.scale
        )
        if self.queries == 1:
            output, own_lse = output.reshape(out.shape), own_lse.reshape(self.rows, -1)
        else:
            output, own_lse = output.transpose(1, 2).reshape(out.shape), own_lse.transpose(1, 2)
            own_lse = own_lse.reshape(-1, heads)
        if frame.params.sinks is not None:
            output, own_lse = with_sinks(output, own_lse, frame.params.sinks)
        frame.set_out(output)
        if lse is not None:
            lse.copy_(own_lse)

    def _rows(self, tensor: Tensor) -> Tensor:
        """View the keys or values as (rows, KV heads, keys, size)."""
        token, head, element = tensor.stride()
        return tensor.as_strided(
            (self.rows, tensor.shape[1], self.keys, tensor.shape[2]),
            (self.apart * token, head, token, element),
            tensor.storage_offset() + self.first * token,
        )
