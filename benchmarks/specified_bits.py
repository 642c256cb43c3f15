"""Has every machine the same bits at `batch_invariant="machines"`? A digest of each of many random steps.

    python benchmarks/specified_bits.py VANILLA --draws 10000 --out bits.txt
    python benchmarks/specified_bits.py TRITON_ATTN --device cuda --draws 10000 --against bits.txt

A number draws a layer of a few, a step and its tensors: of integers, which all builds of torch draw
alike. OUT has a line for each: the number and the digest of output and LSE. With `--against` a file of
another machine's, it says which differ, and fails if one does.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from polyattn import LayerGroup, LayerSpec, select
from polyattn.families.attention.workload import AttentionWorkload
from polyattn.workload.dice import Dice
from torch import Tensor

LAYERS: tuple[dict[str, Any], ...] = (
    {"num_heads": 4, "num_kv_heads": 2, "head_size": 64},
    {"num_heads": 8, "num_kv_heads": 1, "head_size": 128, "needs_lse": True},
    {"num_heads": 3, "head_size": 40, "v_head_size": 72, "block_size": 1},
    {"num_heads": 15, "num_kv_heads": 3, "head_size": 80, "block_size": 24, "alibi": True},
    {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "sliding_window": 21, "learned_sinks": True},
    {"num_heads": 2, "head_size": 96, "sliding_window": 300, "sink_tokens": 5, "needs_lse": True},
    {"num_heads": 6, "num_kv_heads": 2, "head_size": 64, "chunk_size": 100, "block_size": 128},
    {"num_heads": 4, "num_kv_heads": 1, "head_size": 256, "learned_sinks": True, "needs_lse": True},
    {"num_heads": 7, "num_kv_heads": 7, "head_size": 48, "causal": False, "sliding_window": 60},
    {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "cached": False, "needs_lse": True},
    {"num_heads": 5, "head_size": 32, "cached": False, "causal": False},
    {"num_heads": 16, "num_kv_heads": 1, "head_size": 64, "scale": 0.7},
)  # fmt: skip
LENGTHS = (1, 2, 9, 31, 32, 33, 64, 100, 255, 256, 257, 300, 513)
QUERIES = (1, 1, 1, 3, 17)


class Whole(Dice):
    """Numbers up to two: integers of 24 bits over a power of two."""

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        drawn = torch.randint(-(1 << 23), 1 << 23, shape, generator=self.generator)
        return (drawn.to(dtype) * 2.0**-22).to(self.device)


@cache
def group_of(index: int, backend: str, device: str) -> LayerGroup:
    """Return the group of a layer of the list."""
    fields = {"dtype": "float32", "batch_invariant": "machines"} | LAYERS[index]
    return LayerGroup(select(LayerSpec(**fields), device, backend=backend))


def digest(number: int, backend: str, device: str) -> str:
    """Run the step of a number; return the digest of its bits."""
    group = group_of(number % len(LAYERS), backend, device)
    dice = Whole(number, group.torch_device)
    lens = [dice.choice(LENGTHS) for _ in range(dice.integer(1, 5))]
    lengths = [(min(n, dice.choice((*QUERIES, n))), n) for n in lens]
    step = AttentionWorkload(AttentionWorkload.layer_of(group, dice), lengths, dice)
    bits = hashlib.sha256(step.run().cpu().numpy().tobytes())
    if group.spec.needs_lse:
        bits.update(step.lse.cpu().numpy().tobytes())
    return bits.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--draws", type=int, default=1000, help="the number after the last")
    parser.add_argument(
        "--every", type=int, default=1, help="take every so many, from the first on"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="none begins later")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--against", type=Path, help="the OUT of another machine")
    args = parser.parse_args()
    end, other, lines, differ = time.monotonic() + args.seconds, {}, [], []
    if args.against:
        other = dict(line.split() for line in args.against.read_text().splitlines())
    for number in range(args.first, args.draws, args.every):
        lines.append(f"{number} {digest(number, args.backend, args.device)}")
        if other and other.get(str(number)) != lines[-1].split()[1]:
            differ.append(number)
        if time.monotonic() > end:
            break
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    said = f", {len(differ)} unlike {args.against}: {differ[:10]}" if other else ""
    print(f"{args.backend} on {args.device}: {len(lines)} steps{said}", flush=True)
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
