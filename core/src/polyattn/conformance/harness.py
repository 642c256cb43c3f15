"""Runs one case: fresh random inputs, poisoned outputs and unused cache, the float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyattn.api import Selection, select
from polyattn.checking.compare import lse_error, output_error
from polyattn.checking.tolerance import tolerance_of
from polyattn.conformance.cases import batches, served_phases
from polyattn.device import Device
from polyattn.families.attention import reference
from polyattn.families.attention.layer import Attention
from polyattn.registry.discovery import discover
from polyattn.runtime.batch import Batch
from polyattn.runtime.kv_cache import STORAGE_DTYPES, KVCache
from polyattn.settings import current
from polyattn.spec.kinds import Role
from polyattn.spec.layer import LayerSpec


@dataclass
class Inputs:
    """All that one step of one layer takes."""

    batch: Batch
    query: Tensor
    key: Tensor | None
    value: Tensor | None
    cache: KVCache | None


class Harness:
    """Builds and runs layers of one backend on one device."""

    def __init__(self, backend: str, device: Device, seed: int):
        self.backend, self.device = backend, device
        self.generator = torch.Generator().manual_seed(seed)
        self.torch_device = torch.device(device.torch_device or "cpu")

    def select(self, spec: LayerSpec, layout: str | None = None) -> Selection:
        """Select the backend under test, by name, for the phases it claims."""
        named = self.backend
        if spec.cached:
            served = served_phases(discover().backend(self.backend).capabilities, spec, self.device)
            if len(served) == 1:  # the other phase is somebody else's
                named = f"{served[0]}={self.backend}"
        selection = select(
            spec, self.device, backend=named, settings=replace(current(), layout=layout)
        )
        ran = {selection.decision.prefill, selection.decision.decode}
        assert self.backend in ran, f"{self.backend} was named, {ran} was chosen"
        return selection

    def layer(self, spec: LayerSpec, layout: str | None = None) -> Attention:
        """Return a layer with random sinks and slopes where the spec has them."""
        selection = self.select(spec, layout)
        quantized = spec.kv_cache_dtype != "auto"
        scale = 0.04 if spec.kv_cache_dtype == "int8" else 0.5
        return Attention(
            selection,
            sinks=self.random(spec.num_heads).float() if spec.learned_sinks else None,
            alibi_slopes=self.random(spec.num_heads).abs().float() * 0.1 if spec.alibi else None,
            k_scale=scale if quantized else 1.0,
            v_scale=scale * 1.5 if quantized else 1.0,
            checks=True,
        )

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return fresh normal numbers on the device."""
        return torch.randn(*shape, generator=self.generator).to(dtype).to(self.torch_device)

    def inputs(
        self,
        layer: Attention,
        lengths: Sequence[tuple[int, int]] | str,
        packed: bool = False,
    ) -> Inputs:
        """Return a step whose context is in the cache and whose unused cache is NaN."""
        spec = layer.selection.spec
        block = layer.selection.decision.block_size
        if isinstance(lengths, str):
            lengths = batches(lengths, block or 16)
        queries, lens = [q for q, _ in lengths], [n for _, n in lengths]
        dtype = STORAGE_DTYPES[spec.dtype]
        tokens = sum(queries)
        query = self.random(tokens, spec.num_heads, spec.head_size, dtype=dtype)
        key = self.random(tokens, spec.num_kv_heads, spec.head_size, dtype=dtype)
        value = self.random(tokens, spec.num_kv_heads, spec.v_head_size, dtype=dtype)
        if block is None:
            batch = Batch.from_lens(queries, lens, device=self.torch_device)
            return Inputs(batch, query, key, value, None)
        table, num_blocks = self.block_table(lens, block)
        cache = self._cache(layer, num_blocks, packed)
        whole = Batch.from_lens(lens, lens, table, block)
        count = sum(lens)
        keys = self.random(count, spec.num_kv_heads, spec.head_size, dtype=dtype)
        values = self.random(count, spec.num_kv_heads, spec.v_head_size, dtype=dtype)
        slots = without_new(whole, queries, cross=spec.role is Role.CROSS)
        cache.write(keys, values, slots, layer.params.k_scale, layer.params.v_scale)
        if spec.role is Role.CROSS:
            batch = Batch([0, *_cumulative(queries)], lens, table)
            return Inputs(batch, query, None, None, cache)
        batch = batch_with_padding(queries, lens, table, block)
        return Inputs(batch, query, key, value, cache)

    def block_table(self, lens: Sequence[int], block: int) -> tuple[Tensor, int]:
        """Random blocks; entries past a length point at block 0, which is all NaN."""
        needed = [-(-n // block) for n in lens]
        num_blocks = sum(needed) + 3
        order = (torch.randperm(num_blocks - 1, generator=self.generator) + 1).tolist()
        table = torch.zeros(len(lens), max([*needed, 1]) + 1, dtype=torch.int32)
        for row, count in enumerate(needed):
            table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        return table.to(self.torch_device), num_blocks

    def _cache(self, layer: Attention, num_blocks: int, packed: bool) -> KVCache:
        cache_spec = layer.selection.cache_spec(num_blocks)
        cache = cache_spec.allocate(self.torch_device)
        if packed:
            n, b, h, d = cache.key.shape
            shape = (n, 2, b, h, d) if cache_spec.layout == "NHD" else (n, 2, h, b, d)
            storage = torch.empty(shape, dtype=cache.key.dtype, device=self.torch_device)
            cache = KVCache.packed(storage, cache_spec.layout)
        poison(cache)
        return cache

    def run(self, layer: Attention, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Run the layer into a poisoned output."""
        spec = layer.selection.spec
        shape = (inputs.batch.num_tokens, spec.num_heads, spec.v_head_size)
        out = torch.full(shape, torch.nan, dtype=inputs.query.dtype, device=self.torch_device)
        got = layer(inputs.query, inputs.key, inputs.value, inputs.cache, inputs.batch, out=out)
        result, lse = got if isinstance(got, tuple) else (got, None)
        assert result.data_ptr() == out.data_ptr(), "out= was given, and another tensor came back"
        return out, lse

    def check(self, layer: Attention, inputs: Inputs, label: str = "") -> Tensor:
        """Run, compare with the reference, and return the output."""
        spec = layer.selection.spec
        out, lse = self.run(layer, inputs)
        expected, expected_lse = reference.forward(
            spec, inputs.query, inputs.key, inputs.value, inputs.cache, inputs.batch, layer.params
        )
        limit = tolerance_of(spec)
        error = output_error(out, expected)
        assert error <= limit.output, (
            f"{label}{self.backend} is off by {error:.3g} (allowed {limit.output:g}) for {spec}, "
            f"(query, length) {list(zip(inputs.batch.query_lens, inputs.batch.lens, strict=True))}"
        )
        if spec.needs_lse:
            assert lse is not None
            error = lse_error(lse, expected_lse)
            assert error <= limit.lse, (
                f"{label}{self.backend}: LSE is off by {error:.3g} (allowed {limit.lse:g}) for {spec}"
            )
        return out


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


def _cumulative(lens: Sequence[int]) -> list[int]:
    total, found = 0, []
    for length in lens:
        total += length
        found.append(total)
    return found


def without_new(whole: Batch, queries: Sequence[int], cross: bool) -> Tensor:
    """Return every token's slot, -1 for those that the step itself will store."""
    assert whole.slot_mapping is not None
    slots = whole.slot_mapping.clone()
    if not cross:
        for end, count in zip(whole.starts[1:], queries, strict=True):
            slots[max(end - count, 0) : end] = -1
    return slots


def batch_with_padding(
    queries: Sequence[int], lens: Sequence[int], table: Tensor, block: int
) -> Batch:
    """Like `Batch.from_lens`, with slot -1 for padding rows (one query token, length 0)."""
    real = [n if n or q != 1 else 1 for q, n in zip(queries, lens, strict=True)]
    batch = Batch.from_lens(queries, real, table, block)
    assert batch.slot_mapping is not None
    slots = batch.slot_mapping.clone()
    for start, count, length in zip(batch.starts, queries, lens, strict=False):
        if count == 1 and length == 0:
            slots[start] = -1
    return Batch(batch.starts, lens, table, slots)
