"""Steps of uneven lengths on one GPU: TRITON_ATTN and TRITON_MLA beside the libraries.

    python benchmarks/h200_ragged.py [--out FILE.json] [--seed N] [--steps TEXT ...] [--beside NAME ...]
                                     [--seconds N]

Lengths come from traces (`polyattn/data`), uniform and Zipf distributions, and one long sequence
among short ones; beside them equal lengths. Device times with a cold L2 (see `timing.py`), median
of ten, of the backends' own calls. Three sequences of each result are checked against a float64
reference, and that a second run gives the same bits. A table is printed last. Steps that the output
file holds already are not measured again.
`h200_ragged_tries.py` times other schedules of ours.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from polyattn import LayerSpec, select
from polyattn.kernel import AttentionBackend, Batch, KVCache, LayerParams
from polyattn.registry.discovery import discover
from polyattn.runtime.group import LayerGroup
from polyattn.selection.step_choice import StepChoice
from polyattn.spec.timing import KINDS, TimingModel
from polyattn.tools.cli.models import bundled
from polyattn.workload.tolerance import tolerance_of
from timing import host_us, kernel_us

DEVICE = torch.device("cuda")
QWEN = LayerSpec(num_heads=28, num_kv_heads=4, head_size=128)
LLAMA = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
SHARD = LayerSpec(num_heads=16, num_kv_heads=2, head_size=128)
MHA = LayerSpec(num_heads=16, num_kv_heads=16, head_size=128)
MLA = LayerSpec.from_hf_config(bundled("models", "deepseek-v3.json"))[0].replace(num_heads=64)
LIBRARIES = ("FLASHINFER", "FLASH_ATTN_V3")
LATENT_LIBRARIES = ("FLASHINFER_MLA", "FLASH_ATTN_MLA", "FLASHMLA")
K = 1024


@dataclass(frozen=True)
class Step:
    """One row of the table: (query tokens, length) of each sequence."""

    name: str
    spec: LayerSpec
    rows: tuple[tuple[int, int], ...]

    @property
    def ours(self) -> str:
        """Our backend for it."""
        return "TRITON_MLA" if self.spec.latent else "TRITON_ATTN"

    @property
    def libraries(self) -> tuple[str, ...]:
        """The others."""
        return LATENT_LIBRARIES if self.spec.latent else LIBRARIES


def trace(name: str, count: int, chance: random.Random) -> list[int]:
    """Lengths of a trace's requests, each at a random point of its generation."""
    text = bundled(name).read_text(encoding="utf-8").splitlines()
    pairs: list[tuple[int, int]]
    if name.endswith(".csv"):
        pairs = [(int(a), int(b)) for a, b in (line.split(",")[1:3] for line in text[1:])]
    else:
        found = (json.loads(line) for line in text)
        pairs = [(row["input_length"], row["output_length"]) for row in found]
    return [a + chance.randint(1, max(1, b)) for a, b in chance.choices(pairs, k=count)]


def zipf(count: int, mean: int, chance: random.Random) -> list[int]:
    """Skewed lengths of about this mean: ranks' reciprocals, shuffled (FlashInfer paper, 4.2)."""
    shares = [1 / rank for rank in range(1, count + 1)]
    by = mean * count / sum(shares)
    lens = [max(1, round(by * share)) for share in shares]
    chance.shuffle(lens)
    return lens


def steps(seed: int) -> list[Step]:
    """The table's rows, with this seed's lengths."""
    chance = random.Random(seed)

    def decodes(name: str, lens: list[int], spec: LayerSpec = QWEN) -> Step:
        return Step(name, spec, tuple((1, n) for n in lens))

    long = [128 * K] + [K] * 63
    chance.shuffle(long)
    even = [sum(long) // 64] * 64
    prefix = trace("azure_conversation.csv", 32, chance)
    return [
        decodes("decode 1 x 128k + 63 x 1k", long),
        decodes("the same in 64 equal", even),
        decodes("decode, 12 of mooncake", trace("mooncake_conversation.jsonl", 12, chance)),
        decodes("decode, 24 of azure", trace("azure_conversation.csv", 24, chance)),
        decodes("decode, 200 of azure", trace("azure_conversation.csv", 200, chance)),
        decodes("decode, 64 uniform to 8k", [chance.randint(1, 8 * K) for _ in range(64)]),
        decodes("decode, 64 Zipf of 2k", zipf(64, 2 * K, chance)),
        Step("16 new after 128k", QWEN, ((16, 128 * K + 16),)),
        Step("64 x 4 new after 4k", QWEN, ((4, 4 * K + 4),) * 64),
        Step("1 to 8 new, 32 of azure", QWEN, tuple((1 + i % 8, n + 8) for i, n in enumerate(prefix))),
        Step("512 new after 8k", QWEN, ((512, 8 * K + 512),)),
        Step("4 x 512 new after 4k", QWEN, ((512, 4 * K + 512),) * 4),
        Step("prefill 7k + 3 x 300", QWEN, ((7 * K, 7 * K), (300, 300), (300, 300), (300, 300))),
        Step("40 decodes + 2 x 1k prefill", QWEN, ((1, 2 * K),) * 40 + ((K, K),) * 2),
        decodes("16/2 heads: 1 x 128k + 63 x 1k", long, SHARD),
        decodes("16/2 heads: 5 of mooncake", trace("mooncake_conversation.jsonl", 5, chance), SHARD),
        Step("16/2 heads: 16 new after 128k", SHARD, ((16, 128 * K + 16),)),
        decodes("16/16 heads: 40 x 2k", [2 * K] * 40, MHA),
        *(decodes(f"equal {n} x {m}", [m] * n, LLAMA)
          for n, m in ((1, 8192), (4, 8192), (16, 4096), (64, 4096), (128, 8192))),
        Step("equal prefill 1 x 4k", LLAMA, ((4 * K, 4 * K),)),
        decodes("MLA 1 x 128k + 63 x 1k", long, MLA),
        decodes("MLA, the same in 64 equal", even, MLA),
        decodes("MLA, 24 of azure", trace("azure_conversation.csv", 24, chance), MLA),
        Step("MLA, 32 x 4 new after 4k", MLA, ((4, 4 * K + 4),) * 32),
        decodes("MLA equal 64 x 4096", [4096] * 64, MLA),
    ]  # fmt: skip


class Run:
    """A step's calls of one backend: those that decode, and prefill of the rest.

    `prefill`: who takes the rest in a call of its own; default: the same backend, whole steps in one
    call where it claims them.
    """

    def __init__(
        self,
        step: Step,
        name: str,
        tweak: Callable[[Any], None] | None = None,
        prefill: str | None = None,
    ):
        torch.manual_seed(0)
        self.step, spec = step, step.spec
        dtype = getattr(torch, spec.dtype)
        named = f"decode={name}" if spec.latent else name
        if prefill is not None:
            named = f"decode={name},prefill={prefill}"
        group = LayerGroup(select(spec, "cuda", backend=named))
        self.params = LayerParams()
        decode = group.selection.backend("decode")
        assert decode is not None and decode.name == name
        most = decode.capabilities.decode_query_lens
        self.latent = spec.latent.rank if spec.latent else None
        width = spec.latent.size if spec.latent else spec.head_size
        rows = sorted(step.rows, key=lambda row: row[0] > most)
        split = sum(query <= most for query, _ in rows)
        parts = [("decode", rows[:split]), ("prefill", rows[split:])]
        whole = prefill is None and "mixed" in decode.capabilities.phases
        if whole and 0 < split < len(rows):
            parts = [("mixed", rows)]
        self.calls: list[tuple[Any, Any, slice]] = []
        self.backends: list[Any] = []
        form = group.kernel_format(decode)
        assert form is not None
        size, start = form.block_size, 0
        blocks = [-(-n // size) for _, n in rows]
        self.cache = KVCache.allocate(form, sum(blocks), DEVICE)
        for stored in (self.cache.key, self.cache.value):
            stored.normal_()
        ids = torch.randperm(sum(blocks)).int().split(blocks)
        self.table = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True).to(DEVICE)
        self.rows, at = rows, 0
        for phase, part in parts:
            if not part:
                continue
            info = group.selection.backend("prefill" if phase == "prefill" else "decode")
            assert info is not None
            backend = group.load(phase, info, AttentionBackend, cache=group.kernel_format(info))
            if tweak is not None:
                tweak(backend)
            queries, lens = [q for q, _ in part], [n for _, n in part]
            batch = Batch.from_lens(queries, lens, self.table[start : start + len(part)], size)
            tokens = slice(at, at + sum(queries))
            self.calls.append((backend, backend.plan(batch), tokens))
            start, at = start + len(part), at + sum(queries)
        self.query = torch.randn(at, spec.num_heads, width, device=DEVICE).to(dtype)
        self.new: list[tuple[Any, Any]] = [self._fresh(plan.batch) for _, plan, _ in self.calls]
        value = spec.latent.rank if spec.latent else spec.v_head_size
        self.out = torch.full((at, spec.num_heads, value), torch.nan, device=DEVICE).to(dtype)

    def _fresh(self, batch: Batch) -> tuple[Any, Any]:
        """Return the step's own keys and values, as an engine has them, of a prefill from nothing."""
        if self.latent or batch.lens != batch.query_lens:
            return None, None
        assert batch.block_table is not None
        found = []
        for stored in (self.cache.key, self.cache.value):
            pages = [
                stored[row[: -(-n // stored.shape[1])].long()].flatten(0, 1)[:n]
                for row, n in zip(batch.block_table, batch.lens, strict=True)
            ]
            found.append(torch.cat(pages))
        return found[0], found[1]

    def __call__(self) -> None:
        for (backend, plan, tokens), (key, value) in zip(self.calls, self.new, strict=True):
            backend.run(
                plan,
                self.query[tokens],
                key,
                value,
                self.cache,
                self.params,
                self.out[tokens],
                None,
            )

    def error(self) -> float:
        """Return the worst relative error of three sequences' last tokens, in float64."""
        self()
        first = self.out.clone()
        self.out.fill_(torch.nan)
        self()
        self.same = torch.equal(first, self.out)
        spec, worst = self.step.spec, 0.0
        longest = max(range(len(self.rows)), key=lambda i: self.rows[i][1])
        for index in {0, len(self.rows) - 1, longest}:
            count, length = self.rows[index]
            last = sum(q for q, _ in self.rows[: index + 1]) - 1
            for back in {0, count - 1}:
                seen = length - back
                used = self.table[index, : -(-length // self.cache.block_size)].long()
                keys = self.cache.key[used].flatten(0, 1)[:seen].double()
                values = (
                    keys[..., : self.latent]
                    if self.latent
                    else (self.cache.value[used].flatten(0, 1)[:seen].double())
                )
                query = self.query[last - back].double().view(keys.shape[1], -1, keys.shape[2])
                weights = torch.softmax(torch.einsum("hgd,khd->hgk", query, keys) * spec.scale, 2)
                wanted = torch.einsum("hgk,khd->hgd", weights, values).flatten(0, 1)
                got = self.out[last - back].double()
                worst = max(worst, float((got - wanted).norm() / wanted.norm()))
        return worst


def measured(step: Step, name: str, tweak: Callable[[Any], None] | None = None) -> dict[str, Any]:
    """Time one backend on one step."""
    row: dict[str, Any] = {"step": step.name, "backend": name}
    try:
        run = Run(step, name, tweak)
        row["error"] = run.error()
        if not row["error"] <= tolerance_of(step.spec).output:
            return row | {"cannot": f"wrong by {row['error']:.2g}"}
        row |= {"repeats_bits": run.same, "us": kernel_us(run, repeats=10)}
        row["way"] = "+".join(str(getattr(plan, "way", "")) for _, plan, _ in run.calls)
    except Exception as problem:
        row["cannot"] = f"{type(problem).__name__}: {problem}"[:160]
    torch.cuda.empty_cache()
    return row


def host() -> dict[str, float]:
    """Host microseconds for 256 uneven decodes: the choice, the plan, all from lengths on, the launch."""
    chance = random.Random(5)
    lens = [chance.randint(1, 2048) for _ in range(256)]
    run = Run(Step("host", QWEN, tuple((1, n) for n in lens)), "TRITON_ATTN")
    backend, plan, _ = run.calls[0]
    batch, starts = plan.batch, list(range(257))
    known = discover().backends
    infos = {name: known[name] for name in ("TRITON_ATTN", *LIBRARIES)}
    costs = (10.0, 0.01, 1e-7, 1e-7, 1e-9, 1e-6)  # whose values they are changes no time
    models = [TimingModel(name, kind, costs) for name in infos for kind in KINDS]
    choice = StepChoice(
        QWEN, models, {"decode": infos, "prefill": infos},
        {"decode": "TRITON_ATTN", "prefill": "FLASH_ATTN_V3"},
    )  # fmt: skip
    run()
    return {
        "choice_us": host_us(lambda: choice.decode(batch.host_lens, batch.max_seq_len)),
        "plan_us": host_us(lambda: backend.plan(batch)),
        "batch_and_plan_us": host_us(lambda: backend.plan(Batch(starts, lens, batch.block_table))),
        "run_us": host_us(run),
    }


def table(rows: list[dict[str, Any]]) -> None:
    """Print a line a step: ours, each library, ours over the best of them."""
    print(f"\n{'step':32}{'ours':>8}{'way':>16}{'over best':>11}  libraries")
    for name in dict.fromkeys(row["step"] for row in rows):
        here = [row for row in rows if row["step"] == name]
        ours = next(row for row in here if row["backend"].startswith("TRITON"))
        others = {row["backend"]: row["us"] for row in here if row is not ours and "us" in row}
        text = ", ".join(f"{k} {v:.1f}" for k, v in sorted(others.items(), key=lambda o: o[1]))
        over = f"{ours['us'] / min(others.values()):.2f}" if others and "us" in ours else "-"
        us = f"{ours['us']:.1f}" if "us" in ours else ours["cannot"][:30]
        print(f"{name:32}{us:>8}{ours.get('way', ''):>16}{over:>11}  {text}")
    bad = [row for row in rows if row.get("repeats_bits") is False and "TRITON" in row["backend"]]
    ratios = [
        ours["us"] / min(theirs)
        for name in {row["step"] for row in rows}
        for here in [[r for r in rows if r["step"] == name and "us" in r]]
        for ours in here if ours["backend"].startswith("TRITON")
        if (theirs := [r["us"] for r in here if r is not ours])
    ]  # fmt: skip
    if ratios:
        print(
            f"ours over the best library: {statistics.geometric_mean(ratios):.3f} (geometric mean)"
        )
    print("not the same bits twice:", [row["step"] for row in bad] or "none")


def kept(out: Path | None, seed: int) -> list[dict[str, Any]]:
    """Return the rows that an earlier run of the same lengths has left."""
    if out is None or not out.exists():
        return []
    found = json.loads(out.read_text())
    if found["seed"] != seed:
        raise SystemExit(f"{out}: its lengths are of seed {found['seed']}; name another --out")
    rows: list[dict[str, Any]] = found["rows"]
    return rows


def write(out: Path | None, data: dict[str, Any]) -> None:
    if out is not None:
        out.write_text(json.dumps(data, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--steps", nargs="+", default=[], help="only steps whose name has one of these"
    )
    parser.add_argument("--beside", nargs="+", help="only these libraries; default: all")
    parser.add_argument("--seconds", type=float, default=600, help="after which no step is begun")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    rows: list[dict[str, Any]] = kept(args.out, args.seed)
    done = {row["step"] for row in rows}
    for step in steps(args.seed):
        if args.steps and not any(text in step.name for text in args.steps):
            continue
        if step.name in done or time.monotonic() > end:
            continue
        libraries = [n for n in step.libraries if args.beside is None or n in args.beside]
        for name in (step.ours, *libraries):
            rows.append(measured(step, name))
            print(rows[-1], flush=True)
        write(args.out, {"seed": args.seed, "rows": rows})
    facts = {
        "date": str(date.today()),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "host": host(),
    }
    write(args.out, facts | {"seed": args.seed, "rows": rows})
    table(rows)
    print(facts)


if __name__ == "__main__":
    main()
