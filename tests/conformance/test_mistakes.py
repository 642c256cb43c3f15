"""Does the kit name a usual mistake? Each is made here by a formula that shares no code with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import formulas
import pytest
import torch
from polyattn import LayerGroup, LayerSpec
from polyattn.families.attention.workload import AttentionWorkload
from polyattn.workload.dice import Dice
from torch import Tensor

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", block_size=16)
WINDOW, SINKS = SPEC.replace(sliding_window=9), SPEC.replace(learned_sinks=True)
LENGTHS = [(1, 47), (1, 16), (5, 65), (17, 17), (3, 90)]


class Step:
    """A step of a layer, and what a kernel with a mistake makes of it."""

    def __init__(self, spec: LayerSpec, lengths: list[tuple[int, int]]):
        self.work = AttentionWorkload(
            AttentionWorkload.layer_of(LayerGroup(spec), Dice(3, "cpu")), lengths, Dice(4, "cpu")
        )
        self.spec, self.lengths = spec, lengths

    @cached_property
    def sinks(self) -> Tensor | None:
        return self.work.layer.params.sinks  # type: ignore[no-any-return]

    def out(
        self,
        hides: Callable[[Tensor, int, int], Tensor] | None = None,
        order: Any = None,
        **how: Any,
    ) -> Tensor:
        """Return the step's output; `hides(behind, queries, keys)`, `order` of heads: mistakes."""
        how = {"sinks": self.sinks} | how
        rows, (queries, lens) = [], zip(*self.lengths, strict=True)
        every = (
            self.work.query.split(queries),
            *(t.split(lens) for t in (self.work.keys, self.work.values)),
        )
        for query, key, value in zip(*every, strict=True):
            behind = formulas.distances(len(query), len(key))
            mask = behind >= 0
            if self.spec.sliding_window and hides is None:
                mask &= behind < self.spec.sliding_window
            if hides is not None:
                mask &= ~hides(behind, len(query), len(key))
            heads = range(2) if order is None else order
            key, value = (t[:, heads] for t in (key, value))
            rows.append(formulas.attend(query, key, value, mask, **how)[0])
        return torch.cat(rows)


def place(queries: int, keys: int) -> Tensor:
    return torch.arange(keys).expand(queries, keys)


MISTAKES: dict[str, tuple[LayerSpec, dict[str, Any]]] = {
    r"sliding_window=10": (WINDOW, {"hides": lambda behind, *_: behind >= 10}),
    r"sliding_window=8": (WINDOW, {"hides": lambda behind, *_: behind >= 8}),
    r"a layer without sliding_window": (WINDOW, {"hides": lambda behind, *_: behind < 0}),
    r"a layer without learned_sinks": (SINKS, {"sinks": None}),
    r"a softmax scale 1.0": (SPEC, {"scale": 1.0}),
    r"a softmax scale times log2\(e\)": (SPEC, {"scale": 32**-0.5 * 1.4426950408889634}),
    r"query head h reads KV head h % 2": (SPEC, {"order": [0, 1, 0, 1]}),
    r"no query sees the last key": (SPEC, {"hides": lambda _, q, k: place(q, k) == k - 1}),
    r"no query sees an incomplete last block": (
        SPEC, {"hides": lambda _, q, k: place(q, k) >= k // 16 * 16},
    ),
    r"the mask is aligned to the top left": (
        SPEC, {"hides": lambda behind, q, k: behind < k - q},
    ),
}  # fmt: skip


@pytest.mark.parametrize("said", MISTAKES)
def test_a_usual_mistake_is_named(said: str) -> None:
    spec, how = MISTAKES[said]
    step = Step(spec, LENGTHS)
    step.work.compare(step.out(), None)
    with pytest.raises(AssertionError, match=rf"\(allowed 2e-05\) and right (for|if) {said}: "):
        step.work.compare(step.out(**how), None)


def test_a_factor_is_named_and_what_is_no_usual_mistake_is_not() -> None:
    step = Step(SPEC, LENGTHS)
    with pytest.raises(AssertionError, match=r", 0\.5 times what it must be in each element: "):
        step.work.compare(step.out() / 2, None)
    out = step.out()
    out[3, 2] += 1.0
    with pytest.raises(AssertionError) as caught:
        step.work.compare(out, None)
    assert str(caught.value).startswith("the output is off by ") and "2e-05): 1 of " in str(
        caught.value
    )
