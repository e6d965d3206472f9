"""The hand-made mixed precision of `apex.fp16_utils`: cast a model, keep fp32 masters beside it, copy over.

Each function does what its name says in Apex; `hs.prepare` does all of it at once, and `hs.convert` casts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError
from halfstep.scaling.loss_scale import DynamicLossScale, LossScale, StaticLossScale
from halfstep.torch_private import BatchNorm
from halfstep.trees import all_finite

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]

clip_grad_norm = torch.nn.utils.clip_grad_norm_


class tofp16(nn.Module):
    """A module that casts its input to fp16."""

    def forward(self, input: Tensor) -> Tensor:
        """Any floating tensor."""
        return input.half()


def _is_affine_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, BatchNorm) and bool(module.affine)


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Make the affine batch norms inside fp32 again; returns the module."""
    for each in module.modules():
        if _is_affine_batch_norm(each):
            each.float()
    return module


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module's own floating parameters, their gradients and its buffers; not those of its parts."""
    for parameter in module.parameters(recurse=False):
        if parameter.is_floating_point():
            gradient = parameter.grad
            parameter.grad = None
            parameter.data = parameter.data.to(dtype)
            parameter.grad = None if gradient is None else gradient.to(dtype)
    for buffer in module.buffers(recurse=False):
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a network in place but for its affine batch norms; returns it."""
    for module in network.modules():
        if not _is_affine_batch_norm(module):
            convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


class FP16Model(nn.Module):
    """A network cast to fp16 but for its affine batch norms; its inputs are cast too."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Tensor) -> Any:
        """What the network gives for the inputs in fp16."""
        return self.network(*(t.half() for t in inputs))


def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trainable parameters of a model, and fp32 copies of them (one flat copy if asked) to train.

    Raises:
        ConfigError: `flat_master` of parameters of several dtypes, or of none.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    if not flat_master:
        return params, [nn.Parameter(p.detach().clone().float()) for p in params]
    dtypes = {str(p.dtype) for p in params}
    if len(dtypes) != 1:
        raise ConfigError(
            f"flat_master=True needs parameters of one dtype, got {', '.join(sorted(dtypes)) or 'none'}: "
            "use flat_master=False, or FP16_Optimizer"
        )
    master = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in params]).float())
    master.grad = torch.zeros_like(master)
    return params, [master]


def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the gradients of a model's parameters into those of their masters, in fp32."""
    if flat_master:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model_params]
        master_params[0].grad = torch.cat([g.reshape(-1) for g in grads]).float()
        return
    for param, master in zip(model_params, master_params, strict=True):
        master.grad = None if param.grad is None else param.grad.detach().to(master.dtype, copy=True)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Round the masters into the model's parameters."""
    masters: Sequence[Tensor] = master_params
    if flat_master:
        pieces = master_params[0].split([p.numel() for p in model_params])
        masters = [piece.view_as(p) for piece, p in zip(pieces, model_params, strict=True)]
    for param, master in zip(model_params, masters, strict=True):
        param.copy_(master)


def to_python_float(t: Any) -> float:
    """The one number of a tensor or sequence."""
    return t.item() if hasattr(t, "item") else t[0]


class LossScaler:
    """A constant loss scale for a loop written by hand."""

    def __init__(self, scale: float = 1) -> None:
        self.value: LossScale = StaticLossScale(float(scale))

    @property
    def loss_scale(self) -> float:
        """The present scale."""
        return self.value.read()

    def has_overflow(self, params: Any) -> bool:
        """Never looked for: the scale is constant."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Take in whether the gradients overflowed."""

    def scale_gradient(self, module: Any, grad_in: Sequence[Tensor], grad_out: Any) -> tuple[Tensor, ...]:
        """Gradients times the scale, as a backward hook."""
        return tuple(self.loss_scale * gradient for gradient in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Backward of the scaled loss."""
        self.value.scale(loss).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A loss scale that grows after `scale_window` clean updates and shrinks on overflow, never below 1."""

    def __init__(
        self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        super().__init__()
        first, factor = float(init_scale), float(scale_factor)
        self.value = DynamicLossScale(
            first, factor, 1 / factor, scale_window, min=1.0, max=max(first, 2.0**64)
        )

    def has_overflow(self, params: Any) -> bool:
        """Whether a gradient of these parameters holds inf or NaN."""
        return not bool(all_finite([p.grad for p in params if p.grad is not None]))

    def update_scale(self, overflow: bool) -> None:
        """Take in whether the gradients overflowed."""
        self.value = self.value.adjust(not overflow)
