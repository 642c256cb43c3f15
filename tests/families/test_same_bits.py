"""Reinforcement learning: a trainer's log-probabilities have the bits that the engine sampled by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from defaults import CPU_DEFAULT
from polyattn import Attention, Batch, KVCache, LayerGroup, LayerSpec, RopeSpec, attention, select
from polyattn.errors import BatchError
from torch import Tensor
from torch.nn.functional import rms_norm, silu

pytestmark = pytest.mark.skipif(CPU_DEFAULT != "NATIVE_ATTN", reason="not built")
HEADS, KV_HEADS, SIZE, LAYERS, WORDS = 4, 2, 32, 2, 50
WIDTH = HEADS * SIZE
BLOCK, SEED = 16, 4
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""A layer's number, its queries, keys and values; the result, (tokens, HEADS, SIZE)."""


def by_row(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Apply an operator to one token at a time: what isn't attention has the same bits in any batch."""
    return torch.stack([function(row) for row in rows])


class Model:
    """A small decoder with random weights; `attend` is the attention that a caller brings."""

    def __init__(self, dtype: torch.dtype):
        self.dice = torch.Generator().manual_seed(SEED)
        heads = (HEADS + 2 * KV_HEADS) * SIZE
        self.words = self._weights(WORDS, WIDTH, dtype) * 12
        # Values count for more than a token's own embedding, so that a bit of attention's is seen.
        self.layers = [
            (self._weights(heads, WIDTH, dtype) * 2, self._weights(WIDTH, WIDTH, dtype) * 30)
            for _ in range(LAYERS)
        ]

    def _weights(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return (torch.randn(rows, columns, generator=self.dice) / columns**0.5).to(dtype)

    def __call__(self, tokens: Sequence[int], attend: Attend) -> Tensor:
        """Return log-probabilities of the next token, (tokens, WORDS), float32."""
        hidden = self.words[list(tokens)]
        for number, (to_heads, to_hidden) in enumerate(self.layers):

            def project(row: Tensor, weights: Tensor = to_heads) -> Tensor:
                return weights @ rms_norm(row, (WIDTH,))

            def join(row: Tensor, weights: Tensor = to_hidden) -> Tensor:
                return silu(weights @ row)

            mixed = by_row(project, hidden).view(len(hidden), -1, SIZE)
            query, key, value = mixed.split([HEADS, KV_HEADS, KV_HEADS], 1)
            seen = attend(number, query.contiguous(), key.contiguous(), value.contiguous())
            hidden = hidden + by_row(join, seen.reshape(len(hidden), WIDTH))

        def log_probabilities(row: Tensor) -> Tensor:
            return torch.log_softmax((self.words @ rms_norm(row, (WIDTH,))).float() / 8, 0)

        return by_row(log_probabilities, hidden)


class Engine:
    """Prompts in chunks of any length, decodes of any requests beside them, over a paged cache."""

    def __init__(self, model: Model, spec: LayerSpec, requests: int):
        self.model, self.group = model, LayerGroup(select(spec, "cpu"))
        self.layer = Attention(self.group)
        self.caches: list[KVCache] = [self.group.allocate_cache(128) for _ in range(LAYERS)]
        order = torch.randperm(128, generator=model.dice)[: requests * 20]
        self.table = order.view(requests, 20).int()

    def step(self, texts: Sequence[list[int]], pieces: Sequence[tuple[int, int, int]]) -> Tensor:
        """Run tokens `first` to `last` of some requests."""
        which = [request for request, _, _ in pieces]
        queries, lens = [b - a for _, a, b in pieces], [b for _, _, b in pieces]
        batch = Batch.from_lens(queries, lens, self.table[which], BLOCK)
        plan = self.group.plan(batch)
        assert {call.name for call in plan.calls} == {"NATIVE_ATTN"}

        def attend(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out = self.layer(query, key, value, self.caches[number], plan)
            assert isinstance(out, Tensor)
            return out

        return self.model([t for r, a, b in pieces for t in texts[r][a:b]], attend)


def generated(model: Model, spec: LayerSpec) -> tuple[list[list[int]], list[int], list[Tensor]]:
    """Return texts, how long their prompts are, and the log-probabilities of the sampled tokens."""
    texts = [
        torch.randint(0, WORDS, (n,), generator=model.dice).tolist() for n in (300, 3, 70, 1, 16)
    ]
    prompts = [len(text) for text in texts]
    engine = Engine(model, spec, len(texts))
    at, said = [0] * len(texts), [[] for _ in texts]  # type: ignore[var-annotated]
    while unfinished := [i for i, p in enumerate(prompts) if len(texts[i]) < p + 12]:
        some = [i for i in unfinished if torch.rand((), generator=model.dice) < 0.7] or unfinished[
            :1
        ]
        sizes = torch.randint(1, 90, (len(some),), generator=model.dice).tolist()
        pieces = [
            (i, at[i], min(len(texts[i]), at[i] + n)) for i, n in zip(some, sizes, strict=True)
        ]
        rows = engine.step(texts, pieces)
        end = 0
        for request, first, last in pieces:
            end += last - first
            at[request] = last
            if last == len(texts[request]):
                token = int(torch.multinomial(rows[end - 1].exp(), 1, generator=model.dice))
                texts[request].append(token)
                said[request].append(rows[end - 1, token])
    return texts, prompts, [torch.stack(each) for each in said]


def packed(model: Model, spec: LayerSpec, texts: list[list[int]]) -> list[Tensor]:
    """Return what a trainer computes: one forward of all texts, without a cache."""
    layer = Attention(LayerGroup(select(spec.replace(cached=False), "cpu")))
    lens = [len(text) for text in texts]
    plan = layer.group.plan(Batch.from_lens(lens, lens))
    assert {call.name for call in plan.calls} == {"NATIVE_ATTN"}

    def attend(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = layer(query, key, value, None, plan)
        assert isinstance(out, Tensor)
        return out

    return list(model([t for text in texts for t in text], attend).split(lens))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainer_s_log_probabilities_have_the_engine_s_bits(dtype: str) -> None:
    spec = LayerSpec(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=dtype, batch_invariant="calls"
    )
    model = Model(getattr(torch, dtype))
    texts, prompts, sampled = generated(model, spec)
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [1, 0]):
        rows = packed(model, spec, [texts[i] for i in order])
        for request, found in zip(order, rows, strict=True):
            first, text = prompts[request], torch.tensor(texts[request])
            own = found[first - 1 : -1].gather(1, text[first:, None])[:, 0]
            assert torch.equal(own, sampled[request]), f"request {request} of {order}"


@pytest.mark.parametrize("level", [True, "calls"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_call_without_a_layer_gives_a_sequence_its_bits(
    dtype: torch.dtype, level: bool | str
) -> None:
    """Packed with others, alone, and as a dense row; the second call of each goes by addresses."""
    dice, lens = torch.Generator().manual_seed(SEED), [37, 700, 1, 64]
    query, key, value = (
        torch.randn(sum(lens), heads, SIZE, generator=dice).to(dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    asked = {"causal": True, "return_lse": True, "batch_invariant": level}
    packed = [attention(query, key, value, query_lens=lens, **asked) for _ in range(2)]
    expected = packed[0]
    at = 0
    for length in lens:
        mine = slice(at, at + length)
        three = query[mine], key[mine], value[mine]
        for _ in range(2):
            for found in (
                attention(*three, query_lens=[length], **asked),
                [x[0] for x in attention(*(x[None] for x in three), **asked)],
            ):
                assert all(torch.equal(x, y[mine]) for x, y in zip(found, expected, strict=True))
        at += length
    assert all(torch.equal(x, y) for x, y in zip(*packed, strict=True))
    whole = query[None], key[None], value[None]
    mask = torch.ones(1, 1, at, at).bool()
    attention(*whole, mask=mask, batch_invariant="none")
    with pytest.raises(BatchError, match="batch_invariant=.*beside a mask"):
        attention(*whole, mask=mask, batch_invariant=level)


@pytest.mark.parametrize("stored", ["auto", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("store", ["NATIVE_STORE", "TORCH_STORE"])
def test_what_is_rotated_quantised_and_stored_has_the_same_bits(store: str, stored: str) -> None:
    """Of a request in a step of five and alone: its blocks, and what its rotated queries attend to."""
    spec = LayerSpec(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=48, kv_cache_dtype=stored,
        rope=RopeSpec(rotary_size=32), batch_invariant="batch",
    )  # fmt: skip
    group = LayerGroup(select(spec, "cpu", backend=f"store={store}"))
    scales = {"k_scale": 0.03, "v_scale": 0.02} if stored != "auto" else {}
    layer = Attention(group, rotate=True, **scales)
    assert group.selection.backend("store").name == store  # type: ignore[union-attr]
    dice, lens = torch.Generator().manual_seed(SEED), [37, 1, 16, 5, 90]
    given = [
        torch.randn(sum(lens), heads, 48, generator=dice).bfloat16()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    table = torch.randperm(30, generator=dice).view(5, 6).int()

    def step(cache: KVCache, some: list[int]) -> list[Tensor]:
        batch = Batch.from_lens(
            [lens[i] for i in some], [lens[i] for i in some], table[some], BLOCK
        )
        rows = (torch.cat([part.split(lens)[i] for i in some]) for part in given)
        out = layer(*rows, cache, group.plan(batch))
        assert isinstance(out, Tensor)
        return list(out.split([lens[i] for i in some]))

    whole, alone = (group.allocate_cache(30) for _ in range(2))
    for pages in (whole.key, whole.value, alone.key, alone.value):
        pages.view(torch.uint8).zero_()
    order = [3, 0, 4, 1, 2]
    for i, found in zip(order, step(whole, order), strict=True):
        assert torch.equal(step(alone, [i])[0], found), i
    for pages, its in ((whole.key, alone.key), (whole.value, alone.value)):
        assert pages.view(torch.uint8).any()
        assert torch.equal(pages.view(torch.uint8), its.view(torch.uint8))


@pytest.mark.parametrize("backend", ["NATIVE_MLA", "TORCH_MLA"])
def test_where_a_latent_context_is_cut_follows_from_no_other_request(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kit's case, with room for a few latents at a time: contexts in many pieces."""
    from polyattn import resolve_device
    from polyattn.conformance.checks.table import run_case
    from polyattn.conformance.derive import derive
    from polyattn.families.mla import planning
    from polyattn.registry.discovery import discover

    device = resolve_device("cpu")
    cases = derive(discover().backends[backend], device)
    case = next(c for c in cases if c.check == "regrouped" and c.spec.needs_lse)
    each = case.spec.num_heads * (case.spec.head_size + case.spec.v_head_size) * 4
    monkeypatch.setattr(planning, "EXPANDED_BYTES", 24 * each)
    run_case(case, backend, device, SEED)


def test_the_products_around_a_latent_layer_are_each_request_s_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By products whose bits follow from how many rows they have, as those of some BLAS do."""
    from polyattn import resolve_device
    from polyattn.conformance.checks import invariance
    from polyattn.conformance.checks.table import run_case
    from polyattn.conformance.derive import derive
    from polyattn.registry.discovery import discover

    device = resolve_device("cpu")
    cases = derive(discover().backends["TORCH_MLA"], device)
    case = next(c for c in cases if c.check == "regrouped" and c.spec.needs_lse)
    real, rows = {"bmm": torch.bmm, "einsum": torch.einsum}, set[int]()

    def by_rows(name: str, among: int) -> Callable[..., Tensor]:
        def product(*given: Any) -> Tensor:
            found = real[name](*given)
            if found.dtype == torch.float64:  # the reference's
                return found
            rows.add(count := found.shape[among])
            return found * (1 + 1e-6 * (count % 7))

        return product

    monkeypatch.setattr(invariance, "DRAWS", 6)
    monkeypatch.setattr(torch, "bmm", by_rows("bmm", 1))
    monkeypatch.setattr(torch, "einsum", by_rows("einsum", 0))
    run_case(case, "TORCH_MLA", device, SEED)
    assert len(rows) > 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [96, 2560])
def test_tokens_of_several_sequences_go_together_where_each_fills_vectors(
    width: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RG-LRU by torch, with and without room for all on one thread: the kit's cases, of other widths."""
    from dataclasses import replace

    from polyattn import resolve_device
    from polyattn.conformance.checks import invariance
    from polyattn.conformance.checks.table import run_case
    from polyattn.conformance.derive import derive
    from polyattn.registry.discovery import discover
    from polyattn_cpu import recurrent

    device, sizes = resolve_device("cpu"), []
    real = recurrent.TorchScan._tokens

    def tokens(self: Any, rows: list[int], *rest: Any) -> None:
        sizes.append(len(rows))
        real(self, rows, *rest)

    monkeypatch.setattr(recurrent.TorchScan, "_tokens", tokens)
    monkeypatch.setattr(recurrent, "ON_ONE_THREAD", 4 * width)
    monkeypatch.setattr(invariance, "DRAWS", 6)
    for case in derive(discover().backends["TORCH_SCAN"], device):
        if case.check in ("regrouped", "divided") and case.spec.kind == "rg_lru":
            spec = case.spec.replace(num_heads=width, num_kv_heads=width, dtype=dtype)
            if case.check == "divided":
                spec = spec.replace(dtype="float32")
            run_case(replace(case, spec=spec), "TORCH_SCAN", device, SEED)
    assert max(sizes) == 4
