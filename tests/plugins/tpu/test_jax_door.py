"""The door of JAX itself: pure functions over plans, against float64, and without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from adapters import drawn
from polyattn import Batch, LayerGroup, LayerSpec, RopeSpec, SparseSpec, select
from polyattn.errors import BatchError
from polyattn.families.attention import reference
from polyattn.families.mla import reference as reference_latent
from polyattn.families.mla.workload import latent_weights
from polyattn.families.recurrent import reference as recurrence_in_float64
from polyattn.runtime.cache.kv_cache import KVCache, quantize
from polyattn.runtime.program import LayerParams
from polyattn.spec.latent import LatentSpec
from polyattn.spec.recurrent import RecurrentSpec
from polyattn.workload.base import workload
from polyattn.workload.compare import lse_error, output_error

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX must not look for a TPU: it takes seconds
jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import polyattn_tpu as pt  # noqa: E402

SMALL = pt.Buckets(tokens=32, seqs=4, pages=64)
ROWS = [(1, 30), (9, 21), (1, 0), (1, 1)]
"""(query tokens, length): a decode, a prefill with context, a padding row, a first token."""
BASE = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float32", block_size=8)


def spec(**changes: Any) -> LayerSpec:
    return BASE.replace(**changes)


def to_jax(tensor: torch.Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        return jnp.asarray(tensor.float().numpy()).astype(jnp.bfloat16)
    return jnp.asarray(tensor.numpy())


def to_torch(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(array.astype(jnp.float32)))


def table(lens: list[int], block: int, blocks: int) -> torch.Tensor:
    counts = [-(-n // block) for n in lens]
    order = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(5)) + 1
    found = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    at = 0
    for row, count in zip(found, counts, strict=True):
        row[:count] = order[at : at + count].int()
        at += count
    return found


@pytest.fixture
def generator() -> Iterator[torch.Generator]:
    yield torch.Generator().manual_seed(17)


FEATURES = {
    "plain": spec(),
    "window and sinks": spec(sliding_window=7, sink_tokens=3),
    "uneven": spec(causal=False, sliding_window=6, window_right=2),
    "int8": spec(dtype="bfloat16", kv_cache_dtype="int8"),
    "functions of inputs": spec(variant="relative_bias"),
}
"""The sweep has the kit's, by the same functions behind polyattn's interface."""


@pytest.mark.parametrize("name", FEATURES)
def test_stores_and_attends(name: str) -> None:
    """A mixed step: the new tokens stored by the plan's slots, then every row against float64."""
    layer = FEATURES[name]
    work = drawn(layer, ROWS, 8)
    lens, rows, params = work.batch.lens, work.batch.block_table, work.layer.params
    old, step = Batch.from_lens(lens, lens, rows, 8), work.batch
    assert old.slot_mapping is not None and work.held is not None
    mine, scales = pt.Cache.zeros(layer, work.held.num_blocks, 8), pt.Scales(*work.scales)
    functions, inputs = pt.functions_of(layer), None
    if functions is not None:
        tensors = {**step.inputs, **params.inputs}
        inputs = functions.given({name: to_jax(tensor) for name, tensor in tensors.items()})

    @jax.jit
    def run(old_plan: Any, plan: Any, rows: Any, query: Any, cache: Any, inputs: Any) -> Any:
        cache = pt.store(old_plan, *rows, cache, scales)
        options = {
            "sinks": None if params.sinks is None else to_jax(params.sinks),
            "alibi_slopes": None if params.alibi_slopes is None else to_jax(params.alibi_slopes),
            "functions": functions,
            "inputs": inputs,
        }
        return cache, pt.attend(plan, layer, query, cache, scales=scales, lse=True, **options)

    first = pt.plan(old, layer, buckets=pt.Buckets(tokens=64, seqs=4, pages=64))
    plan = pt.plan(step, layer, buckets=SMALL)
    given = [pt.pad(first, to_jax(t)) for t in (work.keys, work.values)]
    cache, (out, lse) = run(first, plan, given, pt.pad(plan, to_jax(work.query)), mine, inputs)
    for ours, right in zip(cache, (work.held.key, work.held.value), strict=True):
        same = to_torch(ours)[..., : right.shape[3]].transpose(1, 2).flatten(0, 1)
        stored = right.flatten(0, 1)[old.slot_mapping].float()
        assert torch.equal(same[old.slot_mapping], stored), "what is stored differs"
        assert not to_torch(ours)[..., right.shape[3] :].any()
    expected, logs = work.expected
    low, count = layer.dtype == "bfloat16", len(work.query)
    assert output_error(to_torch(out)[:count], expected) < (1.5e-2 if low else 2e-5)
    assert lse_error(to_torch(lse)[:count], logs) < (4e-3 if low else 1e-4)


def test_a_learned_sink_beside_no_key_counts_for_nothing(generator: torch.Generator) -> None:
    """More queries than keys: the first see nothing, so their LSE is -inf, sink or not."""
    layer = LayerSpec(
        num_heads=4, num_kv_heads=2, head_size=64, dtype="float32", cached=False,
        learned_sinks=True, needs_lse=True,
    )  # fmt: skip
    step = Batch.from_lens([3, 5, 1, 2], [1, 0, 0, 9])
    query, key, value = (
        torch.randn(n, h, 64, generator=generator) for n, h in ((11, 4), (10, 2), (10, 2))
    )
    sinks = torch.tensor([0.5, -1.0, 2.0, -torch.inf])  # the last: a head without one
    plan = pt.plan(step, layer, buckets=SMALL)
    run = jax.jit(lambda p, q, k, v, s: pt.attend_given(p, layer, q, k, v, sinks=s, lse=True))
    out, lse = run(plan, pt.pad(plan, to_jax(query)), *map(to_jax, (key, value, sinks)))
    expected, logs = reference.forward(layer, query, key, value, None, step, LayerParams(sinks))
    assert logs.isneginf().all(1).tolist() == [True] * 2 + [False] + [True] * 6 + [False] * 2
    assert output_error(to_torch(out)[:11], expected) < 2e-5
    assert lse_error(to_torch(lse)[:11], logs) < 1e-4
    assert not to_torch(out)[:2].any() and not to_torch(out)[3:9].any()


MLA = LayerSpec(
    kind="mla", num_heads=4, head_size=48, v_head_size=32, dtype="float32", block_size=8,
    latent=LatentSpec(rank=64, rope_head_size=16),
)  # fmt: skip


@pytest.mark.parametrize("form", ["absorbed", "expanded", "chosen"])
def test_latents(form: str, generator: torch.Generator) -> None:
    queries, lens = [5, 1, 2] if form == "expanded" else [1, 1, 1], [30, 9, 2]
    rows = table(lens, 8, 8)
    step = Batch.from_lens(queries, lens, rows, 8)
    stored = torch.randn(8, 8, 1, 80, generator=generator)
    stored[0] = torch.nan
    for index, length in enumerate(lens):
        if length % 8:
            stored[rows[index, length // 8], length % 8 :] = torch.nan
    latents = KVCache(stored, stored[..., :64])
    weights = latent_weights(MLA, generator)
    query = torch.randn(sum(queries), 4, 48, generator=generator)
    cache = pt.Cache(jnp.pad(to_jax(stored).swapaxes(1, 2), ((0, 0), (0, 0), (0, 0), (0, 48))))
    up = [to_jax(w) for w in weights]
    choice, spec = None, MLA
    if form == "absorbed":
        plan = pt.plan(step, MLA, buckets=SMALL)
        run = jax.jit(lambda p, q, c, a, b: pt.attend_latent(p, MLA, q, c, a, b)[0])
        out = run(plan, pt.pad(plan, to_jax(query)), cache, *up)
    elif form == "expanded":
        plan, slots = pt.plan_expanded(pt.Step.from_batch(step), MLA, 8, SMALL)
        run = jax.jit(lambda p, s, q, c, *up: pt.attend_expanded(p, s, MLA, q, c, *up)[0])
        out = run(plan, slots, pt.pad(plan, to_jax(query)), cache, *up)
    else:
        topk = torch.tensor([[29, 3, -1], [8, 0, 4], [1, -1, -1]], dtype=torch.int32)
        slots = torch.stack([rows[i][topk[i].clamp(min=0) // 8] * 8 for i in range(3)]) + topk % 8
        slots = slots.masked_fill(topk < 0, -1)
        choice = topk[:, None]
        spec = MLA.replace(kind="sparse_mla", sparse=SparseSpec(budget=3))
        inner = torch.einsum("thn,hnr->thr", query[..., :32], weights[0])
        taken = torch.cat([inner, query[..., 32:]], -1)
        run = jax.jit(lambda q, s, c: pt.attend_rows(q, s, c, MLA.scale, 64)[0])
        found = run(to_jax(taken), to_jax(slots.int()), cache)
        out = jnp.einsum("thr,hrv->thv", found, up[1])
    expected, _ = reference_latent.forward(spec, query, latents, step, weights, choice=choice)
    assert output_error(to_torch(out)[: len(query)], expected) < 4e-5


def recurrent(kind: str, **fields: Any) -> LayerSpec:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "float32"}
    form = fields.pop("recurrent", RecurrentSpec())
    return LayerSpec(kind=kind, **(sizes | fields), recurrent=form)  # type: ignore[arg-type]


KINDS = [
    recurrent("short_conv", num_kv_heads=4, head_size=1, recurrent=RecurrentSpec(conv_width=4)),
    recurrent("mamba1", num_kv_heads=4, head_size=1, recurrent=RecurrentSpec(state_size=8)),
    recurrent("mamba2", recurrent=RecurrentSpec(state_size=24)),
    recurrent("linear", v_head_size=24),
    recurrent("gdn", v_head_size=24, recurrent=RecurrentSpec(qk_norm=True)),
]


@pytest.mark.parametrize("decode", [False, True], ids=["mixed", "decode"])
@pytest.mark.parametrize("layer", KINDS, ids=lambda s: s.kind.value)
def test_recurrences(layer: LayerSpec, decode: bool) -> None:
    rows = [(1, 9), (1, 1), (1, 0), (1, 30)]
    if not decode:
        rows += [(0, 7), (5, 5), (70, 70), (129, 140), (3, 80)]
    group = LayerGroup(select(layer, "cpu", backend="VANILLA_SCAN"))
    work = workload(group, rows).remembered()
    before, (right, after) = work.held, work.expected
    plan = pt.plan(work.batch, layer, buckets=pt.Buckets(tokens=256, seqs=16, pages=1))
    run = jax.jit(lambda p, i, w, s: pt.recur(p, layer, i, w, s), donate_argnums=3)
    given = {name: pt.pad(plan, to_jax(tensor)) for name, tensor in work.tensors().items()}
    states = to_jax(before.clone())
    params = {name: to_jax(tensor) for name, tensor in work.layer.params.items()}
    out, now = run(plan, given, params, states)
    assert states.is_deleted(), "the states were donated, and copied all the same"
    real, used = work.real_rows(), work.used
    found = to_torch(out)[: len(real)]
    assert output_error(found[real].flatten(1), right[real].flatten(1)) < 2e-5
    assert output_error(to_torch(now)[used].flatten(1), after[used].flatten(1)) < 2e-5
    kept = [s for s in range(len(before)) if s not in used]
    assert torch.equal(to_torch(now)[kept].nan_to_num(7.0), before[kept].nan_to_num(7.0))


@pytest.mark.parametrize("layer", KINDS, ids=lambda s: s.kind.value)
def test_recurrences_of_a_process_with_64_bits(layer: LayerSpec) -> None:
    with jax.enable_x64(True):
        test_recurrences(layer, False)


@pytest.mark.parametrize("rate", [-900.0, -1e6, -np.inf])
@pytest.mark.parametrize("kind", ["gdn", "mamba2"])
def test_a_token_that_forgets_all_costs_no_precision_after_it(kind: str, rate: float) -> None:
    steps = {} if kind == "gdn" else {"dt_softplus": False}
    layer = recurrent(kind, recurrent=RecurrentSpec(state_size=24, **steps))
    work = workload(LayerGroup(select(layer, "cpu", backend="VANILLA_SCAN")), [(60, 61)])
    named = work.tensors()
    if kind == "gdn":
        named["g"][::7] = rate
    else:
        named["x"][::7] = 0.0
        named["dt"][::7] = -max(rate, -1e30)
    params = {name: to_jax(tensor) for name, tensor in work.layer.params.items()}
    right, after = recurrence_in_float64.forward(
        layer, named, work.layer.params, work.held, work.batch
    )
    plan = pt.plan(work.batch, layer, buckets=pt.Buckets(tokens=64, seqs=1, pages=1))
    given = {name: pt.pad(plan, to_jax(tensor)) for name, tensor in named.items()}
    out, now = jax.jit(pt.recur, static_argnums=1)(plan, layer, given, params, to_jax(work.held))
    assert output_error(to_torch(out)[:60].flatten(1), right.flatten(1)) < 3e-6
    assert output_error(to_torch(now)[work.used].flatten(1), after[work.used].flatten(1)) < 3e-6


def test_merging_is_the_whole() -> None:
    parts = [
        (jnp.full((2, 1, 3), v), jnp.full((2, 1), float(lse))) for v, lse in ((1.0, 0), (3.0, 0))
    ]
    out, lse = pt.merge(*parts[0], *parts[1])
    assert np.allclose(out, 2.0) and np.allclose(lse, np.log(2.0))
    nothing = jnp.full((2, 1), -jnp.inf)
    out, lse = pt.merge(jnp.zeros((2, 1, 3)), nothing, jnp.zeros((2, 1, 3)), nothing)
    assert not out.any() and bool((lse == -jnp.inf).all())


def test_a_donated_cache_is_written_in_place() -> None:
    """And a slot of -1 leaves it alone."""
    cache = pt.Cache.zeros(BASE, 4, 8)
    step = pt.Step.of([2], [2], [[1]], [8, -1])
    plan = pt.plan(step, BASE, buckets=pt.Buckets(tokens=4, seqs=1, pages=4))
    rows = jnp.ones((plan.num_tokens, 2, 64))
    stored = jax.jit(pt.store, donate_argnums=3)(plan, rows, rows, cache)
    assert cache.key.is_deleted() and cache.value.is_deleted()
    assert float(stored.key.sum()) == 2 * 64 and float(stored.key[1, :, 0, :64].sum()) == 2 * 64


def test_no_torch_is_imported() -> None:
    """A layer runs, and torch is nowhere: a process of its own says so."""
    code = """
import sys
import jax, jax.numpy as jnp
import polyattn_tpu as pt
from polyattn.plugin import LayerSpec
spec = LayerSpec(num_heads=2, num_kv_heads=1, head_size=64, dtype="float32", block_size=8)
step = pt.Step.of([1, 1], [3, 9], [[1, 0], [2, 3]], [10, 24])
plan = pt.plan(step, spec, buckets=pt.Buckets(tokens=8, seqs=2, pages=8))
def layer(plan, query, key, value, cache):
    cache = pt.store(plan, key, value, cache)
    return cache, pt.attend(plan, spec, query, cache)[0]
cache = pt.Cache.zeros(spec, 4, 8)
one = lambda heads: jnp.ones((plan.num_tokens, heads, 64))
cache, out = jax.jit(layer, donate_argnums=4)(plan, one(2), one(1), one(1), cache)
assert abs(float(out[0, 0, 0]) - 1 / (1 + 2 * 2.718281828 ** -8)) < 1e-5, out[0, 0, 0]
assert not any(name.split(".")[0] in ("torch", "torchax") for name in sys.modules)
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=300)


def test_a_trace_compiles_a_stated_number_of_programs() -> None:
    """600 requests of a trace of conversations, served continuously: each shape counted by jit."""
    buckets = pt.Buckets(tokens=2048, seqs=64, pages=4096)
    compiled = jax.jit(lambda plan: plan.tiles.seq.sum())
    rng = np.random.default_rng(3)
    waiting = [
        (int(rng.lognormal(6.0, 1.0)) % 4000 + 1, int(rng.lognormal(4.0, 0.7)) % 100 + 1)
        for _ in range(600)
    ]
    running: list[list[int]] = []  # context, tokens of the prompt to go, of the answer to go
    steps = 0
    while waiting or running:
        while waiting and len(running) < 64:
            prompt, answer = waiting.pop()
            running.append([0, prompt, answer])
        room, queries, lens = 2048 - len(running), [], []
        for request in running:
            new = min(request[1], room) if request[1] else 1
            new = new or (1 if request[1] == 0 else 0)
            room -= new if request[1] else 0
            request[0] += new
            if request[1]:
                request[1] -= new
            else:
                request[2] -= 1
            queries.append(new)
            lens.append(request[0])
        width = max(-(-n // 64) for n in lens)
        step = pt.Step.of(
            queries,
            lens,
            np.zeros((len(lens), width), np.int32),
            np.zeros(sum(queries)).astype(int),
        )
        compiled(pt.plan(step, BASE, block_size=64, buckets=buckets))
        running = [r for r in running if r[2] > 0]
        steps += 1
    count = compiled._cache_size()
    assert steps > 300 and 3 < count <= buckets.programs() == 48, (steps, count)


def test_bad_input_names_field_value_and_remedy() -> None:
    with pytest.raises(BatchError, match="query_lens has 1 entries and seq_lens 2"):
        pt.Step.of([1], [1, 2])
    with pytest.raises(BatchError, match="no block_table"):
        pt.plan(pt.Step.of([1], [1]), BASE)
    with pytest.raises(BatchError, match="9 sequences, the buckets end at 4"):
        pt.plan(pt.Step.of([1] * 9, [1] * 9, np.zeros((9, 1), int)), BASE, buckets=SMALL)
    plan = pt.plan(pt.Step.of([1], [1], [[0]]), BASE, buckets=SMALL)
    with pytest.raises(BatchError, match=r"query has shape \(1, 4, 64\); the plan takes"):
        pt.attend(plan, BASE, jnp.zeros((1, 4, 64)), pt.Cache.zeros(BASE, 4, 8))
    with pytest.raises(BatchError, match="plan has no slots"):
        pt.store(plan, jnp.zeros((4, 2, 64)), None, pt.Cache.zeros(BASE, 4, 8))


MISFITS: dict[str, tuple[LayerSpec, Any, dict[str, Any], str]] = {
    "page": (BASE, pt.Cache.zeros(BASE, 4, 16), {}, "pages of 16 tokens, and the plan is of 8"),
    "heads": (
        BASE,
        pt.Cache.zeros(spec(num_kv_heads=4), 4, 8),
        {},
        "4 heads of 128, and the layer 2",
    ),
    "size": (BASE, pt.Cache.zeros(spec(head_size=192), 4, 8), {}, "heads of 256"),
    "variant": (
        spec(variant="flash_sigmoid"),
        pt.Cache.zeros(BASE, 4, 8),
        {},
        "functions are missing.*flash_sigmoid",
    ),
    "mask": (spec(mask="custom"), pt.Cache.zeros(BASE, 4, 8), {}, "functions are missing"),
    "inputs": (BASE, pt.Cache.zeros(BASE, 4, 8), {"inputs": {"gain": 1}}, r"inputs \['gain'\]"),
    "scales": (
        BASE,
        pt.Cache.zeros(BASE, 4, 8),
        {"scales": pt.Scales(0.5)},
        "this one isn't; leave them out",
    ),
    "sinks": (
        spec(learned_sinks=True),
        pt.Cache.zeros(BASE, 4, 8),
        {"sinks": jnp.ones(1)},
        r"sinks has shape \(1,\); it must be \(4,\)",
    ),
}
"""A layer, a cache and options that don't fit the plan of BASE, which would be misread or ignored."""


@pytest.mark.parametrize("name", MISFITS)
def test_what_would_be_ignored_is_refused(name: str) -> None:
    layer, cache, options, match = MISFITS[name]
    plan = pt.plan(pt.Step.of([1], [1], [[0]], [0]), BASE, buckets=SMALL)
    query = jnp.zeros((plan.num_tokens, 4, 64))
    with pytest.raises(BatchError, match=match):
        pt.attend(plan, layer, query, cache, **options)


def test_a_plan_is_of_what_the_kernel_serves() -> None:
    step = pt.Step.of([1], [1], [[0]], [0])
    turned = spec(rope=RopeSpec(rotary_size=64, positions="cache"))
    gated = recurrent("mamba2", recurrent=RecurrentSpec(state_size=24, gated=True))
    for layer, feature in (
        (turned, "cache_positions"),
        (spec(out_dtype="fp8_e4m3"), "fp8_output"),
        (gated, "gated"),
        (recurrent("kda", num_kv_heads=4), "kind='kda'"),
    ):
        with pytest.raises(BatchError, match=f"asks for {feature}, which JAX's functions"):
            pt.plan(step, layer, buckets=SMALL)
    one = torch.tensor([1])
    moved = Batch.from_lens([1], [1], state_slots=one, state_targets=one + 1)
    later = Batch.from_lens([1], [1], first_positions=[5])
    for batch, layer, field in (
        (moved, recurrent("gdn"), "state_targets"),
        (later, spec(cached=False, block_size=None, chunk_size=8), "first_positions"),
    ):
        with pytest.raises(BatchError, match=f"{field}=.*a Step has none"):
            pt.plan(batch, layer, buckets=SMALL)
    plan = pt.plan(step, BASE, buckets=SMALL)
    rows, single = (jnp.zeros((plan.num_tokens, n, 64)) for n in (2, 1))
    with pytest.raises(BatchError, match="value is None; the plan and the cache take"):
        pt.store(plan, rows, None, pt.Cache.zeros(BASE, 4, 8))
    with pytest.raises(BatchError, match=r"key is \(4, 1, 64\); the plan and the cache take"):
        pt.store(plan, single, rows, pt.Cache.zeros(BASE, 4, 8))


@pytest.mark.parametrize("scale", [0.55, 0.85, 0.9])
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantising_divides_as_torch_does(
    kind: torch.dtype, scale: float, generator: torch.Generator
) -> None:
    """Halfway between two 8-bit numbers a reciprocal's last bit decides, in one of a hundred."""
    from polyattn_tpu.functions import DTYPES, quantised

    rows = torch.randn(4096, 2, 64, generator=generator).to(torch.bfloat16)
    name = {torch.int8: "int8", torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}[
        kind
    ]
    found = jax.jit(lambda a, s: quantised(a, DTYPES[name], s))(to_jax(rows), scale)
    assert torch.equal(to_torch(found), quantize(rows, kind, scale).float())
