"""Prints the support matrix from the declarations: `python -m polyattn.tools.cli.support`."""

from __future__ import annotations

from polyattn.registry.discovery import discover
from polyattn.registry.info import BackendInfo
from polyattn.spec.features import FEATURES


def matrix(infos: list[BackendInfo]) -> str:
    """Return the support matrix as Markdown."""
    names = [info.name for info in infos]
    lines = [
        "# What each backend claims",
        "",
        "Generated from the plugins' declarations; each claim is a test of the conformance kit.",
        "",
        f"| | {' | '.join(names)} |",
        f"| --- |{' --- |' * len(names)}",
    ]

    def row(label: str, cells: list[str]) -> None:
        lines.append(f"| {label} | {' | '.join(cells)} |")

    caps = [info.capabilities for info in infos]
    row("platforms", [_platforms(info) for info in infos])
    row("proof", [", ".join(f"{w} {p.value}" for w, p in info.proof.items()) for info in infos])
    row("phases", [", ".join(sorted(c.phases)) for c in caps])
    row("roles", [", ".join(sorted(r.value for r in c.roles)) for c in caps])
    row("dtypes", [", ".join(sorted(c.dtypes)) for c in caps])
    row("cache dtypes", [", ".join(sorted(c.kv_cache_dtypes)) for c in caps])
    row("rounds queries to fp8 too", ["yes" if c.fp8_compute else "" for c in caps])
    row("head sizes", [str(c.head_sizes) for c in caps])
    row("GQA ratios", [str(c.gqa_ratios) for c in caps])
    row("block sizes", [str(c.block_sizes) for c in caps])
    row("layouts", [", ".join(c.layouts) for c in caps])
    row("graph capture", [c.graph_capture.name.lower() for c in caps])
    for feature, meaning in FEATURES.items():
        row(meaning, ["yes" if feature in c.features else "" for c in caps])
    row("not together", ["; ".join(" + ".join(sorted(s)) for s, _ in c.excludes) for c in caps])
    return "\n".join(lines) + "\n"


def _platforms(info: BackendInfo) -> str:
    return "; ".join(
        f"{platform} ({', '.join(archs)})" if archs else platform
        for platform, archs in info.capabilities.platforms.items()
    )


def main() -> None:
    """Print the matrix of all installed backends but the example."""
    infos = sorted(discover().backends.values(), key=lambda b: b.name)
    print(matrix([info for info in infos if info.name != "EXAMPLE_ATTN"]), end="")


if __name__ == "__main__":
    main()
