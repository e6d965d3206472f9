"""`apex.fp16_utils`: FP16_Optimizer around any torch optimizer, and what a loop written by hand needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.compat.apex._fp16_util import (
    BN_convert_float,
    DynamicLossScaler,
    FP16Model,
    LossScaler,
    clip_grad_norm,
    convert_module,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    prep_param_lists,
    to_python_float,
    tofp16,
)
from halfstep.convert.conversion import convert
from halfstep.distributed import all_ranks
from halfstep.optim import MasterWeights
from halfstep.policy.plan import Plan, PlanRule
from halfstep.scaling.loss_scale import SMALLEST_SCALE, DynamicLossScale, LossScale, StaticLossScale
from halfstep.trees import all_finite

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]


def network_to_half(network: nn.Module) -> nn.Module:
    """Make a model fp16 except for its batch norms; its inputs are cast. Returns the same module."""
    rules = (
        PlanRule("**", dtype=torch.float16, reason="network_to_half"),
        PlanRule("type:_BatchNorm", dtype=torch.float32, reason="batch norm stays fp32", required=False),
    )
    convert(network, Plan(rules), torch.float16)
    return network


class FP16_Optimizer:
    """Masters and loss scale around an optimizer of a model that already is fp16, as in Apex.

    `optimizer.backward(loss)` takes the place of `loss.backward()`; `step()` is a no-op after an overflow,
    which `overflow` tells. `param_groups` and `state` are the inner optimizer's; `revert()` gives it back.

    Args:
        init_optimizer: any torch optimizer that `MasterWeights` takes.
        static_loss_scale: the scale, where it is not dynamic.
        dynamic_loss_scale: grow and back off instead.
        dynamic_loss_args: `init_scale`, `scale_factor`, `scale_window` of the dynamic scale.
        verbose: print skipped steps.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.optimizer, self.verbose, self.overflow = init_optimizer, verbose, False
        self.dynamic_loss_scale = dynamic_loss_scale
        args = {"init_scale": 2.0**16, "scale_factor": 2.0, "scale_window": 1000, **(dynamic_loss_args or {})}
        self.scale: LossScale = StaticLossScale(float(static_loss_scale))
        if dynamic_loss_scale:
            factor = float(args["scale_factor"])
            self.scale = DynamicLossScale(
                float(args["init_scale"]), factor, 1 / factor, int(args["scale_window"]), min=SMALLEST_SCALE
            )
        self.masters = MasterWeights(init_optimizer)
        self._scaled = False

    @property
    def loss_scale(self) -> float:
        """The present loss scale; may be set."""
        return self.scale.read()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        scale = self.scale
        self.scale = (
            scale.with_value(value) if isinstance(scale, DynamicLossScale) else StaticLossScale(value)
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups, which hold the masters."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """The inner optimizer's state."""
        return self.optimizer.state

    def zero_grad(self, set_grads_to_None: bool = True) -> None:
        """Clear the gradients of masters and weights."""
        self.optimizer.zero_grad(set_to_none=set_grads_to_None)
        self._scaled = False

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Scale the loss and run backward. With `update_master_grads=False` the gradients stay scaled."""
        if not self._scaled:
            # Gradients of earlier losses are unscaled already; bring them to the scale of the coming ones.
            self.masters.copy_grads(inv_scale=self.scale.read())
        self.scale.scale(loss.float()).backward(retain_graph=retain_graph)
        self._scaled = True
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Check the gradients, and unscale them in fp32 unless one is not finite."""
        if not self._scaled:
            return
        grads = self.masters.copy_grads()
        finite = all_finite(grads)
        self.overflow = bool(all_ranks(~finite)) if self.dynamic_loss_scale else False
        if not self.overflow:
            home = grads[0].device if grads else None
            self.masters.copy_grads(inv_scale=self.scale.inverse(home))
        self._scaled = False

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the unscaled gradients; their norm, or -1 after an overflow."""
        if self.overflow:
            return -1
        return nn.utils.clip_grad_norm_(self.masters.params(), max_norm, norm_type)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the masters and round them into the weights, or skip after an overflow."""
        self.update_master_grads()
        self.scale, before = self.scale.adjust(not self.overflow), self.scale
        if self.overflow:
            if self.verbose:
                print(f"OVERFLOW! Skipping step. Attempted loss scale: {before.read()}")
            self.zero_grad()
            return None
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        """Scale, flags and the inner optimizer's state with its masters, as plain values and tensors."""
        return {
            "loss_scaler": self.scale.state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "optimizer_state_dict": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`; load the model's before it."""
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self.scale = LossScale.from_state(state_dict["loss_scaler"])
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]

    def revert(self) -> None:
        """Take the masters off the inner optimizer."""
        self.masters.revert()
