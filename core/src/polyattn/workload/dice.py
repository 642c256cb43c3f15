"""Where do a workload's numbers come from? Its own generators: torch's belong to the user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


class Dice:
    """Random numbers on one device, the same for the same seed.

    `generator` is on the CPU, whatever the device. `fast`: the device draws normal numbers itself; they
    differ by device.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu", fast: bool = False):
        self.generator = torch.Generator().manual_seed(seed)
        self.device = torch.device(device)
        self._normal = self.generator
        if fast:
            self._normal = torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return normal numbers."""
        source = self._normal
        numbers = torch.randn(*shape, generator=source, dtype=torch.float32, device=source.device)
        return numbers.to(dtype).to(self.device)

    def chance(self, *shape: int) -> Tensor:
        """Return numbers from 0 up to 1, float32 on the CPU."""
        return torch.rand(*shape, generator=self.generator, dtype=torch.float32, device="cpu")

    def integers(self, low: int, high: int, count: int) -> list[int]:
        """Return `count` integers from `low` up to, not including, `high`."""
        return torch.randint(low, high, (count,), generator=self.generator, device="cpu").tolist()

    def integer(self, low: int, high: int) -> int:
        """Return one of them."""
        return self.integers(low, high, 1)[0]

    def choice(self, values: Sequence[Value]) -> Value:
        """Return one of the values, each as likely."""
        return values[self.integer(0, len(values))]

    def order(self, count: int) -> Tensor:
        """Return 0 … count - 1 in random order, int64 on the CPU."""
        return torch.randperm(count, generator=self.generator, device="cpu")

    def blocks(
        self,
        lens: Sequence[int],
        size: int,
        spare: int = 1,
        within: int | None = None,
        first: int = 1,
    ) -> tuple[Tensor, int]:
        """Return a block table, int32 (sequences, columns), and the number of blocks of its cache.

        Each sequence has blocks of its own, in no order. Entries past a length are block 0, which no
        sequence has unless `first`, the first block that one may have, is 0. `spare`: columns beyond the
        longest sequence's. `within`: the cache's blocks, where it is larger than the sequences.
        """
        needed = torch.tensor([-(-n // size) for n in lens], dtype=torch.int64, device="cpu")
        columns = torch.arange(max(int(needed.max()) if len(lens) else 0, 1) + spare, device="cpu")
        count = within or int(needed.sum()) + 3
        table = torch.zeros(len(lens), len(columns), dtype=torch.int32, device="cpu")
        table[columns < needed[:, None]] = (
            self.order(count - first)[: int(needed.sum())] + first
        ).int()
        return table.to(self.device), count
