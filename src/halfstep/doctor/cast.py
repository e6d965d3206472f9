"""Who takes part in a watched script: models, optimizers, a session, a scaler, as they turn up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from halfstep.doctor.doors import scale_of_a_door
from halfstep.names import canonical
from halfstep.numerics.actors import Actors


class Cast:
    """The models, optimizers, session and scaler of a script, as they turn up."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.session: Any = None
        self.scaler: Any = None
        self._names: dict[int, str] = {}

    def meet(self, module: nn.Module) -> None:
        """A module is called: if it has weights and belongs to no known model, it is one."""
        known = any(module is m for root in self.models for m in root.modules())
        if not known and next(module.parameters(), None) is not None:
            inside = {id(m) for m in module.modules()}
            self.models = [m for m in self.models if id(m) not in inside] + [module]

    def add(self, optimizer: Any) -> None:
        """An optimizer is made or stepped."""
        if isinstance(optimizer, torch.optim.Optimizer) and all(optimizer is not o for o in self.optimizers):
            self.optimizers.append(optimizer)

    def actors(self) -> Actors:
        """All of them, as the tape and the cures take them."""
        self._find_scale()
        others = [x for x in (self.session, self.scaler) if x is not None]
        return Actors(None, [*self.models, *self.optimizers, *others])

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
            found |= {prefix + canonical(n): p for n, p in model.named_parameters() if p.is_floating_point()}
        return found

    def name_of(self, thing: nn.Module | Tensor) -> str:
        """Path of a module (with its class) or parameter; the class of what is in no known model."""
        if id(thing) not in self._names:
            for number, model in enumerate(self.models):
                prefix = f"{type(model).__name__}." if number else ""
                for name, module in model.named_modules():
                    path = f"{prefix}{canonical(name)}".rstrip(".")
                    self._names[id(module)] = f"{path} ({type(module).__name__})" if path else "the model"
                for name, p in model.named_parameters():
                    self._names[id(p)] = prefix + canonical(name)
        return self._names.get(id(thing), type(thing).__name__)

    @property
    def by_hand(self) -> bool:
        """Whether nothing is known that would make the updates."""
        return not self.optimizers and self.session is None and self.scaler is None

    def buffers(self) -> list[Tensor]:
        """Floating-point buffers of all models."""
        return [b for m in self.models for b in m.buffers() if b.is_floating_point()]
