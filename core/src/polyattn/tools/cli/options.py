"""Which options has a command? A class for each command with many of them, and the shared ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from polyattn.registry.builtin_row_formats import ROW_FORMATS

LARGEST_SEED = 2**63 - 1
LARGEST_COUNT = 10**9


def count(text: str, least: int = 1) -> Any:
    """Return an option that counts something."""
    return typer.Option(min=least, max=LARGEST_COUNT, help=text)


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Spec = Annotated[
    str | None, typer.Option("--spec", help="A LayerSpec as JSON, instead of a model.")
]
Backends = Annotated[
    list[str] | None,
    typer.Option("--backend", "--attention-backend", help="Only these backends (repeatable)."),
]
Seed = Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of all that is random.")]
OnDevice = Annotated[
    str | None, typer.Option("--device", help="A profile (h100-sxm) or a torch device (cuda:0).")
]
Model = Annotated[
    str | None,
    typer.Argument(
        help="A config.json, its directory, or a bundled model's name (default: llama-3.1-8b)."
    ),
]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a command reads a model: options of `LayerSpec.from_hf_config`, and its block size."""

    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            help="auto (the checkpoint's, else the model's dtype), fp8 (fp8_e4m3), fp8_e5m2, int8, or "
            f"a format of rows: {', '.join(sorted(form.name for form in ROW_FORMATS))}; plugins may "
            "add others."
        ),
    ] = None
    block_size: Annotated[
        int | None, count("Cache block size (default: the selector chooses).")
    ] = None
    assume: Annotated[
        str | None, typer.Option(help="Read a config of an unknown type as this model_type's.")
    ] = None
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="A config's field that is known not to change attention (repeatable)."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Where:
    """The device that layers run on, and by which backend."""

    device: OnDevice = None
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            "--attention-backend",
            help="A backend, or scoped ones: prefill=NAME,decode=NAME.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Output:
    """The output of a command."""

    json: Json = False
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this PNG file.")] = None


@dataclass(frozen=True, kw_only=True)
class BuildOptions(Where, Reading):
    """The options of `polyattn build`."""

    model: Model = None
    spec: Spec = None


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(Where, Reading, Output):
    """The options of `polyattn explain`."""

    model: Model = None
    spec: Spec = None
    batch: Annotated[
        list[str] | None,
        typer.Option(help="Predict a step like 24q1s4k on each backend (repeatable)."),
    ] = None
    formats: Annotated[
        bool, typer.Option("--formats", help="Compare the formats that the cache could have.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class RunOptions(Where, Reading, Output):
    """The options of `polyattn run`."""

    model: Model = None
    trace: Annotated[
        Path | None, typer.Option(help="A request trace: Azure CSV or Mooncake JSONL.")
    ] = None
    requests: Annotated[int, count("Requests of the trace to serve.")] = 16
    samples: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Outputs of each prompt (default: as the trace says)."),
    ] = None
    weights: Annotated[
        str | None,
        typer.Option(help="Run the whole model: a checkpoint's folder (safetensors), or random."),
    ] = None
    quantization: Annotated[
        str | None,
        typer.Option(
            help="fp8: the weights' projections in e4m3. The cache's format is --kv-cache-dtype."
        ),
    ] = None
    arrivals: Annotated[
        str, typer.Option(help="When requests come: trace, poisson:RATE (per second), or all.")
    ] = "all"
    layers: Annotated[int | None, count("Layers of each group that run (default: 1).")] = None
    max_tokens: Annotated[int, count("Most tokens generated for a request.")] = 32
    scale: Annotated[float, typer.Option(help="Multiply the trace's lengths.")] = 1.0
    token_budget: Annotated[int, count("Most tokens in a step.")] = 2048
    max_seqs: Annotated[int, count("Most sequences in flight.")] = 64
    cache_gb: Annotated[float, typer.Option(help="KV cache of all layers, GiB.")] = 1.0
    snapshots: Annotated[
        int | None, count("Recurrent states kept of shared prefixes (default: 16).")
    ] = None
    fp8_compute: Annotated[
        bool,
        typer.Option("--fp8-compute", help="Let kernels multiply in fp8_e4m3 over such a cache."),
    ] = False
    sliding_window: Annotated[
        int | None, count("Let every attention layer see only the last N tokens.")
    ] = None
    sink_tokens: Annotated[
        int | None, count("Keep the first N tokens beyond the window (StreamingLLM).", 0)
    ] = None
    yes: Annotated[
        bool, typer.Option("--yes", help="Draw random weights of any size without asking.")
    ] = False
    check: Annotated[int, count("Tokens checked for each layer and step.", 0)] = 2
    seed: Seed = 0
    context_parallel: Annotated[
        int, count("Ranks that share each sequence's keys (run by torchrun).")
    ] = 1

    @property
    def running(self) -> int:
        """Layers of each group that run: a whole model's all do."""
        return (self.layers or 1) if self.weights is None else LARGEST_COUNT

    @property
    def kept_states(self) -> int:
        """Recurrent states kept of shared prefixes."""
        return 16 if self.snapshots is None else self.snapshots


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Reading, Output):
    """The options of `polyattn bench`."""

    batches: Annotated[
        list[str] | None,
        typer.Argument(help="8q1s2k: 8 decodes over 2k; q2k: a prefill; 2q2k_32q1s1k: mixed."),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="A config.json or a bundled model, whose first attention layer, or else its first "
            "recurrence, is timed (default: llama-3.1-8b)."
        ),
    ] = None
    spec: Spec = None
    device: OnDevice = None
    backend: Backends = None
    reference: Annotated[
        bool, typer.Option("--reference", help="Time the float64 reference, too.")
    ] = False
    seconds: Annotated[float, typer.Option(help="Time spent on each measurement.")] = 0.5
    total_seconds: Annotated[float, typer.Option(help="Begin no measurement after this time.")] = (
        120.0
    )
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Draw each batch's lengths again: uniform, zipf or one-long, of the same mean, or "
            "trace:FILE."
        ),
    ] = None
    seed: Seed = 0
    shared_prefix: Annotated[
        int, count("Leading tokens whose cache blocks all sequences share.", 0)
    ] = 0


@dataclass(frozen=True, kw_only=True)
class TuneOptions(Reading, Output):
    """The options of `polyattn tune`."""

    model: Annotated[
        list[str] | None,
        typer.Option(help="Measure this model's layers (repeatable; default: a range)."),
    ] = None
    spec: Spec = None
    device: OnDevice = None
    backend: Backends = None
    trace: Annotated[
        Path | None, typer.Option(help="A request trace to take lengths from, among others.")
    ] = None
    out: Annotated[
        Path | None, typer.Option(help="The table (default: ~/.cache/polyattn/timings.json).")
    ] = None
    seconds: Annotated[
        float, typer.Option(help="Time for measuring; 0 fits what was measured before.")
    ] = 300.0
    quantized: Annotated[
        bool, typer.Option(help="Measure layers over fp8 caches too, on accelerators.")
    ] = True
    batch_invariant: Annotated[
        str | None,
        typer.Option(help="Measure the layers at this level too: batch, steps, calls or machines."),
    ] = None
