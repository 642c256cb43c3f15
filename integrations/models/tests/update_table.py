"""Writes docs/models.md: which models are read, and what says that they are read rightly.

python integrations/models/tests/update_table.py
"""

from __future__ import annotations

from pathlib import Path

import transformers
from polyattn_models import READERS, ModelLayers, model_layers
from polyattn_models.multimodal import WRAPPERS
from test_against_transformers import BY_ATTRIBUTES, BY_THEIR_TOWERS, PUBLISHERS_CODE
from tiny import CONFIG_MAPPING, tiny_values

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
MODELS: dict[str, tuple[str, ...]] = {
    "Llama 1 to 3": ("llama",), "Llama 4": ("llama4", "llama4_text", "llama4_vision_model"),
    "Llama 3.2 Vision": ("mllama", "mllama_text_model", "mllama_vision_model"),
    "Mistral": ("mistral", "ministral3"), "Mixtral": ("mixtral",), "Qwen2, Qwen2.5": ("qwen2",),
    "Qwen2-MoE": ("qwen2_moe",), "Qwen3": ("qwen3",), "Qwen3-MoE": ("qwen3_moe",),
    "Qwen3-Next": ("qwen3_next",), "Gemma 1": ("gemma",), "Gemma 2": ("gemma2",),
    "Gemma 3": ("gemma3", "gemma3_text"), "Gemma 3n": ("gemma3n", "gemma3n_text"),
    "Phi-1, 1.5, 2": ("phi",), "Phi-3, Phi-4": ("phi3",), "Phi-3.5-MoE": ("phimoe",),
    "Granite": ("granite", "granitemoe", "granitemoeshared"),
    "Granite-4 hybrid": ("granitemoehybrid",), "Command-R": ("cohere",),
    "Command-R7B": ("cohere2",), "OLMo 1": ("olmo",), "OLMo 2": ("olmo2",), "OLMo 3": ("olmo3",),
    "OLMoE": ("olmoe",), "SmolLM3": ("smollm3",), "Exaone-4": ("exaone4",), "GLM-4": ("glm", "glm4"),
    "GLM-4.5": ("glm4_moe",), "DeepSeek-V2": ("deepseek_v2",), "DeepSeek-V3, R1": ("deepseek_v3",),
    "DeepSeek-V3.2": ("deepseek_v32",), "Kimi-K2": ("kimi_k2",), "Kimi-Linear": ("kimi_linear",),
    "MiniMax": ("minimax", "minimax_text_01", "minimax_m1", "minimax_m2"), "gpt-oss": ("gpt_oss",),
    "Falcon": ("falcon",), "Falcon-H1": ("falcon_h1",), "Falcon-Mamba": ("falcon_mamba",),
    "Mamba 1": ("mamba",), "Mamba 2": ("mamba2",), "Bamba": ("bamba",), "Jamba": ("jamba",),
    "Zamba": ("zamba",), "Zamba2": ("zamba2",), "Nemotron-H": ("nemotron_h",),
    "RecurrentGemma": ("recurrent_gemma",),
    "RWKV-5": ("rwkv5",), "RWKV-6": ("rwkv6",), "RWKV-7": ("rwkv7",),
    "LFM2": ("lfm2", "lfm2_moe"), "GPT-2": ("gpt2",), "GPT-J": ("gptj",),
    "GPT-NeoX": ("gpt_neox",), "GPT-Neo": ("gpt_neo",), "GPT-BigCode": ("gpt_bigcode",),
    "StarCoder2": ("starcoder2",), "OPT": ("opt",), "BLOOM": ("bloom",), "MPT": ("mpt",),
    "StableLM": ("stablelm",), "T5": ("t5", "mt5", "umt5"), "BART": ("bart",),
    "Whisper": ("whisper",), "BERT": ("bert",), "RoBERTa": ("roberta",),
    "ModernBERT": ("modernbert", "modernbert-decoder"), "ViT": ("vit",),
    "CLIP": ("clip", "clip_text_model", "clip_vision_model"),
    "SigLIP": ("siglip", "siglip_text_model", "siglip_vision_model"),
    "LLaVA": ("llava", "llava_next", "llava_onevision"),
    "Qwen2-VL": ("qwen2_vl", "qwen2_vl_text", "qwen2_vl_vision"),
    "Qwen2.5-VL": ("qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_vl_vision"),
    "Qwen3-VL": ("qwen3_vl", "qwen3_vl_text", "qwen3_vl_vision", "qwen3_vl_moe"),
    "Qwen2.5-Omni": ("qwen2_5_omni", "qwen2_5_omni_thinker", "qwen2_5_omni_text"),
    "Qwen3-Omni": ("qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_omni_moe_text"),
    "GLM-4.1V": ("glm4v", "glm4v_text"), "GLM-4.5V": ("glm4v_moe", "glm4v_moe_text"),
    "Mistral Small 4": ("mistral4",), "Molmo 2": ("molmo2", "molmo2_text"),
    "xLSTM": ("xlstm",),
}  # fmt: skip
REFUSED = "refused by name"
HEAD = """# Which models are read

`polyattn-models` (`integrations/models`) reads a `config.json`. Core finds it by an entry point in the
group polyattn.models. A config becomes layers by its `model_type`. The reader knows {count} types. For
{refused} of them polyattn serves no layer, and the reader says what the layers need. The reader
refuses any other type, and names the type that it resembles.

The column "read" says how the reading is proven:

- "equal": a tiny model of the type, built by transformers {version}, computes what the specs say, field
  by field (`integrations/models/tests/test_against_transformers.py`)
- "by towers": each tower has a type of its own, and is compared as that type
- "by attributes": the attributes of its modules are compared, because they call no attention interface
- "published code": transformers has no such type. The fields follow the publisher's code, and nothing
  checks them

"Not served" names what the layers need and polyattn lacks. The refusal has the same words.
Files of mamba_ssm, which have no `model_type`, are read as `mamba` or `mamba2`.

## Fields that the reader doesn't know

A field is harmless unless code reads it. A table, generated from the sources of transformers {version},
lists the fields that each type's modelling and configuration files read. It also lists the fields that
caches, masks and rotations read for every type.

- The reader ignores a field that neither it nor this code reads.
- It refuses a field that this code reads and it doesn't understand, unless the field has its default.
- It refuses any unknown field of a type that it reads as another one (`assume`), or that transformers
  has no code for.

`ignore` names fields that don't affect attention. `strict=False` warns instead of refusing. Commands
take `--assume` and `--ignore`.

## Dtypes and caches

A config without `dtype` (in older files `torch_dtype`) is read as bfloat16.

If a checkpoint stores scales for an e4m3 cache (`kv_cache_scheme`, `kv_cache_quant_algo`, Quark's
`kv_cache_group`), its layers have `kv_cache_dtype="fp8_e4m3"`. ModelOpt's NVFP4 gives `"nvfp4"`, and a
`kv_cache_scheme` of 8-bit integers `"int8"`. `"auto"` means that scheme, else the model's dtype. vLLM's
`int8_per_token_head` and `fp8_per_token_head` are `int8_rows` and `e4m3_rows` here.
`polyattn_models.cache_scales(folder)` reads the scales, and `polyattn run --weights` uses them. The
reader refuses any other scheme unless `kv_cache_dtype` names a dtype. A layer that reads another layer's
keys (Gemma 3n) has that layer's index as `LayerSpec.kv_source`.

## Your own type

A package adds a type by an entry point in the group polyattn.readers, whose name is the `model_type`:

```python
# my_models.py; in pyproject.toml: [project.entry-points."polyattn.readers"] my_type = "my_models:read"
from polyattn import LayerSpec


def read(cfg):
    heads, size = cfg.need("num_attention_heads"), cfg.need("head_dim")
    full = LayerSpec(num_heads=heads, head_size=size, dtype=cfg.dtype)
    near = full.replace(sliding_window=cfg.need("sliding_window"))
    return [full if i % 4 == 3 else near for i in range(cfg.need("num_hidden_layers"))]
```

A layer of several parts is a tuple of them, and a model of several towers a dict of such lists.
`cfg.need` returns a positive integer. `cfg.integer`, `cfg.number`, `cfg.flag` and `cfg.items` return
optional values. `cfg.only` refuses all values but some. You can't replace the types in the table below.

`pytest -m sweep integrations/models/tests/test_against_transformers.py` renames, drops, changes and
adds fields for each type that can be compared. It passes if the reader either refuses the config or
returns what the modules compute. On 2026-11-22, with transformers 5.23.0, the 156 types of that day
passed in three runs on three machines.

## All types

Search for your `model_type`. `python integrations/models/tests/update_table.py` writes the table. Where
the bundled configs come from is in `polyattn/data/README.md`.

| layers | read | not served | `model_type` |
| --- | --- | --- | --- |
"""


def proof(name: str) -> str:
    """Return what says that a type is read rightly."""
    if name in PUBLISHERS_CODE:
        return "published code"
    if name in BY_THEIR_TOWERS:
        return "by towers"
    return "by attributes" if name in BY_ATTRIBUTES else "equal"


def read(name: str) -> ModelLayers:
    """Return the layers of a small model of the type."""
    values: dict[str, object] = {"num_hidden_layers": 4}
    if name in ("rwkv5", "rwkv6", "rwkv7"):
        values["hidden_size"] = 256
    if name in WRAPPERS:
        values = {"text_config": {"model_type": "llama", "num_hidden_layers": 4}}
    elif name in CONFIG_MAPPING:
        values = tiny_values(CONFIG_MAPPING[name])
    return model_layers({"model_type": name} | values)


def rows() -> dict[tuple[str, str, str], list[str]]:
    """Return the types by what is told of them: the layers, the proof, and what isn't served."""
    known_as = {name: model for model, kinds in MODELS.items() for name in kinds}
    table: dict[tuple[str, str, str], list[str]] = {}
    for name in sorted(READERS):
        layers = read(name).layers
        served = sorted({spec.kind.value for layer in layers for spec in layer.specs})
        lacks = sorted({what for layer in layers for what in layer.missing})
        told = ", ".join(served) or "none", proof(name) if served else REFUSED, "; ".join(lacks)
        model = f" ({known_as[name]})" if name in known_as else ""
        table.setdefault(told, []).append(f"`{name}`{model}")
    return table


def page() -> str:
    """Return the page."""
    table = rows()
    refused = sum(len(names) for (_, how, _), names in table.items() if how == REFUSED)
    head = HEAD.format(count=len(READERS), refused=refused, version=transformers.__version__)
    lines = (
        f"| {' | '.join(told)} | {', '.join(names)} |" for told, names in sorted(table.items())
    )
    return head + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
