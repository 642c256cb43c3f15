"""nano-vllm, its files unchanged, with its CUDA graphs: tokens, and tokens a second beside another's."""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from engines import fa3

QWEN3_06B: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
SMALL: dict[str, Any] = QWEN3_06B | {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip


class CopiesWhatItConverts(TorchFunctionMode):
    """nano-vllm changes in place what it converted, made for 16-bit weights: 32-bit ones are copied."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            return args[0].to(torch.float32, copy=True)
        if func is torch.Tensor.to and isinstance(args[1], torch.dtype):
            return func(*args, **kwargs, copy=True)
        return func(*args, **kwargs)


def save_model(folder: Path, sizes: dict[str, Any], dtype: str) -> Any:
    """Write a random Qwen3 and a tokenizer that nothing is asked of. Returns the model, on the GPU."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        **sizes, dtype=dtype, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    )
    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, weight.shape[1] ** -0.5 * 1.5)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"end": 0, "w": 1}, "end"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end").save_pretrained(folder)
    # What transformers writes since 5 is in rope_parameters; nano-vllm reads the older name, too.
    path = folder / "config.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written | {"rope_theta": 1e6, "dtype": dtype}))
    return model


def engine(folder: Path, functions: Any, **options: Any) -> Any:
    """Return nano-vllm's engine, attending by these functions."""
    from nanovllm import LLM
    from nanovllm.layers import attention

    attention.flash_attn_varlen_func = functions.flash_attn_varlen_func
    attention.flash_attn_with_kvcache = functions.flash_attn_with_kvcache
    return LLM(str(folder), **options)


def prompts_of(lens: list[int], vocabulary: int) -> list[list[int]]:
    """Return random prompts."""
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(1, vocabulary, (n,), generator=draw).tolist() for n in lens]


def equal_tokens(checkout: str) -> dict[str, Any]:
    """float32: all greedy tokens equal transformers', with prefix hits, chunked prefill and graphs."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    ours = _install(checkout)
    with tempfile.TemporaryDirectory() as path, torch.no_grad():
        folder = Path(path)
        model = save_model(folder, SMALL, "float32")
        prompts = prompts_of([5, 31, 260, 900, 90, 700, 12, 513], 8192)
        shared = prompts_of([512], 8192)[0]
        prompts += [shared + prompts[0], shared + prompts[1]]
        from nanovllm import SamplingParams

        replays = _counted_replays()
        with CopiesWhatItConverts():
            llm = engine(
                folder, ours, max_num_batched_tokens=768, max_model_len=2048, max_num_seqs=16,
                gpu_memory_utilization=0.3,
            )  # fmt: skip
            greedy = SamplingParams(temperature=1e-9, max_tokens=64, ignore_eos=True)
            found = [o["token_ids"] for o in llm.generate(prompts, greedy, use_tqdm=False)]
        same = 0
        for prompt, tokens in zip(prompts, found, strict=True):
            whole = model.generate(
                torch.tensor([prompt], device="cuda"), max_new_tokens=64, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            same += whole[0, len(prompt) :].tolist() == tokens
    return {
        "equal": same, "of": len(prompts), "graph replays": replays[0], "distinct tokens":
        len({t for row in found for t in row}), "right": same == len(prompts) and replays[0] > 0,
    }  # fmt: skip


class Side:
    """One of the two: its functions, and of each round the rate, phases' seconds and tokens."""

    def __init__(self, functions: Any):
        self.functions = functions
        self.rates: list[float] = []
        self.phases: list[dict[bool, float]] = []
        self.tokens: list[Any] = []

    def measured(self, folder: Path, load: Load) -> str:
        """Add a round by an engine of its own; returns what to print of it."""
        begun = time.perf_counter()
        llm = engine(
            folder, self.functions, max_model_len=4096, max_num_seqs=256, gpu_memory_utilization=0.6
        )
        try:
            llm.generate(load.others, load.wanted(4), use_tqdm=False)  # compiles, for all sizes
            ready, compiled = time.perf_counter(), _compiled()
            with _timed_phases() as spent:
                torch.cuda.synchronize()
                start = time.perf_counter()
                found = llm.generate(load.prompts, load.wanted(), use_tqdm=False)
                rate = sum(load.outs) / (time.perf_counter() - start)
        finally:
            atexit.unregister(llm.exit)
            llm.exit()
        self.rates.append(rate)
        self.phases.append(spent)
        self.tokens = [o["token_ids"] for o in found]
        return (
            f"{rate:.0f} tokens/s, prefills {spent[True]:.3f} s, decodes {spent[False]:.3f} s, "
            f"{_compiled() - compiled} graphs compiled meanwhile; ready after {ready - begun:.1f} s"
        )

    def row(self, who: str) -> dict[str, Any]:
        """Return the rates of all rounds, and the best of those that count: all but the first."""
        counted = self.phases[1:]
        row: dict[str, Any] = {"what": who, "tokens/s": [round(x) for x in self.rates]}
        if counted:
            row |= {
                "best": max(self.rates[1:]), "prefills s": min(p[True] for p in counted),
                "decodes s": min(p[False] for p in counted),
            }  # fmt: skip
        return row


class Load:
    """The requests, as nano-vllm's own benchmark draws them, and others to compile with."""

    def __init__(self, count: int = 256):
        draw = torch.Generator().manual_seed(2)
        lens, self.outs = (
            torch.randint(100, 1025, (count,), generator=draw).tolist() for _ in range(2)
        )
        both = prompts_of(lens + lens, 10000)
        self.prompts, self.others = both[:count], both[count:]

    def wanted(self, tokens: int | None = None) -> list[Any]:
        """Return what is asked of each: `tokens`, or as many as were drawn."""
        from nanovllm import SamplingParams

        return [
            SamplingParams(temperature=1e-9, max_tokens=tokens or n, ignore_eos=True)
            for n in self.outs
        ]


def throughput(checkout: str, seconds: float, rounds: int = 3) -> Iterator[dict[str, Any]]:
    """bf16, Qwen3-0.6B's shape, nano-vllm's own benchmark's lengths: tokens a second, sides in turn.

    The first round of each compiles, and counts for nothing. No engine is begun that would not end
    within `seconds`; a round that fails is a row, and those before it count.
    """
    end, took = time.monotonic() + seconds, 0.0
    sides = {"polyattn": Side(_install(checkout))}
    try:
        sides["FlashAttention-3"] = Side(fa3.load())
    except Exception as error:
        print(f"no FlashAttention-3 here: {error}", flush=True)
    with tempfile.TemporaryDirectory() as path:
        folder, load = Path(path), Load()
        save_model(folder, QWEN3_06B, "bfloat16")
        for turn in range(rounds):
            for who, side in list(sides.items())[:: -1 if turn % 2 else 1]:
                begun = time.monotonic()
                if begun + took > end:
                    print(f"  no time for round {turn} of {who}", flush=True)
                    continue
                try:
                    _free()
                    print(f"  {who}: {side.measured(folder, load)}", flush=True)
                except Exception as error:
                    traceback.print_exc()
                    said = f"{type(error).__name__}: {error}"[:200]
                    yield {"what": f"round {turn} of {who}", "failed": said}
                took = time.monotonic() - begun
            if len(sides) == 2:
                yield compared(turn, *sides.values())
    for who, side in sides.items():
        yield side.row(who)


def compared(turn: int, ours: Side, theirs: Side) -> dict[str, Any]:
    """Return the ratio of the rounds that count; of none, the first round's, so named."""
    what = f"polyattn over FlashAttention-3, rounds to {turn}"
    counted = [side.rates[1:] for side in (ours, theirs)]
    if not all(counted):
        if not (ours.rates and theirs.rates):
            return {"what": what, "failed": "a side has no round"}
        return {"what": what, "ratio, compiling": ours.rates[0] / theirs.rates[0]}
    agree = [_agreed(a, b) for a, b in zip(ours.tokens, theirs.tokens, strict=True)]
    return {
        "what": what, "ratio": max(counted[0]) / max(counted[1]),
        "ratio of medians": median(counted[0]) / median(counted[1]),
        "first tokens equal, mean of a sequence": sum(agree) / len(agree),
        "first token equal": sum(n > 0 for n in agree) / len(agree),
    }  # fmt: skip


def _free() -> None:
    """Give the device the memory of earlier engines back: nano-vllm sizes its cache by what is left.

    One that died in its making left its process group and torch's defaults as well.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.set_default_device("cpu")
    torch.set_default_dtype(torch.float32)
    gc.collect()
    torch.cuda.empty_cache()


def _compiled() -> int:
    """Return how many graphs torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@contextmanager
def _timed_phases() -> Iterator[dict[bool, float]]:
    """Have steps timed: seconds of prefills (True) and of decodes; each ends with a copy.

    The class is patched, not a runner: one that held its own method were a circle, whose cache waited
    for the collector while the next engine looked for memory.
    """
    from nanovllm.engine.model_runner import ModelRunner

    spent, run = {True: 0.0, False: 0.0}, ModelRunner.run

    def timed(runner: Any, seqs: Any, is_prefill: bool) -> Any:
        start = time.perf_counter()
        found = run(runner, seqs, is_prefill)
        spent[is_prefill] += time.perf_counter() - start
        return found

    ModelRunner.run = timed
    try:
        yield spent
    finally:
        ModelRunner.run = run


def _agreed(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def _install(checkout: str) -> Any:
    import polyattn_flash_attn

    sys.path.insert(0, checkout)
    polyattn_flash_attn.install(replace=True)
    import flash_attn
    from polyattn import LayerGroup

    made = LayerGroup.__init__

    def named(group: Any, *args: Any, **kwargs: Any) -> None:
        made(group, *args, **kwargs)
        print(f"  polyattn: {group.spec}: {group.selection.decision.summary()}", flush=True)

    LayerGroup.__init__ = named  # type: ignore[method-assign]

    return flash_attn


def _counted_replays() -> list[int]:
    """Count the replays of CUDA graphs from here on."""
    count, replay = [0], torch.cuda.CUDAGraph.replay

    def counted(graph: Any) -> None:
        count[0] += 1
        replay(graph)

    torch.cuda.CUDAGraph.replay = counted  # type: ignore[method-assign]
    return count
