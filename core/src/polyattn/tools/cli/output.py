"""Prints tables and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from polyattn.tools.cli import stdout
from polyattn.tools.cli.listing import WIDTH


class _Own:
    """The command's own stream of the moment, because rich keeps the file that it gets."""

    def __getattr__(self, name: str) -> Any:
        return getattr(stdout.stream(), name)


# Where output is piped, a line is a line: wrapping at 80 columns would break names in two.
_terminal = Console(file=cast(TextIO, _Own()))
console = _terminal if _terminal.is_terminal else Console(file=cast(TextIO, _Own()), width=200)


@contextmanager
def progress(what: str, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show progress on standard error if it is a terminal; yields the function that reports it."""
    if quiet or not sys.stderr.isatty():
        yield lambda text: None
        return
    with Console(stderr=True).status(what) as status:
        yield lambda text: status.update(f"{what} {escape(text)}")


@contextmanager
def bar(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar if standard error is a terminal; yields what sets its text, count and total."""
    if quiet or not sys.stderr.isatty():
        yield lambda text, done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def show(text: str, done: int, total: int) -> None:
            progress.update(task, description=text[:60], completed=done, total=total)

        yield show


def say(text: str) -> None:
    """Print text as it is: brackets in it are no markup, and its numbers have no colours."""
    console.print(text, markup=False, highlight=False)


def print_json(value: Any) -> None:
    """Print JSON that a program can read: no colours, no wrapping."""
    stdout.write(json.dumps(value, indent=2, default=str))


class _Narrow(Table):
    """A table of `WIDTH` columns at most, however wide the console is; long cells go on below."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        narrow = options.update_width(min(options.max_width, WIDTH))
        return super().__rich_console__(console, narrow)


def print_rows(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Print a table: each column's heading, and the format of its cells.

    Headings that start with `>` are right-aligned; where all are blank, none is shown. Cells are shown
    as they are: brackets in them are no markup.
    """
    heads = any(map(str.strip, columns))
    grid = _Narrow(box=None, pad_edge=False, header_style="bold", show_header=heads)
    for heading in columns:
        side: Literal["left", "right"] = "right" if heading.startswith(">") else "left"
        grid.add_column(heading.removeprefix(">"), justify=side, overflow="fold")
    for row in rows:
        grid.add_row(*(Text(form.format_map(row)) for form in columns.values()))
    console.print(grid)
