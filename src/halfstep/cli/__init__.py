"""The command line: `halfstep COMMAND ...`.

A command is a module of this package with a function `run` whose typed signature tyro turns into options.
Only the module of the command that was asked for is imported. Wrong input ends in one line and exit code 2.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import io
import itertools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

COMMANDS: Mapping[str, str] = {
    "bench": "optimizers side by side: time, memory, how far weights move",
    "devices": "what this machine's devices do with each dtype and op",
    "doctor": "watch some training steps, name what goes wrong and what cures it",
    "formats": "the number formats, and how each stores a number",
    "train": "train a recipe at several precisions and compare them",
    "tune": "measure what trains a recipe or script fastest here, and write the plan",
}

BAD_INPUT = 2
INTERRUPTED = 130


def main(args: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 for a failed check, 2 for wrong input, 130 for Ctrl-C."""
    given = list(sys.argv[1:] if args is None else args)
    from halfstep.errors import HalfstepError

    try:
        return _run(given)
    except HalfstepError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        print("halfstep: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) left early; what is still buffered goes nowhere instead of failing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(given: Sequence[str]) -> int:
    if not given:
        return _refuse(f"no command given; expected one of {', '.join(COMMANDS)} (halfstep --help)")
    name, rest = given[0], given[1:]
    if name in ("-h", "--help"):
        return _help()
    if name == "--version":
        from halfstep import __version__

        print(f"halfstep {__version__}")
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return _refuse(f"unknown command {name!r}; expected one of {', '.join(COMMANDS)}{hint}")
    command = importlib.import_module(f"halfstep.cli.{name}").run
    parsed = _parse(name, command, rest)
    return parsed if isinstance(parsed, int) else parsed() or 0


def _help() -> int:
    from halfstep.cli._output import console, table

    out = console()
    out.print("Mixed-precision training for PyTorch.\n\nusage: halfstep COMMAND [OPTIONS]")
    out.print(table("", ("command", "what it shows or does"), list(COMMANDS.items())))
    out.print("halfstep COMMAND --help lists a command's options.")
    return 0


def _parse(name: str, command: Callable[..., int | None], rest: Sequence[str]) -> Callable[[], Any] | int:
    """The command with its arguments filled in, or the exit code where they were wrong or help was asked."""
    import tyro

    @functools.wraps(command)
    def bind(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        return functools.partial(command, *args, **kwargs)

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(bind, prog=f"halfstep {name}", args=list(rest))  # type: ignore[return-value]
    except SystemExit as end:
        if end.code:
            said = _plain(_one_line(complaint.getvalue()))
            return _refuse(f"{said} (halfstep {name} --help)")
        return 0


_RULE = re.compile(r"^[╭╰+]|^[─-]{3}|[─-]{3}[╮+]?$")


def _one_line(boxed: str) -> str:
    """tyro frames what it says; this is the first paragraph inside the frame, and its guess if it has one."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", boxed)
    lines = [line.strip("│ ") for line in plain.splitlines()]
    if "╭" not in plain:
        # Without Unicode the title stands on a line of its own, above a rule.
        lines = list(itertools.dropwhile(lambda line: not _RULE.search(line), lines))
    body = itertools.dropwhile(lambda line: not line or _RULE.search(line), lines)
    said = " ".join(itertools.takewhile(lambda line: line and not _RULE.search(line), body))
    guess = re.search(r"Perhaps you meant:[\s│|]*(--[\w-]+)", plain)
    return f"{said}; perhaps you meant {guess[1]}" if guess else said


_NO_NUMBER = re.compile(r"Error parsing (--[\w-]+): .*(int\(\)|INT|float).*'([^']*)'\]?\.?$")


def _plain(said: str) -> str:
    """What tyro says of Python types, in words."""
    found = _NO_NUMBER.match(said)
    if found is None:
        return said.removesuffix(" (required)")
    kind = "a number" if found[2] == "float" else "a whole number"
    return f"{found[1]} {found[3]!r}: expected {kind}"


def _refuse(message: str) -> int:
    print("halfstep: " + " ".join(message.split()), file=sys.stderr)
    return BAD_INPUT
