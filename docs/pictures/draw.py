"""Draws the pictures of the documents from the code's own data: `python docs/pictures/draw.py`.

Each picture is an SVG that reads on a light and on a dark page. A test fails when one is stale.
"""

from __future__ import annotations

import ast
import re
import tomllib
from html import escape
from pathlib import Path
from typing import get_type_hints

import polyattn
import torch
from polyattn.registry.catalogue import catalogue

HERE = Path(__file__).parent
STYLE = """<style>
text { font: 14px system-ui, sans-serif; fill: #1f2328; } .small { font-size: 12px; fill: #59636e; }
rect { fill: #f6f8fa; stroke: #8c959f; rx: 6; } .core { fill: #ddf4ff; stroke: #0969da; }
.arrow { stroke: #59636e; fill: none; marker-end: url(#head); } .head { fill: #59636e; }
.page { fill: #ffffff; stroke: none; }
</style>
<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">
<path class="head" d="M0 0L8 4L0 8z"/></marker>"""
HOSTS = ("your engine", "vLLM, SGLang", "transformers", "diffusers", "torch, flash-attn")
STEPS = (
    ("select(spec)", "which kernel, and why"),
    ("LayerGroup", "loads the kernels"),
    ("group.plan(batch)", "once a step"),
    ("layer(q, k, v, cache, plan)", "prefill and decode"),
)


def box(x: int, y: int, width: int, title: str, note: str = "", kind: str = "") -> str:
    """Return a labelled box of 52 units' height."""
    middle, top = x + width // 2, y + (22 if note else 31)
    lines = [
        f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="52"/>',
        f'<text x="{middle}" y="{top}" text-anchor="middle">{escape(title)}</text>',
    ]
    if note:
        lines.append(
            f'<text class="small" x="{middle}" y="{y + 41}" text-anchor="middle">{escape(note)}</text>'
        )
    return "\n".join(lines)


def overview() -> str:
    """Return the README's picture: hosts, core, and the plugins of the catalogue."""
    plugins = sorted(catalogue())
    width = 960
    parts = []
    for row, names, y in ((0, HOSTS, 16), (2, plugins, 264)):
        each = (width - 16) // len(names)
        for at, name in enumerate(names):
            count = len(catalogue()[name]["backends"]) if row else 0
            parts.append(
                box(16 + at * each, y, each - 12, name, f"{count} backends" if row else "")
            )
            middle = 16 + at * each + (each - 12) // 2
            start, end = (68, 104) if not row else (228, 262)
            parts.append(f'<path class="arrow" d="M{middle} {start}L{middle} {end}"/>')
    parts.append(f'<rect class="core" x="16" y="106" width="{width - 28}" height="120"/>')
    parts.append(
        '<text x="32" y="130">polyattn: one interface, one decision, every reason shown</text>'
    )
    each = (width - 60) // len(STEPS)
    for at, (title, note) in enumerate(STEPS):
        parts.append(box(32 + at * each, 150, each - 24, title, note))
        if at:
            parts.append(
                f'<path class="arrow" d="M{32 + at * each - 24} 176L{32 + at * each - 2} 176"/>'
            )
    return _picture(
        width, 332, "Hosts call polyattn, which chooses among the plugins' backends", parts
    )


CORE = HERE.parents[1] / "core" / "src" / "polyattn"


def floors() -> str:
    """Return the folders of core, from the import contract that holds them."""
    contracts = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["tool"][
        "importlinter"
    ]
    (layers,) = (c["layers"] for c in contracts["contracts"] if c["type"] == "layers")
    parts, left, width = [], 200, 740
    for row, layer in enumerate(layers):
        names = layer.split(" | ")
        each = width // len(names)
        for at, name in enumerate(names):
            parts.append(
                box(left + at * each, 16 + 62 * row, each - 12, name, _question(name, each // 7))
            )
    bottom = 16 + 62 * len(layers)
    parts.append(f'<path class="arrow" d="M150 30L150 {bottom - 24}"/>')
    for line, text in enumerate(("imports", "go down", "only")):
        parts.append(f'<text x="40" y="{bottom // 2 + 20 * line}">{text}</text>')
    return _picture(960, bottom + 8, "The folders of core: imports go down only", parts)


def _question(name: str, room: int) -> str:
    """Return what a folder or module of core answers: its docstring's first words that fit."""
    path = CORE / name / "__init__.py" if (CORE / name).is_dir() else CORE / f"{name}.py"
    text = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").replace("`", "")
    line = text.partition("\n")[0]
    while len(line) > room:
        line = re.sub(r"[\s.?:,]+$|(?<=[.?])\s[^.?]*[.?]?$|[:,][^:,]*$|\s\S+$", "", line, count=1)
    return line.rstrip(":,")


def flow() -> str:
    """Return how one value becomes the next, by the functions' own annotations."""
    made_by = get_type_hints(polyattn.select)["return"].__name__
    plan = get_type_hints(polyattn.LayerGroup.plan)["return"].__name__
    spec = get_type_hints(polyattn.select)["spec"].__name__
    batch = get_type_hints(polyattn.LayerGroup.plan)["batch"].__name__
    once = [
        (spec, "what a layer computes"),
        (made_by, "which backends, and why"),
        ("LayerGroup", "loaded kernels, workspaces"),
        ("Attention", "a layer: its parameters"),
    ]
    step = [
        (batch, "lengths, block table, slots"),
        (plan, "calls, and how they combine"),
        ("layer(…, plan)", "output, and LSE where asked"),
    ]
    between = (
        {0: "select()", 1: "loads", 2: "for each layer"},
        {0: "group.plan()", 1: "each layer runs it"},
    )
    parts = []
    for row, (boxes, words) in enumerate(zip((once, step), between, strict=True)):
        y = 44 + row * 130
        parts.append(f'<text x="16" y="{y - 12}">{("built once", "each step")[row]}</text>')
        width = 240
        for at, (title, note) in enumerate(boxes):
            x = 16 + at * width + (width if row else 0) * (len(once) - len(step))
            parts.append(box(x, y, 190, title, note, "core" if title == plan else ""))
            if at < len(boxes) - 1:
                parts.append(
                    f'<path class="arrow" d="M{x + 190} {y + 26}L{x + width - 2} {y + 26}"/>'
                )
                parts.append(
                    f'<text class="small" x="{x + 215}" y="{y + 70}" text-anchor="middle">'
                    f"{words[at]}</text>"
                )
    parts.append(
        '<path class="arrow" d="M591 96L591 172"/><path class="arrow" d="M831 96L831 172"/>'
    )
    return _picture(976, 260, "From a layer's spec to its output", parts)


COLOURS = ("#0969da", "#bf8700", "#1a7f37")


def _example() -> tuple[polyattn.LayerGroup, polyattn.Batch]:
    """Return the step that two pictures show: a prompt of 20 tokens, and two decodes."""
    spec = polyattn.LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, block_size=16)
    chosen = polyattn.select(spec, "cpu", backend="prefill=TORCH_SDPA,decode=NATIVE_ATTN")
    table = torch.tensor([[5, 3, 0], [2, 7, 4], [1, 0, 0]], dtype=torch.int32)
    return polyattn.LayerGroup(chosen), polyattn.Batch.from_lens([20, 1, 1], [20, 41, 9], table, 16)


def cache() -> str:
    """Return where a batch's tokens lie: its block table, and the blocks of the cache."""
    _, batch = _example()
    assert batch.block_table is not None and batch.slot_mapping is not None
    size, new = batch.block_size, set(batch.slot_mapping.tolist())
    table, lens = batch.block_table.tolist(), list(batch.host_lens)
    parts, owner = [], {}
    for row, (blocks, length) in enumerate(zip(table, lens, strict=True)):
        used = -(-length // size)
        y = 44 + row * 34
        query = batch.host_query_lens[row]
        parts.append(
            f'<text x="16" y="{y + 18}">sequence {row}: {length} tokens, {query} new</text>'
        )
        for at, block in enumerate(blocks):
            colour = COLOURS[row] if at < used else "#8c959f"
            parts.append(f'<rect x="{300 + 44 * at}" y="{y}" width="38" height="26"/>')
            text = str(block) if at < used else "–"
            parts.append(
                f'<text x="{319 + 44 * at}" y="{y + 18}" text-anchor="middle" '
                f'style="fill:{colour}">{text}</text>'
            )
            if at < used:
                owner[block] = (row, min(size, length - at * size))
    parts.insert(0, '<text x="300" y="32">block table</text>')
    parts.append(f'<text x="16" y="176">cache: blocks of {size} tokens</text>')
    for block in range(8):
        x, y = 16 + (block % 4) * 232, 190 + (block // 4) * 70
        parts.append(f'<text class="small" x="{x}" y="{y + 12}">block {block}</text>')
        row, filled = owner.get(block, (0, 0))
        for offset in range(size):
            style = "fill:#ffffff"
            if offset < filled:
                fresh = block * size + offset in new
                style = f"fill:{COLOURS[row]};fill-opacity:{1 if fresh else 0.35}"
            parts.append(
                f'<rect x="{x + 13 * offset}" y="{y + 18}" width="12" height="26" style="{style};rx:1"/>'
            )
    parts.append(
        '<text class="small" x="16" y="346">A full colour is a new token: its slot is '
        "block × block size + offset. White slots hold nothing and are never read.</text>"
    )
    return _picture(944, 362, "Where the tokens of a batch lie in the cache", parts)


def step() -> str:
    """Return one step's calls, as the plan itself lists them."""
    group, batch = _example()
    plan = group.plan(batch)
    parts = [box(16, 76, 170, "Batch", f"{batch.num_seqs} sequences, {batch.num_tokens} tokens")]
    store = group.selection.decision.backend("store") or ""
    parts.append(box(236, 76, 190, f"store: {store}", "new keys and values"))
    parts.append('<path class="arrow" d="M186 102L234 102"/>')
    for at, call in enumerate(plan.calls):
        y = 16 + at * 120
        part = call.plan.batch
        rows = f"{part.num_seqs} sequence{'s' * (part.num_seqs > 1)}"
        note = f"{rows}, up to {part.max_seq_len} keys"
        parts.append(box(476, y, 230, f"{call.phase}: {call.name}", note, "core"))
        parts.append(f'<path class="arrow" d="M426 102L474 {y + 26}"/>')
        parts.append(f'<path class="arrow" d="M706 {y + 26}L754 102"/>')
    parts.append(box(756, 76, 188, "output", "each call writes its rows"))
    return _picture(960, 204, "One step: a prompt and two decodes", parts)


def _picture(width: int, height: int, title: str, parts: list[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        f"<title>{escape(title)}</title>\n"
        f'{STYLE}\n<rect class="page" width="{width}" height="{height}"/>\n{body}\n</svg>\n'
    )


PICTURES = {
    "overview.svg": overview,
    "floors.svg": floors,
    "flow.svg": flow,
    "cache.svg": cache,
    "step.svg": step,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw(), encoding="utf-8")
