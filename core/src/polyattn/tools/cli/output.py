"""Prints tables and JSON."""

from __future__ import annotations

import json
from typing import Any, TextIO, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from polyattn.tools.cli import stdout


class _Own:
    """The command's own stream, wherever it is at the time: rich keeps the file it is given."""

    def __getattr__(self, name: str) -> Any:
        return getattr(stdout.stream(), name)


# Where output is piped, a line is a line: wrapping at 80 columns would break names in two.
_terminal = Console(file=cast(TextIO, _Own()))
console = _terminal if _terminal.is_terminal else Console(file=cast(TextIO, _Own()), width=200)


def print_json(value: Any) -> None:
    """Print JSON that a program can read: no colours, no wrapping."""
    stdout.write(json.dumps(value, indent=2, default=str))


def table(*columns: str, title: str | None = None) -> Table:
    """Return a table with the house style; columns that start with `>` are right-aligned."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.startswith(">")
        made.add_column(column.removeprefix(">"), justify="right" if right else "left")
    return made


def add_row(to: Table, *cells: str) -> None:
    """Add a row whose cells are shown as they are: brackets in them are no markup."""
    to.add_row(*map(Text, cells))
