"""How long does a step take on each backend? One layer's candidates over one cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from polyattn.checking.compare import output_error
from polyattn.checking.tolerance import tolerance_of
from polyattn.device import Device
from polyattn.errors import PolyattnError, describe
from polyattn.families.attention import reference
from polyattn.families.attention.layer import Attention
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES, KVCache, raw
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.step.batch import Batch
from polyattn.selection.selection import Selection
from polyattn.spec.kinds import ITEM_BYTES
from polyattn.spec.layer import LayerSpec
from polyattn.tools.tune.clock import Clock
from polyattn.tools.tune.shapes import Size, StepSample

POOL_BYTES = {"cpu": 32 << 20, "gpu": 4 << 30}
"""Keys and values that steps are drawn from: more than the chip's own caches hold."""
MOST_KEYS = 1 << 20
PAIRS = {"cpu": 4_000_000, "gpu": 2_000_000_000}
"""Query-key pairs of the largest prefill, over all heads: a CPU's tens of ms, a GPU's few."""
LONGEST = 131_072


def pool_bytes(device: Device) -> int:
    """Return how large each layer's cache may be, so that a dozen of them leave half the memory."""
    if not device.is_accelerator:
        return POOL_BYTES["cpu"]
    name = str(device.torch_device)
    if not name.startswith("cuda"):  # torch has no common question for the others' memory
        return POOL_BYTES["gpu"] // 8
    return min(POOL_BYTES["gpu"], torch.cuda.get_device_properties(name).total_memory // 32)


def size_for(spec: LayerSpec, device: Device, pool: int) -> Size:
    """Return how large a layer's steps may get on a device, its cache of `pool` bytes."""
    token = spec.num_kv_heads * (spec.head_size + spec.v_head_size) * ITEM_BYTES[spec.stored_dtype]
    keys = min(MOST_KEYS, int(pool // token))
    pairs = PAIRS["gpu" if device.is_accelerator else "cpu"] // spec.num_heads
    return Size(keys, pairs, min(LONGEST, keys))


@dataclass(frozen=True)
class Inputs:
    """A step: its batch, its queries, its tokens' keys and values, and where the output goes."""

    batch: Batch
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor


class Measured:
    """The candidates of one layer on one device, each loaded, all over one cache of random numbers."""

    def __init__(
        self, selection: Selection, clock: Clock, size: Size, leave_out: Collection[str] = ()
    ):
        self.selection, self.spec, self.clock = selection, selection.spec, clock
        self.layers: dict[str, Attention] = {}
        self.cannot: dict[str, str] = {}
        for name in attending(selection):
            if name in leave_out:
                continue
            try:
                group = LayerGroup(selection.alone(name))
                self.layers[name] = Attention(group, checks=False)
            except PolyattnError as error:
                self.cannot[name] = str(error)
        device = clock.device
        form = selection.cache_format
        assert form is not None
        self.size = form.block_size
        # Each row may leave its last block nearly empty.
        self.cache = KVCache.allocate(form, size.keys // self.size + 2 * size.rows, device)
        _fill(self.cache)
        self._device, self._dtype = device, STORAGE_DTYPES[self.spec.dtype]
        self._checked: set[tuple[str, str]] = set()

    def times(
        self, sample: StepSample, names: Collection[str], one_call: bool = True
    ) -> Iterator[tuple[str, float | str]]:
        """Yield each backend's microseconds for a step, or why it has none.

        `one_call`: a backend that would take the step in several calls has none.
        """
        inputs = self.inputs(sample)
        for name in names:
            try:
                plan = self.layers[name].plan(inputs.batch.copy())
                if {call.name for call in plan.calls} != {name}:
                    yield name, "can't run this kind of step alone"
                elif one_call and len(plan.calls) > 1:
                    yield name, "takes this kind of step in several calls"
                else:
                    taken = self.us(self.layers[name], inputs)
                    self._check(name, sample.kind, inputs)
                    yield name, taken
            except torch.OutOfMemoryError:
                yield name, "out of memory"
            except Exception as error:  # whatever a vendor's library raises is a reason
                yield name, describe(error)

    def inputs(self, sample: StepSample) -> Inputs:
        """Return a step's batch, random queries, what the cache holds of its tokens, and room."""
        batch, spec = self._batch(sample), self.spec
        query = torch.randn(
            batch.num_tokens, spec.num_heads, spec.head_size, device=self._device
        ).to(self._dtype)
        slots = batch.tail_slots(self.size)
        at = slots // self.size, slots % self.size
        key, value = (
            raw(stored)[at].view(stored.dtype).to(self._dtype)
            for stored in (self.cache.key, self.cache.value)
        )
        out = query.new_empty(batch.num_tokens, spec.num_heads, spec.v_head_size)
        return Inputs(batch, query, key, value, out)

    def us(self, layer: Attention, inputs: Inputs) -> float:
        """Return a layer's microseconds for a step.

        The new tokens are given, as engines give them, and stored already: storing costs the same
        whoever attends.
        """
        plan, cache = layer.plan(inputs.batch.copy()), self.cache
        query, key, value, out = inputs.query, inputs.key, inputs.value, inputs.out
        return self.clock.us(lambda: layer(query, key, value, cache, plan, out=out))

    def _check(self, name: str, kind: str, inputs: Inputs) -> None:
        """Compare one token of the first step of each kind with the float64 reference."""
        if (name, kind) in self._checked:
            return
        self._checked.add((name, kind))
        batch, params = inputs.batch, self.layers[name].params
        index = batch.lens.index(min(batch.lens))
        keys, values = reference.read_cache(self.spec, self.cache, batch, index, params)
        row = slice(batch.starts[index + 1] - 1, batch.starts[index + 1])
        expected, _ = reference.attend(self.spec, inputs.query[row], keys, values, params)
        error = output_error(inputs.out[row], expected)
        if not error <= tolerance_of(self.spec).output:
            raise PolyattnError(f"its result is wrong: relative error {error:.2g}")

    def _batch(self, sample: StepSample) -> Batch:
        """Return the step with every row's blocks somewhere in the cache, in no order."""
        needed = -(-np.asarray(sample.lens) // self.size)
        ends = needed.cumsum()
        order = torch.randperm(self.cache.num_blocks, device=self._device)
        at = torch.from_numpy((ends - needed)[:, None] + np.arange(needed.max()))
        table = order[at.clamp_(max=int(ends[-1]) - 1).to(self._device)].to(torch.int32)
        starts = [0, *np.cumsum(sample.queries).tolist()]
        return Batch(starts, list(sample.lens), table)


def attending(selection: Selection) -> list[str]:
    """Return all that may attend for a layer over the selected cache, the best first."""
    candidates = dict(selection.candidates)
    infos = [*candidates.get("decode", ()), *candidates.get("prefill", ())]
    return list(dict.fromkeys(info.name for info in infos))


def _fill(cache: KVCache) -> None:
    """Fill with numbers that the dtype holds, a piece of them again and again."""
    for stored in (cache.key, cache.value):
        piece = stored[: max(1, (32 << 20) // stored[0].numel())]
        noise = torch.randn(piece.shape, device=stored.device)
        noise = (noise * 32 if stored.dtype == torch.int8 else noise).to(stored.dtype)
        for start in range(0, stored.shape[0], len(noise)):
            part = stored[start : start + len(noise)]
            part.copy_(noise[: len(part)])
