"""Models of transformers that call the three libraries' functions, and how the modules are installed."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import polyattn_recurrent
import pytest
import torch
from polyattn_recurrent import causal_conv1d, gated_delta_rule, mamba1, mamba2, mamba_state
from transformers import AutoConfig

MODELS = "transformers.models"


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture
def installed() -> Iterator[None]:
    for name in CONFIGS:  # transformers' own, before a stand-in is there
        importlib.import_module(f"{MODELS}.{name}.modeling_{name}")
    roots = polyattn_recurrent.VERSIONS
    before = {n: sys.modules.pop(n) for n in list(sys.modules) if n.split(".")[0] in roots}
    polyattn_recurrent.install(replace=True)
    yield
    polyattn_recurrent.uninstall()
    sys.modules.update(before)


def fresh(name: str) -> ModuleType:
    """Import a model's file anew, and leave the one that is there."""
    path = f"{MODELS}.{name}.modeling_{name}"
    before = sys.modules.pop(path)
    try:
        return importlib.import_module(path)
    finally:
        sys.modules[path] = before


COMMON = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "eos_token_id": None,
          "bos_token_id": 1, "pad_token_id": 0}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("MambaForCausalLM", {"state_size": 8, "time_step_rank": 4}),
    "mamba2": (
        "Mamba2ForCausalLM",
        {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 8},
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {
            "num_hidden_layers": 4, "intermediate_size": 32, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_models_tokens(name: str, installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class_name, sizes = CONFIGS[name]
    config = AutoConfig.for_model(name, **{**COMMON, **sizes})
    config._attn_implementation = "eager"
    own = importlib.import_module(f"{MODELS}.{name}.modeling_{name}")
    model = getattr(own, class_name)(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 0.2)
    calls: list[str] = []
    run = importlib.import_module("polyattn.calls.recurrence").recurrence

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["kind"].value)
        return run(*args, **kwargs)

    for module in (causal_conv1d, mamba1, mamba2, gated_delta_rule):
        monkeypatch.setattr(module, "recurrence", counted)
    served = getattr(fresh(name), class_name)(config).eval()
    served.load_state_dict(model.state_dict())
    ids, mask = torch.randint(3, 96, (2, 13)), torch.ones(2, 13, dtype=torch.int64)
    mask[0, :4] = 0
    wanted = model(ids, attention_mask=mask).logits
    assert not calls, "the model was to be transformers' own"
    found = served(ids, attention_mask=mask).logits
    # Within 1e-5, or what float32 itself leaves open: how far transformers' own answer moves when each
    # weight is rounded by half a unit in its last place (4e-5 for Qwen3-Next's, whose norms amplify).
    noisy = deepcopy(model)
    for weight in noisy.parameters():
        weight.mul_(1 + (torch.rand_like(weight) - 0.5) * 2.0**-23)
    moved = (noisy(ids, attention_mask=mask).logits - wanted).abs().max() / wanted.abs().max()
    assert (found - wanted).abs().max() / wanted.abs().max() < max(1e-5, moved) and moved < 1e-4
    assert len(set(calls)) == 2, calls  # the convolution and the recurrence
    for cut in (slice(0, 13), slice(4, 13)):
        more = {"attention_mask": mask[:, cut], "max_new_tokens": 12, "do_sample": False}
        assert torch.equal(
            model.generate(ids[:, cut], **more), served.generate(ids[:, cut], **more)
        )


def test_real_packages_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match="fla is installed here"):
        polyattn_recurrent.install()
    assert "mamba_ssm" not in sys.modules


SIGNATURES = Path(__file__).parents[3] / "tests" / "signatures"


def test_signatures_are_the_recorded_ones() -> None:
    checked = set()
    for library in ("causal_conv1d", "mamba_ssm", "fla"):
        recorded = json.loads((SIGNATURES / f"{library}.json").read_text())["functions"]
        for module in (causal_conv1d, mamba2, mamba_state, gated_delta_rule):
            for function in set(module.__all__) & recorded.keys():
                parameters = inspect.signature(getattr(module, function)).parameters.values()
                names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
                assert names == recorded[function]["positional"], function
                checked.add(function)
    assert len(checked) == 6
