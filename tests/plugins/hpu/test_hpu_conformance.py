"""Every claim of the Gaudi plugin's backends, by the conformance kit, interpreted on the CPU."""

from __future__ import annotations

import pytest
from kits import OVER_FAKES, conforms


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "least"), [("HPU_ATTN", 200), ("HPU_MLA", 20)])
def test_conforms(backend: str, least: int) -> None:
    conforms(backend, least, *OVER_FAKES)
