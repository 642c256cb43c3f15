"""What is a row of a suite? A layer, a step, which backends and libraries run it, and a bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyattn import LayerSpec
from polyattn.spec.decompose import unrotated
from polyattn.tools.cli.grammar import parse_batch
from polyattn.tools.cli.models import bundled
from polyattn.workload.steps import Lengths

BEST = "the best other"
"""What a bar is a multiple of: the fastest of the others."""


@dataclass(frozen=True)
class Bar:
    """The first contender takes at most `most` times as long as `of`, or `most` us (`of` = "us")."""

    most: float
    of: str = BEST

    def __str__(self) -> str:
        return f"{self.most:g} us" if self.of == "us" else f"{self.most:g} x {self.of}"


@dataclass(frozen=True)
class Other:
    """A contender whose layer or part differs from its row's: `changes` of the spec, `part`."""

    label: str
    backend: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    part: str = ""


Contender = str | Other
"""A backend of the row's own layer by name, or another."""


@dataclass(frozen=True)
class Row:
    """One row of a suite.

    - `steps`: (query length, sequence length) of each sequence, or a text as `8q1s2k_2q1k`.
    - `by`: the contenders, by the device's type; the first one is held to the `bar`.
    - `libraries`: yardsticks, `module.function` of `libraries/`.
    - `part`: what is timed, a name in `measuring.PARTS`.
    - `levels`: (sequences that share a run of tokens, its tokens), outermost first.
    """

    name: str
    spec: LayerSpec
    steps: str | Lengths
    by: Mapping[str, Sequence[Contender]]
    bar: Bar | None = None
    libraries: Sequence[str] = ()
    part: str = "layer"
    levels: Sequence[tuple[int, int]] = ()

    def lengths(self, shrink: int = 1) -> list[tuple[int, int]]:
        """Return the step, its lengths divided by `shrink`, decodes first, as engines order them."""
        pairs = parse_batch(self.steps) if isinstance(self.steps, str) else list(self.steps)
        if shrink > 1 and self.spec.recurrent is not None:  # states have no lengths
            pairs = pairs[:8]
        if shrink > 1:
            pairs = [
                (q if q <= DRAFTS else -(-q // shrink), -(-q // shrink) + -(-(n - q) // shrink) + DRAFTS)
                if n > q or q == 1 else (-(-q // shrink),) * 2
                for q, n in pairs
            ]  # fmt: skip
        return sorted(pairs, key=lambda pair: pair[0] != 1)

    def contenders(self, device: str) -> list[Other]:
        """Return which backends run the row on a type of device."""
        of_type = self.by.get(device, ())
        return [each if isinstance(each, Other) else Other(each, each) for each in of_type]


DRAFTS = 16
"""Queries of a sequence that stay as they are where a step shrinks."""
K = 1024


def model(name: str, kind: str | None = None) -> LayerSpec:
    """Return the first layer of a bundled model, or of a kind; its queries come normed and rotated."""
    specs = LayerSpec.from_hf_config(bundled("models", f"{name}.json"))
    found = next(spec for spec in specs if kind is None or spec.kind.value == kind)
    return unrotated(found)


LLAMA = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
QWEN = LayerSpec(num_heads=28, num_kv_heads=4, head_size=128)
SHARD = LayerSpec(num_heads=16, num_kv_heads=2, head_size=128)
MHA = LayerSpec(num_heads=16, num_kv_heads=16, head_size=128)
ATTENTION: dict[str, Sequence[Contender]] = {
    "cuda": ("TRITON_ATTN", "FLASHINFER", "FLASH_ATTN_V3"),
    "cpu": ("NATIVE_ATTN", "TORCH_SDPA"),
}
PLAIN_CUDA: dict[str, Sequence[Contender]] = ATTENTION | {"cuda": ("TRITON_ATTN", "FLASH_ATTN_V3")}
"""For layers whose variants FlashInfer compiles for minutes."""
RECURRENT: dict[str, Sequence[Contender]] = {
    "cuda": ("TRITON_SCAN", "FLA"), "cpu": ("NATIVE_SCAN", "TORCH_SCAN"),
}  # fmt: skip
LATENT: dict[str, Sequence[Contender]] = {
    "cuda": ("TRITON_MLA", "FLASHINFER_MLA", "FLASH_ATTN_MLA", "FLASHMLA"),
    "cpu": ("NATIVE_MLA", "TORCH_MLA"),
}
