"""How are uneven steps told? Tables of `h200_ragged.py`, `h200_mixed.py` and `selector.py`."""

from __future__ import annotations

from typing import Any

LIBRARIES = {
    "FLASHINFER": ("FLASHINFER", "FLASHINFER_MLA"),
    "FLASH_ATTN_V3": ("FLASH_ATTN_V3", "FLASH_ATTN_MLA"),
    "FLASHMLA": ("FLASHMLA",),
}
"""A column each: the attention backend, and the same library's for MLA."""

LABELS = {
    "table": "by the table",
    "priority": "by priority",
    "noise": "noise: a first round's best, judged by a second",
}
"""Who chooses."""


def ragged(data: dict[str, Any]) -> list[str]:
    """Uneven steps first, as engines have them; equal ones behind."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in data["rows"]:
        found.setdefault(row["step"], {})[row["backend"]] = row
    steps = sorted(found, key=lambda step: "equal" in step)
    lines = [
        "## Lengths as they come",
        "",
        f"{data['date']}: `python benchmarks/h200_ragged.py`, lengths of traces, Zipf, uniform, one long "
        "among short ones, drafts to verify, chunks, mixed steps; equal lengths last. Device us, cold "
        "L2, median of ten; some sequences of each result were checked in float64. Heads 28/4 of 128 "
        "(Qwen2.5-7B), bf16, unless a row says otherwise (`equal`: 32/8; MLA: 64 heads, 512 + 64). `over "
        "best`: ours over the fastest library. Marked *: of an earlier run, and its kernels.",
        "",
        "| step | TRITON_ATTN, _MLA | FLASHINFER, _MLA | FLASH_ATTN_V3, _MLA | FLASHMLA | over best |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for step in steps:
        ours = next((r for n, r in found[step].items() if n.startswith("TRITON")), {})
        theirs = [
            next((found[step][n] for n in names if n in found[step]), {})
            for names in LIBRARIES.values()
        ]
        best = min((r["us"] for r in theirs if "us" in r), default=None)
        over = f"{ours['us'] / best:.2f}" if best and "us" in ours else "–"
        cells = [f"{r['us']:.1f}" if "us" in r else "–" for r in (ours, *theirs)]
        mark = " *" if any(r.get("earlier") for r in found[step].values()) else ""
        lines.append(f"| {step}{mark} | {' | '.join(cells)} | {over} |")
    host = ", ".join(f"{what.removesuffix('_us')} {us:.1f}" for what, us in data["host"].items())
    lines += [
        "",
        f"Host us, 256 uneven decodes on TRITON_ATTN, copies to the device included: {host}.",
    ]
    return lines


def mixed(rows: list[dict[str, Any]]) -> list[str]:
    """Mixed steps in one call and in two."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        layer, step, way = (part.strip() for part in row["what"].split(":"))
        shown = f"{row['us']:.0f}" if "us" in row else "–"
        found.setdefault(f"{layer}: {step}", {})[way] = shown
    ways = list(dict.fromkeys(way for step in found.values() for way in step))
    return [
        "### Mixed steps in one call and in two",
        "",
        "`python benchmarks/h200_mixed.py`: device us, cold L2.",
        "",
        f"| step | {' | '.join(ways)} |",
        f"| --- |{' ---: |' * len(ways)}",
        *(f"| {step} | {' | '.join(us.get(w, '–') for w in ways)} |" for step, us in found.items()),
    ]


def choice(data: dict[str, Any]) -> list[str]:
    """What choosing costs."""
    summary = data["summary"]
    kinds = list(dict.fromkeys(name.split(", ")[1] for name in summary))
    who = list(dict.fromkeys(name.split(", ")[0] for name in summary))
    counts = {kind: summary[f"{who[0]}, {kind}"]["points"] for kind in kinds}
    lines = [
        "### Who is chosen",
        "",
        "`benchmarks/h200_tune.sh`: time over the fastest backend's (of a mixed step or pair's), "
        "geometric mean and worst, on models and lengths that the table was not fitted on.",
        "",
        f"| | {' | '.join(f'{kind} ({counts[kind]})' for kind in kinds)} |",
        f"| --- |{' ---: |' * len(kinds)}",
    ]
    for name in who:
        cells = [
            f"{s['mean']:.3f}, {s['worst']:.2f}" if (s := summary.get(f"{name}, {k}")) else "–"
            for k in kinds
        ]
        label = LABELS.get(name, f"{name} alone")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines
