"""Do Triton's recurrences give the formulas: chunks, tokens, pieces, whatever is forgotten on the way?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from interpreting import interpreted

pytest.importorskip("triton")
TOLERANCE = {"float32": 2e-6, "float16": 5e-4, "chunks of float16": 1e-3}
"""Half a place of float16 is 2.4e-4 of the largest element; states are float32, of long chunks sums of
products of float16. With a chunk's sum of
decays taken apart from its running sums, states that forget all were off by 6.8e-4 and 6.0e-5."""


@pytest.mark.slow
def test_each_way_is_the_formula() -> None:
    errors = json.loads(interpreted(Path(__file__).with_name("interpreted_recurrences.py")))
    assert len(errors) == 45
    for what, (out, state, pieces) in errors:
        of_state = "chunks of float16" if "float16" in what else "float32"
        assert out < TOLERANCE["float16" if "relu" in what else of_state], what
        assert state < TOLERANCE[of_state], what
        assert (pieces >= 4) is ("pieces" in what), what


@pytest.mark.sweep
def test_the_hastened_interpreter_gives_the_plain_one_s_numbers() -> None:
    script = Path(__file__).with_name("interpreted_recurrences.py")
    assert interpreted(script) == interpreted(script, PLAIN_INTERPRETER="1")
