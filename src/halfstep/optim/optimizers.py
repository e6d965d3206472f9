"""The optimizers that users build: torch's arguments, and how weights and states are kept.

Each is a subclass of `OnePassOptimizer` that gives an algorithm and its arguments, nothing else.
"""

from collections.abc import Mapping
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.optim import algorithms
from halfstep.optim.algorithms import Algorithm
from halfstep.optim.base import OnePassOptimizer


class Keeping(TypedDict, total=False):
    """The options that every optimizer here takes beside its algorithm's.

    Args:
        maximize: True ascends instead of descending, as in torch.
        master: "exact" (the default) keeps each 16-bit weight and the 16 low-order bits that it drops of
            fp32; "fp32" keeps a separate fp32 copy with the same numbers; "stochastic" rounds a bf16 weight
            at random and keeps nothing; None rounds it to nearest.
        state_dtype: of the moments: "fp32" (the default), "bf16" (torch's dtypes of the two as well) or
            "8bit". Where rows are shorter than 16, as in vectors, "8bit" keeps bf16, which takes no more.
        clip_norm: clip the gradients of a bare `step()` to this total norm, over all groups; None does not.
        skip_nonfinite: True takes no step where a gradient is inf or NaN.
        release_gradients: True updates each parameter during backward and frees its gradient.
        accumulate: "fp32" adds up the gradients of micro-batches in fp32; None in the weights' own dtype.
        seed: keys all random rounding.
        backend: "auto" runs Numba kernels on a CPU, Triton kernels on CUDA and plain torch elsewhere;
            "reference" runs plain torch everywhere; "triton" insists on Triton.
        differentiable: True is refused: a step is no part of a graph.
    """

    maximize: bool
    master: str | None
    state_dtype: str | torch.dtype
    clip_norm: float | None
    skip_nonfinite: bool
    release_gradients: bool
    accumulate: str | None
    seed: int
    backend: str
    differentiable: bool


class Adam(OnePassOptimizer):
    """Adam (arXiv 1412.6980), arguments as in `torch.optim.Adam`: weight decay is added to the gradient.

    Args:
        params: parameters or parameter groups; a group may have its own `master` and `state_dtype`.
        lr: the learning rate.
        betas: the decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: the factor of the weight that is added to its gradient.
        amsgrad: True keeps the largest second moment; runs in plain torch, several times slower, with fp32
            states.
        bias_correction: False takes the moments as they are, small in the first steps; groups may differ.
        decoupled_weight_decay: True makes it AdamW.
    """

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
        if not isinstance(bias_correction, bool):
            raise ConfigError(f"bias_correction={bias_correction!r}: expected True or False")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        defaults |= {"bias_correction": bias_correction, "decoupled_weight_decay": decoupled_weight_decay}
        super().__init__(params, defaults, **options)

    def algorithm(self, group: Mapping[str, Any]) -> Algorithm:
        """L2 weight decay, unless the group says `decoupled_weight_decay`."""
        if group["decoupled_weight_decay"]:
            return algorithms.ADAMW_AMSGRAD if group["amsgrad"] else algorithms.ADAMW
        return algorithms.ADAM_AMSGRAD if group["amsgrad"] else algorithms.ADAM


class AdamW(Adam):
    """AdamW with 16-bit weights (arXiv 1711.05101), arguments as in `torch.optim.AdamW`.

    Args:
        params: parameters or parameter groups; a group may have its own `master` and `state_dtype`.
        lr: the learning rate.
        betas: the decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: multiplied by the learning rate, the share of a weight that each step takes away.
        amsgrad: True keeps the largest second moment; runs in plain torch, several times slower, with fp32
            states.
        bias_correction: False takes the moments as they are, small in the first steps; groups may differ.

    The state of an Adam is loaded as torch's AdamW loads it: its numbers, and weight decay stays decoupled.
    """

    _fixed_options = frozenset({"decoupled_weight_decay"})

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
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad,
            bias_correction=bias_correction, decoupled_weight_decay=True, **options,
        )  # fmt: skip


class SGD(OnePassOptimizer):
    """SGD with momentum and Nesterov, as in `torch.optim.SGD`.

    Args:
        params: parameters or parameter groups; a group may have its own `master` and `state_dtype`.
        lr: the learning rate.
        momentum: the factor of the momentum; 0 keeps none.
        dampening: the share of a gradient that the momentum leaves out.
        weight_decay: the factor of the weight that is added to its gradient.
        nesterov: True looks ahead along the momentum.
    """

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
        rates = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {**rates, "nesterov": nesterov}, **options)

    def algorithm(self, group: Mapping[str, Any]) -> Algorithm:
        """Without momentum, with it, or Nesterov's."""
        if group["momentum"] == 0:
            return algorithms.SGD
        return algorithms.SGD_NESTEROV if group["nesterov"] else algorithms.SGD_MOMENTUM


class Lion(OnePassOptimizer):
    """Lion (arXiv 2302.06675): the sign of an interpolated momentum; defaults of the paper's authors.

    Args:
        params: parameters or parameter groups; a group may have its own `master` and `state_dtype`.
        lr: the learning rate, the size of every update.
        betas: the weights of the momentum in the update, and in the momentum that is kept.
        weight_decay: multiplied by the learning rate, the share of a weight that each step takes away.
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
