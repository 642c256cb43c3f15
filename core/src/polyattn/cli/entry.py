"""Where the `polyattn` script starts."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line.

    `polyattn list` is answered without the command-line library, whose import takes longer than
    the answer; shells and operators call it often.
    """
    if sys.argv[1:] in (["list"], ["list", "--json"]):
        from polyattn.cli.listing import show
        from polyattn.errors import PolyattnError

        try:
            show(as_json="--json" in sys.argv)
        except PolyattnError as error:
            print(f"polyattn: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        return
    from polyattn.cli.main import main as run

    run()
