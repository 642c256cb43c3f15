"""Does the reader understand every field of a config? It refuses one that only other code reads.

`config_classes.json` lists which code reads which field. It is generated from transformers' sources.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from polyattn.errors import ConfigError, nearest, shown

from polyattn_models.classes import beside, has_class, shared_reads
from polyattn_models.config import Config

log = logging.getLogger("polyattn")

NEUTRAL: tuple[Any, ...] = (False, "", [], {})
BY_OTHERS = dict.fromkeys((
    "alibi", "attn_logit_softcapping", "cla_share_factor", "dual_chunk_attention_config", "index_topk",
    "kv_lora_rank", "kv_source_layers", "no_rope_layers", "num_kv_heads", "num_kv_shared_layers",
    "num_shared_kv_layers", "query_pre_attn_scalar", "use_bidirectional_attention", "use_cla", "use_nope",
))  # fmt: skip
"""Fields that change attention wherever engines or publishers' code read them."""
QWEN3_5 = {"attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32"}
BOOKKEEPING = frozenset({"tokenizer_class"})
"""Fields beside transformers' own that don't affect layers, in anybody's code."""
PUBLISHED: dict[str, dict[str, Any]] = {
    "hunyuan_v1_dense": {"cla_share_factor": 2},  # without use_cla, no layer reads it
    "hunyuan_v1_moe": {"cla_share_factor": 2},
    "qwen3_moe": {"use_qk_norm": True},
    "minimax_m2": {"use_qk_norm": True, "qk_norm_type": "per_layer"},
    "glm_moe_dsa": {"rope_interleave": True, "indexer_rope_interleave": True},
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5,
}
"""Fields that a type's publisher reads and transformers doesn't, and the value that the type computes."""


def check_fields(
    cfg: Config, assumed: bool, ignore: Collection[str] = (), strict: bool = True
) -> None:
    """Refuse the fields that other code reads and the reader didn't; warn of them if not `strict`."""
    unread = {name: cfg.values[name] for name in _unread(cfg, assumed) if name not in ignore}
    if unread:
        kind = cfg.model_type or "this model"
        said = ", ".join(f"{name}={shown(value, 60)}" for name, value in unread.items())
        if strict:
            raise ConfigError(
                f"{cfg.source}: {said} isn't understood for model_type={kind!r} and may change its "
                f"attention; if it doesn't, pass ignore={tuple(unread)!r} ("
                + " ".join(f"--ignore {name}" for name in unread)
                + ")"
                + (f" (read as {kind!r}, as assume= names it)" if assumed else "")
            )
        log.warning("%s: %s isn't understood for model_type=%r: ignored", cfg.source, said, kind)
    for part in cfg.parts:
        check_fields(part, assumed, ignore, strict)


def warn_of_absent(values: Mapping[str, Any], ignore: Collection[str], source: str) -> None:
    """Warn of the names in `ignore` that no part of a config has."""
    there: set[str] = set()
    parts: list[Mapping[str, Any]] = [values]
    while parts:
        part = parts.pop()
        there.update(part)
        parts += [value for value in part.values() if isinstance(value, Mapping)]
    for name in ignore:
        if name not in there:
            log.warning("ignore=%r: %s has no such field%s", name, source, nearest(name, there))


def _unread(cfg: Config, assumed: bool) -> Iterator[str]:
    """Yield the fields that other code reads and the reader didn't."""
    published = PUBLISHED.get(cfg.model_type, {})
    reads = {**BY_OTHERS, **shared_reads(), **cfg.cls.reads}
    foreign = assumed or not has_class(cfg.model_type)  # code that isn't known here
    for name, value in cfg.values.items():
        if name in cfg.read or value is None:
            continue
        if name in published:
            if value != published[name]:
                yield name
        elif name in cfg.cls.fields or name in BOOKKEEPING or name.startswith("_"):
            continue
        elif name in reads:
            if value != reads[name] and (reads[name] or value not in NEUTRAL):
                yield name
        elif value not in NEUTRAL and name not in beside() and (foreign or _misspelt(name, cfg)):
            yield name


def _misspelt(name: str, cfg: Config) -> bool:
    """Return whether a name is nearly that of a field that the reader misses."""
    missing = [field for field in cfg.read if field not in cfg.values and field not in name]
    return bool(difflib.get_close_matches(name, missing, 1, 0.9))
