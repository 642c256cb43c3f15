"""Is the process as a case found it? What is torch's, Python's and NumPy's, and nobody's to change."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_DENORMAL = 1e-40

SETTINGS: dict[str, Callable[[], Any]] = {
    "torch's random state": lambda: torch.get_rng_state().numpy().tobytes(),
    "Python's random state": random.getstate,
    "NumPy's random state": lambda: str(np.random.get_state()),
    "the default dtype": torch.get_default_dtype,
    "the default device": torch.get_default_device,
    "the number of threads": torch.get_num_threads,
    "the number of threads between operators": torch.get_num_interop_threads,
    "grad mode": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "anomaly mode": torch.is_anomaly_enabled,
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
    "CUDA's settings": lambda: (
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled(),
    ),
    "oneDNN's settings": lambda: torch.backends.mkldnn.enabled,
    "denormal numbers": lambda: float(torch.tensor(_DENORMAL) * 1.0) != 0.0,
    "how tensors are printed": lambda: str(vars(torch._tensor_str.PRINT_OPTS)),
    "NumPy's reaction to errors": np.geterr,
    "the environment": lambda: {
        name: value
        for name, value in os.environ.items()
        if not name.lstrip("_").startswith(("TORCHINDUCTOR_", "TRITON_"))  # the compiler's own
    },
    "the working directory": os.getcwd,
}  # fmt: skip
"""What a case must leave as it was, by name."""


def snapshot() -> dict[str, Any]:
    """Return the process' settings and random states."""
    found = {name: read() for name, read in SETTINGS.items()}
    if torch.cuda.is_initialized():
        found["CUDA's random state"] = torch.cuda.get_rng_state().numpy().tobytes()
        found["CUDA's device"] = torch.cuda.current_device()
    return found


@contextmanager
def same_process() -> Iterator[None]:
    """Assert that what runs inside leaves the process' settings and random states alone."""
    before = snapshot()
    yield
    after = snapshot()
    changed = [name for name in before if before[name] != after[name]]
    assert not changed, f"the process isn't as it was: {', '.join(changed)}"
