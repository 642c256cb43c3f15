"""Variants and masks: every CPU backend beside the float64 reference, prefill and decode over pages."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from defined_flex import without_compiler
from devices import everywhere
from polyattn import (
    Attention,
    AttentionVariant,
    Batch,
    BlockSparseMask,
    CustomMask,
    LayerGroup,
    LayerSpec,
    discover,
    register_variant,
    resolve_device,
    select,
    unregister_variant,
    variants,
)
from polyattn.errors import BatchError, PluginError, SelectionError, SpecError
from polyattn.families.attention import reference
from polyattn.registry.discovery import generation
from polyattn.runtime.functions.variants import t5_buckets
from polyattn.workload.compare import output_error
from polyattn.workload.pages import fill
from torch import Tensor

BASE = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", block_size=16)
LENS = ([5, 1, 0, 20, 1], [21, 7, 3, 20, 33])


def capped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return 1.5 * torch.tanh(score / 1.5)


def clamped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    near = torch.clamp(torch.where(kv_idx % 3 == 1, torch.nan, score), -1.0, 1.0)
    least = torch.minimum(torch.maximum(near, score), score)
    return torch.where(near == near, near, torch.where(least == least, score, -score))


def tempered(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *, temperature: Tensor
) -> Tensor:
    return score * temperature[h]


def same_document(
    b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *, document: Tensor
) -> Tensor:
    return document[b, q_idx] == document[b, kv_idx]


def striped(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx + h) % 3 != 0


VARIANTS = (
    AttentionVariant(name="capped", score_mod=capped),
    AttentionVariant(name="clamped", score_mod=clamped),
    AttentionVariant(
        name="tempered", score_mod=tempered, inputs={"temperature": "float32[num_heads]"}
    ),
    AttentionVariant(
        name="documents", mask_mod=same_document, inputs={"document": "int32[num_seqs, *]"}
    ),
    AttentionVariant(name="striped", mask_mod=striped),
)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    for variant in VARIANTS:
        register_variant(variant)
    yield
    for variant in VARIANTS:
        unregister_variant(variant.name)


@pytest.fixture(params=["TORCH_SDPA", "FLEX_ATTENTION"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend that takes functions; FLEX_ATTENTION calls the definition, which nothing compiles."""
    without_compiler(monkeypatch)
    return str(request.param)


def run(
    spec: LayerSpec, backend: str, lens: tuple[list[int], list[int]] = LENS,
    inputs: dict[str, Any] | None = None, step: dict[str, Any] | None = None, mask: Any = None,
    device: str = "cpu",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the backend's output and the reference's."""
    generator = torch.Generator().manual_seed(1)
    group = LayerGroup(select(spec, device, backend=backend, verify=False))
    layer = Attention(group, inputs=inputs, checks=True)
    query_lens, seq_lens = lens
    size, width = 16, 3
    table = torch.randperm(width * len(seq_lens), generator=generator).int()
    table = table.view(len(seq_lens), width).to(device)
    cache = group.allocate_cache(table.numel())
    fill(cache, generator)
    batch = Batch.from_lens(query_lens, seq_lens, table, size, inputs=step, mask=mask)
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    tokens = [torch.randn(batch.num_tokens, n, 32, generator=generator).to(device) for n in heads]
    with torch.no_grad():
        out = layer(*tokens, cache, batch)
    assert isinstance(out, Tensor)
    expected, _ = reference.forward(spec, tokens[0], None, None, cache, batch, layer.params)
    return out, expected


def assert_right(out: Tensor, expected: Tensor) -> None:
    assert output_error(out, expected) < 2e-5


def functions_of_each_kind() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return variants with a softmax, and what a layer or a step gives them."""
    generator = torch.Generator().manual_seed(3)
    document = torch.randint(0, 3, (5, 40), generator=generator).int()
    temperature = torch.rand(4, generator=generator) + 0.5
    return [
        ("capped", {}, {}),
        ("tempered", {"temperature": temperature}, {}),
        ("documents", {}, {"document": document}),
        ("striped", {}, {}),
        ("relative_bias", {"bias": torch.randn(32, 4, generator=generator),
                           "bucket_of_distance": t5_buckets(bidirectional=False)}, {}),
        ("vision_local", {"grid_width": 5, "radius": 1}, {}),
    ]  # fmt: skip


def assert_functions_right(backend: str, lens: tuple[list[int], list[int]]) -> None:
    sigmoid = ("flash_sigmoid", {"sigmoid_bias": -2.0}, {})
    for name, layer, step in (*functions_of_each_kind(), sigmoid):
        assert_right(*run(BASE.replace(variant=name), backend, lens, inputs=layer, step=step))


def test_functions_over_pages(backend: str) -> None:
    plain = run(BASE, backend)[0]
    functions = functions_of_each_kind()
    by_both = [(name, step, layer) for name, layer, step in functions[1:3]]
    for name, layer, step in (*functions, *by_both):
        out, expected = run(BASE.replace(variant=name), backend, inputs=layer, step=step)
        assert_right(out, expected)
        assert not torch.allclose(out, plain, atol=1e-3), f"{name} changes nothing"


@everywhere("TORCH_SDPA", "TORCH_SDPA TRITON_ATTN")
def test_a_function_keeps_nan_through_minimum_maximum_and_clamp(device: str, backend: str) -> None:
    """As torch's do; a GPU's own instructions drop it."""
    out, expected = run(BASE.replace(variant="clamped"), backend, device=device)
    assert_right(out, expected)


@pytest.mark.sweep  # six seconds of torch's compiler each; the gate has the examples of all three
def test_compiled_functions() -> None:
    """What the compiler makes of tensors that a layer brings, a step, and a step's mask."""
    for name, layer, step in functions_of_each_kind()[2:5:2]:
        assert_right(*run(BASE.replace(variant=name), "FLEX_ATTENTION", inputs=layer, step=step))
    spec, mask, lens = masks_of_each_kind()[0]
    assert_right(*run(spec, "FLEX_ATTENTION", lens, mask=mask))


@pytest.mark.parametrize(
    "fields",
    [{"logit_soft_cap": 2.0, "alibi": True}, {"sliding_window": 9, "sink_tokens": 2}],
    ids=["cap, ALiBi", "window"],
)
def test_a_variant_comes_after_the_spec_s_own(fields: dict[str, Any]) -> None:
    spec = BASE.replace(variant="tempered", **fields)
    assert_right(*run(spec, "TORCH_SDPA", inputs={"temperature": torch.rand(4) + 0.5}))


def test_weights_without_a_softmax() -> None:
    spec = BASE.replace(variant="flash_sigmoid")
    assert_right(*run(spec, "TORCH_SDPA", inputs={"sigmoid_bias": -2.0}))
    with pytest.raises(SelectionError, match="flex_attention can.t leave the softmax out"):
        select(spec, backend="FLEX_ATTENTION", verify=False)
    for field in ("learned_sinks", "needs_lse"):
        with pytest.raises(SpecError, match=field):
            select(spec.replace(**{field: True}))


def masks_of_each_kind() -> list[tuple[LayerSpec, Any, tuple[list[int], list[int]]]]:
    generator = torch.Generator().manual_seed(5)
    queries, lens = LENS
    whole = [
        torch.rand(q, n, generator=generator) < 0.5 for q, n in zip(queries, lens, strict=True)
    ]
    tree = [[-1, 0, 0, 1, 2], [-1], [], [n // 2 - 1 if n > 1 else n - 1 for n in range(20)], [-1]]
    custom = BASE.replace(mask="custom", causal=False)
    packed = CustomMask.pack(whole, "all")
    blocks = BlockSparseMask.of(packed, queries, lens, (1, 1))
    decodes = ([1, 1], [33, 40])
    return [
        (custom.replace(causal=True), CustomMask.tree(tree), LENS),
        (custom, packed, LENS),
        (custom, CustomMask.prefix_lm([3, 7, 0, 9, 2], queries, lens), LENS),
        (custom, CustomMask.documents([[k // 6 for k in range(n)] for n in lens], queries), LENS),
        (BASE.replace(mask="block_sparse"), blocks, LENS),
        (BASE.replace(mask="block_sparse", causal=False),
         BlockSparseMask.of(packed, queries, lens, (4, 8)), LENS),
        (BASE.replace(mask="block_sparse"),
         BlockSparseMask.of(CustomMask.tree(tree), queries, lens, (1, 1)), LENS),
        (BASE.replace(mask="block_sparse"),
         BlockSparseMask.sliding_window(5, queries, lens, (2, 3)), LENS),
        (BASE.replace(mask="block_sparse"), BlockSparseMask.of_pages([[0, 2], [1]], 16), decodes),
    ]  # fmt: skip


def test_masks_that_a_step_brings(backend: str) -> None:
    for spec, mask, lens in masks_of_each_kind():
        out, expected = run(spec, backend, lens, mask=mask)
        assert_right(out, expected)
        plain = run(spec.replace(mask=None), backend, lens)[0]
        assert not torch.allclose(out, plain, atol=1e-3)


def test_masks_are_what_they_are_named() -> None:
    """By brute force: ancestors, prefixes and documents, one pair after another."""
    parents = [-1, 0, 0, 1, 3, 2]
    bits = CustomMask.tree([parents]).bits.view(6, 6)
    for token in range(6):
        line = [token]
        while parents[line[-1]] >= 0:
            line.append(parents[line[-1]])
        assert bits[token].nonzero()[:, 0].tolist() == sorted(line)
    bits = CustomMask.prefix_lm([3], [4], [6]).bits.view(4, 6)
    assert bits.tolist() == [[k < 3 or k <= q for k in range(6)] for q in range(2, 6)]
    ids = [0, 0, 1, 1, 0]
    bits = CustomMask.documents([ids], [2]).bits.view(2, 5)
    assert bits.tolist() == [[ids[k] == ids[q] for k in range(5)] for q in (3, 4)]


def test_trees_and_windows_are_blocks(backend: str) -> None:
    """The same output as by the tree itself, and as by the layer's own window."""
    tree = CustomMask.tree([[-1, 0, 0, 1, 2], [-1], [], [-1, *range(19)], [-1]])
    as_blocks = BASE.replace(mask="block_sparse")
    blocks = BlockSparseMask.of(tree, *LENS, (1, 1))
    wanted, _ = run(BASE.replace(mask="custom"), backend, mask=tree)
    assert_right(run(as_blocks, backend, mask=blocks)[0], wanted)
    own = BASE.replace(sliding_window=5)
    wanted, _ = run(own, backend)
    for spec, block in ((as_blocks, (1, 1)), (own.replace(mask="block_sparse"), (4, 3))):
        window = BlockSparseMask.sliding_window(5, *LENS, block)
        assert_right(run(spec, backend, mask=window)[0], wanted)


def test_blocks_of_what_does_not_fit_are_refused() -> None:
    with pytest.raises(BatchError, match="9 bits; masks over new keys"):
        BlockSparseMask.of(CustomMask.tree([[-1, 0, 1]]), [4], [8], (1, 1))
    with pytest.raises(BatchError, match="must be .query rows, keys., 1 or more each"):
        BlockSparseMask.sliding_window(3, [4], [8], (0, 1))
    with pytest.raises(BatchError, match="window=0 must be 1 or more"):
        BlockSparseMask.sliding_window(0, [4], [8], (1, 1))


def test_a_mask_of_another_shape_with_as_many_bits_is_refused() -> None:
    """Transposed, or in another order of sequences."""
    seen = torch.rand(2, 5) < 0.5
    with pytest.raises(BatchError, match=r"masks\[0\] has shape \(5, 2\); .* must be \(2, 5\)"):
        Batch.from_lens([2], [5], mask=CustomMask.pack([seen.T], "all"))
    swapped = CustomMask.pack([seen, torch.rand(1, 5) < 0.5], "all")
    with pytest.raises(BatchError, match=r"masks\[0\] has shape \(2, 5\)"):
        BlockSparseMask.of(swapped, [1, 2], [5, 5], (1, 1))
    whole = CustomMask.pack([seen, torch.ones(0, 0, dtype=torch.bool)], "all")
    assert Batch.from_lens([2, 0], [5, 3], mask=whole).mask is whole


def test_blocks_of_a_tree_beside_padding_rows_are_the_tree_s() -> None:
    tree, none = torch.eye(2, dtype=torch.bool), torch.ones(1, 0, dtype=torch.bool)
    blocks = BlockSparseMask.of(CustomMask.pack([tree, none]), [2, 1], [5, 0], (1, 1))
    assert blocks.indices == [0, 1, 2, 3, 0, 1, 2, 4]
    assert blocks.indptr == [0, 4, 8, 8]
    with pytest.raises(BatchError, match="4 bits; masks over new keys"):  # more queries than keys
        BlockSparseMask.of(CustomMask.pack([tree]), [2], [1], (1, 1))


def test_a_spec_carries_the_name() -> None:
    spec = BASE.replace(variant="tempered", mask="custom")
    assert LayerSpec.from_json(spec.to_json()) == spec == pickle.loads(pickle.dumps(spec))
    assert json.loads(spec.to_json())["variant"] == "tempered"
    assert "variant tempered" in str(spec) and "custom_mask" in str(spec)
    assert hash(spec) != hash(spec.replace(variant=None))


def test_a_new_variant_asks_no_plugin_again() -> None:
    registry, device, known = discover(), resolve_device("cpu"), generation()
    register_variant(AttentionVariant(name="of_a_moment", score_mod=capped))
    unregister_variant("of_a_moment")
    assert discover() is registry and resolve_device("cpu") is device
    assert generation() > known, "selections are made anew"


def test_what_is_unknown_or_wrong_is_named() -> None:
    with pytest.raises(
        SpecError, match=r"variant='tempred' is not registered; did you mean 'tempered'"
    ):
        select(BASE.replace(variant="tempred"))
    with pytest.raises(PluginError, match="registered already"):
        register_variant(VARIANTS[0])
    with pytest.raises(SpecError, match="role='cross'"):
        BASE.replace(variant="capped", role="cross", causal=False)
    with pytest.raises(SpecError, match="mask='tree'"):
        BASE.replace(mask="tree")
    with pytest.raises(SpecError, match="must be one of float32"):
        AttentionVariant(name="x", score_mod=capped, inputs={"t": "float17"})
    with pytest.raises(SpecError, match="changes nothing"):
        AttentionVariant(name="x")
    with pytest.raises(SpecError, match="takes temperature by name"):
        AttentionVariant(name="bad", score_mod=tempered)
    with pytest.raises(
        SpecError, match="takes 4 arguments; it must take score, b, h, q_idx, kv_idx"
    ):
        AttentionVariant(name="bad", score_mod=striped)
    tempered_spec = BASE.replace(variant="tempered")
    with pytest.raises(BatchError, match=r"input 'temperature' .*is missing"):
        run(tempered_spec, "TORCH_SDPA")
    with pytest.raises(SpecError, match=r"must be float32\[num_heads\]"):
        run(tempered_spec, "TORCH_SDPA", inputs={"temperature": torch.ones(3)})
    with pytest.raises(SpecError, match="doesn.t take"):
        run(BASE, "TORCH_SDPA", inputs={"temperature": torch.ones(4)})
    with pytest.raises(BatchError, match="mask is missing"):
        run(BASE.replace(mask="custom"), "TORCH_SDPA")
    with pytest.raises(BatchError, match="masks over new keys"):
        run(BASE.replace(mask="custom"), "TORCH_SDPA", mask=CustomMask(torch.ones(3).bool()))
    with pytest.raises(BatchError, match=r"the layer has mask=None.*replace\(mask='custom'\)"):
        run(BASE, "TORCH_SDPA", mask=CustomMask.tree([[-1] * n for n in LENS[0]]))
    with pytest.raises(BatchError, match=r"is torch.int64 of shape .*convert it, or declare"):
        run(BASE.replace(variant="documents"), "TORCH_SDPA",
            step={"document": torch.zeros(5, 40).long()})  # fmt: skip


def test_who_cannot_serve_says_so() -> None:
    with pytest.raises(SelectionError, match="variant: wanted a variant's functions"):
        select(BASE.replace(variant="capped"), backend="NATIVE_ATTN")
    with pytest.raises(SelectionError, match="custom_mask: wanted masks that a step brings"):
        select(BASE.replace(mask="custom"), backend="NATIVE_ATTN")
    chosen = dict(select(BASE.replace(variant="capped"), verify=False).decision.chosen)
    assert chosen["prefill"] == chosen["decode"] == "TORCH_SDPA"


def test_core_s_own_are_known() -> None:
    assert {"flash_sigmoid", "relative_bias", "vision_local"} <= set(variants())
