"""`polyattn bench`: every backend that can serve, side by side, against the machine's limit."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from polyattn.api import select
from polyattn.device import Device
from polyattn.errors import PolyattnError, SettingsError, describe
from polyattn.families.attention.workload import AttentionWorkload
from polyattn.families.mla.workload import LatentWorkload
from polyattn.families.recurrent.workload import RecurrentWorkload
from polyattn.registry.capabilities import ANY_PLATFORM, check
from polyattn.registry.devices import resolve_device
from polyattn.registry.discovery import discover
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.cost import Cost, batch_cost
from polyattn.runtime.step.shared_prefix import SharedRun
from polyattn.selection.cache_format import format_of
from polyattn.selection.selection import Selection
from polyattn.spec.decompose import unrotated
from polyattn.spec.kinds import AttentionKind
from polyattn.spec.layer import LayerSpec
from polyattn.tools.cli.grammar import parse_batch
from polyattn.tools.cli.memory import check_room, said_plainly
from polyattn.tools.cli.models import bundled_models, read_specs
from polyattn.tools.cli.options import BenchOptions
from polyattn.tools.cli.output import print_json, print_rows, progress, say
from polyattn.tools.cli.plots import check_plot, plot_bench
from polyattn.tools.lengths import redrawn
from polyattn.workload.clock import repeat
from polyattn.workload.dice import Dice
from polyattn.workload.pages import fill
from polyattn.workload.tolerance import tolerance_of

LONGEST = 3600
SMALLEST_COPY = 1 << 18
DEFAULT_BATCHES = ("8q1s2k", "q2k", "2q512_8q1s1k")
Step = AttentionWorkload | LatentWorkload | RecurrentWorkload


def show(options: BenchOptions) -> int:
    """Measure and print; backends that can't serve are listed with the reason.

    Return 1 when not one backend could be measured.
    """
    for name, value in (("seconds", options.seconds), ("total-seconds", options.total_seconds)):
        if not 0 < value <= LONGEST:
            raise SettingsError(f"--{name}={value} must be positive, {LONGEST} at most")
    if options.plot:
        check_plot(options.plot)
    texts = options.batches or DEFAULT_BATCHES
    for text in texts:
        if text in bundled_models() or Path(text).exists():
            raise SettingsError(f"batch {text!r} is a model's name; pass --model {text}")
    batches = {text: parse_batch(text) for text in texts}
    if options.lengths is not None:
        batches = {
            f"{text} {options.lengths}": redrawn(rows, options.lengths, options.seed)
            for text, rows in batches.items()
        }
    spec = _spec(options)
    for text, rows_of in batches.items():
        _check_shared(spec, text, rows_of, options.shared_prefix)
    resolved = resolve_device(options.device)
    named = [discover().backend(name).name for name in options.backend or []]
    smaller = "name a smaller batch"
    for text, rows_of in batches.items():
        check_room(_bytes(spec, rows_of, resolved), f"batch {text}", resolved, smaller)
    bench = Bench(
        spec, resolved, options.seconds, options.shared_prefix, options.total_seconds / len(batches)
    )
    rows: list[dict[str, Any]] = []
    with said_plainly(smaller), progress("measuring", options.json) as tell:
        for text, rows_of in batches.items():
            prompts = any(query > 1 for query, _ in rows_of)
            names = named or _of_this_kind(spec, resolved, options.reference, prompts)
            rows += bench.measure(text, rows_of, names, tell)
    if options.json:
        print_json(
            {"spec": spec.to_dict(), "device": str(resolved), "limits": bench.limits, "rows": rows}
        )
    else:
        _print(spec, resolved, bench.limits, rows)
    measured = [row for row in rows if "ms" in row]
    if options.plot and measured:
        plot_bench(measured, options.plot, f"{spec}\n{resolved}")
    return int(not measured)


def _spec(options: BenchOptions) -> LayerSpec:
    source, specs = read_specs(options.model, options.spec, options)
    for spec in specs:
        if spec.kind.is_latent or (spec.kind is AttentionKind.ATTENTION and spec.cached):
            return unrotated(spec)  # random queries and keys stand for rotated ones
    recurrent = next((spec for spec in specs if spec.kind.is_recurrent), None)
    if recurrent is None:
        raise SettingsError(
            f"{source}: has no recurrence, and no layer of attention or MLA with a cache, to measure; "
            "`polyattn run` times others"
        )
    return recurrent


def _check_shared(
    spec: LayerSpec, text: str, lengths: Sequence[tuple[int, int]], shared: int
) -> None:
    if shared and spec.kind.is_recurrent:
        raise SettingsError(
            f"--shared-prefix={shared}: a layer of kind {spec.kind} has no blocks to share; leave it out"
        )
    for query, length in lengths:
        if shared > length - query:
            raise SettingsError(
                f"--shared-prefix={shared}: a sequence of batch {text} has only {length - query} tokens "
                "before its query"
            )


def _bytes(spec: LayerSpec, lengths: Sequence[tuple[int, int]], device: Device) -> float:
    """The bytes that a batch's cache or states, and its inputs and output take at least."""
    if spec.kind.is_recurrent:
        batch = Batch.from_lens([q for q, _ in lengths], [n for _, n in lengths])
        return float(batch_cost(spec, batch).bytes)
    widths = spec.num_kv_heads * (spec.head_size + spec.v_head_size)
    stepping = spec.num_heads * (spec.head_size + spec.v_head_size) + widths
    cached = format_of(spec, device, "NHD", 16).bytes_per_token
    tokens, queries = sum(n for _, n in lengths), sum(q for q, _ in lengths)
    return float(cached * tokens + 2 * stepping * queries)


class Bench:
    """Times one spec on one device; knows the machine's limits."""

    def __init__(
        self,
        spec: LayerSpec,
        device: Device,
        seconds: float,
        shared: int = 0,
        total: float = LONGEST,
    ):
        """`seconds` is for each measurement; after `total` seconds of a batch no other one begins."""
        if not device.is_real:
            raise SettingsError(f"--device: {device} is a profile; bench needs a device to run on")
        self.spec, self.device, self.seconds, self.shared = spec, device, seconds, shared
        self.torch_device = torch.device(str(device.torch_device))
        self.limits = measure_limits(spec, self.torch_device)
        self.total = total

    def measure(
        self,
        text: str,
        lengths: list[tuple[int, int]],
        only: Sequence[str],
        tell: Callable[[str], None] = lambda what: None,
    ) -> list[dict[str, Any]]:
        """Return a row for each backend: its time and rates, or why it can't."""
        queries, lens = [q for q, _ in lengths], [n for _, n in lengths]
        batch = Batch.from_lens(queries, lens, device=self.torch_device)
        cost = batch_cost(self.spec, batch)
        limit = self._limit(cost)
        phases = {"decode" if q == 1 else "prefill" for q in queries}
        chosen = select(self.spec, self.device)
        end = time.monotonic() + self.total
        rows = []
        for name in sorted(only, key=lambda name: name not in _names(chosen, phases)):
            row: dict[str, Any] = {"batch": text, "backend": name, "limit_ms": limit * 1e3}
            row["selected"] = name in _names(chosen, phases)
            tell(f"{text} by {name}")
            try:
                if time.monotonic() > end:
                    raise SettingsError(
                        f"{name} isn't measured: its batch's {self.total:g} s of --total-seconds are over"
                    )
                selection = self._named(name, phases)
                row |= self._time(selection, lengths, cost)
            except PolyattnError as error:
                row["cannot"] = str(error)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # whatever a vendor's library raises is a reason
                row["cannot"] = f"{name} failed: {describe(error)}"
            rows.append(row)
        if len(_names(chosen, phases)) > 1:
            pair = "+".join(sorted(_names(chosen, phases)))
            row = {"batch": text, "backend": pair, "limit_ms": limit * 1e3, "selected": True}
            rows.append(row | self._time(chosen, lengths, cost))
        best = min((row["ms"] for row in rows if "ms" in row), default=0.0)
        for row in rows:
            if "ms" in row:
                row["over_best"] = row["ms"] / best
        return sorted(rows, key=lambda r: r.get("ms", float("inf")))

    def _named(self, name: str, phases: set[str]) -> Selection:
        info = discover().backend(name)
        both = all(
            not check(info.capabilities, self.spec, self.device, p) for p in ("prefill", "decode")
        )
        scoped = ",".join(f"{phase}={info.name}" for phase in sorted(phases))
        return select(self.spec, self.device, backend=info.name if both else scoped)

    def _time(
        self, selection: Selection, lengths: Sequence[tuple[int, int]], cost: Cost
    ) -> dict[str, Any]:
        step = full_step(selection, lengths, self.shared)
        error = sampled_error(step)
        times = repeat(step.call, self.torch_device, self.seconds)
        median = statistics.median(times)
        return {
            "ms": median * 1e3,
            "runs": len(times),
            "gb_per_s": cost.bytes / median / 1e9,
            "tflop_per_s": cost.flops / median / 1e12,
            "of_limit": self._limit(cost) / median,
            "error": error,
            **(sharing(step) if self.shared else {}),
        }

    def _limit(self, cost: Cost) -> float:
        """The larger of the times that moving the bytes and doing the operations take.

        The bytes move as fast as a copy or a read of at most as many: in a cache, or in memory.
        """
        levels: dict[int, float] = self.limits["copies_gb_per_s"]
        within = [size for size in levels if size <= cost.bytes] or [min(levels)]
        matmul: float = self.limits["matmul_tflop_per_s"]
        return max(cost.bytes / levels[max(within)] / 1e9, cost.flops / matmul / 1e12)


def full_step(selection: Selection, lengths: Sequence[tuple[int, int]], shared: int = 0) -> Step:
    """Return a step of a new layer over a full cache, or over states; decodes first, as engines do.

    `shared`: leading tokens whose blocks all sequences have in common.
    """
    group = LayerGroup(selection)
    group.finish_builds()
    dice = Dice(random.SystemRandom().randrange(2**31), group.torch_device, fast=True)
    lengths = sorted(lengths, key=lambda pair: pair[0] != 1)
    if group.spec.kind.is_recurrent:
        recurrent = RecurrentWorkload.layer_of(group, dice, checks=False)
        return RecurrentWorkload(recurrent, lengths, dice)
    assert group.cache_format is not None
    size = group.cache_format.block_size
    if group.spec.latent is not None:
        latent = LatentWorkload.layer_of(group, dice, checks=False)
        return LatentWorkload(latent, lengths, dice, shared=shared // size)
    cache = group.allocate_cache(sum(-(-n // size) for _, n in lengths) + 1)
    fill(cache)
    everybody = SharedRun(tuple(range(len(lengths))), 0, shared // size)
    layer = AttentionWorkload.layer_of(group, dice, checks=False)
    levels = ((everybody,),) if everybody.count and len(lengths) > 1 else ()
    return AttentionWorkload(layer, lengths, dice, full=cache, shared=levels, spare=0)


def sampled_error(step: Step) -> float:
    """Run a step and return the error of some of its tokens; raise if it is too large."""
    step.call()
    error = step.token_error(step.dice.integer(0, step.batch.num_seqs))
    if not error <= tolerance_of(step.spec).output:
        raise PolyattnError(f"its result is wrong: relative error {error:.2g}")
    return error


def sharing(step: Step) -> dict[str, int]:
    """Return how many blocks a step reads, and how many bytes less for sharing them.

    `shared_bytes`: where each distinct block is read once; `saved_bytes`: by this step's plan.
    """
    cache, table = step.group.cache_format, step.batch.host_block_table
    assert cache is not None and table is not None
    counts = [-(-n // cache.block_size) for n in step.batch.lens]
    rows = [row[:n].tolist() for row, n in zip(table, counts, strict=True)]
    read, distinct = sum(counts), len({block for row in rows for block in row})
    per_block = cache.block_size * cache.bytes_per_token
    return {
        "blocks_read": read,
        "distinct_blocks": distinct,
        "shared_bytes": (read - distinct) * per_block,
        "saved_bytes": sum(call.saved_bytes for call in step.plan.calls),
    }


def measure_limits(spec: LayerSpec, device: torch.device) -> dict[str, Any]:
    """Return this machine's bandwidths and its matmul rate, measured.

    `copies_gb_per_s`: by the bytes that a copy moves, for each level of the memory: the faster of a copy
    and a sum, which only reads. `copy_gb_per_s`: the largest one's, the memory's. A larger copy is never
    the faster one: launches slow the small ones down. `matmul_tflop_per_s`: in the spec's dtype, and on a
    CPU also in float32, because torch may have no kernel for that dtype. On a CPU all figures are the
    best of all threads and of one, which is faster where others use the processor.
    """
    big = device.type != "cpu"
    source = torch.randn(1 << (29 if big else 25), device=device)
    target = torch.empty_like(source)
    dtypes = {getattr(torch, spec.dtype)} if big else {getattr(torch, spec.dtype), torch.float32}
    size = 8192 if big else 1024
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    rates: dict[int, float] = {}
    seconds: list[float] = []
    threads = torch.get_num_threads()
    for used in {threads} if big else {threads, 1}:
        torch.set_num_threads(used)
        part, slower = source.numel(), 0.0
        while 8 * part >= SMALLEST_COPY:
            to, of = target[:part], source[:part]
            copied = 8 * part / min(repeat(partial(to.copy_, of), device, 0.05))
            read = 4 * part / min(repeat(of.sum, device, 0.05))
            slower = max(copied / 1e9, read / 1e9, slower, rates.get(8 * part, 0.0))
            rates[8 * part] = slower
            part //= 4
        for dtype in dtypes:
            product = partial(torch.mm, left.to(dtype), right.to(dtype))
            seconds += repeat(product, device, 0.2)
    torch.set_num_threads(threads)
    return {
        "copy_gb_per_s": rates[8 * source.numel()],
        "copies_gb_per_s": rates,
        "matmul_tflop_per_s": 2 * size**3 / min(seconds) / 1e12,
    }


def _of_this_kind(
    spec: LayerSpec, device: Device, reference: bool, prompts: bool = False
) -> list[str]:
    """Return the backends of a layer's kind on a device's platform; the `reference` where asked for.

    `prompts`: those of attention too, where they serve MLA's prompts, expanded.
    """
    kinds = {spec.kind}
    if prompts and spec.kind is AttentionKind.MLA:
        kinds.add(AttentionKind.ATTENTION)
    return [
        info.name
        for info in discover().backends.values()
        if info.capabilities.attends
        and kinds & info.capabilities.kinds
        and {device.platform, ANY_PLATFORM} & info.capabilities.platforms.keys()
        and (reference or not info.by_name_only)
    ]


def _names(selection: Selection, phases: set[str]) -> set[str]:
    decision = selection.decision
    return {
        name
        for phase, name in (("prefill", decision.prefill), ("decode", decision.decode))
        if phase in phases and name is not None
    }


def _print(
    spec: LayerSpec, device: Device, limits: dict[str, Any], rows: Sequence[dict[str, Any]]
) -> None:
    say(f"{spec}\non {device}")
    copies = ", ".join(
        f"{size / 2**20:g} MiB {rate:.1f}"
        for size, rate in sorted(limits["copies_gb_per_s"].items())
    )
    say(
        f"limits measured now: matmul {limits['matmul_tflop_per_s']:.3f} TFLOP/s; copy or read, in GB/s, "
        f"of {copies}\n"
    )
    columns = {
        "batch": "{batch}", "backend": "{backend}", ">ms": "{ms:.3f}", ">/ best": "{over_best:.2f}",
        ">GB/s": "{gb_per_s:.2f}", ">TFLOP/s": "{tflop_per_s:.3f}", ">of limit": "{of_limit:.0%}",
        ">error": "{error:.1e}", "": "{mark}",
    }  # fmt: skip
    measured = [row for row in rows if "ms" in row]
    print_rows(columns, ({**row, "mark": "<- selected" * row["selected"]} for row in measured))
    for row in rows:
        if "saved_bytes" in row:
            say(
                f"{row['batch']}, {row['backend']}: {row['blocks_read']} blocks read, "
                f"{row['distinct_blocks']} distinct: {row['shared_bytes'] / 2**20:.1f} MiB are the same; "
                f"{row['saved_bytes'] / 2**20:.1f} MiB were read once for all"
            )
        if "cannot" in row:
            say(f"{row['batch']}: {row['cannot']}")
