"""What do a transformers model's modules really do? Recorded where they call attention."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from polyattn import AttentionKind, LayerSpec, NormSpec, Role
from polyattn.families.attention.rope import inv_freq, query_temperature, rotate
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

LENGTH = 23
"""Tokens: more than every tiny window and chunk."""


@dataclass
class Call:
    """One call of attention: query `(heads, tokens, size)`, and what came with it."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float | None
    options: dict[str, Any] = field(default_factory=dict)
    projected: Tensor | None = None


CALLS: list[Call] = []
PRESCALED = (
    "OPTAttention", "WhisperAttention", "EsmSelfAttention", "XGLMAttention", "TrOCRAttention",
    "MvpAttention", "MultiHeadAttention",
)  # fmt: skip
"""Modules that multiply the projected query by the scale before they call attention."""


def _probe(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    projected = getattr(module, "_projected", None)
    CALLS.append(Call(module, query, key, value, attention_mask, scaling, options, projected))
    groups = query.shape[1] // value.shape[1]
    out = value.repeat_interleave(groups, 1).mean(2, keepdim=True)
    return out.expand(-1, -1, query.shape[2], -1).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register("probe", _probe)
ALL_MASK_ATTENTION_FUNCTIONS.register("probe", eager_mask)


@contextlib.contextmanager
def constant_inputs(modules: list[nn.Module]) -> Iterator[None]:
    """Give every position of these modules the hidden state of position 0.

    What differs between positions of the query is then the rotary embedding alone.
    """

    def same(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def flat(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3:
                return value[:, :1].expand_as(value).contiguous()
            return value

        if args:
            return tuple(map(flat, args)), kwargs
        return args, {k: flat(v) if k == "hidden_states" else v for k, v in kwargs.items()}

    def keep(module: nn.Module) -> Any:
        def hook(_: nn.Module, args: Any, out: Tensor) -> None:
            module._projected = out

        return hook

    handles = [m.register_forward_pre_hook(same, with_kwargs=True) for m in modules]
    for module in modules:
        for name in ("q_b_proj", "q_proj", "query", "q_gate_proj", "q_lin"):
            if isinstance(getattr(module, name, None), nn.Module):
                handles.append(getattr(module, name).register_forward_hook(keep(module)))
                break
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def older_interfaces(model: nn.Module) -> Iterator[None]:
    """Record models that call no attention interface: torch's function, or a method `_attn`."""

    class Owner:
        module: nn.Module = model

    def sdpa(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        if is_causal:
            attn_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()[
                None, None
            ]
        out = _probe(Owner.module, query, key, value, attn_mask, scale)[0]
        return out.transpose(1, 2)

    def enter(module: nn.Module, args: Any) -> None:
        Owner.module = module

    handles = [
        module.register_forward_pre_hook(enter)
        for module in model.modules()
        if type(module).__name__.endswith(("Attention", "SelfAttention"))
    ]
    with mock.patch("torch.nn.functional.scaled_dot_product_attention", sdpa), Products(Owner):
        yield
    for handle in handles:
        handle.remove()


class Products(TorchFunctionMode):
    """Records a softmax between two products: attention that a module writes out.

    Its mask and scale are what the softmax sees.
    """

    PRODUCTS = (torch.matmul, torch.bmm, torch.baddbmm, Tensor.matmul, Tensor.__matmul__)
    SOFTMAXES = (nn.functional.softmax, torch.softmax, Tensor.softmax)

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.owner = owner
        self.factors: tuple[Tensor, Tensor] | None = None
        self.logits: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.SOFTMAXES and self.factors is not None:
            sizes = self.factors[0].shape[-2], self.factors[1].shape[-1]
            self.logits = args[0] if args[0].shape[-2:] == sizes and args[0].ndim > 2 else None
        if func in self.PRODUCTS:
            if self.logits is not None and args[0].shape[-2:] == self.logits.shape[-2:]:
                self._record(args[1])
            self.factors, self.logits = args[-2:], None
        return func(*args, **(kwargs or {}))

    def _record(self, value: Tensor) -> None:
        assert self.factors is not None and self.logits is not None
        query, key, value, logits = (
            x.detach()[None] if x.ndim == 3 else x.detach()
            for x in (self.factors[0], self.factors[1].transpose(-1, -2), value, self.logits)
        )
        dots = (query[0, :, 0] * key[0, :, 0]).sum(-1).double()
        scale = float((logits[0, :, 0, 0] * dots).sum() / (dots * dots).sum())
        mask = torch.where(logits < -5e3, -1e9, 0.0)[:, :1]
        module = self.owner.module
        projected = getattr(module, "_projected", None)
        CALLS.append(Call(module, query, key, value, mask, scale, {}, projected))


def record(model: nn.Module, **inputs: Any) -> list[Call]:
    """Return the attention calls of a forward pass whose attention has constant inputs."""
    with contextlib.suppress(ValueError):  # models without the interface stay as they are
        model.set_attn_implementation("probe")
    CALLS.clear()
    with torch.no_grad(), older_interfaces(model):
        model(**inputs)
        modules = list({id(c.module): c.module for c in CALLS}.values())
        CALLS.clear()
        with constant_inputs(modules):
            model(**inputs)
    calls = list(CALLS)
    CALLS.clear()
    return calls


def visible(spec: LayerSpec, queries: int, keys: int) -> Tensor:
    """Return which keys each query sees: bool, `(queries, keys)`."""
    row, column = torch.arange(queries)[:, None], torch.arange(keys)[None]
    seen = column <= row if spec.causal else torch.ones(queries, keys, dtype=torch.bool)
    if spec.sliding_window:
        seen = seen & ((row - column).abs() < spec.sliding_window)
    if spec.sparse is not None and spec.sparse.newest:
        seen = seen & (row - column < spec.sparse.budget)
    if spec.chunk_size:
        seen = seen & (row // spec.chunk_size == column // spec.chunk_size)
    return seen


def expanded(spec: LayerSpec, call: Call) -> LayerSpec:
    """Return what a layer over latents is over keys and values of each head, as its module has them."""
    module, heads = call.module, call.key.shape[1]
    rank, turned = module.kv_b_proj.weight.shape[1], module.qk_rope_head_dim
    assert (spec.num_kv_heads, spec.v_head_size, spec.head_size) == (1, rank, rank + turned)
    return spec.replace(
        num_kv_heads=heads, head_size=call.query.shape[3], v_head_size=call.value.shape[3],
        scale=spec.scale, sparse=dataclasses.replace(spec.sparse, value_in_key=False),
    )  # fmt: skip


def attention_differences(
    spec: LayerSpec, call: Call, joined: LayerSpec | None = None
) -> list[str]:
    """Return what differs between an attention spec and what the module did.

    `joined`: the spec of entries whose keys follow the tokens' under the same softmax.
    """
    if spec.kind is AttentionKind.SPARSE and hasattr(call.module, "kv_b_proj"):
        spec = expanded(spec, call)
    query, key, value = call.query[0], call.key[0], call.value[0]
    kv_heads = key.shape[0] if not spec.kind.is_latent else spec.num_kv_heads
    scale = call.scale
    if scale is None:
        scale = query.shape[-1] ** -0.5
    elif type(call.module).__name__ in PRESCALED and call.projected is not None:
        scale *= float(query[:, 0].norm() / call.projected[0, 0].norm())
    pairs = {
        "num_heads": (spec.num_heads, query.shape[0]),
        "num_kv_heads": (spec.num_kv_heads, kv_heads),
        "head_size": (spec.head_size, query.shape[-1]),
        "v_head_size": (spec.v_head_size, value.shape[-1]),
        "logit_soft_cap": (spec.logit_soft_cap, call.options.get("softcap")),
        "learned_sinks": (spec.learned_sinks, call.options.get("s_aux") is not None),
    }
    out = [f"{name}: spec {a}, module {b}" for name, (a, b) in pairs.items() if a != b]
    if not math.isclose(spec.scale, scale, rel_tol=1e-5):
        out.append(f"scale: spec {spec.scale}, module {scale}")
    bias = call.options.get("position_bias")
    if bias is not None and (bias != bias[..., :1, :1]).any():
        out.append("module has a position bias")
    if spec.latent and spec.sparse:
        indices = call.options.get("indices")
        if indices is None or indices.shape[-1] != min(spec.sparse.budget, LENGTH):
            out.append("topk differs")
    if joined is not None:
        out += _entry_differences(joined, call)
    tokens = key.shape[1] if joined is None else query.shape[1]
    out += _mask_differences(spec, call, query.shape[1], tokens)
    if not out:
        out += _norm_differences(spec, call)
    if not out:
        out += rope_differences(spec, call)
    return out


def _norm_differences(spec: LayerSpec, call: Call) -> list[str]:
    """Norm the projected query of position 0, which no rotation turns; it must be the module's.

    Where the spec has no norm, a module's RMS norm before the rotation must not explain its query.
    """
    module, norm = call.module, spec.qk_norm
    weight = getattr(getattr(module, "q_norm", None), "weight", None)
    own = spec.kind is AttentionKind.ATTENTION and spec.role is not Role.CROSS
    if weight is None or call.projected is None or not own:
        return [] if norm is None else ["qk_norm: the module has no q_norm"]
    heads = call.query.shape[1]
    seen = call.query[0, :, 0].double()
    raw = call.projected.reshape(-1, heads, call.projected.shape[-1] // heads)[0].double()
    raw = raw[:, : spec.head_size]  # a gate may come after it
    forms = [norm] if norm is not None else [
        NormSpec(over=over, eps=module.config.rms_norm_eps, offset=offset)
        for over in ("head", "token")
        for offset in (0.0, 1.0)
        if weight.shape == (spec.head_size * (heads if over == "token" else 1),)
    ]  # fmt: skip
    fits = []
    for form in forms:
        rows = raw if form.over == "head" else raw.flatten()
        by = nn.functional.rms_norm(rows, rows.shape[-1:], weight.double() + form.offset, form.eps)
        by = by.view_as(seen)
        turned = 0 if spec.rope is None else spec.rope.rotary_size
        cut = spec.head_size - turned if turned and spec.rope.last else turned  # type: ignore[union-attr]
        near = 2e-5 * seen.abs().max()
        fits.append(
            all(
                bool((one * (one * each).sum() / (one * one).sum() - each).abs().max() <= near)
                for one, each in zip(  # a factor of the rotation, or a temperature
                    by.tensor_split([cut], -1), seen.tensor_split([cut], -1), strict=True
                )
                if one.numel()
            )
        )
    if norm is None:
        return ["qk_norm: the spec has none, and the module norms its query"] if any(fits) else []
    return [] if fits[0] else [f"qk_norm: the module's query isn't normed by {norm}"]


def _mask_differences(spec: LayerSpec, call: Call, queries: int, keys: int) -> list[str]:
    expected = visible(spec, queries, keys)
    if call.mask is None:
        seen = torch.ones(queries, keys, dtype=torch.bool)
    else:
        mask = call.mask[0, 0][:queries, :keys]
        seen = mask if mask.dtype == torch.bool else mask > -1e4
        if mask.dtype != torch.bool and (mask[seen] != 0).any():
            return ["module has an additive bias"]
    if type(call.module).__name__ == "MllamaVisionAttention":
        config = call.module.config
        tokens = (config.image_size // config.patch_size) ** 2 + 1
        real = torch.arange(queries) % (-(-tokens // 8) * 8) < tokens  # a tile is padded to eights
        seen, expected = seen[real], expected[real]
    if spec.kind is AttentionKind.SPARSE:
        blocks = call.options.get("block_indices")
        if blocks is not None:  # MiniMax-M3 leaves it to a kernel to build the mask
            build, rows = call.module.indexer.build_block_mask, torch.arange(queries)[None]
            seen = build(blocks, None, keys, torch.float32, blocks.device, rows)[0, 0] == 0
    if spec.kind is AttentionKind.SPARSE and not spec.sparse.newest:
        return _choice_differences(spec.sparse, seen, expected)
    if not torch.equal(seen, expected):
        return [f"mask: spec {expected.sum(1).tolist()}, module {seen.sum(1).tolist()}"]
    return []


def _entry_differences(spec: LayerSpec, call: Call) -> list[str]:
    """Return what differs between a spec of compressed entries and the keys behind the tokens'."""
    sparse, part = spec.sparse, call.module.compressor
    assert sparse is not None and sparse.compressor is not None and call.mask is not None
    tokens, m = call.query.shape[2], sparse.tokens_per_entry
    seen = call.mask[0, 0][:, tokens:] > -1e4
    visible = torch.arange(seen.shape[1]) < (torch.arange(tokens)[:, None] + 1) // m
    if sparse.newest:
        out = [] if torch.equal(seen, visible) else ["entries: not all that are visible"]
    else:
        out = _choice_differences(sparse, seen, visible)
    made = [(sparse.compressor, part)]
    if spec.indexer is not None:
        index = part.indexer
        found = index.num_heads, index.head_dim, index.index_topk, index.compress_rate
        own = spec.indexer
        if found != (own.num_heads, own.head_size, own.budget, own.tokens_per_entry):
            out.append(f"indexer: module {found}, spec {own}")
        made.append((own.compressor, index))
    for compressor, module in made:
        shape = (compressor.tokens_per_entry, compressor.channels)
        if module.position_bias.shape != shape or module.kv_proj.out_features != shape[1]:
            out.append(f"compressor: module {tuple(module.position_bias.shape)}, spec {shape}")
    if (spec.indexer is None) != (getattr(part, "indexer", None) is None):
        out.append("indexer: spec and module differ")
    return out


def _choice_differences(sparse: Any, seen: Tensor, visible: Tensor) -> list[str]:
    """Return what differs from a choice of whole groups among the visible keys, within its budget."""
    size = sparse.granularity
    out = [] if not (seen & ~visible).any() else ["module sees keys that the spec hides"]
    groups = [
        nn.functional.pad(keys, (0, -keys.shape[1] % size)).unflatten(1, (-1, size))
        for keys in (seen, visible)
    ]
    touched, whole = groups[0].any(2), groups[1]
    if (groups[0] != (touched[..., None] & whole)).any():
        out.append("module chooses no whole groups")
    if int(touched.sum(1).max()) != min(sparse.budget, whole.shape[1]):
        out.append(f"budget: spec {sparse.budget}, module {touched.sum(1).tolist()}")
    return out


def rope_differences(spec: LayerSpec, call: Call) -> list[str]:
    """Rotate the query of position 0 to every other; it must be the module's."""
    if spec.role is Role.CROSS:
        return [] if spec.rope is None else ["rope: a cross layer has one"]
    query = call.query[0].to(torch.float64).transpose(0, 1)
    start = query[:1].expand_as(query)
    positions = torch.arange(len(query))
    rope = spec.rope
    if rope is None:
        expected = start
    else:
        offset = spec.head_size - spec.latent.rope_head_size if spec.latent else 0
        offset = spec.head_size - rope.span if rope.last else offset
        pairing = rope.pairing
        if offset and _reordered(call, offset):
            if pairing != "gptj":
                return ["rope.pairing: module pairs neighbours"]
            pairing = "neox"  # transformers leaves the rotated elements in halves
        plain = dataclasses.replace(rope, attention_factor=1.0, pairing=pairing)
        factors = _query_factors(call.module, rope, positions)
        if rope.learned and rope.rotary_size:
            before, part = start.split([offset, rope.rotary_size], -1)
            expected = torch.cat([before, _learned_turn(part, positions, plain)], -1)
        else:
            expected = rotate(start, positions, plain, offset=offset)
        expected = expected * (factors / factors[:1])[..., None]
        known = attention_factors(call.module)
        if (
            rope.rotary_size
            and known
            and not any(math.isclose(rope.attention_factor, f, rel_tol=1e-6) for f in known)
        ):
            return [f"rope.attention_factor: spec {rope.attention_factor}, module {known}"]
    error = (expected - query).abs().max() / query.abs().max()
    return [f"rope: rotated query differs by {error:.2g}; spec {rope}"] if error > 2e-5 else []


def _query_factors(module: nn.Module, rope: Any, positions: Tensor) -> Tensor:
    """Return what each token's query heads are multiplied by, float64 (tokens, heads or 1)."""
    if not rope.learned:
        return query_temperature(rope, positions)[:, None]
    own: Any = module.softmax_scaling
    return own.scale.double() * (positions + 1.0).log()[:, None] + own.bias.double()


def _learned_turn(part: Tensor, positions: Tensor, rope: Any) -> Tensor:
    """Return a rope part turned by the module's own angles, by pairs in halves."""
    angles = positions[:, None] * inv_freq(rope) * FACTORS[1].double().exp()
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = part.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _reordered(call: Call, offset: int) -> bool:
    """Return whether the module moved the rope part's elements before it rotated them."""
    assert call.projected is not None
    heads, size = call.query.shape[1], call.query.shape[-1]
    tokens = call.projected.shape[-2]
    raw = call.projected.reshape(tokens, heads, -1)[0, :, offset:size]  # a gate may come after it
    seen = call.query[0, :, 0, offset:]
    raw, seen = raw / raw.norm(dim=-1, keepdim=True), seen / seen.norm(dim=-1, keepdim=True)
    return not torch.allclose(raw, seen, rtol=1e-3, atol=1e-5)


FACTORS: dict[int, Any] = {}


def attention_factors(module: nn.Module) -> set[float]:
    """Return the attention factors of the rotary modules of the model that was recorded."""
    return FACTORS.get(0, set())


def collect_factors(model: nn.Module) -> None:
    """Remember the attention factors of a model's rotary modules; what is learned is drawn."""
    chance = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(getattr(module, "alpha", None), Tensor) and hasattr(module, "inv_freq"):
            FACTORS[1] = module.alpha.normal_(0.0, 0.3, generator=chance)
        if type(module).__name__.endswith("SoftmaxScaling"):
            for weight in module.parameters():
                weight.data.normal_(1.0, 0.3, generator=chance)
    FACTORS[0] = {
        float(value)
        for module in model.modules()
        for name, value in vars(module).items()
        if name.endswith("attention_scaling") and isinstance(value, (int, float))
    }


def recurrent_modules(model: nn.Module) -> list[LayerSpec]:
    """Return what each recurrent module of a model holds, as a spec without dtype and activation."""
    found = []
    for module in model.modules():
        spec = _recurrent(module)
        if spec is not None:
            found.append(spec)
    return found


def _recurrent(module: Any) -> tuple[Any, ...] | None:
    name = type(module).__name__
    if "ShortConv" in name:
        return AttentionKind.SHORT_CONV, module.conv.weight.shape[0], module.conv.weight.shape[-1]
    if "LightningAttention" in name:
        return AttentionKind.LINEAR, module.num_attention_heads, module.head_dim
    if "Rglru" in name:
        return AttentionKind.RG_LRU, module.recurrent_param.shape[0]
    if hasattr(module, "forget_gate") and hasattr(module, "conv1d"):
        return (AttentionKind.KDA, module.num_heads, module.head_dim,
                module.conv1d.weight.shape[-1], module.conv1d.weight.shape[0])  # fmt: skip
    if not hasattr(module, "A_log") or not hasattr(module, "conv1d"):
        return None
    width = module.conv1d.weight.shape[-1]
    if hasattr(module, "head_k_dim"):
        return (
            AttentionKind.GDN, module.num_v_heads, module.num_k_heads, module.head_k_dim,
            module.head_v_dim, width, module.conv1d.weight.shape[0],
        )  # fmt: skip
    if module.A_log.ndim > 1:  # Zamba's of several heads, which have a B and a C each
        groups = module.A_log.shape[0] if module.A_log.ndim == 3 else 1
        channels, state = module.A_log.flatten(0, -2).shape
        return AttentionKind.MAMBA1, channels, state, width, groups
    return (
        AttentionKind.MAMBA2, module.A_log.shape[0], module.n_groups, module.head_dim,
        module.ssm_state_size, width, module.conv1d.weight.shape[0],
    )  # fmt: skip


def recurrent_values(spec: LayerSpec) -> tuple[Any, ...]:
    """Return a recurrent spec in `recurrent_modules`' form."""
    from polyattn.spec.decompose import convolution

    form = spec.recurrent
    assert form is not None
    before = convolution(spec)
    channels = before.num_heads if before else 0
    if spec.kind is AttentionKind.SHORT_CONV:
        return spec.kind, spec.num_heads, form.conv_width
    if spec.kind is AttentionKind.LINEAR:
        return spec.kind, spec.num_heads, spec.head_size
    if spec.kind is AttentionKind.MAMBA1:
        return spec.kind, spec.num_heads, form.state_size, form.conv_width, form.channel_groups
    if spec.kind is AttentionKind.RG_LRU:
        return spec.kind, spec.num_heads
    if spec.kind is AttentionKind.KDA:
        return spec.kind, spec.num_heads, spec.head_size, form.conv_width, channels
    if spec.kind is AttentionKind.GDN:
        return (spec.kind, spec.num_heads, spec.num_kv_heads, spec.head_size, spec.v_head_size,
                form.conv_width, channels)  # fmt: skip
    return (spec.kind, spec.num_heads, spec.num_kv_heads, spec.head_size, form.state_size,
            form.conv_width, channels)  # fmt: skip


def _source_of(calls: list[Call], index: int, spec: LayerSpec) -> int:
    """Return the first call with the same keys; of latents, which each layer expands, the rope part."""
    size = spec.latent.rope_head_size if spec.latent and spec.kv_source is not None else 0
    if size:
        turned = [call.key[..., -size:] for call in calls[: index + 1]]
        return next(
            i for i, k in enumerate(turned) if k.shape == turned[-1].shape and k.equal(turned[-1])
        )
    # All are alive, so those of one address are shared.
    return [call.key.data_ptr() for call in calls].index(calls[index].key.data_ptr())


def differences(model: nn.Module, specs: list[LayerSpec | None], **inputs: Any) -> list[str]:
    """Return everything that differs between a model's modules and the specs of its layers.

    None stands for an attention layer that can't be served.
    """
    collect_factors(model)
    calls = record(model, **inputs)
    attention: list[LayerSpec | None] = []
    joined: dict[int, LayerSpec] = {}
    for spec in specs:
        if spec and spec.sparse and spec.sparse.shares_softmax:
            joined[len(attention) - 1] = spec
        elif spec is None or not spec.kind.is_recurrent:
            attention.append(spec)
    recurrent = [recurrent_values(spec) for spec in specs if spec and spec.kind.is_recurrent]
    out = []
    if len(calls) != len(attention):
        out.append(f"{len(attention)} attention layers, the model has {len(calls)}")
    for index, (spec, call) in enumerate(zip(attention, calls, strict=False)):
        if spec is None:
            continue
        out += [
            f"attention {index}: {line}"
            for line in attention_differences(spec, call, joined.get(index))
        ]
        source = _source_of(calls, index, spec)
        if source != (index if spec.kv_source is None else spec.kv_source):
            out.append(f"attention {index}: module reads the keys of layer {source}")
    held = recurrent_modules(model)
    if recurrent != held:
        out.append(f"recurrent layers: specs {recurrent}, modules {held}")
    return out
