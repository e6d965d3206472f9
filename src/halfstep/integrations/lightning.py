"""Lightning: a precision plugin for Trainer, and a Fabric whose models train in halfstep's precision.

    from halfstep.integrations.lightning import Precision

    Trainer(plugins=Precision(level="O2", dtype="bf16"), ...).fit(module)

    from halfstep.integrations.lightning import Fabric

    fabric = Fabric(level="O2", dtype="bf16")
    model, optimizer = fabric.setup(model, optimizer)

The rest of the script stays as it is: steps, clipping, accumulation, checkpoints.
"""

# The host is not in the environment of the checks.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.integrations import prepare

try:
    from lightning.fabric import Fabric as HostFabric
    from lightning.fabric.plugins import Precision as HostPrecision
    from lightning.pytorch import LightningModule
    from lightning.pytorch.plugins import Precision as TrainerPrecision
    from lightning.pytorch.strategies import DDPStrategy as HostDDPStrategy
    from lightning.pytorch.utilities import GradClipAlgorithmType
    from lightning_utilities import apply_to_collection
except ImportError as error:
    raise ImportError(f"{error}: this module needs lightning, pip install 'lightning>=2.5'") from error


class _Driven:
    """What both plugins do: region and backward are those of `session`, which is None before training."""

    session: hs.Session | None = None

    def __init__(
        self,
        *,
        level: str = "O1",
        dtype: str | torch.dtype | None = None,
        policy: Any = None,
        plan: Any = None,
        loss_scale: Any = None,
        on_nonfinite: str | None = None,
    ) -> None:
        how = {"level": level, "dtype": dtype, "policy": policy, "plan": plan}
        self._how: dict[str, Any] = {**how, "loss_scale": loss_scale, "on_nonfinite": on_nonfinite}

    def prepare(self, module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Prepare a module with its optimizers; without any it keeps its weights and only casts its ops."""
        level = self._how["level"] if optimizers or self._how["level"] == "O0" else "O1"
        self.session = prepare(module, optimizers, {**self._how, "level": level})

    def forward_context(self) -> AbstractContextManager[Any]:
        """The session's region."""
        return nullcontext() if self.session is None else self.session.autocast()

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Scale the loss and run backward."""
        assert self.session is not None
        self.session.backward(tensor, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The session's state: loss scale and counts."""
        return {} if self.session is None else self.session.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave."""
        if self.session is not None and state_dict:
            self.session.load_state_dict(state_dict)


class Precision(_Driven, TrainerPrecision):
    """A plugin for `lightning.Trainer(plugins=...)`.

    Args:
        level, dtype, policy, plan, loss_scale, on_nonfinite: as `halfstep.prepare` takes them. A dynamic loss
            scale starts at 1,024.

    `session` is the `halfstep.Session` once training has begun, `outcome` the latest `halfstep.Outcome`.

    Raises:
        UnsupportedError: a LightningModule with a `backward` of its own, a strategy that shards.
    """

    outcome: hs.Outcome | None = None
    _clip: float | None = None

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Before optimizers are made: undo what an earlier `fit` prepared."""
        if self.session is not None:
            self.session.revert()
        self.session = self.outcome = None
        return module

    def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> Any:
        """Prepare the module with its optimizers."""
        if not isinstance(model, LightningModule):
            raise hs.UnsupportedError(
                f"the strategy made a {type(model).__name__} of the module before it was prepared: for DDP "
                "give Trainer strategy=DDPStrategy() of halfstep.integrations.lightning; elsewhere use an "
                "optimizer of halfstep.optim, which needs no plugin"
            )
        if type(model).backward is not LightningModule.backward:
            raise hs.UnsupportedError(
                f"{type(model).__name__} has a backward() of its own, which nothing would call: leave it out"
            )
        self.prepare(model, list(optimizers))
        return model, optimizers, lr_schedulers

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, the hooks on unscaled gradients, and a step of the session."""
        session, result = cast(hs.Session, self.session), closure()
        if result is None and model.automatic_optimization:  # training_step left this batch out
            return None
        session.unscale(optimizer)
        self._clip = None
        self._after_closure(model, optimizer)
        self.outcome = session.step(optimizer, clip_norm=self._clip, zero_grad=False)
        return result

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = GradClipAlgorithmType.NORM
    ) -> None:
        """Clip by the norm in the coming step, in its one pass over the gradients; by value here."""
        if gradient_clip_algorithm == GradClipAlgorithmType.NORM:
            self._clip = float(clip_val) if clip_val > 0 else None
        else:
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)


class DDPStrategy(HostDDPStrategy):
    """Lightning's own, but the module is wrapped in DDP after `Precision` has prepared its weights."""

    _wraps = False

    def configure_ddp(self) -> None:
        """Wrap later."""
        self._wraps = True

    def setup_precision_plugin(self) -> None:
        """Prepare, then wrap."""
        super().setup_precision_plugin()
        if self._wraps:
            self._wraps = False
            super().configure_ddp()


class _FabricPrecision(_Driven, HostPrecision):
    outcome: hs.Outcome | None = None
    clip: float | None = None

    def convert_output(self, data: Any) -> Any:
        def wide(tensor: Tensor) -> Tensor:
            return tensor.float() if tensor.is_floating_point() else tensor

        return apply_to_collection(data, Tensor, wide)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        assert self.session is not None
        clip, self.clip = self.clip, None
        self.outcome = self.session.step(optimizer, clip_norm=clip, zero_grad=False)

    def unscale_gradients(self, optimizer: Any) -> None:
        assert self.session is not None
        self.session.unscale(optimizer)


class Fabric(HostFabric):
    """`lightning.Fabric` with the arguments of `Precision`; takes all of its base but `precision`.

    `session` is the `halfstep.Session` that `setup(model, optimizer)` makes; save it with the model, as
    `fabric.save(path, {"model": model, "optimizer": optimizer, "session": fabric.session})`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = ("level", "dtype", "policy", "plan", "loss_scale", "on_nonfinite")
        how = {name: kwargs.pop(name) for name in names if name in kwargs}
        self._ours = _FabricPrecision(**how)
        super().__init__(*args, plugins=[self._ours, *kwargs.pop("plugins", [])], **kwargs)

    @property
    def session(self) -> hs.Session | None:
        """The session of the module that was set up with its optimizers."""
        return self._ours.session

    def setup(self, module: nn.Module, *optimizers: Any, **kwargs: Any) -> Any:
        """As the base does, after `halfstep.prepare` where optimizers are given."""
        if optimizers:
            if self.session is not None:
                raise hs.ConfigError(
                    "this Fabric has set up a module with its optimizers already: one is all"
                )
            module = self.to_device(module) if kwargs.get("move_to_device", True) else module
            self._ours.prepare(module, list(optimizers))
        return super().setup(module, *optimizers, **kwargs)

    def clip_gradients(self, module: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """With `max_norm` clip in the coming step, in its one pass, and return the unscaled 2-norm now."""
        max_norm = kwargs.get("max_norm")
        if self.session is None or max_norm is None or args or kwargs.get("norm_type", 2.0) != 2.0:
            return super().clip_gradients(module, optimizer, *args, **kwargs)
        self._ours.clip = float(max_norm)
        return torch.as_tensor(self.session.measure(optimizer.optimizer).norm)
