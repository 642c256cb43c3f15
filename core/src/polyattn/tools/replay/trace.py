"""Reads request traces: the Azure LLM 2023 CSV and Mooncake's JSONL."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from polyattn.errors import TraceError, describe, shown

MOST_TOKENS = 10**9
HASH_BLOCK = 512
"""Tokens behind one of Mooncake's `hash_ids`."""
MOST_SAMPLES = 1024


@dataclass(frozen=True)
class Request:
    """One request. Equal `hash_ids` mean an equal prefix up to that block of `hash_block` tokens.

    `arrival` is in seconds. `samples` outputs are generated of the one prompt.
    """

    prompt: int
    output: int
    hash_ids: tuple[int, ...] = ()
    hash_block: int = HASH_BLOCK
    arrival: float = 0.0
    samples: int = 1

    def scaled(self, scale: float) -> Request:
        """Return the request with its lengths multiplied, none below 1."""
        return replace(
            self,
            prompt=max(1, round(self.prompt * scale)),
            output=max(1, round(self.output * scale)),
            hash_block=max(1, round(self.hash_block * scale)),
        )


def sampled(requests: Sequence[Request], samples: int | None = None) -> list[Request]:
    """Return a request for each output: `samples` of each prompt, or as many as each asks for.

    Outputs of one prompt are requests whose hash blocks are equal to the prompt's end.
    """
    outputs: list[Request] = []
    fresh = min((i for r in requests for i in r.hash_ids), default=0)
    for request in requests:
        count, ids = samples or request.samples, request.hash_ids
        if count > 1:
            blocks = -(-request.prompt // request.hash_block)
            own = range(fresh - 1, fresh - 1 - max(0, blocks - len(ids)), -1)
            fresh -= len(own)
            ids = (*ids, *own)
        outputs += [replace(request, hash_ids=ids, samples=1)] * count
    return outputs


def read_trace(path: str | Path, limit: int | None = None, times: bool = False) -> list[Request]:
    """Return the first `limit` requests, with their times where `times` asks for them.

    Raises `TraceError` that names the file and the line.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():  # a fifo would be waited for, without end
            raise TraceError(f"{path}: is not a regular file; write the trace to one first")
        # Lines end at a newline alone: str.splitlines would cut JSON texts at U+2028 too.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path}: can't be read: {error}") from error
    parse = _jsonl if path.suffix == ".jsonl" else _csv
    requests = []
    for request in parse(path, lines, times):
        requests.append(request)
        if limit is not None and len(requests) >= limit:
            break
    if not requests:
        raise TraceError(f"{path}: holds no request")
    return requests


def _csv(path: Path, lines: list[str], times: bool) -> Iterator[Request]:
    rows = _rows(path, lines)
    header = [name.strip() for name in next(rows, [])]
    columns = []
    for name in ("ContextTokens", "GeneratedTokens", *(["TIMESTAMP"] if times else [])):
        if name not in header:
            raise TraceError(
                f"{path}, line 1: the header {shown(header)} lacks the column {name!r}"
            )
        columns.append(header.index(name))
    for number, row in enumerate(rows, 2):
        if not row:
            continue
        try:
            prompt, output = (int(row[c]) for c in columns[:2])
        except (ValueError, IndexError):
            raise TraceError(
                f"{path}, line {number}: {shown(','.join(row))} must have whole numbers in "
                "ContextTokens and GeneratedTokens"
            ) from None
        arrival = _seconds(path, number, row, columns[2]) if times else 0.0
        yield _request(path, number, prompt, output, (), arrival)


def _seconds(path: Path, number: int, row: list[str], column: int) -> float:
    """Return the time of a row in seconds; Azure's have seven digits of a second."""
    text = row[column].strip() if column < len(row) else ""
    whole, _, part = text.partition(".")
    try:
        if part and not (part.isascii() and part.isdigit()):
            raise ValueError
        since = datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp()
        return since + float(f"0.{part or 0}")
    except ValueError:
        raise TraceError(
            f"{path}, line {number}: TIMESTAMP={shown(text)} must be a date and time like "
            "2023-11-16 18:15:46.68"
        ) from None


def _rows(path: Path, lines: list[str]) -> Iterator[list[str]]:
    rows = csv.reader(lines)
    try:
        yield from rows
    except csv.Error as error:  # a field of more than 131,072 characters, say
        raise TraceError(f"{path}, line {rows.line_num}: not CSV: {error}") from None


def _jsonl(path: Path, lines: list[str], times: bool) -> Iterator[Request]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            entry: Any = json.loads(line)
        except (ValueError, RecursionError) as error:  # numbers too long, lists too deep
            raise TraceError(f"{where}: not JSON: {describe(error)}") from None
        if not isinstance(entry, dict):
            raise TraceError(f"{where}: must be a JSON object")
        for name in ("input_length", "output_length"):
            if type(entry.get(name)) is not int:
                raise TraceError(f"{where}: {name}={shown(entry.get(name))} must be a whole number")
        ids = entry.get("hash_ids", [])
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise TraceError(f"{where}: hash_ids must be a list of whole numbers")
        stamp: Any = entry.get("timestamp") if times else 0
        if type(stamp) not in (int, float) or not 0 <= stamp < 1e15:
            raise TraceError(
                f"{where}: timestamp={shown(stamp)} must be a number of milliseconds, 0 or more"
            )
        samples = entry.get("samples", 1)
        if type(samples) is not int or not 1 <= samples <= MOST_SAMPLES:
            raise TraceError(
                f"{where}: samples={shown(samples)} must be a whole number from 1 to {MOST_SAMPLES}"
            )
        lengths = entry["input_length"], entry["output_length"]
        request = _request(path, number, *lengths, tuple(ids), stamp / 1e3)
        yield replace(request, samples=samples)


def _request(
    path: Path, number: int, prompt: int, output: int, hash_ids: tuple[int, ...], arrival: float
) -> Request:
    if not (1 <= prompt <= MOST_TOKENS and 0 <= output <= MOST_TOKENS):
        raise TraceError(
            f"{path}, line {number}: {shown(prompt)} prompt and {shown(output)} output tokens; a "
            f"request needs at least 1 and 0, and takes {MOST_TOKENS} at most"
        )
    return Request(prompt, max(output, 1), hash_ids, arrival=arrival)
