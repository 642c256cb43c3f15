"""`polyattn tune`: measures the backends on this machine and writes a timing table."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from polyattn.device import Device
from polyattn.errors import SettingsError
from polyattn.registry.devices import resolve_device
from polyattn.registry.discovery import discover
from polyattn.registry.timings import MEASURED, default_path, in_words
from polyattn.spec.decompose import unrotated
from polyattn.spec.kinds import Role
from polyattn.spec.layer import LayerSpec
from polyattn.tools.cli.files import check_target
from polyattn.tools.cli.models import DEFAULT_TRACE, bundled, read_specs
from polyattn.tools.cli.options import TuneOptions
from polyattn.tools.cli.output import bar, print_json, print_rows, say
from polyattn.tools.cli.plots import check_plot, plot_values
from polyattn.tools.lengths import of_trace
from polyattn.tools.tune import tables
from polyattn.tools.tune.measuring import processors_of
from polyattn.tools.tune.points import PointsFile
from polyattn.tools.tune.shapes import layers
from polyattn.tools.tune.tuning import SEED, Tuning, facts_of, left_out, points_path

LONGEST = 7 * 24 * 3600


def show(options: TuneOptions) -> int:
    """Measure, fit, write and print; return 1 when nothing could be fitted."""
    if not 0 <= options.seconds <= LONGEST:
        raise SettingsError(f"--seconds={options.seconds} must be 0 or positive, {LONGEST} at most")
    _check_scipy()
    if options.plot:
        check_plot(options.plot)
    resolved = resolve_device(options.device)
    if not resolved.is_real:
        raise SettingsError(f"--device: {resolved} is a profile; tune needs a device to run on")
    path = options.out or default_path()
    if path is None:
        raise SettingsError("there is no home directory to write to; name a file: --out FILE")
    if options.out is None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(
                f"{path.parent} can't be made: {error.strerror}; name a file: --out FILE"
            ) from error
    check_target("--out", path)  # a folder such as "." has no name to make the points' name of
    check_target("--out", points_path(path))
    registry = discover()
    named = [registry.backend(name).name for name in options.backend or []]
    trace = options.trace or bundled(DEFAULT_TRACE)
    traces = {"trace": of_trace(trace)}
    points = PointsFile(points_path(path), facts_of(resolved, registry, SEED, trace))
    tuning = Tuning(resolved, points, traces, left_out(named))
    specs = _layers(options, resolved)
    if options.batch_invariant is not None:
        specs += [spec.replace(batch_invariant=options.batch_invariant) for spec in specs]
    with bar(quiet=options.json) as show_done:
        tuning.run(specs, options.seconds, show_done)
    processors = processors_of(resolved)
    fits = tables.fits(points.measured(), processors)
    data = tables.table(fits, resolved, registry, processors)
    data, fuller = tables.with_fuller(data, path, resolved, points.measured())
    tuning.notes += fuller
    written = path if fits else None  # an older table isn't given up for an empty one
    if written:
        tables.write(data, written)
    report = _report(fits, tuning, points)
    if options.json:
        print_json({"table": written and str(written), "device": str(resolved), **report})
    else:
        _print(written, resolved, report)
    if options.plot and report["choice"]:
        panels = {
            f"{kind}, {row['steps']} steps": {
                what: row[field]
                for what, field in (("mean", "over_best"), ("p95", "p95"), ("worst", "worst"))
            }
            for kind, row in report["choice"].items()
        }
        plot_values(panels, options.plot, f"tuned on {resolved}", "chosen backend's time / best")
    return int(not fits)


def _check_scipy() -> None:
    """Check the fit's requirements before minutes of measuring."""
    from polyattn.registry.distributions import find_spec

    if find_spec("scipy") is None:
        raise SettingsError('tune needs scipy: pip install "polyattn[tune]"')


def _layers(options: TuneOptions, device: Device) -> list[LayerSpec]:
    cache = {"kv_cache_dtype": options.kv_cache_dtype, "block_size": options.block_size}
    if not options.model and options.spec is None:
        changes = {name: value for name, value in cache.items() if value is not None}
        usual = layers(device.is_accelerator, options.quantized)
        return list(dict.fromkeys(spec.replace(**changes) for spec in usual))
    measured: dict[LayerSpec, None] = {}
    models: list[str | None] = [*options.model] if options.model else [None]
    for model in models:
        source, specs = read_specs(model, options.spec, options)
        mine = [
            unrotated(spec)
            for spec in specs
            if spec.kind in MEASURED and spec.cached and spec.role is Role.DECODER
        ]
        if not mine:
            raise SettingsError(
                f"{source}: has no layer of kind {' or '.join(MEASURED)} with a cache to measure; "
                "`polyattn run` times the others"
            )
        measured |= dict.fromkeys(mine)
    return list(measured)


def _report(fits: dict[tables.Key, Any], tuning: Tuning, points: PointsFile) -> dict[str, Any]:
    failures = sorted({f"{m.backend}, {m.sample.kind}: {m.cannot}" for m in points.failed()})
    return {
        "points": sum(1 for _ in points.measured()),
        "models": [
            {
                "backend": backend, "kind": kind, "layer": dict(layer), "points": len(members),
                "error": made.error, "overlap": made.form.overlap, "whole": made.form.whole,
            }
            for (layer, kind, backend), (made, members) in sorted(fits.items(), key=str)
        ],
        "choice": {
            kind: {
                "steps": len(costs), "over_best": tables.mean(costs), "worst": max(costs),
                "p95": statistics.quantiles(costs, n=20)[-1] if len(costs) > 1 else costs[0],
            }
            for kind, costs in tables.regrets(fits).items()
        },
        "notes": [*tuning.notes, *failures],
    }  # fmt: skip


def _print(path: Path | None, device: Device, report: dict[str, Any]) -> None:
    columns = {
        "backend": "{backend}", "kind": "{kind}",
        "layers": "{layers}",
        ">points": "{points}", ">error": "{error:.1%}", "form": "{form}",
    }  # fmt: skip
    models = [
        {**row, "form": _form(row), "layers": in_words(row["layer"])} for row in report["models"]
    ]
    if models:
        print_rows(columns, models)
    columns = {
        "kind": "{kind}", ">steps": "{steps}", ">chosen / best": "{over_best:.3f}", ">p95": "{p95:.2f}",
        ">worst": "{worst:.2f}",
    }  # fmt: skip
    choice = [{"kind": kind, **row} for kind, row in report["choice"].items()]
    if choice:
        say("\nSteps that the coefficients were not fitted to:")
        print_rows(columns, choice)
        say("")
    for note in report["notes"]:
        say(f"note: {note}")
    nothing = "no table is written: too few points for a fit; read the notes, or raise --seconds"
    end = f"written: {path}" if path else nothing
    say(f"{report['points']} points on {device}; {end}")


def _form(row: dict[str, Any]) -> str:
    """Return how a model adds its terms up."""
    form = "overlap" if row["overlap"] else "sum"
    return f"{form}, cut below {row['whole']} tiles" if row["whole"] else form
