"""What do compiled TPU programs cost, ours beside those of the kernels that JAX ships? No TPU is needed.

    python benchmarks/tpu_cost.py

libtpu compiles each for a chip that isn't here, and XLA's own cost analysis is read: bytes between HBM
and the program, temporary memory. It sees gathers, copies and blocks that are handed to a kernel, and
not what a kernel moves by DMA of its own, nor its products: those are counted from the loops, ours from
the plan, the ragged kernel's, flash's and splash's from their sources, with the block sizes that JAX's
own tables choose. Both together stand beside each generation's roofline. Writes results/tpu/cost.json.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu import paged_attention as paged
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as ragged
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as ragged_kernel
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes as tuned
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from polyattn import LayerSpec
from polyattn_tpu.buckets import Buckets
from polyattn_tpu.configs import block_tokens, pages_per_step
from polyattn_tpu.planning import plan_dense, plan_paged
from polyattn_tpu.profiles import PROFILES
from polyattn_tpu.step import Step

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/plugins/tpu"))

import tpu_ahead

OUT = Path(__file__).parent / "results" / "tpu" / "cost.json"
PAGE, LENGTH, BLOCKS = 64, 2048, 2048
LLAMA = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
MHA = LayerSpec(num_heads=32, head_size=128, cached=False)
CHIPS = ("v5e", "v5p", "v6e", "v7x")
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def ours(spec: LayerSpec, phase: str, seqs: int, tokens: int) -> Case:
    return tpu_ahead.attention_case(
        spec, phase, block_size=PAGE, seqs=seqs, tokens=tokens, length=LENGTH, num_blocks=BLOCKS
    )


def ragged_sizes(arch: str, tokens: int) -> tuple[int, int]:
    """Return (pages of keys, queries) of a block of JAX's ragged kernel: of its table, or its default."""
    heads, both = ragged_kernel.get_min_heads_per_blk(32, 16, jnp.bfloat16, jnp.bfloat16)
    key = tuned.simplify_key(
        (jnp.bfloat16, jnp.bfloat16, heads, both // 2, 128, PAGE, tokens, LENGTH // PAGE)
    )
    table = tuned.TUNED_BLOCK_SIZES.get({"v5e": "TPU v5", "v6e": "TPU v6"}.get(arch, ""), {})
    pages, queries = table.get(key, (128, 32))
    return min(LENGTH // PAGE, pages), min(tokens, queries)


def ragged_case(arch: str, seqs: int, tokens: int) -> Case:
    """JAX's ragged paged attention: K and V of all heads in one page."""
    width = LENGTH // PAGE
    given = (
        array(tokens, 32, 128), array(BLOCKS, PAGE, 16, 128), array(seqs, dtype=jnp.int32),
        array(seqs, width, dtype=jnp.int32), array(seqs + 1, dtype=jnp.int32),
        array(1, dtype=jnp.int32),
    )  # fmt: skip
    pages, queries = ragged_sizes(arch, tokens)

    def run(*args: Any) -> Any:
        return ragged.ragged_paged_attention(
            *args,
            sm_scale=LLAMA.scale,
            num_kv_pages_per_block=pages,
            num_queries_per_block=queries,
        )

    return run, given


def paged_case(seqs: int) -> Case:
    """JAX's paged attention: decode alone."""
    pages = array(8, BLOCKS, PAGE, 128)
    lens, table = array(seqs, dtype=jnp.int32), array(seqs, LENGTH // PAGE, dtype=jnp.int32)

    def run(*args: Any) -> Any:
        return paged.paged_attention(*args, pages_per_compute_block=8)

    return run, (array(seqs, 32, 128), pages, pages, lens, table)


def flash_case(seqs: int) -> Case:
    one = array(seqs, 32, LENGTH, 128)
    return lambda q, k, v: flash.flash_attention(q, k, v, causal=True, sm_scale=MHA.scale), (
        one,
    ) * 3


def splash_case(seqs: int) -> Case:
    mask = masks.MultiHeadMask([masks.CausalMask((LENGTH, LENGTH))] * 32)
    kernel = splash.make_splash_mha_single_device(mask)
    return lambda q, k, v: jax.vmap(kernel)(q * MHA.scale, k, v), (
        array(seqs, 32, LENGTH, 128),
    ) * 3


def dense_case(seqs: int) -> Case:
    """Ours at the shapes of flash and splash: whole sequences, uncached MHA."""
    return tpu_ahead.attention_case(
        MHA, "prefill", block_size=PAGE, seqs=seqs, tokens=seqs * LENGTH, length=LENGTH
    )


CASES: dict[str, Callable[[str], Case]] = {
    "decode of 32, ours": lambda _: ours(LLAMA, "decode", 32, 32),
    "decode of 32, ragged_paged_attention": lambda arch: ragged_case(arch, 32, 32),
    "decode of 32, paged_attention": lambda _: paged_case(32),
    "prefill of 4 x 512, ours": lambda _: ours(LLAMA, "prefill", 4, 2048),
    "prefill of 4 x 512, ragged_paged_attention": lambda arch: ragged_case(arch, 4, 2048),
    "whole prompts, 2 x 2048, ours": lambda _: dense_case(2),
    "whole prompts, 2 x 2048, flash_attention": lambda _: flash_case(2),
    "whole prompts, 2 x 2048, splash_attention": lambda _: splash_case(2),
}


def analysis(arch: str, case: Case) -> dict[str, Any]:
    run, given = case
    try:
        # JAX's ragged kernel asks which TPU it is traced for.
        with jax.sharding.use_abstract_mesh(tpu_ahead.mesh(arch).abstract_mesh):
            found = tpu_ahead.compile_for(arch, run, *given)
    except Exception as error:  # a shipped kernel that this compiler refuses is a result
        return {"fails": str(error).splitlines()[0][:160]}
    cost, memory = found.cost_analysis(), found.memory_analysis()
    return {
        "bytes_that_xla_sees": cost.get("bytes accessed"),
        "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
    }


@dataclass(frozen=True)
class Work:
    """What a kernel's own loops do: bytes of keys and values by DMA, bytes of q and out, operations."""

    pages: int
    ends: int
    operations: int


STEPS = {
    "decode of 32": ([1] * 32, [LENGTH] * 32),
    "prefill of 4 x 512": ([512] * 4, [LENGTH] * 4),
    "prefill of a whole prompt": ([LENGTH], [LENGTH]),
    "ragged prefill": ([700, 31, 255, 90], [700, 1800, 255, 2048]),
    "24 decodes and a prefill of 512": ([1] * 24 + [512], [LENGTH] * 25),
    "decode of 32, window of 512": ([1] * 32, [LENGTH] * 32),
}
"""Query lengths and lengths."""


def spec_of(name: str) -> LayerSpec:
    return LLAMA.replace(sliding_window=512) if "window" in name else LLAMA


def our_work(spec: LayerSpec, step: Step) -> Work:
    """Count what our kernel does, from its plan: the steps that each tile's loop takes."""
    buckets = Buckets(tokens=max(step.num_tokens, 16), seqs=step.num_seqs, pages=4096)
    group = spec.gqa_ratio
    plan = (
        plan_paged(step, group, PAGE, buckets) if spec.cached else plan_dense(step, group, buckets)
    )
    page = PAGE if spec.cached else plan.pack.shape[1]
    keys, width = pages_per_step(page) * page, plan.tiles.step
    each = min(block_tokens(group), width)
    wide, taken, blocks, tiles = spec.head_size + spec.v_head_size, 0, 0, 0
    for seq, start in zip(plan.tiles.seq.tolist(), plan.tiles.start.tolist(), strict=True):
        queries, length = int(plan.pages.query_lens[seq]), int(plan.pages.seq_lens[seq])
        if not queries:
            continue
        first, skip, ends = length - queries + start, max(-start, 0), min(width, queries - start)
        low = max(0, first - spec.sliding_window + 1) if spec.sliding_window else 0
        steps = range(low // keys, math.ceil(min(first + width, length) / keys))
        taken, tiles = taken + len(steps), tiles + 1
        for step_keys in steps:
            blocks += math.ceil(ends / each) - max(skip, step_keys * keys - first) // each
    heads = spec.num_kv_heads
    ends = tiles * width * spec.num_heads * spec.head_size * 2
    ends += step.num_tokens * spec.num_heads * spec.v_head_size * 2
    return Work(
        taken * keys * wide * heads * 2, ends, blocks * each * group * keys * wide * heads * 2
    )


def ragged_work(arch: str, step: Step) -> Work:
    """Count what JAX's ragged kernel does: a block of queries walks all keys of each sequence in it."""
    pages, queries = ragged_sizes(arch, step.num_tokens)
    keys, taken, at = pages * PAGE, 0, 0
    for count, length in zip(step.query_lens, step.seq_lens, strict=True):
        blocks = (at + count - 1) // queries - at // queries + 1
        taken += blocks * math.ceil(length / keys)
        at += count
    ends = 2 * math.ceil(step.num_tokens / queries) * queries * 32 * 128 * 2
    each = keys * 256 * 8
    return Work(taken * each * 2, ends, taken * each * queries * 4 * 2)


def tiled_work(seqs: int, block: int) -> Work:
    """Count what flash and splash do: square blocks, those above the diagonal left out."""
    side = LENGTH // block
    taken = seqs * 32 * side * (side + 1) // 2
    return Work(
        taken * block * 256 * 2, 2 * seqs * LENGTH * 32 * 128 * 2, taken * block * block * 256 * 2
    )


def least(spec: LayerSpec, step: Step) -> Work:
    """Count what any kernel must: each key that is seen read once, each query's product with it."""
    read = operations = 0
    for queries, length in zip(step.query_lens, step.seq_lens, strict=True):
        window = spec.sliding_window or length
        read += min(length, queries + window - 1)
        operations += sum(min(window, length - queries + i + 1) for i in range(queries))
    wide = spec.head_size + spec.v_head_size
    return Work(
        read * spec.num_kv_heads * wide * 2,
        step.num_tokens * spec.num_heads * wide * 2,
        operations * spec.num_heads * wide * 2,
    )


def beside_roofline(work: Work, around: float, arch: str) -> dict[str, float]:
    """Return a program's bytes and operations and the time that the chip needs for them at best."""
    chip = dict(PROFILES)[f"tpu-{arch}"]
    assert chip.bandwidth and chip.matmul
    moved = work.pages + max(work.ends, around)
    times = moved / (chip.bandwidth * 1e3), work.operations / (chip.matmul * 1e6)
    return {"bytes": moved, "operations": work.operations, "roofline_us": round(max(times), 1)}


def counted(arch: str, seen: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return each step's counts, ours and theirs; `seen` is what XLA says of the programs around."""

    def around(name: str) -> float:
        return float(seen.get(name, {}).get("bytes_that_xla_sees") or 0)

    found: dict[str, Any] = {}
    for name, (queries, lengths) in STEPS.items():
        step, spec = Step.of(queries, lengths, np.zeros((len(lengths), 32), int)), spec_of(name)
        mine = our_work(spec, step)
        # A step that isn't compiled here: what surrounds the kernel is a transposition each way.
        outside = around(f"{name}, ours") or 3 * least(spec, step).ends
        found[name] = {
            "least": beside_roofline(least(spec, step), 0, arch),
            "ours": beside_roofline(mine, outside, arch),
            "ragged_paged_attention": beside_roofline(
                ragged_work(arch, step), around(f"{name}, ragged_paged_attention"), arch
            ),
        }
    prompts = Step.of([LENGTH] * 2, [LENGTH] * 2)
    name = "whole prompts, 2 x 2048"
    found[name] = {
        "least": beside_roofline(least(MHA, prompts), 0, arch),
        "ours": beside_roofline(our_work(MHA, prompts), around(f"{name}, ours"), arch),
    }
    for kernel in ("flash_attention", "splash_attention"):
        work = tiled_work(2, 128)
        found[name][kernel] = beside_roofline(work, around(f"{name}, {kernel}"), arch)
    for each in found.values():
        mine = each["ours"]
        for other in [name for name in each if name not in ("ours", "least")]:
            each[f"ours_to_{other}"] = {
                what: round(mine[what] / each[other][what], 2) for what in ("bytes", "operations")
            }
    return found


def main() -> None:
    chips = sys.argv[1:] or list(CHIPS)
    compiled: dict[str, Any] = {arch: {} for arch in chips}
    for arch in chips:
        for name, case in CASES.items():
            compiled[arch][name] = analysis(arch, case(arch))
            print(arch, name, compiled[arch][name], flush=True)
    found = {
        "command": " ".join(("python benchmarks/tpu_cost.py", *sys.argv[1:])),
        "date": str(date.today()),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "libtpu")},
        "shapes": f"{LLAMA}; pages of {PAGE}; {LENGTH} keys a sequence; whole prompts: {MHA}",
        "blocks of the ragged kernel": {arch: ragged_sizes(arch, 2048) for arch in chips},
        "compiled": compiled,
        "counted": {arch: counted(arch, compiled[arch]) for arch in chips},
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
