"""`python -m halfstep`: the command where no script is on the path, as under `torchrun -m`."""

import sys

from halfstep.cli import main

if __name__ == "__main__":
    sys.exit(main())
