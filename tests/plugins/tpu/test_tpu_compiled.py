"""Every variant compiled by libtpu, down to TPU code, for chips that aren't here; and what bounds it."""

from __future__ import annotations

import os
from typing import Any

import pytest
from polyattn import LayerSpec, SparseSpec, select
from polyattn.errors import SelectionError
from polyattn.spec.recurrence import form_of, shape_of
from polyattn.tools.cli.models import bundled, bundled_models

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # two workers of pytest-xdist compile
pytest.importorskip("jax")
pytest.importorskip("libtpu")

import tpu_ahead
from polyattn_tpu.functions import whole_lanes

sweep = pytest.mark.sweep  # v6e alone was compiled whole
ARCHS = [pytest.param(a, marks=[] if a == "v6e" else [sweep]) for a in ("v6e", "v5e", "v5p", "v7x")]


def model_specs() -> dict[str, LayerSpec]:
    """Every distinct layer of the bundled models; fp16, which no TPU multiplies, as bf16."""
    from polyattn.spec.decompose import expanded, group_layers

    found: dict[Any, tuple[str, LayerSpec]] = {}
    for model in bundled_models():
        layers = group_layers(LayerSpec.from_hf_config(bundled("models", f"{model}.json")))
        for spec in layers:
            if spec.dtype == "float16":
                spec = spec.replace(dtype="bfloat16")
            both = [spec, expanded(spec)] if spec.kind.value == "mla" else [spec]
            for one in both:
                found.setdefault(
                    one, (f"{model} {one.kind.value} {one.role.value} {len(found)}", one)
                )
    return dict(found.values())


def repeated(layers: dict[str, LayerSpec]) -> set[str]:
    """The names of layers that differ from another in their number of heads alone, and have fewer.

    Where keys are given, the kernel knows no roles.
    """
    largest: dict[Any, tuple[int, str]] = {}
    for name, spec in layers.items():
        sizes = (spec.head_size, spec.v_head_size, spec.recurrent)
        alike = (spec.kind, spec.cached and spec.role, *sizes, spec.features)
        largest[alike] = max(largest.get(alike, (0, "")), (spec.num_heads, name))
    return layers.keys() - {name for _, name in largest.values()}


BASE = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
SPREAD = dict.fromkeys((4, 8), BASE) | {16: BASE.replace(num_heads=64, num_kv_heads=16)}
"""What is spread over so many devices: each has a KV head at least."""
MODELS = model_specs()
VARIANTS = MODELS | {
    "int8 cache": BASE.replace(kv_cache_dtype="int8"),
    "e4m3 cache": BASE.replace(kv_cache_dtype="fp8_e4m3"),
    "e5m2 cache": BASE.replace(kv_cache_dtype="fp8_e5m2"),
    "fp32": BASE.replace(dtype="float32"),
    "chunked": BASE.replace(chunk_size=8192),
    "lse": BASE.replace(needs_lse=True),
    "kept first tokens": BASE.replace(sliding_window=1024, sink_tokens=4),
    "alibi": BASE.replace(alibi=True),
    "192/128": BASE.replace(head_size=192, v_head_size=128),
    "relative bias": BASE.replace(variant="relative_bias"),
    "vision local, sigmoid's mask": BASE.replace(variant="vision_local", mask="block_sparse"),
    "flash sigmoid": BASE.replace(variant="flash_sigmoid"),
    "MHA of 256": BASE.replace(num_kv_heads=32, head_size=256),
    "MLA, int8": LayerSpec.from_hf_config(bundled("models", "deepseek-v2-lite.json"))[0].replace(
        kv_cache_dtype="int8"
    ),
}


def traits(spec: LayerSpec) -> set[Any]:
    """What the attention kernel's body depends on."""
    group = 1 if spec.gqa_ratio == 1 else min(-(-spec.gqa_ratio // 16) * 16, 32)
    sizes, given = (spec.head_size, spec.v_head_size), (spec.cached, spec.causal)
    formats = (("dtype", spec.dtype), ("cache", spec.kv_cache_dtype))
    functions = (("variant", spec.variant), ("mask", spec.mask))
    return {*spec.features, sizes, given, ("group", group), *formats, *functions}


def covered(layers: dict[str, LayerSpec]) -> set[str]:
    """The names of attention layers all of whose traits others have, which have most of them."""
    left = {name: spec for name, spec in layers.items() if spec.kind.value == "attention"}
    seen: set[Any] = set()
    while left:
        name = max(left, key=lambda name: len(traits(left[name]) - seen))
        if traits(left[name]) <= seen:
            break
        seen |= traits(left.pop(name))
    return {*left}


def recurrent_shapes(spec: LayerSpec, tokens: int) -> Any:
    form = form_of(spec)
    return (
        {name: shape_of(spec, letters, tokens) for name, letters in form.inputs.items()},
        {name: shape_of(spec, letters) for name, letters in form.params.items()},
        shape_of(spec, form.state),
    )


def compile_phases(spec: LayerSpec, arch: str, level: int | None = None) -> None:
    """Compile a layer's prefill and decode; of latents, the absorbed decode alone."""
    for phase in ("decode",) if spec.kind.is_latent else ("prefill", "decode"):
        if spec.kind.is_recurrent:
            run, given = tpu_ahead.recurrent_case(spec, phase, recurrent_shapes)
            made = tpu_ahead.compile_for(arch, run, *given, donate=(3,), level=level)
        elif spec.kind.is_latent:
            run, given = tpu_ahead.latent_case(spec)
            made = tpu_ahead.compile_for(arch, run, *given, level=level)
        else:
            made = tpu_ahead.compile_attention(spec, arch, phase, level=level)
        assert made.memory_analysis().generated_code_size_in_bytes > 10_000


LIKE_MAMBA2 = {name for name in MODELS if " linear " in name}
"""Their chunks are Mamba-2's products (`_decayed`), which take libtpu 14 s."""
REPEATED = repeated(MODELS) | LIKE_MAMBA2
RARE = REPEATED | covered({name: spec for name, spec in VARIANTS.items() if name not in REPEATED})


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in RARE])
def test_the_real_chip_s_compiler_takes_it(name: str) -> None:
    """With the least effort, in half of the time: what is refused is refused at any level."""
    compile_phases(VARIANTS[name], "v6e", tpu_ahead.LEAST_EFFORT)


@sweep
@pytest.mark.parametrize("arch", ["v6e", "v5e", "v5p", "v7x"])
@pytest.mark.parametrize("name", VARIANTS)
def test_compiles_for_the_real_chip(arch: str, name: str) -> None:
    compile_phases(VARIANTS[name], arch)


@pytest.mark.parametrize("size", [64, 80, 128, 192])
def test_no_step_copies_the_cache(size: int) -> None:
    """Temporary memory stays below a hundredth of the cache; in its own width XLA copies it."""
    import jax
    from polyattn_tpu.functions import Cache

    spec = BASE.replace(head_size=size)
    run, given = tpu_ahead.attention_case(spec, "decode", num_blocks=2048)
    found = tpu_ahead.compile_for("v6e", run, *given)
    cache = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(given[2]))
    assert found.memory_analysis().temp_size_in_bytes < cache / 100
    if whole_lanes(size) != size:  # the control: pages as narrow as the heads
        plan, query, kept, params = given
        narrow = Cache(*(jax.ShapeDtypeStruct((*a.shape[:3], size), a.dtype) for a in kept))
        found = tpu_ahead.compile_for("v6e", _narrow(spec), plan, query, narrow, params)
        assert found.memory_analysis().temp_size_in_bytes > cache / 4


def _narrow(spec: LayerSpec) -> Any:
    import dataclasses

    import jax.numpy as jnp
    from polyattn_tpu.functions import form_of
    from polyattn_tpu.kernel import paged_attention

    form = dataclasses.replace(form_of(spec, False, interpret=False), v_size=spec.v_head_size)
    return lambda plan, query, cache, params: paged_attention(
        query, *cache, plan.tiles, plan.pages, jnp.ones(2), None, form
    )


MSA = LayerSpec(
    kind="sparse", num_heads=64, num_kv_heads=4, head_size=128,
    sparse=SparseSpec(budget=16, granularity=128, scope="kv_head"),
)  # fmt: skip
QSA = LayerSpec(
    kind="sparse", num_heads=24, num_kv_heads=2, head_size=256, sparse=SparseSpec(budget=2051)
)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("spec", "tokens"),
    [
        pytest.param(MSA, 8, marks=sweep, id="blocks, decode"),
        pytest.param(MSA, 512, id="blocks, prompts"),
        pytest.param(QSA, 8, id="tokens"),
    ],
)
def test_chosen_keys_are_read_where_they_lie(spec: LayerSpec, tokens: int, arch: str) -> None:
    """More rows than the plan has places take turns; what is gathered is less than the cache."""
    run, given = tpu_ahead.chosen_case(spec, tokens=tokens, block_size=128)
    memory = tpu_ahead.compile_for(arch, run, *given).memory_analysis()
    cache = 2 * 512 * spec.num_kv_heads * 128 * spec.head_size * 2
    assert memory.generated_code_size_in_bytes > 10_000
    assert memory.temp_size_in_bytes < cache


def test_a_donated_cache_is_stored_into_in_place() -> None:
    run, given = tpu_ahead.store_case(BASE)
    kept = tpu_ahead.compile_for("v6e", run, *given, donate=(3,)).memory_analysis()
    copied = tpu_ahead.compile_for("v6e", run, *given).memory_analysis()
    assert kept.alias_size_in_bytes >= 2 * 512 * 8 * 64 * 128 * 2
    assert copied.alias_size_in_bytes == 0


@pytest.mark.parametrize(
    ("arch", "devices"),
    [("v6e", 4), *(pytest.param(a, n, marks=sweep) for a, n in
     (("v6e", 8), ("v5e", 4), ("v5e", 8), ("v5p", 4), ("v5p", 8), ("v7x", 8), ("v7x", 16)))],
)  # fmt: skip
def test_heads_spread_over_devices(arch: str, devices: int) -> None:
    """Each device has its heads' pages, and none speaks with another."""
    for phase in ("prefill", "decode"):
        text = tpu_ahead.compile_sharded(SPREAD[devices], arch, phase, devices).as_text()
        assert f"num_partitions={devices}" in text
        for word in ("all-gather(", "all-reduce(", "collective-permute(", "all-to-all("):
            assert word not in text


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["decode", pytest.param("prefill", marks=sweep)])
def test_vmem_bounds_the_pages(phase: str) -> None:
    """The largest page that is claimed compiles on the smallest VMEM, and a larger one does not."""
    from polyattn_tpu.hooks import PALLAS_ATTN

    caps = PALLAS_ATTN.capabilities
    most, widest = caps.block_sizes.high, caps.head_sizes.high
    assert most is not None and widest is not None
    spec = BASE.replace(dtype="float32", head_size=widest)
    sizes = {"seqs": 1, "num_blocks": 4}
    assert tpu_ahead.compile_attention(
        spec, "v7x", phase, block_size=most, length=2 * most, **sizes
    )
    with pytest.raises(Exception, match="(?s)RESOURCE_EXHAUSTED.*vmem"):
        size = 4 * most
        tpu_ahead.compile_attention(spec, "v7x", phase, block_size=size, length=2 * size, **sizes)


def test_semaphores_bound_the_dmas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two for each of K and V compile; as many as pages of a prompt don't: 512 in all, of 4 bytes."""
    from polyattn_tpu import kernel

    assert tpu_ahead.compile_attention(BASE, "v6e", "decode")
    monkeypatch.setattr(kernel, "ON_THEIR_WAY", (2, 256))
    with pytest.raises(Exception, match="(?s)RESOURCE_EXHAUSTED.*sflag"):
        tpu_ahead.compile_attention(BASE, "v6e", "decode", seqs=4)


def test_sublanes_bound_the_pages() -> None:
    """Pages of 8 tokens, a tile's sublanes, compile; of one token, less than a packed row, don't."""
    assert tpu_ahead.compile_attention(BASE, "v6e", "decode", block_size=8)
    with pytest.raises(Exception, match="must be aligned to tiles"):
        tpu_ahead.compile_attention(BASE, "v6e", "decode", block_size=1)


def test_no_tpu_multiplies_fp16() -> None:
    with pytest.raises(Exception, match="Mosaic"):
        tpu_ahead.compile_attention(BASE.replace(dtype="float16"), "v6e", "decode")
    with pytest.raises(SelectionError, match="no TPU multiplies float16.*cast the model"):
        select(BASE.replace(dtype="float16"), "tpu-v6e")


def test_rejections_speak_the_chip_s_language() -> None:
    with pytest.raises(SelectionError, match="sublanes.*VMEM"):
        select(BASE.replace(block_size=12), "tpu-v5e", backend="PALLAS_ATTN")
    with pytest.raises(SelectionError, match="8 to 320"):
        select(BASE.replace(head_size=384), "tpu-v5e", backend="PALLAS_ATTN")
    decision = select(BASE, "tpu-v6e").decision
    assert decision.cache is not None
    assert (decision.prefill, decision.decode, decision.cache.layout) == ("PALLAS_ATTN",) * 2 + (
        "HND",
    )
