"""How do Triton's kernels run a variant's functions? As generated source, named by its content."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from polyattn.kernel import (
    AttentionVariant,
    LayerSpec,
    Pointwise,
    Trace,
    feature_mod,
    trace,
    trace_features,
    untraceable,
)
from torch import Tensor

from polyattn_triton.compiling.side_by_side import folder
from polyattn_triton.functions.source import by_row, of_element, source


@dataclass(frozen=True)
class Generated:
    """A layer's functions as Triton's. `softmax`: whether weights are a softmax of their results.

    `rescore`: None where scores stay as they are. `by_head`: whether anything depends on the head.
    `by_row`: whether nothing is hidden, and whatever is read is one number for a row of scores. `new`:
    whether their source was never kept on this machine, so that no kernel of them was.
    """

    rows_of: Any
    change: Any
    rescore: Any
    by_head: bool
    softmax: bool
    trace: Trace
    reads: bool
    by_row: bool
    new: bool

    @classmethod
    def of(cls, spec: LayerSpec) -> Generated | None:
        """Generate a layer's functions; None where it has none. Raises `UntraceableError`."""
        pointwise = Pointwise.of(spec, "triton")
        if pointwise is None:
            return None
        traced = trace(pointwise.score_mod, pointwise.mask_mods, pointwise.inputs)
        return cls._of_trace(traced, pointwise.softmax)

    @classmethod
    def of_mask(cls, spec: LayerSpec) -> Generated | None:
        """Generate a layer's masks alone, whose inputs a step must bring; None where it has none."""
        pointwise = Pointwise.of(spec, "triton")
        if pointwise is None or not pointwise.mask_mods:
            return None
        return cls._of_trace(trace(None, pointwise.mask_mods, pointwise.inputs), softmax=True)

    @classmethod
    def _of_trace(cls, traced: Trace, softmax: bool) -> Generated:
        written = "" if traced.written is None else imported(traced.written).__name__
        text = source(traced, softmax, written)
        new = not file_of(text).is_file()
        module = imported(text)
        by_head, by_seq = (any(node.what == name for node in traced.nodes) for name in "hb")
        rescore = getattr(module, "rescore", None)
        reads = bool(traced.inputs) or by_seq
        return cls(
            module.rows_of,
            module.change,
            rescore,
            by_head,
            softmax,
            traced,
            reads,
            by_row(traced),
            new,
        )

    @property
    def constants(self) -> tuple[Any, ...]:
        """What a kernel is specialised on: the functions, and whether there are weights of a softmax."""
        return self.rows_of, self.change, 1 if self.softmax else 2

    @property
    def where_seen(self) -> tuple[Any, ...]:
        """Likewise, of tiles whose keys are all seen; with no scores to change, as without functions."""
        return self.rescore, 0 if self.rescore is None else self.constants[-1]


NOTHING = (None, None, 0)
"""The constants of a layer without functions."""


def features(spec: LayerSpec) -> Any:
    """Return phi of a layer's variant in Triton's language. Raises `UntraceableError`."""
    function = feature_mod(spec)
    assert function is not None
    return imported(of_element(trace_features(function))).phi


def variant_problem(variant: AttentionVariant) -> str | None:
    """Say why a variant's functions can't be generated, or None."""
    return untraceable(variant, "Triton's kernels", "triton")


def table(
    traced: Trace, seq_index: Tensor, tensors: dict[str, Tensor], lists: Tensor | None = None
) -> Tensor:
    """Return the addresses of the functions' inputs, int64, in `source`'s order. Raises `BatchError`.

    `lists` int32 (tiles of rows, 1 or KV heads, entries): `tile_lists`.
    """
    rows = [seq_index.data_ptr(), 0, 0, 0]
    if lists is not None:
        by_head = lists.stride(1) if lists.shape[1] > 1 else 0
        rows[1:] = [lists.data_ptr(), lists.stride(0), by_head]
    rows += traced.addresses(tensors)
    return torch.tensor(rows, dtype=torch.int64, device="cpu").to(seq_index.device)


def file_of(text: str) -> Path:
    """Return the path of a generated module."""
    return folder() / f"polyattn_generated_{hashlib.sha256(text.encode()).hexdigest()[:20]}.py"


@cache
def imported(text: str) -> ModuleType:
    """Return a generated module, written to a file of its own content's name: Triton reads sources."""
    file = file_of(text)
    name = file.stem
    if not file.is_file() or file.read_text() != text:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False) as new:
            new.write(text)
        Path(new.name).replace(file)  # atomic: others may write it now
    module_spec = importlib.util.spec_from_file_location(name, file)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    module_spec.loader.exec_module(module)
    return module
