"""Run a watched script as `__main__`, with hooks that report what it does."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from halfstep.doctor.document import INTERRUPT, Document, add_watched
from halfstep.doctor.examiner import Examiner
from halfstep.doctor.files import Journal, Layer
from halfstep.doctor.ledger import note_conversions
from halfstep.doctor.process import Order, RunFindings, in_words, replace, run_main, seed
from halfstep.numerics.fault import RerunResult
from halfstep.numerics.tape import READS, is_users, reads_nonfinite, users_names
from halfstep.numerics.watch import leave
from halfstep.scaling.grad_scaler import GradScaler
from halfstep.session import setup
from halfstep.torch_private import disable_current_modes, graph_task


class Hooks:
    """Hooks that report a script's acts to an examiner; the stack removes them."""

    def __init__(self, examiner: Examiner, stack: ExitStack) -> None:
        self._examiner = examiner
        self._stack = stack
        self._depth = 0
        self._updated = False
        self._by_hand = False
        self._backward = self._engine = False
        self._within: torch.optim.Optimizer | None = None
        """What was stepped within the backward that runs: the step ends with that."""
        self._stepped: torch.optim.Optimizer | None = None
        self._root: nn.Module | None = None

    def install(self) -> None:
        """Install all hooks."""
        for handle in (
            register_module_forward_pre_hook(self._on_forward),
            register_module_forward_hook(self._on_output),
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ):
            self._stack.callback(handle.remove)
        for listeners, listener in (
            (setup.session_listeners, self._on_session),
            (setup.autocast_listeners, self._on_region),
        ):
            listeners.append(listener)
            self._stack.callback(listeners.remove, listener)
        for scaler in (torch.amp.GradScaler, GradScaler):
            replace(self._stack, scaler, "step", self._on_scaler_step)
            replace(self._stack, scaler, "scale", self._on_scale)
            replace(self._stack, scaler, "update", self._on_scaler_update)
        replace(self._stack, torch.amp.GradScaler, "unscale_", self._on_unscale)
        replace(self._stack, LRScheduler, "step", self._on_schedule)
        replace(self._stack, torch.autograd, "backward", self._on_engine)
        for loss in ("cross_entropy", "binary_cross_entropy_with_logits"):
            replace(self._stack, nn.functional, loss, partial(self._on_loss_function, loss))
        for owner in (torch.amp.GradScaler, torch.optim.Optimizer, LRScheduler):
            replace(self._stack, owner, "__init__", self._on_create)
        for owner in (torch.optim.Optimizer, nn.Module):
            replace(self._stack, owner, "zero_grad", self._on_clear)
        replace(self._stack, torch.autocast, "__enter__", self._on_enter)
        replace(self._stack, torch.Tensor, "backward", self._on_backward)
        for call in READS:
            for owner in (torch.Tensor, torch) if hasattr(torch, call) else (torch.Tensor,):
                replace(self._stack, owner, call, partial(self._on_read, call))
        replace(self._stack, torch.autograd, "grad", self._on_grad)

    @staticmethod
    def _report(hear: Callable[..., Any], *about: Any) -> None:
        """Call the examiner; its own ops are on no tape."""
        with disable_current_modes():
            hear(*about)

    def _on_session(self, session: Any) -> None:
        session.early_listeners.append(self._before_session)
        self._stack.callback(leave, session.early_listeners, self._before_session)
        self._stack.callback(leave, session.listeners, self._after_session)
        self._examiner.on_made(session)

    def _before_session(self, session: Any, optimizer: torch.optim.Optimizer) -> None:
        self._depth, self._updated, self._stepped = 1, False, optimizer
        self._report(self._examiner.on_stepping, optimizer)
        leave(session.listeners, self._after_session)  # it ends the step, after a watch has seen it
        session.listeners.append(self._after_session)

    def _after_session(self, session: Any, outcome: Any) -> None:
        self._depth = 0
        self._examiner.participants.add(self._stepped)
        self._examiner.on_step(self._stepped, skipped=not outcome.taken, finite=bool(outcome.finite))

    def _on_create(self, create: Callable[..., None], thing: Any, /, *args: Any, **kwargs: Any) -> None:
        create(thing, *args, **kwargs)
        self._examiner.on_made(thing)

    def _on_clear(self, clear: Callable[..., None], owner: Any, *args: Any, **kwargs: Any) -> None:
        clear(owner, *args, **kwargs)
        self._examiner.on_cleared(owner)

    def _on_enter(self, enter: Callable[..., Any], region: Any) -> Any:
        self._on_region(region)
        return enter(region)

    def _on_region(self, region: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and not _in_backward():
            self._examiner.on_sign()

    def _on_backward(self, backward: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if loss.numel() == 1:
            self._report(self._examiner.on_loss, loss)
        inner, self._backward = self._backward, True  # a tape calls it once more
        try:
            backward(loss, *args, **kwargs)
        finally:
            self._backward = inner
        self._by_hand = self._examiner.participants.by_hand
        if self._within is not None and not inner:
            stepped, self._within = self._within, None
            self._examiner.on_step(stepped, skipped=False, finite=True)

    def _on_engine(
        self, run: Callable[..., None], roots: Any, given: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Follow what a backward, by whatever name it was called, adds to the gradients."""
        given = kwargs.pop("grad_tensors", given)
        if self._engine or _in_backward():
            run(roots, given, *args, **kwargs)
            return
        tensors = [roots] if isinstance(roots, Tensor) else list(roots)
        weighted = any(x is not None for x in (given if isinstance(given, list | tuple) else [given]))
        self._report(self._examiner.on_backward, tensors, weighted)
        self._engine = True
        try:
            run(roots if isinstance(roots, Tensor) else tensors, given, *args, **kwargs)
        finally:
            self._engine = False
        self._report(self._examiner.owners.after_backward)

    def _on_loss_function(
        self, name: str, loss: Callable[..., Any], input: Tensor, target: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Report the targets of a loss that takes probabilities, with those of a step."""
        result = loss(input, target, *args, **kwargs)
        probabilities = target.is_floating_point() and target.shape == input.shape and target.numel()
        if (
            probabilities
            and torch.is_grad_enabled()
            and not _in_backward()
            and not torch.compiler.is_compiling()
        ):
            self._report(self._examiner.on_targets, name, target.detach())
        return result

    def _on_scale(self, scale: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        scaled = scale(scaler, outputs)
        if scaler.is_enabled():
            self._examiner.owners.on_scaled(scaled)
        return scaled

    def _on_unscale(self, unscale: Callable[..., None], scaler: Any, optimizer: Any) -> None:
        owners, live = self._examiner.owners, scaler.is_enabled()
        if live:
            self._report(owners.before_unscaling, optimizer)
        unscale(scaler, optimizer)
        if live:
            self._report(owners.after_unscaling, optimizer)

    def _on_scaler_update(self, update: Callable[..., None], scaler: Any, *args: Any, **kwargs: Any) -> None:
        update(scaler, *args, **kwargs)
        self._examiner.owners.on_scaler_updated()

    def _on_schedule(self, step: Callable[..., None], schedule: Any, *args: Any, **kwargs: Any) -> None:
        step(schedule, *args, **kwargs)
        self._examiner.owners.on_schedule(schedule)

    def _on_read(self, call: str, read: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Report a value that is not finite and that the script itself reads, outside of its model."""
        outside = self._root is None and not torch.compiler.is_compiling()
        if outside and is_users(sys._getframe(2).f_code.co_filename) and reads_nonfinite(call, args):
            self._examiner.on_read()
        return read(*args, **kwargs)

    def _on_grad(self, grad: Callable[..., Any], outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Report gradients of many tensors at once, where no optimizer is: a step made by hand."""
        grads = grad(outputs, inputs, *args, **kwargs)
        learning = isinstance(inputs, list | tuple) and all(x.is_leaf for x in inputs)
        inner = _in_backward() or kwargs.get("create_graph")
        if learning and not inner and self._examiner.participants.by_hand:
            if isinstance(outputs, Tensor) and outputs.numel() == 1:
                self._report(self._examiner.on_loss, outputs)
            self._report(self._examiner.on_found, list(grads))
            self._by_hand = True
        return grads

    def _on_scaler_step(
        self, step: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Report a scaler's step as one step, whether or not the optimizer inside is stepped."""
        self._depth += 1
        self._updated = False
        self._report(self._examiner.on_stepping, optimizer)
        if self._depth == 1 and scaler.is_enabled():
            self._report(self._examiner.owners.on_scaler_step, scaler, optimizer)
        try:
            result = step(scaler, optimizer, *args, **kwargs)
        finally:
            self._depth -= 1
        if self._depth == 0:
            self._examiner.participants.add(optimizer)
            self._examiner.on_step(optimizer, skipped=not self._updated, finite=True)
        return result

    def _on_forward(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or _in_backward():
            return
        if not torch.is_grad_enabled():
            self._examiner.on_evaluation()
            return
        if self._root is None and self._examiner.participants.is_root(module):
            self._examiner.on_new_forward()
        before = self._examiner.taping
        if self._by_hand:  # a forward after a backward, where no optimizer is: the step before it is over
            self._by_hand = False
            self._report(self._examiner.on_gradients, self._examiner.participants.parts.parameters())
            self._examiner.on_step(self, skipped=False, finite=True)
        self._examiner.on_sign(module)
        taping = self._examiner.taping
        if taping is not None and taping is not before:
            taping.tape.enter_module(module)
        if self._root is None and self._examiner.participants.is_root(module):
            self._root = module
            tensors = [x for x in args if isinstance(x, Tensor)]
            self._report(self._examiner.on_inputs, _names_of_inputs(module, tensors))

    def _on_output(self, module: nn.Module, args: Any, out: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if module is self._root:
            self._root = None
        if isinstance(out, Tensor):
            self._examiner.output_dtypes.add(out.dtype)
        if not torch.is_grad_enabled() or _in_backward() or module._modules or not isinstance(out, Tensor):
            return
        if out.is_floating_point() and out.numel() > 8:
            self._report(self._examiner.on_output, module, out.detach())

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        searches = any(callable(x) for x in (*args, kwargs.get("closure")))
        self._report(self._examiner.on_update, optimizer, self._depth > 0, searches)

    def _after_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._updated = True
        self._report(self._examiner.on_updated, optimizer)
        if _in_backward():
            self._within = optimizer
        elif self._depth == 0:
            self._examiner.on_step(optimizer, skipped=False, finite=True)


def _names_of_inputs(module: nn.Module, tensors: list[Tensor]) -> dict[str, Tensor]:
    """Return inputs by the names of the user's variables; in a loop of ours, of forward's arguments."""
    names = users_names(tensors)
    if names or not tensors:
        return names
    arguments = [p.name for p in inspect.signature(module.forward).parameters.values()]
    return dict(zip(arguments, tensors))


def _compile_disabled(compile: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return compile(*args, **{**kwargs, "disable": True})


def _in_backward() -> bool:
    return graph_task() != -1


def run_order(order: Order) -> RunFindings | RerunResult | None:
    """Run a script as the order says, and remove all hooks afterwards.

    Returns None where the steps to run again were never reached.
    """
    seed(order.seed)
    examiner = Examiner(order)
    with ExitStack() as stack:
        if order.files and order.is_first:
            Journal(order.files).keep(stack, replace)
        elif order.files:
            Layer(order.files, copy=False).install(stack, replace)
        note_conversions(stack, examiner.ledger.flushes)
        request = order.request
        if request is not None:
            examiner.begin_with(request, stack)
        Hooks(examiner, stack).install()
        replace(stack, torch, "compile", _compile_disabled)  # it hides the ops
        stack.enter_context(examiner.around)  # the cures, put in place over the hooks, go before them
        error = run_main(order.script, order.args, order.text, order.module)
        if isinstance(error, KeyboardInterrupt):
            examiner.ended_by, error = INTERRUPT, None
        examiner.on_end(error)
    if request is not None:
        known = examiner.active_request is not None or bool(examiner.rerun_result.error)
        examiner.rerun_result.losses = [note.loss for note in examiner.ledger.notes[: request.at]]
        return examiner.rerun_result if known else None
    return _collect_findings(order, examiner, error and in_words(error, examiner.ledger.iterations))


def _collect_findings(order: Order, examiner: Examiner, error: str | None) -> RunFindings:
    ledger = examiner.ledger
    losses = [note.loss for note in ledger.notes if note.loss is not None]
    document = Document(Path(order.script).name, ledger.iterations, losses, error, ended_by=examiner.ended_by)
    document.audit = examiner.audit
    if examiner.watch is not None:
        add_watched(document, examiner.watch, ledger.skips)
        numbers = dict(enumerate(note.number for note in ledger.notes))
        for row in document.history:  # the watch counts the steps of all optimizers
            row["step"] = numbers.get(row["step"], row["step"])
    return RunFindings(
        document,
        examiner.complete_ledger(),
        examiner.investigation.rerun_result,
        examiner.investigation.unchecked_steps,
    )
