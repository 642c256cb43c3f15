"""Prints tables and JSON."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

# Where output is piped, a line is a line: wrapping at 80 columns would break names in two.
_terminal = Console()
console = _terminal if _terminal.is_terminal else Console(width=200)


def print_json(value: Any) -> None:
    """Print JSON that a program can read: no colours, no wrapping."""
    print(json.dumps(value, indent=2, default=str))


def table(*columns: str, title: str | None = None) -> Table:
    """Return a table with the house style; columns that start with `>` are right-aligned."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.startswith(">")
        made.add_column(column.removeprefix(">"), justify="right" if right else "left")
    return made
