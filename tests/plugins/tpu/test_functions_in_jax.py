"""Functions of scores in jax.numpy: what XLA computes, what the kernel does, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from forks import python
from interpreting import INTERPRETED
from polyattn import AttentionVariant, LayerSpec
from torch import Tensor

pytest.importorskip("jax")

from polyattn.runtime.functions.pointwise import Pointwise
from polyattn_tpu.functions import functions_of
from polyattn_tpu.places import Places
from polyattn_tpu.pointwise import Changes, Functions
from polyattn_tpu.split import KEY, PAIR, ROW
from polyattn_tpu.variants import variant_problem

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64)
FAMILIES = Path(__file__).parents[2] / "families"
VARIABLES = {**INTERPRETED["PALLAS_ATTN"], "PYTHONPATH": f"{FAMILIES}{os.pathsep}{FAMILIES.parent}"}


def gathered(
    score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *, table: Tensor, row: Tensor
) -> Tensor:
    return score * row[h] + table[k - q] + table[b] * table[k] + 0.5 * (k - q)


def by_score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *, table: Tensor) -> Tensor:
    return table[score.to(torch.int32)]


def gamma(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.lgamma(score)


INPUTS = {"table": "float32[*]", "row": "float32[num_heads]"}


def test_what_is_computed_where() -> None:
    """Of `gathered`: a head's `row` and a sequence's number; a key's product; a pair's bias."""
    variant = AttentionVariant(name="x", score_mod=gathered, inputs=INPUTS)
    split = Functions.of_pointwise(Pointwise.of_variant(variant)).split
    assert [len(split.of(kind)) for kind in (ROW, KEY, PAIR)] == [1, 1, 1]
    for fields, by in (
        ({"variant": "flash_sigmoid"}, [1, 0, 0]), ({"variant": "relative_bias"}, [0, 0, 1]),
        ({"variant": "vision_local"}, [3, 2, 0]), ({"mask": "custom"}, [0, 1, 1]),
    ):  # fmt: skip
        functions = functions_of(SPEC.replace(**fields))
        assert [len(functions.split.of(kind)) for kind in (ROW, KEY, PAIR)] == by


def test_a_process_with_64_bits_hands_over_32() -> None:
    import jax
    import jax.numpy as jnp

    functions = Functions.of_pointwise(
        Pointwise.of_variant(AttentionVariant(name="x", score_mod=gathered, inputs=INPUTS))
    )
    with jax.enable_x64(True):
        one, none = (jnp.full(1, n, jnp.int32) for n in (1, 0))
        tables = {"table": jnp.arange(8, dtype=jnp.float32), "row": jnp.ones(4, jnp.float32)}
        places = Places(none, one, none, none, none, 1)
        changes = Changes.of(functions, functions.given(tables), places, (4, 2), 2)
    assert {str(part.dtype) for part in changes.parts if part is not None} == {"int32"}
    assert None not in changes.parts


def test_what_cannot_be_generated_is_named() -> None:
    unknown = AttentionVariant(name="x", score_mod=gamma)
    assert variant_problem(unknown) == (
        "operation 'lgamma', which isn't generated for Pallas' kernel"
    )
    looked_up = AttentionVariant(name="x", score_mod=by_score, inputs={"table": "float32[*]"})
    assert "an input at an index that depends on the score" in str(variant_problem(looked_up))


def test_equal_functions_compile_once() -> None:
    """What jit goes by is the text, not the variant's name."""

    def found(name: str) -> Functions:
        variant = AttentionVariant(name=name, score_mod=gathered, inputs=INPUTS)
        return Functions.of_pointwise(Pointwise.of_variant(variant))

    assert found("one") == found("two") and hash(found("one")) == hash(found("two"))
    other = AttentionVariant(name="one", score_mod=by_score, inputs={"table": "float32[*]"})
    assert found("one") != Functions.of_pointwise(Pointwise.of_variant(other))


@pytest.mark.parametrize(
    "part",
    [
        pytest.param("decode", marks=pytest.mark.sweep),
        pytest.param("prefill", marks=pytest.mark.slow),  # has rows of one token as well
        pytest.param("masks", marks=pytest.mark.slow),
    ],
)
def test_right_in_the_interpreter(part: str) -> None:
    script = Path(__file__).with_name("interpreted_functions.py")
    ran = python(script, part, seconds=1200, **VARIABLES)
    assert ran.stdout == "right\n", ran.stderr[-3000:]
