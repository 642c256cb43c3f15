"""Writes what the installed transformers says of each type's config: fields, defaults, what is read.

Run after a newer transformers: `python integrations/models/tests/update_classes.py`. A test says when
it is stale.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polyattn_models
import transformers
from polyattn.tools.replay.model import decoder
from polyattn_models import READERS
from polyattn_models.classes import TABLE, ModelClass
from transformers import GenerationConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

PUBLISHED_AS = {
    "kimi_k2": "deepseek_v3", "mimo": "qwen2", "minimax_text_01": "minimax", "minimax_m1": "minimax",
}  # fmt: skip
"""Types whose code is their publishers' own, and the type here that they became."""
SHARED = ("cache_utils", "masking_utils", "modeling_rope_utils")
"""Modules of transformers that read the configs of all models."""
LEGACY = {
    "torch_dtype", "auto_map", "attn_implementation", "use_return_dict", "torchscript", "pruned_heads",
    "use_bfloat16", "tf_legacy_loss", "task_specific_params", "output_past", "quantization_config",
}  # fmt: skip
"""Fields of every config that older files have."""
EVERYWHERE = {"model_type", "hidden_act", "max_position_embeddings"}
SIZES = {"hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"}
"""What readers ask for wherever it matters, under whatever name."""
GENERATION = set(vars(GenerationConfig()))
BASE = {f.name for f in dataclasses.fields(PretrainedConfig)}
OTHER_THAN_ATTENTION = re.compile(
    r"""_.* | .*token.* | .*dropout.* | (?!(rms_)?norm_eps).*_eps | .*layerdrop.* | initializer_.*
    | vocab_.* | use_cache | .*intermediate_size.* | hidden_act.* | .*expert.* | .*router.* | moe_.*
    | mlp_.* | tie_.* | image_.*
    | .*_config(_dict)? | .*patch_.* | num_channels | classifier_.* | summary_.* | pixel_.* | get | set_.*
    | .*_act(_fn)? | is_gated_act | scale_decoder_outputs | gradient_checkpointing | out_.* | pooler_.*
    | mamba_(dt_(min|max|init_floor)|conv_bias|chunk_size) | first_k_dense_replace | block_ff_dim
    | (.*_)?bias | norm_(?!eps).* | layer_norm.* | residual_.* | use_mem_eff_path | time_step_rank
    | chunk_size | attn_(impl|pdrop) | final_w_init_variance_scale | use_falcon_mambapy | embedding_size
    | conv_(act|groups|kernel_size)""",
    re.VERBOSE,
)
"""Names of what surrounds attention: tokens, dropout, norms, MLPs, experts, heads, images."""


def literals(module: Any) -> set[str]:
    """Return every string in a package's source: the fields that it may ask for are among them."""
    sources = Path(str(module.__file__)).parent.glob("*.py")
    nodes = (node for path in sources for node in ast.walk(ast.parse(path.read_text())))
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


ASKED = literals(polyattn_models) | {
    f"{side}_{what}"
    for side, what in (
        ("encoder", "attention_heads"), ("decoder", "attention_heads"), ("global", "rope_theta"),
        ("local", "rope_theta"),
    )
}  # fmt: skip
"""The names that the reader asks for, those that it puts together among them."""


def fields(cls: Any) -> dict[str, Any]:
    """Return the default of each field that the reader asks for; null for what is derived."""
    out: dict[str, Any] = {}
    asked = ASKED | {own for alias, own in cls.attribute_map.items() if alias in ASKED}
    for field in dataclasses.fields(cls):
        beside = OTHER_THAN_ATTENTION.fullmatch(field.name) and not field.name.endswith(
            "hidden_act"
        )
        if field.name in BASE or field.name not in asked or beside:
            continue
        value = field.default
        if value is dataclasses.MISSING:
            factory = field.default_factory
            value = None if factory is dataclasses.MISSING else factory()
        out[field.name] = value if isinstance(value, (int, float, str, list, tuple)) else None
    return out


def of_decoder(cls: Any) -> dict[str, Any]:
    """Return the defaults of the fields that whole decoders ask for."""
    asked = literals(decoder)
    return {f.name: getattr(cls(), f.name) for f in dataclasses.fields(cls) if f.name in asked}


@functools.cache
def accesses(path: Path) -> tuple[tuple[str, Any], ...]:
    """Return each field of a config that a file reads, and the default that it states there."""
    return tuple(_accesses(path))


def _accesses(path: Path) -> Iterator[tuple[str, Any]]:
    own = "configuration" in path.name
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if _is_config(node.value, own):
                yield node.attr, None
        elif isinstance(node, ast.Call) and node.args:
            if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
                if _is_config(node.args[0], own):
                    yield from _named(node.args[1:])
            elif own and ast.unparse(node.func) in ("kwargs.pop", "kwargs.get"):
                yield from _named(node.args)


def _is_config(node: ast.expr, own: bool) -> bool:
    name = getattr(node, "id", getattr(node, "attr", ""))
    return name == "config" or name.endswith("_config") or (own and name == "self")


def _named(args: list[ast.expr]) -> Iterator[tuple[str, Any]]:
    """Yield the name, and the default after it, of a look-up by name."""
    if isinstance(args[0], ast.Constant) and isinstance(args[0].value, str):
        default = args[1] if len(args) > 1 else None
        yield args[0].value, default.value if isinstance(default, ast.Constant) else None


def reads(paths: list[Path], declared: set[str]) -> dict[str, Any]:
    """Return the undeclared fields that files read in what attention may depend on."""
    return {
        name: default
        for path in paths
        for name, default in accesses(path)
        if name not in declared | GENERATION
        and not OTHER_THAN_ATTENTION.fullmatch(name)
        and not hasattr(PretrainedConfig, name)
    }


def declared(module: Any) -> set[str]:
    """Return every field and method of the config classes of a module."""
    classes = [
        c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, PretrainedConfig)
    ]
    return {
        name
        for cls in classes
        for name in (*cls.__dict__, *cls.attribute_map, *(f.name for f in dataclasses.fields(cls)))
    }


def entry(cls: Any) -> dict[str, Any]:
    """Return what is known of a config class; what is as usual is left out."""
    configuration = Path(inspect.getfile(cls))
    same = configuration.with_name(configuration.name.replace("configuration", "modeling"))
    models = [same] if same.exists() else sorted(configuration.parent.glob("modeling_*.py"))
    aliases = {
        alias: own
        for alias, own in cls.attribute_map.items()
        if {own, alias} & ASKED and not callable(getattr(cls, own, None))
    }
    found = {
        "fields": fields(cls),
        "aliases": aliases,
        "reads": reads([*models, configuration], declared(inspect.getmodule(cls)) | SIZES),
    }
    if cls.default_theta != ModelClass.theta:
        found["theta"] = cls.default_theta
    return {name: value for name, value in found.items() if value}


def table() -> dict[str, Any]:
    """Return the table: a class for each type that transformers has, and what it reads of all."""
    types = {name: PUBLISHED_AS.get(name, name) for name in sorted(READERS)}
    classes = {n: entry(CONFIG_MAPPING[s]) for n, s in types.items() if s in CONFIG_MAPPING}
    for name in decoder.ARCHITECTURES:
        classes[name]["decoder"] = of_decoder(CONFIG_MAPPING[name])
    classes["mpt_attention"] = {"fields": fields(CONFIG_MAPPING["mpt"].sub_configs["attn_config"])}
    names = BASE | GENERATION | LEGACY
    for source in {types[name] for name in classes if name in types}:
        names |= {f.name for f in dataclasses.fields(CONFIG_MAPPING[source])}
    beside = names - {n for c in classes.values() for n in c.get("fields", ())} | EVERYWHERE
    folder = Path(transformers.__file__).parent
    shared = reads([folder / f"{name}.py" for name in SHARED], SIZES)
    return {
        "transformers": transformers.__version__, "shared": shared, "classes": classes,
        "beside": " ".join(sorted(name for name in beside - set(shared) if name[0] != "_")),
    }  # fmt: skip


def text() -> str:
    """Return the table as its file has it, a type a line."""
    return json.dumps(table(), sort_keys=True).replace('}, "', '},\n"') + "\n"


if __name__ == "__main__":
    TABLE.write_text(text())
