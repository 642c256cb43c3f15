"""vLLM's CPU engine gives the same tokens on polyattn as on its own backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from engine import NEW, Engine, mended_kernels
from polyattn import PolyattnError
from tiny_checkpoints import save, save_dflash, save_head, save_with_mtp
from torch import Tensor
from vllm.model_executor.layers import utils

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama, chunked prefill": ("llama", {"max_num_batched_tokens": 24, "block_size": 32}, {}),
    "llama, fp8_e4m3 cache": ("llama", {"kv_cache_dtype": "fp8_e4m3"}, {}),
    "llama, fp8_e5m2 cache": ("llama", {"kv_cache_dtype": "fp8_e5m2"}, {}),
    "mistral": ("mistral", {}, {}),
    "gemma2": ("gemma2", {}, {}),
    "gpt_oss": ("gpt_oss", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "glm4_moe": ("glm4_moe", {}, {}),
    "bloom": ("bloom", {}, {}),
    "hrm_text": ("hrm_text", {}, {}),
    "deepseek_v3": (
        "deepseek_v3", {"max_num_batched_tokens": 256}, {"attention_backend": "CPU_MLA"},
    ),
}  # fmt: skip
"""The model, vLLM's options, and options for vLLM's own run alone.

For DeepSeek-V3 the steps of both runs are the same: vLLM's CPU engine gives it other tokens in other
batches, with its own backends too, and doesn't chunk its own prefills.
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens(case: str, folder: Path) -> None:
    name, options, own = CASES[case]
    path = save(name, folder)
    with mended_kernels(), Engine(path, own=True, **options, **own) as engine:
        expected = engine.tokens()
    with Engine(path, own=False, **options) as engine:
        found = engine.tokens()
    assert all(len(row) == NEW for row in expected) and len(set(expected[1])) > 4
    assert found == expected


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_vendors_plugin(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`examples/plugin`, which knows nothing of vLLM, named as an operator does, and its layout."""
    from polyattn_example.backend import ExampleAttention

    path, calls, run = save(name, folder), [], ExampleAttention.run
    monkeypatch.setattr(ExampleAttention, "run", lambda *args: (calls.append(name), run(*args))[1])
    with Engine(path, own=True) as engine:
        expected = engine.tokens()
    monkeypatch.setenv("POLYATTN_BACKEND", "EXAMPLE_ATTN")
    monkeypatch.setenv("POLYATTN_LAYOUT", "NHD")
    with Engine(path, own=False) as engine:
        found = engine.tokens()
    assert calls and found == expected


@pytest.mark.parametrize("layers", [2, 3], ids=["the model itself", "another"])
def test_a_draft_model(layers: int, folder: Path) -> None:
    """Every draft token of the model itself is accepted, nearly none of another's."""
    path = save("llama", folder)
    draft = save("llama", folder / f"draft-{layers}", num_hidden_layers=layers)
    speculation = {"model": str(draft), "method": "draft_model", "num_speculative_tokens": 3}
    with Engine(path, own=True) as engine:
        expected = engine.tokens()
    with Engine(path, own=False, speculative_config=speculation) as engine:
        found = engine.tokens()
    assert found == expected


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_an_eagle_head(method: str, folder: Path) -> None:
    """With a head that drafts, on vLLM's backends and on ours, tokens are those without it."""
    path, head = save("llama", folder), save_head(method, folder)
    speculates(path, {"model": str(head), "method": method, "num_speculative_tokens": 3})


def test_a_drafter_that_is_not_causal_is_refused_before_the_engine_is_up(folder: Path) -> None:
    drafter = {"model": str(save_dflash(folder)), "method": "dflash", "num_speculative_tokens": 3}
    with pytest.raises(PolyattnError, match="use_non_causal is given"):
        Engine(save("qwen3", folder), own=False, load_format="dummy", speculative_config=drafter)


def test_multi_token_prediction(folder: Path) -> None:
    path = save_with_mtp("glm4_moe", folder)
    speculates(path, {"method": "mtp", "num_speculative_tokens": 1})


def test_multi_token_prediction_over_latents(folder: Path) -> None:
    """Tokens are those of vLLM's own backends in the same steps, of one request at a time.

    On any backend, vLLM's CPU engine gives DeepSeek-V3 other tokens with drafts than without. Its AMX_MLA
    takes no weights of float32.
    """
    path, tokens = save_with_mtp("deepseek_v3", folder), []
    speculation: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 1}
    for own in (True, False):
        chosen = {"attention_backend": "CPU_MLA"} if own else {}
        drafts = speculation | chosen
        with Engine(path, own=own, speculative_config=drafts, max_num_seqs=1, **chosen) as engine:
            tokens.append(engine.tokens())
            assert engine.draft_tokens() > 0
    assert tokens[0] == tokens[1]


def speculates(path: Path, speculation: dict[str, Any]) -> None:
    """Assert that with drafts both engines give the tokens that vLLM gives without."""
    with Engine(path, own=True) as engine:
        expected = engine.tokens()
    for own in (True, False):
        with Engine(path, own=own, speculative_config=dict(speculation)) as engine:
            assert engine.tokens() == expected
            assert engine.draft_tokens() > 0


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_the_same_bits_in_any_batch(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every word's log-probability after every token, alone, beside others, and in chunks.

    vLLM's products on a CPU follow the number of rows: here a row is multiplied by itself. The kernels
    that vLLM puts in the place of torch's for this are Triton's, which its CPU build (0.32) hasn't.
    """

    def by_row(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = [weight @ row for row in x.reshape(-1, x.shape[-1])]
        out = torch.stack(rows).view(*x.shape[:-1], -1)
        return out if bias is None else out + bias

    def unpacked(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = by_row

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    batch_invariant = pytest.importorskip("vllm.model_executor.determinism.batch_invariant")
    monkeypatch.setattr(batch_invariant, "init_batch_invariance", lambda: None)
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", unpacked)
    path, order = save(name, folder), [5, 0, 7, 2, 4, 1, 6, 3]
    options: dict[str, Any] = {"max_logprobs": -1, "enable_prefix_caching": False}
    with Engine(path, own=False, **options) as engine:
        alone = engine.log_probabilities(range(8), alone=True)
        together = engine.log_probabilities(order, alone=False)
    with Engine(path, own=False, max_num_batched_tokens=24, **options) as engine:
        chunked = engine.log_probabilities(order, alone=False)
    assert len(alone[5]) == 60 - 1 + 12 and len({tuple(row) for row in alone[5]}) > 30
    expected = [alone[i] for i in order]
    assert together == expected and chunked == expected


def test_embeddings(folder: Path) -> None:
    path = save("bert", folder)
    with Engine(path, own=True, runner="pooling") as engine:
        expected = engine.embeddings()
    with Engine(path, own=False, runner="pooling") as engine:
        found = engine.embeddings()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
