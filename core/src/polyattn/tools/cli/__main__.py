"""`python -m polyattn.tools.cli`."""

import sys

from polyattn.tools.cli.entry import main

sys.exit(main())
