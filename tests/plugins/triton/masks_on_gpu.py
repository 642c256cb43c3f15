"""Are TRITON_ATTN's masks right on a GPU? The tests' mask grid, in float32 and bfloat16, by every kernel.

    PYTHONPATH=tests python tests/plugins/triton/masks_on_gpu.py [--workers 12] [--table grid]

Prints a line for each pass and table: right, wrong, refused (`window_right` isn't claimed), then the
first wrong ones. "hopper" passes use Hopper's own kernel where it serves a layer, "portable" never do.
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import polyattn_triton.planning
import torch
from families.mask_grid import BEYOND, GRID, Judged, judged
from polyattn import discover
from polyattn.registry.machine import detect

TABLES = {"grid": GRID, "beyond": BEYOND}
PASSES: dict[str, tuple[bool, dict[str, Any]]] = {
    "portable float32": (False, {}),
    "portable bfloat16": (False, {"dtype": "bfloat16"}),
    "hopper bfloat16": (True, {"dtype": "bfloat16"}),
    "hopper bfloat16, heads of 128": (True, {"dtype": "bfloat16", "head_size": 128}),
}


def share(of: int, table: str, name: str, number: int) -> tuple[Judged, int]:
    """Run every `of`-th mask of a table, from the `number`-th; returns how many plans were Hopper's."""
    torch.set_num_threads(1)
    by_hopper, fields = PASSES[name]
    ran = 0
    make = polyattn_triton.planning.hopper_prefill

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal ran
        found = make(*given, **named) if by_hopper else None
        ran += found is not None
        return found

    polyattn_triton.planning.hopper_prefill = counted
    cases = list(TABLES[table].items())
    try:
        mine = (case for at, case in enumerate(cases) if at // 5 % of == number)
        return judged("TRITON_ATTN", detect(discover()), mine, **fields), ran
    finally:
        polyattn_triton.planning.hopper_prefill = make


def main() -> None:
    """Run the passes and print what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--table", choices=TABLES, action="append")
    parser.add_argument("--show", type=int, default=6, help="wrong cases printed of each pass")
    asked = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(asked.workers, mp_context=context) as pool:
        for table in asked.table or TABLES:
            for name in PASSES:
                found = list(
                    pool.map(partial(share, asked.workers, table, name), range(asked.workers))
                )
                wrong = {case: why for part, _ in found for case, why in part.wrong.items()}
                right, refused = (
                    sum(len(getattr(part, kind)) for part, _ in found)
                    for kind in ("right", "refused")
                )
                print(
                    f"{table}, {name}: {right} right, {len(wrong)} wrong, {refused} refused, "
                    f"{sum(ran for _, ran in found)} layers had Hopper's kernel",
                    flush=True,
                )
                for case, why in list(wrong.items())[: asked.show]:
                    print(f"  {case}: {why}"[:150].replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
