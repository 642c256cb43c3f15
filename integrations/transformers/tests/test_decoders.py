"""Logits and greedy tokens of many architectures equal the models' own eager attention."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import polyattn_transformers
import pytest
import torch
import transformers
from packaging.version import Version
from polyattn.selection import running
from tiny_models import DECODERS, decoder
from transformers import PreTrainedModel

PROMPT, NEW = 11, 10
VERSION = Version(transformers.__version__)
NAMES = [name for name in DECODERS if name != "nemotron" or Version("5.14") <= VERSION]
"""Older Nemotrons take no attention but their own classes."""
PADDED = [0, 4, 9]


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    polyattn_transformers.reset()
    with torch.no_grad():
        yield


def both(model: PreTrainedModel, run: Any) -> tuple[Any, Any]:
    """Return what `run` gives under eager and under polyattn, which must have served all of it."""
    model.set_attn_implementation("eager")
    expected = run(model)
    model.set_attn_implementation("polyattn")
    found = run(model)
    report = polyattn_transformers.report()
    assert report.served and not report.fallbacks, str(report)
    return expected, found


def prompt(padded: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 96, (len(PADDED), PROMPT))
    mask = torch.ones_like(ids)
    if padded:
        for row, count in enumerate(PADDED):
            mask[row, :count], ids[row, :count] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("padded", [False, True], ids=["no padding", "left padding"])
@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, padded: bool) -> None:
    given = prompt(padded)
    expected, found = both(decoder(name), lambda model: model(**given).logits)
    real = given["attention_mask"].bool()
    error = (expected - found)[real].abs().max() / expected[real].abs().max()
    assert error <= 1e-5, float(error)


MODES: dict[str, dict[str, Any]] = {
    "no padding": {},
    "left padding": {},
    "static cache": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens(name: str, mode: str) -> None:
    if Version("5.20") > VERSION and (name, mode) == ("llama4_text", "static cache"):
        pytest.skip("transformers 5.19 itself calls create_chunked_causal_mask by a name it lacks")
    given = prompt(padded=mode != "no padding")
    options = {"max_new_tokens": NEW, "do_sample": False, "disable_compile": True} | MODES[mode]
    expected, found = both(decoder(name), lambda model: model.generate(**given, **options))
    assert len(expected[0].unique()) > 4  # no model that repeats one token proves anything
    assert expected.tolist() == found.tolist()


def test_polyattn_why_tells_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(running, "_written", {})
    model = decoder("llama")
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling = 0.1234  # no other test's, so that the group is a new one
    both(model, lambda model: model(**prompt(padded=False)))
    (process,) = running.running()
    assert "polyattn_transformers" in process.integrations
    assert [d["spec"]["scale"] for d in process.decisions] == [0.1234]
