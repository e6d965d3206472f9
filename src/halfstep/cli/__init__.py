"""The command line: `halfstep COMMAND ...`.

A command is a module of this package with a function `run` whose typed signature tyro turns into options;
what needs no torch (--help, --version, a wrong name) was answered by halfstep_command before.
Only the module of the command that was asked for is imported. Wrong input ends in one line and exit code 2.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import itertools
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from halfstep.errors import ConfigError, HalfstepError
from halfstep_command import COMMANDS, INTERRUPTED, answer, refuse

__all__ = ["COMMANDS", "main"]


def main(args: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 for a failed check, 2 for wrong input, 130 for Ctrl-C."""
    argv = list(sys.argv[1:] if args is None else args)
    try:
        answered = answer(argv)
        if answered is not None:
            return answered
        command = importlib.import_module(f"halfstep.cli.{argv[0]}").run
        return _parse_command(argv[0], command, argv[1:])() or 0
    except HalfstepError as error:
        return refuse(str(error))
    except KeyboardInterrupt:
        print("halfstep: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) left early; what is still buffered goes nowhere instead of failing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parse_command(
    name: str, command: Callable[..., int | None], rest: Sequence[str]
) -> Callable[[], int | None]:
    """Return the command with its arguments filled in, or what does nothing where help was asked.

    Raises:
        ConfigError: wrong arguments.
    """
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
            message = _plain(_one_line(complaint.getvalue()))
            text = f"{message} (halfstep {name} --help){_own_options(name, rest, message)}"
            raise ConfigError(text) from None
        return lambda: 0


def _own_options(name: str, rest: Sequence[str], message: str) -> str:
    """Return what to write where a script was given options of its own among ours."""
    script = next((word for word in rest if word.endswith(".py")), None)
    head, _, unknown = message.partition("Unrecognized options: ")
    if head or not unknown or script is None or name == "train":
        return ""
    options = unknown.partition(";")[0].replace(",", "")
    return f"; options of {script} itself go after --: halfstep {name} {script} -- {options}"


_RULE = re.compile(r"^[╭╰+]|^[─-]{3}|[─-]{3}[╮+]?$")


def _one_line(boxed: str) -> str:
    """tyro frames what it says; this is the first paragraph inside the frame, and its guess if it has one."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", boxed)
    lines = [line.strip("│ ") for line in plain.splitlines()]
    if "╭" not in plain:
        # Without Unicode the title stands on a line of its own, above a rule.
        lines = list(itertools.dropwhile(lambda line: not _RULE.search(line), lines))
    body = itertools.dropwhile(lambda line: not line or _RULE.search(line), lines)
    message = " ".join(itertools.takewhile(lambda line: line and not _RULE.search(line), body))
    guess = re.search(r"Perhaps you meant:[\s│|]*(--[\w-]+)", plain)
    return f"{message}; perhaps you meant {guess[1]}" if guess else message


_NO_NUMBER = re.compile(r"Error parsing (--[\w-]+): .*(int\(\)|INT|float).*'([^']*)'\]?\.?$")


def _plain(message: str) -> str:
    """Return tyro's message with Python types in words."""
    match = _NO_NUMBER.match(message)
    if match is None:
        return message.removesuffix(" (required)")
    kind = "a number" if match[2] == "float" else "a whole number"
    return f"{match[1]} {match[3]!r}: expected {kind}"
