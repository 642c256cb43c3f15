"""How does Triton run recurrences with a decay per channel? Prompts in chunks, decodes by the token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
from polyattn.kernel import STORAGE_DTYPES, AttentionKind, LayerSpec, at_least
from torch import Tensor

from polyattn_triton.configs import prompt_config
from polyattn_triton.functions.pointwise import features
from polyattn_triton.kernels.channels import chunk_kernel, pair_kernel
from polyattn_triton.kernels.token import channel_kernel, elu_plus_one, relu
from polyattn_triton.launch import Launcher, multiprocessors, power
from polyattn_triton.selective import Pieces
from polyattn_triton.walk import Walk

VALUES, OF_128 = 32, 64
"""Value channels that a program holds which takes a token at a time, each with all keys; and with 128
keys (H100, decode of 128: KDA's 198 us, 219 with 32; RWKV-7's of 64 keys 69, 72 with 64)."""
MANY = 2
"""Programs of a walk that a multiprocessor's registers hold, with keys of 128: of more, each has half the
warps (H200, 512 of them 803 us for 988, while 64 take 1,054 for 793)."""
TOKEN_OPTIONS = {"num_warps": 4, "num_stages": 1}
INPUTS = {
    AttentionKind.KDA: ("q", "k", "v", "g", "beta", "", ""),
    AttentionKind.RWKV6: ("r", "k", "v", "w", "", "u", ""),
    AttentionKind.RWKV7: ("r", "k", "v", "w", "", "a", "b"),
    AttentionKind.PHI_LINEAR: ("q", "k", "v", "", "", "", ""),
}
"""The inputs of the kernels, in their order."""
_channel, _pair, _chunk = Launcher(channel_kernel), Launcher(pair_kernel), Launcher(chunk_kernel)


def feature_map(spec: LayerSpec) -> Any:
    """Return phi of linear attention with a normaliser in Triton's language; None of other kinds."""
    if spec.kind is not AttentionKind.PHI_LINEAR:
        return None
    assert spec.recurrent is not None
    name = spec.recurrent.feature_map
    return features(spec) if name is None else {"elu+1": elu_plus_one, "relu": relu}[name]


def channel_constants(spec: LayerSpec, drafts: bool = False) -> tuple[Any, ...]:
    """Return `channel_kernel`'s constants, in its order. `drafts`: each token's state is kept."""
    form = spec.recurrent
    assert form is not None
    phi = feature_map(spec)
    values = spec.v_head_size + (phi is not None)
    # The normaliser's column is a program's with all values.
    most = OF_128 if power(spec.head_size) == 128 else VALUES
    block = power(values) if phi is not None else min(most, power(values))
    return (
        spec.num_heads // spec.num_kv_heads, spec.head_size, values, power(spec.head_size), block,
        spec.kind is AttentionKind.KDA, phi, form.qk_norm, drafts, spec.kind is AttentionKind.RWKV6,
    )  # fmt: skip


def pair_constants(spec: LayerSpec, arch: str) -> tuple[Any, ...]:
    """Return `pair_kernel`'s constants, in its order."""
    assert spec.recurrent is not None
    keys, chunk = spec.head_size, prompt_config(spec, arch).chunk
    sizes = (spec.num_heads // spec.num_kv_heads, keys, power(keys), chunk)
    return *sizes, spec.kind is AttentionKind.KDA, spec.recurrent.qk_norm, chunk.bit_length() - 1


def pair_options(spec: LayerSpec, arch: str) -> dict[str, int]:
    """Return the options that `pair_kernel` is launched with: a warp for 16 tokens."""
    return {"num_warps": prompt_config(spec, arch).chunk // 16, "num_stages": 1}


def chunk_constants(spec: LayerSpec, arch: str, part: str = "whole") -> tuple[Any, ...]:
    """Return `chunk_kernel`'s constants, in its order. `part`: of pieces "left" or "out"."""
    config, keys, values = prompt_config(spec, arch), spec.head_size, spec.v_head_size
    block = min(config.block_v, power(values))
    return keys, values, power(keys), block, config.chunk, spec.kind is AttentionKind.KDA, part


def by_token(
    spec: LayerSpec,
    tensors: tuple[Tensor, ...],
    out: Tensor,
    states: Tensor,
    meta: tuple[Tensor, Tensor, Tensor],
    options: dict[str, int],
    targets: Tensor | None = None,
) -> None:
    """Run a step a token at a time. `tensors`: as `INPUTS`; `meta`: sequences' starts, lengths, slots.

    `targets`: `Batch.state_targets` of drafts.
    """
    beta, constants = tensors[4], channel_constants(spec, targets is not None)
    to, each = (meta[2], 0) if targets is None else (targets, targets.stride(0))
    strides = (*_strides(tensors), beta.stride(0), *out.stride()[:2], *states.stride()[:2], each)
    _channel(
        (meta[2].numel(), spec.num_heads, triton.cdiv(constants[2], constants[4])),
        (*tensors, out, states, *meta, to), (spec.scale,), strides, (), constants, options,
    )  # fmt: skip


def given_inputs(spec: LayerSpec, inputs: Mapping[str, Tensor], none: Tensor) -> tuple[Tensor, ...]:
    """Return the inputs in the kernels' order; `none` for none."""
    return tuple(inputs[name] if name else none for name in INPUTS[spec.kind])


def _strides(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Return token and head strides of all inputs but beta, 0 for one that isn't there."""
    q, k, v, g, _, a, b = tensors
    return tuple(s for t in (q, k, v, g, a, b) for s in (*t.stride(), 0)[:2])


def walk_options(spec: LayerSpec, arch: str, each: float = 0.0) -> dict[str, int]:
    """Return the options that `chunk_kernel` is launched with. `each`: programs of a multiprocessor.

    They don't depend on the batch where bits may not. (What pieces leave takes registers: of "out" 0.)
    """
    config = prompt_config(spec, arch)
    many = each > MANY and power(spec.head_size) == 128 and not spec.batch_invariant
    return {"num_warps": config.num_warps // (2 if many else 1), "num_stages": config.num_stages}


class Channels:
    """Launches a prefill; holds the chunks' matrices. One stream uses it at a time."""

    def __init__(self, spec: LayerSpec, arch: str, device: torch.device):
        self.spec, self.arch = spec, arch
        self.config = prompt_config(spec, arch)
        self.walk = Walk(spec, arch, device)
        small, wide = (2, 3) if spec.kind is AttentionKind.KDA else (4, 4)
        self.row = small * self.config.chunk + wide * spec.head_size
        self.work = torch.empty(0, dtype=STORAGE_DTYPES[spec.dtype], device=device)
        self.whole = torch.empty(0, dtype=torch.float32, device=device)
        self._outgrown: list[Tensor] = []

    def __call__(
        self,
        tensors: tuple[Tensor, ...],
        out: Tensor,
        states: Tensor,
        meta: tuple[Tensor, Tensor, Tensor],
        chunks: Pieces,
        pieces: Pieces | None,
    ) -> None:
        """Run a step. `tensors`, `meta`: as `by_token`; `pieces`: as `Deltas` has them."""
        spec, (q, k, v, g, beta, a, b) = self.spec, tensors
        heads, (starts, _, slots) = spec.num_heads, meta
        per_token, places = heads * self.row, slots.numel() + len(q) // self.config.chunk + 1
        self.work = work = at_least(self.work, len(q) * per_token, self._outgrown)
        self.whole = whole = at_least(self.whole, places * heads * spec.head_size, self._outgrown)
        strides, along = _strides(tensors), (per_token, self.row)
        _pair(
            (chunks.count, heads, 1),
            (q, k, g, beta, a, b, work, whole, starts, slots, chunks.seq, chunks.start),
            (),
            (*strides[:4], *strides[6:], beta.stride(0), *along),
            (),
            pair_constants(spec, self.arch),
            pair_options(spec, self.arch),
        )
        for part, grid, left, cells, size in self.walk.launches(slots.numel(), pieces):
            each = 0.0 if part == "out" else math.prod(grid) / multiprocessors(q.device)
            _chunk(
                grid,
                (v, work, whole, out, states, left, *meta, *cells),
                (spec.scale,),
                (*strides[4:6], *along, *out.stride()[:2], *states.stride()[:2]),
                (size,),
                chunk_constants(spec, self.arch, part),
                walk_options(spec, self.arch, each),
            )
