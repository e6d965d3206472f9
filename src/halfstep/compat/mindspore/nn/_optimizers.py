"""Optimizers that are called with gradients, each a torch.optim one underneath."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from halfstep.compat.mindspore._tensor import plain_tensor
from halfstep.errors import ConfigError
from halfstep.optim import AdamW

LearningRate = float | Sequence[float]


class Optimizer:
    """Base of the optimizers: `optimizer(gradients)` takes one step.

    `optimizer.torch_optimizer` is the torch.optim object that does the work; `parameters` are in the order in
    which gradients are given. A sequence of learning rates holds one for each step, the last one staying.
    """

    def __init__(
        self, torch_optimizer: torch.optim.Optimizer, learning_rate: LearningRate, loss_scale: float
    ) -> None:
        if loss_scale <= 0:
            raise ConfigError(f"the argument 'loss_scale' must be > 0, but got {loss_scale}")
        self.torch_optimizer = torch_optimizer
        self.learning_rate, self.loss_scale = learning_rate, loss_scale
        self.global_step = 0

    @property
    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        """The parameters, in the order of the gradients."""
        return tuple(p for group in self.torch_optimizer.param_groups for p in group["params"])

    def get_lr(self) -> float:
        """The learning rate of the next step (of the first group)."""
        if isinstance(self.learning_rate, int | float):
            return float(self.torch_optimizer.param_groups[0]["lr"])
        return float(self.learning_rate[min(self.global_step, len(self.learning_rate) - 1)])

    def __call__(self, gradients: Iterable[torch.Tensor]) -> bool:
        """Take one step with these gradients, divided by `loss_scale`; returns True."""
        parameters, given = self.parameters, tuple(gradients)
        if len(given) != len(parameters):
            raise ConfigError(f"{len(given)} gradients for {len(parameters)} parameters: give one for each")
        if not isinstance(self.learning_rate, int | float):
            for group in self.torch_optimizer.param_groups:
                group["lr"] = self.get_lr()
        for parameter, gradient in zip(parameters, given):
            own = plain_tensor(gradient.detach()).to(parameter.dtype)
            parameter.grad = own if self.loss_scale == 1.0 else own / self.loss_scale
        self.torch_optimizer.step()
        self.torch_optimizer.zero_grad(set_to_none=True)
        self.global_step += 1
        return True


def _first(learning_rate: LearningRate) -> float:
    if isinstance(learning_rate, str):
        raise ConfigError(f"the 'learning_rate' must be a number or numbers, but got {learning_rate!r}")
    return float(learning_rate if isinstance(learning_rate, int | float) else learning_rate[0])


def _groups(params: Any) -> list[Any]:
    groups = list(params)
    if not groups:
        raise ConfigError("the optimizer got no parameters: pass network.trainable_params()")
    return groups


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
        made = torch.optim.SGD(
            _groups(params), _first(learning_rate), momentum, dampening, weight_decay, nesterov
        )
        super().__init__(made, learning_rate, loss_scale)


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
        made = torch.optim.SGD(
            _groups(params), _first(learning_rate), momentum, 0.0, weight_decay, use_nesterov
        )
        super().__init__(made, learning_rate, loss_scale)


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
        made = torch.optim.Adam(
            _groups(params), _first(learning_rate), (beta1, beta2), eps, weight_decay, use_amsgrad
        )
        super().__init__(made, learning_rate, loss_scale)


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
        groups, first = _groups(params), _first(learning_rate)
        made = AdamW(groups, first, (beta1, beta2), eps, weight_decay, bias_correction=False)
        super().__init__(made, learning_rate, 1.0)
