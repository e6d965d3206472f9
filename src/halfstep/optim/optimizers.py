"""The public optimizers: torch's argument names and defaults, plus how weights and states are kept."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.optim import algorithms
from halfstep.optim.algorithms import Algorithm
from halfstep.optim.base import OnePassOptimizer


class AdamW(OnePassOptimizer):
    """AdamW with 16-bit weights (arXiv 1711.05101), arguments as in `torch.optim.AdamW`.

    `master`: "exact" keeps each 16-bit weight and the 16 bits it lacks of fp32, "fp32" a separate fp32 copy
    with the same numbers, "stochastic" rounds the bf16 weight at random and keeps nothing, None rounds it to
    nearest. `state_dtype`: "fp32", "bf16" or "8bit" moments. `seed` keys the random rounding.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        master: str | None = "exact",
        state_dtype: str = "fp32",
        **keeping: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "master": master,
            "state_dtype": state_dtype,
        }
        super().__init__(params, defaults, **keeping)

    def algorithm(self, group: Mapping[str, Any]) -> Algorithm:
        """Decoupled weight decay."""
        return algorithms.ADAMW


class Adam(AdamW):
    """Adam (arXiv 1412.6980), arguments as in `torch.optim.Adam`: weight decay is added to the gradient."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **options)

    def algorithm(self, group: Mapping[str, Any]) -> Algorithm:
        """L2 weight decay."""
        return algorithms.ADAM


class SGD(OnePassOptimizer):
    """SGD with momentum and Nesterov, as in `torch.optim.SGD`; `master` and `state_dtype` as in AdamW."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        master: str | None = "exact",
        state_dtype: str = "fp32",
        **keeping: Any,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ConfigError("nesterov=True needs momentum > 0 and dampening 0")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "master": master,
            "state_dtype": state_dtype,
        }
        super().__init__(params, defaults, **keeping)

    def algorithm(self, group: Mapping[str, Any]) -> Algorithm:
        """Without momentum, with it, or Nesterov's."""
        if group["momentum"] == 0:
            return algorithms.SGD
        return algorithms.SGD_NESTEROV if group["nesterov"] else algorithms.SGD_MOMENTUM


class Lion(OnePassOptimizer):
    """Lion (arXiv 2302.06675): the sign of an interpolated momentum; defaults of the paper's authors."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        master: str | None = "exact",
        state_dtype: str = "fp32",
        **keeping: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "master": master,
            "state_dtype": state_dtype,
        }
        super().__init__(params, defaults, **keeping)

    def algorithm(self, group: Mapping[str, Any]) -> Algorithm:
        """Sign descent."""
        return algorithms.LION
