"""Cells that take a training or evaluation step, and optimizers that are called with gradients.

The scale, the check and the skip are halfstep's; each optimizer is a torch.optim one underneath.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from halfstep.compat.mindspore._functions import signature_of, value_and_grad
from halfstep.compat.mindspore._loss_scale import (
    OVERFLOWS_IN_A_ROW,
    DynamicLossScaleUpdateCell,
    FixedLossScaleUpdateCell,
    GroupLossScaleManager,
)
from halfstep.compat.mindspore._tensor import (
    Parameter,
    ParameterTuple,
    Tensor,
    as_tensor,
    check_kind,
    plain_tensor,
)
from halfstep.compat.mindspore.nn._cell import Cell
from halfstep.compat.mindspore.nn._layers import Identity
from halfstep.compat.mindspore.nn._rates import LearningRateSchedule
from halfstep.compat.mindspore.ops import GradOperation, HyperMap
from halfstep.distributed import all_ranks
from halfstep.errors import ConfigError, warn
from halfstep.optim import AdamW
from halfstep.scaling.loss_scale import StaticLossScale
from halfstep.scaling.skips import SkipCount
from halfstep.trees import all_finite, cast_floats, multiply, reciprocal

__all__ = [
    "SGD",
    "Adam",
    "AdamWeightDecay",
    "DynamicLossScaleUpdateCell",
    "FixedLossScaleUpdateCell",
    "Momentum",
    "Optimizer",
    "TrainOneStepCell",
    "TrainOneStepWithLossScaleCell",
    "WithEvalCell",
    "WithLossCell",
]


LearningRate = float | Sequence[float] | torch.Tensor | LearningRateSchedule


class Optimizer:
    """Base of the optimizers: `optimizer(gradients)` takes one step.

    `optimizer.torch_optimizer` is the torch.optim object that does the work; `parameters` are in the order in
    which gradients are given: that of the groups, or of a group {"order_params": parameters}. A sequence of
    learning rates, of the optimizer or of a group, holds one for each step, the last one staying; a
    LearningRateSchedule is asked for one at each step. One number for all groups becomes the Parameter
    `learning_rate` (0-d, float64, on the CPU), which may be assigned between steps.
    """

    __signature__: inspect.Signature
    make: Any
    """The class of torch's, or of halfstep's, that does the work."""

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        bound = type(self).__signature__.bind(params, *args, **kwargs)
        bound.apply_defaults()
        arguments: dict[str, Any] = bound.arguments
        given: LearningRate = arguments.pop("learning_rate")
        self.loss_scale: float = arguments.pop("loss_scale", 1.0)
        if self.loss_scale <= 0:
            raise ConfigError(f"the argument 'loss_scale' must be > 0, but got {self.loss_scale}")
        groups, self._order, self._rates = _groups(arguments.pop("params"), given)
        if "beta1" in arguments:
            arguments["betas"] = arguments.pop("beta1"), arguments.pop("beta2")
        options = {name.removeprefix("use_"): value for name, value in arguments.items()}
        self._last = _rate_by_step(given)(0)
        self.torch_optimizer: torch.optim.Optimizer = self.make(groups, lr=self._last, **options)
        one = not self._rates and all(group["lr"] == self._last for group in groups)
        self.learning_rate: Any = given
        if one:
            constant = torch.tensor(self._last, dtype=torch.float64, device="cpu")
            self.learning_rate = Parameter(constant, "learning_rate", requires_grad=False)
        self.global_step = 0

    @property
    def parameters(self) -> ParameterTuple:
        """The parameters, in the order of the gradients."""
        groups = self.torch_optimizer.param_groups
        return ParameterTuple(self._order or [p for group in groups for p in group["params"]])

    def get_lr(self) -> float:
        """The learning rate of the next step (of the first group)."""
        self._set_rates()
        return float(self.torch_optimizer.param_groups[0]["lr"])

    def _set_rates(self) -> None:
        groups = self.torch_optimizer.param_groups
        for index, rate in self._rates.items():
            groups[index]["lr"] = rate(self.global_step)
        if isinstance(self.learning_rate, Parameter) and (now := self.learning_rate.item()) != self._last:
            self._last = now
            for group in groups:
                group["lr"] = now

    def __call__(self, gradients: Iterable[torch.Tensor]) -> bool:
        """Take one step with these gradients, divided by `loss_scale`; returns True."""
        parameters, grads = self.parameters, tuple(gradients)
        if len(grads) != len(parameters):
            raise ConfigError(f"{len(grads)} gradients for {len(parameters)} parameters: give one for each")
        self._set_rates()
        for parameter, gradient in zip(parameters, grads):
            grad = plain_tensor(gradient.detach()).to(parameter.dtype)
            parameter.grad = grad if self.loss_scale == 1.0 else grad / self.loss_scale
        self.torch_optimizer.step()
        self.torch_optimizer.zero_grad(set_to_none=True)
        self.global_step += 1
        return True


def _rate_by_step(learning_rate: Any) -> Callable[[int], float]:
    """The rate as a function of the step."""
    if isinstance(learning_rate, LearningRateSchedule):
        return lambda step: float(learning_rate(torch.tensor(step, dtype=torch.int32, device="cpu")))
    if isinstance(learning_rate, str) or callable(learning_rate):
        raise ConfigError(
            "the 'learning_rate' must be a number, numbers or a LearningRateSchedule, but got "
            f"{learning_rate!r}"
        )
    rates: Any = learning_rate.tolist() if isinstance(learning_rate, torch.Tensor) else learning_rate
    listed = [float(rates)] if isinstance(rates, int | float) else [float(rate) for rate in rates]
    return lambda step: listed[min(step, len(listed) - 1)]


def _changes(learning_rate: Any) -> bool:
    one = isinstance(learning_rate, torch.Tensor) and learning_rate.numel() == 1
    return not (one or isinstance(learning_rate, int | float))


def _groups(
    params: Any, learning_rate: LearningRate
) -> tuple[list[Any], Any, dict[int, Callable[[int], float]]]:
    """MindSpore's groups as torch takes them, the order of the gradients, and rates that change, by index.

    ConfigError for none, for an unknown key and for a bad order.
    """
    listed: list[Any] = list(params)
    if not listed:
        raise ConfigError("the optimizer got no parameters: pass network.trainable_params()")
    param_groups: list[dict[str, Any]] = listed if isinstance(listed[0], dict) else [{"params": listed}]
    groups = [
        {**group, "params": list(group["params"])} for group in param_groups if "order_params" not in group
    ]
    order = next((tuple(group["order_params"]) for group in param_groups if "order_params" in group), None)
    if order is not None and {id(p) for p in order} != {id(p) for g in groups for p in g["params"]}:
        raise ConfigError("'order_params' must hold the parameters of the groups, each of them once")
    rates: dict[int, Callable[[int], float]] = {}
    for index, group in enumerate(groups):
        if group.pop("grad_centralization", False):
            raise ConfigError(
                "a group asks for grad_centralization, which is not here: centre gradients by hand"
            )
        mine = group.get("lr", learning_rate)
        rate = _rate_by_step(mine)
        group["lr"] = rate(0)
        if _changes(mine):
            rates[index] = rate
    return groups, order, rates


def _row(name: str, says: str, make: Any, by_name: Sequence[str] = (), **takes: Any) -> Any:
    """The class of optimizers of this kind, with their arguments in this order; `...` for no default."""
    signature = signature_of({"params": ..., **takes}, by_name)
    body = {"make": staticmethod(make), "__signature__": signature, "__doc__": says, "__module__": __name__}
    return type(name, (Optimizer,), body)


SGD = _row(
    "SGD",
    "Gradient descent with momentum.",
    torch.optim.SGD,
    learning_rate=0.1,
    momentum=0.0,
    dampening=0.0,
    weight_decay=0.0,
    nesterov=False,
    loss_scale=1.0,
)
Momentum = _row(
    "Momentum",
    "Gradient descent with momentum.",
    torch.optim.SGD,
    learning_rate=...,
    momentum=...,
    weight_decay=0.0,
    loss_scale=1.0,
    use_nesterov=False,
)
Adam = _row(
    "Adam",
    "Adam with bias correction; weight decay is added to the gradient.",
    torch.optim.Adam,
    ("use_amsgrad", "weight_decay", "loss_scale"),
    learning_rate=1e-3,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    use_amsgrad=False,
    weight_decay=0.0,
    loss_scale=1.0,
)
AdamWeightDecay = _row(
    "AdamWeightDecay",
    "Adam without bias correction; weight decay is taken off the weight, not added to the gradient.",
    functools.partial(AdamW, bias_correction=False),
    learning_rate=1e-3,
    beta1=0.9,
    beta2=0.999,
    eps=1e-6,
    weight_decay=0.0,
)


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
        warn(
            f"{strangers} of the optimizer's {len(optimizer.parameters)} parameters are not in this network "
            f"({type(network).__name__}): they will not be trained. Build the optimizer from "
            "network.trainable_params() of the network it is to train."
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
        self.scale_sense = as_tensor(StaticLossScale(float(self.sens)).tensor())
        self._grad_fn = value_and_grad(self._scale_loss, None, self.weights, has_aux=True)

    def _scale_loss(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss = self.network(*inputs)
        return multiply(loss, self.scale_sense), loss

    def construct(self, *inputs: Any) -> Any:
        """Take one step; returns the loss, not scaled."""
        (_, loss), gradients = self._grad_fn(*inputs)
        self.optimizer(gradients)
        return loss


class TrainOneStepWithLossScaleCell(TrainOneStepCell):
    """Forward, backward, check and update: inputs to (loss, overflow, scale of the next step).

    A step whose gradients hold inf or NaN, on any rank, is skipped. More than 1000 in a row raise
    LossScaleCollapsed. `scale_sense` is given as a Cell such as nn.DynamicLossScaleUpdateCell (what a
    manager's `get_update_cell` gives), or as a tensor or number for a constant scale; from then on it is the
    scale, a 0-d float32 tensor that `process_loss_scale` changes in place. A `construct` of one's own may use
    it, `start_overflow_check`, `get_overflow_status`, `process_loss_scale`, `hyper_map`, as in MindSpore.
    """

    def __init__(self, network: torch.nn.Module, optimizer: Optimizer, scale_sense: Any) -> None:
        kinds = Cell, torch.Tensor, int, float
        check_kind("TrainOneStepWithLossScaleCell", "scale_sense", scale_sense, *kinds)
        if isinstance(scale_sense, torch.Tensor) and scale_sense.numel() != 1:
            raise ConfigError(
                "For 'TrainOneStepWithLossScaleCell', the shape of 'scale_sense' must be (1,) or (), "
                f"but got {tuple(scale_sense.shape)}."
            )
        constant = not isinstance(scale_sense, Cell)
        cell: Any = FixedLossScaleUpdateCell(float(scale_sense)) if constant else scale_sense
        super().__init__(network, optimizer)
        self.scale_sense = as_tensor(StaticLossScale(float(cell.get_loss_scale())).tensor())
        self.loss_scaling_manager = cell
        self.hyper_map = HyperMap()
        self.skips = SkipCount(limit=OVERFLOWS_IN_A_ROW + 1)

    def construct(self, *inputs: Any) -> tuple[Any, Tensor, Tensor]:
        """Take one step, or skip it."""
        (_, loss), gradients = self._grad_fn(*inputs)
        overflow = all_ranks(~all_finite(gradients))
        if not overflow:
            inverse = reciprocal(self.scale_sense)
            self.optimizer(multiply(gradient, inverse) for gradient in gradients)
        self.process_loss_scale(overflow)
        return loss, as_tensor(overflow), as_tensor(self.scale_sense.clone())

    def start_overflow_check(self, pre_cond: Any, compute_input: Any) -> tuple[Tensor, Any]:
        """A status that `get_overflow_status` takes, and `compute_input` as it is."""
        return as_tensor(torch.zeros(8, dtype=torch.int32)), compute_input

    def get_overflow_status(self, status: Any, compute_output: Any) -> Tensor:
        """Whether a gradient holds inf or NaN, on any rank: a 0-d bool tensor."""
        return as_tensor(all_ranks(~all_finite(compute_output)))

    def process_loss_scale(self, overflow: Any) -> Any:
        """Move the scale by one step; gives `overflow` back."""
        self.loss_scaling_manager(self.scale_sense, as_tensor(torch.as_tensor(overflow)))
        taken = not bool(overflow)
        self.skips = self.skips.after(taken, scale=None if taken else self.scale_sense.item())
        return overflow

    def set_sense_scale(self, sens: torch.Tensor) -> None:
        """Go on with a constant scale of this value."""
        self.loss_scaling_manager = FixedLossScaleUpdateCell(float(sens))
        self.scale_sense.fill_(float(sens))


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
