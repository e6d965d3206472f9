"""What runs a script that does not use halfstep in 16 bits, inside the script's own process.

The outermost call of a module with fp32 weights runs in `hs.autocast` and gives fp32 outputs; a region of
the script's own goes first. In fp16 each backward pass is scaled, and the scale is divided out of every
gradient before it is accumulated, so that the script sees true gradients; a GradScaler of the script's own
goes first. What cannot be tried so is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep.casting.context import autocast
from halfstep.doctor.process import StopScript, replace
from halfstep.formats import dtype_name
from halfstep.policy.levels import LOW_DTYPES
from halfstep.torch_private import pytree
from halfstep.trees import all_finite, cast_floats, gradients_of, parameters_of
from halfstep.tuning.engine import FirstStep

#: Where the loss scale of fp16 begins: small runs lose no step to it.
SCALE = 1024.0

#: Functions of torch that change gradients between backward and step.
CLIPPING = ("clip_grad_norm_", "clip_grad_value_")


class ForeignScript:
    """Puts a script's modules into a region of `dtype` (None: none), and hears its losses and steps.

    `stepped` is called after each step of the first optimizer that steps. `losses`: of each backward pass;
    `first`: the first step, without gradients where it was skipped; `refused`: why the script cannot be
    tried; `uses`: what of torch it uses that halfstep's lines take the place of.
    """

    def __init__(self, dtype: torch.dtype | None, stepped: Callable[[], None]) -> None:
        self.losses: list[Tensor] = []
        self.first = FirstStep()
        self.refused: str | None = None
        self.skipped = 0
        self.uses: set[str] = set()
        self.modules: WeakSet[nn.Module] = WeakSet()
        self.optimizers: list[torch.optim.Optimizer] = []
        self._dtype, self._stepped = dtype, stepped
        self._scale = SCALE if dtype is torch.float16 else None
        self._scalers: list[torch.amp.GradScaler] = []
        self._inside = self._in_backward = self._has_regions = False
        self._unscaled = WeakTensorKeyDictionary()
        self._stack = ExitStack()

    def install(self) -> None:
        """Begin; `close` undoes it."""
        stack = self._stack
        replace(stack, nn.Module, "__call__", self._on_call)
        replace(stack, torch.autograd, "backward", self._heard)
        replace(stack, torch.amp.GradScaler, "__init__", self._on_scaler)
        replace(stack, torch.optim.Optimizer, "add_param_group", self._on_added_group)
        for name in CLIPPING:
            replace(stack, nn.utils, name, self._on_clip)
            replace(stack, nn.utils.clip_grad, name, self._on_clip)
        stack.callback(register_optimizer_step_pre_hook(self._before).remove)
        stack.callback(register_optimizer_step_post_hook(self._after).remove)

    def close(self) -> None:
        """Put everything back."""
        self._stack.close()
        for handle in self._unscaled.values():
            handle.remove()

    def resident(self) -> list[Tensor]:
        """Weights, buffers, gradients and optimizer states seen so far."""
        tensors: list[Any] = [t for m in self.modules for t in (*m.parameters(), *m.buffers())]
        for optimizer in self.optimizers:
            tensors += [*parameters_of(optimizer), *gradients_of(optimizer)]
            tensors += pytree.tree_leaves(list(optimizer.state.values()))
        return [t for t in tensors if isinstance(t, Tensor)]

    def _refuse(self, why: str) -> NoReturn:
        self.refused = why
        raise StopScript

    # --- forward -------------------------------------------------------------------------------------------

    def _on_call(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if self._inside or torch.compiler.is_compiling():
            return call(module, *args, **kwargs)
        weight = next(module.parameters(), None)
        if weight is None or not self._may_enter(weight):
            return call(module, *args, **kwargs)
        self.modules.add(module)
        self._inside = True
        try:
            if self._dtype is None:
                return call(module, *args, **kwargs)
            with autocast(weight.device.type, self._dtype):
                out = call(module, *args, **kwargs)
        finally:
            self._inside = False
        if self._scale is not None and not self._in_backward:
            self._unscale((*module.parameters(), *pytree.tree_leaves((args, kwargs))))
        return cast_floats(out, torch.float32)

    def _may_enter(self, weight: Tensor) -> bool:
        """Whether a call of a module with this weight runs in our region; some end the try."""
        if not isinstance(weight, nn.Parameter):
            self._refuse(
                "functional code: it calls a module with weights that are not the module's own "
                "(torch.func); call modules themselves to try it"
            )
        if weight.dtype in LOW_DTYPES:
            self._refuse(
                f"its weights are {dtype_name(weight.dtype)} already; keep them in fp32 to try it, or let "
                "halfstep doctor examine it as it is"
            )
        if torch.is_autocast_enabled(weight.device.type):
            self._has_regions = True
            return False
        return weight.dtype is torch.float32

    # --- backward ------------------------------------------------------------------------------------------

    def _on_scaler(
        self, create: Callable[..., None], scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any
    ) -> None:
        create(scaler, *args, **kwargs)
        if scaler.is_enabled():
            self.uses.add("GradScaler")
            self._scalers.append(scaler)
            self._scale = None

    def _heard(
        self, backward: Callable[..., None], tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        roots: list[Any] = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if self._in_backward or not all(isinstance(root, Tensor) for root in roots):
            return backward(tensors, grad_tensors, *args, **kwargs)
        script_scale = self._scalers[-1].get_scale() if self._scalers else 1.0
        self.losses += [root.detach() / script_scale for root in roots if root.numel() == 1]
        if self._scale is not None:
            tensors, grad_tensors = roots, _scale_roots(roots, grad_tensors, self._scale)
        self._in_backward = True
        try:
            return backward(tensors, grad_tensors, *args, **kwargs)
        finally:
            self._in_backward = False

    def _on_added_group(
        self, add: Callable[..., None], optimizer: torch.optim.Optimizer, group: dict[str, Any]
    ) -> None:
        add(optimizer, group)
        if self._scale is not None:
            self._unscale(optimizer.param_groups[-1]["params"])

    def _unscale(self, leaves: Sequence[Any]) -> None:
        """Have the scale divided out of the gradients of those that are leaves, once each."""
        for leaf in leaves:
            is_grad_leaf = isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf
            if is_grad_leaf and leaf not in self._unscaled:
                self._unscaled[leaf] = leaf.register_hook(self._divide_by_scale)

    def _divide_by_scale(self, gradient: Tensor) -> Tensor:
        return gradient / self._scale if self._in_backward and self._scale is not None else gradient

    def _on_clip(self, clip: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.uses.add(clip.__name__)
        return clip(*args, **kwargs)

    # --- steps ---------------------------------------------------------------------------------------------

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if any(callable(value) for value in (*args[1:], *kwargs.values())):
            self._refuse(
                f"it steps {type(optimizer).__name__} with a closure, which runs backward inside the step; "
                "call backward and then step() to try it"
            )
        if not self.modules and self._has_regions:
            self._refuse(
                "every module is called in an autocast region of the script's own, which goes first; leave "
                "that out to try it"
            )
        if not self.modules:
            self._refuse("functional code: no module with parameters is called before the first step")
        takes_step = self._scale is None or bool(all_finite(gradients_of(optimizer)))
        if all(optimizer is not other for other in self.optimizers):
            self.optimizers.append(optimizer)
            if len(self.optimizers) == 1 and takes_step:
                self.first.keep(optimizer)
            elif len(self.optimizers) > 1:
                self.uses.add("several optimizers")
        if not takes_step:
            self._skip(optimizer)

    def _skip(self, optimizer: torch.optim.Optimizer) -> None:
        """Without gradients torch's optimizers leave weights and states as they are."""
        assert self._scale is not None
        self.skipped += 1
        self._scale /= 2
        for parameter in parameters_of(optimizer):
            parameter.grad = None

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if optimizer is self.optimizers[0]:
            self._stepped()


def _scale_roots(roots: Sequence[Tensor], gradients: Any, scale: float) -> list[Tensor | None]:
    """Return what backward begins with, times the scale; None for a root that needs a gradient given."""
    grads = [gradients] if gradients is None or isinstance(gradients, Tensor) else gradients
    grads = [None] * len(roots) if gradients is None else grads
    return [
        (torch.full_like(root, scale) if root.numel() == 1 else None)
        if gradient is None
        else gradient * scale
        for root, gradient in zip(roots, grads, strict=True)
    ]
