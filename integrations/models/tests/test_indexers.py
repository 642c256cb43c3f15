"""`Indexer` beside transformers' index modules: the same queries, keys and weights, the same choice."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from polyattn import Batch, Indexer, IndexerSpec
from polyattn.conformance.cases.index import layer_for
from torch import Tensor
from torch.overrides import TorchFunctionMode

TOKENS, BLOCK, HIDDEN = 150, 16, 48
STEPS = [[(TOKENS, TOKENS)], [(37, 37)], [(60, 97)], [(1, 98)], [(TOKENS - 98, TOKENS)]]
"""The whole prompt at once; the same in chunks, a decode among them."""


class Products(TorchFunctionMode):
    """Keeps what goes into matrix products: a module's index queries, keys and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.matmul:
            self.inputs.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))


def module_of(model: str, name: str, **fields: Any) -> Any:
    """Return a model's index module with random weights, biases and norms."""
    home = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    config = SimpleNamespace(hidden_size=HIDDEN, rms_norm_eps=1e-6, **fields)
    made = getattr(home, name)(config, 0).float()
    generator = torch.Generator().manual_seed(7)
    for weight in made.parameters():
        weight.data.normal_(generator=generator)
    return made


def rotation(size: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(TOKENS)[:, None] * 100.0 ** -torch.linspace(0, 1, size // 2)
    angles = torch.cat([angles, angles], 1)[None]
    return angles.cos(), angles.sin()


def hidden() -> Tensor:
    return torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3))


def choices(spec: IndexerSpec, query: Tensor, keys: Tensor, weights: Tensor | None) -> list[Tensor]:
    """Return each step's choice over a paged cache, (tokens, scope, K) of the steps' tokens."""
    entries = spec.tokens_per_entry
    count = -(-len(keys) // BLOCK)
    table = torch.randperm(count + 2, generator=torch.Generator().manual_seed(1))[:count].int()
    cache = torch.full((count + 2, BLOCK, keys.shape[1]), torch.nan)
    for place, key in enumerate(keys):
        cache[int(table[place // BLOCK]), place % BLOCK] = key
    found, indexer = [], Indexer(layer_for(spec, "float32"))
    for ((new, length),) in STEPS:
        batch = Batch.from_lens([new], [length], device="cpu")
        batch.block_table = table[None, : -(-(length // entries) // BLOCK) or 1]
        rows = slice(length - new, length)
        part = None if weights is None else weights[rows]
        found.append(indexer(query[rows], cache, batch, part))
    return found


def check(found: list[Tensor], wanted: list[list[set[int]]]) -> None:
    """Compare sets of ids, of each token and head."""
    for ((new, length),), choice in zip(STEPS, found, strict=True):
        for row in range(new):
            position = length - new + row
            for head in range(choice.shape[1]):
                ids = [i for i in choice[row, head].tolist() if i >= 0]
                assert len(ids) == len(set(ids))
                assert set(ids) == wanted[position][head], (position, head)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("deepseek_v32", "DeepseekV32Indexer"),
        ("glm_moe_dsa", "GlmMoeDsaIndexer"),
        ("axk2", "AXK2Indexer"),
    ],
)
@pytest.mark.parametrize("budget", [7, 64, 200])
def test_deepseeks_choice_of_tokens(model: str, name: str, budget: int) -> None:
    """16 heads, so that no score is a sum of zeros alone, and no two are equal."""
    made = module_of(model, name, index_n_heads=16, index_head_dim=32, qk_rope_head_dim=16,
                     index_topk=budget, q_lora_rank=HIDDEN)  # fmt: skip
    mask = torch.full((1, TOKENS, TOKENS), -torch.inf).triu(1)
    x = hidden()
    with Products() as products:
        ids = made(x, x.flip(-1).contiguous(), rotation(16), mask, torch.arange(TOKENS)[None])
    (query, keys), (weights, _) = products.inputs
    wanted = [[{i for i in ids[0, at].tolist() if i <= at}] for at in range(TOKENS)]
    spec = IndexerSpec(num_heads=16, head_size=32, budget=budget)
    check(choices(spec, query[0], keys[0, 0].T, weights[0, :, 0]), wanted)


@pytest.mark.parametrize(("budget", "local"), [(3, 1), (5, 2), (40, 1), (3, 0)])
def test_minimax_m3s_choice_of_blocks(budget: int, local: int) -> None:
    """Blocks of 8 keys, by KV head."""
    made = module_of("minimax_m3_vl", "MiniMaxM3VLIndexer", index_head_dim=32, index_n_heads=3,
                     index_block_size=8, index_topk_blocks=budget, index_local_blocks=local)  # fmt: skip
    with Products() as products:
        ids = made(hidden(), rotation(32), None, torch.arange(TOKENS)[None])
    ((query, keys),) = products.inputs
    wanted = [
        [{i for i in ids[0, head, at].tolist() if i >= 0} for head in range(3)]
        for at in range(TOKENS)
    ]
    spec = IndexerSpec(num_heads=3, head_size=32, budget=budget, activation="none", fold="none",
                       scale=1.0, pool=8, forced_last=local)  # fmt: skip
    check(choices(spec, query[0].transpose(0, 1), keys[0, 0].T, None), wanted)


@pytest.mark.parametrize("budget", [12, 48, 400])
def test_qwen4s_choice_of_groups(budget: int) -> None:
    """Groups of 4 tokens, each by its mean key, and the group that isn't complete beside them."""
    made = module_of("qwen4_exp", "Qwen4ExpTextQSAIndexer", indexer_n_heads=16, indexer_kv_heads=1,
                     indexer_head_dim=32, indexer_budget=budget, indexer_compress_ratio=4)  # fmt: skip
    mask = torch.ones(TOKENS, TOKENS).tril().bool()[None, None]
    with Products() as products:
        seen = made(hidden(), rotation(32), mask, None)[0, 0]
    # The first three tokens see no group; the last one's keys are all groups'.
    query = torch.stack([torch.zeros(16, 32)] * 3 + [pair[0] for pair in products.inputs])
    wanted = [[{i // 4 for i in row.nonzero().flatten().tolist()}] for row in seen]
    spec = IndexerSpec(
        num_heads=16, head_size=32, budget=budget // 4, fold="sum", tokens_per_entry=4, tail=True
    )
    check(choices(spec, query, products.inputs[-1][1].T, None), wanted)
