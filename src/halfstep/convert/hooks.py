"""Hooks that give a module other dtypes at its edges and inside: picklable, copied with the model, removable.

`conversion.py` decides where they go. They cast what goes in and out of a module, compute with its parameters
cast on the fly, and set the autocast region its ops run in.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Never, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.casting.context import active_policy, autocast
from halfstep.policy.levels import LOW_DTYPES
from halfstep.policy.ops import Rule
from halfstep.policy.policy import Policy
from halfstep.torch_private import BatchNorm, InstanceNorm, flat_weights, pytree, set_flat_weights
from halfstep.trees import cast_floats, is_wide_float


class Power:
    """Whether the hooks of one conversion act. A copied model has its own, which stays as it was copied.

    `off_in_copies`: a deep copy is an fp32 model, whose hooks never act (`copies.py`).
    """

    def __init__(self) -> None:
        self.on = True
        self.off_in_copies = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Power:
        twin = Power()
        twin.on = self.on and not self.off_in_copies
        return twin


class Hook:
    """Base of what is hung on a model, for `torch.jit.script`, which reads the name of each hook."""

    def __getattr__(self, name: str) -> Never:
        scripted = (
            "torch.jit.script cannot compile a prepared model, whose hooks cast what goes in and out: "
            "script it after amp.revert(), or use torch.export or torch.compile"
        )
        raise AttributeError(scripted if name == "__name__" else name)


class CastInputs(Hook):
    """Forward pre-hook (with kwargs): floating inputs to `dtype`."""

    def __init__(self, power: Power, dtype: torch.dtype) -> None:
        self.power, self.dtype = power, dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments to call the module with."""
        return (cast_floats(args, self.dtype), cast_floats(kwargs, self.dtype)) if self.power.on else None


class CastOutputs(Hook):
    """Forward hook: floating outputs to `dtype`."""

    def __init__(self, power: Power, dtype: torch.dtype) -> None:
        self.power, self.dtype = power, dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output in place of the module's own."""
        return cast_floats(output, self.dtype) if self.power.on else None


class Inside:
    """A pair of hooks around a module's forward: the dtype it computes in, whatever surrounds it.

    `dtype`: inputs, outputs and, for this call, the module's own parameters and buffers are cast to it, and
    autocast is off inside; None takes the dtype of the first floating input. With `ops` alone only the op
    rules of a surrounding autocast region change.
    """

    def __init__(
        self,
        power: Power,
        dtype: torch.dtype | None = None,
        ops: Mapping[str, Rule] | None = None,
        edge: bool = True,
    ) -> None:
        self.power, self.dtype, self.ops, self.edge = power, dtype, dict(ops or {}), edge
        self._open: dict[int, list[ExitStack]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": {}}

    def attach(self, module: nn.Module) -> list[Any]:
        """Register both hooks; returns their handles."""
        return [
            module.register_forward_pre_hook(self.enter, with_kwargs=True),
            module.register_forward_hook(self.leave, always_call=True),
        ]

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Forward pre-hook."""
        stack = ExitStack()
        self._open.setdefault(threading.get_ident(), []).append(stack)
        if not self.power.on:
            return None
        if self.ops:
            stack.enter_context(_edited(self.ops))
            return None
        dtype = self.dtype or _dtype_of(args, kwargs)
        if dtype is None:
            return None
        if self.edge:
            stack.enter_context(_region(_device_type(module, args), dtype))
        stack.callback(_cast_own(module, dtype))
        return cast_floats(args, dtype), cast_floats(kwargs, dtype)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook, also after an exception."""
        stacks = self._open.get(threading.get_ident())
        if stacks:
            stacks.pop().close()
        dtype = self.dtype if self.power.on and not self.ops else None
        return None if dtype is None or output is None else cast_floats(output, dtype)


class InRegion:
    """A pair of hooks that runs a module's forward in an autocast region."""

    def __init__(self, power: Power, device_type: str, policy: Policy) -> None:
        self.power, self.device_type, self.policy = power, device_type, policy
        self._open: dict[int, list[autocast | None]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": {}}

    def attach(self, module: nn.Module) -> list[Any]:
        """Register both hooks; returns their handles."""
        return [
            module.register_forward_pre_hook(self.enter),
            module.register_forward_hook(self.leave, always_call=True),
        ]

    def enter(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook."""
        region = autocast(self.device_type, policy=self.policy) if self.power.on else None
        self._open.setdefault(threading.get_ident(), []).append(region)
        if region is not None:
            region.__enter__()

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook, also after an exception."""
        regions = self._open.get(threading.get_ident())
        region = regions.pop() if regions else None
        if region is not None:
            region.__exit__(None, None, None)


def _region(device_type: str, dtype: torch.dtype) -> autocast:
    """The region inside: off, or in 16 bits one that lifts nothing; slow dtypes run as in autocast."""
    if dtype not in LOW_DTYPES:
        return autocast(device_type, enabled=False)
    return autocast(device_type, policy=Policy(compute_dtype=dtype, table="low"))


def _edited(ops: Mapping[str, Rule]) -> AbstractContextManager[Any]:
    policy = active_policy()
    if policy is None:
        return ExitStack()
    words = {rule.value: [name for name, given in ops.items() if given is rule] for rule in Rule}
    return autocast(policy=policy.with_rules(**words))


def _dtype_of(args: Any, kwargs: Any) -> torch.dtype | None:
    floats = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_wide_float(leaf)]
    return floats[0].dtype if floats else None


def _device_type(module: nn.Module, args: Any) -> str:
    tensors = (
        t for t in (*pytree.tree_leaves(args), *module.parameters(recurse=False)) if isinstance(t, Tensor)
    )
    first = next(tensors, None)
    return "cpu" if first is None else first.device.type


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
    return dtype in (torch.float16, torch.bfloat16) and (
        device == "meta" or _takes_mixed(kind, device, dtype)
    )


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
