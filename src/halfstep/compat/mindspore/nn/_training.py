"""Cells that take a training or evaluation step; the scale, the check and the skip are halfstep's."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from halfstep.compat.mindspore._function_ops import GradOperation, HyperMap
from halfstep.compat.mindspore._functions import value_and_grad
from halfstep.compat.mindspore._loss_scale import OVERFLOWS_IN_A_ROW, GroupLossScaleManager
from halfstep.compat.mindspore._tensor import Tensor, as_tensor
from halfstep.compat.mindspore.nn._cell import Cell
from halfstep.compat.mindspore.nn._layers import Identity
from halfstep.compat.mindspore.nn._optimizers import Optimizer
from halfstep.compat.mindspore.nn._update_cells import CellLossScale
from halfstep.distributed import all_ranks
from halfstep.errors import ConfigError, HalfstepWarning
from halfstep.scaling.loss_scale import LossScale, StaticLossScale
from halfstep.scaling.skips import SkipCount
from halfstep.trees import all_finite, cast_floats


class WithLossCell(Cell):
    """A network and its loss: (data, label) to the loss. `full`: outputs and labels go to fp32 before it."""

    def __init__(self, backbone: torch.nn.Module, loss_fn: torch.nn.Module, full: bool = False) -> None:
        super().__init__()
        self._backbone, self._loss_fn, self._full = backbone, loss_fn, full

    def construct(self, data: Any, label: Any) -> torch.Tensor:
        """The loss of one batch."""
        output = self._backbone(data)
        if self._full:
            output, label = cast_floats((output, label), torch.float32)
        return self._loss_fn(output, label)


class WithEvalCell(Cell):
    """A network and its loss: (data, label) to (loss, output, label); the latter two in fp32 if asked to."""

    def __init__(
        self, network: torch.nn.Module, loss_fn: torch.nn.Module, add_cast_fp32: bool = False
    ) -> None:
        super().__init__()
        self._network, self._loss_fn, self._full = network, loss_fn, add_cast_fp32

    def construct(self, data: Any, label: Any) -> tuple[torch.Tensor, Any, Any]:
        """The loss, the output and the label of one batch."""
        output = self._network(data)
        if self._full:
            output, label = cast_floats((output, label), torch.float32)
        return self._loss_fn(output, label), output, label


def _warn_about_strangers(network: torch.nn.Module, optimizer: Optimizer) -> None:
    mine = {id(p) for p in network.parameters()}
    strangers = sum(id(p) not in mine for p in optimizer.parameters)
    if strangers:
        warnings.warn(
            f"{strangers} of the optimizer's {len(optimizer.parameters)} parameters are not in this network "
            f"({type(network).__name__}): they will not be trained. Build the optimizer from "
            "network.trainable_params() of the network it is to train.",
            HalfstepWarning,
            stacklevel=4,
        )


class TrainOneStepCell(Cell):
    """Forward, backward and update: inputs to the loss.

    `sens` multiplies the loss, and nothing divides it out again but the optimizer's own `loss_scale`. A class
    derived from it may write its own `construct` with `self.network`, `self.weights`, `self.optimizer`,
    `self.grad(network, weights)(*inputs, sens)`, `self.grad_no_sens` and `self.grad_reducer`.

    Raises:
        ValueError: `sens` of 0.
    """

    def __init__(self, network: torch.nn.Module, optimizer: Optimizer, sens: float | None = None) -> None:
        super().__init__()
        self.network, self.optimizer = network, optimizer
        _warn_about_strangers(network, optimizer)
        self.weights = optimizer.parameters
        if sens == 0:
            raise ConfigError("The input argument of 'sens' can not be 0.")
        self.sens = 1.0 if sens is None else sens
        self.grad = GradOperation(get_by_list=True, sens_param=True)
        self.grad_no_sens = GradOperation(get_by_list=True)
        self.reducer_flag, self.grad_reducer = False, Identity()
        self._scale: LossScale = StaticLossScale(1.0 if sens is None else float(sens))
        self._grad_fn = value_and_grad(self._scaled, None, self.weights, has_aux=True)

    def _scaled(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss = self.network(*inputs)
        return self._scale.scale(loss), loss

    def construct(self, *inputs: Any) -> Any:
        """Take one step; returns the loss, not scaled."""
        (_, loss), gradients = self._grad_fn(*inputs)
        self.optimizer(gradients)
        return loss


def _scale_of(given: Any, cell: bool) -> LossScale:
    if isinstance(given, LossScale):
        return given
    return CellLossScale(given) if cell else StaticLossScale(float(given))


class TrainOneStepWithLossScaleCell(TrainOneStepCell):
    """Forward, backward, check and update: inputs to (loss, overflow, scale of the next step).

    A step whose gradients hold inf or NaN, on any rank, is skipped. More than 1000 in a row raise
    LossScaleCollapsed. `scale_sense`: a LossScale (what a manager's `get_update_cell` gives), a Cell such as
    nn.DynamicLossScaleUpdateCell, or a tensor or number for a constant scale. A `construct` of one's own may
    use `start_overflow_check`, `get_overflow_status`, `process_loss_scale` and `hyper_map`, as in MindSpore.
    """

    def __init__(self, network: torch.nn.Module, optimizer: Optimizer, scale_sense: Any) -> None:
        super().__init__(network, optimizer)
        if isinstance(scale_sense, torch.Tensor) and scale_sense.numel() != 1:
            raise ValueError(
                "For 'TrainOneStepWithLossScaleCell', the shape of 'scale_sense' must be (1,) or (), "
                f"but got {tuple(scale_sense.shape)}."
            )
        cell = isinstance(scale_sense, Cell) and hasattr(scale_sense, "get_loss_scale")
        if not cell and not isinstance(scale_sense, LossScale | torch.Tensor | int | float):
            raise TypeError(
                "For 'TrainOneStepWithLossScaleCell', the 'scale_sense' must be a Cell, a LossScale, a "
                f"tensor or a number, but got 'scale_sense' type: {type(scale_sense)}."
            )
        self.hyper_map = HyperMap()
        self._scale = _scale_of(scale_sense, cell)
        self._sense = self._scale.tensor().clone()
        self.skips = SkipCount(limit=OVERFLOWS_IN_A_ROW + 1)

    def construct(self, *inputs: Any) -> tuple[Any, Tensor, Tensor]:
        """Take one step, or skip it."""
        (_, loss), gradients = self._grad_fn(*inputs)
        overflow = all_ranks(~all_finite(gradients))
        taken = not overflow
        if taken:
            self.optimizer(self._scale.unscale(gradients, torch.float32))
        self.process_loss_scale(overflow)
        return loss, as_tensor(overflow), as_tensor(self._scale.tensor())

    @property
    def scale_sense(self) -> Tensor:
        """The scale, a 0-d float32 tensor that `process_loss_scale` changes in place."""
        self._sense.copy_(self._scale.tensor())
        return as_tensor(self._sense)

    def start_overflow_check(self, pre_cond: Any, compute_input: Any) -> tuple[Tensor, Any]:
        """A status that `get_overflow_status` takes, and `compute_input` as it is."""
        return as_tensor(torch.zeros(8, dtype=torch.int32)), compute_input

    def get_overflow_status(self, status: Any, compute_output: Any) -> Tensor:
        """Whether a gradient holds inf or NaN, on any rank: a 0-d bool tensor."""
        return as_tensor(all_ranks(~all_finite(compute_output)))

    def process_loss_scale(self, overflow: Any) -> Any:
        """Move the scale by one step; gives `overflow` back."""
        taken = not bool(overflow)
        self._scale = self._scale.adjust(taken)
        self._sense.copy_(self._scale.tensor())
        self.skips = self.skips.after(taken, scale=None if taken else self._scale.read())
        return overflow

    def set_sense_scale(self, sens: torch.Tensor) -> None:
        """Go on with a constant scale of this value."""
        self._scale = StaticLossScale(float(sens))


class TrainOneStepWithGroupScalesCell(TrainOneStepCell):
    """As TrainOneStepWithLossScaleCell, with a GroupLossScaleManager; the scale returned is group 1's."""

    def __init__(
        self, network: torch.nn.Module, optimizer: Optimizer, manager: GroupLossScaleManager
    ) -> None:
        super().__init__(network, optimizer)
        manager.start()
        self._manager = [manager]  # in a list: it is a Cell, and the network has it already
        self._groups = [manager.group_of(p) for p in self.weights]
        self.skips = SkipCount(limit=OVERFLOWS_IN_A_ROW + 1)

    def construct(self, *inputs: Any) -> tuple[Any, Tensor, Tensor]:
        """Take one step, or skip it."""
        manager = self._manager[0]
        (_, loss), gradients = self._grad_fn(*inputs)
        pairs = list(zip(self._groups, gradients))
        flags = [all_finite([g for i, g in pairs if i == index]) for index in range(len(manager.scales))]
        flags = [~all_ranks(~flag) for flag in flags]
        taken = all(bool(flag) for flag in flags) and bool(all_finite([g for i, g in pairs if i is None]))
        if taken:
            self.optimizer(g if i is None else manager.scales[i].unscale(g, torch.float32) for i, g in pairs)
        manager.scales = tuple(s.adjust(bool(flag)) for s, flag in zip(manager.scales, flags))
        self.skips = self.skips.after(taken, scale=None if taken else manager.scales[0].read())
        return loss, as_tensor(torch.tensor(not taken)), as_tensor(manager.scales[0].tensor())
