"""A vendor's plugin that none of the hosts knows serves in each of them, unchanged.

The plugin is `examples/plugin`. vLLM's engine takes an environment of its own:
`integrations/vllm/tests/test_engine.py` runs the plugin there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
PLUGIN = ROOT / "examples/plugin/src/polyattn_example"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Name the plugin's backend as an operator does. Yields whether each of its calls had a cache."""
    from polyattn_example.backend import ExampleAttention

    found: list[bool] = []
    run = ExampleAttention.run

    def counted(self: Any, plan: Any, frame: Any) -> None:
        found.append(frame.cache is not None)
        run(self, plan, frame)

    monkeypatch.setattr(ExampleAttention, "run", counted)
    monkeypatch.setenv("POLYATTN_BACKEND", "EXAMPLE_ATTN")
    torch.manual_seed(0)
    yield found
    assert found, "another backend ran"


def test_the_plugin_is_short() -> None:
    names = ("hooks.py", "backend.py")
    assert sum(len((PLUGIN / name).read_text().splitlines()) for name in names) <= 120


@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
@torch.no_grad()
def test_transformers(name: str, calls: list[bool]) -> None:
    transformers = pytest.importorskip("transformers")
    import polyattn_transformers

    polyattn_transformers.reset()
    sizes = {
        "vocab_size": 96, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_key_value_heads": 4 if name == "bert" else 2,
        "sliding_window": 5,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(name, **sizes)
    config._attn_implementation = "eager"
    kind = transformers.AutoModel if name == "bert" else transformers.AutoModelForCausalLM
    model = kind.from_config(config).eval().float()
    ids, mask = torch.randint(3, 96, (3, 11)), torch.ones(3, 11, dtype=torch.int64)
    mask[0, :4] = 0

    def answer() -> torch.Tensor:
        out = model(input_ids=ids, attention_mask=mask)
        rows: torch.Tensor = out[0][mask.bool()]
        return rows

    expected = answer()
    model.set_attn_implementation("polyattn")
    torch.testing.assert_close(answer(), expected, rtol=1e-5, atol=1e-5)
    report = polyattn_transformers.report()
    assert report.served and not report.fallbacks, report
    assert not any(calls)


@torch.no_grad()
def test_diffusers(calls: list[bool]) -> None:
    pytest.importorskip("diffusers")
    import polyattn_diffusers
    from diffusers import FluxTransformer2DModel
    from diffusers.models.attention_dispatch import attention_backend

    polyattn_diffusers.reset()
    model = FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 16, 4), "encoder_hidden_states": torch.randn(2, 5, 32),
        "pooled_projections": torch.randn(2, 32), "timestep": torch.tensor([0.4, 0.7]),
        "img_ids": torch.rand(16, 3), "txt_ids": torch.zeros(5, 3),
    }  # fmt: skip
    expected = model(**inputs).sample
    with attention_backend("polyattn"):
        found = model(**inputs).sample
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not any(calls)


@torch.no_grad()
def test_sglangs_layers(calls: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the backend that SGLang's registry makes, over its pools, held to the formula."""
    pytest.importorskip("polyattn_sglang")
    monkeypatch.syspath_prepend(ROOT / "integrations/sglang/tests")
    from test_sglang import Served, formula, layer

    for window in (-1, 5):
        served, asked = Served(), layer(sliding_window_size=window)
        for counts in ([5, 9], [7, 3], [1, 1], [1, 4]):
            out, queries = served.step(counts, asked)
            found = out.unflatten(1, (4, -1)).split(counts)
            for row, query in enumerate(queries[:2]):
                wanted = formula(query, served.keys[row], served.values[row], asked)
                torch.testing.assert_close(found[row].double(), wanted, rtol=1e-5, atol=1e-5)
    assert all(calls)
