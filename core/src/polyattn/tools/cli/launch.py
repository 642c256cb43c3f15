"""How do several processes become the ranks of one run? As torchrun starts them."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch

from polyattn.device import Device
from polyattn.errors import SettingsError, describe
from polyattn.tools.replay.runners import Ranks

LAUNCH = "torchrun --nproc-per-node={0} -m polyattn run MODEL --context-parallel={0}"


def check_launch(size: int) -> None:
    """Check that there are `size` processes, and give each its accelerator. Raises `SettingsError`."""
    processes = os.environ.get("WORLD_SIZE", "1")
    if size > 1 and processes != str(size):
        raise SettingsError(
            f"--context-parallel={size} needs {size} processes and there are {processes}; start them "
            f"with {LAUNCH.format(size)}"
        )
    if size > 1 and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


def joined(size: int, device: Device) -> AbstractContextManager[Ranks | None]:
    """Join this process and the others for a run; None where there is one process.

    Raises `SettingsError` where what several ranks need isn't installed.
    """
    if size == 1:
        return nullcontext()
    try:
        from polyattn.tools.replay import ranks
    except ImportError as error:
        raise SettingsError(
            f"--context-parallel={size} needs a distribution of its own ({describe(error)}): "
            'pip install "polyattn[context-parallel]"'
        ) from error
    return ranks.joined(size, device)
