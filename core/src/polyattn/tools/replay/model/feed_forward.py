"""The feed-forward part of a layer: norms, MLPs, and experts with their routers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyattn.tools.replay.model.fields import Fields

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


class Linear(nn.Module):
    """A projection; torch's own draws numbers for its weight, which takes long for 44,000 experts."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return (…, outputs)."""
        return functional.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich, 2019), in float32.

    Gemma's weight has an offset; Mamba-2 norms each of several groups of channels by itself.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0, groups: int = 1):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.offset, self.groups = eps, offset, groups

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` (…, size) normed, in the weight's dtype."""
        parts: Tensor = x.float().unflatten(-1, (self.groups, -1))
        parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + self.eps)
        return (parts.flatten(-2) * (self.weight.float() + self.offset)).to(self.weight.dtype)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), the gated linear unit (Shazeer, 2020)."""

    def __init__(
        self, hidden: int, inner: int, act: Callable[[Tensor], Tensor], bias: bool = False
    ):
        super().__init__()
        self.gate_proj = Linear(hidden, inner, bias)
        self.up_proj = Linear(hidden, inner, bias)
        self.down_proj = Linear(inner, hidden, bias)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """Return (tokens, hidden)."""
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class FusedMLP(nn.Module):
    """The same with one projection for gates and ups, gates first."""

    def __init__(self, hidden: int, inner: int, act: Callable[[Tensor], Tensor]):
        super().__init__()
        self.gate_up_proj, self.down_proj = Linear(hidden, 2 * inner), Linear(inner, hidden)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """Return (tokens, hidden)."""
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(self.act(gate) * up)  # type: ignore[no-any-return]


def fused(fields: Fields, index: int) -> nn.Module:
    """Return Phi-3's and GLM-4's MLP."""
    act = fields.choice("hidden_act", ACTIVATIONS)
    return FusedMLP(fields.size("hidden_size"), fields.size("intermediate_size"), act)


def dense(fields: Fields, index: int) -> nn.Module:
    """Return Llama's MLP."""
    bias = "mlp_bias" in fields.defaults and fields.flag("mlp_bias")
    return _mlp(fields, fields.size("intermediate_size"), bias)


def _mlp(fields: Fields, inner: int, bias: bool = False) -> MLP:
    name = "hidden_act" if "hidden_act" in fields.defaults else "hidden_activation"
    return MLP(fields.size("hidden_size"), inner, fields.choice(name, ACTIVATIONS), bias)


def _mix(
    x: Tensor, weights: Tensor, chosen: Tensor, expert: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Return each token's sum over its experts; `weights` and `chosen` are (tokens, experts)."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for number in chosen.unique().tolist():
        token, slot = (chosen == number).nonzero(as_tuple=True)
        out.index_add_(0, token, expert(number, x[token]).float() * weights[token, slot, None])
    return out.to(x.dtype)


class Router(nn.Module):
    """The scores of every expert, in float32."""

    def __init__(self, fields: Fields, experts: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, fields.size("hidden_size")))
        self.bias = nn.Parameter(torch.empty(experts)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (tokens, experts)."""
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(x.float(), self.weight.float(), bias)


class SoftmaxExperts(nn.Module):
    """The best experts by softmax over all of them; `scaled`: their weights add up to 1.

    `counted`: the field that counts them; `router`: what the checkpoint calls its weights.
    """

    def __init__(
        self,
        fields: Fields,
        expert: Callable[[], nn.Module],
        counted: str = "num_experts",
        router: str = "gate",
        scaled: bool = False,
    ):
        super().__init__()
        count = fields.size(counted)
        self.top = fields.below("num_experts_per_tok", counted)
        self.add_module(router, Router(fields, count))
        self.experts = nn.ModuleList(expert() for _ in range(count))
        self.router_name, self.scaled = router, scaled

    def forward(self, x: Tensor) -> Tensor:
        """Return (tokens, hidden)."""
        scores = self.get_submodule(self.router_name)(x).softmax(-1)
        weights, chosen = scores.topk(self.top, dim=-1)
        if self.scaled:
            weights = weights / weights.sum(-1, keepdim=True)
        return _mix(x, weights, chosen, lambda i, part: self.experts[i](part))


def jamba(fields: Fields, index: int) -> nn.Module:
    """Return an MLP, or experts in every `expert_layer_period`-th layer."""
    period, offset = fields.size("expert_layer_period"), fields.index("expert_layer_offset")
    if index % period == offset and fields.size("num_experts") > 1:
        inner = fields.size("intermediate_size")
        return SoftmaxExperts(fields, lambda: _mlp(fields, inner), router="router")
    return dense(fields, index)


def qwen3_moe(fields: Fields, index: int) -> nn.Module:
    """Return experts in every `decoder_sparse_step`-th layer, an MLP in the others and those listed."""
    listed = fields.value("mlp_only_layers")
    if not isinstance(listed, list):
        raise fields.cfg.error("mlp_only_layers", listed, "must be a list of layers")
    if index in listed or (index + 1) % fields.size("decoder_sparse_step"):
        return dense(fields, index)
    inner, scaled = fields.size("moe_intermediate_size"), fields.flag("norm_topk_prob")
    return SoftmaxExperts(fields, lambda: _mlp(fields, inner), scaled=scaled)


class MixtralExpert(nn.Module):
    """An MLP by its publisher's names: w1 gates, w3 is up, w2 down."""

    def __init__(self, hidden: int, inner: int, act: Callable[[Tensor], Tensor]):
        super().__init__()
        self.w1, self.w3 = Linear(hidden, inner), Linear(hidden, inner)
        self.w2, self.act = Linear(inner, hidden), act

    def forward(self, x: Tensor) -> Tensor:
        """Return (tokens, hidden)."""
        return self.w2(self.act(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


def mixtral(fields: Fields, index: int) -> nn.Module:
    """Return Mixtral's experts."""
    hidden, inner = fields.size("hidden_size"), fields.size("intermediate_size")
    act = fields.choice("hidden_act", ACTIVATIONS)
    return SoftmaxExperts(
        fields, lambda: MixtralExpert(hidden, inner, act), "num_local_experts", scaled=True
    )


class DeepSeekRouter(Router):
    """Sigmoid scores; experts are chosen within the best groups, by scores with a bias
    (DeepSeek-V3, 2024, section 2.1.2).
    """

    def __init__(self, fields: Fields):
        count = fields.size("n_routed_experts")
        super().__init__(fields, count)
        self.e_score_correction_bias = nn.Parameter(torch.empty(count))
        self.top = fields.below("num_experts_per_tok", "n_routed_experts")
        self.groups = fields.below("n_group", "n_routed_experts")
        self.top_groups = fields.below("topk_group", "n_group")
        if count % self.groups or count // self.groups < 2:
            raise fields.cfg.error(
                "n_group",
                self.groups,
                f"must divide n_routed_experts={count} into groups of 2 or more",
            )
        self.scaled = fields.flag("norm_topk_prob")
        self.factor = fields.number("routed_scaling_factor")

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and numbers of each token's experts."""
        scores = self(x).sigmoid()
        biased = (scores + self.e_score_correction_bias.float()).unflatten(-1, (self.groups, -1))
        best = biased.topk(2, dim=-1).values.sum(-1).topk(self.top_groups, dim=-1).indices
        eligible = torch.zeros_like(biased[..., 0], dtype=torch.bool).scatter_(1, best, True)
        biased = biased.masked_fill(~eligible[..., None], float("-inf")).flatten(1)
        chosen = biased.topk(self.top, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.scaled:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.factor, chosen


class DeepSeekExperts(nn.Module):
    """Routed experts, and shared ones that every token goes through."""

    def __init__(self, fields: Fields):
        super().__init__()
        inner = fields.size("moe_intermediate_size")
        self.gate = DeepSeekRouter(fields)
        self.experts = nn.ModuleList(
            _mlp(fields, inner) for _ in range(fields.size("n_routed_experts"))
        )
        self.shared_experts = _mlp(fields, inner * fields.size("n_shared_experts"))

    def forward(self, x: Tensor) -> Tensor:
        """Return (tokens, hidden)."""
        weights, chosen = self.gate.choose(x)
        routed = _mix(x, weights, chosen, lambda i, part: self.experts[i](part))
        return routed + self.shared_experts(x)  # type: ignore[no-any-return]


def deepseek(fields: Fields, index: int) -> nn.Module:
    """Return an MLP in the first layers, experts in the rest."""
    if index < fields.index("first_k_dense_replace"):
        return dense(fields, index)
    return DeepSeekExperts(fields)


class StackedExperts(nn.Module):
    """gpt-oss's experts in one tensor each: gates and ups in turn, clamped, (up + 1) * swish(gate)."""

    def __init__(self, fields: Fields):
        super().__init__()
        count, hidden = fields.size("num_local_experts"), fields.size("hidden_size")
        inner = fields.size("intermediate_size")
        self.gate_up_proj = nn.Parameter(torch.empty(count, hidden, 2 * inner))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(count, 2 * inner))
        self.down_proj = nn.Parameter(torch.empty(count, inner, hidden))
        self.down_proj_bias = nn.Parameter(torch.empty(count, hidden))
        self.alpha, self.limit = fields.number("swiglu_alpha"), fields.number("swiglu_limit")

    def forward(self, number: int, x: Tensor) -> Tensor:
        """Return what one expert makes of its tokens."""
        both = x @ self.gate_up_proj[number] + self.gate_up_proj_bias[number]
        gate = both[..., ::2].clamp(max=self.limit)
        up = both[..., 1::2].clamp(-self.limit, self.limit)
        inner = (up + 1) * gate * torch.sigmoid(gate * self.alpha)
        return inner @ self.down_proj[number] + self.down_proj_bias[number]


class GptOssExperts(nn.Module):
    """The best experts, by softmax over those alone."""

    def __init__(self, fields: Fields):
        super().__init__()
        self.top = fields.below("num_experts_per_tok", "num_local_experts")
        self.router = Router(fields, fields.size("num_local_experts"), bias=True)
        self.experts = StackedExperts(fields)

    def forward(self, x: Tensor) -> Tensor:
        """Return (tokens, hidden)."""
        logits, chosen = self.router(x).topk(self.top, dim=-1)
        return _mix(x, logits.softmax(-1), chosen, self.experts)


def gpt_oss(fields: Fields, index: int) -> nn.Module:
    """Return gpt-oss's experts."""
    return GptOssExperts(fields)
