"""Are published configs read, with all the fields that their publishers left in them?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from polyattn.spec.decompose import group_layers
from polyattn_models import READERS, model_layers
from polyattn_models.multimodal import WRAPPERS
from tiny import CONFIG_MAPPING, tiny_values

PUBLISHED = [
    json.loads(line)
    for line in Path(__file__).with_name("published.jsonl").read_text().splitlines()
]
"""Configs of well-known models, lists of numbers and bookkeeping shortened, and their layers."""


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda model: model["name"])
def test_a_published_config(model: dict[str, Any]) -> None:
    groups = group_layers(model_layers(model["config"]).specs)
    assert [f"{len(layers)} x {spec}" for spec, layers in groups.items()] == model["layers"]


OLDER: dict[str, Any] = {
    "_name_or_path": "", "add_cross_attention": False, "chunk_size_feed_forward": 0,
    "diversity_penalty": 0.0, "do_sample": False, "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0, "id2label": {"0": "LABEL_0"}, "is_decoder": False,
    "is_encoder_decoder": False, "label2id": {"LABEL_0": 0}, "length_penalty": 1.0, "max_length": 20,
    "min_length": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1,
    "num_return_sequences": 1, "output_attentions": False, "output_hidden_states": False,
    "output_scores": False, "pruned_heads": {}, "remove_invalid_values": False,
    "repetition_penalty": 1.0, "return_dict": True, "return_dict_in_generate": False,
    "temperature": 1.0, "tf_legacy_loss": False, "tie_encoder_decoder": False, "top_k": 50,
    "top_p": 1.0, "torchscript": False, "typical_p": 1.0, "use_bfloat16": False,
}  # fmt: skip
"""What transformers 4.57.6 writes into every config that it dumps whole."""


@pytest.mark.parametrize("model_type", sorted(name for name in READERS if name in CONFIG_MAPPING))
def test_a_dump_of_transformers_4(model_type: str) -> None:
    values = {"model_type": model_type} | tiny_values(CONFIG_MAPPING[model_type])
    if model_type in WRAPPERS:
        values["text_config"] = {"model_type": "llama", "num_hidden_layers": 2}
    dumped = {
        name: {**OLDER, **value} if name in ("text_config", "vision_config") else value
        for name, value in values.items()
    }
    assert model_layers({**OLDER, **dumped}).layers == model_layers(values).layers
