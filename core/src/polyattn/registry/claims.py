"""Do a backend's claims make sense? What types can't say: vocabularies, ranges, patterns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from polyattn.device import arch_matches
from polyattn.errors import nearest, shown

if TYPE_CHECKING:
    from polyattn.registry.capabilities import Capabilities
    from polyattn.registry.sizes import Sizes

PLATFORM_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_CPU_ARCHS = re.compile("x86_64|aarch64")
_ARCH_WORD = re.compile("[a-z]+_?[0-9]+[a-z]*")
"""What an arch looks like, where a platform names none: a feature's name has no number in it."""
_ARCH = re.compile(r"[A-Za-z0-9_.]{1,32}")
_ARCHS = re.compile(r"([a-z_]+)(\d+)(?:\+|-\1(\d+))")


def size_problems(sizes: Sizes) -> Iterator[str]:
    """Yield what is wrong with a set of sizes whose fields have the right types."""
    if any(value < 1 for value in sizes.values):
        yield f"Sizes.values={shown(sorted(sizes.values))}: sizes are 1 or more"
    if sizes.multiple < 1:
        yield f"Sizes.multiple={shown(sizes.multiple)} must be 1 or more"
    if sizes.low < 0:
        yield f"Sizes.low={shown(sizes.low)} must not be negative"
    if sizes.high is not None and sizes.high < max(sizes.low, 1):
        yield f"Sizes.high={shown(sizes.high)} is below low={shown(sizes.low)}: it allows no size"


def claim_problems(caps: Capabilities, words: Iterable[str], anywhere: str) -> Iterator[str]:
    """Yield what is wrong with claims whose fields have the right types.

    `words` are the names that `excludes` may use beside the archs of `platforms`; `anywhere` is the
    platform that stands for all.
    """
    for platform, archs in caps.platforms.items():
        if platform != anywhere and not PLATFORM_NAME.fullmatch(platform):
            yield (
                f"Capabilities.platforms: {shown(platform)} can't be a platform's name; use lower-case "
                "letters, digits and _"
            )
        for pattern in archs:
            if not is_arch_pattern(pattern):
                yield (
                    f"Capabilities.platforms[{platform!r}]: {shown(pattern)} is no arch pattern; write "
                    "'sm_90', 'sm_80+' or 'sm_80-sm_90'"
                )
    if any(size < 1 for pair in caps.v_head_pairs for size in pair):
        yield f"Capabilities.v_head_pairs={shown(sorted(caps.v_head_pairs))}: sizes are 1 or more"
    yield from _exclude_problems(caps, frozenset(words), anywhere)


def is_arch_pattern(pattern: str) -> bool:
    """Whether a text is an arch, `"sm_80+"` or a range whose ends are in order."""
    bounds = _ARCHS.fullmatch(pattern)
    if bounds:
        return bounds[3] is None or int(bounds[2]) <= int(bounds[3])
    return _ARCH.fullmatch(pattern) is not None


def _exclude_problems(caps: Capabilities, words: frozenset[str], anywhere: str) -> Iterator[str]:
    for together, _ in caps.excludes:
        if len(together) < 2:
            yield (
                f"Capabilities.excludes: {shown(sorted(together))} must name two things or more that "
                "don't work together; leave one that never works out of the claims"
            )
        for word in sorted(together - words):
            if not _is_claimed_arch(word, caps.platforms, anywhere):
                yield (
                    f"Capabilities.excludes: {shown(word)} is unknown{nearest(word, words)} "
                    "(an arch must be among those that platforms names)"
                )


def _is_claimed_arch(word: str, platforms: Mapping[str, tuple[str, ...]], anywhere: str) -> bool:
    """Whether `word` is an arch that the claims cover; of a platform without archs, a known one."""
    for platform, patterns in platforms.items():
        if any(arch_matches(pattern, word) for pattern in patterns):
            return True
        words = _CPU_ARCHS if platform == "cpu" else _ARCH_WORD
        if not patterns and platform != anywhere and words.fullmatch(word):
            return True
    return False
