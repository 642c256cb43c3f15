"""How do several ranks serve a run? `polyattn run --context-parallel`, by polyattn-context-parallel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from polyattn_context_parallel import ContextAttention, ContextGroup, ContextParallel
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from polyattn import Batch, Device, LatentAttention, SelectedLayers
from polyattn.tools.replay.check import Checker
from polyattn.tools.replay.runners import AttentionRunner, LatentRunner, Options, Runner


class RunRanks(ContextParallel):
    """The ranks of a run, which know how its layers run on them."""

    def runner(self, layers: SelectedLayers, options: Options, num_blocks: int) -> Runner:
        """Return what runs a group of decoder layers on all ranks."""
        return ContextRunner(self, layers, options, num_blocks)


@contextmanager
def joined(size: int, device: Device) -> Iterator[RunRanks]:
    """Join this process and the others that torchrun started."""
    kind = torch.device(str(device.torch_device)).type
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        yield RunRanks(init_device_mesh(kind, (size,)))
    finally:
        dist.destroy_process_group()


class ContextRunner(Runner):
    """Layers whose keys several ranks share: the same random step on each, its keys by block."""

    def __init__(
        self, context: ContextParallel, layers: SelectedLayers, options: Options, num_blocks: int
    ):
        latent = layers.spec.kind.is_latent
        runner = LatentRunner if latent else AttentionRunner
        self.alone: AttentionRunner | LatentRunner = runner(layers, options, num_blocks)
        self.group, self.spec, self.count = self.alone.group, self.alone.spec, self.alone.count
        self.device, self.num_caches = self.alone.device, self.alone.num_caches
        self.shared = ContextGroup(self.group, context)
        self.layers = [ContextAttention(self.shared, layer) for layer in self.alone.layers]
        self.saved_bytes, self.seconds = 0, 0.0

    def paged(self) -> list[Tensor]:
        return self.alone.paged()

    def run(self, batch: Batch, checker: Checker) -> None:
        plan = self.timed(self.shared.plan, batch)
        for layer, cache in zip(self.layers, self.alone.caches, strict=True):
            query, key, value = self.alone.inputs(batch.num_tokens)
            assert cache is not None
            out = self.timed(layer, query, key, value, cache, plan)
            if checker.per_step:
                room, whole = self.shared.collected(cache, batch)
                if isinstance(layer.layer, LatentAttention):
                    checker.check_latent(layer.layer, query, room, whole, None, out)
                else:
                    checker.check(layer.layer, query, (None, None), room, whole, out)
