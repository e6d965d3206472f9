"""Running a training step again from the state it started from.

A `Snapshot` holds copies of everything a step changes: weights, buffers, gradients, optimizer and scaler
state, random generators. Restoring writes the copies back into the same tensors, so nothing loses its
identity. What lives in plain Python (a data iterator, a counter of the user's) is not restored.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.numerics.participants import StepParticipants
from halfstep.optim.base import OnePassOptimizer
from halfstep.rng import rewinder

_replaying = 0


@contextmanager
def replay() -> Generator[None]:
    """Marks what runs within as a replay: a watch does not take it for training."""
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
    """Within, compiled code runs as written. Nothing to do, and nothing imported, where none was compiled."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


class _Values:
    """Values of some tensors and of their gradients."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._saved = [(t, t.detach().clone(), _copied(t.grad) if t.is_leaf else None) for t in tensors]

    def restore(self) -> None:
        for tensor, value, gradient in self._saved:
            if tensor.shape == value.shape and tensor.dtype == value.dtype:
                tensor.data.copy_(value)
            else:
                tensor.data = value.clone()
            if tensor.is_leaf:
                tensor.grad = _copied(gradient)


def _copied(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().clone()


class _Buffers:
    """Buffers may be rebound by forward, so the binding is restored as well as the value."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._training = [(m, m.training) for m in modules]
        self._bound = [(m, dict(m._buffers)) for m in modules if m._buffers]
        buffers = {id(b): b for _, own in self._bound for b in own.values() if b is not None}
        self._values = _Values(buffers.values())

    def restore(self) -> None:
        for module, training in self._training:
            module.training = training
            module._buffers.clear()
        for module, buffers in self._bound:
            module._buffers.update(buffers)
        self._values.restore()


class _OptimizerState:
    """State and options of one optimizer, restored in place: others may hold its groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        self._state = {p: _deep(s) for p, s in optimizer.state.items()}

    def restore(self) -> None:
        for group, saved in zip(self._optimizer.param_groups, self._groups):
            group.update(saved)
        for parameter in list(self._optimizer.state):
            if parameter not in self._state:
                del self._optimizer.state[parameter]
        for parameter, saved in self._state.items():
            self._optimizer.state[parameter] = _deep(saved)


def _deep(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _deep(v) for k, v in value.items()}
    return copy.deepcopy(value)


class _SessionState:
    """All that a step changes in a session, as the session itself tells it."""

    def __init__(self, session: Any, history: bool) -> None:
        self.restore: Callable[[], None] = session.remember(history)


class _Released:
    """What an optimizer that releases gradients knows of a step under way."""

    def __init__(self, release: Any) -> None:
        self.restore: Callable[[], None] = release.memory()


class _ByStateDict:
    """Schedulers, scalers and whatever else offers state_dict and load_state_dict."""

    def __init__(self, thing: Any) -> None:
        self._thing, self._state = thing, copy.deepcopy(thing.state_dict())

    def restore(self) -> None:
        self._thing.load_state_dict(copy.deepcopy(self._state))


class Snapshot:
    """The state before a step. `restore()` may be called any number of times.

    Without `weights` it is cheap enough for every step: no weights, optimizer states or history of outcomes.
    """

    def __init__(self, parts: StepParticipants, weights: bool = True) -> None:
        self._random = rewinder()
        self._parts: list[tuple[Callable[[], Any], Any]] = []
        self._keep(_Buffers, parts.modules)
        if weights:
            self._keep_weights(parts)
        if parts.session is not None:
            self._keep(_SessionState, parts.session, weights)
        for optimizer in parts.optimizers:
            if release := getattr(optimizer, "release", None):
                self._keep(_Released, release)

    def _keep(self, kind: Callable[..., Any], *of: Any) -> None:
        take = partial(kind, *of)
        self._parts.append((take, take()))

    def _keep_weights(self, parts: StepParticipants) -> None:
        for parameter in parts.parameters():
            self._keep(_Values, [parameter])
        for optimizer in parts.optimizers:
            # One of `halfstep.optim` keeps addresses of its state, and forgets them when it loads another.
            own = isinstance(optimizer, OnePassOptimizer)
            self._keep(_ByStateDict if own else _OptimizerState, optimizer)
        for thing in parts.others:
            self._keep(_ByStateDict, thing)

    def restore(self) -> None:
        """Writes every value back and sets the random generators."""
        with torch.no_grad():
            for _, part in self._parts:
                part.restore()
        self._random()

    def exchange(self) -> None:
        """Restores, and keeps what was there until now instead; never a second copy of everything."""
        random = rewinder()
        with torch.no_grad():
            for place, (take, part) in enumerate(self._parts):
                self._parts[place] = take, take()
                part.restore()
        self._random()
        self._random = random
