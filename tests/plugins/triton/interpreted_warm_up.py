"""What steps of all kinds launch was compiled when their group was built; nothing is run or compiled."""

from __future__ import annotations

import contextlib
import random
from itertools import accumulate
from typing import Any

import torch
from polyattn import Attention, Batch, BlockSparseMask, CustomMask, LayerGroup, LayerSpec, select
from polyattn_triton import attention, launch
from polyattn_triton.compiling import warm_up

SPECS: tuple[dict[str, Any], ...] = (
    {"variant": "flash_sigmoid"},
    {"variant": "relative_bias", "needs_lse": True, "learned_sinks": True},
    {"mask": "custom", "sliding_window": 100},
    {"mask": "block_sparse"},
    {"variant": "vision_local", "mask": "block_sparse", "causal": False},
)
STEPS = (
    [(1, 700)], [(1, 30), (1, 5000)], [(1, 64)] * 600, [(3, 90)], [(8, 300), (5, 80)], [(13, 400)] * 9,
    [(16, 400)] * 40,
    [(300, 300)], [(300, 300), (40, 40)], [(200, 1500), (1, 30), (2, 70)], [(256, 256)] * 40,
    [(256, 700)] * 40,
)  # fmt: skip
launched: set[Any] = set()


def record(
    self: Any, grid: Any, tensors: Any, floats: Any, free: Any, kept: Any = launch.NONE
) -> None:
    given = [(t.dtype, t.data_ptr() % 16) for t in (*tensors, *kept.tensors)]
    options = tuple(sorted(self.options.items()))
    launched.add((self.kernel, self.ints, self.constants, options, tuple(given)))


def mask_of(spec: LayerSpec, pairs: list[tuple[int, int]]) -> Any:
    queries, lens = [q for q, _ in pairs], [n for _, n in pairs]
    if spec.mask == "custom":
        return CustomMask.pack([torch.ones(q, q, dtype=torch.bool) for q in queries])
    if spec.mask == "block_sparse":
        rows = [(-(-q // 64), -(-n // 64)) for q, n in zip(queries, lens, strict=True)]
        indices = [list(range(n)) for count, n in rows for _ in range(count)]
        indptr = [0]
        for each in indices:
            indptr.append(indptr[-1] + len(each))
        return BlockSparseMask(indptr, [i for each in indices for i in each], (64, 64))
    return None


def main() -> None:
    launch.Site.__call__ = record  # type: ignore[method-assign]
    attention.compiling_only = contextlib.nullcontext  # type: ignore[assignment]
    for fields in SPECS:
        spec = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64, dtype="float32", block_size=16)
        spec = spec.replace(**fields)
        group = LayerGroup(select(spec, backend="TRITON_ATTN", verify=False))
        launched.clear()
        for phase in ("prefill", "decode"):
            backend = group.planner.chooser.chosen[phase].backend  # type: ignore[attr-defined]
            assert isinstance(backend, attention.TritonAttention)
            backend.warm_up((phase,))
        known = set(launched)
        inputs = warm_up.blank_inputs(spec.replace(mask=None), 1, torch.device("cpu"))
        sinks = torch.ones(8) if spec.learned_sinks else None
        layer = Attention(group, sinks=sinks, inputs=inputs, checks=False)
        for pairs in STEPS:
            random.Random(0).shuffle(list(pairs))
            table = torch.zeros(len(pairs), 400, dtype=torch.int32)
            queries, lens = [q for q, _ in pairs], [n for _, n in pairs]
            starts = [0, *accumulate(queries)]
            batch = Batch(starts, lens, table, None, mask=mask_of(spec, pairs))
            new = [torch.empty(starts[-1], heads, 64) for heads in (8, 2, 2)]
            launched.clear()
            layer(*new, group.allocate_cache(1), batch)
            assert launched, pairs
            late = launched - known
            assert not late, (fields, pairs[:3], [site[0].__name__ for site in late], late)
    print("none is late")


main()
