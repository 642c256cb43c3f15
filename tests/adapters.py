"""Drives an adapter by hand: plans alive side by side, run in any order, beside the reference."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from polyattn import LayerGroup, LayerSpec, select
from polyattn.families.attention import reference
from polyattn.families.attention.workload import AttentionWorkload
from polyattn.kernel import AttentionBackend, Device, Frame
from polyattn.spec.decompose import over_context
from polyattn.workload.base import workload
from polyattn.workload.compare import lse_error, output_error
from polyattn.workload.steps import Lengths

FAKES = Path(__file__).parent / "fake_libraries"
LIBRARIES = (
    "flash_attn", "flash_attn_interface", "flashinfer", "xformers", "aiter", "torch_npu",
    "vllm_xpu_kernels", "nkilib",
)  # fmt: skip
CPU = Device("cuda", "sm_90", torch_device="cpu")


def use_fakes(monkeypatch: pytest.MonkeyPatch, empty_row: float) -> None:
    """Let imports of the libraries find the fakes, for one test."""
    monkeypatch.syspath_prepend(FAKES)
    import polyattn_fakes

    monkeypatch.setattr(polyattn_fakes, "EMPTY_ROW", empty_row)
    for name in list(sys.modules):
        if name.split(".")[0] in LIBRARIES:
            monkeypatch.delitem(sys.modules, name)


def drawn(
    spec: LayerSpec, lengths: Lengths, block_size: int | None = None, seed: int = 0
) -> AttentionWorkload:
    """Draw a step of a layer, which the reference serves. Its block table is a slice of a wider one."""
    plain = spec.replace(graph_capture="none", fp8_compute=False, block_size=block_size)
    work = workload(LayerGroup(select(plain, "cpu", backend="VANILLA")), lengths, seed)
    assert isinstance(work, AttentionWorkload)
    if (table := work.batch.block_table) is not None:
        wide = torch.cat([table, torch.full_like(table, -1)], 1)
        work.batch = work.batch.with_block_table(wide[:, : table.shape[1]])
    return work.remembered()


def run(
    work: AttentionWorkload, backend: AttentionBackend, plan: Any, given: bool = True,
    context: bool = False,
) -> tuple[float, float]:  # fmt: skip
    """Run with the new keys given or in the cache alone; returns the errors.

    `context`: the plan is of a call over keys that all lie before the queries.
    """
    spec, batch, params = backend.spec, work.batch, work.layer.params
    out = torch.full((batch.num_tokens, spec.num_heads, spec.v_head_size), torch.nan)
    out = out.to(work.query.dtype)
    lse = torch.full(out.shape[:2], torch.nan) if spec.needs_lse else None
    keys = (work.key, work.value) if given or work.held is None else (None, None)
    backend.run(plan, Frame(work.query, *keys, work.held, params, out, lse))
    expected, expected_lse = work.expected
    if context:
        expected, expected_lse = reference.forward(
            over_context(spec), work.query, work.key, work.value, work.held, batch.over_context(),
            params,
        )  # fmt: skip
    return output_error(out, expected), 0.0 if lse is None else lse_error(lse, expected_lse)


PAGED: dict[str, Lengths] = {
    "decodes": [(1, 17), (1, 300), (1, 1)],
    "padding": [(1, 17), (1, 0), (1, 5)],
    "short rows": [(3, 40), (1, 9), (2, 2), (3, 3)],
    "as many tokens": [(4, 4), (4, 270)],
    "prompts": [(20, 20), (1, 1), (33, 33)],
    "chunks": [(18, 300), (0, 5), (40, 41)],
    "mixed": [(1, 30), (25, 60), (1, 0)],
}
GIVEN: dict[str, Lengths] = {
    "own lengths": [(5, 9), (0, 4), (19, 30), (1, 0)],
    "packed": [(5, 5), (1, 1), (19, 19)],
    "more queries than keys": [(20, 3), (6, 6)],
    "single tokens": [(1, 8), (1, 3), (0, 2)],
}


def check_paged(
    backend_class: type[AttentionBackend], spec: LayerSpec, block_size: int, tight: float,
    *, kinds: tuple[str, ...] = tuple(PAGED), lse_tight: float = 1e-3, given: bool = True,
) -> None:  # fmt: skip
    """Run steps over pages: all planned first, then run in another order, twice."""
    works = [drawn(spec, PAGED[kind], block_size, seed) for seed, kind in enumerate(kinds)]
    form = works[0].group.cache_format
    _check(backend_class(spec, form, CPU), works, tight, lse_tight, given)


def check_given(
    backend_class: type[AttentionBackend], spec: LayerSpec, tight: float,
    *, lse_tight: float = 1e-3,
) -> None:  # fmt: skip
    """Run steps of a layer that keeps no cache, likewise."""
    spec = spec.replace(cached=False)
    works = [drawn(spec, lengths, seed=seed) for seed, lengths in enumerate(GIVEN.values())]
    _check(backend_class(spec, None, CPU), works, tight, lse_tight, True)


def _check(
    backend: AttentionBackend, works: list[AttentionWorkload], tight: float, lse_tight: float,
    given: bool,
) -> None:  # fmt: skip
    """Run each step, and where a causal layer has an LSE, as a part over context, too."""
    spec = backend.spec
    far = spec.sliding_window or spec.alibi or spec.chunk_size
    ways = (False, True) if spec.causal and spec.needs_lse and not far else (False,)
    steps = [(work, context) for context in ways for work in works]
    plans = [backend.plan(w.batch.over_context() if context else w.batch) for w, context in steps]
    order = [*range(len(steps))[::-1], *range(len(steps))]
    for turn, at in enumerate(order):
        work, context = steps[at]
        error, wrong = run(work, backend, plans[at], given and turn % 2 == 0, context)
        assert error < tight and wrong < lse_tight, (work.lengths, context, error, wrong)
