"""What `h200_engines.py` runs: a module for each engine, each in a process of its own.

Without a GPU the same code runs on the CPU, which captures nothing: a rehearsal.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Captured:
    """A step that was run once and captured; `replay` runs it anew and returns its output."""

    def __init__(self, step: Callable[[], Tensor]):
        self.step, self.graph = step, None
        self.out = step()
        if DEVICE == "cuda":
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = step()

    def replay(self) -> Tensor:
        """Return the output of the step over what its tensors hold now."""
        if self.graph is None:
            return self.step()
        self.graph.replay()
        return self.out
