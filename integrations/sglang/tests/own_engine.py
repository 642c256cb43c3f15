"""SGLang's own engine on a CPU: are its greedy tokens those of transformers' eager attention?

    pip install torch==2.13.0+cpu transformers==5.19.0
    pip install -e core -e integrations/models -e plugins/cpu -e integrations/sglang
    pip install --no-deps sglang==0.5.23 xgrammar==0.2.7 apache-tvm-ffi==0.1.11
    pip install IPython aiohttp compressed-tensors dill easydict einops fastapi gguf interegular \
        llguidance llvmlite msgspec ninja numba openai openai-harmony==0.0.4 orjson outlines_core pillow \
        partial_json_parser prometheus-client psutil pybase64 python-multipart pyzmq requests scipy \
        sentencepiece setproctitle soundfile tiktoken timm triton uvicorn uvloop xxhash zstandard
    python integrations/sglang/tests/own_engine.py [BACKEND]    default: polyattn

Scheduler, radix cache, model runner, memory pools and models are SGLang's. Its packages of kernels
(sgl_kernel, torchvision) are stood in for by names that nothing is asked of: without AMX, SGLang's CPU
path calls torch.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
sys.path.insert(0, str(Path(__file__).parents[2] / "vllm" / "tests"))
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "llama": (1, {}),
    "qwen3": (16, {}),
    "mellum": (16, {}),
    "gemma2": (16, {"hidden_act": "gelu_pytorch_tanh"}),  # SGLang's name of what transformers has
}
"""Tokens of a page, and fields of the config. Mellum's sliding layers have a pool of their own."""
LENGTHS, SHARED, NEW = (3, 37, 11, 20, 1, 60, 8, 15), 48, 24
"""Tokens of prompts, those that one more prompt has of the longest, and new ones."""


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of kernels: modules that have every name."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return a spec for what is a package of kernels."""
        if name.partition(".")[0] in ("sgl_kernel", "torchvision"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        """Return a module that has every name."""
        return MagicMock(name=spec.name, __spec__=spec, __path__=[], __version__="99.0")

    def exec_module(self, module: Any) -> None:
        """There is nothing to run."""


sys.meta_path.insert(0, Stubs())  # SGLang's processes import this file, too


def prompts() -> list[list[int]]:
    """Return prompts of many lengths, and one that begins as another does."""
    draw = torch.Generator().manual_seed(1)
    found = [torch.randint(3, 96, (length,), generator=draw).tolist() for length in LENGTHS]
    return [*found, [*max(found, key=len)[:SHARED], 7, 8, 9]]


def expected(path: Path) -> list[list[int]]:
    """Return the greedy tokens of transformers' eager attention, a prompt at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32
    )
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    return [
        model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        for prompt in prompts()
    ]


def served(path: Path, backend: str, page: int) -> tuple[list[list[list[int]]], int]:
    """Return the tokens of two turns, and how many of the second's the radix cache had."""
    import sglang

    engine = sglang.Engine(
        model_path=str(path), device="cpu", attention_backend=backend, page_size=page,
        dtype="float32", skip_tokenizer_init=True, disable_cuda_graph=True, chunked_prefill_size=32,
        max_running_requests=8, max_total_tokens=4096, mem_fraction_static=0.5, log_level="error",
    )  # fmt: skip
    options = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    turns = [engine.generate(input_ids=prompts(), sampling_params=options) for _ in range(2)]
    engine.shutdown()
    tokens = [[output["output_ids"] for output in turn] for turn in turns]
    return tokens, sum(output["meta_info"]["cached_tokens"] for output in turns[1])


def main(backend: str = "polyattn") -> None:
    """Run all; the first difference is an AssertionError."""
    import tiny_checkpoints

    for name, (page, fields) in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = tiny_checkpoints.save(name, Path(folder), **fields)
            tokens = expected(path)
            found, cached = served(path, backend, page)
            assert found == [tokens, tokens], name
            assert cached, "the radix cache had no token of the second turn"
            print(f"{name}, {backend}, pages of {page}: equal, {cached} cached", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
