r"""Which prefill kernels does TRITON_ATTN's kit reach on a Hopper? A pytest plugin that counts them.

    cd benchmarks
    ROUTES=FILE python -m pytest -p kit_routes --pyargs polyattn.conformance \
        --polyattn-backend TRITON_ATTN -n 8
    python kit_routes.py FILE

Each process appends a line of what it counted; the second command adds them up.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

COUNTED: Counter[str] = Counter()


def pytest_configure() -> None:
    """Count the calls of TRITON_ATTN's prefill by the plan's way and by who takes them."""
    from polyattn_triton.attention import TritonAttention

    attend = TritonAttention._prefill

    def counted(backend: TritonAttention, plan: Any, *rest: Any) -> Any:
        ran = attend(backend, plan, *rest)
        own = "own" if ran is plan and plan.at_once else "portable"
        COUNTED[f"{ran.way}, {own}, {'causal' if ran.batch.causal else 'not causal'}"] += 1
        return ran

    TritonAttention._prefill = counted  # type: ignore[method-assign]


def pytest_sessionfinish() -> None:
    """Leave what was counted."""
    if COUNTED:
        with Path(os.environ["ROUTES"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(COUNTED) + "\n")


if __name__ == "__main__":
    found: Counter[str] = Counter()
    for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
        found.update(json.loads(line))
    print("; ".join(f"{way} {count}" for way, count in sorted(found.items())))
