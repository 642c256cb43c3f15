"""The commands. Each command's work is in a module of its own, imported when it runs, so that
`polyattn list` costs milliseconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_type_hints

import typer

from polyattn._version import __version__
from polyattn.tools.cli import stdout
from polyattn.tools.cli.options import (
    BenchOptions,
    BuildOptions,
    ExplainOptions,
    Json,
    OnDevice,
    RunOptions,
    Seed,
    TuneOptions,
)

app = typer.Typer(
    name="polyattn",
    help="One attention interface, every vendor's kernels.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _exiting(work: Callable[..., int]) -> Callable[..., NoReturn]:
    """Return a command: its work with standard output to itself, and an exit with its code."""

    @wraps(work)
    def command(**values: Any) -> NoReturn:
        with stdout.claimed():
            code = work(**values)
        raise typer.Exit(code)

    return command


def _of_options(work: Callable[[Any], int]) -> Callable[..., NoReturn]:
    """Return the command of a work that takes a class of options: each field is one of them."""
    (options,) = (kind for name, kind in get_type_hints(work).items() if name != "return")

    @wraps(work)
    def command(**values: Any) -> int:
        return work(options(**values))

    parameters = list(_parameters(options))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return _exiting(command)


def _parameters(options: type) -> Iterator[inspect.Parameter]:
    """Yield a class's fields as a function's parameters: its own before those that commands share."""
    hints = get_type_hints(options, include_extras=True)
    for kind in options.__mro__[:-1]:
        for name in kind.__annotations__:
            yield inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=getattr(options, name),
                annotation=hints[name],
            )


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
@_exiting
def list_command(
    everything: Annotated[
        bool, typer.Option("--all", help="List what isn't installed, and how to install it, too.")
    ] = False,
    json: Json = False,
) -> int:
    """List plugins and backends, with their problems."""
    from polyattn.tools.cli.listing import show

    return show(json, everything)


@app.command()
@_of_options
def explain(options: ExplainOptions) -> int:
    """Show which backend each layer gets, with every candidate's verdict and predicted times."""
    from polyattn.tools.cli.explaining import show

    return show(options)


@app.command()
@_of_options
def build(options: BuildOptions) -> int:
    """Compile a model's kernels for this machine ahead of time."""
    from polyattn.tools.cli.building import show

    return show(options)


@app.command()
@_exiting
def why(
    process: Annotated[
        int | None, typer.Argument(help="A process's id (default: all that run).", min=1)
    ] = None,
    saved: Annotated[
        Path | None, typer.Option(help="A file of --json's output, in place of what runs.")
    ] = None,
    json: Json = False,
) -> int:
    """Show which backends a running process uses, and why."""
    from polyattn.tools.cli.why import show

    return show(process, json, saved)


@app.command()
@_exiting
def doctor(json: Json = False) -> int:
    """Report versions, devices, plugins, variables; exit 1 when something is wrong."""
    from polyattn.tools.cli.doctoring import show

    return show(json)


@app.command()
@_of_options
def run(options: RunOptions) -> int:
    """Serve a model's attention layers, or all of it, over a request trace, checked."""
    from polyattn.tools.cli.running import show

    return show(options)


@app.command()
@_of_options
def bench(options: BenchOptions) -> int:
    """Time every backend that can serve, side by side, with the limit and the selector's choice."""
    from polyattn.tools.cli.benching import show

    return show(options)


@app.command()
@_of_options
def tune(options: TuneOptions) -> int:
    """Measure the backends on this machine, so that each step goes to the fastest one."""
    from polyattn.tools.cli.tuning import show

    return show(options)


@app.command()
@_exiting
def claim(
    function: Annotated[str, typer.Argument(help="Where the function is: module:function.")],
    device: OnDevice = None,
    seconds: Annotated[float, typer.Option(help="Time for the kit's search at the end.")] = 5.0,
    seed: Seed = 0,
) -> int:
    """Find out what a function can do, and write the decorator that makes it a backend."""
    from polyattn.tools.cli.claiming import show

    return show(function, device, seed, seconds)
