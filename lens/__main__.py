"""`python -m lens` is the `lens` command."""

import sys

from lens.cli import main

sys.exit(main())
