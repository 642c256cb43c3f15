"""`python -m polyattn`."""

import sys

from polyattn.tools.cli.entry import main

sys.exit(main())
