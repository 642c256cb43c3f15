"""Do captured sparse steps stay right while their choices change? Replays beside eager calls.

    python benchmarks/replays.py [--count 200] [--rows TEXT] [--shrink N] [--out FILE.json]

For each decode of suite `sparse`: a graph of the call is replayed with other queries, choices and
lengths. The same call, run eagerly after it, must give the same bits. Also counts what a replay
allocates, and whether an eager call waits for the device, which torch's own check says. Without a GPU
the call stands for its graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import build, captured
from pages import about, suite
from polyattn.errors import SelectionError
from polyattn.families.sparse.index_workload import IndexWorkload
from polyattn.families.sparse.workload import whole_choice
from rows import Rows
from table import Row


def changed(work: Any, round: int) -> None:
    """Write other queries, choices and lengths where the graph reads them; nothing waits."""
    (work.frame if isinstance(work, IndexWorkload) else work).query.normal_()
    # Some sequences lose their newest tokens, others get them back.
    lens, few = work.batch.seq_lens, torch.arange(work.batch.num_seqs, device=work.device)
    lens.copy_(work.longest - (few + round) % 3 * 7)
    if not isinstance(work, IndexWorkload):
        part = work.spec.sparse
        drawn = whole_choice(part, work.choice.shape[1], work.batch)
        drawn[:, :, part.budget // (1 + round % 2) :] = -1
        work.choice.copy_(drawn)


def replays(row: Row, device: torch.device, count: int, shrink: int) -> dict[str, Any]:
    """Return how many of a row's replays differ from eager calls, allocate, or how many calls wait."""
    on_gpu, work = device.type == "cuda", first_of(row, device, shrink)
    work.longest = work.batch.seq_lens.clone()
    replay = captured(work.call)
    out = out_of(work)  # the graph's, where a call makes a new one
    tally = {"different": 0, "allocations": 0, "waits": 0}
    for round in range(count):
        changed(work, round)
        before = allocations() if on_gpu else 0
        replay()
        tally["allocations"] += allocations() - before if on_gpu else 0
        given = (out if on_gpu else out_of(work)).clone()
        waited = waits(work.call, on_gpu)
        tally["waits"] += waited
        tally["different"] += waited or not torch.equal(given, out_of(work))
    if on_gpu:
        torch.cuda.empty_cache()
    return tally


def out_of(work: Any) -> torch.Tensor:
    """Return what the last call gave."""
    held = work.frame if isinstance(work, IndexWorkload) else work
    return held.out  # type: ignore[no-any-return]


def waits(call: Callable[[], object], on_gpu: bool) -> bool:
    """Run a call; return whether torch stopped it because it would wait for the device."""
    if not on_gpu:
        call()
        return False
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def first_of(row: Row, device: torch.device, shrink: int) -> Any:
    """Return the step on the first of the row's backends that is here."""
    *others, last = row.contenders(device.type)
    for other in others:
        try:
            return build(row, other, device, shrink)
        except SelectionError:
            continue
    return build(row, last, device, shrink)


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
    rows = Rows(float("inf"))
    for row in suite("sparse"):
        if given.rows in row.name and all(query == 1 for query, _ in row.lengths()):
            rows.add(row.name, partial(replays, row, device, given.count, given.shrink))
    rows.finish(given.out, about(device, given.commit) | {"replays": given.count})


if __name__ == "__main__":
    main()
