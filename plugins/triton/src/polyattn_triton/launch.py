"""Launches a kernel's compiled variant without asking Triton again which one it is.

Triton's own launch binds and classifies some forty arguments each time and asks the driver about
every pointer, 30 µs of host time on the machine where it was measured; a decode step is shorter
than that on the device. A compiled variant's own launch tells the profilers' hooks, for half of its
host time: that is left out while nobody listens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
from polyattn.kernel import arch_matches, at_least
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from polyattn_triton.compiling.side_by_side import KNOWN, Compilers, at_once
from polyattn_triton.compiling.worker import settle

if knobs.runtime.interpret:
    from polyattn_triton.interpreter import hasten

    hasten()

Key = tuple[Any, ...]
_log = logging.getLogger("polyattn")


def launches_early(arch: str) -> bool:
    """Whether a kernel may be scheduled while the one before runs (Hopper's dependent launch)."""
    return arch_matches("sm_90+", arch)


def in_units(strides: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Return strides in units of some elements, and these: what divides all strides, 8 at most.

    Triton knows of an integer whether it is a multiple of 16, else nothing: heads of 120 elements would
    be loaded one by one. Of a product with a constant it knows more. 1 where nothing is to be gained.
    """
    common = gcd(*strides)
    if common % 16 == 0 or max(strides) >= 1 << 31:  # in units these would be of 32 bits
        return strides, 1
    unit = min(8, common & -common)
    return tuple([stride // unit for stride in strides]), unit


def power(size: int) -> int:
    """Return the tile that holds `size`; a matrix product wants 16 at least."""
    return int(triton.next_power_of_2(max(16, size)))


UNFUSED = {"enable_fp_fusion": False}
"""Launch options under which the largest logit, a rounded product, less itself is 0. Fused, the
difference is half a unit in the last place off: an exponent of 128 from logits of 1.5e9 on. H200:
gpt-oss, 1 x 4k 86 us for 123; Hopper's own prefill takes up to 1.04 of its time, so it stays fused."""
MERGED_AT_ONCE = 8192
"""Elements of the parts' outputs that a program merging them keeps in registers."""
MOST_AT_ONCE = 16
"""Parts that one merges at once, however small they are."""


def parts_at_once(rows: int, width: int) -> int:
    """Return how many parts of `rows` padded rows a program merges at once."""
    return min(MOST_AT_ONCE, max(1, MERGED_AT_ONCE // (rows * power(width))))


def merge_rows(height: int, width: int) -> int:
    """Return how many rows of a tile one program takes that merges parts by `merged`."""
    return min(height, max(1, MERGED_AT_ONCE // (MOST_AT_ONCE * power(width))))


FEW_PARTS = 4
"""Parts of a tile up to which a program merges several rows."""
WIDE_PARTS, WIDE_COLUMNS = 256, 32
"""Parts that one merges at once of so many columns of one row, where few tiles are of many parts. H100,
198 splits of 128k: 62 us, 68 by sixteen parts at once of all columns."""


class Merge(NamedTuple):
    """What `merge_kernel` is to do: `programs` have parts of so many tiles, at most `parts` of one.

    A thread holds four columns of sixteen parts: of one row, or four of each of four rows. `wide`:
    tiles are so few that a row's columns are several programs', of four warps. `alike`: rows of a
    program, whatever parts tiles have, where a row's bits must be its own. `narrow`: parts are of 16
    bits. A thread then has eight columns, of one row: of four rows the code is longer than they take.
    """

    programs: int
    tiles: int
    parts: int
    wide: bool = False
    alike: int = 0
    narrow: bool = False

    @property
    def few(self) -> bool:
        """Whether parts are few: a compiled kernel depends on it, beside `wide` and `alike`."""
        return not self.alike and self.parts <= FEW_PARTS

    @property
    def at_once(self) -> int:
        """How many parts are merged at once."""
        most = MOST_AT_ONCE // (self.alike or 1)
        return WIDE_PARTS if self.wide else FEW_PARTS if self.few else most

    def columns(self, width: int) -> int:
        """Return how many columns of a row a program takes, of `width` padded ones."""
        return min(width, WIDE_COLUMNS) if self.wide else width

    @property
    def by_tile(self) -> bool:
        """Whether cut tiles are looked for among the tiles, not among the programs that end one."""
        return self.tiles < self.programs

    def of_each_variant(self, wide: bool) -> Iterator[Merge]:
        """Yield one for each compiled kernel, for callers that compile them all; `wide`, too."""
        for parts in (FEW_PARTS, FEW_PARTS + 1):
            yield self._replace(parts=parts, wide=False)
        if wide:
            yield self._replace(wide=True)

    def rows(self, height: int) -> int:
        """Return how many of a tile's rows a program takes."""
        return min(height, self.alike or (4 if self.few and not self.narrow else 1))

    def grid(self, height: int, heads: int, width: int = 1) -> tuple[int, int, int]:
        """Return the kernel's grid for tiles of so many rows, of heads whose outputs are `width` wide."""
        rows = -(-height // self.rows(height)) * (power(width) // self.columns(power(width)))
        return min(self.tiles, self.programs), rows, heads


def merge_options(merge: Merge, width: int, early: bool) -> dict[str, Any]:
    """Return `merge_kernel`'s launch options: warps in which a row's columns lie side by side."""
    pdl = {"launch_pdl": True} if early else {}
    columns = 256 if merge.narrow else 128  # of a warp
    return {"num_warps": 4 if merge.wide else max(1, power(width) // columns)} | pdl


def merge_constants(
    merge: Merge, group: int, width: int, height: int, tiled: bool, by_token: bool, sinks: bool,
    lse: bool, early: bool, scales: int = 0, summed: bool = False, listed: bool = True,
) -> tuple[Any, ...]:  # fmt: skip
    """Return `merge_kernel`'s constants, in its order. `width`: of a head's output.

    `summed`: parts have no softmax. `listed`: not of even splits.
    """
    return (
        group, width, merge.columns(power(width)), power(width) // merge.columns(power(width)), height,
        merge.rows(height), merge.at_once, listed, tiled, by_token, sinks, lse, early, scales,
        summed, merge.alike > 0,
    )  # fmt: skip


def facts(device: torch.device) -> Any:
    """Return what torch knows of a GPU; None of a host, which interprets kernels."""
    return torch.cuda.get_device_properties(device) if device.type == "cuda" else None


def multiprocessors(device: torch.device) -> int:
    """Return how many a device has; a few where kernels are interpreted."""
    gpu = facts(device)
    return 4 if gpu is None else gpu.multi_processor_count


def fitting(device: torch.device, needed: int, most: int) -> int:
    """Return how many programs, at most `most`, of so many bytes of shared memory run on one."""
    gpu = facts(device)
    if gpu is None:
        return min(most, 2)
    # torch for ROCm names the block's alone: there it is the multiprocessor's.
    held: int = getattr(gpu, "shared_memory_per_multiprocessor", gpu.shared_memory_per_block)
    return max(1, min(most, held // (needed + 1024)))


class Workspace:
    """Where parts of tiles wait to be merged: outputs, LSE, and how many of a tile's have ended.

    Kernels of one stream share it. What is outgrown lives on: a captured graph goes on writing to it.
    `narrow`: outputs of parts over e4m3, at most 448, in float16: half of the bytes to write and merge.
    """

    def __init__(self, device: torch.device):
        self.parts = self.part_lse = torch.empty(0, dtype=torch.float32, device=device)
        self.narrow = self.parts.view(torch.float16)
        self.done = torch.zeros(0, dtype=torch.int32, device=device)
        self._outgrown: list[Tensor] = []
        self._room = (0, 0, 0)

    def reserve(self, rows: int, width: int, counters: int) -> None:
        """Have room for so many rows of parts, and so many tiles that are in parts."""
        asked = (rows, width, counters)
        if asked == self._room:  # nearly always
            return
        self._room = asked
        self.parts = at_least(self.parts, rows * width, self._outgrown)
        self.narrow = self.parts.view(torch.float16)
        self.part_lse = at_least(self.part_lse, rows, self._outgrown)
        if self.done.numel() < counters:  # the merging program resets its counter to zero
            self._outgrown.append(self.done)
            self.done = self.done.new_zeros(counters)


def _listening() -> bool:
    """Whether a profiler listens to launches."""
    runtime = knobs.runtime
    return bool(
        getattr(runtime.launch_enter_hook, "calls", True)
        or getattr(runtime.launch_exit_hook, "calls", True)
    )


class Kept:
    """Tensors that stay the same from launch to launch, with their addresses.

    `own` come first. `rest`: returns the others, of `addresses`, whose tensors a compiled kernel doesn't
    need.
    """

    def __init__(
        self,
        own: tuple[Tensor, ...] = (),
        addresses: Sequence[int] = (),
        rest: Callable[[], tuple[Tensor, ...]] = tuple,
    ):
        self.own, self._rest = own, rest
        self.pointers = [tensor.data_ptr() for tensor in own]
        self.pointers += addresses
        self.low = 0
        for pointer in self.pointers:
            self.low |= pointer

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return *self.own, *self._rest()


NONE = Kept()


_compiling: ContextVar[list[Any] | None] = ContextVar("polyattn_triton_compiling", default=None)


@contextmanager
def compiling_only(compilers: Compilers) -> Iterator[list[Any]]:
    """Make sites compile and list their first launches, without launching them."""
    asked: list[Any] = []
    token = _compiling.set(asked)
    try:
        with at_once(compilers):
            yield asked
    finally:
        _compiling.reset(token)


def load(kernels: Iterable[Any]) -> None:
    """Load compiled kernels and their launchers on the current device, so that no first step waits.

    What doesn't fit on the device is told, and fails where a step asks for it.
    """
    for kernel in {id(kernel): kernel for kernel in kernels if kernel is not None}.values():
        compiled = kernel.result() if hasattr(kernel, "result") else kernel
        try:
            compiled._init_handles()
        except OutOfResources as error:
            _log.warning("TRITON_ATTN can't run a variant of %s here: %s", compiled.name, error)


# Without torch.cuda.current_device's look at whether CUDA is set up. No kernel is compiled without CUDA.
_current_device = getattr(torch._C, "_cuda_getDevice", int)


class Site:
    """A kernel with all that it is specialised on but the pointers' alignments.

    Whoever holds one vouches for the tensors' dtypes and device: they are looked at on the first
    call alone. Those kept come after the others. A kernel whose last constant is UNIT takes its integers,
    which are strides, in units of so many elements (`in_units`).
    """

    def __init__(self, kernel: Any, ints: tuple[int, ...], constants: Key, options: dict[str, Any]):
        for function in (kernel, *constants):
            settle(function)
        if getattr(kernel, "arg_names", ())[-1:] == ["UNIT"]:
            ints, unit = in_units(ints)
            constants = (*constants, unit)
        self.kernel, self.options = kernel, options
        self.ints, self.constants = ints, constants
        self.variants: dict[Any, Any] = {}
        self.device: int | None = None

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor],
        floats: tuple[float, ...],
        free: tuple[int, ...],
        kept: Kept = NONE,
    ) -> None:
        pointers = [tensor.data_ptr() for tensor in tensors]
        low = kept.low
        for pointer in pointers:
            low |= pointer
        pointers += kept.pointers
        which = 0 if not low & 15 else tuple([pointer & 15 for pointer in pointers])
        variant = self.variants.get(which)
        if variant is not None:
            if self.device != _current_device():
                with torch.cuda.device(self.device):
                    self(grid, tensors, floats, free, kept)
                return
            if not KNOWN or _listening():
                variant[grid](*pointers, *floats, *self.ints, *free, *self.constants)
                return
            variant.run(
                *grid, driver.active.get_current_stream(self.device), variant.function,
                variant.packed_metadata, None, None, None,
                *pointers, *floats, *self.ints, *free, *self.constants,
            )  # fmt: skip
            return
        arguments = (*tensors, *kept.tensors, *floats, *self.ints, *free, *self.constants)
        asked, device = _compiling.get(), tensors[0].device
        # Triton compiles for the current device, and launches there.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            if asked is not None:
                asked.append(self.kernel.warmup(*arguments, grid=grid, **self.options))
                return
            variant = self.kernel[grid](*arguments, **self.options)
        if hasattr(variant, "__getitem__"):  # the interpreter compiles nothing
            self.variants[which] = variant
            self.device = device.index


class Launcher:
    """One kernel's sites, by everything that Triton specialises on.

    Arguments go by position: tensors, floats, integers, free integers, constants. Integers are part
    of the key, since Triton specialises on 1 and on multiples of 16; so is the device. Free integers
    change from step to step (a block table's width): the kernel declares them `do_not_specialize`.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.sites: dict[Key, Site] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        floats: tuple[float, ...],
        ints: tuple[int, ...],
        free: tuple[int, ...],
        constants: Key,
        options: dict[str, Any],
    ) -> None:
        self.site(tensors, ints, constants, options)(grid, tensors, floats, free)

    def site(
        self,
        tensors: tuple[Tensor, ...],
        ints: tuple[int, ...],
        constants: Key,
        options: dict[str, Any],
    ) -> Site:
        """Return the site of such tensors, for callers that find it again by less than all of this."""
        dtypes = tuple([tensor.dtype for tensor in tensors])
        key: Key = (ints, constants, dtypes, tensors[0].device, *options.values())
        site = self.sites.get(key)
        if site is None:
            site = self.sites[key] = Site(self.kernel, ints, constants, options)
        return site
