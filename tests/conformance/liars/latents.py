"""Lies of MLA backends."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from polyattn.kernel import Batch, KVCache, LayerParams, Plan
from polyattn_cpu.mla import TorchMLA, TorchSparseMLA
from torch import Tensor


class HonestLatent(TorchMLA):
    by: ClassVar[tuple[str, ...]] = ()


class HonestSparse(TorchSparseMLA):
    by: ClassVar[tuple[str, ...]] = ()


class ScalesByTheLatent(TorchMLA):
    """The softmax's scale is the absorbed size's, not the head's."""

    by = ("latent",)

    def __init__(self, spec: Any, cache: Any, device: Any):
        super().__init__(spec, cache, device)
        self.spec = self.spec.replace(scale=float(self.spec.head_size**-0.5))


class IgnoresTheRope(TorchMLA):
    by = ("latent",)

    def run(self, plan: Plan, query: Tensor, *args: Any) -> None:
        query = query.clone()
        query[..., args[2].value.shape[3] :] = 0.0
        super().run(plan, query, *args)


class ValuesFromTheEnd(TorchMLA):
    """The value is the key's last part, rope and all."""

    by = ("latent",)

    def run(self, plan: Plan, query: Tensor, key: Any, value: Any, cache: Any, *rest: Any) -> None:
        rank = cache.value.shape[3]
        other = KVCache(cache.key, cache.key[..., cache.key.shape[3] - rank :].clone())
        super().run(plan, query, key, value, other, *rest)


class SixteenHeads(TorchMLA):
    """Heads come in tiles of 16; a tile that isn't full is rounded down to 4."""

    by = ("latent", "latent_search")

    def run(self, plan: Plan, *args: Any) -> None:
        super().run(plan, *args)
        if args[5].shape[1] % 4:
            args[5][:, -1] = 0.0


class UnscaledLatents(TorchMLA):
    """A quantised latent is scaled in the logits alone."""

    by = ("latent",)

    def run(
        self, plan: Plan, query: Tensor, key: Any, value: Any, cache: Any, params: Any, *rest: Any
    ) -> None:
        half = LayerParams(k_scale=params.k_scale, v_scale=1.0)
        super().run(plan, query, key, value, cache, half, *rest)


class LatentLseInBits(TorchMLA):
    by = ("latent",)

    def run(self, plan: Plan, *args: Any) -> None:
        super().run(plan, *args)
        if args[-1] is not None:
            args[-1].mul_(1.4427)


class LatestLatentPlan(TorchMLA):
    by = ("latent_plans",)

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Any:
        self.last = super().plan(batch, reuse)
        return self.last

    def run(self, plan: Plan, query: Tensor, *args: Any) -> None:
        same = len(query) == self.last.batch.num_tokens
        super().run(self.last if same else plan, query, *args)


class FirstLatentCache(TorchMLA):
    by = ("latent_plans",)

    def run(self, plan: Plan, query: Tensor, key: Any, value: Any, cache: Any, *rest: Any) -> None:
        kept = self.__dict__.setdefault("kept", {}).setdefault(id(plan), cache)
        super().run(plan, query, key, value, kept, *rest)


class LatentNan(TorchMLA):
    """One request's NaN is every request's."""

    by = ("latent_isolation",)

    def run(self, plan: Plan, query: Tensor, *args: Any) -> None:
        super().run(plan, query, *args)
        args[4].add_(0.0 * query.sum())


class NoneIsZero(TorchSparseMLA):
    """-1 means the first slot."""

    by = ("latent",)

    def run(self, plan: Plan, query: Tensor, slots: Tensor, *args: Any) -> None:
        super().run(plan, query, slots.clamp(min=0), *args)


class ChosenHalf(TorchSparseMLA):
    """Only as many chosen tokens as fit one tile count."""

    by = ("latent",)

    def run(self, plan: Plan, query: Tensor, slots: Tensor, *args: Any) -> None:
        super().run(plan, query, slots[:, :16].contiguous(), *args)


class ChosenInOrder(TorchSparseMLA):
    """Chosen tokens end at the first -1 of the batch's first row."""

    by = ("latent",)

    def run(self, plan: Plan, query: Tensor, slots: Tensor, *args: Any) -> None:
        if len(slots):
            count = max(1, int((slots[0] >= 0).sum()))
            slots = slots[:, :count].contiguous()
        super().run(plan, query, slots, *args)


class SparseNan(TorchSparseMLA):
    by = ("latent_isolation",)

    def run(self, plan: Plan, query: Tensor, slots: Tensor, *args: Any) -> None:
        super().run(plan, query, slots, *args)
        scale = query.abs().amax() if query.numel() else torch.zeros(())
        args[2].mul_(1.0 + 1e-2 * scale.tanh() * (scale > 6.0))
