"""Sparse models of transformers with our choice and attention inside: the same layers and logits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from polyattn import Batch, Indexer, IndexerSpec, KVCache, LayerSpec, SparseAttention, SparseSpec
from polyattn.conformance.cases.index import layer_for
from test_indexers import Products
from tiny import build, tiny_config
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

TOKENS, BLOCK = 40, 16
TABLE = torch.tensor([[3, 0, 2]], dtype=torch.int32)
CHUNKS = (13, 14, 1, 1, TOKENS - 29)
SINGLE = (1,) * TOKENS
REJECTED = (13, -5, 1, -3, 2, -4, 4, -1, 1, -6, TOKENS - 21)
"""Below zero: so many drafts, all of which are rejected, before the next step's tokens."""
INDEX = {"index_topk": 8, "index_n_heads": 16, "index_head_dim": 16, "num_hidden_layers": 3}
"""16 heads, so that no two scores are equal; a quarter of the keys at most."""
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v32": INDEX,
    "axk2": INDEX,
    "glm_moe_dsa": INDEX | {"indexer_types": ["full", "shared", "full"]},
    "hy_v4": INDEX | {"indexer_types": ["full", "shared", "shared"]},
    "mistral_large4_text": INDEX | {
        "indexer_types": ["full", "shared", "full"], "kv_source_layers": [0, 1, 0],
        "no_rope_layers": [1, 0, 1],
    },
    "minimax_m3_vl_text": {
        "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 3,
        "num_hidden_layers": 3, "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 2,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 16, "indexer_head_dim": 16, "indexer_budget": 8, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "indexed_attention"],
    },
}  # fmt: skip


def choice_of(
    module: Any, query: Tensor, keys: Tensor, weights: Tensor | None, past: int
) -> Tensor:
    """Return our indexer's choice, from what goes into the products of a model's own."""
    kind = type(module).__name__
    sizes = {"num_heads": query.shape[1], "head_size": query.shape[2]}
    if "MiniMax" in kind:
        spec = IndexerSpec(**sizes, budget=module.topk_blocks, activation="none", fold="none",
                           scale=1.0, pool=module.block_size, forced_last=1)  # fmt: skip
    elif "QSA" in kind:
        spec = IndexerSpec(**sizes, budget=module.block_topk, fold="sum", tail=True,
                           tokens_per_entry=module.compress_ratio)  # fmt: skip
    else:
        spec = IndexerSpec(**sizes, budget=module.index_topk)
    batch = Batch.from_lens([len(query)], [past + len(query)], TABLE, BLOCK)
    cache = torch.full((4, BLOCK, keys.shape[1]), torch.nan)  # what isn't written isn't read
    for place, key in enumerate(keys):
        cache[int(TABLE[0, place // BLOCK]), place % BLOCK] = key
    return Indexer(layer_for(spec, "float32"))(query, cache, batch, weights)


class Ours:
    """Polyattn's layers inside a model: each module's choice is ours, and ours is its attention."""

    def __init__(self, model: nn.Module):
        self.layers: dict[int, tuple[SparseAttention, KVCache]] = {}
        self.past, self.model = 0, model
        self.choices: dict[int, Tensor] = {}

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Replace the model's indexers and attention."""
        ALL_ATTENTION_FUNCTIONS.register("ours", self.attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register("ours", eager_mask)
        self.model.set_attn_implementation("ours")
        with mock.patch.multiple("torch.nn.Module", __call__=self.call(nn.Module.__call__)):
            yield
        self.model.set_attn_implementation("eager")

    def call(self, real: Any) -> Any:
        """Return `Module.__call__`, in which an indexer returns our choice."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not type(module).__name__.endswith("Indexer"):
                return real(module, *args, **kwargs)
            with Products() as products:
                theirs = real(module, *args, **kwargs)
            return self.chosen(module, products.inputs, theirs)

        return call

    def chosen(self, module: Any, products: list[tuple[Tensor, Tensor]], theirs: Tensor) -> Tensor:
        """Return our choice in the model's own form, and remember it."""
        if "QSA" in type(module).__name__:
            count = theirs.shape[2] - len(products)  # the first tokens see no whole group
            query = torch.stack(
                [torch.zeros(module.index_n_heads, module.index_head_dim)] * count
                + [pair[0] for pair in products]
            )
            keys = products[-1][1].T if products else query[:0, 0]
            self.choices[module.layer_idx] = choice_of(module, query, keys, None, self.past)
            return theirs
        query, keys = products[0][0][0], products[0][1][0, 0].T
        if "MiniMax" in type(module).__name__:
            choice = choice_of(module, query.transpose(0, 1), keys, None, self.past)
            self.choices[module.layer_idx] = choice
            return choice.transpose(0, 1)[None]
        return choice_of(module, query, keys, products[1][0][0, :, 0], self.past)[:, 0][None]

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float,
        indices: Tensor | None = None, s_aux: Tensor | None = None, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Attend over our own paged cache, which takes the step's keys alone."""
        index, new = module.layer_idx, query.shape[2]
        choice = self.choices.get(index) if indices is None else indices[0][:, None]
        dense = choice is None
        if choice is None:
            choice = (
                torch.arange(self.past + new, dtype=torch.int32).expand(new, 1, -1).contiguous()
            )
        if index not in self.layers:
            whom = "kv_head" if choice.shape[1] > 1 else "all"
            groups = getattr(module, "indexer", None)
            size = getattr(groups, "block_size", getattr(groups, "compress_ratio", 1))
            spec = LayerSpec(
                kind="sparse", num_heads=query.shape[1], num_kv_heads=key.shape[1],
                head_size=key.shape[3], v_head_size=value.shape[3], scale=scaling, dtype="float32",
                block_size=BLOCK, learned_sinks=s_aux is not None,
                sparse=SparseSpec(
                    budget=TOKENS if dense else choice.shape[2], scope=whom,
                    granularity=1 if dense else size,
                ),
            )  # fmt: skip
            layer = SparseAttention(spec, sinks=s_aux)
            self.layers[index] = layer, layer.group.allocate_cache(num_blocks=4)
        layer, cache = self.layers[index]
        batch = Batch.from_lens([new], [self.past + new], TABLE, BLOCK)
        rows = [x[0, :, -new:].transpose(0, 1).contiguous() for x in (query, key, value)]
        out = layer(*rows, cache, batch, choice=choice)
        assert isinstance(out, Tensor)
        return out[None], None


def model_of(model_type: str, **fields: Any) -> Any:
    """Return a tiny model of the type."""
    return stirred(build(tiny_config(model_type, **(MODELS[model_type] | fields))))


def stirred(model: Any) -> Any:
    """Return a model none of whose weights is at its neutral start."""
    generator = torch.Generator().manual_seed(5)
    for name, weight in model.named_parameters():
        if (weight.ndim == 1 and "A_log" not in name) or not weight.any():
            weight.data += 0.3 * torch.randn(weight.shape, generator=generator)
    model.set_attn_implementation("eager")
    return model


def run(model: Any, tokens: Tensor, steps: tuple[int, ...], ours: Ours | None) -> list[Tensor]:
    """Return the logits, and what each attention module returns, all tokens together."""
    seen: dict[str, list[Tensor]] = {}
    handles = [
        module.register_forward_hook(
            lambda _, args, out, name=name: seen.setdefault(name, []).append(out[0])
        )
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Attention")
    ]
    cache, past = DynamicCache(config=model.config), 0
    logits = []
    for new in steps:
        if ours is not None:
            ours.past = past
        if new < 0:  # transformers' cache is put back; ours has what the drafts left in it
            drafts, before = tokens[:, past : past - new].flip(1), copy.deepcopy(cache)
            lengths = {name: len(parts) for name, parts in seen.items()}
            with torch.no_grad():
                model(drafts, past_key_values=cache, use_cache=True)
            for name, count in lengths.items():
                del seen[name][count:]
            cache = before
            continue
        with torch.no_grad():
            step = model(tokens[:, past : past + new], past_key_values=cache, use_cache=True)
        logits.append(step.logits if "logits" in step else step.last_hidden_state)
        past += new
    for handle in handles:
        handle.remove()
    return [torch.cat(logits, 1), *(torch.cat(parts, 1) for parts in seen.values())]


def compare(model_type: str, *ways: tuple[int, ...], **fields: Any) -> None:
    """Compare layers and logits with transformers' own, of one whole prompt."""
    model = model_of(model_type, **fields)
    tokens = torch.randint(3, 60, (1, TOKENS), generator=torch.Generator().manual_seed(2))
    wanted = run(model, tokens, (TOKENS,), None)
    for steps in ways:
        ours = Ours(model)
        with ours.inside():
            found = run(model, tokens, steps, ours)
        assert len(found) == len(wanted) == len(ours.layers) + 1
        for one, other in zip(found, wanted, strict=True):
            error = (one - other).abs().max() / other.abs().max()
            assert error < 1e-5, (steps, float(error))
        assert torch.equal(found[0].argmax(-1), wanted[0].argmax(-1))


@pytest.mark.parametrize("model_type", MODELS)
def test_layers_and_logits(model_type: str) -> None:
    """A whole prompt; chunks with single tokens among them, over a cache of ours."""
    compare(model_type, (TOKENS,), CHUNKS)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODELS)
def test_single_tokens_and_rejected_drafts(model_type: str) -> None:
    compare(model_type, SINGLE, REJECTED)


def first_of_equals(
    scores: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    """`topk`, of equal scores the first."""
    best, ids = scores.sort(dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((best.narrow(dim, 0, k), ids.narrow(dim, 0, k)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "heads"),
    [(name, "index_n_heads") for name, fields in MODELS.items() if INDEX.items() <= fields.items()]
    + [("qwen4_exp_text", "indexer_n_heads")],
)
def test_of_equal_scores_the_smaller_id_is_chosen(model_type: str, heads: str) -> None:
    """With 2 heads a quarter of the scores are exactly 0; transformers' choice is made stable."""
    with (
        mock.patch.object(torch.Tensor, "topk", first_of_equals),
        mock.patch.object(torch, "topk", first_of_equals),
    ):
        compare(model_type, (TOKENS,), CHUNKS, SINGLE, **{heads: 2})
