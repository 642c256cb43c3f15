"""When are a step's key tiles listed? Where it brings all that the masks of its layers read."""

from __future__ import annotations

from typing import Any

import torch
from polyattn.kernel import Batch, CustomMask, LayerSpec, Pointwise
from torch import Tensor

from polyattn_triton.configs import Config
from polyattn_triton.functions.pointwise import Generated, table
from polyattn_triton.kernels.tile_lists import AROUND, list_kernel
from polyattn_triton.launch import Site
from polyattn_triton.variants import list_constants

MOST_NUMBERS = 1 << 25
"""Numbers in all lists of a step, 128 MiB; beyond, masks are asked for every pair."""


class Lister:
    """Lists the key tiles that a layer's masks show, without waiting for the device."""

    def __init__(self, masks: Generated, device: torch.device, of_step: bool):
        """`of_step`: the step's mask is all there is."""
        self.masks, self.device, self.of_step = masks, device, of_step
        self.captured = masks.trace.captured(device)
        self._sites: dict[Any, Site] = {}

    @classmethod
    def of(cls, spec: LayerSpec, device: torch.device) -> Lister | None:
        """Return a layer's, None where it has no masks but its own.

        Rotated keys are gone through in the window's tiles and the kept tokens' apart: no list says so.
        """
        masks = None if spec.rope and spec.sink_tokens else Generated.of_mask(spec)
        pointwise = Pointwise.of(spec)
        if masks is None or pointwise is None:
            return None
        return cls(masks, device, spec.mask is not None and len(pointwise.mask_mods) == 1)

    def takes(self, batch: Batch) -> bool:
        """Whether the step brings all that the masks read, and may hide keys by them.

        What a layer brings is known when it runs. A single token sees all that is before it where the
        mask is of new tokens alone.
        """
        alone = self.of_step and batch.all_decode
        if alone and isinstance(batch.mask, CustomMask) and batch.mask.over == "new":
            return False
        trace = self.masks.trace
        return trace.inputs.keys() <= batch.inputs.keys() | trace.constants.keys()

    def listed(
        self, batch: Batch, spec: LayerSpec, config: Config, work: Tensor, count: int
    ) -> Tensor | None:
        """Return the lists (tiles, 1 or KV heads, numbers) of the `count` tiles that `work` ends with.

        None where they were too long.
        """
        width = -(-batch.max_seq_len // config.block_n)
        heads = spec.num_kv_heads if self.masks.by_head else 1
        if count * heads * width > MOST_NUMBERS:
            return None
        lists = torch.zeros((count, heads, width + AROUND), dtype=torch.int32, device=self.device)
        inputs = table(self.masks.trace, batch.seq_index, {**batch.inputs, **self.captured()})
        # Heads of one token see the same keys, unless a mask reads the head.
        height = 1 if batch.max_query_len == 1 and not self.masks.by_head else config.block_m
        key = (spec.causal, height, config.block_n)
        site = self._sites.get(key)
        if site is None:
            constants = list_constants(spec, height, config.block_n, self.masks.constants)
            site = self._sites[key] = Site(list_kernel, (), constants, {"num_warps": 4})
        tensors = (lists, inputs, work, batch.seq_lens, batch.query_start_loc)
        site((count, heads, 1), tensors, (), (width, count, work.numel() - 2 * count))
        return lists
