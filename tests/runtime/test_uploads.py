"""Do eager plans' numbers reach an accelerator together, and as they were put, however late it copies?"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from late_device import LateDevice
from polyattn import Batch, LayerGroup, LayerSpec
from polyattn.errors import BatchError
from polyattn.runtime.step import uploads
from polyattn.runtime.step.uploads import PLACES, SHEETS, Pool, Upload, new_upload, outgoing

LATER = torch.device("meta")  # which stands for an accelerator


class Late(LateDevice, Pool):
    """Memory on the CPU, into which what was sent is copied when the test says so, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        LateDevice.__init__(self)
        Pool.__init__(self, 0, 0)
        self.device, self.uploads = torch.device("cpu"), list[Upload]()
        self.current = True
        copy, device = torch.Tensor.copy_, self

        def late(goal: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
            assert non_blocking
            device.do(lambda: copy(goal, source))

        monkeypatch.setattr(torch.Tensor, "copy_", late)
        monkeypatch.setattr(uploads, "new_upload", self.new)

    def new(self, device: torch.device, size: int) -> Upload:
        assert device == LATER and size <= PLACES
        self.uploads.append(self.take())
        return self.uploads[-1]

    def is_current(self) -> bool:
        return self.current

    def _event(self) -> Any:
        event = self.event()
        event.record(None)
        return event


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Late:
    return Late(monkeypatch)


@pytest.fixture
def planning(device: Late) -> Iterator[Late]:
    """Within a plan, which sends at its end."""
    outgoing.plans += 1
    yield device
    outgoing.plans -= 1
    outgoing.send()


def batch_of(lens: list[int]) -> Batch:
    return Batch(list(range(len(lens) + 1)), lens, device=LATER)


@pytest.mark.parametrize("first", ["query_start_loc", "seq_lens", "upload", "later", "lengths_at"])
@pytest.mark.parametrize("rows", [0, 1, 5, 7])
def test_lengths_go_to_an_accelerator_in_one_copy(first: str, rows: int, planning: Late) -> None:
    """Both start at addresses of 16 bytes, for which kernels are compiled."""
    lens = list(range(9, 9 + rows))
    batch, place = batch_of(lens), None
    if first in ("upload", "later"):  # a plan's numbers go with them
        numbers = np.array([3, 1, 4], np.int32)
        if first == "upload":
            work = batch.upload(numbers)
        else:
            place = batch.later(numbers)
            assert not planning.queue  # yet
            work = place.tensor
        assert planning.queued == 1
        planning.run()
        assert work.tolist() == [3, 1, 4] and work.data_ptr() % 16 == 0
        assert place is None or place.address == work.data_ptr()
    elif first == "lengths_at":
        addresses = batch.lengths_at()
        assert not planning.queue
        tensors = batch.query_start_loc, batch.seq_lens
        assert all(a == t.data_ptr() for a, t in zip(addresses, tensors, strict=True) if len(t))
    else:
        getattr(batch, first)
    tensors = batch.query_start_loc, batch.seq_lens
    planning.run()
    assert [t.tolist() for t in tensors] == [batch.starts, lens] and planning.queued == 1
    assert all(t.dtype == torch.int32 and t.data_ptr() % 16 == 0 for t in tensors)
    alone = batch.upload(np.array([7], np.int32))
    planning.run()
    assert alone.tolist() == [7] and len(planning.uploads) == planning.queued == 2


def test_lengths_that_the_device_has_are_not_copied_again(planning: Late) -> None:
    own = torch.tensor([4, 5], dtype=torch.int32)
    batch = Batch([0, 1, 2], own)
    batch.device = LATER
    starts, lens = batch.lengths_at()
    assert lens == own.data_ptr() == batch.seq_lens.data_ptr()
    assert starts == batch.query_start_loc.data_ptr()
    batch.later(np.array([1], np.int32))
    planning.run()
    assert batch.query_start_loc.tolist() == [0, 1, 2] and batch.lengths_at() == (starts, lens)


def test_plans_in_a_row_each_read_their_own_numbers(device: Late) -> None:
    """While the device is steps behind, and whether plans live on or not."""
    seen, living = [], []

    def looks(tensors: tuple[torch.Tensor, ...]) -> None:
        seen.append([t.tolist() for t in tensors])

    for step in range(5 * SHEETS):
        outgoing.plans += 1
        batch = batch_of([step + 1, step + 2])
        place = batch.later(np.array([step], np.int32))
        outgoing.plans -= 1
        outgoing.send()
        if step % 3 == 0:
            living.append((step, batch, place))
        tensors = batch.seq_lens, place.tensor
        device.do(partial(looks, tensors))
        if step == 2 * SHEETS:
            device.run(3 * SHEETS)
    device.run()
    assert seen == [[[step + 1, step + 2], [step]] for step in range(5 * SHEETS)]
    for step, batch, place in living:
        assert batch.seq_lens.tolist() == [step + 1, step + 2] and place.tensor.tolist() == [step]


def sheet_of(upload: Upload) -> int:
    """The address of the page-locked memory of an upload that isn't sent."""
    assert upload._sheet is not None
    return upload._sheet.tensor.data_ptr()


def test_a_sheet_serves_again_behind_its_copy_alone(device: Late) -> None:
    """Not while a copy may read it, and not where that was queued on another stream."""
    sheets = []
    for step in range(2 * SHEETS):
        upload = device.take()
        sheets.append(sheet_of(upload))
        device.current = step != 3
        upload.send()
    assert len(set(sheets)) == 2 * SHEETS
    device.run()
    again = [sheet_of(device.take()) for _ in range(SHEETS + 1)]
    assert set(sheets[:3]) < set(again) and sheets[3] not in again


def test_parts_of_a_step_and_other_batches_send_with_it(device: Late) -> None:
    outgoing.plans += 1
    batch = Batch([0, 1, 2, 7], [9, 8, 7], device=LATER)
    first, second = batch.part(slice(0, 2)), batch.part(slice(2, 3))
    other = batch_of([5])  # as of the pages that a plan chooses
    parts = (first, second, other)
    places = [part.later(np.array([n], np.int32)) for n, part in enumerate(parts)]
    assert all(len(part.lengths_at()) == 2 for part in parts) and not device.queue
    outgoing.plans -= 1
    outgoing.send()
    assert device.queued == 1
    device.run()
    assert [p.tensor.tolist() for p in places] == [[0], [1], [2]]
    assert first.seq_lens.tolist() == [9, 8] and second.query_start_loc.tolist() == [0, 5]
    assert other.seq_lens.tolist() == [5] and device.queued == 1


def test_numbers_outside_a_plan_are_sent_at_once(device: Late) -> None:
    place = batch_of([3, 4]).later(np.array([1], np.int32))
    assert device.queued == 1
    device.run()
    assert place.tensor.tolist() == [1]


def test_what_has_no_room_goes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    taken = []

    def new(_: torch.device, size: int) -> Upload:
        taken.append(size)
        return own(device, size)

    own = uploads.new_upload
    monkeypatch.setattr(uploads, "new_upload", new)
    rows = 700
    batch = batch_of([2] * rows)
    work = batch.upload(np.arange(4 * PLACES, dtype=np.int32))
    assert batch.seq_lens.tolist() == [2] * rows and batch.query_start_loc.tolist() == batch.starts
    assert work.tolist() == list(range(4 * PLACES)) and len(taken) == 2


@pytest.mark.parametrize("size", [3, PLACES + 1])
def test_memory_of_inference_mode_serves_outside_of_it(size: int, device: Late) -> None:
    """Torch refuses writes, outside of that mode, to what was allocated in it."""
    make, where = (device.new, LATER) if size <= PLACES else (new_upload, torch.device("cpu"))
    with torch.inference_mode():
        made = [make(where, size) for _ in range(2)]
    made.append(make(where, size))
    for upload in made:
        place = upload.put(np.arange(size, dtype=np.int32))
        upload.send()
        device.run()
        assert place is not None and place.tensor[2] == 2


def test_a_pickled_batch_has_no_memory_on_its_way(device: Late) -> None:
    batch = batch_of([3, 4])
    batch.later(np.array([1], np.int32))
    other = pickle.loads(pickle.dumps(batch))
    assert batch._places is not None and other._places is None


def test_a_plan_sends_what_it_put(device: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is refused: its batch's next plan knows where the lengths are."""
    group = LayerGroup(LayerSpec(num_heads=4, head_size=32, dtype="float32", block_size=16))
    monkeypatch.setattr(LayerGroup, "check", lambda *_: None)
    batch = batch_of([3, 4])

    class Planner:
        refuses = True

        def plan(self, batch: Batch) -> Any:
            self.place = batch.later(np.array([7], np.int32))
            assert device.queued == (not self.refuses)
            if self.refuses:
                raise BatchError("no")
            return None

    group.planner = planner = Planner()  # type: ignore[assignment]
    with pytest.raises(BatchError):
        group.plan(batch)
    assert device.queued == 1 and not outgoing.plans
    planner.refuses = False
    group.plan(batch)
    assert device.queued == 2 and not outgoing.plans and not outgoing.uploads
    device.run()
    assert planner.place.tensor.tolist() == [7] and batch.seq_lens.tolist() == [3, 4]
