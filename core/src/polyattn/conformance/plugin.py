"""The pytest plugin (entry point `pytest11`). Without `--polyattn-backend` it stays out of the way."""

from __future__ import annotations

import json
import math
import platform
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from polyattn._version import __version__

if TYPE_CHECKING:
    from polyattn.conformance.case import Case
    from polyattn.device import Device
    from polyattn.registry.info import BackendInfo


WRITTEN_EACH = 5.0
"""Seconds after which the report is written again while cases run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the kit's options."""
    group = parser.getgroup("polyattn", "polyattn's conformance kit")
    group.addoption("--polyattn-backend", metavar="NAME", help="the backend to test")
    group.addoption("--polyattn-device", metavar="DEVICE", help="torch device (default: the best)")
    group.addoption(
        "--polyattn-as",
        metavar="PROFILE",
        help="take the torch device for this one: for a fake of a library whose hardware is absent",
    )
    group.addoption("--polyattn-seed", type=int, metavar="N", help="seed (default: a fresh one)")
    group.addoption(
        "--polyattn-budget",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how long each search draws layers and batches from the claims (default: 5)",
    )
    group.addoption(
        "--polyattn-batches",
        type=int,
        default=0,
        metavar="N",
        help="run so many random small batches, too, a thousand a case (default: none)",
    )
    group.addoption("--polyattn-report", metavar="FILE", help="write the counts as JSON")
    group.addoption(
        "--polyattn-resume",
        action="store_true",
        help="go on from that file: what passed on the same commit and machine isn't run again",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set up the kit where a backend is named."""
    if config.getoption("--polyattn-backend", None):
        config.pluginmanager.register(_Kit(config), "polyattn-conformance-kit")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The suite means nothing without a backend's name."""
    if collection_path.name == "test_conformance.py" and "polyattn" in collection_path.parts:
        return None if config.getoption("--polyattn-backend", None) else True
    return None


class _Kit:
    """The backend under test, its cases and what became of them."""

    def __init__(self, config: pytest.Config):
        from polyattn.conformance.derive import batch_cases, derive
        from polyattn.errors import PolyattnError
        from polyattn.registry.devices import resolve_device
        from polyattn.registry.discovery import discover
        from polyattn.registry.machine import availability, build_here
        from polyattn.settings import current_settings

        try:
            self.info: BackendInfo = discover().backend(config.getoption("--polyattn-backend"))
            self.device: Device = resolve_device(config.getoption("--polyattn-device"))
            taken_for = config.getoption("--polyattn-as")
            if taken_for:
                self.device = resolve_device(taken_for).on(str(self.device.torch_device))
            problem = availability(self.info, current_settings().probe_timeout)
            self.info = build_here(
                self.info, self.device.platform, current_settings().probe_timeout
            )
        except PolyattnError as error:
            raise pytest.UsageError(str(error)) from error
        if problem:
            raise pytest.UsageError(f"{self.info.name} can't run here: {problem}")
        seed = config.getoption("--polyattn-seed")
        # Not torch.seed(), which would reseed the user's generators.
        self.seed = random.SystemRandom().randrange(2**31) if seed is None else seed
        config.option.polyattn_seed = self.seed  # workers of pytest-xdist use the same
        self.budget: float = config.getoption("--polyattn-budget")
        self.report = config.getoption("--polyattn-report")
        self.cases: list[Case] = derive(self.info, self.device)
        self.cases += batch_cases(self.cases, config.getoption("--polyattn-batches") or 0)
        self.counts: Counter[tuple[str, str]] = Counter()
        self.failures: dict[str, str] = {}
        self.passed: list[str] = []
        self.plans = self.plans_checked = 0
        if config.getoption("--polyattn-resume"):
            self._resume(config)
        self.before = frozenset(self.passed)
        self.is_worker = hasattr(config, "workerinput")  # of pytest-xdist
        self.due = time.monotonic() + WRITTEN_EACH

    def _resume(self, config: pytest.Config) -> None:
        """Take what passed from the report, and its seed, if it is of this code on this machine."""
        if not self.report:
            raise pytest.UsageError("--polyattn-resume: name the report, --polyattn-report FILE")
        path = Path(self.report)
        report = json.loads(path.read_text()) if path.exists() else {}
        origin = self.origin
        if origin["commit"].endswith("+") or origin != {name: report.get(name) for name in origin}:
            return
        self.passed = sorted({case.id for case in self.cases} & set(report["ids"]))
        self.counts.update((name.partition("-")[0], "passed") for name in self.passed)
        self.plans, self.plans_checked = report["plans"], report["plans_checked"]
        self.seed = config.option.polyattn_seed = report["seed"]

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out what passed before."""
        before = [item for item in items if _case(item.nodeid) in self.before]
        if before:
            config.hook.pytest_deselected(items=before)
            items[:] = [item for item in items if _case(item.nodeid) not in self.before]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if {"case", "run"} <= set(metafunc.fixturenames):
            metafunc.parametrize("case", self.cases, ids=[case.id for case in self.cases])

    @pytest.fixture
    def run(self, request: pytest.FixtureRequest) -> Callable[[Case], None]:
        """What runs one case of the backend under test."""
        from polyattn.conformance.checks.table import run_case

        def run(case: Case) -> None:
            try:
                plans = run_case(case, self.info.name, self.device, self.seed, self.budget)
            except AssertionError as error:
                if not _asserted_here(error):
                    raise
                wrong = str(error).partition("\nassert ")[0]
            else:
                request.node.user_properties.append(("plans", plans))
                return
            pytest.fail(
                wrong, pytrace=False
            )  # of the kit's own frames a kernel's author learns nothing

        return run

    @pytest.fixture
    def conformance_cases(self) -> list[Case]:
        """Every case of the backend under test."""
        return self.cases

    @pytest.fixture
    def conformance_lacks(self) -> str:
        """What `lacks` returns."""
        return self.lacks()

    def lacks(self) -> str:
        """Return the layer that lacks the fewest claims, and a line for each of them."""
        from polyattn.registry.capabilities import check

        caps = self.info.capabilities
        phase = "decode" if "decode" in caps.phases else min(caps.phases, default="decode")
        lacks = {case.spec: check(caps, case.spec, self.device, phase) for case in self.cases}
        spec = min(lacks, key=lambda spec: len(lacks[spec]) or math.inf, default=None)
        return "" if spec is None else f"{spec}" + "".join(f"\n  {line}" for line in lacks[spec])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed or (report.when == "setup" and report.skipped):
            case = _case(report.nodeid)
            self.counts[case.partition("-")[0], report.outcome] += 1
            if report.passed and case:
                self.passed.append(case)
            if report.failed and case:
                crash = getattr(report.longrepr, "reprcrash", None)
                self.failures[case] = report.longreprtext if crash is None else crash.message
            properties: dict[str, Any] = dict(report.user_properties)
            plans, checked = properties.get("plans", (0, 0))
            self.plans += plans
            self.plans_checked += checked
            if time.monotonic() > self.due:
                self._write()

    def _write(self) -> None:
        """Write the report so far: a run that is killed can go on from there."""
        self.due = time.monotonic() + WRITTEN_EACH
        if self.report and not self.is_worker:
            Path(self.report).write_text(json.dumps(self.summary(), indent=1) + "\n")

    def pytest_report_header(self) -> str:
        return f"polyattn: {self.info.name} on {self.device}, seed {self.seed}"

    @cached_property
    def origin(self) -> dict[str, Any]:
        """The backend, device and versions. `commit`: of the checkout, "" where there is none."""
        import torch

        from polyattn.registry.machine import running
        from polyattn.settings import current_settings

        return {
            "backend": self.info.name,
            "device": str(self.device),
            "polyattn": __version__,
            "torch": torch.__version__,
            "commit": _commit(),
            "build": self.info.build,
            "runs": running(self.info.runs, current_settings().probe_timeout) or "",
            "versions": _versions(self.info),
        }

    def summary(self) -> dict[str, object]:
        """The counts: refusals apart from passes, a skipped case counted as neither. What ran, where.

        `ids`: the cases that passed. `plans`: of the cases' steps; `plans_checked`: those that the
        checker of plans could read.
        """
        counts = self.counts
        passed = sum(n for (c, o), n in counts.items() if o == "passed" and c != "refusal")
        return {
            **self.origin,
            "date": str(date.today()),
            "seed": self.seed,
            "cases": sum(counts.values()),
            "passed": passed,
            "refused": counts["refusal", "passed"],
            "failed": sum(n for (_, o), n in counts.items() if o == "failed"),
            "skipped": sum(n for (_, o), n in counts.items() if o == "skipped"),
            "plans": self.plans,
            "plans_checked": self.plans_checked,
            "ids": sorted(self.passed),
        }

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        result = self.summary()
        words = ", ".join(
            f"{result[name]} {name}" for name in ("cases", "passed", "refused", "failed", "skipped")
        )
        terminalreporter.write_line(
            f"polyattn conformance of {self.info.name}: {words}, seed {self.seed}"
        )
        failed = sorted((c, n) for (c, o), n in self.counts.items() if o == "failed")
        if failed:
            failures = ", ".join(f"{check} {count}" for check, count in failed)
            terminalreporter.write_line(f"failed, by what was looked at: {failures}")
        if self.failures:  # the shortest message is of the fewest sequences
            case = min(self.failures, key=lambda name: len(self.failures[name]))
            terminalreporter.write_line(f"the smallest: {case}: {self.failures[case].strip()}")
            terminalreporter.write_line(
                f'to run it alone, add: --polyattn-seed {self.seed} -k "{case}"'
            )
        self._write()


def _asserted_here(error: AssertionError) -> bool:
    """Whether polyattn's own code says so, and not a backend's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    home = Path(__file__).parents[1]
    return trace is not None and home in Path(trace.tb_frame.f_code.co_filename).parents


def _case(node: str) -> str:
    """Return the id of the case that a test's node id names."""
    return node.partition("[")[2].removesuffix("]")


def _commit() -> str:
    """Return the commit of the checkout that runs, with a `+` where it was changed; "" without one."""
    words = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty=+",
        "--exclude=*",
    ]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _versions(info: BackendInfo) -> dict[str, str]:
    """Return the installed versions of a backend's requirements, and of Python."""
    from packaging.requirements import Requirement

    from polyattn.registry.distributions import installed

    versions = {"python": platform.python_version()}
    for name in ("numpy", "triton", *(Requirement(text).name for text in info.requires)):
        dist = installed(name)
        if dist is not None:
            versions[name] = dist.version
    return versions
