"""Who takes part in a watched script: models, optimizers, a session, a scaler, as they turn up."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.doctor.doors import scale_of_a_door
from halfstep.doctor.ledger import read_amaxes
from halfstep.names import fqn
from halfstep.numerics.participants import StepParticipants
from halfstep.numerics.terms import LOOPS, Terms, terms_of
from halfstep.torch_private import disable_current_modes


class Roster:
    """The models, optimizers, session and scaler of a script, as they turn up.

    `helpers`: modules with buffers and no parameters, as criteria are. `schedules`: of learning rates.
    """

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.helpers: list[nn.Module] = []
        self.schedules: list[Any] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.session: Any = None
        self.scaler: Any = None
        self._names: dict[int, str] = {}
        self._born_ill: frozenset[str] = frozenset()
        self._loop: str | None = None

    def meet(self, module: nn.Module) -> None:
        """A module is called: if it has weights and belongs to no known model, it is one."""
        known = any(module is m for root in (*self.models, *self.helpers) for m in root.modules())
        if known:
            return
        if next(module.parameters(), None) is not None:
            inside = {id(m) for m in module.modules()}
            self.models = [m for m in self.models if id(m) not in inside] + [module]
            named = self.named()
            with disable_current_modes():
                self._born_ill |= self._ill(dict(zip(named, read_amaxes(list(named.values())))))
        elif next(module.buffers(), None) is not None:
            self.helpers.append(module)
        if self._loop is None:
            self._loop = _running_loop()

    def _ill(self, weights: Mapping[str, float]) -> frozenset[str]:
        """Names of what is not finite: of parameters, whose largest magnitudes are given, and of buffers."""
        buffers = self.buffers()
        found = {**weights, **dict(zip(buffers, read_amaxes(list(buffers.values()))))}
        return frozenset(name for name, amax in found.items() if not math.isfinite(amax))

    def fell_ill(self, weights: Mapping[str, float]) -> bool:
        """Whether a parameter or buffer is not finite that was when its model was first called."""
        return not self._ill(weights) <= self._born_ill

    def add(self, optimizer: Any) -> None:
        """An optimizer is made or stepped."""
        if isinstance(optimizer, torch.optim.Optimizer) and all(optimizer is not o for o in self.optimizers):
            self.optimizers.append(optimizer)

    def parts(self) -> StepParticipants:
        """All of them, as the tape and the cures take them."""
        self._find_scale()
        others = [x for x in (self.session, self.scaler) if x is not None]
        parts = StepParticipants(None, [*self.models, *self.helpers, *self.optimizers, *others])
        parts.loop = self._loop or ""
        return parts

    @property
    def terms(self) -> Terms:
        """How this script would write a cure down."""
        return terms_of(self.parts(), in_region=self.scaler is not None)

    def schedule_of(self, optimizer: torch.optim.Optimizer) -> str:
        """The classes of what sets an optimizer's learning rates."""
        mine = (s for s in self.schedules if getattr(s, "optimizer", None) is optimizer)
        return ", ".join(dict.fromkeys(type(s).__name__ for s in mine))

    def _find_scale(self) -> None:
        if self.session is None and self.scaler is None:
            self.scaler = scale_of_a_door()

    def scale(self) -> float:
        """The present loss scale."""
        self._find_scale()
        if self.session is not None:
            return float(self.session.loss_scale.value)
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def named(self) -> dict[str, Tensor]:
        """Parameters by name, those of the first model without a prefix."""
        found: dict[str, Tensor] = {}
        for number, model in enumerate(self.models):
            prefix = f"{type(model).__name__}." if number else ""
            found |= {prefix + fqn(n): p for n, p in model.named_parameters() if p.is_floating_point()}
        return found

    def name_of(self, thing: nn.Module | Tensor) -> str:
        """Path of a module (with its class) or parameter; the class of what is in no known model."""
        if id(thing) not in self._names:
            for number, model in enumerate(self.models):
                prefix = f"{type(model).__name__}." if number else ""
                for name, module in model.named_modules():
                    path = f"{prefix}{fqn(name)}".rstrip(".")
                    self._names[id(module)] = f"{path} ({type(module).__name__})" if path else "the model"
                for name, p in model.named_parameters():
                    self._names[id(p)] = prefix + fqn(name)
        return self._names.get(id(thing), type(thing).__name__)

    @property
    def by_hand(self) -> bool:
        """Whether nothing is known that would make the updates."""
        return not self.optimizers and self.session is None and self.scaler is None

    def buffers(self) -> dict[str, Tensor]:
        """Floating-point buffers of all models, by a name that no parameter has."""
        return {
            f"buffer {number}.{name}": b
            for number, model in enumerate(self.models)
            for name, b in model.named_buffers()
            if b.is_floating_point()
        }


def _running_loop() -> str:
    """Which known training loop calls the script's step; empty where it is the script's own."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename.replace(os.sep, "/")
        found = next((end for end in LOOPS if file.endswith(end)), None)
        if found is not None:
            return found
        frame = frame.f_back
    return ""
