"""``python -m prism``: the command line."""

import sys

from prism.cli.main import main

sys.exit(main())
