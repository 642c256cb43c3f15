from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_kernel_reads_what_nothing_wrote() -> Iterator[None]:
    """Of all kernels that a module's tests compile for sm_90, at once."""
    yield
    if "ahead" in sys.modules:
        sys.modules["ahead"].look()
