"""Compares sampled tokens of every step with the float64 reference."""

from __future__ import annotations

import random

from torch import Tensor

from polyattn import Attention, Batch, KVCache, reference
from polyattn.errors import PolyattnError
from polyattn.tolerance import TOLERANCES, output_error


class WrongResultError(PolyattnError):
    """A backend gave a wrong result while serving."""


class Checker:
    """Checks up to `per_step` tokens of each layer and step; remembers the worst error."""

    def __init__(self, per_step: int, seed: int):
        self.per_step, self.worst, self.checked = per_step, 0.0, 0
        self._random = random.Random(seed)

    def check(
        self,
        layer: Attention,
        query: Tensor,
        given: tuple[Tensor | None, Tensor | None],
        cache: KVCache | None,
        batch: Batch,
        out: Tensor,
    ) -> None:
        """Raise `WrongResultError` if a sampled token is off by more than the tolerance."""
        indices = [i for i, n in enumerate(batch.query_lens) if n]
        for index in self._random.sample(indices, min(self.per_step, len(indices))):
            self._check_one(layer, query, given, cache, batch, out, index)

    def _check_one(
        self,
        layer: Attention,
        query: Tensor,
        given: tuple[Tensor | None, Tensor | None],
        cache: KVCache | None,
        batch: Batch,
        out: Tensor,
        index: int,
    ) -> None:
        spec = layer.selection.spec
        rows = slice(batch.starts[index], batch.starts[index + 1])
        at = self._random.randrange(batch.query_lens[index])
        if cache is not None:
            keys, values = reference.read_cache(spec, cache, batch, index, layer.params)
        else:
            key, value = given
            assert key is not None and value is not None
            keys, values = key[rows], value[rows]
        seen = batch.lens[index]
        if spec.causal:  # a token sees what lies before it: it is the last query of a shorter run
            seen -= batch.query_lens[index] - 1 - at
        elif spec.sliding_window or spec.chunk_size or spec.alibi:
            at = batch.query_lens[index] - 1  # its position must be the last
        row = rows.start + at
        expected, _ = reference.attend(
            spec, query[row : row + 1], keys[:seen], values[:seen], layer.params
        )
        error = output_error(out[row : row + 1], expected)
        self.worst, self.checked = max(self.worst, error), self.checked + 1
        limit = TOLERANCES[spec.dtype].output
        if not error <= limit:
            ran = layer.selection.decision.summary()
            raise WrongResultError(
                f"sequence {index} of {batch}, token {at}: error {error:.3g}, allowed {limit:g} "
                f"({spec}; {ran})"
            )
