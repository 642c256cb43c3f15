"""Does TRITON_ATTN read every format's rows rightly on a GPU? Beside the float64 reference.

    python tests/plugins/triton/rows_on_gpu.py [--formats int4,nvfp4] [--seconds 200]

Prints a line a case: how far off the output and the LSE are, of what is allowed, and whether the decode
of packed rows ran (`hopper.packed`). Unused slots hold 0xFF, which is NaN in many formats.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from functools import cache

import polyattn
import torch
from polyattn import Attention, Batch, KVCache, LayerGroup, LayerSpec, select
from polyattn.families.attention import reference
from polyattn.kernel import SharedRun
from polyattn.spec.row_format import known_formats
from polyattn.workload.compare import output_error
from polyattn.workload.tolerance import tolerance_of
from polyattn_triton.attention import TritonAttention
from polyattn_triton.hopper.packing import ROWS as PACKED_ROWS
from unseen_format import LOGS6

DECODES = ([1, 17, 32, 33, 64, 700, 1024, 5], [4096] * 3, [20000], [300] * 40, [9, 9000, 1, 2500])
CHUNKS = ([(20, 20), (1, 700), (3, 43)], [(600, 1600)])
BASE = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, block_size=16, needs_lse=True)


def cases(names: list[str]) -> Iterator[tuple[LayerSpec, list[tuple[int, int]]]]:
    """Yield layers and steps: packed formats in many, others in few."""
    for name in names:
        spec = BASE.replace(kv_cache_dtype=name)
        steps = [[(1, n) for n in lens] for lens in DECODES]
        if (name, 1) in PACKED_ROWS:
            for changes, step in itertools.product(
                (
                    {}, {"dtype": "float16", "block_size": 64}, {"num_kv_heads": 32},
                    {"num_heads": 64, "scales": "head"}, {"num_heads": 96, "scales": "tensor"},
                ),
                steps,
            ):  # fmt: skip
                yield spec.replace(**changes), step
        else:
            yield from ((spec, step) for step in (steps[0], steps[2], steps[4]))
        yield from ((spec, list(step)) for step in CHUNKS)
        yield spec.replace(head_size=64, v_head_size=64, needs_lse=False), steps[4]


@cache
def group_of(spec: LayerSpec) -> LayerGroup:
    """Select once for all of a layer's steps."""
    return LayerGroup(select(spec, "cuda", backend="TRITON_ATTN"))


def off(spec: LayerSpec, step: list[tuple[int, int]]) -> tuple[float, float, bool]:
    """Run a step; returns the output's and the LSE's errors, and whether the packed decode ran."""
    chance = torch.Generator().manual_seed(len(step))
    scale = torch.rand(spec.num_kv_heads, generator=chance) + 0.5
    given = {"number": 0.75, "tensor": scale[0], "head": scale}[spec.scales]
    layer = Attention(group_of(spec), k_scale=given, v_scale=given)
    size = spec.block_size or 16
    tables = [-(-n // size) for _, n in step]
    cache = layer.group.allocate_cache(sum(tables) + 1)
    for stored in (cache.key, cache.value):
        stored.fill_(0xFF)
    places = torch.randperm(sum(tables), generator=chance) + 1
    table = torch.zeros(len(step), max(tables), dtype=torch.int32)
    for row, mine in enumerate(places.split(tables)):
        table[row, : len(mine)] = mine
    dtype = getattr(torch, spec.dtype)

    def drawn(tokens: int, heads: int, width: int) -> torch.Tensor:
        return torch.randn(tokens, heads, width, generator=chance).to(dtype).cuda()

    lens, d = [n for _, n in step], spec.head_size
    before = [n - q or n for q, n in step]
    past = Batch.from_lens(before, before, table.cuda(), size)
    now = Batch.from_lens([q for q, _ in step], lens, table.cuda(), size)
    for batch in (past, now):
        query, key, value = (
            drawn(batch.num_tokens, h, d)
            for h in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )
        found = layer(query, key, value, cache, batch)
        out, lse = found if isinstance(found, tuple) else (found, None)
    calls = [
        call for call in layer.group.plan(now).calls if isinstance(call.backend, TritonAttention)
    ]
    packed = any(call.plan.config == call.backend.packed for call in calls)
    held = KVCache(cache.key.cpu(), cache.value.cpu(), cache.format)
    there = Batch.from_lens([q for q, _ in step], lens, table, size)
    params = layer.params
    for name in ("k_scale", "v_scale", "q_scale", "out_scale"):
        number = getattr(params, name)
        if isinstance(number, torch.Tensor):
            setattr(params, name, number.cpu())
    wanted, wanted_lse = reference.forward(
        spec, query.cpu(), key.cpu(), value.cpu(), held, there, params
    )
    error = output_error(out.cpu(), wanted) / tolerance_of(spec).output
    lse_off = 0.0 if lse is None else float((lse.cpu() - wanted_lse).abs().max())
    return error, lse_off, packed


def captured(spec: LayerSpec) -> float:
    """Capture a decode of rows that share a prefix, replay it over other queries; returns its error."""
    chance, count, lens = torch.Generator().manual_seed(1), 6, [300, 290, 257, 320, 258, 300]
    group = group_of(spec.replace(graph_capture="single_token_decode", needs_lse=False))
    layer, cache = Attention(group), group.allocate_cache(17 + 5 * count)
    table = torch.arange(5 * count).view(count, 5) + 17
    table = torch.cat([torch.arange(16).repeat(count, 1), table], 1).int()

    def drawn(tokens: int) -> list[torch.Tensor]:
        heads = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
        return [torch.randn(tokens, h, 128, generator=chance).bfloat16().cuda() for h in heads]

    before = [n - 1 for n in lens]
    layer(*drawn(sum(before)), cache, Batch.from_lens(before, before, table.cuda(), 16))
    levels = ((SharedRun(tuple(range(count)), 0, 16),),)
    batch = Batch.from_lens([1] * count, lens, table.cuda(), 16, shared_prefix=levels)
    plan, new = group.plan(batch), drawn(count)
    layer(*new, cache, plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(*new, cache, plan)
    for tensor, other in zip(new, drawn(count), strict=True):
        tensor.copy_(other)
    graph.replay()
    held = KVCache(cache.key.cpu(), cache.value.cpu(), cache.format)
    here = Batch.from_lens([1] * count, lens, table, 16)
    wanted, _ = reference.forward(spec, *(t.cpu() for t in new), held, here, layer.params)
    return output_error(out.cpu(), wanted) / tolerance_of(spec).output  # type: ignore[arg-type]


def main() -> None:
    """Run the cases and print what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default="")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no case begins")
    asked = parser.parse_args()
    polyattn.register_row_format(LOGS6)
    names = [n for n in known_formats() if known_formats()[n].row_bytes(128)]
    wrong, end = 0, time.monotonic() + asked.seconds
    for spec, step in cases(
        asked.formats.split(",") if asked.formats else [*names, "int8_rows/int4"]
    ):
        if time.monotonic() > end:
            print("the time was up")
            break
        text = f"{spec}: {len(step)} of {step[0]}, {step[-1]}"
        try:
            error, lse, packed = off(spec, step)
        except Exception as problem:
            print(f"FAILED {text}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
            wrong += 1
            continue
        right = error <= 1.0 and lse < 0.02
        wrong += not right
        print(f"{'right' if right else 'WRONG'} {error:.2f} of the tolerance, lse {lse:.1e}, "
              f"{'packed' if packed else 'portable'}: {text}", flush=True)  # fmt: skip
    for name in ("logs6", "int4"):
        error = captured(BASE.replace(kv_cache_dtype=name))
        print(f"{name}, captured over a shared prefix: {error:.2f} of the tolerance", flush=True)
        wrong += error > 1.0
    print(f"wrong: {wrong}")


if __name__ == "__main__":
    main()
