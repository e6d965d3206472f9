"""`Session`: backward, step, measure, save and load of one training run that `prepare` set up.

It keeps the order of things right (scale, backward, unscale, check, clip, update, write back, zero) and
records what each step did. It decides nothing about formats and has no numerics of its own.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Never

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from halfstep.casting import kernel_choice
from halfstep.casting.kernel_facts import does_not_pay
from halfstep.casting.kernel_probes import measurements
from halfstep.checkpoint import Background
from halfstep.devices import refuse_capture, refuse_reading
from halfstep.distributed import all_ranks, world_size
from halfstep.distributed.reduce import largest_of_ranks
from halfstep.errors import ConfigError, UnsupportedError, show, warn
from halfstep.formats import dtype_name
from halfstep.gradients.decision import Decision, check_clip, decide
from halfstep.gradients.stats import AnyStats
from halfstep.numerics.replayable import Replayable
from halfstep.numerics.uncast import casts_weights, no_region, ran_wide, weights_fault
from halfstep.optim.release import PARTLY
from halfstep.optim.replicas import listen_to_wraps
from halfstep.optim.resolution import find_idle_steps
from halfstep.outcome import Outcome, OutcomeQueue, StepRecord
from halfstep.policy.levels import LOW_DTYPES
from halfstep.scaling.loss_scale import LossScale, NoLossScale
from halfstep.scaling.skips import SkipCount
from halfstep.session import loading, saving
from halfstep.session.averages import start_average
from halfstep.session.checks import (
    BROKEN_OFF,
    LEFTOVER_GRADIENTS,
    SKIPPED_IN_A_ROW,
    SKIPPING,
    NonFinite,
    Report,
    check_expanded,
    check_loss_id,
    check_scheduler,
    check_sharing,
    check_state,
    has_nonzero,
    index_of,
    indices_of,
    name_of,
    no_optimizer,
    one_loss,
    refuse_direct_steps,
)
from halfstep.session.ranks import RankGuard
from halfstep.session.round import (
    Flag,
    Loss,
    StepState,
    begin_backward,
    check_unscaling,
    find_conflicting,
    finite_of,
    inverse,
    losses_to_step,
    merge_found_inf,
    scale_of_gradients,
    sizes_of,
    stash_gradients,
    unscale_added,
    unscale_gradients,
)
from halfstep.session.setup import Setup
from halfstep.session.steppers import OnePassStepper, Stepper, Update, steppers_of, weights_of
from halfstep.torch_private import never_compiled

Models = nn.Module | Sequence[nn.Module]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
Listener = Callable[["Session", Outcome], None]
EarlyListener = Callable[["Session", torch.optim.Optimizer], None]

#: Outcomes that `Session.history` keeps.
HISTORY = 10_000


class Session(Setup):
    """One training run, made by `prepare`: its `models` and `optimizers` as they were given, their `device`,
    the `policy` that ops run under, `kernels` by which a CPU runs LOW ops, whether steps are skipped whose
    gradients are not finite (`skip_nonfinite`), what was done to each model (`conversions`), fp32 `masters`
    of torch optimizers by number, convolution weights in channels_last (`layout`), what "auto" measured
    (`tuning`).

    `history` holds the latest outcomes, `skips` the counts, `loss_scale` the present scale; `listeners` are
    called with (session, outcome) after every step, `early_listeners` with (session, optimizer) before one
    looks at its gradients; neither may change anything.
    """

    def __init__(
        self,
        *prepared: Any,
        max_skips: int,
        on_nonfinite: Any,
        norm_group: Any,
        group: Any,
    ) -> None:
        super().__init__(*prepared)
        skips, gradient_scales = SkipCount(limit=max_skips), (None,) * len(self.optimizers)
        sizes = tuple(map(sizes_of, self.optimizers))
        self.state = StepState(self.precision.scales, skips, gradient_scales, sizes=sizes)
        self.history: deque[Outcome] = deque(maxlen=HISTORY)
        self.listeners: list[Listener] = []
        self.early_listeners: list[EarlyListener] = []
        self._queue = OutcomeQueue()
        self._nonfinite = NonFinite(on_nonfinite, self.models, self.optimizers)
        self._replay: Replayable | None = None
        self._first, self._wide = True, False
        """Whether no step was made yet, and whether its losses came of fp32 ops that 16 bits are for."""
        plain = self.level.name == "O0"
        self._steppers: list[Stepper] = steppers_of(
            self.models, self.optimizers, self.masters, norm_group, plain
        )
        self._ranks = RankGuard(self, group, norm_group)
        self.stages = norm_group is not None
        """Whether each rank has other parameters, whatever their names."""
        self.writer: Background | None = None

    def install_hooks(self) -> None:
        """Once everything is prepared: copies of the models get the masters, and the session can be found."""
        listen_to_wraps(self._ranks)
        self._ranks.share_kernels()
        if self.precision.scaled:
            self._preparation.handles += refuse_direct_steps(self)
        super().install_hooks()

    def __repr__(self) -> str:
        """Level, policy, scale, counts, layout; what "auto" measured, or that the level does not pay."""
        read = ", ".join(f"{scale.read():g}" for scale in self.loss_scales)
        kinds = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers) or "no optimizer"
        lines = [
            f"{self.level.name} ({self.level.summary}): {self.policy} on {self.device}, "
            f"{type(self.loss_scale).__name__}",
            f"{kinds}: {self.steps} steps, {self.skips.total} skipped, loss scale {read}",
            "convolution weights in channels_last" if self.layout else "",
        ]
        dtype = self.policy.compute_dtype
        if self.tuning is not None:
            lines.append(self.tuning.reason)
        elif dtype in LOW_DTYPES and self.device.type == "cpu" and self.kernels.measures:
            slow = does_not_pay(measurements.lookup(), dtype_name(dtype), torch.get_num_threads())
            lines.append(slow or "")
        return "\n".join(filter(None, lines))

    def __getitem__(self, index: Any) -> Never:
        raise ConfigError(
            "prepare() returns one Session, not several things: write amp = hs.prepare(model, optimizer) and "
            "go on with the model and the optimizer that you have"
        )

    def __reduce__(self) -> Any:
        raise UnsupportedError(
            "a Session cannot be pickled or copied: save state_dict() of model, optimizer and session, then "
            "prepare() and load them"
        )

    @property
    def loss_scale(self) -> LossScale:
        """The scale that the next backward multiplies by; of several losses, the first one's."""
        return self.state.loss_scales[0]

    @loss_scale.setter
    def loss_scale(self, scale: LossScale) -> None:
        if not isinstance(scale, LossScale):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"amp.loss_scale = {show(scale)}: expected a LossScale, such as StaticLossScale(1024.0); "
                "prepare(loss_scale=...) takes numbers and words"
            )
        self.state = self.state._replace(loss_scales=(scale, *self.state.loss_scales[1:]))

    @property
    def loss_scales(self) -> tuple[LossScale, ...]:
        """The scale of every loss, by the number that `backward(loss_id=)` names it by."""
        return self.state.loss_scales

    @property
    def group(self) -> Any:
        """The process group whose ranks step and save together, None for all ranks; see `prepare`.

        Every one of them must ask for it at the same place in the program.
        """
        return self._ranks.group

    @property
    def steps(self) -> int:
        """Steps so far, taken or skipped."""
        return self.state.steps

    @property
    def skips(self) -> SkipCount:
        """How many steps were skipped, in a row and in all (on an accelerator known at most 2 steps late)."""
        return replace(self.state.skips, steps=self.steps)

    @never_compiled
    def backward(
        self,
        loss: Tensor | Sequence[Tensor],
        optimizer: Optimizers = None,
        *,
        loss_id: int = 0,
        more: bool = False,
        **kwargs: Any,
    ) -> None:
        """Scale the loss and run backward; call it several times before a step to accumulate.

        Args:
            loss: a scalar tensor (or any, with `gradient=` in kwargs), not scaled; or several scalar losses,
                whose sum, taken in fp32, is differentiated in one pass.
            optimizer: the optimizers whose parameters this loss trains; None means all. Gradients of the
                others stay as they are. An inf found in the gradients of one skips those of the same loss.
            loss_id: which of the scales given as `prepare(loss_scale=[...])` is this loss's.
            more: further backward passes follow before the step; needed only with released gradients, which
                are applied by the last pass and clipped by the `clip_norm` and norm of the step before.
            kwargs: handed to `Tensor.backward` (retain_graph, create_graph, inputs, gradient).

        Where it breaks off (out of memory, Ctrl-C, a hook that raises), the gradients of these optimizers are
        cleared, those of earlier passes since the step too, and the next call begins again.

        Raises:
            ConfigError: a loss without a graph or of several numbers, an optimizer not of this session, or a
                loss_id that has no scale. UnsupportedError: inside a CUDA graph capture.
        """
        if torch.cuda.is_initialized():
            refuse_capture(self.device, "amp.backward()")
        scales = self.state.loss_scales
        check_loss_id(loss_id, len(scales))
        loss, scale = one_loss(loss, kwargs), scales[loss_id]
        optimizers = self.optimizers
        if self._ranks.asks:
            self._ranks.check()
        self._check_added()
        indices = indices_of(optimizers, optimizer)
        conflicts = find_conflicting(self.state, indices, loss_id)
        if self._first:
            self._first_backward(loss)
        if LEFTOVER_GRADIENTS not in self.state.warned:
            self._note_leftovers(indices)
        begun = False
        try:
            with ExitStack() as stack:
                self._enter_backward(stack, indices, scale, more)
                if conflicts:
                    stack.enter_context(self._isolated_backward(conflicts))
                begun = True
                self.state = begin_backward(self.state, self._steppers, indices, loss_id)
                if self.precision.stores_low:
                    self._ranks.fit_gradients([w for i in indices for w in weights_of(optimizers[i])])
                scale.scale(loss).backward(**kwargs)
        except BaseException as error:
            if begun:
                self._clear_gradients(indices)
                error.add_note(BROKEN_OFF)
            raise
        self._nonfinite.backward(loss)

    def _enter_backward(self, stack: ExitStack, indices: Sequence[int], scale: LossScale, more: bool) -> None:
        """Set gradients of other optimizers aside for a backward pass, and say how it releases its own."""
        if len(indices) < len(self.optimizers):
            weights = [set(weights_of(o)) for o in self.optimizers]
            others = set[Tensor]().union(*weights).difference(*(weights[i] for i in indices))
            stack.enter_context(stash_gradients(others, add=False))
        for index, stepper in enumerate(self._steppers):
            if isinstance(stepper, OnePassStepper) and stepper.releases:
                inv_scale = scale.inverse(self.device) if self.skip_nonfinite else None
                stack.enter_context(stepper.during_backward(index in indices, more, inv_scale))

    def _clear_gradients(self, indices: Sequence[int]) -> None:
        """Clear gradients that a part of a backward pass was added to: nobody can tell which."""
        for index in indices:
            self._steppers[index].clear()
            self.state = self.state.without(index)

    @contextmanager
    def _isolated_backward(self, conflicts: Sequence[int]) -> Generator[None]:
        """A backward of one loss over optimizers that hold gradients of others: each is looked at alone."""
        self._unscale(conflicts)
        weights = dict.fromkeys(w for index in conflicts for w in weights_of(self.optimizers[index]))
        with stash_gradients(weights, add=True):
            yield
            self._unscale(conflicts)

    def _unscale(self, indices: Sequence[int]) -> None:
        for index in indices:
            check_unscaling(self.state, self.optimizers, index, partial(name_of, self.models))
            self.state = unscale_gradients(self.state, self._steppers[index], index, self.device)

    def _check_added(self) -> None:
        """Look at parameters that an optimizer was given by `add_param_group` since the last call."""
        for index, optimizer in enumerate(self.optimizers):
            if sizes_of(optimizer) != self.state.sizes[index]:
                check_expanded(self.models, self.optimizers)
                check_sharing(self.models, self.optimizers, self.precision.masters)
                self.state = unscale_added(self.state, optimizer, index, partial(name_of, self.models))

    def _note_leftovers(self, indices: Sequence[int]) -> None:
        """Before a backward: note whose gradients it adds to those of another loss, until one was cleared."""
        for index in indices:
            has_stepped = any(loss.adjusted and index in loss.pending for loss in self.state.losses)
            if self.state.gradient_scales[index] is not None and not has_stepped:
                continue  # all that it may hold is of its own losses
            stepper, leftovers = self._steppers[index], self.state.leftovers
            has_values = has_nonzero(stepper.optimizer) if stepper.has_gradients() else None
            if has_values:
                self.state = self.state._replace(leftovers=leftovers | {index})
            elif has_values is False or index in leftovers:
                self.state = self.state._replace(leftovers=leftovers - {index}).with_warned(
                    LEFTOVER_GRADIENTS
                )

    def scale(self, tree: Any, loss_id: int = 0) -> Any:
        """Scale losses without running backward, for `torch.autograd.grad` and the like."""
        check_loss_id(loss_id, len(self.loss_scales))
        scale = self.loss_scales[loss_id]
        if torch.cuda.is_initialized() and not isinstance(scale, NoLossScale):
            refuse_capture(self.device, "amp.scale()")
        return scale.scale(tree)

    @never_compiled
    def unscale(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Divide the loss scale out of the gradients now, to look at or change them before `step`.

        Needed only for what `step(clip_norm=...)` does not do: clipping by value, noise, a norm of your own.
        16-bit gradients become fp32 first, so none is lost. A second call before the step does nothing.
        Raises as `step` does, and UnsupportedError where gradients are released during backward.
        """
        if torch.cuda.is_initialized():
            refuse_capture(self.device, "amp.unscale()")
        index = index_of(self.optimizers, optimizer)
        self._check_added()
        losses_to_step(self.state, self._steppers[index], index)
        self._steppers[index].round_sums()
        if not isinstance(self.state.gradient_scales[index], NoLossScale) or self._steppers[index].releases:
            self._unscale([index])

    @never_compiled
    def measure(self, optimizer: torch.optim.Optimizer | None = None) -> AnyStats:
        """Read the gradients now, before `step`: their unscaled 2-norm, and whether all are finite.

        For training loops that log the norm or clip before the step; `step` reads the gradients again. Over
        shards every rank must call it. Raises as `step` does where there are no gradients.
        """
        index = index_of(self.optimizers, optimizer)
        self._check_added()
        losses_to_step(self.state, self._steppers[index], index)
        self._steppers[index].round_sums()
        gradient_scale = self.state.gradient_scales[index] or NoLossScale()
        inv_scale = None if isinstance(gradient_scale, NoLossScale) else gradient_scale.inverse(self.device)
        stepper = self._steppers[index]
        return stepper.measure(stepper.collect(), inv_scale, False)

    @never_compiled
    def step(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        clip_norm: float | None = None,
        scheduler: Any = None,
        zero_grad: bool = True,
    ) -> Outcome:
        """Unscale, check, clip, update, write back and zero; returns what happened.

        Args:
            optimizer: which one, where the session has several.
            clip_norm: clip the 2-norm of this optimizer's unscaled gradients to this.
            scheduler: advanced in this call if the step was taken. Under a loss scale, or with
                `skip_nonfinite`, that takes one wait for an accelerator: for the flag of this step. One whose
                step() wants a metric is refused: call it yourself.
            zero_grad: drop the gradients afterwards; those kept are added to as if they carried no scale.

        Raises:
            ScalerStateError: no gradients, or gradients that did not come through `backward`.
            ConfigError: a wrong `clip_norm` or `scheduler`. UnsupportedError: an optimizer wanting a closure,
                or a CUDA graph capture.
            LossScaleCollapsed: `max_skips` skips in a row. NonFiniteError: as `on_nonfinite` says.

        The outcome's `scale` is what the gradients carried; of several losses, the lowest of their scales.
        """
        if torch.cuda.is_initialized():
            refuse_capture(self.device, "amp.step()")
        index = index_of(self.optimizers, optimizer)
        check_clip(clip_norm)
        check_scheduler(scheduler)
        if self._ranks.asks:
            self._ranks.check_step(self.optimizers[index])
        self._check_added()
        stepper = self._steppers[index]
        losses = losses_to_step(self.state, stepper, index)
        if not zero_grad and not isinstance(stepper, OnePassStepper):
            check_unscaling(self.state, self.optimizers, index, partial(name_of, self.models))
        gradient_scale, enabled = self.state.gradient_scales[index] or NoLossScale(), torch.is_grad_enabled()
        try:
            if self._preparation.handles:  # its own step is none that they refuse
                self.state = self.state.with_scale(index, NoLossScale())
            if self._first:
                self._first_step()
            if index in self.state.leftovers and LEFTOVER_GRADIENTS not in self.state.warned:
                self.state = self.state.with_warned(LEFTOVER_GRADIENTS)
                text = LEFTOVER_GRADIENTS.format(type(stepper.optimizer).__name__, index)
                warn(text)
            for listener in self.early_listeners:
                listener(self, stepper.optimizer)
            if self.precision.stores_low:
                stepper.round_sums()
            inv_scale = (
                None if isinstance(gradient_scale, NoLossScale) else gradient_scale.inverse(self.device)
            )
            measured, found_inf, losses, update = self._update(index, losses, inv_scale, clip_norm, zero_grad)
            report = self._nonfinite.make_report(stepper.optimizer, found_inf, losses, self.skip_nonfinite)
            kept_scale = NoLossScale() if update.unscaled else gradient_scale
            self.state = self.state.after_step(index, losses, None if zero_grad else kept_scale, measured)
            if zero_grad:
                stepper.clear()
        except BaseException as error:
            self.state = self.state.without(index)  # the gradients are not ours now
            if stepper.releases or not isinstance(error, Exception):  # a signal, while gradients are changed
                stepper.clear()
            torch.set_grad_enabled(enabled)
            raise
        for conversion in self.conversions:
            if conversion.buffers.watched:
                conversion.buffers.warn_if_changed()
        reason = PARTLY if stepper.releases else None
        about = {"scale": scale_of_gradients(losses), "reason": reason, "clips": clip_norm is not None}
        return self._record_outcome(measured, update.found_inf, about, scheduler, report)

    def _first_backward(self, loss: Tensor) -> None:
        """Before the first step: look whether ops were cast, and whether anything is going to step."""
        has_losses = bool(self.state.losses)
        self._wide = (self._wide or not has_losses) and not self._off and ran_wide(loss, self.policy)
        if not self.optimizers:
            self._first = False
            if text := no_optimizer(self.precision, self.loss_scale):
                warn(text)

    def _first_step(self) -> None:
        """Warn where steps move no weight, no op ran in the level's 16 bits, or weights are not its own."""
        self._first = False
        weights = (p for model in self.models for p in model.parameters())
        fault = next((row[1:] for row in find_idle_steps(self.optimizers)), None)
        fault = fault or weights_fault(self.level, self.policy, self.optimizers, weights)
        if fault is None and self._wide and not self._off and casts_weights(self.level, self.policy):
            fault = no_region(self.policy, self.conversions)
        if fault is not None:
            warn(f"{fault[0]}: {fault[1]} (said once)")

    def _update(
        self,
        index: int,
        losses: list[Loss],
        inv_scale: Tensor | None,
        clip_norm: float | None,
        clears: bool,
    ) -> tuple[AnyStats, Flag, list[Loss], Update]:
        """Measure, decide, apply; in one pass where nothing depends on what is measured.

        Gives what was measured, whether it is inf, by loss too, and what the update left.
        """
        stepper, skips = self._steppers[index], self.skip_nonfinite
        limits = stepper.limits(clip_norm)
        fused = stepper.fuses and not skips and not any(limits)
        groups = [] if fused else stepper.collect()
        if fused:
            measured = stepper.update_and_measure(Decision(inv_scale))
        else:
            measured = stepper.measure(groups, inv_scale, self.state.needs_amax)
        over_ranks = partial(all_ranks, group=self._ranks.group) if skips and world_size() > 1 else None
        losses, found_inf = merge_found_inf(
            losses, self._steppers, index, measured, lambda: self.device, over_ranks,
            lambda amax: largest_of_ranks(amax, self._ranks.group),
        )  # fmt: skip
        update = Update(False, found_inf)
        if not fused:
            decision = decide(measured.norm, limits, inv_scale, found_inf if skips else False)
            update = stepper.update(groups, decision, clears)
            if not skips and found_inf is not False:
                update = update._replace(found_inf=found_inf)
        if update.norm is not None:
            measured = measured._replace(norm=update.norm)
        return measured, found_inf, losses, update

    def _record_outcome(
        self,
        measured: AnyStats,
        found_inf: bool | Tensor,
        about: Mapping[str, Any],
        scheduler: Any,
        report: Report | None,
    ) -> Outcome:
        """Make the outcome, keep it, and tell the counts, the scheduler and the listeners."""
        finite = finite_of(found_inf, measured)
        outcome = Outcome(
            taken=finite if self.skip_nonfinite else True,
            finite=finite,
            grad_norm=measured.norm,
            amax=measured.amax,
            step=self.steps,
            on_read=_when_read(self, report),
            **about,
        )
        self.history.append(outcome)
        self._queue.push(outcome)
        if scheduler is not None and outcome.taken:
            scheduler.step()
        for listener in (*self.listeners,):
            listener(self, outcome)
        return outcome

    def averaged(self, decay: float = 0.999) -> AveragedModel:
        """Return an fp32 average of the first model's weights (an EMA), updated by every step that is taken.

        After a step the average is `decay` times itself plus `1 - decay` times the weights: the fp32 masters
        at O2, floating buffers likewise. It begins as the weights are now, is a `torch.optim.swa_utils.
        AveragedModel` in eval mode (call it, save its `state_dict()`), and is followed while somebody keeps
        it. Where steps can be skipped that takes one wait for an accelerator each, as `scheduler=` does.

        Raises:
            ConfigError: a decay that is not a number in [0, 1). UnsupportedError: a sharded model, or O3.
        """
        return start_average(self, self.model, decay)

    def step_without_batch(self) -> None:
        """Take part in a step of ranks that still have batches; see `halfstep.distributed.join`."""
        refuse_capture(self.device, "amp.step_without_batch()")
        if len(self.loss_scales) > 1:
            raise UnsupportedError(
                "a rank without batches cannot tell which of several losses the others stepped: use one "
                "loss_scale with halfstep.distributed.join, or give every rank as many batches"
            )
        self.state = self.state._replace(steps=self.steps + 1)
        if not self.skip_nonfinite:
            return
        flag = all_ranks(torch.zeros((), dtype=torch.bool, device=self.device), self._ranks.group)
        taken = inverse(bool(flag) if self.device.type == "cpu" else flag)
        scale, self.loss_scale = self.loss_scale.value, self.loss_scale.adjust(taken, None)
        self._queue.push(
            Outcome(taken=taken, finite=True, scale=scale, step=self.steps, on_read=_when_read(self))
        )

    def _on_outcome_read(self, record: StepRecord, report: Report | None = None) -> None:
        """Count and warn once what a step did is known on the host."""
        taken = record.taken
        self._queue.read_before(record.step or 0)
        if not taken or self.state.skips.in_row:  # a clean step after clean steps changes no count
            self.state = self.state._replace(skips=self.state.skips.after_steps(taken))
        if not record.finite and report is not None:
            report(record.step, taken)
        if taken:
            return
        self.state.skips.check(scale=record.scale)
        in_row, limit = self.state.skips.in_row, self.state.skips.limit
        if in_row == SKIPPED_IN_A_ROW and SKIPPING not in self.state.warned:
            self.state = self.state.with_warned(SKIPPING)
            scaled = not isinstance(self.loss_scale, NoLossScale)
            at = f" at loss scales down to {record.scale:g}" if scaled else ""
            warn(SKIPPING.format(in_row, record.step, at, limit))

    def replayable(self, step: Callable[..., Any], *batch: Any) -> Any:
        """Run `step(*batch)` so that it can be traced; a bad step is replayed and its first bad op named.

        What is traced is named in a warning, in `LossScaleCollapsed`, and kept by the `Replayable`. On an
        accelerator the verdict on a step is read when the next one begins: until then, or until the cycle
        collector runs, the last step keeps what it refers to, this session too.
        """
        if self._replay is None:
            self._replay = Replayable(self)
        return self._replay.run(step, *batch)

    def sync(self) -> None:
        """Wait for every outcome still on its way from the device, so that `skips` is up to date."""
        refuse_reading(self.device, "amp.sync()")
        self._queue.drain()

    def state_dict(self) -> dict[str, Any]:
        """Loss scale, counts and kernels as plain values; models and optimizers save themselves."""
        refuse_reading(self.device, "amp.state_dict()")
        self.sync()
        return {
            "format": 1,
            "level": self.level.name,
            "policy": str(self.policy),
            **self.state.to_plain(),
            "kernels": kernel_choice.dump_table(self.kernels),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`, by the kernels that it was saved with.

        Classes of ops that a session with measured kernels had not met by then are measured when met.

        Raises:
            CheckpointError: not such a state, or one of another level or policy; nothing is changed then.
        """
        self.state, self.kernels = self._read_state(state)
        self._queue.forget()  # outcomes still on their way are of the state that ends here

    def _read_state(self, state: Mapping[str, Any]) -> tuple[StepState, kernel_choice.KernelTable]:
        """Read a state for `load_state_dict`; raise its errors and change nothing."""
        check_state(state, self.level, self.policy)
        remembered = self.state.from_plain(state)
        kernels = (
            kernel_choice.load_table(state["kernels"], self.kernels) if "kernels" in state else self.kernels
        )
        return remembered, kernels

    def snapshot(self, history: bool = True) -> Callable[[], None]:
        """Note all that a step changes in the session; the result puts it back, any number of times."""
        state, policy, queue = self.state, self.policy, copy.copy(self._queue)
        past = copy.copy(self.history) if history else None

        def restore() -> None:
            self.state, self.policy, self._queue = state, policy, copy.copy(queue)
            if past is not None:
                self.history = copy.copy(past)

        return restore

    save, wait_until_saved, load = saving.save, saving.wait_until_saved, loading.load

    def revert(self) -> None:
        """Undo `prepare`: fp32 weights (exact where there are masters), optimizers as they were, no hooks."""
        super().revert()
        self._ranks.asks = True
        self.state = self.state.without_gradients()


def _when_read(session: Session, report: Report | None = None) -> Callable[[StepRecord], None]:
    """Return what to call once an outcome is read; it does not keep the session alive."""
    weak = weakref.ref(session)

    def on_read(record: StepRecord) -> None:
        if (alive := weak()) is not None:
            alive._on_outcome_read(record, report)

    return on_read
