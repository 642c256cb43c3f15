"""Steps over an e4m3 cache that Hopper's own prefill serves by 16-bit copies: for `h200_fp8.py`.

Each beside the portable kernel over the very same cache, and beside a bf16 cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from polyattn import LayerSpec, select
from polyattn.families.attention import reference
from polyattn.kernel import LayerParams
from polyattn.tools.cli.benching import full_step
from polyattn.workload.compare import output_error
from polyattn.workload.tolerance import tolerance_of

HEADS = ((16, 2), (32, 8))
TIMED: dict[str, tuple[list[int], list[int]]] = {
    "8 x 2048 fresh": ([2048] * 8, [2048] * 8),
    "1 x 16384 fresh": ([16384], [16384]),
    "4 x 512 after 4096": ([512] * 4, [4608] * 4),
    "1 x 2048 after 30k": ([2048], [32768]),
}
RAGGED = ([1021, 37, 517], [1021, 900, 4003])
"""Lengths that end within a page: what lies behind is NaN."""
SAMPLES = 8
"""Query tokens of a sequence that are computed in float64."""
WINDOW = 1000
NAN = 0x7F
"""e4m3's."""


class Widened:
    """One layer over one step's cache in e4m3, of which all that no query sees is NaN."""

    def __init__(
        self, device: torch.device, heads: tuple[int, int], queries: list[int], lens: list[int],
        **changes: Any,
    ):  # fmt: skip
        spec = LayerSpec(
            num_heads=heads[0], num_kv_heads=heads[1], head_size=128, block_size=16,
            kv_cache_dtype="fp8", **changes,
        )  # fmt: skip
        self.spec, self.device, self.lens = spec, device, (queries, lens)
        self.step = full_step(self._selected(spec), list(zip(queries, lens, strict=True)))
        (call,) = self.step.plan.calls
        self.backend, self.plan, self.cache = call.backend, call.plan, call.view(self.step.cache)
        self.portable = self.backend.plan_rows(self.plan.batch, portable=True)
        self.params = LayerParams(k_scale=0.5, v_scale=0.25)
        self._poison()
        wide = spec.replace(kv_cache_dtype="auto", qkv_dtype="auto")
        self.wide = full_step(self._selected(wide), list(zip(queries, lens, strict=True)))

    def _selected(self, spec: LayerSpec) -> Any:
        return select(spec, self.device, backend="TRITON_ATTN", verify=False)

    def _poison(self) -> None:
        """Leave numbers where some query sees them, NaN in all other slots."""
        batch, size = self.plan.batch, self.cache.block_size
        for stored in (self.cache.key, self.cache.value):
            bits = stored.view(torch.uint8)
            unused = torch.ones(bits.shape[:2], dtype=torch.bool, device=self.device)
            for i, (query, length) in enumerate(zip(batch.query_lens, batch.lens, strict=True)):
                low = max(0, length - query - (self.spec.sliding_window or length) + 1)
                at = torch.arange(low, length, device=self.device)
                unused[batch.block_table[i, at // size].long(), at % size] = False
            bits[unused] = NAN

    def attend(self, plan: Any) -> torch.Tensor:
        """Run a plan over the e4m3 cache, into outputs that were NaN."""
        out = torch.full_like(self.step.out, torch.nan)
        self.backend.run(plan, self.step.query, None, None, self.cache, self.params, out, None)
        return out

    def ways(self) -> dict[str, Callable[[], Any]]:
        """What is timed; the outputs are there."""
        out, made = self.step.out, self.plan.widening

        def over(plan: Any) -> Callable[[], Any]:
            return lambda: self.backend.run(
                plan, self.step.query, None, None, self.cache, self.params, out, None
            )

        (wide,) = self.wide.plan.calls
        cache = wide.view(self.wide.cache)
        return {
            "portable": over(self.portable),
            "widened": over(self.plan),
            "copying": lambda: made.copies(
                self.plan.batch, self.cache.key, self.cache.value, out.dtype
            ),
            "bf16": lambda: wide.backend.run(
                wide.plan, self.wide.query, None, None, cache, LayerParams(), out, None
            ),
        }

    def checked(self) -> dict[str, Any]:
        """Compare with float64; without a window with the portable kernel as well, every output."""
        assert self.plan.widening is not None, "not served by copies"
        found = self.attend(self.plan)
        allowed = tolerance_of(self.spec).output
        errors = [error for i in (0, len(self.lens[0]) - 1) for error in self._errors(i, found)]
        row = {"way": self.plan.way, "copied": self.plan.widening.tokens, "allowed": allowed,
               "error": max(errors)}  # fmt: skip
        if not self.spec.sliding_window:  # it multiplies what lies before a window by 0, NaN too
            row["unlike_portable"] = output_error(found, self.attend(self.portable))
            errors.append(row["unlike_portable"])
        assert all(error <= allowed for error in errors), f"wrong: {row}"  # NaN isn't
        return row

    def _errors(self, index: int, found: torch.Tensor) -> Iterator[float]:
        """Yield errors of some tokens of a sequence: first and last ones, where tiles end, others."""
        spec, batch = self.spec, self.plan.batch
        keys, values = reference.read_cache(spec, self.cache, batch, index, self.params)
        keys, values, found = keys.cpu(), values.cpu(), found.cpu()
        count, length = batch.query_lens[index], batch.lens[index]
        chosen = {0, count - 1, min(15, count - 1), min(16, count - 1), count // 2}
        chosen |= set(torch.randint(count, (SAMPLES - 5,)).tolist())
        for token in sorted(chosen):
            last = length - count + token
            low = max(0, last + 1 - (spec.sliding_window or length))
            row = batch.starts[index] + token
            query = self.step.query[row].double().cpu().view(spec.num_kv_heads, -1, spec.head_size)
            k, v = (t[low : last + 1].permute(1, 0, 2) for t in (keys, values))
            weights = (query @ k.transpose(1, 2) * spec.scale).softmax(-1)
            yield output_error(found[row], (weights @ v).reshape(spec.num_heads, -1))


def steps(device: torch.device) -> dict[str, Widened]:
    """Return what is timed, and what is checked beside."""
    made = {
        f"{heads[0]}/{heads[1]}, {name}": Widened(device, heads, *lens)
        for heads, (name, lens) in itertools.product(HEADS, TIMED.items())
    }
    made["32/8, 8 x 2048 fresh, e4m3 queries"] = Widened(
        device, (32, 8), *TIMED["8 x 2048 fresh"], qkv_dtype="fp8"
    )
    made["ragged"] = Widened(device, (16, 2), *RAGGED)
    made["ragged, window"] = Widened(device, (16, 2), *RAGGED, sliding_window=WINDOW)
    return made


def compile_side_by_side(made: dict[str, Widened]) -> int:
    """Compile all that they launch, by as many processes as there are processors; how many kernels."""
    from polyattn_triton.compiling.side_by_side import Compilers
    from polyattn_triton.launch import compiling_only, load

    with compiling_only(Compilers()) as asked:
        for step in made.values():
            for call in step.ways().values():
                call()
    load(asked)
    return len(asked)


@contextmanager
def every_step() -> Iterator[list[int]]:
    """Have every step's cache copied that can be, however short; yields the tokens of each."""
    from polyattn_triton.hopper import choice, widening

    kept = widening.LEAST, widening.ROWS_A_KEY, choice.SLOWER_BY_TOKEN
    copies, copied = widening.Widening.copies, list[int]()

    def counted(made: Any, *given: Any) -> Any:
        copied.append(made.tokens)
        return copies(made, *given)

    widening.LEAST, widening.ROWS_A_KEY, choice.SLOWER_BY_TOKEN = -(1 << 62), 0, frozenset()
    widening.Widening.copies = counted  # type: ignore[method-assign]
    try:
        yield copied
    finally:
        widening.LEAST, widening.ROWS_A_KEY, choice.SLOWER_BY_TOKEN = kept
        widening.Widening.copies = copies  # type: ignore[method-assign]
