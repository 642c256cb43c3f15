"""Which usual mistake makes a kernel's output wrong? The reference with that mistake in it tells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
from torch import Tensor

from polyattn.errors import SpecError
from polyattn.families.attention import reference
from polyattn.runtime.program import LayerParams
from polyattn.spec.layer import LayerSpec
from polyattn.workload.base import Workload
from polyattn.workload.compare import row_errors

MOST_SCORES = 1 << 19
"""Of a step whose mistake is looked for: each of some fifteen takes the reference's time again."""
Sees = Callable[[LayerSpec, int, int, int], Tensor]


def mistake_of(work: Workload, out: Tensor, limit: float) -> str:
    """Return what a step's wrong output would be right for; `""` if that is no usual mistake.

    Rows to which the mistake shows no key don't count.
    """
    spec, batch, params, expected = work.spec, work.batch, work.layer.params, work.expected[0]
    scores = spec.num_heads * sum(q * n for q, n in zip(batch.query_lens, batch.lens, strict=True))
    if scores > MOST_SCORES or out.shape != expected.shape:
        return ""
    out, wrong = out.detach().cpu().double(), row_errors(out, expected) > limit
    factor = float((out * expected).sum() / expected.square().sum())
    if factor and not bool((row_errors(out / factor, expected) > limit).any()):
        return f", {factor:.4g} times what it must be in each element"
    same, sees = torch.arange(spec.num_heads, device="cpu"), reference.visible

    def explains(mistaken: LayerSpec, order: Tensor = same, sees: Sees = sees) -> bool:
        query, key, value, _ = work.inputs
        right, lse = reference.forward(
            mistaken, query[:, order], key, value, work.held, batch, params, sees=sees
        )
        seen = (lse > -torch.inf)[:, order.argsort()]
        off = row_errors(out, right[:, order.argsort()]) > limit
        return not bool((off & seen).any()) and bool((wrong & seen).any())

    for words, changes in _of_layers(spec, params):
        with suppress(SpecError):  # no layer has that alone
            if explains(spec.replace(**changes)):
                return f" and right for {words}"
    for words, mask in _of_masks(work.held.block_size if work.held else 0):
        if explains(spec, sees=mask):
            return f" and right if {words}"
    grouped = 1 < spec.num_kv_heads < spec.num_heads and not (spec.learned_sinks or spec.alibi)
    if grouped and explains(spec, same.view(-1, spec.num_kv_heads).T.flatten()):
        return f" and right if query head h reads KV head h % {spec.num_kv_heads}"
    return ""


def _of_layers(spec: LayerSpec, params: LayerParams) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield other layers that a kernel may have computed, in words and by their fields."""
    if spec.sliding_window:
        for window in (spec.sliding_window + 1, spec.sliding_window - 1):
            yield f"sliding_window={window}", {"sliding_window": window}
    none = {"sliding_window": None, "window_right": None, "chunk_size": None, "sink_tokens": 0}
    none |= {"logit_soft_cap": None, "learned_sinks": False, "alibi": False}
    for name, value in none.items():
        if getattr(spec, name) != value:
            yield f"a layer without {name}", {name: value}
    yield f"causal={not spec.causal}", {"causal": not spec.causal}
    scales = {"1.0": 1.0, "applied twice": spec.scale**2, "times log2(e)": spec.scale / math.log(2)}
    scales["divided by log2(e)"] = spec.scale * math.log(2)
    if isinstance(params.k_scale, float):
        scales["with a k_scale of 1"] = spec.scale / params.k_scale
    for words, scale in scales.items():
        if scale != spec.scale:
            yield f"a softmax scale {words}", {"scale": scale}


def _of_masks(block_size: int) -> Iterator[tuple[str, Sees]]:
    """Yield masks that a kernel may have applied, in words."""

    def without(hides: Callable[[Tensor, int], Tensor]) -> Sees:
        def sees(spec: LayerSpec, queries: int, keys: int, first: int = 0) -> Tensor:
            hidden = hides(torch.arange(keys, device="cpu"), keys)
            return reference.visible(spec, queries, keys, first) & ~hidden

        return sees

    def top_left(spec: LayerSpec, queries: int, keys: int, first: int = 0) -> Tensor:
        whole = reference.visible(spec, max(queries, keys), max(queries, keys), first)
        return whole[:queries, :keys]

    yield "the mask is aligned to the top left", top_left
    yield "no query sees the last key", without(lambda key, keys: key == keys - 1)
    if block_size:
        yield (
            "no query sees an incomplete last block",
            without(lambda key, keys: key >= keys // block_size * block_size),
        )
