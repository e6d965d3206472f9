"""Whole runs of scripts, and whether one of them trains as the same script does in fp32."""

import contextlib
import math
import warnings
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.compat.apex import amp
from halfstep.doctor.in_script import run_order
from halfstep.doctor.process import Order
from halfstep.numerics.remedies.base import with_attributes
from tests.doctor.test_zoo import run_here


@dataclass(frozen=True)
class Whole:
    """What a script did from its first step to its end: a loss for each step that had one."""

    losses: tuple[float, ...]
    steps: int
    spoiled: int | None
    error: str | None

    def is_well(self, other, until=None):
        """Whether everything is finite, to the end (where it went as far as another run) or before a step."""
        finite = all(map(math.isfinite, self.losses[:until]))
        lasting = self.spoiled is None or (until is not None and self.spoiled >= until)
        through = self.steps >= other.steps and self.error in (None, other.error)
        seen = len(self.losses) >= len(other.losses) or until is not None
        return finite and lasting and (through or until is not None) and seen and self.steps > 0

    def loss(self, step, until=None):
        """The mean of the losses of these steps."""
        last = self.losses[step:until] or self.losses[:until][-1:]
        return sum(last) / len(last) if last else 0.0


def whole(text, path):
    """Runs a text of a script to its end."""
    path.write_text(text)
    order = Order(str(path), (), 0, 0, copies=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, _ = run_here(lambda: run_order(order))
    notes = found.ledger.notes
    losses = tuple(note.loss for note in notes if note.loss is not None)
    spoiled = next((index for index, note in enumerate(notes) if note.lasting_damage), None)
    return Whole(losses, len(notes), spoiled, found.document.error)


def whole_in_fp32(text, path):
    """The same, in fp32 whatever the script asks for."""
    with in_fp32():
        return whole(text, path)


def trains_as(run, fp32, step, until=None, times=1.0):
    """Whether the loss from a step on (and before another) is that of fp32 over the same steps, within 5 %.

    `times`: what the loss was divided by.
    """
    loss, wide = run.loss(step, until) * times, fp32.loss(step, until)
    return fp32.steps > 0 and abs(loss - wide) <= 0.05 * abs(wide)


def is_better(run, without, step, until=None, times=1.0):
    """Whether the loss is lower than without a cure or, where that goes wrong, in proportion to it before."""
    if without.is_well(without, until):
        return run.loss(step, until) * times < without.loss(step, until)
    usual = max(map(abs, without.losses[:step]), default=math.inf)
    return abs(run.loss(step + 1, until) * times) < 100 * usual


@contextlib.contextmanager
def in_fp32():
    """Within, a script computes in fp32 whatever it asks for."""

    names = {name: getattr(torch, name) for name in ("float16", "half", "bfloat16")}

    def at_o0(make, level="level"):
        def made(*args, **given):
            told = ("dtype", "policy", "plan", "level", "opt_level", "loss_scale")
            with with_attributes(torch, **names):
                return make(*args, **{k: v for k, v in given.items() if k not in told}, **{level: "O0"})

        return made

    def unscaled(scaler, *args, _create=torch.amp.GradScaler.__init__, **given):
        _create(scaler, *args, **{**given, "enabled": False})

    wide = torch.float32
    with ExitStack() as stack:
        for owner, values in (
            (torch, dict.fromkeys(names, wide)),
            (Tensor, {"half": Tensor.float, "bfloat16": Tensor.float}),
            (nn.Module, {"half": nn.Module.float, "bfloat16": nn.Module.float}),
            (hs, {"prepare": at_o0(hs.prepare), "Trainer": at_o0(hs.Trainer), "convert": at_o0(hs.convert)}),
            (amp, {"initialize": at_o0(amp.initialize, "opt_level")}),
            (torch.amp.GradScaler, {"__init__": unscaled}),
        ):
            stack.enter_context(with_attributes(owner, **values))
        yield
