"""`python -m grassy` is the command `grassy`."""

import sys

from grassy.cli import main

sys.exit(main())
