"""What runs inside the process of a watched script: hooks at step boundaries, the watch, the armed tape."""

from __future__ import annotations

import math
import pickle
import random
import runpy
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from halfstep.numerics.actors import Actors
from halfstep.numerics.cures import remedy
from halfstep.numerics.snapshot import run_eagerly
from halfstep.numerics.tape import Tape, is_finite
from halfstep.numerics.trace import Trace, bad_names, finish
from halfstep.numerics.underflow import UnderflowProbe
from halfstep.numerics.watch import Watch, watch


class _Enough(BaseException):
    """Ends the script after the last step that was asked for."""


class Examiner:
    """Counts the steps of a script, watches its model, and tapes one step."""

    def __init__(self, steps: int, armed: int | None, cure: tuple[Any, ...] | None = None) -> None:
        self.steps, self.armed, self.cure = steps, armed, cure
        self.applied = False
        self._around = ExitStack()
        self.done = 0
        self.first_bad: int | None = None
        self.first_bad_loss: int | None = None
        self.skips = 0
        self.losses: list[float] = []
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.session: Any = None
        self.scaler: Any = None
        self.seen: Watch | None = None
        self.trace: Trace | None = None
        self._tape: Tape | None = None
        self._before: frozenset[tuple[str, str]] = frozenset()
        self._depth = 0
        self._bad = False
        self._updated = False
        self._probe = UnderflowProbe()
        self._lint: Any = None

    def install(self, stack: ExitStack) -> None:
        """Puts the hooks in place until `stack` closes."""
        for handle in (
            register_module_forward_pre_hook(self._on_forward),
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ):
            stack.callback(handle.remove)
        from halfstep.scaling.grad_scaler import GradScaler
        from halfstep.session.session import Session

        for owner in (Session, GradScaler, torch.amp.GradScaler):
            self._bracket(owner, stack)
        backward = torch.Tensor.backward
        stack.callback(setattr, torch.Tensor, "backward", backward)

        def noted(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if loss.numel() == 1:
                with _disable_current_modes():
                    self._note_loss(loss)
            backward(loss, *args, **kwargs)

        torch.Tensor.backward = noted  # type: ignore[method-assign]

    def _bracket(self, owner: Any, stack: ExitStack) -> None:
        """A step of `owner` is one boundary, whether the optimizer inside is stepped or skipped."""
        step, create = owner.step, owner.__init__

        def created(thing: Any, *args: Any, **kwargs: Any) -> None:
            create(thing, *args, **kwargs)
            name = "scaler" if hasattr(thing, "get_scale") else "session"
            setattr(self, name, thing)

        def bracketed(thing: Any, *args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            self._updated = False
            try:
                result = step(thing, *args, **kwargs)
            finally:
                self._depth -= 1
            if self._depth == 0:
                self._on_bracket(thing, result, args)
            return result

        stack.callback(setattr, owner, "step", step)
        stack.callback(setattr, owner, "__init__", create)
        owner.step, owner.__init__ = bracketed, created

    def _on_bracket(self, thing: Any, result: Any, args: tuple[Any, ...]) -> None:
        if thing is self.scaler:
            optimizer = args[0] if args else None
            if optimizer is not None and all(optimizer is not o for o in self.optimizers):
                self.optimizers.append(optimizer)
            self._bad = self._bad or not self._updated
            if not self._updated and self.seen is not None:
                self.seen.note_skip()
        else:
            self._bad = self._bad or not result.finite
        self._boundary()

    def _note_loss(self, loss: torch.Tensor) -> None:
        value = loss.detach().float()
        scale = 1.0
        if self.session is not None:
            scale = float(self.session.loss_scale.value)
        elif self.scaler is not None:
            scale = self.scaler.get_scale()
        self.losses[self.done :] = [value.item() / scale]
        if not is_finite(value):
            self._bad = True
            if self.first_bad_loss is None and math.isfinite(scale):
                self.first_bad_loss = self.done

    def _on_forward(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        known = any(module is m for root in self.models for m in root.modules())
        if not known and next(module.parameters(), None) is not None:
            inside = {id(m) for m in module.modules()}
            self.models = [m for m in self.models if id(m) not in inside] + [module]
        if self.armed == 0 and self._tape is None and self.done == 0 and self.models:
            self._arm()
            assert self._tape is not None
            self._tape.enter_module(module)

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if all(optimizer is not o for o in self.optimizers):
            self.optimizers.append(optimizer)
        gradients = (p.grad for g in optimizer.param_groups for p in g["params"])
        self._bad = self._bad or not all(is_finite(g) for g in gradients if g is not None)

    def _after_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._updated = True
        if self._depth == 0:
            self._boundary()

    def _boundary(self) -> None:
        if self._tape is not None:
            self._disarm()
        if self._bad:
            self.skips += 1
            self.first_bad = self.done if self.first_bad is None else self.first_bad
        self._bad = False
        self.done += 1
        if self.done >= self.steps:
            raise _Enough
        if self.armed == self.done:
            self._arm()
        if self.seen is None and self.armed is None and self.models:
            what = self.session if self.session is not None else self.optimizers
            self.seen = watch(self.models[0], what, every=max(1, self.steps // 12), scaler=self.scaler)
            self.seen.step = self.done

    def _actors(self) -> Actors:
        others = [x for x in (self.session, self.scaler) if x is not None]
        return Actors(None, [*self.models, *self.optimizers, *others])

    def _arm(self) -> None:
        from halfstep.numerics.lint import LintProbe

        self._lint = LintProbe()
        self._before = bad_names(self._actors())
        self._tape = Tape(
            self.models[0] if self.models else None, observers=[self._probe.look, self._lint.look]
        )
        self._around.enter_context(run_eagerly())
        apply = None if self.cure is None else remedy(self.cure, self._actors())
        if apply is not None:
            self._around.enter_context(apply())
            self.applied = True
        self._tape.__enter__()

    def _disarm(self, error: BaseException | None = None) -> None:
        tape, self._tape = self._tape, None
        assert tape is not None
        tape.__exit__()
        self._around.close()
        self.trace = finish(tape, self._actors(), self._before, None, error, self._probe)

    def run(self, script: str, args: list[str]) -> str | None:
        """Runs the script as `__main__`; returns what it failed with, if it did."""
        sys.argv = [script, *args]
        sys.path.insert(0, str(Path(script).resolve().parent))
        try:
            runpy.run_path(script, run_name="__main__")
        except (_Enough, SystemExit):
            return None
        except BaseException as error:
            if self._tape is not None:
                self._disarm(error)
            said = (str(error).splitlines() or ["no message"])[0]
            return f"{type(error).__name__} after {self.done} steps: {said}"
        finally:
            if self._tape is not None:
                self._disarm()
        return None

    def found(self, error: str | None) -> dict[str, Any]:
        """What goes back to the doctor."""
        from halfstep.doctor.document import document_of

        traces = [] if self.trace is None else [(self.done - 1, self.trace)]
        findings = [] if self._lint is None else list(dict.fromkeys(self._lint.findings))
        document = document_of("script", self.seen, traces, findings, self.losses, error)
        missed = self.armed is not None and self.trace is None
        return {
            "steps": self.done,
            "first_bad": self.first_bad if self.first_bad_loss is None else self.first_bad_loss,
            "skips": self.skips,
            "applied": self.applied,
            "error": error,
            "document": None if missed else document,
        }


def run_order(order: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a script as the order says; everything that was hooked is as before afterwards."""
    random.seed(order["seed"])
    torch.manual_seed(order["seed"])
    numpy.random.seed(order["seed"])
    examiner = Examiner(order["steps"], order["armed"], order["cure"])
    argv, path = sys.argv, list(sys.path)
    with ExitStack() as stack:
        stack.callback(setattr, sys, "argv", argv)
        stack.callback(setattr, sys, "path", path)
        examiner.install(stack)
        error = examiner.run(order["script"], list(order["args"]))
    if examiner.seen is not None:
        examiner.seen.close()
    return examiner.found(error)


def main(orders_path: str) -> None:
    """Runs one order, written by the doctor's parent process."""
    order = pickle.loads(Path(orders_path).read_bytes())
    Path(order["result"]).write_bytes(pickle.dumps(run_order(order)))


if __name__ == "__main__":
    main(sys.argv[1])
