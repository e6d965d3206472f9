"""Floating tensors in trees: casts, finite checks, the device they share; nothing of levels or scales."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.torch_private import pytree

T = TypeVar("T")


def as_float32(x: float) -> float:
    """Round a Python float to float32 (nearest even); above its range the answer is inf."""
    try:
        return float(struct.unpack("f", struct.pack("f", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def is_float_tensor(x: object) -> bool:
    """Whether `x` is a real or complex floating tensor."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def tensors_in(tree: Any) -> list[Tensor]:
    """Return all tensors of a nest (list, tuple, dict, named tuple ...), in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def map_floats(fn: Callable[[Tensor], Tensor], tree: T) -> T:
    """Apply `fn` to every floating tensor of a nest (list, tuple, dict, named tuple ...); leave the rest."""

    def on_leaf(leaf: Any) -> Any:
        return fn(leaf) if is_float_tensor(leaf) else leaf

    return pytree.tree_map(on_leaf, tree)


def all_finite(tree: Any) -> Tensor:
    """Return a 0-d bool tensor: no floating tensor in `tree` holds inf or NaN.

    Tensors may differ in dtype and device and may be sparse. The answer lies on the first accelerator met,
    otherwise on the CPU; nothing is read back. A nest without floating tensors is finite.
    """
    flags = [_finite(t) for t in tensors_in(tree) if is_float_tensor(t)]
    if not flags:
        return torch.ones((), dtype=torch.bool, device="cpu")
    home = home_device(flags)
    return torch.stack([move_to(flag, home) for flag in flags]).all()


def _finite(t: Tensor) -> Tensor:
    low, high = ends_of(dense_values(t.detach()))
    return torch.isfinite(low) & torch.isfinite(high)


Ends = tuple[Tensor, Tensor]
"""Smallest and largest element, 0-d."""


def ends_of(t: Tensor) -> Ends:
    """Smallest and largest element of a dense real tensor: zeros where it is empty, NaN if it holds one."""
    if t.element_size() == 1:
        t = t.float()
    if not t.numel():
        return t.new_zeros(()), t.new_zeros(())
    low, high = torch.aminmax(t)
    return low, high


def dense_values(t: Tensor) -> Tensor:
    """Return the numbers a tensor really holds: local shard, coalesced sparse values, complex as pairs."""
    if type(t) is Tensor and t.layout is torch.strided and not t.is_complex():
        return t
    to_local = getattr(t, "to_local", None)
    if to_local is not None:
        t = cast(Tensor, to_local())
    if t.layout != torch.strided:
        t = t.coalesce().values() if t.is_sparse else t.values()
    return torch.view_as_real(t) if t.is_complex() else t


def home_device(tensors: list[Tensor]) -> torch.device:
    """Return where scalars of these tensors meet: the first accelerator, so that no copy waits."""
    return next((t.device for t in tensors if not t.is_cpu), tensors[0].device)


def accumulate_in_fp32(parameter: Tensor) -> None:
    """From now on the parameter's gradients are fp32; one that is there already is widened."""
    grad, parameter.grad = parameter.grad, None
    parameter.grad_dtype = torch.float32
    parameter.grad = None if grad is None else grad.float()


def each_parameter(modules: Iterable[torch.nn.Module]) -> list[Tensor]:
    """Return the parameters of modules and of all in them, a shared one as often as modules hold it.

    For what looks at all of them in every step: `Module.parameters` also makes their names.
    """
    visited: set[torch.nn.Module] = set()
    rest: list[torch.nn.Module | None] = [*modules]
    slots: list[Tensor | None] = []
    while rest:
        module = rest.pop()
        if module is not None and module not in visited:
            visited.add(module)
            rest += module._modules.values()
            slots += module._parameters.values()
    return [p for p in slots if p is not None]


def compute_device(parameters: Iterable[Tensor]) -> torch.device:
    """Return where a model with these parameters computes: the first accelerator, else the CPU.

    Of a shard it is the device of its mesh, also while the shard itself waits on the host. Without an
    accelerator it is the first parameter's device, which may be "meta".
    """
    parameters, usual = list(parameters), torch.nn.Parameter
    for p in parameters:
        if type(p) is usual and p.is_cpu:  # what most are, and every region asks
            continue
        kind = p.device.type
        if type(p) is not usual and (mesh := getattr(p, "device_mesh", None)) is not None:
            kind = mesh.device_type
        if kind not in ("cpu", "meta"):
            return p.device if kind == p.device.type else torch.device(kind)
    return parameters[0].device if parameters else torch.device("cpu")


def stack_scalars(scalars: Sequence[Tensor], home: torch.device) -> Tensor:
    """0-d tensors of any dtypes and devices as one [n] in float32 (float64 if one is)."""
    kinds = {(s.dtype, s.device) for s in scalars}
    wide = torch.float64 if any(dtype == torch.float64 for dtype, _ in kinds) else torch.float32
    out = list(scalars)
    if kinds == {(wide, home)}:
        return torch.stack(out)
    if len(kinds) == 1:
        return move_to(torch.stack(out), home, wide)
    for kind in kinds:  # one cast for each kind, not one for each scalar
        places = [i for i, s in enumerate(scalars) if (s.dtype, s.device) == kind]
        values = move_to(torch.stack([scalars[i] for i in places]), home, wide)
        for i, value in zip(places, values.unbind()):
            out[i] = value
    return torch.stack(out)


def all_equal(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Whether the two tensors of each pair, of one shape and device, are equal; waits once for all."""
    same = [(a == b).all() for a, b in pairs]
    return stack_scalars(same, same[0].device).tolist() if same else []


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of an optimizer, one group after the other; none where it has no groups."""
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def gradients_of(optimizer: Any) -> list[Tensor]:
    """Return the gradients that an optimizer's parameters have."""
    return [p.grad for p in parameters_of(optimizer) if p.grad is not None]


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step computes the loss itself, as often as it likes: a search, as LBFGS is."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def select_tree(pred: bool | Tensor, a: T, b: T) -> T:
    """Return nest `a` where `pred` (a bool or 0-d bool tensor) holds, else `b`, leaf by leaf.

    Tensor leaves go through `torch.where`, so nothing synchronises; other leaves must be equal in both nests
    unless `pred` is a plain bool. Raises ConfigError when the nests differ in shape.
    """
    if not isinstance(pred, Tensor):
        return a if pred else b
    leaves_a, spec_a = pytree.tree_flatten(a)
    leaves_b, spec_b = pytree.tree_flatten(b)
    if spec_a != spec_b:
        raise ConfigError(f"select_tree needs two nests of one shape, got {spec_a} and {spec_b}")
    return pytree.tree_unflatten([_select(pred, x, y) for x, y in zip(leaves_a, leaves_b)], spec_a)


def _select(pred: Tensor, x: Any, y: Any) -> Any:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return torch.where(move_to(pred, x.device), x, y)
    if type(x) is type(y) and x == y:
        return x
    raise ConfigError(
        f"select_tree cannot choose between {x!r} and {y!r} without reading the flag: "
        "make them tensors, or pass a plain bool"
    )


def reciprocal(scale: Tensor) -> Tensor:
    """Return 1/scale in float32."""
    return scale.float().reciprocal()


def move_to(t: Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor on `device` (and in `dtype`): towards an accelerator without waiting, towards the host
    once it is there.

    torch's own copy to the host without waiting may be read before it has arrived.
    `devices.transfer.send_to_host` makes one that says when it has.
    """
    towards_host = torch.device(device).type == "cpu"
    return t.to(device, dtype or t.dtype, non_blocking=not towards_host)


def scalar_on(value: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a 0-d tensor, without waiting for the device as `torch.as_tensor` does for Python's."""
    if isinstance(value, Tensor):
        return move_to(value, device, dtype).reshape(())
    return torch.full((), value, dtype=dtype, device=device)


def multiply(t: Tensor, factor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return t * factor computed in at least float32; `dtype` None keeps the computing dtype."""
    if not t.is_complex():
        t = t.to(torch.promote_types(t.dtype, torch.float32))
    product = t * factor
    return product if dtype is None else product.to(dtype)


def is_wide_float(value: Any) -> bool:
    """Whether it is a real floating tensor of 16 bits or more (8-bit floats keep their scale elsewhere)."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.element_size() > 1


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """Return the nest with its floating tensors in `dtype`; integers, masks and complex numbers untouched.

    Goes into lists, tuples, dicts, what pytree knows, dict subclasses and dataclasses; copies, never alters.
    """

    def on_leaf(leaf: Any) -> Any:
        if is_wide_float(leaf):
            return leaf.to(dtype)
        if isinstance(leaf, dict):
            changed = copy.copy(cast(dict[Any, Any], leaf))
            for key, value in leaf.items():
                changed[key] = cast_floats(value, dtype)
            return changed
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            names = [f.name for f in dataclasses.fields(leaf) if f.init]
            return dataclasses.replace(leaf, **{n: cast_floats(getattr(leaf, n), dtype) for n in names})
        return leaf

    return on_leaf(tree) if isinstance(tree, Tensor) else pytree.tree_map(on_leaf, tree)


def first_device(args: Any) -> str:
    """Device type of the first floating tensor in a nest, else of the first tensor, else "cpu"."""
    tensors = tensors_in(args)
    floating = [t for t in tensors if t.is_floating_point()]
    return (floating or tensors)[0].device.type if tensors else "cpu"
