"""The program's entry: an interrupt while it is still being loaded ends as any other does."""

from __future__ import annotations

import sys


def main() -> None:
    """Load the command line and run it."""
    try:
        from flashtrie_cli.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("flashtrie: interrupted\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
