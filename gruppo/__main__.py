"""`python -m gruppo` is the `gruppo` command."""

import sys

from gruppo.cli import main

if __name__ == "__main__":
    sys.exit(main())
