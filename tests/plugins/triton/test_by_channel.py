"""Do KDA's and RWKV-7's chunks give what their tokens give, whatever is forgotten on the way?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from interpreting import interpreted

pytest.importorskip("triton")
TOLERANCE = 2e-6
"""In float32: what the token at a time has, too."""


@pytest.mark.slow
def test_chunks_are_the_tokens_one_by_one() -> None:
    errors = json.loads(interpreted(Path(__file__).with_name("by_channel.py")))
    assert len(errors) == 8
    assert {what: pair for what, pair in errors.items() if max(pair) > TOLERANCE} == {}
