"""How is a lie told in a line? By a table: who tells it, and what it does for one honest step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from liars.plain import Pair, Plain
from polyattn.families.attention import reference
from polyattn.kernel import Batch, KVCache, LayerParams, LayerSpec, Plan
from torch import Tensor


def lies(module: str, *tables: Any) -> dict[str, type[Any]]:
    """Return the liars of tables (base, step, told, *by): a class of `base` for each row of `told`.

    A row is a liar's name, and what it does in place of `step`. `by`: the checks that must find it,
    where they aren't the base's.
    """
    return {
        name: type(name, (base,), {step: does, "__module__": module, **({"by": by} if by else {})})
        for base, step, told, *checks in tables
        for by in [tuple(checks)]
        for name, does in told.items()
    }


class Hooks:
    """Runs over another frame than it is given, or spoils what its base gave."""

    def before(self, plan: Any, frame: Any) -> Any:
        return frame

    def after(self, plan: Any, frame: Any) -> None:
        return

    def run(self, plan: Any, frame: Any) -> None:
        super().run(plan, self.before(plan, frame))  # type: ignore[misc]
        self.after(plan, frame)

    def once(self, key: Any, value: Any) -> Any:
        """Return what was the value of `key` when it was first asked for."""
        return self.__dict__.setdefault("first", {}).setdefault(key, value)

    def every(self, value: Any) -> None:
        """Never forget a value."""
        self.__dict__.setdefault("all", []).append(value)


class Told(Hooks, Plain):
    """An honest backend until a table says what it does otherwise."""


class Reading(Told):
    """Spoils the keys and values of a sequence that were read from a cache."""

    def spoilt(
        self, keys: Tensor, values: Tensor, cache: KVCache, batch: Batch, index: int
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def read(self, plan: Plan, cache: KVCache, index: int, params: LayerParams) -> Pair:
        return self.spoilt(*super().read(plan, cache, index, params), cache, plan.batch, index)


class OtherSpec(Plain):
    """Computes a layer with other fields than its own."""

    fields: ClassVar[Callable[[LayerSpec], dict[str, Any]]]

    def visible(self, queries: int, keys: int) -> Tensor:
        return reference.visible(self._other(), queries, keys)

    def capped(self, scores: Tensor) -> Tensor:
        cap = self._other().logit_soft_cap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def _other(self) -> LayerSpec:
        return replace(self.spec, **type(self).fields(self.spec))
