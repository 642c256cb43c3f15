"""`ContextAttention`: one layer whose keys lie on several ranks."""

from __future__ import annotations

from typing import Any

import torch
from polyattn import Attention, KVCache, LatentAttention
from polyattn.errors import BatchError, SpecError
from polyattn.host import Frame, capturing, check_on_device, own_precision, refuse_gradients
from torch import Tensor, nn

from polyattn_context_parallel.group import ContextGroup, ContextPlan


class ContextAttention(nn.Module):
    """An `Attention` or `LatentAttention` over the ranks of a `ContextGroup`. Forward only.

    `layer` belongs to `shared.group`; its sinks, slopes, scales and weights apply. Pass queries and keys
    that are rotated already: a rank knows only its own batch's positions. Raises `SpecError`.
    """

    def __init__(self, shared: ContextGroup, layer: Attention | LatentAttention):
        super().__init__()
        if layer.group is not shared.group:
            raise SpecError(
                "the layer has another LayerGroup than the ContextGroup; build both with the same one"
            )
        params = layer.params
        if params.rotate or params.qkv_bias is not None or params.q_norm is not None:
            raise SpecError(
                "a layer over several ranks takes queries and keys biased, normed and rotated already; "
                "build it with rotate=False and without qkv_bias"
            )
        if (
            shared.keys == "heads"
            and getattr(layer, "default_slopes", False)
            and shared.context.size > 1
        ):
            raise SpecError(
                f"alibi_slopes is missing: the default ones are of {shared.spec.num_heads} heads in all, "
                "not of a rank's share; with keys='heads' pass alibi_slopes of own_heads(…)"
            )
        self.shared, self.layer, self.spec = shared, layer, shared.spec

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache,
        plan: ContextPlan,
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Store this rank's keys and attend. Every rank calls it at the same time.

        `query`, `key`, `value`: (tokens, heads, size), of an MLA layer query, latent and rope key as
        it takes them; of all the step's tokens or this rank's own, as the plan says; `cache`: this
        rank's. Returns the output of the same tokens, and the LSE where the spec has `needs_lse`;
        with `merge="all_to_all"` of this rank's heads alone. Raises `BatchError`, `CacheError`,
        `ParallelError`; after any of them the ranks are at different places, and the
        `ContextParallel` refuses to go on.
        """
        context = self.shared.context
        context.check()
        try:
            frame = self._frame(query, key, value, cache, plan)
            with own_precision(self.shared.group.device_type):
                plan.run(frame)
        except Exception as error:
            context.break_off(error)
            raise
        return frame.out if frame.lse is None else (frame.out, frame.lse)

    def _frame(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, cache: KVCache, plan: Any
    ) -> Frame:
        """Return the arguments as a frame for the step's ops. Raises `BatchError`, `CacheError`."""
        if not isinstance(plan, ContextPlan) or plan.shared is not self.shared:
            raise BatchError(f"plan={plan!r} must be a plan of this layer's ContextGroup")
        if not isinstance(cache, KVCache):
            raise BatchError(f"cache is a {type(cache).__name__}; it must be a KVCache")
        self.shared.group.check_format(cache.format)
        if (key is None) != (value is None):
            raise BatchError("key and value come together, or both are None")
        self.layer.refuse_keys(key)
        layer, params, shared = self.layer, self.layer.params, self.shared
        width, size = layer.spec.v_head_size, layer.spec.head_size
        if isinstance(layer, LatentAttention):
            params.weights = layer.weights
            if params.weights is None:  # absorbed by the caller: queries and outputs are of latents
                width, size = cache.format.v_head_size, cache.format.head_size
        shapes = shared.input_shapes(size, key)
        for (name, shape), tensor in zip(shapes.items(), (query, key, value), strict=True):
            if tensor is None:
                continue
            if len(tensor) != plan.tokens:
                raise BatchError(
                    f"{name} has {len(tensor)} rows on rank {shared.context.rank}; the plan has "
                    f"{plan.tokens} tokens here"
                )
            if tensor.shape[1:] != shape or tensor.dtype is not shared.dtype:
                raise BatchError(
                    f"{name} is {tuple(tensor.shape)} of {tensor.dtype}; it must be "
                    f"{(plan.tokens, *shape)} of {shared.dtype}"
                )
            if tensor.device != cache.key.device:
                raise BatchError(f"{name} is on {tensor.device}, the cache on {cache.key.device}")
        refuse_gradients(query=query, key=key, value=value)
        if layer.checks and not capturing(query):
            check_on_device(plan.batch, cache.num_blocks, self.shared.block_size)
        if key is not None and value is not None:
            if self.spec.latent is not None:
                key = torch.cat([key, value], dim=1)[:, None]
                value = key[..., : cache.format.v_head_size]
            else:
                key, value = key.contiguous(), value.contiguous()
        heads = query.shape[1] // (self.shared.context.size if plan.by_heads else 1)
        out = query.new_empty(len(query), heads, width)
        lse = None
        if self.spec.needs_lse:
            lse = query.new_empty(out.shape[:2], dtype=torch.float32)
        return Frame(query.contiguous(), key, value, cache, params, out, lse)

    def extra_repr(self) -> str:
        """Describe the layer in `print(model)`."""
        return f"{self.shared!r}"
