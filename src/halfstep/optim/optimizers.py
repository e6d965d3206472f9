"""The public optimizers: torch's argument names and defaults, plus how weights and states are kept."""

from collections.abc import Mapping
from typing import Any, TypedDict, Unpack

from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.optim import algorithms
from halfstep.optim.algorithms import Algorithm
from halfstep.optim.arguments import HARMLESS
from halfstep.optim.base import OnePassOptimizer


class Keeping(TypedDict, total=False):
    """The options that every optimizer here takes beside its algorithm's."""

    maximize: bool
    master: str | None
    state_dtype: str
    release_gradients: bool
    accumulate: str | None
    seed: int
    backend: str
    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool


class _Optimizer(OnePassOptimizer):
    """Puts the options that may differ between groups with the algorithm's own."""

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        maximize: bool = False,
        master: str | None = "exact",
        state_dtype: str = "fp32",
        **keeping: Any,
    ) -> None:
        run = {name: keeping.pop(name, default) for name, default in HARMLESS.items()}
        kept = {"maximize": maximize, "master": master, "state_dtype": state_dtype}
        super().__init__(params, {**defaults, **run, **kept}, **keeping)


class AdamW(_Optimizer):
    """AdamW with 16-bit weights (arXiv 1711.05101), arguments as in `torch.optim.AdamW`.

    `master`: "exact" (the default) keeps each 16-bit weight and the 16 bits it lacks of fp32, "fp32" a
    separate fp32 copy with the same numbers, "stochastic" rounds the bf16 weight at random and keeps nothing,
    None rounds it to nearest. `state_dtype`: "fp32" (the default), "bf16" or "8bit" moments (where rows are
    shorter than 16, as in vectors, "8bit" keeps bf16: exponents would take as much). `seed` keys the random
    rounding. `release_gradients`, `accumulate` and `backend` as in `OnePassOptimizer`.
    `bias_correction=False` takes the moments as they are, small in the first steps; groups may differ in it.
    `amsgrad=True` runs in plain torch, several times slower, with fp32 states. Of torch's arguments about how
    a step runs, `foreach`, `fused` and `capturable` are taken and change nothing: one fused pass does it.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        **options: Unpack[Keeping],
    ) -> None:
        own = _adam(lr, betas, eps, weight_decay, amsgrad, bias_correction)
        super().__init__(params, {**own, "decoupled_weight_decay": True}, **options)

    def algorithm(self, group: Mapping[str, Any]) -> Algorithm:
        """Decoupled weight decay."""
        return algorithms.ADAMW_AMSGRAD if group["amsgrad"] else algorithms.ADAMW


class Adam(_Optimizer):
    """Adam (arXiv 1412.6980), arguments as in `torch.optim.Adam`: weight decay is added to the gradient."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Keeping],
    ) -> None:
        own = _adam(lr, betas, eps, weight_decay, amsgrad, bias_correction)
        super().__init__(params, {**own, "decoupled_weight_decay": decoupled_weight_decay}, **options)

    def algorithm(self, group: Mapping[str, Any]) -> Algorithm:
        """L2 weight decay, unless the group says `decoupled_weight_decay`."""
        if group["decoupled_weight_decay"]:
            return algorithms.ADAMW_AMSGRAD if group["amsgrad"] else algorithms.ADAMW
        return algorithms.ADAM_AMSGRAD if group["amsgrad"] else algorithms.ADAM


def _adam(
    lr: float | Tensor,
    betas: tuple[float | Tensor, float | Tensor],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    bias_correction: bool,
) -> dict[str, Any]:
    """The defaults that AdamW and Adam share."""
    if not isinstance(bias_correction, bool):
        raise ConfigError(f"bias_correction={bias_correction!r}: expected True or False")
    return {
        "lr": lr,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        "amsgrad": amsgrad,
        "bias_correction": bias_correction,
    }


class SGD(_Optimizer):
    """SGD with momentum and Nesterov, as in `torch.optim.SGD`; the options are those of `AdamW`."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[Keeping],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, **options)

    def algorithm(self, group: Mapping[str, Any]) -> Algorithm:
        """Without momentum, with it, or Nesterov's."""
        if group["momentum"] == 0:
            return algorithms.SGD
        return algorithms.SGD_NESTEROV if group["nesterov"] else algorithms.SGD_MOMENTUM


class Lion(_Optimizer):
    """Lion (arXiv 2302.06675): the sign of an interpolated momentum; defaults of the paper's authors.

    The options are those of `AdamW`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[Keeping],
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, **options)

    def algorithm(self, group: Mapping[str, Any]) -> Algorithm:
        """Sign descent."""
        return algorithms.LION
