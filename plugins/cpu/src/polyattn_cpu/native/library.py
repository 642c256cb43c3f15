"""Finds the compiled library and its instruction set for this processor. Imports no torch."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from polyattn.plugin import SettingsError

ABI = 15
"""`PA_ABI` of the header that this package was written for."""

ISA_VARIABLE = "POLYATTN_CPU_ISA"
"""The instruction set to use instead of the best one that the processor has."""

PAIRS_VARIABLE = "POLYATTN_CPU_PAIRS"
"""1: avx512_bf16 multiplies pairs of bfloat16 where float32 products are faster, too."""

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "kernels.lib"
REPORT = FOLDER / "build.txt"
"""The build's report: if there is no library, the reason."""

REBUILD = "run python -m polyattn_cpu.native.build"


class NativeError(RuntimeError):
    """The native library is missing, doesn't fit this package, or lacks what the caller needs."""


@cache
def load() -> ctypes.CDLL:
    """Load the library. Raises `NativeError` with what is missing and how to get it."""
    if not LIBRARY.is_file():
        why = REPORT.read_text().strip() if REPORT.is_file() else "they were never built"
        raise NativeError(f"no native kernels: {why}; then {REBUILD}")
    try:
        lib = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise NativeError(f"{LIBRARY} can't be loaded: {error}; {REBUILD}") from error
    if lib.pa_abi() != ABI:
        raise NativeError(
            f"{LIBRARY} has interface {lib.pa_abi()}, this package wants {ABI}; {REBUILD}"
        )
    pointer, text, count = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32
    for name, result, arguments in (
        ("pa_error", text, []),
        ("pa_poison", None, []),
        ("pa_isas", text, []),
        ("pa_plan_new", pointer, [text, text, text]),
        ("pa_plan_free", None, [pointer]),
        ("pa_plan_list", None, [pointer, pointer, pointer, pointer]),
        ("pa_attend", ctypes.c_int, [pointer, text]),
        ("pa_store", ctypes.c_int64, [text, text, count, count]),
        ("pa_scan_step", ctypes.c_int64, [text, text, count]),
        ("pa_choose", ctypes.c_int, [text, text, count, *[pointer] * 4]),
        ("pa_pages", ctypes.c_int, [text, count]),
        ("pa_attend_chosen", ctypes.c_int, [pointer, text, text, text]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def why_not() -> str | None:
    """Return why the native kernels can't run here, or None: the backends' probe.

    Raises `SettingsError` where they can, but not as `POLYATTN_CPU_ISA` wants it.
    """
    try:
        isa()
    except NativeError as error:
        return str(error)
    return None


@cache
def isas() -> tuple[str, ...]:
    """Return the instruction sets that were built and that this processor has, the best first."""
    there, _, _ = load().pa_isas().decode().partition(";")
    return tuple(there.split(","))


def runs() -> str:
    """Return `isa()`, and the sets of this processor that the build's compiler failed at."""
    _, _, left_out = load().pa_isas().decode().partition(";")
    return f"{isa()} (built without {left_out.replace(',', ', ')})" if left_out else isa()


def isa() -> str:
    """Return the instruction set that runs: `POLYATTN_CPU_ISA`, or the best one.

    Raises `SettingsError` where the variable names one that isn't here or `POLYATTN_CPU_PAIRS` is
    neither 0 nor 1, and `NativeError` without the library.
    """
    wanted, there = os.environ.get(ISA_VARIABLE), isas()
    pairs = os.environ.get(PAIRS_VARIABLE)
    if pairs not in (None, "", "0", "1"):
        raise SettingsError(f"environment variable {PAIRS_VARIABLE}={pairs!r}: must be 0 or 1")
    if not wanted:
        return there[0]
    if wanted not in there:
        raise SettingsError(
            f"environment variable {ISA_VARIABLE}={wanted!r}: this machine and build have "
            f"{', '.join(there)}; name one of these or unset it"
        )
    return wanted
