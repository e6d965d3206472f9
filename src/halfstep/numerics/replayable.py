"""Steps that are ready to be traced: run as they are, replayed under the tape only when one goes wrong.

What a step could not get back is kept while it runs: random state, buffers and its batch (by reference).
Weights are copied only once gradients turn out not to be finite and an update is about to use them: where no
loss scale skips such an update, an accelerator is waited for once a step, to know.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from halfstep.distributed import all_ranks, is_sharded, world_size
from halfstep.errors import LossScaleCollapsed, warn
from halfstep.gradients.per_parameter import amaxes
from halfstep.numerics.snapshot import Snapshot, StepParticipants
from halfstep.numerics.tape import is_finite
from halfstep.numerics.trace import Trace, trace_step
from halfstep.trees import compute_device, gradients_of, tensors_in

_SHARDED = (
    "step {}: gradients or the loss are not finite. No op is named: fully_shard frees the weights that it "
    "gathers, which a replay would have to read again. Run the step in one process or under DDP (said once)"
)

#: Replays of one run for each new cause that it may find.
_TRIES = 4


@dataclass
class _PendingStep:
    """A step that was run and whose verdict is still to be read."""

    step: Callable[..., Any]
    batch: tuple[Any, ...]
    parts: StepParticipants
    before: Snapshot
    outcomes: int
    result: Any = None
    early: Snapshot | None = None

    @property
    def device(self) -> torch.device:
        """Return the device of the models."""
        return compute_device(self.parts.parameters())

    @property
    def sharded(self) -> bool:
        """Whether a model is under `fully_shard`."""
        return any(map(is_sharded, self.parts.models))


class Replayable:
    """Runs steps of a Session or of a plain model and optimizer; `traces` holds what replays found.

    A step that is skipped, or whose loss is not finite, is replayed if its cause may be new: the first in a
    row of bad steps, the second, the fourth and so on. Each cause is named once, in a warning; a range that
    only the present loss scale exceeds is no fault and is kept without one. Steps of a model under
    `fully_shard` are not replayed: a warning names the first bad one. What a step trains is looked for in
    each step and not kept, so that a session which holds a Replayable is not kept alive by it.

    Args:
        session: a Session, or None with `model` and `optimizer` given (or found through the step function).
        model, optimizer: what the steps train.
        others: further things with state_dict that a step changes (schedulers, scalers).
        limit: how many different causes are kept; at most four times as many steps are replayed.
        warn: whether a warning names each cause.
    """

    def __init__(
        self,
        session: Any = None,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        others: Iterable[Any] = (),
        limit: int = 3,
        warn: bool = True,
    ) -> None:
        self._traces: list[tuple[int, Trace]] = []
        self.steps = 0
        self._session = (lambda: None) if session is None else weakref.ref(session)
        self._others = [x for x in (model, optimizer, *others) if x is not None]
        self._limit, self._warn = limit, warn
        self._replays = self._bad_in_a_row = 0
        self._has_warned = False
        self._pending: _PendingStep | None = None

    @property
    def traces(self) -> list[tuple[int, Trace]]:
        """Return step number and trace of each cause found; this may replay the last step."""
        self.finish()
        return self._traces

    @property
    def last(self) -> Trace | None:
        """Return the latest trace."""
        traces = self.traces
        return traces[-1][1] if traces else None

    def run(self, step: Callable[..., Any], *batch: Any) -> Any:
        """Run `step(*batch)`; if its gradients or its loss are not finite, replay it under the tape.

        On an accelerator the verdict is read when the next step begins, or `last` or `traces` are read.
        `step` must not change its batch, and is called again for the replay.

        Raises:
            LossScaleCollapsed: as the session does, with the first bad op in the message.
        """
        self.finish()
        parts = StepParticipants(step, self._given)
        steps = 0 if parts.session is None else parts.session.steps
        pending = _PendingStep(step, batch, parts, Snapshot(parts, weights=False), steps)
        self.steps += 1
        skips = parts.session is not None and parts.session.skip_nonfinite
        hooks = [] if pending.sharded or skips else self._guards(parts, pending)
        try:
            pending.result = step(*batch)
        except LossScaleCollapsed as error:
            raise self._with_origin(error, pending) from error
        finally:
            for hook in hooks:
                hook.remove()
        self._pending = pending
        if pending.device.type == "cpu":
            self.finish()
        return pending.result

    def finish(self) -> None:
        """Read the last step's verdict, and replay the step if it was bad and may show a new cause."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        session, bad = pending.parts.session, False
        try:
            if session is not None:
                outcomes = islice(reversed(session.history), session.steps - pending.outcomes)
                bad = any(not outcome.finite for outcome in outcomes)
        except LossScaleCollapsed as error:
            raise self._with_origin(error, pending) from error
        bad = bad or pending.early is not None or not all(is_finite(t) for t in tensors_in(pending.result))
        bad = _on_any_rank(pending, bad)
        self._bad_in_a_row = self._bad_in_a_row + 1 if bad else 0
        power_of_two = self._bad_in_a_row & (self._bad_in_a_row - 1) == 0
        replay_due = bad and power_of_two and self._replays < _TRIES * self._limit
        if pending.sharded and bad and self._warn and not self._has_warned:
            self._has_warned = True
            warn(_SHARDED.format(self.steps))
        elif not pending.sharded and replay_due and _on_any_rank(pending, len(self._traces) < self._limit):
            self._keep(self._replay(pending), self._warn)

    @property
    def _given(self) -> list[Any]:
        """Return the objects given to the constructor that are alive."""
        return [x for x in (self._session(), *self._others) if x is not None]

    def _keep(self, trace: Trace, warns: bool) -> None:
        """Keep a trace whose cause is new, and warn if asked."""
        bad = trace.bad
        if bad is None or any(bad.same_as(other.bad) for _, other in self._traces):
            return
        self._traces.append((self.steps, trace))
        if warns and not bad.harmless and bad.cause.kind != "rank":
            warn(f"step {self.steps}: {bad.summary()}")

    def _with_origin(self, error: LossScaleCollapsed, pending: _PendingStep) -> LossScaleCollapsed:
        if pending.sharded:
            return LossScaleCollapsed(str(error))
        trace = self._replay(pending)
        self._keep(trace, warns=False)
        bad = trace.bad
        return LossScaleCollapsed(f"{error}; first bad op: {bad.summary()}" if bad else str(error))

    def _guards(self, parts: StepParticipants, pending: _PendingStep) -> list[Any]:
        """Install hooks that copy weights before an update with nonfinite gradients corrupts them."""

        def guard(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            gradients = gradients_of(optimizer) if pending.early is None else []
            if gradients and not math.isfinite(float(amaxes(gradients).max())):
                pending.early = Snapshot(parts)

        return [o.register_step_pre_hook(guard) for o in parts.optimizers]

    def _replay(self, pending: _PendingStep) -> Trace:
        parts = pending.parts
        if parts.session is not None:
            parts.session.sync()
        self._replays += 1
        after = Snapshot(parts, weights=pending.early is not None)
        if pending.early is not None:
            pending.early.restore()
        gradients = [(p, p.grad) for p in parts.parameters()]
        for parameter, _ in gradients:
            parameter.grad = None
        pending.before.restore()
        try:  # a trace leaves weights and states as it found them
            return trace_step(pending.step, *pending.batch, others=[*self._given, *parts.others])
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            after.restore()


def _on_any_rank(pending: _PendingStep, flag: bool) -> bool:
    """Whether any rank replays: then all do, since a replay takes part in their collectives."""
    if world_size() == 1:
        return flag
    return bool(all_ranks(torch.tensor(flag, device=pending.device), pending.parts.group))
