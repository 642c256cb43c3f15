"""8 bits and captures that no device has shown yet, on one GPU.

    python benchmarks/h200_fp8.py [--out FILE.json] [--only widened,prefill,...] [--seconds 60]

- `prefill`: what FlashAttention-3's prefill in e4m3 takes apart: rounding bf16 queries, the library's
  kernel alone over pages of 64 tokens and over packed keys, our call around it; bf16 the same ways. At
  4k, 16k and 64k tokens of one prompt, heads of 64, 128 and 256. `faster` is bf16's time over e4m3's
  (bar: 1.4), `nan_leaks` whether a packed neighbour's NaN reaches a prompt's last tile.
- `triton`: TRITON_ATTN's prefill over the same e4m3 inputs, multiplied in e4m3 and in float16, beside
  bf16's by the portable kernel and by Hopper's own.
- `widened`: TRITON_ATTN's prefill over an e4m3 cache by 16-bit copies for Hopper's own kernel
  (`h200_widened.py`), the copying alone, the portable kernel, and a bf16 cache. Checked against float64
  with NaN in all of the cache that no query sees; where lengths end within a page and with a window too.
- `widened_kit`: the kit's cases of 8-bit caches with every step copied that can be, however short.
- `fa2`: FLASH_ATTN captured: 200 replays of four layers (bits beside
  the padded eager step, allocations, device time beside its own calls), and the kit's captured cases.
  The driver assembles its kernels first, for a minute or more; `h200_fa2_warm.py --one bfloat16 128 True
  True` has it do so beforehand, on one core and next to nothing of the GPU, with the same
  `CUDA_CACHE_PATH`.
- `latents`: decode over latents in e4m3 by FLASHINFER_MLA_FP8 (FlashInfer 0.7) and TRITON_MLA beside
  bf16's.
- `kit`: TRITON_SCAN's states with room for drafts and padding rows, TRITON_ATTN's queries in e4m3, the
  whole kit of FLASHINFER_MLA_FP8.

Device times with a cold L2 (`timing.py`), medians. Without a GPU the sections say that they need one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch
from h200_serving import DEVICE, SPEC, Model, Row, _kit, guarded, main, replayed
from h200_widened import Widened, compile_side_by_side, every_step, steps
from polyattn import LayerSpec, select
from polyattn.conformance.checks.table import run_case
from polyattn.conformance.derive import derive
from polyattn.registry.devices import resolve_device
from polyattn.registry.discovery import discover
from polyattn.registry.machine import availability
from polyattn.spec.layer import LatentSpec
from polyattn.tools.cli.benching import full_step, sampled_error
from polyattn.workload.compare import output_error

TOKENS = (4096, 16384, 65536)
SIZES = {64: (64, 8), 128: (32, 8), 256: (16, 4)}
"""Query and KV heads at each head size: as many products."""
E4M3 = torch.float8_e4m3fn


def within(seconds: float, calls: list[tuple[str, Callable[[], Row]]]) -> list[Row]:
    """Measure one after another while there is time; what is left over is named."""
    end, rows = time.monotonic() + seconds, []
    for name, call in calls:
        if time.monotonic() > end:
            rows.append({"what": name, "failed": "no time was left"})
        else:
            rows.append(guarded(name, call))
    return rows


def prefill_section(seconds: float) -> list[Row]:
    return within(
        seconds,
        [
            (f"prefill {tokens} tokens, heads of {size}", lambda t=tokens, s=size: _prefill(t, s))
            for size, tokens in itertools.product((128, 64, 256), TOKENS)
        ],
    )  # fmt: skip


class Prompt:
    """One prompt over pages of 64 in a dtype, and the very arguments of the library's call."""

    def __init__(self, tokens: int, size: int, stored: str):
        heads, kv_heads = SIZES[size]
        spec = LayerSpec(
            num_heads=heads, num_kv_heads=kv_heads, head_size=size, block_size=64,
            kv_cache_dtype=stored, qkv_dtype=stored, fp8_compute=stored != "auto",
        )  # fmt: skip
        self.step = full_step(
            select(spec, DEVICE, backend="FLASH_ATTN_V3"),
            [(tokens, tokens)],
        )
        self.error = sampled_error(self.step)
        (call,) = self.step.plan.calls
        self.backend, self.plan = call.backend, call.plan
        self.query, self.key, self.value = self.step.query, self.step.key, self.step.value
        self.out = self.query.new_empty(self.query.shape, dtype=torch.bfloat16)
        one = torch.ones(1, kv_heads, device=DEVICE)
        self.scales = (one, one, one) if stored != "auto" else (None, None, None)

    def paged(self) -> None:
        """The library's kernel over pages."""
        self.backend.attend(
            self.plan, self.query, None, None, self.step.cache, self.out, self.scales, None
        )

    def packed(self) -> None:
        """The library's kernel over the same keys as they were given, one after another."""
        self.backend.attend(
            self.plan, self.query, self.key, self.value, None, self.out, self.scales, None
        )


def _prefill(tokens: int, size: int) -> Row:
    from polyattn_cuda.query_rounding import by_torch, rounded_query
    from timing import kernel_us

    few = 8 if tokens > 20000 else 15
    wide, narrow = Prompt(tokens, size, "auto"), Prompt(tokens, size, "fp8")
    row: Row = {"bar": 1.4}
    for name in ("paged", "packed"):
        times = [kernel_us(getattr(prompt, name), few) for prompt in (wide, narrow)]
        row |= {f"{name}_bf16_us": times[0], f"{name}_e4m3_us": times[1],
                f"{name}_faster": times[0] / times[1]}  # fmt: skip
    ours = [kernel_us(prompt.step.but(key=None, value=None).call, few) for prompt in (wide, narrow)]
    row |= {"ours_bf16_us": ours[0], "ours_e4m3_us": ours[1], "ours_faster": ours[0] / ours[1]}
    given = (wide.query, SIZES[size][1], 1, narrow.plan.seq_of)
    for way, rounds in (("", rounded_query), ("_by_torch", by_torch)):
        row[f"round_query{way}_us"] = kernel_us(lambda rounds=rounds: rounds(*given), few)
    same = zip(rounded_query(*given), by_torch(*given), strict=True)
    row["rounded_unlike_torch"] = max(float((a.float() - b.float()).abs().max()) for a, b in same)
    row["floor_us"] = 5 * wide.query.numel() / 4.8e6  # read twice, written once at 4.8 TB/s
    narrow.paged()
    pages = narrow.out.clone()
    narrow.packed()
    row["packed_unlike_paged"] = output_error(narrow.out, pages)
    products = 4 * tokens * tokens * size * SIZES[size][0] / 2
    row["packed_e4m3_tflops"] = products / row["packed_e4m3_us"] / 1e6
    row["nan_leaks"] = _leaks(narrow)
    return row


def _leaks(prompt: Prompt) -> bool:
    """Whether a packed neighbour's NaN reaches the sequence before it (its last tile is cut)."""
    from polyattn import Batch

    count = 200
    query, key, value = (t[: 2 * count].clone() for t in (prompt.query, prompt.key, prompt.value))
    plan = prompt.backend.plan(
        Batch([0, count, 2 * count], [count] * 2, torch.zeros(2, 4).int().to(DEVICE), device=DEVICE)
    )
    scales = tuple(s.expand(2, -1).contiguous() for s in prompt.scales)
    found = []
    for spoilt in (1.0, torch.nan):
        value[count:] = (value[count:].float() * spoilt).to(E4M3)
        out = torch.empty(query.shape, device=DEVICE, dtype=torch.bfloat16)
        prompt.backend.attend(plan, query, key, value, None, out, scales, None)
        found.append(out[:count].clone())
    return not torch.equal(*found)


def triton_section(seconds: float) -> list[Row]:
    return within(
        seconds,
        [
            (f"triton {c} x {t}, heads of {s}", lambda c=c, t=t, s=s: _triton(c, t, s))
            for s in (128, 64)
            for c, t in ((8, 2048), (1, 16384))
        ],
    )  # fmt: skip


def _triton(count: int, tokens: int, size: int) -> Row:
    from timing import kernel_us

    heads, kv_heads = SIZES[size]
    wide = LayerSpec(num_heads=heads, num_kv_heads=kv_heads, head_size=size, block_size=16)
    eight = wide.replace(kv_cache_dtype="fp8", qkv_dtype="fp8")
    lens, row = [tokens] * count, {}
    for name, spec in (
        ("bf16", wide),
        ("bf16 portable, capped", wide.replace(logit_soft_cap=1e4)),  # Hopper's own takes no cap
        ("e4m3 in float16", eight),
        ("e4m3", eight.replace(fp8_compute=True)),
    ):
        step = full_step(
            select(spec, DEVICE, backend="TRITON_ATTN"), list(zip(lens, lens, strict=True))
        )
        row[f"{name} us"] = kernel_us(step.but(key=None, value=None).call, 10)
        if spec.kv_cache_dtype != "auto":
            row[f"{name} error"] = sampled_error(step)
        del step
    return row


def widened_section(seconds: float) -> list[Row]:
    """Compile everything first; then check and time, step by step."""
    made: dict[str, Widened] = {}

    def compiled() -> Row:
        made.update(steps(DEVICE))
        return {"kernels": compile_side_by_side(made)}

    rows = [guarded("compiled side by side", compiled)]
    calls = [(name, lambda step=step: _widened(step)) for name, step in reversed(made.items())]
    return rows + within(seconds, calls)


def _widened(step: Widened) -> Row:
    from timing import kernel_us

    row = step.checked()
    if max(step.lens[1]) % 16 == 0:
        row |= {f"{name}_us": kernel_us(call, 8) for name, call in step.ways().items()}
        row["faster"] = row["portable_us"] / row["widened_us"]
        row["copying_gb_per_s"] = (
            6 * row["copied"] * step.spec.num_kv_heads * 128 / row["copying_us"] / 1e3
        )
    return row


def widened_kit_section(seconds: float) -> list[Row]:
    return [guarded("kit, copied", lambda: _widened_kit(seconds))]


def _widened_kit(seconds: float) -> Row:
    device, info = resolve_device(str(DEVICE)), discover().backend("TRITON_ATTN")
    cases = [
        case for case in derive(info, device)
        if case.spec.stored_dtype in ("fp8_e4m3", "fp8_e5m2", "int8") and case.batch != "decode"
    ]  # fmt: skip
    end, row = time.monotonic() + seconds, {"cases": len(cases), "copied": 0, "ran": 0, "wrong": []}
    for case in cases:
        if time.monotonic() > end:
            break
        with every_step() as copied:
            try:
                run_case(case, info.name, device, 5, budget=1.0)
            except Exception as error:  # one case must not end the others
                row["wrong"].append(f"{case.id}: {type(error).__name__}: {str(error)[:200]}")
        row["ran"] += 1
        row["copied"] += bool(copied)
    return row


def fa2_section(seconds: float) -> list[Row]:
    plain = SPEC.replace(graph_capture="uniform")
    return within(
        seconds,
        [
            ("graph FLASH_ATTN", lambda: replayed(Model(plain, "FLASH_ATTN"))),
            ("FLASH_ATTN's captured cases", _captured_cases),
        ],
    )


def _captured_cases() -> Row:
    """Run the kit's cases of captured steps; returns how many passed, and the first that didn't."""
    device = resolve_device(str(DEVICE))
    info = discover().backend("FLASH_ATTN")
    info = next((b for b in info.builds if availability(b, 10.0) is None), info)
    cases = [
        case for case in derive(info, device) if "graph" in case.check or "reuse" in case.check
    ]
    row: Row = {"cases": len(cases), "passed": 0}
    for case in cases:
        try:
            run_case(case, info.name, device, 5)
            row["passed"] += 1
        except Exception as error:  # one case must not end the others
            row.setdefault("wrong", f"{case.id}: {type(error).__name__}: {str(error)[:200]}")
    return row


def latents_section(seconds: float) -> list[Row]:
    return within(
        seconds,
        [
            (f"latents {count} x {length}", lambda c=count, n=length: _latents(c, n))
            for count, length in ((64, 4096), (16, 4096), (8, 32768))
        ],
    )


def _latents(count: int, length: int) -> Row:
    from families import LatentDecode
    from timing import kernel_us

    wide = LayerSpec(
        kind="mla", num_heads=128, head_size=192, v_head_size=128, block_size=64,
        latent=LatentSpec(rank=512, rope_head_size=64),
    )  # fmt: skip
    narrow = wide.replace(kv_cache_dtype="fp8")
    row: Row = {}
    for name, spec, backend in (
        ("FLASHINFER_MLA bf16", wide, "FLASHINFER_MLA"),
        ("TRITON_MLA bf16", wide, "TRITON_MLA"),
        ("TRITON_MLA e4m3", narrow, "TRITON_MLA"),
        ("FLASHINFER_MLA_FP8 e4m3", narrow, "FLASHINFER_MLA_FP8"),
    ):
        try:
            row[name] = kernel_us(LatentDecode(spec, backend, count, length))
        except Exception as error:  # the others are measured all the same
            row[name] = f"{type(error).__name__}: {str(error)[:160]}"
    return row


def kit_section(seconds: float) -> list[Row]:
    chosen = {
        "TRITON_SCAN": "drafts or padded",
        "TRITON_ATTN": "fp8_inputs",
        "FLASHINFER_MLA_FP8": "not zzz",
    }
    return within(
        seconds,
        [
            (f"kit {backend}", lambda b=backend, w=which: _kit(b, w, seconds))
            for backend, which in chosen.items()
        ],
    )


SECTIONS = {
    "prefill": prefill_section, "triton": triton_section, "fa2": fa2_section,
    "latents": latents_section, "kit": kit_section, "widened": widened_section,
    "widened_kit": widened_kit_section,
}  # fmt: skip

if __name__ == "__main__":
    main(__doc__, SECTIONS)
