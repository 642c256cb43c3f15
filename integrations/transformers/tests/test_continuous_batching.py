"""Continuous batching: requests of mixed lengths get the tokens that `generate` gives each alone."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polyattn_transformers
import pytest
import torch
from every_type import tiny_model
from packaging.version import Version
from polyattn import LayerSpec, PolyattnError, select
from polyattn.errors import SelectionError
from polyattn_transformers import paged
from polyattn_transformers.attention import attention
from tiny_models import decoder
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig

PAGES: dict[str, Any] = {
    "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size": 16
}
"""Tokens of a page; called blocks to transformers 5.17."""


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gemma2",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3", "olmo3", "gpt_oss")),
    ],
)
def test_tokens_equal_generate(name: str) -> None:
    polyattn_transformers.reset()
    model = decoder(name)
    if Version("5.16") > paged.VERSION and "sliding_attention" in (
        getattr(model.config, "layer_types", None) or ()
    ):
        with pytest.raises(PolyattnError, match="reads a window's keys from the wrong places"):
            polyattn_transformers.continuous_batching_manager(model)
        return
    torch.manual_seed(2)
    prompts = [torch.randint(3, 96, (n,)).tolist() for n in (3, 37, 11, 20, 1)]
    options = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with torch.no_grad():
        expected = [
            model.generate(torch.tensor([p]), generation_config=options)[0, len(p) :].tolist()
            for p in prompts
        ]
    manager = polyattn_transformers.continuous_batching_manager(
        model,
        options,
        continuous_batching_config=ContinuousBatchingConfig(
            **PAGES, num_blocks=64, max_batch_tokens=16
        ),
    )
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


def tokens_of(
    model: PreTrainedModel, prompts: Sequence[list[int]], batches: Sequence[list[int]], tokens: int
) -> list[list[int]]:
    """Serve batches of prompts one after another, in steps of so many `tokens`.

    Returns each prompt's new tokens.
    """
    sampling = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = ContinuousBatchingConfig(
        **PAGES, num_blocks=256, use_async_batching=False, max_batch_tokens=tokens
    )
    manager = polyattn_transformers.continuous_batching_manager(
        model, sampling, batch_invariant="calls", continuous_batching_config=config
    )
    manager.start()
    found: dict[int, list[int]] = {}
    try:
        for batch in batches:
            names = {manager.add_request(prompts[i], max_new_tokens=8): i for i in batch}
            while not found.keys() >= {*batch}:
                result = manager.get_result(timeout=60)
                assert result is not None, "no answer within a minute"
                if result.is_finished():
                    found[names[result.request_id]] = result.generated_tokens
    finally:
        manager.stop(block=True)
    return [found[i] for i in range(len(prompts))]


def _by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every projection multiply a row by itself; skips where no backend gives the level."""

    def by_row(self: nn.Linear, rows: Tensor) -> Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        return torch.stack([self.weight @ row for row in flat]).view(*rows.shape[:-1], -1)

    try:
        select(LayerSpec(num_heads=4, head_size=16, batch_invariant="calls"), "cpu")
    except SelectionError:
        pytest.skip("no backend here gives this level")
    polyattn_transformers.reset()
    monkeypatch.setattr(nn.Linear, "forward", by_row)


def _bytes(row: Tensor) -> bytes:
    return row.detach().float().numpy().tobytes()


@pytest.mark.parametrize(
    ("count", "batchings"),
    [
        (6, 3),
        pytest.param(20, 8, marks=pytest.mark.slow),
        pytest.param(50, 20, marks=pytest.mark.sweep),
    ],
)
def test_logits_have_the_same_bits_in_any_batching(
    count: int, batchings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts alone, then in random orders and chunks of random sizes; other operators by the row."""
    _by_row(monkeypatch)
    model, logits = decoder("llama"), set[bytes]()
    model.lm_head.register_forward_hook(
        lambda module, args, out: logits.update(_bytes(row) for row in out.flatten(0, -2))
    )
    torch.manual_seed(3)
    lengths = [3, 37, 61, 20, 1, 16, *torch.randint(1, 40, (count - 6,)).tolist()]
    prompts = [torch.randint(3, 96, (n,)).tolist() for n in lengths]
    alone = tokens_of(model, prompts, [[i] for i in range(count)], 256)
    expected, sizes = set(logits), [256, 32, 13, *torch.randint(9, 200, (batchings - 3,)).tolist()]
    assert len(expected) > 6 * count
    for size in sizes:
        logits.clear()
        found = tokens_of(model, prompts, [torch.randperm(count).tolist()], size)
        assert found == alone and expected <= logits, f"in steps of {size} tokens"
    assert not polyattn_transformers.report().fallbacks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trainer_s_logits_have_the_engine_s_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sampled tokens: by a forward of whole texts without a cache, and by continuous batching."""
    _by_row(monkeypatch)
    model, logits = decoder("llama").to(dtype), set[bytes]()
    hook = model.lm_head.register_forward_hook(
        lambda module, args, out: logits.update(_bytes(row) for row in out.flatten(0, -2))
    )
    torch.manual_seed(3)
    prompts = [torch.randint(3, 96, (n,)).tolist() for n in (70, 16, 1)]
    sampled = tokens_of(model, prompts, [[2, 0, 1]], 33)
    hook.remove()
    with torch.no_grad():
        for prompt, tokens in zip(prompts, sampled, strict=True):
            rows = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            assert rows.argmax(-1).tolist() == tokens
            assert {_bytes(row) for row in rows} <= logits
        with pytest.raises(PolyattnError, match="a mask, or keys of earlier steps; pass whole seq"):
            model.generate(torch.tensor([prompts[1]]), max_new_tokens=2)
    model(torch.tensor([prompts[1]])).logits.sum().backward()
    assert "gradients" in str(polyattn_transformers.report())


def test_a_window_s_keys_that_move_are_refused_beyond_a_batch() -> None:
    with pytest.raises(PolyattnError, match="use batch_invariant='batch'"):
        paged.attend(
            SimpleNamespace(layer_idx=0, _polyattn_invariance="steps"),  # type: ignore[arg-type]
            torch.zeros(1, 2, 1, 16), *[torch.zeros(1, 2, 1, 16)] * 2, 0.25, None, None,
            {
                "cache": SimpleNamespace(
                    layer_to_allocator=[
                        SimpleNamespace(index=0, sliding_window=5)
                    ]
                ),
                "cu_seq_lens_q": torch.tensor([0, 1]),
                "cu_seq_lens_k": {"sliding_attention": torch.tensor([0, 1])},
                "read_index": [torch.zeros(0)],
                "write_index": [torch.zeros(0)],
            },
        )  # fmt: skip


def test_a_step_of_another_manager_is_refused() -> None:
    """Since transformers 5.24 its keys may be the whole cache's, which no mask tells apart."""
    layer, keys = nn.Identity(), torch.zeros(1, 2, 3, 16)
    layer.layer_idx = 0  # type: ignore[assignment]
    with pytest.raises(PolyattnError, match="begin it so"):
        attention(layer, keys, keys, keys, None, write_index=[torch.arange(3)])


def test_cuda_graphs_are_refused() -> None:
    for asked in (True, (False, True)):
        config = ContinuousBatchingConfig(**PAGES, num_blocks=64, use_cuda_graph=asked)
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


def test_mla_is_refused() -> None:
    """The cache takes `head_dim` for keys and values, which is DeepSeek-V3's rotary part."""
    with pytest.raises(PolyattnError, match=r"kv_lora_rank=32.*use its generate\(\)"):
        polyattn_transformers.continuous_batching_manager(decoder("deepseek_v3"))


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(Path(__file__).parents[3] / "examples/transformers_batching.py"))
    polyattn_transformers.reset()
    example["main"]()
    printed = capsys.readouterr().out
    assert printed.count("req_") == 6, printed
    assert "served" in printed
    assert not polyattn_transformers.report().fallbacks
