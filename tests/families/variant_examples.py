"""The seven examples of variants, one backend beside formulas in float64 that share no code with them.

python variant_examples.py BACKEND [DEVICE DTYPE [NAME ...]]: each one's error, who refused it, or what
is WRONG.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from polyattn.errors import SelectionError
from polyattn.workload.compare import output_error
from polyattn.workload.tolerance import tolerance_of
from torch import Tensor

EXAMPLES = Path(__file__).parents[2] / "examples/variants.py"
_found = importlib.util.spec_from_file_location("examples_of_variants", EXAMPLES)
assert _found is not None and _found.loader is not None
examples = importlib.util.module_from_spec(_found)
sys.modules["examples_of_variants"] = examples
_found.loader.exec_module(examples)
DECODES = ([1, 1, 1], [21, 33, 20])
Formula = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Of scores (heads, queries, keys), places of queries (…, 1) and keys, and the sequence: the scores, and
who sees whom beside causality."""


def ancestors(parents: list[int]) -> Tensor:
    rows = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for token in range(len(parents)):
        at = token
        while at >= 0:
            rows[token, at] = True
            at = parents[at]
    return rows


def tree(s: Tensor, q: Tensor, k: Tensor, seq: int) -> tuple[Tensor, Tensor]:
    parents = [[-1, 0, 0, 1, 2], [-1], [i // 2 - 1 if i > 1 else i - 1 for i in range(20)]][seq]
    count, seen = s.shape[1], torch.ones(s.shape[1:], dtype=torch.bool)
    seen[:, -count:] = ancestors(parents[:count])
    return s, seen


def t5(s: Tensor, q: Tensor, k: Tensor, seq: int) -> tuple[Tensor, Tensor]:
    """transformers' own buckets, and a scale of 1."""
    from transformers.models.t5.modeling_t5 import T5Attention

    bucket = T5Attention._relative_position_bucket(
        k - q, bidirectional=False, num_buckets=32, max_distance=128
    )
    bias = torch.linspace(-2, 2, 32 * s.shape[0]).view(32, s.shape[0]).double()
    return s * 8.0 + bias[bucket].permute(2, 0, 1), everybody(s)


def everybody(s: Tensor) -> Tensor:
    return torch.ones(s.shape[1:], dtype=torch.bool)


def each(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None, None]


FORMULAS: dict[str, Formula] = {
    "flash_sigmoid": lambda s, q, k, seq: (1 / (1 + torch.exp(3.0 - s)), everybody(s)),
    "soft_cap": lambda s, q, k, seq: (2 * torch.tanh(s / 2), everybody(s)),
    "alibi": lambda s, q, k, seq: (s - each([1 / 2, 1 / 4, 1 / 8, 1 / 16]) * (q - k), everybody(s)),
    "speculation_tree": tree,
    "documents": lambda s, q, k, seq: (s, q // 8 == k // 8),
    "t5_bias": t5,
    "head_temperature": lambda s, q, k, seq: (s / each([0.5, 1, 1.5, 2]), everybody(s)),
}  # fmt: skip


def by_hand(name: str, query: Tensor, keys: Tensor, values: Tensor, seq: int) -> Tensor:
    """One sequence's attention (queries, heads, size) in float64, of four heads of 64."""
    count, length = len(query), len(keys)
    keys, values = (t.repeat_interleave(2, 1).double() for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) / 8.0
    q, k = torch.arange(length - count, length)[:, None], torch.arange(length)
    scores, seen = FORMULAS[name](scores, q, k, seq)
    seen = seen & (k <= q)
    if name == "flash_sigmoid":
        weights = torch.where(seen, scores, 0.0)
    else:
        weights = torch.where(seen, scores, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def check(backend: str, name: str, lens: Any, device: str = "cpu", dtype: str = "float32") -> float:
    """Return an example's error on a backend; raises where it isn't right."""
    generator = torch.Generator().manual_seed(11)
    spec = examples.SPEC.replace(dtype=dtype)
    kind = getattr(torch, dtype)
    example = getattr(examples, name)(spec)
    if name == "speculation_tree" and lens == DECODES:
        step = {"mask": examples.CustomMask.tree([[-1], [-1], [-1]])}
        example = (example[0], example[1], step)
    new = [torch.randn(sum(lens[0]), n, 64, generator=generator).to(kind) for n in (4, 2, 2)]
    cached = [torch.randn(9, 16, 2, 64, generator=generator).to(kind) for _ in range(2)]
    table = torch.randperm(9, generator=generator).int().view(3, 3)
    out = examples.attend(
        example, backend, [t.to(device) for t in new], [t.to(device) for t in cached],
        table.to(device), lens,
    ).cpu()  # fmt: skip
    expected, at = [], 0
    for seq, (count, length) in enumerate(zip(*lens, strict=True)):
        mine = slice(at, at := at + count)
        keys, values = (t[table[seq].long()].flatten(0, 1)[:length].clone() for t in cached)
        keys[length - count :], values[length - count :] = new[1][mine], new[2][mine]
        expected.append(by_hand(name, new[0][mine], keys, values, seq))
    error = output_error(out, torch.cat(expected))
    assert error <= tolerance_of(example[0]).output, f"{name} on {backend}: off by {error:.3g}"
    return error


def main(backend: str, device: str = "cpu", dtype: str = "float32", *names: str) -> None:
    for name in names or FORMULAS:
        for label, lens in (("prefill", examples.LENS), ("decode", DECODES)):
            try:
                print(f"{backend} {name} {label}: {check(backend, name, lens, device, dtype):.2g}")
            except SelectionError as error:
                print(f"{backend} {name} {label}: refused: {' '.join(str(error).split())[:400]}")
            except Exception as error:
                print(f"{backend} {name} {label}: WRONG: {' '.join(str(error).split())[:400]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
