"""Rows of several tokens that stand for no sequence: who takes them, and who says that it doesn't."""

from __future__ import annotations

import pytest
import torch
from polyattn import Attention, Batch, LayerGroup, LayerSpec, Recurrent, StepSize, select
from polyattn.errors import BatchError
from polyattn.runtime.graphs.mixed_buffers import MixedBuffers
from polyattn.runtime.graphs.step_buffers import StepBuffers
from polyattn.spec.recurrent import RecurrentSpec

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", block_size=8)
TABLE = torch.arange(9, dtype=torch.int32).view(3, 3)


def step(
    backend: str, queries: list[int], lens: list[int], *, rotate: bool = False
) -> torch.Tensor:
    """Return the output of a step over a cache of random numbers."""
    from polyattn.spec.rope import RopeSpec

    dice = torch.Generator().manual_seed(3)
    spec = SPEC.replace(rope=RopeSpec(rotary_size=16)) if rotate else SPEC
    layer = Attention(
        LayerGroup(select(spec, "cpu", backend=backend)), checks=True, rotate=rotate or None
    )
    cache = layer.group.allocate_cache(9)
    cache.key.copy_(torch.randn(cache.key.shape, generator=dice))
    cache.value.copy_(torch.randn(cache.value.shape, generator=dice))
    tokens = sum(queries)
    drawn = [torch.randn(tokens, heads, 32, generator=dice) for heads in (4, 2, 2)]
    batch = Batch.from_lens(queries, lens, TABLE[: len(lens)], 8)
    out = torch.full((tokens, 4, 32), torch.nan)
    return layer(*drawn, cache, batch, out=out)  # type: ignore[return-value]


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("backend", ["TORCH_SDPA", "NATIVE_ATTN", "VANILLA"])
def test_padding_changes_nothing_beside_it(backend: str, rotate: bool) -> None:
    """The real rows' bits are those of the step without padding, whose output is 0."""
    found = step(backend, [4, 4, 4], [20, 7, 0], rotate=rotate)
    assert not found[8:].any()
    wide = step("VANILLA", [4, 4, 4], [20, 7, 4], rotate=rotate)  # the same draws
    torch.testing.assert_close(found[:8], wide[:8], atol=1e-4, rtol=1e-4)


def test_who_does_not_claim_it_is_named() -> None:
    with pytest.raises(
        BatchError, match=r"seq_lens\[1\]=0 .* 4 tokens, and FLEX_ATTENTION takes pad"
    ):
        step("FLEX_ATTENTION", [4, 4], [20, 0])


def test_a_padding_row_stores_nothing() -> None:
    group = LayerGroup(select(SPEC, "cpu", backend="TORCH_SDPA"))
    layer, cache = Attention(group, checks=True), group.allocate_cache(9)
    slots = torch.tensor([0, 1, 2, 3, 8, -1])
    batch = Batch([0, 4, 6], [4, 0], TABLE[:2], slots)
    new = [torch.zeros(6, heads, 32) for heads in (4, 2, 2)]
    with pytest.raises(BatchError, match=r"slots must be -1, not \[8, -1\]"):
        layer(*new, cache, batch)


@pytest.mark.parametrize(("takes", "length"), [(True, 0), (False, 3)])
def test_captured_steps_pad_with_what_their_backends_take(takes: bool, length: int) -> None:
    buffers = StepBuffers(4, 3, 64, 8, "cpu", padding_rows=takes)
    filled = buffers.fill(Batch.from_lens([3, 3], [9, 5], TABLE[:2], 8))
    assert filled.lens == [9, 5, length, length] == buffers.seq_lens.tolist()
    assert filled.slot_mapping is not None and (filled.slot_mapping[6:] == -1).all()


def test_prompts_beside_state_targets_are_no_size() -> None:
    with pytest.raises(BatchError, match="state_targets=True beside prompts=1"):
        StepSize(4, prompts=1, prompt_tokens=8, state_targets=True)


def test_a_size_has_rows_or_prompts() -> None:
    assert StepSize(0, prompts=1, prompt_tokens=8).rows == 0
    with pytest.raises(BatchError, match="rows=0: set rows or prompts"):
        StepSize(0)


def test_a_filled_step_is_read_from_the_host() -> None:
    """What a step brings on the device is copied; lengths that aren't there yet don't go there first."""
    buffers = StepBuffers(4, 3, 64, 8, "cpu", padding_rows=True)
    known = buffers.seq_lens.data_ptr(), buffers.state_slots.data_ptr()
    for queries, lens in (([3, 3, 3], [9, 5, 24]), ([3], [7])):
        batch = Batch.from_lens(
            queries, lens, TABLE[: len(lens)], 8, state_slots=torch.arange(len(lens))
        )
        filled = buffers.fill(batch)
        assert "seq_lens" not in batch.__dict__
        missing = 4 - len(lens)
        assert buffers.seq_lens.tolist() == lens + [0] * missing == filled.lens
        assert buffers.state_slots.tolist() == [*range(len(lens)), *[-1] * missing]
        assert filled.slot_mapping is not None and batch.slot_mapping is not None
        slots = batch.slot_mapping.tolist()
        assert filled.slot_mapping.tolist() == slots + [-1] * (3 * missing)
        assert filled.block_table is not None
        assert (
            filled.block_table[:, :3].tolist() == TABLE[: len(lens)].tolist() + [[0] * 3] * missing
        )
    assert known == (buffers.seq_lens.data_ptr(), buffers.state_slots.data_ptr())


def test_lengths_that_the_device_counts_are_copied_there() -> None:
    """A batch over buffers knows on the host the most that they may hold."""
    inner, outer = (StepBuffers(2, 1, 64, 8, "cpu") for _ in range(2))
    inner.fill(Batch.from_lens([1, 1], [9, 5], TABLE[:2], 8))
    bounds = inner.batch([64, 64])
    assert outer.fill(bounds).lens == [64, 64] and outer.seq_lens.tolist() == [9, 5]


@pytest.mark.parametrize("store", ["NATIVE_STORE", "TORCH_STORE"])
def test_any_negative_slot_of_a_token_skips(store: str) -> None:
    group = LayerGroup(select(SPEC, "cpu", backend=f"store={store}"))
    cache = group.allocate_cache(9)
    new = [torch.ones(3, heads, 32) for heads in (4, 2, 2)]
    batch = Batch([0, 3], [3], TABLE[:1], torch.tensor([0, -5, -1]))
    for part in (cache.key, cache.value):
        part.zero_()
    Attention(group, checks=False)(*new, cache, batch)
    assert cache.key.any(-1).any(-1).nonzero().tolist() == [[0, 0]]
    with pytest.raises(BatchError, match=r"slot_mapping\[1\]=-5 is out of range: .* and -1 skips"):
        Attention(group, checks=True)(*new, cache, batch)


@pytest.mark.parametrize("backend", ["NATIVE_SCAN", "TORCH_SCAN", "VANILLA_SCAN"])
def test_any_negative_slot_of_a_padding_row_has_no_state(backend: str) -> None:
    """A state is neither read nor written for it, whatever lies where the number would point."""
    spec = LayerSpec(
        kind="short_conv", num_heads=4, head_size=1, dtype="float32",
        recurrent=RecurrentSpec(conv_width=3),
    )  # fmt: skip
    group = LayerGroup(select(spec, "cpu", backend=backend))
    layer = Recurrent(group, checks=False, weight=torch.ones(4, 3))
    found = []
    for slot in (-1, -5):
        states = group.allocate_states(5)
        states.data.fill_(torch.nan)
        batch = Batch.from_lens([2, 2], [2, 0], state_slots=torch.tensor([3, slot]))
        out = layer(torch.arange(16.0).view(4, 4), states=states, plan=batch)
        assert states.data.isfinite().flatten(1).all(1).tolist() == [False] * 3 + [True, False]
        found.append((out[:2], states.data[3]))
    for padded, other in zip(*found, strict=True):
        assert torch.equal(padded, other)


def test_a_captured_mixed_step_has_the_devices_lengths() -> None:
    """A batch over buffers has bounds on the host; a decode stands between two prompts."""
    buffers = MixedBuffers(StepSize(rows=2, prompts=2, prompt_tokens=12), 64, 8, "cpu")
    starts, bounds = [0, 5, 6, 13], [40, 30, 20]
    table = torch.arange(1, 25, dtype=torch.int32).view(3, 8)
    exact = torch.tensor([33, 28, 17], dtype=torch.int32)
    step = Batch.on_buffers(starts, bounds, torch.tensor(starts).int(), exact, table, None)
    filled = buffers.fill(step)
    assert filled.lens == [40, 20, 0, 30, 0]
    assert filled.seq_lens.tolist() == [33, 17, 0, 28, 0]
    assert filled.block_table is not None
    assert filled.block_table[:, 0].tolist() == [1, 17, 0, 9, 0]


@pytest.mark.parametrize("backend", ["TORCH_SCAN", "NATIVE_SCAN", "VANILLA_SCAN"])
@pytest.mark.parametrize("targets", [None, [1, -1, -1], [[1, -1, -1], [-1] * 3, [-1] * 3]])
def test_a_recurrence_s_padding_has_output_0(backend: str, targets: list[int] | None) -> None:
    conv = RecurrentSpec(conv_width=4)
    spec = LayerSpec(kind="short_conv", num_heads=8, head_size=1, dtype="float32", recurrent=conv)
    layer = Recurrent(select(spec, "cpu", backend=backend), weight=torch.ones(8, 4))
    states = layer.group.allocate_states(2)
    moved = None if targets is None else torch.tensor(targets)
    slots = torch.tensor([0, -1, -1])
    batch = Batch.from_lens([1, 1, 3], [5, 0, 0], state_slots=slots, state_targets=moved)
    states.data.zero_()
    out = layer(torch.ones(5, 8), states=states, plan=batch, out=torch.full((5, 8), torch.nan))
    assert out[0].all() and not out[1:].any()
