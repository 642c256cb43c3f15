"""What does every case need? A source of numbers, a selection by name, pages and what poisons them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from polyattn.api import select
from polyattn.checking.compare import lse_error, output_error
from polyattn.checking.tolerance import tolerance_of
from polyattn.conformance.case import served_phases
from polyattn.conformance.harness.where import worst_lse, worst_row
from polyattn.device import Device
from polyattn.registry.discovery import discover
from polyattn.runtime.cache.kv_cache import KVCache, quantize
from polyattn.runtime.cache.scales import Scale
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.step_mask import StepMask
from polyattn.selection.selection import Selection
from polyattn.settings import current
from polyattn.spec.layer import LayerSpec

Lengths = Sequence[tuple[int, int]]
"""(query length, sequence length) of each sequence."""


class Harness:
    """Selects one backend on one device by name, and draws its inputs.

    `budget`: seconds that a search of cases may take.
    """

    budget = 5.0

    def __init__(self, backend: str, device: Device, seed: int):
        self.backend, self.device, self.seed = backend, device, seed
        self.generator = torch.Generator().manual_seed(seed)
        self.torch_device = torch.device(device.torch_device or "cpu")

    def select(self, spec: LayerSpec, layout: str | None = None) -> Selection:
        """Select the backend under test, by name, for the phases it claims."""
        caps, named = discover().backend(self.backend).capabilities, self.backend
        for service in caps.phases & {"store", "merge"}:
            named = f"{service}={self.backend}"
        if spec.cached and named == self.backend:
            served = served_phases(caps, spec, self.device)
            if len(served) == 1:  # the other phase is somebody else's
                named = f"{served[0]}={self.backend}"
        selection = select(
            spec, self.device, backend=named, settings=replace(current(), layout=layout)
        )
        ran = {name for _, name in selection.decision.chosen}
        assert self.backend in ran, f"{self.backend} was named, {ran} was chosen"
        return selection

    def group(self, spec: LayerSpec, layout: str | None = None) -> LayerGroup:
        """Return a fresh group: nothing is left of another case."""
        return LayerGroup(self.select(spec, layout))

    def judge(
        self,
        spec: LayerSpec,
        batch: Batch,
        found: tuple[Tensor, Tensor | None],
        expected: tuple[Tensor, Tensor],
        label: str = "",
        offset: float = 0.0,
    ) -> None:
        """Assert that an output and an LSE, where there is one, are within the spec's tolerance.

        `offset`: what all logits lie near.
        """
        limit = tolerance_of(spec, offset)
        error = output_error(found[0], expected[0])
        assert error <= limit.output, (
            f"{label}{self.backend} is off by {error:.3g} (allowed {limit.output:g}): "
            f"{worst_row(batch, found[0], expected[0], limit.output)}; for {spec}, "
            f"(query, length) {list(zip(batch.query_lens, batch.lens, strict=True))}"
        )
        if found[1] is not None:
            error = lse_error(found[1], expected[1])
            assert error <= limit.lse, (
                f"{label}{self.backend}: LSE is off by {error:.3g} (allowed {limit.lse:g}): "
                f"{worst_lse(batch, found[1], expected[1])}; for {spec}"
            )

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return fresh normal numbers on the device."""
        return torch.randn(*shape, generator=self.generator).to(dtype).to(self.torch_device)

    def integers(self, low: int, high: int, count: int) -> list[int]:
        """Return `count` random integers from `low` up to, not including, `high`."""
        return torch.randint(low, high, (count,), generator=self.generator).tolist()

    def block_table(self, lens: Sequence[int], block: int) -> tuple[Tensor, int]:
        """Random blocks; entries past a length point at block 0, which is all NaN."""
        needed = [-(-n // block) for n in lens]
        num_blocks = sum(needed) + 3
        order = (torch.randperm(num_blocks - 1, generator=self.generator) + 1).tolist()
        table = torch.zeros(len(lens), max([*needed, 1]) + 1, dtype=torch.int32)
        for row, count in enumerate(needed):
            table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        return table.to(self.torch_device), num_blocks


def lens_of(lengths: Lengths) -> tuple[list[int], list[int]]:
    """Return the queries' and the sequences' lengths."""
    return [q for q, _ in lengths], [n for _, n in lengths]


def new_rows(lengths: Lengths) -> Tensor:
    """Return where a step's new tokens are among all tokens of its sequences, int64."""
    rows, start = [], 0
    for query, length in lengths:
        # A padding row (one query token, length 0) has no token at all: any will do.
        rows += [max(at, 0) for at in range(start + length - query, start + length)]
        start += length
    return torch.tensor(rows, dtype=torch.int64)


def paged_batch(lengths: Lengths, table: Tensor, block: int, mask: StepMask | None = None) -> Batch:
    """Like `Batch.from_lens`, with slot -1 for padding rows (one query token, length 0)."""
    queries, lens = lens_of(lengths)
    real = [n if n or q != 1 else 1 for q, n in lengths]
    batch = Batch.from_lens(queries, real, table, block)
    assert batch.slot_mapping is not None
    slots = batch.slot_mapping.clone()
    for start, (query, length) in zip(batch.starts, lengths, strict=False):
        if query == 1 and length == 0:
            slots[start] = -1
    return Batch(batch.starts, lens, table, slots, mask=mask)


def poison(cache: KVCache) -> None:
    """Fill a cache with NaN and Inf (int8: with its largest values)."""
    for stored in (cache.key, cache.value):
        if stored.dtype == torch.int8:
            stored.fill_(127)
        elif stored.dtype.itemsize == 1:  # 0x7F is NaN in both OCP formats, 0x80 in FNUZ
            fnuz = stored.dtype == torch.float8_e4m3fnuz
            stored.view(torch.uint8).fill_(0x80 if fnuz else 0x7F)
        else:
            stored.fill_(torch.nan)
            stored[:, ::2] = torch.inf


def copied(cache: KVCache) -> KVCache:
    """Return what a cache holds, in memory of its own."""
    key = cache.key.clone()
    value = key[..., : cache.value.shape[3]] if cache.value_in_key else cache.value.clone()
    return KVCache(key, value)


def put(cache: KVCache, key: Tensor, value: Tensor, slots: Tensor, scales: Sequence[Scale]) -> None:
    """Write rows to their slots; -1 skips. The kit's own store, which no backend's has a part in."""
    kept = slots >= 0
    at = slots[kept] // cache.block_size, slots[kept] % cache.block_size
    pairs = [(cache.key, key, scales[0])]
    if not cache.value_in_key:
        pairs.append((cache.value, value, scales[1]))
    for stored, new, scale in pairs:
        rows = quantize(new[kept], stored.dtype, scale)
        if stored.dtype.itemsize == 1:
            stored.view(torch.uint8)[at] = rows.view(torch.uint8)
        else:
            stored[at] = rows


_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as integers: a NaN equals itself."""
    return tensor.contiguous().view(_SAME_SIZE[tensor.dtype.itemsize])


def unchanged(what: str, now: Tensor | None, before: Tensor | None) -> None:
    """Assert that an input was left alone."""
    if now is not None and before is not None:
        assert torch.equal(bits(now), bits(before)), f"{what} was written to; it is an input"


def spoil(tensor: Tensor, how: str) -> Tensor:
    """Return other contents for a tensor of this shape: other numbers, NaN, or infinities."""
    if how == "nan":
        return torch.full_like(tensor, torch.nan)
    if how == "inf":
        found = torch.full_like(tensor, torch.inf)
        found[..., ::2] = -torch.inf
        return found
    return torch.full_like(tensor, 3.0) - tensor
