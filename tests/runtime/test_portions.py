"""Is a step that was taken apart wrongly told from a right one, by token and key?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from polyattn import Batch, LayerGroup, LayerSpec, select
from polyattn.errors import PluginError
from polyattn.families.attention.prefix import PrefixPlan
from polyattn.families.mla import planning as mla_planning
from polyattn.kernel import LatentSpec
from polyattn.runtime.merge import Merged
from polyattn.runtime.plan_checks import PlanChecks, check_calls

BASE = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64, dtype="bfloat16")


def step_of(queries: list[int], lens: list[int], **more: Any) -> Batch:
    table = torch.arange(len(lens) * 400, dtype=torch.int32).view(len(lens), 400)
    return Batch([0, *np.cumsum(queries).tolist()], lens, table, **more)


def on_device(batch: Batch) -> None:
    """Hide the host's copy of the block table, as where only a GPU has it."""
    batch.__dict__["host_block_table"] = None


def steps_apart(blocks: int = 0) -> dict[str, Any]:
    """A step by phase, and one over latents whose prefills expand their context in several pieces.

    `blocks`: which a sequence's table names again and again, as an engine's step without a request may.
    """
    batch = step_of([1, 20, 0, 1, 30], [300, 90, 4, 20, 130])
    if blocks:
        assert batch.block_table is not None
        batch.block_table.remainder_(400).remainder_(blocks)
    plain = select(BASE.replace(dtype="float32", block_size=16), "cpu", backend="TORCH_SDPA")
    latent = LayerSpec(
        kind="mla", num_heads=2, num_kv_heads=2, head_size=48, v_head_size=32, dtype="float32",
        block_size=16, latent=LatentSpec(rank=64, rope_head_size=16),
    )  # fmt: skip
    with patch.object(mla_planning, "EXPANDED_BYTES", 2 * (48 + 32) * 4 * 120):
        return {
            "by phase": LayerGroup(plain).plan(batch),
            "by pieces": LayerGroup(select(latent, "cpu", verify=False)).plan(batch),
        }


def pieces_of(step: Any) -> Any:
    return next(op for op in step.ops if isinstance(op, Merged)).parts


def fewer_rows(step: Any) -> None:
    step.calls[-1].rows = slice(1, step.batch.num_tokens)


def other_block(step: Any) -> None:
    step.calls[0].plan.batch.block_table[0, 3] += 1


def other_length(step: Any) -> None:
    step.calls[0].plan.batch.lens[0] -= 1


def piece_missing(step: Any) -> None:
    merged = next(op for op in step.ops if isinstance(op, Merged))
    merged.parts = merged.parts[:-1]


def piece_twice(step: Any) -> None:
    merged = next(op for op in step.ops if isinstance(op, Merged))
    merged.parts = (*merged.parts, merged.parts[-1])


APART: dict[str, tuple[str, Callable[[Any], None]]] = {
    "a call has other tokens": ("by phase", fewer_rows),
    "a call has no tokens": ("by phase", lambda step: setattr(step, "ops", step.ops[:-1])),
    "a call runs twice": ("by phase", lambda step: setattr(step, "ops", (*step.ops, step.ops[-1]))),
    "a call has another block": ("by phase", other_block),
    "a call has a key less": ("by phase", other_length),
    "a piece is missing": ("by pieces", piece_missing),
    "a piece is merged twice": ("by pieces", piece_twice),
    "a piece has other keys": ("by pieces", lambda step: pieces_of(step)[1][1].slots.add_(1)),
    "own keys are others": ("by pieces", lambda step: pieces_of(step)[0][1].slots.sub_(1)),
}


@pytest.mark.parametrize("where", ["table on the host", "table on the device"])
@pytest.mark.parametrize("name", APART)
def test_a_mistake_in_taking_a_step_apart_is_told(name: str, where: str) -> None:
    kind, bug = APART[name]
    step = steps_apart()[kind]
    assert len(step.calls) > 1
    if where == "table on the device":
        for batch in (step.batch, *(call.plan.batch for call in step.calls)):
            on_device(batch)
    check_calls(step)
    bug(step)
    with pytest.raises(
        PluginError, match=r"taken apart wrongly.*(query token|planned for|sequence \d)"
    ):
        check_calls(step)


@pytest.mark.parametrize("blocks", [1, 2, 3, 7])
@pytest.mark.parametrize("name", [name for name in APART if APART[name][0] == "by pieces"])
def test_a_mistake_over_blocks_that_come_twice_is_told(name: str, blocks: int) -> None:
    step = steps_apart(blocks)["by pieces"]
    check_calls(step)
    APART[name][1](step)
    with pytest.raises(PluginError, match=r"taken apart wrongly.*sequence \d.*query token \d"):
        check_calls(step)


def texts(chunk: int | None) -> Any:
    """A step of texts whose first keys are missing; the second has fewer keys than queries."""
    masks: dict[str, Any] = (
        {"chunk_size": chunk} if chunk else {"sliding_window": 21, "sink_tokens": 9}
    )
    spec = BASE.replace(dtype="float32", cached=False, **masks)
    batch = Batch.from_lens([1, 9, 30, 0, 4], [31, 5, 40, 3, 70], first_positions=[5, 3, 17, 2, 0])
    return LayerGroup(select(spec, "cpu", backend="TORCH_SDPA", verify=False)).plan(batch)


def later_keys(step: Any) -> None:
    held = step.calls[-1].plan.batch
    held.__dict__["key_starts"] = [start + 1 for start in held.key_starts]


def a_key_less(step: Any) -> None:
    step.calls[-1].plan.batch.lens[-1] -= 1


def another_chunk(step: Any) -> None:
    """A chunk's sequence begins where the one before it does: its first keys are hidden from it."""
    held = step.calls[-1].plan.batch
    at = -min(2, len(held.lens))
    held.__dict__["key_starts"] = list(held.key_starts)
    held.key_starts[at] -= 1
    held.lens[at] += 1


TEXTS: dict[str, Callable[[Any], None]] = {
    "its keys begin later": later_keys,
    "a key less": a_key_less,
    "a key before": another_chunk,
    "a call has no tokens": lambda step: setattr(step, "ops", step.ops[:-1]),
    "a call runs twice": lambda step: setattr(step, "ops", (*step.ops, step.ops[-1])),
}


@pytest.mark.parametrize("chunk", [7, 8, 24, None])
@pytest.mark.parametrize("name", TEXTS)
def test_a_mistake_in_a_step_of_texts_is_told(name: str, chunk: int | None) -> None:
    step = texts(chunk)
    check_calls(step)
    TEXTS[name](step)
    with pytest.raises(PluginError, match=r"taken apart wrongly.*sequence \d, query token \d"):
        check_calls(step)


@pytest.mark.parametrize("chunk", [7, 8, 24])
def test_a_step_that_was_planned_for_other_texts_is_told(chunk: int) -> None:
    step = texts(chunk)
    step.batch.first_positions = [5, 3, 18, 2, 0]
    with pytest.raises(PluginError, match=r"sequence 2, query token \d+, key \d+: by"):
        check_calls(step)


LENS = [50, 70, 33, 40]
BLOCKS = [[1, 2, 3, 4, 0], [1, 2, 3, 5, 6], [1, 2, 7, 0, 0], [8, 9, 10, 0, 0]]
"""Rows of one token over blocks of 16: three of them share two blocks, two of these a third."""


def shared(spec: LayerSpec, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("polyattn.families.attention.sharing.CALL_US", {"cpu": 0.0})
    table = torch.tensor(BLOCKS, dtype=torch.int32)
    group = LayerGroup(select(spec, "cpu", backend="TORCH_SDPA", verify=False))
    step = group.plan(Batch([0, 1, 2, 3, 4], LENS, table))
    assert isinstance(step.calls[0].plan, PrefixPlan)
    return step


def parts_of(step: Any) -> list[Any]:
    """The call of the rows' own keys, then those of each level."""
    return list(step.calls[0].plan.merged.calls)


def another_row(step: Any) -> None:
    merged = step.calls[0].plan.merged
    (own, (_, level), *rest) = merged.parts
    merged.parts = (own, (torch.tensor([0, 1, 3]), level), *rest)


def level_missing(step: Any) -> None:
    step.calls[0].plan.merged.parts = step.calls[0].plan.merged.parts[:-1]


def level_twice(step: Any) -> None:
    merged = step.calls[0].plan.merged
    merged.parts = (*merged.parts, merged.parts[1])


SHARED: dict[str, Callable[[Any], None]] = {
    "a level is missing": level_missing,
    "a level is merged twice": level_twice,
    "a level is another row's": another_row,
    "a level has another block": lambda s: parts_of(s)[1].plan.batch.block_table[0].add_(1),
    "a level has a block less": lambda s: parts_of(s)[2].plan.batch.lens.__setitem__(0, 0),
    "own keys begin a block late": lambda s: parts_of(s)[0].plan.batch.block_table[1].add_(1),
    "own keys are one less": lambda s: parts_of(s)[0].plan.batch.lens.__setitem__(2, 0),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_mistake_over_blocks_that_rows_share_is_told(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = shared(BASE.replace(dtype="float32", block_size=16), monkeypatch)
    assert len(parts_of(step)) == 3
    checks = PlanChecks(float("inf"))
    checks(step, 1.0)
    assert checks.plans == 3
    SHARED[name](step)
    with pytest.raises(PluginError, match=r"taken apart wrongly.*sequence \d, query token 0"):
        check_calls(step)
