"""Runs a step again in place, with a cure: on one rank, or on all ranks together.

Ranks find different ops, and a trial takes part in the step's collectives, so ranks tell each other first
what they found and then try everybody's cures, in one order. A rank that raised where others wait would leave
them waiting for ever: a cure that changes an op is therefore rehearsed before, by each rank on its own, with
collectives answered by its own values and DDP left out (a backward that fails inside DDP spoils its reducer).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel

from halfstep.distributed import gather
from halfstep.errors import LossScaleCollapsed
from halfstep.numerics.cures import lowest_scale, placed, with_attributes
from halfstep.numerics.fault import Cure, Fault, Spec
from halfstep.numerics.judge import Again, Seen
from halfstep.numerics.participants import StepParticipants
from halfstep.numerics.snapshot import replay, run_eagerly
from halfstep.torch_private import (
    TorchDispatchMode,
    collective_that_is_over,
    delays_all_reduce,
    schema_of,
    tree_leaves,
    tree_map,
)

#: Collectives for which a rank's own values are an answer of the right shape.
_ANSWERED = frozenset(["c10d::allreduce_", "c10d::broadcast_", "c10d::barrier"])
#: Cures that change one factor, so that the step runs the very same ops.
_SCALES = ("loss_scale", "loss")

# What a rehearsal showed.
_READY, _RAISED, _UNSAFE = "ready", "raised", "unsafe"


class InPlace:
    """Runs a step again in this process, on this rank.

    Args:
        step: runs the step as it is.
        look: runs it under the tape; what was bad, if anything.
        restore: puts everything back as it was before the step.
        parts: what takes part in the step.
    """

    def __init__(
        self,
        step: Callable[[], Any],
        look: Callable[[], Fault | None],
        restore: Callable[[], None],
        parts: StepParticipants,
    ) -> None:
        self._step, self._look, self._restore, self._parts = step, look, restore, parts
        self.group = parts.group

    def run(self, again: Again) -> Seen | None:
        """Whether the step stays finite with the cure; one that it cannot run with does not help."""
        assert again.cure is not None
        cure = placed(again.cure, self._parts)
        if cure is None:
            return None
        seen = Seen(falls=lowest_scale(self._parts) is not None)
        try:
            with cure:
                bad = self._look()
                seen.applied = getattr(cure, "met", True)
            seen.faults = [] if bad is None else [bad]
            seen.bad_at = None if bad is None else again.at
        except Exception:
            seen.bad_at = again.at
        finally:
            self._restore()
        return seen

    def rehearse(self, spec: Spec) -> str:
        """Whether the step runs through with the change, on this rank alone: ready, raised or unsafe."""
        cure = placed(spec, self._parts)
        if cure is None or spec[0] in _SCALES:
            return _UNSAFE if cure is None else _READY
        try:
            with run_eagerly(), replay(), _without_ddp(), cure, _Alone():
                self._step()
        except _NotAlone:
            return _UNSAFE
        except LossScaleCollapsed:  # comes last in a step, and on all ranks
            return _READY
        except Exception:
            return _RAISED
        finally:
            self._restore()
        return _READY


@dataclass(frozen=True)
class ReplayReport:
    """What a rank tells the others of its replay.

    `fault`: its own, None if all was well with it. `through`: whether the step ran to its end. `known`:
    whether a rehearsal can answer every collective that the step ran.
    """

    fault: Fault | None
    through: bool
    known: bool

    @classmethod
    def of(cls, bad: Fault | None, error: BaseException | None, collectives: Sequence[str]) -> ReplayReport:
        """What to tell of a replay that showed `bad`; another rank's fault is not this one's."""
        through = error is None or isinstance(error, LossScaleCollapsed)
        own = None if bad is None or bad.cause.kind == "rank" else bad
        return cls(own, through, _ANSWERED.issuperset(collectives))

    @property
    def underflow(self) -> bool:
        """Whether trials must look for gradients that vanish."""
        return self.fault is not None and self.fault.underflow

    @property
    def cures(self) -> list[Cure]:
        """What the rank proposes."""
        return [] if self.fault is None else self.fault.cures


class Together:
    """Runs a step again on all ranks together: each must make one of these and call it alike.

    A step is well if everything stays finite on every rank.
    """

    def __init__(self, everyone: Sequence[ReplayReport], alone: InPlace) -> None:
        self._alone = alone
        self._answers: dict[Spec, Seen | None] = {}
        self._through = all(told.through for told in everyone)
        self._known = all(told.known for told in everyone)

    def run(self, again: Again) -> Seen | None:
        """What that showed on any rank; asks all ranks where the cure was not tried yet."""
        assert again.cure is not None
        if again.cure not in self._answers:
            self._answers[again.cure] = self._try(again)
        return self._answers[again.cure]

    def _try(self, again: Again) -> Seen | None:
        assert again.cure is not None
        if not self._through or not (again.cure[0] in _SCALES or self._known):
            return None
        states = gather(self._alone.rehearse(again.cure), self._alone.group)
        if _UNSAFE in states:
            return None
        if _RAISED in states:
            return Seen(bad_at=again.at)
        seen = self._alone.run(again)
        well = all(gather(seen is not None and seen.bad_at is None, self._alone.group))
        return Seen(bad_at=None if well else again.at)


class _NotAlone(BaseException):
    """A step that needs the other ranks; passes by handlers of Exception in the step."""


class _Alone(TorchDispatchMode):
    """Answers collectives at once, with this rank's own values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" not in func.namespace:
            return func(*args, **(kwargs or {}))
        name = schema_of(func).name
        if name not in _ANSWERED:
            raise _NotAlone(name)
        work = _done()
        return work if name == "c10d::barrier" else (args[0], work)


def _done() -> Any:
    """What a collective that is over returns, as the dispatcher wants it."""
    work = collective_that_is_over()
    if work is None:
        raise _NotAlone("this PyTorch cannot stand in for a collective")
    return work


def _forward(ddp: Any, *args: Any, **kwargs: Any) -> Any:
    """DDP's forward without DDP: its reducer neither expects nor sees the backward that follows."""
    marks_used = ddp.static_graph or ddp.find_unused_parameters  # its hooks would count this backward
    if marks_used or ddp.mixed_precision is not None or delays_all_reduce(ddp):
        raise _NotAlone("DDP")
    if ddp.device_ids:
        home = torch.device(ddp.device_type, ddp.device_ids[0])

        def move(x: Any) -> Any:
            return x.to(home) if isinstance(x, Tensor) else x

        args, kwargs = tree_map(move, (args, kwargs))
    return ddp.module(*args, **kwargs)


def _met(waiting: set[int], module: int, gradient: Tensor) -> None:
    waiting.discard(module)


@contextmanager
def expected_reductions(names: MutableMapping[str, int]) -> Generator[None]:
    """Counts in `names` the DDP modules whose last forward within was not followed by a backward.

    Their reducers wait for one, and would take a rehearsal's for it.
    """
    waiting: set[int] = set()

    def after(module: nn.Module, args: Any, out: Any) -> None:
        if not isinstance(module, DistributedDataParallel):
            return
        if torch.is_grad_enabled() and module.require_backward_grad_sync:
            waiting.add(id(module))
            for t in tree_leaves(out):
                if isinstance(t, Tensor) and t.requires_grad:
                    t.register_hook(partial(_met, waiting, id(module)))

    handle = register_module_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()
        if waiting:
            names["a reduction by DDP that is still expected"] = len(waiting)


@contextmanager
def _without_ddp() -> Generator[None]:
    with with_attributes(DistributedDataParallel, forward=_forward):
        yield
