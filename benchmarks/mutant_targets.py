"""What seeds bugs where, and which tests look for them: the targets of `mutants.py`."""

from __future__ import annotations

from typing import NamedTuple

TRITON = "plugins/triton/src/polyattn_triton/"
CPU_PLUGIN = "plugins/cpu/src/polyattn_cpu/"
NATIVE = CPU_PLUGIN + "native/csrc/"
TPU = "plugins/tpu/src/polyattn_tpu/"
HPU = "plugins/hpu/src/polyattn_hpu/"
TESTS = "tests/plugins/triton/"
CPU = "tests/plugins/cpu/"
SHAPES = ".py::test_every_shape_and_storage_agrees_with_float64"
FAMILIES = "tests/families/test_"
RANKS = "test_each_key_and_each_token_is_one_rank_s"
PLANS = ("tests/runtime/test_arithmetic.py", "tests/runtime/test_reads.py")


class Judge(NamedTuple):
    """One run of pytest that looks for bugs."""

    arguments: tuple[str, ...]
    environment: dict[str, str] = {}


class Target(NamedTuple):
    """Files, what looks for bugs in them, narrow first, functions that choose among right plans, and for
    which instruction set C++ is built, with its base; "": the last but the generic one."""

    files: tuple[str, ...]
    judges: tuple[Judge, ...]
    spared: frozenset[str] = frozenset()
    isa: str = ""


def kit(backend: str, chosen: str, **environment: str) -> Judge:
    bounded = ("-p", "tests.plugins.triton.bounds") if "TRITON_INTERPRET" in environment else ()
    arguments = (*bounded, "--pyargs", "polyattn.conformance", "--polyattn-backend", backend,
                 "--polyattn-device", "cpu", "--polyattn-budget", "1", "--polyattn-seed", "0",
                 "-k", chosen)  # fmt: skip
    return Judge(arguments, environment)


def tests(*names: str) -> Judge:
    return Judge(names)


def slow(*arguments: str) -> Judge:
    return Judge(("-m", "slow", *arguments))


def sources(*names: str) -> tuple[str, ...]:
    return tuple(NATIVE + name for name in names)


def kernels(*names: str) -> tuple[str, ...]:
    return tuple(f"{TRITON}kernels/{name}.py" for name in names)


MIXED = "mixed and (feature_lse or gqa_3 or feature_sliding_window or feature_non_causal)"
OTHERS = "sink_tokens-mixed or dtype_int8-mixed or decoder_sigmoid-mixed or decoder_custom-mixed"
LISTED = "beside_a_mask or forest or sparse-- or reuse or plans or stale"
LISTS = "functions-decoder_ and (custom- or block_sparse- or vision) and (mixed or decode) and not pages"
WHOLE = "not search and not refusal and not process and not many_"
SCANS = "(recurrence and (odd or three_each or rg_lru)) or short_conv-mixed"
ROWS = "(gptj_24_of_64_bias or neox_v_32_bias or cache_nvfp4 or neox_cache_int8) and some"
SHORT = "(heads_5 or rank_512 or lse or size_16 or mixed or short) and not isolation and not search"
TRITON_KIT = kit("TRITON_ATTN", f"({MIXED}) or ({LISTED})", TRITON_INTERPRET="1")
LATENT_KIT = kit("TRITON_MLA", SHORT, TRITON_INTERPRET="1")
SPARSE_KIT = kit("TRITON_MLA_SPARSE", SHORT, TRITON_INTERPRET="1")
NATIVE_KIT = kit("NATIVE_ATTN", f"({MIXED}) or ({LISTED}) or decode")
EDGES = slow(TESTS + "test_edges.py")
RACES = Judge(("-m", "sweep", CPU + "test_native_sanitized.py", "-k", "race"))
STORE_KIT = kit("NATIVE_STORE", WHOLE)
MEMORY = Judge(
    ("-m", "sweep", CPU + "test_native_sanitized.py", "-k", "bounds and tests"), {"ISAS": "avx2"}
)
FORMATS = "rows_ and (decode or prefill or chunked or gqa_3 or stale)"
TARGETS = {
    "ranges": Target(
        ("core/src/polyattn/spec/key_ranges.py",), (tests("tests/spec/test_key_ranges.py"),)
    ),
    "schedule": Target(
        (TRITON + "schedule.py",),
        (tests(*PLANS, TESTS + "test_schedule.py"),),
        frozenset({"reading", "merging", "programs", "splits", "fullest"}),
    ),
    "planning": Target(
        (TRITON + "planning.py", TRITON + "mla.py"),
        (
            tests(*PLANS, TESTS + "test_planned.py"), EDGES,
            slow(TESTS + "test_generated.py", "-k", "interpreter"), TRITON_KIT, LATENT_KIT, SPARSE_KIT,
        ),
        frozenset({"splits", "_are_few", "_resident", "__init__", "_reserve"}),
    ),
    "prefixes": Target(
        (TRITON + "prefix_schedule.py",), (tests(*PLANS, TESTS + "test_prefix_schedule.py"),)
    ),
    "apart": Target(
        ("core/src/polyattn/runtime/decompositions.py", "core/src/polyattn/families/mla/planning.py",
         "core/src/polyattn/families/attention/text_positions.py",
         "core/src/polyattn/runtime/step/block_tables.py",
         "integrations/context_parallel/src/polyattn_context_parallel/shards.py"),
        (
            tests(
                PLANS[1], "tests/runtime/test_portions.py", FAMILIES + "mla_and_recurrent.py",
                FAMILIES + "text_positions.py", FAMILIES + "dense_context.py",
                "tests/runtime/test_plans.py", "-k", "not conforms",
            ),
            tests("integrations/context_parallel/tests/test_context_parallel.py::" + RANKS),
        ),
    ),
    "native": Target(
        sources("api.cpp", "kernels.cpp", *(
            f"{n}.h" for n in ("item", "softmax", "dot_path", "matrix_path", "float_engine")
        )),
        (
            tests(*PLANS, *(CPU + f"test_native{name}" for name in ("_plans.py", "_masks.py", SHAPES))),
            NATIVE_KIT, kit("NATIVE_MLA", WHOLE), STORE_KIT, RACES,
        ),
    ),
    "row formats": Target(
        sources("rows.h", "row_keys.h", "row_path.h"),
        (
            tests(CPU + "test_native_rows.py"), kit("NATIVE_ATTN", FORMATS),
            slow(CPU + "test_native_rows.py"), MEMORY,
        ),
    ),
    "pairs": Target(
        sources("row_keys.h", "row_path.h", "row_pairs.h", "pair_dots.h", "dot_products.h", "dot_path.h"),
        (
            tests(CPU + "test_native_rows.py"), kit("NATIVE_ATTN", FORMATS),
            slow(CPU + "test_native_rows.py"),
        ),
        isa="avx512_bf16",
    ),
    "tiles": Target(
        sources("tile_path.h", "tile_steps.h", "wide_path.h", "wide_steps.h"),
        (tests(CPU + "test_native_rows.py"), NATIVE_KIT, kit("NATIVE_MLA", WHOLE)), isa="amx",
    ),
    "index": Target(
        sources("index.h", "choose.cpp"),
        (
            tests(CPU + "test_native_index.py"), kit("NATIVE_INDEX", WHOLE),
            slow(CPU + "test_native_index.py"), MEMORY,
        ),
    ),
    "generated rows": Target(
        (TRITON + "functions/rows.py", CPU_PLUGIN + "native/rows.py"),
        (
            tests(CPU + "test_native_rows.py", TESTS + "test_rows.py"),
            slow(CPU + "test_native_rows.py", TESTS + "test_rows.py"), EDGES,
        ),
    ),
    "native stores": Target(
        sources("store.h", "convert.h", "scan.h", "scan_keys.h", "scan_mamba.h", "scan_conv.h"),
        (
            tests(CPU + "test_native_scan.py", CPU + "test_native_bytes.py"), STORE_KIT,
            kit("NATIVE_SCAN", WHOLE),
        ),
    ),
    "pool": Target(
        sources("pool.cpp", "pool.h"), (tests(CPU + "test_native_threads.py"), NATIVE_KIT, RACES),
    ),
    "triton": Target(kernels("decode", "prefill", "parts", "tiles", "softmax"), (EDGES, TRITON_KIT)),
    "hopper": Target(
        tuple(f"{TRITON}hopper/{n}.py" for n in ("prefill", "packed", "mla", "items", "copies", "rows")),
        (
            tests(TESTS + "test_gluon_on_host.py", TESTS + "test_hopper_items.py"),
            slow(TESTS + "test_gluon_on_host.py"),
        ),
    ),
    "ranking": Target(
        kernels("index", "choice"),
        (
            slow(TESTS + "test_choice_kernels.py", "-k", "named"),
            kit("TRITON_INDEX", WHOLE, TRITON_INTERPRET="1"),
        ),
    ),
    "lists": Target(
        kernels("tile_lists"),
        (
            kit("TRITON_ATTN", LISTS, TRITON_INTERPRET="1"),
            slow(TESTS + "test_generated.py", "-k", "interpreter"),
        ),
    ),
    "latents": Target(kernels("mla"), (EDGES, LATENT_KIT, SPARSE_KIT)),
    "shared": Target(
        kernels("prefix"),
        (
            kit("TRITON_ATTN", "forest--", TRITON_INTERPRET="1"),
            tests(TESTS + "test_triton.py", "-k", "over_shared_prefixes and bf16"),
        ),
    ),
    "scans": Target(
        kernels("scan", "step", "token", "channels"),
        tuple(kit(n, SCANS, TRITON_INTERPRET="1") for n in ("TRITON_SCAN", "TRITON_TOKEN_SCAN")),
    ),
    "stores": Target(
        kernels("rotated_store", "four_bit_store"),
        (tests(TESTS + "test_rotated_store.py"), kit("TRITON_STORE", ROWS, TRITON_INTERPRET="1")),
    ),
    "pallas": Target(
        (TPU + "kernel.py", TPU + "planning.py"),
        (
            tests(PLANS[1], "tests/plugins/tpu/test_tpu_masks.py"),
            slow("tests/plugins/tpu/test_tpu_masks.py", "-k", "far_behind"),
            kit("PALLAS_ATTN", f"({MIXED}) or stale or ({OTHERS})", PALLAS_INTERPRET="1"),
            kit("XLA_SCAN", "recurrence-gdn and (odd or three_each)", PALLAS_INTERPRET="1"),
        ),
    ),
    "hpu": Target(
        (HPU + "metadata.py", HPU + "unified.py"),
        (
            tests(
                PLANS[1], "tests/plugins/hpu/test_hpu_unified.py", "tests/runtime/test_empty_steps.py"
            ),
            kit("HPU_ATTN", f"({MIXED}) or ({LISTED}) or empty or cache_dtype"),
        ),
    ),
}  # fmt: skip
