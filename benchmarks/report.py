"""Turns the JSON of a GPU run into the table and the plot that are committed beside it.

python benchmarks/report.py benchmarks/results/h200
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import report_ragged
from matplotlib import pyplot


def main(folder: Path) -> None:
    matrix = json.loads((folder / "matrix.json").read_text())
    bars = json.loads((folder / "bars.json").read_text())
    families = json.loads((folder / "families.json").read_text())
    counts = [json.loads(p.read_text()) for p in sorted(folder.glob("conformance-*.json"))]
    lines = [
        f"# {matrix['device']}, {matrix['date']}",
        "",
        f"torch {matrix['torch']}, Triton {matrix['triton']}, FlashInfer 0.6.13, FlashAttention-2 "
        "and -3 as vLLM 0.24.0 builds them, flash-attn-4 4.0.0b36, xFormers 0.0.35. Commands: "
        f"`benchmarks/h200_conformance.sh DIR`, `{matrix['command']}`, "
        "`python benchmarks/families.py --out DIR`, "
        "`python benchmarks/report.py benchmarks/results/h200`.",
        "",
        "Device times with a cold L2, median of ten. Limits measured in the same run: copy "
        f"{matrix['limits']['copy_gb_per_s']:.0f} GB/s, bf16 matmul "
        f"{matrix['limits']['matmul_tflop_per_s']:.0f} TFLOP/s.",
        "",
        *_uneven(folder),
        "",
        "## Conformance",
        "",
        "| backend | date | cases | passed | refused | failed | skipped |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {c['backend']} | {c['date']} | {c['cases']} | {c['passed']} | {c['refused']} | "
            f"{c['failed']} | {c['skipped']} |"
            for c in counts
        ),
        "",
        "FLASHINFER: its FlashAttention-2 modules built without the multi-item mask, the others for the "
        "plain and the causal mask only (`FEW_MASKS=1`). FLA: decode steps and short "
        "continuations; its kernels try out configurations for every shape. MAMBA_SSM: mamba-ssm's "
        "Triton kernels without its compiled extension; a subset, for the same reason. FLASH_ATTN: "
        "vLLM's build holds PTX for sm_80, which was assembled for sm_90 beforehand as the driver "
        "would have done for minutes. XFORMERS: without flash-attn 4 beside it, whose namespace breaks "
        "its import.",
        "",
        *_bars(bars["bars"]),
        "",
        *_quantized(bars["quantized"]),
        "",
        *_families(families),
        "",
        *_matrix(matrix["rows"]),
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n")
    _plot(matrix["rows"], folder / "matrix.png", f"{matrix['device']}, {matrix['date']}")


def _uneven(folder: Path) -> list[str]:
    """What engines' steps look like comes before equal lengths."""
    lines = report_ragged.ragged(json.loads((folder / "ragged.json").read_text()))
    for name, section in (("mixed", report_ragged.mixed), ("selector_fresh", report_ragged.choice)):
        path = folder / f"{name}.json"
        if path.exists():
            lines += ["", *section(json.loads(path.read_text()))]
    return lines


COMPARED = ("TRITON_ATTN", "FLASHINFER", "FLASHINFER on CUDA cores")


def _bars(bars: dict[str, Any]) -> list[str]:
    lines = [
        "## Against FlashInfer (bf16, 32/8 heads of 128, block 16)",
        "",
        "Attention alone, new tokens already stored. `cores`: FlashInfer's wrapper as it is by default, "
        "on CUDA cores; FLASHINFER uses its tensor cores, as our adapter does for groups of four and "
        "more. `ratio`: theirs over ours, tensor cores, then CUDA cores. `read`: a kernel that merely "
        "reads as many bytes, timed alike; `most`: FLASHINFER's time over that, which no kernel can "
        "exceed.",
        "",
        "| decode | TRITON_ATTN us | FLASHINFER | cores | FLASHINFER_TRTLLM | FA3 | ratio | read | "
        "most |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    decodes = {name[7:]: row for name, row in bars.items() if name.startswith("decode")}
    for name, row in decodes.items():
        ours, theirs, default = (row[backend]["us"] for backend in COMPARED)
        read = row["read"]["us"]
        lines.append(
            f"| {name} | {ours:.1f} | {theirs:.1f} | {default:.1f} | "
            f"{row['FLASHINFER_TRTLLM']['us']:.1f} | {row['FLASH_ATTN_V3']['us']:.1f} | "
            f"{theirs / ours:.2f}, {default / ours:.2f} | {read:.1f} | {theirs / read:.2f} |"
        )
    lines += [
        "",
        "`graph`: back to back in a replayed graph, L2 warm; beside it how much longer than the "
        "backend's own call. `latency`: one call on an idle device, L2 cold, launch included, the "
        "backends in turn, with `ratio` as above; like the host's time it depends on the machine's "
        "processor, which others share. `layer adds`: host time of `Attention.forward` over the "
        "backend's own call.",
        "",
        "| decode | graph us: TRITON_ATTN | FLASHINFER | read | latency us: TRITON_ATTN | FLASHINFER | "
        "cores | ratio | host us: TRITON_ATTN | FLASHINFER | layer adds us |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, row in decodes.items():
        ours, theirs, default = (row[backend] for backend in COMPARED)
        graphs = " | ".join(
            f"{r['graph_us']:.1f} ({100 * (r['graph_us'] / r['graph_own_us'] - 1):+.1f}%)"
            for r in (ours, theirs)
        )
        waits = [r["latency_us"] for r in (ours, theirs, default)]
        lines.append(
            f"| {name} | {graphs} | {row['read']['graph_us']:.1f} | {waits[0]:.1f} | {waits[1]:.1f} | "
            f"{waits[2]:.1f} | {waits[1] / waits[0]:.2f}, {waits[2] / waits[0]:.2f} | "
            f"{ours['host_us']:.1f} | {theirs['host_us']:.1f} | {ours['layer_adds_us']:.1f} |"
        )
    lines += ["", "| prefill, causal | TRITON_ATTN | FLASHINFER (fa3) | FA3 | cuDNN | ratio |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for name, row in bars.items():
        if name.startswith("prefill"):
            rates = " | ".join(
                f"{row[b]['tflop_s']:.0f}"
                for b in ("TRITON_ATTN", "FLASHINFER", "FLASH_ATTN_V3", "CUDNN_ATTENTION")
            )
            lines.append(f"| {name[8:]} (TFLOP/s) | {rates} | {row['ratio']:.2f} |")
    return lines


def _quantized(rows: dict[str, dict[str, float]]) -> list[str]:
    shapes = list(next(iter(rows.values())))
    return [
        f"| cache, decode (us) | {' | '.join(shapes)} |",
        f"| --- |{' ---: |' * len(shapes)}",
        *(
            f"| {name} | {' | '.join(f'{row[s]:.1f}' for s in shapes)} |"
            for name, row in rows.items()
        ),
    ]


def _families(data: dict[str, Any]) -> list[str]:
    limits = data["limits"]
    lines = [
        "## MLA and recurrent layers (bf16)",
        "",
        f"{data['date']}, torch {data['torch']}; limits in that run: copy "
        f"{limits['copy_gb_per_s']:.0f} GB/s, bf16 matmul {limits['matmul_tflop_per_s']:.0f} TFLOP/s. "
        "MLA: DeepSeek-V3, 128 heads, 576/512, decode alone. Mamba-2: 2.7B; GDN: Qwen3-Next; linear: "
        "MiniMax; Mamba-1: Jamba; short conv: LFM2. `its own call`: the library without our adapter, "
        "which also copies states out of their slots and back.",
        "",
        "| step | kernel | us | TB/s | TFLOP/s | limit us |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in data["rows"]:
        if "us" not in row:
            continue
        rates = [f"{row[k]:.2f}" if k in row else "" for k in ("tb_s", "tflop_s", "limit_us")]
        lines.append(
            f"| {row['what']} | {row['backend']} | {row['us']:.1f} | {' | '.join(rates)} |"
        )
    return lines


def _matrix(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## Every backend that ran (microseconds; the selector's choice last)",
        "",
        "FLASHINFER prefills by its ragged wrapper where nothing was cached. Marked *: timed in another "
        "run; XFORMERS only for some of the models, since it can't be imported beside flash-attn 4. "
        "`(= NAME)`: the very kernels of that row, timed again; what differs is noise.",
        "",
        "mistral-7b's and phi-3's decode, mixed and shared prefix cells are of an earlier run of the "
        "same day and kernels: in this one TRITON_ATTN's tile for many programs took so many registers "
        "with a sliding window that three fitted a multiprocessor instead of four (307 us against 250 "
        "for mistral-7b's decode). It has the earlier tile there again, and a test counts them. That run "
        "had llama-3.1-70b's prefill at 476 us with FLASH_ATTN_V3 and 448 with FLASHINFER: 1.06, not "
        "1.19. FLASH_ATTN's decodes read each key once a head here: it packs a group's heads only where "
        "the window is unbounded on the right, as upstream's adapter asks since and vLLM's does not yet.",
        "",
        "On Hopper TRITON_ATTN decodes first since it is ahead of FLASHINFER with few sequences and over "
        "8-bit caches (the tables above), as fast with many, and a few percent behind only where a "
        "shared prefix comes from the L2; it needs no compiler either. A priority can't depend on the "
        "batch. Elsewhere FLASHINFER decodes first: nothing was measured there.",
        "",
        "| model | step | backends, fastest first | selected | over the best single backend |",
        "| --- | --- | --- | ---: | ---: |",
    ]
    for model, step in dict.fromkeys((r["model"], r["step"]) for r in rows):
        here = [r for r in rows if (r["model"], r["step"]) == (model, step)]
        timed = [r for r in here if "us" in r and r["backend"] != "(selected)"]
        timed.sort(key=lambda r: r["us"])
        chosen = next(r for r in here if r["backend"] == "(selected)")
        times = ", ".join(
            f"{r['backend']}{'*' * r.get('other_run', False)} {r['us']:.0f}" for r in timed
        )
        same = next((f" (= {r['backend']})" for r in timed if r["ran"] == chosen["ran"]), "")
        lines.append(
            f"| {model} | {step} | {times} | {chosen['us']:.0f}{same} | {chosen['over_best']:.2f} |"
        )
    return lines


def _plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    steps = list(dict.fromkeys(r["step"] for r in rows))
    models = list(dict.fromkeys(r["model"] for r in rows))
    names = [
        "TRITON_ATTN",
        "FLASHINFER",
        "FLASH_ATTN_V3",
        "FLASH_ATTN_V4",
        "CUDNN_ATTENTION",
        "(selected)",
    ]
    figure, axes = pyplot.subplots(
        len(steps), 1, figsize=(11, 3 * len(steps)), layout="constrained"
    )
    for axis, step in zip(axes, steps, strict=True):
        for offset, name in enumerate(names):
            heights = [
                next((r.get("us", 0) for r in rows
                      if (r["model"], r["step"], r["backend"]) == (m, step, name)), 0)
                for m in models
            ]  # fmt: skip
            places = [i + (offset - 2.5) * 0.14 for i in range(len(models))]
            axis.bar(places, heights, 0.14, label=name)
        axis.set(title=step, ylabel="us", xticks=range(len(models)), xticklabels=models)
        axis.tick_params(axis="x", labelsize=8)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(names))
    figure.suptitle(title)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
