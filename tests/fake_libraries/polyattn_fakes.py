"""What the fakes of the libraries share: they bind, check and compute with the reference.

Each call is bound against the signature recorded from the real package, and the answer comes from the
very arguments: pages, starts, window, scales. What the libraries leave undefined is NaN here.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
from functools import cache
from inspect import Parameter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from polyattn import LayerSpec
from polyattn.families.attention import reference
from polyattn.kernel import LayerParams
from torch import Tensor

RECORDS = Path(__file__).parent.parent / "signatures"
FP8 = {"gfx942": torch.float8_e4m3fnuz}.get(os.environ.get("FAKE_GFX", ""), torch.float8_e4m3fn)
"""The e4m3 that the pretended chip computes, whatever a tensor says that it holds."""

EMPTY_ROW = torch.nan
"""What a row without keys gets: nobody promises anything on ROCm; see `polyattn_on_cpu`."""

UNFILLED = SimpleNamespace(
    uint8=torch.uint8, zeros=lambda size, **_: torch.from_numpy(np.zeros(size, np.uint8))
)
"""torch, to `polyattn.runtime.workspaces`: filling 128 MiB of scratch takes a CPU longer than a step."""


@cache
def recorded(package: str) -> dict[str, Any]:
    """Return what `signatures/record.py` wrote of a package."""
    record: dict[str, Any] = json.loads((RECORDS / f"{package}.json").read_text())
    return record


@cache
def signature_of(package: str, function: str) -> inspect.Signature:
    """Return a function's signature as it was recorded; what has a default is None there."""
    record = recorded(package)["functions"][function]
    names = record["positional"]
    required = len(names) - record["defaults"]
    return inspect.Signature(
        [
            Parameter(
                name, Parameter.POSITIONAL_OR_KEYWORD,
                default=Parameter.empty if index < required else None,
            )
            for index, name in enumerate(names)
        ]
        + [Parameter(name, Parameter.VAR_POSITIONAL) for name in [record["varargs"]] if name]
        + [
            Parameter(name, Parameter.KEYWORD_ONLY, default=None if optional else Parameter.empty)
            for name, optional in record["keyword"].items()
        ]
    )  # fmt: skip


def bind(package: str, function: str, args: Any, kwargs: Any) -> dict[str, Any]:
    """Bind a call as the real function would; arguments that the call leaves out are None."""
    try:
        bound = signature_of(package, function).bind(*args, **kwargs)
    except TypeError as error:
        where = f"{recorded(package)['package']} {recorded(package)['version']}: {function}"
        raise AssertionError(f"{where}: {error}") from error
    bound.apply_defaults()
    return dict(bound.arguments)


def attend_paged(
    query: Tensor, key: Tensor, value: Tensor, starts: list[int], lens: list[int], table: Tensor,
    *, scale: float, window: tuple[int, int], soft_cap: float, slopes: Tensor | None,
    scales: tuple[Tensor | float, Tensor | float] = (1.0, 1.0), sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend over pages (blocks, block, KV heads, size); returns the output and LSE (heads, tokens).

    `window` is (left, right) beside the query, -1 for none; a row without keys has LSE +inf, and
    padding beyond what is defined is NaN. `scales` of keys and values: one number, or (num_seqs,
    KV heads).
    """
    assert table.dtype == torch.int32 and key.stride(3) == 1 and value.stride(3) == 1
    keys, values = [], []
    for index, length in enumerate(lens):
        blocks = table[index, : -(-length // key.shape[1])].long()
        for stored, found, factor in ((key, keys, scales[0]), (value, values, scales[1])):
            each = factor[index][:, None] if isinstance(factor, Tensor) else factor
            found.append(stored[blocks].flatten(0, 1)[:length].float() * each)
    return attend_each(
        query, keys, values, starts, scale=scale, window=window, soft_cap=soft_cap, slopes=slopes,
        sinks=sinks,
    )  # fmt: skip


def by_columns(table: Tensor) -> Tensor:
    """Return what a kernel reads that goes by the number of a table's columns, not by its strides."""
    return table.as_strided(table.shape, (table.shape[1], 1))


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, starts: list[int], key_starts: list[int],
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same over packed keys (tokens, KV heads, size) that start where `key_starts` says."""
    spans = list(itertools.pairwise(key_starts))
    assert len(key) == len(value) >= key_starts[-1]
    keys, values = ([t[a:b].float() for a, b in spans] for t in (key, value))
    return attend_each(query, keys, values, starts, **options)


def attend_each(
    query: Tensor, keys: list[Tensor], values: list[Tensor], starts: list[int],
    *, scale: float, window: tuple[int, int], soft_cap: float = 0.0, slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend for each sequence's queries to its own keys."""
    left, right = window
    assert right in (0, -1) or right == left, "only causal, symmetric or no windows are asked for"
    spec = LayerSpec(
        num_heads=query.shape[1], num_kv_heads=keys[0].shape[1], head_size=query.shape[2],
        v_head_size=values[0].shape[2], scale=scale, causal=right == 0,
        sliding_window=None if left < 0 else left + 1, logit_soft_cap=soft_cap or None,
        alibi=slopes is not None, learned_sinks=sinks is not None, needs_lse=True,
    )  # fmt: skip
    shape = (len(query), query.shape[1], spec.v_head_size)
    exact = torch.float64 if query.dtype == torch.float32 else torch.float32  # as their kernels
    out = torch.full(shape, EMPTY_ROW, dtype=exact)
    lse = torch.full((query.shape[1], len(query)), torch.inf, dtype=exact)
    for index, key in enumerate(keys):
        rows = slice(starts[index], starts[index + 1])
        if len(key) == 0 or rows.start == rows.stop:
            continue
        params = LayerParams(alibi_slopes=slopes, sinks=sinks)
        out[rows], found = reference.attend(spec, query[rows], key, values[index], params, exact)
        lse[:, rows] = found.T
    return out.to(query.dtype), lse.float()


def lengths(starts: Tensor) -> tuple[list[int], list[int]]:
    """Return starts and lengths of int32 (num_seqs + 1,)."""
    assert starts.dtype == torch.int32 and starts.dim() == 1
    found = starts.tolist()
    return found, [b - a for a, b in itertools.pairwise(found)]
