"""Runs transformers' own tests of attention implementations with polyattn's name in place of theirs.

    pip download --no-deps --no-binary :all: transformers==5.23.0 && tar xzf transformers-5.23.0.tar.gz
    pip install parameterized accelerate
    python integrations/transformers/tests/own_attention_tests.py transformers-5.23.0 [pytest's arguments]

The source distribution holds `tests/test_modeling_common.py`, of whose `ModelTesterMixin` all models'
tests are made; nothing of it is copied here. Its `eager_matches_sdpa_inference` (25 combinations of
dtype, padding, mask and kernels) and `flash_attn_inference_equivalence` (both sides) are run for the
models of `tiny_models.py` and for encoders, with "polyattn" wherever they ask for "sdpa" or a flash
attention. A test in which polyattn served nothing, or something fell back that isn't listed, fails.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import TestCase, mock

import polyattn_transformers
import pytest
import torch
from tiny_models import DECODERS, SIZES
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

SOURCE = "TRANSFORMERS_SOURCE"
ROWS, TOKENS = 13, 7
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"type_vocab_size": 2},
    "roberta": {"type_vocab_size": 2, "pad_token_id": 1},
    "modernbert": {"local_attention": 4, "global_attn_every_n_layers": 2},
    "electra": {"embedding_size": 64},
}
EXPECTED = ("output_attentions=True",)
"""What may fall back: the weights themselves were asked for."""


class ModelTester:
    """What the mixin asks for a model: its configuration and inputs."""

    is_training, batch_size, seq_length = False, ROWS, TOKENS

    def __init__(self, name: str):
        self.name = name

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        """Return a fresh configuration, and inputs without padding."""
        fields = {**SIZES, **({**DECODERS, **ENCODERS}[self.name])}
        if self.name in ENCODERS:
            fields["num_key_value_heads"] = 4
        ids = torch.randint(3, 96, (ROWS, TOKENS))
        return AutoConfig.for_model(self.name, **fields), {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
        }


def mixin_of(checkout: str) -> Any:
    """Return `ModelTesterMixin`; what the source distribution leaves out of it has no part in this."""
    package = ModuleType("transformers_tests")
    package.__path__ = [str(Path(checkout) / "tests")]
    sys.modules["transformers_tests"] = package
    for name, held in (
        ("exporters.test_export", "Export"),
        ("generation.test_utils", "Generation"),
    ):
        folder, _, _ = name.partition(".")
        sys.modules[f"transformers_tests.{folder}"] = ModuleType(folder)
        module = sys.modules[f"transformers_tests.{name}"] = ModuleType(name)
        setattr(module, f"{held}TesterMixin", type(f"{held}TesterMixin", (), {}))
    return importlib.import_module("transformers_tests.test_modeling_common").ModelTesterMixin


FLASH = "test_flash_attn_2_inference_equivalence"
SIDES = {"": "left", "_right_padding": "right"}
WANTED = ("test_eager_matches_sdpa_inference", FLASH)


def cases(mixin: Any) -> dict[str, type[TestCase]]:
    """Return a test class for each model, of the mixin's wanted tests alone."""
    found: dict[str, type[TestCase]] = {}
    others = [
        name
        for name in dir(mixin)
        if name.startswith("test_")
        and callable(getattr(mixin, name))
        and not name.startswith(WANTED)
    ]
    for name in (*DECODERS, *ENCODERS):
        config, _ = ModelTester(name).prepare_config_and_inputs_for_common()
        kinds = (AutoModel, AutoModelForCausalLM) if name in DECODERS else (AutoModel,)
        members: dict[str, Any] = (
            dict.fromkeys(others)
            | {
                "all_model_classes": tuple(kind._model_mapping[type(config)] for kind in kinds),
                "setUp": lambda self, n=name: setattr(self, "model_tester", ModelTester(n)),
            }
            | {f"{FLASH}{suffix}": _flash(name, side) for suffix, side in SIDES.items()}
        )
        title = f"Test_{name}"
        found[title] = type(title, (mixin, TestCase), members)
    return found


def _flash(name: str, side: str) -> Any:
    """Return the mixin's comparison with a flash attention, by our name; None where it can't be run.

    It asks for gradients without a need of them, which eager attention would serve: not here.
    """
    # The mixin's smaller heads don't fit its rotary sizes, eager's neither.
    if name == "deepseek_v3":
        return None

    def run(test: Any) -> None:
        with torch.no_grad():
            test.flash_attn_inference_equivalence(attn_implementation="polyattn", padding_side=side)

    return run


class Plugin:
    """Has models that ask for "sdpa" get "polyattn", and looks at who served."""

    def __init__(self) -> None:
        self.fallbacks: dict[str, int] = {}
        self.served = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        loaded = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

        def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("attn_implementation") == "sdpa":
                kwargs["attn_implementation"] = "polyattn"
            return loaded(cls, *args, **kwargs)

        polyattn_transformers.reset()
        with mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(from_pretrained)):
            result = yield
        report = polyattn_transformers.report()
        for name, count in report.fallbacks.items():
            self.fallbacks[name] = self.fallbacks.get(name, 0) + count
        self.served += sum(report.served.values())
        unlisted = [name for name in report.fallbacks if not name.endswith(EXPECTED)]
        assert not unlisted, unlisted
        assert report.served or report.fallbacks, "polyattn was asked nothing"
        return result

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(
            f"served {self.served}, fell back {self.fallbacks or 'nothing'}"
        )


def main(checkout: str, *args: str) -> int:
    """Run the tests and return pytest's status."""
    torch.set_num_threads(1)
    os.environ[SOURCE] = str(Path(checkout).resolve())
    options = ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", "/tmp", "-W", "ignore"]
    return int(pytest.main([*options, __file__, *args], [Plugin()]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
if SOURCE in os.environ:  # pytest imports this file for its classes
    globals().update(cases(mixin_of(os.environ[SOURCE])))
