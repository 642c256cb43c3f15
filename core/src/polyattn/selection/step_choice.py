"""Which backend should run a step? Each candidate's predicted time, and the fastest. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from polyattn.registry.info import BackendInfo
from polyattn.selection.pieces import largest
from polyattn.selection.prediction import (
    Array,
    Ints,
    Predictor,
    Price,
    StepShape,
    Weighed,
    dealt_decodes,
    kind_of_step,
    shape_of_decodes,
)
from polyattn.selection.selection import Selection
from polyattn.spec.key_ranges import all_seen
from polyattn.spec.kinds import GraphCapture
from polyattn.spec.layer import LayerSpec
from polyattn.spec.timing import WINDOWLESS, TimingModel

NO_ROWS = StepShape(0, 0, 0, 0, 0, 0, 0)
UNKNOWN = Price(0.0, 0.0, 0.0)
APART = 1.15
"""What each of two calls costs the host over a call that has the whole step, which needs no views of its
rows: on an H100's host 1.1 to 1.25 (2026-11-28)."""
QUEUED = 4.0
"""Microseconds that two calls take less than each alone: the second is launched while the first runs. On
an H200 2.5 where they take more than 40, else 5 (2026-11-30)."""
NEAR = 1.25
"""Of the least prediction of decodes, up to which others are looked at again, by how each deals keys out.
On an H200 a step in four or five is that near. Of 1,969 steps 5 are above 1.10 of the best with 1.15, 3
with 1.25 (2026-11-30)."""
KINDS_OF_CALLS = ("decode", "decode"), ("prefill", "prefill"), ("prefill", "chunked")
"""Phases, and kinds of their calls of which a mixed step has two."""
ALL, DECODES, REST = "all rows", "rows of one token", "longer rows"


class CallChoice(NamedTuple):
    """One call of a step: its rows, its phase, its backend, and each candidate's prediction.

    `candidates` have a model for this `kind` of call; if the selection's own choice has none, it stays.
    `name`: the backend, empty before it is chosen. `other`: the step's other call, if it has two.
    """

    phase: str
    kind: str
    rows: str
    shape: StepShape
    candidates: Sequence[Weighed]
    name: str = ""
    other: CallChoice | None = None

    @property
    def times(self) -> dict[str, float]:
        """The device's microseconds with each candidate."""
        return Predictor.evaluate(self.candidates, self.shape)

    @property
    def price(self) -> Price:
        """The price with the call's backend."""
        own = [weighed for weighed in self.candidates if weighed.name == self.name]
        return Predictor.prices(own, self.shape).get(self.name, UNKNOWN)

    @property
    def most(self) -> Price:
        """At the most, the price with the call's backend."""
        for weighed in self.candidates:
            if weighed.name == self.name:
                us = weighed.between(self.shape)[1]
                return Price(us, us * weighed.factor, weighed.host_us(self.shape))
        return UNKNOWN

    @property
    def prices(self) -> dict[str, float]:
        """The step's microseconds with each candidate."""
        prices = Predictor.prices(self.candidates, self.shape)
        if self.other is None:
            return {name: max(price.us, price.host) for name, price in prices.items()}
        other = self.other.price
        return {name: together(other, price.us, price.host) for name, price in prices.items()}


def together(price: Price, us: float, host: float, compared: bool = False) -> float:
    """Return the microseconds of a step of two calls: what the slower of device and host takes.

    The device's times add up, but for `QUEUED` where a host queues calls, and so do the host's, `APART`
    counted. `compared`: with margins.
    """
    device = (price.compared if compared else price.us) + us - (QUEUED if host else 0.0)
    return max(device, APART * price.host + APART * host)


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
        among, self._deals = self.predictor.among, self.predictor.deals["decode"]
        self._candidates = {kind: among(kind, phases[phase]) for phase, kind in KINDS_OF_CALLS}
        self._takers: dict[int, tuple[str, list[str], list[Weighed]]] = {}
        # Decodes are most steps of an engine, and the same few may run each of them.
        self._decoding = self._call("decode", "decode", ALL, NO_ROWS)
        if spec.graph_capture:  # replayed, they cost the host nothing
            captured = self.predictor.captured(self._decoding.candidates)
            self._decoding = self._decoding._replace(candidates=captured)
        self._decodes_compete = self._knows(self._decoding) and len(self._decoding.candidates) > 1
        # How keys are dealt out in a captured step is another matter.
        dealt = [] if spec.graph_capture else among("dealt", phases["decode"])
        self._dealt = {weighed.name: weighed for weighed in dealt}
        self._deals_near = self.predictor.deals["dealt"]
        self._looks: dict[tuple[bool, ...], list[Weighed]] = {}  # by which candidates are near
        # A backend named for one phase keeps it: one call for all needs one that may serve both.
        mixing = [n for n, i in phases["prefill"].items() if _mixes(i) and n in phases["decode"]]
        self._mixing = among("mixed", mixing)
        self._host_of_two: float = self._least_host()
        if self._within:
            self._host_of_two = min(self._host_of_two, self._within._host_of_two)

    def decode(self, lens: Ints, longest: int | None = None) -> str:
        """Return the backend for a step of single-token rows of that many keys. A few microseconds.

        `longest`: the largest of `lens`, where it is known.
        """
        if self._within is not None:
            longest = int(np.max(lens, initial=0)) if longest is None else longest
            if longest <= self._seen:
                return self._within.decode(lens, longest)
        if not self._decodes_compete:
            return self.chosen["decode"]
        lens = np.asarray(lens, np.int64)
        shape = shape_of_decodes(self.spec, lens, longest, self._deals)
        first, some, shape = self._looked_at(shape, lens)
        return first or self.predictor.fastest(some, shape)

    def _looked_at(self, shape: StepShape, lens: Array) -> tuple[str, Sequence[Weighed], StepShape]:
        """Return the fastest candidate of decodes, empty where others are near; all; and the shape.

        The near ones then deal keys out, where their way is known.
        """
        some = self._decoding.candidates
        times = [max(w.us(shape) * w.factor, w.host_us(shape)) for w in some]
        least = min(times)
        most = NEAR * least if self._dealt else least
        near = tuple([us <= most for us in times])
        if near.count(True) == 1 or not self._dealt:
            return some[times.index(least)].name, some, shape
        if near not in self._looks:
            pairs = zip(some, near, strict=True)
            self._looks[near] = [self._dealt.get(w.name, w) if n else w for w, n in pairs]
        return "", self._looks[near], dealt_decodes(self.spec, shape, lens, self._deals_near)

    def calls(self, queries: Ints, lens: Ints) -> tuple[CallChoice, ...]:
        """Return the calls of a step of these rows: the fastest way to run it that is known."""
        q, n = np.asarray(queries, np.int64), np.asarray(lens, np.int64)
        if self._within is not None and n.max(initial=0) <= self._seen:
            return self._within.calls(q, n)
        kind = kind_of_step(q, n)
        if kind == "mixed":
            return self._mixed(q, n)
        shape = self.predictor.shape(kind, q, n)
        if kind == "short":
            return (self._short(int(q.max()), shape),)
        if kind == "decode":
            call = self._decoding._replace(shape=shape)
            if not self._decodes_compete:
                return (call._replace(name=self.chosen["decode"]),)
            first, some, shape = self._looked_at(shape, n)
            first = first or self.predictor.fastest(some, shape)
            return (call._replace(candidates=some, shape=shape, name=first),)
        call = self._call("prefill", kind, ALL, shape)
        return (call._replace(name=self._alone(call)),)

    def _short(self, longest: int, shape: StepShape) -> CallChoice:
        """Rows of a few tokens: decodes, if a backend takes them as such."""
        if longest not in self._takers:
            self._takers[longest] = self._taking(longest)
        usual, takes, candidates = self._takers[longest]
        call = CallChoice(usual, "short", ALL, shape, candidates)
        name = self._alone(call)
        phase = usual if name == self.chosen[usual] else "decode"
        return call._replace(phase=phase if name in takes else "prefill", name=name)

    def _taking(self, longest: int) -> tuple[str, list[str], list[Weighed]]:
        """Return the usual phase of such rows, who takes them as decodes, and all candidates."""
        infos = self.phases["decode"].values()
        takes = [i.name for i in infos if i.capabilities.decode_query_lens >= longest]
        candidates = self.predictor.among("short", [*takes, *self.phases["prefill"]])
        if self.spec.graph_capture >= GraphCapture.UNIFORM:
            candidates = self.predictor.captured(candidates)
        return "decode" if self.chosen["decode"] in takes else "prefill", takes, candidates

    def _mixed(self, q: Array, n: Array) -> tuple[CallChoice, ...]:
        """Single tokens and longer rows: one call has all, or each has its own."""
        if np.count_nonzero(q) < len(q):  # a row without tokens takes no time
            q, n = q[q > 0], n[q > 0]
        ones = q == 1
        more = np.flatnonzero(~ones)
        ones = np.flatnonzero(ones)
        if not len(ones):
            kind = kind_of_step(q, n)
            call = self._call("prefill", kind, ALL, self.predictor.shape(kind, q, n))
            return (call._replace(name=self._alone(call)),)
        whole = CallChoice("prefill", "mixed", ALL, NO_ROWS, self._mixing)
        if self._mixing:
            whole = whole._replace(shape=self.predictor.shape("mixed", q, n))
            # What two calls cost the host is known before their rows are looked at.
            if name := self.predictor.fastest(self._mixing, whole.shape, self._host_of_two):
                return (whole._replace(name=name),)
        longer, behind, lens = q[more], n[more], n[ones]
        kind, side = kind_of_step(longer, behind), self._side(behind)
        rest = side._call("prefill", kind, REST, side.predictor.shape(kind, longer, behind))
        side = self._side(lens)
        shape = shape_of_decodes(self.spec, lens, deals=side._deals)
        some: Sequence[Weighed] = side._candidates["decode"]
        if side._decodes_compete and side._dealt:
            _, some, shape = side._looked_at(shape, lens)
        decodes = CallChoice("decode", "decode", DECODES, shape, some)
        floors = [[w.least(c.shape) for w in c.candidates] for c in (decodes, rest)]
        # An unmeasured time can't be compared.
        if not (self._mixing and self._knows(decodes) and self._knows(rest)):
            return self._apart(decodes, rest, floors)
        fastest, mixing = self.predictor.fastest, self._mixing
        least = _least_together(decodes, rest, floors)
        name = fastest(mixing, whole.shape, least, deal=False)
        if not name:  # it may take more than a pair does at the least
            decodes, rest = self._apart(decodes, rest, floors)
            bounds = [(w.between(whole.shape)[0], w) for w in mixing]
            least = min([max(us * w.factor, w.host_us(whole.shape)) for us, w in bounds])
            (first, _, of_first), (us, _, host) = decodes.most, rest.most
            if least < together(Price(first, 0.0, of_first), us, host):
                us, _, host = rest.price
                name = fastest(mixing, whole.shape, together(decodes.price, us, host))
            if not name:
                return decodes, rest
        return (whole._replace(name=name),)

    def _side(self, lens: Array) -> StepChoice:
        """Return what knows the times of one of two calls: each may be within the window by itself."""
        return self._within if self._within and largest(lens) <= self._seen else self

    def _call(self, phase: str, kind: str, rows: str, shape: StepShape) -> CallChoice:
        """Return a call with its candidates."""
        return CallChoice(phase, kind, rows, shape, self._candidates[kind])

    def _least_host(self) -> float:
        """Return what a mixed step's two calls cost the host at the least; 0 if a time isn't known."""
        calls = [self._call(*call, ALL, NO_ROWS) for call in KINDS_OF_CALLS]
        if not all(map(self._knows, calls)):
            return 0.0
        first, *others = (min(w.host for w in call.candidates) for call in calls)
        return together(Price(0.0, 0.0, first), 0.0, min(others))

    def _knows(self, call: CallChoice) -> bool:
        """Whether the selection's own choice has a time."""
        usual = self.chosen.get(call.phase)
        return any(usual == weighed.name for weighed in call.candidates)

    def _alone(self, call: CallChoice) -> str:
        """Return the backend of a step of one call; the selection's own if that has no time."""
        if self._knows(call):
            return self.predictor.fastest(call.candidates, call.shape)
        return self.chosen[call.phase]

    def _undominated(self, decodes: CallChoice, floors: Sequence[float]) -> dict[str, Price]:
        """Return the prices of decodes that none beats on the device and the host alike.

        Without a time of the selection's own, that one stays.
        """
        if not self._knows(decodes):
            return {self.chosen["decode"]: UNKNOWN}
        some, shape, prices = decodes.candidates, decodes.shape, dict[int, Price]()
        for least, i in sorted([(floors[i] * w.factor, i) for i, w in enumerate(some)]):
            weighed, host = some[i], some[i].host_us(shape)
            if any(p.compared < least and p.host <= host for p in prices.values()):
                continue  # its keys needn't be dealt out
            least = weighed.between(shape)[0] * weighed.factor
            if any(p.compared < least and p.host <= host for p in prices.values()):
                continue
            us = weighed.us(shape)
            prices[i] = Price(us, us * weighed.factor, host)
        firsts, most = {}, math.inf
        for i in sorted(prices, key=lambda i: (prices[i].compared, i)):
            if prices[i].host < most:
                firsts[some[i].name], most = prices[i], prices[i].host
        return firsts

    def _apart(
        self, decodes: CallChoice, rest: CallChoice, floors: Sequence[Sequence[float]]
    ) -> tuple[CallChoice, CallChoice]:
        """Give both calls of a step their backends; the selection's own stays if it has no time.

        `floors`: what each candidate's time exceeds, of both calls.
        """
        firsts, of_rest = self._undominated(decodes, floors[0]), floors[1]

        def total(us: float, host: float) -> float:
            return min([together(first, us, host, True) for first in firsts.values()])

        name = self.chosen["prefill"]
        if self._knows(rest):
            some = rest.candidates
            order = sorted(range(len(some)), key=lambda i: of_rest[i] * some[i].factor)
            in_turn, bounds = [some[i] for i in order], [of_rest[i] for i in order]
            name = self.predictor.fastest(in_turn, rest.shape, total=total, floors=bounds)
        rest, (first, *others) = rest._replace(name=name), firsts
        if others:
            _, us, host = rest.price
            first = min(firsts, key=lambda name: together(firsts[name], us, host, True))
        decodes = decodes._replace(name=first)
        return decodes._replace(other=rest), rest._replace(other=decodes)


def _least_together(
    decodes: CallChoice, rest: CallChoice, floors: Sequence[Sequence[float]]
) -> float:
    """Return what a step of two calls takes at the least, whoever runs them."""
    first, other = decodes.shape, rest.shape
    prices = [
        Price(us, us, w.host_us(first)) for us, w in zip(floors[0], decodes.candidates, strict=True)
    ]
    return min(
        [
            together(price, us, w.host_us(other))
            for us, w in zip(floors[1], rest.candidates, strict=True)
            for price in prices
        ]
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
