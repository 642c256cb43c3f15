"""Every claim of the Gaudi plugin's backends, by the conformance kit, interpreted on the CPU."""

from __future__ import annotations

import pytest
from kits import OVER_FAKES, PARTS, conforms


@PARTS
def test_attention_conforms(part: tuple[str, ...]) -> None:
    conforms("HPU_ATTN", 200, *OVER_FAKES, *part)


@pytest.mark.slow
def test_latent_attention_conforms() -> None:
    conforms("HPU_MLA", 20, *OVER_FAKES)
