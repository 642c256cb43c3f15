"""Does TORCH_SDPA read a paged cache without a parallel region for each block?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from polyattn_cpu import gather
from torch.overrides import TorchFunctionMode


class Copies(TorchFunctionMode):
    """Notes how many elements each row has that `index_select` copies."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") == "index_select":
            self.sizes.append(args[0][0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "shape", [(9, 16, 8, 128), (9, 16, 32, 96), (9, 24, 40, 64), (9, 5, 64, 160), (9, 256, 8, 128)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_are_copied_in_pieces_that_open_no_region(shape, dtype):
    stored = torch.randn(shape).to(dtype)
    blocks = torch.tensor([3, 8, 0, 3])
    with Copies() as copies:
        found = gather._pick(stored, blocks)
    assert torch.equal(found.float(), stored.float()[blocks])
    assert copies.sizes and all(size < gather.PARALLEL for size in copies.sizes)
