"""TRITON_ATTN without a GPU: the kit in Triton's interpreter, and machine code for every target."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from forks import python
from interpreting import interpreted
from kits import conforms
from polyattn import LatentSpec, LayerSpec, SparseSpec
from polyattn.kernel import AttentionKind, RecurrentSpec

triton = pytest.importorskip("triton")

BASE = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
VARIANTS = {
    "plain": BASE,
    "head 64, sinks, window": BASE.replace(
        num_heads=64, head_size=64, learned_sinks=True, sliding_window=128
    ),
    "head 256, soft cap, window": BASE.replace(
        num_heads=16, head_size=256, logit_soft_cap=50.0, sliding_window=4096
    ),
    "head 96, MHA, lse": BASE.replace(num_kv_heads=32, head_size=96, needs_lse=True),
    "ALiBi": BASE.replace(num_kv_heads=32, alibi=True),
    "MQA of 71": BASE.replace(num_heads=71, num_kv_heads=1, head_size=64),
    "chunked, sink tokens": BASE.replace(chunk_size=8192, sliding_window=512, sink_tokens=4),
    "int8 cache": BASE.replace(kv_cache_dtype="int8"),
    "fp32": BASE.replace(dtype="float32"),
}
SHARED_KIB = {
    "sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "gfx90a": 64, "gfx942": 64,
    "gfx950": 160,
}  # fmt: skip
"""What a program may use of each chip's shared memory (NVIDIA) or LDS (AMD)."""
TARGETS = tuple(SHARED_KIB)
FP8_TARGETS = ("sm_90", "gfx942", "gfx950")


LARGEST = ("listed", "paged pieces", "prefix high", "merge", "merge many", "write")
"""Each kernel once, in the way that asks most of a chip: listed work, pieces of pages, high tiles."""


def compiled_bytes(spec: LayerSpec, arch: str, phases: tuple[str, ...] = ()) -> dict[str, int]:
    """Compile a layer's phases, of `phases` those that it has; returns the machine code's sizes."""
    from ahead import phases_of

    kind = "cubin" if arch.startswith("sm_") else "hsaco"
    compiled = {
        phase: launch.compiled(arch)
        for phase, launch in phases_of(spec, arch).items()
        if not phases or phase in phases
    }
    for phase, kernel in compiled.items():
        assert kernel.metadata.shared <= SHARED_KIB[arch] << 10, f"{phase} can't be launched"
    return {phase: len(kernel.asm[kind]) for phase, kernel in compiled.items()}


slow = pytest.mark.slow
sweep = pytest.mark.sweep  # not yet run whole on the work lists' kernels
WHOLE = [
    pytest.param(arch, variant, marks=slow if (arch, variant) == ("sm_90", "plain") else sweep)
    for arch in TARGETS
    for variant in VARIANTS
]
"""Every variant for every target; CI has one chip's plain layer."""
LIKE_OTHERS = ("sm_80", "gfx950")
"""sm_89 has the same instructions in less memory; gfx950 compiles over fp8 caches."""
BY_OTHERS = ("head 96, MHA, lse",)
"""Odd heads and LSEs are in `FEWEST`; tiles are those of heads of 128."""
QUICK = [
    *(
        pytest.param(
            "sm_90", variant,
            marks=() if variant == "ALiBi" else sweep if variant in BY_OTHERS else slow,
        )
        for variant in VARIANTS
        if variant != "plain"
    ),
    pytest.param("gfx942", "plain"),
    *(
        pytest.param(arch, "plain", marks=sweep if arch in LIKE_OTHERS else slow)
        for arch in TARGETS
        if arch not in ("sm_90", "gfx942")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("arch", "variant"), WHOLE)
def test_compiles_to_machine_code(arch: str, variant: str) -> None:
    sizes = compiled_bytes(VARIANTS[variant], arch)
    assert len(sizes) >= 9 and all(size > 500 for size in sizes.values())


@pytest.mark.parametrize(("arch", "variant"), QUICK)
def test_each_kernel_compiles_at_its_largest(arch: str, variant: str) -> None:
    """One chip's variants and the other chips' plain layers, in the ways that may not fit."""
    sizes = compiled_bytes(VARIANTS[variant], arch, LARGEST)
    assert len(sizes) >= 3 and all(size > 500 for size in sizes.values())


def bytes_apart(spec: str, arch: str, phases: tuple[str, ...]) -> int:
    """Compile in a process of its own: Triton keeps the fp8 conversions of the first target for all."""
    code = (
        f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); import test_triton as t; "
        f"print(min(t.compiled_bytes({spec}, {arch!r}, {phases!r}).values())); "
        "import ahead; ahead.look()"
    )
    done = python("-c", code, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)


WIDE = BASE.replace(num_heads=32, num_kv_heads=1, head_size=512)
WIDE_HEADS = {
    "512": WIDE,
    "320, groups of 128": WIDE.replace(num_heads=128, head_size=320),
    "512, soft cap, window, e4m3 cache": WIDE.replace(
        logit_soft_cap=50.0, sliding_window=1024, kv_cache_dtype="fp8_e4m3"
    ),
    "512, fp32, ALiBi": WIDE.replace(dtype="float32", alibi=True),
    "576": WIDE.replace(head_size=576),
    "576, values of 512, e5m2 cache": WIDE.replace(
        head_size=576, v_head_size=512, kv_cache_dtype="fp8_e5m2"
    ),
}


WIDEST = ("512, fp32, ALiBi", "576")
"""Heads whose tiles take the most memory: in bytes, and for want of a power of two."""
LEAST_MEMORY = ("sm_89", "gfx942")
"""The chip of each vendor with the least memory for a program."""
WIDE_CASES = {
    *(("sm_90", heads) for heads in WIDE_HEADS if heads != "512"),
    *product(LEAST_MEMORY, WIDEST),
}


@pytest.mark.parametrize(
    ("arch", "heads"),
    [
        pytest.param(arch, heads, marks=slow if (arch, heads) in WIDE_CASES else sweep)
        for arch in ("sm_80", "sm_89", "sm_90", "gfx90a", "gfx942")
        for heads in WIDE_HEADS
        if not ("e4m3" in heads and arch in ("sm_80", "gfx90a", "gfx942"))
    ],
)
def test_wide_heads_fit_in_shared_memory(arch: str, heads: str) -> None:
    """Tiles of fewer rows than a group has, where the chip's memory holds no more."""
    from polyattn_triton.variants import tallest_tile

    spec = WIDE_HEADS[heads]
    phases: tuple[str, ...] = ("paged pieces", "few", "merge", "write")
    if spec.gqa_ratio <= tallest_tile(spec, arch):
        phases += ("merge many", "listed", "prefix high")
    if "e4m3" in heads or "e5m2" in heads:
        assert bytes_apart(f"t.WIDE_HEADS[{heads!r}]", arch, phases) > 500
        return
    sizes = compiled_bytes(spec, arch, phases)
    assert set(sizes) == set(phases) and all(size > 500 for size in sizes.values())


@pytest.mark.parametrize("profile", ["h100-sxm", "a100", "rtx4090", "b200"])
def test_wide_heads_are_its_own(profile: str) -> None:
    """No library has a kernel of heads over 256. Prompts of heads over 512 are torch's: it is faster."""
    from polyattn import select

    for size, changes in ((264, {}), (512, {"kv_cache_dtype": "int8"}), (512, {"cached": False})):
        decision = select(WIDE.replace(head_size=size, **changes), profile).decision
        assert {decision.prefill, decision.decode} <= {"TRITON_ATTN", None}
    for spec in (
        WIDE.replace(head_size=576, cached=False), WIDE.replace(head_size=584),
        WIDE.replace(head_size=576, dtype="float32"),
    ):  # fmt: skip
        assert select(spec, profile).decision.prefill == "TORCH_SDPA"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["decode", "listed", "few"])
def test_hoppers_registers_hold_a_program_of_wide_heads(way: str) -> None:
    from ahead import compile_phase
    from polyattn_triton.variants import on_one, tile_config

    spec = WIDE.replace(num_heads=8)
    config = tile_config(spec, "sm_90", "few", 32 if way == "few" else 0)
    held = programs_on_one(compile_phase(spec, "sm_90", way), 32)
    assert held == on_one(spec, config, way) == 1


def programs_on_one(kernel: Any, most_spilled: int = 0) -> int:
    """How many programs of a compiled kernel Hopper's multiprocessor holds at once.

    `most_spilled`: bytes of a thread's registers that may lie in memory.
    """
    from machine_code import usage

    taken = usage(kernel.asm["cubin"])
    registers = -(-taken["REG"] // 8) * 8
    assert taken["STACK"] <= most_spilled, f"registers are spilled: {taken}"
    by_registers = 65536 // (registers * 32 * kernel.metadata.num_warps)
    return min(by_registers, 228 * 1024 // (kernel.metadata.shared + 1024))


MANY = {
    "plain": BASE,
    "window": BASE.replace(sliding_window=4096),
    "head 96, MHA, window": BASE.replace(num_kv_heads=32, head_size=96, sliding_window=2047),
    "chunked": BASE.replace(chunk_size=8192),
    "ALiBi": BASE.replace(num_kv_heads=32, alibi=True),
    "soft cap, lse": BASE.replace(logit_soft_cap=50.0, needs_lse=True),
    "groups of 8": BASE.replace(num_heads=64),
    "e4m3 cache": BASE.replace(kv_cache_dtype="fp8_e4m3"),
    "head 64, sinks, window": VARIANTS["head 64, sinks, window"],
}
FEWEST = ("plain", "head 96, MHA, window", "soft cap, lse", "e4m3 cache")
"""A tile of each kind: of a group's heads, of one head, with logits changed, of bytes."""


@pytest.mark.slow
def test_a_multiprocessor_holds_two_programs_of_any_step_s_kernel() -> None:
    from ahead import compile_phase

    layer = BASE.replace(batch_invariant="steps")
    assert programs_on_one(compile_phase(layer, "sm_90", "paged pieces")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prefill", "pieces"])
@pytest.mark.parametrize("more", [{}, {"logit_soft_cap": 50.0}], ids=["plain", "soft cap"])
def test_a_multiprocessor_holds_two_programs_of_prompts_with_heads_of_64(
    phase: str, more: dict[str, Any]
) -> None:
    """A thread of a group that is no power of two takes 145 registers, if it may: 339 us, not 271."""
    from ahead import compile_phase
    from polyattn_triton.variants import on_one, tile_config

    layer = LayerSpec(num_heads=21, num_kv_heads=7, head_size=64, **more)
    planned = on_one(layer, tile_config(layer, "sm_90", "prefill"), phase)
    assert programs_on_one(compile_phase(layer, "sm_90", phase)) == planned == 2


@pytest.mark.slow
def test_narrow_keys_beside_wide_values_have_the_registers_that_their_products_take() -> None:
    """A product of 64 x 256 takes 158 registers of a thread; ptxas refuses it a limit of 128."""
    from ahead import compile_phase

    compile_phase(
        LayerSpec(num_heads=20, num_kv_heads=4, head_size=64, v_head_size=256), "sm_90", "prefill"
    )


@pytest.mark.parametrize(
    "layer", [pytest.param(n, marks=slow if n in FEWEST else sweep) for n in MANY]
)
def test_a_multiprocessor_holds_as_many_programs_as_planned(layer: str) -> None:
    """One register too many and a fourth program waits: 307 us instead of 250 on an H200."""
    from ahead import phases_of
    from polyattn_triton.variants import FEW_ON_ONE, MANY_ON_ONE, on_one, tile_config

    held = {
        # What is constant over a stretch may be spilled: it is loaded once a tile.
        way: programs_on_one(launch.compiled("sm_90"), 32 if way in ("listed", "few") else 0)
        for way, launch in phases_of(MANY[layer], "sm_90").items()
        if launch.name == "decode_kernel"
    }
    assert held["decode"] >= MANY_ON_ONE
    fewest = FEW_ON_ONE if MANY[layer].kv_cache_dtype == "auto" else 2
    assert all(held[way] >= fewest for way in held.keys() & {"split", "many"})
    for way, rows in (("listed", 0), ("few", 4 * MANY[layer].gqa_ratio)):
        config = tile_config(MANY[layer], "sm_90", "few", rows)
        assert held[way] >= on_one(MANY[layer], config, way)


@pytest.mark.slow
@pytest.mark.parametrize("cached", ["auto", "fp8_e4m3"])
def test_it_holds_as_many_programs_over_shared_prefixes(cached: str) -> None:
    """Of each tile that was measured; nothing of a thread lies in memory."""
    from ahead import compile_phase
    from polyattn_triton.configs import prefix_configs

    configs = prefix_configs("sm_90", 128, 2)
    assert len(configs) > 2
    for config in configs:
        spec = BASE.replace(kv_cache_dtype=cached)
        kernel = compile_phase(spec, "sm_90", "prefix low", tile=config)
        assert programs_on_one(kernel) >= config.on_one, config
        # Only small floats are multiplied in float16, whose range bfloat16's numbers leave.
        assert ("xf16>" in kernel.asm["ttir"]) == (cached != "auto")


@pytest.mark.slow
@pytest.mark.parametrize("arch", FP8_TARGETS)
def test_compiles_fp8_caches(arch: str) -> None:
    assert bytes_apart("t.BASE.replace(kv_cache_dtype='fp8_e4m3')", arch, LARGEST) > 500


FAMILY_MODELS = (
    "deepseek-v3", "deepseek-v2-lite", "deepseek-v3.2", "jamba-v0.1", "mamba2-2.7b",
    "minimax-text-01", "qwen3-next-80b-a3b", "lfm2-1.2b",
)  # fmt: skip


SAMPLE = ("deepseek-v3", "qwen3-next-80b-a3b")
"""An MLA and a recurrence."""
FAMILIES_ELSEWHERE = {*product(LEAST_MEMORY, SAMPLE), ("sm_100", "deepseek-v3")}
"""What CI compiles beside all of sm_90: sm_100's accumulators have a memory of their own."""
FAMILY_CASES = [
    *(
        pytest.param("sm_90", model, marks=() if model == "deepseek-v3.2" else slow)
        for model in FAMILY_MODELS
    ),
    *(
        pytest.param(arch, model, marks=slow if (arch, model) in FAMILIES_ELSEWHERE else sweep)
        for arch in TARGETS
        if arch != "sm_90"
        for model in FAMILY_MODELS
    ),
]


FAMILY_STEPS = ([(1, 300)], [(3, 300)], [(300, 300)])
"""A decode, drafts, a prompt."""
SMALLER = {"selective_kernel": {"BLOCK_D": 32, "BLOCK_T": 4}}
"""Tiles of drafts for prompts on sm_90, where LLVM takes 17 s for a prompt's own: GPUs run those."""


def compiled_families(
    spec: LayerSpec, arch: str, backend: str, steps: Sequence[Any] = FAMILY_STEPS, **step: Any
) -> dict[str, list[Any]]:
    """Compile what a layer's steps launch beside stores and TRITON_ATTN; returns it by kernel."""
    from ahead import launches

    others = ("write_kernel", "prefill_kernel", "prefill_hopper_kernel")
    every = [one for lengths in steps for one in launches(spec, arch, lengths, backend, **step)]
    each = {(one.name, one.constants): one for one in every if one.name not in others}
    made: dict[str, list[Any]] = {}
    for (name, _), launch in each.items():
        smaller = SMALLER.get(name, {}) if arch == "sm_90" else {}
        made.setdefault(name, []).append(launch.but(**smaller).compiled(arch))
    kind = "cubin" if arch.startswith("sm_") else "hsaco"
    assert all(len(kernel.asm[kind]) > 500 for kernels in made.values() for kernel in kernels)
    return made


FAMILY_KERNELS = {
    AttentionKind.MAMBA1: {"mamba1_kernel", "selective_kernel"},
    AttentionKind.MAMBA2: {"step_kernel", "gated_kernel"},
    AttentionKind.LINEAR: {"step_kernel", "gated_kernel"},
    AttentionKind.GDN: {"step_kernel", "system_kernel", "delta_kernel"},
    AttentionKind.SHORT_CONV: {"conv_kernel", "conv_drafts_kernel"},
}


@pytest.mark.parametrize(("arch", "model"), FAMILY_CASES)
def test_families_compile_to_machine_code(arch: str, model: str) -> None:
    from polyattn.tools.cli.models import bundled

    spec = LayerSpec.from_hf_config(bundled("models", f"{model}.json"))[0].replace(rope=None)
    if spec.latent:
        name = "TRITON_MLA_SPARSE" if spec.sparse else "TRITON_MLA"
        made = compiled_families(spec, arch, name, (*FAMILY_STEPS, [(1, 16)] * 400))
        return
    made = compiled_families(spec, arch, "TRITON_SCAN")
    drafts = compiled_families(spec, arch, "TRITON_SCAN", FAMILY_STEPS[1:2], targets="tokens")
    assert made.keys() | drafts.keys() == FAMILY_KERNELS[spec.kind]
    by_batch = spec.kind in (AttentionKind.MAMBA1, AttentionKind.GDN)  # no wider level is theirs
    alike = spec.replace(batch_invariant="batch" if by_batch else "steps")
    compiled_families(alike, arch, "TRITON_SCAN", FAMILY_STEPS[:1])


LATENTS = LayerSpec(
    kind="mla", num_heads=128, head_size=192, v_head_size=128,
    latent=LatentSpec(rank=512, rope_head_size=64),
)  # fmt: skip
"""DeepSeek-V3's."""


@pytest.mark.slow
@pytest.mark.parametrize(("few", "block"), [(0, 16), (1, 64), (2, 128)])
def test_latents_by_roles_compile_to_machine_code(few: int, block: int) -> None:
    """Of one token, of several, of several that see the same keys.

    A program runs most of its code once. To fetch 15 KB of it takes 2 us, and 20 while others read.
    """
    from machine_code import code_of

    step = [(1, 300)] if not few else [(3, 300)] if few == 1 else [(1, 900)] * 4
    more = {"shared": 3} if few == 2 else {}
    spec = LATENTS.replace(block_size=block)
    kernels = compiled_families(spec, "sm_90", "TRITON_MLA", [step], **more)["latents_kernel"]
    assert len(kernels) == (2 if few == 2 else 1)  # what is shared, and each one's own
    for kernel in kernels:
        assert kernel.metadata.shared <= 227 << 10
        assert "wgmma" in kernel.asm["ptx"]
        assert few or len(code_of(kernel.asm["cubin"])) <= 80 << 10


@pytest.mark.slow
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("stored", ["auto", "fp8"])
@pytest.mark.parametrize("heads", [16, 32])
def test_latents_by_few_heads_compile_to_machine_code(heads: int, stored: str, block: int) -> None:
    """Two programs leave each other room on a multiprocessor, and hardly a register is spilled."""
    from machine_code import code_of, usage

    spec = LATENTS.replace(num_heads=heads, kv_cache_dtype=stored, block_size=block)
    made = compiled_families(spec, "sm_90", "TRITON_MLA", FAMILY_STEPS[:1])
    (kernel,) = made["few_heads_kernel" if stored == "auto" else "latent_bytes_kernel"]
    assert 2 * (kernel.metadata.shared + 1024) <= 228 << 10
    assert "wgmma" in kernel.asm["ptx"]
    taken = usage(kernel.asm["cubin"])
    assert taken["REG"] <= 128 and taken["STACK"] <= 64
    assert len(code_of(kernel.asm["cubin"])) <= (64 if stored == "auto" else 76) << 10


@pytest.mark.parametrize(
    ("size", "arch"),
    [
        pytest.param(320, "sm_90", marks=sweep),  # tiles of 512, as on the other chip
        *(
            pytest.param(*case, marks=slow)
            for case in ((320, "gfx942"), (512, "sm_90"), (512, "gfx942"))
        ),
    ],
)
def test_values_in_keys_compile_to_machine_code(arch: str, size: int) -> None:
    """DeepSeek-V4's heads of 512: a sparse layer over rows, by MLA's kernel without a rope key."""
    sparse = SparseSpec(budget=512, tokens_per_entry=4, value_in_key=True)
    spec = LayerSpec(
        kind="sparse", num_heads=64, num_kv_heads=1, head_size=size, dtype="bfloat16",
        learned_sinks=True, sparse=sparse,
    )  # fmt: skip
    made = compiled_families(spec, arch, "TRITON_MLA_SPARSE", ([(1, 300)], [(1, 4)] * 1000))
    kernels = made["mla_kernel"]
    assert len(kernels) == 2, "keys split, and whole"
    assert arch != "sm_90" or all(kernel.metadata.shared <= 227 << 10 for kernel in kernels)


BY_TOKEN = {
    "kda": {"channel_kernel", "pair_kernel", "chunk_kernel"},
    "rwkv7": {"channel_kernel", "pair_kernel", "chunk_kernel"},
    "rwkv6": {"channel_kernel"},
    "rg_lru": {"unit_kernel", "unit_pieces_kernel"},
    "phi_linear": {"channel_kernel", "phi_kernel"},
}


@pytest.mark.parametrize(
    "arch", [pytest.param(a, marks=slow if a == "sm_90" else sweep) for a in TARGETS]
)
@pytest.mark.parametrize(
    "kind", ["kda", "rwkv6", "rwkv7", "rg_lru", "phi_linear", "phi_linear of a variant"]
)
def test_scans_by_channel_and_token_compile_to_machine_code(arch: str, kind: str) -> None:
    from polyattn.conformance.cases.functions import FEATURES, registered

    heads, size = (2560, 1) if kind == "rg_lru" else (32, 128)
    sizes = {"num_heads": heads, "head_size": size}
    form = RecurrentSpec(
        feature_map="elu+1" if kind == "phi_linear" else None, qk_norm=kind == "kda"
    )
    kind, _, own = kind.partition(" of ")
    if own:
        sizes, form = sizes | {"variant": registered(FEATURES)}, RecurrentSpec()
    spec = LayerSpec(kind=kind, dtype="bfloat16", recurrent=form, **sizes)
    name = "TRITON_SCAN" if kind in ("kda", "rwkv7") else "TRITON_TOKEN_SCAN"
    made = compiled_families(spec, arch, name, (*FAMILY_STEPS, [(2000, 2000)], [(64, 64)] * 16))
    assert made.keys() == BY_TOKEN[kind]


def test_compilation_can_fail() -> None:
    """The negative control: a tile whose rows are no power of two is not waved through."""
    from ahead import launch_of

    with pytest.raises(triton.CompilationError):
        launch_of(BASE, "sm_90", "prefill").but(BLOCK_M=96).compiled("sm_90")


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param("pair and (sliding_window or chunked)", marks=sweep),
        pytest.param("pair and not (sliding_window or chunked)", marks=sweep),
        # The sweep has infinities, which spoil as NaN does, and numbers in decodes; `test_specified.py`
        # has specified bits with an LSE.
        pytest.param(
            "feature_lse and not specified or isolation-nan or isolation-numbers-mixed or plans",
            marks=pytest.mark.slow,
        ),
        # Shared prefixes in its own launch; the sweep has every format, ratio and dtype.
        pytest.param(
            "forest--many_rows or forest and not nvfp4 and "
            "(learned_sinks or head_scales or alibi-levels or sliding_window-levels or reuse)",
            marks=pytest.mark.slow,
        ),
        pytest.param("decoder and not pair", marks=sweep),
        pytest.param("not pair and not decoder", marks=sweep),
    ],
)
def test_conforms_in_the_interpreter(chosen: str) -> None:
    conforms("TRITON_ATTN", 4, "-k", chosen, TRITON_INTERPRET="1")


def test_both_mla_kernels_are_launched_alike() -> None:
    """One call site launches either: their arguments before the constants are the same."""
    from polyattn_triton.hopper.mla import mla_hopper_kernel
    from polyattn_triton.kernels.mla import mla_kernel

    names = [k.arg_names[: k.arg_names.index("HEADS")] for k in (mla_hopper_kernel, mla_kernel)]
    assert names[0] == names[1] and names[0][-1] == "table_s"


def test_a_triton_without_what_hoppers_kernel_needs_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from polyattn import AttentionKind
    from polyattn.spec.latent import LatentSpec
    from polyattn_triton import mla

    spec = LayerSpec(
        kind=AttentionKind.MLA, num_heads=128, num_kv_heads=1, head_size=192, v_head_size=128,
        latent=LatentSpec(rank=512, rope_head_size=64),
    )  # fmt: skip
    assert mla.mla_config(spec, "sm_90").hopper and not caplog.records
    monkeypatch.setattr(mla, "mla_hopper_kernel", None)
    assert not mla.mla_config(spec, "sm_90").hopper
    assert "install triton 3.6" in caplog.text
    caplog.clear()
    assert not mla.mla_config(spec, "sm_100").hopper and not caplog.records


def test_splits_fill_the_multiprocessors_evenly() -> None:
    """Within 1% of its configuration's fastest on an H200 (132), by sequences times KV heads."""
    from polyattn_triton.variants import even_splits

    chosen = {32: 8, 40: 6, 56: 7, 64: 4, 80: 3, 96: 4, 128: 3, 160: 2, 192: 2, 256: 2, 320: 1}
    assert {programs: even_splits(programs, 132) for programs in chosen} == chosen
    assert even_splits(10_000, 132) == 1


UNITS = """
import torch, triton, triton.language as tl
import polyattn_triton.launch
from polyattn_triton.kernels.decode import power_below
from triton.runtime import interpreter

patch, patched = interpreter._patch_builtin, []
interpreter._patch_builtin = lambda *of: (patched.append(of[0]), patch(*of))

@triton.jit
def kernel(X, OUT, N: tl.constexpr):
    at = tl.arange(0, N)
    x = power_below(tl.load(X + at))
    tl.store(OUT + at, power_below(x))

x = torch.tensor([0.0, 1.0, 1.5, 3.9, 4.0, 0.3, 7e5, 3e38])
out = torch.full_like(x, torch.nan)
kernel[(1,)](x, out, 8)
assert out.tolist() == [1.0, 1.0, 1.0, 2.0, 4.0, 0.25, 2.0**19, 2.0**127], out
assert patched.count(tl) == 1, patched
"""


def test_the_unit_of_a_query_is_a_power_of_two(tmp_path: Path) -> None:
    """What float16 holds of a query that is divided by it is exact. A launch patches once."""
    (tmp_path / "units.py").write_text(UNITS)
    interpreted(tmp_path / "units.py")


@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize("sms", [16, 132])
def test_a_captured_graph_serves_any_lengths(kv_heads: int, sms: int) -> None:
    """Its grid, its workspace and where its work lies stay, whatever is planned after it."""
    import torch
    from polyattn import Batch, Device
    from polyattn.selection.cache_format import format_of
    from polyattn_triton.attention import TritonAttention

    spec = BASE.replace(num_kv_heads=kv_heads, graph_capture="single_token_decode")
    device = Device("cuda", "sm_90", torch_device="cpu")
    backend = TritonAttention(spec, format_of(spec, device, "NHD", 16), device)
    backend.num_sms = sms
    random, seen = torch.Generator().manual_seed(0), set()
    for count in [1, 2, 3, 5, 16, 31, 64, 263, 300]:
        table = torch.zeros(count, 512, dtype=torch.int32)
        captured = backend.plan(Batch.from_lens([1] * count, [8192] * count, table, 16))
        before = captured.work.clone()
        for _ in range(4):
            lens = torch.randint(0, 8193, (count,), generator=random)
            lens[torch.randint(count, (1,), generator=random)] = 1
            batch = Batch([*range(count + 1)], lens.tolist(), table)
            plan = backend.plan(batch, reuse=captured)
            assert (plan.grid, plan.variant, plan.merging) == (
                captured.grid, captured.variant, captured.merging,
            )  # fmt: skip
            assert plan.work.data_ptr() == captured.work.data_ptr()
        assert not torch.equal(before, captured.work)
        space = backend.workspace
        seen.add((space.parts.data_ptr(), space.part_lse.data_ptr()))
        rows = 2 * plan.grid[0] * kv_heads * plan.rows
        assert space.part_lse.numel() >= rows
        assert space.parts.numel() >= rows * spec.v_head_size
    assert len(seen) == 1
