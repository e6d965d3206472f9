"""LARC: layer-wise adaptive rates around any optimizer (You, Gitman and Ginsburg 2017, arXiv 1708.03888)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ConfigError


class LARC(torch.optim.Optimizer):
    """An optimizer whose gradients are scaled, tensor by tensor, by trust * |w| / (|g| + decay * |w|) first.

    With `clip` that rate is at most the group's learning rate. Weight decay is added here and hidden from the
    optimizer inside. States and groups are the inner optimizer's, so `amp.initialize` may take either.

    Args:
        optimizer: any torch optimizer.
        trust_coefficient: the share of a weight's norm that one step may move it.
        clip: min(rate, lr) / lr in place of the rate.
        eps: keeps the division finite.
    """

    takes_masters = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"LARC wraps a torch optimizer, got {type(optimizer).__name__}")
        self.optim, self.trust_coefficient, self.clip, self.eps = optimizer, trust_coefficient, clip, eps
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give the inner optimizer another group."""
        if not any(param_group is group for group in self.optim.param_groups):
            self.optim.add_param_group(param_group)

    def load_state_dict(self, state_dict: Any) -> None:
        """The inner optimizer's."""
        self.optim.load_state_dict(state_dict)
        self.param_groups, self.state = self.optim.param_groups, self.optim.state

    def state_dict(self) -> Any:
        """The inner optimizer's."""
        return self.optim.state_dict()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore
        """Scale the gradients, then let the inner optimizer step."""
        decays = [group.get("weight_decay", 0) for group in self.param_groups]
        for group, decay in zip(self.param_groups, decays):
            group["weight_decay"] = 0
            for p in group["params"]:
                if p.grad is not None:
                    self._adapt(p, group["lr"], decay)
        try:
            return self.optim.step() if closure is None else self.optim.step(closure)
        finally:
            for group, decay in zip(self.param_groups, decays):
                group["weight_decay"] = decay

    def _adapt(self, p: Tensor, lr: float, decay: float) -> None:
        grad = p.grad
        assert grad is not None
        weight_norm, grad_norm = (torch.linalg.vector_norm(t.float()) for t in (p, grad))
        rate = self.trust_coefficient * weight_norm / (grad_norm + weight_norm * decay + self.eps)
        if self.clip:
            rate = (rate / lr).clamp(max=1.0)
        usable = (weight_norm != 0) & (grad_norm != 0)
        adapted = (grad.float() + decay * p.float()) * rate
        p.grad = torch.where(usable, adapted, grad.float()).to(grad.dtype)
