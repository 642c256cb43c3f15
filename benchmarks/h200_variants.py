"""Variants and masks on an H200: generated functions beside built-in ones, FLEX_ATTENTION and FlashInfer.

python benchmarks/h200_variants.py [--seconds 400] [--out variants.json]

Each row: checked against the float64 reference over a few heads and rows (on the device), then timed.
Prefill of 4 x 4,096 and decode of 64 x 4,096, 32/8 heads of 128, bf16, over pages of 16; decodes that
read 64 of 2,048 pages; blocks of 128 x 128 of which a quarter is seen. FlashInfer's JIT: FlashSigmoid as
its documentation declares it, compiled while the rest is measured (`h200_flashinfer_sigmoid.py`). Compile
times are of each row's build and first call, in this process and again in a new one. With
`TRITON_INTERPRET=1` the same rows run small, on the CPU, without being timed: a rehearsal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from beside import compiled_kernels, finished, started
from polyattn import (
    Attention,
    AttentionVariant,
    Batch,
    BlockSparseMask,
    CustomMask,
    LayerGroup,
    LayerSpec,
    register_variant,
    select,
)  # fmt: skip
from polyattn.families.attention import reference
from polyattn.families.attention.alibi import alibi_slopes
from polyattn.runtime.backend import LayerParams
from polyattn.runtime.functions.variants import t5_buckets
from polyattn.workload.compare import output_error
from timing import kernel_us
from torch import Tensor

REHEARSAL = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE, LONG, DTYPE = ("cpu", 64, "float32") if REHEARSAL else ("cuda", 4096, "bfloat16")
BASE = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, dtype=DTYPE, block_size=16)
PREFILL, DECODE = [(LONG, LONG)] * (1 if REHEARSAL else 4), [(1, LONG)] * (2 if REHEARSAL else 64)
FEW = [(16, LONG)] * len(DECODE)
PAGES = 16 if REHEARSAL else 2048
READ = 4 if REHEARSAL else 64
BLOCK = 16 if REHEARSAL else 128
ROWS: list[dict[str, Any]] = []
DEADLINE = float("inf")


def cap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return 30.0 * torch.tanh(score / 30.0)


def alibi(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *, slopes: Tensor
) -> Tensor:
    return score + slopes[h] * (kv_idx - q_idx)


def one_document(
    b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *, document: Tensor
) -> Tensor:
    return document[b, q_idx] == document[b, kv_idx]


def tempered(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *, temperature: Tensor
) -> Tensor:
    return score * temperature[h]


VARIANTS = (
    AttentionVariant(name="cap", score_mod=cap),
    AttentionVariant(
        name="alibi_function", score_mod=alibi, inputs={"slopes": "float32[num_heads]"}
    ),
    AttentionVariant(
        name="one_document", mask_mod=one_document, inputs={"document": "int32[num_seqs, *]"}
    ),
    AttentionVariant(
        name="tempered", score_mod=tempered, inputs={"temperature": "float32[num_heads]"}
    ),
)


def document_ids(num_seqs: int, length: int) -> Tensor:
    return (
        (torch.arange(length, device=DEVICE) // (LONG // 8))
        .int()
        .expand(num_seqs, length)
        .contiguous()
    )


def synchronize() -> None:
    if not REHEARSAL:
        torch.cuda.synchronize()


class Case:
    """A layer over a batch on one backend."""

    def __init__(
        self, spec: LayerSpec, backend: str, pairs: list[tuple[int, int]],
        layer: dict[str, Any] | None = None, step: dict[str, Any] | None = None, mask: Any = None,
    ):  # fmt: skip
        generator = torch.Generator(DEVICE).manual_seed(0)

        kind = torch.float32 if REHEARSAL else torch.bfloat16

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=DEVICE).to(kind)

        started = time.perf_counter()
        self.group = LayerGroup(select(spec, DEVICE, backend=backend, verify=False))
        self.layer = Attention(self.group, inputs=layer, checks=False)
        self.build_s = time.perf_counter() - started
        blocks = len(pairs) * max(-(-n // 16) for _, n in pairs)
        self.cache = self.group.allocate_cache(blocks)
        self.cache.key.copy_(randn(*self.cache.key.shape))
        self.cache.value.copy_(randn(*self.cache.value.shape))
        table = torch.randperm(blocks, generator=generator, device=DEVICE).int()
        queries, lens = ([p[i] for p in pairs] for i in (0, 1))
        whole = Batch.from_lens(
            queries, lens, table.view(len(pairs), -1), 16, inputs=step, mask=mask
        )
        # What is timed is attention: the cache holds the keys already.
        self.batch = Batch(
            whole.starts, whole.lens, whole.block_table, None, inputs=step, mask=mask
        )
        self.query = randn(whole.num_tokens, spec.num_heads, 128)
        self.out = torch.empty_like(self.query)
        started = time.perf_counter()
        self.plan = self.group.plan(self.batch)
        synchronize()
        self.plan_s = time.perf_counter() - started

    def __call__(self) -> None:
        self.layer(self.query, None, None, self.cache, self.plan, out=self.out)

    def first_call_s(self) -> float:
        started = time.perf_counter()
        self()
        synchronize()
        return time.perf_counter() - started

    def error(self) -> float:
        """Against the float64 reference: the last rows of two sequences, the heads of one KV head."""
        spec = self.layer.spec
        worst = 0.0
        for index in (0, self.batch.num_seqs - 1):
            length, stop = self.batch.lens[index], self.batch.starts[index + 1]
            count = min(3, self.batch.query_lens[index])
            keys, values = reference.read_cache(
                spec, self.cache, self.batch, index, self.layer.params
            )
            given = {n: t.cpu() for n, t in self.batch.inputs.items()}
            params = LayerParams(
                inputs={n: t.cpu() for n, t in self.layer.params.inputs.items()},
                alibi_slopes=self.layer.params.alibi_slopes,
            )
            rows = slice(stop - count, stop)
            assert keys.shape[0] == length
            expected, _ = reference.attend(
                spec, self.query[rows].cpu(), keys, values, params, torch.float64, given, index
            )
            worst = max(worst, output_error(self.out[rows].cpu(), expected))
        return worst


def row(name: str, build: Callable[[], Case], repeats: int = 10) -> None:
    """Check and time one case; what fails is a row that says so."""
    if time.time() > DEADLINE:
        ROWS.append({"row": name, "failed": "no time left"})
        return
    try:
        case = build()
        first = case.first_call_s()
        error = case.error()
        took = 0.0 if REHEARSAL else kernel_us(case, repeats)
        ROWS.append({
            "row": name, "us": round(took, 1), "error": float(f"{error:.2g}"),
            "right": error < 1.5e-2, "build_s": round(case.build_s, 2),
            "plan_ms": round(case.plan_s * 1e3, 1), "first_s": round(first, 2),
        })  # fmt: skip
        del case
    except Exception as problem:
        traceback.print_exc()
        ROWS.append({"row": name, "failed": f"{type(problem).__name__}: {str(problem)[:200]}"})
    if not REHEARSAL:
        torch.cuda.empty_cache()
    print(ROWS[-1], flush=True)


def cases(backend: str) -> dict[str, Callable[[], Case]]:
    slopes = alibi_slopes(32).to(DEVICE)
    found: dict[str, Callable[[], Case]] = {}
    for phase, pairs in (("prefill", PREFILL), ("decode", DECODE)):

        def add(
            name: str, fields: dict[str, Any], pairs: Any = pairs, phase: str = phase, **given: Any
        ) -> None:
            spec = BASE.replace(**fields)
            found[f"{phase} {name}"] = lambda: Case(spec, backend, pairs, **given)

        documents = document_ids(len(pairs), LONG)
        add("plain", {})
        add("soft cap built in", {"logit_soft_cap": 30.0})
        add("soft cap generated", {"variant": "cap"})
        add("ALiBi built in", {"alibi": True})
        add("ALiBi generated", {"variant": "alibi_function"}, layer={"slopes": slopes})
        add("temperature", {"variant": "tempered"}, layer={"temperature": slopes + 0.5})
        add("FlashSigmoid", {"variant": "flash_sigmoid"}, layer={"sigmoid_bias": -8.3})
        add("documents", {"variant": "one_document"}, step={"document": documents})
        add("relative bias", {"variant": "relative_bias"}, layer={
            "bias": torch.randn(32, 32, device=DEVICE),
            "bucket_of_distance": t5_buckets(bidirectional=False),
        })  # fmt: skip
    return found


def tree_case(backend: str = "TRITON_ATTN") -> Case:
    """16 drafted tokens a sequence, in a tree, for 64 sequences of 4,096."""
    parents = [[-1, *[(i - 1) // 2 for i in range(1, 16)]]] * len(FEW)
    mask = CustomMask.tree(parents)
    return Case(BASE.replace(mask="custom"), backend, FEW, mask=mask)


def quest_case(chosen: bool, backend: str = "TRITON_ATTN") -> Case:
    """64 decodes over 2,048 pages of 16 keys each, all or 64 of which are read."""
    pairs = [(1, PAGES * 16)] * len(DECODE)
    if not chosen:
        return Case(BASE, backend, pairs)
    generator = torch.Generator().manual_seed(0)
    pages = [
        sorted({PAGES - 1, *torch.randperm(PAGES - 1, generator=generator)[: READ - 1].tolist()})
        for _ in pairs
    ]
    mask = BlockSparseMask.of_pages(pages, 16)
    return Case(BASE.replace(mask="block_sparse"), backend, pairs, mask=mask)


def blocks_case(backend: str) -> Case:
    """A quarter of the blocks of keys for each block of queries, no other mask."""
    generator = torch.Generator().manual_seed(0)
    count = LONG // BLOCK
    rows = [
        sorted(torch.randperm(count, generator=generator)[: count // 4].tolist())
        for _ in range(len(PREFILL) * count)
    ]
    indptr = [n * (count // 4) for n in range(len(rows) + 1)]
    mask = BlockSparseMask(indptr, [block for each in rows for block in each], (BLOCK, BLOCK))
    spec = BASE.replace(mask="block_sparse", causal=False)
    return Case(spec, backend, PREFILL, mask=mask)


def ours_on_flashinfer() -> dict[str, Callable[[], Case]]:
    """The same functions by FlashInfer's JIT, its custom masks, its decode of chosen pages."""
    functions = cases("FLASHINFER")
    found = {
        name: functions[name]
        for name in ("prefill FlashSigmoid", "decode FlashSigmoid", "prefill documents")
    }
    return found | {
        "speculation tree 64 x 16": lambda: tree_case("FLASHINFER"),
        "decode 64 x 64 of 2,048 pages": lambda: quest_case(True, "FLASHINFER"),
    }


def second_processes() -> None:
    """What another process waits for: nothing should be compiled."""
    for name in ("prefill FlashSigmoid", "prefill documents"):
        ran = subprocess.run(
            [sys.executable, __file__, "--only", name], capture_output=True, text=True, check=False,
            timeout=120,
        )  # fmt: skip
        last = ran.stdout.strip().splitlines()[-1:] or [ran.stderr[-300:]]
        ROWS.append({"row": f"a second process, {name}", "said": last[0]})
        print(ROWS[-1], flush=True)


def flashinfer_sigmoid(compiling: subprocess.Popen[str] | None) -> None:
    """FlashInfer's JIT beside ours, by a process of its own: what it compiles may fail."""
    if compiling is None:
        return
    script = str(Path(__file__).with_name("h200_flashinfer_sigmoid.py"))
    try:
        finished(compiling, DEADLINE)
        ran = subprocess.run(
            [sys.executable, script, "time"], capture_output=True, text=True, check=False,
            timeout=120,
        )  # fmt: skip
        for line in ran.stdout.splitlines():
            if line.startswith("{"):
                ROWS.append(json.loads(line))
                print(ROWS[-1], flush=True)
        if ran.returncode:
            ROWS.append({"row": "FlashInfer's JIT", "failed": ran.stderr[-300:]})
    except subprocess.TimeoutExpired:
        ROWS.append({"row": "FlashInfer's JIT", "failed": "no time left"})


def report(out: str) -> None:
    """Keep all rows, and print a short table."""
    Path(out).write_text(json.dumps(ROWS, indent=1))
    print(f"\n{'row':<58}{'us':>10}{'error':>10}{'first call':>12}{'plan ms':>9}")
    for one in ROWS:
        said = one.get("failed") or one.get("said")
        if "us" in one:
            said = f"{one['us']:>10}{one['error']:>10}{one['first_s']:>11}s{one['plan_ms']:>9}"
            said += "" if one["right"] else "  WRONG"
        print(f"{one['row']:<58}{said}")


def main() -> None:
    global DEADLINE
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--out", default="variants.json")
    parser.add_argument("--flashinfer", action="store_true", help="compile its modules, no more")
    parser.add_argument("--only", default="", help="FLASHINFER: its rows; else "
                        "one row of TRITON_ATTN's: its first call alone")  # fmt: skip
    args = parser.parse_args()
    DEADLINE = time.time() + args.seconds
    for variant in VARIANTS:
        register_variant(variant)
    if args.flashinfer:
        for name, build in ours_on_flashinfer().items():
            try:
                print("FLASHINFER", name, round(build().build_s, 1), "s", flush=True)
            except Exception:
                traceback.print_exc()
        return
    if args.only == "FLASHINFER":
        for name, build in ours_on_flashinfer().items():
            row(f"FLASHINFER {name}", build)
        report(args.out)
        return
    triton = cases("TRITON_ATTN")
    if args.only:
        before, case = compiled_kernels(), triton[args.only]()
        found = {"build_s": round(case.build_s, 2), "first_s": round(case.first_call_s(), 3)}
        print(json.dumps(found | {"compiled": compiled_kernels() - before}))
        return
    # These alone, since what is compiled beside them takes the cores that their own compiling takes.
    alone = ("prefill plain", "prefill FlashSigmoid", "prefill documents", "prefill relative bias")
    for name in alone:
        row(f"TRITON_ATTN {name}", triton[name])
    row("TRITON_ATTN speculation tree 64 x 16", tree_case)
    row("TRITON_ATTN the same, causal", lambda: Case(BASE, "TRITON_ATTN", FEW))
    second_processes()
    compiling = ours = None
    if not REHEARSAL:
        script = Path(__file__).with_name("h200_flashinfer_sigmoid.py")
        compiling = started([str(script), "compile"])
        ours = started([__file__, "--flashinfer"])
    for name in triton:
        if name not in alone:
            row(f"TRITON_ATTN {name}", triton[name])
    row("TRITON_ATTN decode 64 x 2,048 pages", lambda: quest_case(False))
    row("TRITON_ATTN decode 64 x 64 of 2,048 pages", lambda: quest_case(True))
    row("TRITON_ATTN prefill dense, no causal mask",
        lambda: Case(BASE.replace(causal=False), "TRITON_ATTN", PREFILL))  # fmt: skip
    row("TRITON_ATTN prefill a quarter of blocks", lambda: blocks_case("TRITON_ATTN"))
    flex = {} if REHEARSAL else cases("FLEX_ATTENTION")
    for name in ("prefill plain", "prefill documents", "prefill soft cap generated"):
        if name in flex:
            row(f"FLEX_ATTENTION {name}", flex[name])
    flashinfer_sigmoid(compiling)
    if ours is not None:
        finished(ours, DEADLINE)
    for name, build in ({} if ours is None else ours_on_flashinfer()).items():
        row(f"FLASHINFER {name}", build)
    report(args.out)


if __name__ == "__main__":
    main()
