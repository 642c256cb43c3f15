"""One step of a recurrence: poisoned states, and the published recurrence in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import normalize

from polyattn.families.recurrent import reference
from polyattn.families.recurrent.layer import Recurrent, input_dtype
from polyattn.runtime.cache.scales import output_dtype
from polyattn.runtime.group import LayerGroup, StepPlan
from polyattn.runtime.step.batch import Batch
from polyattn.spec.kinds import AttentionKind
from polyattn.spec.layer import LayerSpec
from polyattn.spec.recurrence import form_of, shape_of
from polyattn.workload.base import Workload, picked_rows, spoil_requests
from polyattn.workload.compare import row_errors
from polyattn.workload.dice import Dice
from polyattn.workload.judge import place_of
from polyattn.workload.pages import bits, unchanged
from polyattn.workload.steps import USUAL, Lengths, lens_of, pairs
from polyattn.workload.tolerance import tolerance_of

GROWTH, FORGETTING = 0.03, 40.0
"""What a token multiplies the state by in unusual inputs: up to exp(GROWTH), down to exp(-FORGETTING).

No trained model grows for long; none is forbidden to.
"""
RATES = {"g", "w"}
"""Inputs that are exponents of each token's own."""
FEW = 64
"""Tokens of a sequence that `token_error` looks at, because the reference goes token by token."""
RESETS = (-900.0, -1e6, -torch.inf)
"""Exponents by which a token forgets all: another text begins within a sequence."""


class RecurrentWorkload(Workload):
    """One step of a recurrent layer.

    - `tokens`: the inputs, in the form's order.
    - `states`: the cache: states of sequences that continue, NaN elsewhere; `used`: the slots that the
      step writes.
    """

    def __init__(
        self, layer: Recurrent, lengths: Lengths, dice: Dice, *, numbers: str = USUAL,
        targets: str = "", like: RecurrentWorkload | None = None,
    ):  # fmt: skip
        """Draw a step.

        - `numbers`: those of `unusual` are unusual.
        - `targets`: states end elsewhere, of `sequences` or `tokens`.
        - `like`: another layer's step, whose slots this one has too.
        """
        self.layer, self.lengths, self.dice, self.numbers = layer, lengths, dice, numbers
        self.tokens = self.more(sum(q for q, _ in lengths))
        shape = layer.group.allocate_states(1).data.shape[1:]
        self.starts = recurrent_state(self.spec, (len(lengths), *shape), dice.generator)
        self.starts = self.starts.to(self.device)
        slots = None if like is None else like.slots
        self._lay(dice.order(len(lengths) + 2).tolist() if slots is None else slots)
        if targets:
            self._move(by_token=targets == "tokens")

    @classmethod
    def layer_of(
        cls, group: LayerGroup, dice: Dice, *, checks: bool = True, numbers: str = USUAL
    ) -> Recurrent:
        """Return a recurrent layer with random parameters."""
        params = recurrent_params(group.spec, dice.generator)
        for name in {"A", "decay"} & params.keys():
            params[name] = rates(params[name], numbers, dice.generator)
        return Recurrent(group, checks=checks, **params)

    def more(self, count: int) -> list[Tensor]:
        """Return the inputs of that many tokens, in the form's order."""
        inputs = recurrent_inputs(self.spec, count, self.dice.generator, self.device)
        for index, name in enumerate(self.layer.form.inputs):
            if name in RATES:
                inputs[index] = rates(inputs[index], self.numbers, self.dice.generator)
        return inputs

    def _lay(self, slots: Sequence[int]) -> None:
        """Put the states of sequences that go on into these slots."""
        self.states = self.group.allocate_states(len(self.lengths) + 2)
        self.states.data.fill_(torch.nan)
        self.slots, own, self.used = list(slots), [], []
        for (query, length), slot, start in zip(self.lengths, slots, self.starts, strict=False):
            padding = query > 0 and length == 0
            own.append(-1 if padding else slot)
            if length > query:
                self.states.data[slot] = start.to(self.states.data)
            if query and not padding:
                self.used.append(slot)
        self.batch = self.step(self.lengths, torch.tensor(own, dtype=torch.int64, device="cpu"))

    def step(self, lengths: Lengths, slots: Tensor, targets: Tensor | None = None) -> Batch:
        """Return a batch over states of this workload."""
        targets = None if targets is None else targets.to(self.device)
        return Batch.from_lens(
            *lens_of(lengths),
            state_slots=slots.to(self.device),
            state_targets=targets,
            device=self.device,
        )

    def _move(self, by_token: bool) -> None:
        queries, lens = lens_of(self.lengths)
        held, slots = self.states.data, self.batch.state_slots
        assert slots is not None
        real = [query if length else 0 for query, length in self.lengths]
        counts = real if by_token else [min(count, 1) for count in real]
        free = (self.dice.order(sum(counts)) + len(held)).tolist()
        targets = torch.full((len(lens), max(counts)), -1, dtype=torch.int64, device="cpu")
        for row, count in enumerate(counts):
            targets[row, :count] = torch.tensor([free.pop() for _ in range(count)], device="cpu")
        self.used = targets[targets >= 0].tolist()
        if by_token:  # as engines have it: a sequence goes on from one of its own slots
            row = max(range(len(lens)), key=lambda i: (lens[i] > queries[i], queries[i]))
            self.used[self.used.index(int(targets[row, -1]))] = int(slots[row])
            targets[row, -1] = slots[row]
        self.states = self.group.allocate_states(len(held) + sum(counts))
        self.states.data.fill_(torch.nan)
        self.states.data[: len(held)] = held
        self.batch = self.step(self.lengths, slots, targets if by_token else targets[:, 0])

    def picked(self, requests: Sequence[int], spoilt: Sequence[int] = ()) -> Self:
        queries, _ = lens_of(self.lengths)
        rows, chosen = picked_rows(queries, requests, self.device), list(requests)
        work = self.but(
            lengths=[self.lengths[i] for i in requests],
            starts=self.starts[chosen],
            tokens=[tensor[rows] for tensor in self.tokens],
        )
        queries, ones = lens_of(work.lengths)[0], [1] * len(chosen)
        parts = [*((tensor, queries) for tensor in work.tokens), (work.starts, ones)]
        spoil_requests(parts, spoilt, self.dice)
        work._lay(self.dice.order(len(chosen) + 2).tolist())
        output, after = self.expected
        ends = work.states.data.to("cpu", torch.float64, copy=True)
        ends[work.slots[: len(chosen)]] = after[[self.slots[i] for i in requests]]
        work.expected = output[rows.cpu()], ends
        work.used = [
            slot
            for i, slot in enumerate(work.slots[: len(chosen)])
            if slot in work.used and i not in spoilt
        ]
        return work

    @property
    def inputs(self) -> tuple[Any, ...]:
        return tuple(self.tokens)

    def tensors(self) -> dict[str, Tensor]:
        return dict(zip(self.layer.form.inputs, self.tokens, strict=True))

    @cached_property
    def held(self) -> Tensor:
        """The states before the step."""
        return self.states.data.clone()

    @cached_property
    def expected(self) -> tuple[Tensor, Tensor]:
        return reference.forward(
            self.spec, self.tensors(), self.layer.params, self.held, self.batch
        )

    def call(self) -> Any:
        return self.layer(*self.tokens, states=self.states, plan=self.plan, out=self.out)

    @cached_property
    def out(self) -> Tensor:
        """Where the output goes; NaN at first. A captured step has more rows than its batch."""
        shape = self.layer.output_shape(len(self.tokens[0]))
        return torch.full(shape, torch.nan, dtype=torch.float32, device=self.device).to(
            output_dtype(self.spec)
        )

    def run(self, plan: StepPlan | None = None) -> Tensor:
        self.__dict__.pop("out", None)
        self.layer.run(plan or self.plan, self.inputs, self.states, self.out)
        return self.out

    def errors(self, rows: Tensor | None = None) -> Iterator[tuple[str, float, float]]:
        limit, real = tolerance_of(self.spec).output, self.real_rows()
        rows = torch.arange(len(real), device="cpu") if rows is None else rows
        rows = rows[real[rows]]
        pairs = [
            ("output", self.out[rows.to(self.device)], self.expected[0][rows]),
            ("state", self.states.data[self.used], self.expected[1][self.used]),
        ]
        for what, actual, right in pairs:
            count = len(right)
            yield what, _error(actual, right) if count else 0.0, limit

    def token_error(self, index: int) -> float:
        """Return the error of a sequence's first tokens, after one call.

        For steps too long for the reference.
        """
        (query, length), begin = self.lengths[index], self.batch.starts[index]
        rows = slice(begin, begin + min(query, FEW))
        tokens, params = (
            {name: tensor.detach().to("cpu", torch.float64) for name, tensor in named.items()}
            for named in ({n: t[rows] for n, t in self.tensors().items()}, self.layer.params)
        )
        start = self.starts[index].to(self.states.data.dtype) * (length > query)
        before = start.to("cpu", torch.float64)
        right, _ = reference.scan(self.spec, tokens, params, before, length - query)
        return _error(self.out[rows], right)

    def check(self, label: str = "", plan: StepPlan | None = None) -> Tensor:
        self.__dict__.pop("held", None)  # states go on from where they are
        self.__dict__.pop("expected", None)
        params = {name: tensor.clone() for name, tensor in self.layer.params.items()}
        out = super().check(label, plan)
        for name, then in params.items():
            unchanged(name, self.layer.params[name], then)
        return out

    def check_memory(self) -> None:
        now = self.states.data
        rest = [slot for slot in range(len(now)) if slot not in self.written()]
        same = torch.equal(bits(now[rest]), bits(self.held[rest]))
        assert same, "a slot that no sequence of the step has was written"

    def written(self) -> set[int]:
        """Return the slots that the step may write."""
        slots, targets = self.batch.state_slots, self.batch.state_targets
        assert slots is not None
        if targets is not None:
            return set(self.used)
        pairs = zip(slots.tolist(), self.batch.query_lens, strict=True)
        return {slot for slot, query in pairs if slot >= 0 and query}

    def compare(self, out: Tensor, lse: Tensor | None, label: str = "") -> None:
        real = self.real_rows()
        tokens, used = real.nonzero().flatten(), self.used
        states = self.states.data[used], self.expected[1][used]

        def token(row: int) -> str:
            return place_of(self.batch, int(tokens[row]))

        self.agree(out[real], self.expected[0][real], f"{label}the output", token)
        self.agree(*states, f"{label}the state", lambda row: self._slot(used[row]))

    def agree(
        self,
        actual: Tensor,
        right: Tensor,
        what: str,
        place: Callable[[int], str] = "row {}".format,
    ) -> None:
        """Assert that two tensors agree: by token, or by slot. `place`: which one a row is, in words."""
        if not len(right):
            return
        errors, limit = _errors(actual, right), tolerance_of(self.spec).output
        worst, apart = int(errors.argmax()), (actual.cpu() - right.cpu()).double()
        heads = apart[worst].nan_to_num(torch.inf).reshape(apart.shape[1], -1).norm(dim=-1)
        assert float(errors[worst]) <= limit, (
            f"{what} is off by {float(errors[worst]):.3g} (allowed {limit:g}): "
            f"{int((errors > limit).sum())} of {len(errors)} rows; the worst is head "
            f"{int(heads.argmax())} of {place(worst)}; {self.spec}; (query, length) "
            f"{pairs(self.batch)}; {self.who}"
        )

    def _slot(self, slot: int) -> str:
        """Say which slot that is, and whose, if a sequence of the step starts from it."""
        slots = [] if self.batch.state_slots is None else self.batch.state_slots.tolist()
        return f"slot {slot}" + (f" (sequence {slots.index(slot)})" if slot in slots else "")

    def real_rows(self) -> Tensor:
        """Return which tokens belong to no padding row."""
        assert self.batch.state_slots is not None
        real = (self.batch.state_slots >= 0).cpu()
        return torch.repeat_interleave(
            real, torch.tensor(self.batch.query_lens, dtype=torch.int64, device="cpu")
        )


WORKLOAD = RecurrentWorkload


def _error(actual: Tensor, right: Tensor) -> float:
    return float(_errors(actual, right).max())


def _errors(actual: Tensor, right: Tensor) -> Tensor:
    return row_errors(actual.reshape(len(right), -1), right.cpu().reshape(len(right), -1))


def unusual(spec: LayerSpec) -> list[str]:
    """Return the unusual numbers that a layer's steps may be drawn with.

    What forgets by a step grows by `exp(FORGETTING)` by a negative one, which float16 doesn't hold.
    """
    signed = spec.recurrent is not None and not spec.recurrent.dt_softplus
    resets = ["resets"] if RATES & form_of(spec).inputs.keys() else []
    return ["growing", *([] if signed else ["forgetting"]), *resets]


def rates(usual: Tensor, numbers: str, generator: torch.Generator) -> Tensor:
    """Return exponents of the same shape: a state grows, forgets all at once, or at some tokens."""
    if numbers == "growing" and usual.numel():
        return (usual.abs() / usual.abs().max().clamp(min=1e-6) * GROWTH).to(usual.dtype)
    if numbers == "forgetting":
        return usual - FORGETTING
    if numbers == "resets":
        drawn = torch.randint(6 * len(RESETS), usual.shape, generator=generator, device="cpu")
        resets = usual.float()  # float16 has no -1e6: it becomes -inf
        for which, rate in enumerate(RESETS):
            resets.masked_fill_((drawn == which).to(usual.device), rate)
        return resets.to(usual.dtype)
    return usual


def recurrent_inputs(
    spec: LayerSpec, tokens: int, generator: torch.Generator, device: str | torch.device = "cpu"
) -> list[Tensor]:
    """Return inputs of a recurrent layer in its form's order: steps short, gates within (0, 1)."""
    inputs: list[Tensor] = []
    for name, letters in form_of(spec).inputs.items():
        tensor = torch.randn(
            shape_of(spec, letters, tokens), generator=generator, dtype=torch.float32, device="cpu"
        )
        if name == "dt":
            tensor = tensor * 0.5 - 1.0
            if spec.recurrent and not spec.recurrent.dt_softplus:  # steps, some negative
                size = torch.nn.functional.softplus(tensor)
                tensor = torch.where(tensor < -1.6, -size, size)
        elif name in ("g", "w"):
            tensor = -torch.nn.functional.softplus(tensor - 2.0)
        elif name == "beta":
            tensor = torch.sigmoid(tensor)
        elif name in ("q", "k") and spec.kind in (AttentionKind.GDN, AttentionKind.KDA):
            drawn = torch.rand(
                tensor.shape[:-1], generator=generator, dtype=torch.float32, device="cpu"
            )
            # Of a layer that norms them powers of two: a library may round what it has normed.
            normed = spec.recurrent and spec.recurrent.qk_norm
            length = torch.exp2(torch.floor(4 * drawn)) if normed else 1 - drawn / 2
            tensor = normalize(tensor, dim=-1) * length[..., None]
        elif name == "a":
            tensor = -normalize(tensor, dim=-1)
        elif name == "b":  # a model writes at most as much as it removed
            tensor = -inputs[-1].to("cpu", tensor.dtype) * torch.sigmoid(tensor)
        elif name in ("r", "k", "B", "C"):
            tensor = tensor / math.sqrt(tensor.shape[-1])
        inputs.append(tensor.to(input_dtype(spec, name)).to(device))
    return inputs


def recurrent_state(spec: LayerSpec, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return states (…, as the form says) that earlier tokens may have left, in float32."""
    state = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * 0.5
    if spec.kind is AttentionKind.PHI_LINEAR:  # the last column sums up weights, none negative
        state[..., -1] = state[..., -1].abs() + 1.0
    return state


def recurrent_params(spec: LayerSpec, generator: torch.Generator) -> dict[str, Tensor]:
    """Return a recurrent layer's parameters: A and decay negative, as every model has them."""
    params = {}
    for name, letters in form_of(spec).params.items():
        tensor = torch.randn(
            shape_of(spec, letters), generator=generator, dtype=torch.float32, device="cpu"
        )
        if name == "A":
            tensor = -torch.exp(tensor * 0.5)
        elif name == "decay":
            drawn = torch.rand(tensor.shape, generator=generator, dtype=torch.float32, device="cpu")
            tensor = -drawn * 0.5
        elif name == "weight":
            tensor = tensor / math.sqrt(tensor.shape[-1])
        elif name == "dt_bias" and spec.recurrent and not spec.recurrent.dt_softplus:
            tensor = tensor.abs() * 0.1
        params[name] = tensor
    return params
