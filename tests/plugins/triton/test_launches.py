"""Launches without a device: what is passed once a variant is known, and what makes another one."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from polyattn_triton.launch import in_units


class FakeVariant:
    """A compiled variant that writes down its launches, by either way."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launched: list[tuple[object, ...]] = []
        self.told: list[tuple[object, ...]] = []

    def run(self, *args: object) -> None:
        self.launched.append(args)

    def __getitem__(self, grid: object) -> object:
        return lambda *args: self.told.append(args)


class FakeKernel:
    """A kernel that writes down what it was compiled for; all its variants are one."""

    def __init__(self) -> None:
        self.variant = FakeVariant()
        self.compiled: list[tuple[object, ...]] = []

    def __getitem__(self, grid: object) -> object:
        return lambda *args, **options: (self.compiled.append(args), self.variant)[1]


def test_a_site_asks_the_compiler_once_an_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches pass addresses once a variant is known; another alignment is another variant."""
    import torch
    from polyattn_triton import launch
    from triton import knobs

    monkeypatch.setattr(launch, "KNOWN", True)
    active = SimpleNamespace(get_current_stream=lambda index: f"stream of {index}")
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "_current_device", lambda: None)
    kernel = FakeKernel()
    compiled, variant = kernel.compiled, kernel.variant
    start, tensor = launch.Launcher(kernel), torch.zeros(32)
    for given in (tensor, tensor, tensor[1:], tensor[4:]):
        start((1, 2, 3), (given,), (0.5,), (16,), (7,), (True,), {"num_warps": 4})
    assert [a[0].data_ptr() % 16 for a in compiled] == [0, 4]  # type: ignore[attr-defined]
    before = (1, 2, 3, "stream of None", "function", "metadata", None, None, None)
    assert variant.launched == [
        (*before, t.data_ptr(), 0.5, 16, 7, True) for t in (tensor, tensor[4:])
    ]
    start((1, 1, 1), (tensor.double(),), (0.5,), (16,), (7,), (True,), {"num_warps": 4})
    assert len(compiled) == 3 and not variant.told
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    start((1, 2, 3), (tensor,), (0.5,), (16,), (7,), (True,), {"num_warps": 4})
    assert variant.told == [(tensor.data_ptr(), 0.5, 16, 7, True)]  # a profiler hears of it
    assert len(variant.launched) == 2


def test_kept_tensors_come_after_the_others_and_count_for_alignment() -> None:
    import torch
    from polyattn_triton.launch import Kept, Site

    kernel = FakeKernel()
    compiled = kernel.compiled
    site, tensor = Site(kernel, (16,), (True,), {}), torch.zeros(32)
    aligned, shifted = Kept((tensor, tensor[8:])), Kept((tensor, tensor[1:]))
    for kept in (aligned, shifted):
        site((1, 1, 1), (tensor[4:],), (0.5,), (7,), kept)
    pointers = [[t.data_ptr() for t in args[:3]] for args in compiled]  # type: ignore[attr-defined]
    assert pointers == [[tensor[4:].data_ptr(), *kept.pointers] for kept in (aligned, shifted)]
    assert compiled[0][3:] == (0.5, 16, 7, True)
    assert len(site.variants) == 2


def test_a_launch_is_on_its_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is current: models lie over several GPUs (`device_map="auto"`)."""
    from contextlib import contextmanager

    import torch
    from polyattn_triton import launch

    current, used = [0], []

    @contextmanager
    def device(which: torch.device | int) -> Iterator[None]:
        before = current[0]
        current[0] = which if isinstance(which, int) else which.index
        yield
        current[0] = before

    class Kernel(FakeKernel):
        def __getitem__(self, grid: object) -> object:
            used.append(current[0])
            return super().__getitem__(grid)

    class There(SimpleNamespace):
        """A tensor of GPU 1."""

        device, data_ptr = torch.device("cuda", 1), staticmethod(lambda: 16)

    monkeypatch.setattr(launch, "KNOWN", True)
    streams = SimpleNamespace(get_current_stream=lambda index: (index, current[0]))
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=streams))
    monkeypatch.setattr(launch, "_current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    kernel = Kernel()
    site = launch.Site(kernel, (), (), {})
    for _ in range(2):
        site((1, 1, 1), (There(),), (), ())  # type: ignore[arg-type]
    assert used == [1] and [args[3] for args in kernel.variant.launched] == [(1, 1)]
    assert current == [0]


def test_strides_are_in_units_of_what_divides_them() -> None:
    def unit(*strides: int) -> int:
        counts, unit = in_units(strides)
        assert tuple(unit * count for count in counts) == strides
        return unit

    assert unit(4096, 128, 16384, 1024, 0) == 1  # multiples of 16 already
    assert unit(480, 120, 1920, 120) == 8
    assert unit(36, 12) == 4 and unit(7, 21) == 1
    assert unit(0, 0) == 1
    assert unit(120, 120 << 25) == 1  # a unit's number would be of 32 bits, and overflow
