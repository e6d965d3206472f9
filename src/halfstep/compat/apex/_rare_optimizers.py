"""FusedAdagrad and FusedNovoGrad with Apex's options, in plain torch ops; states are fp32."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ConfigError, UnsupportedError


class _PerParameter(torch.optim.Optimizer, ABC):
    """A step that goes parameter by parameter, in fp32."""

    takes_masters = True
    set_grad_none: bool

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients; to None or zero as the constructor was told."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore
        """One update of every parameter that has a gradient.

        Raises:
            UnsupportedError (a RuntimeError): a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise UnsupportedError(f"{type(self).__name__} does not support sparse gradients")
                p.copy_(self._updated(group, p, p.float(), p.grad.float()))
        return loss

    @abstractmethod
    def _updated(self, group: dict[str, Any], p: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
        """The weight, in fp32, after a step with this gradient."""


class FusedAdagrad(_PerParameter):
    """Adagrad (Duchi et al., JMLR 2011); weight decay in the gradient, or decoupled by `adagrad_w_mode`."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self.set_grad_none, self.adagrad_w_mode = set_grad_none, bool(adagrad_w_mode)
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    def _updated(self, group: dict[str, Any], p: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
        total = self.state[p].setdefault("sum", torch.zeros_like(weight))
        decay = group["weight_decay"]
        grad = grad if self.adagrad_w_mode else grad + decay * weight
        total.addcmul_(grad, grad)
        update = grad / (total.sqrt() + group["eps"])
        update = update + decay * weight if self.adagrad_w_mode else update
        return weight - group["lr"] * update


class FusedNovoGrad(_PerParameter):
    """NovoGrad (Ginsburg et al. 2019, arXiv 1905.11286): one second moment a tensor, kept as a norm.

    `norm_type` 2 blends squares of norms, 0 (or inf) the largest magnitudes themselves.

    Raises:
        UnsupportedError (a RuntimeError): amsgrad. ConfigError: another norm.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: float = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise UnsupportedError("FusedNovoGrad does not support amsgrad=True, as in Apex")
        if norm_type not in (0, 2, float("inf")):
            raise ConfigError(f"norm_type={norm_type!r}: expected 2, or 0 for the largest magnitude")
        self.set_grad_none, self.reg_inside_moment = set_grad_none, reg_inside_moment
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        more = {"grad_averaging": grad_averaging, "norm_type": norm_type, "init_zero": init_zero}
        super().__init__(params, {**defaults, "weight_decay": weight_decay, **more})

    def _updated(self, group: dict[str, Any], p: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
        state, (beta1, beta2), decay = self.state[p], group["betas"], group["weight_decay"]
        squares = group["norm_type"] == 2
        norm = torch.linalg.vector_norm(grad, 2 if squares else float("inf"))
        if "norm" not in state:
            state["norm"] = torch.zeros_like(norm) if group["init_zero"] else norm.clone()
            state["exp_avg"] = torch.zeros_like(weight)
        before = state["norm"]
        if squares:
            blended = (beta2 * before.square() + (1 - beta2) * norm.square()).sqrt()
        else:
            blended = beta2 * before + (1 - beta2) * norm
        before.copy_(blended)
        corrections = (1 - beta1 ** group["step"], (1 - beta2 ** group["step"]) ** 0.5)
        first, second = corrections if group["bias_correction"] else (1.0, 1.0)
        below = blended / second + group["eps"]
        grad = grad / below + decay * weight if self.reg_inside_moment else grad
        moment = state["exp_avg"].mul_(beta1)
        moment.add_(grad, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        update = moment / first
        update = update if self.reg_inside_moment else update / below + decay * weight
        return weight - group["lr"] * update
