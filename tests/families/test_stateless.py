"""What does a call that keeps nothing cost? One look-up, and the same operators for many sequences."""

from __future__ import annotations

from typing import Any

import polyattn
import pytest
import torch
from devices import DEVICES
from polyattn import Attention, Batch, Invariance, KVCache, LayerGroup, LayerSpec, Recurrent
from polyattn.calls.bound import BoundCall
from polyattn.calls.memo import memo
from polyattn.calls.recurrence import recurrence
from polyattn.errors import BatchError, CacheError, SpecError
from polyattn.host import CallOptions, PackedKeys, attend_packed, sdpa
from polyattn.spec.recurrent import RecurrentSpec
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch_operators import Operators

HEADS, SIZE = 4, 16


def operators(call: Any) -> int:
    """Return how many of torch's operators a call runs."""
    names: list[str] = []
    with torch.no_grad(), Operators(lambda name, *_: names.append(name)):
        call()
    return len(names)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_a_way_of_calling_is_looked_up(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call makes no spec, no batch and no plan, whatever its tensors hold."""
    memo.clear()
    asked: dict[str, Any] = {"causal": True, "query_lens": (3, 5)} if packed else {"causal": True}

    def call() -> Tensor:
        shape = (8, HEADS, SIZE) if packed else (2, 4, HEADS, SIZE)
        torch.manual_seed(0)
        return polyattn.attention(*(torch.randn(shape) for _ in range(3)), **asked)  # type: ignore[return-value]

    with torch.no_grad():
        wanted = call()

    def made(*given: Any, **named: Any) -> None:
        raise AssertionError("made anew")

    monkeypatch.setattr(LayerSpec, "__post_init__", made)
    monkeypatch.setattr(Batch, "__init__", made)
    monkeypatch.setattr(LayerGroup, "plan", made)
    with torch.no_grad():
        assert torch.equal(call(), wanted)


def test_decodes_of_many_sequences_are_one_call() -> None:
    """On a CPU the work of torch's operators doesn't grow with the sequences."""
    spec = LayerSpec(num_heads=HEADS, head_size=SIZE, dtype="float32", block_size=16)
    layer = polyattn.Attention(LayerGroup(polyattn.select(spec, "cpu", backend="NATIVE_ATTN")))

    def decode(rows: int) -> int:
        cache = layer.group.allocate_cache(rows)
        cache.key.zero_()
        cache.value.zero_()
        table = torch.arange(rows, dtype=torch.int32)[:, None]
        plan = layer.group.plan(Batch.from_lens([1] * rows, [9] * rows, table, 16))
        assert len(plan.calls) == 1
        tokens = [torch.randn(rows, HEADS, SIZE) for _ in range(3)]
        return operators(lambda: layer(*tokens, cache, plan))

    assert decode(32) == decode(1) <= 4


def test_a_batch_of_lengths_makes_no_tensors() -> None:
    assert operators(lambda: Batch.from_lens([1] * 64, [9] * 64)) == 0


def test_a_scale_of_nothing_is_refused() -> None:
    """0 is the default of a spec's field, and here one that was asked for."""
    query = torch.randn(1, 3, 2, 8)
    with pytest.raises(BatchError, match="scale=0"):
        polyattn.attention(query, query, query, scale=0.0)
    for scale in ("", torch.ones(2)):
        with pytest.raises(SpecError, match="scale=.* must be a positive number"):
            polyattn.attention(query, query, query, scale=scale)  # type: ignore[arg-type]


Q, K = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 2, 8)
FLAT = torch.randn(6, 2, 8)
UNSEEN = torch.tensor([True, False, True])[None, None, None]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"query": Q.numpy()}, r"query is an array of shape \(2, 3, 4, 8\) and must be a tensor; torch"),
        ({"query": Q.tolist()}, r"query=\[\[\[\[.*… must be a tensor; torch.as_tensor makes one"),
        ({"query": None}, "query=None must be a tensor"),
        ({"key": K.numpy()}, "key is an array of shape"),
        ({"key": None}, "key=None must be a tensor"),
        ({"value": K.numpy()}, "value is an array of shape"),
        ({"value": [1]}, r"value=\[1\] must be a tensor"),
        ({"query": FLAT, "key": FLAT.numpy(), "query_lens": [6]}, "key is an array of shape"),
        ({"query": FLAT, "key": FLAT, "value": None, "query_lens": [6]}, "value=None must be"),
        ({"mask": UNSEEN.numpy()}, r"mask is an array of shape \(1, 1, 1, 3\)"),
        ({"sinks": [1.0] * 4}, r"sinks=\[1.0, 1.0, 1.0, 1.0\] must be a tensor"),
        ({"alibi_slopes": Q[0, 0, :, 0].numpy()}, "alibi_slopes is an array of shape"),
        ({"sinks": torch.zeros(4, requires_grad=True)}, "sinks requires a gradient"),
        ({"alibi_slopes": torch.ones(4, requires_grad=True)}, "alibi_slopes requires a gradient"),
        ({"key_lens": 3}, "key_lens=3 must be a list of integers"),
        ({"key_lens": torch.tensor([3, 3])}, r"key_lens\[0\]=tensor\(3\) must be an integer; .tolist"),
        ({"query": FLAT, "key": FLAT, "value": FLAT, "query_lens": 6}, "query_lens=6 must be a list"),
        ({"query": FLAT, "key": FLAT, "value": FLAT}, r"query \(6, 2, 8\) is packed: it needs"),
        ({"first_positions": 3}, "first_positions=3 must be a list of integers"),
        ({"sliding_window": [3]}, r"sliding_window=\[3\] must be one value"),
        ({"sinks": torch.ones(4, device="meta")}, "sinks is on the meta device"),
    ],
)  # fmt: skip
def test_what_is_no_tensor_or_list_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BatchError, match=says):
        polyattn.attention(**({"query": Q, "key": K, "value": K} | changes))


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (UNSEEN, r"a mask with holes \(mask\[0, 0, 0\] shows 2 of keys 0 to 2\); it must be .* layer's"),
        (torch.full((1, 1, 3, 3), 0.5), "a mask that adds numbers to the scores; it must be"),
        (torch.ones(1, 1, 3, 3, dtype=torch.int32), r"a mask of torch.int32; it must be .* of bool"),
        (torch.ones(2, 4, 3, 3) > 0, r"a mask of shape \(2, 4, 3, 3\), which differs between heads"),
        (torch.ones(3, 3) > 0, r"a mask of \(3, 3\) over 3 queries and 3 keys; it must be \(batch or 1"),
        (torch.ones(2, 3) > 0, r"a mask of \(2, 3\) .*; of a padding mask .* pass mask\[:, None, None\]"),
        (torch.ones(3, 1, 3, 3) > 0, "a mask of 3 rows over 2; it must be"),
    ],
)  # fmt: skip
def test_a_mask_that_cannot_be_read_is_named(mask: Tensor, says: str) -> None:
    with pytest.raises(BatchError, match=f"^mask: {says}"):
        polyattn.attention(Q, K, K, mask=mask)


def test_a_backends_own_mistake_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments that are right are not blamed for it."""

    def broken(*args: Any, **named: Any) -> None:
        raise AttributeError("the kernel's own")

    monkeypatch.setattr(BoundCall, "__call__", broken)
    with pytest.raises(AttributeError, match="the kernel's own"):
        polyattn.attention(Q, K, K)


def test_states_of_other_sequences_are_refused() -> None:
    x, weight = torch.randn(6, 4), torch.randn(4, 3)
    fields = {"kind": "short_conv", "num_heads": 4, "head_size": 1}
    for shape in ((1, 4, 2), (2, 4, 3), (2, 1, 2)):  # all but the second would be stretched
        with pytest.raises(BatchError, match=r"states have shape .* it must be \(2, 4, 2\)"):
            recurrence(
                [x], {"weight": weight}, [2, 4], torch.zeros(shape),
                recurrent=RecurrentSpec(conv_width=3), **fields,
            )  # fmt: skip


def test_a_sequence_without_tokens_has_the_state_that_it_starts_from() -> None:
    fields = {
        "kind": "short_conv",
        "num_heads": 4,
        "head_size": 1,
        "recurrent": RecurrentSpec(conv_width=3),
    }
    x, weight, before = torch.randn(3, 4), torch.randn(4, 3), torch.randn(2, 4, 2)
    torch.full((1024,), torch.nan)  # whose memory the states may get
    for states in (None, before):
        _, after = recurrence([x], {"weight": weight}, [3, 0], states, **fields)
        assert torch.equal(after[1], torch.zeros(4, 2) if states is None else before[1])


def test_a_mask_over_no_keys_shows_nothing() -> None:
    none = torch.zeros(2, 0, 2, 8)
    for mask in (torch.zeros(2, 1, 3, 0), torch.zeros(1, 1, 1, 0, dtype=torch.bool)):
        out, lse = polyattn.attention(Q, none, none, mask=mask, return_lse=True)
        assert not out.any() and bool((lse == -torch.inf).all())


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.filterwarnings("ignore")  # of the tracer
def test_what_only_stands_for_tensors_is_named(packed: bool) -> None:
    query, key = (FLAT, FLAT) if packed else (Q, K)
    asked = {"query_lens": [6]} if packed else {}

    def call(query: Tensor, key: Tensor) -> Any:
        return polyattn.attention(query, key, key, **asked)

    with pytest.raises(
        BatchError, match="query is on the meta device and holds no numbers; move it"
    ):
        call(query.to("meta"), key.to("meta"))
    with pytest.raises(BatchError, match=r"query is inside torch.vmap .*; pass the whole batch"):
        torch.vmap(call)(query[None], key[None])
    if not packed:  # transformers' mask of a model under torch.func.jvp
        mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
        with pytest.raises(BatchError, match=r"mask is inside torch.vmap .*; pass the whole batch"):
            torch.vmap(lambda m: sdpa(query, key, key, m, heads_first=False))(mask[None])
    with pytest.raises(
        BatchError, match=r"torch.jit.trace can't record attention; use torch.compile"
    ):
        torch.jit.trace(call, (query, key))
    call(query, key)  # an earlier call of these shapes excuses no recorder
    with pytest.raises(BatchError, match=r"make_fx can't record attention; use torch.export"):
        make_fx(call)(query, key)
    with (
        FakeTensorMode(),
        pytest.raises(BatchError, match=r"(query|batch) is a FakeTensor .*; leave"),
    ):
        call(torch.empty(query.shape), torch.empty(key.shape))  # ended the process


@pytest.mark.filterwarnings("ignore")
def test_what_only_stands_for_tensors_is_named_by_a_layer() -> None:
    group = LayerGroup(LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32"))
    layer, cache = Attention(group), group.allocate_cache(4)
    batch, query = Batch([0, 1], [5], torch.zeros(1, 1, dtype=torch.int32)), torch.randn(1, 4, 16)

    def call(query: Tensor) -> Any:
        return layer(query, None, None, cache, batch)

    with pytest.raises(BatchError, match="can't record attention"):
        torch.jit.trace(call, query)
    with pytest.raises(BatchError, match="make_fx can't record attention"):
        make_fx(call)(query)
    call(query)
    with pytest.raises(BatchError, match=r"query is inside torch.vmap"):
        torch.vmap(call)(query[None])
    with FakeTensorMode(), pytest.raises(BatchError, match="query is a FakeTensor"):
        call(torch.empty(query.shape))


@pytest.mark.parametrize("device", DEVICES)
def test_tangents_of_forward_mode_are_refused(device: str) -> None:
    query, key = Q.to(device), K.to(device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query, torch.ones_like(query))
        for _ in range(2):  # the second call finds a bound one
            with pytest.raises(BatchError, match="query carries a tangent .*; pass"):
                polyattn.attention(dual, key, key)
            polyattn.attention(query, key, key)


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 2, "logit_soft_cap": 2.0}, {"sink_tokens": 1}]
)
def test_gradients_of_gradients_are_the_formulas(options: dict[str, Any]) -> None:
    """The first sequence has more queries than keys: its first query sees nothing."""
    asked = CallOptions(causal=True, **{"sliding_window": 3, **options})
    query, key, value = (
        torch.randn(n, heads, size, dtype=torch.float64, requires_grad=True)
        for n, heads, size in ((4, 4, 3), (5, 2, 3), (5, 2, 2))
    )

    def call(*tensors: Tensor) -> Tensor:
        query, key, value = tensors
        return attend_packed(query, [3, 1], PackedKeys(key, value, [2, 3]), asked)[0]

    assert torch.autograd.gradcheck(call, (query, key, value))
    assert torch.autograd.gradgradcheck(call, (query, key, value))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"slopes": torch.rand(3, 4)}, "alibi_slopes has 3 rows; query_lens has 2"),
        ({"lens": [5, 1, 3]}, "keys.lens has 3 rows; query_lens has 2"),
        ({"starts": [0]}, "keys.starts has 1 rows; query_lens has 2"),
        ({"query_lens": [4, 1]}, "query has 6 tokens; query_lens sum up to 5"),
    ],
)
def test_slopes_of_each_sequence_need_a_row_for_each(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "query_lens": [5, 1],
        "lens": [5, 1],
        "slopes": torch.rand(2, 4),
        **changed,
    }
    query, key = torch.randn(6, 4, 16), torch.randn(6, 2, 16)
    keys = PackedKeys(key, key, given["lens"], given.get("starts"))
    with pytest.raises(BatchError, match=message):
        attend_packed(query, given["query_lens"], keys, CallOptions(), alibi_slopes=given["slopes"])


@pytest.mark.parametrize("tokens", [(5, 6), (1, 5)])
def test_values_without_elements_are_refused(tokens: tuple[int, int]) -> None:
    """They read memory beyond them."""
    query, key = (torch.randn(1, n, 2, 16) for n in tokens)
    for none, name in ((key[..., :0], "v_head_size"), (key[:, :, :0], "num_kv_heads")):
        pair = (none, none) if name == "num_kv_heads" else (key, none)
        with pytest.raises(BatchError, match=f"{name}=0"):
            polyattn.attention(query, *pair)
        with pytest.raises(BatchError, match=f"{name}=0"):
            polyattn.attention(
                query[0], *(t[0] for t in pair), query_lens=tokens[:1], key_lens=tokens[1:]
            )


def test_tensors_of_other_layouts_are_named() -> None:
    nested = torch.nested.nested_tensor([Q[0], Q[0, :2]])
    for tensor, name in ((nested, "nested"), (Q.to_sparse(), "torch.sparse_coo")):
        with pytest.raises(BatchError, match=f"query is {name}; kernels read dense tensors"):
            polyattn.attention(tensor, K, K)


def test_tensors_that_hold_others_are_named() -> None:
    """As DTensors are; NATIVE_ATTN went by address 0. A plain call of the same shapes came before."""
    inner = torch.arange(4.0)
    pairs = [TwoTensor(each.clone(), each.clone()) for each in (Q, K)]
    polyattn.attention(Q, K, K)
    says = "is a TwoTensor, which has no address; pass the tensor that it holds"
    for name, tensors in (("query", (pairs[0], K, K)), ("value", (Q, K, pairs[1]))):
        with pytest.raises(BatchError, match=f"{name} {says}"):
            polyattn.attention(*tensors)
        packed = (tensor.flatten(0, 1) for tensor in tensors)
        with pytest.raises(BatchError, match=f"{name} {says}"):
            polyattn.attention(
                *packed, query_lens=[len(Q[0])] * len(Q), key_lens=[len(K[0])] * len(K)
            )
    with pytest.raises(BatchError, match=f"sinks {says}"):
        polyattn.attention(Q, K, K, sinks=TwoTensor(inner[: Q.shape[2]], inner[: Q.shape[2]]))
    spec = LayerSpec(num_heads=4, head_size=8, dtype="float32", learned_sinks=True)
    with pytest.raises(SpecError, match=f"sinks {says}"):
        Attention(LayerGroup(spec), sinks=TwoTensor(inner, inner))
    pages = torch.zeros(1, 16, 4, 8)
    with pytest.raises(CacheError, match=f"value {says}"):
        KVCache(pages, TwoTensor(pages, pages))


def test_no_sequences_have_no_output() -> None:
    """Also where the tensor of no tokens has gaps, which the output doesn't take over."""
    query, key = torch.randn(0, 4, 32)[..., ::2], torch.randn(0, 4, 16)
    keys = PackedKeys(key, key, [])
    for slopes in (None, torch.rand(0, 4)):
        out, _ = attend_packed(query, [], keys, CallOptions(), alibi_slopes=slopes)
        assert out.shape == (0, 4, 16)


def test_an_output_whose_elements_share_memory_is_refused() -> None:
    layer = Attention(
        LayerGroup(
            LayerSpec(num_heads=4, num_kv_heads=2, head_size=8, dtype="float32", cached=False)
        )
    )
    query, key = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    with pytest.raises(BatchError, match="out has strides .* its elements share memory; clone it"):
        layer(
            query,
            key,
            key,
            None,
            Batch.from_lens([3], [3]),
            out=torch.empty(1, 4, 8).expand(3, 4, 8),
        )


ROWS = torch.randn(2, 9, HEADS, SIZE)
SHAPES = [(2, 3, 5), (3, 2, 7), (4, 5, 9), (2, 8, 8), (5, 1, 6)]


def compiled(call: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 3, "sink_tokens": 1, "sinks": torch.randn(HEADS), "return_lse": True},
        {"alibi_slopes": torch.rand(HEADS), "logit_soft_cap": 3.0, "batch_invariant": True},
        {
            "scale": 0.3,
            "chunk_size": 4,
            "backend": "TORCH_SDPA",
            "batch_invariant": Invariance.BATCH,
        },
    ],
    ids=["plain", "sinks", "alibi", "chunk"],
)
def test_a_compiled_call_is_one_operator_of_any_shape(options: dict[str, Any]) -> None:
    """Without a break, with the eager bits."""

    def call(query: Tensor, key: Tensor) -> Any:
        result = polyattn.attention(query * 2, key, key, causal=True, **options)
        return [t + 1 for t in result] if isinstance(result, tuple) else [result + 1]

    traced = compiled(call)
    torch._dynamo.utils.counters.clear()
    for batch, queries, keys in SHAPES:
        query, key = torch.randn(batch, queries, HEADS, SIZE), torch.randn(batch, keys, 2, SIZE)
        for one, other in zip(traced(query, key), call(query, key), strict=True):
            assert torch.equal(one, other) and one.stride() == other.stride()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3  # the first, any, one query


def test_a_compiled_call_takes_masks_and_packed_rows() -> None:
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()

    def masked(query: Tensor, mask: Tensor) -> Any:
        level = Invariance.NONE
        return polyattn.attention(
            query, query, query, mask=mask, return_lse=True, batch_invariant=level
        )

    for shown in (mask, mask.flip(2, 3), mask.new_ones(2, 1, 1, 9)):
        for one, other in zip(compiled(masked)(ROWS, shown), masked(ROWS, shown), strict=True):
            assert torch.equal(one, other)

    def packed(query: Tensor, lens: list[int], firsts: tuple[int, ...]) -> Any:
        keys = polyattn.attention(query, query, query, query_lens=lens, first_positions=firsts)
        return polyattn.attention(query, keys, keys, query_lens=lens[::-1], key_lens=lens)

    traced = compiled(packed)
    for lens in ([3, 6], [4, 5], [9, 0]):
        assert torch.equal(traced(ROWS[0], lens, (0, 7)), packed(ROWS[0], lens, (0, 7)))


def test_a_compiled_call_refuses_what_an_eager_one_does() -> None:
    traced, learned = compiled(polyattn.attention), torch.ones(HEADS, requires_grad=True)
    for named in ({"sinks": learned}, {"alibi_slopes": learned}):
        with pytest.raises(Exception, match="requires a gradient.*forward only"):
            traced(ROWS, ROWS, ROWS, **named)
    with pytest.raises(Exception, match="requires a gradient.*forward only"):
        traced(ROWS, ROWS, ROWS.clone().requires_grad_())
    with pytest.raises(BatchError, match="differ in their rows or head sizes"):
        traced(ROWS, ROWS[..., :8], ROWS)
    nothing = (None,) * 6
    with pytest.raises(BatchError, match="query requires a gradient"):
        torch.ops.polyattn.attention(
            ROWS.clone().requires_grad_(),
            ROWS,
            ROWS,
            *nothing,
            False,
            *nothing[:5],
            False,
            None,
            0,
            "none",
        )
    with torch.no_grad():
        assert traced(ROWS, ROWS, ROWS, sinks=learned).shape == ROWS.shape


def test_an_output_that_shares_memory_with_an_input_is_refused() -> None:
    """Kernels would read what they wrote; parts of one buffer are no fault."""
    spec = LayerSpec(num_heads=2, num_kv_heads=2, head_size=8, dtype="float32", cached=False)
    batch = Batch.from_lens([3], [3])
    rows = torch.randn(3, 8, 8)  # a fused QKV, and room for the output behind it
    query, key, value, out = rows.split(2, 1)
    wanted = Attention(spec)(query.clone(), key.clone(), value.clone(), plan=batch)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        with pytest.raises(BatchError, match=f"out shares memory with {name}"):
            Attention(spec)(query, key, value, plan=batch, out=tensor)
        with pytest.raises(BatchError, match="out shares memory with"):
            Attention(spec)(
                query, key, value, plan=batch, out=tensor.as_strided((3, 2, 8), (32, 8, 1))
            )
    Attention(spec)(query, key, value, plan=batch, out=out)
    assert torch.equal(out, wanted)
    between = torch.randn(3, 2, 2, 8)  # heads of two tensors in turns
    Attention(spec)(between[:, :, 0], key, value, plan=batch, out=between[:, :, 1])
    conv = RecurrentSpec(conv_width=4)
    short = LayerSpec(kind="short_conv", num_heads=8, head_size=1, dtype="float32", recurrent=conv)
    layer, x = Recurrent(short, weight=torch.randn(8, 4)), torch.randn(3, 8)
    step = Batch.from_lens([3], [3], state_slots=torch.tensor([0]))
    with pytest.raises(BatchError, match="out shares memory with x"):
        layer(x, states=layer.group.allocate_states(1), plan=step, out=x)
