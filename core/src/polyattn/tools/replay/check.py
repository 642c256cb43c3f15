"""Compares sampled tokens of every step with the float64 reference."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from polyattn import (
    Attention,
    Batch,
    KVCache,
    LatentAttention,
    LayerSpec,
    Recurrent,
    SparseAttention,
    StateCache,
)
from polyattn.errors import PolyattnError
from polyattn.families.attention import reference
from polyattn.families.attention.workload import token_error
from polyattn.families.mla import reference as reference_latent
from polyattn.families.recurrent import reference as reference_recurrent
from polyattn.families.sparse import reference as reference_sparse
from polyattn.families.sparse import workload as sparse
from polyattn.workload.compare import output_error
from polyattn.workload.tolerance import tolerance_of

HEADS = 4
"""Heads of an MLA layer, or channels of a recurrent one, that are checked at a time."""
RECURRENT_TOKENS = 256
"""Tokens of a recurrent layer's query that are checked: the reference takes one at a time."""


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
        keys: tuple[Tensor | None, Tensor | None],
        cache: KVCache | None,
        batch: Batch,
        out: Tensor,
    ) -> None:
        """Raise `WrongResultError` if a sampled token is off by more than the tolerance."""
        spec = layer.spec
        for index in self._sampled(batch):
            rows = slice(batch.starts[index], batch.starts[index + 1])
            last = batch.query_lens[index] - 1
            at = self._random.randrange(last + 1)
            if not spec.causal and (spec.sliding_window or spec.chunk_size or spec.alibi):
                at = last  # its position must be the last
            key, value = (None if tensor is None else tensor[rows] for tensor in keys)
            after = last - at if spec.causal else 0
            row = rows.start + at
            error = token_error(
                layer, query[row], (key, value), cache, batch, index, out[row], after
            )
            self._judge(layer, error, f"sequence {index} of {batch}, token {at}")

    def _sampled(self, batch: Batch) -> list[int]:
        """Draw up to `per_step` of the sequences that have a query."""
        indices = [i for i, n in enumerate(batch.query_lens) if n]
        return self._random.sample(indices, min(self.per_step, len(indices)))

    def _judge(
        self,
        layer: Attention | LatentAttention | Recurrent | SparseAttention,
        error: float,
        where: str,
    ) -> None:
        self.worst, self.checked = max(self.worst, error), self.checked + 1
        limit = tolerance_of(layer.spec).output
        if not error <= limit:
            raise WrongResultError(
                f"{where}: error {error:.3g}, allowed {limit:g} "
                f"({layer.spec}; {layer.group.selection.decision.summary()})"
            )

    def check_latent(
        self,
        layer: LatentAttention,
        query: Tensor,
        cache: KVCache,
        batch: Batch,
        choice: Tensor | None,
        out: Tensor,
    ) -> None:
        """As `check`, for a few heads of an MLA layer: a head's keys are made for the check."""
        spec = layer.spec
        heads = sorted(self._random.sample(range(spec.num_heads), min(HEADS, spec.num_heads)))
        alone = LayerSpec(
            num_heads=len(heads),
            head_size=spec.head_size,
            v_head_size=spec.v_head_size,
            scale=spec.scale,
            causal=False,
        )
        assert layer.weights is not None
        w_uk, w_uv = layer.weights
        for index in self._sampled(batch):
            rows, _ = reference.read_cache(cache, batch, index, layer.params)
            at = self._random.randrange(batch.query_lens[index])
            token = batch.starts[index] + at
            visible = torch.arange(batch.lens[index] - batch.query_lens[index] + 1 + at)
            if choice is not None:
                seen = len(visible)
                ids = choice[token, 0].tolist()
                slots = reference_sparse.chosen_slots(spec, ids, seen - 1, seen, [0], seen)
                visible = torch.tensor(slots, dtype=torch.int64)
            keys, values = reference_latent.keys_and_values(
                rows[visible, 0], (w_uk[heads], w_uv[heads])
            )
            expected, _ = reference.attend(alone, query[token : token + 1, heads], keys, values)
            error = output_error(out[token : token + 1, heads], expected)
            self._judge(layer, error, f"sequence {index} of {batch}, token {at}")

    def check_sparse(
        self,
        layer: SparseAttention,
        query: Tensor,
        cache: KVCache,
        batch: Batch,
        choice: Tensor | None,
        out: Tensor,
    ) -> None:
        """As `check`, for a layer over chosen keys; None: the newest."""
        for index in self._sampled(batch):
            at = self._random.randrange(batch.query_lens[index])
            error = sparse.token_error(layer, query, cache, batch, choice, out, index, at)
            self._judge(layer, error, f"sequence {index} of {batch}, token {at}")

    def sample_states(self, batch: Batch, states: StateCache) -> dict[int, Tensor]:
        """Return the states of a few sequences before a step, for `check_recurrent` after it."""
        assert batch.state_slots is not None
        slots = batch.state_slots
        return {i: states.data[slots[i]].clone() for i in self._sampled(batch)}

    def check_recurrent(
        self,
        layer: Recurrent,
        inputs: Sequence[Tensor],
        states: StateCache,
        batch: Batch,
        out: Tensor,
        sampled: dict[int, Tensor],
    ) -> None:
        """Check a few heads of the sampled sequences: outputs, and the state of a short query."""
        spec, form = layer.spec, layer.form
        assert batch.state_slots is not None
        size = HEADS if len(form.output) == 2 else 1
        each = spec.num_heads // spec.num_kv_heads
        for index, before in sampled.items():
            head = self._random.randrange(max(1, spec.num_heads - size + 1))
            heads = slice(head, head + size)
            groups = heads if each == 1 else slice(head // each, head // each + 1)
            part = spec.replace(num_heads=size, num_kv_heads=size if each == 1 else 1)
            count = min(batch.query_lens[index], RECURRENT_TOKENS)
            rows = slice(batch.starts[index], batch.starts[index] + count)

            def cut(tensor: Tensor, letters: str) -> Tensor:
                for dim, letter in enumerate(letters):
                    if letter in "HG":
                        by = [slice(None)] * dim + [heads if letter == "H" else groups]  # noqa: B023
                        tensor = tensor[tuple(by)]
                return tensor.detach().to("cpu", torch.float64)

            named = zip(form.inputs.items(), inputs, strict=True)
            exact_inputs = {name: cut(x[rows], letters) for (name, letters), x in named}
            params = {name: cut(p, form.params[name]) for name, p in layer.params.items()}
            state = cut(before, form.state)
            had = batch.lens[index] - batch.query_lens[index]
            if not had:
                state = torch.zeros_like(state)
            expected, after = reference_recurrent.scan(part, exact_inputs, params, state, had)
            result = out[rows][:, heads].reshape(count, -1)
            error = output_error(result, expected.reshape(count, -1))
            if count == batch.query_lens[index]:
                now = cut(states.data[batch.state_slots[index]], form.state)
                error = max(error, output_error(now.reshape(1, -1), after.reshape(1, -1)))
            self._judge(layer, error, f"sequence {index} of {batch}, head {head}")
