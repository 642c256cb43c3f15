"""Where the `polyattn` script starts, and where every error becomes a line and an exit code.

0: done. 1: done, and something is wrong (`doctor`, `explain`, `bench`, `claim`) or absent (`why`).
2: polyattn can't do what you asked. 130: interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from polyattn._version import __version__
from polyattn.errors import PolyattnError, SettingsError
from polyattn.tools.cli import stdout

INTERRUPTED = 130


def main() -> int:
    """Run the command line of this process and return its exit code."""
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for good
    if sys.stdout is None:
        print("polyattn: standard output is closed", file=sys.stderr)
        return 2
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may have it ignored
        signal.signal(signal.SIGINT, _interrupt)
    return run(sys.argv[1:])


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """End the process at once, rather than by KeyboardInterrupt.

    Libraries drop that exception in finalizers, callbacks and a bare `except:`. Raised while
    torch's extension modules initialise, it aborts the process.
    """
    os.write(2, b"polyattn: interrupted\n")
    os._exit(INTERRUPTED)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        try:
            return _dispatch(list(arguments))
        finally:  # at the interpreter's end no code would catch its exception
            sys.stdout.flush()
    except PolyattnError as error:
        print(f"polyattn: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of the output has gone, as `head` does
        stdout.discard()
        return 1
    except OSError as error:  # a full disk, a file that vanished
        stdout.discard()
        print(f"polyattn: {error.filename or 'standard output'}: {error.strerror}", file=sys.stderr)
        return 2


def _dispatch(arguments: list[str]) -> int:
    """`list` and `--version` go without the command-line library, whose import takes longer.

    Shells and operators call them often.
    """
    if arguments == ["--version"]:
        stdout.write(f"polyattn {__version__}")
        return 0
    if arguments in (["list"], ["list", "--json"]):
        from polyattn.tools.cli.listing import show

        with stdout.claimed():
            return show(as_json="--json" in arguments)
    try:
        from polyattn.tools.cli.main import app
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        raise SettingsError(
            f'this command needs {error.name}: pip install "polyattn[cli]"'
        ) from error
    try:
        app(arguments, prog_name="polyattn")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
