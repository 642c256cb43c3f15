"""vLLM's engine with graphs that hold prompts and decodes (`FULL`): tokens beside its own backends'."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from engines import serving

sys.path.insert(0, str(Path(__file__).parents[2] / "integrations" / "vllm" / "tests"))

TIE = 0.02
"""Words whose log-probabilities are nearer than this may change places by rounding."""
Answers = list[tuple[list[int], list[float]]]
"""Of each prompt: greedy tokens, and how much likelier each was than the second."""


def answers(folder: Path, side: str, dtype: str, graphs: str) -> tuple[Answers, int]:
    """Return an engine's answers, and how many of polyattn's steps a graph of any step held."""
    from engine import NEW, Engine, prompts
    from polyattn_vllm.step import Builder
    from vllm import SamplingParams

    serving.stand_in()
    held, refilled = [0], Builder._refilled

    def counted(builder: Builder, *args: Any) -> Any:
        held[0] += 1
        return refilled(builder, *args)

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
    asked = SamplingParams(
        temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=2
    )
    Builder._refilled = counted  # type: ignore[method-assign]
    try:
        with Engine(
            folder, own=side != "polyattn", dtype=dtype, max_num_batched_tokens=32, **options
        ) as one:
            held[0] = 0
            found: Answers = []
            for output in one.llm.generate(prompts(), asked, use_tqdm=False):
                words = [
                    sorted(w.logprob for w in ws.values()) for ws in output.outputs[0].logprobs
                ]
                found.append((list(output.outputs[0].token_ids), [w[-1] - w[-2] for w in words]))
    finally:
        Builder._refilled = refilled  # type: ignore[method-assign]
    return found, held[0]


def compared(model: str, dtype: str, own: str, **changed: Any) -> dict[str, Any]:
    """Compare 8 prompts of 40 tokens; the first of each that differs must have been a tie."""
    from tiny_checkpoints import save

    with tempfile.TemporaryDirectory() as path:
        folder = save(model, Path(path), **changed)
        theirs, _ = answers(folder, own, dtype, "NONE")
        ours, held = answers(folder, "polyattn", dtype, "FULL")
    equal = ties = 0
    for (tokens, gaps), (wanted, margins) in zip(ours, theirs, strict=True):
        differ = [i for i, (a, b) in enumerate(zip(tokens, wanted, strict=True)) if a != b]
        equal += not differ
        ties += bool(differ) and max(gaps[differ[0]], margins[differ[0]]) < TIE
    return {"equal": equal, "ties": ties, "of": len(ours), "steps held": held,
            "right": equal + ties == len(ours) and bool(held or not serving.GPU)}  # fmt: skip
