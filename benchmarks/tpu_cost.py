"""What do compiled TPU programs cost, ours beside those of the kernels that JAX ships? No TPU is needed.

    python benchmarks/tpu_cost.py

libtpu compiles each for a chip that isn't here, and XLA's own cost analysis is read: operations, bytes
between HBM and the program, temporary memory. It sees gathers, copies and blocks that are handed to a
kernel, and not what a kernel moves by DMA of its own: for ours that is counted from the plan, and
stands beside the least that any kernel must read. Writes results/tpu_cost.json.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
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
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from polyattn import LayerSpec
from polyattn_tpu import aot
from polyattn_tpu.configs import pages_per_step

OUT = Path(__file__).parent / "results" / "tpu_cost.json"
PAGE, LENGTH, BLOCKS = 64, 2048, 2048
LLAMA = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
MHA = LayerSpec(num_heads=32, head_size=128, cached=False)
CHIPS = ("v5e", "v5p", "v6e", "v7x")
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def ours(spec: LayerSpec, phase: str, seqs: int, tokens: int) -> Case:
    return aot.attention_case(
        spec, phase, block_size=PAGE, seqs=seqs, tokens=tokens, length=LENGTH, num_blocks=BLOCKS
    )


def ragged_case(seqs: int, tokens: int) -> Case:
    """JAX's ragged paged attention: K and V of all heads in one page."""
    width = LENGTH // PAGE
    given = (
        array(tokens, 32, 128), array(BLOCKS, PAGE, 16, 128), array(seqs, dtype=jnp.int32),
        array(seqs, width, dtype=jnp.int32), array(seqs + 1, dtype=jnp.int32),
        array(1, dtype=jnp.int32),
    )  # fmt: skip

    def run(*args: Any) -> Any:
        return ragged.ragged_paged_attention(
            *args, sm_scale=LLAMA.scale, num_kv_pages_per_block=8, num_queries_per_block=32
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
    return aot.attention_case(
        MHA, "prefill", block_size=PAGE, seqs=seqs, tokens=seqs * LENGTH, length=LENGTH
    )


CASES: dict[str, Callable[[], Case]] = {
    "decode of 32, ours": lambda: ours(LLAMA, "decode", 32, 32),
    "decode of 32, ragged_paged_attention": lambda: ragged_case(32, 32),
    "decode of 32, paged_attention": lambda: paged_case(32),
    "prefill of 4 x 512, ours": lambda: ours(LLAMA, "prefill", 4, 2048),
    "prefill of 4 x 512, ragged_paged_attention": lambda: ragged_case(4, 2048),
    "whole prompts, 2 x 2048, ours": lambda: dense_case(2),
    "whole prompts, 2 x 2048, flash_attention": lambda: flash_case(2),
    "whole prompts, 2 x 2048, splash_attention": lambda: splash_case(2),
}


def analysis(arch: str, case: Case) -> dict[str, Any]:
    run, given = case
    try:
        # JAX's ragged kernel asks which TPU it is traced for.
        with jax.sharding.use_abstract_mesh(aot.mesh(arch).abstract_mesh):
            found = aot.compile_for(arch, run, *given)
    except Exception as error:  # a shipped kernel that this compiler refuses is a result
        return {"fails": str(error).splitlines()[0][:160]}
    cost, memory = found.cost_analysis(), found.memory_analysis()
    return {
        "operations": cost.get("flops"),
        "bytes_that_xla_sees": cost.get("bytes accessed"),
        "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
    }


def pages_read(spec: LayerSpec, phase: str, seqs: int, tokens: int) -> dict[str, int]:
    """Count what our kernel asks for by DMA, from its plan, and the least that must be read once."""
    _, (plan, *_rest) = ours(spec, phase, seqs, tokens)
    keys = pages_per_step(PAGE) * PAGE
    wide = spec.num_kv_heads * (spec.head_size + spec.v_head_size) * 2
    moved = 0
    for seq, start in zip(np.asarray(plan.tiles.seq), np.asarray(plan.tiles.start), strict=True):
        queries, length = int(plan.pages.query_lens[seq]), int(plan.pages.seq_lens[seq])
        last = length - queries + min(int(start) + plan.tiles.step, queries)
        moved += math.ceil(last / keys) * keys * wide if queries else 0
    return {"moved_by_dma": moved, "least": seqs * LENGTH * wide}


def main() -> None:
    chips = sys.argv[1:] or list(CHIPS)
    found: dict[str, Any] = {
        "command": "python benchmarks/tpu_cost.py " + " ".join(sys.argv[1:]),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "libtpu")},
        "shapes": f"{LLAMA}; pages of {PAGE}; {LENGTH} keys a sequence; whole prompts: {MHA}",
        "our_pages": {
            "decode of 32": pages_read(LLAMA, "decode", 32, 32),
            "prefill of 4 x 512": pages_read(LLAMA, "prefill", 4, 2048),
        },
        "compiled": {},
    }
    for name, case in CASES.items():
        found["compiled"][name] = {arch: analysis(arch, case()) for arch in chips}
        print(name, found["compiled"][name], flush=True)
    OUT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
