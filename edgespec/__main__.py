"""`python -m edgespec` is the `edgespec` command."""

import sys

from edgespec.cli import main

sys.exit(main())
