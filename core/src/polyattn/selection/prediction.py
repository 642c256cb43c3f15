"""How long will a step take on each candidate? A few features, weighed by measured coefficients.

A time is modelled by six terms. Three are a launch, work items, and bytes of queries and outputs. A chip
does the other three at the same time: bytes of keys and values, the longest row, products. These three
add up, or where a kernel hides them behind one another, the largest counts. The longest row counts from
so many tiles on: with fewer, a backend cuts its keys. The coefficients are fitted to measured times
(`polyattn tune`). They choose among right backends only.

Where it is known how a library cuts keys (`dealing`), products are those of the fullest processor,
the longest row counts by its parts, and items by whether anything is merged.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from polyattn.selection.dealing import SWITCHES, Dealer, Least, deal, deals_of, least
from polyattn.selection.pieces import Counts, largest, ones, total
from polyattn.spec.layer import LayerSpec
from polyattn.spec.timing import GROUPED, KINDS, OVERLAPPING, TERMS, TimingModel

Array = npt.NDArray[np.int64]
Ints = Sequence[int] | Array


ABSORBED = ("decode", "short")
"""Kinds of steps over latents; longer ones attend to keys and values that are made of them."""
LONGEST_SHORT = 16
"""Rows of up to this many query tokens count as short."""
TILE = 64
"""Rows (token, head of a group) of a tile that short rows are multiplied in, at the least."""
TALL = 128
"""And of the tiles that are counted: as many as a Hopper kernel's program takes at a time."""


class StepShape(NamedTuple):
    """The shape of a call: sums over its rows, and its longest row.

    `pairs` counts pairs of a query token and a key that it sees; if all rows are short, or keys latents,
    those of whole tiles. `tiles` counts tiles of `TALL` rows of (token, head of a group), over all KV
    heads. `runs` counts runs of neighbouring rows of equal lengths, of decodes each row. `dealt`: the
    shape as a way of dealing keys out makes it, by its name. `kind`: as in `Counts`.
    """

    rows: float
    queries: int
    keys: int
    longest: int
    pairs: int
    tiles: int
    runs: int
    dealt: Any = {}
    kind: str = ""


NO_DEALS: Mapping[str, int] = {}
"""Ways of dealing keys out that a step's shape has, by name, and the processors to which: none."""


def shape_of_decodes(
    spec: LayerSpec, lens: Ints, longest: int | None = None, deals: Mapping[str, int] = NO_DEALS
) -> StepShape:
    """Return the shape of a call over rows of one query token and so many keys.

    `longest`: the largest of `lens`, where it is known. `deals`: as `NO_DEALS`.
    """
    lens = np.asarray(lens, np.int64)
    rows, seen = len(lens), _seen(spec, 1)
    longest = int(lens.max(initial=0)) if longest is None else longest
    hides = longest > seen
    near, longest = (np.minimum(lens, seen), seen) if hides else (lens, longest)
    keys = total(near)
    group, kv_heads = _heads(spec)
    pairs = keys * -(-group // TILE) * TILE // group if spec.latent is not None else keys
    tiles = rows * kv_heads * -(-group // TALL)
    shape = StepShape(rows, rows, keys, longest, pairs, tiles, rows)
    return _dealt(spec, shape, ones(rows), lens, 1, deals) if deals else shape


def dealt_decodes(
    spec: LayerSpec, shape: StepShape, lens: Array, deals: Mapping[str, int]
) -> StepShape:
    """Return the shape of decodes of so many keys with other ways of dealing these out."""
    return _dealt(spec, shape, ones(len(lens)), lens, 1, deals)


def shape_of_step(
    spec: LayerSpec,
    queries: Ints,
    lens: Ints,
    by_run: bool = True,
    deals: Mapping[str, int] = NO_DEALS,
) -> StepShape:
    """Return the shape of a call over rows of so many query tokens and keys.

    `by_run`: whether anybody launches by run; else each row is one. `deals`: as `NO_DEALS`.
    """
    q, n = np.asarray(queries, np.int64), np.asarray(lens, np.int64)
    if not len(q):
        return _dealt(spec, StepShape(0, 0, 0, 0, 0, 0, 0), q, n, 0, deals)
    tokens, most, seen = total(q), largest(q), _seen(spec, 0)
    runs = rows = len(q)
    if by_run and most > 1:
        runs = 1 + int(np.count_nonzero((q[1:] != q[:-1]) | (n[1:] != n[:-1])))
    lens = n
    if seen < sys.maxsize:
        n = np.minimum(n, q + seen)
    group, kv_heads = _heads(spec)
    if 1 < most <= LONGEST_SHORT or (most == 1 and spec.latent is not None):
        pairs = int(((q * group + (TILE - 1)) // TILE).dot(n)) * TILE // group
    else:
        pairs = int(q.dot(n))
        if spec.causal:
            pairs -= (int(q.dot(q)) - tokens) // 2
        if spec.causal and seen < sys.maxsize:  # what lies before the windows of later tokens
            over = np.maximum(n - seen - 1, 0)
            pairs -= int(over.dot(over + 1)) // 2
    tiles = total((q * group + (TALL - 1)) // TALL) * kv_heads
    shape = StepShape(rows, tokens, total(n), largest(n), pairs, tiles, runs)
    return _dealt(spec, shape, q, lens, most, deals) if deals else shape


class Dealt(Mapping[str, StepShape]):
    """A step's shape as each way of dealing keys out makes it, dealt when it is asked for."""

    def __init__(self, shape: StepShape, deals: Mapping[str, int], dealer: Callable[[], Dealer]):
        self._shape, self._deals, self._begin = shape, deals, dealer
        self._dealer: Dealer | None = None
        self._counts: dict[str, Counts] = {}
        self._known: dict[str, tuple[StepShape, StepShape]] = {}

    def __getitem__(self, name: str) -> StepShape:
        return self.between(name, exact=True)[0]

    def between(self, name: str, exact: bool = False) -> tuple[StepShape, StepShape]:
        """Return two shapes whose times bound the exact one's. They cost little."""
        known = self._known.get(name)
        if known is not None and not (exact and known[0] is not known[1]):
            return known
        counts = self._counts.get(name)
        if counts is None:
            self._dealer = self._dealer or self._begin()
            counts = self._dealer(name, self._deals[name])
        self._counts[name] = counts = counts.exact() if exact else counts
        _, _, keys, _, _, tiles, runs, _, _ = self._shape
        rows, queries, longest, pairs, most, deal_out, kind = counts
        low = high = StepShape(rows, queries, keys, longest, pairs, tiles, runs, {}, kind)
        if deal_out:
            high = StepShape(rows, queries, keys, longest, most, tiles, runs, {}, kind)
        self._known[name] = low, high
        return low, high

    def __iter__(self) -> Iterator[str]:
        return iter(self._deals)

    def __len__(self) -> int:
        return len(self._deals)


def _dealt(
    spec: LayerSpec,
    shape: StepShape,
    queries: Array,
    lens: Array,
    most: int,
    deals: Mapping[str, int],
) -> StepShape:
    """Add the shapes that ways of dealing keys out make of a step. `most`: tokens of a row."""

    def dealer() -> Dealer:
        if shape.keys:
            return deal(spec, queries, lens, _seen(spec, 0), (shape.queries, most))
        plain = Counts(shape.rows, shape.queries, shape.longest, shape.pairs, shape.pairs)
        return lambda *_: plain

    return StepShape(*shape[:7], Dealt(shape, deals, dealer))


def _heads(spec: LayerSpec) -> tuple[int, int]:
    """Return (query heads of a group, KV heads) as a call has them: latents are absorbed."""
    return (spec.num_heads, 1) if spec.latent is not None else (spec.gqa_ratio, spec.num_kv_heads)


def _seen(spec: LayerSpec, queries: int) -> int:
    """Return how many keys a row of so many query tokens, its last ones, can see at most."""
    limits = [size for size in (spec.sliding_window, spec.chunk_size) if size is not None]
    return queries + min(limits) - 1 + spec.sink_tokens if limits else sys.maxsize


class Form(NamedTuple):
    """How terms make up a time: these fields of `TimingModel`."""

    overlap: bool = False
    whole: int = 0
    by_run: bool = False
    deal: str = ""


def timer(weights: Sequence[float], form: Form) -> Callable[[StepShape], float]:
    """Return a function for a call's microseconds on the device. It runs at each decode of an engine.

    It takes the shape that the form's way of dealing keys out makes of the call.
    """
    launch, item, byte, chain, product, token = weights
    overlap, whole, by_run, _ = form

    def us(shape: StepShape) -> float:
        rows, queries, keys, longest, pairs, tiles, runs, _, _ = shape
        busy, b, c = byte * keys, chain * longest if tiles >= whole else 0.0, product * pairs
        if not overlap:
            busy += b + c
        else:
            busy = b if b > busy else busy
            busy = c if c > busy else busy
        start = launch * runs if by_run else launch
        return start + item * rows + token * queries + busy

    return us


def floor(weights: Sequence[float], form: Form, fewest: Least) -> Callable[[StepShape], float]:
    """Return a function for what a call's microseconds exceed, whatever way its keys are dealt out.

    `fewest`: that way's counts at the least.
    """
    launch, item, byte, _, product, token = weights
    of_pairs, of_queries, of_tiles, of_longest, alone, merged, items, *_ = fewest
    overlap, _, by_run, _ = form
    token, item = token * merged, item * items + (launch if by_run else 0.0)
    launch = 0.0 if by_run else launch

    def us(shape: StepShape) -> float:
        rows, queries, keys, longest, pairs, tiles, runs, _, _ = shape
        least = max(
            of_pairs * pairs + of_queries * queries + of_tiles * tiles, of_longest * longest
        )
        b, c = byte * keys, product * (alone * least if rows == 1 else least)
        busy = (b if b > c else c) if overlap else b + c
        return launch + item * runs + token * queries + busy

    return us


def terms(weights: Sequence[float], form: Form, shape: StepShape) -> dict[str, float]:
    """Return the microseconds of each term, by the names of `TERMS`; 0 for a hidden term."""
    values, shape = {}, shape.dealt[form.deal] if form.deal else shape
    for index, term in enumerate(TERMS):
        alone = [0.0] * len(TERMS)
        alone[index] = weights[index]
        values[term] = timer(alone, form)(shape)
    if form.overlap:
        counted = max(OVERLAPPING, key=values.__getitem__)
        values |= {term: 0.0 for term in OVERLAPPING if term != counted}
    return values


def _by_kind(timers: Mapping[str, Callable[[StepShape], float]]) -> Callable[[StepShape], float]:
    """Return the function of a shape's kind, or the one of no name."""
    own = timers[""]
    return own if len(timers) == 1 else lambda shape: timers.get(shape.kind, own)(shape)


def _floor(
    spec: LayerSpec, model: TimingModel, weights: Mapping[str, tuple[Sequence[float], Form]]
) -> Callable[[StepShape], float]:
    """Return what a model's times exceed. `weights`: of its kernels, by the kinds of steps."""

    def of(kind: str) -> Callable[[StepShape], float]:
        fewest = least(spec, kind, model.deal, model.processors)

        def of_kind(name: str) -> Callable[[StepShape], float]:
            return floor(*weights.get(name, weights[""]), fewest)

        of_kinds = [of_kind(name) for name in fewest.kinds]
        if fewest.single:
            several, single = of_kinds[0], of_kind(fewest.single)
            return lambda shape: (single if shape.rows == 1 else several)(shape)
        if len(of_kinds) == 1:
            return of_kinds[0]
        return lambda shape: min([us(shape) for us in of_kinds])

    usual, short = of(model.kind), of("short")
    if model.kind not in ("prefill", "chunked"):
        return usual
    # Prompts may be as short as short rows are.
    return lambda shape: (short if shape.queries <= LONGEST_SHORT * shape.rows else usual)(shape)


class Weighed(NamedTuple):
    """A backend, what gives its time for layers of one spec, and how that is compared.

    `kind`: of its model. `timer`: takes a shape that `deal` makes. `floor`: gives what the time exceeds.
    `factor`: what the time is multiplied by (`TimingModel.margin`). `host`: the host's microseconds, of
    each run with `by_run`.
    """

    name: str
    kind: str
    timer: Callable[[StepShape], float]
    floor: Callable[[StepShape], float]
    deal: str
    factor: float
    host: float
    by_run: bool

    def us(self, shape: StepShape) -> float:
        """Return the microseconds on the device."""
        return self.timer(shape.dealt[self.deal] if self.deal else shape)

    def least(self, shape: StepShape) -> float:
        """Return what the microseconds on the device are at the least, however keys are dealt out."""
        return (self.floor if self.deal else self.timer)(shape)

    def between(self, shape: StepShape) -> tuple[float, float]:
        """Return two times, between which the microseconds on the device are. They cost little."""
        if not self.deal:
            return (us := self.timer(shape)), us
        low, high = shape.dealt.between(self.deal)
        return (us := self.timer(low)), us if high is low else self.timer(high)

    def host_us(self, shape: StepShape) -> float:
        """Return the host's microseconds."""
        return self.host * shape.runs if self.by_run else self.host


def _with_mixed(models: tuple[TimingModel, ...]) -> tuple[TimingModel, ...]:
    """Add models of mixed steps in one call: chunks to a kernel whose keys are dealt out."""
    known = {(model.kind, model.backend) for model in models}
    dealt = [model for model in models if model.kind == "chunked" and model.deal]
    mixed = [replace(m, kind="mixed") for m in dealt if ("mixed", m.backend) not in known]
    return (*models, *mixed)


def _ungrouped(models: Sequence[TimingModel]) -> Iterator[TimingModel]:
    """Yield the models of a layer of small groups, whose decodes some backends give to another kernel."""
    own = {model.backend for model in models if model.kind == "ungrouped"}
    for model in models:
        if model.kind == "ungrouped":
            yield replace(model, kind="decode")
        elif model.kind != "decode" or model.backend not in own:
            yield model


def form_of(model: TimingModel) -> Form:
    """Return a model's form."""
    return Form(model.overlap, model.whole, model.by_run, model.deal)


class Price(NamedTuple):
    """Microseconds of a call: the device's, these with the margin, and the host's."""

    us: float
    compared: float
    host: float


class Predictor:
    """Predicts the microseconds of each candidate for layers of one spec, by the kind of call.

    Layers are queued one after another: where the host is slower than the device, a call takes the
    host's time. Where a model has none, it is taken for the slowest one that its table knows.
    """

    def __init__(self, spec: LayerSpec, models: Iterable[TimingModel]):
        self.spec, models = spec, _with_mixed(tuple(m for m in models if not m.windowless))
        if spec.latent is not None:  # longer rows attend to keys that are made of latents
            ways = ("", *deals_of(spec, "short"))
            models = tuple(m for m in models if m.kind in ABSORBED and m.deal in ways)
        elif spec.gqa_ratio < GROUPED and not spec.sliding_window:
            models = tuple(_ungrouped(models))
        slowest: dict[str, float] = {}
        for model in models:
            slowest[model.source] = max(slowest.get(model.source, 0.0), model.host)
        self.by_run = {m.kind for m in models if m.by_run or m.deal == "runs"}
        self.deals: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
        self._models = {(model.kind, model.backend): model for model in models}
        self._weighed: dict[str, dict[str, Weighed]] = {kind: {} for kind in KINDS}
        for model in models:
            if model.deal:
                self.deals[model.kind][model.deal] = model.processors
            made = {"": model} | self._switched(model)
            weights = {kind: (m.weights(spec), form_of(m)) for kind, m in made.items()}
            self._weighed[model.kind][model.backend] = Weighed(
                model.backend,
                model.kind,
                _by_kind({kind: timer(*some) for kind, some in weights.items()}),
                _floor(spec, model, weights),
                model.deal,
                1 + model.margin,
                model.host or slowest[model.source],
                model.by_run or model.deal == "runs",
            )

    def _switched(self, model: TimingModel) -> dict[str, TimingModel]:
        """Return the models that take a model's place where keys are dealt out to another kernel."""
        others = {
            kind: self._models.get((kind, model.backend)) for kind in SWITCHES.get(model.deal, ())
        }
        return {kind: other for kind, other in others.items() if other and other.deal == model.deal}

    def shape(self, kind: str, queries: Ints, lens: Ints) -> StepShape:
        """Return the shape of a call of a kind, as far as its models look at it."""
        return shape_of_step(self.spec, queries, lens, kind in self.by_run, self.deals[kind])

    def among(self, kind: str, names: Iterable[str]) -> list[Weighed]:
        """Return those of some backends that have a model for a kind of call."""
        known = self._weighed[kind]
        return [known[name] for name in dict.fromkeys(names) if name in known]

    @staticmethod
    def captured(candidates: Iterable[Weighed]) -> list[Weighed]:
        """Return the candidates of a call that is replayed from a graph, without a host's time."""
        return [weighed._replace(host=0.0) for weighed in candidates]

    @staticmethod
    def evaluate(candidates: Iterable[Weighed], shape: StepShape) -> dict[str, float]:
        """Return each candidate's microseconds on the device for a call of this shape."""
        return {weighed.name: weighed.us(shape) for weighed in candidates}

    @classmethod
    def prices(cls, candidates: Sequence[Weighed], shape: StepShape) -> dict[str, Price]:
        """Return each candidate's price for a call of this shape."""
        times = cls.evaluate(candidates, shape)
        return {
            w.name: Price(times[w.name], times[w.name] * w.factor, w.host_us(shape))
            for w in candidates
        }

    @staticmethod
    def fastest(
        candidates: Sequence[Weighed],
        shape: StepShape,
        least: float = math.inf,
        total: Callable[[float, float], float] = max,
        deal: bool = True,
        floors: Sequence[float] = (),
    ) -> str:
        """Return whose time is the least, margins counted; "" where none is below `least`.

        Keys are dealt out as far as it takes to know. `total`: what a step takes for the device's and
        the host's microseconds of the call. `deal`: else "" where bounds don't tell. `floors`: of each
        candidate, what `least` returns, where that is known.
        """
        times = [(least, -1, least)] if least < math.inf else []  # at the least, whose, at the most
        for index, weighed in enumerate(candidates):
            floor = floors[index] if floors else weighed.least(shape)
            us = total(floor * weighed.factor, weighed.host_us(shape))
            times.append((us, index, math.inf if weighed.deal else us))
        while True:
            times.sort()
            (_, index, high), *others = times
            if not others or (high, index) <= others[0]:
                return candidates[index].name if index >= 0 else ""
            if not deal and high < math.inf:
                return ""
            weighed = candidates[index]
            factor, host = weighed.factor, weighed.host_us(shape)
            below, above = weighed.between(shape) if high == math.inf else (weighed.us(shape),) * 2
            low = high = total(below * factor, host)
            if above != below:
                high = total(above * factor, host)
            times[0] = low, index, high

    def terms(self, kind: str, name: str, shape: StepShape) -> dict[str, float]:
        """Return the microseconds of each term of a prediction, by the names of `TERMS`."""
        model = self._models[kind, name]
        if model.deal:
            model = self._switched(model).get(shape.dealt[model.deal].kind, model)
        return terms(model.weights(self.spec), form_of(model), shape)


def kind_of_step(queries: Ints, lens: Ints) -> str:
    """Return the kind of a call over rows of so many tokens and keys."""
    if not len(queries):
        return "decode"
    q, n = np.asarray(queries, np.int64), np.asarray(lens, np.int64)
    most = largest(q)
    if most <= 1:
        return "decode"
    if most <= LONGEST_SHORT:
        return "short"
    if q[q.argmin()] <= 1:
        return "mixed"
    return "prefill" if q.tobytes() == n.tobytes() else "chunked"
