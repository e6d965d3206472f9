"""What `prepare` made of models and optimizers: how ops run, the exact weights, and the way back.

Which session a model was prepared by is noted here too: for `revert(model)`, and for preparing it again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import devices
from halfstep.casting.context import autocast
from halfstep.casting.kernel_choice import KernelTable
from halfstep.convert.compiled import Compiled
from halfstep.convert.conversion import Conversion, is_converted
from halfstep.convert.in_place import undo_copy
from halfstep.convert.layout import Relayout
from halfstep.distributed import local_of
from halfstep.errors import ConfigError, show, warn
from halfstep.names import unwrap
from halfstep.optim.loading import LoadedMasters, MasterHolder
from halfstep.optim.master_link import split_bounded
from halfstep.optim.masters import MasterWeights, holder_of
from halfstep.optim.replicas import follow_wraps, send_masters
from halfstep.optim.saved_masters import SavedMasters
from halfstep.policy.levels import Level
from halfstep.session.precision import Precision
from halfstep.session.preparation import Preparation, Prepared, check_states
from halfstep.torch_private import hooks_after_load
from halfstep.trees import all_equal, compute_device, each_parameter
from halfstep.tuning.search import Tuning


class Setup:
    """What was prepared, and what has nothing to do with steps; `Session` derives from it."""

    def __init__(
        self,
        models: list[nn.Module],
        optimizers: list[torch.optim.Optimizer],
        precision: Precision,
        kernels: KernelTable,
        device: torch.device,
        skip_nonfinite: bool,
        layout: Relayout,
        compiled: Compiled,
        conversions: list[Conversion],
        masters: dict[int, MasterWeights],
    ) -> None:
        self.models, self.optimizers, self.precision = models, optimizers, precision
        self._checked_device = device
        """The device whose dtypes were checked."""
        self.policy, self.kernels, self.skip_nonfinite = precision.policy, kernels, skip_nonfinite
        self._preparation = Preparation(optimizers, precision, layout, compiled, conversions, masters)
        self.tuning: Tuning | None = None
        self.evaluates = False
        """Whether stand-ins are in the place of 16-bit weights."""
        self._off = False
        """Whether a region that casts nothing was asked for."""

    @property
    def model(self) -> nn.Module:
        """The first (usually the only) model."""
        return self.models[0]

    @property
    def device(self) -> torch.device:
        """Where the models compute now: the accelerator that any parameter is on, else the CPU."""
        if self._checked_device.type == "cpu" and not torch.accelerator.is_available():
            return self._checked_device  # there is no other; a look at each parameter is 1 % of a small step
        return compute_device(each_parameter(self.models))

    @property
    def conversions(self) -> list[Conversion]:
        """What was done to each model; empty once it was undone."""
        return self._preparation.conversions

    @property
    def masters(self) -> dict[int, MasterWeights]:
        """The fp32 masters of torch optimizers, by number."""
        return self._preparation.masters

    @property
    def layout(self) -> Relayout:
        """The convolution weights that are in channels_last."""
        return self._preparation.layout

    @property
    def reverted(self) -> bool:
        """Whether all was undone."""
        return self._preparation.reverted

    @property
    def level(self) -> Level:
        """The precision level."""
        return self.precision.level

    def autocast(self, enabled: bool = True) -> autocast:
        """Return the region to run forward and loss in: ops run under the session's policy."""
        for listener in autocast_listeners:
            listener(self)
        if not isinstance(enabled, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"amp.autocast({show(enabled)}): expected enabled=True or False. A session's region has its "
                "device from the model and its dtype from prepare(dtype=...); hs.autocast takes both"
            )
        self._off = self._off or not enabled
        if (device := self.device) != self._checked_device:
            devices.check_dtype(device, self.policy.compute_dtype)
            check_states(self.optimizers)
            self._checked_device = device
        return autocast(device.type, policy=self.policy, enabled=enabled, kernels=self.kernels)

    def take_masters(self, ddp: Any, rank: int) -> None:
        """Take the masters that `rank` of a DDP's group has, a collective."""
        send_masters(ddp, ddp.module, [self], rank)

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Within, the models are in eval mode, without gradients, and compute with the fp32 masters.

        At O3, which has none, they compute in `autocast()` with the 16-bit weights.

        Weights that are set or loaded within are set for good. Save and load sessions after it.
        UnsupportedError inside a CUDA graph capture where there are masters.
        """
        if self.precision.masters:
            devices.refuse_reading(self.device, "amp.evaluating()")
        holders, modes = (
            self._preparation.holders,
            [(m, m.training) for model in self.models for m in model.modules()],
        )
        with torch.no_grad(), ExitStack() as stack:
            for masters in self.masters.values():
                stack.enter_context(masters.swap())
            for conversion in self.conversions if self.precision.masters else ():
                stack.enter_context(conversion.suspended())
            if self.precision.stores_low and not self.precision.masters:
                stack.enter_context(self.autocast())
            stand_ins = ((getattr(p, "_stands_for", None), p) for m in self.models for p in m.parameters())
            copies: dict[Tensor, Tensor] = {weight: copy for weight, copy in stand_ins if weight is not None}
            for some in split_bounded(copies):  # joined masters are never all there
                for holder in holders:
                    for weight, value in holder.masters({*some}).items():
                        copies[weight].data.copy_(value)
            for model in self.models:
                model.eval()
            self.evaluates = self.precision.masters
            try:
                yield
            finally:
                self.evaluates = False
                for module, training in modes:
                    module.training = training
        for some in split_bounded(copies):
            for holder in holders:
                values = holder.masters({*some})
                same = all_equal([(local_of(copies[w]), local_of(v)) for w, v in values.items()])
                holder.seed_masters(
                    {w: copies[w].detach() for w, is_same in zip(values, same) if not is_same}
                )

    def revert(self) -> None:
        """Undo `prepare`: fp32 weights (exact where there are masters), optimizers as they were, no hooks."""
        self._preparation.revert()
        for model in self.models:
            _MODELS.pop(unwrap(model), None)
        for optimizer in self.optimizers:
            _OPTIMIZERS.pop(optimizer, None)

    def install_hooks(self) -> None:
        """From now on masters reach copies of the models, DDP and loads, and the session can be found.

        An earlier session of the same optimizer no longer watches it.
        """
        handles, preparation = self._preparation.handles, self._preparation
        for optimizer in self.optimizers:
            if self.precision.masters and isinstance(optimizer, MasterHolder):
                handles += LoadedMasters(optimizer).attach(self.models)  # MasterWeights follow by themselves
            elif not self.precision.masters and holder_of(optimizer) is None:
                handles += SavedMasters().attach(optimizer)
            earlier = _OPTIMIZERS.get(optimizer)
            before = None if earlier is None else earlier()
            if before is not None and before is not self:
                before._preparation.remove_hooks()
            _OPTIMIZERS[optimizer] = weakref.ref(self)
        if self.precision.masters:
            follow_wraps(preparation)
            exact = weakref.WeakMethod(preparation.exact)
            for conversion in self.conversions:
                conversion.widen_copies(lambda: {} if (values := exact()) is None else values())
        for model in self.models:
            _MODELS[unwrap(model)] = weakref.ref(self)
        for listener in session_listeners:
            listener(self)
        changed = self.models if preparation.compiled else [c.model for c in self.conversions if c.changes]
        handles += [model.register_load_state_dict_post_hook(Prepared(preparation)) for model in changed]


# ---- which session prepared a model ---------------------------------------------------------------------

_MODELS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Setup]] = weakref.WeakKeyDictionary()
_OPTIMIZERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Any]] = weakref.WeakKeyDictionary()

#: Called with every session that is made.
session_listeners: list[Callable[[Any], None]] = []
#: Called with each session whose region is asked for, before its policy is read.
autocast_listeners: list[Callable[[Any], None]] = []


def revert(model: nn.Module) -> None:
    """Undo `prepare` for a model whose session is not at hand: weights, optimizers and hooks as before.

    A copy with casts of its own (`torch.load` of a whole model) becomes fp32, with the 16-bit values that it
    has and a HalfstepWarning. ConfigError for a model that was not prepared, or that nothing is left to undo
    for.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"revert takes the model that was prepared, not {type(model).__name__}")
    inner = unwrap(model)
    hooks = [hook.preparation for hook in hooks_after_load(inner).values() if isinstance(hook, Prepared)]
    session_ref = _MODELS.get(inner)
    session = None if session_ref is None else session_ref()
    preparation = next((candidate for candidate in reversed(hooks) if candidate is not None), None)
    if session is not None:
        session.revert()
    elif preparation is not None:
        preparation.revert()
    elif not is_converted(inner) and undo_copy(inner):
        warn(
            f"this {type(model).__name__} was a copy of a prepared one: it is fp32 again, with the 16-bit "
            "values that it had, since masters stay with the original. Where they matter load the "
            "original's: hs.optim.fp32_state_dict(model, optimizer), or what Session.save wrote"
        )
    else:
        raise ConfigError(
            f"this {type(model).__name__} is not prepared: revert takes the model that was given to prepare()"
        )
