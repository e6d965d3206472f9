"""Run a training step again from the state it started from.

`StepParticipants` says what takes part: models, optimizers, a session, whatever keeps state. A `Snapshot`
holds copies of everything a step changes: weights, buffers, gradients, optimizer and scaler state, random
generators. Restoring writes the copies back into the same tensors, so nothing loses its identity. What lives
in plain Python (a data iterator, a counter of the user's) is not restored.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.rng import rewinder
from halfstep.scaling.loss_scale import NoLossScale, StaticLossScale
from halfstep.torch_private import is_traceable_wrapper_subclass
from halfstep.trees import parameters_of


def is_session(thing: Any) -> bool:
    """Whether this is a halfstep Session (by what it offers; sessions live above this floor)."""
    return all(hasattr(type(thing), name) for name in ("backward", "step", "autocast", "revert"))


def scale_of(session: Any, scaler: Any) -> float | Tensor:
    """Return the current loss scale of a session or else of a scaler; 1 without either."""
    if session is not None:
        return session.loss_scale.value
    return 1.0 if scaler is None else scaler.get_scale()


def as_list(value: Any) -> list[Any]:
    """Return one object, several or None, as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, Iterable) and not isinstance(value, nn.Module) else [value]


def with_prefixes(models: Iterable[nn.Module]) -> Iterable[tuple[str, nn.Module]]:
    """Yield models with the prefix of their names: none for the first, its class for any other."""
    return ((f"{type(model).__name__}." if number else "", model) for number, model in enumerate(models))


class StepParticipants:
    """What takes part in a step: models, optimizers, a session, and other things that keep state.

    What is not given is looked for among the names the step function uses. `loop`: the end of the path of the
    training loop that calls the script's step, where it is not the script's own. `prepare`: what makes a
    session of models and optimizers, where a remedy may (sessions live above this floor).
    """

    loop = ""
    prepare: Callable[..., Any] | None = None

    def __init__(self, step: Callable[..., Any] | None, participants: Iterable[Any] = ()) -> None:
        things = list(participants)
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
        self.scaler: Any = next((t for t in self.others if hasattr(t, "get_scale")), None)

    @property
    def model(self) -> nn.Module | None:
        """Return the first model, whose paths have no prefix."""
        return self.models[0] if self.models else None

    @property
    def group(self) -> Any:
        """Return the process group of the session's ranks, None for all."""
        return getattr(self.session, "group", None)

    @property
    def scale_moves(self) -> bool:
        """Whether the loss scale is dynamic: one that is too large backs off by itself."""
        holder = self.session or self.scaler
        scale = getattr(holder, "loss_scale", None)
        if scale is None:
            return isinstance(holder, torch.amp.GradScaler) and holder.is_enabled()
        return not isinstance(scale, NoLossScale | StaticLossScale)

    @property
    def scale_now(self) -> tuple[float, float]:
        """Return the loss scale and its minimum."""
        rule = getattr(self.session or self.scaler, "loss_scale", None)
        return float(scale_of(self.session, self.scaler)), float(getattr(rule, "min", 0.0))

    @property
    def has_scale(self) -> bool:
        """Whether the loss is scaled by something whose scale can be set."""
        if self.session is not None:
            return not isinstance(self.session.loss_scale, NoLossScale)
        return self.scaler is not None and self.scaler.is_enabled()

    @property
    def scale_falls(self) -> bool:
        """Whether the loss scale is dynamic and still above its minimum."""
        now, least = self.scale_now
        return self.has_scale and self.scale_moves and now > max(least, 1.0)

    def parameters(self) -> list[Tensor]:
        """Return every parameter of the models and every tensor the optimizers update, once."""
        owned = [p for m in self.models for p in m.parameters()]
        updated = [p for o in self.optimizers for p in parameters_of(o)]
        return list({id(p): p for p in (*owned, *updated)}.values())

    def named_values(self) -> Iterable[tuple[str, str, Tensor]]:
        """Yield kind (parameter, buffer or state), name and value of what a step may change."""
        names: dict[Tensor, str] = {}
        for prefix, model in with_prefixes(self.models):
            for name, parameter in model.named_parameters():
                names[parameter] = prefix + name
                yield "parameter", prefix + name, parameter
            for name, buffer in model.named_buffers():
                yield "buffer", prefix + name, buffer
        for number, optimizer in enumerate(self.optimizers):
            for place, parameter in enumerate(parameters_of(optimizer)):
                name = names.get(parameter, f"parameter {place} of optimizer {number}")
                if parameter not in names:
                    yield "parameter", name, parameter
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        yield "state", f"{name}.{key}", value


def _keeps_state(thing: Any) -> bool:
    return not isinstance(thing, type) and all(
        callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict")
    )


def closure_of(function: Any) -> list[Any]:
    """Return the values in a function's closure."""
    values: list[Any] = []
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # a name the enclosing function has not bound yet
            values.append(cell.cell_contents)
    return values


def _reachable(step: Callable[..., Any]) -> list[Any]:
    """Return stateful objects that a function refers to: in its closure, as globals, as its `self`."""
    function = getattr(step, "__func__", step)
    function = getattr(function, "func", function)
    things: list[Any] = []
    owner = getattr(step, "__self__", None)
    if owner is not None:
        things += [owner, *getattr(owner, "__dict__", {}).values()]
    code = getattr(function, "__code__", None)
    if code is not None:
        names = getattr(function, "__globals__", {})
        things += [names[n] for n in code.co_names if n in names] + closure_of(function)
    listed = [x for t in things for x in (t if isinstance(t, list | tuple) else (t,))]
    return [t for t in listed if is_session(t) or _keeps_state(t)]


_replaying = 0


@contextmanager
def replay() -> Generator[None]:
    """Mark the block as a replay: a watch does not take it for training."""
    global _replaying
    _replaying += 1
    try:
        yield
    finally:
        _replaying -= 1


def replaying() -> bool:
    """Whether a replay is running."""
    return _replaying > 0


def run_eagerly() -> AbstractContextManager[Any]:
    """Run compiled code as it was written, for the block; imports nothing where none was compiled."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


Restore = Callable[[], None]


def _deep(value: Any, device: torch.device | None = None) -> Any:
    if isinstance(value, Tensor):
        stays = device is None or is_traceable_wrapper_subclass(value)
        return value.detach().clone() if stays else value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {k: _deep(v) for k, v in value.items()}
    return copy.deepcopy(value)


def _put_back(saved: Any, live: Any) -> Any:
    """Write saved values into the live tensors where they fit, so that these keep their identity."""
    if isinstance(saved, dict):
        now: dict[Any, Any] = live if isinstance(live, dict) else {}
        return {k: _put_back(v, now.get(k)) for k, v in saved.items()}
    alike = isinstance(saved, Tensor) and isinstance(live, Tensor) and saved.shape == live.shape
    if not alike or saved.dtype != live.dtype:
        return _deep(saved)
    live.data.copy_(saved)
    return live


def _values(tensors: Iterable[Tensor], home: torch.device | None = None) -> Restore:
    """Save values of tensors and of their gradients on the device `home`."""
    saved = [(t, t.device, _deep(t, home), _deep(t.grad, home) if t.is_leaf else None) for t in tensors]

    def restore() -> None:
        for tensor, device, value, gradient in saved:
            if _put_back(value, tensor) is not tensor:
                tensor.data = _deep(value, device)
            if tensor.is_leaf:
                tensor.grad = _deep(gradient, device)

    return restore


def _buffers(modules: Sequence[nn.Module]) -> Restore:
    """Save buffers with their bindings, which forward may change."""
    training = [(m, m.training) for m in modules]
    bound = [(m, dict(m._buffers)) for m in modules if m._buffers]
    restore_values = _values(
        {id(b): b for _, buffers in bound for b in buffers.values() if b is not None}.values()
    )

    def restore() -> None:
        for module, mode in training:
            module.training = mode
            module._buffers.clear()
        for module, buffers in bound:
            module._buffers.update(buffers)
        restore_values()

    return restore


def _optimizer_state(optimizer: torch.optim.Optimizer) -> Restore:
    """Save state and options of one optimizer, to be restored in place: others may hold its groups."""
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    state = {p: _deep(s) for p, s in optimizer.state.items()}

    def restore() -> None:
        for group, saved in zip(optimizer.param_groups, groups):
            group.update(saved)
        for parameter in [p for p in optimizer.state if p not in state]:
            del optimizer.state[parameter]
        for parameter, saved in state.items():
            optimizer.state[parameter] = _put_back(saved, optimizer.state.get(parameter))

    return restore


def _load(thing: Any, state: Any) -> None:
    thing.load_state_dict(copy.deepcopy(state))


class Snapshot:
    """The state before a step. `restore()` may be called any number of times.

    Without `weights` it is cheap enough for every step: no weights, optimizer states or history of outcomes.
    Copies of weights and gradients are kept on the device `home`; None keeps them where they are.
    """

    def __init__(
        self, parts: StepParticipants, weights: bool = True, home: torch.device | None = None
    ) -> None:
        self._random = rewinder()
        self._restore = [_buffers(parts.modules)]
        if weights:
            self._restore.append(_values(parts.parameters(), home))
            self._restore += [_optimizer_state(o) for o in parts.optimizers]
            for thing in parts.others:
                state = copy.deepcopy(thing.state_dict())
                self._restore.append(partial(_load, thing, state))
        if parts.session is not None:
            self._restore.append(parts.session.snapshot(weights))
        for release in filter(None, (getattr(o, "release", None) for o in parts.optimizers)):
            self._restore.append(release.memory())
            if weights:  # what an optimizer that releases gradients clips the next ones by
                self._restore.append(partial(release.load, release.state()))

    def restore(self) -> None:
        """Write every value back and set the random generators."""
        with torch.no_grad():
            for restore in self._restore:
                restore()
        self._random()
