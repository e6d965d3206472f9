"""The `halfstep` command before the package is loaded: what needs no torch is answered here, at once.

Ctrl-C while the package is loaded ends in one line too.
"""

import difflib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

COMMANDS: Mapping[str, str] = {
    "bench": "compare optimizers: time, memory, how far weights move",
    "devices": "show which dtypes this machine computes fast, and how",
    "doctor": "watch some training steps, name what goes wrong and what cures it",
    "formats": "show the number formats, and how each stores a number",
    "memory": "count the bytes that training holds, without holding them",
    "train": "train a recipe at several precisions and compare them",
    "tune": "measure what trains a recipe or script fastest here, and write the plan",
}

#: Commands that take a recipe or a script.
SCRIPTED = ("doctor", "memory", "train", "tune")
BAD_INPUT = 2
INTERRUPTED = 130


def main() -> int:
    """Load the command line and run it; returns the exit code."""
    answered = answer(sys.argv[1:])
    if answered is not None:
        return answered
    before = signal.signal(signal.SIGINT, _leave)
    terminal, imported = sys.stderr.isatty(), threading.Event()
    if terminal:
        print("halfstep: importing torch ...", end="", file=sys.stderr, flush=True)
    elif sys.argv[1] == "train" and "--json" not in sys.argv:
        threading.Thread(target=_print_until, args=(imported,), daemon=True).start()
    from halfstep.cli import main as run

    imported.set()
    if terminal:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    signal.signal(signal.SIGINT, before)
    return run()


def _print_until(imported: threading.Event) -> None:
    """Print a line every ten seconds: on a busy machine torch takes half a minute."""
    while True:
        print("halfstep: importing torch ...", file=sys.stderr, flush=True)
        if imported.wait(10.0):
            return


def answer(given: Sequence[str]) -> int | None:
    """Answer --version, --help and wrong input that shows without torch: the exit code, or None to go on."""
    name, rest = (given[0], given[1:]) if given else ("", ())
    if not given:
        return refuse(f"no command given; expected one of {', '.join(COMMANDS)} (halfstep --help)")
    if name in ("-h", "--help"):
        return _help()
    if name == "--version":
        from importlib.metadata import version

        print(f"halfstep {version('halfstep')}")
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return refuse(f"unknown command {name!r}; expected one of {', '.join(COMMANDS)}{hint}")
    own = itertools.takewhile(lambda word: word != "--", rest if name in SCRIPTED else ())
    missing = next((word for word in own if word.endswith(".py") and not os.path.exists(word)), None)
    if missing is not None:
        return refuse(f"no script {missing}; expected a recipe or the path of a .py file")
    return None


def refuse(message: str) -> int:
    """Print an error in one line; returns the exit code of wrong input."""
    print("halfstep: " + " ".join(message.split()), file=sys.stderr)
    return BAD_INPUT


def _help() -> int:
    rows = "\n".join(f"  {name:<8} {purpose}" for name, purpose in COMMANDS.items())
    print(
        f"Mixed-precision training for PyTorch.\n\nusage: halfstep COMMAND [OPTIONS]\n\n{rows}\n\n"
        "halfstep COMMAND --help lists a command's options."
    )
    return 0


def _leave(*_: Any) -> None:
    # No exception: some of what is being imported would swallow it or wrap it in one of its own.
    os.write(sys.stderr.fileno(), b"halfstep: interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
