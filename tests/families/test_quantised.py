"""Queries, keys, values and outputs in 8 bits: beside torch's own attention on what they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from polyattn import Attention, Batch, KVCache, LayerGroup, LayerSpec, select
from polyattn.errors import BatchError, SelectionError, SpecError
from polyattn.workload.base import workload
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

E4M3 = torch.float8_e4m3fn
SPEC = LayerSpec(
    num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", kv_cache_dtype="fp8", qkv_dtype="fp8",
    block_size=16,
)  # fmt: skip
TABLE = torch.tensor([[1, 0], [2, 3], [4, 0]], dtype=torch.int32)
SERVING = pytest.mark.parametrize("backend", ["TORCH_SDPA", "VANILLA"])


def layer_of(spec: LayerSpec, backend: str = "TORCH_SDPA", **more: Any) -> Attention:
    return Attention(LayerGroup(select(spec, "cpu", backend=backend)), checks=True, **more)


def fused(tokens: int, seed: int = 0) -> Tensor:
    """A projection's rows, (tokens, (4 + 2 * 2) * 32), quantised as it would leave them."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(tokens, 8 * 32, generator=generator) * 2).to(E4M3)


def exact(rows: Tensor, scales: tuple[Any, Any, Any]) -> list[Tensor]:
    """What fused rows stand for, float64: (tokens, heads, 32) each of query, key, value."""
    parts = rows.double().unflatten(1, (8, 32)).split([4, 2, 2], dim=1)
    found = []
    for part, scale in zip(parts, scales, strict=True):
        each = torch.as_tensor(scale, dtype=torch.float64).reshape(-1)
        found.append(part * each.repeat_interleave(part.shape[1] // len(each))[:, None])
    return found


def by_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One sequence's causal attention in float64, by torch."""
    return scaled_dot_product_attention(
        *(t.transpose(0, 1)[None] for t in (query, key, value)), is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)


def run(layer: Attention, lens: list[int], rows: Tensor, **more: Any) -> tuple[Any, KVCache]:
    cache = layer.group.allocate_cache(5)
    cache.key.view(torch.uint8).fill_(0x7F)
    cache.value.view(torch.uint8).fill_(0x7F)
    batch = Batch.from_lens(lens, lens, TABLE[: len(lens)], 16)
    return layer(rows, None, None, cache, batch, **more), cache


def test_fp8_is_what_engines_call_e4m3() -> None:
    assert SPEC.kv_cache_dtype == SPEC.qkv_dtype == "fp8_e4m3"
    assert LayerSpec.from_json(SPEC.to_json()) == SPEC
    assert "fp8_inputs" in SPEC.features
    assert "fp8_output" in SPEC.replace(out_dtype="fp8").features


@SERVING
@pytest.mark.parametrize("scales", ["number", "tensor", "head"])
def test_a_quantised_projection_is_attended_to_and_stored_as_it_is(
    backend: str, scales: str
) -> None:
    given: dict[str, Any] = {"q_scale": 0.5, "k_scale": 0.25, "v_scale": 2.0}
    if scales == "tensor":
        given = {name: torch.tensor(value) for name, value in given.items()}
    elif scales == "head":
        given = {name: torch.tensor([value, value * 1.5]) for name, value in given.items()}
    layer = layer_of(SPEC.replace(scales=scales), backend, **given)
    rows, lens = fused(24), [5, 18, 1]  # a decode stands last, beside two prompts
    out, cache = run(layer, lens, rows)
    parts = exact(rows, tuple(given.values()))
    expected = torch.cat([by_torch(*p) for p in zip(*(t.split(lens) for t in parts), strict=True)])
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)
    assert out.dtype == torch.float32
    keys = rows.view(torch.uint8).unflatten(1, (8, 32))[:, 4:6]
    assert torch.equal(cache.key.view(torch.uint8)[1, :5], keys[:5])
    assert torch.equal(cache.key.view(torch.uint8)[3, :2], keys[21:23])


@SERVING
def test_decodes_between_prompts_are_gathered(backend: str) -> None:
    """Rows that lie apart are copied together: indexing knows no 8-bit floats everywhere."""
    layer = layer_of(SPEC.replace(out_dtype="fp8"), backend, out_scale=0.02)
    rows, lens = fused(20), [1, 18, 1]
    out, _ = run(layer, lens, rows)
    parts = exact(rows, (1.0, 1.0, 1.0))
    expected = torch.cat([by_torch(*p) for p in zip(*(t.split(lens) for t in parts), strict=True)])
    assert out.dtype == E4M3
    rounded = (expected / 0.02).float().clamp(-448, 448)
    assert ((out.float() - rounded).abs() <= 0.0626 * rounded.abs() + 2**-9).all()


@SERVING
@pytest.mark.parametrize("scale", [1.0, torch.tensor(0.5)])
def test_an_output_in_e4m3_saturates(backend: str, scale: Any) -> None:
    scales = "tensor" if isinstance(scale, Tensor) else "number"
    spec = SPEC.replace(out_dtype="fp8", scales=scales)
    layer = layer_of(spec, backend, v_scale=torch.tensor(300.0) if scales == "tensor" else 300.0,
                     out_scale=scale)  # fmt: skip
    rows = fused(1)
    out, _ = run(layer, [1], rows)  # one key: the output is its value
    value = exact(rows, (1.0, 1.0, 300.0))[2].repeat_interleave(2, 1) / float(scale)
    assert torch.equal(out.float(), value.float().clamp(-448, 448).to(E4M3).float())
    assert out.float().abs().max() == 448


@SERVING
def test_the_kit_expects_an_output_to_saturate(backend: str) -> None:
    """Sums of 1,000 values by sigmoids leave e4m3's range at a scale for values near 1."""
    spec = SPEC.replace(out_dtype="fp8", variant="flash_sigmoid")
    step: Any = workload(LayerGroup(select(spec, "cpu", backend=backend)), [(9, 1000)])
    step.check()
    assert step.out.float().abs().max() == 448


def test_numbers_may_be_assigned_anew() -> None:
    layer, rows = layer_of(SPEC), fused(1)
    first, _ = run(layer, [1], rows)
    layer.v_scale = 4.0
    assert layer.v_scale == 4.0
    second, _ = run(layer, [1], rows)
    assert torch.equal(second, 4 * first)
    with pytest.raises(SpecError, match=r"v_scale=0\.0 must be a positive number"):
        layer.v_scale = 0.0
    assert layer.v_scale == 4.0
    with pytest.raises(SpecError, match="out_scale=2.0 scales"):
        layer.out_scale = 2.0


def test_what_is_written_into_a_tensor_counts_for_the_next_step() -> None:
    scale = torch.tensor([1.0, 1.0])
    layer, rows = layer_of(SPEC.replace(scales="head"), v_scale=scale), fused(1)
    first, _ = run(layer, [1], rows)
    scale.copy_(torch.tensor([2.0, 8.0]))
    second, _ = run(layer, [1], rows)
    assert torch.equal(second, first * torch.tensor([2.0, 2.0, 8.0, 8.0])[None, :, None])
    layer.v_scale = torch.tensor([3.0, 3.0])  # another tensor in its place
    third, _ = run(layer, [1], rows)
    torch.testing.assert_close(third, 3 * first)


@pytest.mark.parametrize("scales", ["number", "tensor", "head"])
def test_a_scale_is_read_as_it_is_assigned(scales: str) -> None:
    layer, rows = layer_of(SPEC.replace(scales=scales)), fused(1)
    first, _ = run(layer, [1], rows)
    layer.v_scale = 2 * layer.v_scale
    second, _ = run(layer, [1], rows)
    torch.testing.assert_close(second, 2 * first)


@pytest.mark.parametrize(("scales", "remedy"), [("number", "scales='tensor'"), ("tensor", "write")])
def test_a_captured_graph_keeps_no_scale_that_was_replaced(
    scales: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the number, or the tensor's address: replacing either would change nothing, in silence."""
    from polyattn.families.attention import layer as module

    layer = layer_of(SPEC.replace(scales=scales))
    monkeypatch.setattr(layer, "_seals", True)  # as of a spec whose steps are captured
    layer.v_scale = 2.0
    monkeypatch.setattr(module, "capturing", lambda tensor: True)
    run(layer, [1], fused(1))
    with pytest.raises(
        SpecError, match=f"v_scale is replaced after a graph was captured.*{remedy}"
    ):
        layer.v_scale = 4.0
    assert float(layer.params.v_scale if scales == "number" else layer.params.v_scale[0]) == 2.0


def test_a_tensor_of_another_dtype_is_followed_too() -> None:
    scale = torch.tensor(1.0, dtype=torch.float64)
    layer, rows = layer_of(SPEC.replace(scales="tensor"), v_scale=scale), fused(1)
    first, _ = run(layer, [1], rows)
    scale.fill_(2.0)
    assert torch.equal(run(layer, [1], rows)[0], 2 * first)


@pytest.mark.parametrize("changes", [{}, {"qkv_dtype": "auto", "kv_cache_dtype": "auto"}])
def test_outputs_may_be_rows_as_inputs_are(changes: dict[str, Any]) -> None:
    layer, rows = layer_of(SPEC.replace(needs_lse=True, **changes)), fused(5)
    rows = rows if not changes else rows.float()
    (first, lse), _ = run(layer, [5], rows)
    out = torch.full((7, 128), 7.0)
    (second, lse_again), _ = run(layer, [5], rows, out=out[1:-1])
    assert second.data_ptr() == out[1:].data_ptr() and second.shape == (5, 128)
    assert torch.equal(second.view(5, 4, 32), first) and torch.equal(lse, lse_again)
    assert (out[0] == 7).all() and (out[-1] == 7).all()
    with pytest.raises(BatchError, match="out has rows of 64 elements"):
        run(layer, [5], rows, out=torch.empty(5, 64))


def test_what_was_quantised_is_rotated_with_its_bias_as_what_it_stands_for() -> None:
    """Query, key and value leave 8 bits for the rotation; keys and values return to them."""
    from polyattn.spec.rope import RopeSpec

    spec = SPEC.replace(rope=RopeSpec(rotary_size=32))
    bias = torch.randn(8 * 32, generator=torch.Generator().manual_seed(3))
    given = {"q_scale": 0.5, "k_scale": 0.25, "v_scale": 2.0}
    layer = layer_of(spec, rotate=True, qkv_bias=bias, **given)
    plain = layer_of(
        spec.replace(qkv_dtype="auto"), rotate=True, qkv_bias=bias, k_scale=0.25, v_scale=2.0
    )
    rows = fused(9)
    out, cache = run(layer, [9], rows)
    same = torch.cat([p.flatten(1) for p in exact(rows, (0.5, 0.25, 2.0))], 1).float()
    expected, wanted = run(plain, [9], same)
    torch.testing.assert_close(out, expected)
    assert torch.equal(cache.key.view(torch.uint8)[1, :9], wanted.key.view(torch.uint8)[1, :9])


def test_keys_given_whole_may_be_quantised() -> None:
    """An encoder's, whose queries, keys and values all come from one quantised projection."""
    spec = LayerSpec(
        num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", qkv_dtype="fp8", cached=False,
        causal=False, role="encoder_only",
    )  # fmt: skip
    rows = fused(12)
    for backend in ("TORCH_SDPA", "VANILLA"):
        layer = layer_of(spec, backend, q_scale=0.5, k_scale=0.25, v_scale=2.0)
        out = layer(rows, None, None, None, Batch.from_lens([7, 5], [7, 5]))
        for at in (slice(0, 7), slice(7, 12)):
            q, k, v = (t[at].transpose(0, 1)[None] for t in exact(rows, (0.5, 0.25, 2.0)))
            found = scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)
            torch.testing.assert_close(out[at].double(), found, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_cache_dtype": "auto"}, "needs kv_cache_dtype='fp8_e4m3', not 'auto'"),
        ({"kv_cache_dtype": "int8"}, "needs kv_cache_dtype='fp8_e4m3', not 'int8'"),
        ({"qkv_dtype": "fp8_e5m2"}, "qkv_dtype='fp8_e5m2' is unknown"),
        ({"out_dtype": "int8"}, "out_dtype='int8' is unknown"),
        ({"scales": "row"}, "scales='row' is unknown"),
        (
            {"scales": "head", "qkv_dtype": "auto", "kv_cache_dtype": "auto"},
            "scales='head': nothing is quantised",
        ),
    ],
)
def test_what_means_nothing_is_refused(changes: dict[str, str], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        SPEC.replace(**changes)
    assert said in str(caught.value)


def test_scales_that_do_not_fit_are_refused() -> None:
    for scales, name, value, said in (
        ("number", "k_scale", torch.tensor(1.0), "the spec has scales='number'"),
        ("tensor", "k_scale", torch.ones(2), r"k_scale has shape (2,); with scales='tensor'"),
        ("head", "k_scale", torch.ones(3), r"must be (2,), one a KV head"),
        ("head", "out_scale", torch.ones(1), "scales nothing of this layer"),
        ("tensor", "q_scale", torch.tensor(1), "must be a floating-point tensor"),
    ):
        with pytest.raises(SpecError) as caught:
            layer_of(SPEC.replace(scales=scales), **{name: value})
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({}, "fp8_inputs"),
        ({"qkv_dtype": "auto", "out_dtype": "fp8"}, "fp8_output"),
        ({"qkv_dtype": "auto", "scales": "tensor"}, "tensor_scales"),
        ({"qkv_dtype": "auto", "scales": "head"}, "head_scales"),
    ],
)
def test_who_does_not_claim_it_is_refused_by_name(changes: dict[str, str], feature: str) -> None:
    spec = SPEC.replace(**changes)
    for device, backend in (("cpu", "NATIVE_ATTN"), ("h200", "FLASH_ATTN"), ("gaudi3", "HPU_ATTN")):
        with pytest.raises(SelectionError, match=f"{feature}: wanted"):
            select(spec, device, backend=backend)
    chosen = dict(select(spec.replace(dtype="bfloat16"), "h200").decision.chosen)
    assert chosen["prefill"] == chosen["decode"] == "TRITON_ATTN"
    assert chosen["store"] == "TRITON_STORE"


def test_queries_in_fnuz_are_refused() -> None:
    with pytest.raises(SelectionError, match="fp8 format: wanted ocp"):
        select(SPEC.replace(dtype="bfloat16"), "mi300x")
