"""Lies of stores that rotate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from liars.told import lies
from polyattn.runtime.rotation import NewTokens, Rotation
from polyattn.runtime.store import TorchStore
from torch import Tensor


class Rotating(TorchStore):
    by: ClassVar[tuple[str, ...]] = ("store_rotated",)

    def other(self, rotation: Rotation) -> Rotation:
        """Return the rotation that is done instead."""
        return rotation

    def new(self, rotation: Rotation, new: NewTokens) -> NewTokens:
        """Return the tokens that are rotated instead."""
        return new

    def run_rotated(self, plan: Any, rotation: Any, new: NewTokens, *rest: Any) -> Any:
        new = self.new(rotation, new)
        return super().run_rotated(plan, self.other(rotation), new, *rest)


class HonestRotation(Rotating):
    by = ()


def lengths(rotation: Rotation) -> Tensor:
    """How long a turn's pair of a cosine and a sine is."""
    return torch.hypot(*rotation.turns.chunk(2, dim=1)).repeat(1, 2)


OTHER = {
    # Neighbours where halves are meant, and the other way round.
    "OtherPairs": lambda self, rotation: replace(
        rotation, pairing="gptj" if rotation.pairing == "neox" else "neox"
    ),
    # By the negative angle: queries and keys alike, so that only what is stored tells.
    "TurnsBack": lambda self, rotation: replace(
        rotation, turns=torch.cat([(turns := rotation.turns.chunk(2, dim=1))[0], -turns[1]], dim=1)
    ),
    # Every token turns as the first does.
    "IgnoresPositions": lambda self, rotation: replace(
        rotation, turns=rotation.turns[:1].expand_as(rotation.turns)
    ),
    # Turns by a length of one: the attention factor is lost.
    "IgnoresTheFactor": lambda self, rotation: replace(
        rotation, turns=rotation.turns / lengths(rotation)
    ),
    "ForgetsTheTemperature": lambda self, rotation: replace(rotation, query_scale=None),
    # Cosines and sines of 8 bits.
    "TurnsInBfloat16": lambda self, rotation: replace(
        rotation, turns=rotation.turns.bfloat16().to(rotation.turns.dtype)
    ),
}
# The rotation of the first step of so many tokens is kept.
FIRST = {
    "FirstRotation": lambda self, rotation: self.__dict__.setdefault("held", {}).setdefault(
        len(rotation.turns), rotation
    )
}


def norms_the_bias(self: Rotating, rotation: Rotation, new: NewTokens) -> NewTokens:
    """The bias is added to what is normed already."""
    norms = new.norms
    if norms is None or new.key is None:
        return new
    query, key = norms.applied(new.query, norms.query), norms.applied(new.key, norms.key)
    dtype = new.query.dtype
    return replace(new, query=query.to(dtype), key=key.to(dtype), norms=None)


def norms_whole_tokens(self: Rotating, rotation: Rotation, new: NewTokens) -> NewTokens:
    """All heads are one row, where each is one."""
    norms = new.norms
    if norms is None or norms.over != "head" or new.key is None:
        return new
    assert norms.key is not None
    query, key = norms.query.repeat(new.query.shape[1]), norms.key.repeat(new.key.shape[1])
    return replace(new, norms=replace(norms, query=query, key=key, over="token"))


def rotates_the_value(self: Rotating, rotation: Rotation, new: NewTokens) -> NewTokens:
    value = new.value
    assert value is not None
    if rotation.last or value.shape[2] < rotation.size:
        return new
    return replace(new, value=rotation.applied(value).to(value.dtype))


NEW = {
    "ForgetsTheBias": lambda self, rotation, new: replace(new, bias=None),
    "ForgetsTheNorm": lambda self, rotation, new: replace(new, norms=None),
    "ForgetsEps": lambda self, rotation, new: replace(
        new, norms=new.norms and replace(new.norms, eps=0.0)
    ),
    "NormsTheBias": norms_the_bias,
    "NormsWholeTokens": norms_whole_tokens,
    "RotatesTheValue": rotates_the_value,
}
globals().update(lies(
    __name__,
    (Rotating, "other", OTHER), (Rotating, "other", FIRST, "store_rotated_plans"), (Rotating, "new", NEW),
))  # fmt: skip


class RotatesThePassThrough(Rotating):
    """Pairs run over the whole head; the last ones turn by the angle of the first."""

    def run_rotated(self, plan: Any, rotation: Any, new: NewTokens, *rest: Any) -> Any:
        width = new.query.shape[2]
        if not rotation.last and rotation.size < width:
            cos, sin = rotation.turns.chunk(2, dim=1)
            more = (0, (width - rotation.size) // 2)
            cos, sin = (torch.nn.functional.pad(t, more, value=float(t[:, :1].mean())) if t.numel()
                        else t.new_empty(0, width // 2) for t in (cos, sin))  # fmt: skip
            rotation = replace(rotation, turns=torch.cat([cos, sin], dim=1), size=width)
        return super().run_rotated(plan, rotation, new, *rest)


class BiasAfterwards(Rotating):
    """The query's bias is added when it is turned already."""

    def run_rotated(self, plan: Any, rotation: Any, new: NewTokens, *rest: Any) -> Any:
        turned = super().run_rotated(plan, rotation, replace(new, bias=None), *rest)
        biases = new.biases()
        if biases is None:
            return turned
        return (turned[0].float() + biases[0]).to(turned[0].dtype), *turned[1:]


class RotatesInPlace(Rotating):
    """The caller's query is overwritten."""

    def run_rotated(self, plan: Any, rotation: Any, new: NewTokens, *rest: Any) -> Any:
        turned = super().run_rotated(plan, rotation, new, *rest)
        new.query.copy_(turned[0])
        return new.query, *turned[1:]


class RotatesStoredKeysTwice(Rotating):
    """What is kept is right, what is stored is turned once more."""

    def run_rotated(
        self, plan: Any, rotation: Any, new: NewTokens, cache: Any, params: Any, keep: Any
    ) -> Any:
        turned = super().run_rotated(plan, rotation, new, cache, params, True)
        assert turned[1] is not None
        again = rotation.applied(turned[1]).to(turned[1].dtype)
        self.run(plan, again, turned[2], cache, params)  # type: ignore[arg-type]
        return turned
