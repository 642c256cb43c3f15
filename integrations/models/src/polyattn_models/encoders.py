"""Encoders of text and images, and models of an encoder and a decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyattn import LayerSpec, Role, RopeSpec

from polyattn_models.attention import head_sizes
from polyattn_models.config import Config
from polyattn_models.layers import Missing, Reader, Stack, Towers, spec_of, unserved
from polyattn_models.patterns import FULL, SLIDING, layer_types, starting
from polyattn_models.rotary import nested_parameters, read_rope

RELATIVE_BIAS = "a learned relative position bias"
PREFIX = "a mask that is causal only beyond a prefix"
GLOBAL_TOKENS = "windows beside tokens that see, and are seen by, everything"
RANDOM_BLOCKS = "a mask of blocks that are drawn at random in each call"
ENCODER: dict[str, Any] = {"role": Role.ENCODER_ONLY, "causal": False}


def encoder(
    tower: str = "text",
    rope: Callable[[Config, int], RopeSpec | None] = lambda cfg, size: None,
    head_dim: bool = False,
) -> Callable[[Config], Towers]:
    """Return a reader of encoders; one with `is_decoder` is a causal decoder (BERT's family)."""

    def read(cfg: Config) -> Towers:
        cfg.only("position_embedding_type", "absolute")
        cfg.only("add_cross_attention", False)
        heads, _, size = head_sizes(cfg, head_dim=head_dim, kv=False)
        if "is_decoder" not in cfg.cls.fields:
            cfg.only("is_decoder", False)
        role: dict[str, Any] = {} if cfg.flag("is_decoder") else ENCODER
        spec = spec_of(cfg, heads, size, rope=rope(cfg, size), **role)
        count = cfg.need("num_hidden_layers") * (cfg.integer("inner_group_num") or 1)
        return {tower: [spec] * count}

    return read


def roformer_rope(cfg: Config, size: int) -> RopeSpec:
    """Neighbouring elements turn, with a base of 10,000."""
    cfg.only("rotary_value", False)
    return RopeSpec(pairing="gptj", rotary_size=size)


def tapas(cfg: Config) -> Towers:
    """BERT's layers; TAPAS' modules see every token with `is_decoder`, too."""
    cfg.only("is_decoder", False)
    return encoder()(cfg)


def big_bird(cfg: Config) -> Stack | Towers:
    """BERT's layers, or a mask of blocks that are drawn at random."""
    if cfg.get("attention_type") == "original_full":
        return encoder()(cfg)
    cfg.read.update(cfg.values)
    return [Missing(RANDOM_BLOCKS)] * cfg.need("num_hidden_layers")


def bigbird_pegasus(cfg: Config) -> Towers:
    """BART's layers; the encoder's mask may be of blocks that are drawn at random."""
    out = encoder_decoder(cfg)
    if cfg.get("attention_type") == "original_full":
        return out
    cfg.get("block_size", "num_random_blocks")
    return {**out, "encoder": [Missing(RANDOM_BLOCKS)] * len(out["encoder"])}


def xlm(cfg: Config) -> Stack:
    """An encoder with names of its own, or a decoder without a cache (`causal`)."""
    heads, width = cfg.need("n_heads"), cfg.need("emb_dim")
    if width % heads:
        raise cfg.error("n_heads", heads, f"doesn't divide emb_dim={width}")
    cfg.only("is_encoder", True)
    causal = cfg.flag("causal")
    role: dict[str, Any] = {} if causal else ENCODER
    return [spec_of(cfg, heads, width // heads, **role)] * cfg.need("n_layers")


def git(cfg: Config) -> Towers:
    """GIT: text that attends causally; image tokens before it see each other both ways."""
    cfg.get("num_image_with_embedding")
    heads, _, size = head_sizes(cfg, head_dim=False, kv=False)
    text = spec_of(cfg, heads, size)
    vision = encoder("vision")(cfg.part("vision_config", "git_vision_model"))
    return {"text": [text] * cfg.need("num_hidden_layers"), **vision}


def trocr(cfg: Config) -> Stack:
    """A decoder by itself: it attends to itself, then to an image's encoder."""
    return _decoder(cfg)


def esm(cfg: Config) -> Towers:
    """Protein encoders, rotated or with learned positions."""
    kind = cfg.get("position_embedding_type")
    if kind == "rotary":
        cfg.values["position_embedding_type"] = "absolute"
        base = cfg.number("rope_theta", 10000.0)
        return encoder(rope=lambda cfg, size: RopeSpec(rotary_size=size, base=base))(cfg)  # type: ignore[arg-type]
    return encoder()(cfg)


def modernbert(causal: bool) -> Reader:
    """Return the reader of ModernBERT: two of three layers see `local_attention` tokens around."""

    def read(cfg: Config) -> Stack:
        count, (heads, _, size) = cfg.need("num_hidden_layers"), head_sizes(cfg, False, False)
        types = layer_types(cfg, count, starting(3, "global_attn_every_n_layers"), (FULL, SLIDING))
        half = cfg.need("local_attention") // 2
        cfg.only("sliding_window", half)
        window = half if causal else half + 1
        role: dict[str, Any] = {} if causal else ENCODER
        return [
            spec_of(
                cfg, heads, size, sliding_window=window if kind == SLIDING else None,
                rope=_modernbert_rope(cfg, size, kind), **role,
            )
            for kind in types
        ]  # fmt: skip

    return read


def _modernbert_rope(cfg: Config, size: int, kind: str) -> RopeSpec:
    nested_parameters(cfg)
    place = "local" if kind == SLIDING else "global"
    base = cfg.number(f"{place}_rope_theta", cfg.cls.theta[place])
    return read_rope(cfg, size, layer_type=kind, theta=base)


def two_towers(causal_text: bool) -> Reader:
    """Return the reader of CLIP's family, whose towers are models by themselves."""

    def read(cfg: Config) -> Towers:
        text = cfg.part("text_config", f"{cfg.model_type}_text_model")
        vision = cfg.part("vision_config", f"{cfg.model_type}_vision_model")
        return {
            "text_model": causal_text_tower(text) if causal_text else encoder()(text)["text"],
            "vision_model": encoder("vision")(vision)["vision"],
        }

    return read


def causal_text_tower(cfg: Config) -> Stack:
    """CLIP's text tower has a causal mask."""
    heads, _, size = head_sizes(cfg, head_dim=False, kv=False)
    return [spec_of(cfg, heads, size, cached=False)] * cfg.need("num_hidden_layers")


def encoder_decoder(cfg: Config) -> Towers:
    """BART's family and Whisper: the decoder attends to itself, then to the encoder's output."""
    encoder = _side(cfg, "encoder", Role.ENCODER)
    return {"encoder": [encoder] * cfg.need("encoder_layers"), "decoder": _decoder(cfg)}


def _decoder(cfg: Config) -> Stack:
    layer = (_side(cfg, "decoder", Role.DECODER), _side(cfg, "decoder", Role.CROSS))
    return [layer] * cfg.need("decoder_layers")


def _side(cfg: Config, side: str, role: Role) -> LayerSpec:
    width, heads = cfg.need("d_model"), cfg.need(f"{side}_attention_heads")
    if width % heads:
        raise cfg.error(f"{side}_attention_heads", heads, f"doesn't divide d_model={width}")
    return spec_of(cfg, heads, width // heads, role=role, causal=role is Role.DECODER)


def t5(cfg: Config) -> Towers:
    """T5's family: self-attention has a bias of distances, cross-attention is plain; their scale is 1."""
    heads, size = cfg.need("num_heads"), cfg.need("d_kv")

    def spec(role: Role, variant: str | None) -> LayerSpec:
        causal = role is Role.DECODER
        return spec_of(cfg, heads, size, role=role, scale=1.0, causal=causal, variant=variant)

    decoder = (spec(Role.DECODER, "relative_bias"), spec(Role.CROSS, None))
    return {
        "encoder": [spec(Role.ENCODER, "relative_bias")] * cfg.need("num_layers"),
        "decoder": [decoder] * cfg.need("num_decoder_layers", "num_layers"),
    }


def biased(cfg: Config) -> Stack:
    """MPNet and DeBERTa: every layer needs a bias."""
    return [Missing(RELATIVE_BIAS)] * cfg.need("num_hidden_layers")


def ibert(cfg: Config) -> Towers:
    """I-BERT as it is trained first: its second form has a softmax of integers."""
    cfg.only("quant_mode", False)
    return encoder()(cfg)


def mvp(cfg: Config) -> Towers:
    """MVP, whose prompts are keys and values beside the text's."""
    cfg.only("use_prompt", False)
    return encoder_decoder(cfg)


READERS: dict[str, Reader] = {
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "albert",
         "xlm-roberta-xl", "roberta-prelayernorm", "data2vec-text", "siglip_text_model", "ernie",
         "bert-generation", "megatron-bert", "rembert", "roc_bert", "xmod"),
        encoder(),
    ),
    "ibert": ibert,
    "roformer": encoder(rope=roformer_rope),
    "tapas": tapas,
    "big_bird": big_bird,
    **dict.fromkeys(("xlm", "flaubert"), xlm),
    "git": git,
    "trocr": trocr,
    **dict.fromkeys(
        ("vit", "deit", "dinov2", "clip_vision_model", "siglip_vision_model", "idefics3_vision",
         "smolvlm_vision"),
        encoder("vision"),
    ),
    **dict.fromkeys(
        ("nomic_bert", "gte", "jina_embeddings_v3"),
        encoder(rope=lambda cfg, size: read_rope(cfg, size), head_dim=True),
    ),
    "esm": esm,
    "modernbert": modernbert(causal=False),
    "modernbert-decoder": modernbert(causal=True),
    "clip": two_towers(causal_text=True),
    "clip_text_model": causal_text_tower,
    "siglip": two_towers(causal_text=False),
    **dict.fromkeys(
        ("bart", "mbart", "whisper", "marian", "pegasus", "m2m_100", "blenderbot",
         "blenderbot-small", "plbart", "nllb-moe"),
        encoder_decoder,
    ),
    "mvp": mvp,
    "bigbird_pegasus": bigbird_pegasus,
    **dict.fromkeys(("longformer", "led", "pegasus_x"), unserved(GLOBAL_TOKENS)),
    "longt5": unserved("local blocks beside summaries of all blocks"),
    "fnet": unserved("Fourier transforms in place of attention"),
    "nystromformer": unserved("attention over landmarks of queries and keys"),
    **dict.fromkeys(("yoso", "mra"), unserved("attention that samples or approximates its weights")),
    "funnel": unserved("queries that are pooled from layer to layer"),
    "convbert": unserved("a convolution of spans beside attention"),
    "perceiver": unserved("latents that attend to the whole input"),
    "prophetnet": unserved("streams of n-grams with a relative position bias"),
    **dict.fromkeys(("t5", "mt5", "umt5"), t5),
    **dict.fromkeys(("mpnet", "deberta", "deberta-v2"), biased),
}  # fmt: skip
