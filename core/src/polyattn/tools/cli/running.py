"""`polyattn run`: the main job, from a config and a trace to a report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from polyattn.api import select_layers
from polyattn.device import Device
from polyattn.errors import SettingsError, shown
from polyattn.registry.devices import resolve_device
from polyattn.registry.discovery import discover
from polyattn.registry.machine import interpreted
from polyattn.runtime.cache.state_cache import StateCacheSpec
from polyattn.selection.selection import SelectedLayers
from polyattn.settings import current_settings
from polyattn.spec.decompose import unrotated
from polyattn.spec.kinds import AttentionKind, Role
from polyattn.spec.layer import LayerSpec
from polyattn.spec.models import model_reader
from polyattn.tools.cli.launch import check_launch, joined
from polyattn.tools.cli.memory import check_room, said_plainly
from polyattn.tools.cli.models import DEFAULT_TRACE, bundled, has_blocks, read_specs
from polyattn.tools.cli.options import RunOptions
from polyattn.tools.cli.output import bar, print_json, print_rows, say
from polyattn.tools.cli.plots import check_plot, plot_run
from polyattn.tools.cli.weights import Whole, model_of, whole_model
from polyattn.tools.replay.arrivals import Arrivals
from polyattn.tools.replay.engine import Engine, fit_requests
from polyattn.tools.replay.report import Report
from polyattn.tools.replay.runners import Options, Ranks
from polyattn.tools.replay.trace import Request, read_trace, sampled

LARGEST_SCALE, LARGEST_CACHE = 1e6, 1e9
PRETENDED = "interpreted on this machine's CPU: results are checked, times aren't the device's"


def show(options: RunOptions) -> int:
    """Serve and print the report."""
    for name, most in (("scale", LARGEST_SCALE), ("cache_gb", LARGEST_CACHE)):
        value = getattr(options, name)
        if not 0 < value <= most:
            raise SettingsError(
                f"--{name.replace('_', '-')}={value} must be positive, {most:g} at most"
            )
    if options.plot:
        check_plot(options.plot)
    _check_quantization(options)
    arrivals = Arrivals.parse(options.arrivals)
    model = model_of(options.model, options.weights)
    path, specs = read_specs(model, None, options)
    served = _served(specs, options)
    whole = None
    if options.weights is not None:
        if options.layers is not None:
            raise SettingsError(
                f"--layers={options.layers} and --weights: a model with weights runs "
                "whole; drop one of them"
            )
        if options.context_parallel > 1:
            raise SettingsError(
                f"--context-parallel={options.context_parallel} and --weights: ranks share the layers' "
                "keys, not a whole model; drop one of them"
            )
        whole = whole_model(
            options.weights, path, served, options.seed, options.assume, options.quantization
        )
        if not options.yes:
            whole.confirm()
    trace = options.trace or bundled(DEFAULT_TRACE)
    requests = read_trace(trace, options.requests, times=arrivals.kind == "trace")
    check_launch(options.context_parallel)
    profile = resolve_device(options.device)
    device, context = interpreted(discover(), profile)
    with context, joined(options.context_parallel, device) as ranks:
        return _serve(options, path, served, whole, requests, arrivals, device, profile, ranks)


def _check_quantization(options: RunOptions) -> None:
    if options.quantization not in (None, "fp8"):
        raise SettingsError(
            f"--quantization={shown(options.quantization)} must be fp8; a checkpoint's own scheme "
            "needs no option, and the cache's is --kv-cache-dtype"
        )
    if options.quantization is not None and options.weights is None:
        raise SettingsError(
            "--quantization=fp8 is of --weights, and none are named; --kv-cache-dtype=fp8 is of the cache"
        )


def _serve(
    options: RunOptions,
    path: str,
    served: list[LayerSpec],
    whole: Whole | None,
    requests: list[Request],
    arrivals: Arrivals,
    device: Device,
    profile: Device,
    ranks: Ranks | None,
) -> int:
    """Select, serve and print; of another `device` than the profile, which it interprets, say so.

    If there are several `ranks`, the first one prints.
    """
    silent = ranks is not None and ranks.rank > 0
    pretends = device is not profile
    settings = current_settings().with_backend(options.backend, "flag --backend")
    room, what = options.cache_gb * 2**30, f"--cache-gb={options.cache_gb:g}"
    if whole is not None:
        room, what = room + whole.bytes, f"{what} and the weights of {path}"
    check_room(room, what, device, "lower --cache-gb")
    # On an accelerator the check also compiles kernels, outside the times that are reported.
    verify = True if device.is_accelerator and not pretends else None
    groups = select_layers(served, device, settings=settings, verify=verify)
    if not options.json and not silent:
        _print_selection(_name(path), groups, options, whole)
        if pretends:
            say(f"  {PRETENDED}")
    requests = [request.scaled(options.scale) for request in requests]
    config = model_reader().read_config(path)
    requests, clipped = fit_requests(requests, config, served, options.max_tokens)
    requests = sampled(arrivals.of(requests, options.seed), options.samples)
    with said_plainly("lower --cache-gb, --token-budget or --layers"):
        model = None if whole is None else whole.load(device)
        engine = Engine(groups, requests, _engine_options(options, ranks), model)
        with bar(quiet=options.json or silent) as show_done:
            report = engine.run(lambda done, total: show_done("serving", done, total))
    if silent:
        return 0
    if options.json:
        summary = _json(_name(path), groups, options, clipped, report)
        print_json({"interpreted": pretends, **summary})
    else:
        _print_report(report, clipped, options)
    if options.plot:
        plot_run(report, options.plot)
    return 0


def _name(path: str) -> str:
    """Return a model's name in reports: its file's name, or its folder's."""
    file = Path(path).absolute()
    folder = file.parent if file.name == "config.json" else file
    return folder.name if folder.is_dir() else file.stem


def _served(specs: list[LayerSpec], options: RunOptions) -> list[LayerSpec]:
    """Return the layers as the command line wants them served."""
    recurrent = any(spec.kind.is_recurrent for spec in specs)
    streams, cached = any(map(_streams, specs)), any(map(has_blocks, specs))
    for flag, value, of, some in (
        ("--sliding-window", options.sliding_window, "attention layers of a decoder", streams),
        ("--sink-tokens", options.sink_tokens, "attention layers of a decoder", streams),
        ("--snapshots", options.snapshots, "recurrent layers", recurrent),
        ("--fp8-compute", options.fp8_compute or None, "layers over a cache", cached),
    ):
        if value is not None and not some:
            raise SettingsError(f"{flag}={value} needs {of}, and the model has none; leave it out")
    served = []
    for spec in specs:
        changes: dict[str, Any] = {}
        if has_blocks(spec):
            changes = {"fp8_compute": options.fp8_compute, **_streaming(spec, options)}
        if (
            options.context_parallel > 1
            and not spec.kind.is_recurrent
            and spec.role is Role.DECODER
        ):
            changes["needs_lse"] = True  # states of several ranks merge by it
        spec = spec.replace(**changes)
        # Random queries and keys stand for rotated ones; a whole model's layers rotate theirs.
        served.append(unrotated(spec) if options.weights is None else spec)
    return served


def _streams(spec: LayerSpec) -> bool:
    """Whether a layer takes the options of StreamingLLM."""
    return spec.kind is AttentionKind.ATTENTION and spec.role is Role.DECODER


def _streaming(spec: LayerSpec, options: RunOptions) -> dict[str, Any]:
    """Return StreamingLLM's fields of a layer: a window, sink tokens, positions within the cache."""
    if (options.sliding_window is None and options.sink_tokens is None) or not _streams(spec):
        return {}
    changes: dict[str, Any] = {}
    if options.sliding_window is not None:
        changes["sliding_window"] = options.sliding_window
    if options.sink_tokens is not None:
        if (options.sliding_window or spec.sliding_window) is None:
            raise SettingsError(
                f"--sink-tokens={options.sink_tokens} needs a window in every attention layer, and "
                f"{spec} has none; pass --sliding-window, too"
            )
        changes["sink_tokens"] = options.sink_tokens
        if spec.rope is not None:
            changes["rope"] = replace(spec.rope, positions="cache")
    return changes


def _engine_options(options: RunOptions, ranks: Ranks | None) -> Options:
    return Options(
        layers=options.running,
        token_budget=options.token_budget,
        max_seqs=options.max_seqs,
        snapshots=options.kept_states,
        cache_bytes=int(options.cache_gb * 2**30),
        check_tokens=options.check,
        seed=options.seed,
        context=ranks,
    )


def _print_selection(
    model: str, groups: list[SelectedLayers], options: RunOptions, whole: Whole | None
) -> None:
    where = f" on {groups[0].selection.device}" if groups else ""
    say(f"{model}{where}")
    if whole is not None:
        say(f"  {whole.describe()}")
    for group in groups:
        running = min(options.running, len(group.layers))
        say(f"  {len(group.layers)} layers ({running} run): {group.spec}")
        say(f"    => {group.selection.decision.summary()}")
        for note in group.selection.decision.notes:
            say(f"    note: {note}")
        line = memory_line(group)
        if line:
            say(f"    {line}")
    if any(g.spec.kind.is_recurrent for g in groups):
        say(f"  {options.kept_states} snapshots of recurrent states, for shared prefixes")


def memory_line(group: SelectedLayers) -> str | None:
    """Describe the cost of a token or sequence in latents and states."""
    spec, count = group.spec, len(group.layers)
    if spec.kind.is_recurrent:
        size = StateCacheSpec.for_layer(spec, 1).bytes_per_slot
        return f"state: {size * count / 2**20:.2f} MiB a sequence in {count} layers, any length"
    cache = group.selection.cache_format
    if spec.latent is None or cache is None:
        return None
    wide = spec.num_heads * (spec.head_size + spec.v_head_size)
    narrow = spec.latent.size
    return (
        f"cache: {cache.bytes_per_token} bytes a token and layer, {narrow} elements where MHA would "
        f"hold {wide}: {wide / narrow:.1f} times less"
    )


def _print_report(report: Report, clipped: int, options: RunOptions) -> None:
    data = report.to_dict()
    columns = {
        "steps": "{of}", ">steps": "{steps}", ">tokens": "{tokens}", ">seconds": "{seconds:.2f}",
        ">p50 ms": "{p50_ms:.2f}", ">p99 ms": "{p99_ms:.2f}",
    }  # fmt: skip
    if not report.whole_model:
        columns |= {">GB/s": "{gb_per_s:.2f}", ">TFLOP/s": "{tflop_per_s:.4f}"}
    phases = {"with prefill": data["prefill"], "decode only": data["decode"]}
    say("")
    print_rows(columns, ({"of": of, **row} for of, row in phases.items()))
    say("")
    say(
        f"{data['requests']} requests in {data['steps']} steps: {data['tokens']} tokens computed, "
        f"{data['shared_prefix_tokens']} shared by prefix, {data['generated_tokens']} generated, "
        f"{data['preemptions']} preemptions; cache use at most {data['cache_use_peak']:.0%}"
    )
    for line in cache_lines(report):
        say(line)
    times, alone = data["latency"], "" if report.whole_model else " of the layers that ran"
    say(
        f"time{alone}, arrivals {options.arrivals}: to the first token p50 {times['ttft_p50_ms']:.2f} "
        f"ms, p99 {times['ttft_p99_ms']:.2f} ms; between tokens p50 {times['itl_p50_ms']:.2f} ms, p99 "
        f"{times['itl_p99_ms']:.2f} ms"
    )
    for index, tokens in enumerate(report.outputs):
        ids = " ".join(map(str, tokens))
        say(f"tokens of request {index}: {ids}")
    if clipped:
        say(f"{clipped} prompts were clipped to the model's longest sequence")
    say(
        f"{data['checked_tokens']} tokens checked against the float64 reference, largest relative "
        f"error {data['max_error']:.2g}"
    )


def cache_lines(report: Report) -> list[str]:
    """Say what sharing saved, and how few blocks a window needs."""
    lines, shared = [], report.sharing()
    if shared["shared_bytes"]:
        lines.append(
            f"sharing: {shared['blocks_read']} blocks read, {shared['distinct_blocks']} distinct: "
            f"{shared['shared_bytes'] / 2**20:.1f} MiB are the same; {shared['saved_bytes'] / 2**20:.1f} "
            f"MiB were read once for all; {shared['blocks_copied']} blocks copied on write"
        )
    if shared["states_copied"]:
        lines.append(
            f"states: {shared['states_copied']} times a sequence continued from a snapshot"
        )
    for usage in report.usage:
        if usage.shared_bytes and usage.unshared:
            lines.append(f"each row reads shared blocks for itself: {usage.unshared}")
        cache = usage.to_dict()
        if cache["window"] is not None:
            sinks = f" and {cache['sinks']} sink tokens" if cache["sinks"] else ""
            lines.append(
                f"window of {cache['window']}{sinks}: a sequence that decodes held at most "
                f"{cache['decode_blocks']} blocks of {cache['block_size']}; of {cache['blocks']} in all"
            )
    return lines


def _json(
    model: str, groups: list[SelectedLayers], options: RunOptions, clipped: int, report: Report
) -> dict[str, Any]:
    return {
        "model": model,
        "weights": options.weights,
        "arrivals": options.arrivals,
        "context_parallel": options.context_parallel,
        "groups": [{"layers": list(g.layers), **g.selection.decision.to_dict()} for g in groups],
        "clipped_prompts": clipped,
        **report.to_dict(),
    }
