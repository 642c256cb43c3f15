"""`polyattn bench`: every backend that can serve, side by side, against the machine's limit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from polyattn.api import select
from polyattn.checking.compare import output_error
from polyattn.checking.tolerance import tolerance_of
from polyattn.device import Device
from polyattn.errors import PolyattnError, SettingsError, describe
from polyattn.families.attention import reference
from polyattn.families.attention.layer import Attention
from polyattn.registry.capabilities import ANY_PLATFORM, check
from polyattn.registry.devices import resolve_device
from polyattn.registry.discovery import discover
from polyattn.runtime.cache.scales import input_dtype, output_dtype
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.cost import Cost, batch_cost
from polyattn.selection.selection import Selection
from polyattn.spec.decompose import unrotated
from polyattn.spec.kinds import AttentionKind
from polyattn.spec.layer import LayerSpec
from polyattn.tools.cli.grammar import parse_batch
from polyattn.tools.cli.memory import check_room, said_plainly
from polyattn.tools.cli.models import read_specs
from polyattn.tools.cli.output import add_row, console, print_json, progress, table
from polyattn.tools.cli.plots import check_plot, plot_bench
from polyattn.tools.lengths import redrawn

LONGEST = 3600
SMALLEST_COPY = 1 << 18
DEFAULT_BATCHES = ("8q1s2k", "q2k", "2q512_8q1s1k")


def show(
    texts: Sequence[str],
    model: str | None,
    spec_json: str | None,
    device: str | None,
    backends: Sequence[str],
    block_size: int | None,
    seconds: float,
    lengths: str | None,
    seed: int,
    shared_prefix: int,
    as_json: bool,
    plot: Path | None,
    kv_cache_dtype: str | None = None,
    reference: bool = False,
    total: float = 120.0,
) -> int:
    """Measure and print; backends that can't serve are listed with the reason.

    Return 1 when not one backend could be measured.
    """
    for name, value in (("seconds", seconds), ("total-seconds", total)):
        if not 0 < value <= LONGEST:
            raise SettingsError(f"--{name}={value} must be positive, {LONGEST} at most")
    if plot:
        check_plot(plot)
    batches = {text: parse_batch(text) for text in texts or DEFAULT_BATCHES}
    if lengths is not None:
        batches = {
            f"{text} {lengths}": redrawn(rows, lengths, seed) for text, rows in batches.items()
        }
    for text, rows_of in batches.items():
        _check_shared(text, rows_of, shared_prefix)
    spec = _spec(model, spec_json, kv_cache_dtype, block_size)
    resolved = resolve_device(device)
    names = [discover().backend(name).name for name in backends]
    names = names or _of_this_kind(spec, resolved, reference)
    for text, rows_of in batches.items():
        check_room(_bytes(spec, rows_of), f"batch {text}", resolved)
    bench = Bench(spec, resolved, seconds, shared_prefix, total / len(batches))
    rows: list[dict[str, Any]] = []
    with said_plainly("name a smaller batch"), progress("measuring", as_json) as tell:
        for text, rows_of in batches.items():
            rows += bench.measure(text, rows_of, names, tell)
    if as_json:
        print_json(
            {"spec": spec.to_dict(), "device": str(resolved), "limits": bench.limits, "rows": rows}
        )
    else:
        _print(spec, resolved, bench.limits, rows)
    measured = [row for row in rows if "ms" in row]
    if plot and measured:
        plot_bench(measured, plot, f"{spec}\n{resolved}")
    return int(not measured)


def _spec(
    model: str | None, spec_json: str | None, kv_cache_dtype: str | None, block_size: int | None
) -> LayerSpec:
    source, specs = read_specs(
        model, spec_json, kv_cache_dtype=kv_cache_dtype, block_size=block_size
    )
    for spec in specs:
        if spec.kind is AttentionKind.ATTENTION and spec.cached:
            return unrotated(spec)  # random queries and keys stand for rotated ones
    raise SettingsError(f"{source}: has no attention layer with a cache to measure")


def _check_shared(text: str, lengths: Sequence[tuple[int, int]], shared: int) -> None:
    for query, length in lengths:
        if shared > length - query:
            raise SettingsError(
                f"--shared-prefix={shared}: a sequence of batch {text} has only {length - query} tokens "
                "before its query"
            )


def _bytes(spec: LayerSpec, lengths: Sequence[tuple[int, int]]) -> float:
    """The bytes that a batch's cache and its queries, keys, values and output take at least."""
    widths = spec.num_kv_heads * (spec.head_size + spec.v_head_size)
    stepping = spec.num_heads * (spec.head_size + spec.v_head_size) + widths
    cached = 2 if spec.kv_cache_dtype == "auto" else 1
    tokens, queries = sum(n for _, n in lengths), sum(q for q, _ in lengths)
    return float(cached * widths * tokens + 2 * stepping * queries)


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
                row |= self._time(selection, queries, lens, cost)
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
            rows.append(row | self._time(chosen, queries, lens, cost))
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
        self, selection: Selection, queries: list[int], lens: list[int], cost: Cost
    ) -> dict[str, Any]:
        step = Step(selection, queries, lens, self.torch_device, self.shared)
        error = step.error()
        times = repeat(step.run, self.torch_device, self.seconds)
        median = statistics.median(times)
        return {
            "ms": median * 1e3,
            "runs": len(times),
            "gb_per_s": cost.bytes / median / 1e9,
            "tflop_per_s": cost.flops / median / 1e12,
            "of_limit": self._limit(cost) / median,
            "error": error,
            **(step.sharing() if self.shared else {}),
        }

    def _limit(self, cost: Cost) -> float:
        """The larger of the times that moving the bytes and doing the operations take.

        The bytes move as fast as a copy of at most as many does: in a cache, or in memory.
        """
        levels: dict[int, float] = self.limits["copies_gb_per_s"]
        within = [size for size in levels if size <= cost.bytes] or [min(levels)]
        matmul: float = self.limits["matmul_tflop_per_s"]
        return max(cost.bytes / levels[max(within)] / 1e9, cost.flops / matmul / 1e12)


class Step:
    """One layer over one batch with random pages, ready to run again and again."""

    def __init__(
        self,
        selection: Selection,
        queries: list[int],
        lens: list[int],
        device: torch.device,
        shared: int = 0,
    ):
        """`shared`: leading tokens whose blocks all sequences have in common."""
        group = LayerGroup(selection)
        group.finish_builds()
        spec = group.spec
        assert group.cache_format is not None
        size = group.cache_format.block_size
        needed = [-(-n // size) for n in lens]
        order = torch.randperm(sum(needed)).to(torch.int32).split(needed)
        table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True).to(device)
        table[1:, : shared // size] = table[0, : shared // size]
        self.cache = group.allocate_cache(sum(needed))
        for stored in (self.cache.key, self.cache.value):
            if stored.dtype == torch.uint8:  # any 4-bit numbers, block scales up to 4
                stored.random_(0, 0x48)
                continue
            noise = torch.randn(stored.shape, device=device)
            stored.copy_((noise * 32 if stored.dtype == torch.int8 else noise).to(stored.dtype))
        # Decodes come first, as an engine orders them.
        pairs = sorted(zip(queries, lens, range(len(lens)), strict=True), key=lambda p: p[0] != 1)
        rows = torch.tensor([p[2] for p in pairs])
        table = table[rows.to(device)]
        self.batch = Batch.from_lens(
            [p[0] for p in pairs], [p[1] for p in pairs], table, size,
            host_block_table=table.cpu().numpy(),
        )  # fmt: skip
        tokens = self.batch.num_tokens

        def random(heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(tokens, heads, width, device=device).to(dtype)

        given = input_dtype(spec)

        self.layer = Attention(
            group,
            sinks=torch.randn(spec.num_heads) if spec.learned_sinks else None,
            rotate=spec.rope is not None,
            checks=False,
        )
        self.query = random(spec.num_heads, spec.head_size, given)
        self.key = random(spec.num_kv_heads, spec.head_size, given)
        self.value = random(spec.num_kv_heads, spec.v_head_size, given)
        self.out = random(spec.num_heads, spec.v_head_size, output_dtype(spec))
        self.plan = group.plan(self.batch)

    def run(self) -> None:
        """Store the new tokens and attend."""
        self.layer(self.query, self.key, self.value, self.cache, self.plan, out=self.out)

    def attend(self) -> None:
        """Attend alone: the new tokens were stored before."""
        self.layer(self.query, None, None, self.cache, self.plan, out=self.out)

    def sharing(self) -> dict[str, int]:
        """Return how many blocks the step reads, and how many bytes less for sharing them.

        `shared_bytes`: where each distinct block is read once; `saved_bytes`: by this step's plan.
        """
        cache, table = self.layer.group.cache_format, self.batch.host_block_table
        assert cache is not None and table is not None
        counts = [-(-n // cache.block_size) for n in self.batch.lens]
        rows = [row[:n].tolist() for row, n in zip(table, counts, strict=True)]
        read, distinct = sum(counts), len({block for row in rows for block in row})
        saved = sum(call.saved_bytes for call in self.plan.calls)
        per_block = cache.block_size * cache.bytes_per_token
        return {
            "blocks_read": read, "distinct_blocks": distinct,
            "shared_bytes": (read - distinct) * per_block, "saved_bytes": saved,
        }  # fmt: skip

    def error(self) -> float:
        """Return the error of one sampled token; raise if it is too large."""
        self.run()
        spec, batch = self.layer.spec, self.batch
        index = int(torch.randint(batch.num_seqs, (1,)))
        keys, values = reference.read_cache(spec, self.cache, batch, index, self.layer.params)
        row = batch.starts[index + 1] - 1
        params = self.layer.params
        query = reference.exact(self.query[row : row + 1], params.q_scale, torch.float64)
        expected, _ = reference.attend(spec, query, keys, values, params)
        found = reference.exact(self.out[row : row + 1], params.out_scale, torch.float64)
        error = output_error(found, expected)
        if not error <= tolerance_of(spec).output:
            raise PolyattnError(f"its result is wrong: relative error {error:.2g}")
        return error


def repeat(
    call: Callable[[], None], device: torch.device, seconds: float, least: int = 3
) -> list[float]:
    """Return the seconds of each of many calls, warmed up."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3)
        else:
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return times


def measure_limits(spec: LayerSpec, device: torch.device) -> dict[str, Any]:
    """Return this machine's copy bandwidths and its matmul rate in the spec's dtype, measured.

    `copies_gb_per_s` is by the bytes that a copy reads and writes: each level of the memory has its own;
    `copy_gb_per_s` is the largest copy's, the memory's own.
    A larger copy is never the faster one: what slows small copies down is their launch.
    """
    big = device.type != "cpu"
    source = torch.randn(1 << (29 if big else 25), device=device)
    target = torch.empty_like(source)
    rates: dict[int, float] = {}
    part = source.numel()
    while 8 * part >= SMALLEST_COPY:
        to, of = target[:part], source[:part]
        seconds = statistics.median(
            repeat(lambda to=to, of=of: _done(to.copy_(of)), device, 0.05)  # type: ignore[misc]
        )
        rates[8 * part] = max(8 * part / seconds / 1e9, *rates.values(), 0.0)
        part //= 4
    size = 8192 if big else 1024
    left, right = (
        torch.randn(size, size, device=device).to(getattr(torch, spec.dtype)) for _ in range(2)
    )
    matmul = statistics.median(repeat(lambda: _done(torch.mm(left, right)), device, 0.2))
    return {
        "copy_gb_per_s": rates[8 * source.numel()],
        "copies_gb_per_s": rates,
        "matmul_tflop_per_s": 2 * size**3 / matmul / 1e12,
    }


def _of_this_kind(spec: LayerSpec, device: Device, reference: bool) -> list[str]:
    """Return the backends of a layer's kind on a device's platform; the `reference` where asked for."""
    return [
        info.name
        for info in discover().backends.values()
        if info.capabilities.attends
        and spec.kind in info.capabilities.kinds
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
    console.print(f"{spec}\non {device}", highlight=False, markup=False)
    copies = ", ".join(
        f"{size / 2**20:g} MiB {rate:.1f}"
        for size, rate in sorted(limits["copies_gb_per_s"].items())
    )
    console.print(
        f"limits measured now: {spec.dtype} matmul {limits['matmul_tflop_per_s']:.3f} TFLOP/s; copy, in "
        f"GB/s, of {copies}\n",
        highlight=False,
    )
    made = table(
        "batch", "backend", ">ms", ">/ best", ">GB/s", ">TFLOP/s", ">of limit", ">error", ""
    )
    for row in rows:
        if "ms" not in row:
            continue
        add_row(
            made, row["batch"], row["backend"], f"{row['ms']:.3f}", f"{row['over_best']:.2f}",
            f"{row['gb_per_s']:.2f}",
            f"{row['tflop_per_s']:.3f}", f"{row['of_limit']:.0%}", f"{row['error']:.1e}",
            "<- selected" if row["selected"] else "",
        )  # fmt: skip
    console.print(made)
    for row in rows:
        if "saved_bytes" in row:
            console.print(
                f"{row['batch']}, {row['backend']}: {row['blocks_read']} blocks read, "
                f"{row['distinct_blocks']} distinct: {row['shared_bytes'] / 2**20:.1f} MiB are the same; "
                f"{row['saved_bytes'] / 2**20:.1f} MiB were read once for all",
                markup=False, highlight=False,
            )  # fmt: skip
        if "cannot" in row:
            console.print(f"{row['batch']}: {row['cannot']}", markup=False, highlight=False)


def _done(_: torch.Tensor) -> None:
    """Drop a result, where a call must return nothing."""
