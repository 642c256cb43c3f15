"""What can a function do? Tries claims one at a time, and writes those that the kit proves."""

from __future__ import annotations

import importlib
import multiprocessing
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from polyattn.conformance.case import Case
from polyattn.conformance.cases.attention import BLOCK_SIZES, GQA_RATIOS, HEAD_SIZES
from polyattn.conformance.checks.table import run_case
from polyattn.conformance.derive import derive
from polyattn.device import Device
from polyattn.errors import PluginError, SettingsError, describe, plain
from polyattn.registry.devices import resolve_device
from polyattn.registry.discovery import register, unregister
from polyattn.runtime.function_backend import (
    READ_BY,
    FunctionBackend,
    declared,
    form_of,
    parameters_of,
)
from polyattn.spec.kinds import KV_CACHE_DTYPES, LAYOUTS, Role

TRIAL: type[FunctionBackend]
"""The backend under trial, while there is one: selection loads it by this path."""
UNPROVABLE = frozenset(
    {"deterministic", "batch_invariant", "step_invariant", "call_invariant", "machine_invariant"}
)
"""What a passing case doesn't prove: another run, or another batch, may differ."""
DEPARTURES = 2
"""In how many fields the first layer that works may differ from the usual one."""
_DTYPES = ("bfloat16", "float16", "float32", "float64")
_HEAD_SIZES = (128, 64, *(size for size in HEAD_SIZES if size not in (64, 128)))
_BLOCK_SIZES = (16, *(size for size in BLOCK_SIZES if size != 16))

Claims = dict[str, tuple[Any, ...]]


@dataclass
class Findings:
    """What holds, which case proves it, what doesn't hold and why.

    `claims`: the decorator's arguments; empty where nothing holds. `proof`: of (field, value) the
    case's id. `refusals`: of (field, value) what failed. `failures`: cases that fail though each claim
    has its proof.
    """

    name: str
    claims: Claims = field(default_factory=dict)
    proof: dict[tuple[str, Any], str] = field(default_factory=dict)
    refusals: dict[tuple[str, Any], str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def manifest(self) -> str:
        """Return the decorator, with the proving case beside each claim."""
        lines = [f"@backend(\n    {self.name!r},"] if self.claims else []
        for name, values in self.claims.items():
            lines.append(f"    {name}=(")
            for value in values:
                case = self.proof.get((name, value))
                lines.append(f"        {value!r}," + (f"  # {case}" if case else ""))
            lines.append("    ),")
        lines += [")"] if self.claims else ["# The kit proves no claim of this function."]
        for (name, value), reason in self.refusals.items():
            lines.append(f"# not {name} {value!r}: {plain(reason, 200)}")
        lines += [f"# fails: {plain(failure, 200)}" for failure in self.failures]
        return "\n".join(lines)


class Trials:
    """Runs the kit's cases of one function under changing claims, each case once.

    `begin` hears of a case before it runs.
    """

    def __init__(self, function: Callable[..., Any], name: str, device: Device, seed: int):
        self.function, self.name, self.device, self.seed = function, name, device, seed
        self.begin: Callable[[Case], object] = lambda case: None
        self.passed: set[Case] = set()

    def problems(
        self, claims: Claims, budget: float | None = None
    ) -> Iterator[tuple[Case, str | None]]:
        """Yield each new case and its error, or None. `budget`: run all checks, else until one fails."""
        global TRIAL
        trial = declared(self.function, self.name, claims)
        trial.info = replace(trial.info, path=f"{__name__}:TRIAL")
        TRIAL = trial
        register(trial, "claim-trial")
        try:
            for case in derive(trial.info, self.device, budget is not None):
                if case in self.passed:
                    continue
                self.begin(case)
                try:
                    run_case(case, trial.info.name, self.device, self.seed, budget or 0.0)
                except (Exception, SystemExit) as error:  # a kernel may raise anything
                    yield case, describe(error)
                    if budget is None:
                        return
                else:
                    self.passed.add(case)
                    yield case, None
        finally:
            unregister("claim-trial")
            del TRIAL

    def end(self) -> None:
        """Give back what the trials hold."""

    def proof(self, claims: Claims) -> tuple[str, str | None]:
        """Return the first new case and None, or the case that fails and why; "" where there is none."""
        first = ""
        for case, problem in self.problems(claims):
            if problem is not None:
                return case.id, problem
            first = first or case.id
        return (first, None) if first else ("", "")


class ForkedTrials(Trials):
    """Trials in a fork: a kernel that crashes fails a case. After a failure another fork goes on."""

    _process: Any = None

    def problems(
        self, claims: Claims, budget: float | None = None
    ) -> Iterator[tuple[Case, str | None]]:
        if self._process is None:
            forks = multiprocessing.get_context("fork")
            self._pipe, theirs = forks.Pipe()
            self._process = forks.Process(target=self._serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        self._pipe.send((claims, budget))
        case: Any = None
        said: Any
        results: list[tuple[Case, str | None]] = []
        try:
            while (said := self._pipe.recv()) is not None:
                if isinstance(said, PluginError):
                    raise said
                if isinstance(said, Case):
                    case = said
                    self.begin(case)
                    continue
                if said[0] is None:
                    self.passed.add(case)
                results.append((case, said[0]))
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode
            end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            results.append((case, f"the function ended its process ({end})"))
        if any(problem for _, problem in results):
            self.end()  # what fails may have written beside its output
        yield from results

    def _serve(self, pipe: Connection) -> None:
        self.begin = pipe.send
        while True:
            claims, budget = pipe.recv()
            try:
                for _, problem in super().problems(claims, budget):
                    pipe.send((problem,))
            except PluginError as error:
                pipe.send(error)
            else:
                pipe.send(None)

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None


def find(
    function: Callable[..., Any],
    name: str,
    device: Device,
    seed: int = 0,
    budget: float = 2.0,
    trials: Trials | None = None,
) -> Findings:
    """Try claims one at a time, each on top of those that hold. `budget`: seconds for the search.

    Raises `PluginError` for a function whose parameters no backend can fill.
    """
    trials, findings = trials or Trials(function, name, device, seed), Findings(name)
    names = parameters_of(function)
    problem, farthest = "", -1
    for claims in _bases(names, device):
        before = len(trials.passed)
        case, reason = trials.proof(claims)
        if reason is None:
            findings.claims = claims
            break
        if len(trials.passed) - before > farthest:  # what works but for that case
            problem, farthest = f"{case}: {reason}", len(trials.passed) - before
    else:
        findings.refusals["claim", "any"] = problem
        return findings
    findings.proof = {(key, value): case for key, values in claims.items() for value in values}
    for key, value in _additions(names, claims):
        held = findings.claims[key]
        if value in held:
            continue
        wider = findings.claims | {key: (*held, value)}
        try:
            case, reason = trials.proof(wider)
        except PluginError:  # sink tokens without a window, for example
            continue
        if reason is None:
            findings.claims = wider
            findings.proof[key, value] = case
        elif case:
            findings.refusals[key, value] = f"{case}: {reason}"
    rest = trials.problems(findings.claims, budget)
    findings.failures = [f"{case.id}: {reason}" for case, reason in rest if reason is not None]
    return findings


def _bases(names: tuple[str, ...], device: Device) -> Iterator[Claims]:
    """Yield least claims to begin with: the usual layer's, then those that differ in a few fields."""
    fields: dict[str, tuple[tuple[Any, ...], ...]] = {
        "dtypes": tuple((dtype,) for dtype in _DTYPES),
        "head_sizes": tuple((size,) for size in _HEAD_SIZES),
        "features": (("causal", "gqa"), ("causal",), ("non_causal", "gqa"), ("non_causal",)),
        "roles": (("decoder",), ("encoder_only",)),
    }
    if form_of(names) == "pages":
        fields["roles"] = (("decoder",),)
        fields["block_sizes"] = tuple((size,) for size in _BLOCK_SIZES)
        fields["kv_cache_dtypes"] = (("auto",),)
        both = (("prefill", "decode"), ("decode",), ("prefill",))
        fields["phases"] = both if "query_start_loc" in names else both[1:2]
        # Tried first: at block size 1 all layouts are alike.
        fields["layouts"] = tuple((layout,) for layout in LAYOUTS)
    indices = product(*(range(len(values)) for values in fields.values()))
    counted = [(sum(map(bool, at)), sum(at), at) for at in indices]  # usual values first
    for *_, at in sorted(item for item in counted if item[0] <= DEPARTURES):
        chosen = {
            name: values[index] for (name, values), index in zip(fields.items(), at, strict=True)
        }
        if "gqa" in chosen["features"]:
            chosen["gqa_ratios"] = (1, 2)
        yield {"platforms": (device.platform,), **chosen}


def _additions(names: tuple[str, ...], claims: Claims) -> Iterator[tuple[str, Any]]:
    pages = form_of(names) == "pages"
    yield from (("dtypes", dtype) for dtype in _DTYPES)
    yield from (("head_sizes", size) for size in _HEAD_SIZES)
    if pages:
        yield from (("layouts", layout) for layout in LAYOUTS)
        yield from (("block_sizes", size) for size in _BLOCK_SIZES)
    if "gqa" in claims["features"]:
        yield from (("gqa_ratios", ratio) for ratio in GQA_RATIOS)
    for feature, wanted in READ_BY.items():
        masks = {"causal", "window", "mask"} if feature in ("causal", "non_causal") else set(wanted)
        readable = not masks or masks & set(names)
        if readable and feature not in UNPROVABLE | {"gqa"}:
            yield "features", feature
    if {"k_scale", "v_scale"} <= set(names):
        yield from (("kv_cache_dtypes", dtype) for dtype in KV_CACHE_DTYPES)
    yield from (("roles", role.value) for role in Role)


def find_at(
    path: str, device: str | None, seed: int, budget: float, begin: Callable[[Case], object]
) -> Findings:
    """Return the kit's verdict on `"module:function"`, a plain function or a backend made of one.

    `begin` hears of each case before it runs.

    Raises `SettingsError` where there is none, and what `find` raises.
    """
    module, _, name = path.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function: Any = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        raise SettingsError(f"{path}: {describe(error)}; write module:function") from error
    if isinstance(function, type) and issubclass(function, FunctionBackend):
        function, name = function.function, function.info.name
    resolved = resolve_device(device)
    if not resolved.is_real:
        raise SettingsError(f"--device: {resolved} is a profile; claim needs a device to run on")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads wait for each other busily, and cases are small
    # Neither a device's context nor JAX's threads survive a fork.
    forks = resolved.platform == "cpu" and sys.platform == "linux" and "jax" not in sys.modules
    trial = f"{name.upper()}_TRIAL"  # an installed plugin may have the function's own name
    trials = (ForkedTrials if forks else Trials)(function, trial, resolved, seed)
    trials.begin = begin
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the NaN in poisoned caches
            return find(function, name.upper(), resolved, seed, budget, trials)
    finally:
        trials.end()
        torch.set_num_threads(threads)
