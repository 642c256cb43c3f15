"""DeepSeek-V4 and GLM-5.3 with our compressors, choices and attention in place of transformers' own."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from polyattn import (
    Batch,
    Compressor,
    CompressorSpec,
    Entries,
    Indexer,
    LayerSpec,
    SparseAttention,
    Stream,
    UnionAttention,
)
from polyattn_models import model_layers
from test_sparse_models import stirred
from tiny import build, tiny_config
from torch import Tensor
from transformers import DynamicCache
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek
from transformers.models.glm5_next import modeling_glm5_next as glm

TOKENS, DRAFTS = 45, 4
RAW = torch.tensor([[3, 0, 2]], dtype=torch.int32)
POOLED = torch.tensor([[1, 2]], dtype=torch.int32)
"""Blocks of 16 tokens, and of 8 entries."""
WHOLE, CHUNKS, SINGLE = [(TOKENS, 0)], [(13, 0), (14, 0), (1, 0), (17, 0)], [(1, 0)] * TOKENS
REJECTED = [(6, 0), *[(5, rejected) for rejected in (4, 2, 0, 3, 1, 4, 3, 0, 1, 2)], (9, 0)]
"""New tokens of each step, and how many of the last ones are rejected."""


class Group:
    """A compressor of a layer: its states, and where its entries go."""

    def __init__(self, module: Any, bias: Tensor, spec: CompressorSpec | None):
        assert spec is not None
        self.compressor = Compressor(dataclasses.replace(spec, drafts=DRAFTS), bias.detach())
        self.states = self.compressor.allocate_states(2)
        self.module = module

    def entries(self, rows: Tensor, gates: Tensor, batch: Batch) -> Entries:
        return self.compressor(rows[0], gates[0], self.states, batch)


def step_of(past: int, new: int) -> Batch:
    slots = torch.tensor([1])
    return Batch.from_lens([new], [past + new], RAW, 16, state_slots=slots)


def specs_of(module: Any) -> list[LayerSpec]:
    """Return what the reader says of a module's layer, in the test's dtype and blocks."""
    (layer,) = [
        each for each in model_layers(module.config).layers if each.index == module.layer_idx
    ]
    blocks = [8 if spec.sparse and spec.sparse.tokens_per_entry > 1 else 16 for spec in layer.specs]
    return [
        spec.replace(dtype="float32", block_size=size)
        for spec, size in zip(layer.specs, blocks, strict=True)
    ]


class V4Layer:
    """One of DeepSeek-V4's layers: a window, and entries that an indexer chooses, or all of them."""

    def __init__(self, module: Any):
        self.module = module
        specs = [spec.replace(learned_sinks=False, needs_lse=True) for spec in specs_of(module)]
        layers = [SparseAttention(spec, rotate=True) for spec in specs]
        self.groups: dict[str, Group] = {}
        self.indexer: Indexer | None = None
        if module.compressor is not None:
            part, sparse, index = module.compressor, specs[1].sparse, specs[1].indexer
            assert sparse is not None
            self.groups["entries"] = Group(part, part.position_bias, sparse.compressor)
            if index is not None:
                self.indexer = Indexer(layers[1].group)
                self.index_keys = self.indexer.allocate_cache(3)
                bias = part.indexer.position_bias
                self.groups["keys"] = Group(part.indexer, bias, index.compressor)
        self.attend = UnionAttention(layers, module.sinks)
        self.caches = [layer.group.allocate_cache(4) for layer in layers]
        for cache in self.caches:
            cache.key.fill_(torch.nan)

    def pooled(self, name: str, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return a group's entries as the model normalises and rotates them, and their slots."""
        group, part = self.groups[name], self.groups[name].module
        entries = group.entries(part.kv_proj(x), part.gate_proj(x), batch)
        norm, rope = part.kv_norm, self.attend.layers[0].spec.rope
        rows = group.compressor.finished(
            entries, norm.weight.detach(), eps=norm.variance_epsilon, rope=rope
        )
        return rows, entries.slots(POOLED, 8)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        module, new = self.module, x.shape[1]
        residual = module.q_a_norm(module.q_a_proj(x))
        query = module.q_b_norm(module.q_b_proj(residual).unflatten(2, (-1, module.head_dim)))
        raw = module.kv_norm(module.kv_proj(x))[0, :, None]
        batch = step_of(int(positions[0, 0]), new)
        streams = [Stream(self.caches[0], batch, key=raw)]
        if self.groups:
            rows, slots = self.pooled("entries", x, batch)
            layer = self.attend.layers[1]
            layer.store(rows[:, None].contiguous(), None, self.caches[1], slots)
            plan = Batch.from_lens(batch.query_lens, batch.lens)
            plan.block_table = POOLED
            streams.append(Stream(self.caches[1], plan, self.chosen(x, residual, plan, batch)))
        out, _ = self.attend(query[0], streams)
        grouped = out.reshape(1, new, module.config.o_groups, -1)
        result: Tensor = module.o_b_proj(module.o_a_proj(grouped).flatten(2))
        return result

    def chosen(self, x: Tensor, residual: Tensor, plan: Batch, batch: Batch) -> Tensor | None:
        """Return the indexer's choice of entries, None for all."""
        if self.indexer is None:
            return None
        keys, slots = self.pooled("keys", x, batch)
        self.indexer.store(keys.contiguous(), self.index_keys, slots)
        part = self.module.compressor.indexer
        positions = torch.arange(batch.lens[0] - x.shape[1], batch.lens[0])[None]
        cos, sin = part.rotary_emb(x, position_ids=positions, layer_type="compress")
        query = part.q_b_proj(residual).unflatten(2, (-1, part.head_dim)).transpose(1, 2)
        query = deepseek.apply_rotary_pos_emb(query, cos, sin)[0].transpose(0, 1).contiguous()
        weights = part.scorer.weights_proj(x)[0] * part.scorer.weights_scaling
        return self.indexer(query, self.index_keys, plan, weights)


class GlmLayer:
    """One of GLM-5.3's attention layers, over latents: pools of keys are chosen, and the tail."""

    def __init__(self, module: Any):
        self.module, part, (spec,) = module, module.indexer, specs_of(module)
        self.layer = SparseAttention(spec)
        self.cache = self.layer.group.allocate_cache(4)
        weights = module.kv_b_proj.weight.unflatten(0, (module.num_heads, -1))
        self.of_keys, self.of_values = weights.split(
            [module.qk_nope_head_dim, module.v_head_dim], 1
        )
        assert (part is None) == (spec.indexer is None)
        if spec.indexer is not None:
            self.indexer = Indexer(self.layer.group)
            self.index_keys = self.indexer.allocate_cache(3, 8)
            self.group = Group(part, part.index_kpool_compress_ape, spec.indexer.compressor)

    def __call__(self, x: Tensor, past: int, shared: Tensor | None) -> tuple[Tensor, Tensor]:
        module, batch = self.module, step_of(past, x.shape[1])
        residual = module.q_a_layernorm(module.q_a_proj(x))
        query = module.q_b_proj(residual)[0].unflatten(1, (-1, module.qk_head_dim))
        query = torch.einsum("thd,hdr->thr", query, self.of_keys)
        latent = module.kv_a_layernorm(module.kv_a_proj_with_mqa(x))[0, :, None].contiguous()
        choice = self.chosen(x, residual, batch) if shared is None else shared
        out = self.layer(query, latent, None, self.cache, batch, choice=choice)
        assert isinstance(out, Tensor)
        out = torch.einsum("thr,hvr->thv", out, self.of_values)
        return module.o_proj(out.flatten(1))[None], choice

    def chosen(self, x: Tensor, residual: Tensor, batch: Batch) -> Tensor:
        part = self.module.indexer
        gates = torch.nn.functional.linear(x, part.index_kpool_compress_gate)
        entries = self.group.entries(part.k_norm(part.wk(x)), gates, batch)
        self.indexer.store(entries.rows, self.index_keys, entries.slots(POOLED, 8))
        plan = Batch.from_lens(batch.query_lens, batch.lens)
        plan.block_table = POOLED
        query = part.wq_b(residual)[0].unflatten(1, (-1, part.head_dim)).contiguous()
        weights = part.weights_proj(x)[0] * part.n_heads**-0.5
        return self.indexer(query, self.index_keys, plan, weights)


def close(found: list[Tensor], wanted: list[Tensor], what: object) -> None:
    for one, other in zip(found, wanted, strict=True):
        error = float((one - other).abs().max() / other.abs().max())
        assert error < 1e-5, (what, error)
    assert torch.equal(found[0].argmax(-1), wanted[0].argmax(-1))


def tokens() -> Tensor:
    return torch.randint(3, 60, (1, TOKENS + DRAFTS), generator=torch.Generator().manual_seed(2))


def run(
    model: Any,
    steps: list[tuple[int, int]],
    began: Callable[[int], None] = lambda past: None,
    **how: Any,
) -> list[Tensor]:
    """Return the logits of accepted tokens, and what each attention module returns of them.

    Others stand in a step where drafts are rejected.

    `began(past)` is called before a step. Caches in `how` are of states that can't be put back: where
    drafts are rejected the accepted tokens run again, on a copy from before the step.
    """
    now: dict[str, Tensor] = {}
    found: list[list[Tensor]] = []
    handles = [
        module.register_forward_hook(
            lambda _, args, out, name=name: now.update(
                {name: out if isinstance(out, Tensor) else out[0]}
            )
        )
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Attention")
    ]
    past = 0
    for new, rejected in steps:
        step = tokens()[:, past : past + new]
        if rejected:
            step[:, -rejected:] = 3 + (step[:, -rejected:] + 11) % 57
        at = torch.arange(past, past + new)[None]
        began(past)
        before = copy.deepcopy(how) if rejected else how
        with torch.no_grad():
            out = model(step, position_ids=at, **how)
            logits = out.logits if "logits" in out else out.last_hidden_state
            found.append([each[:, : new - rejected] for each in (logits, *now.values())])
            if rejected and how:
                how = before
                if new > rejected:
                    accepted = slice(new - rejected)
                    model(step[:, accepted], position_ids=at[:, accepted], **how)
        past += new - rejected
    for handle in handles:
        handle.remove()
    assert len(now) >= 2
    return [torch.cat(parts, 1) for parts in zip(*found, strict=True)]


IDS = ["whole", "chunks", "single", "rejected"]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [WHOLE, CHUNKS, SINGLE, REJECTED], ids=IDS)
def test_deepseek_v4(steps: list[tuple[int, int]]) -> None:
    """Windows, entries of 4 that overlap and are chosen, entries of 8 that are all attended to."""
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
    kinds = ["sliding_attention", *rates, "compressed_sparse_attention"]
    model = stirred(build(tiny_config(
        "deepseek_v4", compress_rates=rates, sliding_window=8, index_topk=3, index_n_heads=16,
        index_head_dim=16, partial_rotary_factor=0.5, head_dim=32, num_key_value_heads=1,
        num_hidden_layers=4, mlp_layer_types=["moe"] * 4, o_groups=2, o_lora_rank=16,
        layer_types=kinds,
    )))  # fmt: skip
    layers: dict[int, V4Layer] = {}

    def forward(
        module: Any, hidden_states: Tensor, position_embeddings: Any, position_ids: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        if module.layer_idx not in layers:
            layers[module.layer_idx] = V4Layer(module)
        return layers[module.layer_idx](hidden_states, position_ids), None

    wanted = run(model, WHOLE)
    with mock.patch.object(deepseek.DeepseekV4Attention, "forward", forward):
        close(run(model, steps), wanted, steps)
    assert len(layers) == 4


@pytest.mark.slow
@pytest.mark.parametrize("steps", [WHOLE, CHUNKS, SINGLE, REJECTED], ids=IDS)
def test_glm5_next(steps: list[tuple[int, int]]) -> None:
    """Pools of 4 keys and the tail, in a layer that indexes and one that shares its choice."""
    model = stirred(build(tiny_config(
        "glm5_next_text", num_hidden_layers=3, linear_num_heads=2, linear_head_dim=16,
        layer_types=["linear_attention", "indexed_attention", "indexed_attention"],
        indexer_types=["full", "full", "shared"], mlp_layer_types=["dense"] * 3, index_topk=12,
        index_n_heads=16, index_head_dim=16,
    )))  # fmt: skip
    layers: dict[int, GlmLayer] = {}
    past = [0]

    def forward(
        module: Any, hidden_states: Tensor, prev_topk_indices: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None, Tensor]:
        index = module.layer_idx
        if index not in layers:
            layers[index] = GlmLayer(module)
        out, choice = layers[index](hidden_states, past[-1], prev_topk_indices)
        return out, None, choice

    wanted = run(model, WHOLE)
    cache = DynamicCache(config=model.config)
    with mock.patch.object(glm.Glm5NextTextAttention, "forward", forward):
        found = run(model, steps, past.append, past_key_values=cache, use_cache=True)
    close(found, wanted, steps)
    assert len(layers) == 2
