"""nano-vllm, its files unchanged, on this machine's CPU: its flash_attn is polyattn's.

    git clone https://github.com/GeeeekExplorer/nano-vllm && git -C nano-vllm checkout bb823b3
    pip install xxhash tqdm
    python examples/nano_vllm.py nano-vllm

A tiny random Qwen3 answers seven prompts: two share a prefix of 256 tokens (a prefix hit), one is longer
than a step takes (chunked prefill). All greedy tokens are compared with transformers'. On a GPU,
nano-vllm needs nothing of this file but `polyattn_flash_attn.install()` before it is imported.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}  # no GPU to compile for

import polyattn_flash_attn
import torch
from tokenizers import Tokenizer, models
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

BLOCKS = 12
"""Pages of 256 tokens that nano-vllm is told to have memory for."""


class OnTheCPU(TorchFunctionMode):
    """Makes on the CPU what nano-vllm asks for on "cuda", and pins no memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.cuda:
            return args[0]
        # nano-vllm changes in place what it converted, made for 16-bit weights; these have 32.
        if func is torch.Tensor.float:
            return args[0].to(torch.float32, copy=True)
        if func is torch.Tensor.to and isinstance(args[1], torch.dtype):
            return func(*args, **kwargs, copy=True)
        return func(*args, **kwargs)


def without_gpu(block_bytes: int) -> None:
    """Replace what nano-vllm asks of CUDA and NCCL, which this machine has not."""
    cuda: Any = torch.cuda
    for name in ("set_device", "empty_cache", "reset_peak_memory_stats", "synchronize"):
        setattr(cuda, name, lambda *_: None)
    total = BLOCKS * block_bytes
    cuda.mem_get_info = lambda: (total, total)
    cuda.memory_stats = lambda: dict.fromkeys(
        ("allocated_bytes.all.peak", "allocated_bytes.all.current"), 0
    )
    set_device: Any = torch.set_default_device
    torch.set_default_device = lambda _: set_device("cpu")
    join: Any = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda _, *args, **kwargs: join("gloo", *args, **kwargs)


def save_model(folder: Path) -> Qwen3ForCausalLM:
    """Write a tiny random Qwen3 and a tokenizer that nothing is asked of."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
        dtype="float32", tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"end": 0, **{f"w{i}": i for i in range(1, 256)}}, "end"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end").save_pretrained(folder)
    return model


@torch.no_grad()
def main(checkout: str) -> int:
    """Generate with nano-vllm and with transformers. Returns how many prompts differ."""
    sys.path.insert(0, checkout)
    polyattn_flash_attn.install()
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder))
        without_gpu(block_bytes=2 * 2 * 256 * 2 * 32 * 4)
        with OnTheCPU():
            from nanovllm import LLM, SamplingParams

            shared = torch.randint(1, 256, (256,)).tolist()
            lens = (5, 31, 260, 600, 90)
            prompts = [torch.randint(1, 256, (n,)).tolist() for n in lens]
            prompts += [shared + prompts[0], shared + prompts[1]]
            llm = LLM(
                folder, enforce_eager=True, max_num_batched_tokens=512, max_model_len=1024,
                max_num_seqs=4, gpu_memory_utilization=1.0,
            )  # fmt: skip
            steps, hits = watch(llm)
            greedy = SamplingParams(temperature=1e-9, max_tokens=16, ignore_eos=True)
            found = [o["token_ids"] for o in llm.generate(prompts, greedy, use_tqdm=False)]
        differ = 0
        for prompt, tokens in zip(prompts, found, strict=True):
            whole = model.generate(
                torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
            same = whole[0, len(prompt) :].tolist() == tokens
            differ += not same
            print(f"{len(prompt):4} tokens: {'equal' if same else 'DIFFERENT'} {tokens}")
    print(f"{len(steps)} steps of up to {max(steps)} tokens, {sum(hits)} tokens of prefix hits")
    return differ


def watch(llm: Any) -> tuple[list[int], list[int]]:
    """Note the tokens of each step, and the tokens that sequences found in the cache at their start."""
    steps: list[int] = []
    hits: list[int] = []
    call, manager = llm.model_runner.call, llm.scheduler.block_manager
    allocate = manager.allocate

    def noted_call(name: str, *args: Any) -> Any:
        if name == "run":
            steps.append(sum(seq.num_scheduled_tokens for seq in args[0]))
        return call(name, *args)

    def noted_allocate(seq: Any, cached: int) -> None:
        hits.append(cached * 256)
        allocate(seq, cached)

    llm.model_runner.call, manager.allocate = noted_call, noted_allocate
    return steps, hits


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
