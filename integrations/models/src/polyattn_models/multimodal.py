"""Models of text and images: each tower is read as the model that it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from polyattn import Role
from polyattn.errors import ConfigError

from polyattn_models import by_type, decoders, encoders, gpt, hybrids, mla, sparse
from polyattn_models.attention import Decoder, head_sizes, optional_window, rotary
from polyattn_models.config import Config
from polyattn_models.layers import Missing, Reader, Stack, Towers, spec_of, towers_of, unserved

OTHER_AXES = "a rotary embedding whose pairs follow other axes than sections name"
CONVOLVED = "convolutions of keys and values before attention"
DRAFTS = "the keys of another model, for which it drafts"
TWO_DIMENSIONS = "a rotary embedding over rows and columns"
QWEN_VL = Decoder(
    types=decoders.qwen2_types,
    listed=True,
    window=optional_window,
    rope=rotary(sections=(16, 24, 24)),
)

QWEN3_VL = Decoder(rope=rotary(sections=(24, 20, 20), interleaved=True))
GLM_SECTIONS = (8, 12, 12)


def glm4v(cfg: Config) -> Stack:
    """GLM-4.1V: a head is what the width leaves for it."""
    cfg.only("head_dim", cfg.need("hidden_size") // cfg.need("num_attention_heads"))
    rope = rotary(pairing="gptj", partial=1.0, sections=GLM_SECTIONS)
    return Decoder(head_dim=False, rope=rope)(cfg)


TEXT_PARTS = ("text_config", "llm_config", "language_config")
WRAPPERS = (
    "audioflamingo3", "aya_vision", "blip-2", "cohere2_vision", "cosmos3_omni", "deepseek_vl",
    "deepseek_vl_hybrid", "exaone4_5", "fast_vlm", "florence2", "fun_asr_nano", "glmasr", "got_ocr2",
    "granite_speech", "granite_speech_plus", "hyperclovax_vision_v2", "idefics2", "instructblip",
    "instructblipvideo", "internvl", "janus", "kimi_k25", "lfm2_vl", "lfm3_vl", "lighton_ocr",
    "llava_next_video", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "moss_transcribe_diarize",
    "musicflamingo", "nemo_speechlm", "nemotron_h_omni", "ovis2", "perception_lm", "pp_chart2table",
    "qianfan_ocr", "qwen2_audio", "qwen3_asr", "shieldgemma2", "vibevoice", "vibevoice_asr",
    "video_llama_3", "video_llava", "vipllava", "voxtral",
)  # fmt: skip
"""Types whose text is a model of the type that `text_config` names, with that model's own masks."""


def text_part(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the text tower's own fields, where a config has them apart."""
    parts = (values.get(name) for name in TEXT_PARTS)
    return next((part for part in parts if isinstance(part, Mapping)), None)


def towers(text_type: str, vision_type: str = "") -> Callable[[Config], Towers]:
    """Return the reader of a text tower and, where it is known, a vision tower."""

    def read(cfg: Config) -> Towers:
        text = _text_part(cfg, text_type)
        read = towers_of(tower_reader(text)(text))
        out: Towers = {"text": [layer for stack in read.values() for layer in stack]}
        if cfg.get("vision_config") is not None or vision_type:
            out["vision"] = _vision(cfg.part("vision_config", vision_type))
        if cfg.get("audio_config") is not None:
            out["audio"] = [Missing("audio towers")]
        return out

    return read


def _text_part(cfg: Config, text_type: str) -> Config:
    """Return the text tower: `text_config`, or in older files the model's own fields."""
    if cfg.get(*TEXT_PARTS) is not None or "num_hidden_layers" not in cfg.values:
        return cfg.part("text_config", text_type, TEXT_PARTS[1:])
    own = {
        name: value
        for name, value in cfg.values.items()
        if name not in cfg.cls.fields and name != "model_type"
    }
    cfg.read.update(own)
    text = Config(own, cfg.source, text_type)
    cfg.parts.append(text)
    return text


def tower_reader(part: Config) -> Reader:
    """Return the reader of a tower's own type. Raises `ConfigError`."""
    reader = TOWERS.get(part.model_type)
    if reader is None:
        raise ConfigError(
            f"{part.source}: model_type={part.model_type!r} is no tower that is known"
        )
    return reader


def _vision(part: Config) -> Stack:
    """Return the layers of a vision tower, one that isn't known as such."""
    if part.model_type not in TOWERS:
        for name in part.values:
            part.get(name)
        kind = f" of type {part.model_type!r}" if part.model_type else ""
        return [Missing(f"vision towers{kind}")]
    return next(iter(towers_of(TOWERS[part.model_type](part)).values()))


def two_dimensional(cfg: Config) -> Towers:
    """Vision towers whose patches are rotated by row and column."""
    for name in cfg.values:
        cfg.get(name)
    missing = [TWO_DIMENSIONS]
    if cfg.get("window_size") is not None:
        missing.append("attention within windows of an image")
    count = cfg.need("num_hidden_layers", "depth")
    return {"vision": [tuple(Missing(what) for what in missing)] * count}


def mllama_text(cfg: Config) -> Stack:
    """Llama 3.2 Vision: some layers attend to the image instead of the text."""
    crosses = cfg.items("cross_attention_layers", int) or [3, 8, 13, 18, 23, 28, 33, 38]
    heads, kv_heads, size = head_sizes(cfg, head_dim=False)
    self_attention = Decoder(head_dim=False).layer(cfg, 0)
    cross = spec_of(cfg, heads, size, num_kv_heads=kv_heads, role=Role.CROSS, causal=False)
    count = cfg.need("num_hidden_layers")
    return [cross if i in crosses else self_attention for i in range(count)]


def mllama_vision(cfg: Config) -> Towers:
    """A local and a global encoder, one after the other."""
    heads, _, size = head_sizes(cfg, head_dim=False, kv=False)
    spec = spec_of(cfg, heads, size, **encoders.ENCODER)
    return {"vision": [spec] * (cfg.need("num_hidden_layers") + cfg.need("num_global_layers"))}


def paligemma(cfg: Config) -> Towers:
    """PaliGemma: the image and the prompt see each other both ways, the answer causally."""
    text = _text_part(cfg, "gemma")
    text.get("use_bidirectional_attention")
    return {
        "text": [Missing(encoders.PREFIX)] * text.need("num_hidden_layers"),
        "vision": _vision(cfg.part("vision_config", "siglip_vision_model")),
    }


def minimax_m3_vl(cfg: Config) -> Towers:
    """MiniMax-M3, whose merged patches have a width of their own."""
    cfg.get("merged_hidden_size")
    return towers("minimax_m3_vl_text", "minimax_m3_vl_vision")(cfg)


def hrm_text(cfg: Config) -> Stack:
    """HRM: two stacks that run in cycles, each run with keys of its own."""
    runs = cfg.need("H_cycles") * (cfg.need("L_cycles") + 1)
    each, count = cfg.integer("num_layers_per_stack"), cfg.need("num_hidden_layers")
    count = count * runs if each is None else each * runs
    if each is not None:
        cfg.only("num_hidden_layers", count)
    if cfg.flag("prefix_lm", True):
        return [Missing(encoders.PREFIX)] * count
    return [Decoder(kv_heads=False).layer(cfg, 0)] * count


def gemma3(cfg: Config) -> Towers:
    """Gemma 3: text that attends causally; image tokens among it see each other both ways."""
    return towers("gemma3_text", "siglip_vision_model")(cfg)


TOWERS: dict[str, Reader] = {
    **decoders.READERS,
    **by_type.READERS,
    **sparse.READERS,
    **gpt.READERS,
    **hybrids.READERS,
    **mla.READERS,
    **encoders.READERS,
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"), QWEN_VL),
    **dict.fromkeys(
        ("qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_omni_moe_text", "cosmos3_edge_text"), QWEN3_VL
    ),
    "glm4v_text": glm4v,
    "glm_ocr_text": Decoder(rope=rotary(pairing="gptj", partial=1.0, sections=GLM_SECTIONS)),
    "glm4v_moe_text": Decoder(rope=rotary(partial=0.5, sections=GLM_SECTIONS)),
    "paddleocr_vl_text": Decoder(rope=rotary(sections=(16, 24, 24))),
    "ernie4_5_vl_moe_text": unserved(OTHER_AXES),
    "hunyuan_vl_text": unserved(OTHER_AXES),
    "unlimited_ocr_text": unserved("a window beside a prompt that every token sees"),
    "diffusion_gemma_text": unserved("a canvas whose tokens see each other both ways"),
    **dict.fromkeys(
        ("pixtral", "qwen2_vl_vision", "qwen2_5_vl_vision", "qwen3_vl_vision", "qwen3_vl_moe_vision",
         "llama4_vision_model", "qwen3_5_vision", "qwen3_5_moe_vision"),
        two_dimensional,
    ),
    **dict.fromkeys(("inkling_text", "inkling2_text"), unserved(CONVOLVED, encoders.RELATIVE_BIAS)),
    "zaya": unserved(CONVOLVED),
    "blt": unserved("towers of bytes and of patches that attend to each other"),
    "hrm_text": hrm_text,
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), unserved(DRAFTS)),
    "mllama_text_model": mllama_text,
    "mllama_vision_model": mllama_vision,
}  # fmt: skip

_OWN_TEXT = """aria cohere_compass cosmos3_edge deepseek_ocr2 diffusion_gemma ernie4_5_vl_moe glm4v
glm4v_moe glm_ocr granite4_vision granite_docling hunyuan_vl inkling2 molmo2
muse_glimmer muse_spark paddleocr_vl unlimited_ocr voxtral_realtime"""
NAMED = {
    "glm46v": "glm4v_text",
    "glmga": "glm4v_text",
    "inkling_mm_model": "inkling_text",
    "qwen2_5_omni_thinker": "qwen2_5_omni_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text",
    **{name: f"{name}_text" for name in _OWN_TEXT.split()},
}
"""Types with towers, and the type of their text where `text_config` names none."""


def thinker(model_type: str) -> Reader:
    """Return the reader of a model that thinks in text; its speech is another model's."""
    return lambda cfg: towers(NAMED[model_type])(cfg.part("thinker_config", model_type))


READERS: dict[str, Reader] = {
    **TOWERS,
    **dict.fromkeys(WRAPPERS, towers("")),
    **dict.fromkeys(
        ("llava", "llava_next", "llava_onevision"), towers("llama", "clip_vision_model")
    ),
    "paligemma": paligemma,
    "mistral3": towers("mistral", "pixtral"),
    "idefics3": towers("llama", "idefics3_vision"),
    "smolvlm": towers("llama", "smolvlm_vision"),
    "gemma3": gemma3,
    "gemma3n": towers("gemma3n_text"),
    "gemma4": towers("gemma4_text", "gemma4_vision"),
    "gemma4_unified": towers("gemma4_unified_text", "gemma4_unified_vision"),
    "minimax_m3_vl": minimax_m3_vl,
    "mistral_large4": towers("mistral_large4_text"),
    "glm5_next": towers("glm5_next_text", "glm5_next_vision"),
    "dots3_note": towers("dots3_note_text", "dots3_note_vision_encoder"),
    "step3p7": towers("step3p5", "step3p5_vision"),
    "qwen4_exp": towers("qwen4_exp_text", "qwen4_exp_vision"),
    "emu3": towers("emu3_text_model"),
    "fuyu": towers("persimmon"),
    **{name: towers(text) for name, text in NAMED.items()},
    "qwen2_5_omni": thinker("qwen2_5_omni_thinker"),
    "qwen3_omni_moe": thinker("qwen3_omni_moe_thinker"),
    "llama4": towers("llama4_text", "llama4_vision_model"),
    "mllama": towers("mllama_text_model", "mllama_vision_model"),
    "qwen2_vl": towers("qwen2_vl_text", "qwen2_vl_vision"),
    "qwen2_5_vl": towers("qwen2_5_vl_text", "qwen2_5_vl_vision"),
    "qwen3_vl": towers("qwen3_vl_text", "qwen3_vl_vision"),
    "qwen3_vl_moe": towers("qwen3_vl_moe_text", "qwen3_vl_moe_vision"),
    "qwen3_5": towers("qwen3_5_text", "qwen3_5_vision"),
    "qwen3_5_moe": towers("qwen3_5_moe_text", "qwen3_5_moe_vision"),
}
