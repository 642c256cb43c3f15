"""Did a case change the process? Settings of torch, Python and NumPy that must stay as they were."""

from __future__ import annotations

import builtins
import decimal
import gc
import locale
import logging
import math
import os
import random
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

_DENORMAL = 1e-40
SIGNALS = tuple(signal.valid_signals())
SHORT, NAMED = 120, 5
"""Characters of a change that a message shows, and names of a mapping's."""

SETTINGS: dict[str, Callable[[], Any]] = {
    "torch's random state": lambda: torch.get_rng_state().numpy().tobytes(),
    "Python's random state": random.getstate,
    "NumPy's random state": lambda: tuple(
        each.tobytes() if isinstance(each, np.ndarray) else each for each in np.random.get_state()
    ),
    "the default dtype": torch.get_default_dtype,
    "the default device": torch.get_default_device,
    "the number of threads": torch.get_num_threads,
    "the number of threads between operators": torch.get_num_interop_threads,
    "grad mode": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "anomaly mode": torch.is_anomaly_enabled,
    "torch's modes of functions and dispatch": lambda: (
        torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(),
    ),
    "autocast": lambda: [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
    "autocast's dtype": lambda: torch.get_autocast_dtype("cpu"),
    "deterministic algorithms": torch.get_deterministic_debug_mode,
    "filling of uninitialised memory": lambda: getattr(
        torch.utils.deterministic, "fill_uninitialized_memory", None
    ),
    "float32's precision in products": torch.get_float32_matmul_precision,
    "cuDNN's settings": lambda: (
        torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32,
    ),
    "CUDA's settings": lambda: _attributes(
        torch.backends.cuda.matmul, "allow_tf32", "allow_bf16_reduced_precision_reduction",
        "allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation",
    ) | {
        name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
        for name in ("flash", "math", "mem_efficient", "cudnn")
    } | {
        "fp16_bf16_reduction_math_sdp":
            torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed(),
    },
    "oneDNN's settings": lambda: torch.backends.mkldnn.enabled,
    "how torch contracts einsum": lambda: _attributes(
        torch.backends.opt_einsum, "enabled", "strategy"),
    "denormal numbers": lambda: float(torch.tensor(_DENORMAL) * 1.0) != 0.0,
    "how tensors are printed": lambda: str(vars(torch._tensor_str.PRINT_OPTS)),
    "NumPy's reaction to errors": np.geterr,
    "how NumPy prints": np.get_printoptions,
    "the decimal context": lambda: str(_without_flags(decimal.getcontext().copy())),
    "the environment": lambda: {
        name: value
        for name, value in os.environ.items()
        # The compilers' own, and pytest's: JAX 0.11 sets Mosaic's when Pallas is imported.
        if not name.lstrip("_").startswith(("TORCHINDUCTOR_", "TRITON_", "MOSAIC_GPU_", "PYTEST_"))
    },
    "the working directory": os.getcwd,
    "the mask of new files": lambda: _umask(),
    "the locale": lambda: locale.setlocale(locale.LC_ALL),
    "the processors": lambda: os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None,
    "the recursion limit": sys.getrecursionlimit,
    "the switch interval": sys.getswitchinterval,
    "garbage collection": lambda: (gc.isenabled(), gc.get_threshold(), gc.get_debug()),
    "the timeout of sockets": socket.getdefaulttimeout,
    "the hooks of exceptions": lambda: (sys.excepthook, sys.unraisablehook),
}  # fmt: skip
"""What a case must leave as it was, by name."""
PATCHED = (torch.nn.functional, torch, torch.Tensor, np, math, random, time, builtins)
"""What a library may put other functions into."""
IMPORTED: dict[str, Callable[[], Any]] = {
    "the filters of warnings": lambda: list(warnings.filters),
    "logging": lambda: {"logging.disable": logging.root.manager.disable, **_loggers()},
    "sys.path": lambda: list(sys.path),
    "the finders of modules": lambda: [*sys.meta_path, *sys.path_hooks],
    "signal handlers": lambda: {each: signal.getsignal(each) for each in SIGNALS},
    "functions": lambda: {module.__name__: dict(vars(module)) for module in PATCHED},
}
"""What a library may change when it is first imported, and no step may."""


def _attributes(of: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(of, name, None) for name in names}


def _without_flags(context: decimal.Context) -> decimal.Context:
    context.clear_flags()
    return context


def _umask() -> int:
    mask = os.umask(0o077)  # only set and returned together; what another thread opens is private
    os.umask(mask)
    return mask


def _loggers() -> dict[str, Any]:
    """Return each logger's level and handlers."""
    known = {"root": logging.root, **logging.root.manager.loggerDict}
    return {
        name: (each.level, each.disabled, each.propagate, tuple(each.handlers))
        for name, each in known.items()
        if isinstance(each, logging.Logger)
    }


def snapshot() -> dict[str, Any]:
    """Return the process' settings and random states."""
    values = {name: read() for name, read in (SETTINGS | IMPORTED).items()}
    if torch.cuda.is_initialized():
        values["CUDA's random state"] = torch.cuda.get_rng_state().numpy().tobytes()
        values["CUDA's device"] = torch.cuda.current_device()
    return values


Result = TypeVar("Result")


def _restore_environment(before: dict[str, str]) -> None:
    for name in SETTINGS["the environment"]().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


RESTORED: dict[str, Callable[[Any], None]] = {
    "Python's random state": random.setstate,
    "the environment": _restore_environment,
    "the recursion limit": sys.setrecursionlimit,
}
"""What libraries change where a first step imports or compiles them, and what puts it back."""


def runs_alone(run: Callable[[], Result]) -> Result:
    """Return what a run returns; assert that the process' settings and random states stay as they were.

    If modules were imported and only `RESTORED` changed, that is put back and it runs again. So a change
    that each step makes is reported, and one that a process' first step makes is not. FLA's and
    mamba-ssm's first steps import packages that set environment variables. torch's compiler raises the
    recursion limit each time that it compiles, with or without imports.
    """
    before, modules = snapshot(), len(sys.modules)
    result = run()
    changed = changes(before, modules)
    excused = RESTORED.keys() if len(sys.modules) > modules else {"the recursion limit"}
    if changed and changed.keys() <= excused:
        for name in changed:
            RESTORED[name](before[name])
        before, modules = snapshot(), len(sys.modules)
        result = run()
        changed = changes(before, modules)
    names = ", ".join(name + change for name, change in changed.items())
    assert not changed, f"the process isn't as it was: {names}"
    return result


def changes(before: dict[str, Any], modules: int) -> dict[str, str]:
    """Return what changed since, by its name. `modules`: how many were imported."""
    after, imported = snapshot(), len(sys.modules) > modules
    changed = {
        name: _change(before[name], after[name], name in IMPORTED)
        for name in before
        if not (imported and name in IMPORTED)
    }
    return {name: change for name, change in changed.items() if change is not None}


def _other_names(before: dict[str, Any], after: dict[str, Any], grows: bool) -> Iterator[str]:
    """Yield the names whose values are others; of a mapping of mappings, `outer.inner`."""
    for name in before.keys() if grows else before.keys() | after.keys():
        old, new = before.get(name), after.get(name)
        if old is new or old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            yield from (f"{name}.{inner}" for inner in _other_names(old, new, grows))
        else:
            yield str(name)


def _change(before: Any, after: Any, grows: bool) -> str | None:
    """Return how a setting changed, or None. `grows`: new entries of a mapping are no change."""
    if before == after:
        return None
    if isinstance(before, dict):
        names = sorted(_other_names(before, after, grows))
        return f" ({', '.join(names[:NAMED])})" if names else None
    change = f" ({before!r} became {after!r})"
    return change if len(change) < SHORT else ""
