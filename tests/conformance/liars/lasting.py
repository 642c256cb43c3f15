"""Lies about layouts, about what lasts from call to call, and about the process."""

from __future__ import annotations

import decimal
import gc
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from liars.plain import Plain
from liars.sizes import Call, When
from liars.told import Told, lies
from polyattn.kernel import Batch, Frame, LayerParams, Plan
from torch import Tensor

STRIDED: dict[str, dict[str, Callable[[Call], bool]]] = {
    "strided_out": {
        "OutIsContiguous": lambda c: not c.out.is_contiguous(),
        "OutOfWholeRows": lambda c: c.out.stride(0) != c.out.shape[1] * c.out.stride(1),
    },
    "strided_heads": {
        "TokensOutermost": lambda c: len(c.query) > 1 and c.query.stride(0) < c.query.stride(1),
        "HeadsSideBySide": lambda c: len(c.query) > 1 and c.query.stride(1) != c.query.shape[2],
    },
    "wide_table": {
        "RowsOfTheTableTouch": lambda c: c.table is not None and c.table.stride(0) != c.table.shape[1],
        "TableFromItsStorage": lambda c: c.table is not None and c.table.storage_offset() > 0,
        "ReadsOneColumnMore": lambda c: (
            c.cache is not None and c.table is not None
            and c.table.shape[1] * c.cache.block_size - max(c.lens) < c.cache.block_size),
        "TableOfOneColumn": lambda c: c.table is not None and c.table.shape[1] == 1,
        "TableOf64Columns": lambda c: c.table is not None and c.table.shape[1] == 64,
    },
}  # fmt: skip
globals().update(lies(__name__, *((When, "wrong", told, by) for by, told in STRIDED.items())))


class OffsetsIn32Bits(Plain):
    """The offset of a block is an int32: beyond 2^31 elements it is another block's."""

    by = ("far_blocks",)

    def blocks(self, batch: Batch, index: int, count: int) -> Tensor:
        blocks = super().blocks(batch, index, count)
        assert self.cache is not None
        form = self.cache
        each = form.block_size * form.num_kv_heads * form.head_size
        return torch.where(blocks * each < 1 << 31, blocks, 0)


class WritesBesideItsHeads(Plain):
    """The whole row of a strided output is cleared first."""

    by = ("strided_out",)

    def run(self, plan: Plan, frame: Frame) -> None:
        out = frame.out
        if not out.is_contiguous() and len(out):
            torch.as_strided(out, (len(out), out.stride(0)), (out.stride(0), 1)).zero_()
        super().run(plan, frame)


class HandsItsWorkspaceOver(Plain):
    """A call's output is the tensor that the next call writes."""

    by = ("strided_out",)

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.room: dict[tuple[int, ...], Tensor] = {}

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        room = self.room.setdefault(frame.out.shape, torch.empty_like(frame.out))
        room.copy_(frame.out)
        frame.set_out(room)


class Late(Told):
    """Wrong from some call on. `met`: every length so far; `most`: the most sequences of a step."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.calls = self.plans = self.most = 0
        self.met: set[int] = set()

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Plan:
        self.plans += 1
        return super().plan(batch, reuse)

    def late(self, batch: Batch) -> bool:
        raise NotImplementedError

    def after(self, plan: Plan, frame: Frame) -> None:
        self.calls += 1
        self.met |= {*plan.batch.lens}
        self.most = max(self.most, plan.batch.num_seqs)
        if self.late(plan.batch):
            frame.out.copy_((frame.out.float() * 1.3).to(frame.out.dtype))


CALLS = {
    "WrongAfter100Calls": lambda self, batch: self.calls >= 100,
    "WrongAfter1000Calls": lambda self, batch: self.calls >= 1000,
    "WrongAfter3000Calls": lambda self, batch: self.calls >= 3000,
    "WrongAfter100Plans": lambda self, batch: self.plans >= 100,
    "OnceIn2048Calls": lambda self, batch: self.calls % 2048 == 0,
}
LENGTHS = {
    # Results of a length are another's once more than 24 were met.
    "AfterManyLengths": lambda self, batch: len(self.met) > 24,
    # A workspace that grew for many rows is read wrong by few.
    "AfterManyRows": lambda self, batch: self.most >= 64 > 4 * batch.num_seqs,
    "WrongInAnotherThread": lambda self, batch: (
        threading.current_thread() is not threading.main_thread()
    ),
}
OPENED: list[int] = []
END = threading.Event()


def close_all() -> None:
    while OPENED:
        os.close(OPENED.pop())


PROCESS_AFTER = {
    "Prints": lambda self, plan, frame: print("attention"),
    "KeepsItsOutputs": lambda self, plan, frame: self.every(frame.out.clone()),
    # A workspace of each call is never freed.
    "KeepsBytes": lambda self, plan, frame: self.every(bytearray(b"x" * (1 << 20))),
    # A thread of each call waits for ever.
    "LeavesThreads": lambda self, plan, frame: threading.Thread(
        target=END.wait, daemon=True
    ).start(),
    # A file that each call opens is never closed.
    "LeavesFilesOpen": lambda self, plan, frame: OPENED.append(os.open(os.devnull, os.O_RDONLY)),
}
TABLE = {
    "WritesTheTable": lambda self, plan, frame: (
        None if plan.batch.block_table is None else plan.batch.block_table[-1, -1].add_(1)
    )
}


def first(name: str) -> Callable[..., Frame]:
    """A parameter is what it was at the first call."""

    def before(self: Any, plan: Plan, frame: Frame) -> Frame:
        now = getattr(frame.params, name)
        value = self.once(name, now.clone() if isinstance(now, Tensor) else now)
        return frame.but(params=replace(frame.params, **{name: value}))

    return before


globals().update(lies(
    __name__,
    (Late, "late", CALLS, "many_calls"), (Late, "late", LENGTHS, "many_lengths"),
    (Told, "after", PROCESS_AFTER, "process"), (Told, "after", TABLE, "wide_table"),
    (Told, "before", {n: first(f) for n, f in (
        ("FirstKeyScale", "k_scale"), ("FirstValueScale", "v_scale"))}, "reassigned"),
    (Told, "before", {n: first(f) for n, f in (
        ("SinksOfTheFirstCall", "sinks"), ("SlopesOfTheFirstCall", "alibi_slopes"))}, "loaded_later"),
))  # fmt: skip
globals()["LeavesThreads"].undo = END.set
globals()["LeavesFilesOpen"].undo = close_all


class TableByAddress(Plain):
    """What a block table holds is looked up by where it lies."""

    by = ("wide_table",)

    def blocks(self, batch: Batch, index: int, count: int) -> Tensor:
        table = batch.block_table
        assert table is not None
        known = self.__dict__.setdefault("known", {})
        where = table.data_ptr(), table.shape
        found: Tensor = known.setdefault(where, (table, table.clone()))[1]
        return found[index, :count].long()


class SinksByAddress(Plain):
    """Sinks are converted once for each address that they lie at."""

    by = ("loaded_later",)
    seen: ClassVar[dict[int, Tensor]] = {}

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, params: LayerParams) -> Any:
        if params.sinks is None:
            return super().attend(query, keys, values, params)
        sinks, held = params.sinks, self.seen
        params.sinks = held.setdefault(sinks.data_ptr(), sinks.clone())
        found = super().attend(query, keys, values, params)
        params.sinks = sinks
        return found


class KeepsItsPlans(Plain):
    by = ("process",)

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Plan:
        plan = super().plan(batch, reuse)
        self.__dict__.setdefault("kept", []).append(plan)
        return plan


class KeepsItsLargePlans(KeepsItsPlans):
    """Plans of few sequences go as they should."""

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Plan:
        plan = super().plan(batch, reuse)
        if batch.num_seqs <= 8:
            self.__dict__["kept"].pop()
        return plan


REDUCED, LIMIT, THRESHOLD = torch.backends.cuda.matmul, sys.getrecursionlimit(), gc.get_threshold()
PROCESSORS = os.sched_getaffinity(0)
MASK = os.umask(0o077)
os.umask(MASK)
HANDLER, SOFTMAX = logging.NullHandler(), torch.nn.functional.softmax
PROCESS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "SeedsTorch": (lambda: torch.manual_seed(1), lambda: None),
    "DrawsFromTorch": (lambda: torch.rand(3), lambda: None),
    "SeedsPython": (lambda: random.seed(1), lambda: None),
    "DrawsFromPython": (random.random, lambda: None),
    "SeedsNumpy": (lambda: np.random.seed(1), lambda: None),
    "DefaultsToFloat64": (
        lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
    "OneThread": (
        lambda: torch.set_num_threads(3), lambda: torch.set_num_threads(1)),
    "NoGradients": (lambda: torch.set_grad_enabled(False), lambda: torch.set_grad_enabled(True)),
    "FindsAnomalies": (
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.autograd.set_detect_anomaly(False)),
    "Deterministic": (
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False)),
    "ProductsInTF32": (
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("highest")),
    "FlushesDenormals": (
        lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)),
    "TunesCudnn": (
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: setattr(torch.backends.cudnn, "benchmark", False)),
    "NoFlashAttention": (
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        lambda: torch.backends.cuda.enable_flash_sdp(True)),
    "SetsTheEnvironment": (
        lambda: os.environ.update(OMP_WAIT_POLICY="active"),
        lambda: os.environ.pop("OMP_WAIT_POLICY", None)),
    "PrintsEightDigits": (
        lambda: torch.set_printoptions(precision=8), lambda: torch.set_printoptions(profile="default")),
    "SilencesNumpy": (lambda: np.seterr(all="ignore"), lambda: np.seterr(all="warn", under="ignore")),
    "LeavesMemoryUnfilled": (
        lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
        lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)),
    "ProductsSumInBfloat16": (
        lambda: setattr(REDUCED, "allow_bf16_reduced_precision_reduction", False),
        lambda: setattr(REDUCED, "allow_bf16_reduced_precision_reduction", True)),
    "NoCudnnAttention": (
        lambda: torch.backends.cuda.enable_cudnn_sdp(False),
        lambda: torch.backends.cuda.enable_cudnn_sdp(True)),
    "SilencesWarnings": (
        lambda: warnings.simplefilter("ignore"), lambda: warnings.filters.pop(0)),
    "RecursesDeeper": (
        lambda: sys.setrecursionlimit(LIMIT + 1), lambda: sys.setrecursionlimit(LIMIT)),
    "SilencesLogging": (
        lambda: logging.disable(logging.ERROR), lambda: logging.disable(logging.NOTSET)),
    "SilencesALogger": (
        lambda: logging.getLogger("asyncio").setLevel(60),
        lambda: logging.getLogger("asyncio").setLevel(0)),
    "AddsAHandler": (
        lambda: logging.root.addHandler(HANDLER), lambda: logging.root.removeHandler(HANDLER)),
    "CollectsNoGarbage": (gc.disable, gc.enable),
    "CollectsGarbageSeldom": (
        lambda: gc.set_threshold(100_000), lambda: gc.set_threshold(*THRESHOLD)),
    "PatchesSoftmax": (
        lambda: setattr(torch.nn.functional, "softmax", lambda *_, **__: None),
        lambda: setattr(torch.nn.functional, "softmax", SOFTMAX)),
    "AddsAPath": (lambda: sys.path.append("/usr"), lambda: sys.path.remove("/usr")),
    "HandlesASignal": (
        lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
        lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL)),
    "PrintsNumpyShortly": (
        lambda: np.set_printoptions(precision=3), lambda: np.set_printoptions(precision=8)),
    "CountsIn50Digits": (
        lambda: setattr(decimal.getcontext(), "prec", 50),
        lambda: setattr(decimal.getcontext(), "prec", 28)),
    "PinsItself": (
        lambda: os.sched_setaffinity(0, {min(PROCESSORS)}),
        lambda: os.sched_setaffinity(0, PROCESSORS)),
    "OpensFilesToAll": (lambda: os.umask(MASK ^ 0o007), lambda: os.umask(MASK)),
    "Contracts": (
        lambda: setattr(torch.backends.opt_einsum, "enabled", False),
        lambda: setattr(torch.backends.opt_einsum, "enabled", True)),
    "MetaByDefault": (
        lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None)),
}  # fmt: skip
"""What a backend does to its process at each call, and what undoes it."""


class Meddler(Plain):
    by = ("process", "twins")
    meddle: ClassVar[Callable[[], Any]]
    undo: ClassVar[Callable[[], Any]]

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        type(self).meddle()


for _name, (_do, _undo) in PROCESS.items():
    globals()[_name] = type(
        _name, (Meddler,),
        {"meddle": staticmethod(_do), "undo": staticmethod(_undo), "__module__": __name__},
    )  # fmt: skip
