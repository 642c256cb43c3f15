"""What does a model consist of? Its towers' layers: what each computes, or what it lacks to be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from polyattn import LayerSpec
from polyattn.errors import ConfigError, ranges

from polyattn_models.config import Config


@dataclass(frozen=True)
class Missing:
    """What has to be built before a layer can be served."""

    what: str


@dataclass(frozen=True)
class Layer:
    """One layer of a tower: what it computes, in order, or what is missing for it.

    A layer has several specs where it attends to itself and then to another sequence, or has a
    recurrence and attention; none where it only has an MLP.
    """

    tower: str
    index: int
    specs: tuple[LayerSpec, ...]
    missing: tuple[str, ...] = ()


Part = LayerSpec | Missing
Stack = Sequence[Part | tuple[Part, ...]]
"""A tower's layers: one part each, or those that run in order."""
Towers = dict[str, Stack]
Reader = Callable[[Config], Stack | Towers]
"""Returns each tower's layers, or those of a text tower alone."""


def spec_of(cfg: Config, heads: int, size: int, **fields: Any) -> LayerSpec:
    """Return a layer of so many heads of a size, in the config's dtype."""
    return LayerSpec(num_heads=heads, head_size=size, dtype=cfg.dtype, **fields)


def towers_of(layers: Stack | Towers) -> Towers:
    """Return what a reader returned, by the towers' names."""
    return layers if isinstance(layers, dict) else {"text": layers}


def unserved(*missing: str) -> Reader:
    """Return a reader of models whose every layer lacks the same, whatever their fields say."""

    def read(cfg: Config) -> Stack:
        cfg.read.update(cfg.values)
        listed = cfg.get("attn_layers")  # Reformer's
        count = len(listed) if isinstance(listed, list) else cfg.integer("num_hidden_layers")
        return [tuple(map(Missing, missing))] * (count or 1)

    return read


@dataclass(frozen=True)
class ModelLayers:
    """Every layer of a model, tower by tower."""

    source: str
    model_type: str
    layers: tuple[Layer, ...]

    @property
    def towers(self) -> tuple[str, ...]:
        """The names of the towers: "text", "vision", "encoder", "decoder"."""
        return tuple(dict.fromkeys(layer.tower for layer in self.layers))

    def tower(self, name: str) -> tuple[Layer, ...]:
        """Return one tower's layers."""
        return tuple(layer for layer in self.layers if layer.tower == name)

    @property
    def served(self) -> tuple[Layer, ...]:
        """The layers that text is served with: a vision tower is a model by itself."""
        if "text" in self.towers and len(self.towers) > 1:
            return self.tower("text")
        return self.layers

    @property
    def unserved(self) -> tuple[Layer, ...]:
        """The layers that can't be served, each with what is missing."""
        return tuple(layer for layer in self.layers if layer.missing)

    @property
    def specs(self) -> list[LayerSpec]:
        """The specs of the layers that text is served with. Raises `ConfigError`."""
        lines = missing_lines(layer for layer in self.served if layer.missing)
        if lines:
            raise ConfigError(
                f"{self.source}: model_type={self.model_type!r} has layers that can't be served: "
                + "; ".join(lines)
            )
        return [spec for layer in self.served for spec in layer.specs]


def missing_lines(layers: Iterable[Layer]) -> list[str]:
    """Return a line for each thing that is missing: which layers lack it."""
    where: dict[tuple[str, str], list[int]] = {}
    for layer in layers:
        for what in layer.missing:
            where.setdefault((layer.tower, what), []).append(layer.index)
    return [f"{tower} layers {ranges(i)} need {what}" for (tower, what), i in where.items()]


def model_of(
    source: str, model_type: str, layers: Stack | Towers, kv_cache_dtype: str
) -> ModelLayers:
    """Return the model of a reader's layers; what is cached is in `kv_cache_dtype`."""
    read = [
        Layer(
            tower,
            index,
            tuple(
                part.replace(kv_cache_dtype=kv_cache_dtype)
                if part.cached and not part.kind.is_recurrent
                else part
                for part in parts
                if isinstance(part, LayerSpec)
            ),
            tuple(part.what for part in parts if isinstance(part, Missing)),
        )
        for tower, stack in towers_of(layers).items()
        for index, one in enumerate(stack)
        for parts in [one if isinstance(one, tuple) else (one,)]
    ]
    return ModelLayers(source, model_type, tuple(read))
