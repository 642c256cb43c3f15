"""What does a model need of a step? Positions, plans, memory; and each layer's call, checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from polyattn import (
    Attention,
    Batch,
    KVCache,
    LatentAttention,
    LayerGroup,
    Recurrent,
    SelectedLayers,
    StateCache,
    StepPlan,
)
from polyattn.families.attention.rope import rotate
from polyattn.runtime.rotation import rms_norm
from polyattn.tools.replay.check import Checker
from polyattn.tools.replay.runners import Options, Runner


class GroupMemory(Runner):
    """A group of a model's layers, with the caches or the states of each, by its index."""

    def __init__(self, layers: SelectedLayers, options: Options, num_blocks: int = 0):
        super().__init__(layers, options)
        self.caches: dict[int, KVCache] = {}
        self.states: dict[int, StateCache] = {}
        for index in layers.layers:
            if self.spec.kind.is_recurrent:
                self.states[index] = self.group.allocate_states(options.state_slots)
            else:
                self.caches[index] = self.group.allocate_cache(num_blocks)
        self.first, self.rotates = layers.layers[0], self.spec.rope is not None

    def paged(self) -> list[Tensor]:
        caches = self.caches.values()
        values = [cache.value for cache in caches if not cache.value_in_key]
        states = [cache.data for cache in self.states.values()]
        return [*(cache.key for cache in caches), *values, *states]

    def checks(self, index: int) -> bool:
        """Whether a layer checks tables and slots on the device: the first one, as a group shares them.

        A device that is waited for in every layer has no times to report.
        """
        return index == self.first


class ModelStep:
    """One step of a model: `positions` int64 (tokens,), and for each group its batch and plan.

    Calls go to the layers, and sampled tokens of them to the checker; `checking` counts its seconds.
    """

    def __init__(
        self,
        positions: Tensor,
        batches: Mapping[LayerGroup, Batch],
        plans: Mapping[LayerGroup, StepPlan],
        checker: Checker,
        clock: Runner,
    ):
        self.positions, self.batches, self.plans = positions, batches, plans
        self.checker, self.clock, self.checking = checker, clock, 0.0

    @contextmanager
    def _unclocked(self) -> Iterator[None]:
        started = self.clock.clock()
        yield
        self.checking += self.clock.clock() - started

    def _turned(self, layer: Attention | LatentAttention, query: Tensor) -> Tensor:
        """Return a query as the formulas norm and rotate it: the caches' keys are already."""
        spec = layer.spec
        norm, weight = spec.qk_norm, layer.params.q_norm
        if norm is not None and weight is not None:
            rows = query.to(weight.dtype).reshape(-1, len(weight))
            query = rms_norm(rows, weight, norm.eps).view_as(query)
        if spec.rope is None or spec.rope.positions == "cache":
            return query
        offset = spec.head_size - spec.latent.rope_head_size if spec.latent else 0
        with query.device:  # the tables are made where the positions are
            return rotate(query, self.positions, spec.rope, offset=offset)

    def attend(
        self, layer: Attention, cache: KVCache, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Run an attention layer."""
        out = layer(query, key, value, cache, self.plans[layer.group])
        if self.checker.per_step:
            with self._unclocked():
                batch = self.batches[layer.group]
                turned = self._turned(layer, query)
                self.checker.check(layer, turned, (key, value), cache, batch, out)
        return out  # type: ignore[no-any-return]

    def attend_latent(
        self, layer: LatentAttention, cache: KVCache, query: Tensor, latent: Tensor, rope: Tensor
    ) -> Tensor:
        """Run an MLA layer."""
        out = layer(query, latent, rope, cache, self.plans[layer.group])
        if self.checker.per_step:
            with self._unclocked():
                batch = self.batches[layer.group]
                self.checker.check_latent(
                    layer, self._turned(layer, query), cache, batch, None, out
                )
        return out  # type: ignore[no-any-return]

    def recur(self, layer: Recurrent, states: StateCache, *inputs: Tensor) -> Tensor:
        """Run a recurrent layer."""
        batch = self.batches[layer.group]
        sampled: dict[int, Tensor] = {}
        if self.checker.per_step:
            with self._unclocked():
                sampled = self.checker.sample_states(batch, states)
        out: Tensor = layer(*inputs, states=states, plan=self.plans[layer.group])
        if sampled:
            with self._unclocked():
                self.checker.check_recurrent(layer, inputs, states, batch, out, sampled)
        return out
