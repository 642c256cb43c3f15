"""Runs the kernels that round queries, interpreted, beside torch's operators: bits, of any shape."""

from __future__ import annotations

import torch
from polyattn_cuda.query_rounding import by_kernels, by_torch

LENS = {
    "decode": None,
    "one sequence": [70],
    "ragged": [1, 3, 0, 129, 2, 40],
    "zeros between": [5, 9, 64],
}
SHAPES = ((8, 2, 64), (3, 3, 80), (12, 4, 192), (32, 1, 128))


def main() -> None:
    """Compare each shape and split of tokens; prints how many."""
    dice, done = torch.Generator().manual_seed(0), 0
    for heads, kv_heads, size in SHAPES:
        for name, lens in LENS.items():
            tokens = 37 if lens is None else sum(lens)
            wide = torch.randn(tokens, heads + 2, size, generator=dice)
            loud = torch.rand(tokens, heads + 2, 1, generator=dice) * 20 - 10
            query = (wide * loud.exp()).bfloat16()[:, 1:-1]  # a view, as of a fused projection
            seq_of = None
            if lens is not None:
                seq_of = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))
            if name == "zeros between":
                query[5:14] = 0
            seqs = tokens if lens is None else len(lens)
            # The interpreter isn't held to 8-bit floats: it divides, torch rounds.
            found, scales = by_kernels(query, kv_heads, seqs, seq_of, torch.float32)
            wanted, right = by_torch(query, kv_heads, seqs, seq_of)
            used = slice(None) if seq_of is None else seq_of.unique()
            assert torch.equal(scales[used], right[used]), (heads, size, name)
            same = found.to(torch.float8_e4m3fn).view(torch.uint8) == wanted.view(torch.uint8)
            assert bool(same.all()), (heads, size, name)
            done += 1
    print(done)


if __name__ == "__main__":
    main()
