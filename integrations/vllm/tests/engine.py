"""A tiny model in vLLM's own CPU engine, on vLLM's backends or on ours."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip

import polyattn_vllm
import torch
from vllm import LLM, SamplingParams, _custom_ops
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.models import registry
from vllm.plugins import load_general_plugins
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum as Names

# A process for each architecture, which imports vLLM, keeps CUDA out of this one: there is none.
registry._run_in_subprocess = lambda call: call()

LENGTHS = (3, 37, 11, 20, 1, 60, 8, 15)
NEW = 40


class Engine:
    """vLLM with its own backends, or with polyattn's; closed before the next one is made."""

    def __init__(self, path: Path, own: bool, **options: Any):
        load_general_plugins()  # once: what is registered from here on stays
        for name in ("CUSTOM", "CPU_ATTN", "CPU_MLA", "AMX_MLA"):
            if name in Names.__members__:
                Names[name].clear_override()
        if not own:
            polyattn_vllm.register()
        selector._cached_get_attn_backend.cache_clear()
        try:
            self.llm = LLM(
                str(path), **{
                    "dtype": "float32", "enforce_eager": True, "disable_log_stats": False,
                    "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 128, **options,
                },
            )  # fmt: skip
        except BaseException:  # its parallel groups would serve the next engine
            cleanup_dist_env_and_memory()
            raise
        known = self.llm.llm_engine.vllm_config.compilation_config.static_forward_context
        self.impls = [layer.impl for layer in known.values() if hasattr(layer, "impl")]
        ours = {type(impl).__module__.split(".")[0] == "polyattn_vllm" for impl in self.impls}
        assert ours == {not own}, [type(impl) for impl in self.impls]

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        del self.llm, self.impls
        gc.collect()
        cleanup_dist_env_and_memory()

    def tokens(self) -> list[list[int]]:
        """Greedy tokens after prompts of many lengths."""
        options = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate(prompts(), options, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def draft_tokens(self, kind: str = "draft") -> int:
        """Return how many tokens were drafted, or `accepted`, since the engine was made."""
        counted = {metric.name: metric for metric in self.llm.get_metrics()}
        return int(counted[f"vllm:spec_decode_num_{kind}_tokens"].value)

    def log_probabilities(self, which: Iterable[int], alone: bool) -> list[list[list[float]]]:
        """Return for each token of a prompt, and each greedy one after it, those of all words.

        Each prompt is served `alone`, or all of them together, in that order.
        """
        options = SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=-1,
            prompt_logprobs=-1,
        )  # fmt: skip
        asked = [prompts()[i] for i in which]
        outputs: list[Any] = []
        for some in [[prompt] for prompt in asked] if alone else [asked]:
            outputs += self.llm.generate(some, options, use_tqdm=False)
        return [
            [
                [word.logprob for _, word in sorted(words.items())]
                for words in [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
            ]
            for output in outputs
        ]

    def embeddings(self) -> torch.Tensor:
        """One row for each prompt."""
        return torch.tensor(
            [o.outputs.embedding for o in self.llm.embed(prompts(), use_tqdm=False)]
        )


def prompts() -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(1)
    return [
        {"prompt_token_ids": torch.randint(3, 96, (n,), generator=draw).tolist()} for n in LENGTHS
    ]


@contextlib.contextmanager
def mended_kernels() -> Iterator[None]:
    """Let vLLM's CPU kernels be an oracle, which they aren't by themselves.

    They store fp8 truncated; here, rounded to nearest, as GPUs do. Before 0.31.0 they read sinks as
    bfloat16 alone (`cpu_attn.py` casts them there); here, they are passed so in each version.
    """
    store, attend = _custom_ops.cpu_attn_reshape_and_cache, _custom_ops.cpu_attention_with_kv_cache

    def rounded(key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        kind = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.get(
            kwargs["kv_cache_dtype"]
        )
        if kind is not None:
            key, value = key.to(kind).to(key.dtype), value.to(kind).to(value.dtype)
        store(key, value, *args, **kwargs)

    def with_sinks(*args: Any, s_aux: torch.Tensor | None = None, **kwargs: Any) -> None:
        attend(*args, s_aux=None if s_aux is None else s_aux.bfloat16(), **kwargs)

    _custom_ops.cpu_attn_reshape_and_cache = rounded
    _custom_ops.cpu_attention_with_kv_cache = with_sinks
    try:
        yield
    finally:
        _custom_ops.cpu_attn_reshape_and_cache = store
        _custom_ops.cpu_attention_with_kv_cache = attend
