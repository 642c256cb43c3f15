"""`python -m polyattn.tools.cli`."""

from polyattn.tools.cli.entry import main

main()
