"""What `prepare` made of models and optimizers: how ops run, the exact weights, and the way back."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfstep.casting.context import autocast
from halfstep.casting.kernel_choice import KernelTable
from halfstep.convert.conversion import Conversion
from halfstep.convert.layout import Relayout
from halfstep.errors import ConfigError, show
from halfstep.optim.loading import HasMasters, LoadedMasters
from halfstep.optim.masters import MasterWeights, holder_of, holders_of
from halfstep.optim.replicas import Replica, follow_wraps
from halfstep.optim.saved_masters import SavedMasters
from halfstep.policy.levels import Level
from halfstep.policy.policy import Policy
from halfstep.session import registry
from halfstep.session.weights import exact_weights, fit_states
from halfstep.tuning.search import Tuning


class Setup:
    """One prepared training; steps are `Session`'s. `tuning` is what "auto" measured, if it was asked for."""

    def __init__(
        self,
        models: list[nn.Module],
        optimizers: list[torch.optim.Optimizer],
        level: Level,
        policy: Policy,
        kernels: KernelTable,
        device: torch.device,
        skip_nonfinite: bool,
        layout: Relayout,
    ) -> None:
        self.models, self.optimizers, self.level, self.device = models, optimizers, level, device
        self.policy, self.kernels, self.skip_nonfinite, self.layout = policy, kernels, skip_nonfinite, layout
        self.conversions: list[Conversion] = []
        self.masters: dict[int, MasterWeights] = {}
        self.tuning: Tuning | None = None
        self.off = self.reverted = False
        """Whether a region that casts nothing was asked for, and whether all was undone."""
        self.evaluates = False
        """Whether stand-ins are in the place of 16-bit weights."""
        self._region = policy, kernels, autocast(device.type, policy=policy, kernels=kernels)

    def region(self, enabled: bool) -> autocast:
        """The region that ops run in."""
        if not isinstance(enabled, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"amp.autocast({show(enabled)}): expected enabled=True or False. A session's region has its "
                "device from the model and its dtype from prepare(dtype=...); hs.autocast takes both"
            )
        self.off = self.off or not enabled
        if enabled and not torch.compiler.is_compiling():
            policy, kernels = self.policy, self.kernels  # a replay tries another policy
            if self._region[0] is not policy or self._region[1] is not kernels:
                region = autocast(self.device.type, policy=policy, kernels=kernels)
                self._region = policy, kernels, region
            return self._region[2]
        return autocast(self.device.type, policy=self.policy, enabled=enabled, kernels=self.kernels)

    def serve_copies(self) -> None:
        """From now on, copies of the models are made of the masters' values, and DDP sends these too."""
        if self.level.masters:
            follow_wraps(self)
            exact = weakref.WeakMethod(self._exact)
            for conversion in self.conversions:
                conversion.widen_copies(lambda: {} if (values := exact()) is None else values())

    def look_at_buffers(self) -> None:
        """After each step: warn of 16-bit buffers that the model changes in training, once each."""
        for conversion in self.conversions:
            conversion.buffers.look()

    def follow_loads(self) -> list[RemovableHandle]:
        """From now on, checkpoints reach masters, and fp32 weights of torch, unrounded; returns hooks."""
        if not self.level.masters:
            plain = [o for o in self.optimizers if holder_of(o) is None]
            return [handle for o in plain for handle in SavedMasters().attach(o)]
        own = [o for o in self.optimizers if isinstance(o, HasMasters)]  # MasterWeights follow by themselves
        return [handle for o in own for handle in LoadedMasters(o).attach(self.models)]

    @property
    def holders(self) -> list[HasMasters]:
        """What holds the exact fp32 value of 16-bit weights; nothing at a level without masters."""
        return holders_of(self.optimizers) if self.level.masters else []

    def _exact(self) -> dict[Tensor, Tensor]:
        """The fp32 value of every weight that has a master."""
        return {w: value for holder in self.holders for w, value in holder.masters().items()}

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Within, the models are in eval mode, without gradients, and compute with the fp32 masters."""
        suspended = self.conversions if self.level.masters else []
        self.evaluates = self.level.masters
        try:
            with torch.no_grad(), exact_weights(self.models, self.masters, suspended, self.holders):
                yield
        finally:
            self.evaluates = False

    def revert(self) -> None:
        """Undo it: fp32 weights (exact where there are masters), optimizers and layout as they were."""
        exact = [(holder, holder.masters()) for holder in self.holders]
        for conversion in self.conversions:
            conversion.revert()
        for holder, values in exact:
            holder.seed_masters(values)
        for masters in self.masters.values():
            masters.revert()
        if self.conversions:
            fit_states(self.level, self.optimizers)
        self.layout.revert()
        self.conversions, self.masters = [], {}
        self.reverted = True


class OfSetup:
    """Base of `Session`: what was prepared, by name, and what has nothing to do with steps."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    @property
    def model(self) -> nn.Module:
        """The first (usually the only) model."""
        return self._setup.models[0]

    @property
    def models(self) -> list[nn.Module]:
        """The models, as they were given."""
        return self._setup.models

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers, as they were given."""
        return self._setup.optimizers

    @property
    def level(self) -> Level:
        """The precision level."""
        return self._setup.level

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._setup.device

    @property
    def policy(self) -> Policy:
        """What ops run under."""
        return self._setup.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._setup.policy = policy

    @property
    def kernels(self) -> KernelTable:
        """By which kernels a CPU runs LOW ops."""
        return self._setup.kernels

    @kernels.setter
    def kernels(self, kernels: KernelTable) -> None:
        self._setup.kernels = kernels

    @property
    def skip_nonfinite(self) -> bool:
        """Whether steps whose gradients are not finite are skipped."""
        return self._setup.skip_nonfinite

    @skip_nonfinite.setter
    def skip_nonfinite(self, skips: bool) -> None:
        self._setup.skip_nonfinite = skips

    @property
    def conversions(self) -> list[Conversion]:
        """What was done to each model."""
        return self._setup.conversions

    @property
    def masters(self) -> dict[int, MasterWeights]:
        """The fp32 masters of torch optimizers, by the optimizer's number."""
        return self._setup.masters

    @property
    def layout(self) -> Relayout:
        """Convolution weights that were put into channels_last."""
        return self._setup.layout

    @property
    def tuning(self) -> Tuning | None:
        """What `level="auto"` or `layout="auto"` measured, if they were asked for."""
        return self._setup.tuning

    @tuning.setter
    def tuning(self, found: Tuning) -> None:
        self._setup.tuning = found

    def autocast(self, enabled: bool = True) -> autocast:
        """The region to run forward and loss in: ops run under the session's policy."""
        for listener in registry.opened:
            listener(self)
        return self._setup.region(enabled)

    def replica(self, ddp: Any) -> Replica:
        """The weights with masters that `ddp` keeps the same on all ranks."""
        return Replica(ddp, ddp.module, [self._setup])

    def evaluating(self) -> AbstractContextManager[None]:
        """Within, the models are in eval mode, without gradients, and compute with the fp32 masters.

        Weights that are set or loaded within are set for good. Save and load sessions after it.
        """
        return self._setup.evaluating()
