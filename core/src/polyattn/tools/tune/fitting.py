"""Which coefficients explain the measured times? Least squares of relative errors, none negative.

Forms compete: terms that add up and terms that overlap, the longest row from several numbers of
tiles on (`TimingModel.whole`), launches by call and by run (`by_run`), and ways in which libraries
deal keys out (`deal`). The one that predicts best what it was not fitted to is kept. Overlap is fitted
by turns: which term is largest at each point, then the coefficients that follow (as k-plane
regression: Magnani and Boyd, "Convex piecewise-linear fitting", 2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from polyattn.errors import PolyattnError
from polyattn.selection.prediction import Form, StepShape, terms
from polyattn.spec.layer import LayerSpec
from polyattn.spec.timing import OVERLAPPING, TERMS, units

FOLDS = 5
LEAST_LAYERS = 3
"""Layers from which on each is predicted by the others; of fewer, steps are."""
LEAST_POINTS = 12
"""Twice as many as there are coefficients."""
WHOLE = (0, 64, 96, 128, 192, 256, 384, 512, 768)
"""Tiles from which on keys may stay whole: about as finely as chips' numbers of processors tell."""
UNLIKELY = 2.0
"""What a loss of launches by run is multiplied by: the host's time follows, so noise mustn't say so."""
_BUSY = [TERMS.index(term) for term in OVERLAPPING]

Array = Any
"""Of float64. numpy's own generic type adds nothing and costs a cast at each use."""


@dataclass(frozen=True)
class Point:
    """A measured call: its counts, its microseconds, and its step."""

    spec: LayerSpec
    shape: StepShape
    us: float
    step: int


@dataclass(frozen=True)
class Fit:
    """Coefficients in the order of `TERMS`; `held_out`: each point's prediction by the others."""

    coefficients: tuple[float, ...]
    form: Form
    held_out: tuple[float, ...]
    error: float


def features(points: Sequence[Point], form: Form) -> Array:
    """Return the factor of each coefficient, (points, terms), as if the terms added up."""
    form = form._replace(overlap=False)
    rows = [[*terms(units(p.spec), form, p.shape).values()] for p in points]
    return np.array(rows, dtype=np.float64)


def fit(points: Sequence[Point], deal: str = "") -> Fit | None:
    """Return the best form's fit; None where too few points are there to judge one.

    `deal`: the way that keys are dealt out, where it is known.
    """
    if len(points) < LEAST_POINTS:
        return None
    times, folds = np.array([p.us for p in points]), _folds(points)
    launches = (False, True) if any(p.shape.runs < p.shape.rows for p in points) else (False,)
    forms = [
        Form(whole=whole, by_run=by_run) for whole, by_run in product(_thresholds(points), launches)
    ]
    forms = [Form(deal=deal)] if deal else forms + [Form(deal=way) for way in points[0].shape.dealt]
    tables = {form: features(points, form) for form in forms}
    held = {
        form._replace(overlap=overlap): _held_out(table, times, folds, overlap)
        for form, table in tables.items()
        for overlap in (False, True)
    }
    # Squares of logarithms are what a choice suffers from; the median is what one reads.
    losses = {
        form: _loss(guessed, times) * (UNLIKELY if form.by_run else 1)
        for form, guessed in held.items()
    }
    best = min(losses, key=losses.__getitem__)
    table = tables[best._replace(overlap=False)]
    coefficients = tuple(map(float, solve(table, times, best.overlap)))
    error = float(np.median(np.abs(held[best] / times - 1)))
    return Fit(coefficients, best, tuple(map(float, held[best])), error)


def _thresholds(points: Sequence[Point]) -> list[int]:
    """Return those of `WHOLE` that tell points apart, each in its own way."""
    tiles = np.array([p.shape.tiles for p in points])
    told = {int((tiles >= whole).sum()): whole for whole in reversed(WHOLE)}
    return sorted(whole for many, whole in told.items() if many or not whole)


def _held_out(table: Array, times: Array, folds: Array, overlap: bool) -> Array:
    """Return each point's prediction by the points of the other folds."""
    held = np.zeros(len(times))
    for fold in set(folds.tolist()):
        out = folds == fold
        if out.any() and not out.all():
            held[out] = predict(table[out], solve(table[~out], times[~out], overlap), overlap)
    return held


def _folds(points: Sequence[Point]) -> Array:
    """Return each point's fold: layers in turn where there are enough, since others' are predicted."""
    layers = list(dict.fromkeys(p.spec for p in points))
    if len(layers) < LEAST_LAYERS:
        return np.array([p.step % FOLDS for p in points])
    index = {spec: i % FOLDS for i, spec in enumerate(layers)}
    return np.array([index[p.spec] for p in points])


def predict(table: Array, coefficients: Array, overlap: bool) -> Array:
    """Return the microseconds of each point, as `Predictor.evaluate` does of one."""
    parts = table * coefficients
    if not overlap:
        return parts.sum(1)
    busy = parts[:, _BUSY]
    return parts.sum(1) - busy.sum(1) + busy.max(1)


def solve(table: Array, times: Array, overlap: bool) -> Array:
    """Return the coefficients of least relative error, a few outliers notwithstanding."""
    coefficients = _least_squares(table, times)
    if not overlap:
        return coefficients
    best, least = coefficients, _loss(predict(table, coefficients, True), times)
    for start in _starts(table, times, coefficients):
        coefficients = start
        for _ in range(20):
            busy = (table * coefficients)[:, _BUSY]
            active = table.copy()
            hidden = np.arange(len(_BUSY)) != busy.argmax(1)[:, None]
            active[:, _BUSY] = np.where(hidden, 0.0, active[:, _BUSY])
            following = _least_squares(active, times)
            # An unused term keeps its coefficient: at 0 it could never come back.
            unused = ~active.any(0)
            following[unused] = coefficients[unused]
            loss = _loss(predict(table, following, True), times)
            if loss < least:
                best, least = following, loss
            if np.allclose(following, coefficients, rtol=1e-6, atol=0):
                break
            coefficients = following
    return best


def _starts(table: Array, times: Array, summed: Array) -> list[Array]:
    """Return coefficients to begin with: of the sum, and each term as if it alone took the time."""
    with np.errstate(divide="ignore", invalid="ignore"):
        bounds = np.where(table > 0, times[:, None] / table, np.inf)
        tight = np.nan_to_num(np.quantile(bounds, 0.1, axis=0), posinf=0.0)
    mixed = summed.copy()
    mixed[_BUSY] = np.maximum(mixed[_BUSY], tight[_BUSY] / 2)
    return [summed * np.where(np.isin(np.arange(len(TERMS)), _BUSY), 1.5, 1.0), mixed, tight / 2]


def _least_squares(table: Array, times: Array) -> Array:
    """Non-negative, of relative errors; points that lie far off count less (Huber, 1964)."""
    try:
        from scipy.optimize import nnls
    except ModuleNotFoundError as error:
        raise PolyattnError('fitting needs scipy: pip install "polyattn[tune]"') from error
    relative = table / times[:, None]
    scale = np.maximum(np.linalg.norm(relative, axis=0), 1e-300)
    relative, weights = relative / scale, np.ones(len(times))
    for _ in range(4):
        solution = nnls(relative * weights[:, None], weights, maxiter=100 * len(TERMS))[0]
        off = np.abs(relative @ solution - 1)
        weights = np.sqrt(np.minimum(1.0, 0.1 / np.maximum(off, 1e-12)))
    return solution / scale


def _loss(predicted: Array, times: Array) -> float:
    off = np.abs(np.log(np.maximum(predicted, 1e-9) / times))
    return float(np.where(off < 0.2, off**2, 0.4 * off - 0.04).mean())
