"""`apex.fp16_utils`: FP16_Optimizer around any torch optimizer, and what a loop written by hand needs.

Each function does what its name says in Apex; `hs.prepare` does all of it at once, and `hs.convert` casts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.compat.apex._state import LossScaler as AmpScaler
from halfstep.convert.conversion import convert
from halfstep.convert.hooks import CastInputs, HookSwitch
from halfstep.distributed import all_ranks
from halfstep.errors import CheckpointError, UnsupportedError, show
from halfstep.optim import MasterWeights
from halfstep.optim.masters import weight_of
from halfstep.policy.plan import Plan, PlanRule
from halfstep.scaling.loss_scale import DynamicLossScale, LossScale, StaticLossScale
from halfstep.torch_private import BatchNorm
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


clip_grad_norm = torch.nn.utils.clip_grad_norm_


def network_to_half(network: nn.Module) -> nn.Module:
    """Make a model fp16 except for its batch norms; its inputs are cast. Returns the same module."""
    half, why = torch.float16, "batch norm stays fp32"
    rules = (
        PlanRule("**", dtype=half, reason="network_to_half"),
        PlanRule("type:_BatchNorm", dtype=torch.float32, reason=why, required=False, output=half),
    )
    convert(network, Plan(rules), half)
    network.register_forward_pre_hook(CastInputs(HookSwitch(), half), with_kwargs=True)
    return network


def _of_inner(name: str, says: str) -> Any:
    """An attribute of the optimizer inside, read and set there."""

    def set_inside(self: Any, value: Any) -> None:
        setattr(self.optimizer, name, value)

    return property(lambda self: getattr(self.optimizer, name), set_inside, doc=says)


def _flatten(groups: str) -> Any:
    """Lists by group in one list."""
    return property(
        lambda self: [p for group in getattr(self, groups) for p in group], doc=f"`{groups}` in one."
    )


class FP16_Optimizer:
    """Masters and loss scale around an optimizer of a model that already is fp16, as in Apex.

    `optimizer.backward(loss)` takes the place of `loss.backward()`; `step()` is a no-op after an overflow,
    which `overflow` tells. `param_groups` and `state` are the inner optimizer's; `revert()` gives it back.
    A weight and its master share one gradient, which is unscaled by the time `backward` is over.

    Args:
        init_optimizer: any torch optimizer that `MasterWeights` takes.
        static_loss_scale: the scale, where it is not dynamic.
        dynamic_loss_scale: grow and back off instead.
        dynamic_loss_args: `init_scale` (2^16), `scale_factor` (2), `scale_window` (2000), `min_loss_scale`,
            `max_loss_scale` (2^24) of the dynamic scale.
        verbose: print skipped steps.
    """

    clip_grad_norm = staticmethod(clip_grad_norm)

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.optimizer, self.verbose, self.overflow = init_optimizer, verbose, False
        self.loss_scaler = (
            AmpScaler("dynamic", **(dynamic_loss_args or {}))
            if dynamic_loss_scale
            else AmpScaler(static_loss_scale)
        )
        self.masters = MasterWeights(init_optimizer)
        self.first_closure_call_this_step = True
        self._scaled = False

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the scale grows and backs off."""
        return self.loss_scaler.dynamic

    @property
    def loss_scale(self) -> float:
        """The present loss scale; may be set."""
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.set(value)

    param_groups = _of_inner(
        "param_groups", "The inner optimizer's groups, which hold the masters; may be set."
    )
    state = _of_inner("state", "The inner optimizer's state; may be set.")

    def _groups(self, with_master: bool) -> list[list[Tensor]]:
        master_ids = {id(master) for _, master in self.masters.pairs()}
        return [[p for p in g["params"] if (id(p) in master_ids) == with_master] for g in self.param_groups]

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The 16-bit weights of each group."""
        return [[weight_of(p) for p in group] for group in self.fp32_from_fp16_groups]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """The masters of each group, in the order of `fp16_groups`."""
        return self._groups(True)

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The parameters of each group that are fp32 themselves and get gradients."""
        return [[p for p in group if p.requires_grad] for group in self._groups(False)]

    all_fp16_params = _flatten("fp16_groups")
    all_fp32_from_fp16_params = _flatten("fp32_from_fp16_groups")
    all_fp32_from_fp32_params = _flatten("fp32_from_fp32_groups")

    def maybe_print(self, msg: str) -> None:
        """Print, where verbose."""
        if self.verbose:
            print(msg)

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Clear the gradients of masters and weights: to zero, or to None."""
        self.optimizer.zero_grad(set_to_none=set_grads_to_None)
        self._scaled = False

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Scale the loss and run backward. With `update_master_grads=False` the gradients stay scaled."""
        if not self._scaled:
            # Gradients of earlier losses are unscaled already; bring them to the scale of the coming ones.
            self.masters.copy_grads(inv_scale=self.loss_scale)
        self.loss_scaler.value.scale(loss.float()).backward(retain_graph=retain_graph)
        self._scaled = True
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Check the gradients, unscale them in fp32 unless one is not finite, and adjust the scale."""
        if not self._scaled:
            return
        grads = self.masters.copy_grads()
        self.overflow = self.dynamic_loss_scale and bool(all_ranks(~all_finite(grads)))
        if not self.overflow:
            home = grads[0].device if grads else None
            self.masters.copy_grads(inv_scale=self.loss_scaler.value.inverse(home))
        self._scaled = False
        self.loss_scaler.update(self.overflow)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """The unscaled fp32 gradients, a list for each group; None, with a word, after an overflow."""
        if self.overflow:
            print(
                "FP16_Optimizer overflowed: its gradients are inf, NaN or stale, so there is None to inspect"
            )
            return None
        groups = [[p.grad for p in group["params"]] for group in self.param_groups]
        return [[None if grad is None else grad.detach() for grad in grads] for grads in groups]

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the unscaled gradients; their norm, or -1 after an overflow."""
        if self.overflow:
            return -1
        return self.clip_grad_norm(self.masters.params(), max_norm, norm_type)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the masters and round them into the weights, or skip after an overflow.

        A `closure` clears the gradients, computes the loss, calls `backward(loss)` here and returns the loss;
        it is called again while it overflows.
        """
        self.update_master_grads()
        if closure is not None:
            return self._step_with(closure)
        if self.overflow:
            self.maybe_print(f"Gradient overflow.  Skipping step, reducing loss scale to {self.loss_scale}")
            self.zero_grad(set_grads_to_None=True)
            return None
        return self.optimizer.step()

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        def closure_until_finite() -> Any:
            if not self.first_closure_call_this_step:
                self.masters.write_back()  # the optimizer may have moved the masters since the last call
            self.first_closure_call_this_step = False
            loss = closure()
            while self.overflow:
                self.maybe_print(f"OVERFLOW within closure!  Reducing loss scale to {self.loss_scale}")
                loss = closure()
            return loss

        try:
            return self.optimizer.step(closure_until_finite)
        finally:
            self.first_closure_call_this_step = True

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError("FP16_Optimizer should be serialized using state_dict(), and is not copied")

    def state_dict(self) -> dict[str, Any]:
        """Scale, flags, the inner optimizer's state, and the masters by group as `fp32_from_fp16`.

        The masters are the very tensors of the inner state's entry `masters`: a file holds them once.
        """
        inner = self.optimizer.state_dict()
        name_of = {id(master): name for name, master in self.masters.named()}
        return {
            "loss_scaler": self.loss_scaler.value.state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": inner,
            "fp32_from_fp16": [
                [inner["masters"][name_of[id(p)]] for p in group] for group in self.fp32_from_fp16_groups
            ],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`, ours or Apex's; load the model's before it.

        Raises:
            CheckpointError: masters of other parameters, or a scaler that is none; nothing is changed then.
        """
        scaler, dynamic = read_scaler(state_dict["loss_scaler"]), state_dict["dynamic_loss_scale"]
        inner = dict(state_dict["optimizer_state_dict"])
        if "fp32_from_fp16" in state_dict:
            names = {id(master): name for name, master in self.masters.named()}
            values = read_masters(state_dict["fp32_from_fp16"], self.fp32_from_fp16_groups)
            present = self.masters.state_dict() if len(values) < len(names) else {}
            inner["masters"] = {**present, **{names[id(p)]: saved for p, saved in values}}
        self.optimizer.load_state_dict(inner)
        if isinstance(scaler, LossScale):
            self.loss_scaler.value, self.loss_scaler.dynamic = scaler, dynamic
        else:
            if dynamic != self.dynamic_loss_scale:
                self.loss_scaler = AmpScaler("dynamic" if dynamic else scaler[0])
            self.loss_scaler.load(*scaler)
        self.overflow = state_dict["overflow"]

    def revert(self) -> None:
        """Take the masters off the inner optimizer."""
        self.masters.revert()


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
    """The trainable parameters of a model, and fp32 copies of them (one flat copy if asked) to train."""
    params = [p for p in model.parameters() if p.requires_grad]
    if not flat_master:
        return params, [nn.Parameter(p.detach().clone().float()) for p in params]
    master = nn.Parameter(torch.cat([p.detach().reshape(-1).float() for p in params]))
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


def read_scaler(saved: Any) -> LossScale | tuple[float, int]:
    """Our loss scale, or (scale, clean passes) of the object that Apex pickles.

    Raises:
        CheckpointError: what is neither.
    """
    if isinstance(saved, Mapping):
        return LossScale.from_state(saved)
    scale = getattr(saved, "_loss_scale", getattr(saved, "cur_scale", None))
    if scale is None:
        raise CheckpointError(f"loss_scaler={show(saved)} is no loss scaler, neither ours nor Apex's")
    return float(scale), int(getattr(saved, "_unskipped", 0))


def read_masters(saved: Any, groups: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Each master with its saved value, of `fp32_from_fp16`; Apex keeps none for what has no gradient.

    Raises:
        CheckpointError: other groups, numbers or shapes.
    """
    lists = isinstance(saved, list | tuple) and all(isinstance(group, list | tuple) for group in saved)
    if not lists or len(saved) != len(groups):
        raise CheckpointError(
            f"fp32_from_fp16={show(saved)}: expected a list of masters for each of {len(groups)} groups"
        )
    pairs: list[tuple[Tensor, Tensor]] = []
    for number, (values, masters) in enumerate(zip(saved, groups)):
        trained = [master for master in masters if master.requires_grad]
        mine = masters if len(values) == len(masters) else trained
        saved_shapes = [list(value.shape) for value in values]
        shapes = [list(master.shape) for master in mine]
        if saved_shapes != shapes:
            raise CheckpointError(
                f"fp32_from_fp16[{number}] has masters of shapes {show(saved_shapes)}, "
                f"the optimizer {show(shapes)}"
            )
        pairs += zip(mine, values)
    return pairs
