"""Compiles for real, for an sm_90 that is not here, what a group with functions of its own warms up.

Last it says how many kernels this process compiled by itself, and how many others did.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import triton
from polyattn import LayerSpec
from polyattn.selection.cache_format import CacheFormat
from polyattn_triton.attention import TritonAttention
from polyattn_triton.compiling import side_by_side
from polyattn_triton.kernels.decode import decode_kernel
from polyattn_triton.kernels.prefill import prefill_kernel
from polyattn_triton.kernels.tile_lists import list_kernel

sys.path.insert(0, str(Path(__file__).parents[2]))
from ahead import compiling_for, device_of


def main() -> None:
    compiled, sent = [], []
    listener: Any = lambda *, cache_hit, **_: None if cache_hit else compiled.append(1)  # noqa: E731
    triton.knobs.compilation.listener = listener
    compile_elsewhere = side_by_side.Compilers.compile

    def compile_and_count(self: side_by_side.Compilers, asked: Any) -> None:
        sent.append(1)
        compile_elsewhere(self, asked)

    side_by_side.Compilers.compile = compile_and_count  # type: ignore[method-assign]
    spec = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64, block_size=16)
    spec = spec.replace(**json.loads(sys.argv[1]))
    form = CacheFormat(
        block_size=16, num_kv_heads=2, head_size=64, v_head_size=64, dtype="bfloat16"
    )
    backend = TritonAttention(spec, form, device_of("sm_90"))
    with compiling_for("sm_90"):
        backend.warm_up(tuple(sys.argv[2:]))
        for kernel in (prefill_kernel, decode_kernel, list_kernel):
            found = list(kernel.device_caches[0][0].values())
            assert all(compiled.asm["cubin"] for compiled in found)
            print(kernel.__name__, len(found))
    print("here", len(compiled))
    print("elsewhere", len(sent))


main()
