"""Lightning's Fabric: one whose models train in halfstep's precision.

    from halfstep.integrations.fabric import Fabric

    fabric = Fabric(level="O2", dtype="bf16")
    model, optimizer = fabric.setup(model, optimizer)

The rest of the script stays as it is: steps, clipping, accumulation, checkpoints.
"""

# The host is not in the environment of the checks.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
from __future__ import annotations

from typing import Any

from torch import Tensor, nn

import halfstep as hs
from halfstep.integrations import clip, get_session, options
from halfstep.integrations.lightning import Driven
from halfstep.trees import parameters_of

try:
    from lightning.fabric import Fabric as HostFabric
    from lightning.fabric.plugins import Precision as HostPrecision
    from lightning_utilities import apply_to_collection
except ImportError as error:
    raise ImportError(f"{error}: this module needs lightning, pip install 'lightning>=2.5'") from error


class _Precision(Driven, HostPrecision):
    def convert_output(self, data: Any) -> Any:
        def wide(tensor: Tensor) -> Tensor:
            return tensor.float() if tensor.is_floating_point() else tensor

        return apply_to_collection(data, Tensor, wide)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> hs.Outcome:
        return self.step(optimizer)

    def unscale_gradients(self, optimizer: Any) -> None:
        get_session(self.session).unscale(optimizer)


class Fabric(HostFabric):
    """`lightning.Fabric` with the arguments of `halfstep.integrations.lightning.Precision`.

    Takes all of its base but `precision`. The `step()` of an optimizer that `setup` returns gives the
    `halfstep.Outcome`: `if optimizer.step().taken: scheduler.step()`.

    `session` is the `halfstep.Session` that `setup(model, optimizer)` makes; save it with the model, as
    `fabric.save(path, {"model": model, "optimizer": optimizer, "session": fabric.session})`.

    Raises:
        ConfigError: a level that there is not, or "auto"; optimizers without their module, or a second pair.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._ours = _Precision(**options(kwargs))
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

    def setup_optimizers(self, *optimizers: Any) -> Any:
        """Refused: weights and masters are made of a module together with its optimizers."""
        raise hs.ConfigError(
            "setup_optimizers() was given optimizers without their module: give the model and its optimizers "
            "to one fabric.setup(model, optimizer)"
        )

    def clip_gradients(self, module: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Unscale and clip as the base does; a 2-norm is added up in fp32, also over 16-bit gradients."""
        max_norm = kwargs.get("max_norm")
        if self.session is None or max_norm is None or args or kwargs.get("norm_type", 2.0) != 2.0:
            return super().clip_gradients(module, optimizer, *args, **kwargs)
        return clip(self.session, parameters_of(optimizer.optimizer), float(max_norm))
