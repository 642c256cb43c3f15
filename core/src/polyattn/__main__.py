"""`python -m polyattn`."""

from polyattn.tools.cli.entry import main

main()
