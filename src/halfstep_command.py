"""The `halfstep` command before the package is loaded: Ctrl-C while that goes on ends in one line too."""

import os
import signal
import sys
from typing import Any

INTERRUPTED = 130


def main() -> int:
    """Load the command line and run it; returns the exit code."""
    before = signal.signal(signal.SIGINT, _leave)
    from halfstep.cli import main as run

    signal.signal(signal.SIGINT, before)
    return run()


def _leave(*_: Any) -> None:
    # No exception: some of what is being imported would swallow it or wrap it in one of its own.
    os.write(sys.stderr.fileno(), b"halfstep: interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
