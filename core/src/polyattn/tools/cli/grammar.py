"""The batch grammar of vLLM's attention benchmarks: `8q1s2k`, `q2k`, `2q2k_32q1s1k`."""

from __future__ import annotations

import re

from polyattn.errors import SettingsError

_PART = re.compile(r"(?P<count>[0-9]{1,9})?q(?P<q>[0-9]{1,9}k?)(?:s(?P<s>[0-9]{1,9}k?))?")
MOST_SEQUENCES = 1 << 16


def parse_batch(text: str) -> list[tuple[int, int]]:
    """Return (query length, sequence length) of each sequence.

    Parts are joined by `_`; each is `[count]q<query>[s<sequence>]`, `k` meaning 1,024. Without `s`
    the sequence is as long as the query. Raises `SettingsError`.
    """
    pairs: list[tuple[int, int]] = []
    for part in text.split("_"):
        match = _PART.fullmatch(part)
        name = f"batch {text!r}" if part == text else f"batch {text!r}: {part!r}"
        if not match:
            raise SettingsError(
                f"{name} is not [count]q<query>[s<sequence>], like 8q1s2k or q2k, in numbers of at "
                "most 9 digits"
            )
        query = _number(match["q"])
        length = _number(match["s"]) if match["s"] else query
        count = int(match["count"] or 1)
        if not count or not query or length < query:
            raise SettingsError(
                f"{name} needs at least one sequence, and a sequence no shorter than its query"
            )
        if len(pairs) + count > MOST_SEQUENCES:
            raise SettingsError(f"{name} makes more than {MOST_SEQUENCES} sequences; name fewer")
        pairs += [(query, length)] * count
    return pairs


def _number(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)
