"""What is a whole decoder? Embedding, layers and head, named as Hugging Face names their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyattn import LayerSpec
from polyattn.errors import ConfigError, nearest
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES
from polyattn.tools.replay.model import feed_forward
from polyattn.tools.replay.model.feed_forward import Linear, RMSNorm
from polyattn.tools.replay.model.fields import Fields
from polyattn.tools.replay.model.mixers import (
    JambaMamba,
    LatentSelfAttention,
    Mamba2,
    Mixer,
    SelfAttention,
)
from polyattn.tools.replay.model.step import GroupMemory, ModelStep

Making = Callable[[Fields, LayerSpec], tuple[str, Mixer]]
"""Makes what mixes a layer's tokens; returns its name, too."""


def attention(**options: bool) -> Making:
    """Return what makes Llama's attention; `options` as `SelfAttention` takes them."""
    return lambda fields, spec: ("self_attn", SelfAttention(fields, spec, **options))


llama_attention = attention()


def latent_attention(fields: Fields, spec: LayerSpec) -> tuple[str, Mixer]:
    """Return MLA."""
    return "self_attn", LatentSelfAttention(fields, spec)


def mamba2(fields: Fields, spec: LayerSpec) -> tuple[str, Mixer]:
    """Return Mamba-2."""
    return "mixer", Mamba2(fields, spec)


def jamba_mixer(fields: Fields, spec: LayerSpec) -> tuple[str, Mixer]:
    """Return Mamba-1 or attention."""
    if spec.kind.is_recurrent:
        return "mamba", JambaMamba(fields, spec)
    return llama_attention(fields, spec)


@dataclass(frozen=True)
class Architecture:
    """How a type departs from Llama: what mixes, what follows, and what its weights are called.

    `norms`: before and after what mixes, before and after what follows; empty for none.
    """

    mixer: Making = llama_attention
    feed_forward: Callable[[Fields, int], nn.Module] | None = feed_forward.dense
    feed_forward_name: str = "mlp"
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    root: str = "model"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    eps: str = "rms_norm_eps"
    norm_offset: float = 0.0
    scales_embedding: bool = False


GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(),
    "mistral": Architecture(),
    "qwen2": Architecture(attention(qkv_bias=True, out_bias=False)),
    "qwen3": Architecture(),
    "qwen3_moe": Architecture(feed_forward=feed_forward.qwen3_moe),
    "mixtral": Architecture(
        feed_forward=feed_forward.mixtral, feed_forward_name="block_sparse_moe"
    ),
    "phi3": Architecture(attention(fused=True), feed_forward.fused),
    "olmo2": Architecture(
        norms=("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    ),
    "glm4": Architecture(
        attention(out_bias=False), feed_forward.fused,
        norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm",
               "post_mlp_layernorm"),
    ),
    "gemma2": Architecture(norms=GEMMA_NORMS, norm_offset=1.0, scales_embedding=True),
    "gemma3_text": Architecture(norms=GEMMA_NORMS, norm_offset=1.0, scales_embedding=True),
    "gpt_oss": Architecture(feed_forward=feed_forward.gpt_oss),
    "deepseek_v3": Architecture(latent_attention, feed_forward.deepseek),
    "mamba2": Architecture(
        mamba2, None, norms=("norm", "", "", ""), root="backbone", embedding="embeddings",
        final_norm="norm_f", eps="layer_norm_epsilon",
    ),
    "jamba": Architecture(
        jamba_mixer, feed_forward.jamba, "feed_forward",
        norms=("input_layernorm", "", "pre_ff_layernorm", ""), final_norm="final_layernorm",
    ),
}  # fmt: skip


class Layer(nn.Module):
    """One layer: x + mixer(norm(x)), then x + feed_forward(norm(x)).

    Gemma and GLM-4 norm again after each part, OLMo 2 only there.
    """

    def __init__(self, made_as: Architecture, fields: Fields, index: int, spec: LayerSpec):
        super().__init__()
        size, eps = fields.size("hidden_size"), fields.number(made_as.eps)
        names: list[tuple[str, str, str]] = []
        name, mixer = made_as.mixer(fields, spec)
        self.add_module(name, mixer)
        names.append((made_as.norms[0], name, made_as.norms[1]))
        if made_as.feed_forward is not None:
            name = made_as.feed_forward_name
            self.add_module(name, made_as.feed_forward(fields, index))
            names.append((made_as.norms[2], name, made_as.norms[3]))
        for norm in filter(None, made_as.norms):
            self.add_module(norm, RMSNorm(size, eps, made_as.norm_offset))
        self.names, self.index, self.mixer_name = names, index, names[0][1]

    @property
    def mixing(self) -> Mixer:
        """The module that mixes tokens."""
        return self.get_submodule(self.mixer_name)  # type: ignore[return-value]

    def forward(self, x: Tensor, step: ModelStep) -> Tensor:
        """Return (tokens, hidden)."""
        for before, name, after in self.names:
            part = self.get_submodule(name)
            normed = self.get_submodule(before)(x) if before else x
            out = part(normed, step) if name == self.mixer_name else part(normed)
            x = x + (self.get_submodule(after)(out) if after else out)
        return x


class Decoder(nn.Module):
    """A decoder of the layers `specs`, without weights until `weights.load` brings them.
    Raises `ConfigError` for a type that isn't run whole and for a field's value.
    """

    def __init__(self, fields: Fields, specs: Sequence[LayerSpec]):
        super().__init__()
        made_as = ARCHITECTURES.get(fields.model_type)
        if made_as is None:
            raise ConfigError(
                f"{fields.cfg.source}: model_type={fields.model_type!r} isn't run with weights"
                f"{nearest(fields.model_type, ARCHITECTURES)}; without --weights its layers are served"
            )
        self.fields, self.dtype = fields, STORAGE_DTYPES[specs[0].dtype]
        self.tied = fields.flag("tie_word_embeddings")
        self.vocabulary, hidden = fields.size("vocab_size"), fields.size("hidden_size")
        with torch.device("meta"):
            body = nn.Module()
            body.add_module(made_as.embedding, nn.Embedding(self.vocabulary, hidden))
            layers = [Layer(made_as, fields, i, spec) for i, spec in enumerate(specs)]
            body.add_module("layers", nn.ModuleList(layers))
            norm = RMSNorm(hidden, fields.number(made_as.eps), made_as.norm_offset)
            body.add_module(made_as.final_norm, norm)
            self.add_module(made_as.root, body)
            if not self.tied:
                self.lm_head = Linear(hidden, self.vocabulary)
        self.requires_grad_(False)
        self.cache_scales: dict[int, dict[str, Any]] = {}  # as `Attention` takes them
        self.scale = hidden**0.5 if made_as.scales_embedding else 1.0
        wide = "residual_in_fp32" in fields.defaults and fields.flag("residual_in_fp32")
        self.residual = torch.float32 if wide else self.dtype
        cap = "final_logit_softcapping" in fields.defaults
        self.cap = fields.optional("final_logit_softcapping") if cap else None
        self.embedding_name = f"{made_as.root}.{made_as.embedding}"
        self.norm_name = f"{made_as.root}.{made_as.final_norm}"
        self.layers_name = f"{made_as.root}.layers"

    @property
    def head(self) -> nn.Module:
        """The module that makes logits: the embedding itself where they share a weight."""
        return self.get_submodule(self.embedding_name) if self.tied else self.lm_head

    @property
    def layers(self) -> list[Layer]:
        """The layers, in order."""
        return list(self.get_submodule(self.layers_name))  # type: ignore[call-overload, no-any-return]

    def bind(self, groups: Sequence[GroupMemory]) -> None:
        """Give every layer its group's kernels and its own cache or states."""
        by_spec = {group.spec: group for group in groups}
        for layer in self.layers:
            layer.mixing.bind(layer.index, by_spec, self.cache_scales.get(layer.index, {}))

    def forward(self, tokens: Tensor, step: ModelStep) -> Tensor:
        """Return the hidden states (tokens, hidden) before the head, of int64 (tokens,)."""
        x = self.get_submodule(self.embedding_name)(tokens)
        if self.scale != 1.0:
            x = x * torch.tensor(self.scale, dtype=x.dtype)  # rounded as the model was trained
        x = x.to(self.residual)
        for layer in self.layers:
            x = layer(x, step)
        return self.get_submodule(self.norm_name)(x)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 (tokens, vocabulary)."""
        out = nn.functional.linear(hidden, self.head.weight).float()  # type: ignore[arg-type]
        return out if self.cap is None else torch.tanh(out / self.cap) * self.cap
