"""`python -m wardround`: the same as the `wardround` command."""

import sys

from wardround.cli import main

sys.exit(main())
