"""Masks in the Pallas kernel: its arithmetic by exhaustion, and whole layers of the shared grid."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forks import python
from polyattn import LayerSpec
from polyattn.families.attention import reference
from spec.test_key_ranges import MASKS, SHAPES

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX must not look for a TPU: it takes seconds
pytest.importorskip("jax")

import polyattn_tpu as pt
from plugins.tpu.test_tpu_kit import ENVIRONMENT, SMALL
from polyattn_tpu.kernel import floor_divide, visible

slow = pytest.mark.slow


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: "-".join(str(v) for v in mask.values()))
def test_the_kernel_shows_exactly_what_the_reference_shows(mask: dict[str, Any]) -> None:
    spec = LayerSpec(num_heads=1, head_size=64, **mask)
    for queries, keys in SHAPES:
        rows, columns = np.indices((queries, keys + 3), np.int32)
        position, key = rows + (keys - queries), columns
        seen = np.asarray(visible(spec, key, position, keys))
        expected = reference.visible(spec, queries, keys).numpy()
        np.testing.assert_array_equal(
            seen, np.pad(expected, ((0, 0), (0, 3))), err_msg=f"{queries} of {keys}"
        )


def test_floor_divide_is_pythons() -> None:
    values = np.arange(-40, 40, dtype=np.int32)
    for by in (1, 2, 7, 16):
        np.testing.assert_array_equal(floor_divide(values, by), values // by)


@pytest.mark.parametrize("lens", [([3], [0]), ([1], [0]), ([0], [0]), ([], [])], ids=str)
def test_a_step_without_keys_is_zeros(lens: tuple[list[int], list[int]]) -> None:
    import jax.numpy as jnp

    spec = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float32", cached=False)
    plan = pt.plan(pt.Step.of(*lens), spec, buckets=pt.Buckets(tokens=16, seqs=4, pages=4))
    nothing = jnp.zeros((0, 2, 64))
    query = pt.pad(plan, jnp.ones((sum(lens[0]), 4, 64)))
    out, _ = pt.attend_given(plan, spec, query, nothing, nothing)
    assert not np.asarray(out)[: sum(lens[0])].any()


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("cases", "step"),
    [
        pytest.param("grid", 61, marks=slow),
        pytest.param("beyond", 43, marks=slow),
        pytest.param("grid", 1, marks=pytest.mark.sweep),
        pytest.param("beyond", 29, marks=pytest.mark.sweep),
    ],
)
def test_every_mask_in_the_interpreter(cases: str, step: int) -> None:
    run("masks.py", cases, str(step), environment=SMALL)


@slow
def test_full_tiles_and_kept_tokens_far_behind() -> None:
    run("edges.py")


def run(script: str, *words: str, environment: dict[str, str] = ENVIRONMENT) -> None:
    found = python(Path(__file__).with_name(script), *words, seconds=7000, **environment)
    assert found.returncode == 0, found.stderr[-3000:]
