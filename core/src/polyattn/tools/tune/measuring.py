"""How long does a step take on each backend? One layer's candidates over one cache."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch

from polyattn.device import Device
from polyattn.errors import PolyattnError, describe
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.group import LayerGroup
from polyattn.selection.selection import Selection
from polyattn.spec.layer import LayerSpec
from polyattn.spec.timing import units
from polyattn.tools.tune.shapes import Size, StepSample
from polyattn.workload.base import family_of, workload
from polyattn.workload.clock import Clock
from polyattn.workload.dice import Dice
from polyattn.workload.pages import fill
from polyattn.workload.tolerance import tolerance_of

POOL_BYTES = {"cpu": 32 << 20, "gpu": 4 << 30}
"""Keys and values that steps are drawn from: more than the chip's own caches hold."""
MOST_KEYS = 1 << 20
PAIRS = {"cpu": 4_000_000, "gpu": 2_000_000_000}
"""Query-key pairs of the largest prefill, over all heads: a CPU's tens of ms, a GPU's few."""
LONGEST = 131_072


class Times(NamedTuple):
    """Microseconds of a layer's call: the device's, and the host's until it can queue another one.

    The host's are 0 where no device works meanwhile.
    """

    us: float
    host: float


def pool_bytes(device: Device) -> int:
    """Return how large each layer's cache may be, so that a dozen of them leave half the memory."""
    if not device.is_accelerator:
        return POOL_BYTES["cpu"]
    name = str(device.torch_device)
    if not name.startswith("cuda"):  # torch has no common question for the others' memory
        return POOL_BYTES["gpu"] // 8
    return min(POOL_BYTES["gpu"], torch.cuda.get_device_properties(name).total_memory // 32)


def processors_of(device: Device) -> int:
    """Return a GPU's multiprocessors, over which kernels deal keys out; 0 of other devices."""
    name = str(device.torch_device)
    if not name.startswith("cuda"):
        return 0
    return int(torch.cuda.get_device_properties(name).multi_processor_count)


def size_for(spec: LayerSpec, device: Device, pool: int) -> Size:
    """Return how large a layer's steps may get on a device, its cache of `pool` bytes."""
    _, _, bytes_a_key, *_ = units(spec)
    keys = min(MOST_KEYS, int(pool // bytes_a_key))
    pairs = PAIRS["gpu" if device.is_accelerator else "cpu"] // spec.num_heads
    return Size(keys, pairs, min(LONGEST, keys))


class Measured:
    """The candidates of one layer on one device, each loaded, all over one cache of random numbers."""

    def __init__(
        self, selection: Selection, clock: Clock, size: Size, leave_out: Collection[str] = ()
    ):
        self.selection, self.spec, self.clock = selection, selection.spec, clock
        self.layers: dict[str, Any] = {}
        device = clock.device
        self._dice = Dice(random.SystemRandom().randrange(2**31), device, fast=True)
        # Absorbing latents takes equally long with each backend, because the caller does it.
        how = {} if self.spec.latent is None else {"weights": False}
        self.cannot: dict[str, str] = {}
        for name in attending(selection):
            if name in leave_out:
                continue
            try:
                group = LayerGroup(selection.alone(name))
                self.layers[name] = family_of(self.spec).layer_of(
                    group, self._dice, checks=False, **how
                )
            except PolyattnError as error:
                self.cannot[name] = str(error)
        form = selection.cache_format
        assert form is not None
        self.size = form.block_size
        # Each row may leave its last block nearly empty.
        self.cache = KVCache.allocate(form, size.keys // self.size + 2 * size.rows, device)
        fill(self.cache)
        self._checked: set[tuple[str, str]] = set()

    def times(
        self, sample: StepSample, names: Collection[str], one_call: bool = True
    ) -> Iterator[tuple[str, Times | str]]:
        """Yield each backend's times for a step, or why it has none.

        `one_call`: a backend that would take the step in several calls has none.
        """
        step = self.step(sample)
        for name in names:
            try:
                mine = step.but(layer=self.layers[name], batch=step.batch.copy())
                if {call.name for call in mine.plan.calls} != {name}:
                    yield name, "can't run this kind of step alone"
                elif one_call and len(mine.plan.calls) > 1:
                    yield name, "takes this kind of step in several calls"
                else:
                    times = self.step_times(mine)
                    self._check(name, sample.kind, mine)
                    yield name, times
            except torch.OutOfMemoryError:
                yield name, "out of memory"
            except Exception as error:  # any exception of a vendor's library is a reason
                yield name, describe(error)

    def step(self, sample: StepSample) -> Any:
        """Return a step that lies anywhere in the cache, of the first layer."""
        layer = next(iter(self.layers.values()))
        lengths = list(zip(sample.queries, sample.lens, strict=True))
        where = {"full": self.cache} | ({} if self.spec.latent is not None else {"spare": 0})
        return workload(layer, lengths, self._dice, step=where)

    def step_times(self, step: Any) -> Times:
        """Return a layer's times for a step.

        The new tokens are given, as engines give them: storing costs the same with every backend.
        """
        assert step.plan
        us = self.clock.us(step.call)
        cuda = self.clock.device.type == "cuda"
        return Times(us, self.clock.host_us(step.call, calls=4, rounds=3) if cuda else 0.0)

    def _check(self, name: str, kind: str, step: Any) -> None:
        """Compare one token of the first step of each kind with the float64 reference."""
        if (name, kind) in self._checked:
            return
        self._checked.add((name, kind))
        error = step.token_error(step.batch.lens.index(min(step.batch.lens)))
        if not error <= tolerance_of(self.spec).output:
            raise PolyattnError(f"its result is wrong: relative error {error:.2g}")


def attending(selection: Selection) -> list[str]:
    """Return all that may attend for a layer over the selected cache, the best first."""
    candidates = dict(selection.candidates)
    infos = [*candidates.get("decode", ())]
    if selection.spec.latent is None:  # of latents, prompts are attended to without the cache
        infos += candidates.get("prefill", ())
    return list(dict.fromkeys(info.name for info in infos))
