"""The commands and their options. Each command's work is in a module of its own, imported when
it runs, so that `polyattn list` costs milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from polyattn._version import __version__
from polyattn.registry.builtin_row_formats import ROW_FORMATS
from polyattn.tools.cli import stdout

app = typer.Typer(
    name="polyattn",
    help="One attention interface, every vendor's kernels.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

LARGEST_SEED = 2**63 - 1
LARGEST_COUNT = 10**9


def count(text: str, least: int = 1) -> Any:
    """Return an option that counts something."""
    return typer.Option(min=least, max=LARGEST_COUNT, help=text)


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
BackendOption = Annotated[
    str | None,
    typer.Option(
        "--backend",
        "--attention-backend",
        help="A backend, or scoped ones: prefill=NAME,decode=NAME.",
    ),
]
BackendsOption = Annotated[
    list[str] | None,
    typer.Option("--backend", "--attention-backend", help="Only these backends (repeatable)."),
]
SpecOption = Annotated[
    str | None,
    typer.Option("--spec", help="A LayerSpec as JSON, instead of a model."),
]
CacheDtypeOption = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-dtype",
        help="auto (the checkpoint's, else the model's dtype), fp8 (fp8_e4m3), fp8_e5m2, int8, or "
        f"a format of rows: {', '.join(sorted(form.name for form in ROW_FORMATS))}; plugins may "
        "add others.",
    ),
]
QuantizationOption = Annotated[
    str | None,
    typer.Option(
        help="fp8: the weights' projections in e4m3. The cache's format is --kv-cache-dtype."
    ),
]
BlockSizeOption = Annotated[int | None, count("Cache block size (default: the selector chooses).")]
SamplesOption = Annotated[
    int | None,
    typer.Option(min=1, max=1024, help="Outputs of each prompt (default: as the trace says)."),
]
SeedOption = Annotated[
    int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of all that is random.")
]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="A profile (h100-sxm) or a torch device (cuda:0)."),
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(help="A config.json, its directory, or a bundled model's name."),
]
AssumeOption = Annotated[
    str | None, typer.Option(help="Read a config of an unknown type as this model_type's.")
]
IgnoreOption = Annotated[
    list[str] | None,
    typer.Option(help="A config's field that is known not to change attention (repeatable)."),
]
PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", help="Write a plot to this PNG file."),
]
WeightsOption = Annotated[
    str | None,
    typer.Option(help="Run the whole model: a checkpoint's folder (safetensors), or random."),
]
ArrivalsOption = Annotated[
    str, typer.Option(help="When requests come: trace, poisson:RATE (per second), or all.")
]


def _finish(show: Callable[[], int]) -> NoReturn:
    """Run a command's work with standard output to itself, and exit with its code."""
    with stdout.claimed():
        code = show()
    raise typer.Exit(code)


def _print_version(asked: bool) -> None:
    if asked:
        stdout.write(f"polyattn {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """One attention interface, every vendor's kernels."""


@app.command("list")
def list_command(
    everything: Annotated[
        bool, typer.Option("--all", help="List what isn't installed, and how to install it, too.")
    ] = False,
    json: Json = False,
) -> None:
    """List plugins and backends, and what is wrong with any of them."""
    from polyattn.tools.cli.listing import show

    _finish(lambda: show(json, everything))


@app.command()
def explain(
    model: ModelArgument = None,
    device: DeviceOption = None,
    backend: BackendOption = None,
    spec: SpecOption = None,
    batch: Annotated[
        list[str] | None,
        typer.Option("--batch", help="Predict a step like 24q1s4k on each backend (repeatable)."),
    ] = None,
    formats: Annotated[
        bool, typer.Option("--formats", help="Compare the formats that the cache could have.")
    ] = False,
    kv_cache_dtype: CacheDtypeOption = None,
    block_size: BlockSizeOption = None,
    assume: AssumeOption = None,
    ignore: IgnoreOption = None,
    json: Json = False,
    plot: PlotOption = None,
) -> None:
    """Show which backend each layer gets, with every candidate's verdict and predicted times."""
    from polyattn.tools.cli.explaining import show
    from polyattn.tools.cli.models import Reading

    reading = Reading(assume, tuple(ignore or ()), kv_cache_dtype, block_size)
    _finish(lambda: show(model, spec, device, backend, batch or [], json, reading, plot, formats))


@app.command()
def build(
    model: ModelArgument = None,
    device: DeviceOption = None,
    backend: BackendOption = None,
    spec: SpecOption = None,
    kv_cache_dtype: CacheDtypeOption = None,
    block_size: BlockSizeOption = None,
    assume: AssumeOption = None,
    ignore: IgnoreOption = None,
) -> None:
    """Compile ahead what a model's layers may run on this machine."""
    from polyattn.tools.cli.building import show
    from polyattn.tools.cli.models import Reading

    reading = Reading(assume, tuple(ignore or ()), kv_cache_dtype, block_size)
    _finish(lambda: show(model, spec, device, backend, reading))


@app.command()
def why(
    process: Annotated[
        int | None, typer.Argument(help="A process's id (default: all that run).", min=1)
    ] = None,
    json: Json = False,
) -> None:
    """Show which backends a running process uses, and why."""
    from polyattn.tools.cli.why import show

    _finish(lambda: show(process, json))


@app.command()
def doctor(json: Json = False) -> None:
    """Report versions, devices, plugins, variables; exit 1 when something is wrong."""
    from polyattn.tools.cli.doctoring import show

    _finish(lambda: show(json))


@app.command()
def run(
    model: ModelArgument = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="A request trace: Azure CSV or Mooncake JSONL."),
    ] = None,
    requests: Annotated[int, count("Requests of the trace to serve.")] = 16,
    samples: SamplesOption = None,
    weights: WeightsOption = None,
    arrivals: ArrivalsOption = "all",
    layers: Annotated[int | None, count("Layers of each group that run (default: 1).")] = None,
    max_tokens: Annotated[int, count("Most tokens generated for a request.")] = 32,
    scale: Annotated[float, typer.Option(help="Multiply the trace's lengths.")] = 1.0,
    token_budget: Annotated[int, count("Most tokens in a step.")] = 2048,
    max_seqs: Annotated[int, count("Most sequences in flight.")] = 64,
    cache_gb: Annotated[float, typer.Option(help="KV cache of all layers, GiB.")] = 1.0,
    snapshots: Annotated[int, count("Recurrent states kept of shared prefixes.")] = 16,
    block_size: BlockSizeOption = None,
    kv_cache_dtype: CacheDtypeOption = None,
    quantization: QuantizationOption = None,
    fp8_compute: Annotated[
        bool,
        typer.Option("--fp8-compute", help="Let kernels multiply in fp8_e4m3 over such a cache."),
    ] = False,
    sliding_window: Annotated[
        int | None, count("Let every attention layer see only the last N tokens.")
    ] = None,
    sink_tokens: Annotated[
        int | None, count("Keep the first N tokens beyond the window (StreamingLLM).", 0)
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Draw random weights of any size without asking.")
    ] = False,
    check: Annotated[int, count("Tokens checked for each layer and step.", 0)] = 2,
    seed: SeedOption = 0,
    device: DeviceOption = None,
    backend: BackendOption = None,
    context_parallel: Annotated[
        int, count("Ranks that share each sequence's keys (run by torchrun).")
    ] = 1,
    assume: AssumeOption = None,
    ignore: IgnoreOption = None,
    json: Json = False,
    plot: PlotOption = None,
) -> None:
    """Serve a model's attention layers, or all of it, over a request trace, checked."""
    from polyattn.tools.cli.running import RunOptions, show

    options = RunOptions(
        model=model, trace=trace, requests=requests, layers=layers, max_tokens=max_tokens,
        scale=scale, token_budget=token_budget, max_seqs=max_seqs, cache_gb=cache_gb,
        block_size=block_size, kv_cache_dtype=kv_cache_dtype, fp8_compute=fp8_compute, check=check,
        seed=seed, device=device, backend=backend, json=json, plot=plot, weights=weights,
        arrivals=arrivals, samples=samples, sliding_window=sliding_window, sink_tokens=sink_tokens,
        context_parallel=context_parallel, snapshots=snapshots, assume=assume,
        ignore=tuple(ignore or ()), yes=yes, quantization=quantization,
    )  # fmt: skip
    _finish(lambda: show(options))


@app.command()
def bench(
    batches: Annotated[
        list[str] | None,
        typer.Argument(help="8q1s2k: 8 decodes over 2k; q2k: a prefill; 2q2k_32q1s1k: mixed."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="A config.json or a bundled model (its first attention)."),
    ] = None,
    spec: SpecOption = None,
    device: DeviceOption = None,
    backend: BackendsOption = None,
    block_size: BlockSizeOption = None,
    kv_cache_dtype: CacheDtypeOption = None,
    reference: Annotated[
        bool, typer.Option("--reference", help="Time the float64 reference, too.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="Time spent on each measurement.")] = 0.5,
    total_seconds: Annotated[
        float, typer.Option(help="Begin no measurement after this time.")
    ] = 120.0,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Draw each batch's lengths again: uniform, zipf or one-long, of the same mean, or "
            "trace:FILE."
        ),
    ] = None,
    seed: SeedOption = 0,
    shared_prefix: Annotated[
        int, count("Leading tokens whose cache blocks all sequences share.", 0)
    ] = 0,
    assume: AssumeOption = None,
    ignore: IgnoreOption = None,
    json: Json = False,
    plot: PlotOption = None,
) -> None:
    """Time every backend that can serve, side by side, with the limit and the selector's choice."""
    from polyattn.tools.cli.benching import show
    from polyattn.tools.cli.models import Reading

    reading = Reading(assume, tuple(ignore or ()), kv_cache_dtype, block_size)
    _finish(
        lambda: show(
            batches or [],
            model,
            spec,
            device,
            backend or [],
            seconds,
            lengths,
            seed,
            shared_prefix,
            json,
            plot,
            reading,
            reference,
            total_seconds,
        )
    )


@app.command()
def tune(
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="Measure this model's layers (repeatable; default: a range)."),
    ] = None,
    device: DeviceOption = None,
    backend: BackendsOption = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="A request trace to take lengths from, among others."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The table (default: ~/.cache/polyattn/timings.json)."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Time for measuring; 0 fits what was measured before.")
    ] = 300.0,
    quantized: Annotated[
        bool, typer.Option(help="Measure layers over fp8 caches too, on accelerators.")
    ] = True,
    batch_invariant: Annotated[
        str | None,
        typer.Option(help="Measure the layers at this level too: batch, steps or calls."),
    ] = None,
    assume: AssumeOption = None,
    ignore: IgnoreOption = None,
    kv_cache_dtype: CacheDtypeOption = None,
    block_size: BlockSizeOption = None,
    json: Json = False,
    plot: PlotOption = None,
) -> None:
    """Measure the backends on this machine, so that each step goes to the fastest one."""
    from polyattn.tools.cli.models import Reading
    from polyattn.tools.cli.tuning import show

    reading = Reading(assume, tuple(ignore or ()), kv_cache_dtype, block_size)
    _finish(
        lambda: show(
            model or [],
            device,
            backend or [],
            trace,
            out,
            seconds,
            json,
            plot,
            quantized,
            reading,
            batch_invariant,
        )
    )


@app.command()
def claim(
    function: Annotated[str, typer.Argument(help="Where the function is: module:function.")],
    device: DeviceOption = None,
    seconds: Annotated[float, typer.Option(help="Time for the kit's search at the end.")] = 5.0,
    seed: SeedOption = 0,
) -> None:
    """Find out what a function can do, and write the decorator that makes it a backend."""
    from polyattn.tools.cli.claiming import show

    _finish(lambda: show(function, device, seed, seconds))
