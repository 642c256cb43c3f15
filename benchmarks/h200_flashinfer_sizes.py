"""Which head sizes does FlashInfer's FA2 really take? Compiled, run, compared with float64.

    python benchmarks/h200_flashinfer_sizes.py [--sizes 320 512]

Each size compiles a module for minutes. Rows of one and of several tokens over pages, and a prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from h200_mixed import library, paged
from h200_ragged import Run, Step
from polyattn import LayerSpec
from rows import Rows

ROWS = {
    "decodes": ((1, 700), (1, 33), (1, 4096)),
    "drafts": ((4, 700), (7, 33)),
    "a prompt and a chunk": ((300, 300), (200, 900)),
}


def measured(size: int, rows: Sequence[tuple[int, int]]) -> dict[str, object]:
    """Compare with TORCH_SDPA's result, which is checked in float64."""
    spec = LayerSpec(num_heads=16, num_kv_heads=2, head_size=size)
    run = Run(Step("sizes", spec, tuple(rows)), "TORCH_SDPA")
    error = run.error()
    assert error < 0.01, f"TORCH_SDPA is off by {error}"
    wanted = run.out.clone()
    return library(run, paged(run, "fa2"), wanted)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="+", type=int, default=[512, 320])
    options = parser.parse_args()
    rows = Rows(500)
    for size in options.sizes:
        for name, lengths in ROWS.items():
            rows.add(f"heads of {size}: {name}", lambda n=size, r=lengths: measured(n, r))  # type: ignore[misc]
            torch.cuda.empty_cache()
    print("wrong or failed:", rows.wrong() or "none")


if __name__ == "__main__":
    main()
