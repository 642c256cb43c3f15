"""Draws the pictures of the documents from the code's own data: `python docs/pictures/draw.py`.

Each picture is an SVG that reads on a light and on a dark page. A test fails when one is stale.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

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
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 332" role="img">\n'
        "<title>Hosts call polyattn, which chooses among the plugins' backends</title>\n"
        f'{STYLE}\n<rect class="page" width="{width}" height="332"/>\n{body}\n</svg>\n'
    )


PICTURES = {"overview.svg": overview}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw(), encoding="utf-8")
