"""Continuous batching: requests of mixed lengths get the tokens that `generate` gives each alone."""

from __future__ import annotations

import runpy
from pathlib import Path

import polyattn_transformers
import pytest
import torch
from every_type import tiny_model
from polyattn import PolyattnError
from tiny_models import decoder
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "olmo3", "gpt_oss"])
def test_tokens_equal_generate(name: str) -> None:
    torch.set_num_threads(1)
    polyattn_transformers.reset()
    model = decoder(name)
    torch.manual_seed(2)
    prompts = [torch.randint(3, 96, (n,)).tolist() for n in (3, 37, 11, 20, 1)]
    options = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with torch.no_grad():
        expected = [
            model.generate(torch.tensor([p]), generation_config=options)[0, len(p) :].tolist()
            for p in prompts
        ]
    manager = polyattn_transformers.continuous_batching_manager(
        model, options,
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=16, num_blocks=64, max_batch_tokens=16
        ),
    )  # fmt: skip
    manager.start()
    try:
        names = [manager.add_request(p, max_new_tokens=12) for p in prompts]
        found = {}
        while len(found) < len(prompts):
            result = manager.get_result(timeout=60)
            assert result is not None, "no answer within a minute"
            if result.is_finished():
                found[result.request_id] = result.generated_tokens
    finally:
        manager.stop(block=True)
    assert [found[n] for n in names] == expected
    report = polyattn_transformers.report()
    assert report.served and not report.fallbacks, str(report)
    assert any("block 16" in spec for spec in report.served), str(report)


def test_cuda_graphs_are_refused() -> None:
    for asked in (True, (False, True)):
        config = ContinuousBatchingConfig(page_size=16, num_blocks=64, use_cuda_graph=asked)
        with pytest.raises(PolyattnError, match="use_cuda_graph"):
            polyattn_transformers.continuous_batching_manager(
                decoder("llama"), continuous_batching_config=config
            )


@pytest.mark.parametrize("model_type", ["bloom", "falcon", "mpt", "git"])
def test_models_with_attention_of_their_own_are_refused(model_type: str) -> None:
    model = tiny_model(model_type, AutoModelForCausalLM)
    before = model.config._attn_implementation
    with pytest.raises(PolyattnError, match=r"ForCausalLM doesn't pass a paged cache on"):
        polyattn_transformers.continuous_batching_manager(model)
    assert model.config._attn_implementation == before


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(Path(__file__).parents[3] / "examples/transformers_batching.py"))
    torch.set_num_threads(1)
    polyattn_transformers.reset()
    example["main"]()
    printed = capsys.readouterr().out
    assert printed.count("req_") == 6, printed
    assert "served" in printed
    assert not polyattn_transformers.report().fallbacks
