"""Lightning: a precision plugin for Trainer; `halfstep.integrations.fabric` has a Fabric.

    from halfstep.integrations.lightning import Precision

    Trainer(plugins=Precision(level="O2", dtype="bf16"), ...).fit(module)

The rest of the script stays as it is: steps, clipping, accumulation, checkpoints.
"""

# The host is not in the environment of the checks.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Unpack

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.formats import dtype_name
from halfstep.integrations import Options, check_options, clip, get_session, precision_of, prepare

try:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.plugins import Precision as TrainerPrecision
    from lightning.pytorch.strategies import DDPStrategy as HostDDPStrategy
    from lightning.pytorch.utilities import GradClipAlgorithmType
except ImportError as error:
    raise ImportError(f"{error}: this module needs lightning, pip install 'lightning>=2.5'") from error


class Driven:
    """What the plugins of Trainer and Fabric do: region, backward and state are those of `session`.

    Args:
        how: keywords of `Options`, as `halfstep.prepare` takes them. A dynamic loss scale starts at 1,024.

    `session` is the `halfstep.Session` once training has begun, `outcome` the latest `halfstep.Outcome`.
    """

    session: hs.Session | None = None
    outcome: hs.Outcome | None = None

    def __init__(self, **how: Unpack[Options]) -> None:
        self._how = check_options({**how})

    @property
    def precision(self) -> str:
        """What is trained, in the host's words: "bf16-mixed" at O1, "bf16-true" at O2 and O3, and so on."""
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
        how = precision_of(self.session, self._how, device)
        name = dtype_name(how.policy.compute_dtype)
        if name == "fp32":
            return "32-true"
        return f"{name.removeprefix('fp')}-{'true' if how.stores_low else 'mixed'}"

    def prepare(self, module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Prepare a module with its optimizers; without any it keeps its weights and only casts its ops."""
        level = self._how.get("level", "O1")
        how: Options = {**self._how, "level": level if optimizers or level == "O0" else "O1"}
        self.session = prepare(module, optimizers, how)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the session's region."""
        return nullcontext() if self.session is None else self.session.autocast()

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Scale the loss and run backward."""
        get_session(self.session).backward(tensor, **kwargs)

    def step(self, optimizer: torch.optim.Optimizer) -> hs.Outcome:
        """Take a step of the session; gradients stay until `zero_grad`."""
        self.outcome = get_session(self.session).step(optimizer, zero_grad=False)
        return self.outcome

    def state_dict(self) -> dict[str, Any]:
        """Return the session's state: loss scale and counts."""
        return {} if self.session is None else self.session.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave."""
        if self.session is not None and state_dict:
            self.session.load_state_dict(state_dict)


class Precision(Driven, TrainerPrecision):
    """A plugin for `lightning.Trainer(plugins=...)`, with the arguments of `Driven`.

    Raises:
        UnsupportedError: a LightningModule with a `backward` of its own, a strategy that shards.
    """

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
        session, result = get_session(self.session), closure()
        if result is None and model.automatic_optimization:  # training_step left this batch out
            return None
        session.unscale(optimizer)
        self._after_closure(model, optimizer)
        self.step(optimizer)
        return result

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = GradClipAlgorithmType.NORM
    ) -> None:
        """Clip as the base does; the norm is added up in fp32, also over 16-bit gradients."""
        if gradient_clip_algorithm != GradClipAlgorithmType.NORM:
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
        elif clip_val > 0:
            clip(get_session(self.session), self.main_params(optimizer), float(clip_val))


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
