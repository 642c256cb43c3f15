"""Which backend should run a step? Each candidate's predicted time, and the fastest. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from polyattn.registry.info import BackendInfo
from polyattn.selection.prediction import (
    Ints,
    Predictor,
    Price,
    StepShape,
    Weighed,
    kind_of_step,
    shape_of_decodes,
)
from polyattn.selection.selection import Selection
from polyattn.spec.kinds import GraphCapture
from polyattn.spec.layer import LayerSpec
from polyattn.spec.timing import WINDOWLESS, TimingModel, all_seen

UNKNOWN = Price(0.0, 0.0, 0.0)
APART = 1.15
"""What each of two calls costs the host over a call that has the whole step, which needs no views of its
rows: on an H100's host 1.1 to 1.25 (2026-11-28)."""
ALL, DECODES, REST = "all rows", "rows of one token", "longer rows"


class CallChoice(NamedTuple):
    """One call of a step: its rows, its phase, its backend, and each candidate's prediction.

    `candidates` have a model for this `kind` of call; if the selection's own choice has none, it stays.
    `name`: the backend, empty before it is chosen.
    `others`: the microseconds of the step's other call, the device's and the host's.
    """

    phase: str
    kind: str
    rows: str
    shape: StepShape
    candidates: Sequence[Weighed]
    name: str = ""
    others: tuple[float, float] | None = None

    @property
    def times(self) -> dict[str, float]:
        """The device's microseconds with each candidate."""
        return Predictor.evaluate(self.candidates, self.shape)

    @property
    def prices(self) -> dict[str, float]:
        """The step's microseconds with each candidate: what the slower of device and host takes."""
        us, host = self.others or (0.0, 0.0)
        apart = APART if self.others else 1.0
        return {
            name: max(us + price.us, host + apart * price.host)
            for name, price in Predictor.prices(self.candidates, self.shape).items()
        }


class StepChoice:
    """Chooses among the candidates of each phase, for layers of one spec.

    `phases` has the candidates of each phase by name. `chosen` has the selection's backend of each
    phase, which serves the calls that no model covers.
    """

    def __init__(
        self,
        spec: LayerSpec,
        models: Iterable[TimingModel],
        phases: Mapping[str, Mapping[str, BackendInfo]],
        chosen: Mapping[str, str],
    ):
        self.spec, self.phases, self.chosen = spec, phases, chosen
        models, self._seen = tuple(models), all_seen(spec)
        self._within: StepChoice | None = None  # of steps within the window
        if within := [replace(m, windowless=False) for m in models if m.windowless]:
            others = [m for m in models if m.backend not in WINDOWLESS]
            self._within = StepChoice(spec, [*others, *within], phases, chosen)
        self.predictor = Predictor(spec, models)
        self._deals = self.predictor.deals["decode"]
        decode, prefill = phases["decode"], phases["prefill"]
        # A backend named for one phase keeps it: one call for all needs one that may serve both.
        self._mixing = [n for n, i in prefill.items() if _mixes(i) and n in decode]
        # Decodes are most steps of an engine, and the same few may run each of them.
        self._decoding = self.predictor.among("decode", decode)
        if chosen.get("decode") not in [weighed.name for weighed in self._decoding]:
            self._decoding = []  # without its own time the selection's choice stays
        if spec.graph_capture:  # replayed, they cost the host nothing
            self._decoding = self.predictor.captured(self._decoding)

    def decode(self, lens: Ints, longest: int | None = None) -> str:
        """Return the backend for a step of single-token rows of that many keys. A few microseconds.

        `longest`: the largest of `lens`, where it is known.
        """
        if self._within is not None:
            longest = int(np.max(lens, initial=0)) if longest is None else longest
            if longest <= self._seen:
                return self._within.decode(lens, longest)
        if len(self._decoding) < 2:
            return self._decoding[0].name if self._decoding else self.chosen["decode"]
        return self.predictor.fastest(
            self._decoding, shape_of_decodes(self.spec, lens, longest, self._deals)
        )

    def calls(self, queries: Ints, lens: Ints) -> tuple[CallChoice, ...]:
        """Return the calls of a step of these rows: the fastest way to run it that is known."""
        q, n = np.asarray(queries, np.int64), np.asarray(lens, np.int64)
        if self._within is not None and n.max(initial=0) <= self._seen:
            return self._within.calls(q, n)
        kind = kind_of_step(q, n)
        if kind == "decode":
            return self._fastest(self._part("decode", kind, ALL, self.predictor.shape(kind, q, n)))
        if kind == "short":
            return (self._short(int(q.max()), self.predictor.shape(kind, q, n)),)
        if kind != "mixed":
            return self._fastest(self._part("prefill", kind, ALL, self.predictor.shape(kind, q, n)))
        some = q > 0
        if not some.all():  # a row without tokens takes no time
            q, n = q[some], n[some]
        ones = q == 1
        more, longer = q[~ones], n[~ones]
        kind = kind_of_step(more, longer)
        rest = self.predictor.shape(kind, more, longer)
        if not ones.any():
            return self._fastest(self._part("prefill", kind, ALL, rest))
        decodes = shape_of_decodes(self.spec, n[ones], deals=self._deals)
        apart = self._fastest(
            self._part("decode", "decode", DECODES, decodes, False),
            self._part("prefill", kind, REST, rest),
        )
        if any(call.name not in [w.name for w in call.candidates] for call in apart):
            return apart  # an unmeasured time can't be compared
        pair = apart[0].prices[apart[0].name]
        candidates = self.predictor.among("mixed", self._mixing)
        if not candidates:
            return apart
        whole = self.predictor.shape("mixed", q, n)
        if not self.predictor.fastest(candidates, whole, pair):
            return apart
        return self._fastest(CallChoice("prefill", "mixed", ALL, whole, candidates))

    def _short(self, longest: int, shape: StepShape) -> CallChoice:
        """Rows of a few tokens: decodes, if a backend takes them as such."""
        infos = self.phases["decode"].values()
        takes = [i.name for i in infos if i.capabilities.decode_query_lens >= longest]
        usual = "decode" if self.chosen["decode"] in takes else "prefill"
        captured = self.spec.graph_capture >= GraphCapture.UNIFORM
        among = [*takes, *self.phases["prefill"]]
        part = self._part(usual, "short", ALL, shape, captured, among)
        name = self._alone(part)
        phase = usual if name == self.chosen[usual] else "decode"
        return part._replace(phase=phase if name in takes else "prefill", name=name)

    def _part(
        self,
        phase: str,
        kind: str,
        rows: str,
        shape: StepShape,
        captured: bool | None = None,
        among: Iterable[str] | None = None,
    ) -> CallChoice:
        """Return a call with its candidates; a captured one costs the host nothing."""
        candidates = self.predictor.among(kind, self.phases[phase] if among is None else among)
        if captured or (captured is None and kind == "decode" and self.spec.graph_capture):
            candidates = self.predictor.captured(candidates)
        return CallChoice(phase, kind, rows, shape, candidates)

    def _alone(self, part: CallChoice) -> str:
        """Return the backend of a step of one call; the selection's own if that has no time."""
        name = self.chosen[part.phase]
        if part.kind == "mixed" or any(name == weighed.name for weighed in part.candidates):
            return self.predictor.fastest(part.candidates, part.shape)
        return name

    def _fastest(self, *parts: CallChoice) -> tuple[CallChoice, ...]:
        """Give each call of a step its backend; without a time of the selection's own, that one stays.

        The device's times of calls add up, and so do the host's, `APART` counted; the larger sum is what
        the step takes.
        """
        if len(parts) == 1:
            return (parts[0]._replace(name=self._alone(parts[0])),)
        options: list[list[tuple[str, Price]]] = []
        for part in parts:
            usual = self.chosen[part.phase]
            known = any(weighed.name == usual for weighed in part.candidates)
            prices = self.predictor.contending(part.candidates, part.shape) if known else {}
            options.append(list(prices.items()) or [(usual, UNKNOWN)])

        def us(way: Sequence[tuple[str, Price]]) -> float:
            prices = [price for _, price in way]
            return max(sum(p.compared for p in prices), sum(APART * p.host for p in prices))

        (first, own), (second, other) = min(product(*options), key=us)
        return (
            parts[0]._replace(name=first, others=(other.us, APART * other.host)),
            parts[1]._replace(name=second, others=(own.us, APART * own.host)),
        )


def _mixes(info: BackendInfo) -> bool:
    """Whether a backend takes a whole step in one call."""
    return "mixed" in info.capabilities.phases


def step_choice(selection: Selection) -> StepChoice | None:
    """Return how a selection chooses for each step, without loading anything; None without times."""
    if not selection.timings:
        return None
    known = {model.backend for model in selection.timings}
    chosen = {p: i.name for p, i in selection.backends if p in ("decode", "prefill")}
    phases = {
        phase: {i.name: i for i in infos if i.name in known or i.name == chosen.get(phase)}
        for phase, infos in selection.candidates
        if phase in ("decode", "prefill")
    }
    return StepChoice(selection.spec, selection.timings, phases, chosen)
