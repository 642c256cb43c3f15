"""What does an engine hold? `ContextAttention`: one layer whose keys lie on several ranks."""

from __future__ import annotations

from typing import Any

import torch
from polyattn import KVCache
from polyattn.errors import BatchError, SpecError
from polyattn.host import Rows, capturing, check_on_device, own_precision, refuse_gradients
from torch import Tensor, nn

from polyattn_context_parallel.group import ContextGroup, ContextPlan
from polyattn_context_parallel.step import Found, Layer, width_of


class ContextAttention(nn.Module):
    """An `Attention` or `LatentAttention` over the ranks of a `ContextGroup`. Forward only.

    `layer`: of `shared.group`; its sinks, slopes, scales and weights count, and it doesn't rotate:
    queries and keys come rotated, since every rank knows their positions and none the others'
    batches. Raises `SpecError`.
    """

    def __init__(self, shared: ContextGroup, layer: Layer):
        super().__init__()
        if layer.group is not shared.group:
            raise SpecError(
                "the layer has another LayerGroup than the ContextGroup; build both with the same one"
            )
        if layer.params.rotate or layer.params.qkv_bias is not None:
            raise SpecError(
                "a layer over several ranks takes queries and keys that are biased and rotated already; "
                "build it with rotate=False and without qkv_bias"
            )
        self.shared, self.layer, self.spec = shared, layer, shared.spec

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache,
        plan: ContextPlan,
    ) -> Found | Tensor:
        """Store what falls to this rank and attend, on every rank at the same time.

        `query`, `key`, `value`: as the layer takes them (an MLA layer's are query, latent and rope
        key), of all the step's tokens or this rank's own, as the plan says; `cache`: this rank's.
        Returns the output of the same tokens, and the LSE where the spec has `needs_lse`; with
        `merge="all_to_all"` of this rank's heads alone. Raises `BatchError`, `CacheError`,
        `ParallelError`; after any of them the ranks are at different places, and the
        `ContextParallel` refuses to go on.
        """
        context = self.shared.context
        context.check()
        try:
            self._check(query, key, value, cache, plan)
            with own_precision(self.shared.group.device_type):
                out, lse = self._run(query, key, value, cache, plan)
        except Exception as error:
            context.break_off(error)
            raise
        return (out, lse) if self.spec.needs_lse else out

    def _check(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, cache: KVCache, plan: Any
    ) -> None:
        if not isinstance(plan, ContextPlan) or plan.group is not self.shared:
            raise BatchError(f"plan={plan!r} must be a plan of this layer's ContextGroup")
        if not isinstance(cache, KVCache):
            raise BatchError(f"cache is a {type(cache).__name__}; it must be a KVCache")
        self.shared.group.check_format(cache.format)
        if (key is None) != (value is None):
            raise BatchError("key and value come together, or both are None")
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor is not None and len(tensor) != plan.tokens:
                raise BatchError(
                    f"{name} has {len(tensor)} rows on rank {self.shared.context.rank}; the plan has "
                    f"{plan.tokens} tokens here"
                )
            if tensor is not None and tensor.device != cache.key.device:
                raise BatchError(f"{name} is on {tensor.device}, the cache on {cache.key.device}")
        refuse_gradients(query=query, key=key, value=value)
        if self.layer.checks and not capturing(query):
            check_on_device(plan.batch, cache.num_blocks, self.shared.block_size)

    def _run(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, cache: KVCache, plan: Any
    ) -> Found:
        layer, results = self.layer, list[tuple[Rows, Found]]()
        for rows, step in plan.parts:
            tensors = (_rows(query, rows), _rows(key, rows), _rows(value, rows))
            results.append((rows, step.run(layer, *tensors, cache)))
        if len(results) == 1 and results[0][0] is None:
            return results[0][1]
        out, lse = self._empty(query, cache)
        for rows, (some, some_lse) in results:
            at = slice(None) if rows is None else rows
            assert some_lse is not None, "only a step by heads does without"
            out[at], lse[at] = some, some_lse
        return out, lse

    def _empty(self, query: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Return room for the outputs of a step's parts."""
        shared, heads = self.shared, query.shape[1]
        if shared.merge == "all_to_all":
            heads //= shared.context.size
        out = query.new_zeros(len(query), heads, width_of(self.layer, cache))
        return out, torch.full(out.shape[:2], -torch.inf, device=out.device)

    def extra_repr(self) -> str:
        """Describe the layer in `print(model)`."""
        return f"{self.shared!r}"


def _rows(tensor: Tensor | None, rows: Rows) -> Tensor | None:
    return tensor if tensor is None or rows is None else tensor[rows]
