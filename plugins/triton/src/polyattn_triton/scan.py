"""TRITON_SCAN: every recurrent family; plans tiles on the host, launches the kernels."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import triton
from polyattn.kernel import (
    AttentionKind,
    Batch,
    CacheFormat,
    Device,
    Invariance,
    LayerSpec,
    Plan,
    RecurrentBackend,
    RecurrentFrame,
)
from torch import Tensor

from polyattn_triton.channels import TOKEN_OPTIONS, Channels, by_token, given_inputs
from polyattn_triton.configs import SCANS, SelectiveConfig, prompt_config
from polyattn_triton.delta import Deltas
from polyattn_triton.kernels.scan import conv_kernel, gated_kernel
from polyattn_triton.kernels.step import conv_drafts_kernel, mamba1_kernel, step_kernel
from polyattn_triton.launch import Launcher, power
from polyattn_triton.selective import (
    Pieces,
    Selective,
    mamba1_strides,
    selective_configs,
    selective_constants,
    widest_words,
)
from polyattn_triton.walk import GATED, Walk, key_value_sizes

CONV_TOKENS, CONV_CHANNELS, DRAFT_CHANNELS = 16, 128, 64
CHANNELS = (AttentionKind.KDA, AttentionKind.RWKV7)

_conv, _conv_drafts = Launcher(conv_kernel), Launcher(conv_drafts_kernel)
_mamba1 = Launcher(mamba1_kernel)
_gated, _step = Launcher(gated_kernel), Launcher(step_kernel)


def scan_constants(spec: LayerSpec, phase: str, params: frozenset[str]) -> tuple[Any, ...]:
    """Return the constants of `spec`'s kernel for `phase`, in its order, but for a walk's part.

    A phase may be "drafts" too, or "tokens": a prefill that has a decode's bits.
    """
    form = spec.recurrent
    assert form is not None
    kind, drafts = spec.kind, phase == "drafts"
    several = drafts or spec.batch_invariant >= Invariance.STEPS
    phase = "prefill" if phase == "prefill" else "decode"
    decode = phase == "decode"
    has = ("D" in params, "dt_bias" in params)
    if kind is AttentionKind.SHORT_CONV and drafts:
        return (
            spec.num_heads,
            form.conv_width,
            triton.next_power_of_2(form.conv_width),
            DRAFT_CHANNELS,
            "bias" in params,
            form.activation == "silu",
        )
    if kind is AttentionKind.SHORT_CONV:
        return (
            spec.num_heads, form.conv_width, 1 if decode else CONV_TOKENS, CONV_CHANNELS,
            "bias" in params, form.activation == "silu", decode,
            form.conv_width - 1 + form.draft_tokens if form.draft_tokens else 0,
        )  # fmt: skip
    if kind is AttentionKind.MAMBA1:
        if not decode:
            first = selective_configs(form.state_size)[0]
            return selective_constants(spec, first, widest_words(spec), has, "whole")
        config = SCANS[kind, phase]
        n = triton.next_power_of_2(form.state_size)
        each = spec.num_heads // form.channel_groups
        return (
            spec.num_heads, form.state_size, config.block_v, n, *has, form.dt_softplus, form.gated,
            each, drafts,
        )  # fmt: skip
    config = SCANS[kind, phase]
    keys, values = key_value_sizes(spec)
    sizes = (
        spec.num_heads // spec.num_kv_heads,
        keys,
        values,
        power(keys),
        min(config.block_v, power(values)),
    )
    mamba, delta = kind is AttentionKind.MAMBA2, kind is AttentionKind.GDN
    softplus = mamba and form.dt_softplus
    if decode:
        return (*sizes, mamba, delta, softplus, *has, form.qk_norm, form.gated, several, drafts)
    return (*sizes, config.chunk, mamba, softplus, *has, form.gated)


class ScanPlan(Plan):
    """The step's metadata on the device.

    `pieces`: of a prefill: a convolution's tiles of tokens, KDA's and RWKV-7's chunks; others' parts of
    sequences, None where they are whole, as `walked` has of sequences whose chunks are `pieces`.
    `config`: Mamba-1's. `targets`: of drafts, where the state after each token goes. A captured step's
    prompts are a prefill however short they are.
    """

    __slots__ = ("config", "phase", "pieces", "seq_lens", "slots", "starts", "targets", "walked")
    config: SelectiveConfig | None
    pieces: Pieces | None
    walked: Pieces | None

    def __init__(self, batch: Batch):
        super().__init__(batch)
        assert batch.state_slots is not None
        single = batch.all_decode and batch.num_contexts is None
        self.phase, self.targets = "decode" if single else "prefill", batch.state_targets
        if self.targets is not None:
            self.phase = "drafts"
        self.starts, self.seq_lens = batch.query_start_loc, batch.seq_lens
        self.slots, self.config = batch.state_slots, None
        self.pieces = self.walked = None

    def take(self, captured: Plan | None) -> bool:
        """Take a captured plan's pieces, which its graph reads; of prompts they become this step's.

        Returns whether there is such a plan: one of rows of the same lengths, or of prompts.
        """
        if not isinstance(captured, ScanPlan):
            return False
        batch = self.batch
        if batch.num_contexts is None and captured.batch.starts != batch.starts:
            return False
        self.config, self.pieces = captured.config, captured.pieces
        self.walked = captured.walked
        for pieces in (self.pieces, self.walked):
            if batch.num_contexts is not None and pieces is not None:
                pieces.fill(batch)
        return True

    @property
    def meta(self) -> tuple[Tensor, Tensor, Tensor]:
        """The sequences' first tokens, lengths and slots."""
        return self.starts, self.seq_lens, self.slots

    @property
    def goal(self) -> tuple[Tensor, int]:
        """The targets and their stride by sequence; something in their place where there are none."""
        return (self.slots, 0) if self.targets is None else (self.targets, self.targets.stride(0))


class TritonScan(RecurrentBackend):
    """One kernel a family; decode of the matrix states is a kernel of its own."""

    name: ClassVar[str] = "TRITON_SCAN"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(spec, cache, device)
        self.torch_device = torch.device(str(device.torch_device))
        self._none = torch.empty(0, dtype=torch.float32, device=self.torch_device)
        self._constants: dict[tuple[str, frozenset[str]], tuple[Any, ...]] = {}
        self._selective: Selective | None = None
        if spec.kind is AttentionKind.MAMBA1:
            self._selective = Selective(spec, self.torch_device)
        self._by_token = (
            spec.batch_invariant >= Invariance.STEPS and spec.kind is not AttentionKind.SHORT_CONV
        )
        self._channels: Channels | None = None
        self._deltas: Deltas | None = None
        self._tile = CONV_TOKENS if spec.kind is AttentionKind.SHORT_CONV else 0
        if spec.kind in CHANNELS:
            self._channels = Channels(spec, device.arch, self.torch_device)
        elif spec.kind is AttentionKind.GDN:
            self._deltas = Deltas(spec, device.arch, self.torch_device)
        walks = self._channels or self._deltas
        self._walk = walks.walk if walks else None
        if spec.kind in GATED:
            self._walk = Walk(spec, device.arch, self.torch_device)
        if walks:
            self._tile = prompt_config(spec, device.arch).chunk

    def plan(self, batch: Batch, reuse: Plan | None = None) -> ScanPlan:
        plan = ScanPlan(batch)
        # A convolution's tile sums each token alike; what other kinds' do follows from where it begins.
        if self._by_token and plan.phase == "prefill":
            plan.phase = "tokens"
        if plan.phase != "prefill" or plan.take(reuse):
            return plan
        if self._tile:
            plan.pieces = Pieces(batch, self._tile)
        if self._walk is not None:
            plan.walked = self._walk.cut(batch)
        elif self._selective is not None:
            plan.config, plan.pieces = self._selective.cut(batch)
        return plan

    def run(self, plan: ScanPlan, frame: RecurrentFrame) -> None:
        if self._channels is not None:
            self._by_channel(plan, frame)
            return
        if self._deltas is not None and plan.phase == "prefill":
            if plan.pieces is not None and plan.pieces.count:
                tensors = tuple(frame.inputs[x] for x in ("q", "k", "v", "g", "beta"))
                self._deltas(tensors, frame.out, frame.states, plan.meta, plan.pieces, plan.walked)
            return
        names, phase = frozenset(frame.params), plan.phase
        constants = self._constants.get((phase, names))
        if constants is None:
            constants = scan_constants(self.spec, phase, names)
            self._constants[phase, names] = constants
        kind = self.spec.kind
        if kind is AttentionKind.SHORT_CONV:
            self._convolve(plan, frame, constants)
        elif kind is AttentionKind.MAMBA1:
            self._mamba1(plan, frame, constants)
        else:
            self._matrix(plan, frame, constants)

    def _by_channel(self, plan: ScanPlan, frame: RecurrentFrame) -> None:
        assert self._channels is not None
        out, states = frame.out, frame.states
        tensors = given_inputs(self.spec, frame.inputs, self._none)
        if plan.phase != "prefill":
            by_token(self.spec, tensors, out, states, plan.meta, TOKEN_OPTIONS, plan.targets)
        elif plan.pieces is not None and plan.pieces.count:
            self._channels(tensors, out, states, plan.meta, plan.pieces, plan.walked)

    def _convolve(self, plan: ScanPlan, frame: RecurrentFrame, constants: tuple[Any, ...]) -> None:
        x, out, states = frame.inputs["x"], frame.out, frame.states
        tensors = (x, out, states, frame.params["weight"], frame.params.get("bias", self._none))
        strides = (x.stride(0), out.stride(0), states.stride(0))
        if plan.targets is not None:
            _conv_drafts(
                (plan.batch.num_seqs, triton.cdiv(self.spec.num_heads, DRAFT_CHANNELS), 1),
                (*tensors, *plan.meta, plan.targets),
                (), (*strides, plan.goal[1]), (), constants, {"num_warps": 4},
            )  # fmt: skip
            return
        tiles, cells = plan.batch.num_seqs, (plan.slots, plan.slots)
        if plan.pieces is not None:
            tiles, cells = plan.pieces.count, (plan.pieces.seq, plan.pieces.start)
        if tiles == 0:
            return
        _conv(
            (tiles, triton.cdiv(self.spec.num_heads, CONV_CHANNELS), 1),
            (*tensors, *plan.meta, *cells), (), strides, (), constants, {"num_warps": 4},
        )  # fmt: skip

    def _mamba1(self, plan: ScanPlan, frame: RecurrentFrame, constants: tuple[Any, ...]) -> None:
        inputs, params, states, out = frame.inputs, frame.params, frame.states, frame.out
        tensors = [inputs[name] for name in ("x", "dt", "B", "C")]
        tensors.append(inputs.get("z", tensors[0]))
        if plan.phase == "prefill":
            assert self._selective is not None and plan.config is not None
            self._selective(tensors, params, out, states, plan.meta, plan.config, plan.pieces)
            return
        x, dt, B, C, z = tensors
        config = SCANS[self.spec.kind, "decode"]
        to, each = plan.goal
        _mamba1(
            (plan.batch.num_seqs, triton.cdiv(self.spec.num_heads, config.block_v), 1),
            (
                x, dt, params["A"], B, C, params.get("D", self._none),
                params.get("dt_bias", self._none), z, out, states, *plan.meta, to,
            ),
            (), (*mamba1_strides(x, dt, B, C, z, out, states), each), (), constants,
            {"num_warps": config.num_warps, "num_stages": config.num_stages},
        )  # fmt: skip

    def _matrix(self, plan: ScanPlan, frame: RecurrentFrame, constants: tuple[Any, ...]) -> None:
        inputs, params, states, out = frame.inputs, frame.params, frame.states, frame.out
        spec, none = self.spec, self._none
        mamba = spec.kind is AttentionKind.MAMBA2
        names = ("C", "B", "x") if mamba else ("q", "k", "v")
        q, k, v = (inputs[name] for name in names)
        dt, g, beta = (inputs.get(name, none) for name in ("dt", "g", "beta"))
        rate = params["A"] if mamba else params.get("decay", none)
        optional = (params.get("D", none), params.get("dt_bias", none))
        strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1))
        rows = tuple(t.stride(0) if t.dim() == 2 else 0 for t in (dt, g, beta))
        s = states.stride()
        along = (s[3], s[2]) if mamba else (s[2], s[3])  # Mamba-2's state is (head size, N)
        phase = "prefill" if plan.phase == "prefill" else "decode"
        config = SCANS[spec.kind, phase]
        z = inputs.get("z", v)
        of_z = z.stride()[:2]
        to, each = plan.goal
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        o = (out.stride(0), out.stride(1))
        scale = (1.0 if mamba else spec.scale,)
        if phase == "decode":
            blocks = triton.cdiv(key_value_sizes(spec)[1], constants[4])
            _step(
                (plan.batch.num_seqs, spec.num_heads, blocks),
                (q, k, v, dt, g, beta, rate, *optional, z, out, states, *plan.meta, to), scale,
                (*strides, *rows, *of_z, *o, s[0], s[1], each, *along), (), constants, options,
            )  # fmt: skip
            return
        assert self._walk is not None
        tensors = (q, k, v, dt, g, rate, *optional, z, out, states)
        for part, grid, left, cells, size in self._walk.launches(plan.batch.num_seqs, plan.walked):
            _gated(
                grid, (*tensors, left, *plan.meta, *cells), scale,
                (*strides, *rows[:2], *of_z, *o, s[0], s[1], *along), (size,), (*constants, part),
                options,
            )  # fmt: skip
