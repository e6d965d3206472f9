"""The exception tree: every error and warning halfstep raises on purpose.

Each message says what was given, what was expected and what to change; `show` writes what was given.
"""

import sys
import warnings


class HalfstepError(Exception):
    """Base of every error raised by halfstep."""


class ConfigError(HalfstepError, ValueError):
    """A wrong argument: an unknown level, dtype, op, device, rule, recipe or an inconsistent combination."""


class PlanError(ConfigError):
    """A plan whose rules match nothing, contradict each other, or cannot be read."""


class UnsupportedError(HalfstepError, RuntimeError):
    """This device, dtype, optimizer or module cannot do what was asked."""


class BannedOpError(HalfstepError, NotImplementedError):
    """An op the policy refuses; the message carries the remedy. A RuntimeError too, as in torch."""


class ScalerStateError(HalfstepError, RuntimeError):
    """GradScaler methods called in an order that would scale or unscale wrongly."""


class NonFiniteError(HalfstepError, ArithmeticError):
    """A step found inf or NaN, and stopping there was asked for."""


class LossScaleCollapsed(HalfstepError, RuntimeError):
    """Too many steps in a row were skipped."""


class MasterRangeError(HalfstepError, OverflowError):
    """A weight lies outside what the chosen master format can hold."""


class CheckpointError(HalfstepError, RuntimeError):
    """A checkpoint that is missing, corrupt, or of another model.

    `damaged` says whether it cannot be read at all, so that an earlier one may serve.
    """

    def __init__(self, message: str, *, damaged: bool = False) -> None:
        super().__init__(message)
        self.damaged = damaged


class RankError(HalfstepError, RuntimeError):
    """Another rank failed, was killed or hangs; the message names it."""


class DataError(HalfstepError, ValueError):
    """Training data that cannot be used: missing, malformed or not finite."""


class HalfstepWarning(UserWarning):
    """Base of every warning issued by halfstep."""


def show(x: object) -> str:
    """`x` as an error shows it: its repr, or its class where that is no short line (a model)."""
    try:
        shown = repr(x)
    except Exception:  # the caller's own class: an error in its repr must not hide ours
        shown = "\n"
    if len(shown) <= 100 and shown.isprintable():
        return shown
    return f"an object of class {type(x).__name__}"


def warn(message: str) -> None:
    """Warn with a `HalfstepWarning` at the line of the user's program that led here.

    That is the nearest one outside of this package, of torch and of contextlib, through which hooks and
    context managers come; the first of all where there is none.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, HalfstepWarning, stacklevel=level + 1)


_INSIDE = ("halfstep", "torch", "contextlib")
