"""Do captured sparse steps stay right while their choices change? Replays beside eager calls.

    python benchmarks/replays.py [--count 200] [--rows TEXT] [--shrink N] [--out FILE.json]

For each row of suite `sparse`: a graph of the call is replayed with other queries, choices and lengths. The
same call, run eagerly after it, must give the same bits. Also counts what a replay allocates, and whether
an eager call waits for the device, which torch's own check says. Without a GPU the call stands for its graph.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from measuring import build, captured
from pages import about, suite
from polyattn.errors import PolyattnError
from polyattn.families.sparse.workload import whole_choice
from table import Row


def changed(work: Any, round: int) -> None:
    """Write other queries, choices and lengths where the graph reads them; nothing waits."""
    work.query.normal_()
    # Some sequences lose their newest tokens, others get them back.
    lens, few = work.batch.seq_lens, torch.arange(work.batch.num_seqs, device=work.device)
    if work.batch.all_decode:
        lens.copy_(work.longest - (few + round) % 3 * 7)
    if getattr(work, "choice", None) is not None:
        shape = work.choice.shape
        part = work.spec.sparse
        drawn = whole_choice(part, shape[1] if len(shape) > 2 else 1, work.batch)
        drawn[:, :, part.budget // (1 + round % 2) :] = -1
        work.choice.copy_(drawn.view(shape))


def replays(row: Row, device: torch.device, count: int, shrink: int) -> dict[str, Any]:
    """Return how many of a row's replays differ from eager calls, allocate, or how many calls wait."""
    on_gpu = device.type == "cuda"
    work = build(row, row.contenders(device.type)[0], device, shrink)
    work.longest = work.batch.seq_lens.clone()
    if on_gpu:
        replay = captured(work.call)
        into = work.out  # an indexer's newest output is the graph's
    else:
        replay, into = work.call, None
    tally = {"different": 0, "allocations": 0, "waits": 0}
    for round in range(count):
        changed(work, round)
        before = allocations() if on_gpu else 0
        found = replay()
        tally["allocations"] += (allocations() if on_gpu else 0) - before
        given = (work.out if into is None else into).clone()
        del found
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            eager = work.call()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            tally["waits"] += 1
            continue
        finally:
            if on_gpu:
                torch.cuda.set_sync_debug_mode("default")
        eager = eager if isinstance(eager, torch.Tensor) else work.out
        tally["different"] += not torch.equal(given, eager)
    return tally


def allocations() -> int:
    """Return how many blocks torch has allocated since it began."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--rows", default="")
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {}
    for row in (row for row in suite("sparse") if given.rows in row.name):
        try:
            found[row.name] = replays(row, device, given.count, given.shrink)
        except (PolyattnError, RuntimeError) as error:
            found[row.name] = {"cannot": str(error).splitlines()[0][:160]}
        print(f"{row.name:44} {json.dumps(found[row.name])}", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if given.out is not None:
        record = about(device, given.commit) | {"replays": given.count, "rows": found}
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
