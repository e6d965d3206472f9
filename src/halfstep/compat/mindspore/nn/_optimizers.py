"""Optimizers that are called with gradients, each a torch.optim one underneath."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halfstep.compat.mindspore._tensor import plain_tensor
from halfstep.errors import ConfigError
from halfstep.optim import AdamW

LearningRate = float | Sequence[float] | torch.Tensor


class Optimizer:
    """Base of the optimizers: `optimizer(gradients)` takes one step.

    `optimizer.torch_optimizer` is the torch.optim object that does the work; `parameters` are in the order in
    which gradients are given: that of the groups, or of a group {"order_params": parameters}. A sequence of
    learning rates, of the optimizer or of a group, holds one for each step, the last one staying.
    """

    def __init__(
        self,
        torch_optimizer: torch.optim.Optimizer,
        learning_rate: LearningRate,
        loss_scale: float,
        groups: Groups | None = None,
    ) -> None:
        if loss_scale <= 0:
            raise ConfigError(f"the argument 'loss_scale' must be > 0, but got {loss_scale}")
        self.torch_optimizer = torch_optimizer
        self.learning_rate, self.loss_scale = learning_rate, loss_scale
        self.global_step = 0
        self._order = None if groups is None else groups.order
        self._rates: dict[int, Sequence[float]] = {} if groups is None else groups.rates

    @property
    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        """The parameters, in the order of the gradients."""
        if self._order is not None:
            return self._order
        return tuple(p for group in self.torch_optimizer.param_groups for p in group["params"])

    def get_lr(self) -> float:
        """The learning rate of the next step (of the first group)."""
        self._set_rates()
        return float(self.torch_optimizer.param_groups[0]["lr"])

    def _set_rates(self) -> None:
        for index, rates in self._rates.items():
            rate = float(rates[min(self.global_step, len(rates) - 1)])
            self.torch_optimizer.param_groups[index]["lr"] = rate

    def __call__(self, gradients: Iterable[torch.Tensor]) -> bool:
        """Take one step with these gradients, divided by `loss_scale`; returns True."""
        parameters, given = self.parameters, tuple(gradients)
        if len(given) != len(parameters):
            raise ConfigError(f"{len(given)} gradients for {len(parameters)} parameters: give one for each")
        self._set_rates()
        for parameter, gradient in zip(parameters, given):
            own = plain_tensor(gradient.detach()).to(parameter.dtype)
            parameter.grad = own if self.loss_scale == 1.0 else own / self.loss_scale
        self.torch_optimizer.step()
        self.torch_optimizer.zero_grad(set_to_none=True)
        self.global_step += 1
        return True


@dataclass(frozen=True)
class Groups:
    """Parameter groups as torch takes them, the order of the gradients, and rates that change by index."""

    groups: list[Any]
    order: tuple[torch.nn.Parameter, ...] | None
    rates: dict[int, Sequence[float]]


def _first(learning_rate: LearningRate) -> float:
    if isinstance(learning_rate, str):
        raise ConfigError(f"the 'learning_rate' must be a number or numbers, but got {learning_rate!r}")
    given: Any = learning_rate.tolist() if isinstance(learning_rate, torch.Tensor) else learning_rate
    return float(given if isinstance(given, int | float) else given[0])


def _groups(params: Any, learning_rate: LearningRate) -> Groups:
    """Read MindSpore's groups; ConfigError for none, for an unknown key and for a bad order."""
    listed: list[Any] = list(params)
    order = next((g["order_params"] for g in listed if isinstance(g, dict) and "order_params" in g), None)
    groups = [_group(g) for g in listed if not (isinstance(g, dict) and "order_params" in g)]
    if not groups:
        raise ConfigError("the optimizer got no parameters: pass network.trainable_params()")
    grouped = isinstance(groups[0], dict)
    mine: list[Any] = [p for g in groups for p in g["params"]] if grouped else groups
    if order is not None and {id(p) for p in order} != {id(p) for p in mine}:
        raise ConfigError("'order_params' must hold the parameters of the groups, each of them once")
    rates: dict[int, Any] = {}
    for index, group in enumerate(groups if grouped else [{}]):
        rate = group.get("lr", learning_rate)
        rate = rate.tolist() if isinstance(rate, torch.Tensor) else rate
        if "lr" in group:
            group["lr"] = _first(rate)
        if not isinstance(rate, int | float):
            rates[index] = rate
    return Groups(groups, None if order is None else tuple(order), rates)


def _group(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    group: dict[str, Any] = {**given, "params": list(given["params"])}
    if group.pop("grad_centralization", False):
        raise ConfigError("a group asks for grad_centralization, which is not here: centre gradients by hand")
    return group


class SGD(Optimizer):
    """Gradient descent with momentum."""

    def __init__(
        self,
        params: Any,
        learning_rate: LearningRate = 0.1,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        loss_scale: float = 1.0,
    ) -> None:
        groups = _groups(params, learning_rate)
        made = torch.optim.SGD(
            groups.groups, _first(learning_rate), momentum, dampening, weight_decay, nesterov
        )
        super().__init__(made, learning_rate, loss_scale, groups)


class Momentum(Optimizer):
    """Gradient descent with momentum."""

    def __init__(
        self,
        params: Any,
        learning_rate: LearningRate,
        momentum: float,
        weight_decay: float = 0.0,
        loss_scale: float = 1.0,
        use_nesterov: bool = False,
    ) -> None:
        groups = _groups(params, learning_rate)
        made = torch.optim.SGD(
            groups.groups, _first(learning_rate), momentum, 0.0, weight_decay, use_nesterov
        )
        super().__init__(made, learning_rate, loss_scale, groups)


class Adam(Optimizer):
    """Adam with bias correction; weight decay is added to the gradient."""

    def __init__(
        self,
        params: Any,
        learning_rate: LearningRate = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        *,
        use_amsgrad: bool = False,
        weight_decay: float = 0.0,
        loss_scale: float = 1.0,
    ) -> None:
        groups = _groups(params, learning_rate)
        made = torch.optim.Adam(
            groups.groups, _first(learning_rate), (beta1, beta2), eps, weight_decay, use_amsgrad
        )
        super().__init__(made, learning_rate, loss_scale, groups)


class AdamWeightDecay(Optimizer):
    """Adam without bias correction; weight decay is taken off the weight, not added to the gradient."""

    def __init__(
        self,
        params: Any,
        learning_rate: LearningRate = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        groups, first = _groups(params, learning_rate), _first(learning_rate)
        made = AdamW(groups.groups, first, (beta1, beta2), eps, weight_decay, bias_correction=False)
        super().__init__(made, learning_rate, 1.0, groups)
