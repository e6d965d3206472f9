"""The algorithms as data: states, per-step scalars, and the update in plain torch with its source.

`update` is the readable reference of what the kernels do, in fp32 and in this order of operations; each
line is one correctly rounded operation, so that kernels can equal it bit for bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ConfigError, show
from halfstep.kernels import codes as L

Number = float | Tensor
Scalars = tuple[Number, ...]
"""Seven scalars of one parameter and step: decay and c2 to c7 (what each means, the algorithm says)."""


@dataclass(frozen=True)
class Algorithm:
    """One optimizer: its states' names (torch's), its scalars, its update and its kernel code.

    `bounds` says how large each state can get from its old peak and the peak of the gradient (with its L2
    decay where the algorithm is not `decoupled`), by the states' own averages.
    """

    name: str
    code: int
    states: tuple[str, ...]
    scalars: Callable[[Mapping[str, Any], Number], Scalars]
    update: Callable[..., tuple[Tensor, list[Tensor]]]
    """Weight, gradient and states (flat), then the scalars, to the new weight and states."""
    bounds: Callable[[list[Tensor], Tensor, Scalars], list[Tensor]]
    decoupled: bool
    counts: bool = False
    """Whether the scalars depend on the number of the step."""
    whole: bool = False
    """Whether it takes each parameter by itself, and the parameter and its group in the place of scalars."""
    starts_with_buffer: bool = False
    """Whether steps are counted from the making of the buffer, whose first value is the gradient."""


def _adam_scalars(group: Mapping[str, Any], step: Number, decay: Number) -> Scalars:
    beta1, beta2 = group["betas"]
    corrected = group.get("bias_correction", True)
    first, second = (1 - beta1**step, 1 - beta2**step) if corrected else (1.0, 1.0)
    try:
        return (decay, 1 - beta1, beta2, 1 - beta2, 1 / second**0.5, group["eps"], group["lr"] / first)
    except ZeroDivisionError:
        raise ConfigError(f"betas={show(group['betas'])}: must be a pair of numbers in [0, 1)") from None


def _adamw_scalars(group: Mapping[str, Any], step: Number) -> Scalars:
    return _adam_scalars(group, step, 1 - group["lr"] * group["weight_decay"])


def _adam_l2_scalars(group: Mapping[str, Any], step: Number) -> Scalars:
    return _adam_scalars(group, step, group["weight_decay"])


def _root(v: Tensor) -> Tensor:
    """Return the correctly rounded square root. torch's fp32 one on a CPU can be a bit off (MKL)."""
    return v.to(torch.float64).sqrt().to(torch.float32) if v.device.type == "cpu" else v.sqrt()


def _moments(g: Tensor, states: list[Tensor], s: Scalars) -> tuple[Tensor, list[Tensor]]:
    """Kingma & Ba, Adam (arXiv 1412.6980), with the bias corrections as torch applies them, or none.

    With a third state v never falls: Reddi et al., On the Convergence of Adam and Beyond (arXiv 1904.09237).
    """
    _, c2, c3, c4, unbias, eps, step_size = s
    m, v, *top = states
    m = m + (g - m) * c2
    v = v * c3 + (g * g) * c4
    top = [torch.maximum(v_max, v) for v_max in top]
    root = _root((top or [v])[0])
    return step_size * (m / (root * unbias + eps)), [m, v, *top]


def _adamw(w: Tensor, g: Tensor, states: list[Tensor], s: Scalars) -> tuple[Tensor, list[Tensor]]:
    """Loshchilov & Hutter, Decoupled Weight Decay Regularization (arXiv 1711.05101)."""
    w = w * s[0]
    change, states = _moments(g, states, s)
    return w - change, states


def _adam(w: Tensor, g: Tensor, states: list[Tensor], s: Scalars) -> tuple[Tensor, list[Tensor]]:
    change, states = _moments(g + w * s[0], states, s)
    return w - change, states


def _lion_scalars(group: Mapping[str, Any], step: Number) -> Scalars:
    beta1, beta2 = group["betas"]
    lr = group["lr"]
    return (1 - lr * group["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2, lr, 0.0)


def _lion(w: Tensor, g: Tensor, states: list[Tensor], s: Scalars) -> tuple[Tensor, list[Tensor]]:
    """Chen et al., Symbolic Discovery of Optimization Algorithms (arXiv 2302.06675)."""
    decay, c2, c3, c4, c5, lr, _ = s
    w = w * decay
    u = states[0] * c2 + g * c3
    sign = (u > 0).to(torch.float32) - (u < 0).to(torch.float32)
    return w - sign * lr, [states[0] * c4 + g * c5]


def _sgd_scalars(group: Mapping[str, Any], step: Number) -> Scalars:
    momentum, keep = group["momentum"], 1 - group["dampening"]
    # torch starts the buffer as the first gradient, whole: step 1 has neither momentum nor dampening.
    first = step == 1
    if isinstance(first, Tensor):
        first = first.to(torch.float64)
        past, new = momentum * (1 - first), keep + (1 - keep) * first
    else:
        past, new = (0.0, 1.0) if first else (momentum, keep)
    return (group["weight_decay"], past, new, group["lr"], momentum, 0.0, 0.0)


def _sgd(w: Tensor, g: Tensor, states: list[Tensor], s: Scalars) -> tuple[Tensor, list[Tensor]]:
    return w - (g + w * s[0]) * s[3], states


def _sgd_momentum(w: Tensor, g: Tensor, states: list[Tensor], s: Scalars) -> tuple[Tensor, list[Tensor]]:
    """Sutskever et al. 2013, as torch writes it: the learning rate multiplies the whole buffer."""
    g = g + w * s[0]
    m = states[0] * s[1] + g * s[2]
    return w - m * s[3], [m]


def _sgd_nesterov(w: Tensor, g: Tensor, states: list[Tensor], s: Scalars) -> tuple[Tensor, list[Tensor]]:
    g = g + w * s[0]
    m = states[0] * s[1] + g * s[2]
    return w - (g + m * s[4]) * s[3], [m]


def _adam_bounds(old: list[Tensor], g: Tensor, s: Scalars) -> list[Tensor]:
    return [old[0] * (1 - s[1]) + g * s[1], old[1] * s[2] + (g * g) * s[3]]


def _lion_bounds(old: list[Tensor], g: Tensor, s: Scalars) -> list[Tensor]:
    return [old[0] * s[3] + g * s[4]]


def _momentum_bounds(old: list[Tensor], g: Tensor, s: Scalars) -> list[Tensor]:
    return [old[0] * s[1] + g * s[2]]


_TWO, _BUFFER = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
ADAMW = Algorithm("AdamW", L.ADAMW, _TWO, _adamw_scalars, _adamw, _adam_bounds, True, counts=True)
ADAM = Algorithm("Adam", L.ADAM, _TWO, _adam_l2_scalars, _adam, _adam_bounds, False, counts=True)
ADAMW_AMSGRAD = replace(ADAMW, code=L.NO_KERNEL, states=(*_TWO, "max_exp_avg_sq"))
ADAM_AMSGRAD = replace(ADAM, code=L.NO_KERNEL, states=(*_TWO, "max_exp_avg_sq"))
LION = Algorithm("Lion", L.LION, ("exp_avg",), _lion_scalars, _lion, _lion_bounds, True)
SGD = Algorithm("SGD", L.SGD, (), _sgd_scalars, _sgd, _momentum_bounds, False)
SGD_MOMENTUM = replace(
    SGD, code=L.SGD_MOMENTUM, states=_BUFFER, update=_sgd_momentum, starts_with_buffer=True
)
SGD_NESTEROV = replace(SGD_MOMENTUM, code=L.SGD_NESTEROV, update=_sgd_nesterov)
