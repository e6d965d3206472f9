"""Cures tried by running the step again with each: on one rank, or on all ranks together.

Ranks find different ops, and a trial takes part in the step's collectives, so ranks tell each other first
what they found and then try everybody's cures, in one order. A rank that raised where others wait would leave
them waiting for ever: a cure that changes an op is therefore rehearsed before, by each rank on its own, with
collectives answered by its own values and DDP left out (a backward that fails inside DDP spoils its reducer).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from halfstep.distributed import gather
from halfstep.errors import LossScaleCollapsed
from halfstep.numerics.cures import FAILS, UNTRIED, WORKS, Apply, Cure, remedy, with_attributes
from halfstep.numerics.participants import StepParticipants
from halfstep.numerics.snapshot import replay, run_eagerly

#: Collectives for which a rank's own values are an answer of the right shape.
_ANSWERED = frozenset(["c10d::allreduce_", "c10d::broadcast_", "c10d::barrier"])

# What a rehearsal showed.
_READY, _RAISED, _UNSAFE = "ready", "raised", "unsafe"


class Trials:
    """Runs a step again with a change in place.

    Args:
        step: runs the step as it is.
        look: runs it under the tape; whether everything stayed finite.
        restore: puts everything back as it was before the step.
        lowest: the lowest loss scale, where it goes there by itself and what it skips does not matter.
    """

    def __init__(
        self,
        step: Callable[[], Any],
        look: Callable[[], bool],
        restore: Callable[[], None],
        lowest: Apply | None = None,
    ) -> None:
        self._step, self._look, self._restore, self._lowest = step, look, restore, lowest

    def works(self, apply: Apply) -> bool:
        """Whether the step stays finite with the change, if need be at a lower loss scale.

        One that it cannot run with does not help.
        """
        try:
            with apply():
                if self._lowest is None:
                    return self._look()
                if self._look():
                    return True
                self._restore()
                with self._lowest():
                    return self._look()
        except Exception:
            return False
        finally:
            self._restore()

    def rehearse(self, apply: Apply) -> str:
        """Whether the step runs through with the change, on this rank alone: ready, raised or unsafe."""
        try:
            with run_eagerly(), replay(), _without_ddp(), apply(), _Alone():
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


def judge(cures: Sequence[Cure], status_of: Callable[[Cure], str]) -> tuple[Cure, ...]:
    """The cures with their answers: of each the first dose that works, else the last that was tried."""

    def judged(cure: Cure) -> Cure:
        if cure.apply is None:
            return cure
        dose, status = cure, UNTRIED
        for dose in (cure, *cure.variants):
            status = status_of(dose)
            if status != FAILS:
                break
        return replace(dose, status=status)

    return tuple(judged(cure) for cure in cures)


def try_alone(cures: Sequence[Cure], trials: Trials) -> tuple[Cure, ...]:
    """Tries the cures one after the other on this rank."""

    def status_of(cure: Cure) -> str:
        return WORKS if cure.apply is not None and trials.works(cure.apply) else FAILS

    return judge(cures, status_of)


@dataclass(frozen=True)
class ReplayReport:
    """What a rank tells the others of its replay.

    `story`: its own bad op in a line, empty if all was well with it. `underflow`: whether trials must look
    for gradients that vanish. `through`: whether the step ran to its end. `known`: whether a rehearsal can
    answer every collective that the step ran.
    """

    story: str = ""
    cures: tuple[Cure, ...] = ()
    underflow: bool = False
    through: bool = True
    known: bool = True


def can_rehearse(collectives: Sequence[str]) -> bool:
    """Whether a rank alone can answer these collectives."""
    return _ANSWERED.issuperset(collectives)


def plain(cure: Cure) -> Cure:
    """The cure as another process can read it; without `spec` where it cannot be applied."""
    spec = cure.spec if cure.apply is not None else ()
    return replace(cure, apply=None, spec=spec, variants=tuple(plain(v) for v in cure.variants))


class TrialsTogether:
    """Cures of all ranks, tried by all ranks together: each must make one of these and call it alike.

    A cure works if everything stays finite on every rank.
    """

    def __init__(self, everyone: Sequence[ReplayReport], trials: Trials, parts: StepParticipants) -> None:
        self._everyone, self._trials, self._parts = everyone, trials, parts
        self._answers: dict[tuple[Any, ...], str] = {}
        self._through = all(told.through for told in everyone)
        self._known = all(told.known for told in everyone)

    def run(self) -> list[tuple[Cure, ...]]:
        """Tries everybody's cures, in the order of ranks; returns them with their answers, by rank."""
        return [judge([self._applied(c) for c in told.cures], self.status_of) for told in self._everyone]

    def status_of(self, cure: Cure) -> str:
        """The answer for one cure; asks all ranks where it was not tried yet."""
        if cure.spec not in self._answers:
            self._answers[cure.spec] = self._try(cure)
        return self._answers[cure.spec]

    def _applied(self, cure: Cure) -> Cure:
        # A cure that this rank cannot apply is still gone through with the others.
        apply = (remedy(cure.spec, self._parts) or _impossible) if cure.spec else None
        return replace(cure, apply=apply, variants=tuple(self._applied(v) for v in cure.variants))

    def _try(self, cure: Cure) -> str:
        scales = cure.kind == "loss_scale"  # changes one factor, so the step runs the very same ops
        if not self._through or not (scales or self._known) or cure.apply is None:
            return UNTRIED
        possible = cure.apply is not _impossible
        state = _UNSAFE if not possible else _READY if scales else self._trials.rehearse(cure.apply)
        states = gather(state, self._parts.group)
        if _UNSAFE in states:
            return UNTRIED
        if _RAISED in states:
            return FAILS
        return WORKS if all(gather(self._trials.works(cure.apply), self._parts.group)) else FAILS


def _impossible() -> Any:
    raise RuntimeError("a cure that cannot be applied on this rank was tried")


class _NotAlone(BaseException):
    """A step that needs the other ranks; passes by handlers of Exception in the step."""


class _Alone(TorchDispatchMode):
    """Answers collectives at once, with this rank's own values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" not in func.namespace:
            return func(*args, **(kwargs or {}))
        name = func._schema.name
        if name not in _ANSWERED:
            raise _NotAlone(name)
        work = _done()
        return work if name == "c10d::barrier" else (args[0], work)


def _done() -> Any:
    """What a collective that is over returns, as the dispatcher wants it."""
    distributed: Any = torch._C._distributed_c10d  # pyright: ignore
    work = getattr(distributed, "FakeWork", None)
    if work is None or not hasattr(work, "boxed"):
        raise _NotAlone("this PyTorch cannot stand in for a collective")
    return work().boxed()


def _forward(ddp: Any, *args: Any, **kwargs: Any) -> Any:
    """DDP's forward without DDP: its reducer neither expects nor sees the backward that follows."""
    marks_used = ddp.static_graph or ddp.find_unused_parameters  # its hooks would count this backward
    if marks_used or ddp.mixed_precision is not None or getattr(ddp, "_delay_all_reduce_all_params", False):
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
