"""What are lengths in tensors on the host? A copy, stored on the tensor until it changes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor

from polyattn.errors import BatchError
from polyattn.runtime.inputs import capturing


def values_of(tensor: Tensor) -> list[int]:
    """Return a tensor's integers on the host. A tensor is copied again only after it has changed.

    Args:
        tensor: integers (values,), on any device.

    Returns:
        The values.

    Raises:
        BatchError: a graph is being captured.

    Examples:
        >>> values_of(torch.tensor([3, 1]))
        [3, 1]

    """
    return _copied(tensor)[1]  # type: ignore[no-any-return]


def lens_between(cumulative: Tensor, gap: bool = False) -> tuple[int, ...]:
    """Return the lengths between cumulative starts, on the host, copied as `values_of` does it.

    Args:
        cumulative: integers (num_seqs + 1,), where each sequence starts, and where the last one ends.
        gap: whether something may lie before the first sequence.

    Returns:
        The lengths, in tokens.

    Raises:
        BatchError: the first start isn't 0 and `gap` isn't set, or a graph is being captured.

    Examples:
        >>> lens_between(torch.tensor([0, 5, 6]))
        (5, 1)

    """
    known = _copied(cumulative)
    if not gap and known[1][0] != 0:
        raise BatchError(f"cumulative lengths begin with {known[1][0]}; they must begin with 0")
    if known[2] is None:
        known[2] = tuple([b - a for a, b in pairwise(known[1])])
    return known[2]  # type: ignore[no-any-return]


def _copied(tensor: Tensor) -> list[Any]:
    """Return [version, values, lengths between them or None].

    A tensor of `torch.inference_mode` counts no changes, so that it is copied at each call.
    """
    if capturing(tensor):  # known values, too: a replay would go on with them, whatever it holds
        raise BatchError(
            "this call reads lengths on the host, and a graph is being captured; run it outside "
            "the capture, or use the call whose lengths stay on the device"
        )
    version = None if tensor.is_inference() else tensor._version
    known: list[Any] | None = getattr(tensor, "_polyattn_host", None)
    if known is not None and known[0] == version and version is not None:
        return known
    known = [version, tensor.tolist(), None]
    tensor._polyattn_host = known  # type: ignore[attr-defined]
    return known
