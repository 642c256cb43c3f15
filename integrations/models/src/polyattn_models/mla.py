"""Multi-head latent attention: DeepSeek's models and those made after them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from polyattn import AttentionKind, IndexerSpec, LatentSpec, LayerSpec, RopeSpec, SparseSpec

from polyattn_models.config import Config
from polyattn_models.layers import Reader, Stack
from polyattn_models.patterns import FULL, SLIDING, named
from polyattn_models.rotary import parameters, read_rope, with_temperature, yarn_mscale


def latent_attention(
    cfg: Config, rope: RopeSpec | None, topk: int | None = None, indexed: bool = True
) -> LayerSpec:
    """Return an MLA layer, a sparse one where `topk` is given; `indexed`: with its own indexer."""
    nope, rotated = cfg.need("qk_nope_head_dim"), cfg.need("qk_rope_head_dim")
    heads = cfg.need("num_attention_heads")
    if rope is not None and "head_dim" not in cfg.cls.fields:  # classes that have it overwrite it
        cfg.only("head_dim", rotated)
    cfg.get("head_dim")
    indexer = None
    if topk and indexed:
        index_heads, size = cfg.need("index_n_heads"), cfg.need("index_head_dim")
        indexer = IndexerSpec(num_heads=index_heads, head_size=size, budget=topk)
    return LayerSpec(
        kind=AttentionKind.SPARSE_MLA if topk else AttentionKind.MLA,
        num_heads=heads,
        head_size=nope + rotated,
        v_head_size=cfg.integer("v_head_dim") or cfg.need("hidden_size") // heads,
        scale=(nope + rotated) ** -0.5 * _magnitude(cfg),
        dtype=cfg.dtype,
        rope=rope,
        latent=LatentSpec(rank=cfg.need("kv_lora_rank"), rope_head_size=rotated),
        sparse=SparseSpec(budget=topk) if topk else None,
        indexer=indexer,
    )


def _magnitude(cfg: Config) -> float:
    """Return YaRN's correction of the scale, for queries and keys alike (`mscale_all_dim`)."""
    params: Mapping[str, object] = parameters(cfg, "full_attention", None)
    kind = params.get("rope_type") or params.get("type") or "default"
    share = params.get("mscale_all_dim")
    factor = params.get("factor")
    if kind == "default" or not isinstance(share, (int, float)) or not share:
        return 1.0
    if not isinstance(factor, (int, float)) or factor <= 0:
        raise cfg.error("rope_parameters.factor", factor, "must be a positive number")
    return yarn_mscale(factor, share) ** 2


def _pairing(cfg: Config, default: bool) -> str:
    return "gptj" if cfg.flag("rope_interleave", default) else "neox"


def deepseek(cfg: Config) -> Stack:
    """DeepSeek-V2 and V3, Kimi-K2, GLM-4.7-Flash: neighbouring elements of the rope part turn."""
    return _stack(cfg, _pairing(cfg, True))


def deepseek_v2(cfg: Config) -> Stack:
    """DeepSeek-V2, which knows no other pairing."""
    cfg.only("rope_interleave", True)
    return _stack(cfg, "gptj")


def neox_latent(cfg: Config) -> Stack:
    """MiniCPM 3: halves of the rope part turn."""
    return _stack(cfg, "neox")


def _stack(cfg: Config, pairing: str) -> Stack:
    rope = read_rope(cfg, cfg.need("qk_rope_head_dim"), pairing=pairing)
    return [latent_attention(cfg, rope)] * cfg.need("num_hidden_layers")


MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Mistral Small 4's rotation where the file has none."""


def mistral4(cfg: Config) -> Stack:
    """Mistral Small 4: the query has a temperature, and `head_dim` is that of the whole key."""
    size = cfg.need("qk_nope_head_dim") + cfg.need("qk_rope_head_dim")
    part = cfg.need("qk_rope_head_dim") / size
    cfg.only("head_dim", size)
    rotation = cfg.get("rope_scaling") or cfg.get("rope_parameters") or MISTRAL4_ROPE
    cfg.values.update(rope_parameters=rotation, rope_scaling=None, head_dim=None)
    rope = read_rope(cfg, size, pairing=_pairing(cfg, True), partial=part)
    rope = with_temperature(cfg, rope, parameters(cfg, FULL, None))
    return [latent_attention(cfg, rope)] * cfg.need("num_hidden_layers")


def deepseek_sparse(cfg: Config) -> Stack:
    """DeepSeek-V3.2: each query attends to the tokens that its indexer chose."""
    return _sparse(cfg, [True] * cfg.need("num_hidden_layers"))


def indexers(cfg: Config, count: int) -> list[bool]:
    """Return whether each layer has an indexer; others attend to the choice of the nearest before."""
    listed = cfg.items("indexer_types", str, count)
    pattern = cfg.get("index_topk_pattern")
    if listed is None and pattern is not None:
        listed = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    every = cfg.integer("index_topk_freq") or 1
    offset = cfg.get("index_skip_topk_offset", default=2)
    if type(offset) is not int:
        raise cfg.error("index_skip_topk_offset", offset, "must be an integer")
    counted = ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(count)]
    if listed is None:
        listed = counted
    elif cfg.given("index_topk_freq") and listed != counted:
        raise cfg.error("index_topk_freq", every, f"contradicts indexer_types={listed}; drop one")
    kinds = named(cfg, "indexer_types", listed, ("full", "shared"))
    if len(kinds) != count:
        raise cfg.error("indexer_types", listed, f"must have an entry for each of {count} layers")
    return [kind == "full" for kind in kinds]


def glm_sparse(cfg: Config) -> Stack:
    """GLM-5: some layers attend to the tokens that an earlier layer's indexer chose."""
    return _sparse(cfg, indexers(cfg, cfg.need("num_hidden_layers")))


def absorbed(
    cfg: Config,
    sparse: SparseSpec,
    *,
    heads: int,
    rank: int,
    nope: int,
    rope: RopeSpec | None = None,
) -> LayerSpec:
    """Return MLA over its latents: one KV head, whose value is the first part of its key.

    A layer of MLA's own kind attends to all tokens or to a choice of single ones.
    """
    turned = 0 if rope is None else rope.rotary_size
    return LayerSpec(
        kind=AttentionKind.SPARSE, num_heads=heads, num_kv_heads=1, head_size=rank + turned,
        v_head_size=rank, scale=(nope + turned) ** -0.5, dtype=cfg.dtype, sparse=sparse,
        rope=None if rope is None else dataclasses.replace(rope, last=True),
    )  # fmt: skip


DOTS3_WINDOWED = {
    "num_attention_heads": 64,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}
"""Sizes of dots3's windowed layers, which files may change under names with `swa_`."""


def dots3(cfg: Config) -> Stack:
    """dots3: DeepSeek's sparse layers, and windowed ones over latents of another size."""
    count = cfg.need("num_hidden_layers")
    dsa = cfg.flag("use_dsa", True)
    windowed = cfg.flag("use_sliding_window", True)
    whole = "indexed_attention" if dsa else FULL
    types = cfg.items("layer_types", str, count) or [
        whole if not windowed or i < 2 or i % 4 == 1 else SLIDING for i in range(count)
    ]
    if cfg.get("per_layer_config") is None or cfg.given("use_dsa"):
        types = [whole if kind in (FULL, "indexed_attention") else kind for kind in types]
    types = named(cfg, "layer_types", types, (FULL, SLIDING, "indexed_attention"))
    sizes = {name: cfg.integer(f"swa_{name}") or value for name, value in DOTS3_WINDOWED.items()}
    cfg.only("swa_num_key_value_heads", sizes["num_attention_heads"])
    cfg.integer("swa_q_lora_rank")
    turned = cfg.integer("swa_qk_rope_head_dim") or sizes["head_dim"] - sizes["qk_nope_head_dim"]
    layers, theta = [], cfg.number("rope_theta", 8e7)
    # What is stated in one place is of all layers: there `rope_theta` stands for a missing base.
    plain = cfg.get("rope_parameters") is None and not cfg.get("rope_scaling")
    near_theta = cfg.number("swa_rope_theta", 50_000.0) if plain else theta
    for index, kind in enumerate(types):
        values = cfg.layer_values(index)
        if values is None:
            values = dict(sizes, qk_rope_head_dim=turned) if kind == SLIDING else {}
        part = Config({**cfg.values, **values}, cfg.source, cfg.model_type)
        rope = _dots3_rope(part, kind, near_theta if kind == SLIDING else theta)
        if kind == SLIDING:
            cfg.only("swa_rope_theta", rope.base)
            near = SparseSpec(
                budget=cfg.integer("sliding_window") or cfg.integer("sliding_window_size") or 512,
                value_in_key=True,
                newest=True,
            )
            layers.append(absorbed(
                part, near, heads=part.need("num_attention_heads"), rank=part.need("kv_lora_rank"),
                nope=part.need("qk_nope_head_dim"), rope=rope,
            ))  # fmt: skip
        else:
            topk = part.need("index_topk") if kind != FULL else None
            layer = latent_attention(part, rope, topk)
            layers.append(layer.replace(scale=layer.head_size**-0.5))  # YaRN changes no scale
        cfg.read.update(part.read)
    return layers


def _dots3_rope(cfg: Config, kind: str, theta: float | None) -> RopeSpec:
    """Return a layer's rotation, always of the whole rope part."""
    stated = cfg.get("rope_scaling") or cfg.get("rope_parameters") or {}
    stated = stated.get(kind, stated) if isinstance(stated, Mapping) else stated
    if not isinstance(stated, Mapping):
        raise cfg.error("rope_parameters", stated, "must be a JSON object")
    plain = {name: value for name, value in stated.items() if name != "partial_rotary_factor"}
    cfg.read.update(("rope_parameters", "rope_scaling", "rope_theta"))
    own = Config(
        {**cfg.values, "rope_parameters": {kind: plain}, "rope_scaling": None},
        cfg.source,
        cfg.model_type,
    )
    return read_rope(
        own, cfg.need("qk_rope_head_dim"), layer_type=kind, theta=theta, pairing="gptj"
    )


def hy_sparse(cfg: Config) -> Stack:
    """Hunyuan 4: the first of each four layers after the first has an indexer; all have sinks."""
    count = cfg.need("num_hidden_layers")
    derived = ["full" if i == 0 or (i - 1) % 4 == 0 else "shared" for i in range(count)]
    kinds = cfg.items("indexer_types", str, count) or derived
    kinds = named(cfg, "indexer_types", kinds, ("full", "shared"))
    layers = _sparse(cfg, [kind == "full" for kind in kinds], "neox")
    return [layer.replace(learned_sinks=True) for layer in layers]


def longcat(cfg: Config) -> Stack:
    """LongCat-Flash: two attention layers in each of `num_layers`."""
    count = 2 * cfg.need("num_layers")
    cfg.only("num_hidden_layers", count)
    rope = read_rope(cfg, cfg.need("qk_rope_head_dim"), pairing="gptj")
    return [latent_attention(cfg, rope)] * count


LE_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2048.0,
    "original_max_position_embeddings": 512,
    "attention_factor": 1.0,
}
"""Mistral Large 4's rotation where the file has none."""


def mistral_large4(cfg: Config) -> Stack:
    """Mistral Large 4: learned angles, layers without positions, latents of earlier layers."""
    count, rotated = cfg.need("num_hidden_layers"), cfg.need("qk_rope_head_dim")
    every = cfg.integer("no_rope_layer_interval") or 4
    turned = cfg.items("no_rope_layers", int) or [(i + 1) % every for i in range(count)]
    sources = cfg.items("kv_source_layers", int, count) or list(range(count))
    named(cfg, "layer_types", cfg.items("layer_types", str, count) or [], ("indexed_attention",))
    if len(turned) < count:
        raise cfg.error("no_rope_layers", turned, f"must have an entry for each of {count} layers")
    rope = read_rope(cfg, rotated, pairing="gptj", default=LE_ROPE)
    rope = dataclasses.replace(rope, learned=True)
    topk, layers, owns = cfg.need("index_topk"), list[LayerSpec](), indexers(cfg, count)
    for index, own in enumerate(owns):
        layer = latent_attention(cfg, rope, topk, own)
        if not turned[index]:
            latent = LatentSpec(rank=cfg.need("kv_lora_rank"), rope_head_size=0)
            layer = layer.replace(latent=latent, rope=RopeSpec(rotary_size=0, learned=True))
        layers.append(layer.replace(kv_source=_latents_of(cfg, index, sources, turned)))
    return layers


def _latents_of(cfg: Config, index: int, sources: list[int], turned: list[int]) -> int | None:
    """Return whose latents a layer reads, None for its own: the last that are read, of its rotation."""
    source = sources[index]
    if source == index:
        return None
    alike = (i for i in range(index) if bool(turned[i]) == bool(turned[index]))
    last = [i for i in alike if sources[i] == i and i in sources[i + 1 :]]
    if source not in last[-1:]:
        raise cfg.error(
            "kv_source_layers", sources, f"has layer {index} read {source}; it can read {last[-1:]}"
        )
    return source


def _sparse(cfg: Config, indexed: list[bool], pairing: str = "gptj") -> list[LayerSpec]:
    types = cfg.items("layer_types", str, len(indexed))
    named(cfg, "layer_types", types or [], ("indexed_attention",))
    rope = read_rope(cfg, cfg.need("qk_rope_head_dim"), pairing=pairing)
    topk = cfg.need("index_topk")
    return [latent_attention(cfg, rope, topk, own) for own in indexed]


READERS: dict[str, Reader] = {
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "glm4_moe_lite", "youtu", "axk1"), deepseek),
    "deepseek_v2": deepseek_v2,
    "mistral4": mistral4,
    "minicpm3": neox_latent,
    **dict.fromkeys(("deepseek_v32", "axk2"), deepseek_sparse),
    "hy_v4": hy_sparse,
    "mistral_large4_text": mistral_large4,
    "longcat_flash": longcat,
    "glm_moe_dsa": glm_sparse,
    "dots3_note_text": dots3,
}
