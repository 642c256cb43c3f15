"""TRITON_TOKEN_SCAN: RG-LRU, RWKV-6, and linear attention with a normaliser.

Prompts go by tiles of tokens, in pieces side by side where sequences are few. Decodes, drafts, RWKV-6 and
what must have a decode's bits go by the token.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import triton
from polyattn.kernel import (
    AttentionKind,
    Batch,
    CacheFormat,
    Device,
    LayerSpec,
    Plan,
    RecurrentBackend,
    RecurrentFrame,
    at_least,
)
from torch import Tensor

from polyattn_triton.channels import by_token, channel_constants, feature_map, given_inputs
from polyattn_triton.kernels.pieces import phi_kernel, unit_pieces_kernel
from polyattn_triton.kernels.token import unit_kernel
from polyattn_triton.launch import Launcher, multiprocessors, power
from polyattn_triton.scan import ScanPlan
from polyattn_triton.selective import LEAST_PIECE, SCHEDULERS, Pieces

UNITS = 64
"""Channels of RG-LRU that a program holds by the token."""
PIECE_UNITS, AHEAD = 128, 8
"""Channels of RG-LRU that a program of a prompt holds, and tokens that it loads ahead."""
CHUNK = 64
"""Tokens of linear attention that a program multiplies at once."""
WIDEST = 128
"""Keys and values of a head that a program holds as a matrix at most; wider ones go by the token."""
UNIT_PROGRAMS, PROGRAMS = 8, 4
"""Of a prompt's launch on a scheduler (RG-LRU) or multiprocessor where sequences, too few for one each,
are cut (H100: RG-LRU's 8 x 4,096 took 460 us cut and 913 whole, 32 x 4,096 1,702 and 1,274)."""
_unit, _unit_pieces = Launcher(unit_kernel), Launcher(unit_pieces_kernel)
_phi = Launcher(phi_kernel)


def token_constants(spec: LayerSpec, drafts: bool = False) -> tuple[Any, ...]:
    """Return the constants of `spec`'s kernel, in its order. `drafts`: each token's state is kept."""
    if spec.kind is AttentionKind.RG_LRU:
        return spec.num_heads, UNITS, drafts
    return channel_constants(spec, drafts)


def token_options(spec: LayerSpec) -> dict[str, int]:
    """Return the launch options of `spec`'s kernel: a wider tile has more warps."""
    if spec.kind is AttentionKind.RG_LRU:
        return {"num_warps": 1}
    return {"num_warps": _warps(spec), "num_stages": 1}


def piece_constants(spec: LayerSpec, part: str) -> tuple[Any, ...]:
    """Return the constants of the kernel of `spec`'s prompts, in its order. `part`: as it says."""
    if spec.kind is AttentionKind.RG_LRU:
        return spec.num_heads, PIECE_UNITS, AHEAD, part
    return (
        spec.num_heads // spec.num_kv_heads,
        spec.head_size,
        spec.v_head_size + 1,
        power(spec.head_size),
        power(spec.v_head_size),
        CHUNK,
        feature_map(spec),
        part,
    )


def piece_options(spec: LayerSpec) -> dict[str, int]:
    """Return that kernel's launch options."""
    if spec.kind is AttentionKind.RG_LRU:
        return {"num_warps": 1, "num_stages": 1}
    return {"num_warps": _warps(spec), "num_stages": 1}


def _warps(spec: LayerSpec) -> int:
    """Return the warps that hold a matrix of keys and values: a wider one has more."""
    return 4 if max(spec.head_size, spec.v_head_size) <= 64 else 8


class TritonTokenScan(RecurrentBackend):
    """One launch a step, or two of a prompt's pieces; holds what they leave, for one stream at a time."""

    name: ClassVar[str] = "TRITON_TOKEN_SCAN"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.torch_device = torch.device(str(device.torch_device))
        self._none = torch.empty(0, dtype=torch.float32, device=self.torch_device)
        self._whole = torch.empty(0, dtype=torch.int32, device=self.torch_device)
        self._options = token_options(spec)
        units = spec.kind is AttentionKind.RG_LRU
        # A layer whose bits may not depend on the step has them by the token.
        wide = not units and max(spec.head_size, spec.v_head_size) > WIDEST
        serial = wide or spec.kind is AttentionKind.RWKV6
        self._tiles = not (spec.batch_invariant or serial)
        self._programs = triton.cdiv(spec.num_heads, PIECE_UNITS) if units else spec.num_heads
        self._places = multiprocessors(self.torch_device) * (SCHEDULERS if units else 1)
        self._side = self._places * (UNIT_PROGRAMS if units else PROGRAMS)
        self._left = self._none
        self._outgrown: list[Tensor] = []

    def plan(self, batch: Batch, reuse: Plan | None = None) -> ScanPlan:
        plan = ScanPlan(batch)
        if plan.phase != "prefill" or not self._tiles or plan.take(reuse):
            return plan
        counts = batch.query_lens
        size = max(LEAST_PIECE, triton.cdiv(sum(counts) * self._programs, self._side))
        if batch.num_seqs * self._programs < self._places and size < max(counts):
            plan.pieces = Pieces(batch, size)
        return plan

    def run(self, plan: ScanPlan, frame: RecurrentFrame) -> None:
        if self._tiles and plan.phase == "prefill":
            self._by_tiles(plan, frame)
        elif self.spec.kind is AttentionKind.RG_LRU:
            self._units(plan, frame)
        else:
            out, states, inputs = frame.out, frame.states, {**frame.inputs}
            if (bonus := frame.params.get("u")) is not None:
                inputs["u"] = bonus.expand(len(out), -1, -1)
            tensors = given_inputs(self.spec, inputs, self._none)
            by_token(self.spec, tensors, out, states, plan.meta, self._options, plan.targets)

    def _by_tiles(self, plan: ScanPlan, frame: RecurrentFrame) -> None:
        spec, out, states, pieces = self.spec, frame.out, frame.states, plan.pieces
        parts: tuple[str, ...] = ("whole",)
        cells, programs, size = (self._whole, self._whole), plan.batch.num_seqs, 0
        if pieces is not None:
            parts, cells = ("left", "out"), (pieces.seq, pieces.start)
            programs, size = pieces.count, pieces.size
        if spec.kind is AttentionKind.RG_LRU:
            kernel, each = _unit_pieces, 2 * spec.num_heads
            tensors = [frame.inputs[n] for n in ("x", "input_gate", "recurrent_gate")]
            strides = tuple(t.stride(0) for t in (*tensors, out, states))
            tensors.append(frame.params["Lambda"])
        else:
            kernel, each = _phi, spec.num_heads * spec.head_size * (spec.v_head_size + 1)
            tensors = list(given_inputs(spec, frame.inputs, self._none)[:3])
            strides = tuple(s for t in (*tensors, out, states) for s in t.stride()[:2])
        if pieces is not None:
            self._left = at_least(self._left, programs * each, self._outgrown)
        for part in parts:
            kernel(
                (programs, self._programs, 1),
                (*tensors, out, states, self._left, *plan.meta, *cells),
                (),
                strides,
                (size,),
                piece_constants(spec, part),
                piece_options(spec),
            )

    def _units(self, plan: ScanPlan, frame: RecurrentFrame) -> None:
        out, states = frame.out, frame.states
        tensors = [frame.inputs[name] for name in ("x", "input_gate", "recurrent_gate")]
        to, each = plan.goal
        strides = (*[tensor.stride(0) for tensor in (*tensors, out, states)], each)
        _unit(
            (plan.batch.num_seqs, triton.cdiv(self.spec.num_heads, UNITS), 1),
            (*tensors, frame.params["Lambda"], out, states, *plan.meta, to),
            (),
            strides,
            (),
            token_constants(self.spec, plan.targets is not None),
            self._options,
        )
