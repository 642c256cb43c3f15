"""`python -m polyattn.cli`."""

from polyattn.cli.entry import main

main()
