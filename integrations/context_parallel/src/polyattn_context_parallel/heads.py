"""How is a step shared out by heads? Ranks swap tokens for heads, attend, and swap back (Ulysses).

Every rank holds all keys of its own heads, so that what it computes is an ordinary step of a layer
with fewer heads, and its cache an ordinary cache (DeepSpeed-Ulysses, arXiv 2309.14509). Where there
are fewer KV heads than ranks, neighbours hold the same one. An MLA layer's latents, which all heads
share, go to all.
"""

from __future__ import annotations

from typing import Any

import torch
from polyattn import Batch, KVCache, LayerGroup, LayerSpec
from polyattn.errors import SpecError
from torch import Tensor

from polyattn_context_parallel.ranks import ContextParallel
from polyattn_context_parallel.shards import Zigzag
from polyattn_context_parallel.step import ContextStep, Found, Layer, raw_bytes


def heads_of_rank(spec: LayerSpec, size: int) -> LayerSpec:
    """Return the layer that each of `size` ranks computes of `spec`: its share of the heads.

    Raises `SpecError` where heads can't be shared out evenly.
    """
    kv = 1 if spec.latent else spec.num_kv_heads
    even = spec.num_heads % size == 0 and (kv % size == 0 or size % kv == 0)
    if not even:
        raise SpecError(
            f"num_heads={spec.num_heads}, num_kv_heads={spec.num_kv_heads} can't be sharded over "
            f"{size} ranks: num_heads must be a multiple, num_kv_heads a multiple or a divisor; "
            "shard keys by block instead (keys='blocks')"
        )
    heads = spec.num_heads // size
    return spec.replace(num_heads=heads, num_kv_heads=heads if spec.latent else max(kv // size, 1))


def own_heads(count: int, rank: int, size: int) -> slice:
    """Return the heads that a rank has of `count`; neighbours have the same where there are fewer."""
    if count >= size:
        return slice(rank * (count // size), (rank + 1) * (count // size))
    first = rank * count // size
    return slice(first, first + 1)


class HeadsStep(ContextStep):
    """An ordinary step of the rank's own heads, between two exchanges.

    `own`: each rank has its own tokens with all heads; else every rank has all tokens.
    """

    def __init__(
        self, group: LayerGroup, context: ContextParallel, batch: Batch, own: bool, by_heads: bool
    ):
        self.context, self.own, self.by_heads = context, own, by_heads
        self.plan = group.plan(batch)
        self.zigzag = Zigzag.of(batch, context.size)
        self.places = torch.from_numpy(self.zigzag.places()).to(batch.device)
        longest, size = self.zigzag.longest, context.size
        # Where each rank's tokens lie in the step; what pads its part is some token.
        parts = torch.zeros(size, longest, dtype=torch.int64)
        for rank in range(size):
            tokens = torch.from_numpy(self.zigzag.tokens(rank))
            parts[rank, : len(tokens)] = tokens
        self.parts = parts.to(batch.device)

    def run(
        self, layer: Layer, query: Tensor, key: Tensor | None, value: Tensor | None, cache: KVCache
    ) -> Found:
        latent = layer.spec.latent is not None
        tensors = [query, key, value]
        for index, tensor in enumerate(tensors):
            if tensor is None:
                continue
            if index and latent:
                tensors[index] = self._all_tokens(tensor) if self.own else tensor
            elif self.own:
                tensors[index] = self._swap(tensor)
            else:
                mine = own_heads(tensor.shape[1], self.context.rank, self.context.size)
                tensors[index] = tensor[:, mine].contiguous()
        result: Any = layer(*tensors, cache, self.plan)
        out, lse = result if isinstance(result, tuple) else (result, None)
        if self.by_heads:
            return out, lse
        if self.own:
            return self._swap_back(out), None if lse is None else self._swap_back(lse)
        return self._all_heads(out), None if lse is None else self._all_heads(lse)

    def _swap(self, tensor: Tensor) -> Tensor:
        """Give tokens of all heads (own tokens, heads, size), take all tokens of own heads."""
        size, longest = self.context.size, self.zigzag.longest
        padded = tensor.new_zeros(longest, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        cuts = [own_heads(tensor.shape[1], rank, size) for rank in range(size)]
        sent = torch.stack([padded[:, cut] for cut in cuts])
        return self._exchanged(sent).flatten(0, 1)[self.places]

    def _swap_back(self, tensor: Tensor) -> Tensor:
        """Give all tokens of own heads, take own tokens of all heads."""
        received = self._exchanged(tensor[self.parts])
        mine = received[:, : self.zigzag.counts[self.context.rank]]
        return mine.transpose(0, 1).flatten(1, 2)

    def _exchanged(self, sent: Tensor) -> Tensor:
        received = torch.empty_like(sent)
        if sent.numel():
            self.context.all_to_all(_rows(received), _rows(sent))
        return received

    def _all_tokens(self, tensor: Tensor) -> Tensor:
        padded = tensor.new_zeros(self.zigzag.longest, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        return self._gathered(padded).flatten(0, 1)[self.places]

    def _all_heads(self, tensor: Tensor) -> Tensor:
        return self._gathered(tensor).transpose(0, 1).flatten(1, 2)

    def _gathered(self, tensor: Tensor) -> Tensor:
        received = tensor.new_empty(self.context.size, *tensor.shape)
        if tensor.numel():
            self.context.all_gather(_rows(received), raw_bytes(tensor))
        return received


def _rows(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes, a row for each of the ranks that its first dimension counts."""
    return tensor.view(torch.uint8).view(tensor.shape[0], -1)
