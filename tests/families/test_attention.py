"""Is the reference right, does merging states lose nothing, and what do queries without keys give?"""

from __future__ import annotations

from typing import Any

import polyattn
import pytest
import torch
from devices import everywhere
from hypothesis import given, settings
from hypothesis import strategies as st
from polyattn import (
    AttentionState,
    Batch,
    LayerGroup,
    LayerSpec,
    discover,
    merge_states,
    resolve_device,
    select,
)
from polyattn.conformance.harness.base import Harness
from polyattn.errors import SpecError
from polyattn.families.attention import reference
from polyattn.registry.capabilities import SERVICES
from polyattn.spec.kinds import AttentionKind
from polyattn.workload.base import workload
from polyattn.workload.compare import output_error
from polyattn.workload.tolerance import tolerance_of

DEVICE = resolve_device("cpu")
# FLEX_ATTENTION compiles for ten seconds a layer: the conformance kit has it, with fewer cases.
BACKENDS = [
    b
    for b in discover().backends.values()
    if "cpu" in b.capabilities.platforms
    and AttentionKind.ATTENTION in b.capabilities.kinds
    and not b.capabilities.phases & SERVICES
    and b.name != "FLEX_ATTENTION"
]


@settings(max_examples=50, deadline=None)
@given(
    parts=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    seed=st.integers(0, 2**30),
    order=st.randoms(),
)
def test_merge_is_attention_over_all_keys(parts: list[int], seed: int, order: object) -> None:
    """Associative, commutative, and equal to attending once over everything."""
    generator = torch.Generator().manual_seed(seed)
    spec = LayerSpec(num_heads=2, head_size=8, causal=False)
    query = torch.randn(3, 2, 8, generator=generator, dtype=torch.float64)
    keys = torch.randn(sum(parts), 2, 8, generator=generator, dtype=torch.float64)
    values = torch.randn(sum(parts), 2, 8, generator=generator, dtype=torch.float64)
    states = [
        AttentionState(*reference.attend(spec, query, k, v))
        for k, v in zip(keys.split(parts), values.split(parts), strict=True)
    ]
    expected = AttentionState(*reference.attend(spec, query, keys, values))
    shuffled = sorted(states, key=lambda _: order.random())  # type: ignore[attr-defined]
    left = shuffled[0]
    for state in shuffled[1:]:
        left = left.merge(state)
    nothing = AttentionState(torch.zeros_like(left.output), torch.full_like(left.lse, -torch.inf))
    for merged in (merge_states(states), left, nothing.merge(left)):
        torch.testing.assert_close(merged.output, expected.output)
        torch.testing.assert_close(merged.lse, expected.lse)


def test_reference_against_textbook_softmax() -> None:
    """The oracle itself, against `softmax(QK^T)V` written in one line."""
    spec = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16)
    q, k, v = torch.randn(5, 4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    k4, v4 = (t.double().repeat_interleave(2, 1).transpose(0, 1) for t in (k, v))
    mask = torch.ones(5, 9).tril(diagonal=4).bool()
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double().transpose(0, 1)[None], k4[None], v4[None], attn_mask=mask
    )[0].transpose(0, 1)
    torch.testing.assert_close(reference.attend(spec, q, k, v)[0], expected)


@pytest.mark.parametrize(
    ("changes", "seen_by_last_but_one"),
    [
        # six keys; the query at position 4 sees…
        ({}, [0, 1, 2, 3, 4]),
        ({"causal": False}, [0, 1, 2, 3, 4, 5]),
        ({"sliding_window": 1}, [4]),
        ({"sliding_window": 3}, [2, 3, 4]),
        ({"sliding_window": 2, "causal": False}, [3, 4, 5]),
        ({"sliding_window": 2, "sink_tokens": 1}, [0, 3, 4]),
        ({"chunk_size": 4}, [4]),
        ({"chunk_size": 3}, [3, 4]),
    ],
)
def test_masks(changes: dict[str, object], seen_by_last_but_one: list[int]) -> None:
    spec = LayerSpec(**({"num_heads": 1, "head_size": 8} | changes))  # type: ignore[arg-type]
    mask = reference.visible(spec, 2, 6)
    assert mask[0].nonzero().flatten().tolist() == seen_by_last_but_one


def test_a_query_that_sees_nothing() -> None:
    spec = LayerSpec(num_heads=2, head_size=8)
    out, lse = reference.attend(
        spec, torch.randn(1, 2, 8), torch.randn(0, 2, 8), torch.randn(0, 2, 8)
    )
    assert torch.equal(out, torch.zeros_like(out)) and bool((lse == -torch.inf).all())


@pytest.mark.parametrize(
    ("backend", "changes"),
    [
        pytest.param(b.name, changes, id=f"{b.name}-{how}")
        for b in BACKENDS
        for how, changes in (("fused", {}), ("by hand", {"logit_soft_cap": 5.0}))
        if False in b.capabilities.cached and b.capabilities.features >= {*changes}
    ],
)
def test_queries_beyond_the_window_of_all_keys_see_nothing(
    backend: str, changes: dict[str, Any]
) -> None:
    """More queries than keys, no causal mask: who sees none gets output 0 and LSE -inf, on every path."""
    spec = LayerSpec(
        num_heads=4, num_kv_heads=2, head_size=64, dtype="float32", cached=False, causal=False,
        sliding_window=3, needs_lse=True, **changes,
    )  # fmt: skip
    harness = Harness(backend, DEVICE, 4)
    layer = harness.layer(spec)
    for step in ([(9, 2)], [(6, 1), (1, 1), (5, 0), (40, 33)]):
        out = harness.step(layer, step).check()
        assert not out[: step[0][0] - step[0][1] - 2].any()


def test_alibi_slopes_are_the_papers() -> None:
    from polyattn.families.attention.alibi import alibi_slopes

    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert len(alibi_slopes(12)) == 12 and alibi_slopes(12)[8] == pytest.approx(2**-0.5)


def test_decodes_need_not_come_first() -> None:
    """The order of a batch changes speed, never the result."""
    harness = Harness("TORCH_SDPA", DEVICE, 3)
    layer = harness.layer(LayerSpec(num_heads=4, head_size=16, dtype="float32"))
    harness.step(layer, [(5, 9), (1, 30), (0, 3), (1, 1), (7, 7)]).check()


def test_batch_from_tensors_equals_batch_from_lists() -> None:
    table = torch.zeros(2, 4, dtype=torch.int32)
    lists = Batch([0, 1, 4], [9, 5], table)
    tensors = Batch(
        torch.tensor([0, 1, 4], dtype=torch.int32), torch.tensor([9, 5], dtype=torch.int32), table
    )
    assert (lists.starts, lists.lens) == (tensors.starts, tensors.lens)
    assert torch.equal(lists.query_start_loc, tensors.query_start_loc)
    with pytest.raises(SpecError):
        LayerSpec(num_heads=1, head_size=0)


def test_a_long_prefill_s_scores_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a soft cap the scores are made in memory: never more at a time than SCORES."""
    import polyattn_cpu.sdpa as sdpa

    sizes, real = [], sdpa.TorchSDPA._attend

    def counted(self: Any, query: torch.Tensor, keys: torch.Tensor, *rest: Any) -> Any:
        sizes.append(query.shape[0] * query.shape[1] * keys.shape[1])
        return real(self, query, keys, *rest)

    monkeypatch.setattr(sdpa, "SCORES", 1 << 14)
    monkeypatch.setattr(sdpa.TorchSDPA, "_attend", counted)
    spec = LayerSpec(num_heads=8, num_kv_heads=2, head_size=8, dtype="float32", logit_soft_cap=5.0)
    harness = Harness("TORCH_SDPA", DEVICE, 1)
    layer = harness.layer(spec)
    harness.step(layer, [(300, 700)]).check()
    assert max(sizes) <= 1 << 14 and len(sizes) > 300 * 700 * 8 >> 15


def test_a_sink_is_no_key() -> None:
    """Of 9 queries at -6 to 2 over 3 keys, the window from its own to 2 on: 4 see none."""
    query, key = torch.randn(9, 2, 16), torch.randn(3, 2, 16)
    out, lse = polyattn.attention(
        query, key, key, sliding_window=1, window_right=2, sinks=torch.tensor([0.3, -torch.inf]),
        query_lens=[9], key_lens=[3], return_lse=True, backend="TORCH_SDPA",
    )  # fmt: skip
    assert bool((lse[:4] == -torch.inf).all()) and bool(lse[4:].isfinite().all())
    assert bool((out[:4] == 0).all()) and bool((out[4:] != 0).any(-1).all())


@everywhere("NATIVE_ATTN TORCH_SDPA", "TRITON_ATTN TORCH_SDPA")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("lengths", [[(1, 300), (1, 1000)], [(3, 300)], [(300, 300), (90, 700)]])
def test_huge_logits_leave_one_key(
    device: str, backend: str, dtype: str, lengths: list[tuple[int, int]]
) -> None:
    """Of logits near 10^9 one is larger than all others by far more than float32 rounds."""
    spec = LayerSpec(num_heads=8, num_kv_heads=2, head_size=128, dtype=dtype)
    work: Any = workload(LayerGroup(select(spec, device, backend=backend)), lengths)
    factor = (1e9 / spec.scale / spec.head_size) ** 0.5
    for tensor in (work.query, work.key, work.cache.key):
        tensor *= factor if dtype != "float16" else 3e3
    work.expected = reference.forward(
        spec, work.query, None, None, work.held, work.batch, work.layer.params
    )
    assert output_error(work.run(), work.expected[0]) <= tolerance_of(spec).output
