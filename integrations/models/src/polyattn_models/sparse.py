"""Models whose layers attend to a choice of keys over an ordinary cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from polyattn import AttentionKind, CompressorSpec, IndexerSpec, LayerSpec, SparseSpec

from polyattn_models.attention import Decoder, rotary
from polyattn_models.config import Config
from polyattn_models.layers import Reader, Stack
from polyattn_models.mla import absorbed, indexers
from polyattn_models.patterns import FULL, LINEAR, SLIDING, all_of, every, layer_types, named
from polyattn_models.recurrent import gated_delta, kimi_delta, kimi_sizes
from polyattn_models.rotary import read_rope

INDEXED, BLOCKS = "indexed_attention", "minimax_m3_sparse"
M3_NAMES = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
"""Names of the index's sizes, and those in the publisher's `sparse_attention_config`."""


def chosen(layer: LayerSpec, indexer: IndexerSpec, **choice: Any) -> LayerSpec:
    """Return a layer that attends to the keys that an indexer chooses."""
    budget = indexer.budget + indexer.tail
    sparse = SparseSpec(budget=int(budget), **choice)
    # The caller norms what a sparse layer attends with.
    return layer.replace(kind=AttentionKind.SPARSE, sparse=sparse, indexer=indexer, qk_norm=None)


def minimax_m3(cfg: Config) -> Stack:
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
    return [sparse if kind == BLOCKS else dense for kind in types]


def qwen4_exp(cfg: Config) -> Stack:
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
    dense = Decoder(rope=rotary(partial=1.0, sections=(11, 11, 10), interleaved=True)).layer(cfg, 0)
    index = IndexerSpec(
        num_heads=heads, head_size=size, budget=budget // group, fold="sum", tokens_per_entry=group,
        tail=True, compressor=CompressorSpec(size=size, tokens_per_entry=group, reduction="mean"),
    )  # fmt: skip
    sparse = chosen(dense, index, granularity=group)
    delta = gated_delta(cfg)
    return [delta if kind == LINEAR else sparse for kind in types]


WINDOW_RATIO, CHOSEN, WHOLE = 0, "compressed_sparse_attention", "heavily_compressed_attention"
V4_RATIOS = {WINDOW_RATIO: SLIDING, 4: CHOSEN, 128: WHOLE}
"""What DeepSeek-V4's older files call a layer, and its type."""


def _v4_ropes(cfg: Config, size: int) -> dict[str, Any]:
    """Return DeepSeek-V4's two rotations; that of compressed layers alone is stretched."""
    rotated = cfg.integer("qk_rope_head_dim")
    turned = cfg.number("partial_rotary_factor")
    if turned is None:
        turned = 64 / 512 if rotated is None else rotated / size
    stated = cfg.get("rope_scaling") or cfg.get("rope_parameters") or {}
    if not isinstance(stated, Mapping):
        raise cfg.error("rope_parameters", stated, "must be a JSON object")
    if not isinstance(stated.get("main"), Mapping) or not isinstance(
        stated.get("compress"), Mapping
    ):
        plain = {"rope_theta": cfg.number("rope_theta"), "partial_rotary_factor": turned}
        own = {name: value for name, value in stated.items() if name not in ("main", "compress")}
        own |= {"rope_theta": cfg.number("compress_rope_theta"), "partial_rotary_factor": turned}
        if (own.get("rope_type") or own.get("type")) == "yarn":
            own = {"attention_factor": 1.0} | own
        stated = {"main": {"rope_type": "default", **plain}, "compress": own}
    cfg.values["rope_parameters"] = stated
    cfg.values.pop("rope_scaling", None)
    cfg.values.pop("partial_rotary_factor", None)
    return {
        kind: dataclasses.replace(
            read_rope(cfg, size, layer_type=kind, pairing="gptj", partial=1.0), last=True
        )
        for kind in ("main", "compress")
    }


def deepseek_v4(cfg: Config) -> Stack:
    """A window, and in most layers compressed entries beside it, chosen or all; keys are values."""
    count, heads = cfg.need("num_hidden_layers"), cfg.need("num_attention_heads")
    cfg.only("num_key_value_heads", 1)
    size, window = cfg.need("head_dim"), cfg.need("sliding_window")
    stated = cfg.part("compress_rates")
    rates = {
        kind: cfg.integer(older) or stated.integer(kind) or default
        for kind, older, default in (
            (CHOSEN, "compress_rate_csa", 4),
            (WHOLE, "compress_rate_hca", 128),
        )
    }
    ratios = cfg.items("compress_ratios", int)
    derived = [CHOSEN if i % 2 and i > 1 else WHOLE for i in range(count)]
    types = cfg.items("layer_types", str)
    if types is None and ratios is not None:
        types = [V4_RATIOS.get(ratio, f"ratio {ratio}") for ratio in ratios]
    types = named(cfg, "layer_types", (types or derived)[:count], (SLIDING, CHOSEN, WHOLE))
    if len(types) != count:
        raise cfg.error("layer_types", types, f"must have an entry for each of {count} layers")
    ropes = _v4_ropes(cfg, size)
    near = LayerSpec(
        kind=AttentionKind.SPARSE, num_heads=heads, num_kv_heads=1, head_size=size, dtype=cfg.dtype,
        learned_sinks=True, rope=ropes["main"],
        sparse=SparseSpec(budget=window, value_in_key=True, newest=True, turns_back=True),
    )  # fmt: skip
    streamed = near.replace(rope=ropes["compress"], needs_lse=True)

    def entries(kind: str) -> LayerSpec:
        m, overlaps = rates[kind], kind == CHOSEN
        made = CompressorSpec(size=size, tokens_per_entry=m, overlap=overlaps)
        choice: dict[str, Any] = {
            "budget": -(-cfg.need("max_position_embeddings") // m),
            "newest": True,
        }
        indexer = None
        if kind == CHOSEN:
            choice = {"budget": cfg.need("index_topk")}
            own = cfg.need("index_head_dim")
            indexer = IndexerSpec(
                num_heads=cfg.need("index_n_heads"),
                head_size=own,
                tokens_per_entry=m,
                **choice,
                compressor=dataclasses.replace(made, size=own),
            )
        sparse = SparseSpec(
            **choice,
            tokens_per_entry=m,
            value_in_key=True,
            shares_softmax=True,
            turns_back=True,
            compressor=made,
        )
        return streamed.replace(learned_sinks=False, sparse=sparse, indexer=indexer)

    layers = {kind: (streamed, entries(kind)) for kind in {*types} - {SLIDING}}
    return [layers.get(kind, near) for kind in types]


def glm5_next(cfg: Config) -> Stack:
    """GLM-5.3: Kimi delta rules, and MLA without positions that attends to pools of tokens."""
    count = cfg.need("num_hidden_layers")
    part = cfg.part("linear_attn_config") if cfg.get("linear_attn_config") is not None else None
    delta = kimi_delta(cfg, *kimi_sizes(cfg, part))
    names = {FULL: INDEXED}
    types = [names.get(kind, kind) for kind in cfg.items("layer_types", str, count) or []]
    types = types or every(4, "", LINEAR, INDEXED)(cfg, count)
    types = named(cfg, "layer_types", types, (LINEAR, INDEXED))
    cfg.only("qk_rope_head_dim", 0)
    m, budget, width = cfg.need("index_kpool"), cfg.need("index_topk"), cfg.need("index_head_dim")
    if budget % m:
        raise cfg.error("index_topk", budget, f"is no multiple of index_kpool={m}")
    index = IndexerSpec(
        num_heads=cfg.need("index_n_heads"),
        head_size=width,
        budget=budget // m,
        tokens_per_entry=m,
        tail=cfg.flag("index_kpool_always_select_tail", True) and m > 1,
        compressor=CompressorSpec(size=width, tokens_per_entry=m),
    )
    chosen = SparseSpec(budget=budget // m + index.tail, granularity=m, value_in_key=True)
    latent = absorbed(
        cfg,
        chosen,
        heads=cfg.need("num_attention_heads"),
        rank=cfg.need("kv_lora_rank"),
        nope=cfg.need("qk_nope_head_dim"),
    )
    owns = indexers(cfg, count)
    return [
        delta if kind == LINEAR else latent.replace(indexer=index if own else None)
        for kind, own in zip(types, owns, strict=True)
    ]


READERS: dict[str, Reader] = {
    "minimax_m3_vl_text": minimax_m3,
    "qwen4_exp_text": qwen4_exp,
    "deepseek_v4": deepseek_v4,
    "glm5_next_text": glm5_next,
}
