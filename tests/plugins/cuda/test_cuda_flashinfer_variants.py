"""FlashInfer's JIT declarations, compiled for the host, and custom masks, beside the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from builds import CPU, HALF, SMALL
from polyattn import (
    AttentionVariant,
    Batch,
    BlockSparseMask,
    CustomMask,
    LayerSpec,
    register_variant,
    unregister_variant,
)
from polyattn.families.attention import reference
from polyattn.kernel import CacheFormat, Frame, KVCache, LayerParams
from polyattn.runtime.functions.variants import t5_buckets
from polyattn.workload.compare import lse_error, output_error
from polyattn.workload.pages import fill
from torch import Tensor

pytest.importorskip("triton")

LENS = ([3, 1, 0, 20, 1], [19, 7, 3, 20, 33])
DECODES = ([1] * 5, [19, 7, 3, 20, 33])
SPEC = SMALL.replace(needs_lse=False, num_heads=4)


def everything(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *, table: Tensor) -> Tensor:
    """Most operations at once, on floats, integers and truths."""
    far = torch.clamp(k - q, -4, 7) // 3
    found = torch.where((far % 2 == 0) & (h != 1), torch.tanh(s) + 0.5 * torch.abs(s), -s)
    found = found + table[far, b] + torch.exp(-torch.abs(s)) + torch.sigmoid(s) ** 2
    kept = torch.clamp(torch.where(k % 3 == 1, torch.nan, s), -1.0, 1.0)  # NaN stays NaN
    found = torch.where(kept == kept, found, -found)
    return torch.maximum(found, torch.sqrt(1.0 + s * s)) - torch.log(2.0 + k.to(torch.float32))


def same(b: Tensor, h: Tensor, q: Tensor, k: Tensor, *, document: Tensor) -> Tensor:
    return (document[b, q] == document[b, k]) & ~((k + h) % 5 == 4)


VARIANTS = (
    AttentionVariant(name="everything", score_mod=everything, inputs={"table": "float32[*, num_seqs]"}),
    AttentionVariant(name="same", mask_mod=same, inputs={"document": "int32[num_seqs, *]"}),
)  # fmt: skip
INPUTS: dict[str, dict[str, Any]] = {
    "everything": {"table": torch.linspace(-1, 1, 40).view(8, 5)},
    "same": {"document": (torch.arange(5 * 40) // 7 % 3).int().view(5, 40)},
    "flash_sigmoid": {"sigmoid_bias": torch.tensor(-2.0)},
    "relative_bias": {"bias": torch.randn(32, 4, generator=torch.Generator().manual_seed(0)),
                      "bucket_of_distance": t5_buckets(bidirectional=False)},
}  # fmt: skip


@pytest.fixture(autouse=True)
def registered(fakes: None) -> Iterator[None]:
    for variant in VARIANTS:
        register_variant(variant)
    yield
    for variant in VARIANTS:
        unregister_variant(variant.name)


def check(spec: LayerSpec, lens: Any = LENS, inputs: Any = None, mask: Any = None) -> None:
    from polyattn_cuda.flashinfer import FlashInferAttention

    generator = torch.Generator().manual_seed(2)
    form = CacheFormat(
        block_size=8, num_kv_heads=2, head_size=64, v_head_size=64, dtype="float16"
    )  # fmt: skip
    cache = KVCache.allocate(form, 25, torch.device("cpu"))
    fill(cache, generator)
    table = torch.randperm(25, generator=generator).int().view(5, 5)
    batch = Batch.from_lens(*lens, table, 8, mask=mask, inputs=inputs)
    params = LayerParams()
    query, key, value = (
        torch.randn(batch.num_tokens, n, 64, generator=generator).half() for n in (4, 2, 2)
    )
    for index in range(batch.num_tokens):  # the step's own keys are stored already
        slot = int(batch.slot_mapping[index])  # type: ignore[index]
        for stored, new in ((cache.key, key), (cache.value, value)):
            stored[slot // 8, slot % 8] = new[index]
    backend = FlashInferAttention(spec, form, CPU)
    backend.prepare(("prefill", "decode"))
    out = torch.full((batch.num_tokens, 4, 64), torch.nan).half()
    lse = torch.full(out.shape[:2], torch.nan) if spec.needs_lse else None
    backend.run(backend.plan(batch), Frame(query, key, value, cache, params, out, lse))
    expected, expected_lse = reference.forward(spec, query, None, None, cache, batch, params)
    assert output_error(out, expected) < HALF
    assert lse is None or lse_error(lse, expected_lse) < HALF
    plain, _ = reference.forward(
        spec.replace(variant=None, mask=None), query, None, None, cache, batch, params
    )
    assert output_error(plain, expected) > HALF


@pytest.mark.parametrize("lens", [LENS, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize("name", INPUTS)
def test_generated_functions(name: str, lens: Any) -> None:
    check(SPEC.replace(variant=name), lens, INPUTS[name])


def test_beside_the_spec_s_own() -> None:
    spec = SPEC.replace(variant="everything", logit_soft_cap=2.0, sliding_window=9)
    check(spec, LENS, INPUTS["everything"])


def test_a_source_by_hand() -> None:
    """An error function, which isn't generated; and one that lies is as wrong as it says."""
    from written_by_hand import HONEST, LYING, given

    for variant in (HONEST, LYING):
        register_variant(variant)
    try:
        for lens in (LENS, DECODES):
            check(SPEC.replace(variant="bent"), lens, given(5))
        with pytest.raises(AssertionError):
            check(SPEC.replace(variant="bent_lie"), LENS, given(5))
    finally:
        for variant in (HONEST, LYING):
            unregister_variant(variant.name)


def masks() -> dict[str, tuple[LayerSpec, Any, Any]]:
    generator = torch.Generator().manual_seed(5)
    bits = [torch.rand(q, n, generator=generator) < 0.4 for q, n in zip(*LENS, strict=True)]
    packed = CustomMask.pack(bits, "all")
    tree = CustomMask.tree(
        [[-1, 0, 0], [-1], [], [n // 2 - 1 if n > 1 else n - 1 for n in range(20)], [-1]]
    )
    custom, blocks = SPEC.replace(mask="custom", needs_lse=True), SPEC.replace(mask="block_sparse")
    return {
        "tree": (custom, tree, LENS),
        "any": (custom.replace(causal=False), packed, LENS),
        "any, window": (custom.replace(sliding_window=9), packed, LENS),
        "blocks": (blocks, BlockSparseMask.of(packed, *LENS, (4, 3)), LENS),
        "pages": (blocks, BlockSparseMask.of_pages([[0, 2], [0], [], [1], [4, 1]], 8), DECODES),
        "parts of pages": (blocks, BlockSparseMask.of_pages([[0, 2], [0], [], [1], [4, 1]], 4), DECODES),
    }  # fmt: skip


@pytest.mark.parametrize("name", masks())
def test_step_masks(name: str) -> None:
    spec, mask, lens = masks()[name]
    check(spec, lens, mask=mask)


def test_a_function_beside_a_step_s_mask() -> None:
    spec, mask, lens = masks()["any"]
    spec = spec.replace(variant="relative_bias", needs_lse=False)
    check(spec, lens, INPUTS["relative_bias"], mask)


def test_chosen_pages_are_all_that_is_read() -> None:
    from polyattn_cuda.flashinfer import FlashInferAttention

    spec, mask, lens = masks()["pages"]
    form = CacheFormat(
        block_size=8, num_kv_heads=2, head_size=64, v_head_size=64, dtype="float16"
    )  # fmt: skip
    table = torch.arange(25).int().view(5, 5)
    plan = FlashInferAttention(spec, form, CPU).plan(
        Batch.from_lens(*lens, table, 8, mask=mask)
    )  # fmt: skip
    assert plan.lease.wrapper.planned["indices"].tolist() == [0, 2, 5, 16, 21, 24]
