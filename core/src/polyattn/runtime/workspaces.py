"""Where do kernels write their scratch? `Workspaces`: buffers of calls that run one after another."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspaces:
    """The scratch memory of one stream, which a group's backends share.

    Nothing is allocated before a backend requests it. A buffer lives as long as this object, because
    captured graphs continue to write to it.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, bool], list[Tensor]] = {}

    def scratch(self, device: torch.device, size: int) -> Tensor:
        """Return `size` bytes or more, uint8 of one dimension, whose content means nothing."""
        return self._buffer(device, size, counters=False)

    def counters(self, device: torch.device, size: int) -> Tensor:
        """Return the same for kernels that need their counters at 0, and leave them at 0."""
        return self._buffer(device, size, counters=True)

    def _buffer(self, device: torch.device, size: int, counters: bool) -> Tensor:
        buffers = self._buffers.setdefault((device, counters), [])
        for buffer in buffers:
            if buffer.numel() >= size:
                return buffer
        buffers.append(torch.zeros(size, dtype=torch.uint8, device=device))
        return buffers[-1]
