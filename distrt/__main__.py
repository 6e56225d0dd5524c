"""``python -m distrt``: the command line (layer 7). May import: cli."""

import sys

from distrt.cli import main

if __name__ == "__main__":
    sys.exit(main())
