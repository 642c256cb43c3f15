"""NATIVE_ATTN's plans: how are a step's keys cut in parts, and its rows in blocks?"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from polyattn import LayerSpec
from polyattn_cpu.native import attention
from test_native import Step, isa, needs_library  # noqa: F401

pytestmark = [needs_library, pytest.mark.usefixtures("isa")]


def spec(heads: int, kv_heads: int = 1, **features: object) -> LayerSpec:
    return LayerSpec(
        num_heads=heads, num_kv_heads=kv_heads, head_size=32, dtype="float32", **features
    )  # fmt: skip


@pytest.mark.parametrize("queries", [[3, 1], [1, 3], [16, 3, 1]])
def test_parts_have_room_for_the_largest_of_a_step(queries: list[int]) -> None:
    """Groups of partial results differ in rows; each part has the room of the largest, wherever it is."""
    Step(spec(8, 2), queries, [2000 + 600 * at for at in range(len(queries))]).check()


@pytest.mark.parametrize(
    "mask", [{"sliding_window": 5}, {"sliding_window": 5, "causal": False}, {}]
)
@pytest.mark.parametrize("heads", [1, 3])
def test_a_block_of_rows_begins_with_its_first_row_s_keys(
    mask: dict[str, object], heads: int
) -> None:
    """A window of 5 shows each row one key that the next one doesn't see."""
    for queries in (99, 101, 120, 128, 129, 300):
        Step(spec(heads, **mask), [queries, 2], [queries + 70, 60]).check()


@pytest.mark.parametrize(
    ("heads", "keys", "cuts"),
    [(12, 2052, [1024]), (12, 1152, []), (12, 1153, [1024]), (8, 577, [512]), (8, 1088, [512])],
)
def test_what_is_left_of_a_sequence_joins_its_last_piece(
    heads: int, keys: int, cuts: list[int]
) -> None:
    """Up to an eighth of a piece, which has 1,024 keys, or 512 of few rows."""
    plan = attention.StepPlan(attention.layer_bytes(spec(heads)), [0, 1], [keys], 16)
    _, items, _ = plan.listed()
    spans = sorted((int(item[9]), int(item[10])) for item in items)
    assert spans == list(pairwise([0, *cuts, keys]))
    Step(spec(heads), [1], [keys]).check()


@pytest.mark.parametrize("blocks", range(1, 13))
def test_every_row_of_every_number_of_blocks_is_computed(blocks: int) -> None:
    """Of 71 heads a block holds 14 tokens, or 5; the last block is whole, or short."""
    for tokens in (5, 14):
        Step(spec(71), [blocks * tokens], [blocks * tokens]).check()
        Step(spec(71), [blocks * tokens - tokens + 1], [blocks * tokens]).check()


@pytest.mark.parametrize("checks", [False, True])
def test_scratch_is_poisoned_as_the_settings_say(
    checks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file's `checks`, too, not the variable alone."""
    calls: list[int] = []
    lib = SimpleNamespace(pa_poison=lambda: calls.append(1))
    monkeypatch.setattr(attention, "load", lambda: lib)
    monkeypatch.setattr(attention, "current_settings", lambda: SimpleNamespace(checks=checks))
    assert attention.kernels.__wrapped__() is lib
    assert len(calls) == checks
