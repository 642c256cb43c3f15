"""Where does a test run? On the CPU, and on a GPU where there is one, by a backend of each."""

from __future__ import annotations

import pytest
import torch

GPU = torch.cuda.is_available() and torch.version.hip is None
DEVICES = ["cpu", "cuda"] if GPU else ["cpu"]


def everywhere(cpu: str, cuda: str) -> pytest.MarkDecorator:
    """Parametrise `device` and `backend`: names of backends for the CPU, and for an NVIDIA GPU."""
    pairs = [("cpu", name) for name in cpu.split()]
    pairs += [("cuda", name) for name in cuda.split() if GPU]
    return pytest.mark.parametrize(("device", "backend"), pairs)
