"""`apex.optimizers`: FusedAdam and FusedSGD as names of `halfstep.optim`'s one-pass steps, and FusedLAMB.

16-bit weights keep the bits they lack of fp32 (`master="exact"`, 2 bytes a parameter), where Apex rounds them
after each step unless told `master_weights=True`; `master=None` does as Apex does. Every option of
`halfstep.optim` is taken as well (`state_dtype="8bit"`, say).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Unpack, cast

import torch
from torch import Tensor

from halfstep.errors import ConfigError, UnsupportedError
from halfstep.optim import SGD, AdamW, algorithms
from halfstep.optim.algorithms import Algorithm
from halfstep.optim.optimizers import Keeping
from halfstep.torch_private import (
    foreach_add_,
    foreach_addcmul_,
    foreach_copy_,
    foreach_div,
    foreach_mul_,
    foreach_norm,
    foreach_sqrt,
)

__all__ = [
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
]


def _refuse_amsgrad(name: str, amsgrad: bool) -> None:
    if amsgrad:
        raise UnsupportedError(
            f"{name} does not support amsgrad=True, as in Apex: use torch.optim.AdamW(params, amsgrad=True)"
        )


_OPTIONS = {
    *("set_grad_none", "adam_w_mode", "wd_after_momentum"),
    *("use_nvlamb", "adagrad_w_mode", "reg_inside_moment"),
}
"""What the optimizers keep beside their groups, and copies of them too."""


class _AsInApex(torch.optim.Optimizer):
    """`zero_grad` clears to None or to zero as the constructor's `set_grad_none` said.

    `takes_masters`: `amp.initialize` and `FP16_Optimizer` may hand it fp32 masters in the weights' place.
    """

    takes_masters = True
    set_grad_none: bool

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients; to None or zero as the constructor was told."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        options = {name: value for name, value in vars(self).items() if name in _OPTIONS}
        return {**super().__getstate__(), **options}


class FusedAdam(_AsInApex, AdamW):
    """Apex's FusedAdam by `hs.optim`: AdamW by default, Adam with L2 where `adam_w_mode=False`.

    `capturable` and `master_weights` are taken and change nothing: a step reads nothing back from the device,
    and 16-bit weights have masters unless `master=None`. Without `bias_correction` the moments are used as
    they are.

    Raises:
        UnsupportedError (a RuntimeError): amsgrad. ConfigError: master_weights=True beside master=None.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        **options: Unpack[Keeping],  # pyright: ignore[reportGeneralTypeIssues]
    ) -> None:
        _refuse_amsgrad("FusedAdam", amsgrad)
        if master_weights and options.get("master", "exact") is None:
            raise ConfigError("master_weights=True and master=None contradict each other: leave one out")
        self.adam_w_mode, self.set_grad_none = bool(adam_w_mode), set_grad_none
        corrected = bool(bias_correction)
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction=corrected, **options)

    def algorithm(self, group: Mapping[str, Any]) -> Algorithm:
        """AdamW or Adam."""
        return algorithms.ADAMW if self.adam_w_mode else algorithms.ADAM


def _with_rate(group: Any) -> Any:
    if not isinstance(group, dict) or "lr" not in group:
        raise ConfigError("FusedSGD was given no lr: give one, or one in every parameter group")
    return cast(Any, group)


class FusedSGD(_AsInApex, SGD):
    """Apex's FusedSGD by `hs.optim`. `materialize_master_grads` is taken and has no effect here.

    Weight decay enters the gradient before momentum does. `wd_after_momentum=True` is taken where that is the
    same: without momentum or without weight decay.

    `lr` may be left out where every group has its own.

    Raises:
        UnsupportedError: wd_after_momentum=True with both. ConfigError: values SGD cannot mean.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor | None = None,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
        **options: Unpack[Keeping],
    ) -> None:
        self.set_grad_none, self.wd_after_momentum = set_grad_none, bool(wd_after_momentum)
        if lr is None:
            params = [_with_rate(group) for group in params]
        rate = 0.0 if lr is None else lr
        super().__init__(params, rate, momentum, dampening, weight_decay, nesterov, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; see the class for weight decay after momentum."""
        self.algorithm({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def algorithm(self, group: Mapping[str, Any]) -> Algorithm:
        """SGD's, where weight decay may come first."""
        if self.wd_after_momentum and group["momentum"] and group["weight_decay"]:
            raise UnsupportedError(
                "FusedSGD does not support wd_after_momentum=True with momentum and weight decay: here decay "
                "enters the gradient, as in torch.optim.SGD; leave it out, or use AdamW's decoupled decay"
            )
        return super().algorithm(group)


class _InPlainOps(_AsInApex):
    """A step in torch's own ops, parameter by parameter unless a class does it otherwise; states are fp32."""

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
        self._update_all()
        return loss

    def _update_all(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise UnsupportedError(f"{type(self).__name__} does not support sparse gradients")
                p.copy_(self._new_weight(group, p, p.float(), p.grad.float()))

    def _new_weight(self, group: dict[str, Any], p: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
        """The weight, in fp32, after a step with this gradient."""
        raise NotImplementedError


class FusedLAMB(_InPlainOps):
    """LAMB (You et al., ICLR 2020, arXiv 1904.00962, algorithm 2) with Apex's options, in foreach ops.

    m and v are Adam's moments of the gradient, first divided by max(1, global norm / max_grad_norm); the
    update u = m_hat / (sqrt(v_hat) + eps) + weight_decay * w is scaled by |w| / |u|, for parameters with
    weight decay (for all with `use_nvlamb`), and by the learning rate. States are fp32.

    Raises:
        UnsupportedError: amsgrad.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        _refuse_amsgrad("FusedLAMB", amsgrad)
        self.adam_w_mode, self.set_grad_none, self.use_nvlamb = adam_w_mode, set_grad_none, use_nvlamb
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults)

    def _update_all(self) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if grads:
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.float()) for g in grads]))
            for group in self.param_groups:
                self._update(group, norm)

    def _update(self, group: dict[str, Any], norm: Tensor) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        group["step"] = group.get("step", 0) + 1
        beta1, beta2 = group["betas"]
        limit, decay = group["max_grad_norm"], group["weight_decay"]
        clip = 1.0 if limit is None or limit <= 0 else torch.clamp(norm / limit, min=1.0)
        weights = self._wide(params)
        grads = [p.grad.float() / clip for p in params]
        if not self.adam_w_mode and decay:
            foreach_add_(grads, weights, alpha=decay)
        first, second = (self._moments(params, key) for key in ("exp_avg", "exp_avg_sq"))
        foreach_mul_(first, beta1)
        foreach_add_(first, grads, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        foreach_mul_(second, beta2)
        foreach_addcmul_(second, grads, grads, 1 - beta2)
        corrections = (1 - beta1 ** group["step"], 1 - beta2 ** group["step"])
        c1, c2 = corrections if group["bias_correction"] else (1.0, 1.0)
        below = foreach_sqrt(foreach_div(second, c2))
        foreach_add_(below, group["eps"])
        updates = foreach_div(foreach_div(first, c1), below)
        if self.adam_w_mode and decay:
            foreach_add_(updates, weights, alpha=decay)
        if decay or self.use_nvlamb:
            norms = zip(foreach_norm(weights), foreach_norm(updates))
            ratios = [torch.where((w > 0) & (u > 0), w / u, 1.0) for w, u in norms]
            updates = [u * ratio for u, ratio in zip(updates, ratios)]
        foreach_add_(weights, updates, alpha=-group["lr"])
        foreach_copy_(params, weights)

    def _wide(self, params: list[Tensor]) -> list[Tensor]:
        """The weights in fp32, to be changed in place."""
        return [p.float() for p in params]

    def _moments(self, params: list[Tensor], key: str) -> list[Tensor]:
        for p in params:
            if key not in self.state[p]:
                self.state[p][key] = torch.zeros_like(p, dtype=torch.float32)
        return [self.state[p][key] for p in params]


class FusedMixedPrecisionLamb(FusedLAMB):
    """FusedLAMB with fp32 masters of its 16-bit weights, in its state."""

    takes_masters = False

    def _wide(self, params: list[Tensor]) -> list[Tensor]:
        return [self.state[p].setdefault("master", p.detach().float().clone()) for p in params]


class FusedAdagrad(_InPlainOps):
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

    def _new_weight(self, group: dict[str, Any], p: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
        total = self.state[p].setdefault("sum", torch.zeros_like(weight))
        decay = group["weight_decay"]
        grad = grad if self.adagrad_w_mode else grad + decay * weight
        total.addcmul_(grad, grad)
        update = grad / (total.sqrt() + group["eps"])
        update = update + decay * weight if self.adagrad_w_mode else update
        return weight - group["lr"] * update


class FusedNovoGrad(_InPlainOps):
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
        _refuse_amsgrad("FusedNovoGrad", amsgrad)
        if norm_type not in (0, 2, float("inf")):
            raise ConfigError(f"norm_type={norm_type!r}: expected 2, or 0 for the largest magnitude")
        self.set_grad_none, self.reg_inside_moment = set_grad_none, reg_inside_moment
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        more = {"grad_averaging": grad_averaging, "norm_type": norm_type, "init_zero": init_zero}
        super().__init__(params, {**defaults, "weight_decay": weight_decay, **more})

    def _new_weight(self, group: dict[str, Any], p: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
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
