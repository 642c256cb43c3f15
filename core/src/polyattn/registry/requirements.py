"""Is a package that a backend requires installed? Requirement strings as pip takes them."""

from __future__ import annotations

import operator
import re
from functools import cache
from importlib.metadata import Distribution

from polyattn.errors import describe, plain, shown
from polyattn.registry.distributions import installed

_VERSION = r"\d+(?:\.\d+)*(?:(?:a|b|rc)\d+)?(?:\.post\d+)?(?:\.dev\d+)?"
_CLAUSE = rf"(?:<|<=|>|>=|==|!=)\s*{_VERSION}"
_PLAIN = re.compile(
    rf"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*({_CLAUSE}(?:\s*,\s*{_CLAUSE})*)?"
)
"""Requirements that need no parser: packaging takes 30 ms to import, its parser as long again."""


HIDDEN: dict[str, str] = {}
"""Distributions whose modules are hidden in this process, and what hides them (`calls.stand_in`)."""


def requirement_syntax_problem(text: str) -> str | None:
    """Say why a text is no requirement, or None."""
    if text.isascii() and _PLAIN.fullmatch(text):
        return None
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        Requirement(text)
    except InvalidRequirement:
        return f"{shown(text)} is no requirement; write it as for pip: 'package>=1.2'"
    return None


def requirement_of(text: str) -> tuple[str, str] | None:
    """Return the package that a requirement names, and the versions; None if its marker excludes it."""
    simple = _PLAIN.fullmatch(text)
    if simple:
        return simple[1], simple[2] or ""
    from packaging.requirements import Requirement

    requirement = Requirement(text)
    if requirement.marker is not None and not requirement.marker.evaluate():
        return None
    return requirement.name, str(requirement.specifier)


@cache
def requirement_problem(text: str) -> str | None:
    """Say why a requirement isn't met on this machine, or None."""
    try:
        return _problem(text)
    except Exception as error:  # a damaged installation of that package
        return f"what {plain(text)} needs can't be looked up: {describe(error)}; reinstall it"


def of_another_release(dist: Distribution) -> str | None:
    """Say that a distribution was made for another polyattn than the installed one, or return None."""
    try:
        requires = dist.requires or ()
    except ValueError:  # no text, which discovery says
        return None
    for text in requires:
        ours = re.match(r"polyattn(?![\w.-])", text) and "extra ==" not in text
        if ours and (problem := requirement_problem(text)):
            return f"{problem}; pip install --upgrade polyattn {dist.name}"
    return None


def _problem(text: str) -> str | None:
    requirement = requirement_of(text)
    if requirement is None:
        return None
    name, needed = requirement
    here = installed(name)
    if here is None:
        return f"{name} is not installed (needs {text})"
    version = here.version
    if needed and not _satisfies(version, needed):
        return f"{name} {version} is installed, but {text} is needed"
    by = HIDDEN.get(re.sub("[-_.]+", "-", name).lower())
    return by and f"{name} is hidden in this process by {by}, whose functions call polyattn"


_RELEASE = re.compile(r"\d+(?:\.\d+)*")
_OPERATORS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


def _satisfies(version: str, needed: str) -> bool:
    clauses = [re.fullmatch(r"([<>=!]+)\s*(\S+)", part.strip()) for part in needed.split(",")]
    pairs = [(c[1], c[2]) for c in clauses if c is not None]
    if (
        _RELEASE.fullmatch(version)
        and all(sign in _OPERATORS and _RELEASE.fullmatch(bound) for sign, bound in pairs)
        and len(pairs) == len(clauses)
    ):
        return all(_OPERATORS[sign](_numbers(version), _numbers(bound)) for sign, bound in pairs)
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(needed).contains(version, prereleases=True)


def _numbers(release: str) -> tuple[int, ...]:
    """The numbers of a release without zeros at its end: 1.2.0 is 1.2."""
    numbers = [int(part) for part in release.split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
