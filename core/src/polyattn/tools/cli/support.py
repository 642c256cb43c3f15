"""Prints what backends claim: `python -m polyattn.tools.cli.support > docs/support.md`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from polyattn.registry.capabilities import SERVICES
from polyattn.registry.discovery import discover
from polyattn.registry.info import BackendInfo, Proof

COMMON = frozenset({"causal", "gqa"})
"""Features that are left out where a backend has them: nearly all do."""


def matrix(infos: Iterable[BackendInfo]) -> str:
    """Return the claims as Markdown: a table for each plugin, a row for each backend."""
    plugins: dict[str, list[BackendInfo]] = {}
    for info in sorted(infos, key=lambda b: b.name):
        plugins.setdefault(info.path.split(".")[0], []).append(info)
    lines = [
        "# What each backend claims",
        "",
        "Generated from the plugins' declarations and the kits' records; each claim is a test of the",
        "kit. All serve a causal mask and groups of query heads unless their features say `no …`. How",
        "far they are proven follows from records: `measured` where each case of today's claims passed,",
        "`measured in part` where a record names no cases or lacks some; `declared` is a plugin's word.",
    ]
    for plugin, members in sorted(plugins.items()):
        lines += ["", f"## {plugin.replace('_', '-')}", ""]
        lines += [
            "| backend | where, and how far proven | serves | dtypes; caches | sizes | features |"
        ]
        lines += ["| --- | --- | --- | --- | --- | --- |"]
        lines += [f"| {' | '.join(_row(info))} |" for info in members]
    return "\n".join(lines) + "\n"


def _row(info: BackendInfo) -> list[str]:
    caps = info.capabilities
    roles = sorted(role.value for role in caps.roles)
    serves = [", ".join(sorted(kind.value for kind in caps.kinds)), ", ".join(sorted(caps.phases))]
    if not caps.phases & SERVICES:
        serves.append(", ".join(roles))
        keys = {frozenset({True}): "over a cache", frozenset({False}): "given keys"}
        serves.append(keys.get(caps.cached, "over a cache and given keys"))
        if caps.decode_query_lens > 1:
            serves.append(f"decodes of up to {caps.decode_query_lens} tokens")
        if caps.state_targets:
            serves.append("drafts in one launch")
        if caps.padding_rows:
            serves.append("padding rows of several tokens")
        if caps.shared_prefix:
            serves.append("shared prefixes in its own launch")
        if caps.mixes_tails:
            serves.append("lets NaN of uncached keys through")
        if caps.by_address:
            serves.append("given keys by address")
        if caps.graph_capture:
            serves.append(f"graphs: {caps.graph_capture.name.lower()}")
    sizes = [f"heads {caps.head_sizes}"]
    for label, claimed in (("groups", caps.gqa_ratios), ("blocks", caps.block_sizes)):
        sizes += [f"{label} {claimed}"] if str(claimed) != "any" else []
    sizes.append("/".join(caps.layouts))
    features = sorted(caps.features - COMMON) + [
        f"no {name}" for name in sorted(COMMON - caps.features)
    ]
    features += ["rounds queries to fp8"] if caps.fp8_compute else []
    features += [f"rotates {', '.join(sorted(caps.rotates))}"] if caps.rotates else []
    features += [f"norms {', '.join(sorted(caps.norms))}"] if caps.norms else []
    apart = [" + ".join(sorted(together)) for together, _ in caps.excludes]
    features += [f"not together: {'; '.join(apart)}"] if apart else []
    return [
        info.name,
        f"{_platforms(info)}: {'; '.join(_proofs(info))}",
        "; ".join(serves),
        f"{', '.join(sorted(caps.dtypes))}; {', '.join(sorted(caps.kv_cache_dtypes))}",
        "; ".join(sizes),
        ", ".join(features),
    ]


def _proofs(info: BackendInfo) -> Iterator[str]:
    """Yield how far a backend is proven, by build where these differ, with the record that says so."""
    for where, declared in info.proof.items():
        platforms = [p for p in info.proof if p != where and info.proof[p] is not declared]
        builds: dict[str, list[str]] = {}
        for build in info.builds:
            if (where == "cpu") != ("cpu" in build.capabilities.platforms) and info.variants:
                continue
            records = build.records(where)
            level = build.proof_at(where).value
            if records and declared is Proof.MEASURED:
                level = f"[{level}: {records[0].text}](../{records[0].path})"
            elif declared is Proof.MEASURED and platforms:  # which is said of the platform
                continue
            builds.setdefault(level, []).append(build.build)
        for level, names in builds.items():
            some = declared is Proof.MEASURED and info.variants
            yield f"{where} {level}" + (f" ({', '.join(names)})" if some else "")


def _platforms(info: BackendInfo) -> str:
    return "; ".join(
        f"{platform} ({', '.join(archs)})" if archs else platform
        for platform, archs in info.capabilities.platforms.items()
    )


def main() -> None:
    """Print the claims of all installed backends except the example."""
    infos = discover().backends.values()
    print(matrix(info for info in infos if info.name != "EXAMPLE_ATTN"), end="")


if __name__ == "__main__":
    main()
