"""A covering array: each two values meet, as far as they may, in few steps."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
import torch
from polyattn import discover, resolve_device
from polyattn.conformance.cases.published import VALUES as PUBLISHED
from polyattn.conformance.checks.published import MOST_NUMBERS, ROWS, claimed, fits
from polyattn.conformance.covering import Covering
from polyattn.conformance.derive import derive
from polyattn.workload.compare import output_error
from polyattn.workload.tolerance import TOLERANCES

VALUES = {
    "head": (64, 80, 96, 128, 256), "block": (1, 16, 48, 64), "window": (None, 8, 1024),
    "causal": (True, False), "context": (1, 9, 300), "query": (2, 5), "length": (3, 7),
}  # fmt: skip
OF_STEP = {"decodes": (("context",), 2), "prompts": (("query", "length"), 2)}


def met(choices: list[dict[str, Any]]) -> set[frozenset[tuple[str, Any]]]:
    """Return the pairs of choices, by another way than the array's own."""
    found: set[frozenset[tuple[str, Any]]] = set()
    for choice in choices:
        plain = [(name, choice[name]) for name in ("head", "block", "window", "causal")]
        rows = [[("context", length)] for (length,) in choice["decodes"]]
        rows += [[("query", row[0]), ("length", row[1])] for row in choice["prompts"]]
        for own in [plain, *([*plain, *row] for row in rows)]:
            found |= {frozenset(pair) for pair in combinations(own, 2)}
    return found


def test_each_two_values_meet_and_what_may_not_never_does() -> None:
    covering, choices = Covering(VALUES, OF_STEP, 5), []
    for choice in covering.draw(lambda some: (some.get("head"), some.get("window")) != (256, 1024)):
        choices.append(choice)
        covering.meet(choice)
    pairs = {
        frozenset(((one, a), (other, b)))
        for one, other in combinations(VALUES, 2)
        if {one, other} not in ({"context", "query"}, {"context", "length"})
        for a, b in product(VALUES[one], VALUES[other])
    }
    assert met(choices) == pairs - {frozenset((("head", 256), ("window", 1024)))}
    assert len(choices) <= 24  # 20 of them at least: five heads, four blocks


def test_who_does_not_run_a_choice_is_not_given_it_for_ever() -> None:
    covering = Covering({"a": (1, 2), "b": (1, 2)}, {}, 5)
    assert len(list(covering.draw(lambda some: True))) == 4 and covering.left.any()


def test_a_logits_sum_in_float32_is_within_the_tolerance_of_each_layer_that_fits() -> None:
    """Sums are taken product after product, as no kernel does worse; all else is float64."""
    torch.manual_seed(0)

    def error(size: int, scale: float) -> float:
        query, key, value = torch.randn(4000, size), torch.randn(64, size), torch.randn(64, 64)
        sums = torch.zeros(4000, 64)
        for d in range(size):
            sums += query[:, d : d + 1] * key[:, d]
        exact, off = (query.double() @ key.double().T, sums.double())
        (expected, out) = ((x * scale).softmax(-1) @ value.double() for x in (exact, off))
        return output_error(out, expected)

    allowed = TOLERANCES["float32"].output
    for scale in PUBLISHED["scale"]:
        served = [
            size
            for size in PUBLISHED["head_size"]
            if fits({"dtype": "float32", "scale": scale, "head_size": size}, MOST_NUMBERS[-1])
        ]
        assert error(max(served), scale or max(served) ** -0.5) < 0.75 * allowed
    assert error(256, 1.0) > allowed
    wide = {"scale": 1.0, "head_size": 256}
    assert fits(wide | {"dtype": "bfloat16"}, MOST_NUMBERS[-1]) and fits(wide, MOST_NUMBERS[-1])


@pytest.mark.slow
def test_the_kits_own_array_leaves_only_what_no_step_of_its_size_has() -> None:
    """Few pairs are left: those of a long context and many heads, say."""
    info = discover().backends["TORCH_SDPA"]
    case = next(c for c in derive(info, resolve_device("cpu")) if c.check == "pairs")
    covering = Covering(claimed(case.spec, info.capabilities), ROWS, 5)
    pairs, count = int(covering.left.sum()) // 2, 0
    for most in MOST_NUMBERS:
        for choice in covering.draw(lambda some, most=most: fits(some, most)):
            covering.meet(choice)
            count += 1
    assert int(covering.left.sum()) // 2 < pairs // 50 and count < pairs // 15
