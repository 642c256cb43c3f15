"""Lies of stores that rotate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from polyattn.runtime.rotation import NewTokens, Rotation
from polyattn.runtime.store import TorchStore


class Rotating(TorchStore):
    by: ClassVar[tuple[str, ...]] = ("store_rotated",)

    def other(self, rotation: Rotation) -> Rotation:
        """Return the rotation that is done instead."""
        return rotation

    def run_rotated(self, plan: Any, rotation: Any, *rest: Any) -> Any:
        return super().run_rotated(plan, self.other(rotation), *rest)


class HonestRotation(Rotating):
    by = ()


class OtherPairs(Rotating):
    """Neighbours where halves are meant, and the other way round."""

    def other(self, rotation: Rotation) -> Rotation:
        return replace(rotation, pairing="gptj" if rotation.pairing == "neox" else "neox")


class TurnsBack(Rotating):
    """By the negative angle: queries and keys alike, so that only what is stored tells."""

    def other(self, rotation: Rotation) -> Rotation:
        cos, sin = rotation.turns.chunk(2, dim=1)
        return replace(rotation, turns=torch.cat([cos, -sin], dim=1))


class RotatesThePassThrough(Rotating):
    """Pairs run over the whole head; the last ones turn by the angle of the first."""

    def run_rotated(
        self, plan: Any, rotation: Any, new: NewTokens, cache: Any, params: Any, keep: Any
    ) -> Any:
        width = new.query.shape[2]
        if not rotation.last and rotation.size < width:
            cos, sin = rotation.turns.chunk(2, dim=1)
            more = (0, (width - rotation.size) // 2)
            cos, sin = (torch.nn.functional.pad(t, more, value=float(t[:, :1].mean())) if t.numel()
                        else t.new_empty(0, width // 2) for t in (cos, sin))  # fmt: skip
            rotation = replace(rotation, turns=torch.cat([cos, sin], dim=1), size=width)
        return super().run_rotated(plan, rotation, new, cache, params, keep)


class IgnoresPositions(Rotating):
    """Every token turns as the first does."""

    def other(self, rotation: Rotation) -> Rotation:
        return replace(rotation, turns=rotation.turns[:1].expand_as(rotation.turns))


class IgnoresTheFactor(Rotating):
    """Turns by a length of one: the attention factor is lost."""

    def other(self, rotation: Rotation) -> Rotation:
        cos, sin = rotation.turns.chunk(2, dim=1)
        length = torch.hypot(cos, sin)
        return replace(rotation, turns=torch.cat([cos / length, sin / length], dim=1))


class ForgetsTheTemperature(Rotating):
    def other(self, rotation: Rotation) -> Rotation:
        return replace(rotation, query_scale=None)


class TurnsInBfloat16(Rotating):
    """Cosines and sines of 8 bits."""

    def other(self, rotation: Rotation) -> Rotation:
        return replace(rotation, turns=rotation.turns.bfloat16().to(rotation.turns.dtype))


class ForgetsTheBias(Rotating):
    def run_rotated(self, plan: Any, rotation: Any, new: NewTokens, *rest: Any) -> Any:
        return super().run_rotated(plan, rotation, replace(new, bias=None), *rest)


class BiasAfterwards(Rotating):
    """The query's bias is added when it is turned already."""

    def run_rotated(self, plan: Any, rotation: Any, new: NewTokens, *rest: Any) -> Any:
        found = super().run_rotated(plan, rotation, replace(new, bias=None), *rest)
        biases = new.biases()
        if biases is None:
            return found
        return (found[0].float() + biases[0]).to(found[0].dtype), *found[1:]


class ForgetsTheNorm(Rotating):
    def run_rotated(self, plan: Any, rotation: Any, new: NewTokens, *rest: Any) -> Any:
        return super().run_rotated(plan, rotation, replace(new, norms=None), *rest)


class ForgetsEps(Rotating):
    def run_rotated(self, plan: Any, rotation: Any, new: NewTokens, *rest: Any) -> Any:
        norms = new.norms and replace(new.norms, eps=0.0)
        return super().run_rotated(plan, rotation, replace(new, norms=norms), *rest)


class NormsTheBias(Rotating):
    """The bias is added to what is normed already."""

    def run_rotated(self, plan: Any, rotation: Any, new: NewTokens, *rest: Any) -> Any:
        norms = new.norms
        if norms is not None and new.key is not None:
            query, key = norms.applied(new.query, norms.query), norms.applied(new.key, norms.key)
            dtype = new.query.dtype
            new = replace(new, query=query.to(dtype), key=key.to(dtype), norms=None)
        return super().run_rotated(plan, rotation, new, *rest)


class NormsWholeTokens(Rotating):
    """All heads are one row, where each is one."""

    def run_rotated(self, plan: Any, rotation: Any, new: NewTokens, *rest: Any) -> Any:
        norms = new.norms
        if norms is not None and norms.over == "head" and new.key is not None:
            assert norms.key is not None
            query, key = norms.query.repeat(new.query.shape[1]), norms.key.repeat(new.key.shape[1])
            new = replace(new, norms=replace(norms, query=query, key=key, over="token"))
        return super().run_rotated(plan, rotation, new, *rest)


class RotatesTheValue(Rotating):
    def run_rotated(self, plan: Any, rotation: Any, new: NewTokens, *rest: Any) -> Any:
        value = new.value
        assert value is not None
        if not rotation.last and value.shape[2] >= rotation.size:
            new = replace(new, value=rotation.applied(value).to(value.dtype))
        return super().run_rotated(plan, rotation, new, *rest)


class RotatesInPlace(Rotating):
    """The caller's query is overwritten."""

    def run_rotated(self, plan: Any, rotation: Any, new: NewTokens, *rest: Any) -> Any:
        found = super().run_rotated(plan, rotation, new, *rest)
        new.query.copy_(found[0])
        return new.query, *found[1:]


class RotatesStoredKeysTwice(Rotating):
    """What is kept is right, what is stored is turned once more."""

    def run_rotated(
        self, plan: Any, rotation: Any, new: NewTokens, cache: Any, params: Any, keep: Any
    ) -> Any:
        found = super().run_rotated(plan, rotation, new, cache, params, True)
        assert found[1] is not None
        again = rotation.applied(found[1]).to(found[1].dtype)
        self.run(plan, again, found[2], cache, params)  # type: ignore[arg-type]
        return found


class FirstRotation(Rotating):
    """The rotation of the first step of so many tokens is kept."""

    by = ("store_rotated_plans",)

    def other(self, rotation: Rotation) -> Rotation:
        held = self.__dict__.setdefault("held", {})
        return held.setdefault(len(rotation.turns), rotation)  # type: ignore[no-any-return]
