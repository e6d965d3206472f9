"""What takes part in a training step: models, optimizers, a session, whatever keeps state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.scaling.loss_scale import NoLossScale, StaticLossScale


def is_session(thing: Any) -> bool:
    """Whether this is a halfstep Session (by what it offers; sessions live above this floor)."""
    return all(hasattr(type(thing), name) for name in ("backward", "step", "autocast", "revert"))


def listed(value: Any) -> list[Any]:
    """One thing, several or None, as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, Iterable) and not isinstance(value, nn.Module) else [value]


class StepParticipants:
    """What takes part in a step: models, optimizers, a session, and other things that keep state.

    What is not given is looked for among the names the step function uses. `loop`: the end of the path of the
    training loop that calls the script's step, where it is not the script's own.
    """

    loop = ""

    def __init__(self, step: Callable[..., Any] | None, given: Iterable[Any] = ()) -> None:
        things = list(given)
        if step is not None:
            things += [t for t in _reachable(step) if all(t is not g for g in things)]
        self.session: Any = next((t for t in things if is_session(t)), None)
        if self.session is not None:
            things += [*self.session.models, *self.session.optimizers]
        unique = list({id(t): t for t in things}.values())
        self.models = [t for t in unique if isinstance(t, nn.Module)]
        inner = {id(c) for m in self.models for c in m.modules() if c is not m}
        self.models = [m for m in self.models if id(m) not in inner]
        self.models.sort(key=lambda m: next(m.parameters(), None) is None)
        self.modules = [m for model in self.models for m in model.modules()]
        self.optimizers = [t for t in unique if isinstance(t, torch.optim.Optimizer)]
        others = (*self.models, *self.optimizers, self.session)
        self.others = [t for t in unique if all(t is not o for o in others) and _keeps_state(t)]
        self.scaler = next((t for t in self.others if hasattr(t, "get_scale")), None)

    @property
    def model(self) -> nn.Module | None:
        """The first model, the one whose paths stand without a prefix."""
        return self.models[0] if self.models else None

    @property
    def group(self) -> Any:
        """The process group of the session's ranks, None for all."""
        return getattr(self.session, "group", None)

    @property
    def scale_moves(self) -> bool:
        """Whether the loss scale finds its own place: one that is too large goes down by itself."""
        holder = self.session or self.scaler
        scale = getattr(holder, "loss_scale", None)
        if scale is None:
            return isinstance(holder, torch.amp.GradScaler) and holder.is_enabled()
        return not isinstance(scale, NoLossScale | StaticLossScale)

    def parameters(self) -> list[Tensor]:
        """Every parameter of the models and every tensor the optimizers update, once."""
        owned = [p for m in self.models for p in m.parameters()]
        updated = [p for o in self.optimizers for g in o.param_groups for p in g["params"]]
        return list({id(p): p for p in (*owned, *updated)}.values())


def _keeps_state(thing: Any) -> bool:
    return not isinstance(thing, type) and all(
        callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict")
    )


def _reachable(step: Callable[..., Any]) -> list[Any]:
    """Stateful objects a function refers to: its closure, globals it names, the object it is bound to."""
    function = getattr(step, "__func__", step)
    function = getattr(function, "func", function)
    found: list[Any] = []
    owner = getattr(step, "__self__", None)
    if owner is not None:
        found += [owner, *getattr(owner, "__dict__", {}).values()]
    code = getattr(function, "__code__", None)
    if code is not None:
        names = getattr(function, "__globals__", {})
        found += [names[n] for n in code.co_names if n in names]
        for cell in function.__closure__ or ():
            try:
                found.append(cell.cell_contents)
            except ValueError:  # a name the enclosing function has not bound yet
                continue
    listed = [x for t in found for x in (t if isinstance(t, list | tuple) else (t,))]
    return [t for t in listed if is_session(t) or _keeps_state(t)]
