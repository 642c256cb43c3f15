"""Which of a module's liars does the whole kit pass? `python judge_unseen.py MODULE OUT.json [--budget S] [NAMES]`"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

FIRST = ("pairs", "published", "combined", "many_calls", "many_lengths", "masks")
"""What catches most is run first: the order of cases changes only how long a liar is looked at."""
LATE = (
    "search",
    "many_calls",
    "many_lengths",
    "published",
    "sparse_search",
    "latent_search",
    "recurrent_search",
)

SEARCHES = (*LATE, "pairs", "masks")


def main() -> None:
    from polyattn import discover, register, resolve_device
    from polyattn.conformance.checks.table import run_case
    from polyattn.conformance.derive import derive
    from witness import Plugin, name_of

    module, out = importlib.import_module(f"liars.{sys.argv[1]}"), Path(sys.argv[2])
    budget = float(sys.argv[3])
    register(Plugin(module.ALL), "unseen")
    device = resolve_device("cpu")
    results = json.loads(out.read_text()) if out.is_file() else {}
    for kind in module.ALL:
        name = kind.__name__
        if (sys.argv[4:] and name not in sys.argv[4:]) or (not sys.argv[4:] and name in results):
            continue
        start, caught, why, count = time.process_time(), None, "", 0
        cases = derive(discover().backends[name_of(kind)], device)
        if os.environ.get("SEARCHES"):  # what a budget doesn't change was looked at before
            cases = [case for case in cases if case.check in SEARCHES]
        for case in sorted(
            cases, key=lambda case: FIRST.index(case.check) if case.check in FIRST else 9
        ):
            count += 1
            try:
                run_case(case, name_of(kind), device, 20, budget)
            except BaseException as error:  # noqa: BLE001
                if isinstance(error, KeyboardInterrupt):
                    raise
                caught, why = case.id, f"{type(error).__name__}: {str(error)[:160]}"
                break
        gc.enable()
        np.seterr(divide="warn", over="warn", under="ignore", invalid="warn")
        torch.set_float32_matmul_precision("highest")
        os.environ["OMP_NUM_THREADS"] = "1"
        getattr(kind, "undo", int)()
        results[name] = {
            "caught": caught,
            "why": why,
            "cases": [count, len(cases)],
            "cpu_s": round(time.process_time() - start, 1),
        }
        print(name, results[name], flush=True)
        out.write_text(json.dumps(results, indent=1))
    passed = [name for name, result in results.items() if not result["caught"]]
    print(f"caught {len(results) - len(passed)} of {len(results)}; passed: {', '.join(passed)}")


if __name__ == "__main__":
    sys.path[:0] = ["tests/conformance"]
    main()
