"""Which of TRITON_ATTN's schedules is faster where it is behind: few KV heads, a tail, few tokens?

python benchmarks/h200_ragged_tries.py --seconds 100 [--own | --merging | --tall]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from h200_ragged import MHA, K, Run, Step, measured, steps, trace
from polyattn import LayerSpec
from polyattn_triton.configs import Pipe
from timing import kernel_us

ONE = LayerSpec(num_heads=16, num_kv_heads=1, head_size=128)
FOUR = LayerSpec(num_heads=8, num_kv_heads=2, head_size=128)
TWELVE = LayerSpec(num_heads=48, num_kv_heads=4, head_size=128)


def stretched(on_one: int, **changes: Any) -> Callable[[Any], None]:
    def tweak(backend: Any) -> None:
        backend.spec = backend.spec.replace(graph_capture="single_token_decode")
        backend.on_one = on_one
        backend.few_config = replace(backend.few_config, **changes)

    return tweak


def decoding(least: int = 2, item: int = 1, on_one: int = 0, **changes: Any) -> Any:
    def tweak(backend: Any) -> None:
        backend.rates, backend.on_one = replace(backend.rates, least=least, item=item), on_one
        backend.few_config = replace(backend.few_config, **changes)

    return tweak


def pieces(on_one: int, **changes: Any) -> Callable[[Any], None]:
    def tweak(backend: Any) -> None:
        backend.hopper = None  # the portable kernel
        backend.prefill_config = replace(backend.prefill_config, **changes)
        backend.paged_config = replace(backend.paged_config, **changes)
        backend.on_one = on_one

    return tweak


FEW_HEADS = {
    "1 on one": decoding(on_one=1), "2 on one": decoding(on_one=2), "4 on one": decoding(on_one=4),
    "4 stages, 1 on one": decoding(num_stages=4, on_one=1),
    "128 keys, 8 warps, 1": decoding(block_n=128, num_warps=8, num_stages=3, on_one=1),
}  # fmt: skip


def owned(stages: int, queries: int, turns: bool = True) -> Callable[[Any], None]:
    """Hopper's own prefill, in pieces."""

    def tweak(backend: Any) -> None:
        assert backend.hopper is not None
        backend.hopper.pipes = (backend.hopper.pipes[0], Pipe(stages, queries, turns))

    return tweak


OWN = {
    "2 stages, 2 queries": owned(2, 2), "2 stages": owned(2, 1), "3 stages": owned(3, 1),
    "3 stages, no turns": owned(3, 1, False), "2 stages, 2 queries, no turns": owned(2, 2, False),
    "portable": pieces(0),
}  # fmt: skip
TAIL = {"stretches, 2": stretched(2), "stretches, 3": stretched(3), "stretches, 4": stretched(4)}
HIGH = {
    "64 rows, 4 warps, 2 stages, 3": pieces(3, block_m=64, num_warps=4, num_stages=2),
    "64 rows, 4 warps, 3 stages, 2": pieces(2, block_m=64, num_warps=4, num_stages=3),
    "64 rows, 4 warps, 2 stages, 2": pieces(2, block_m=64, num_warps=4, num_stages=2),
    "64 rows, 128 keys, 4 warps": pieces(2, block_m=64, block_n=128, num_warps=4, num_stages=2),
    "128 rows, 128 keys, 8 warps, 2 stages": pieces(1, block_n=128, num_stages=2),
    "128 rows, 32 keys, 8 warps, 3 stages, 2": pieces(2, block_n=32, num_stages=3),
    "128 rows, 64 keys, 8 warps, 2 stages, 2": pieces(2, num_stages=2),
    "128 rows, 4 warps, 2 stages, 2": pieces(2, num_warps=4, num_stages=2),
    "4 stages": pieces(1, num_stages=4),
}  # fmt: skip


def chip(**changes: float) -> Callable[[Any], None]:
    """What merging is taken to cost, in key tiles (`schedule.Chip`)."""

    def tweak(backend: Any) -> None:
        backend.chip = replace(backend.chip, **changes)

    return tweak


def by_a_kernel(backend: Any) -> None:
    """A second kernel merges as many splits as the program that ends last would."""
    splits, by_one = backend.splits, backend.by_one

    def planned(batch: Any) -> int:
        backend.by_one = by_one
        found: int = splits(batch)
        backend.by_one = 0
        return found

    backend.splits = planned


def by_lists(backend: Any) -> None:
    """Even lengths are dealt out as others are."""
    backend.spec = backend.spec.replace(graph_capture="single_token_decode")


def tall(most: int, tallest: int) -> Callable[[Any], None]:
    """The decode kernel serves up to `most` rows a sequence, in tiles of up to `tallest`."""

    def tweak(backend: Any) -> None:
        backend.most_few_rows, backend.tallest_few, backend.most_few_keys = most, tallest, 0

    return tweak


TALL = {
    "by Hopper's prefill": tall(64, 64), "tiles of 32": tall(256, 32), "tiles of 64": tall(256, 64),
    "tiles of 128": tall(256, 128),
}  # fmt: skip


def tall_steps(seed: int) -> list[Step]:
    """Drafts to verify whose tokens times a group's heads are 40 to 256 rows."""
    chance, found = random.Random(seed), []
    for heads, kv_heads, count, each in (
        (32, 2, 24, 5), (32, 2, 1, 5), (32, 2, 100, 8), (32, 4, 24, 12), (64, 8, 32, 12), (16, 1, 24, 5),
        (16, 1, 8, 8), (28, 4, 64, 12), (96, 8, 12, 8), (32, 8, 24, 16), (32, 2, 24, 3), (32, 2, 24, 12),
    ):  # fmt: skip
        spec = LayerSpec(num_heads=heads, num_kv_heads=kv_heads, head_size=128)
        for name in ("azure_conversation.csv", "mooncake_conversation.jsonl"):
            lens = trace(name, count if name[0] == "a" else max(1, count // 6), chance)
            said = f"{heads}/{kv_heads} heads: {len(lens)} x {each} new of {name[:5]}"
            found.append(Step(said, spec, tuple((each, n + each) for n in lens)))
    return found


MERGING = {
    "as many as fit": chip(launch=0.0, round=0.0), "a round is 0.5": chip(round=0.5),
    "a round is 2": chip(round=2.0),
}  # fmt: skip
EVEN = {"by a kernel": by_a_kernel, "by lists": by_lists}


def without_merge(step: Step) -> float:
    """Time what cuts keys without what merges the parts: its results are none."""
    run = Run(step, "TRITON_ATTN", lambda backend: setattr(backend, "merge", lambda *_: None))
    run()
    return kernel_us(run, repeats=10)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--own", action="store_true", help="Hopper's own prefill in pieces alone")
    parser.add_argument("--merging", action="store_true", help="merging decodes' parts alone")
    parser.add_argument("--tall", action="store_true", help="several tokens of large groups alone")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    by_name = {step.name: step for step in steps(2)}
    work: list[tuple[Step, dict[str, Any]]] = [
        (by_name["16 new after 128k"], OWN),
        (by_name["512 new after 8k"], OWN),
        (by_name["16/2 heads: 16 new after 128k"], OWN),
        (by_name["4 x 512 new after 4k"], OWN),
        (by_name["16 new after 128k"], HIGH),
        (by_name["16/2 heads: 1 x 128k + 63 x 1k"], FEW_HEADS),
        (by_name["decode 1 x 128k + 63 x 1k"], FEW_HEADS),
        (by_name["16/2 heads: 16 new after 128k"], HIGH),
        (by_name["decode, 12 of mooncake"], FEW_HEADS),
        (Step("16/1 heads: 5 x 20k + 1k", ONE, ((1, 20_000),) * 5 + ((1, K),)), FEW_HEADS),
        (by_name["16/2 heads: 5 of mooncake"], MERGING),
        (Step("16/1 heads: 1 x 16k", ONE, ((1, 16_889),)), MERGING),
        (Step("16/1 heads: 3 x 44k", ONE, ((1, 44_000), (1, 68_000), (1, 21_000))), MERGING),
        (Step("48/4 heads: 8 of 1k", TWELVE, ((1, 4129),) + ((1, K),) * 7), MERGING),
        (by_name["decode 1 x 128k + 63 x 1k"], MERGING),
        (by_name["decode, 24 of azure"], MERGING),
        (by_name["equal 1 x 8192"], EVEN),
        (by_name["the same in 64 equal"], EVEN),
        (Step("8/2 heads: 1 x 1k", FOUR, ((1, K),)), EVEN),
        (Step("16/16 heads: 45 x 2k", MHA, ((1, 2 * K),) * 45), TAIL),
        (Step("16/16 heads: 52 x 2k", MHA, ((1, 2 * K),) * 52), TAIL),
        (Step("16/16 heads: 80 x 2k", MHA, ((1, 2 * K),) * 80), TAIL),
    ]
    if options.tall:
        work = [(step, TALL) for step in tall_steps(7)]
    for step, tries in work:
        if options.own and tries is not OWN:
            continue
        if options.merging and tries is not MERGING and tries is not EVEN:
            continue
        found: dict[str, float | str] = {}
        for name, tweak in {"as planned": None, **tries, "as planned again": None}.items():
            if time.monotonic() > end:
                break
            row = measured(step, "TRITON_ATTN", tweak)
            found[name] = row.get("us", row.get("cannot", ""))
            if row.get("repeats_bits") is False:
                found[name] = f"{found[name]}, not the same bits"
        if found:
            others = {n: measured(step, n).get("us") for n in ("FLASH_ATTN_V3", "FLASHINFER")}
            print(f"{step.name}: {others}", flush=True)
            numbers = sorted((v, k) for k, v in found.items() if isinstance(v, float))
            print("   ", "; ".join(f"{k} {v:.1f}" for v, k in numbers), flush=True)
            if tries is OWN:
                print(f"    without the merge {without_merge(step):.1f}", flush=True)
            print("   ", {k: v for k, v in found.items() if not isinstance(v, float)}, flush=True)


if __name__ == "__main__":
    main()
