"""Models whose layers attend to a choice of keys over an ordinary cache."""

from __future__ import annotations

from typing import Any

from polyattn import AttentionKind, IndexerSpec, LayerSpec, SparseSpec

from polyattn_models.attention import Decoder, rotary
from polyattn_models.config import Config
from polyattn_models.layers import Reader, Towers
from polyattn_models.patterns import FULL, LINEAR, all_of, every, layer_types
from polyattn_models.recurrent import gated_delta

INDEXED, BLOCKS = "indexed_attention", "minimax_m3_sparse"
M3_NAMES = {
    "index_n_heads": "sparse_num_index_heads", "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size", "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}  # fmt: skip
"""Names of the index's sizes, and those in the publisher's `sparse_attention_config`."""


def chosen(layer: LayerSpec, indexer: IndexerSpec, **choice: Any) -> LayerSpec:
    """Return a layer that attends to the keys that an indexer chooses."""
    budget = indexer.budget + indexer.tail
    sparse = SparseSpec(budget=int(budget), **choice)
    return layer.replace(kind=AttentionKind.SPARSE, sparse=sparse, indexer=indexer)


def minimax_m3(cfg: Config) -> Towers:
    """MiniMax-M3: each KV head attends to the blocks of keys that its index head chooses."""
    count = cfg.need("num_hidden_layers")
    own = cfg.get("sparse_attention_config")
    part = cfg.part("sparse_attention_config") if own is not None else None
    types = all_of(FULL)(cfg, count)
    sizes = {name: cfg.need(name) for name in M3_NAMES if name != "index_local_blocks"}
    sizes["index_local_blocks"] = cfg.integer("index_local_blocks") or 0
    if part is not None:
        part.only("sparse_init_block", 0)
        sizes |= {name: part.need(older) for name, older in M3_NAMES.items() if part.given(older)}
        listed = part.items("sparse_attention_freq", int, count)
        types = types if listed is None else [BLOCKS if sparse else FULL for sparse in listed]
    types = layer_types(cfg, count, lambda cfg, count: types, (FULL, BLOCKS))
    heads = cfg.need("num_key_value_heads")
    if BLOCKS in types and sizes["index_n_heads"] != heads:
        raise cfg.error(
            "index_n_heads", sizes["index_n_heads"], f"isn't num_key_value_heads={heads}"
        )
    cfg.get("rotary_dim")  # transformers goes by partial_rotary_factor alone
    dense = Decoder(rope=rotary(partial=1.0)).layer(cfg, 0)
    index = IndexerSpec(
        num_heads=sizes["index_n_heads"], head_size=sizes["index_head_dim"], scale=1.0,
        budget=sizes["index_topk_blocks"], activation="none", fold="none",
        pool=sizes["index_block_size"], forced_last=sizes["index_local_blocks"],
    )  # fmt: skip
    sparse = chosen(dense, index, granularity=index.pool, scope="kv_head")
    return {"text": [(sparse if kind == BLOCKS else dense,) for kind in types]}


def qwen4_exp(cfg: Config) -> Towers:
    """Gated delta rules, and attention to groups of neighbours; the newest group comes on top."""
    names = {"full_attention": INDEXED}
    types = cfg.items("layer_types", str) or []
    if types:
        cfg.values["layer_types"] = [names.get(kind, kind) for kind in types]
    count = cfg.need("num_hidden_layers")
    pattern = every(4, "full_attention_interval", LINEAR, INDEXED)
    types = layer_types(cfg, count, pattern, (INDEXED, LINEAR))
    cfg.only("indexer_kv_heads", 1)
    heads, size = cfg.need("indexer_n_heads"), cfg.need("indexer_head_dim")
    group, budget = cfg.need("indexer_compress_ratio"), cfg.need("indexer_budget")
    if budget % group:
        raise cfg.error("indexer_budget", budget, f"is no multiple of {group} tokens a group")
    dense = Decoder(
        rope=rotary(partial=1.0, sections=(11, 11, 10), interleaved=True)
    ).layer(cfg, 0)  # fmt: skip
    index = IndexerSpec(
        num_heads=heads, head_size=size, budget=budget // group, fold="sum", tokens_per_entry=group,
        tail=True,
    )  # fmt: skip
    sparse = chosen(dense, index, granularity=group)
    delta = gated_delta(cfg)
    return {"text": [(delta if kind == LINEAR else sparse,) for kind in types]}


READERS: dict[str, Reader] = {
    "minimax_m3_vl_text": minimax_m3,
    "qwen4_exp_text": qwen4_exp,
}
