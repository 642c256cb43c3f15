"""A variant's functions couple no requests: what reduces over tokens, heads or scores is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from polyattn import (
    Attention,
    AttentionVariant,
    Batch,
    LayerGroup,
    LayerSpec,
    register_variant,
    select,
    unregister_variant,
    variants,
)
from polyattn.errors import SpecError
from polyattn.runtime.functions.coupling import check_coupling
from torch import Tensor

BASE = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32")
WEIGHT = torch.linspace(0.5, 1.5, 16)


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    before = set(variants())
    yield
    for name in set(variants()) - before:
        unregister_variant(name)


def in_place(x: Tensor, b: Tensor, h: Tensor, at: Tensor, d: Tensor) -> Tensor:
    x *= x.sum(0)
    return x


def zeroed_mean(x: Tensor, b: Tensor, h: Tensor, at: Tensor, d: Tensor) -> Tensor:
    """Only what isn't finite gets from one token to another."""
    return x + 0 * x.mean()


def over_tokens(x: Tensor, b: Tensor, h: Tensor, at: Tensor, d: Tensor) -> Tensor:
    return torch.softmax(x, dim=0)


COUPLED: dict[str, Callable[..., Any]] = {
    "mean of squares": lambda x, b, h, at, d: x * (x * x).mean(),
    "the mean alone": lambda x, b, h, at, d: (x * x).mean(),
    "sum over tokens": lambda x, b, h, at, d: x / x.abs().sum(0),
    "sum over heads": lambda x, b, h, at, d: x / x.abs().sum(1, keepdim=True),
    "norm without keepdim": lambda x, b, h, at, d: x * x.norm(dim=-1),
    "softmax over tokens": lambda x, b, h, at, d: torch.softmax(x, dim=0),
    "largest": lambda x, b, h, at, d: x / x.abs().amax().clamp(min=1e3),
    "cumsum": lambda x, b, h, at, d: torch.cumsum(x, dim=0),
    "sort": lambda x, b, h, at, d: torch.sort(x, dim=0).values,
    "flip": lambda x, b, h, at, d: x.flip(0),
    "roll": lambda x, b, h, at, d: torch.roll(x, 1, 0),
    "matmul between tokens": lambda x, b, h, at, d: torch.einsum("ahd,bhd,bhe->ahe", x, x, x),
    "reshape": lambda x, b, h, at, d: x.reshape(x.shape[1], x.shape[0], -1).transpose(0, 1),
    "transposed norm": lambda x, b, h, at, d: x / x.transpose(0, 2).norm(dim=-1, keepdim=True),
    "last place": lambda x, b, h, at, d: x * (at.max() - at),
    "how many": lambda x, b, h, at, d: x * x.shape[0],
    "in place": in_place,
    "mean times 0": zeroed_mean,
}


@pytest.mark.parametrize("which", ["query_mod", "key_mod", "value_mod", "output_mod"])
@pytest.mark.parametrize("case", COUPLED)
def test_functions_of_elements_that_couple_are_refused(case: str, which: str) -> None:
    given: dict[str, Any] = {which: COUPLED[case]}
    with pytest.raises(SpecError, match=f"'coupled': {which} (gives one head|writes to)"):
        register_variant(AttentionVariant(name="coupled", **given))
    assert "coupled" not in variants()


SCORES: dict[str, Callable[..., Any]] = {
    "softmax": lambda score, b, h, q, k: torch.softmax(score, dim=-1),
    "mean": lambda score, b, h, q, k: score - score.mean(),
    "largest": lambda score, b, h, q, k: score - score.amax(-1, keepdim=True),
    "last key": lambda score, b, h, q, k: score + k - k.max(),
}


@pytest.mark.parametrize("case", SCORES)
def test_functions_of_scores_that_reduce_are_refused(case: str) -> None:
    with pytest.raises(SpecError, match="score_mod gives one pair of query and key other results"):
        register_variant(AttentionVariant(name="coupled", score_mod=SCORES[case]))
    if case == "last key":

        def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return k < k.max()

        with pytest.raises(SpecError, match="mask_mod gives one pair of query and key other"):
            register_variant(AttentionVariant(name="coupled", mask_mod=seen))


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (
            lambda score, b, h, q, k: score if q > k else -score,
            r"asks .* is true \(if, .* torch.where",
        ),
        (lambda score, b, h, q, k: None, "returns None; return a tensor"),
    ],
)
def test_functions_that_no_backend_can_run_are_refused(function: Any, why: str) -> None:
    with pytest.raises(SpecError, match=f"'broken': score_mod {why}"):
        register_variant(AttentionVariant(name="broken", score_mod=function))


def test_the_callers_default_device_changes_nothing() -> None:
    """Models are built on the meta device."""
    with torch.device("meta"), pytest.raises(SpecError, match="query_mod gives one head"):
        register_variant(AttentionVariant(name="coupled", query_mod=over_tokens))


def normed(x: Tensor, b: Tensor, h: Tensor, at: Tensor, d: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * WEIGHT


def halves(x: Tensor, b: Tensor, h: Tensor, at: Tensor, d: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], -1).cumsum(-1)


@pytest.mark.parametrize("lens", [[5, 20], [9, 1]])
def test_a_norm_over_a_heads_elements_is_served_and_couples_nothing(lens: list[int]) -> None:
    """Against torch's own layer over queries and keys that were normed by hand, in float64."""
    register_variant(
        AttentionVariant(name="normed", query_mod=normed, key_mod=normed, value_mod=halves)
    )
    group = LayerGroup(select(BASE.replace(variant="normed", cached=False)))
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(sum(lens), heads, 16, generator=generator) for heads in (4, 2, 2)
    )

    def attend(query: Tensor) -> Tensor:
        batch = Batch([0, lens[0], sum(lens)], lens, None)
        return Attention(group)(query, key, value, None, batch)

    out = attend(query)
    size = (16,)
    q, k = (
        torch.nn.functional.rms_norm(x.double(), size, WEIGHT.double(), 1e-6) for x in (query, key)
    )
    v = halves(value.double(), *[torch.zeros(1)] * 4)
    start = 0
    for length in lens:
        rows = slice(start, start + length)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            *(x[rows].transpose(0, 1) for x in (q, k, v)), is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(out[rows].double(), wanted.transpose(0, 1), rtol=1e-4, atol=1e-5)
        start += length
    louder = query.clone()
    louder[lens[0] :] *= 100
    assert torch.equal(attend(louder)[: lens[0]], out[: lens[0]])


def test_a_function_of_a_layers_sizes_is_judged_when_its_group_is_made() -> None:
    """What it has captured fits no example's sizes, so that registration can't run it."""
    register_variant(AttentionVariant(name="sized", query_mod=lambda x, *at: (x * WEIGHT).mean()))
    with pytest.raises(SpecError, match="'sized': query_mod gives one head of one token"):
        LayerGroup(select(BASE.replace(variant="sized")))


def test_a_function_by_its_path_is_judged_when_its_group_is_made() -> None:
    register_variant(AttentionVariant(name="path", key_mod=f"{__name__}:over_tokens"))
    with pytest.raises(SpecError, match="'path': key_mod gives one head of one"):
        LayerGroup(select(BASE.replace(variant="path")))


@pytest.mark.parametrize("name", ["flash_sigmoid", "vision_local", "relative_bias"])
def test_cores_own_variants_couple_nothing(name: str) -> None:
    check_coupling(variants()[name])
