"""Variants with sources written by hand: what torch.fx-traced generation can't do, and a lie of each."""

from __future__ import annotations

import torch
from polyattn import AttentionVariant
from torch import Tensor


def bent(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *, gain: Tensor, shift: Tensor
) -> Tensor:  # fmt: skip
    """An error function, which no generator knows, times a head's gain."""
    return torch.erf(score + shift) * gain[h]


def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *, reach: Tensor) -> Tensor:
    return q_idx - kv_idx < 4 + 3 * reach[b, h % 2]


TRITON = """
import triton
import triton.language as tl
from polyattn_triton.functions.ops import load


@triton.jit
def score_mod(score, b, h, q_idx, kv_idx, gain, shift):
    return tl.erf(score + shift) * load(gain, h)


@triton.jit
def mask_mod(b, h, q_idx, kv_idx, reach):
    return q_idx - kv_idx < 4 + 3 * load(reach, b, h % 2)
"""
JAX = """
from jax.lax import erf


def score_mod(score, b, h, q_idx, kv_idx, *, gain, shift):
    return erf(score + shift) * gain[h]


def mask_mod(b, h, q_idx, kv_idx, *, reach):
    return q_idx - kv_idx < 4 + 3 * reach[b, h % 2]
"""
CUDA = """
static __device__ float score_mod(float s, int64_t b, int64_t h, int64_t q, int64_t k,
                                           Input<float, 1> gain, float shift) {
  return erff(s + shift) * gain(h);
}
static __device__ bool mask_mod(int64_t b, int64_t h, int64_t q, int64_t k,
                                         Input<int32_t, 2> reach) {
  return q - k < 4 + 3 * reach(b, h % 2);
}
"""
SOURCES = {"triton": TRITON, "jax": JAX, "cuda": CUDA}
LIES = {language: text.replace("erf", "tanh") for language, text in SOURCES.items()} | {
    "triton": TRITON.replace("load(gain, h)", "load(gain, h + 1)"),
    "jax": JAX.replace("gain[h]", "gain[0]"),
    "cuda": CUDA.replace("gain(h)", "gain(0)"),
}


def variant(name: str, sources: dict[str, str]) -> AttentionVariant:
    return AttentionVariant(
        name=name, score_mod=bent, mask_mod=near, sources=sources,
        inputs={"gain": "float32[num_heads]", "shift": "float32", "reach": "int32[num_seqs, 2]"},
    )  # fmt: skip


HONEST, LYING = variant("bent", SOURCES), variant("bent_lie", LIES)


def given(seqs: int) -> dict[str, Tensor]:
    """Return what the functions read."""
    reach = torch.tensor([[0, 2]] * seqs, dtype=torch.int32)
    reach[::2] += 1
    return {
        "gain": torch.tensor([1.5, -2.0, 0.5, 3.0]),
        "shift": torch.tensor(0.25),
        "reach": reach,
    }
