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
from typing import Any, ClassVar

import numpy as np
import torch
from liars.plain import Plain
from liars.sizes import Call, lies
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
for _by, _lies in STRIDED.items():
    globals().update(lies(_by, _lies, __name__))


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


class Counting(Plain):
    """Wrong from some call on."""

    by = ("many_calls",)
    first = 0

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.calls = self.plans = 0

    def plan(self, batch: Batch, reuse: Plan | None = None) -> Plan:
        self.plans += 1
        return super().plan(batch, reuse)

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        self.calls += 1
        if self.late():
            frame.out.copy_((frame.out.float() * 1.3).to(frame.out.dtype))

    def late(self) -> bool:
        return self.calls >= self.first


class WrongAfter100Calls(Counting):
    first = 100


class WrongAfter1000Calls(Counting):
    first = 1000


class WrongAfter3000Calls(Counting):
    first = 3000


class WrongAfter100Plans(Counting):
    def late(self) -> bool:
        return self.plans >= 100


class OnceIn2048Calls(Counting):
    def late(self) -> bool:
        return self.calls % 2048 == 0


class AfterManyLengths(Plain):
    """Results of a length are another's once more than 24 were met."""

    by = ("many_lengths",)

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        met = self.__dict__.setdefault("met", set())
        met |= {*plan.batch.lens}
        if len(met) > 24:
            frame.out.copy_((frame.out.float() * 1.3).to(frame.out.dtype))


class AfterManyRows(Plain):
    """A workspace that grew for many rows is read wrong by few."""

    by = ("many_lengths",)

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        self.most = max(self.__dict__.get("most", 0), plan.batch.num_seqs)
        if self.most >= 64 > 4 * plan.batch.num_seqs:
            frame.out.copy_((frame.out.float() * 1.3).to(frame.out.dtype))


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


class WrongInAnotherThread(Plain):
    by = ("many_lengths",)

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        if threading.current_thread() is not threading.main_thread():
            frame.out.copy_((frame.out.float() * 1.3).to(frame.out.dtype))


class WritesTheTable(Plain):
    by = ("wide_table",)

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        if plan.batch.block_table is not None:
            plan.batch.block_table[-1, -1] += 1


class Prints(Plain):
    by = ("process",)

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        print("attention")


class First(Plain):
    """Parameters are what they were at the first call."""

    names: ClassVar[tuple[str, ...]] = ()

    def run(self, plan: Plan, frame: Frame) -> None:
        kept, params = self.__dict__.setdefault("kept", {}), frame.params
        place = frame.query.device, params.__class__
        first = kept.setdefault(place, {})
        other = LayerParams(
            k_scale=params.k_scale, v_scale=params.v_scale, out_scale=params.out_scale,
            q_scale=params.q_scale, sinks=params.sinks, alibi_slopes=params.alibi_slopes,
        )  # fmt: skip
        for name in self.names:
            now = getattr(params, name)
            held = first.setdefault(name, now.clone() if isinstance(now, Tensor) else now)
            setattr(other, name, held)
        super().run(plan, frame.but(params=other))


class FirstKeyScale(First):
    by, names = ("reassigned",), ("k_scale",)


class FirstValueScale(First):
    by, names = ("reassigned",), ("v_scale",)


class SinksOfTheFirstCall(First):
    by, names = ("loaded_later",), ("sinks",)


class SlopesOfTheFirstCall(First):
    by, names = ("loaded_later",), ("alibi_slopes",)


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


class KeepsItsOutputs(Plain):
    by = ("process",)

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        self.__dict__.setdefault("kept", []).append(frame.out.clone())


class LeavesThreads(Plain):
    """A thread of each call waits for ever."""

    by = ("process",)
    end: ClassVar[threading.Event] = threading.Event()

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        threading.Thread(target=self.end.wait, daemon=True).start()

    @classmethod
    def undo(cls) -> None:
        cls.end.set()


class LeavesFilesOpen(Plain):
    """A file that each call opens is never closed."""

    by = ("process",)
    opened: ClassVar[list[int]] = []

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        self.opened.append(os.open(os.devnull, os.O_RDONLY))

    @classmethod
    def undo(cls) -> None:
        while cls.opened:
            os.close(cls.opened.pop())


class KeepsBytes(Plain):
    """A workspace of each call is never freed."""

    by = ("process",)

    def run(self, plan: Plan, frame: Frame) -> None:
        super().run(plan, frame)
        self.__dict__.setdefault("kept", []).append(bytearray(b"x" * (1 << 20)))


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
