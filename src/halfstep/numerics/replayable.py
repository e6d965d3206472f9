"""Steps that are ready to be traced: run as they are, replayed under the tape only when one goes wrong.

What a step could not get back is kept while it runs: random state, buffers and its batch (by reference).
Weights are copied only once gradients turn out not to be finite and an update is about to use them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from halfstep.errors import LossScaleCollapsed
from halfstep.numerics.replay import Actors, Snapshot
from halfstep.numerics.tape import is_finite, tensors_in
from halfstep.numerics.trace import Trace, trace_step


class Replayable:
    """Runs steps of a Session or of a plain model and optimizer; `traces` holds what replays found.

    Args:
        session: a Session, or None with `model` and `optimizer` given (or found through the step function).
        model, optimizer: what the steps train.
        limit: how many bad steps are traced (a dynamic loss scale skips some steps for good reasons).
    """

    def __init__(
        self,
        session: Any = None,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        limit: int = 3,
    ) -> None:
        self.traces: list[tuple[int, Trace]] = []
        self.steps = 0
        self._given = [x for x in (session, model, optimizer) if x is not None]
        self._limit = limit
        self._actors: Actors | None = None
        self._step: Callable[..., Any] | None = None
        self._waiting: tuple[Any, ...] | None = None
        self._early: Snapshot | None = None

    @property
    def last(self) -> Trace | None:
        """What the latest replay found."""
        return self.traces[-1][1] if self.traces else None

    def run(self, step: Callable[..., Any], *batch: Any) -> Any:
        """Runs `step(*batch)`; if its gradients or its loss are not finite, replays it under the tape.

        On an accelerator the verdict is read when the next step begins, so that nothing waits in between.
        `step` must not change its batch, and is called again for the replay.

        Raises:
            LossScaleCollapsed: as the session does, with the first bad op in the message.
        """
        actors = self._actors_of(step)
        self.settle()
        before = Snapshot(actors, weights=False)
        self._early = None
        hooks = [o.register_step_pre_hook(self._guard) for o in actors.optimizers]
        marks = self._marks(actors)
        try:
            result = step(*batch)
        except LossScaleCollapsed as error:
            self._replay(step, batch, before)
            bad = self.last.bad if self.last is not None else None
            raise LossScaleCollapsed(
                f"{error}; first bad op: {bad.summary()}" if bad else str(error)
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
        self._waiting = (step, batch, before, marks, result, self._early)
        self.steps += 1
        if not any(p.device.type != "cpu" for p in actors.parameters()[:1]):
            self.settle()
        return result

    def settle(self) -> None:
        """Reads the last step's verdict now, and replays it if it was bad."""
        if self._waiting is None:
            return
        step, batch, before, marks, result, early = self._waiting
        self._waiting = None
        actors = self._actors_of(step)
        bad = early is not None or not all(is_finite(t) for t in tensors_in(result))
        if actors.session is not None:
            bad = bad or any(not o.finite for o in list(actors.session.history)[marks:])
        if bad and len(self.traces) < self._limit:
            self._replay(step, batch, before, early)

    def _marks(self, actors: Actors) -> int:
        """How many outcomes there were, so that a step's own can be told."""
        return 0 if actors.session is None else len(actors.session.history)

    def _actors_of(self, step: Callable[..., Any]) -> Actors:
        if self._actors is None or self._step is not step:
            self._actors, self._step = Actors(step, self._given), step
        return self._actors

    def _guard(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Before an update on a CPU: if a gradient is not finite, keep the weights it is about to spoil."""
        gradients = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        on_cpu = all(g.device.type == "cpu" for g in gradients)
        if self._early is None and on_cpu and not all(is_finite(g) for g in gradients):
            assert self._actors is not None
            self._early = Snapshot(self._actors)

    def _replay(
        self,
        step: Callable[..., Any],
        batch: tuple[Any, ...],
        before: Snapshot,
        early: Snapshot | None = None,
    ) -> None:
        actors = self._actors_of(step)
        after = Snapshot(actors)
        if early is not None:
            early.restore()
        with torch.no_grad():
            for parameter in actors.parameters():
                parameter.grad = None
        before.restore()
        try:
            trace = trace_step(step, *batch, others=[*self._given, *actors.others])
            self.traces.append((self.steps, trace))
        finally:
            after.restore()
