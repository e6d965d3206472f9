"""Hooks that give a module other dtypes at its edges and inside: picklable, copied with the model, removable.

`conversion.py` decides where they go. They cast what goes in and out of a module, compute with its parameters
cast on the fly, and set the autocast region its ops run in.
"""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.casting.context import active_policy, autocast
from halfstep.errors import ConfigError
from halfstep.formats import parse_dtype
from halfstep.policy.levels import LOW_DTYPES
from halfstep.policy.ops import Rule
from halfstep.policy.policy import Policy
from halfstep.torch_private import (
    BatchNorm,
    Convolution,
    InstanceNorm,
    NormWithStatistics,
    flat_weights,
    hooks_of,
    never_compiled,
    pytree,
    set_flat_weights,
)
from halfstep.trees import cast_floats, compute_device, first_device, is_wide_float


class HookSwitch:
    """Whether the hooks of one conversion act. A copied model has its own, which stays as it was copied.

    `off_in_copies`: a deep copy is an fp32 model, whose hooks never act (`Conversion.widen_copies`).
    """

    def __init__(self) -> None:
        self.on = True
        self.off_in_copies = False

    def __deepcopy__(self, memo: dict[int, Any]) -> HookSwitch:
        twin = HookSwitch()
        twin.on = self.on and not self.off_in_copies
        return twin


class CastInputs:
    """Forward pre-hook (with kwargs): floating inputs to `dtype`."""

    def __init__(self, power: HookSwitch, dtype: torch.dtype) -> None:
        self.power, self.dtype = power, dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments to call the module with."""
        return (cast_floats(args, self.dtype), cast_floats(kwargs, self.dtype)) if self.power.on else None


class CastOutputs:
    """Forward hook: floating outputs to `dtype`.

    `regions`: True casts only in regions, where the ops that follow cast too, False only outside of them.
    """

    def __init__(self, power: HookSwitch, dtype: torch.dtype, regions: bool | None = None) -> None:
        self.power, self.dtype, self.regions = power, dtype, regions

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output in place of the module's own."""
        if not self.power.on or (
            self.regions is not None
            and torch.is_autocast_enabled(first_device((output, args))) != self.regions
        ):
            return None
        return cast_floats(output, self.dtype)


class CastToWeight:
    """Forward pre-hook of a module whose kernel takes its input in its weights' 16-bit dtype, and no other.

    In a region the op's rule casts; outside of one this does, so that a model in 16 bits runs there too.
    """

    def __init__(self, power: HookSwitch, dtype: torch.dtype) -> None:
        self.power, self.dtype = power, dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments to call the module with, None where they stay as they are."""
        for value in (*args, *kwargs.values()):
            for t in value if isinstance(value, tuple) else (value,):
                if isinstance(t, Tensor) and t.dtype is not self.dtype and is_wide_float(t):
                    if not self.power.on or torch.is_autocast_enabled(t.device.type):
                        return None
                    return cast_floats(args, self.dtype), cast_floats(kwargs, self.dtype)
        return None


WITH_KERNELS = (
    *(nn.Linear, nn.Bilinear, Convolution, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention),
    *(nn.PReLU, nn.EmbeddingBag, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, NormWithStatistics),
)
"""Modules of torch whose kernels want weights and inputs of one dtype."""
FP32_OUT_OPS = (
    *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "einsum"),
    *("chain_matmul", "linalg_multi_dot"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
)
"""The products whose results are never rounded where a plan says `output="fp32"`."""


class ForwardHooks:
    """A pair of hooks around a module's forward, with what is open in between, by thread.

    Compiled code breaks at both, and compiles what is between them.
    """

    def __init__(self, power: HookSwitch) -> None:
        self.power = power
        self._open: dict[int, list[ExitStack]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": {}}

    def attach(self, module: nn.Module, first: bool = False) -> list[Any]:
        """Register both hooks, that of entry before all others if `first`; returns their handles."""
        return [
            module.register_forward_pre_hook(self.enter, prepend=first, with_kwargs=True),
            module.register_forward_hook(self.leave, always_call=True),
        ]

    def open_scopes(self) -> ExitStack:
        """Return what `leave` closes."""
        stack = ExitStack()
        self._open.setdefault(threading.get_ident(), []).append(stack)
        return stack

    @never_compiled
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Forward pre-hook."""
        raise NotImplementedError

    @never_compiled
    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook, also after an exception."""
        stacks = self._open.get(threading.get_ident())
        if stacks:
            stacks.pop().close()


class ComputeIn(ForwardHooks):
    """The dtype that a module computes in, whatever surrounds it.

    `dtype`: inputs, outputs and, for this call, the module's own parameters and buffers are cast to it, and
    autocast is off inside; None takes the dtype of the first floating input. With `ops` alone only the op
    rules of a surrounding autocast region change; `outside` is the policy that they edit where there is none.
    """

    def __init__(
        self,
        power: HookSwitch,
        dtype: torch.dtype | None = None,
        ops: Mapping[str, Rule] | None = None,
        edge: bool = True,
        outside: Policy | None = None,
    ) -> None:
        super().__init__(power)
        self.dtype, self.ops, self.edge, self.outside = dtype, dict(ops or {}), edge, outside

    @never_compiled
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Forward pre-hook."""
        stack = self.open_scopes()
        if not self.power.on:
            return None
        if self.ops:
            device_type = first_device((args, kwargs, *module.parameters(recurse=False)))
            stack.enter_context(_region_with_edits(device_type, self.ops, self.outside))
            return None
        dtype = self.dtype or _dtype_of(args, kwargs)
        if dtype is None:
            return None
        if self.edge:
            stack.enter_context(_region(first_device((args, *module.parameters(recurse=False))), dtype))
        stack.callback(_cast_own(module, dtype))
        return cast_floats(args, dtype), cast_floats(kwargs, dtype)

    @never_compiled
    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook, also after an exception."""
        super().leave(module, args, output)
        dtype = self.dtype if self.power.on and not self.ops else None
        return None if dtype is None or output is None else cast_floats(output, dtype)


class RunInAutocast(ForwardHooks):
    """Runs a module's forward in an autocast region of the device that the module is on then."""

    def __init__(self, power: HookSwitch, policy: Policy) -> None:
        super().__init__(power)
        self.policy = policy

    @never_compiled
    def enter(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Forward pre-hook."""
        stack = self.open_scopes()
        if self.power.on:
            stack.enter_context(autocast(compute_device(module.parameters()).type, policy=self.policy))


def _region(device_type: str, dtype: torch.dtype) -> autocast:
    """Return the region inside: off, or in 16 bits one that lifts nothing; slow dtypes run as in autocast."""
    if dtype not in LOW_DTYPES:
        return autocast(device_type, enabled=False)
    return autocast(device_type, policy=Policy(compute_dtype=dtype, table="low"))


def _region_with_edits(
    device_type: str, ops: Mapping[str, Rule], outside: Policy | None
) -> AbstractContextManager[Any]:
    policy = active_policy(device_type)
    if policy is None and not torch.is_autocast_enabled(device_type):
        policy = outside
    if policy is None:
        return ExitStack()
    words = {rule.value: [name for name, edit in ops.items() if edit is rule] for rule in Rule}
    return autocast(device_type, policy=policy.with_rules(**words))


def _dtype_of(args: Any, kwargs: Any) -> torch.dtype | None:
    floats = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_wide_float(leaf)]
    return floats[0].dtype if floats else None


def _not_in(dtype: torch.dtype, store: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {k: t for k, t in store.items() if t is not None and is_wide_float(t) and t.dtype != dtype}


def _cast_own(module: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Put cast stand-ins in the place of the module's own parameters and buffers; returns what undoes it."""
    if keeps_fp32(module, dtype):
        return lambda: None
    parameters = _not_in(dtype, module._parameters)
    buffers = _not_in(dtype, module._buffers)
    flat = flat_weights(module)
    stand_ins = {k: t.to(dtype) for k, t in (*parameters.items(), *buffers.items())}
    versions = {k: stand_ins[k]._version for k in buffers}
    for key in parameters:
        module._parameters[key] = cast(Any, stand_ins[key])
    for key in buffers:
        module._buffers[key] = stand_ins[key]
    if flat is not None:
        set_flat_weights(module, [stand_ins.get(name, weight) for name, weight in zip(*flat)])

    def undo() -> None:
        module._parameters.update(cast(dict[str, Any], parameters))
        for key, buffer in buffers.items():
            if stand_ins[key]._version != versions[key]:
                with torch.no_grad():
                    buffer.copy_(stand_ins[key])
            module._buffers[key] = buffer
        if flat is not None:
            set_flat_weights(module, flat[1])

    return undo


_NORMS: Mapping[Any, str] = {
    nn.LayerNorm.forward: "layer_norm",
    nn.GroupNorm.forward: "group_norm",
    BatchNorm.forward: "batch_norm",
    InstanceNorm.forward: "instance_norm",
}


def keeps_fp32(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether this is a torch norm that takes `dtype` in and gives it out with fp32 weights and statistics.

    Such a module needs no casts around it. Asked of the device, by one small forward and backward; RMSNorm
    is not among them, since mixed dtypes take it off its fused kernel.
    """
    kind = _NORMS.get(type(module).forward)
    tensors = [
        *module.parameters(recurse=False),
        *(b for b in module.buffers(recurse=False) if is_wide_float(b)),
    ]
    if kind is None or not tensors or any(t.dtype != torch.float32 for t in tensors):
        return False
    device = tensors[0].device.type
    return dtype in LOW_DTYPES and (device == "meta" or _takes_mixed(kind, device, dtype))


@functools.lru_cache(maxsize=64)
def _takes_mixed(kind: str, device: str, dtype: torch.dtype) -> bool:
    with warnings.catch_warnings(), torch.enable_grad(), torch.inference_mode(False):
        warnings.simplefilter("error")
        x = torch.ones(2, 4, 3, device=device, dtype=dtype, requires_grad=True)
        size = 3 if kind == "layer_norm" else 4
        weight, bias, mean, var = (torch.ones(size, device=device, requires_grad=i < 2) for i in range(4))
        calls: dict[str, Callable[[], Tensor]] = {
            "layer_norm": lambda: F.layer_norm(x, (3,), weight, bias),
            "group_norm": lambda: F.group_norm(x, 2, weight, bias),
            "batch_norm": lambda: F.batch_norm(x, mean, var, weight, bias, training=True),
            "instance_norm": lambda: F.instance_norm(x, mean, var, weight, bias),
        }
        try:
            with autocast(device, enabled=False):
                y = calls[kind]()
            y.sum().backward()
        except (RuntimeError, Warning):
            return False
        return y.dtype == dtype


# ---- a module in a dtype of its own ----------------------------------------------------------------------


def to_float(module: nn.Module, dtype: str | torch.dtype | None, *, keep_parts: bool = False) -> nn.Module:
    """Make a module and all in it compute in `dtype`, as MindSpore's `Cell.to_float`; returns the module.

    Floating inputs are cast to it, parameters and buffers are cast in use and stay stored as they are,
    outputs are in it, and autocast does not reach inside. The last call wins, for a module and for all below
    it; None takes it off again. `convert` leaves such modules alone. With `keep_parts` the outputs of a
    module whose parts were given another dtype later are left as they come, as MindSpore does.
    """
    if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"to_float takes a torch.nn.Module, not {type(module).__name__}")
    chosen = None if dtype is None else parse_dtype(dtype)
    for each in module.modules():
        hook_dicts = hooks_of(each)
        hooks = ((k, getattr(hook, "__self__", None)) for some in hook_dicts[:2] for k, hook in some.items())
        ours = [k for k, owner in hooks if isinstance(owner, _ToFloat)]
        for registered, key in itertools.product(hook_dicts, ours):
            registered.pop(key, None)
        if chosen is not None:
            caster = _ToFloat(HookSwitch(), chosen)
            caster.keep_parts = keep_parts
            caster.attach(each)
    return module


class _ToFloat(ComputeIn):
    """What `to_float` hangs on a module."""

    keep_parts = False

    @never_compiled
    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """As `ComputeIn`; see `to_float` for `keep_parts`."""
        cast_output = super().leave(module, args, output)
        if not self.keep_parts:
            return cast_output
        others = (own_dtype(each) for each in module.modules())
        return None if any(dtype not in (None, self.dtype) for dtype in others) else cast_output


def own_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype that `to_float` gave a module, or None."""
    for hook in hooks_of(module)[0].values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, _ToFloat):
            return owner.dtype
    return None


# ---- deep copies -----------------------------------------------------------------------------------------
# An average or a target network is made by copying the model. A copy in 16 bits would stand still where each
# change is smaller than half a unit in its last place (weights averaged at decay 0.9999).


#: The exact values by 16-bit tensor, as far as there are any.
Exact = Callable[[], Mapping[Tensor, Tensor]]


class WideCopies:
    """A hook that does no work in forward; copied with a module, it widens the copy.

    It is registered for the end of `load_state_dict`, where it does nothing. In a copy, and after pickling,
    it is empty.
    """

    def __init__(
        self,
        power: HookSwitch | None = None,
        tensors: Sequence[tuple[Tensor, torch.dtype]] = (),
        exact: Exact | None = None,
    ) -> None:
        self.power, self._tensors, self._exact = power, tensors, exact

    def __call__(self, module: nn.Module, keys: Any) -> None:
        """Do nothing; torch calls it at the end of `load_state_dict`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> WideCopies:
        if self.power is not None and self.power.on:
            self._widen(memo)
        return WideCopies()

    def __reduce__(self) -> tuple[type[WideCopies], tuple[()]]:
        return WideCopies, ()

    def _widen(self, memo: dict[int, Any]) -> None:
        """Put the wide twin of every tensor where `copy.deepcopy` looks for copies made before."""
        exact = {} if self._exact is None else self._exact()
        for tensor, dtype in self._tensors:
            wide = exact[tensor].clone() if tensor in exact else tensor.detach().to(dtype)
            twin = memo.get(id(tensor))
            if twin is not None:
                twin.data = wide
            elif isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = nn.Parameter(wide, requires_grad=tensor.requires_grad)
            else:
                memo[id(tensor)] = wide
