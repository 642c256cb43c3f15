"""Where is a recurrent layer's state? One slot for each sequence, in one tensor for each layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from polyattn.errors import CacheError, shown
from polyattn.runtime.cache.huge_pages import on_huge_pages
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES
from polyattn.runtime.cache.room import room
from polyattn.runtime.inputs import bad_input, check_is_tensor
from polyattn.spec.layer import LayerSpec
from polyattn.spec.recurrence import form_of, shape_of


@dataclass(frozen=True, kw_only=True)
class StateCacheSpec:
    """The size of one layer's states. `dtype` is a key of `STORAGE_DTYPES`."""

    num_slots: int
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if type(self.num_slots) is not int or self.num_slots <= 0:
            raise CacheError(
                f"StateCacheSpec.num_slots={self.num_slots!r} must be a positive integer"
            )

    @classmethod
    def for_layer(cls, spec: LayerSpec, num_slots: int) -> StateCacheSpec:
        """Return the states of a recurrent layer. Raises `CacheError` for another kind."""
        if not spec.kind.is_recurrent:
            raise CacheError(
                f"{spec} keeps no state; its keys are in a KV cache: allocate_cache(n)"
            )
        form = form_of(spec)
        dtype = spec.dtype
        assert spec.recurrent is not None
        if spec.recurrent.state_dtype != "auto":
            dtype = spec.recurrent.state_dtype
        elif form.state_in_float32 and dtype != "float64":
            dtype = "float32"
        return cls(num_slots=num_slots, shape=shape_of(spec, form.state), dtype=dtype)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one sequence's state in one layer, however long the sequence is."""
        return math.prod(self.shape) * STORAGE_DTYPES[self.dtype].itemsize

    def allocate(self, device: torch.device | str = "cpu") -> StateCache:
        """Return uninitialised states: a sequence that starts fresh reads none."""
        shape, dtype = (self.num_slots, *self.shape), STORAGE_DTYPES[self.dtype]
        with room("num_slots", self.num_slots, self.bytes_per_slot, torch.device(device)):
            return StateCache(on_huge_pages(torch.empty(shape, dtype=dtype, device=device)))


class StateCache:
    """The states of one recurrent layer.

    Args:
        data: (num_slots, ...), contiguous: each slot is a state as the layer's form shapes it.

    Raises:
        CacheError: the tensor isn't contiguous.

    Examples:
        >>> conv = RecurrentSpec(conv_width=4, activation="silu")
        >>> spec = LayerSpec(
        ...     kind="short_conv", num_heads=8, head_size=1, dtype="float32", recurrent=conv
        ... )
        >>> LayerGroup(spec).allocate_states(num_slots=2).data.shape
        torch.Size([2, 8, 3])

    """

    __slots__ = ("data",)

    def __init__(self, data: Tensor):
        check_is_tensor("data", data, error=CacheError)
        if not data.is_contiguous():
            raise CacheError(f"states of shape {tuple(data.shape)} must be contiguous")
        self.data = data

    @property
    def num_slots(self) -> int:
        """Sequences that the cache can hold."""
        return self.data.shape[0]

    @staticmethod
    def accepted(targets: Tensor, counts: Tensor) -> Tensor:
        """Return the next step's `state_slots` after some of this step's drafts were accepted.

        It never waits for the device.

        Args:
            targets: the step's `state_targets`, int64 (num_seqs, tokens).
            counts: accepted tokens of each sequence, integers (num_seqs,), 1 or more; a padding row's
                is 1.

        Returns:
            int64 (num_seqs,).

        Raises:
            BatchError: the shapes don't fit each other.

        """
        for name, tensor, dims in (("targets", targets, 2), ("counts", counts, 1)):
            check_is_tensor(name, tensor)
            if tensor.dim() != dims or tensor.dtype not in (torch.int64, torch.int32):
                shape = ("num_seqs", "tokens")[:dims]
                raise bad_input(name, tensor, shape, torch.int64)
        if len(counts) != len(targets):
            raise bad_input("counts", counts, (len(targets),), counts.dtype)
        return targets.gather(1, counts.to(targets)[:, None] - 1)[:, 0]

    def copy(self, source: int, target: int) -> None:
        """Copy one slot to another: the state of a prefix, for a sequence that shares it.

        Args:
            source: the slot to read.
            target: the slot to write.

        Raises:
            CacheError: a slot is out of range.

        """
        for name, slot in (("source", source), ("target", target)):
            if not isinstance(slot, int) or not 0 <= slot < self.num_slots:
                raise CacheError(
                    f"{name}={shown(slot)} is out of range: there are {self.num_slots} slots, from 0"
                )
        self.data[target].copy_(self.data[source])

    def __repr__(self) -> str:
        return f"<StateCache: {self.num_slots} slots of {tuple(self.data.shape[1:])}, {self.data.dtype}>"
