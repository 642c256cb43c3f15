"""vLLM's engine, whose graphs hold prompts and decodes, or drafts: tokens beside its own backends'."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines import serving

sys.path.insert(0, str(Path(__file__).parents[2] / "integrations" / "vllm" / "tests"))

TIE = 0.02
"""Words whose log-probabilities are nearer than this may change places by rounding."""
Answers = list[tuple[list[int], list[float]]]
"""Of each prompt: greedy tokens, and how much likelier each was than the second."""


@contextmanager
def engine(
    folder: Path, side: str, dtype: str, graphs: str, **changed: Any
) -> Iterator[tuple[Any, list[int]]]:
    """Yield an engine, and how many of polyattn's steps its graphs hold; `changed` are options."""
    from engine import Engine
    from polyattn_vllm.step import Builder

    serving.stand_in()
    methods = {name: getattr(Builder, name) for name in ("_refilled", "_replayed")}
    held = [0]

    def counted(plan: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            held[0] += 1
            return plan(*args)

        return call

    named = "CUSTOM" if side == "polyattn" else side
    options: dict[str, Any] = {}
    if serving.GPU:
        options = {
            "attention_backend": named, "enforce_eager": graphs == "NONE",
            "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30,
            "compilation_config": {
                "mode": 0, "cudagraph_mode": graphs, "max_cudagraph_capture_size": 32,
            },
        }  # fmt: skip
    for name, plan in methods.items():
        setattr(Builder, name, counted(plan))
    try:
        with Engine(
            folder, own=side != "polyattn", dtype=dtype,
            **{"max_num_batched_tokens": 32, **options, **changed},
        ) as one:  # fmt: skip
            held[0] = 0
            yield one, held
    finally:
        for name, plan in methods.items():
            setattr(Builder, name, plan)


def answers(
    folder: Path, side: str, dtype: str, graphs: str, **changed: Any
) -> tuple[Answers, dict[str, Any]]:
    """Return an engine's answers, and how many of polyattn's steps graphs held; `changed` are options.

    With drafts also how many of them the model accepted.
    """
    from engine import NEW, prompts
    from vllm import SamplingParams

    asked = SamplingParams(
        temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=2
    )
    with engine(folder, side, dtype, graphs, **changed) as (one, held):
        found: Answers = []
        for output in one.llm.generate(prompts(), asked, use_tqdm=False):
            words = [sorted(w.logprob for w in ws.values()) for ws in output.outputs[0].logprobs]
            found.append((list(output.outputs[0].token_ids), [w[-1] - w[-2] for w in words]))
        counts: dict[str, Any] = {"steps held": held[0]}
        if "speculative_config" in changed:
            counts["accepted"] = one.draft_tokens("accepted") / one.draft_tokens()
        return found, counts


def same_bits(model: str, dtype: str, side: str, **changed: Any) -> dict[str, Any]:
    """Compare all words' log-probabilities after each token of 8 prompts, alone and beside others."""
    from tiny_checkpoints import save

    order = [5, 0, 7, 2, 4, 1, 6, 3]
    options: dict[str, Any] = {"max_logprobs": -1, "enable_prefix_caching": False}
    with tempfile.TemporaryDirectory() as path:
        folder = save(model, Path(path), **changed)
        with engine(folder, side, dtype, "FULL_DECODE_ONLY", **options) as (one, held):
            alone = one.log_probabilities(order, alone=True)
            together = one.log_probabilities(order, alone=False)
    equal = sum(a == b for a, b in zip(alone, together, strict=True))
    return {"equal": equal, "of": len(order), "steps held": held[0],
            "right": equal == len(order) and bool(held[0] or side != "polyattn")}  # fmt: skip


def compared(model: str, dtype: str, own: str, drafts: str = "", **changed: Any) -> dict[str, Any]:
    """Compare 8 prompts of 40 tokens; the first of each that differs must have been a tie.

    `drafts` is a method of vLLM's, of a head or, as `draft_model`, the model itself: 3 tokens a draft,
    in graphs of 4 tokens a request. vLLM's own side drafts nothing.
    """
    from tiny_checkpoints import save, save_head

    with tempfile.TemporaryDirectory() as path:
        folder, graphs, options = save(model, Path(path), **changed), "FULL", dict[str, Any]()
        theirs, _ = answers(folder, own, dtype, "NONE")
        if drafts:
            drafter = folder if drafts == "draft_model" else save_head(drafts, Path(path))
            speculation: dict[str, Any] = {
                "model": str(drafter),
                "method": drafts,
                "num_speculative_tokens": 3,
            }
            if serving.GPU:  # vLLM chooses for a drafter's layers by itself
                speculation["attention_backend"] = "CUSTOM"
            options = {
                "speculative_config": speculation, "async_scheduling": False,
                "max_num_batched_tokens": 128,
            }  # fmt: skip
            graphs = "FULL_DECODE_ONLY"
        ours, counts = answers(folder, "polyattn", dtype, graphs, **options)
    equal = ties = 0
    for (tokens, gaps), (wanted, margins) in zip(ours, theirs, strict=True):
        differ = [i for i, (a, b) in enumerate(zip(tokens, wanted, strict=True)) if a != b]
        equal += not differ
        ties += bool(differ) and max(gaps[differ[0]], margins[differ[0]]) < TIE
    held = bool(counts["steps held"] or not serving.GPU)
    right = equal + ties == len(ours) and held
    return {"equal": equal, "ties": ties, "of": len(ours)} | counts | {"right": right}
