"""Writes the selection tables: what each model gets on each profile."""

from __future__ import annotations

from pathlib import Path

from polyattn import LayerSpec, select
from polyattn.errors import SelectionError
from polyattn.spec.decompose import group_layers
from polyattn.tools.cli.models import bundled, bundled_models

TABLES = {
    "nvidia.md": ("a100", "l40s", "h100-sxm", "h200", "b200", "rtx4090", "rtx5090"),
    "amd.md": ("mi250x", "mi300x", "mi355x"),
    "hpu.md": ("gaudi2", "gaudi3"),
    "accelerators.md": ("ascend-910b", "xpu-b580", "trn2"),
    "metal.md": ("metal-m4", "metal-m3-max"),
    "tpu.md": ("tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x"),
    "cpu.md": ("x86-avx2", "x86-avx512", "x86-amx", "neoverse"),
}


def choice(spec: LayerSpec, profile: str) -> str:
    try:
        decision = select(spec, profile).decision
    except SelectionError:
        return "none"
    if decision.decode in (None, decision.prefill):
        return decision.prefill
    return f"{decision.prefill} + {decision.decode}"


def table(profiles: tuple[str, ...]) -> str:
    lines = [
        "# What each model's layers get (prefill + decode, with every plugin installed)",
        "",
        f"| model | layers | {' | '.join(profiles)} |",
        f"| --- | --- |{' --- |' * len(profiles)}",
    ]
    for model in bundled_models():
        for spec, layers in group_layers(
            LayerSpec.from_hf_config(bundled("models", f"{model}.json"))
        ).items():
            cells = " | ".join(choice(spec, profile) for profile in profiles)
            lines.append(f"| {model} | {len(layers)} x {spec} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    for name, profiles in TABLES.items():
        (Path(__file__).parent / name).write_text(table(profiles))


if __name__ == "__main__":
    main()
