"""Times kernels on the device, with a cold L2 and the host's launch time hidden."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch
from polyattn.workload.clock import between_events, device_us, empty_l2


def kernel_us(call: Callable[[], object], repeats: int = 20, flush_bytes: int = 256 << 20) -> float:
    """Return the median device time of `call` in microseconds, the L2 cold.

    As `polyattn tune` takes it: no run counts in which the device may have waited for the host.
    """
    scratch = torch.empty(flush_bytes // 4, device="cuda")
    for _ in range(3):
        call()
    return statistics.median(device_us(call, scratch) for _ in range(repeats))


def host_us(call: Callable[[], object], calls: int = 200, repeats: int = 15) -> float:
    """Return the least host time of `call` in microseconds, the device kept ahead of."""
    import time

    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - started) / calls)
        torch.cuda.synchronize()
    return best * 1e6


def latencies_us(calls: Mapping[str, Callable[[], object]], repeats: int = 50) -> dict[str, float]:
    """Return the median microseconds between events around each call on an idle device, L2 cold.

    What an eager engine waits for: the host's launch time and the kernels'. The calls take turns,
    since a processor that others share is faster at one time than at another.
    """
    scratch = torch.empty(64 << 20, device="cuda")

    def before() -> None:
        empty_l2(scratch)
        torch.cuda.synchronize()

    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(between_events(call, before)[0])
    return {name: statistics.median(taken) for name, taken in times.items()}


def graph_us(call: Callable[[], object], inner: int = 20, repeats: int = 10) -> float:
    """Return the median device time of `call` in a replayed CUDA graph of `inner` calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            call()
    return kernel_us(graph.replay, repeats, flush_bytes=1 << 20) / inner
