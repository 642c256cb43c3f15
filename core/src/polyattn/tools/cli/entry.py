"""Where the `polyattn` script starts."""

from __future__ import annotations

import os
import sys

from polyattn.errors import PolyattnError


def main() -> None:
    """Run the command line; a polyattn error is its message and exit code 2."""
    try:
        try:
            _run()
        finally:  # not left to the interpreter's end, where nobody catches what it raises
            sys.stdout.flush()
    except PolyattnError as error:
        print(f"polyattn: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:  # whoever read the output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def _run() -> None:
    """`polyattn list` without the command-line library, whose import takes longer than the answer.

    Shells and operators call it often.
    """
    if sys.argv[1:] in (["list"], ["list", "--json"]):
        from polyattn.tools.cli.listing import show

        show(as_json="--json" in sys.argv)
        return
    from polyattn.tools.cli.main import app

    app()
