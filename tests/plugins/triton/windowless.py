"""Runs TRITON_ATTN beside the float64 reference in Triton's interpreter, about as long as a window.

A program of its own, since Triton reads TRITON_INTERPRET when it is imported. Prints each step, and
whether the layer ran without its window.
"""

from __future__ import annotations

import torch
from polyattn import Device, LayerSpec, RopeSpec
from polyattn.conformance.case import Case
from polyattn.conformance.checks.forests import _backend, _run, forest
from polyattn.conformance.harness.base import Harness
from polyattn_triton.attention import TritonAttention
from polyattn_triton.prefix import PrefixPlan

torch.set_num_threads(1)
DEVICE = Device("cpu", "x86_64", torch_device="cpu")
BASE = LayerSpec(
    num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", needs_lse=True, block_size=16
)
TURNED = RopeSpec(rotary_size=32, base=100.0, positions="cache")
WIDTH = 37
LAYERS = {
    "window": BASE.replace(sliding_window=WIDTH),
    "chunks": BASE.replace(chunk_size=WIDTH),
    "both": BASE.replace(sliding_window=WIDTH, chunk_size=50),
    "sink tokens": BASE.replace(sliding_window=WIDTH, sink_tokens=3, learned_sinks=True),
    "ALiBi, cap": BASE.replace(sliding_window=WIDTH, alibi=True, logit_soft_cap=1.5),
    "turned": BASE.replace(sliding_window=WIDTH, sink_tokens=3, rope=TURNED),
    "not causal": BASE.replace(sliding_window=WIDTH, causal=False),
    "encoder": BASE.replace(
        sliding_window=WIDTH, causal=False, role="encoder_only", block_size=None
    ),
    "captured": BASE.replace(sliding_window=WIDTH, graph_capture="uniform"),
    "bounds": BASE.replace(sliding_window=WIDTH, length_bounds=True),
    "alike": BASE.replace(sliding_window=WIDTH, batch_invariant=True),
}


def steps(longest: int, cached: bool) -> dict[str, list[tuple[int, int]]]:
    """Return steps whose longest sequence has so many keys."""
    if not cached:
        return {"encoded": [(longest, longest), (5, 5), (1, 1)]}
    return {
        "decodes": [(1, longest), (1, 0), (1, 9)],
        "prompts": [(longest, longest), (20, 20)],
        "chunk": [(30, longest), (0, 7), (1, 1)],
    }


def share(window: int) -> None:
    """Decode rows that share blocks, the longest of 115 keys."""
    spec, plan = BASE.replace(sliding_window=window), TritonAttention.plan
    plans = []

    def planned(self, *step):  # type: ignore[no-untyped-def]
        plans.append(plan(self, *step))
        return plans[-1]

    TritonAttention.plan = planned  # type: ignore[method-assign]
    forest(Case("forest", "", spec, "one run"), Harness("TRITON_ATTN", DEVICE, 7))
    TritonAttention.plan = plan  # type: ignore[method-assign]
    assert isinstance(plans[-1], PrefixPlan)
    print(f"shared, within {window}: {'none' if plans[-1].windowless else 'window'}", flush=True)


def gone(name: str) -> None:
    """Attend where the cache holds NaN at all that no query of a sequence sees."""
    spec = LAYERS[name]
    harness = Harness("TRITON_ATTN", DEVICE, 7)
    layer = harness.layer(spec)
    backend, width = _backend(layer), spec.sliding_window or 0
    for step in ([(1, 300), (1, 70)], [(4, 260), (3, 77)], [(70, 170), (5, 90), (40, 40)]):
        work = harness.step(layer, step).remembered()
        cache, table = work.held, work.batch.block_table
        for row, (queries, length) in enumerate(step):
            for key in range(spec.sink_tokens, length - queries - width + 1):
                for rows in (cache.key, cache.value):
                    rows[table[row, key // 16], key % 16] = torch.nan
        plan = backend.plan(work.batch)
        _run(work, plan, f"{name}, NaN between: ")
        print(f"{name}, NaN between, {step}: {plan.way}", flush=True)


if __name__ == "__main__":
    gone("sink tokens")
    gone("turned")
    share(115)
    share(114)
    for name, spec in LAYERS.items():
        harness = Harness("TRITON_ATTN", DEVICE, 7)
        layer = harness.layer(spec)
        for longest in (WIDTH - 1, WIDTH, WIDTH + 1, 2 * WIDTH):
            for step, lengths in steps(longest, spec.cached).items():
                work = harness.step(layer, lengths)
                work.check(f"{name}, {step} of {longest}: ")
                # The longest sequence's: a step's decodes and its prompts are planned apart.
                some = [call.plan for call in work.plan.calls]
                plan = max(some, key=lambda plan: plan.batch.max_seq_len)
                way = "none" if plan.windowless else "window"
                print(f"{name}, {step} of {longest}: {way}", flush=True)
