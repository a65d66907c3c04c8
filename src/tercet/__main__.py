"""`python -m tercet` is `tercet`."""

import sys

from tercet.cli import main

# Guarded: processes that the data commands spawn import this module again.
if __name__ == "__main__":
    sys.exit(main())
