"""`polyattn` is each model type's own attention.

The fast tests have a sample and thirty decoders. The slow ones have all decoders, each type with a
reader of ours and one in four of the others; the sweep has all.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from typing import Any

import every_type
import pytest
import transformers
from packaging.version import Version
from polyattn_models import READERS
from polyattn_transformers.paged import VERSION
from tiny_models import DECODERS
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

READ_MASKS = ["bigbird_pegasus", "pegasus_x", "nllb-moe", "splinter", "deepseek_v4", "git"]
"""They join masks to their own or add them to scores."""
SELECT_KEYS = ["deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "mistral_large4_text"]
"""They call attention with `indices=`, fewer than the text has tokens."""
COLLECT_WEIGHTS = ["gpt2", "opt", "gpt_bigcode", "nemotron", "persimmon", "stablelm", "siglip"]
"""Attention isn't told of `output_attentions`: hooks collect the weights."""
MASKLESS = ["paligemma", "mllama"]
"""Bidirectional by name under a causal mask; cross attention without a mask."""
REFUSED = {"minimax_m3_vl": "block_indices=", "minimax_m3_vl_text": "block_indices="}
"""Layers with an indexer pass an argument that isn't served, and which the error names."""
if Version("5.18") > VERSION:
    REFUSED |= dict.fromkeys(SELECT_KEYS, "indices=")
SERVED = DECODERS.keys() - ({"nemotron"} if Version("5.14") > VERSION else set())
"""Nothing of them falls back but weights that are asked for; errors are 1e-5 at most. Nemotrons before
5.14 take no attention but their own classes."""
SAMPLE = READ_MASKS + SELECT_KEYS + COLLECT_WEIGHTS + MASKLESS


def check(model_type: str, auto: Any) -> None:
    transformers.logging.set_verbosity_error()
    try:
        model = every_type.tiny_model(model_type, auto)
    except Exception as error:
        pytest.skip(f"not built: {error}")
    cases, limit = every_type.CASES[auto], every_type.LIMIT
    if model_type in SERVED:
        cases, limit = [*cases, every_type.beams], 1e-5
    said = {case.__name__: every_type.verdict(model, case, limit) for case in cases}
    wrong = {case: what for case, what in said.items() if not what.startswith(("equal", "not run"))}
    if model_type in REFUSED:
        assert wrong and all(
            f"with {REFUSED[model_type]}, which" in what for what in wrong.values()
        )
        return
    assert not wrong
    if model_type in SERVED:
        if (model_type, Version("5.20") > VERSION) == ("llama4_text", True):
            del said["static_cache"]  # 5.19 calls create_chunked_causal_mask by a name it lacks
        assert said.pop("weights").startswith("equal: 0, ")
        assert all(re.fullmatch(r"equal: [1-9]\d*, 0", what) for what in said.values()), said
    if all(what.startswith("not run") for what in said.values()):
        pytest.skip(str(said))


def types(names: Iterable[str]) -> list[Any]:
    """Return all types of an automatic class; those that aren't in the sample are slow or sweep.

    A name's own checksum decides: a new type moves no other.
    """
    rare = {n for n in names if n not in READERS and zlib.crc32(n.encode()) % 4}
    rare -= MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    return [
        n
        if n in SAMPLE or n in SERVED
        else pytest.param(n, marks=pytest.mark.sweep if n in rare else pytest.mark.slow)
        for n in sorted(names)
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", types(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_decoder(model_type: str) -> None:
    check(model_type, AutoModelForCausalLM)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model_type", types(MODEL_MAPPING_NAMES.keys() - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys())
)
def test_every_model(model_type: str) -> None:
    """All that is no decoder: `test_every_decoder` has those with a head, in more ways."""
    check(model_type, AutoModel)
