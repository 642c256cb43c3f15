"""Transforms of queries, keys, values and outputs, beside formulas in float64; and DeBERTa's buckets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from formulas import attend
from polyattn import (
    Attention,
    AttentionVariant,
    Batch,
    LayerGroup,
    LayerSpec,
    register_variant,
    select,
    unregister_variant,
)
from polyattn.errors import SpecError
from polyattn.families.attention import reference
from polyattn.runtime.functions.variants import deberta_buckets
from polyattn.workload.compare import output_error
from polyattn.workload.pages import fill
from torch import Tensor

BASE = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32", block_size=8)
QUERIES, LENS = [3, 1, 0, 6], [9, 12, 4, 6]


def of_query(x: Tensor, b: Tensor, h: Tensor, q: Tensor, d: Tensor, *, gain: Tensor) -> Tensor:
    return x * gain[h] + 0.01 * q + 0.1 * b


def of_key(x: Tensor, b: Tensor, h: Tensor, k: Tensor, d: Tensor) -> Tensor:
    return torch.where(d % 2 == 0, x, -x) * (1.0 + 0.05 * k) + 0.1 * h


def of_value(x: Tensor, b: Tensor, h: Tensor, k: Tensor, d: Tensor) -> Tensor:
    return torch.tanh(x) + 0.02 * k * d


def of_output(x: Tensor, b: Tensor, h: Tensor, q: Tensor, d: Tensor, *, gain: Tensor) -> Tensor:
    return torch.sigmoid(x) * gain[h] - 0.03 * q


def doubled(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score * 2.0


GAIN = {"gain": "float32[num_heads]"}
ALL = AttentionVariant(
    name="all", query_mod=of_query, key_mod=of_key, value_mod=of_value, output_mod=of_output, inputs=GAIN
)  # fmt: skip
BOTH = AttentionVariant(
    name="both", score_mod=doubled, key_mod=of_key, output_mod=of_output, inputs=GAIN
)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    for variant in (ALL, BOTH):
        register_variant(variant)
    yield
    for variant in (ALL, BOTH):
        unregister_variant(variant.name)


def by_hand(
    variant: AttentionVariant, query: Tensor, keys: Tensor, values: Tensor, gain: Tensor, seq: int,
    first: int,
) -> Tensor:  # fmt: skip
    """A causal sequence in float64; `keys` and `values` before their transforms, all of them."""
    query, keys, values, gain = (t.double() for t in (query, keys, values, gain))
    heads, kv_heads, d = torch.arange(4)[:, None], torch.arange(2)[:, None], torch.arange(16)
    q = torch.arange(first, first + len(query))[:, None, None]
    k = torch.arange(len(keys))[:, None, None]
    b = torch.tensor(seq)
    if variant.query_mod is not None:
        query = of_query(query, b, heads, q, d, gain=gain)
        values = of_value(values, b, kv_heads, k, d)
    keys = of_key(keys, b, kv_heads, k, d)
    scale = 0.25 if variant.score_mod is None else 0.5
    out, _ = attend(query, keys, values, k[:, 0, 0] <= q[:, :, 0], scale=scale)
    return of_output(out, b, heads, q, d, gain=gain)


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "NATIVE_ATTN", "VANILLA"])
@pytest.mark.parametrize("variant", [ALL, BOTH], ids=["alone", "beside a score_mod"])
def test_a_prompt_and_its_decodes(backend: str, variant: AttentionVariant) -> None:
    """Keys are transformed where they are stored; a step that reads them transforms its own alone."""
    if backend == "NATIVE_ATTN" and variant is BOTH:
        pytest.skip("it serves transforms, and no functions of scores")
    generator = torch.Generator().manual_seed(0)
    spec, gain = BASE.replace(variant=variant.name), torch.rand(4, generator=generator) + 0.5
    group = LayerGroup(select(spec, backend=backend, verify=False))
    layer, cache = Attention(group, inputs={"gain": gain}), group.allocate_cache(4)
    fill(cache, generator)
    query, key, value = (torch.randn(19, n, 16, generator=generator) for n in (4, 2, 2))
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    at = 0
    for count in (14, 1, 3, 1):
        batch = Batch.from_lens([count], [at + count], table, 8)
        new = slice(at, at + count)
        found = layer(query[new], key[new], value[new], cache, batch)
        expected = by_hand(variant, query[new], key[: at + count], value[: at + count], gain, 0, at)
        assert isinstance(found, Tensor) and output_error(found, expected) < 2e-5
        told, _ = reference.forward(spec, query[new], None, None, cache, batch, layer.params)
        assert output_error(found, told) < 2e-5
        at += count


def test_keys_that_are_given_whole() -> None:
    generator = torch.Generator().manual_seed(1)
    spec, gain = BASE.replace(variant="all", cached=False, block_size=None), torch.rand(4) + 0.5
    layer = Attention(LayerGroup(select(spec, verify=False)), inputs={"gain": gain})
    starts = [2, 12, 30, 34]  # gaps between, where nothing is read
    batch = Batch.from_lens(QUERIES, LENS, key_starts=starts)
    query, key, value = (
        torch.randn(n, h, 16, generator=generator) for n, h in ((10, 4), (41, 2), (41, 2))
    )
    found = layer(query, key, value, None, batch)
    assert isinstance(found, Tensor)
    told, _ = reference.forward(spec, query, key, value, None, batch, layer.params)
    assert output_error(found, told) < 2e-5
    for index, (start, length) in enumerate(zip(starts, LENS, strict=True)):
        rows = slice(batch.starts[index], batch.starts[index + 1])
        mine = slice(start, start + length)
        expected = by_hand(
            ALL, query[rows], key[mine], value[mine], gain, index, length - QUERIES[index]
        )  # fmt: skip
        assert not len(expected) or output_error(found[rows], expected) < 2e-5


def test_what_does_not_go_together_is_named() -> None:
    for field, value in (("graph_capture", "single_token_decode"), ("out_dtype", "fp8_e4m3")):
        with pytest.raises(SpecError, match=f"{field}=.*transforms queries"):
            select(BASE.replace(variant="all", **{field: value}))
    with pytest.raises(
        SpecError, match="output_mod takes 4 arguments; it must take output, b, h, q_idx, d"
    ):
        AttentionVariant(name="x", output_mod=lambda output, b, h, q_idx: output)
    shown = select(BASE.replace(variant="all"), backend="TORCH_SDPA", verify=False)
    assert "before and after attention" in str(shown.decision.notes)


@pytest.mark.parametrize("buckets", [(256, 512), (32, 128), (8, 20)])
def test_buckets_are_deberta_s(buckets: tuple[int, int]) -> None:
    deberta = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    count, reach = buckets
    theirs = deberta.make_log_bucket_position(-torch.arange(-reach, reach + 1), count, reach)
    assert torch.equal(
        deberta_buckets(count, reach), (theirs + count).clamp(0, 2 * count - 1).int()
    )
