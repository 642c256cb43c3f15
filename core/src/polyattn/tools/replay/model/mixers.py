"""What mixes tokens in a layer: projections in plain torch around polyattn's layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyattn import Attention, LatentAttention, LayerSpec, Recurrent
from polyattn.spec.decompose import convolution
from polyattn.tools.replay.model.feed_forward import Linear, RMSNorm
from polyattn.tools.replay.model.fields import Fields
from polyattn.tools.replay.model.step import GroupMemory, ModelStep

Scales = Mapping[str, Any]
"""`k_scale` and `v_scale`, as `Attention` takes them, of those that a checkpoint has."""
LATENT_EPS = 1e-6
"""The epsilon of DeepSeek's norms of latents; `rms_norm_eps` doesn't change it."""


class Mixer(nn.Module):
    """A part of a model with polyattn's layers: `bind` sets its groups, caches and states."""

    spec: LayerSpec

    def bind(self, index: int, groups: dict[LayerSpec, GroupMemory], scales: Scales) -> None:
        """Build the layers from the loaded weights; `scales`: of the cached keys and values."""
        raise NotImplementedError


def _used(scales: Scales, spec: LayerSpec) -> Scales:
    """Return the scales if the layer's cache needs them, else none."""
    return scales if spec.kv_cache_dtype in ("fp8_e4m3", "nvfp4", "int8") else {}


class SelfAttention(Mixer):
    """Attention over keys and values, whose layer norms and rotates as its spec says.

    `qkv_bias` and `out_bias`: whatever the config says; None: its `attention_bias`. `fused`: one
    projection for all.
    """

    def __init__(
        self,
        fields: Fields,
        spec: LayerSpec,
        qkv_bias: bool | None = None,
        out_bias: bool | None = None,
        fused: bool = False,
    ):
        super().__init__()
        self.spec = spec
        hidden, size = fields.size("hidden_size"), spec.head_size
        told = "attention_bias" in fields.defaults and fields.flag("attention_bias")
        bias = told if qkv_bias is None else qkv_bias
        heads, kv_heads = spec.num_heads * size, spec.num_kv_heads * size
        self.widths = [heads, kv_heads, kv_heads] if fused else []
        if fused:
            self.qkv_proj = Linear(hidden, sum(self.widths), bias)
        else:
            self.q_proj = Linear(hidden, heads, bias)
            self.k_proj = Linear(hidden, kv_heads, bias)
            self.v_proj = Linear(hidden, kv_heads, bias)
        self.o_proj = Linear(heads, hidden, told if out_bias is None else out_bias)
        self.sinks = nn.Parameter(torch.empty(spec.num_heads)) if spec.learned_sinks else None
        if (norm := spec.qk_norm) is not None:
            by_head = norm.over == "head"
            self.q_norm = RMSNorm(size if by_head else heads, norm.eps, norm.offset)
            self.k_norm = RMSNorm(size if by_head else kv_heads, norm.eps, norm.offset)

    def bind(self, index: int, groups: dict[LayerSpec, GroupMemory], scales: Scales) -> None:
        memory = groups[self.spec]
        sinks = None if self.sinks is None else self.sinks.detach()
        norms: dict[str, Any] = {}
        if self.spec.qk_norm is not None:
            norms = {"q_norm": self.q_norm.weight.detach(), "k_norm": self.k_norm.weight.detach()}
        self.layer = Attention(
            memory.group,
            sinks=sinks,
            rotate=memory.rotates,
            checks=memory.checks(index),
            **norms,
            **_used(scales, self.spec),
        )
        self.cache = memory.caches[index]

    def forward(self, x: Tensor, step: ModelStep) -> Tensor:
        """Return (tokens, hidden)."""
        size = (-1, self.spec.head_size)
        if self.widths:
            query, key, value = self.qkv_proj(x).split(self.widths, -1)
        else:
            query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        query, key, value = (rows.unflatten(-1, size) for rows in (query, key, value))
        return self.o_proj(step.attend(self.layer, self.cache, query, key, value).flatten(1))  # type: ignore[no-any-return]


class LatentSelfAttention(Mixer):
    """MLA (DeepSeek-V2, 2024, section 2.1): keys and values are made of a latent."""

    def __init__(self, fields: Fields, spec: LayerSpec):
        super().__init__()
        assert spec.latent is not None
        self.spec, self.latent = spec, spec.latent
        hidden, width = fields.size("hidden_size"), spec.num_heads * spec.head_size
        bias = fields.flag("attention_bias")
        self.low_rank = fields.value("q_lora_rank") is not None
        if self.low_rank:
            rank = fields.size("q_lora_rank")
            self.q_a_proj = Linear(hidden, rank, bias)
            self.q_a_layernorm = RMSNorm(rank, LATENT_EPS)
            self.q_b_proj = Linear(rank, width)
        else:
            self.q_proj = Linear(hidden, width)
        self.kv_a_proj_with_mqa = Linear(hidden, self.latent.size, bias)
        self.kv_a_layernorm = RMSNorm(self.latent.rank, LATENT_EPS)
        self.nope = spec.head_size - self.latent.rope_head_size
        self.kv_b_proj = Linear(
            self.latent.rank, spec.num_heads * (self.nope + spec.v_head_size), bias=False
        )
        self.o_proj = Linear(spec.num_heads * spec.v_head_size, hidden, bias)

    def bind(self, index: int, groups: dict[LayerSpec, GroupMemory], scales: Scales) -> None:
        memory = groups[self.spec]
        up = self.kv_b_proj.weight.detach().unflatten(0, (self.spec.num_heads, -1))
        w_uk, w_uv = up[:, : self.nope], up[:, self.nope :].mT
        self.layer = LatentAttention(
            memory.group,
            w_uk.contiguous(),
            w_uv.contiguous(),
            rotate=memory.rotates,
            checks=memory.checks(index),
            k_scale=_used(scales, self.spec).get("k_scale", 1.0),
        )
        self.cache = memory.caches[index]

    def forward(self, x: Tensor, step: ModelStep) -> Tensor:
        """Return (tokens, hidden)."""
        if self.low_rank:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        else:
            query = self.q_proj(x)
        query = query.unflatten(-1, (-1, self.spec.head_size))
        both = self.kv_a_proj_with_mqa(x)
        latent = self.kv_a_layernorm(both[:, : self.latent.rank])
        key = both[:, self.latent.rank :]
        out = step.attend_latent(self.layer, self.cache, query, latent, key)
        return self.o_proj(out.flatten(1))  # type: ignore[no-any-return]


class _Recurrence(Mixer):
    """A recurrence and the short convolution before it."""

    conv1d: nn.Conv1d

    def _bind(self, index: int, groups: dict[LayerSpec, GroupMemory], **params: Any) -> None:
        before = convolution(self.spec)
        assert before is not None
        memories = groups[before], groups[self.spec]
        weights = {"weight": self.conv1d.weight[:, 0].detach()}
        if self.conv1d.bias is not None:
            weights["bias"] = self.conv1d.bias.detach()
        parameters = (weights, {name: tensor.detach() for name, tensor in params.items()})
        self.layers = [
            Recurrent(memory.group, checks=memory.checks(index), **tensors)
            for memory, tensors in zip(memories, parameters, strict=True)
        ]
        self.states = [memory.states[index] for memory in memories]

    def convolve(self, x: Tensor, step: ModelStep) -> Tensor:
        """Run the short convolution over (tokens, channels)."""
        return step.recur(self.layers[0], self.states[0], x.contiguous())

    def scan(self, step: ModelStep, *inputs: Tensor) -> Tensor:
        """Run the recurrence."""
        return step.recur(self.layers[1], self.states[1], *(x.contiguous() for x in inputs))


def _conv(channels: int, width: int, bias: bool) -> nn.Conv1d:
    return nn.Conv1d(channels, channels, width, groups=channels, bias=bias)


class JambaMamba(_Recurrence):
    """Mamba-1 (Gu and Dao, 2023) with norms of dt, B and C (Jamba, 2024)."""

    def __init__(self, fields: Fields, spec: LayerSpec):
        super().__init__()
        assert spec.recurrent is not None
        self.spec, hidden = spec, fields.size("hidden_size")
        channels, state = spec.num_heads, spec.recurrent.state_size
        auto = fields.value("mamba_dt_rank") == "auto"
        rank = -(-hidden // 16) if auto else fields.size("mamba_dt_rank")
        bias, eps = fields.flag("mamba_proj_bias"), fields.number("rms_norm_eps")
        self.conv1d = _conv(channels, spec.recurrent.conv_width, fields.flag("mamba_conv_bias"))
        self.in_proj = Linear(hidden, 2 * channels, bias)
        self.x_proj = Linear(channels, rank + 2 * state)
        self.dt_proj = Linear(rank, channels, bias=True)
        self.A_log = nn.Parameter(torch.empty(channels, state))
        self.D = nn.Parameter(torch.empty(channels))
        self.out_proj = Linear(channels, hidden, bias)
        self.dt_layernorm = RMSNorm(rank, eps)
        self.b_layernorm = RMSNorm(state, eps)
        self.c_layernorm = RMSNorm(state, eps)
        self.parts = (rank, state, state)

    def bind(self, index: int, groups: dict[LayerSpec, GroupMemory], scales: Scales) -> None:
        self._bind(index, groups, A=-self.A_log.float().exp(), D=self.D, dt_bias=self.dt_proj.bias)

    def forward(self, x: Tensor, step: ModelStep) -> Tensor:
        """Return (tokens, hidden)."""
        inner, gate = self.in_proj(x).chunk(2, dim=-1)
        inner = self.convolve(inner, step)
        dt, b, c = self.x_proj(inner).split(self.parts, dim=-1)
        # Its bias joins dt later.
        dt = functional.linear(self.dt_layernorm(dt), self.dt_proj.weight)
        out = self.scan(step, inner, dt, self.b_layernorm(b), self.c_layernorm(c))
        return self.out_proj(out * functional.silu(gate))  # type: ignore[no-any-return]


class Mamba2(_Recurrence):
    """Mamba-2 (Dao and Gu, 2024)."""

    def __init__(self, fields: Fields, spec: LayerSpec):
        super().__init__()
        assert spec.recurrent is not None
        self.spec, hidden = spec, fields.size("hidden_size")
        before = convolution(spec)
        assert before is not None
        inner, channels = spec.num_heads * spec.head_size, before.num_heads
        bias = fields.flag("use_bias")
        self.conv1d = _conv(channels, spec.recurrent.conv_width, fields.flag("use_conv_bias"))
        self.in_proj = Linear(hidden, inner + channels + spec.num_heads, bias)
        self.dt_bias = nn.Parameter(torch.empty(spec.num_heads))
        self.A_log = nn.Parameter(torch.empty(spec.num_heads))
        self.D = nn.Parameter(torch.empty(spec.num_heads))
        eps = fields.number("layer_norm_epsilon")
        self.norm = RMSNorm(inner, eps, groups=spec.num_kv_heads)
        self.out_proj = Linear(inner, hidden, bias)
        self.parts: Sequence[int] = (inner, channels, spec.num_heads)
        shared = spec.num_kv_heads * spec.recurrent.state_size
        self.channels: Sequence[int] = (inner, shared, shared)

    def bind(self, index: int, groups: dict[LayerSpec, GroupMemory], scales: Scales) -> None:
        self._bind(index, groups, A=-self.A_log.float().exp(), D=self.D, dt_bias=self.dt_bias)

    def forward(self, x: Tensor, step: ModelStep) -> Tensor:
        """Return (tokens, hidden)."""
        spec = self.spec
        gate, inner, dt = self.in_proj(x).split(self.parts, dim=-1)
        inner, b, c = self.convolve(inner, step).split(self.channels, dim=-1)
        b, c = (tensor.unflatten(-1, (spec.num_kv_heads, -1)) for tensor in (b, c))
        out = self.scan(step, inner.unflatten(-1, (-1, spec.head_size)), dt, b, c)
        gated = out.flatten(1).float() * functional.silu(gate.float())
        return self.out_proj(self.norm(gated))  # type: ignore[no-any-return]
