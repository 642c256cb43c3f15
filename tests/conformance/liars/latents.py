"""Lies of MLA backends."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from polyattn import SparseSpec
from polyattn.kernel import Batch, Frame, KVCache, LayerParams, LayerSpec, Plan
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

    def run(self, plan: Plan, frame: Frame) -> None:
        query = frame.query
        query = query.clone()
        query[..., self.spec.v_head_size :] = 0.0
        super().run(plan, frame.but(query=query))


class ValuesFromTheEnd(TorchMLA):
    """The value is the key's last part, rope and all."""

    by = ("latent",)

    def run(self, plan: Plan, frame: Frame) -> None:
        rank = frame.cache.value.shape[3]
        other = KVCache(
            frame.cache.key, frame.cache.key[..., frame.cache.key.shape[3] - rank :].clone()
        )
        super().run(plan, frame.but(cache=other))


class SixteenHeads(TorchMLA):
    """Heads come in tiles of 16; a tile that isn't full is rounded down to 4."""

    by = ("latent", "latent_search")

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        if frame.out.shape[1] % 4:
            frame.out[:, -1] = 0.0


class UnscaledLatents(TorchMLA):
    """A quantised latent is scaled in the logits alone."""

    by = ("latent",)

    def run(self, plan: Plan, frame: Frame) -> None:
        half = LayerParams(k_scale=frame.params.k_scale, v_scale=1.0)
        super().run(plan, frame.but(params=half))


class LatentLseInBits(TorchMLA):
    by = ("latent",)

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        if frame.lse is not None:
            frame.lse.mul_(1.4427)


class LatestLatentPlan(TorchMLA):
    by = ("latent_plans",)

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Any:
        self.last = super().plan(batch, reuse)
        return self.last

    def run(self, plan: Plan, frame: Frame) -> None:
        same = len(frame.query) == self.last.batch.num_tokens
        super().run(self.last if same else plan, frame)


class FirstLatentCache(TorchMLA):
    by = ("latent_plans",)

    def run(self, plan: Plan, frame: Frame) -> None:
        kept = self.__dict__.setdefault("kept", {}).setdefault(id(plan), frame.cache)
        super().run(plan, frame.but(cache=kept))


class LatentNan(TorchMLA):
    """One request's NaN is every request's."""

    by = ("latent_isolation",)

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        frame.out.add_(0.0 * frame.query.sum())


class NoneIsZero(TorchSparseMLA):
    """-1 means the first slot."""

    by = ("latent",)

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame.but(choice=frame.choice.clamp(min=0)))


class ChosenHalf(TorchSparseMLA):
    """Only as many chosen tokens as fit one tile count."""

    by = ("latent",)

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame.but(choice=frame.choice[:, :16].contiguous()))


class ChosenInOrder(TorchSparseMLA):
    """Chosen tokens end at the first -1 of the batch's first row."""

    by = ("latent",)

    def run(self, plan: Plan, frame: Frame) -> None:
        slots = frame.choice
        if len(slots):
            count = max(1, int((slots[0] >= 0).sum()))
            slots = slots[:, :count].contiguous()
        super().run(plan, frame.but(choice=slots))


class PlacesInTheSequence(TorchSparseMLA):
    """Each id is one place of the sequence, whatever the layer's choice means."""

    by = ("latent",)

    def place(self, spec: LayerSpec, choice: Tensor, *step: Any) -> Tensor:
        assert spec.sparse is not None
        plain = spec.replace(sparse=SparseSpec(budget=spec.sparse.budget))
        return super().place(plain, choice, *step)


class SparseNan(TorchSparseMLA):
    by = ("latent_isolation",)

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        scale = frame.query.abs().amax() if frame.query.numel() else torch.zeros(())
        frame.out.mul_(1.0 + 1e-2 * scale.tanh() * (scale > 6.0))
