"""Loss scalers and loss scale managers: MindSpore's interfaces around halfstep's immutable loss scales.

Unlike MindSpore, nothing is scaled or unscaled in 16 bits: a scale above 65504 is no inf for fp16 tensors,
and small fp16 gradients are divided in fp32 before they are rounded once.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from halfstep.compat.mindspore._tensor import Tensor, as_tensor, check_kind, check_whole
from halfstep.compat.mindspore.nn._cell import Cell
from halfstep.errors import ConfigError
from halfstep.scaling.loss_scale import LARGEST_SCALE, DynamicLossScale, LossScale, StaticLossScale
from halfstep.scaling.skips import SkipCount
from halfstep.trees import as_float32, multiply

OVERFLOWS_IN_A_ROW = 1000
"""More of them raise."""


@dataclass(frozen=True)
class WindowLossScale(LossScale):
    """MindSpore's dynamic rule as a halfstep LossScale: an integer factor, a counter that wraps round.

    Finite: the counter grows modulo `window`; where it wraps, the scale is multiplied by `factor`, unless
    the product is infinite in fp32. Overflow: the scale becomes max(1, scale / factor), the counter 0.
    (mindspore/amp.py 2.10, DynamicLossScaler.adjust.)
    """

    init: float
    factor: float
    window: int
    current: float | torch.Tensor | None = field(default=None, kw_only=True)
    counter: int | torch.Tensor = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if not 1.0 <= as_float32(self.init) < math.inf:
            raise ConfigError(f"the loss scale must be at least 1 and fit float32, got {self.init!r}")
        if self.current is None:
            object.__setattr__(self, "current", as_float32(self.init))

    @property
    def value(self) -> float | torch.Tensor:
        """The scale: a float at first, a 0-d float32 tensor after `adjust`."""
        assert self.current is not None  # __post_init__ filled it in
        return self.current

    def adjust(
        self, finite: bool | torch.Tensor, amax: float | torch.Tensor | None = None
    ) -> WindowLossScale:
        """Return the next scale; a tensor is not read."""
        flag = torch.as_tensor(finite).detach().reshape(()).bool()
        scale, counter = self.tensor(flag.device), torch.as_tensor(self.counter, device=flag.device)
        grown = scale * self.factor
        grown = torch.where(torch.isfinite(grown), grown, scale)
        scale_if_finite = torch.where(counter == self.window - 1, grown, scale)
        shrunk = (scale / self.factor).clamp(min=1.0)
        return replace(
            self,
            current=torch.where(flag, scale_if_finite, shrunk),
            counter=torch.where(flag, (counter + 1) % self.window, 0).to(torch.int32),
        )


def _check_scale(holder: Any, name: str, value: Any) -> None:
    check_kind(type(holder).__name__, name, value, float, int)
    if not value >= 1.0:
        raise ConfigError(f"The argument '{name}' must be >= 1, but got {value}")


class LossScaler(abc.ABC):
    """Base of the scalers of the functional style; derive from it for a rule of your own."""

    @abc.abstractmethod
    def scale(self, inputs: Any) -> Any:
        """Multiply a loss, or every tensor of a nest, by the scale."""

    @abc.abstractmethod
    def unscale(self, inputs: Any) -> Any:
        """Divide every tensor of a nest by the scale."""

    @abc.abstractmethod
    def adjust(self, grads_finite: Any) -> bool:
        """Take in whether the gradients were finite."""


class _Holder(LossScaler):
    """A scaler that holds a halfstep LossScale, `loss_scale`."""

    loss_scale: Any  # a LossScale

    @property
    def scale_value(self) -> Tensor:
        """The scale as a 0-d float32 tensor."""
        return as_tensor(self.loss_scale.tensor())

    def scale(self, inputs: Any) -> Any:
        """Multiply every floating tensor of the nest; 16-bit ones are computed and returned in float32."""
        return self.loss_scale.scale(inputs)

    def unscale(self, inputs: Any) -> Any:
        """Divide every floating tensor of the nest, in float32; each keeps its dtype."""
        return self.loss_scale.unscale(inputs)


class StaticLossScaler(_Holder):
    """A constant scale of at least 1. `adjust` returns False."""

    def __init__(self, scale_value: float) -> None:
        _check_scale(self, "scale_value", scale_value)
        self.loss_scale = StaticLossScale(float(scale_value))

    def adjust(self, grads_finite: Any) -> bool:
        """Do nothing."""
        return False


class DynamicLossScaler(_Holder):
    """A scale that grows by `scale_factor` after `scale_window` finite steps and shrinks by it on overflow.

    Raises ValueError for a scale, factor or window below 1, TypeError for a factor or window that is no
    integer, and LossScaleCollapsed after more than 1000 overflows in a row.
    """

    def __init__(self, scale_value: float, scale_factor: int, scale_window: int) -> None:
        _check_scale(self, "scale_value", scale_value)
        check_whole("DynamicLossScaler", "scale_window", scale_window)
        check_whole("DynamicLossScaler", "scale_factor", scale_factor)
        self.scale_factor, self.scale_window = scale_factor, scale_window
        self._skips = SkipCount(limit=OVERFLOWS_IN_A_ROW + 1)
        self.loss_scale: WindowLossScale = WindowLossScale(float(scale_value), scale_factor, scale_window)

    @property
    def counter(self) -> Tensor:
        """Finite steps since the last overflow or growth, a 0-d int32 tensor."""
        return as_tensor(torch.as_tensor(self.loss_scale.counter, dtype=torch.int32))

    def adjust(self, grads_finite: Any) -> bool:
        """Take in whether the gradients were finite; a tensor of an accelerator is not read. Returns True."""
        self.loss_scale = self.loss_scale.adjust(grads_finite)
        if not isinstance(grads_finite, torch.Tensor) or grads_finite.device.type == "cpu":
            self._skips = self._skips.after(bool(grads_finite), scale=self.loss_scale.read())
        return True


class FixedLossScaleUpdateCell(Cell):
    """`cell(loss_scale, overflow)` gives `overflow` back and leaves the scale alone."""

    def __init__(self, loss_scale_value: float) -> None:
        super().__init__()
        self.loss_scale_value = loss_scale_value

    def get_loss_scale(self) -> float:
        """The scale to begin with."""
        return self.loss_scale_value

    def construct(self, loss_scale: torch.Tensor, overflow: Any) -> Any:
        """`loss_scale`: a 0-d or 1-element tensor."""
        return overflow


class DynamicLossScaleUpdateCell(FixedLossScaleUpdateCell):
    """`cell(loss_scale, overflow)` writes the next scale into `loss_scale` and gives `overflow` back.

    An overflow divides by `scale_factor`, down to 1; `scale_window` steps without one multiply by it.

    Raises:
        ValueError: a scale below 1.
    """

    def __init__(self, loss_scale_value: float, scale_factor: float, scale_window: int) -> None:
        super().__init__(loss_scale_value)
        self.scale_factor, self.scale_window = scale_factor, scale_window
        self._rule = WindowLossScale(float(loss_scale_value), scale_factor, scale_window)

    def construct(self, loss_scale: torch.Tensor, overflow: Any) -> Any:
        """`loss_scale`: a 0-d or 1-element tensor; `overflow`: a bool or such a tensor, which is not read."""
        flag = torch.as_tensor(overflow).detach().reshape(()).bool()
        before = loss_scale.detach().reshape(()).float().clone()
        self._rule = replace(self._rule, current=before).adjust(~flag)
        with torch.no_grad():
            loss_scale.copy_(self._rule.tensor(loss_scale.device).reshape(loss_scale.shape))
        return overflow


class LossScaleManager:
    """Base of the managers that `build_train_network` and `Model` take."""

    def get_loss_scale(self) -> float:
        """The scale."""
        return 1.0

    def update_loss_scale(self, overflow: bool) -> None:
        """Take in whether a step overflowed."""

    def get_update_cell(self) -> Cell | None:
        """What moves a training network's scale; None: scale only, never skip, never unscale."""
        return None


class FixedLossScaleManager(LossScaleManager):
    """A constant scale of at least 1.

    With `drop_overflow_update` steps that overflow are skipped and gradients are unscaled; without it the
    optimizer does that: give it `loss_scale=` too.
    """

    def __init__(self, loss_scale: float = 128.0, drop_overflow_update: bool = True) -> None:
        _check_scale(self, "loss_scale", loss_scale)
        self._loss_scale, self._drop_overflow_update = float(loss_scale), drop_overflow_update

    def get_loss_scale(self) -> float:
        """The scale."""
        return self._loss_scale

    def get_drop_overflow_update(self) -> bool:
        """Whether steps that overflow are skipped."""
        return self._drop_overflow_update

    def get_update_cell(self) -> Cell | None:
        """A FixedLossScaleUpdateCell, or None without `drop_overflow_update`."""
        return FixedLossScaleUpdateCell(self._loss_scale) if self._drop_overflow_update else None


class DynamicLossScaleManager(LossScaleManager):
    """A dynamic scale; more than 1000 overflows in a row raise LossScaleCollapsed, a RuntimeError."""

    def __init__(
        self, init_loss_scale: float = 2**24, scale_factor: float = 2, scale_window: int = 2000
    ) -> None:
        _check_scale(self, "init_loss_scale", init_loss_scale)
        check_whole("DynamicLossScaleManager", "scale_window", scale_window)
        if scale_factor <= 0:
            raise ConfigError(f"The argument 'scale_factor' must be > 0, but got {scale_factor}")
        self.scale_factor, self.scale_window = scale_factor, scale_window
        self._value = WindowLossScale(float(init_loss_scale), scale_factor, scale_window)
        self._skips = SkipCount(limit=OVERFLOWS_IN_A_ROW + 1)

    def get_loss_scale(self) -> float:
        """The scale now."""
        return self._value.read()

    def update_loss_scale(self, overflow: bool) -> None:
        """Take in whether a step overflowed; raises LossScaleCollapsed as the class says."""
        self._value = self._value.adjust(not overflow)
        self._skips = self._skips.after(not overflow, scale=self._value.read())

    def get_drop_overflow_update(self) -> bool:
        """Steps that overflow are always skipped."""
        return True

    def get_update_cell(self) -> Cell:
        """A DynamicLossScaleUpdateCell that goes on from the scale as it is now."""
        return DynamicLossScaleUpdateCell(self.get_loss_scale(), self.scale_factor, self.scale_window)


_GROUP_GROWTH, _GROUP_BACKOFF = 2.0 ** (1.0 / 1000.0), 2.0**-0.5
"""Each step's factors in mindspore/boost 2.10, BoostTrainOneStepWithLossScaleCell."""


class GroupLossScaleManager(Cell):
    """A scale of its own for each group of layers: call it in `construct` where one group ends.

    `x = manager(x, i, j)` lets x pass and brings the gradient that comes back from the scale of group j to
    that of group i; groups count from 1, 0 and n + 1 mean no scale. `loss_scale_groups` lists the
    parameters of each group. Every step an overflowing group's scale shrinks by the root of 2, another's
    grows by 2^(1/1000); a step is skipped where any group overflowed.
    """

    def __init__(self, init_loss_scale: float, loss_scale_groups: Sequence[Sequence[torch.Tensor]]) -> None:
        super().__init__()
        _check_scale(self, "init_loss_scale", init_loss_scale)
        self._init = float(init_loss_scale)
        self.loss_scale_groups = loss_scale_groups
        self.scales: tuple[LossScale, ...] = ()

    def get_loss_scale(self) -> float:
        """The scale every group starts with."""
        return self._init

    def start(self) -> None:
        """Give every group its first scale; a training network does this."""
        if not self.loss_scale_groups:
            raise ConfigError("GroupLossScaleManager has no groups: set loss_scale_groups before training")
        first = DynamicLossScale(
            self._init, _GROUP_GROWTH, _GROUP_BACKOFF, interval=1, max=max(self._init, LARGEST_SCALE)
        )
        self.scales = (first,) * len(self.loss_scale_groups)

    def group_of(self, parameter: torch.Tensor) -> int | None:
        """The index of a parameter's group, None where it has none."""
        for index, group in enumerate(self.loss_scale_groups):
            if any(parameter is mine for mine in group):
                return index
        return None

    def construct(self, x: torch.Tensor, layer1: int, layer2: int) -> torch.Tensor:
        """Let `x` pass; its gradient is multiplied by scale[layer1] / scale[layer2], in fp32."""
        if not self.scales or not x.requires_grad:
            return x
        ratio = (self._scale(layer1) / self._scale(layer2)).to(x.device)
        passed = x.view_as(x)

        def rescale(gradient: torch.Tensor) -> torch.Tensor:
            return multiply(gradient, ratio, gradient.dtype)

        passed.register_hook(rescale)
        return passed

    def _scale(self, layer: int) -> torch.Tensor:
        inside = 1 <= layer <= len(self.scales)
        return self.scales[layer - 1].tensor() if inside else torch.ones(())
