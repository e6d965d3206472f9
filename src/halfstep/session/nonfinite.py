"""What a session does about gradients that are not finite: raise, skip, go on, or go on and say so once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from halfstep.distributed import local_of
from halfstep.errors import ConfigError, HalfstepWarning, NonFiniteError, show
from halfstep.names import named_parameters
from halfstep.optim.masters import weight_of
from halfstep.scaling.loss_scale import NoLossScale, StaticLossScale
from halfstep.session.checks import epsilon_hint
from halfstep.session.round import Loss
from halfstep.session.steppers import parameters_of

CHOICES = ("raise", "skip", "continue")


def skips_of(on_nonfinite: str | None, skip_nonfinite: bool | None, scaled: bool) -> bool:
    """Whether steps on such gradients are skipped; ConfigError for choices that contradict each other."""
    if skip_nonfinite is not None and not isinstance(skip_nonfinite, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"skip_nonfinite={show(skip_nonfinite)}: expected True, False or None")
    if on_nonfinite is not None and on_nonfinite not in CHOICES:
        raise ConfigError(f"on_nonfinite={show(on_nonfinite)}: expected 'raise', 'skip', 'continue' or None")
    if on_nonfinite is None:
        return scaled if skip_nonfinite is None else skip_nonfinite
    skips = on_nonfinite != "continue"
    if skip_nonfinite not in (None, skips) or (on_nonfinite == "raise" and skip_nonfinite is not None):
        raise ConfigError(
            f"on_nonfinite={show(on_nonfinite)} with skip_nonfinite={skip_nonfinite}: drop one of them"
        )
    if scaled and not skips:
        raise ConfigError(
            "on_nonfinite='continue' with a loss scale: a scale finds its value by skipping steps that "
            "overflow; pass loss_scale='none' or leave on_nonfinite out"
        )
    return skips


@dataclass(frozen=True, eq=False)
class Looked:
    """What is kept of a step until it is known whether its gradients were finite."""

    where: str = ""
    values: tuple[Tensor, ...] = ()
    """The losses themselves."""
    losses: tuple[Loss, ...] = ()
    """What each brought, and the scale that it carried."""


NOTHING = Looked()


class NonFinite:
    """One session's choice, and what it has said.

    An overflow under a loss scale that can still go down is that scale's work, NaN too: inf minus inf and
    inf times 0 make it of an overflow. So "raise" is about losses that are not finite themselves, and about
    gradients that are not although their loss scale is as low as it goes.
    """

    def __init__(
        self, choice: str | None, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._choice, self._models, self._optimizers = choice, models, optimizers
        self._said = False
        self._losses: list[Tensor] = []

    def backward(self, loss: Tensor) -> None:
        """Remember a loss of the coming step."""
        if self._choice == "raise":
            self._losses.append(loss.detach())

    def look(self, optimizer: torch.optim.Optimizer, found: bool | Tensor, losses: Sequence[Loss]) -> Looked:
        """Note what somebody will be told if the step was bad; which gradients were while they are there."""
        values, self._losses = self._losses, []
        if found is False or self._said or self._choice in ("skip", "continue"):
            return NOTHING
        where = self._where(optimizer) if found is True else ""
        return Looked(where, tuple(values), tuple(losses))

    def _where(self, optimizer: torch.optim.Optimizer) -> str:
        names = {id(p): name for model in self._models for name, p in named_parameters(model).items()}
        weights = [weight_of(p) for p in parameters_of(optimizer)]
        held = [(w, w.grad) for w in weights if w.grad is not None]
        bad = [w for w, g in held if not bool(local_of(g.detach()).float().abs().sum().isfinite())]
        if not bad:
            return ""
        first = names.get(id(bad[0]), f"one of shape {list(bad[0].shape)}")
        return f"of {len(bad)} of {len(held)} parameters (first: {first}) "

    def tell(self, step: int | None, taken: bool, finite: bool, looked: Looked) -> None:
        """Warn once of a bad step that was taken; raise NonFiniteError where that was asked for."""
        if finite:
            return
        if self._choice == "raise":
            self._raise(step, looked)
        elif taken and self._choice is None and not self._said:
            self._said = True
            warnings.warn(
                f"step {step}: gradients {looked.where}hold inf or NaN and the step was taken, as plain "
                f"PyTorch does; {epsilon_hint(self._optimizers)} (said once)",
                HalfstepWarning,
                stacklevel=5,
            )

    def _raise(self, step: int | None, looked: Looked) -> None:
        bad = [loss for loss in looked.values if not bool(loss.isfinite().all())]
        lowest = [loss.scale for loss in looked.losses if bool(loss.found) and loss.scale.at_lowest]
        if not bad and not lowest:
            return
        what = f"gradients {looked.where}hold inf or NaN"
        if bad:
            what = f"the loss is {float(bad[0].float().sum())}"
        elif not isinstance(lowest[0], NoLossScale | StaticLossScale):
            what += f" although the loss scale is down to {lowest[0].read():g}"
        raise NonFiniteError(
            f"step {step}: {what}; the step was not taken, weights are those before it "
            "(on_nonfinite='raise'). `amp.replayable` or `halfstep doctor` name the op"
        )
