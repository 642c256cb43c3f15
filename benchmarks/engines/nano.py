"""nano-vllm, its files unchanged, with its CUDA graphs: tokens, and tokens a second beside another's."""

from __future__ import annotations

import atexit
import json
import os
import sys
import tempfile
import time
from itertools import accumulate
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


def _round(
    llm: Any, prompts: list[Any], outs: list[int]
) -> tuple[float, list[Any], tuple[float, float]]:
    """Return tokens a second, the tokens, and what prefills and decodes took."""
    from nanovllm import SamplingParams

    def wanted(n: int) -> Any:
        return SamplingParams(temperature=1e-9, max_tokens=n, ignore_eos=True)

    llm.generate(prompts[:8], wanted(8), use_tqdm=False)
    spent = _timed_phases(llm.model_runner)
    torch.cuda.synchronize()
    start = time.perf_counter()
    found = llm.generate(prompts, [wanted(n) for n in outs], use_tqdm=False)
    rate = sum(outs) / (time.perf_counter() - start)
    return rate, [o["token_ids"] for o in found], (spent[True], spent[False])


def throughput(checkout: str, rounds: int = 4) -> list[dict[str, Any]]:
    """bf16, Qwen3-0.6B's shape, nano-vllm's own benchmark's lengths: tokens a second, sides in turn.

    The first round of each compiles, and counts for nothing.
    """
    ours = _install(checkout)
    sides = {"polyattn": ours}
    try:
        sides["FlashAttention-3"] = fa3.load()
    except Exception as error:
        print(f"no FlashAttention-3 here: {error}", flush=True)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        save_model(folder, QWEN3_06B, "bfloat16")
        torch.cuda.empty_cache()
        draw = torch.Generator().manual_seed(2)
        lens = torch.randint(100, 1025, (256,), generator=draw).tolist()
        outs = torch.randint(100, 1025, (256,), generator=draw).tolist()
        prompts = prompts_of(lens, 10000)
        rows: dict[str, list[float]] = {who: [] for who in sides}
        phases: dict[str, list[tuple[float, float]]] = {who: [] for who in sides}
        tokens: dict[str, Any] = {}
        for turn in range(rounds):
            for who, functions in list(sides.items())[:: -1 if turn % 2 else 1]:
                llm = engine(
                    folder, functions, max_model_len=4096, max_num_seqs=256,
                    gpu_memory_utilization=0.6,
                )  # fmt: skip
                rate, tokens[who], spent = _round(llm, prompts, outs)
                rows[who].append(rate)
                phases[who].append(spent)
                print(
                    f"  {who}: {rate:.0f} tokens/s, prefills {spent[0]:.3f} s, decodes {spent[1]:.3f} s",
                    flush=True,
                )
                atexit.unregister(llm.exit)
                llm.exit()
                del llm
                torch.cuda.empty_cache()
    found_rows: list[dict[str, Any]] = [
        {
            "what": who, "tokens/s": [round(x) for x in r], "best": max(r[1:]),
            "prefills s": min(p for p, _ in phases[who][1:]),
            "decodes s": min(d for _, d in phases[who][1:]),
        }
        for who, r in rows.items()
    ]  # fmt: skip
    if len(sides) == 2:
        mine, theirs = tokens["polyattn"], tokens["FlashAttention-3"]
        agree = [_agreed(a, b) for a, b in zip(mine, theirs, strict=True)]
        found_rows.append({
            "what": "polyattn over FlashAttention-3",
            "ratio": max(rows["polyattn"][1:]) / max(rows["FlashAttention-3"][1:]),
            "ratio of medians": median(rows["polyattn"][1:]) / median(rows["FlashAttention-3"][1:]),
            "first tokens equal, mean of a sequence": sum(agree) / len(agree),
            "first token equal": sum(n > 0 for n in agree) / len(agree),
        })  # fmt: skip
    return found_rows


@torch.inference_mode()
def decode_times(layers: int = 28) -> list[dict[str, Any]]:
    """What the decodes of one step take in a captured graph, Qwen3-0.6B's heads, lengths near 800.

    Each side's 28 calls over caches of their own, pages of 256, tables as wide as nano-vllm's.
    """
    from polyattn_flash_attn import flash_attn_2

    from engines import Captured

    sides = {"polyattn": flash_attn_2, "FlashAttention-3": fa3.load()}
    heads, kv_heads, size, width, found = 16, 8, 128, 16, []
    for rows in (1, 8, 64, 256):
        lens = torch.randint(400, 1200, (rows,), dtype=torch.int32, device="cuda")
        table = torch.randperm(rows * 5, device="cuda").int().view(rows, 5)
        table = torch.nn.functional.pad(table, (0, width - 5))
        caches = torch.randn(
            2, layers if rows < 256 else 7, rows * 5, 256, kv_heads, size, device="cuda",
            dtype=torch.bfloat16,
        )  # fmt: skip
        query = torch.randn(rows, 1, heads, size, device="cuda", dtype=torch.bfloat16)
        row: dict[str, Any] = {"what": f"{rows} rows"}
        for who, functions in sides.items():

            def step(functions: Any = functions) -> torch.Tensor:
                for layer in range(layers):
                    at = layer % caches.shape[1]  # noqa: B023
                    out: torch.Tensor = functions.flash_attn_with_kvcache(
                        query, caches[0, at], caches[1, at], cache_seqlens=lens,  # noqa: B023
                        block_table=table, causal=True,  # noqa: B023
                    )  # fmt: skip
                return out

            graph = Captured(step)
            row[f"{who} us a layer"] = min(_graph_us(graph) for _ in range(5)) / layers
        found.append(
            row | {"ratio": row["FlashAttention-3 us a layer"] / row["polyattn us a layer"]}
        )
    return found


@torch.inference_mode()
def prefill_times(layers: int = 28, steps: int = 6, tokens: int = 16384) -> list[dict[str, Any]]:
    """What a prefill step's attention takes, host and device together, each step of other lengths.

    Of whole prompts, and of prompts whose first 256 tokens the cache holds (over pages, as nano-vllm
    goes on with a prompt); `of known lengths`: each step again, so that nothing is planned.
    """
    from polyattn_flash_attn import flash_attn_2

    sides = {"polyattn": flash_attn_2}
    if torch.cuda.is_available():
        sides["FlashAttention-3"] = fa3.load()
    heads, kv_heads, size, found = 16, 8, 128, []
    for paged in (False, True):
        row: dict[str, Any] = {"what": "pages" if paged else "whole prompts"}
        for who, functions in sides.items():
            given = [
                _prefill_step(seed, tokens, paged, heads, kv_heads, size) for seed in range(steps)
            ]
            for turn in ("compiling", "", " of known lengths"):
                spent = []
                for call in (
                    given if turn else [_prefill_step(99, tokens, paged, heads, kv_heads, size)]
                ):
                    _wait()
                    start = time.perf_counter()
                    for _ in range(layers):
                        functions.flash_attn_varlen_func(**call)
                    _wait()
                    spent.append(time.perf_counter() - start)
                row[f"{who} ms a step{turn}"] = median(spent) * 1e3
            del row[f"{who} ms a stepcompiling"]
        if len(sides) == 2:
            row["ratio"] = row["FlashAttention-3 ms a step"] / row["polyattn ms a step"]
        found.append(row)
    return found


def _prefill_step(
    seed: int, tokens: int, paged: bool, heads: int, kv_heads: int, size: int
) -> dict[str, Any]:
    """Return what nano-vllm calls `flash_attn_varlen_func` with, prompts of 100 to 1,024 tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw, lens = torch.Generator().manual_seed(seed), list[int]()
    while sum(lens) < tokens:
        lens.append(min(int(torch.randint(100, 1025, (), generator=draw)), tokens - sum(lens)))
    held = 256 if paged else 0
    starts = [0, *accumulate(lens)]
    with torch.inference_mode(False):  # as nano-vllm makes them, outside of its model's run
        cu = torch.tensor(starts, dtype=torch.int32).to(device)
        cu_k = torch.tensor([at + held * i for i, at in enumerate(starts)], dtype=torch.int32)
        cu_k = cu_k.to(device)
        table = torch.arange(len(lens) * 5, dtype=torch.int32, device=device).view(-1, 5)

    def filled(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, size, device=device, dtype=torch.bfloat16)

    where = (len(lens) * 5, 256, kv_heads) if paged else (tokens, kv_heads)
    return {
        "q": filled(tokens, heads), "k": filled(*where), "v": filled(*where), "cu_seqlens_q": cu,
        "cu_seqlens_k": cu_k, "max_seqlen_q": max(lens), "max_seqlen_k": max(lens) + held,
        "softmax_scale": size**-0.5, "causal": True, "block_table": table if paged else None,
    }  # fmt: skip


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _graph_us(graph: Any, replays: int = 10) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / replays * 1e3


def _timed_phases(runner: Any) -> dict[bool, float]:
    """Have a runner's steps timed: seconds of prefills (True) and of decodes; each ends with a copy."""
    spent, run = {True: 0.0, False: 0.0}, runner.run

    def timed(seqs: Any, is_prefill: bool) -> Any:
        start = time.perf_counter()
        found = run(seqs, is_prefill)
        spent[is_prefill] += time.perf_counter() - start
        return found

    runner.run = timed
    return spent


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
