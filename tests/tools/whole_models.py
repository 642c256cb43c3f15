"""Tiny whole models, as transformers builds and saves them, and what its own code makes of tokens."""

from __future__ import annotations

import contextlib
import io
import math
from pathlib import Path
from typing import Any

import tiny
import torch
import transformers
from polyattn import LayerSpec, select_layers
from polyattn.tools.replay.engine import Engine
from polyattn.tools.replay.model import runner
from polyattn.tools.replay.model.decoder import Decoder
from polyattn.tools.replay.model.fields import Fields
from polyattn.tools.replay.model.step import ModelStep
from polyattn.tools.replay.model.weights import Checkpoint, load
from polyattn.tools.replay.runners import Options
from polyattn.tools.replay.scheduler import Running, Scheduled
from polyattn.tools.replay.trace import Request
from torch import Tensor

LENGTHS = {"max_position_embeddings": 256}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 0.8, "mscale_all_dim": 0.7, "original_max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0,
    "short_factor": [1.0 + 0.25 * i for i in range(8)], "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 128,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
DEEPSEEK = LENGTHS | {"num_key_value_heads": 4}
GEMMA3_TYPES = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LENGTHS | {"rope_parameters": LLAMA3}),
    "llama-biased": ("llama", LENGTHS | {"attention_bias": True, "mlp_bias": True,
                                         "tie_word_embeddings": True}),
    "llama-longrope": ("llama", LENGTHS | {"rope_parameters": LONGROPE}),
    "llama-dynamic": ("llama", LENGTHS | {"rope_parameters": DYNAMIC}),
    "llama-proportional": ("llama", LENGTHS | {"rope_parameters": {
        "rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "mistral": ("mistral", LENGTHS),
    "qwen2": ("qwen2", LENGTHS),
    "qwen3": ("qwen3", LENGTHS),
    "qwen3-moe": ("qwen3_moe", LENGTHS | {
        "norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    "mixtral": ("mixtral", LENGTHS),
    "phi3": ("phi3", LENGTHS),
    "olmo2": ("olmo2", LENGTHS),
    "glm4": ("glm4", LENGTHS | {"attention_bias": True}),
    "gemma2": ("gemma2", LENGTHS | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0,
                                    "final_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", LENGTHS | {"layer_types": GEMMA3_TYPES}),
    "gpt-oss": ("gpt_oss", LENGTHS | {"swiglu_limit": 0.8}),
    "deepseek-v3": ("deepseek_v3", DEEPSEEK | {
        "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "rope_parameters": YARN}),
    "deepseek-v3-full-rank": ("deepseek_v3", DEEPSEEK | {"q_lora_rank": None,
                                                        "norm_topk_prob": False}),
    "mamba2": ("mamba2", {"chunk_size": 8, "tie_word_embeddings": True}),
    "jamba": ("jamba", LENGTHS | {"mamba_proj_bias": True}),
}  # fmt: skip
"""Each shape's type in transformers, and what its tiny config has beyond `tiny.SIZES`."""


def transformers_model(name: str, **sizes: Any) -> torch.nn.Module:
    """Return a model whose every weight matters: none is 0 or 1 as initialised; tiny by default.

    What another version of transformers doesn't compute with isn't in its config.
    """
    kind, changes = MODELS[name]
    known = tiny.class_fields(tiny.CONFIG_MAPPING[kind])
    changes = {field: value for field, value in (changes | sizes).items() if field in known}
    with contextlib.redirect_stderr(io.StringIO()):
        torch.manual_seed(0)
        config = tiny.tiny_config(kind, **changes)
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for label, weight in [*model.named_parameters(), *model.named_buffers()]:
            if label.endswith(("A_log", "dt_bias", "inv_freq", "embed_scale")):
                continue
            numbers = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:
                weight.add_(numbers * 0.3)
            else:  # experts are stacked one way or the other: between both ways' fan-in
                weight.copy_(numbers * 1.5 * math.prod(weight.shape[-2:]) ** -0.25)
    model.eval().set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    return model.requires_grad_(False)  # type: ignore[no-any-return]


def saved(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, **sizes: Any
) -> torch.nn.Module:
    """Return the model, and save it as a checkpoint in Hugging Face's layout."""
    model = transformers_model(name, **sizes).to(dtype)
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
    return model


class Recorded(runner.ModelRunner):
    """A model runner that keeps the logits of every token that it computes, by its position."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.seen: dict[Running, dict[int, list[Tensor]]] = {s: {} for s in self.tokens}
        self.widest: set[int] = set()
        whole = self.model.forward

        def forward(tokens: Tensor, step: ModelStep) -> Tensor:
            hidden = whole(tokens, step)
            logits = iter(self.model.logits(hidden))
            for item in self.plan:
                for position in range(item.start, item.start + item.count):
                    self.seen[item.sequence].setdefault(position, []).append(next(logits))
            return hidden

        self.model.forward = forward  # type: ignore[method-assign]

    def step(self, plan: list[Scheduled], batches: Any) -> float:
        self.plan = plan
        self.widest.add(len(plan))
        return super().step(plan, batches)


def engine(
    folder: Path,
    requests: list[Request],
    block_size: int | None = 8,
    blocks: int = 64,
    device: str = "cpu",
    **options: Any,
) -> Engine:
    """Return an engine over a checkpoint; each pool has room for `blocks` blocks of 8 tokens."""
    specs = [
        s if s.kind.is_recurrent else s.replace(block_size=block_size)
        for s in LayerSpec.from_hf_config(folder)
    ]
    model = Decoder(Fields(folder), specs)
    source = Checkpoint(folder)
    source.check(model)
    groups = select_layers(specs, device)
    load(model, source, torch.device(device))
    per_token = sum(
        g.selection.cache_format.bytes_per_token * len(g.layers)
        for g in groups
        if g.selection.cache_format
    )
    made = Options(layers=10**6, cache_bytes=blocks * 8 * per_token, **options)
    return Engine(groups, requests, made, model)


def disagreement(recorded: Recorded, sequence: Running, model: torch.nn.Module) -> float:
    """Return the largest difference to transformers' logits, relative to their largest.

    Checks that each generated token is the one that transformers' own logits say.
    """
    ids = recorded.tokens[sequence]
    with torch.no_grad():
        expected = model(torch.tensor([ids[:-1]]), use_cache=False).logits[0]
    prompt = sequence.request.prompt
    assert ids[prompt:] == expected[prompt - 1 :].argmax(-1).tolist()
    seen = recorded.seen[sequence]
    errors = [
        (logits - expected[position]).abs().max()
        for position, several in seen.items()
        for logits in several
    ]
    reused = set(range(len(ids) - 1)) - set(seen)
    assert reused == set(range(len(reused)))
    assert len(reused) <= len(sequence.request.hash_ids) * sequence.request.hash_block
    return float(max(errors) / expected.abs().max())
