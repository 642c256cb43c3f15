"""How do several processes become the ranks of one run? As torchrun starts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from polyattn.context_parallel.ranks import ContextParallel
from polyattn.device import Device
from polyattn.errors import SettingsError

LAUNCH = "torchrun --nproc-per-node={0} -m polyattn run MODEL --context-parallel={0}"


def check_launch(size: int) -> None:
    """Check that there are `size` processes, and give each its accelerator. Raises `SettingsError`."""
    found = os.environ.get("WORLD_SIZE", "1")
    if size > 1 and found != str(size):
        raise SettingsError(
            f"--context-parallel={size} needs {size} processes and there are {found}; start them with "
            + LAUNCH.format(size)
        )
    if size > 1 and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def joined(size: int, device: Device) -> Iterator[ContextParallel | None]:
    """Join this process and the others for a run; None where there is one process."""
    if size == 1:
        yield None
        return
    kind = torch.device(str(device.torch_device)).type
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        yield ContextParallel(init_device_mesh(kind, (size,)))
    finally:
        dist.destroy_process_group()
