"""What a session does about gradients that are not finite: raise, skip, go on, or go on and say so once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from halfstep.distributed import local_of
from halfstep.errors import ConfigError, HalfstepWarning, NonFiniteError, show
from halfstep.names import named_parameters
from halfstep.optim.masters import weight_of
from halfstep.session.guards import epsilon_hint
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


class NonFinite:
    """One session's choice, what it has said, and where the gradients of the present step were bad.

    Where a loss scale adjusts itself, an overflow is part of its work, and "raise" is about losses that are
    not finite themselves.
    """

    def __init__(
        self,
        choice: str | None,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        adjusts: bool,
    ) -> None:
        self._choice, self._models, self._optimizers, self._adjusts = choice, models, optimizers, adjusts
        self._said = False
        self._where = ""
        self._losses: list[Tensor] = []

    def backward(self, loss: Tensor) -> None:
        """Remember a loss of the coming step."""
        if self._choice == "raise" and self._adjusts:
            self._losses.append(loss.detach())

    def look(self, optimizer: torch.optim.Optimizer, found: bool | Tensor) -> None:
        """Note which gradients are bad while they are there; only where somebody will be told."""
        if found is not True or self._said or self._choice in ("skip", "continue"):
            return
        names = {id(p): name for model in self._models for name, p in named_parameters(model).items()}
        weights = [weight_of(p) for p in parameters_of(optimizer)]
        held = [(w, w.grad) for w in weights if w.grad is not None]
        bad = [w for w, g in held if not bool(local_of(g.detach()).float().abs().sum().isfinite())]
        if bad:
            first = names.get(id(bad[0]), f"one of shape {list(bad[0].shape)}")
            self._where = f"of {len(bad)} of {len(held)} parameters (first: {first}) "

    def tell(self, step: int | None, taken: bool, finite: bool) -> None:
        """Warn once of a bad step that was taken; raise NonFiniteError where that was asked for."""
        losses, self._losses = self._losses, []
        where, self._where = self._where, ""
        if finite:
            return
        if self._choice == "raise":
            self._raise(step, where, losses)
        elif taken and self._choice is None and not self._said:
            self._said = True
            warnings.warn(
                f"step {step}: gradients {where}hold inf or NaN and the step was taken, as plain PyTorch "
                f"does; {epsilon_hint(self._optimizers)} (said once)",
                HalfstepWarning,
                stacklevel=5,
            )

    def _raise(self, step: int | None, where: str, losses: Sequence[Tensor]) -> None:
        bad = [loss for loss in losses if not bool(loss.isfinite().all())]
        if self._adjusts and not bad:
            return
        what = f"the loss is {float(bad[0].float().sum())}" if bad else f"gradients {where}hold inf or NaN"
        raise NonFiniteError(
            f"step {step}: {what}; the step was not taken, weights are those before it "
            "(on_nonfinite='raise'). `amp.replayable` or `halfstep doctor` name the op"
        )
